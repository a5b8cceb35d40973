"""Cursors are two packed int32 vectors that all layers share: made empty, taken from an engine as they are, or refused.

A kernel reads them by pointer, so a vector with gaps would hand each slot its neighbour's cursor without an error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm import Cursors, ReplaySpec, make_cursors

SPEC = ReplaySpec(4)


def test_new_cursors_are_empty(device: torch.device) -> None:
    cursors = make_cursors(SPEC, 5, device=device)
    for vector in (cursors.ring_start, cursors.num_committed):
        assert vector.tolist() == [0] * 5
        assert vector.dtype is torch.int32 and vector.is_contiguous() and vector.device.type == device.type
    assert cursors.num_slots == 5
    assert cursors.device == cursors.ring_start.device
    cursors.ring_start.fill_(1)  # two vectors, not one
    assert cursors.num_committed.tolist() == [0] * 5


def test_an_engines_vectors_are_used_in_place() -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    cursors = Cursors(SPEC, table[0], table[2])
    assert cursors.ring_start.data_ptr() == table[0].data_ptr()
    assert cursors.num_committed.data_ptr() == table[2].data_ptr()


def test_stochastic_rounding_counts_folds(device: torch.device) -> None:
    spec = ReplaySpec(4, checkpoint_dtype=torch.float16, rounding="stochastic")
    cursors = make_cursors(spec, 5, device=device)
    assert cursors.fold_count is not None and cursors.fold_count.tolist() == [0] * 5
    assert cursors.names == ("ring_start", "num_committed", "fold_count")
    assert make_cursors(SPEC, 5).names == ("ring_start", "num_committed")
    with pytest.raises(TypeError, match=r"fold_count: .*int32.*int64"):
        Cursors(spec, good(), good(), good().long())


def good() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("start", "count", "error", "words"),
    [
        ([0, 0], good(), TypeError, ("ring_start", "torch.Tensor", "list")),
        (good(), None, TypeError, ("num_committed", "torch.Tensor", "NoneType")),
        (good().long(), good(), TypeError, ("ring_start", "int32", "int64", ".to(")),
        (good(), good().float(), TypeError, ("num_committed", "int32", "float32")),
        (good()[:3], good(), ValueError, ("num_committed", "expected (3,)", "got (4,)")),
        (good()[:, None], good(), ValueError, ("ring_start", "expected (4,)", "squeeze(1)")),
        (torch.tensor(0, dtype=torch.int32), good(), ValueError, ("ring_start", "got ()")),
        (torch.zeros(8, dtype=torch.int32)[::2], good(), ValueError, ("ring_start", "densely packed", "contiguous()")),
        (good(), torch.zeros(4, 2, dtype=torch.int32)[:, 1], ValueError, ("num_committed", "densely packed")),
        (good()[:1].expand(4), good(), ValueError, ("ring_start", "densely packed", "strides (0,)")),
        (good(), good().to("meta"), ValueError, ("num_committed", "on cpu", "meta")),
    ],
)
def test_cursors_refuse(start: Any, count: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        Cursors(SPEC, start, count)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("slots", [0, -1])
def test_no_slots_are_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=f"num_slots: expected 1 or more, got {slots}"):
        make_cursors(SPEC, slots)
