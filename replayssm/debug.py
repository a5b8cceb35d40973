"""Debug mode, `REPLAYSSM_DEBUG=1`: the caller's duties that only the device knows, checked with a synchronisation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from replayssm.cursors import Cursors

DEBUG = os.environ.get("REPLAYSSM_DEBUG") == "1"


def is_live(cache_indices: Tensor, pad_slot_id: int) -> Tensor:
    """[rows] bool: rows that carry a request; those of `pad_slot_id` and of negative slots are padding."""
    return (cache_indices >= 0) & (cache_indices != pad_slot_id)


def check_rows(cursors: Cursors, cache_indices: Tensor, pad_slot_id: int, name: str = "cache_indices") -> None:
    """Refuse slots out of range, two live rows on one slot, and cursors out of range.

    Raises:
        ValueError: names the first offending slot.
    """
    slots = cache_indices[is_live(cache_indices, pad_slot_id)].long()
    _check_below(name, slots, cursors.num_slots)
    check_distinct(name, slots)
    _check_cursors(cursors, slots)


def _check_below(name: str, slots: Tensor, num_slots: int) -> None:
    if slots.numel() and int(slots.max()) >= num_slots:
        raise ValueError(f"{name}: expected slots below {num_slots}, got {int(slots.max())}")


def check_distinct(name: str, slots: Tensor) -> None:
    """Refuse a slot that is named twice."""
    found, counts = slots.unique(return_counts=True)
    if found.numel() and int(counts.max()) > 1:
        raise ValueError(f"{name}: expected distinct slots, got {int(found[counts.argmax()])} more than once")


def _check_cursors(cursors: Cursors, slots: Tensor) -> None:
    limits = {"ring_start": cursors.replay.ring_capacity - 1, "num_committed": cursors.replay.window}
    for name, limit in limits.items():
        values = getattr(cursors, name)[slots]
        bad = (values < 0) | (values > limit)
        if bool(bad.any()):
            raise ValueError(
                f"{name}: expected 0 to {limit}, got {int(values[bad][0])} in slot {int(slots[bad][0])}; "
                "reset a slot before its first use"
            )


def check_moves(cursors: Cursors, source: Tensor, destination: Tensor, num_records: Tensor | None) -> None:
    """Refuse rows of `materialize` that overlap, leave the pool or ask for too many records.

    Raises:
        ValueError: names the first offending slot.
    """
    live = (source >= 0) & (destination >= 0)
    read, write = source[live].long(), destination[live].long()
    for name, slots in (("source", read), ("destination", write)):
        _check_below(name, slots, cursors.num_slots)
    check_distinct("destination", write)
    if (both := write[torch.isin(write, read)]).numel():
        raise ValueError(
            f"destination: expected slots that are no source, got {int(both[0])}; flush folds a slot in place"
        )
    _check_cursors(cursors, read)
    if num_records is not None:
        records, pending = num_records[live], cursors.num_committed[read]
        bad = (records < 0) | (records > pending)
        if bool(bad.any()):
            raise ValueError(
                f"num_records: expected 0 to num_committed = {int(pending[bad][0])} of slot {int(read[bad][0])}, "
                f"got {int(records[bad][0])}"
            )


def check_lengths(cu_seqlens: Tensor | None, max_draft: int, total: int | None = None) -> None:
    """Refuse rows of fewer than 0 or more than `max_draft` tokens, or beyond the `total`."""
    if cu_seqlens is None or cu_seqlens.numel() == 1:
        return
    ends, lengths = cu_seqlens.tolist(), cu_seqlens.diff()
    bad = torch.nonzero((lengths < 0) | (lengths > max_draft))
    if bad.numel():
        row = int(bad[0])
        raise ValueError(
            f"cu_seqlens: expected 0 to max_draft = {max_draft} tokens a row, got {ends[row]} to {ends[row + 1]} in "
            f"row {row}"
        )
    if ends[0] < 0 or (total is not None and ends[-1] > total):
        raise ValueError(f"cu_seqlens: expected 0 to {total or 'the total'}, got {ends[0]} to {ends[-1]}")


def check_committed(
    cursors: Cursors,
    cache_indices: Tensor,
    num_draft: int,
    cu_seqlens: Tensor | None,
    num_accepted: Tensor | None,
    pad_slot_id: int,
) -> None:
    """As `check_rows` and `check_lengths`, and refuse a live row that accepts more tokens than it has."""
    check_rows(cursors, cache_indices, pad_slot_id)
    check_lengths(cu_seqlens, cursors.replay.max_draft)
    if num_accepted is None:
        return
    limits = torch.full_like(num_accepted, num_draft) if cu_seqlens is None else cu_seqlens.diff()
    bad = is_live(cache_indices, pad_slot_id) & (limits > 0) & ((num_accepted < 0) | (num_accepted > limits))
    if bool(bad.any()):
        limit, got = (int(t[bad][0]) for t in (limits, num_accepted))
        raise ValueError(f"num_accepted: expected 0 to num_draft = {limit}, got {got}")
