"""`materialize` and `flush` write the state that records stand for, to the slots they are given, and nothing else.

What is right is the recurrence over the very records in float64, one after the other; what it errs in float32, rounded
to the dtype of the checkpoint, is the measure (`helpers.tolerance`). Each recurrence runs as a model of three layers
that share cursors, the second with other heads and in head-major order: every layer must get its own state. The window
is 5 in a ring of 8, so that every ring start with every number of records and every prefix of them is 168 rows. All
that is not pending is NaN from the start (`helpers.model`). Copies, padding and what must not be written are compared
byte for byte. Every comparison has a case that must fail. On a GPU heads are 64 x 64, as no kernel has smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import replayssm
from replayssm.inputs import Inputs
from replayssm.reference import recurrence
from replayssm.spec import RECURRENCES, Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import make_inputs, per_token, tensors_of
from tests.helpers.model import SPARE_ROWS, Model, every_prefix, excesses, fitting, model_of, one_by_one, untouched
from tests.helpers.oracle import F32, F64, NAMES
from tests.helpers.tolerance import excess, same_bytes

BF16, F16 = torch.bfloat16, torch.float16
WINDOW, CAPACITY = 5, 5 + SPARE_ROWS
# The dtypes of activations (and so of records) and of the checkpoint.
PRECISIONS = [(F32, F32), (BF16, F32), (F32, BF16), (F16, F16), (BF16, BF16)]
POISONS = [float("nan"), float("inf"), -float("inf"), 1e38]

each_kind = pytest.mark.parametrize("kind", RECURRENCES)


def case_of(kind: Recurrence, activation: torch.dtype = F32, checkpoint: torch.dtype = F32) -> Case:
    return Case(kind, 4, 2, 8, 16, window=WINDOW, activation=activation, checkpoint=checkpoint)


# The state after a prefix.


@each_kind
@pytest.mark.parametrize(("activation", "checkpoint"), PRECISIONS, ids=str)
def test_every_prefix_from_every_ring_row(
    kind: Recurrence, activation: torch.dtype, checkpoint: torch.dtype, device: torch.device
) -> None:
    """All layers at once, several rows of one source at once; sources and all that is not a destination stay."""
    model, source, destination, records = every_prefix(case_of(kind, activation, checkpoint), device)
    given = model.clone()
    model.materialize(source, destination, records)
    assert excesses(model, given, source, destination, records) == []
    assert untouched(model, given, destination) == []


def ask_for_less(model: Model, records: Tensor) -> None:
    records[int(records.argmax())] -= 1


def mix_up_rates(model: Model, records: Tensor) -> None:
    assert model.A is not None
    model.A = [model.A[0], model.A[1], model.A[0]]


BEFORE: dict[str, Callable[[Model, Tensor], object]] = {
    "one record less": ask_for_less,
    "the rates of another layer": mix_up_rates,
    "a lost record": lambda m, r: m.pools[1].key[:, :, 0].zero_(),
}
AFTER: dict[str, Callable[[Model, Tensor], object]] = {
    "a state that is a little off": lambda m, d: m.pools[2].checkpoint[d[-1]].mul_(1.00001),
    "the state of another layer": lambda m, d: m.pools[2].checkpoint.copy_(m.pools[0].checkpoint),
    "a state in 16 bits": lambda m, d: m.pools[1].checkpoint.copy_(m.pools[1].checkpoint.bfloat16()),
    "a number that is not finite": lambda m, d: m.pools[0].checkpoint[d[0], 0, 0, 0].fill_(float("nan")),
    "a row that was left out": lambda m, d: m.pools[0].checkpoint[d[5]].copy_(m.pools[0].checkpoint[d[6]]),
}
SEEN = [
    (kind, fault) for kind in RECURRENCES for fault in (*BEFORE, *AFTER) if kind == "mamba2" or "rates" not in fault
]


@pytest.mark.parametrize(("kind", "fault"), SEEN)
def test_the_comparison_sees(kind: Recurrence, fault: str, device: torch.device) -> None:
    model, source, destination, records = every_prefix(case_of(kind), device)
    given, asked = model.clone(), records.clone()
    BEFORE.get(fault, lambda m, r: None)(model, asked)
    model.materialize(source, destination, asked)
    AFTER.get(fault, lambda m, d: None)(model, destination)
    assert excesses(model, given, source, destination, records) != []


STRAY: dict[str, Callable[[Model], object]] = {
    "a source's state": lambda m: m.pools[0].checkpoint[1].mul_(1.0001),
    "a source's cursor": lambda m: m.cursors.ring_start[1].add_(1),
    "a ring row of a destination": lambda m: m.pools[2].key[-2, 0, 3].fill_(0.0),
    "a slot without a row": lambda m: m.pools[1].checkpoint[-1].fill_(0.0),
}


@pytest.mark.parametrize("stray", STRAY)
def test_a_stray_write_is_seen(stray: str, device: torch.device) -> None:
    model, source, destination, records = every_prefix(case_of("gdn"), device)
    given = model.clone()
    model.materialize(source, destination, records)
    STRAY[stray](model)
    assert untouched(model, given, destination) != []


@each_kind
def test_a_16_bit_state_that_is_rounded_twice_is_seen(kind: Recurrence, device: torch.device) -> None:
    """Truncation errs twice as much as rounding."""
    model, source, destination, records = every_prefix(case_of(kind, checkpoint=BF16), device)
    for pool in model.pools:
        state = one_by_one(model, model.pools.index(pool), source, records, F32)
        pool.checkpoint[destination] = (state.view(torch.int32) & -65536).view(F32).to(BF16)
    assert excesses(model, model, source, destination, records) != []


@each_kind
@pytest.mark.parametrize("checkpoint", [F32, BF16, F16], ids=str)
def test_a_prefix_of_decoded_tokens_is_the_recurrence(
    kind: Recurrence, checkpoint: torch.dtype, device: torch.device
) -> None:
    """From tokens, not from records: the layer decodes a window, and each prefix of it is materialised."""
    case = fitting(replace(case_of(kind, F32, checkpoint), HV=3, HK=1), device)
    replay_spec, rows, generator = case.replay, 7, torch.Generator().manual_seed(3)
    pool = replayssm.make_pool(case.layer, replay_spec, rows * (WINDOW + 2), device=device)
    cursors = replayssm.make_cursors(replay_spec, pool.num_slots, device=device)
    pool.checkpoint.copy_(torch.randn(pool.checkpoint.shape, generator=generator))
    slots = torch.arange(rows, device=device)
    states = {dtype: [pool.checkpoint[slots].to(dtype)] for dtype in (F64, F32)}
    for _ in range(WINDOW):
        inputs = make_inputs(case, rows, generator)
        inputs = inputs._replace(**{name: t.to(device) for name, t in tensors_of(inputs).items()})
        replayssm.step(pool, cursors, inputs, cache_indices=slots)
        replayssm.commit(cursors, cache_indices=slots)
        for dtype, run in states.items():
            run.append(recurrence.run(inputs, run[-1], dtype)[1])
    A = [inputs.A] if kind == "mamba2" else None
    source, wanted = slots.repeat(WINDOW + 1), torch.arange(WINDOW + 1, device=device).repeat_interleave(rows)
    destination = rows + torch.arange(len(source), device=device)
    replayssm.materialize(cursors, source, destination, wanted.int(), pools=[pool], A=A)
    got, exact, plain = pool.checkpoint[destination], torch.cat(states[F64]), torch.cat(states[F32])
    assert excess("state", got, plain.to(checkpoint), exact, keep=(0, 1)) == []
    late = got.roll(rows, 0)  # teeth: the prefix that is one shorter
    assert excess("state", late[rows:], plain[rows:].to(checkpoint), exact[rows:], keep=(0, 1)) != []


@each_kind
def test_no_number_of_records_means_all(kind: Recurrence, device: torch.device) -> None:
    told, untold = (model_of(case_of(kind), device, [0, 3, 5, 1], free=4) for _ in range(2))
    source, destination = torch.arange(4, device=device), torch.tensor([6, 4, 7, 5], device=device)
    told.materialize(source, destination, told.cursors.num_committed[source])
    untold.materialize(source, destination, None)
    assert told.same_as(untold)
    told.materialize(source, destination, told.cursors.num_committed[source].clamp(max=3))
    assert not told.same_as(untold)


@each_kind
@pytest.mark.parametrize("checkpoint", [F32, BF16, F16], ids=str)
def test_no_records_copy_every_bit(kind: Recurrence, checkpoint: torch.dtype, device: torch.device) -> None:
    """-0 and the payload of a NaN too, which no sum with 0 keeps; in `flush` of a slot without records as well."""
    model = model_of(case_of(kind, BF16, checkpoint), device, [4, 0], free=2)
    odd = [-32768, -1, 0x7F81] if checkpoint is not F32 else [-(2**31), -1, 0x7F800001]
    for pool in model.pools:
        bits = pool.checkpoint.view(torch.int32 if checkpoint is F32 else torch.int16)
        bits[:2, :, 0, :3] = torch.tensor(odd, dtype=bits.dtype, device=device)
    given = model.clone()
    source, destination = torch.tensor([0, 1], device=device), torch.tensor([3, 2], device=device)
    model.materialize(source, destination, torch.zeros(2, dtype=torch.int32, device=device))
    assert all(same_bytes(pool.checkpoint[destination], pool.checkpoint[source]) for pool in model.pools)
    assert untouched(model, given, destination) == []
    before = model.clone()
    model.flush(source[1:])
    assert model.same_as(before)
    model.flush(source[:1])
    assert not model.same_as(before)


# What must not matter.


@each_kind
@pytest.mark.parametrize("poison", POISONS)
def test_what_lies_beyond_the_prefix_has_no_effect(kind: Recurrence, poison: float, device: torch.device) -> None:
    """Committed records behind the prefix are skipped, not multiplied by 0."""
    clean = model_of(case_of(kind), device, [5, 4, 3, 5], free=4)
    source, destination = torch.arange(4, device=device), torch.arange(4, 8, device=device)
    records = torch.tensor([0, 2, 3, 4], dtype=torch.int32, device=device)
    dirty = clean.clone()
    rows = torch.arange(CAPACITY, device=device)
    beyond = ((rows - clean.cursors.ring_start[source, None]) % CAPACITY >= records[:, None])[:, None]
    for pool in dirty.pools:
        for ring in pool.tensors[1:]:
            mask = beyond if ring.dim() == 3 else beyond[..., None]
            ring[source] = ring[source].masked_fill(mask, poison)
    clean.materialize(source, destination, records)
    dirty.materialize(source, destination, records)
    for ours, theirs in zip(clean.pools, dirty.pools, strict=True):
        assert bool(torch.isfinite(ours.checkpoint[destination]).all())
        assert same_bytes(ours.checkpoint[destination], theirs.checkpoint[destination])
    dirty.materialize(source, destination, records + (records < 5).int() * (records > 1).int())  # teeth
    assert not same_bytes(clean.pools[0].checkpoint[destination[3]], dirty.pools[0].checkpoint[destination[3]])


@each_kind
def test_padding_rows_and_index_dtypes(kind: Recurrence, device: torch.device) -> None:
    """Rows with a negative source or destination write nothing and their `num_records` are not read."""
    given = model_of(case_of(kind), device, [5, 4, 0], free=3)
    plain, padded, flushed, padded_flush = (given.clone() for _ in range(4))
    source, destination = (torch.tensor(one, device=device) for one in ([1, 0], [5, 3]))
    plain.materialize(source, destination, torch.tensor([2, 5], dtype=torch.int32, device=device))
    padded.materialize(
        torch.tensor([-1, 1, 2, 0, -7], dtype=torch.int32, device=device),
        torch.tensor([4, 5, -1, 3, -1], dtype=torch.int32, device=device),
        torch.tensor([-9, 2, 99, 5, 2**31 - 1], dtype=torch.int32, device=device),
    )
    assert plain.same_as(padded)
    assert not plain.same_as(given)
    flushed.flush(torch.tensor([1, 0], device=device))
    padded_flush.flush(torch.tensor([-1, 0, -7, 1], dtype=torch.int32, device=device))
    assert flushed.same_as(padded_flush)
    assert not flushed.same_as(given)
    nothing = given.clone()
    for empty in (torch.tensor([-1, -1], device=device), source[:0]):
        nothing.flush(empty)
        nothing.materialize(empty, empty, None)
        nothing.materialize(empty, empty, torch.zeros_like(empty, dtype=torch.int32))
    assert nothing.same_as(given)


# Flush.


@each_kind
@pytest.mark.parametrize(("activation", "checkpoint"), PRECISIONS, ids=str)
def test_a_flush_is_a_forced_fold(
    kind: Recurrence, activation: torch.dtype, checkpoint: torch.dtype, device: torch.device
) -> None:
    """Bit for bit in the checkpoints. The twin also decodes alike whether a step folds or not, so with a float32
    checkpoint, which rounds nothing that the forced step still had, all memory and all outputs stay equal."""
    given = model_of(case_of(kind, activation, checkpoint), device, [5, 0, 1, 3, 4], free=2)
    slots = torch.tensor([3, 0, 1, 4], device=device)
    flushed, forced = given.clone(), given.clone()
    flushed.flush(slots)
    want = given.clone()
    want.cursors.ring_start[slots] = (given.cursors.ring_start + given.cursors.num_committed)[slots] % CAPACITY
    want.cursors.num_committed[slots] = 0
    outs = [forced.decode(slots, seed=1, force=True)]
    for pool, theirs in zip(want.pools, forced.pools, strict=True):
        pool.checkpoint[slots] = theirs.checkpoint[slots]
    assert flushed.same_as(want)  # cursors that moved, no ring row touched, no other slot
    flushed.flush(slots)
    assert flushed.same_as(want)
    got = [flushed.decode(slots, seed=1)]
    if checkpoint is F32 and device.type == "cpu":
        for seed in range(2, 9):
            outs.append(forced.decode(slots, seed=seed))
            got.append(flushed.decode(slots, seed=seed))
        assert all(same_bytes(a, b) for a, b in zip(got, outs, strict=True))
        assert flushed.same_as(forced)
        sums = one_by_one(given, 0, slots, given.cursors.num_committed[slots], F32)
        assert not same_bytes(want.pools[0].checkpoint[slots], sums)  # teeth: bits tell another order of sums apart


@each_kind
def test_a_flush_folds_what_the_records_say(kind: Recurrence, device: torch.device) -> None:
    model, *_ = every_prefix(case_of(kind), device)
    given = model.clone()
    slots = torch.arange(CAPACITY * (WINDOW + 1), device=device)
    count = given.cursors.num_committed[slots]
    model.flush(slots)
    assert excesses(model, given, slots, slots, count) == []
    assert excesses(model, given, slots, slots, (count - 1).clamp(min=0)) != []


@pytest.mark.gpu
@each_kind
def test_a_captured_graph_folds_what_there_is(kind: Recurrence) -> None:
    """Capture also shows that neither verb waits or copies once it has run. The rows are rewritten in place between
    replays, as an engine does, and the records are others each time."""
    given = model_of(case_of(kind), torch.device("cuda"), [5, 2, 0, 4], free=4)
    source, destination, records, slots = torch.tensor([[0, 1, 3], [5, 4, 6], [3, 2, 4], [0, 1, 3]], device="cuda")
    records = records.int()

    def run(model: Model, fold: Callable[[], object]) -> list[list[Tensor]]:
        seen = []
        for rows in ((0, 1, 2), (1, -1, 0), (2, 0, 1)):
            for own, one in zip((source, destination, records, slots), every, strict=True):
                own.copy_(one[list(rows)].where(torch.tensor(rows, device="cuda") >= 0, -1))
            fold()
            seen.append([tensor.clone() for tensor in model.memory()])
            for tensor, kept in zip(model.memory(), given.memory(), strict=True):
                tensor.copy_(kept)
        return seen

    def verbs(model: Model) -> None:
        model.materialize(source, destination, records)
        model.flush(slots)

    every = [rows.clone() for rows in (source, destination, records, slots)]
    eager, captured = given.clone(), given.clone()
    want = run(eager, lambda: verbs(eager))
    run(captured, lambda: verbs(captured))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verbs(captured)
    assert captured.same_as(given)
    got = run(captured, graph.replay)
    assert all(same_bytes(a, b) for one, other in zip(want, got, strict=True) for a, b in zip(one, other, strict=True))
    assert not same_bytes(want[0][0], want[1][0])


# Slots come, go and move.


@each_kind
def test_a_materialised_slot_decodes_as_a_folded_copy(kind: Recurrence, device: torch.device) -> None:
    """A destination was garbage; its own rings stay so and must not be read."""
    moved = model_of(case_of(kind), device, [5, 2, 0], free=3)
    copied = moved.clone()
    source, destination = torch.arange(3, device=device), torch.tensor([4, 5, 3], device=device)
    moved.materialize(source, destination, None)
    replayssm.copy_slots(copied.cursors, source, destination, pools=copied.pools)
    copied.flush(destination)
    for seed in range(7):
        out = moved.decode(destination, seed=seed)
        assert bool(torch.isfinite(out).all())
        assert same_bytes(out, copied.decode(destination, seed=seed))
    stale = copied.clone()  # teeth: the sources are still what they were
    stale.materialize(source, destination, None)
    assert not same_bytes(stale.decode(destination, seed=8), copied.decode(destination, seed=8))


@each_kind
@pytest.mark.parametrize("way", ["flush", "materialize", "with its records"])
def test_a_slot_taken_away_comes_back_anywhere(kind: Recurrence, way: str, device: torch.device) -> None:
    """Preempted to host memory or sent to a worker that has had other tenants, with any number of records pending. The
    slots are overwritten meanwhile."""
    case, slots = case_of(kind), torch.arange(6, device=device)
    here, there = model_of(case, device, [0, 1, 2, 3, 4, 5], free=6), model_of(case, device, [4] * 12, free=1)
    stays, lost = here.clone(), there.clone()
    unfolded = [pool.checkpoint[slots].cpu() for pool in here.pools]
    if way == "flush":
        here.flush(slots)
    if way == "materialize":
        here.materialize(slots, slots + 6, None)
    home = slots + 6 if way == "materialize" else slots
    if way != "with its records":
        stays.flush(slots)
    names = NAMES if way == "with its records" else NAMES[:1]
    parcel = [[getattr(pool, name)[home].cpu() for name in names] for pool in here.pools]
    cursors = [cursor[home].cpu() for cursor in (here.cursors.ring_start, here.cursors.num_committed)]
    for tensor in here.memory():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -7)
    new = torch.tensor([9, 2, 11, 0, 5, 7], device=device)
    for model, parts in ((there, parcel), (lost, [[one] for one in unfolded])):
        for pool, tensors in zip(model.pools, parts, strict=True):
            for name, tensor in zip(names, tensors, strict=False):
                getattr(pool, name)[new] = tensor.to(device)
        replayssm.reset(model.cursors, new)
    if way == "with its records":
        there.cursors.ring_start[new], there.cursors.num_committed[new] = (one.to(device) for one in cursors)
    outs = [[model.decode(new, seed=seed) for seed in range(7)] for model in (there, lost)]
    want = [stays.decode(slots, seed=seed) for seed in range(7)]
    assert all(same_bytes(a, b) for a, b in zip(outs[0], want, strict=True))
    assert not same_bytes(outs[1][0], want[0])  # teeth: the checkpoints alone


def prompt_in_chunks(kind: Recurrence, device: torch.device, last: bool, flushes: bool = True) -> list[str]:
    """A slot with another tenant's records gets 3 tokens of a prompt by the recurrence, decodes 2, gets 3 more and then
    one alone, which is a step; asked to fold or not. What is wrong with the outputs from there on."""
    case = fitting(case_of(kind), device)
    model = model_of(case, device, [4, 2, 5], free=1, layers=[(case, "record_major")])
    (pool,), slots, generator = model.pools, torch.arange(4, device=device), torch.Generator().manual_seed(2)
    inputs = make_inputs(replace(case, T=12), 4, generator)
    inputs = inputs._replace(**{name: t.to(device) for name, t in tensors_of(inputs).items()})
    model.A = None if model.A is None else [inputs.A]

    def chunk(first: int, end: int) -> Inputs:
        return per_token(inputs, lambda x: x[:, first:end].contiguous())

    def decode(token: int, force: bool = False) -> Tensor:
        mask = torch.full((4,), force, device=device)
        out = replayssm.step(pool, model.cursors, chunk(token, token + 1), cache_indices=slots, force_fold=mask)
        replayssm.commit(model.cursors, cache_indices=slots, force_fold=mask)
        return out

    def prefill(first: int, end: int, state: Tensor) -> None:
        pool.checkpoint[slots] = recurrence.run(chunk(first, end), state, F32)[1]
        replayssm.reset(model.cursors, slots)

    prefill(0, 3, torch.zeros_like(pool.checkpoint[slots]))
    for token in (3, 4):
        decode(token)
    if flushes:
        model.flush(slots)
    prefill(5, 8, pool.checkpoint[slots])
    got = torch.cat([decode(8, last), *(decode(token) for token in (9, 10, 11))], 1)
    empty = torch.zeros_like(pool.checkpoint[slots])
    exact, plain = (recurrence.run(inputs, empty, dtype)[0][:, 8:] for dtype in (F64, F32))
    return excess("output", got, plain, exact, keep=(0, 2))


@each_kind
@pytest.mark.parametrize("last", [False, True], ids=["a step", "a step that is asked to fold"])
def test_a_prompt_in_chunks_loses_no_token(kind: Recurrence, last: bool, device: torch.device) -> None:
    assert prompt_in_chunks(kind, device, last) == []
    assert prompt_in_chunks(kind, device, last, flushes=False) != []


@each_kind
def test_a_boundary_inside_a_draft_is_kept_after_the_commit(kind: Recurrence, device: torch.device) -> None:
    """A step folds before it appends, so every prefix within the tokens just accepted is still among the records."""
    case = replace(case_of(kind), T=3, window=WINDOW)
    model = model_of(case, device, [0, 1, 2, 3, 4, 5], free=6)
    model.cases = [replace(one, T=3) for one in model.cases]
    slots = torch.arange(6, device=device)
    mask, accepted = torch.zeros_like(slots, dtype=torch.bool), torch.full_like(slots, 3, dtype=torch.int32)
    given, generator = model.clone(), torch.Generator().manual_seed(5)
    for i, pool in enumerate(model.pools):
        inputs = make_inputs(model.cases[i], 6, generator)
        inputs = inputs._replace(**{name: t.to(device) for name, t in tensors_of(inputs).items()})
        inputs = inputs if model.A is None else inputs._replace(A=model.A[i])
        replayssm.step(pool, model.cursors, inputs, cache_indices=slots, force_fold=mask)
    replayssm.commit(model.cursors, cache_indices=slots, num_draft=3, num_accepted=accepted, force_fold=mask)
    assert bool((model.cursors.num_committed[slots] >= 3).all())
    assert bool((model.cursors.num_committed[slots] == 3).any())
    before = model.cursors.num_committed[slots] - 3
    model.materialize(slots, slots + 6, before)  # the boundary is where the step began
    whole = given.cursors.num_committed[slots]
    assert excesses(model, given, slots, slots + 6, whole) == []
    model.materialize(slots, slots + 6, before + 1)
    assert excesses(model, given, slots, slots + 6, whole) != []


def test_layers_of_two_recurrences_share_a_call(device: torch.device) -> None:
    """Mamba-2 layers have rates, the others none."""
    models = [model_of(case_of(kind), device, [5, 2, 0], free=3) for kind in ("mamba2", "kda")]
    apart, slots = [model.clone() for model in models], torch.arange(3, device=device)
    pools, A = [one for pair in zip(*(m.pools for m in models), strict=True) for one in pair], models[0].A
    assert A is not None
    rates = [one for rate in A for one in (rate, None)]
    replayssm.materialize(models[0].cursors, slots, slots + 3, None, pools=iter(pools), A=iter(rates))
    replayssm.flush(models[0].cursors, slots, pools=iter(pools), A=iter(rates))
    for model in apart:
        model.materialize(slots, slots + 3, None)
        model.flush(slots)
    for model, other in zip(models, apart, strict=True):
        assert all(
            same_bytes(getattr(a, n), getattr(b, n))
            for a, b in zip(model.pools, other.pools, strict=True)
            for n in NAMES
        )
    assert models[0].same_as(apart[0])
