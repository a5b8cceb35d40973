"""The compiled step and commit compute what the mathematics says, executed instruction by instruction on a CPU.

Host code and PTX are those that a GPU would run; only the device is interpreted. Numbers: one step against the replay
form in float64, and a trace against the token-by-token recurrence, within the bounds of the GPU tests
(`helpers.tolerance`). Grid: `CASES`, in which every dtype, head_dim, d_state, window, split, option and architecture
occurs for each recurrence; in each, rows that read, that fold, that are forced to, and padding in one launch, with NaN
in all that no output may depend on. Each launch runs with asynchronous copies as early and as late as they may be, and
with warps in another order, and must give the same bits. Teeth: faults put into the PTX are all caught, each as what
it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels.configs import RingLayout, StepConfig
from replayssm.reference import replay as reference
from replayssm.spec import Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import KERNELS, AnyGiven, DeltaGiven, part, tensors_of, tokens_of
from tests.helpers.oracle import BARE, F32, PAD, Given, Scene, Trace, mistakes, per_token
from tests.helpers.tolerance import same_bytes
from tests.ptx import recorder
from tests.ptx.launches import Bench, Interpreted, swap
from tests.ptx.machine import Mode, TroubleError

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

    @property
    def id(self) -> str:
        given = self.given.id if self.given else "default"
        return f"{self.arch}-{self.case.id}-split{self.split}-warps{self.warps}-{given}"

    @property
    def scene(self) -> Scene:
        """A row without records, one that folds, padding, a forced one, and one that fills its window; their ring
        starts let all but the first wrap around."""
        window = self.case.window
        starts = (0, window, 0, 2, window - 1)
        return Scene(
            self.case,
            (0, window, PAD, window // 2, window - 1),
            forced=(0, 3),
            given=self.given,
            starts=starts,
            ring_layout=self.layout,
            index_dtype=self.index,
        )


def case(kind: Recurrence, sizes: tuple[int, int, int, int], window: int, *dtypes: torch.dtype) -> Case:
    """A case of (value heads, key heads, head_dim, d_state), dtypes of activation and checkpoint."""
    return Case(kind, *sizes, window, 1, *dtypes)


CASES = (
    Run("sm_90a", case("mamba2", (2, 1, 64, 64), 5, BF16, F32)),
    Run("sm_103a", case("mamba2", (1, 1, 64, 128), 16, BF16, F32), Given(z=False), pdl=True, index=torch.int64),
    Run("sm_90a", case("mamba2", (1, 1, 80, 64), 5, F32, BF16), BARE, layout="head_major"),
    Run("sm_103a", case("mamba2", (1, 1, 64, 64), 33, F32, F16), Given(D=None, dt_bias=None), split=2),
    Run("sm_103a", case("mamba2", (2, 2, 64, 64), 16, F16, F16), Given(dt_bias=F16, dt_softplus=False),
        layout="strided"),
    Run("sm_90a", case("mamba2", (1, 1, 80, 128), 5, BF16, BF16), Given(D=None, z=False, dt=F32), pdl=True),
    Run("sm_90a", case("gdn", (3, 1, 64, 64), 5, BF16, F32)),
    Run("sm_103a", case("gdn", (1, 1, 128, 128), 16, BF16, BF16), DeltaGiven(beta=F32), pdl=True, index=torch.int64),
    Run("sm_90a", case("gdn", (1, 1, 64, 256), 5, F32, F32), DeltaGiven(l2norm_eps=None), split=2,
        layout="head_major"),
    Run("sm_103a", case("gdn", (1, 1, 128, 64), 33, F16, F16), DeltaGiven(scale=0.25, gate=F32), split=2),
    Run("sm_103a", replace(case("gdn", (2, 2, 64, 64), 16, F16, F32), value_dtype=F32), DeltaGiven(round_beta=True),
        layout="strided"),
    Run("sm_90a", case("gdn", (4, 2, 64, 64), 5, F32, BF16), DeltaGiven(l2norm_eps=1e-2), pdl=True),
    Run("sm_90a", case("kda", (3, 1, 64, 64), 5, BF16, F32)),
    Run("sm_103a", case("kda", (1, 1, 128, 128), 16, BF16, BF16), DeltaGiven(beta=F32, lower_bound=-5.0), pdl=True,
        index=torch.int64),
    Run("sm_90a", case("kda", (1, 1, 64, 256), 5, F32, F32), DeltaGiven(l2norm_eps=None), split=2,
        layout="head_major"),
    Run("sm_103a", case("kda", (1, 1, 128, 64), 33, F16, F16), DeltaGiven(scale=0.25, gate=F32), split=2),
    Run("sm_103a", replace(case("kda", (2, 2, 64, 64), 16, F16, F32), value_dtype=F32), layout="strided"),
    Run("sm_90a", replace(case("kda", (4, 2, 64, 64), 5, F32, BF16), decay_dtype=BF16), DeltaGiven(lower_bound=-0.5),
        pdl=True),
    Run("sm_90a", case("mamba2", (1, 1, 64, 64), 33, BF16, BF16), split=2, warps=8),
    Run("sm_90a", case("gdn", (1, 1, 64, 64), 33, BF16, F32), warps=8),
    Run("sm_90a", case("kda", (1, 1, 64, 64), 33, BF16, F32), warps=8),
    Run("sm_90a", case("kda", (1, 1, 80, 64), 16, F32, F32)),
    Run("sm_90a", replace(case("kda", (1, 1, 128, 64), 16, BF16, F32), value_dtype=F32)),
)  # fmt: skip


def after(run: Run, mode: Mode, seed: int) -> list[torch.Tensor]:
    """All that a step wrote, once it is known to be right."""
    bench, outputs = Bench(run.arch, mode, seed), []
    work = Interpreted.of(run.scene, bench)
    config = StepConfig(run.split, run.warps)
    found = mistakes(work, after=lambda work, out: outputs.append(out), config=config, pdl=run.pdl)
    assert found == [], (run, mode, seed)
    (launch,) = bench.launches
    assert f".target {run.arch}" in launch.ptx
    return [*outputs, *work.written()]


@pytest.mark.parametrize("run", CASES, ids=lambda run: run.id)
def test_a_step_is_the_replay_form(run: Run) -> None:
    early, late = after(run, "early", 0), after(run, "late", 1)
    assert all(same_bytes(a, b) for a, b in zip(early, late, strict=True))


HEAD_DIMS: dict[Recurrence, tuple[set[int], set[int]]] = {
    "mamba2": ({64, 80}, {64, 128}),
    "gdn": ({64, 128}, {64, 128, 256}),
    "kda": ({64, 80, 128}, {64, 128, 256}),
}
each_kernel = pytest.mark.parametrize("kind", KERNELS)


@each_kernel
def test_the_grid_covers_what_it_says(kind: Recurrence) -> None:
    runs = [run for run in CASES if run.case.recurrence == kind]
    cases = [run.case for run in runs]
    assert {c.activation for c in cases} == {c.checkpoint for c in cases} == {F32, BF16, F16}
    assert ({c.V for c in cases}, {c.K for c in cases}) == HEAD_DIMS[kind]
    assert {c.window for c in cases} == {5, 16, 33}
    assert {run.split for run in runs} == {1, 2}
    assert {run.layout for run in runs} == {"record_major", "head_major", "strided"}
    default = Given() if kind == "mamba2" else DeltaGiven()
    changed = {
        name for run in runs for name, value in vars(run.given or default).items() if value != vars(default)[name]
    }
    assert changed == set(vars(default)) - {"mamba2": set(), "gdn": {"lower_bound"}, "kda": {"round_beta"}}[kind]
    for arch in ("sm_90a", "sm_103a"):
        assert {run.pdl for run in runs if run.arch == arch} == {False, True}


def ptx_of(run: Run) -> str:
    bench = Bench(run.arch)
    Interpreted.of(run.scene, bench).step(config=StepConfig(run.split), pdl=run.pdl)
    return bench.launches[0].ptx


def narrow(kind: str, ptx: str) -> int:
    """How many instructions load from, or store to, global memory 4 bytes or fewer a lane."""
    return len(re.findall(rf"\b{kind}\.global(?![\w.:]*\.v[24]\b)", ptx))


def waits_first(ptx: str) -> bool:
    """Whether the wait for the launch before stands in front of every access to global memory."""
    return ptx.index("griddepcontrol.wait") < ptx.index(".global.")


@pytest.mark.parametrize("run", CASES, ids=lambda run: run.id)
def test_only_scalars_move_narrowly(run: Run) -> None:
    """Loads: slot, mask, cursor, the token's gate and its parameters, its gate and value channels, the window's decays.
    Stores: an output in each of three branches, and decay records in two; of a delta rule also its value's record in
    two. Where each channel of K decays by itself, a lane has a channel and loads its gate, its bias and its decays, 32
    side by side. One vector taken apart would exceed either."""
    ptx, case = ptx_of(run), run.case
    loads, stores = 11 + -(-case.window // 32), 4 + -(-case.window // 32) + 2 * (case.recurrence != "mamba2")
    if case.recurrence == "kda":
        channels = -(-case.K // 128)
        loads, stores = 9 + channels * (case.window + 2), 5 + channels
    assert narrow("ld", ptx) <= loads
    assert narrow("st", ptx) <= stores
    assert narrow("ld", ptx.replace("ld.global.cs.v4.b32", "ld.global.b32; " * 4, 1)) >= narrow("ld", ptx) + 4
    assert "griddepcontrol" not in ptx or waits_first(ptx)
    assert not waits_first("ld.global.b32 %r1, [%rd1]; griddepcontrol.wait;")


@each_kernel
def test_steps_and_commits_are_the_recurrence(kind: Recurrence) -> None:
    """Random acceptance, forced folds and padding, with a window that fills every other step."""
    trace = Trace(case(kind, (1, 1, 64, 64), 2, F32, F32), torch.device("cpu"), slots=3)
    bench = Bench("sm_90a", "late")
    trace.work = Interpreted.of(trace.work, bench)
    for _ in range(8):
        trace.step()
    assert trace.mistakes() == []
    assert len(bench.launches) == 16


SMALL = {kind: Run("sm_90a", case(kind, (1, 1, 64, 64), 5, BF16, F32)) for kind in KERNELS}
IN_PARTS = Run("sm_90a", case("kda", (1, 1, 128, 64), 16, BF16, F32))
ODD_ROWS, IN_FOUR_PARTS = CASES[-2:]


@each_kernel
def test_a_prepared_launch_sees_other_memory(kind: Recurrence) -> None:
    """A parameter may be given other memory, as loading weights does; the object stays."""
    work = Interpreted.of(SMALL[kind].scene, Bench(SMALL[kind].arch, "early"))
    assert mistakes(work) == []
    parameters = {name: t for name, t in tensors_of(work.inputs).items() if name not in tokens_of(work.inputs)}
    assert len(parameters) == {"mamba2": 3, "gdn": 2, "kda": 2}[kind]
    for name, parameter in parameters.items():
        parameter.data = parameter * 2 + (name not in ("A", "A_log"))
        assert mistakes(work) == [], name


@each_kernel
def test_any_negative_slot_is_padding(kind: Recurrence) -> None:
    run = SMALL[kind]
    work = Interpreted.of(replace(run.scene, index_dtype=torch.int64), Bench(run.arch, "early"))
    for slot in (-1, -(2**31), -(2**32), torch.iinfo(torch.int64).min):
        work.cache_indices[1] = slot
        assert mistakes(work) == [], slot


@each_kernel
def test_strong_and_infinite_decays_stay_finite(kind: Recurrence) -> None:
    """Sums of log-decays far below -88, and of a delta rule a record of -inf: exp of a difference of prefixes would be
    infinite or NaN. A rate of e**6 and gates from next to nothing to 3e4, in rows that read and rows that fold."""
    run = SMALL[kind]
    work = Interpreted.of(replace(run.scene, counts=(0, 5, 4, 3, 4)), Bench(run.arch, "early"))
    gate = part(work.inputs, "gate")
    gate.copy_(torch.tensor([3e4, -30.0, 4.0, float("-inf"), 21.0]).view(-1, *[1] * (gate.dim() - 1)))
    part(work.inputs, "rate").fill_(-400.0 if kind == "mamba2" else 6.0)
    if kind != "mamba2":
        work.pool.decay[:, :, 1] = -float("inf")
    assert mistakes(work) == []


@each_kernel
def test_more_rows_than_a_grid_has_are_refused(kind: Recurrence) -> None:
    work = Interpreted.of(SMALL[kind].scene, Bench(SMALL[kind].arch))
    many = per_token(work.inputs, lambda x: x[:1].expand(65536, *x.shape[1:]).contiguous())
    work = replace(work, inputs=many, cache_indices=torch.full((65536,), -1), force_fold=None)
    with pytest.raises(NotImplementedError, match=r"cache_indices: .*65535 rows, got 65536"):
        work.step()


@pytest.mark.parametrize(("arch", "draft", "index"), [("sm_90a", 1, torch.int64), ("sm_103a", 3, torch.int32)])
def test_a_commit_is_the_rule(arch: str, draft: int, index: torch.dtype) -> None:
    """130 rows in two CTAs: every record count with ring starts on both sides of the wrap, padding among them."""
    counts = tuple((0, 1, 2, PAD, 3, 4, 5)[row % 7] for row in range(130))
    scene = Scene(
        replace(SMALL["mamba2"].case, T=draft), counts, forced=tuple(range(0, 130, 3)), capacity=9, index_dtype=index
    )
    accepted = torch.arange(130, dtype=torch.int32) % (draft + 1)
    for given in (None, accepted):
        work = Interpreted.of(scene, Bench(arch, "early"))
        twin = work.clone()
        work.commit(num_draft=draft, num_accepted=given)
        reference.commit(
            twin.cursors,
            cache_indices=twin.cache_indices,
            num_draft=draft,
            num_accepted=given,
            force_fold=twin.force_fold,
        )
        assert torch.equal(work.cursors.ring_start, twin.cursors.ring_start)
        assert torch.equal(work.cursors.num_committed, twin.cursors.num_committed)


# Teeth.


SHUFFLE = r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+)"
BARRIER, WAIT, RING = r"bar\.sync\s+0;", r"bra\.uni\s+LAB_WAIT;", r"(setp\.gt\.u32\s+%p\d+, %r\d+), 6;"
UNORDERED, ASTRAY = "race: shared|uninitialised: shared", "output|out_of_bounds: global"
Fault = tuple[Callable[[str], str], str]
# Which barrier is the one behind the partial sums, and which of the comparisons with the end of the ring, and of the
# loads of decay records, concerns a record that wraps around, and one that is absent.
PLACES: dict[Recurrence, tuple[int, int, int]] = {"mamba2": (2, 0, 0), "gdn": (2, 0, 0), "kda": (3, 0, 3)}


def of_all(kind: Recurrence) -> dict[str, Fault]:
    """The change, and how its report or the first wrong result begins. The first two barriers of the kernel order
    loads, not memory; of the rest each is needed."""
    barrier, ring, absent = PLACES[kind]
    return {
        "no barrier behind the partial sums": (swap(BARRIER, "", barrier), UNORDERED),
        "no barrier behind the staged records": (swap(BARRIER, "", barrier + 1), UNORDERED),
        "no barrier behind the products": (swap(BARRIER, "", barrier + 2), UNORDERED),
        "no wait in a row that reads": (swap(WAIT, "", 0), UNORDERED),
        "no wait in a row that folds": (swap(WAIT, "", 1), UNORDERED),
        "a ring one row too long": (swap(RING, r"\1, 7;", ring), ASTRAY),
        "a ring one row too short": (swap(RING, r"\1, 5;", ring), ASTRAY),
        "absent records loaded": (swap(r"@p (ld\.global\.cs\.b32)", r"\1", absent), ASTRAY),
        "a sum over half of the lanes": (swap(SHUFFLE + ", 4,", r"\1, 0,"), "output"),
        "a copy of 16 bytes less": (swap(r"(cp\.async\.bulk\S+ [^;]*), 16384,", r"\1, 16368,"), "deadlock"),
        "16 bytes less expected": (swap(r"(mov\.b32\s+%r\d+), 16384;", r"\1, 16368;"), "deadlock"),
        "no mbarrier": (swap(r"mbarrier\.init\S+\s+[^;]*;", ""), "mbarrier"),
        "no fence behind the mbarrier": (swap(r"fence\.mbarrier_init\S*;", ""), "missing_fence"),
        "a misaligned load": (swap(r"(ld\.shared\.v4\.b32 [^;]*)\+\d+\]", r"\1+8]"), "misaligned"),
        "a load behind shared memory": (swap(r"(ld\.shared\.v4\.b32 [^;]*)\+\d+\]", r"\1+49152]"), "out_of_bounds"),
    }  # fmt: skip


NORM, SUB = r"rsqrt\.approx\.f32\s+(%r\d+), %r\d+;", r"sub\.f32(\s+%r\d+, %r\d+, %r\d+;\s+mul\.f32)"
ONE, SUM = r"mov.f32 \1, 0f3F800000;", r"add\.f32(\s+(%r\d+), %r\d+), %r\d+;"
SCALAR, CHANNEL = r"@p st\.global\.b32 [^;]*;", r"@p st\.global\.b16 [^;]*;"  # stores, in order: see the names below
OF_DELTA_RULE: dict[str, Fault] = {
    "a key appended by every warp": (swap(r"@p (st\.global\.v2\.b32)", r"\1"), "race: global"),
    "half of a key not appended": (swap(r"@p st\.global\.v2\.b32 [^;]*;", "", 1), "key"),
    "a key not appended by a fold": (swap(r"@p st\.global\.v2\.b32 [^;]*;", "", 2), "key"),
    "a decay not appended": (swap(SCALAR, "", 0), "decay"),
    "a u not appended": (swap(CHANNEL, "", 1), "value"),
    "a u not appended by a fold": (swap(CHANNEL, "", 3), "value"),
    "an output not written": (swap(CHANNEL, "", 2), "output"),
    "a query not normalised": (swap(NORM, ONE, 0), "output"),
    "a key not normalised": (swap(NORM, ONE, 1), "output|key"),
    "a query not normalised by a fold": (swap(NORM, ONE, 2), "output"),
    "a key not normalised by a fold": (swap(NORM, ONE, 3), "output|key"),
    "a norm over half of a key": (swap(SHUFFLE + ", 4,", r"\1, 0,", 1), "output|value|key"),
    "a beta without its sigmoid": (swap(r"rcp\.approx\.ftz\.f32 (%r\d+), %r\d+;", ONE), "output"),
    "a state that grows": (swap(r"neg\.f32\s+(%r\d+), (%r\d+);\s+(?=mul\.f32)", r"mov.f32 \1, \2;"), "output|decay"),
    "a correction that adds": (swap(SUB, r"add.f32\1"), "output"),
    "a correction that adds in a fold": (swap(SUB, r"add.f32\1", 1), "output"),
    "sums of the key over those of the query": (swap(r"(ld\.shared\.b32 [^;]*)\+0\];", r"\1+1024];"), "output"),
    "a score of the token with itself from half of the lanes": (swap(SHUFFLE + ", 1,", r"\1, 0,", 4), "output"),
    "a product of state and key from half of the lanes": (swap(SHUFFLE + ", 1,", r"\1, 0,", 6), "output"),
}  # fmt: skip
OF_ONE: dict[Recurrence, dict[str, Fault]] = {
    "mamba2": {
        "a key appended by every lane": (swap(r"@p (st\.global\.v2\.b32)", r"\1"), "output|key|race: global"),
        "a value not appended": (swap(r"@p st\.global\.v4\.b32 [^;]*;", ""), "value"),
        "a state that grows": (swap(r"(mul\.f32\s+%r\d+, %r\d+), 0f3FB8AA3B", r"\1, 0fBFB8AA3B"), "output"),
    },
    "gdn": {**OF_DELTA_RULE, "a decay not appended by a fold": (swap(SCALAR, "", 1), "decay")},
    "kda": {
        **OF_DELTA_RULE,
        "no barrier behind the staged decays": (swap(BARRIER, "", 2), UNORDERED),
        "a record that forgets a decay": (
            swap(SUM + r"(\s+(add\.s32 [^;]*;\s+)?mul\.f32\s+%r\d+, \2, 0f3FB8AA3B;)", r"add.f32\1, 0f00000000;\3"),
            "output",
        ),
        "a channel without its bias": (swap(r"@p ld\.global\.b32 [^;]*;", ""), "output|decay"),
    },
}  # fmt: skip
FAULTS = [(kind, name) for kind in KERNELS for name in of_all(kind) | OF_ONE[kind]]


def caught(run: Run, change: Callable[[str], str]) -> list[str]:
    """What a row that folds and one that reads, and wraps around, find in a changed kernel. Copies are late."""
    scene = replace(run.scene, counts=(run.case.window, 3), starts=(4, 5), forced=None)
    try:
        return mistakes(Interpreted.of(scene, Bench(run.arch, "late", change=change)), config=StepConfig())
    except TroubleError as trouble:
        return [str(trouble)]


@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_a_fault_in_the_kernel_is_caught(kind: Recurrence, fault: str) -> None:
    change, beginning = (of_all(kind) | OF_ONE[kind])[fault]
    (first, *_) = caught(SMALL[kind], change)
    assert re.match(beginning, first), first


@pytest.mark.parametrize("barrier", range(2, 9))
def test_each_barrier_is_needed_where_values_are_staged_in_parts(barrier: int) -> None:
    """Those behind the staged decays, the partial sums, the staged keys, each part's values and folds, the products."""
    (first, *_) = caught(IN_PARTS, swap(BARRIER, "", barrier))
    assert re.match(UNORDERED, first), first


@pytest.mark.parametrize("run", [*SMALL.values(), IN_PARTS, IN_FOUR_PARTS, ODD_ROWS], ids=lambda run: run.id)
def test_the_kernel_without_a_fault_passes(run: Run) -> None:
    """With a head a CTA, and more values of a fold at a time than in `CASES`."""
    assert caught(run, str) == []
