"""Claim: a checkpoint and a ring give what the token-by-token recurrence gives, whatever is accepted or folded.

The oracle is `recurrence.run` in float64. Bounds are FACTOR times the error that the same recurrence makes in float32
on the same trace (relative 2-norms over all outputs, so no lucky element sets a bound); where pool and arithmetic are
float64 that error is scaled by the ratio of the two precisions, which leaves no room for a wrong term. Grid: every
recurrence, windows 1 to 64, drafts 1 to 4, head ratio 2, V != K, both ring layouts, rings longer than needed, random
starts, acceptance (zero included), forced folds and padding rows. Where nothing may change, bytes are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replayssm.cursors import Cursors, make_cursors
from replayssm.inputs import GdnInputs, Inputs, KdaInputs, Mamba2Inputs
from replayssm.pool import Pool, make_pool
from replayssm.reference import recurrence, replay
from replayssm.spec import LayerSpec, Recurrence, ReplaySpec

RECURRENCES: tuple[Recurrence, ...] = ("mamba2", "gdn", "kda")
HV, HK, V, K = 4, 2, 8, 16
FACTOR = 2  # the worst ratio seen is 1.3
F32, F64 = torch.float32, torch.float64
PRECISION_RATIO = torch.finfo(F64).eps / torch.finfo(F32).eps
NAMES = ("checkpoint", "value", "key", "decay")
POISONS = [float("nan"), float("inf"), -float("inf"), 1e38]

each_recurrence = pytest.mark.parametrize("kind", RECURRENCES)


def layer_of(kind: Recurrence) -> LayerSpec:
    return LayerSpec(kind, HV, HK, V, K)


def make_inputs(kind: Recurrence, rows: int, tokens: int, generator: torch.Generator, **changes: Any) -> Inputs:
    """Random tokens and fixed weights in float32; `changes` replaces fields."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=generator)

    rate = torch.tensor([-1.0, -0.2, 0.3, 1.0])
    inputs: Inputs
    if kind == "mamba2":
        x, dt, B, C, z = normal(HV, V), normal(HV), normal(HK, K), normal(HK, K), normal(HV, V)
        inputs = Mamba2Inputs(x, dt, B, C, -rate.exp(), D=rate, z=z, dt_bias=rate - 2, dt_softplus=True)
    elif kind == "gdn":
        inputs = GdnInputs(normal(HK, K), normal(HK, K), normal(HV, V), normal(HV), normal(HV), rate, rate - 2)
    else:
        bias = torch.linspace(-4, 1, HV * K).view(HV, K)
        inputs = KdaInputs(normal(HK, K), normal(HK, K), normal(HV, V), normal(HV, K), normal(HV), rate, bias)
    return inputs._replace(**changes)


def per_token(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """`change` applied to every field that has a token axis (the weights have two axes at most)."""
    return inputs._replace(
        **{n: change(t) for n, t in inputs._asdict().items() if isinstance(t, Tensor) and t.dim() > 2}
    )


def prefix_states(inputs: Inputs, state: Tensor, dtype: torch.dtype) -> Tensor:
    """The state after 0, 1, ..., T tokens: [T + 1, rows, HV, V, K]."""
    states = [state]
    for t in range(recurrence.tokens(inputs, dtype).value.shape[1]):
        states.append(recurrence.run(per_token(inputs, lambda x, t=t: x[:, t : t + 1]), states[-1], dtype)[1])
    return torch.stack(states)


def as_float64(pool: Pool) -> Pool:
    """The same pool with float64 tensors, which the checks of a real one refuse: nothing is rounded where stored."""
    tensors = {name: getattr(pool, name).double() for name in NAMES}
    return SimpleNamespace(layer=pool.layer, replay=pool.replay, **tensors)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@dataclass
class Trace:
    """A pool driven over random steps, beside the float64 truth and the float32 baseline of every slot."""

    kind: Recurrence
    spec: ReplaySpec
    slots: int = 6
    storage: Literal["float32", "float64"] = "float32"
    compute: torch.dtype = F64
    seed: int = 0
    layout: Literal["record_major", "head_major"] = "record_major"
    draw: Callable[..., Inputs] = make_inputs

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        pool = make_pool(layer_of(self.kind), self.spec, self.slots, ring_layout=self.layout)
        pool.checkpoint.copy_(torch.randn(pool.checkpoint.shape, generator=self.generator))
        for ring in pool.tensors[1:]:
            ring.fill_(float("nan"))
        self.pool = as_float64(pool) if self.storage == "float64" else pool
        self.cursors = make_cursors(self.spec, self.slots)
        self.cursors.ring_start.copy_(self.integers(self.spec.ring_capacity, self.slots))
        self.truth, self.baseline = pool.checkpoint.double(), pool.checkpoint.clone()
        self.outputs: dict[str, list[Tensor]] = {"got": [], "truth": [], "baseline": []}

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def step(self, tokens: int, *, force: bool = True, pads: bool = True, accepted: int | None = None) -> None:
        """One model step over the slots in random order; some rows are padding, with poisoned inputs."""
        indices = torch.randperm(self.slots, generator=self.generator)
        if pads:
            indices = torch.where(self.integers(4, self.slots) == 0, -1, indices)
        live, rows = indices >= 0, len(indices)
        inputs = self.draw(self.kind, rows, tokens, self.generator)
        inputs = per_token(inputs, lambda x: x.where(live.view(-1, *[1] * (x.dim() - 1)), float("nan")))
        mask = self.integers(4, rows) == 0 if force else None
        num_accepted = self.integers(tokens + 1, rows) if accepted is None else torch.full((rows,), accepted)
        out = replay.step(
            self.pool,
            self.cursors,
            inputs,
            cache_indices=indices,
            out=torch.full((rows, tokens, HV, V), float("nan"), dtype=F64),
            force_fold=mask,
            dtype=self.compute,
        )
        assert (out[~live] == 0).all()
        replay.commit(self.cursors, cache_indices=indices, num_draft=tokens, num_accepted=num_accepted, force_fold=mask)
        kept, slots = per_token(inputs, lambda x: x[live]), indices[live]
        self.outputs["got"].append(out[live].flatten())
        for name, state, dtype in (("truth", self.truth, F64), ("baseline", self.baseline, F32)):
            self.outputs[name].append(recurrence.run(kept, state[slots], dtype)[0].flatten().double())
            after = prefix_states(kept, state[slots], dtype)
            state[slots] = after[num_accepted[live], torch.arange(len(slots))]

    def errors(self) -> tuple[float, float]:
        """The relative error of all outputs so far, and the bound for it."""
        got, truth, baseline = (torch.cat(self.outputs[name]) for name in ("got", "truth", "baseline"))
        scale = PRECISION_RATIO if self.storage == "float64" else 1.0
        return relative_error(got, truth), FACTOR * scale * relative_error(baseline, truth)

    def check(self) -> None:
        error, bound = self.errors()
        assert error <= bound


@each_recurrence
@pytest.mark.parametrize("window", [1, 2, 5, 16, 64])
@pytest.mark.parametrize(
    ("storage", "compute"), [("float64", F64), ("float32", F64), ("float32", F32)], ids=["f64", "f32-in-f64", "f32"]
)
def test_replay_equals_the_recurrence(
    kind: Recurrence, window: int, storage: Literal["float32", "float64"], compute: torch.dtype
) -> None:
    draft = min(window, 4)
    spec = ReplaySpec(window, draft, activation_dtype=F32, ring_capacity=window + draft + (0 if window % 2 else 3))
    layout: Literal["record_major", "head_major"] = "head_major" if window in (2, 16) else "record_major"
    trace = Trace(kind, spec, storage=storage, compute=compute, seed=window, layout=layout)
    for i in range(14 + window):
        trace.step(1 + i % draft, force=window < 64)
    trace.check()


@each_recurrence
def test_a_window_may_start_at_every_ring_row(kind: Recurrence) -> None:
    spec = ReplaySpec(5, 3, activation_dtype=F32, ring_capacity=9)
    trace = Trace(kind, spec, slots=9, storage="float64")
    trace.cursors.ring_start.copy_(torch.arange(9))
    for tokens in (3, 2, 1, 3, 3, 2, 3):
        trace.step(tokens, force=False, pads=False, accepted=tokens)
    trace.check()


@each_recurrence
def test_windows_agree(kind: Recurrence) -> None:
    outputs = []
    for window in (1, 2, 7, 24):
        trace = Trace(kind, ReplaySpec(window, 1, activation_dtype=F32, ring_capacity=25), storage="float64")
        for _ in range(24):
            trace.step(1, force=False, pads=False, accepted=1)
        trace.check()
        outputs.append(torch.cat(trace.outputs["got"]))
    for other in outputs[1:]:
        assert relative_error(other, outputs[0]) <= 2 * trace.errors()[1]


def decays(kind: Recurrence, which: str) -> dict[str, Any]:
    """Fields that make the decays extreme: "none" is exp(0), "bound" the lower bound, "mixed" both and all between."""
    level = {"none": -1e4, "bound": 1e4}.get(which)
    if kind == "kda":
        g = torch.linspace(-60, 60, HV * K).view(HV, K) if level is None else torch.full((HV, K), level)
        if which == "unbounded":
            return {"dt_bias": torch.linspace(-4, 30, HV * K).view(HV, K), "A_log": torch.tensor([0.0, 3, 6, 80])}
        return {"dt_bias": g, "lower_bound": -5.0}
    heads = torch.tensor([-1e4, -1.0, 3.0, 1e4]) if level is None else torch.full((HV,), level)
    if which != "unbounded":
        return {"dt_bias": heads}
    steep = torch.tensor([0.0, 3.0, 6.0, 80.0])
    return {"A": -steep.exp()} if kind == "mamba2" else {"A_log": steep}


@each_recurrence
@pytest.mark.parametrize("which", ["none", "bound", "mixed", "unbounded"])
@pytest.mark.parametrize("window", [5, 64])
def test_extreme_decays(kind: Recurrence, which: str, window: int) -> None:
    def draw(*arguments: Any) -> Inputs:
        return make_inputs(*arguments, **decays(kind, which))

    trace = Trace(kind, ReplaySpec(window, 4, activation_dtype=F32), compute=F32, draw=draw)
    for i in range(2 * window // 5 + 8):
        trace.step(1 + i % 4, force=False, pads=False)
    assert torch.isfinite(torch.cat(trace.outputs["got"])).all()
    trace.check()


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_an_infinite_decay_forgets_everything_before_it(kind: Recurrence) -> None:
    def draw(*arguments: Any) -> Inputs:
        inputs = make_inputs(*arguments, A_log=torch.full((HV,), 88.0))
        return inputs._replace(**{name: getattr(inputs, name) + 50 for name in ("a", "g") if hasattr(inputs, name)})

    trace = Trace(kind, ReplaySpec(5, 4, activation_dtype=F32), compute=F32, draw=draw)
    for i in range(8):
        trace.step(1 + i % 4, pads=False)
    live = trace.cursors.num_committed.nonzero().flatten()[0]
    assert trace.pool.decay[live][:, trace.cursors.ring_start[live]].max() == -torch.inf
    trace.check()


PERTURBATIONS: dict[str, Callable[[Pool, Cursors, int, int], None]] = {
    "value": lambda pool, cursors, slot, row: pool.value[slot, 1, row].mul_(1.001),
    "key": lambda pool, cursors, slot, row: pool.key[slot, 1, row].mul_(1.001),
    "decay": lambda pool, cursors, slot, row: pool.decay[slot, 1, row].mul_(1.001),
    "checkpoint": lambda pool, cursors, slot, row: pool.checkpoint[slot, 2, 1].mul_(1.001),
    "ring_start": lambda pool, cursors, slot, row: cursors.ring_start[slot].add_(1),
    "num_committed": lambda pool, cursors, slot, row: cursors.num_committed[slot].sub_(1),
}


@each_recurrence
@pytest.mark.parametrize("what", ["nothing", *PERTURBATIONS])
def test_the_bound_catches_one_wrong_record(kind: Recurrence, what: str) -> None:
    trace = Trace(kind, ReplaySpec(5, 2, activation_dtype=F32), compute=F32)
    trace.step(2, force=False, pads=False, accepted=2)
    trace.step(1, force=False, pads=False, accepted=1)
    trace.check()
    if what != "nothing":
        newest = (int(trace.cursors.ring_start[3]) + 2) % trace.spec.ring_capacity
        PERTURBATIONS[what](trace.pool, trace.cursors, 3, newest)
    trace.step(2, force=False, pads=False, accepted=2)
    trace.step(2, force=False, pads=False, accepted=2)
    error, bound = trace.errors()
    assert (error <= bound) == (what == "nothing")


def committed(kind: Recurrence, spec: ReplaySpec, counts: list[int]) -> tuple[Pool, Cursors, dict[torch.dtype, Tensor]]:
    """A pool whose slots hold the given numbers of records, and the state each stands for in two precisions."""
    generator = torch.Generator().manual_seed(0)
    pool, cursors = make_pool(layer_of(kind), spec, len(counts)), make_cursors(spec, len(counts))
    pool.checkpoint.copy_(torch.randn(pool.checkpoint.shape, generator=generator))
    cursors.ring_start.copy_(torch.randint(spec.ring_capacity, (len(counts),), generator=generator))
    states, slots = {dtype: pool.checkpoint.to(dtype, copy=True) for dtype in (F32, F64)}, torch.arange(len(counts))
    for done in range(max(counts)):
        inputs = make_inputs(kind, len(counts), 1, generator)
        live = torch.tensor(counts) > done
        replay.step(pool, cursors, inputs, cache_indices=slots.where(live, -1), dtype=F64)
        replay.commit(cursors, cache_indices=slots.where(live, -1))
        for dtype, state in states.items():
            after = recurrence.run(inputs, state, dtype)[1]
            states[dtype] = after.where(live[:, None, None, None], state)
    assert cursors.num_committed.tolist() == counts
    return pool, cursors, states


def clone(pool: Pool) -> Pool:
    """A copy with the same strides and the same bytes, NaN included."""
    return replace(pool, **{n: getattr(pool, n).clone(memory_format=torch.preserve_format) for n in NAMES})


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def logical_rows(cursors: Cursors) -> Tensor:
    """[slots, R]: the logical number of each physical ring row, 0 for the oldest pending record."""
    ring = torch.arange(cursors.replay.ring_capacity)
    return (ring - cursors.ring_start[:, None]) % cursors.replay.ring_capacity


def pending_rows(cursors: Cursors, extra: int = 0) -> Tensor:
    """[slots, R] bool: the physical rows of the pending records and of `extra` records after them."""
    return logical_rows(cursors) < cursors.num_committed[:, None] + extra


@each_recurrence
@pytest.mark.parametrize("poison", POISONS)
def test_what_is_not_pending_never_reaches_an_output(kind: Recurrence, poison: float) -> None:
    spec = ReplaySpec(5, 2, activation_dtype=F32, ring_capacity=9)
    pool, cursors, _ = committed(kind, spec, [0, 1, 3, 5, 4, 2])
    dirty, indices = clone(pool), torch.tensor([4, -1, 0, 3, 2, -1])  # slots 1 and 5 are unused
    for ring in (dirty.value, dirty.key, dirty.decay):
        live = pending_rows(cursors)[:, None].expand(ring.shape[:3])
        ring.copy_(ring.where(live[..., None] if ring.dim() == 4 else live, poison))
        ring[[1, 5]] = poison
    dirty.checkpoint[[1, 5]] = poison
    inputs = make_inputs(kind, 6, 2, torch.Generator().manual_seed(1))
    padding = (indices < 0).nonzero().flatten()
    bad = per_token(inputs, lambda x: x.index_fill(0, padding, poison))
    force = torch.tensor([True, True, True, False, False, True])
    clean_out = replay.step(pool, cursors, inputs, cache_indices=indices, force_fold=force)
    dirty_out = replay.step(dirty, cursors, bad, cache_indices=indices, force_fold=force)
    assert torch.isfinite(clean_out).all()
    assert torch.equal(clean_out, dirty_out)
    assert torch.equal(pool.checkpoint[indices[indices >= 0]], dirty.checkpoint[indices[indices >= 0]])

    # Poison in a pending record does reach the output of its row.
    dirty.value[4, :, int(cursors.ring_start[4])] = poison
    reached = replay.step(dirty, cursors, inputs, cache_indices=indices)
    assert not torch.equal(reached[0], replay.step(pool, cursors, inputs, cache_indices=indices)[0])


@each_recurrence
@pytest.mark.parametrize("layout", ["record_major", "head_major"])
def test_a_step_writes_its_records_and_the_folded_checkpoints_only(
    kind: Recurrence, layout: Literal["record_major", "head_major"]
) -> None:
    spec = ReplaySpec(5, 2, activation_dtype=F32, ring_capacity=9)
    filled, cursors, _ = committed(kind, spec, [0, 1, 3, 4, 5, 2, 5])
    pool = make_pool(filled.layer, spec, 7, ring_layout=layout)
    for name in NAMES:
        getattr(pool, name).copy_(getattr(filled, name))
    pool.checkpoint[:, 0] = -0.0  # a fold of nothing would give +0.0
    before, kept = clone(pool), (cursors.ring_start.clone(), cursors.num_committed.clone())
    indices = torch.tensor([3, -1, 0, 1, 4, -1, 2])
    force = torch.tensor([False, True, True, False, False, True, True])  # of slots 3, pad, 0, 1, 4, pad, 2
    replay.step(pool, cursors, make_inputs(kind, 7, 2, torch.Generator()), cache_indices=indices, force_fold=force)
    changed = [not same_bytes(pool.checkpoint[slot], before.checkpoint[slot]) for slot in range(7)]
    assert changed == [False, False, True, True, True, False, False]
    assert torch.equal(cursors.ring_start, kept[0])
    assert torch.equal(cursors.num_committed, kept[1])
    appended = pending_rows(cursors, 2) & ~pending_rows(cursors)
    appended[[5, 6]] = False
    for name in NAMES[1:]:
        new, old = (getattr(p, name).transpose(1, 2) for p in (pool, before))
        assert same_bytes(new[~appended], old[~appended])
        rows_differ = (new[appended] != old[appended]).flatten(1).any(1)
        assert rows_differ.all()


@each_recurrence
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_padding_rows_may_repeat_and_any_slot_may_mean_padding(kind: Recurrence, index_dtype: torch.dtype) -> None:
    pool, cursors, _ = committed(kind, ReplaySpec(4, 1, activation_dtype=F32), [2, 3, 4])
    before, inputs = clone(pool), make_inputs(kind, 4, 1, torch.Generator())
    indices = torch.tensor([1, 1, -7, 2], dtype=index_dtype)
    out = replay.step(pool, cursors, inputs, cache_indices=indices, pad_slot_id=1)
    replay.commit(cursors, cache_indices=indices, pad_slot_id=1)
    assert (out[:3] == 0).all()
    assert (out[3] != 0).all()
    assert cursors.num_committed.tolist() == [2, 3, 1]
    for name in NAMES:
        assert same_bytes(getattr(pool, name)[:2], getattr(before, name)[:2])
    nobody = torch.full((4,), -1, dtype=index_dtype)
    assert (replay.step(pool, cursors, inputs, cache_indices=nobody) == 0).all()


@each_recurrence
def test_accepting_nothing_leaves_the_step_to_be_taken_again(kind: Recurrence) -> None:
    pool, cursors, _ = committed(kind, ReplaySpec(6, 3, activation_dtype=F32), [0, 2, 3])
    inputs, slots = make_inputs(kind, 3, 3, torch.Generator()), torch.arange(3)
    outs = []
    for _ in range(2):
        outs.append(replay.step(pool, cursors, inputs, cache_indices=slots))
        kept = cursors.ring_start.clone(), cursors.num_committed.clone()
        replay.commit(cursors, cache_indices=slots, num_draft=3, num_accepted=torch.zeros(3, dtype=torch.int32))
        assert torch.equal(kept[0], cursors.ring_start)
        assert torch.equal(kept[1], cursors.num_committed)
    assert torch.equal(*outs)


@each_recurrence
def test_accepting_nothing_after_a_fold_empties_the_window(kind: Recurrence) -> None:
    pool, cursors, states = committed(kind, ReplaySpec(4, 2, activation_dtype=F32), [3, 4])
    start = cursors.ring_start.clone()
    slots, none = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    replay.step(pool, cursors, make_inputs(kind, 2, 2, torch.Generator()), cache_indices=slots)
    replay.commit(cursors, cache_indices=slots, num_draft=2, num_accepted=none)
    assert cursors.num_committed.tolist() == [0, 0]
    assert torch.equal(cursors.ring_start, (start + torch.tensor([3, 4])) % 6)
    bound = FACTOR * relative_error(states[F32], states[F64])
    assert relative_error(pool.checkpoint, states[F64]) <= bound


@each_recurrence
@pytest.mark.parametrize("accepted", [1, 2])
def test_rejected_drafts_leave_no_trace(kind: Recurrence, accepted: int) -> None:
    """Two runs whose drafts differ from the second token on: the same later output, unless the second is accepted."""
    outs = []
    for seed in (1, 2):
        pool, cursors, _ = committed(kind, ReplaySpec(6, 3, activation_dtype=F32), [1, 3, 5])
        first = make_inputs(kind, 3, 3, torch.Generator().manual_seed(0))
        other = make_inputs(kind, 3, 3, torch.Generator().manual_seed(seed))
        drafts = per_token(first, lambda x: x.clone())
        for mine, theirs in zip(drafts, other, strict=True):
            if isinstance(mine, Tensor) and mine.dim() > 2:
                mine[:, 1:] = theirs[:, 1:]
        slots = torch.arange(3)
        replay.step(pool, cursors, drafts, cache_indices=slots)
        replay.commit(cursors, cache_indices=slots, num_draft=3, num_accepted=torch.full((3,), accepted))
        later = make_inputs(kind, 3, 2, torch.Generator().manual_seed(3))
        outs.append(replay.step(pool, cursors, later, cache_indices=slots))
    assert torch.equal(*outs) == (accepted == 1)


@each_recurrence
def test_fold_gives_the_state_after_any_number_of_records(kind: Recurrence) -> None:
    pool, cursors, states = committed(kind, ReplaySpec(5, 1, activation_dtype=F32), [0, 1, 2, 3, 4, 5])
    cursors.num_committed.fill_(5)  # the records behind those of each slot are garbage: `count` must keep them out
    for ring in pool.tensors[1:]:
        live = (logical_rows(cursors) < torch.arange(6)[:, None])[:, None].expand(ring.shape[:3])
        ring.copy_(ring.where(live[..., None] if ring.dim() == 4 else live, float("nan")))
    A = make_inputs(kind, 1, 1, torch.Generator()).A if kind == "mamba2" else None
    counts, slots = torch.arange(6), torch.arange(6)
    before = clone(pool)
    folded = replay.fold(pool, cursors, slots, counts, A=A, dtype=F32)
    bound = FACTOR * relative_error(states[F32], states[F64])
    assert torch.equal(folded[0], pool.checkpoint[0])
    assert relative_error(folded, states[F64]) <= bound
    assert all(same_bytes(getattr(pool, name), getattr(before, name)) for name in NAMES)
    fewer = replay.fold(pool, cursors, slots, (counts - 1).clamp(min=0), A=A, dtype=F32)
    assert relative_error(fewer, states[F64]) > bound


def test_a_mamba2_fold_needs_its_rates() -> None:
    pool, cursors, _ = committed("mamba2", ReplaySpec(2, 1, activation_dtype=F32), [1])
    with pytest.raises(ValueError, match="A: expected a"):
        replay.fold(pool, cursors, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), dtype=F32)


@each_recurrence
def test_records_are_rounded_where_stored_and_nowhere_else(kind: Recurrence) -> None:
    """bfloat16 records against a recurrence that rounds u and k after each output; the rest stays in float64."""
    spec = ReplaySpec(5, 1, activation_dtype=torch.bfloat16)
    pool, cursors = make_pool(layer_of(kind), spec, 2), make_cursors(spec, 2)
    pool = as_float64(pool)
    pool.value, pool.key = pool.value.bfloat16(), pool.key.bfloat16()
    generator, slots = torch.Generator().manual_seed(0), torch.arange(2)
    state = torch.zeros(2, HV, V, K, dtype=F64)
    got, expected, plain = [], [], {F32: ([], state.float()), F64: ([], state)}
    for _ in range(12):
        inputs = make_inputs(kind, 2, 1, generator)
        out = torch.empty(2, 1, HV, V, dtype=F64)
        got.append(replay.step(pool, cursors, inputs, cache_indices=slots, out=out, dtype=F64))
        replay.commit(cursors, cache_indices=slots)
        token = recurrence.tokens(inputs, F64)
        expected.append(recurrence.run(inputs, state)[0])
        key = token.key[:, 0].repeat_interleave(HV // HK, 1)
        state = state * token.log_decay[:, 0, :, None].exp()
        value = token.value[:, 0]
        if token.delta_rule:
            value = token.strength[:, 0, :, None] * (value - torch.einsum("rhvk,rhk->rhv", state, key))
        stored = value.bfloat16().double() * (1 if token.delta_rule else token.strength[:, 0, :, None])
        state = state + stored[..., None] * key.bfloat16().double()[..., None, :]
        for dtype, (outs, exact) in plain.items():
            out, exact = recurrence.run(inputs, exact, dtype)
            plain[dtype] = ([*outs, out], exact)
    truth, unrounded = torch.cat(expected), torch.cat(plain[F64][0])
    bound = FACTOR * PRECISION_RATIO * relative_error(torch.cat(plain[F32][0]), unrounded)
    assert relative_error(torch.cat(got), truth) <= bound
    assert relative_error(unrounded, truth) > bound


def test_a_float32_checkpoint_is_not_rounded_to_the_activation_dtype() -> None:
    """64 folds of bfloat16 records, which Mamba-2 stores exactly when its inputs are bfloat16."""

    def draw(*arguments: Any) -> Inputs:
        return per_token(make_inputs(*arguments), lambda x: x.bfloat16())

    trace = Trace("mamba2", ReplaySpec(2, 1), compute=F32, draw=draw)
    for _ in range(128):
        trace.step(1, force=False, pads=False, accepted=1)
    trace.check()


def test_outputs_come_in_the_activation_dtype_or_where_asked() -> None:
    pool, cursors, _ = committed("gdn", ReplaySpec(4, 1), [2, 2])
    inputs, slots = make_inputs("gdn", 2, 1, torch.Generator()), torch.arange(2)
    plain = replay.step(pool, cursors, inputs, cache_indices=slots)
    wide = torch.empty(2, 2, HV, V)[:, ::2]
    assert replay.step(pool, cursors, inputs, cache_indices=slots, out=wide) is wide
    assert plain.dtype is torch.bfloat16
    assert torch.equal(plain, wide.bfloat16())
    assert not torch.equal(plain.float(), wide)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_commit_moves_the_cursors_by_the_rule(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 8))
    draft = data.draw(st.integers(1, min(4, window)))
    spec = ReplaySpec(window, draft, ring_capacity=window + draft + data.draw(st.integers(0, 3)))
    cursors, slots = make_cursors(spec, 5), data.draw(st.permutations([-1, 0, 1, 2, 3, 4]))
    expected = {}
    force, accepted = [], []
    for slot in slots:
        start = data.draw(st.integers(0, spec.ring_capacity - 1))
        count = data.draw(st.integers(0, window))
        force.append(data.draw(st.booleans()))
        accepted.append(data.draw(st.integers(0, draft)))
        if slot < 0:
            continue
        cursors.ring_start[slot], cursors.num_committed[slot] = start, count
        folded = count if count + draft > window or force[-1] else 0
        expected[slot] = ((start + folded) % spec.ring_capacity, count - folded + accepted[-1])
    replay.commit(
        cursors,
        cache_indices=torch.tensor(slots),
        num_draft=draft,
        num_accepted=torch.tensor(accepted),
        force_fold=torch.tensor(force),
    )
    for slot, (start, count) in expected.items():
        assert (cursors.ring_start[slot], cursors.num_committed[slot]) == (start, count)
        assert count <= window
