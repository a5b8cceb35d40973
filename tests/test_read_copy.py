"""Steps read the copy, folds read the checkpoint and write both, and every verb keeps a slot's parts.

What a step must give is the twin without copies: outputs and records of one that starts from the decoded copies and
does not fold, checkpoints of one that starts from the checkpoints. All compute in float32, so they agree bit for bit;
"nearest" rounds the twin's fold, "stochastic" is `storage.round_state` of it. A copy must always be the encoding of its
checkpoint. Every precision that a spec can name is tried: it decodes, or it is refused by name. Each comparison has a
case that must fail. On CUDA the kernels do the same; what they round stochastically is what they fold into a float32
checkpoint, as torch sums in another order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import replayssm
from cute_kernels.configs import StepConfig
from replayssm import Cursors, LayerSpec, Pool, ReplaySpec, bytes_per_slot, make_cursors, make_pool, plan_step
from replayssm.model_launch import plan_fold
from replayssm.pool import READ_PARTS
from replayssm.reference import quant, replay, storage
from replayssm.spec import READ_FORMATS, RECURRENCES, Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import hard_states, make_inputs, random_pool
from tests.helpers.oracle import busy_scene, drawn_cursors, mistakes, ragged, unrounded
from tests.helpers.tolerance import same_bytes

F32, F16, BF16, FP8, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
WINDOW, SLOTS = 5, 8
RINGS = ("value", "key", "decay")
# Checkpoint, read copy and rounding: each format, each checkpoint, both roundings.
PRECISIONS: list[tuple[torch.dtype, Any, Any]] = [
    (F32, "nvfp4", "nearest"), (F32, "mxfp8", "nearest"), (F32, FP8, "nearest"), (F32, BF16, "nearest"),
    (F16, "nvfp4", "stochastic"), (BF16, INT8, "stochastic"), (BF16, "nvfp4", "nearest"), (F16, None, "stochastic"),
]  # fmt: skip
each_kind = pytest.mark.parametrize("kind", RECURRENCES)
each_precision = pytest.mark.parametrize(("checkpoint", "read", "rounding"), PRECISIONS, ids=str)


@dataclass
class Work:
    """A layer with cursors: slots of few and of many pending records, each state with its copy."""

    case: Case
    pool: Pool
    cursors: Cursors
    A: Tensor | None

    def clone(self) -> Work:
        pool = replace(self.pool, **{n: getattr(self.pool, n).clone() for n in names_of(self.pool)})
        cursors = Cursors(self.cursors.replay, *(getattr(self.cursors, n).clone() for n in self.cursors.names))
        return Work(self.case, pool, cursors, self.A)

    def inputs(self, rows: int, seed: int, tokens: int = 1) -> Any:
        inputs = make_inputs(replace(self.case, T=tokens), rows, torch.Generator().manual_seed(seed))
        return inputs if self.A is None else inputs._replace(A=self.A)

    def step(
        self, slots: Tensor, seed: int, tokens: int = 1, force: Tensor | None = None, commit: bool = True
    ) -> Tensor:
        """One step of these slots, and its commit."""
        out = replayssm.step(
            self.pool, self.cursors, self.inputs(len(slots), seed, tokens), cache_indices=slots, force_fold=force
        )
        if commit:
            replayssm.commit(self.cursors, cache_indices=slots, num_draft=tokens, force_fold=force)
        return out

    @property
    def rates(self) -> list[Tensor] | None:
        return None if self.A is None else [self.A]

    def memory(self, slots: Any = slice(None)) -> dict[str, Tensor]:
        """Everything that a verb may write, at some slots."""
        held = {n: getattr(self.pool, n)[slots] for n in names_of(self.pool)}
        return held | {n: getattr(self.cursors, n)[slots] for n in self.cursors.names}

    def differs(self, other: Work, slots: Any = slice(None)) -> list[str]:
        mine, theirs = self.memory(slots), other.memory(slots)
        return [name for name in mine if not same_bytes(mine[name], theirs[name])]

    def stale(self, slots: Any = slice(None)) -> list[str]:
        """Parts of copies that are not the encoding of their checkpoint."""
        if self.pool.replay.read_dtype is None:
            return []
        parts = quant.encode(self.pool.checkpoint[slots].float(), self.pool.replay.read_dtype)
        return [name for name, p in parts.items() if not same_bytes(p, getattr(self.pool, f"read_{name}")[slots])]


def names_of(pool: Pool) -> list[str]:
    return [name for name in ("checkpoint", *RINGS, *READ_PARTS, "seed") if getattr(pool, name) is not None]


def work_of(kind: Recurrence, checkpoint: torch.dtype = F32, read: Any = "nvfp4", rounding: Any = "nearest") -> Work:
    case = Case(kind, 4, 2, 16, 32, window=WINDOW, T=3, activation=F32, checkpoint=checkpoint)
    spec = replace(case.replay, read_dtype=read, rounding=rounding, ring_capacity=WINDOW + 5)
    generator = torch.Generator().manual_seed(1)
    cursors = make_cursors(spec, SLOTS)
    cursors.ring_start.copy_(torch.arange(SLOTS) * 3 % spec.ring_capacity)
    cursors.num_committed.copy_(torch.tensor([0, 5, 2, 3, 4, 1, 5, 2]))
    pool = random_pool(case.layer, spec, cursors.ring_start, cursors.num_committed, generator, "record_major")
    replayssm.write_read_copy(cursors, torch.arange(SLOTS), pools=[pool])
    return Work(case, pool, cursors, -torch.logspace(-1.5, 0.6, 4) if kind == "mamba2" else None)


def without_copies(work: Work, state: Tensor) -> Work:
    """The same with float32 checkpoints of these states and no copies."""
    spec = replace(work.pool.replay, checkpoint_dtype=F32, read_dtype=None, rounding="nearest")
    rings = {name: getattr(work.pool, name).clone() for name in RINGS}
    cursors = Cursors(spec, work.cursors.ring_start.clone(), work.cursors.num_committed.clone())
    return Work(work.case, Pool(work.pool.layer, spec, state.clone(), **rings), cursors, work.A)


@each_kind
@each_precision
@pytest.mark.parametrize("tokens", [1, 3])
def test_steps_read_the_copy_and_folds_the_checkpoint(
    kind: Recurrence, checkpoint: torch.dtype, read: Any, rounding: Any, tokens: int
) -> None:
    work, slots = work_of(kind, checkpoint, read, rounding), torch.tensor([3, 1, -1, 0, 6, 4, 2])
    live = slots >= 0
    folds = work.cursors.num_committed[slots[live]] + tokens > WINDOW
    assert folds.any() and not folds.all()
    stored, before = work.pool.checkpoint.float(), work.clone()
    folded, right = slots[live][folds], without_copies(work, stored)
    if read is not None:
        reading = without_copies(work, storage.read_copy(work.pool, torch.arange(SLOTS)))
        wrong = without_copies(work, stored)
    out, of_folds = (one.step(slots, 7, tokens, commit=False) for one in (work, right))
    if read is None:
        reading, want = right, of_folds
    else:
        with mock.patch.object(replay, "fold_mask", lambda count, *_: torch.zeros_like(count, dtype=torch.bool)):
            want = reading.step(slots, 7, tokens, commit=False)
            assert not same_bytes(out, wrong.step(slots, 7, tokens, commit=False))  # teeth
    assert same_bytes(out, want)
    assert all(same_bytes(getattr(work.pool, name), getattr(reading.pool, name)) for name in RINGS)
    exact = right.pool.checkpoint[folded]
    if rounding == "stochastic":
        assert work.pool.seed is not None and work.cursors.fold_count is not None
        exact = storage.round_state(exact, checkpoint, work.pool.seed[folded], work.cursors.fold_count[folded])
        assert not same_bytes(exact, right.pool.checkpoint[folded].to(checkpoint))  # teeth
    assert same_bytes(work.pool.checkpoint[folded], exact.to(checkpoint))
    assert not work.stale()
    others = torch.tensor([i for i in range(SLOTS) if i not in folded.tolist()])
    assert set(work.differs(before, others)) <= set(RINGS)
    assert not work.differs(before, torch.tensor([5, 7]))


def poison(work: Work, slots: Any = slice(None)) -> None:
    """Copies of senseless bytes, NaN among them."""
    for name in READ_PARTS:
        tensor = getattr(work.pool, name)
        if tensor is not None:
            tensor[slots] = torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 0x7F)[slots]


@each_kind
@each_precision
def test_a_copy_never_enters_the_recurrence(
    kind: Recurrence, checkpoint: torch.dtype, read: Any, rounding: Any
) -> None:
    """Poisoned copies before a fold change no state and no copy after it, whichever verb folds. Outputs and a delta
    rule's new records of a step that folds read the copy, as in any step."""
    if read is None:
        return
    slots, live = torch.arange(1, SLOTS), slice(1, SLOTS)
    force = torch.ones(len(slots), dtype=torch.bool)
    verbs: dict[str, Any] = {
        "step": lambda w: w.step(slots, 0, 2, force),
        "flush": lambda w: replayssm.flush(w.cursors, slots, pools=[w.pool], A=w.rates),
        "materialize": lambda w: replayssm.materialize(
            w.cursors, torch.tensor([1, 2]), torch.tensor([6, 7]), None, pools=[w.pool], A=w.rates
        ),
    }
    for name, verb in verbs.items():
        clean, poisoned = work_of(kind, checkpoint, read, rounding), work_of(kind, checkpoint, read, rounding)
        poison(poisoned, live)
        assert poisoned.differs(clean)
        outs = [verb(clean), verb(poisoned)]
        touched = torch.tensor([6, 7]) if name == "materialize" else live
        assert not set(poisoned.differs(clean, touched)) - ({"value"} if name == "step" and kind != "mamba2" else set())
        assert name != "step" or not same_bytes(*outs)  # teeth
    clean, poisoned = (work_of(kind, checkpoint, read, rounding) for _ in range(2))
    poison(poisoned, live)
    readers = torch.tensor([2, 5])  # teeth: a step that reads does see it
    assert not same_bytes(clean.step(readers, 0), poisoned.step(readers, 0))


@each_kind
@each_precision
def test_no_fold_remembers_an_earlier_copy(kind: Recurrence, checkpoint: torch.dtype, read: Any, rounding: Any) -> None:
    """Copies that are poisoned before each of 5 folds, with steps in between that read what the folds have made."""
    if read is None:
        return
    slots = torch.arange(1, SLOTS)
    clean, poisoned = (work_of(kind, checkpoint, read, rounding) for _ in range(2))
    for fold in range(5):
        outs = [work.step(slots, fold, 2) for work in (clean, poisoned)]
        assert same_bytes(*outs)
        poison(poisoned, slots)
        assert poisoned.differs(clean)  # teeth
        for work in (clean, poisoned):
            replayssm.flush(work.cursors, slots, pools=[work.pool], A=work.rates)
        assert not poisoned.differs(clean)


@each_kind
@each_precision
def test_a_random_trace_keeps_every_copy(kind: Recurrence, checkpoint: torch.dtype, read: Any, rounding: Any) -> None:
    work, generator = work_of(kind, checkpoint, read, rounding), torch.Generator().manual_seed(3)
    folds = torch.zeros(SLOTS, dtype=torch.int32)
    for i in range(12):
        rows = torch.randperm(SLOTS, generator=generator)[:5]
        force = torch.rand(5, generator=generator) < 0.2
        tokens = i % 3 + 1
        count = work.cursors.num_committed[rows]
        folds[rows] += ((count + tokens > WINDOW) | (force & (count > 0))).int()
        assert work.step(rows, i, tokens, force).isfinite().all()
        assert not work.stale()
    if rounding == "stochastic":
        assert work.cursors.fold_count is not None and torch.equal(work.cursors.fold_count, folds)


@each_kind
@each_precision
def test_verbs_move_all_parts_of_a_slot(kind: Recurrence, checkpoint: torch.dtype, read: Any, rounding: Any) -> None:
    work = work_of(kind, checkpoint, read, rounding)
    source, destination = torch.tensor([1, 4, 0]), torch.tensor([7, 2, 5])
    by_copy, by_verb, given = work.clone(), work.clone(), work.clone()
    replayssm.copy_slots(by_copy.cursors, source, destination, pools=[by_copy.pool])
    mine, theirs = by_copy.memory(destination), given.memory(source)
    assert all(same_bytes(mine[name], theirs[name]) for name in mine)
    # A copy that is folded and a state that is materialised are one state, with one seed, folds and copy.
    replayssm.flush(by_copy.cursors, destination, pools=[by_copy.pool], A=work.rates)
    replayssm.materialize(by_verb.cursors, source, destination, None, pools=[by_verb.pool], A=work.rates)
    assert set(by_verb.differs(by_copy, destination)) <= {*RINGS, "ring_start"}
    assert not by_verb.differs(given, source)
    assert not by_verb.stale() and not by_copy.stale()
    # A step that is forced writes what a flush writes.
    by_step = given.clone()
    replayssm.flush(given.cursors, source, pools=[given.pool], A=work.rates)
    by_step.step(source, 0, 1, torch.ones(3, dtype=torch.bool), commit=False)
    state_parts = [n for n in given.memory() if n not in (*RINGS, *given.cursors.names)]
    assert not set(by_step.differs(given, source)) & set(state_parts)
    replayssm.reset(given.cursors, destination, pools=[given.pool])
    cleared = given.memory(destination)
    assert not any(t.any() for n, t in cleared.items() if n not in (*RINGS, "seed"))
    assert not given.stale() and not given.differs(by_step, torch.tensor([3, 6]))


@each_kind
@each_precision
def test_a_slot_goes_to_another_pool_with_all_its_tensors(
    kind: Recurrence, checkpoint: torch.dtype, read: Any, rounding: Any
) -> None:
    """It decodes there as it would have here, over two folds. A part of a copy, a seed or a number of folds that
    stays behind shows."""
    here, slots, there = work_of(kind, checkpoint, read, rounding), torch.tensor([1, 4, 2]), torch.tensor([6, 0, 3])
    other = here.clone()
    for seed in range(3):
        other.step(torch.arange(SLOTS), seed, 3)
    parcel = here.memory(slots)
    outs = [here.step(slots, seed, 2) for seed in range(6)]
    parts = [name for name in parcel if name.startswith("read_") or name in ("seed", "fold_count")]
    for left in (None, *parts):
        receiver = other.clone()
        for name, tensor in parcel.items():
            if name != left:
                getattr(receiver.cursors if name in receiver.cursors.names else receiver.pool, name)[there] = tensor
        same = [same_bytes(receiver.step(there, seed, 2), out) for seed, out in enumerate(outs)]
        mine, theirs = receiver.memory(there), here.memory(slots)
        differs = [name for name in mine if not same_bytes(mine[name], theirs[name])]
        assert (all(same) and not differs) == (left is None), left


def test_a_prefill_is_read_after_its_copy_is_made() -> None:
    work, slots = work_of("gdn"), torch.tensor([2, 6])
    work.pool.checkpoint[slots] = torch.randn(2, 4, 16, 32)
    replayssm.reset(work.cursors, slots)
    assert work.stale()  # teeth
    before = work.clone()
    replayssm.write_read_copy(work.cursors, slots, pools=[work.pool])
    assert not work.stale() and not work.differs(before, torch.tensor([0, 1, 3, 4, 5, 7]))


# Stochastic rounding.


def test_the_next_fold_draws_anew_and_seeds_decide() -> None:
    work = work_of("kda", F16, None, "stochastic")
    state, slots = torch.randn(2, 4, 16, 32), torch.tensor([3, 6])
    assert work.pool.seed is not None and work.cursors.fold_count is not None
    assert work.pool.seed.tolist() == list(range(SLOTS))
    first = storage.rounded(work.pool, state, slots, work.cursors)
    work.cursors.fold_count[3] += 1
    second = storage.rounded(work.pool, state, slots, work.cursors)
    assert not same_bytes(first[0], second[0]) and same_bytes(first[1], second[1])
    work.pool.seed[6] = 99
    third = storage.rounded(work.pool, state, slots, work.cursors)
    assert not same_bytes(first[1], third[1]) and same_bytes(second[0], third[0])
    other = make_pool(work.pool.layer, work.pool.replay, 3, seed=5 << 32).seed
    assert other is not None and other.tolist() == [5 * 2**32 + i for i in range(3)]


# Twins that do it wrong.


def _fold_from_the_copy(fold: Any = replay.fold) -> Any:
    def folded(pool: Any, *args: Any, **kwargs: Any) -> Tensor:
        state = storage.read_copy(pool, torch.arange(pool.num_slots))
        return fold(replace(pool, checkpoint=state.to(pool.checkpoint.dtype)), *args, **kwargs)

    return folded


def _growing_scales(write_copy: Any = storage.write_copy) -> Any:
    def written(pool: Pool, slots: Tensor) -> None:
        assert pool.read_tile_scale is not None
        before = pool.read_tile_scale[slots]
        write_copy(pool, slots)
        pool.read_tile_scale[slots] = torch.maximum(pool.read_tile_scale[slots], before)

    return written


def _one_draw(pool: Pool, state: Tensor, slots: Tensor, cursors: Cursors) -> Tensor:
    assert pool.seed is not None
    return storage.round_state(state, pool.checkpoint.dtype, pool.seed[slots], torch.zeros(len(slots)))


READS = ("gdn", F32, "nvfp4", "nearest")
FAULTS: dict[str, tuple[tuple[Any, str, Any], Any]] = {
    "a step reads the checkpoint": (
        (storage, "read_copy", lambda pool, slots: pool.checkpoint[slots].float()),
        lambda: test_steps_read_the_copy_and_folds_the_checkpoint(*READS, 1),
    ),
    "a fold forgets the copy": (
        (storage, "write_copy", lambda pool, slots: None),
        lambda: test_steps_read_the_copy_and_folds_the_checkpoint(*READS, 1),
    ),
    "a fold starts from the copy": (
        (replay, "fold", _fold_from_the_copy()),
        lambda: test_a_copy_never_enters_the_recurrence(*READS),
    ),
    "a fold keeps a scale that was larger": (
        (storage, "write_copy", _growing_scales()),
        lambda: test_no_fold_remembers_an_earlier_copy(*READS),
    ),
    "every fold draws the same": (
        (storage, "rounded", _one_draw),
        lambda: test_the_next_fold_draws_anew_and_seeds_decide(),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_twin_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, check = FAULTS[name]
    check()
    monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError):
        check()


# What can be asked for.

COMBINATIONS = list(itertools.product((F32, F16, BF16), (None, *READ_FORMATS), ("nearest", "stochastic")))


def refusal(checkpoint: torch.dtype, read: Any, rounding: str) -> str | None:
    """The field that is refused, or None: written out, not derived."""
    if rounding == "stochastic" and checkpoint is F32:
        return "rounding"
    return "read_dtype" if checkpoint in (F16, BF16) and read in (F16, BF16) else None


@pytest.mark.parametrize(("checkpoint", "read", "rounding"), COMBINATIONS, ids=str)
def test_every_combination_decodes_or_is_refused(checkpoint: torch.dtype, read: Any, rounding: Any) -> None:
    field = refusal(checkpoint, read, rounding)
    if field is not None:
        with pytest.raises(NotImplementedError, match=f"^{field}: .*"):
            ReplaySpec(WINDOW, 3, checkpoint, F32, read_dtype=read, rounding=rounding)
        return
    work = work_of("gdn", checkpoint, read, rounding)
    for seed in range(3):
        assert work.step(torch.tensor([3, 0, 5]), seed, 3).isfinite().all()
    assert not work.stale()
    sizes = bytes_per_slot(work.pool.layer, work.pool.replay)
    assert sizes == {n: t[0].numel() * t.element_size() for n, t in ((n, getattr(work.pool, n)) for n in sizes)}
    assert list(sizes) == names_of(work.pool)


def test_the_readme_has_every_combination() -> None:
    """Once; those that are refused under the field that the error begins with, the others with a plan for CUDA."""
    from cute_kernels.configs import Mamba2Options

    names = {str(dtype).removeprefix("torch."): dtype for dtype in (F32, BF16, F16, FP8, INT8, None)}
    lines = (Path(__file__).parents[1] / "README.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| checkpoint (`checkpoint_dtype`)"))
    told: dict[Any, str] = {}
    for line in itertools.takewhile(str.strip, lines[first + 2 :]):
        *lists, says = (cell.strip() for cell in line.strip("|").split("|"))
        given = [[name.strip('"') for name in cell.split(", ")] for cell in lists]
        if given[1:] == [["any"], ["any"]]:
            for name in given[0]:
                with pytest.raises(NotImplementedError, match=says.split("`")[1]):
                    ReplaySpec(checkpoint_dtype=names[name])
            continue
        for checkpoint, read, rounding in itertools.product(*given):
            combination = names[checkpoint], names.get(read, read), rounding
            assert combination not in told
            told[combination] = says
    assert set(told) == set(COMBINATIONS)
    for (checkpoint, read, rounding), says in told.items():
        field = refusal(checkpoint, read, rounding)
        assert says == "yes" if field is None else says.startswith(f"`{field}`: "), says
        if field is None:
            spec = ReplaySpec(checkpoint_dtype=checkpoint, read_dtype=read, rounding=rounding)
            for arch in ("sm_90a", "sm_103a"):
                assert plan_step(LayerSpec("mamba2", 8, 1, 64, 128), spec, Mamba2Options(), arch=arch, batch=4).key


@pytest.mark.parametrize("read", ["nvfp5", "fp8", torch.float64, torch.uint8, 4])
def test_other_read_dtypes_are_refused(read: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"read_dtype: supported are .*nvfp4"):
        ReplaySpec(read_dtype=read)


def test_other_roundings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rounding: expected one of .*'nearest', 'stochastic'.*got 'up'"):
        ReplaySpec(rounding="up")  # type: ignore[arg-type]


@pytest.mark.parametrize(("read", "unit"), [("nvfp4", 32), ("mxfp8", 32), (FP8, 16), (INT8, 16), (BF16, 8)])
def test_rows_of_codes_are_whole_loads(read: Any, unit: int) -> None:
    spec = ReplaySpec(read_dtype=read)
    make_pool(LayerSpec("gdn", 2, 2, 8, unit), spec, 1)
    with pytest.raises(NotImplementedError, match=f"d_state: .*multiple of {unit}, got {unit // 2}"):
        make_pool(LayerSpec("gdn", 2, 2, 8, unit // 2), spec, 1)


def test_a_pool_has_just_the_parts_of_its_spec() -> None:
    pool = work_of("gdn").pool
    for name in READ_PARTS:
        with pytest.raises(TypeError, match=f"{name}: expected a torch.Tensor, got NoneType"):
            replace(pool, **{name: None})
    with pytest.raises(TypeError, match=r"seed: expected None, as the spec has .*rounding='nearest'"):
        replace(pool, seed=torch.zeros(SLOTS, dtype=torch.int64))
    with pytest.raises(ValueError, match="read_scale: expected"):
        replace(pool, read_scale=pool.read_scale[:, :-1])  # type: ignore[index]
    spec = ReplaySpec(checkpoint_dtype=F16, rounding="stochastic")
    with pytest.raises(TypeError, match=r"fold_count: expected a \[slots\] int32 tensor"):
        Cursors(spec, *torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(TypeError, match="fold_count: expected None"):
        Cursors(ReplaySpec(), *torch.zeros(3, 4, dtype=torch.int32))
    other = make_pool(pool.layer, spec, SLOTS)
    with pytest.raises(ValueError, match="expected rounding"):
        replayssm.reset(make_cursors(ReplaySpec(checkpoint_dtype=F16), SLOTS), torch.tensor([0]), pools=[other])


# CUDA.


@pytest.mark.parametrize("read", READ_FORMATS, ids=str)
def test_a_plan_reads_the_copy_and_folds_the_checkpoint(read: Any) -> None:
    """One token too goes to the kernel of several, whose tile in shared memory is that of the codes; not so `flush`."""
    from cute_kernels.configs import Mamba2Options, Tile

    layer, bits = LayerSpec("mamba2", 8, 1, 64, 128), READ_FORMATS[read].bits
    key = plan_step(layer, ReplaySpec(read_dtype=read), Mamba2Options(), arch="sm_90a", batch=4).key
    assert key.drafts and key.read_dtype == str(read).removeprefix("torch.")
    assert Tile.of(key).bytes == 64 * 128 * bits // 8
    assert plan_fold(layer, ReplaySpec(read_dtype=read), "sm_90a", "int32").read_dtype is None


@pytest.mark.gpu
@each_kind
@pytest.mark.parametrize("checkpoint", [F16, BF16], ids=str)
@pytest.mark.parametrize(("read", "tokens", "rows", "channels"), [
    (None, 1, 64, 128), (None, 4, 128, 64), (None, 1, 80, 256), ("nvfp4", 1, 128, 128), (INT8, 9, 64, 64)])  # fmt: skip
def test_cuda_folds_draw_the_bits_of_the_reference(
    kind: Recurrence, checkpoint: torch.dtype, read: Any, tokens: int, rows: int, channels: int
) -> None:
    """Several steps with their commits: what a step folds, with seeds and numbers of folds that move along."""
    case = Case(kind, 4, 2, rows, channels, window=16, T=tokens, checkpoint=checkpoint)
    scene = replace(busy_scene(case, read_dtype=read), rounding="stochastic")
    work, again = scene.on("cuda"), scene.on("cuda")
    for _ in range(3):
        exact, folding = unrounded(work), work.slots[work.fold_counts() > 0]
        seed, folds = work.pool.seed, work.cursors.fold_count
        assert seed is not None and folds is not None
        others = torch.tensor([i for i in range(work.pool.num_slots) if i not in folding.tolist()], device="cuda")
        before, counts = work.pool.checkpoint[others], folds.clone()
        outs = [one.step() for one in (work, exact, again)]
        state = exact.pool.checkpoint[folding]
        want = storage.round_state(state, checkpoint, seed[folding], folds[folding])
        assert same_bytes(work.pool.checkpoint[folding], want)
        assert not len(folding) or not same_bytes(want, state.to(checkpoint))  # teeth
        assert same_bytes(work.pool.checkpoint[others], before)
        for one in (work, again):
            one.commit()
        assert same_bytes(outs[0], outs[2]) and same_bytes(again.pool.checkpoint, work.pool.checkpoint)
        counts[folding] += 1
        assert torch.equal(folds, counts)
        if read is not None:
            parts = quant.encode(work.pool.checkpoint[folding].float(), read)
            assert all(same_bytes(p, getattr(work.pool, f"read_{n}")[folding]) for n, p in parts.items())


@pytest.mark.gpu
@each_kind
def test_cuda_verbs_move_seeds_and_folds(kind: Recurrence) -> None:
    """A state that is materialised, and one that is copied and flushed, are one state with one seed and number."""
    case = Case(kind, 4, 2, 64, 64, window=WINDOW, activation=F32, checkpoint=F16)
    spec = replace(case.replay, rounding="stochastic")
    start, count = torch.zeros(SLOTS, dtype=torch.int32), torch.tensor([0, 5, 2, 3, 4, 1, 5, 2], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    cpu = random_pool(case.layer, spec, start, count, generator, "record_major")
    pool = replace(cpu, **{n: getattr(cpu, n).cuda() for n in names_of(cpu)})
    cursors = drawn_cursors([pool], start.cuda(), count.cuda(), generator)
    A = -torch.logspace(-1.5, 0.6, 4, device="cuda") if kind == "mamba2" else None
    by_verb = Work(case, pool, cursors, A)
    by_copy = by_verb.clone()
    source, destination = (torch.tensor(slots, device="cuda") for slots in ([1, 4, 0], [7, 2, 5]))
    replayssm.copy_slots(by_copy.cursors, source, destination, pools=[by_copy.pool])
    replayssm.flush(by_copy.cursors, destination, pools=[by_copy.pool], A=by_verb.rates)
    replayssm.materialize(by_verb.cursors, source, destination, None, pools=[by_verb.pool], A=by_verb.rates)
    assert set(by_verb.differs(by_copy, destination)) <= {*RINGS, "ring_start"}
    assert by_verb.pool.seed is not None and cpu.seed is not None
    assert by_verb.pool.seed[destination].tolist() == by_verb.pool.seed[source].tolist()


@pytest.mark.gpu
@each_kind
@pytest.mark.parametrize("read", READ_FORMATS, ids=str)
@pytest.mark.parametrize(("tokens", "rows", "channels"), [(1, 64, 128), (4, 128, 64), (9, 80, 256)])
def test_cuda_steps_read_the_copy(kind: Recurrence, read: Any, tokens: int, rows: int, channels: int) -> None:
    """Rows that read, fold, are forced to, and padding; the copies that folds write bit for bit."""
    case = Case(kind, 4, 2, rows, channels, window=16, T=tokens)
    for scene in (busy_scene(case, read_dtype=read), ragged(busy_scene(case, read_dtype=read))):
        assert mistakes(scene.on("cuda")) == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
@pytest.mark.parametrize("read", ["nvfp4", "mxfp8", torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("tokens", "rows", "channels"), [(1, 64, 128), (4, 128, 64), (9, 80, 128)])
def test_cuda_heads_share_a_cta(kind: Recurrence, read: Any, tokens: int, rows: int, channels: int) -> None:
    """The same where the heads of a key head do; 64 and 128 rows have scales that are whole atoms, 80 have not."""
    case = Case(kind, 4, 2, rows, channels, window=16, T=tokens)
    for scene in (busy_scene(case, read_dtype=read), ragged(busy_scene(case, read_dtype=read))):
        assert mistakes(scene.on("cuda"), config=StepConfig(warps=1, heads=2, readout="mma")) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "channels"), [(64, 64), (80, 128), (128, 256)])
@pytest.mark.parametrize(
    ("checkpoint", "read"), [(c, r) for c, r, how in COMBINATIONS if r and how == "nearest" and not refusal(c, r, how)]
)
def test_cuda_copies_have_the_bits_of_the_reference(
    checkpoint: torch.dtype, read: Any, rows: int, channels: int
) -> None:
    """By each verb that makes them, of finite states; what is not finite: tests/ptx/test_encode_kernel.py."""
    case = Case("gdn", 3, 1, rows, channels, window=WINDOW, checkpoint=checkpoint)
    spec = replace(case.replay, read_dtype=read)
    cursors = make_cursors(spec, SLOTS)
    cursors.num_committed.copy_(torch.tensor([0, 5, 2, 3, 4, 1, 5, 2]))
    cpu = random_pool(
        case.layer, spec, cursors.ring_start, cursors.num_committed, torch.Generator().manual_seed(1), "head_major"
    )
    cpu.checkpoint.copy_(hard_states(SLOTS, 3, rows, channels).nan_to_num(1.0, 2.0, 3.0).clamp(-6e4, 6e4))
    pool = replace(cpu, **{n: getattr(cpu, n).cuda() for n in names_of(cpu)})
    work = Work(case, pool, Cursors(spec, *(getattr(cursors, n).cuda() for n in cursors.names)), None)

    def stale(slots: list[int]) -> list[str]:
        parts = quant.encode(pool.checkpoint[slots].cpu().float(), read)
        return [name for name, p in parts.items() if not same_bytes(p, getattr(pool, f"read_{name}")[slots].cpu())]

    poison(work)
    assert stale([0])  # teeth
    replayssm.write_read_copy(work.cursors, torch.tensor([4, 2, 0, 7, 3], device="cuda"), pools=[pool])
    assert not stale([0, 2, 3, 4, 7]) and stale([1]) and stale([5]) and stale([6])
    replayssm.materialize(
        work.cursors, torch.tensor([1, 2], device="cuda"), torch.tensor([5, 0], device="cuda"), None, pools=[pool]
    )
    replayssm.flush(work.cursors, torch.tensor([1, -1, 6], device="cuda"), pools=[pool])
    assert not stale(list(range(SLOTS)))
