"""Advance the cursors after a model step: one small launch for all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.args import CursorTensors, RowTensors, fake_cursors, fake_vector
from cute_kernels.compile import compiled
from cute_kernels.primitives.arithmetic import at_most, select
from cute_kernels.primitives.memory import load_words, store_words
from cute_kernels.replay.cursor import RowCursor, count_fold, is_padding, load_force, load_slot, load_span

THREADS = 128


@dataclass(frozen=True)
class CommitKey:
    """Everything that one compiled commit kernel depends on, beside the architecture.

    With `cu_seqlens` the key's `num_draft` is the most tokens that a row has. Folds count for stochastic rounding.
    """

    window: int
    num_draft: int
    index_dtype: str = "int32"
    has_force_fold: bool = False
    has_num_accepted: bool = False
    has_cu_seqlens: bool = False
    counts_folds: bool = False


@cute.kernel
def commit_kernel(
    cursors: CursorTensors,
    rows: RowTensors,
    num_accepted: cute.Tensor | None,
    ring_capacity: Int32,
    pad_slot: Int32,
    key: cutlass.Constexpr,
):
    """One thread a row: num_committed <- (folded ? 0 : num_committed) + accepted, ring_start past what was folded."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row = block * THREADS + thread
    if row < cute.size(rows.cache_indices):
        slot = load_slot(rows.cache_indices, row, key.index_dtype)
        _, tokens = load_span(rows, row, key.num_draft)
        if not (is_padding(slot, pad_slot) | (tokens == 0)):
            cursor = RowCursor.load(
                cursors, slot, load_force(rows, row), capacity=ring_capacity, window=key.window, tokens=tokens
            )
            accepted = Int32(tokens)
            if cutlass.const_expr(num_accepted is not None):
                given = Int32(load_words(num_accepted.iterator.toint() + Int64(row) * 4, 1)[0])
                accepted = select(given < 0, Int32(0), at_most(given, accepted))
            offset = cursor.slot * 4
            start = select(cursor.folds, cursor.physical(cursor.count), cursor.start)
            left = select(cursor.folds, Int32(0), cursor.count)
            store_words(cursors.ring_start.iterator.toint() + offset, [start])
            store_words(cursors.num_committed.iterator.toint() + offset, [left + accepted])
            if cutlass.const_expr(key.counts_folds):
                count_fold(cursors, slot, slot, cursor.folds)


@cute.jit
def commit_launch(
    cursors: CursorTensors,
    rows: RowTensors,
    num_accepted: cute.Tensor | None,
    ring_capacity: Int32,
    pad_slot: Int32,
    key: cutlass.Constexpr,
    stream: Any,
):
    """Host side of the launch."""
    commit_kernel(cursors, rows, num_accepted, ring_capacity, pad_slot, key).launch(
        grid=[(cute.size(rows.cache_indices) + THREADS - 1) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


def fake_arguments(key: CommitKey) -> tuple[Any, ...]:
    """Fake tensors of the shapes and dtypes that a commit kernel admits."""

    batch, slots = cute.sym_int64(), cute.sym_int64()
    cursors = fake_cursors(slots, key.counts_folds)
    rows = RowTensors(
        cache_indices=fake_vector(key.index_dtype, batch),
        force_fold=fake_vector("uint8", batch) if key.has_force_fold else None,
        cu_seqlens=fake_vector("int32", cute.sym_int64()) if key.has_cu_seqlens else None,
    )
    num_accepted = fake_vector("int32", batch) if key.has_num_accepted else None
    return cursors, rows, num_accepted, Int32(1), Int32(-1), key, make_fake_stream(use_tvm_ffi_env_stream=True)


def kernel(key: CommitKey, arch: str) -> Callable[..., None]:
    """The compiled commit: call it with (cursor tensors, row tensors, num_accepted, ring capacity, pad slot)."""
    return compiled(commit_launch, lambda: fake_arguments(key), key, arch)
