"""Commit moves the cursors by the rule, for every count, ring start, draft length and acceptance, and nothing else.

The rule is written here a second time, in plain integers, and compared exactly. One window of 5 in a ring of 11 with up
to 4 draft tokens: small enough to go through every state at once.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import replayssm
from replayssm import Cursors, ReplaySpec, make_cursors

SPEC = ReplaySpec(window=5, max_draft=4, ring_capacity=11)
SENSELESS = torch.iinfo(torch.int32).max


def rule(start: int, count: int, draft: int, accepted: int, forced: bool) -> tuple[int, int]:
    """Ring start and pending records after a commit."""
    folded = count if count + draft > SPEC.window or forced else 0
    return (start + folded) % SPEC.ring_capacity, count - folded + accepted


def cursors_of(states: list[tuple[int, int]], device: torch.device) -> Cursors:
    start, count = torch.tensor(states, dtype=torch.int32, device=device).t().contiguous()
    return Cursors(SPEC, start, count)


@pytest.mark.parametrize(
    ("draft", "dtype", "forces", "accepts"),
    [(1, torch.int64, True, True), (1, torch.int32, False, False), (4, torch.int32, True, True)],
)
def test_commit_follows_the_rule(
    draft: int, dtype: torch.dtype, forces: bool, accepts: bool, device: torch.device
) -> None:
    counts, starts = range(SPEC.window + 1), range(SPEC.ring_capacity)
    cases = list(
        itertools.product(
            starts, counts, range(draft + 1) if accepts else [draft], [False, True] if forces else [False]
        )
    )
    cursors = cursors_of([(start, count) for start, count, _, _ in cases], device)
    expected = [rule(start, count, draft, accepted, forced) for start, count, accepted, forced in cases]
    order = torch.randperm(len(cases))
    replayssm.commit(
        cursors,
        cache_indices=order.to(device, dtype),
        num_draft=draft,
        num_accepted=torch.tensor([c[2] for c in cases], dtype=torch.int32)[order].to(device) if accepts else None,
        force_fold=torch.tensor([c[3] for c in cases])[order].to(device) if forces else None,
    )
    got = torch.stack([cursors.ring_start, cursors.num_committed], 1).tolist()
    assert got == [list(pair) for pair in expected]
    assert all(0 <= start < SPEC.ring_capacity and 0 <= count <= SPEC.window for start, count in got)
    assert expected != [rule(start, count, draft, accepted, not forced) for start, count, accepted, forced in cases]


@pytest.mark.parametrize("pad", [-1, 0])
def test_padding_rows_and_other_slots_keep_their_cursors(pad: int, device: torch.device) -> None:
    """Padding rows are not read either: their `num_accepted` is garbage, and slots may hold any cursor until reset."""
    states = [(-8, 99), (3, 5), (10, 4), (-7, -9), (0, 0), (10, 5)]
    cursors = cursors_of(states, device)
    rows = [5, pad, 1, -3, pad, 2]
    forced = [False, True, False, True, True, True]
    accepted = [1, SENSELESS, 0, SENSELESS, -SENSELESS, 1]
    replayssm.commit(
        cursors,
        cache_indices=torch.tensor(rows, device=device),
        num_accepted=torch.tensor(accepted, dtype=torch.int32, device=device),
        force_fold=torch.tensor(forced, device=device),
        pad_slot_id=pad,
    )
    expected = list(states)
    for slot, force, count in zip(rows, forced, accepted, strict=True):
        if slot > 0:
            expected[slot] = rule(*states[slot], 1, count, force)
    assert torch.stack([cursors.ring_start, cursors.num_committed], 1).tolist() == [list(pair) for pair in expected]
    assert expected[5] == (4, 1) and expected[1] == (8, 0) and expected[2] == (3, 1)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000])
def test_any_number_of_rows(rows: int, device: torch.device) -> None:
    cursors = make_cursors(SPEC, rows + 1, device=device)
    cursors.num_committed[: rows - 1] = 5
    one = torch.ones(rows, dtype=torch.int32, device=device)
    no = torch.zeros(rows, dtype=torch.bool, device=device)
    for _ in range(2):
        replayssm.commit(cursors, cache_indices=torch.arange(rows, device=device), num_accepted=one, force_fold=no)
    assert cursors.num_committed.tolist() == [2] * rows + [0]
    assert cursors.ring_start.tolist() == [5] * (rows - 1) + [0, 0]
