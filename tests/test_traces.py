"""Whatever an engine does with its requests, their outputs and states are those of the recurrence over accepted tokens.

Random traces by the rules of docs/protocol.md: steps of 1 to 3 tokens of which any number is accepted, forced folds,
flushes, moves to another slot after any prefix of the pending records, preemption and resumption in another slot, and
slots that change tenants. A population of requests lives in one pool, so that requests in every phase share the calls
and the slots; slots that nobody owns hold NaN and senseless cursors, padding rows NaN. A trace is one tenant from its
prompt's state to its end. The ten populations below have more than 1,700 each.

What is right is the recurrence in float64; what it errs in float32, with its state rounded to the dtype of the
checkpoint after each token, is the measure: the worst request and head against the worst (`helpers.tolerance`). The
activations are float32, so that records of a delta rule are not rounded; for Mamba-2, whose records are inputs,
bfloat16 as well. The sizes are as small as they can be: two heads that share a key head, 8 by 8, on a GPU 64 by 64. A
window of 5 has a ring row to spare, one of 3, which the longest draft fills, has none. The faults at the end must all
be seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import replayssm
from replayssm.reference import recurrence
from replayssm.reference import replay as reference
from replayssm.spec import RECURRENCES, Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import make_inputs, part, per_token, tensors_of
from tests.helpers.model import fitting
from tests.helpers.oracle import F32, F64
from tests.helpers.tolerance import excess

BF16 = torch.bfloat16
MAX_DRAFT = 3
REQUESTS, TICKS = 1100, 16
LIMITS = torch.iinfo(torch.int32)
# What a request does in a tick, and how often; a parked one resumes or waits.
WEIGHTS = {"step 1": 4.0, "step 2": 3.0, "step 3": 3.0, "flush": 1.5, "move": 2.0, "preempt": 1.5, "finish": 1.0}


def case_of(kind: Recurrence, activation: torch.dtype = F32, checkpoint: torch.dtype = F32, window: int = 5) -> Case:
    return Case(kind, 2, 1, 8, 8, window=window, activation=activation, checkpoint=checkpoint)


class Population:
    """Requests in the slots of one pool, driven by the public verbs, and the states that they must have.

    `states` are, by dtype, the state of each request now and before each of its last `window` tokens: [requests,
    window + 1, HV, V, K], the newest first.
    """

    def __init__(self, case: Case, device: torch.device, *, requests: int, seed: int = 0) -> None:
        self.case = case = fitting(case, device)
        self.device, self.requests = device, requests
        self.generator = torch.Generator().manual_seed(seed)
        spare = int(case.window > MAX_DRAFT)
        self.window, self.capacity = case.window, case.window + MAX_DRAFT + spare
        spec = replace(case.replay, max_draft=MAX_DRAFT, ring_capacity=self.capacity)
        self.pool = replayssm.make_pool(case.layer, spec, 2 * requests + 2, device=device)
        self.cursors = replayssm.make_cursors(spec, self.pool.num_slots, device=device)
        self.A = make_inputs(case, 1, self.generator).A.to(device) if case.recurrence == "mamba2" else None
        self.parked = torch.zeros(requests, dtype=torch.bool, device=device)
        self.states = {
            dtype: torch.zeros((requests, case.window + 1, *self.pool.checkpoint.shape[1:]), dtype=dtype, device=device)
            for dtype in (F64, F32)
        }
        self.outputs: dict[str, list[Tensor]] = {"got": [], "exact": [], "plain": []}
        self.ends: dict[str, list[Tensor]] = {"got": [], "exact": [], "plain": []}
        self.seen, self.strays, self.traces = Counter[str](), 0, 0
        self.leave(torch.arange(self.pool.num_slots, device=device))
        self.home = torch.randperm(self.pool.num_slots, generator=self.generator)[:requests].to(device)
        self.admit(torch.arange(requests, device=device))

    # Chance.

    def some(self, number: int, one_in: float) -> Tensor:
        return (torch.rand(number, generator=self.generator) < 1 / one_in).to(self.device)

    def integers(self, low: int | Tensor, high: int | Tensor, number: int) -> Tensor:
        """[number] int64 from `low` up to and with `high`."""
        drawn = torch.rand(number, generator=self.generator, dtype=F64).to(self.device)
        return low + (drawn * (high - low + 1)).long()

    def flip(self) -> bool:
        return bool(torch.rand((), generator=self.generator) < 0.5)

    # Slots.

    def take(self, number: int) -> Tensor:
        """Free slots, in random order."""
        free = torch.ones(self.pool.num_slots, dtype=torch.bool, device=self.device)
        free[self.home] = False
        free = free.nonzero().squeeze(1)
        return free[torch.randperm(len(free), generator=self.generator).to(self.device)[:number]]

    def leave(self, slots: Tensor) -> None:
        """Nobody owns the slots now: NaN in all memory, cursors in range or far beyond."""
        for tensor in self.pool.tensors:
            tensor[slots] = float("nan")
        for cursor, limit in ((self.cursors.ring_start, self.capacity - 1), (self.cursors.num_committed, self.window)):
            wild = self.integers(LIMITS.min, LIMITS.max, len(slots))
            cursor[slots] = wild.where(self.some(len(slots), 2), self.integers(0, limit, len(slots))).int()

    def settle(self, chosen: Tensor, slots: Tensor) -> None:
        """Requests live in other slots from now on."""
        old = self.home[chosen]
        self.home[chosen] = slots
        self.leave(old)

    def with_padding(self, *vectors: Tensor) -> list[Tensor]:
        """The rows in random order with padding among them: negative slots (int64), senseless counts (int32)."""
        rows = len(vectors[0])
        extra = rows // 8 + 1
        order = torch.randperm(rows + extra, generator=self.generator).to(self.device)
        dtype = torch.int32 if self.flip() else torch.int64
        padded = []
        for vector in vectors:
            fill = -self.integers(1, 9, extra) if vector.dtype is torch.int64 else self.integers(-9, 9, extra).int()
            padded.append(torch.cat([vector, fill.to(vector.dtype)])[order])
        return [one.to(dtype) if one.dtype is torch.int64 else one for one in padded]

    # What requests do.

    def admit(self, chosen: Tensor) -> None:
        """New tenants: of some the prompt's state is written, the others start from nothing."""
        self.traces += len(chosen)
        prompted = self.some(len(chosen), 2)
        slots = self.home[chosen]
        replayssm.reset(self.cursors, slots[~prompted], pools=[self.pool])
        replayssm.reset(self.cursors, slots[prompted].int())
        shape = (int(prompted.sum()), *self.pool.checkpoint.shape[1:])
        self.pool.checkpoint[slots[prompted]] = torch.randn(shape, generator=self.generator).to(self.pool.checkpoint)
        for dtype, states in self.states.items():
            states[chosen, 0] = 0.0
            states[chosen[prompted], 0] = self.pool.checkpoint[slots[prompted]].to(dtype)

    def finish(self, chosen: Tensor) -> None:
        self.record_states(chosen)
        self.settle(chosen, self.take(len(chosen)))
        self.admit(chosen)

    def record_states(self, chosen: Tensor) -> None:
        slots = self.home[chosen]
        count = self.cursors.num_committed[slots].long()
        self.ends["got"].append(reference.fold(self.pool, self.cursors, slots, count, A=self.A, dtype=F64))
        self.ends["exact"].append(self.states[F64][chosen, 0])
        self.ends["plain"].append(self.states[F32][chosen, 0])

    @property
    def layers(self) -> dict[str, Any]:
        return {"pools": [self.pool], "A": None if self.A is None else [self.A]}

    def flush(self, chosen: Tensor) -> None:
        replayssm.flush(self.cursors, *self.with_padding(self.home[chosen]), **self.layers)

    def move(self, chosen: Tensor) -> None:
        """Go on in another slot, from the state after all pending records or after any number of them."""
        slots, destination = self.home[chosen], self.take(len(chosen))
        pending = self.cursors.num_committed[slots].long()
        everything = self.flip()
        records = pending if everything else self.integers(torch.zeros_like(pending), pending, len(chosen))
        source, target, number = self.with_padding(slots, destination, records.int())
        replayssm.materialize(self.cursors, source, target, None if everything else number, **self.layers)
        depth = torch.arange(self.window + 1, device=self.device) + (pending - records)[:, None]
        for states in self.states.values():
            states[chosen] = states[chosen[:, None], depth.clamp(max=self.window)]
        self.settle(chosen, destination)
        self.seen["rolled back"] += int((records < pending).sum())
        self.seen["copied"] += int(((records == 0) & (pending > 0)).sum())

    def preempt(self, chosen: Tensor) -> None:
        slots = self.take(len(chosen))
        replayssm.copy_slots(self.cursors, self.home[chosen], slots, pools=[self.pool])
        self.settle(chosen, slots)
        self.parked[chosen] = True

    def resume(self, chosen: Tensor) -> None:
        slots = self.take(len(chosen))
        replayssm.copy_slots(self.cursors, self.home[chosen].int(), slots.int(), pools=[self.pool])
        self.settle(chosen, slots)
        self.parked[chosen] = False

    def step(self, chosen: Tensor, num_draft: int) -> None:
        accepted = self.integers(0, num_draft, len(chosen)).int()
        everything = self.flip() and num_draft == 1
        accepted = torch.full_like(accepted, num_draft) if everything else accepted
        forced, pending = self.some(len(chosen), 6), self.cursors.num_committed[self.home[chosen]]
        indices, row, taken, force = self.with_padding(
            self.home[chosen], torch.arange(len(chosen), device=self.device), accepted, forced.int()
        )
        live = indices >= 0
        rows = row[live].long()
        inputs = make_inputs(replace(self.case, T=num_draft), len(indices), self.generator)
        inputs = inputs._replace(**{name: t.to(self.device) for name, t in tensors_of(inputs).items()})
        inputs = per_token(inputs, lambda x: x.masked_fill(~live.view(-1, *[1] * (x.dim() - 1)), float("nan")))
        options: dict[str, Any] = {"cache_indices": indices, "force_fold": force > 0}
        out = replayssm.step(self.pool, self.cursors, inputs, **options)
        options |= {"num_draft": num_draft, "num_accepted": None if everything else taken}
        replayssm.commit(self.cursors, **options)
        self.strays += int((out[~live] != 0).sum())
        given = per_token(inputs, lambda x: x[live])
        found = {"got": out[live], **{n: self.follow(given, chosen[rows], accepted[rows], d) for n, d in PATHS.items()}}
        for name, values in found.items():  # one tensor a step, with a row for every request
            wide = values.new_zeros(self.requests, MAX_DRAFT, *values.shape[2:])
            wide[chosen[rows], :num_draft] = values
            self.outputs[name].append(wide)
        self.seen["folded by the rule"] += int((pending + num_draft > self.window).sum())
        self.seen["folded on demand"] += int((forced & (pending > 0) & (pending + num_draft <= self.window)).sum())
        self.seen["nothing accepted"] += int((accepted == 0).sum())
        self.seen["some rejected"] += int(((accepted > 0) & (accepted < num_draft)).sum())

    def follow(self, inputs: Any, chosen: Tensor, accepted: Tensor, dtype: torch.dtype) -> Tensor:
        """The recurrence over all tokens, from the states of the requests, which go on by what is accepted."""
        states, outputs = self.states[dtype], []
        state = states[chosen, 0]
        for t in range(part(inputs, "value").shape[1]):
            out, state = recurrence.run(per_token(inputs, lambda x, t=t: x[:, t : t + 1]), state, dtype)
            if dtype is F32:
                out, state = out.to(self.case.activation), state.to(self.case.checkpoint).float()
            outputs.append(out)
            kept = accepted > t
            states[chosen[kept], 1:] = states[chosen[kept], :-1]
            states[chosen[kept], 0] = state[kept]
        return torch.cat(outputs, dim=1)

    def tick(self) -> None:
        """Every request does one thing; those that do the same share a call."""
        weights = torch.tensor(list(WEIGHTS.values()))
        drawn = torch.multinomial(weights, self.requests, replacement=True, generator=self.generator).to(self.device)
        groups = {name: (drawn == i) & ~self.parked for i, name in enumerate(WEIGHTS)}
        groups["resume"] = self.parked & self.some(self.requests, 2)
        names = list(groups)
        for i in torch.randperm(len(names), generator=self.generator).tolist():
            chosen = groups[names[i]].nonzero().squeeze(1)
            if len(chosen) == 0:
                continue
            self.seen[names[i]] += len(chosen)
            verb, _, tokens = names[i].partition(" ")
            if tokens:
                self.step(chosen, int(tokens))
            else:
                getattr(self, verb)(chosen)

    def mistakes(self) -> list[str]:
        """What is wrong with all outputs so far, and with the states of all tenants at their end or now."""
        kept = {name: list(tensors) for name, tensors in self.ends.items()}
        self.record_states(torch.arange(self.requests, device=self.device))
        got, exact, plain = (torch.stack(self.outputs[name], dim=1) for name in ("got", "exact", "plain"))
        coarse = min(self.case.activation, self.case.checkpoint, key=lambda dtype: dtype.itemsize)
        findings = excess("output", got, plain, exact, keep=(0, 3), dtype=coarse)
        states = (torch.cat(self.ends[name]) for name in ("got", "plain", "exact"))
        findings += excess("state", *states, keep=(0, 1), dtype=self.case.checkpoint)
        self.ends = kept
        return findings + (["padding: an output is not zero"] if self.strays else [])


PATHS = {"exact": F64, "plain": F32}
POPULATIONS = [
    *((kind, F32, checkpoint, 5) for kind in RECURRENCES for checkpoint in (F32, BF16)),
    *((kind, F32, F32, 3) for kind in RECURRENCES),
    ("mamba2", BF16, F32, 5),
]
EVENTS = (
    *WEIGHTS,
    "resume",
    "rolled back",
    "copied",
    "folded by the rule",
    "folded on demand",
    "nothing accepted",
    "some rejected",
)


@pytest.mark.parametrize(("kind", "activation", "checkpoint", "window"), POPULATIONS, ids=str)
def test_traces_are_the_recurrence(
    kind: Recurrence, activation: torch.dtype, checkpoint: torch.dtype, window: int, device: torch.device
) -> None:
    seed = POPULATIONS.index((kind, activation, checkpoint, window))
    population = Population(case_of(kind, activation, checkpoint, window), device, requests=REQUESTS, seed=seed)
    ticks = 0
    # Chance decides what a call does, so that a rare event may want more ticks.
    while ticks < TICKS or (min(population.seen[event] for event in EVENTS) < 100 and ticks < 3 * TICKS):
        population.tick()
        ticks += 1
    assert population.mistakes() == []
    assert population.traces > 1700
    assert min(population.seen[event] for event in EVENTS) >= 100, population.seen


# Faults: each replaces a verb by one that errs.

Verb = Callable[..., Any]


def flush_that_keeps_its_records(flush: Verb, cursors: Any, slots: Tensor, **options: Any) -> None:
    before = cursors.ring_start.clone(), cursors.num_committed.clone()
    flush(cursors, slots, **options)
    cursors.ring_start.copy_(before[0])
    cursors.num_committed.copy_(before[1])


def materialize_of_one_less(materialize: Verb, cursors: Any, source: Tensor, *rows: Any, **options: Any) -> None:
    destination, records = rows
    records = cursors.num_committed[source.long().clamp(min=0)] if records is None else records
    materialize(cursors, source, destination, (records - 1).clamp(min=0), **options)


def materialize_of_all(materialize: Verb, cursors: Any, source: Tensor, *rows: Any, **options: Any) -> None:
    materialize(cursors, source, rows[0], None, **options)


def copy_without_records(copy: Verb, cursors: Any, source: Tensor, destination: Tensor, **options: Any) -> None:
    copy(cursors, source, destination, **options)
    cursors.num_committed[destination.long()] = 0


def copy_of_cursors_alone(copy: Verb, cursors: Any, source: Tensor, destination: Tensor, **options: Any) -> None:
    copy(cursors, source, destination, pools=[])


def reset_that_leaves_the_cursors(reset: Verb, cursors: Any, slots: Tensor, **options: Any) -> None:
    before = cursors.num_committed.clamp(0, cursors.replay.window)
    reset(cursors, slots, **options)
    cursors.num_committed[slots.long()] = before[slots.long()]


def commit_of_a_rejected_token(commit: Verb, cursors: Any, **options: Any) -> None:
    if (accepted := options["num_accepted"]) is not None:
        options["num_accepted"] = (accepted + 1).clamp(max=options["num_draft"])
    commit(cursors, **options)


def commit_without_the_mask(commit: Verb, cursors: Any, **options: Any) -> None:
    commit(cursors, **(options | {"force_fold": None}))


FAULTS: dict[str, list[Verb]] = {
    "flush": [flush_that_keeps_its_records],
    "materialize": [materialize_of_one_less, materialize_of_all],
    "copy_slots": [copy_without_records, copy_of_cursors_alone],
    "reset": [reset_that_leaves_the_cursors],
    "commit": [commit_of_a_rejected_token, commit_without_the_mask],
}


@pytest.mark.parametrize("checkpoint", [F32, BF16], ids=str)
@pytest.mark.parametrize(("verb", "fault"), [(verb, fault) for verb in FAULTS for fault in FAULTS[verb]])
@pytest.mark.parametrize("kind", RECURRENCES)
def test_a_wrong_verb_is_seen(
    kind: Recurrence,
    verb: str,
    fault: Verb,
    checkpoint: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = getattr(replayssm, verb)
    monkeypatch.setattr(replayssm, verb, lambda *args, **options: fault(right, *args, **options))
    population = Population(case_of(kind, F32, checkpoint), device, requests=60)
    for _ in range(8):
        population.tick()
    assert population.mistakes() != []


@pytest.mark.parametrize("checkpoint", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", RECURRENCES)
def test_one_wrong_request_among_many_is_seen(kind: Recurrence, checkpoint: torch.dtype, device: torch.device) -> None:
    """In the state at once, in the outputs once it has decoded: an error is not averaged over the requests."""
    population = Population(case_of(kind, F32, checkpoint), device, requests=REQUESTS)
    for _ in range(2):
        population.tick()
    assert population.mistakes() == []
    pending = population.cursors.num_committed[population.home]
    wrong = int(((pending > 1) & (pending < 4) & ~population.parked).nonzero()[0])
    population.cursors.num_committed[population.home[wrong]] -= 1
    assert [finding.partition(":")[0] for finding in population.mistakes()] == ["state"]
    population.step(torch.tensor([wrong], device=device), 2)
    assert [finding.partition(":")[0] for finding in population.mistakes()] == ["output", "state"]
