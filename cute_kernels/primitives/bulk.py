"""One-dimensional bulk copies from global to shared memory, completed on mbarriers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.experimental import primitives as P


def _bulk_copy(destination: Any, source: Any, num_bytes: int, barrier: Any, policy: Any) -> None:
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        f"[{{$r0}}], [{{$r1}}], {num_bytes}, [{{$r2}}], {{$r3}};"
    )
    cute.arch.inline_ptx(text, read_only_args=[destination, source, barrier, policy])


@cute.jit
def bulk_load(
    thread: Int32,
    destination: Int32,
    source: Int64,
    barriers: Any,
    policy: Int64,
    chunk_bytes: cutlass.Constexpr[int],
    chunks: cutlass.Constexpr[int],
):
    """Start `chunks` copies of `chunk_bytes` each, one barrier a chunk; thread 0 issues, no thread waits.

    Args:
        destination, source: byte addresses in shared and global memory, 16-byte aligned.
        barriers: pointer to one Int64 of shared memory a chunk; initialised here.
        policy: L2 policy word.
        chunk_bytes: a multiple of 16.

    Other threads may wait on a barrier only after a CTA-wide barrier that follows this call.
    """
    if thread == 0:
        for i in cutlass.range_constexpr(chunks):
            P.mbarrier_init(barriers + i, 1)
        P.fence_mbarrier_init()
        for i in cutlass.range_constexpr(chunks):
            barrier = barriers + i
            P.mbarrier_arrive_expect_tx(barrier, chunk_bytes)
            _bulk_copy(
                destination + i * chunk_bytes,
                source + i * chunk_bytes,
                chunk_bytes,
                Int32(barrier.toint()),
                policy,
            )


def bulk_wait(barriers: Any, chunk: int) -> None:
    """Wait until a chunk of the first use of its barrier has arrived."""
    cute.arch.mbarrier_wait(barriers + chunk, 0)
