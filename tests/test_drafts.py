"""A step of several tokens, of which any number is accepted, is the recurrence over the accepted tokens.

One step is compared with the replay form in float64, and 20 steps with random acceptance with the token-by-token
recurrence in float64, within a multiple of what the recurrence itself errs in float32: all T outputs of each row, and
the state that checkpoint and records stand for. What was rejected must leave no trace, so bytes are compared there.

Grid: each recurrence with 2, 3, 8 and 16 tokens (two, an odd number, a half and a whole tile of a matrix instruction);
the sizes go through those of the kernels, small enough for one CPU thread. A window holds two drafts and two records
more at most, so that two steps read and the third folds; or just one draft, where every row with records folds. A CPU
runs all of it too: there the torch twin stands in for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replayssm.reference import replay as reference
from replayssm.spec import RECURRENCES, Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import make_inputs, part, per_token, with_parts
from tests.helpers.oracle import F32, F64, NAMES, PAD, Scene, Trace, Work, busy_scene, mistakes
from tests.helpers.tolerance import FACTOR_FLOAT32, excess, same_bytes, worst_error

BF16, F16 = torch.bfloat16, torch.float16
# By T: value heads, key heads, head_dim, d_state, window.
SIZES = {2: (4, 2, 64, 64, 5), 3: (3, 1, 80, 64, 8), 8: (2, 2, 64, 128, 17), 16: (4, 2, 64, 64, 33)}


def case_of(kind: Recurrence, num_draft: int) -> Case:
    *sizes, window = SIZES[num_draft]
    return Case(kind, *sizes, window=window, T=num_draft)


@pytest.fixture(params=[(kind, t) for kind in RECURRENCES for t in SIZES], ids=lambda one: f"{one[0]}-T{one[1]}")
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(*request.param)


def slot(work: Work, row: int) -> int:
    """The slot of the row-th live row."""
    return int(work.slots[row])


def state_of(work: Work, dtype: torch.dtype = F64) -> Tensor:
    """What checkpoint and committed records of each live row stand for."""
    count = work.cursors.num_committed[work.slots].long()
    A = getattr(work.inputs, "A", None)
    return reference.fold(work.pool, work.cursors, work.slots, count, A=A, dtype=dtype)


def random_accepted(work: Work, seed: int = 0) -> Tensor:
    """[rows] int32, 0 to T, both occurring; senseless in padding rows."""
    drawn = torch.randint(work.num_draft + 1, work.cache_indices.shape, generator=torch.Generator().manual_seed(seed))
    drawn[0], drawn[1] = 0, work.num_draft
    return drawn.int().to(work.pool.device).masked_fill(~work.live, torch.iinfo(torch.int32).min)


def poison(work: Work) -> None:
    """NaN in every ring row of the live rows' slots that holds no committed record."""
    rows = torch.arange(work.pool.replay.ring_capacity, device=work.pool.device)
    start, count = (t[work.slots, None] for t in (work.cursors.ring_start, work.cursors.num_committed))
    free = ((rows - start) % work.pool.replay.ring_capacity >= count)[:, None]
    for ring in work.pool.tensors[1:]:
        mask = free.view(*free.shape, *[1] * (ring.dim() - 3))
        ring[work.slots] = ring[work.slots].masked_fill(mask, float("nan"))


def next_inputs(work: Work, case: Case, seed: int = 1) -> None:
    """Give the step other tokens; the parameters stay."""
    drawn = make_inputs(case, len(work.cache_indices), torch.Generator().manual_seed(seed))
    roles = {role: part(drawn, role).to(work.pool.device) for role in ("value", "key", "query", "gate")}
    work.inputs = with_parts(per_token(work.inputs, lambda x: x.nan_to_num(0.5)), **roles)


# One step.


@pytest.mark.parametrize(("activation", "checkpoint"), [(BF16, F32), (F32, F32), (F16, BF16)], ids=str)
def test_one_step_is_the_replay_form(
    activation: torch.dtype, checkpoint: torch.dtype, case: Case, device: torch.device
) -> None:
    case = replace(case, activation=activation, checkpoint=checkpoint)
    for window in (case.window, case.T):
        work = busy_scene(replace(case, window=window)).on(device)
        folds = work.fold_counts()
        assert 0 < int((folds > 0).sum()) < len(folds)
        assert mistakes(work) == [], window


def test_a_busy_scene_has_every_kind_of_row(case: Case, device: torch.device) -> None:
    work = busy_scene(case).on(device)
    count, folds = work.cursors.num_committed[work.slots], work.fold_counts()
    read = set(count[folds == 0].tolist())
    assert {0, 1, case.window - case.T} <= read  # nothing, little, and as much as a row that reads can have
    by_rule = count + case.T > case.window
    assert {case.window, case.window - case.T + 1} <= set(folds[by_rule].tolist())
    assert bool(((folds > 0) & ~by_rule).any())  # a row that only a mask makes fold
    assert bool((~work.live).any())
    assert bool((work.places() < work.places()[:, :1]).any())  # a draft that wraps around


def test_shorter_drafts_use_the_same_pool(case: Case, device: torch.device) -> None:
    """A row folds by the number of tokens that come, not by the most that may come."""
    for num_draft in (1, case.T - 1):
        work = busy_scene(case).on(device)
        work.inputs = per_token(work.inputs, lambda x, n=num_draft: x[:, :n].contiguous())
        assert work.num_draft == num_draft
        assert mistakes(work) == [], num_draft


@pytest.mark.parametrize("kind", RECURRENCES)
def test_a_draft_may_lie_at_every_ring_row(kind: Recurrence, device: torch.device) -> None:
    """Every ring start with every number of pending records, at once: no append may land on a record that is read."""
    case = case_of(kind, 3)
    pairs = [(start, count) for start in range(case.window + case.T + 1) for count in range(case.window + 1)]
    starts, counts = zip(*pairs, strict=True)
    scene = Scene(case, counts, forced=tuple(range(0, len(pairs), 5)), starts=starts)
    assert mistakes(scene.on(device)) == []


def late(work: Work, row: int) -> int:
    """The ring row of the last token's record."""
    return int(work.places()[row, -1])


def behind(work: Work, row: int) -> int:
    """The ring row behind the last token's record."""
    return (late(work, row) + 1) % work.pool.replay.ring_capacity


# Of `busy_scene`: live row 0 reads nothing, 2 reads most, 1 folds a full window, 4 one that only just overflows.
BEFORE: dict[str, tuple[str, Callable[[Work], object]]] = {
    "a wrong record": ("output", lambda work: work.pool.key[slot(work, 2)].mul_(1.05)),
    "a lost record": ("output", lambda work: work.cursors.num_committed[slot(work, 2)].sub_(1)),
    "a wrong ring start": ("output", lambda work: work.cursors.ring_start[slot(work, 2)].add_(1)),
    "a wrong state": ("output", lambda work: work.pool.checkpoint[slot(work, 0), 1].mul_(1.02)),
    "a fold that did not happen": ("checkpoint", lambda work: work.cursors.num_committed[slot(work, 4)].sub_(1)),
    "a wrong last token": ("output", lambda work: part(work.inputs, "query")[0, -1].neg_()),
    "tokens in another order": ("output", lambda work: part(work.inputs, "key")[0].copy_(
        part(work.inputs, "key")[0].flip(0))),
}  # fmt: skip
AFTER: dict[str, tuple[str, Callable[[Work, Tensor], object]]] = {
    "a wrong head of the last token": ("output", lambda work, out: out[0, -1, 1].mul_(1.03)),
    "a wrong channel of the last token": ("output", lambda work, out: out[0, -1, 1, 5].add_(0.5)),
    "padding that is not zero": ("padding", lambda work, out: out[2, -1, 1, 7].fill_(1e-30)),
    "a last record that is wrong": (
        "value", lambda work, out: work.pool.value[slot(work, 0), 1, late(work, 0)].mul_(1.03)),
    "a last record not appended": (
        "key", lambda work, out: work.pool.key[slot(work, 0), 0, late(work, 0)].fill_(float("nan"))),
    "a decay one row late": (
        "decay", lambda work, out: work.pool.decay[slot(work, 0)].copy_(work.pool.decay[slot(work, 0)].roll(1, 1))),
    "a record too many": ("key", lambda work, out: work.pool.key[slot(work, 0), 0, behind(work, 0), 3].zero_()),
    "a state written by a reader": ("checkpoint", lambda work, out: work.pool.checkpoint[slot(work, 2)].mul_(1.0001)),
    "a cursor that moved": ("num_committed", lambda work, out: work.cursors.num_committed[slot(work, 0)].add_(1)),
}  # fmt: skip


@pytest.mark.parametrize("fault", [*BEFORE, *AFTER])
@pytest.mark.parametrize("num_draft", [2, 16])
@pytest.mark.parametrize("kind", RECURRENCES)
def test_the_comparison_sees(kind: Recurrence, num_draft: int, fault: str, device: torch.device) -> None:
    word, change = BEFORE.get(fault) or AFTER[fault]
    work = busy_scene(case_of(kind, num_draft)).on(device)
    findings = mistakes(work, **{"before" if fault in BEFORE else "after": change})
    assert any(word in finding for finding in findings), findings


# Steps and commits.


def run_trace(case: Case, device: torch.device, steps: int) -> Trace:
    trace = Trace(case, device)
    for _ in range(steps):
        trace.step()
    return trace


def test_a_trace_is_the_recurrence(case: Case, device: torch.device) -> None:
    """Random acceptance, forced folds and padding, in float32, where a lost record or a stale one cannot hide."""
    trace = run_trace(replace(case, activation=F32), device, steps=20)
    assert trace.mistakes() == []
    # The twin is the measure of `mistakes`; its own measure is the recurrence.
    twin, exact, plain = (torch.cat(trace.outputs[name]) for name in ("twin", "exact", "torch"))
    assert worst_error(twin, exact, (1, 2)) <= FACTOR_FLOAT32 * worst_error(plain, exact, (1, 2))
    states = trace.standing_for(trace.twin), trace.rounded
    error, measure = (worst_error(state, trace.state, (1,)) for state in states)
    assert error <= FACTOR_FLOAT32 * measure


def test_a_trace_of_16_bit_inputs_is_the_recurrence(case: Case, device: torch.device) -> None:
    assert run_trace(case, device, steps=6).mistakes() == []


FAULTS: dict[str, Callable[[Work, int], object]] = {
    "a perturbed record": lambda work, slot: work.pool.key[slot].mul_(1.001),
    "a rejected token kept": lambda work, slot: work.cursors.num_committed[slot].add_(1),
    "an accepted token lost": lambda work, slot: work.cursors.num_committed[slot].sub_(1),
    "a cursor off by one": lambda work, slot: work.cursors.ring_start[slot].add_(1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_trace_sees(fault: str, case: Case, device: torch.device) -> None:
    """In the state at once, and in the outputs once the slot has a row again."""
    trace = run_trace(replace(case, activation=F32), device, steps=4)
    assert trace.mistakes() == []
    count = trace.work.cursors.num_committed
    chosen = next(slot for slot in trace.slots.tolist() if 0 < int(count[slot]) < case.window)
    FAULTS[fault](trace.work, chosen)
    assert any("state" in finding for finding in trace.mistakes())
    trace.step()
    while chosen not in trace.work.slots.tolist():
        trace.step()
    assert any("output" in finding for finding in trace.mistakes())


# What must not change.


def test_accepting_nothing_leaves_the_state(case: Case, device: torch.device) -> None:
    """Bit for bit where a row reads; a row that folded stands for the same state in another form."""
    work = busy_scene(case).on(device)
    before, exact, rounded = work.clone(), state_of(work), state_of(work, F32)
    nothing, reads = torch.zeros_like(random_accepted(work)), work.fold_counts() == 0
    kept = work.cursors.num_committed[work.slots].where(reads, 0)
    work.step()
    work.commit(num_accepted=nothing)
    after = state_of(work)
    assert torch.equal(after[reads], exact[reads])
    assert excess("state", after[~reads].float(), rounded[~reads], exact[~reads], keep=(0, 1)) == []
    assert torch.equal(work.cursors.num_committed[work.slots], kept)
    for one in (before, work):
        next_inputs(one, case)
        one.force_fold = None
    outs = [one.step()[one.live][reads] for one in (before, work)]
    assert same_bytes(*outs)
    work.commit()  # teeth: the same tokens accepted
    assert not torch.equal(state_of(work)[reads], exact[reads])


def test_rejected_records_never_reach_an_output(case: Case, device: torch.device) -> None:
    clean = busy_scene(case).on(device)
    accepted = random_accepted(clean)
    clean.step()
    clean.commit(num_accepted=accepted)
    next_inputs(clean, case)
    clean.force_fold = None
    work = clean.clone()
    poison(work)
    assert any(not same_bytes(getattr(work.pool, name), getattr(clean.pool, name)) for name in NAMES[1:])
    broken, expected, outs = work.clone(), clean.step(), []
    assert mistakes(work, after=lambda work, out: outs.append(out)) == []
    assert same_bytes(outs[0], expected)
    assert same_bytes(work.pool.checkpoint[work.slots], clean.pool.checkpoint[work.slots])
    broken.cursors.num_committed[broken.slots[0]] += 1  # teeth: its first draft was rejected
    assert not bool(torch.isfinite(broken.step()[broken.live][0]).all())


def test_a_checkpoint_changes_at_folds_only(case: Case, device: torch.device) -> None:
    """Two drafts fit beside nothing or one record; the third folds what is pending, and what only it brings stays."""
    work = Scene(case, (0, 1, PAD, case.window - 2 * case.T), forced=None).on(device)
    before = work.clone()
    for seed in range(2):
        next_inputs(work, case, seed)
        work.step()
        work.commit()
        assert same_bytes(work.pool.checkpoint, before.pool.checkpoint)
    stands_for, rounded = state_of(work), state_of(work, F32)
    next_inputs(work, case, 2)
    work.step()
    assert not same_bytes(work.pool.checkpoint, before.pool.checkpoint)
    assert excess("checkpoint", work.pool.checkpoint[work.slots], rounded, stands_for, keep=(0, 1)) == []
    unused = [one for one in range(work.pool.num_slots) if one not in work.slots.tolist()]
    assert same_bytes(work.pool.checkpoint[unused], before.pool.checkpoint[unused])
