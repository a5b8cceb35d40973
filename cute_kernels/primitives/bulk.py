"""One-dimensional bulk copies from global to shared memory, each completed on an mbarrier."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.experimental import primitives as P


@cute.jit
def bulk_init(thread: Int32, barrier: Any, copies: cutlass.Constexpr[int] = 1):
    """Initialise the barrier of so many copies, by thread 0; a CTA-wide barrier must follow before its use.

    Args:
        barrier: pointer to an Int64 of shared memory.
    """
    if thread == 0:
        P.mbarrier_init(barrier, copies)
        P.fence_mbarrier_init()


@cute.jit
def bulk_load(
    thread: Int32, destination: Int32, source: Int64, barrier: Any, policy: Int64, num_bytes: cutlass.Constexpr[int]
):
    """Start a copy; thread 0 issues it, no thread waits.

    Args:
        destination, source: byte addresses in shared and global memory, 16-byte aligned.
        barrier: as `bulk_init` left it.
        policy: L2 policy word.
        num_bytes: a multiple of 16.
    """
    if thread == 0:
        P.mbarrier_arrive_expect_tx(barrier, num_bytes)
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            f"[{{$r0}}], [{{$r1}}], {num_bytes}, [{{$r2}}], {{$r3}};",
            read_only_args=[destination, source, Int32(barrier.toint()), policy],
        )


def bulk_wait(barrier: Any) -> None:
    """Wait until all copies on a barrier have arrived."""
    cute.arch.mbarrier_wait(barrier, 0)
