"""The compiled step of several tokens computes what the mathematics says, executed instruction by instruction on a CPU.

Host code and PTX are those that a GPU would run. Numbers: one step against the replay form in float64, and a trace of
random acceptance against the recurrence over the accepted tokens, within the bounds of the tests of one token. Grid:
`CASES`, in which 2 to 16 tokens, one and two blocks of them, every dtype, head_dim, d_state, window, split, layout and
architecture occur for each recurrence; in each, rows that read, that fold, that are forced to, and padding, with NaN in
all that no output may depend on. `LIFTED`, `HALVES`: what some shapes do. `RAGGED`: rows of 0 to T tokens, T of 1 among
them, and calls that break the rules. Each launch runs with asynchronous copies as early and as late as they may be, and
with warps in another order, and must give the same bits. Teeth: faults put into the PTX are caught.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels.configs import Precision, RingLayout, StepConfig, Tile
from cute_kernels.draft_shape import DraftShape
from replayssm.keys import step_key
from replayssm.launch import options_of
from replayssm.spec import Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import KERNELS, AnyGiven, DeltaGiven, of_one_key, part, per_token
from tests.helpers.oracle import BARE, F32, PAD, Given, Scene, Trace, busy_scene, first_rows, mistakes, ragged
from tests.helpers.tolerance import same_bytes
from tests.ptx import recorder
from tests.ptx.launches import Bench, Interpreted, swap
from tests.ptx.machine import Mode, TroubleError
from tests.test_ragged import scene_of

pytestmark = pytest.mark.skipif(recorder.why_no_recorder() is not None, reason=str(recorder.why_no_recorder()))
BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Run:
    """A kernel to run: its layer, how it is called and for which architecture."""

    arch: str
    case: Case
    given: AnyGiven | None = None
    split: int = 1
    warps: int = 4
    pdl: bool = False
    layout: RingLayout = "record_major"
    index: torch.dtype = torch.int32
    ragged: bool = False

    @property
    def id(self) -> str:
        return f"{self.arch}-{self.case.id}-split{self.split}-warps{self.warps}{'-ragged' * self.ragged}"

    @property
    def config(self) -> StepConfig:
        """With products as precise as plans have them."""
        floats = F32 in (self.case.activation, self.case.value_dtype)
        return StepConfig(self.split, self.warps, precision="fp32" if floats else "tf32")

    @property
    def scene(self) -> Scene:
        """Every kind of row; of many tokens, which take long, one of each: folds, padding, reads, folds as asked."""
        scene = busy_scene(self.case, given=self.given, ring_layout=self.layout, index_dtype=self.index)
        if self.case.T >= 8:
            scene = replace(scene, counts=tuple(scene.counts[i] for i in (1, 2, 3, 8)), forced=(3,))
        return ragged(scene) if self.ragged else scene


def case(kind: Recurrence, sizes: tuple[int, int, int, int], window: int, T: int, *dtypes: torch.dtype) -> Case:
    """A case of (value heads, key heads, head_dim, d_state), dtypes of activation and checkpoint."""
    return Case(kind, *sizes, window, T, *dtypes)


CASES = (
    Run("sm_90a", case("mamba2", (2, 1, 64, 64), 5, 4, BF16, F32)),
    Run("sm_103a", case("mamba2", (1, 1, 64, 128), 16, 8, BF16, BF16), Given(z=False), pdl=True, index=torch.int64,
        warps=2),
    Run("sm_90a", case("mamba2", (2, 2, 80, 64), 16, 2, F32, F32), BARE, layout="head_major", warps=2),
    Run("sm_103a", case("mamba2", (1, 1, 128, 64), 33, 16, F16, F16), Given(D=None, dt_bias=None), split=2, warps=1),
    Run("sm_90a", case("mamba2", (1, 1, 64, 256), 16, 9, BF16, F16), Given(dt=F32), layout="strided", warps=8),
    Run("sm_90a", case("gdn", (3, 1, 64, 64), 5, 4, BF16, F32)),
    Run("sm_103a", case("gdn", (1, 1, 128, 128), 16, 8, BF16, BF16), DeltaGiven(beta=F32), pdl=True, index=torch.int64,
        warps=2),
    Run("sm_90a", case("gdn", (2, 2, 80, 64), 16, 2, F32, F32), DeltaGiven(l2norm_eps=None), layout="head_major",
        warps=2),
    Run("sm_103a", replace(case("gdn", (1, 1, 128, 64), 33, 16, F16, F16), value_dtype=F32), DeltaGiven(scale=0.25),
        split=2, warps=1),
    Run("sm_90a", case("gdn", (1, 1, 64, 256), 16, 9, BF16, F16), DeltaGiven(round_beta=True), layout="strided",
        warps=8),
    Run("sm_90a", case("kda", (3, 1, 64, 64), 5, 4, BF16, F32), DeltaGiven(lower_bound=-5.0)),
    Run("sm_103a", replace(case("kda", (1, 1, 128, 128), 16, 8, BF16, BF16), decay_dtype=BF16), DeltaGiven(beta=F32),
        pdl=True, index=torch.int64, warps=2),
    Run("sm_90a", case("kda", (2, 2, 80, 64), 16, 2, F32, F32), DeltaGiven(l2norm_eps=None), layout="head_major",
        warps=2),
    Run("sm_103a", replace(case("kda", (1, 1, 128, 64), 33, 16, F16, F16), value_dtype=F32), DeltaGiven(scale=0.25),
        split=2, warps=1),
    Run("sm_90a", case("kda", (1, 1, 64, 256), 16, 9, BF16, F16), DeltaGiven(gate=F32), layout="strided", warps=8),
    Run("sm_90a", case("kda", (1, 1, 64, 64), 33, 2, BF16, F32), warps=8),
)  # fmt: skip
LIFTED = (  # a fold's records lie over the end of the tile, which waits in registers
    Run("sm_90a", case("mamba2", (1, 1, 64, 128), 24, 4, BF16, F32), warps=2),
    Run("sm_90a", case("gdn", (1, 1, 128, 64), 17, 2, BF16, BF16), warps=4),
)
HALVES = (  # state and probes meet as float16
    Run("sm_90a", case("gdn", (2, 1, 64, 64), 16, 4, BF16, F16), warps=2),
    Run("sm_90a", case("mamba2", (1, 1, 64, 64), 5, 1, BF16, F16), warps=1, ragged=True),
)
RAGGED = (
    Run("sm_90a", case("mamba2", (1, 1, 64, 64), 5, 4, BF16, F32), split=2, pdl=True, ragged=True),
    Run("sm_103a", case("gdn", (1, 1, 64, 64), 16, 9, F32, F32), index=torch.int64, ragged=True),
    Run("sm_90a", case("kda", (1, 1, 64, 64), 5, 4, BF16, F32), ragged=True),
    *(Run("sm_90a", case(kind, (1, 1, 64, 64), 5, 1, BF16, F32), warps=1, ragged=True) for kind in KERNELS),
)
each_kernel = pytest.mark.parametrize("kind", KERNELS)


def after(run: Run, mode: Mode, seed: int) -> list[torch.Tensor]:
    """All that a step wrote, once it is known to be right."""
    bench, outputs = Bench(run.arch, mode, seed), []
    work = Interpreted.of(run.scene, bench)
    found = mistakes(work, after=lambda work, out: outputs.append(out), config=run.config, pdl=run.pdl)
    assert found == [], (run, mode, seed)
    (launch,) = bench.launches
    assert f".target {run.arch}" in launch.ptx and "mma.sync" in launch.ptx
    return [*outputs, *work.written()]


@pytest.mark.parametrize("run", [*CASES, *LIFTED, *HALVES, *RAGGED], ids=lambda run: run.id)
def test_a_step_is_the_replay_form(run: Run) -> None:
    early, late = after(run, "early", 0), after(run, "late", 1)
    assert all(same_bytes(a, b) for a, b in zip(early, late, strict=True))


@each_kernel
def test_the_grid_covers_what_it_says(kind: Recurrence) -> None:
    runs = [run for run in CASES if run.case.recurrence == kind]
    cases = [run.case for run in runs]
    assert {c.T for c in cases} == {2, 4, 8, 9, 16}
    assert {c.activation for c in cases} == {c.checkpoint for c in cases} == {F32, BF16, F16}
    assert ({c.V for c in cases}, {c.K for c in cases}) == ({64, 80, 128}, {64, 128, 256})
    assert {c.window for c in cases} == {5, 16, 33}
    assert {run.split for run in runs} == {1, 2}
    assert {run.warps for run in runs} == {1, 2, 4, 8}
    assert {run.layout for run in runs} == {"record_major", "head_major", "strided"}
    assert {run.arch for run in runs} == {"sm_90a", "sm_103a"}


def test_shapes_do_what_they_are_here_for() -> None:
    def sizes(run: Run) -> tuple[DraftShape, Tile]:
        case = run.case
        options = options_of(run.scene.on("cpu").inputs)
        key = step_key(case.layer, case.replay, options, num_tokens=case.T, config=run.config)
        return DraftShape.of(key), Tile.of(key)

    assert [shape.lifted_bytes(tile) for shape, tile in map(sizes, LIFTED)] == [2 * 16 * 512, 4 * 16 * 128]
    assert all(shape.halves for shape, _ in map(sizes, HALVES))
    others = [sizes(run) for run in (*CASES, *RAGGED) if run.case.window <= 16 and run.case.checkpoint != F16]
    assert len(others) > 10 and not any(shape.lifted_bytes(tile) or shape.halves for shape, tile in others)


SMALL = {kind: Run("sm_90a", case(kind, (1, 1, 64, 64), 6, 3, F32, F32)) for kind in KERNELS}


@each_kernel
def test_drafts_and_commits_are_the_recurrence(kind: Recurrence) -> None:
    """Random acceptance of 0 to T tokens, forced folds and padding, with a window that fills every other step."""
    trace = Trace(case(kind, (1, 1, 64, 64), 4, 3, F32, F32), torch.device("cpu"), slots=3)
    bench = Bench("sm_90a", "late")
    trace.work = Interpreted.of(trace.work, bench)
    for _ in range(8):
        trace.step()
    assert trace.mistakes() == []
    assert len(bench.launches) == 16


@each_kernel
def test_drafts_of_any_lengths_and_commits_are_the_recurrence(kind: Recurrence) -> None:
    """The same with 0 to T tokens a row; every step takes the launch that the first one prepared."""
    trace = Trace(case(kind, (1, 1, 64, 64), 4, 3, F32, F32), torch.device("cpu"), slots=4, ragged=True)
    trace.work = Interpreted.of(trace.work, Bench("sm_90a", "late"))
    totals = set()
    for _ in range(6):
        trace.step()
        totals.add(part(trace.work.inputs, "value").shape[1])
    assert trace.mistakes() == []
    assert len(totals) > 1
    assert (len(trace.work.pool.launches), len(trace.work.cursors.launches)) == (1, 1)


def test_a_prepared_launch_takes_any_number_of_rows() -> None:
    """First two rows, then all of them, by one launch each of step and commit: nothing was sized by the first call."""
    work = Interpreted.of(RAGGED[2].scene, Bench(RAGGED[2].arch, "early"))
    for one in (first_rows(work, 2), work):
        assert mistakes(one) == []
        one.commit()
    assert (len(work.pool.launches), len(work.cursors.launches)) == (1, 1)


def test_what_a_cut_takes_is_made_up_for_factor_by_factor() -> None:
    """Values of which little is left once their keys have answered for them. With what TF32 takes from two factors made
    up for at once, also where they had nothing to lose, records of the second step err by 4.0e-3 instead of 2.7e-3."""
    work = Interpreted.of(scene_of("kda", 4), Bench("sm_90a", "early"))
    work.inputs = per_token(work.inputs, lambda x: x.nan_to_num(0.5))
    few = first_rows(work, 3)
    few.step()
    few.commit()
    assert mistakes(work) == []


def test_any_negative_slot_and_the_named_one_are_padding() -> None:
    """64-bit slots are read as such: the low half of one is the slot of a live row."""
    run = RAGGED[1]
    scene = replace(run.scene, counts=(PAD, PAD, 5, PAD, PAD, PAD), forced=(), lengths=(1, 9, 2, 0, 3, 2), starts=None)
    work = Interpreted.of(scene, Bench(run.arch, "early"))
    least, live = torch.iinfo(torch.int64).min, int(work.cache_indices[2])
    spare = next(slot for slot in range(work.pool.num_slots) if slot != live)
    work.pad_slot_id, given = spare, work.clone()
    work.cache_indices = torch.tensor([live - 2**32, spare, live, -7, least + live, live - 2**31])
    assert mistakes(work) == []
    for one in (work, given):
        one.commit(num_accepted=torch.tensor([1, 9, 1, 9, 9, 2], dtype=torch.int32))
    assert torch.equal(work.cursors.num_committed, given.cursors.num_committed)
    assert torch.equal(work.cursors.ring_start, given.cursors.ring_start)


WRONG: dict[str, Callable[[Interpreted], object]] = {
    "lengths descend": lambda work: work.inputs.cu_seqlens.copy_(work.inputs.cu_seqlens.flip(0)),
    "lengths exceed the most": lambda work: work.inputs.cu_seqlens.mul_(3),
    "lengths leave the inputs": lambda work: work.inputs.cu_seqlens.add_(5),
    "lengths are negative": lambda work: work.inputs.cu_seqlens.sub_(7),
    "lengths are enormous": lambda work: work.inputs.cu_seqlens.sub_(1).mul_(2**26),
    "starts leave the ring": lambda work: work.cursors.ring_start.add_(1000),
    "starts are negative": lambda work: work.cursors.ring_start.sub_(1000),
    "more is committed than a window": lambda work: work.cursors.num_committed.add_(1000),
    "less than nothing is committed": lambda work: work.cursors.num_committed.sub_(1000),
}


# All for one recurrence, and of each sort one for the others, whose kernels take longer and look up the same places.
MISTAKES = [(kind, name) for kind in KERNELS for i, name in enumerate(WRONG) if kind == "mamba2" or i in (4, 5, 7)]


@pytest.mark.parametrize(("kind", "wrong"), MISTAKES)
def test_mistakes_of_the_caller_stay_within_the_slots(kind: Recurrence, wrong: str) -> None:
    """A row writes its own slot and its part of the output at most; a read elsewhere would be reported."""
    run = Run("sm_90a", case(kind, (1, 1, 64, 64), 5, 3, F32, F32), ragged=True)
    scene = replace(run.scene, counts=(5, 2, PAD, 3, 0), forced=(), lengths=(3, 2, 3, 0, 1))
    work = Interpreted.of(scene, Bench(run.arch, "early"))
    given = work.clone()
    WRONG[wrong](work)
    out = torch.full((1, 11, 1, 64), 7.0)  # two tokens that no row has
    work.step(out=out)
    mine = work.cache_indices[work.cache_indices >= 0].tolist()
    others = [slot for slot in range(work.pool.num_slots) if slot not in mine]
    for now, before in zip(work.pool.tensors, given.pool.tensors, strict=True):
        assert same_bytes(now[others], before[others])
    work.commit(num_accepted=torch.tensor([9, -9, 9, 9, 2**31 - 1], dtype=torch.int32))
    committed = work.cursors.num_committed[given.slots]
    assert bool(((committed >= 0) & (committed <= 5)).all()), committed


@each_kernel
def test_one_row_does_not_depend_on_the_others(kind: Recurrence) -> None:
    """Rows in reverse order give the same bits: no sum depends on which CTA a row is."""
    run = SMALL[kind]
    scene = replace(run.scene, counts=(6, 2, PAD, 3), forced=(3,))
    straight, turned = (Interpreted.of(scene, Bench(run.arch, "early")) for _ in range(2))
    for name in [n for n, t in turned.inputs._asdict().items() if isinstance(t, torch.Tensor) and t.dim() > 2]:
        turned.inputs = turned.inputs._replace(**{name: getattr(turned.inputs, name).flip(0)})
    turned.cache_indices = turned.cache_indices.flip(0)
    turned.force_fold = None if turned.force_fold is None else turned.force_fold.flip(0)
    assert same_bytes(straight.step(), turned.step().flip(0))
    assert all(same_bytes(a, b) for a, b in zip(straight.written(), turned.written(), strict=True))


@each_kernel
def test_strong_and_infinite_decays_stay_finite(kind: Recurrence) -> None:
    """Sums of log-decays far below -88, between tokens too, and of a delta rule a record of -inf: a difference of
    prefixes would be NaN or lose the small decays behind a large one."""
    run = SMALL[kind]
    work = Interpreted.of(run.scene, Bench(run.arch, "early"))
    gate = part(work.inputs, "gate")
    gate += torch.tensor([3e4, -30.0, 4.0]).view(1, 3, *[1] * (gate.dim() - 2))
    gate[1::2] = gate[1::2].flip(1)
    part(work.inputs, "rate").fill_(-400.0 if kind == "mamba2" else 6.0)
    if kind != "mamba2":
        work.pool.decay[:, :, 1] = -float("inf")
    assert mistakes(work) == []


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_tokens_of_one_key_are_solved_exactly(kind: Recurrence) -> None:
    run = next(run for run in RAGGED if run.case.recurrence == kind)
    most = run.case.T
    scene = replace(run.scene, counts=(5, 3, 0), forced=(0,), lengths=(most, most - 1, most), starts=None)
    work = Interpreted.of(scene, Bench(run.arch, "early"))
    assert mistakes(replace(work, inputs=of_one_key(work.inputs))) == []


ERRORS: dict[str, float] = {"tf32": 2.0**-15, "bf16": 2.0**-7}  # twice a term's rounding


@each_kernel
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_precision_errs_as_it_says(kind: Recurrence, precision: str) -> None:
    """Relative to the largest output of float32 activations; each is coarser than the one before."""
    run = replace(SMALL[kind], case=case(kind, (1, 1, 64, 64), 6, 3, F32, F32))

    def output(precision: str) -> torch.Tensor:
        work = Interpreted.of(replace(run.scene, forced=None), Bench(run.arch, "early"))
        return work.step(config=StepConfig(precision=precision)).double()

    exact = output("fp32")
    error = float((output(precision) - exact).abs().max() / exact.abs().max())
    assert error == 0 if precision == "fp32" else 0.01 * ERRORS[precision] < error < ERRORS[precision]


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_float32_state_meets_bfloat16_as_tf32(kind: Recurrence) -> None:
    """Records of float32 show what outputs of bfloat16 do not. A factor is cut by two thirds of its last bit at most,
    up and down alike: on average next to nothing is left of that."""
    run = replace(SMALL[kind], case=replace(case(kind, (1, 1, 64, 64), 6, 3, BF16, F32), value_dtype=F32))

    def records(precision: Precision) -> torch.Tensor:
        work = Interpreted.of(replace(run.scene, forced=None), Bench(run.arch, "early"))
        work.step(config=StepConfig(precision=precision))
        return work.pool.value.double()

    exact, found = records("fp32"), records("tf32")
    there = exact.isfinite()
    error = (found - exact)[there] / exact[there].abs().max()
    assert 2.0**-16 < float(error.abs().max()) < 2.0**-10
    assert abs(float(error.mean())) < 0.2 * float(error.abs().mean())


# Teeth.


BARRIER, STORE = r"bar\.sync\s+0;", r"@p st\.global[^;]*;"
PRODUCT = r"mma\.sync[^{;]*\{(%\w+),\s*(%\w+),\s*(%\w+),\s*(%\w+)\}[^;]*;"
NORM, ZERO = r"rsqrt\.approx\S*\s+(%\w+), %\w+;", " ".join(rf"mov.f32 \{i}, 0f00000000;" for i in range(1, 5))


def faults(ptx: str) -> dict[str, tuple[str, str]]:
    """A changed kernel and how its report or the first wrong result begins, by name. The first two barriers order
    loads, not memory; of the products, which are many, one in nine is left out at a time."""
    found: dict[str, tuple[str, str]] = {}
    for what, pattern, by, beginning, first, every in (
        ("barrier", BARRIER, "", "race: shared|uninitialised: shared", 2, 1),
        ("product", PRODUCT, ZERO, "output|value|checkpoint", 0, 9),
        ("store", STORE, "", "output|value|key|decay|checkpoint", 0, 1),
        ("norm", NORM, r"mov.f32 \1, 0f3F800000;", "output|key", 0, 1),
    ):
        for i in range(first, len(re.findall(pattern, ptx)), every):
            found[f"no {what} {i}"] = swap(pattern, by, i)(ptx), beginning
    return found


@pytest.mark.parametrize("which", [-1, -2])
def test_a_barrier_less_around_lifted_rows_is_caught(which: int) -> None:
    """Those between rows on their way into registers and records, and behind the records."""
    run = LIFTED[0]
    scene = replace(run.scene, counts=(24, 3), starts=(4, 5), forced=None)
    found = []
    for change in (str, swap(BARRIER, "", which)):
        try:
            found.append(mistakes(Interpreted.of(scene, Bench(run.arch, "late", change=change)), config=run.config))
        except TroubleError as trouble:
            found.append([str(trouble)])
    assert found[0] == [] and re.match("race: shared|uninitialised: shared", found[1][0])


def caught(kind: Recurrence, changed: str) -> list[str]:
    """What rows that read, fold and wrap around find in a changed kernel. Copies are late."""
    scene = replace(SMALL[kind].scene, counts=(6, 3, PAD, 2), starts=(4, 5, 0, 7), forced=None)
    try:
        return mistakes(Interpreted.of(scene, Bench("sm_90a", "late", change=lambda ptx: changed or ptx)))
    except TroubleError as trouble:
        return [str(trouble)]


@each_kernel
def test_faults_in_the_kernel_are_caught(kind: Recurrence) -> None:
    bench = Bench("sm_90a")
    Interpreted.of(replace(SMALL[kind].scene, forced=None), bench).step()
    assert caught(kind, "") == []
    changed = faults(bench.launches[0].ptx)
    missed = []
    for name, (ptx, beginning) in changed.items():
        first = next(iter(caught(kind, ptx)), "nothing")
        if not re.match(beginning, first):
            missed.append(f"{name}: {first}")
    assert not missed, "\n".join(missed)
    assert len(changed) > 15
