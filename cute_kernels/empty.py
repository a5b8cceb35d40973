"""Cursors of slots whose records are all in a checkpoint: one small launch, after `materialize` in every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.args import CursorTensors, MoveTensors, fake_cursors, fake_vector
from cute_kernels.compile import compiled
from cute_kernels.configs import THREADS
from cute_kernels.primitives.memory import load_words, store_words
from cute_kernels.replay.cursor import RowCursor, count_fold, load_slot


@dataclass(frozen=True)
class EmptyKey:
    """Everything that one compiled kernel depends on, beside the architecture: see `materialize.MaterializeKey`.

    Folds are counted for stochastic rounding; nothing else here depends on the number of records.
    """

    index_dtype: str = "int32"
    has_destination: bool = False
    has_num_records: bool = False
    counts_folds: bool = False


@cute.kernel
def empty_kernel(
    cursors: CursorTensors, rows: MoveTensors, window: Int32, ring_capacity: Int32, key: cutlass.Constexpr
):
    """One thread a row: no pending records, from row 0 on in another slot, in place from behind what was folded."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row = block * THREADS + thread
    if row < cute.size(rows.source):
        slot = source = load_slot(rows.source, row, key.index_dtype)
        if cutlass.const_expr(key.has_destination):
            slot = load_slot(rows.destination, row, key.index_dtype)
        if (source >= 0) & (slot >= 0):
            start, most = Int32(0), None
            if cutlass.const_expr(key.has_num_records):
                most = Int32(load_words(rows.num_records.iterator.toint() + Int64(row) * 4, 1)[0])
            if cutlass.const_expr(key.counts_folds or not key.has_destination):
                cursor = RowCursor.load_prefix(cursors, source, most, capacity=ring_capacity, window=window)
                if cutlass.const_expr(not key.has_destination):
                    start = cursor.physical(cursor.count)
                if cutlass.const_expr(key.counts_folds):
                    count_fold(cursors, source, slot, cursor.folds)
            offset = Int64(slot) * 4
            store_words(cursors.ring_start.iterator.toint() + offset, [start])
            store_words(cursors.num_committed.iterator.toint() + offset, [Int32(0)])


@cute.jit
def empty_launch(
    cursors: CursorTensors, rows: MoveTensors, window: Int32, ring_capacity: Int32, key: cutlass.Constexpr, stream: Any
):
    """Host side of the launch."""
    empty_kernel(cursors, rows, window, ring_capacity, key).launch(
        grid=[(cute.size(rows.source) + THREADS - 1) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


def fake_arguments(key: EmptyKey) -> tuple[Any, ...]:
    """Fake tensors of the shapes and dtypes that a kernel admits."""
    batch, slots = cute.sym_int64(), cute.sym_int64()
    destination = fake_vector(key.index_dtype, batch) if key.has_destination else None
    records = fake_vector("int32", batch) if key.has_num_records else None
    rows = MoveTensors(fake_vector(key.index_dtype, batch), destination, records)
    cursors = fake_cursors(slots, key.counts_folds)
    return cursors, rows, Int32(1), Int32(1), key, make_fake_stream(use_tvm_ffi_env_stream=True)


def kernel(key: EmptyKey, arch: str) -> Callable[..., None]:
    """The compiled kernel: call it with (cursor tensors, row tensors, window, ring capacity)."""
    return compiled(empty_launch, lambda: fake_arguments(key), key, arch)
