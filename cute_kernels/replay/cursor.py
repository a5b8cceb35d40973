"""Where a row's pending records lie and whether the row folds in this step: the device's single statement of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_kernels.args import CursorTensors, RowTensors
from cute_kernels.primitives.arithmetic import at_most, select
from cute_kernels.primitives.memory import load_byte, load_words, store_words


def load_slot(slots: cute.Tensor, row: Any, index_dtype: str) -> Int32:
    """The slot of a row, -1 for any negative one. A slot beyond 31 bits cannot exist."""
    size = 8 if index_dtype == "int64" else 4
    words = load_words(slots.iterator.toint() + Int64(row) * size, size // 4)
    slot = Int32(words[0])
    return slot if size == 4 else select(Int32(words[1]) < 0, Int32(-1), slot)


def is_padding(slot: Any, pad_slot: Any) -> Boolean:
    """Rows of the padding slot and of negative slots carry no request."""
    return (slot == pad_slot) | (slot < 0)


@dataclass(frozen=True)
class RowCursor:
    """The pending records of one row.

    Args:
        slot: the row's slot, 64 bits wide so that products with strides cannot overflow.
        start: physical row of the oldest pending record.
        count: pending records.
        folds: the committed records enter the checkpoint at the start of this step.
        capacity: physical rows of the ring.
    """

    slot: Int64
    start: Int32
    count: Int32
    folds: Boolean
    capacity: Int32

    @classmethod
    def load(
        cls, cursors: CursorTensors, slot: Any, forced: Boolean | None, *, capacity: Any, window: int, tokens: Any
    ) -> RowCursor:
        """Read a live slot's cursor and decide by the fold rule for a step of `tokens` tokens; see `load_force`."""
        start, count = load_cursor(cursors, slot, capacity, window)
        folds = folds_by_rule(count, tokens, window, forced)
        return cls(Int64(slot), start, count, folds, Int32(capacity))

    @classmethod
    def load_prefix(cls, cursors: CursorTensors, slot: Any, most: Any, *, capacity: Any, window: Any) -> RowCursor:
        """The first `most` pending records of a live slot, all when None, which fold if there are any."""
        start, count = load_cursor(cursors, slot, capacity, window)
        if most is not None:
            count = select(most < 0, Int32(0), at_most(count, most))
        return cls(Int64(slot), start, count, count > 0, Int32(capacity))

    def physical(self, logical: Any) -> Int32:
        """Physical ring row of logical record `logical`, 0 to capacity - 1."""
        row = self.start + logical
        return select(row >= self.capacity, row - self.capacity, row)


def load_cursor(cursors: CursorTensors, slot: Any, capacity: Any, window: Any) -> tuple[Int32, Int32]:
    """A slot's ring_start and num_committed.

    Out of range they are a mistake of the caller's, and count as the largest: they must not lead out of the slot.
    """
    offset = Int64(slot) * 4
    start, count = (load_words(t.iterator.toint() + offset, 1)[0] for t in (cursors.ring_start, cursors.num_committed))
    return at_most(Int32(start), Int32(capacity) - 1), at_most(Int32(count), Int32(window))


def count_fold(cursors: CursorTensors, source: Any, slot: Any, folds: Boolean) -> None:
    """Write how often a slot has folded: as often as its source, and once more if that folds now."""
    counts = cursors.fold_count
    assert counts is not None
    (before,) = load_words(counts.iterator.toint() + Int64(source) * 4, 1)
    store_words(counts.iterator.toint() + Int64(slot) * 4, [Int32(before) + Int32(folds)])


def load_span(rows: RowTensors, row: Any, most: int) -> tuple[Any, Any]:
    """Where a row's tokens begin on the token axis of the inputs, and how many it has, 0 to `most`."""
    if cutlass.const_expr(rows.cu_seqlens is None):
        return 0, most
    words = [load_words(rows.cu_seqlens.iterator.toint() + Int64(row) * 4 + 4 * i, 1)[0] for i in (0, 1)]
    first, end = Int32(words[0]), Int32(words[1])
    return first, select(first < end, at_most(end - first, Int32(most)), Int32(0))


def load_force(rows: RowTensors, row: Any) -> Boolean | None:
    """Whether the caller asks this row to fold; None where no mask was given."""
    if cutlass.const_expr(rows.force_fold is None):
        return None
    return load_byte(rows.force_fold.iterator.toint() + Int64(row)) != 0


def folds_by_rule(count: Any, tokens: Any, window: int, forced: Boolean | None) -> Boolean:
    """The fold rule: the step's tokens would not fit beside the pending records, or the caller asks for it."""
    full = count + tokens > window
    if cutlass.const_expr(forced is None):
        return full & (count > 0)
    return (full | forced) & (count > 0)
