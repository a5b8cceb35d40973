"""Rows of different numbers of tokens, by `cu_seqlens`: each row is a step of its own.

The torch twin is compared with one dense call a row in float64, everything else with the replay form and the recurrence
in float64 as in test_drafts.py. Grid: each recurrence with at most 1, 4 and 9 tokens a row; rows of every number of
tokens between none and the most, that read, that fold, that are forced to, and padding. Behind the last row the inputs
have two tokens more, which are NaN. What must stay untouched is compared byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import replayssm
from replayssm.reference import replay as reference
from replayssm.spec import RECURRENCES, Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import part, per_token
from tests.helpers.oracle import F32, F64, NAMES, PAD, Scene, Trace, Work, first_rows, in_float64, mistakes
from tests.helpers.tolerance import same_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES, indirect=True)


def scene_of(kind: Recurrence, most: int) -> Scene:
    """Two rows are padding; of those that are asked to fold, one has no records, one is padding, the last no token."""
    window = max(5, most + 1)
    counts = (0, window, 3, window - 1, PAD, 1, window, 2, PAD, 2, window - most, 0, 3)
    lengths = (*((7 * i + 2) % (most + 1) for i in range(12)), 0)
    case = Case(kind, 4, 2, 64, 64, window=window, T=most)
    return Scene(case, counts, forced=(0, 4, 7, 9, 10, 12), index_dtype=torch.int32, lengths=lengths)


@pytest.fixture(
    params=[(kind, most) for kind in RECURRENCES for most in (1, 4, 9)], ids=lambda one: f"{one[0]}-T{one[1]}"
)
def scene(request: pytest.FixtureRequest) -> Scene:
    return scene_of(*request.param)


@pytest.fixture
def work(scene: Scene, device: torch.device) -> Work:
    return scene.on(device)


def test_a_busy_scene_has_every_kind_of_row(work: Work, scene: Scene) -> None:
    assert set(work.lengths.tolist()) == set(range(scene.case.T + 1))
    assert 0 < int((work.fold_counts() > 0).sum()) < len(work.slots)
    count, folds = work.cursors.num_committed[work.slots], work.fold_counts() > 0
    by_rule, by_most = (count + n > scene.case.window for n in (work.lengths[work.live], scene.case.T))
    assert bool((folds & ~by_rule).any())  # a row that only a mask makes fold
    if scene.case.T > 1:  # a row folds by its own tokens
        assert bool((by_most & ~folds).any())


def test_a_row_is_a_step_of_its_own(work: Work) -> None:
    """The twin, in float64."""
    exact = in_float64(work)
    alone = replace(exact, pool=in_float64(work.clone()).pool)
    out = torch.full(part(work.inputs, "value").shape, 7.0, dtype=F64, device=work.pool.device)
    reference.step(exact.pool, exact.cursors, exact.inputs, cache_indices=exact.cache_indices, out=out,
                   force_fold=exact.force_fold, dtype=F64)  # fmt: skip
    first = 0
    assert alone.force_fold is not None
    for row, length in enumerate(work.lengths.tolist()):
        tokens = per_token(work.inputs, lambda x, s=slice(first, first + length): x[:, s])._replace(cu_seqlens=None)
        want = torch.empty(part(tokens, "value").shape, dtype=F64, device=out.device)
        if length:
            reference.step(alone.pool, alone.cursors, tokens, cache_indices=work.cache_indices[row : row + 1], out=want,
                           force_fold=alone.force_fold[row : row + 1], dtype=F64)  # fmt: skip
        torch.testing.assert_close(out[:, first : first + length], want, rtol=1e-12, atol=1e-12)
        first += length
    assert bool((out[:, first:] == 7.0).all())
    for name in NAMES:
        pair = [getattr(one.pool, name) for one in (exact, alone)]
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("activation", [torch.bfloat16, F32], ids=str)
def test_one_step_is_the_replay_form(activation: torch.dtype, scene: Scene, device: torch.device) -> None:
    work = replace(scene, case=replace(scene.case, activation=activation)).on(device)
    assert mistakes(work) == []


def test_a_trace_is_the_recurrence(scene: Scene, device: torch.device) -> None:
    trace = Trace(replace(scene.case, activation=F32), device, ragged=True)
    for _ in range(16):
        trace.step()
    assert trace.mistakes() == []


def test_what_no_row_has_is_left_alone(work: Work) -> None:
    """Outputs behind the last row, and slots and cursors of rows without tokens, forced or not."""
    given, out = work.clone(), torch.full_like(part(work.inputs, "value"), 7.0)
    work.step(out=out)
    work.commit()
    assert bool((out[:, -2:] == 7.0).all())
    assert bool((out[:, :-2] != 7.0).any())
    idle = given.cache_indices[(given.lengths == 0) & (given.cache_indices >= 0)].long()
    assert len(idle) > 0
    assert all(same_bytes(now[idle], before[idle]) for now, before in zip(work.written(), given.written(), strict=True))
    nothing = work.clone()
    nothing.inputs = per_token(nothing.inputs, lambda x: x[:, :0])._replace(
        cu_seqlens=torch.zeros_like(work.inputs.cu_seqlens)
    )
    assert nothing.step().shape[1] == 0
    nothing.commit()
    assert all(same_bytes(now, before) for now, before in zip(nothing.written(), work.written(), strict=True))


def test_other_rows_and_lengths_are_followed(work: Work, device: torch.device) -> None:
    """Three rows, then all; then lengths and acceptance rewritten in place, as an engine does before it replays a graph
    (on a GPU this is one): nothing of the call before may remain."""
    ends, lengths = work.inputs.cu_seqlens, work.lengths
    work.inputs = per_token(work.inputs, lambda x: x.nan_to_num(0.5))  # any row may have any token here
    for one in (first_rows(work, 3), work):
        assert mistakes(one) == []
        one.commit()
    saved, out = work.clone(), torch.zeros_like(part(work.inputs, "value"))
    accepted = torch.zeros_like(ends[1:])

    def both() -> None:
        work.step(out=out)
        work.commit(num_accepted=accepted)

    both()
    run: Callable[[], object] = both
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            both()
        run = graph.replay
    seen = []
    for other in (lengths, lengths.flip(0), lengths.roll(5), lengths * 0):
        for now, before in zip(work.written(), saved.written(), strict=True):
            now.copy_(before)
        ends[1:], fresh, want = other.cumsum(0), saved.clone(), torch.full_like(out, 7.0)
        accepted.copy_(other - other // 2)
        fresh.inputs = fresh.inputs._replace(cu_seqlens=ends.clone())
        out.fill_(7.0)
        run()
        fresh.step(out=want)
        fresh.commit(num_accepted=accepted.clone())
        assert all(same_bytes(a, b) for a, b in zip((out, *work.written()), (want, *fresh.written()), strict=True))
        seen.append(want)
    assert not any(same_bytes(seen[0], one) for one in seen[2:])


def test_no_acceptance_keeps_every_token(work: Work) -> None:
    count, folds = work.cursors.num_committed[work.slots], work.fold_counts()
    work.step()
    work.commit()
    assert torch.equal(work.cursors.num_committed[work.slots], count - folds.int() + work.lengths[work.live].int())


LENGTHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "descending": lambda ends: ends.flip(0),
    "more tokens than the most": lambda ends: ends * 3,
    "beyond the tokens": lambda ends: ends + 5,
    "negative": lambda ends: ends - 3,
    "enormous": lambda ends: (ends - 1) * 2**26,
}


@pytest.mark.parametrize("mistake", LENGTHS)
def test_wrong_lengths_stay_within_the_rows(mistake: str, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the caller's mistake, and write nothing but the rows' own slots and the output; debug mode says so."""
    clean = per_token(work.inputs, lambda x: x.nan_to_num(0.5))
    work.inputs = clean._replace(cu_seqlens=LENGTHS[mistake](work.inputs.cu_seqlens))
    given = work.clone()
    slots = work.cache_indices[work.cache_indices >= 0].long()
    others = [slot for slot in range(work.pool.num_slots) if slot not in slots.tolist()]
    value = part(work.inputs, "value")
    memory = torch.full((1, value.shape[1] + 8, *value.shape[2:]), 7.0, dtype=value.dtype, device=value.device)
    work.step(out=memory[:, 4:-4])
    work.commit(num_accepted=torch.full_like(work.inputs.cu_seqlens[1:], 10**6))
    assert bool((memory[:, :4] == 7.0).all() & (memory[:, -4:] == 7.0).all())
    assert all(same_bytes(now[others], then[others]) for now, then in zip(work.written(), given.written(), strict=True))
    assert bool((work.cursors.num_committed[slots] <= work.pool.replay.window).all())
    monkeypatch.setattr("replayssm.debug.DEBUG", True)
    for verb in (given.step, given.commit) if mistake not in ("beyond the tokens", "negative") else (given.step,):
        with pytest.raises(ValueError, match="cu_seqlens: expected 0 to"):
            verb()


def test_debug_mode_refuses_more_accepted_tokens_than_a_row_has(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayssm.debug.DEBUG", True)
    work = scene_of("gdn", 4).on(device)
    work.step()
    accepted = work.lengths.int()
    accepted[4] = accepted[12] = -1  # padding, and a row without tokens
    work.commit(num_accepted=accepted)
    accepted[3] += 1
    with pytest.raises(ValueError, match=f"num_accepted: expected 0 to num_draft = {int(work.lengths[3])}, got"):
        work.commit(num_accepted=accepted)


BAD: dict[str, tuple[Callable[[Work], Any], type[Exception], str]] = {
    "dtype": (lambda work: work.inputs.cu_seqlens.long(), TypeError, "int64"),
    "rows": (lambda work: work.inputs.cu_seqlens[1:], ValueError, r"\(14,\) int32"),
    "rank": (lambda work: work.inputs.cu_seqlens[None], ValueError, r"\(14,\) int32"),
    "a list": (lambda work: work.inputs.cu_seqlens.tolist(), TypeError, "list"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lengths_are_refused_before_anything_is_written(name: str, device: torch.device) -> None:
    change, error, words = BAD[name]
    work = scene_of("mamba2", 4).on(device)
    work.step()  # a signature that is known does not let another pass
    work.commit()
    lengths, given = change(work), work.clone()
    with pytest.raises(error, match=f"inputs.cu_seqlens: expected .*{words}"):
        replace(work, inputs=work.inputs._replace(cu_seqlens=lengths)).step()
    with pytest.raises(error, match=f"cu_seqlens: expected .*{words}"):
        work.commit(cu_seqlens=lengths)
    assert all(same_bytes(now, then) for now, then in zip(work.written(), given.written(), strict=True))


def test_what_does_not_go_together_is_refused(device: torch.device) -> None:
    work = scene_of("kda", 4).on(device)
    with pytest.raises(ValueError, match="num_draft: expected none beside cu_seqlens, got 4"):
        work.commit(num_draft=4)
    dense = replace(scene_of("kda", 4), lengths=None).on(device)
    with pytest.raises(ValueError, match=r"inputs\.q: expected \(1, any, 2, 64\)|inputs\.q: expected \(1, 4, 2, 64\)"):
        replace(dense, inputs=dense.inputs._replace(cu_seqlens=work.inputs.cu_seqlens)).step()
    with pytest.raises(ValueError, match=r"out: expected \(1, "):
        work.step(out=torch.empty((13, 4, 4, 64), dtype=torch.bfloat16, device=device))
    replayssm.commit(work.cursors, cache_indices=work.cache_indices, cu_seqlens=work.inputs.cu_seqlens)


def test_faults_are_seen(device: torch.device) -> None:
    """Teeth: a row with a token of its neighbour's, tokens one place further on, a row that folds unasked."""

    def lengthen(work: Work) -> None:
        work.inputs.cu_seqlens[3:5] += 1

    def shift(work: Work) -> None:
        work.inputs.cu_seqlens[:] += 1

    def force(work: Work) -> None:
        assert work.force_fold is not None
        work.force_fold[2] = True

    for kind in RECURRENCES:
        for fault in (lengthen, shift, force):
            assert mistakes(scene_of(kind, 4).on(device), before=fault) != [], fault
