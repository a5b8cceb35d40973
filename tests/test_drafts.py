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
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm.reference import replay as reference
from replayssm.spec import RECURRENCES, Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import AnyGiven, DeltaGiven, make_inputs, of_one_key, part, per_token, with_parts
from tests.helpers.oracle import F32, F64, NAMES, PAD, Given, Scene, Trace, Work, busy_scene, mistakes, ragged
from tests.helpers.tolerance import excess, same_bytes

BF16, F16 = torch.bfloat16, torch.float16
POISONS = [float("nan"), float("inf"), -float("inf"), 1e38]
DELTA_RULES: tuple[Recurrence, ...] = ("gdn", "kda")
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


def poison(work: Work, value: float) -> None:
    """The value in every ring row of the live rows' slots that holds no committed record."""
    rows = torch.arange(work.pool.replay.ring_capacity, device=work.pool.device)
    start, count = (t[work.slots, None] for t in (work.cursors.ring_start, work.cursors.num_committed))
    free = ((rows - start) % work.pool.replay.ring_capacity >= count)[:, None]
    for ring in work.pool.tensors[1:]:
        mask = free.view(*free.shape, *[1] * (ring.dim() - 3))
        ring[work.slots] = ring[work.slots].masked_fill(mask, value)


def next_inputs(work: Work, case: Case, seed: int = 1) -> None:
    """Give the step other tokens; the parameters stay."""
    drawn = make_inputs(case, len(work.cache_indices), torch.Generator().manual_seed(seed))
    roles = {role: part(drawn, role).to(work.pool.device) for role in ("value", "key", "query", "gate")}
    work.inputs = with_parts(per_token(work.inputs, lambda x: x.nan_to_num(0.5)), **roles)


# One step.


@pytest.mark.parametrize(("activation", "checkpoint"), [(BF16, F32), (F32, F32), (F16, BF16), (F16, F16)], ids=str)
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


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("kind", RECURRENCES)
def test_a_row_of_a_batch_is_the_row_alone(kind: Recurrence, groups: int, device: torch.device) -> None:
    """Whatever a kernel keeps for a row, and for each of its groups, must not be its neighbour's."""
    whole = busy_scene(Case(kind, 8, groups, 64, 64, window=8, T=3)).on(device)
    alone, out = whole.clone(), whole.clone().step()
    whole.step()
    mask = alone.force_fold
    assert mask is not None
    for row in range(len(out)):
        one = slice(row, row + 1)
        inputs = per_token(alone.inputs, lambda x, one=one: x[one].clone())
        indices, force = alone.cache_indices[one].clone(), mask[one].clone()
        single = replace(alone, inputs=inputs, cache_indices=indices, force_fold=force)
        assert same_bytes(single.step(), out[one])
    assert all(same_bytes(a, b) for a, b in zip(alone.written(), whole.written(), strict=True))
    mixed = busy_scene(Case(kind, 8, groups, 64, 64, window=8, T=3)).on(device)  # teeth
    mixed.inputs = with_parts(mixed.inputs, key=part(mixed.inputs, "key").roll(1, 0))
    assert not same_bytes(mixed.step(), out)


OPTIONS: dict[Recurrence, tuple[AnyGiven, dict[str, Any]]] = {
    "mamba2": (Given(), {"D": None, "z": None, "dt_bias": None, "dt_softplus": False}),
    "gdn": (DeltaGiven(0.25, 9.0, True, gate=F32), {"scale": None, "l2norm_eps": 1.0}),
    "kda": (DeltaGiven(0.25, 9.0, lower_bound=-5.0, beta=F32), {"scale": None, "l2norm_eps": 1.0, "lower_bound": None}),
}


@pytest.mark.parametrize("kind", RECURRENCES)
def test_options_act_on_every_token(kind: Recurrence, device: torch.device) -> None:
    given, without = OPTIONS[kind]
    scene = busy_scene(case_of(kind, 3), given=given)
    assert mistakes(scene.on(device)) == []
    for name, value in without.items():  # teeth

        def drop(work: Work, name: str = name, value: Any = value) -> None:
            work.inputs = per_token(work.inputs, lambda x: x.nan_to_num(0.0))._replace(**{name: value})

        assert mistakes(scene.on("cpu"), before=drop) != [], name


ENDS = {"open": 1e4, "closed": -1e4, "mixed": None}
BOUNDS: dict[Recurrence, tuple[float | None, ...]] = {"mamba2": (None,), "gdn": (None,), "kda": (None, -5.0, -2.5)}


def at_the_ends(kind: Recurrence, bound: float | None, end: str, device: torch.device) -> Work:
    """16 tokens whose gates are wide open, shut, or both side by side, behind records of a delta rule like them."""
    scene = busy_scene(
        replace(case_of(kind, 16), activation=F32), given=DeltaGiven(lower_bound=bound) if bound else None
    )
    work, level = scene.on(device), ENDS[end]
    gate, decay = part(work.inputs, "gate"), work.pool.decay
    mixed = torch.linspace(-60, 60, 997, device=device)[torch.arange(gate.numel(), device=device) * 31 % 997]
    gate.copy_(mixed.view(gate.shape) if level is None else torch.full_like(gate, level))
    if kind != "mamba2":
        strongest = 30.0 if bound is None else -bound
        share = (torch.arange(decay.numel(), device=device) % 3 / 2).view(decay.shape)
        decay.copy_(decay * 0 - strongest * (share if level is None else float(level > 0)))  # NaN stays
    return work


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("kind", "bound"), [(kind, bound) for kind in RECURRENCES for bound in BOUNDS[kind]])
def test_gates_at_both_ends_stay_exact(kind: Recurrence, bound: float | None, end: str, device: torch.device) -> None:
    assert mistakes(at_the_ends(kind, bound, end, device)) == []


@pytest.mark.parametrize("kind", RECURRENCES)
def test_a_quotient_of_prefixes_is_seen(
    kind: Recurrence, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teeth: a decay between two tokens as exp of one prefix times exp of the other's opposite overflows."""
    with monkeypatch.context() as patch:
        patch.setattr(reference, "_decay_between", quotient)
        wrong = at_the_ends(kind, None, "mixed", torch.device("cpu")).step().to(device)
    assert mistakes(at_the_ends(kind, None, "mixed", device), after=lambda work, out: out.copy_(wrong)) != []


def quotient(log_decay: Tensor) -> Tensor:
    prefix = log_decay.cumsum(2)
    between = torch.exp(prefix)[:, :, :, None] * torch.exp(-prefix)[:, :, None]
    return between * torch.ones(between.shape[2:4]).tril()[..., None]


def repeating(kind: Recurrence, activation: torch.dtype, device: torch.device) -> Work:
    work = busy_scene(replace(case_of(kind, 16), activation=activation)).on(device)
    return replace(work, inputs=of_one_key(work.inputs))


@pytest.mark.parametrize("activation", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", DELTA_RULES)
def test_tokens_of_one_key_are_solved_exactly(kind: Recurrence, activation: torch.dtype, device: torch.device) -> None:
    assert mistakes(repeating(kind, activation, device)) == []


@pytest.mark.parametrize("kind", DELTA_RULES)
def test_an_inverse_in_16_bits_is_seen(kind: Recurrence, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for activation in (F32, BF16):
        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, "solve_triangular", by_inverse_in_16_bits)
            wrong = repeating(kind, activation, torch.device("cpu")).step().to(device)
        found = mistakes(repeating(kind, activation, device), after=lambda work, out, wrong=wrong: out.copy_(wrong))
        assert any("output" in one for one in found)


def by_inverse_in_16_bits(system: Tensor, right: Tensor, **_: bool) -> Tensor:
    """(1 - A)(1 + A^2)(1 + A^4)(1 + A^8) is the inverse of 1 + A of 16 tokens."""
    one, power = torch.eye(system.shape[-1]), system.tril(-1).bfloat16()
    inverse = (one - power).bfloat16()
    for _ in range(3):
        power = power @ power
        inverse = inverse @ (one + power).bfloat16()
    return inverse.float() @ right


def late(work: Work, row: int) -> int:
    """The ring row of the last token's record."""
    return int(work.places()[row, -1])


def behind(work: Work, row: int) -> int:
    """The ring row behind the last token's record."""
    return (late(work, row) + 1) % work.pool.replay.ring_capacity


def begin_later(work: Work, slot: int) -> None:
    """Let a slot's records begin one ring row later, in the ring: a kernel takes a start beyond it for the last row."""
    start = work.cursors.ring_start
    start[slot] = (start[slot] + 1) % work.pool.replay.ring_capacity


# Of `busy_scene`: live row 0 reads nothing, 2 reads most, 1 folds a full window, 4 one that only just overflows.
BEFORE: dict[str, tuple[str, Callable[[Work], object]]] = {
    "a wrong record": ("output", lambda work: work.pool.key[slot(work, 2)].mul_(1.05)),
    "a lost record": ("output", lambda work: work.cursors.num_committed[slot(work, 2)].sub_(1)),
    "a wrong ring start": ("output", lambda work: begin_later(work, slot(work, 2))),
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


def test_a_trace_of_16_bit_inputs_is_the_recurrence(case: Case, device: torch.device) -> None:
    assert run_trace(case, device, steps=6).mistakes() == []


FAULTS: dict[str, Callable[[Work, int], object]] = {
    "a perturbed record": lambda work, slot: work.pool.key[slot].mul_(1.001),
    "a rejected token kept": lambda work, slot: work.cursors.num_committed[slot].add_(1),
    "an accepted token lost": lambda work, slot: work.cursors.num_committed[slot].sub_(1),
    "a cursor off by one": begin_later,
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


NEGATIVE = (-1, -7, -(2**31), -(2**32), torch.iinfo(torch.int64).min)


@pytest.mark.parametrize("lengths", ["one", "any"])
@pytest.mark.parametrize("kind", RECURRENCES)
def test_padding_is_a_negative_slot_or_the_named_one(kind: Recurrence, lengths: str, device: torch.device) -> None:
    """Its output is zero, and memory stays that of the rows without it, whatever the row says and however it repeats;
    the named slot may be one that others use."""
    scene = Scene(case_of(kind, 3), (0, PAD, 8, 3, PAD, 6), forced=(1, 3))
    given = (scene if lengths == "one" else ragged(scene)).on(device)
    spare = next(one for one in range(given.pool.num_slots) if one not in given.slots.tolist())
    accepted = given.lengths.int().masked_fill(given.cache_indices < 0, torch.iinfo(torch.int32).max)
    want, results = given.clone(), []
    for slot, named in (*((slot, -1) for slot in NEGATIVE), (spare, spare)):
        work = given.clone()
        work.cache_indices[given.cache_indices < 0], work.pad_slot_id = slot, named
        out = torch.full_like(part(work.inputs, "value"), float("nan"))
        assert bool((work.of_tokens(work.step(out=out))[1] == 0).all())
        work.commit(num_accepted=accepted)
        results.append([work.of_tokens(out)[0], *work.written()])
    results.append([want.of_tokens(want.step())[0], *want.written()])
    want.commit(num_accepted=accepted)
    assert all(same_bytes(a, b) for one in results for a, b in zip(one, results[-1], strict=True))
    unnamed = given.clone()  # teeth
    unnamed.cache_indices[1] = spare
    unnamed.step()
    unnamed.commit(num_accepted=accepted.clamp(max=1))
    assert any(not same_bytes(a, b) for a, b in zip(unnamed.written(), want.written(), strict=True))


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


@pytest.mark.parametrize("value", POISONS)
def test_rejected_records_never_reach_an_output(value: float, case: Case, device: torch.device) -> None:
    """Nor does anything else that lies in a free ring row: it is masked before exp and before a product with 0."""
    clean = busy_scene(case).on(device)
    accepted = random_accepted(clean)
    clean.step()
    clean.commit(num_accepted=accepted)
    next_inputs(clean, case)
    clean.force_fold = None
    work = clean.clone()
    poison(work, value)
    assert any(not same_bytes(getattr(work.pool, name), getattr(clean.pool, name)) for name in NAMES[1:])
    broken, expected, outs = work.clone(), clean.step(), []
    assert mistakes(work, after=lambda work, out: outs.append(out)) == []
    assert same_bytes(outs[0], expected)
    assert same_bytes(work.pool.checkpoint[work.slots], clean.pool.checkpoint[work.slots])
    broken.cursors.num_committed[broken.slots[0]] += 1  # teeth: its first draft was rejected
    assert not same_bytes(broken.step()[broken.live][0], expected[broken.live][0])


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
