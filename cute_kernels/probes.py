"""Kernels that measure a device's limits: a pure read, a read-modify-write in place, and an empty launch.

A step's time is quoted against these rates, so each probe moves its bytes in the order and with the cache policies
that were the fastest of those tried (H200, 2026-11-29: 4.56 TB/s read, 4.08 TB/s rewritten in place):

* one CTA of 128 threads for each contiguous 32 KiB tile, as many bytes as an fp32 Mamba-2 head of 64 x 128;
* the read is a bulk copy into shared memory with L2 evict_first: nothing but the memory system takes part;
* the rewrite has 16-byte loads, all sixteen of a thread in flight before the first is used (a CTA barrier holds them
  there: ptxas may sink a weak load to its use, but not below a barrier, and the first use needs the barrier's own
  result), and stores with L2 evict_last: a line that waits in the L2 for its neighbours turns the bus less often;
* no L2 prefetch hint, which costs 6 % of the read rate.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.experimental import primitives
from torch import Tensor

from cute_kernels.compile import compiled
from cute_kernels.primitives.bulk import bulk_init, bulk_load, bulk_wait
from cute_kernels.primitives.memory import EVICT_FIRST, EVICT_LAST, load_words, store_words

THREADS = 128
LOADS = 16
WORDS_PER_LOAD = 4
STEP_BYTES = THREADS * WORDS_PER_LOAD * 4
TILE_BYTES = LOADS * STEP_BYTES
TILE_WORDS = TILE_BYTES // 4


@cute.kernel
def _read_kernel(words: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    smem = cutlass.AddressSpace.smem
    landing = cutlass.Array(Uint32, (TILE_WORDS,), space=smem, alignment=128)
    arrived = cutlass.Array(Int64, (1,), space=smem, alignment=8)
    # 64-bit: a tile's offset passes 2**31 from 2 GiB on.
    source = words.iterator.toint() + Int64(tile) * TILE_BYTES
    destination = Int32(landing.data_ptr().toint())
    bulk_init(thread, arrived.data_ptr())
    bulk_load(thread, destination, source, arrived.data_ptr(), Int64(EVICT_FIRST), TILE_BYTES)
    cute.arch.barrier()
    bulk_wait(arrived.data_ptr())


@cute.kernel
def _rewrite_kernel(words: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    address = words.iterator.toint() + Int64(tile) * TILE_BYTES + thread * (WORDS_PER_LOAD * 4)
    loads = [load_words(address, WORDS_PER_LOAD, offset=i * STEP_BYTES) for i in range(LOADS)]
    zero = Uint32(primitives.barrier_cta_red_aligned(thread < 0, 0, primitives.BarrierRedux.POPC))
    for i in cutlass.range_constexpr(LOADS):
        flipped = [word ^ (zero + 1) for word in loads[i]]
        store_words(address, flipped, hint=EVICT_LAST, offset=i * STEP_BYTES)


@cute.kernel
def _empty_kernel(words: cute.Tensor) -> None:
    pass


@cute.jit
def read_tiles(words: cute.Tensor, stream: Any) -> None:
    """Read every whole tile of `words`."""
    tiles = cute.size(words) // TILE_WORDS
    _read_kernel(words).launch(grid=[tiles, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def rewrite_tiles(words: cute.Tensor, stream: Any) -> None:
    """Read every whole tile of `words`, flip the lowest bit of each word and write it back."""
    tiles = cute.size(words) // TILE_WORDS
    _rewrite_kernel(words).launch(grid=[tiles, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def launch_nothing(words: cute.Tensor, stream: Any) -> None:
    """Launch one warp that returns at once."""
    _empty_kernel(words).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


def fake_arguments() -> tuple[Any, ...]:
    """What a probe is compiled for."""
    words = make_fake_compact_tensor(Uint32, (cute.sym_int64(),), assumed_align=16)
    return words, make_fake_stream(use_tvm_ffi_env_stream=True)


def launch_read(words: Tensor, arch: str) -> None:
    """Read `words` once, on torch's current stream.

    Args:
        words: [n] uint32 on the GPU, 16-byte aligned; whole tiles of 32 KiB are read, a rest is not. At least one.
        arch: architecture of the GPU, e.g. "sm_90a".
    """
    compiled(read_tiles, fake_arguments, "read", arch)(words)


def launch_rewrite(words: Tensor, arch: str) -> None:
    """Read `words`, change every word and write it back in place, on torch's current stream.

    Args:
        words, arch: as for `launch_read`; two calls restore the values.
    """
    compiled(rewrite_tiles, fake_arguments, "rewrite", arch)(words)


def launch_empty(words: Tensor, arch: str) -> None:
    """Launch a kernel that does nothing: the floor of every time.

    Args:
        words: any [n] uint32 on the GPU, 16-byte aligned; untouched.
    """
    compiled(launch_nothing, fake_arguments, "empty", arch)(words)
