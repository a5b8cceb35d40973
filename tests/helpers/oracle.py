"""Random steps of `case.T` tokens a row, of any recurrence, what each must give in float64, and what a run got wrong.

A `Scene` says how many records each row has pending; `Scene.on` makes its tensors, the same numbers on every device.
All that no output may depend on is NaN from the start: ring rows that are not pending, slots that no row uses, inputs
of padding rows. Inputs are drawn in the dtype that they are passed in, so float64 sees exactly what a kernel sees.

`mistakes` runs the public step and compares everything that it may write; on CPU tensors that step is the torch twin,
so what runs here without a GPU shows that the comparison accepts a right step and, with `before` or `after`, that it
refuses a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import replayssm
from cute_kernels.configs import RingLayout
from replayssm import Cursors, Pool, ReplaySpec
from replayssm.pool import READ_PARTS, record_shapes
from replayssm.reference import recurrence, storage
from replayssm.reference import replay as reference
from tests.helpers.cases import Case
from tests.helpers.draw import (
    ALL,
    BARE,
    BASE,
    BASES,
    F32,
    F64,
    AnyGiven,
    Given,
    make_inputs,
    part,
    per_token,
    random_pool,
    tensors_of,
    tokens_of,
)
from tests.helpers.tolerance import excess, same_bytes

__all__ = ["ALL", "BARE", "BASE", "BASES", "F32", "F64", "NAMES", "PAD", "Given", "Scene", "Trace", "Work",
           "busy_counts", "busy_scene", "first_rows", "make_inputs", "mistakes", "packed", "per_token", "ragged",
           "random_pool"]  # fmt: skip
PAD = -1  # in `Scene.counts`: the row is padding
NAMES = ("checkpoint", "value", "key", "decay")


@dataclass(frozen=True)
class Scene:
    """One step.

    Args:
        case: geometry, window and dtypes.
        counts: pending records of each row's slot, 0 to the window, or PAD.
        forced: rows that are asked to fold; None passes no mask at all.
        given: the optional inputs; all that the recurrence has when None.
        starts: ring start of each row's slot; random when None.
        ring_layout: "strided" makes rings that are packed neither way.
        capacity: ring rows; one more than needed when 0.
        index_dtype: of `cache_indices`.
        seed: of everything drawn.
        lengths: tokens of each row, 0 to `case.T`, with `cu_seqlens`; None gives every row `case.T` without it.
        read_dtype: of read copies, made of the checkpoints; None for none.
        rounding: of folded states; slots then have random seeds and numbers of folds.
    """

    case: Case
    counts: tuple[int, ...]
    forced: tuple[int, ...] | None = ()
    given: AnyGiven | None = None
    starts: tuple[int, ...] | None = None
    ring_layout: RingLayout = "record_major"
    capacity: int = 0
    index_dtype: torch.dtype = torch.int64
    seed: int = 0
    lengths: tuple[int, ...] | None = None
    read_dtype: Any = None
    rounding: Any = "nearest"

    @property
    def replay(self) -> ReplaySpec:
        capacity = self.capacity or self.case.window + self.case.T + 1
        how = {"read_dtype": self.read_dtype, "rounding": self.rounding}
        return replace(self.case.replay, ring_capacity=capacity, **how)

    def on(self, device: torch.device | str) -> Work:
        """The tensors of the step, with two slots that no row uses."""
        generator, replay = torch.Generator().manual_seed(self.seed), self.replay
        live = torch.tensor([count != PAD for count in self.counts])
        slots = int(live.sum()) + 2
        indices = torch.full((len(self.counts),), -1)
        indices[live] = torch.randperm(slots, generator=generator)[: slots - 2]
        start = torch.full((slots,), torch.iinfo(torch.int32).min, dtype=torch.int32)
        count = start.clone()
        drawn = torch.randint(replay.ring_capacity, (len(self.counts),), generator=generator)
        chosen = drawn if self.starts is None else torch.tensor(self.starts)
        start[indices[live]] = chosen[live].int()
        count[indices[live]] = torch.tensor(self.counts)[live].int()
        pool = random_pool(self.case.layer, replay, start, count, generator, self.ring_layout)
        storage.write_copy(pool, torch.arange(slots))
        inputs = make_inputs(self.case, len(self.counts), generator, self.given)
        inputs = per_token(inputs, lambda x: x.masked_fill(~live.view(-1, *[1] * (x.dim() - 1)), float("nan")))
        if self.lengths is not None:
            inputs = packed(inputs, torch.tensor(self.lengths))
        force = None
        if self.forced is not None:
            force = torch.zeros(len(self.counts), dtype=torch.bool)
            force[list(self.forced)] = True
        cursors = drawn_cursors([pool], start, count, generator)
        work = Work(pool, cursors, inputs, indices.to(self.index_dtype), force)
        return work.to(torch.device(device))


@dataclass
class Work:
    """The tensors of one step, as `replayssm.step` takes them."""

    pool: Pool
    cursors: Cursors
    inputs: Any  # of the layer's type
    cache_indices: Tensor
    force_fold: Tensor | None = None
    pad_slot_id: int = -1

    def to(self, device: torch.device) -> Work:
        """The same step in memory of its own, with the same strides, on a device."""
        names = record_shapes(self.pool.layer, self.pool.replay)
        tensors = {name: like(getattr(self.pool, name), device) for name in names}
        inputs = self.inputs._replace(**{n: like(t, device) for n, t in tensors_of(self.inputs).items()})
        return replace(
            self,
            pool=Pool(self.pool.layer, self.pool.replay, **tensors),
            cursors=copy_cursors(self.cursors, device),
            inputs=inputs,
            cache_indices=like(self.cache_indices, device),
            force_fold=None if self.force_fold is None else like(self.force_fold, device),
        )

    def clone(self) -> Work:
        return self.to(self.pool.device)

    def step(self, **options: Any) -> Tensor:
        """The public verb on these tensors; `options` are added to its arguments."""
        arguments = {"cache_indices": self.cache_indices, "force_fold": self.force_fold}
        arguments |= {"pad_slot_id": self.pad_slot_id, **options}
        return replayssm.step(self.pool, self.cursors, self.inputs, **arguments)

    def commit(self, **options: Any) -> None:
        arguments = {"cache_indices": self.cache_indices, "force_fold": self.force_fold}
        ragged = self.inputs.cu_seqlens
        arguments |= {"num_draft": self.num_draft} if ragged is None else {"cu_seqlens": ragged}
        self.run_commit(**(arguments | {"pad_slot_id": self.pad_slot_id, **options}))

    def run_commit(self, **arguments: Any) -> None:
        replayssm.commit(self.cursors, **arguments)

    @property
    def num_draft(self) -> int:
        """T, the tokens a row of the inputs, or the most that a row may have."""
        ragged = self.inputs.cu_seqlens is not None
        return self.pool.replay.max_draft if ragged else part(self.inputs, "value").shape[1]

    @property
    def lengths(self) -> Tensor:
        """[rows] int64: tokens of each row."""
        if self.inputs.cu_seqlens is None:
            return torch.full_like(self.cache_indices, self.num_draft, dtype=torch.int64)
        return self.inputs.cu_seqlens.diff().long()

    @property
    def live(self) -> Tensor:
        """[rows] bool: rows that are no padding and have tokens."""
        return (self.cache_indices >= 0) & (self.cache_indices != self.pad_slot_id) & (self.lengths > 0)

    @property
    def present(self) -> Tensor:
        """[live rows, T] bool: which of T tokens a row has."""
        return torch.arange(self.num_draft, device=self.cache_indices.device) < self.lengths[self.live][:, None]

    def of_tokens(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """From a tensor shaped as the output: what the tokens of live rows have, and what the others have."""
        live = self.live.repeat_interleave(self.lengths)
        flat = out.flatten(0, 1)[: len(live)]
        return flat[live], flat[~live]

    def fold_counts(self) -> Tensor:
        """[live rows] int64: records that this step folds, by the rule of the docstrings."""
        count = self.cursors.num_committed[self.slots].long()
        folds = count + self.lengths[self.live] > self.pool.replay.window
        if self.force_fold is not None:
            folds |= self.force_fold[self.live]
        return count.where(folds, 0)

    @property
    def slots(self) -> Tensor:
        """[live rows] int64."""
        return self.cache_indices[self.live].long()

    def places(self) -> Tensor:
        """[live rows, T] int64: the ring rows that this step appends to."""
        first = (self.cursors.ring_start[self.slots] + self.cursors.num_committed[self.slots]).long()
        return (first[:, None] + torch.arange(self.num_draft, device=first.device)) % self.pool.replay.ring_capacity

    def written(self) -> list[Tensor]:
        """Every tensor that a verb may write."""
        return [*self.pool.tensors, *(getattr(self.cursors, name) for name in self.cursors.names)]


def drawn_cursors(pools: list[Pool], start: Tensor, count: Tensor, generator: torch.Generator) -> Cursors:
    """Cursors of these pools; with stochastic rounding random numbers of folds, and random seeds in the pools."""
    replay = pools[0].replay
    if replay.rounding == "nearest":
        return Cursors(replay, start, count)
    for pool in pools:
        assert pool.seed is not None
        pool.seed.copy_(torch.randint(-(2**63), 2**63 - 1, pool.seed.shape, generator=generator))
    folds = torch.randint(-(2**31), 2**31 - 1, start.shape, generator=generator, dtype=torch.int32)
    return Cursors(replay, start, count, folds.to(start.device))


def unrounded(work: Work) -> Work:
    """The same step with a float32 checkpoint: what it folds is what the step itself rounds."""
    spec = replace(work.pool.replay, checkpoint_dtype=F32, rounding="nearest")
    own = work.clone()
    pool = replace(own.pool, replay=spec, checkpoint=own.pool.checkpoint.float(), seed=None)
    return replace(own, pool=pool, cursors=Cursors(spec, own.cursors.ring_start, own.cursors.num_committed))


def like(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides, gaps included."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = torch.full((extent,), 0, dtype=tensor.dtype, device=device)
    return memory.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def copy_cursors(cursors: Cursors, device: torch.device | None = None) -> Cursors:
    """Cursors of the same values in memory of their own."""
    tensors = (getattr(cursors, name) for name in cursors.names)
    return Cursors(cursors.replay, *(t.to(device or t.device, copy=True) for t in tensors))


Change = Callable[[Work], object]


def mistakes(
    work: Work,
    *,
    before: Change | None = None,
    after: Callable[[Work, Tensor], object] | None = None,
    **options: Any,
) -> list[str]:
    """Run one step in place and say what is wrong with it; an empty list means nothing.

    What is right is one step of the replay form in float64, and its error in float32 the measure.

    Args:
        before: a change to make between computing what is right and running the step; for teeth.
        after: a change to make to the work and the output once the step has run; for teeth.
        options: for `Work.step`.
    """
    given, exact, twin = work.clone(), in_float64(work), work.clone()
    folding = work.slots[work.fold_counts() > 0]
    want = torch.empty(part(work.inputs, "value").shape, dtype=F64, device=work.pool.device)
    _reference_step(exact, want, F64)
    baseline = _reference_step(twin, None, F32)
    if before is not None:
        before(work)
    out = work.step(**options)
    if after is not None:
        after(work, out)

    got, padding = given.of_tokens(out)
    findings = [] if bool((padding == 0).all()) else ["output: padding rows are not zero"]
    findings += excess("output", got, *(given.of_tokens(right)[0] for right in (baseline, want)), keep=(0, 1))
    states = [one.pool.checkpoint[folding] for one in (work, twin, exact)]
    findings += excess("checkpoint", *states, keep=(0, 1))
    storage.write_copy(_with_state(given.pool, work.pool.checkpoint), folding)
    findings += _appended((work, twin, exact), given)
    given.pool.checkpoint[folding] = states[0]
    for name in (*NAMES, *work.pool.state_names[1:]):
        if not same_bytes(getattr(work.pool, name), getattr(given.pool, name)):
            findings.append(f"{name}: bytes beside the appended records and the folded states changed, or a wrong copy")
    for name in ("ring_start", "num_committed"):
        if not torch.equal(getattr(work.cursors, name), getattr(given.cursors, name)):
            findings.append(f"{name}: a step must leave the cursors")
    return findings


def _reference_step(work: Work, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    return reference.step(
        work.pool,
        work.cursors,
        work.inputs,
        cache_indices=work.cache_indices,
        out=out,
        force_fold=work.force_fold,
        pad_slot_id=work.pad_slot_id,
        dtype=dtype,
    )


def in_float64(work: Work) -> Work:
    """The same step with float64 memory, which a real pool refuses: nothing is rounded where it is stored."""
    pool: Any = SimpleNamespace(layer=work.pool.layer, replay=work.pool.replay)
    vars(pool).update({name: getattr(work.pool, name).double() for name in NAMES})
    for name, held in zip(READ_PARTS, work.pool.read_parts, strict=True):
        setattr(pool, name, None if held is None else held.clone())
    return replace(work, pool=pool)


def _with_state(pool: Pool, checkpoint: Tensor) -> Any:
    """The same memory under another checkpoint."""
    return SimpleNamespace(
        **{**{name: getattr(pool, name) for name in ("replay", *READ_PARTS)}, "checkpoint": checkpoint}
    )


def _appended(works: tuple[Work, Work, Work], given: Work) -> list[str]:
    """The appended records of (the run, the twin, float64): bit for bit where torch errs nothing, as where an input is
    the record, else within the bound. Copies them into `given`."""
    findings, present, places = list[str](), given.present, given.places()
    slots, places = given.slots[:, None].expand_as(places)[present], places[present]
    for name in NAMES[1:]:
        got, baseline, exact = (getattr(work.pool, name)[slots, :, places] for work in works)
        if not torch.equal(baseline.double(), exact):
            findings += excess(f"{name}: the appended record", got, baseline, exact, keep=(0, 1)[: got.dim() - 1])
        elif not same_bytes(got, baseline):
            findings.append(f"{name}: the appended record is not the input")
        getattr(given.pool, name)[slots, :, places] = got
    return findings


def ragged(scene: Scene) -> Scene:
    """The same step with 0 to T tokens a row."""
    return replace(scene, lengths=tuple((i + 1) % (scene.case.T + 1) for i in range(len(scene.counts))))


def first_rows(work: Work, count: int) -> Any:
    """The step of the first rows of a ragged one, over the same pool and cursors."""
    ends, force = work.inputs.cu_seqlens[: count + 1].clone(), work.force_fold
    inputs = per_token(work.inputs, lambda x: x[:, : int(ends[-1])].clone())._replace(cu_seqlens=ends)
    force = None if force is None else force[:count]
    return replace(work, inputs=inputs, cache_indices=work.cache_indices[:count].clone(), force_fold=force)


def packed(inputs: Any, lengths: Tensor) -> Any:
    """The first `lengths` tokens of each row one after the other, as `cu_seqlens` has them, then two of NaN."""
    present = torch.arange(part(inputs, "value").shape[1]) < lengths[:, None]
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()

    def pack(t: Tensor) -> Tensor:
        return torch.cat([t[present], torch.full((2, *t.shape[2:]), float("nan"), dtype=t.dtype)])[None]

    return per_token(inputs, pack)._replace(cu_seqlens=ends)


def busy_counts(window: int, num_draft: int = 1) -> tuple[int, ...]:
    """Rows that read with few and with many records, rows that fold a full window and one that only just overflows,
    and padding, mixed. Where a draft fills the window, only rows without records read."""
    fit = window - num_draft  # the most records with which a row reads
    half = min(window // 2, fit)
    return (0, window, PAD, fit, half, fit + 1, min(1, fit), PAD, half or window // 2)


def busy_scene(case: Case, **changes: Any) -> Scene:
    """`busy_counts` with a forced row that has records (the last), one without (the first) and a padding row (2)."""
    return Scene(case, busy_counts(case.window, case.T), **({"forced": (0, 2, 8)} | changes))


class Trace:
    """A pool driven over random steps by the public verbs, beside the float64 recurrence and the float32 twin.

    The slots start with random states and pending records. Each step takes the slots in random order, makes some rows
    padding (with NaN inputs and a senseless `num_accepted`), forces some to fold and accepts 0 to T tokens of each, or
    with `ragged` of the 0 to T tokens that the row has. Outputs are those of all T tokens. "torch" among them, and
    `rounded` beside `state`, are the recurrence in float32: what the twin itself may err where memory is float32.
    """

    def __init__(
        self, case: Case, device: torch.device, *, slots: int = 6, seed: int = 0, ragged: bool = False
    ) -> None:
        counts = tuple(case.window * i // (slots - 1) for i in range(slots))
        work = Scene(case, counts, seed=seed).on(device)
        twin = work.clone()
        self.case, self.work, self.twin, self.slots, self.ragged = case, work, twin, work.slots, ragged
        self.generator = torch.Generator().manual_seed(seed)
        self.state = self.standing_for(work)
        self.rounded = self.state.float()
        self.outputs: dict[str, list[Tensor]] = {"got": [], "exact": [], "twin": [], "torch": []}

    def standing_for(self, work: Work) -> Tensor:
        """The float64 state of every slot that its checkpoint and records stand for."""
        count = work.cursors.num_committed[self.slots].long()
        A = getattr(work.inputs, "A", None)
        return reference.fold(work.pool, work.cursors, self.slots, count, A=A, dtype=F64)

    def _draw(self, one_in: int) -> Tensor:
        return torch.randint(one_in, (len(self.slots),), generator=self.generator) == 0

    def step(self) -> None:
        """One model step: `step`, then `commit`."""
        rows, device, num_draft = len(self.slots), self.slots.device, self.case.T
        order = torch.randperm(rows, generator=self.generator)
        padding, forced = self._draw(4), self._draw(8)
        accepted = torch.randint(num_draft + 2, (rows,), generator=self.generator).clamp(max=num_draft).int()
        inputs = make_inputs(self.case, rows, self.generator)
        inputs = per_token(inputs, lambda x: x.masked_fill(padding.view(-1, *[1] * (x.dim() - 1)), float("nan")))
        lengths = torch.full((rows,), num_draft)
        if self.ragged:
            lengths = torch.randint(num_draft + 1, (rows,), generator=self.generator)
            accepted = accepted.minimum(lengths).int()
        given = packed(inputs, lengths) if self.ragged else inputs
        indices = self.slots[order.to(device)].masked_fill(padding.to(device), -1)
        accepted = accepted.masked_fill(padding | (lengths == 0), torch.iinfo(torch.int32).max).to(device)
        drawn = {name: given._asdict()[name] for name in (*tokens_of(given), "cu_seqlens")}
        given = self.work.inputs._replace(**{n: None if t is None else t.to(device) for n, t in drawn.items()})
        for work in (self.work, self.twin):
            work.inputs, work.cache_indices, work.force_fold = given, indices, forced.to(device)
        live, present = self.work.live, self.work.present
        for name, out in (("got", self.work.step()), ("twin", _reference_step(self.twin, None, F32))):
            of_rows = torch.zeros((*present.shape, *out.shape[2:]), dtype=out.dtype, device=device)
            of_rows[present] = self.work.of_tokens(out)[0]
            self.outputs[name].append(of_rows)
        where = order.to(device)[live]
        dense = {name: t.to(device)[live] for name, t in tokens_of(inputs).items()}
        tokens = self.work.inputs._replace(**dense, cu_seqlens=None)
        for name, states, dtype in (("exact", self.state, F64), ("torch", self.rounded, F32)):
            out = _follow(tokens, states, where, accepted[live], dtype)
            self.outputs[name].append(out.where(present[:, :, None, None], 0))
        self.work.commit(num_accepted=accepted)
        reference.commit(
            self.twin.cursors,
            cache_indices=indices,
            num_draft=num_draft,
            cu_seqlens=given.cu_seqlens,
            num_accepted=accepted,
            force_fold=self.work.force_fold,
        )

    def mistakes(self) -> list[str]:
        """What is wrong with all outputs so far, with the state that the slots stand for, and with the cursors."""
        got, exact, twin = (torch.cat(self.outputs[name]) for name in ("got", "exact", "twin"))  # [.., T, HV, V]
        findings = excess("output", got, twin, exact, keep=(1, 2))
        states = self.standing_for(self.work), self.standing_for(self.twin)
        stored = [self.case.checkpoint, self.case.decay_dtype]
        if self.case.recurrence != "mamba2":  # the records are no inputs, and rounded too
            stored.append(self.case.activation)
        findings += excess("state", *states, self.state, keep=(1,), dtype=min(stored, key=lambda dtype: dtype.itemsize))
        if {self.case.activation, *stored} == {F32}:  # the twin is the measure; its own is the recurrence
            findings += excess("twin's output", twin, torch.cat(self.outputs["torch"]), exact, keep=(1, 2))
            findings += excess("twin's state", states[1], self.rounded, self.state, keep=(1,), dtype=F32)
        for name in ("ring_start", "num_committed"):
            if not torch.equal(getattr(self.work.cursors, name), getattr(self.twin.cursors, name)):
                findings.append(f"{name}: not what the rule says")
        return findings


def _follow(inputs: Any, states: Tensor, where: Tensor, accepted: Tensor, dtype: torch.dtype) -> Tensor:
    """The recurrence over all tokens of each row; its outputs. `states[where]` become those after `accepted` tokens."""
    state, outputs = states[where], []
    for t in range(part(inputs, "value").shape[1]):
        out, state = recurrence.run(per_token(inputs, lambda x, t=t: x[:, t : t + 1]), state, dtype)
        outputs.append(out)
        states[where[accepted > t]] = state[accepted > t]
    return torch.cat(outputs, dim=1)
