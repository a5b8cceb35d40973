"""The compiled step and commit compute what the mathematics says, executed instruction by instruction on a CPU.

Host code and PTX are those that a GPU would run; only the device is interpreted. Numbers: one step against the replay
form in float64, and a trace against the token-by-token recurrence, within the bounds of the GPU tests
(`helpers.tolerance`). Grid: `CASES`, in which every dtype, head_dim, d_state, window, split, option and architecture
occurs; in each, rows that read, that fold, that are forced to, and padding in one launch, with NaN in all that no
output may depend on. Each launch runs with asynchronous copies as early and as late as they may be, and with warps
in another order, and must give the same bits. Teeth: faults put into the PTX are all caught, each as what it is.
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
from tests.helpers.cases import Case
from tests.helpers.oracle import ALL, BARE, F32, PAD, Given, Scene, Trace, mistakes, per_token
from tests.helpers.tolerance import same_bytes
from tests.ptx import recorder
from tests.ptx.launches import Bench, Interpreted
from tests.ptx.machine import Mode, TroubleError

pytestmark = pytest.mark.skipif(recorder.why_no_recorder() is not None, reason=str(recorder.why_no_recorder()))
BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Run:
    """A kernel to run: its layer, how it is called and for which architecture."""

    arch: str
    case: Case
    given: Given = ALL
    split: int = 1
    pdl: bool = False
    layout: RingLayout = "record_major"
    index: torch.dtype = torch.int32

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


def case(heads: int, groups: int, head_dim: int, d_state: int, window: int, *dtypes: torch.dtype) -> Case:
    activation, checkpoint = dtypes
    return Case("mamba2", heads, groups, head_dim, d_state, window, 1, activation, checkpoint)


CASES = (
    Run("sm_90a", case(2, 1, 64, 64, 5, BF16, F32)),
    Run("sm_103a", case(1, 1, 64, 128, 16, BF16, F32), Given(z=False), pdl=True, index=torch.int64),
    Run("sm_90a", case(1, 1, 80, 64, 5, F32, BF16), BARE, layout="head_major"),
    Run("sm_103a", case(1, 1, 64, 64, 33, F32, F16), Given(D=None, dt_bias=None), split=2),
    Run("sm_103a", case(2, 2, 64, 64, 16, F16, F16), Given(dt_bias=F16, dt_softplus=False), layout="strided"),
    Run("sm_90a", case(1, 1, 80, 128, 5, BF16, BF16), Given(D=None, z=False, dt=F32), pdl=True),
)


def after(run: Run, mode: Mode, seed: int) -> list[torch.Tensor]:
    """All that a step wrote, once it is known to be right."""
    bench, outputs = Bench(run.arch, mode, seed), []
    work = Interpreted.of(run.scene, bench)
    config = StepConfig(run.split)
    found = mistakes(work, after=lambda work, out: outputs.append(out), config=config, pdl=run.pdl)
    assert found == [], (run, mode, seed)
    (launch,) = bench.launches
    assert f".target {run.arch}" in launch.ptx
    return [*outputs, *work.written()]


@pytest.mark.parametrize("run", CASES, ids=lambda run: f"{run.arch}-{run.case.id}-split{run.split}-{run.given.id}")
def test_a_step_is_the_replay_form(run: Run) -> None:
    early, late, other = after(run, "early", 0), after(run, "late", 0), after(run, "late", 1)
    for again in (late, other):
        assert all(same_bytes(a, b) for a, b in zip(early, again, strict=True))


def test_the_grid_covers_what_it_says() -> None:
    cases = [run.case for run in CASES]
    assert {c.activation for c in cases} == {c.checkpoint for c in cases} == {F32, BF16, F16}
    assert {c.V for c in cases} == {64, 80}
    assert {c.K for c in cases} == {64, 128}
    assert {c.window for c in cases} == {5, 16, 33}
    assert {run.split for run in CASES} == {1, 2}
    assert {run.layout for run in CASES} == {"record_major", "head_major", "strided"}
    for option in ("D", "z", "dt_bias", "dt_softplus"):
        assert {bool(getattr(run.given, option)) for run in CASES} == {False, True}
    for arch in ("sm_90a", "sm_103a"):
        assert {run.pdl for run in CASES if run.arch == arch} == {False, True}


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


@pytest.mark.parametrize("run", CASES, ids=[run.case.id for run in CASES])
def test_only_scalars_move_narrowly(run: Run) -> None:
    """Loads: slot, mask, cursor, the token's dt, A, bias, D, its gate and value channels, the window's decays.
    Stores: an output in each of three branches, and decay records. One vector taken apart would exceed either."""
    ptx = ptx_of(run)
    assert narrow("ld", ptx) <= 12
    assert narrow("st", ptx) <= 6
    assert narrow("ld", ptx.replace("ld.global.cs.v4.b32", "ld.global.b32; " * 4, 1)) >= narrow("ld", ptx) + 4
    assert "griddepcontrol" not in ptx or waits_first(ptx)
    assert not waits_first("ld.global.b32 %r1, [%rd1]; griddepcontrol.wait;")


def test_steps_and_commits_are_the_recurrence() -> None:
    """Random acceptance, forced folds and padding, with a window that fills every other step."""
    trace = Trace(case(1, 1, 64, 64, 2, F32, F32), torch.device("cpu"), slots=3)
    bench = Bench("sm_90a", "late")
    trace.work = Interpreted.of(trace.work, bench)
    for _ in range(8):
        trace.step()
    assert trace.mistakes() == []
    assert len(bench.launches) == 16


SMALL = Run("sm_90a", case(1, 1, 64, 64, 5, BF16, F32))


def test_a_prepared_launch_sees_other_memory() -> None:
    """A parameter may be given other memory, as loading weights does; the object stays."""
    work = Interpreted.of(SMALL.scene, Bench(SMALL.arch, "early"))
    assert mistakes(work) == []
    for name in ("A", "D", "dt_bias"):
        parameter = getattr(work.inputs, name)
        parameter.data = parameter * 2 + (name == "D")
        assert mistakes(work) == [], name


def test_any_negative_slot_is_padding() -> None:
    work = Interpreted.of(replace(SMALL.scene, index_dtype=torch.int64), Bench(SMALL.arch, "early"))
    for slot in (-1, -(2**31), -(2**32), torch.iinfo(torch.int64).min):
        work.cache_indices[1] = slot
        assert mistakes(work) == [], slot


def test_more_rows_than_a_grid_has_are_refused() -> None:
    work = Interpreted.of(SMALL.scene, Bench(SMALL.arch))
    many = per_token(work.inputs, lambda x: x[:1].expand(65536, *x.shape[1:]).contiguous())
    work = replace(work, inputs=many, cache_indices=torch.full((65536,), -1), force_fold=None)
    with pytest.raises(NotImplementedError, match=r"inputs\.x: .*65535 rows, got 65536"):
        work.step()


@pytest.mark.parametrize(("arch", "draft", "index"), [("sm_90a", 1, torch.int64), ("sm_103a", 3, torch.int32)])
def test_a_commit_is_the_rule(arch: str, draft: int, index: torch.dtype) -> None:
    """130 rows in two CTAs: every record count with ring starts on both sides of the wrap, padding among them."""
    counts = tuple((0, 1, 2, PAD, 3, 4, 5)[row % 7] for row in range(130))
    scene = Scene(replace(SMALL.case, T=draft), counts, forced=tuple(range(0, 130, 3)), capacity=9, index_dtype=index)
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


def swap(pattern: str, by: str, which: int = 0) -> Callable[[str], str]:
    """A fault: the match number `which` of a pattern becomes something else."""

    def change(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))
        start, end = found[which].span()
        return ptx[:start] + found[which].expand(by) + ptx[end:]

    return change


BARRIER, WAIT, RING = r"bar\.sync\s+0;", r"bra\.uni\s+LAB_WAIT;", r"(setp\.gt\.s32\s+%p\d+, %r\d+), 6;"
UNORDERED, ASTRAY = "race: shared|uninitialised: shared", "output|out_of_bounds: global"
# The change, and how its report or the first wrong result begins. The first two barriers of the kernel order loads, not
# memory; of the rest each is needed.
FAULTS: dict[str, tuple[Callable[[str], str], str]] = {
    "no barrier behind the partial sums": (swap(BARRIER, "", 2), UNORDERED),
    "no barrier behind the staged records": (swap(BARRIER, "", 3), UNORDERED),
    "no barrier behind the products": (swap(BARRIER, "", 4), UNORDERED),
    "no wait in a row that reads": (swap(WAIT, "", 0), UNORDERED),
    "no wait in a row that folds": (swap(WAIT, "", 1), UNORDERED),
    "a ring one row too long": (swap(RING, r"\1, 7;"), ASTRAY),
    "a ring one row too short": (swap(RING, r"\1, 5;"), ASTRAY),
    "absent records loaded": (swap(r"@p (ld\.global\.cs\.b32)", r"\1"), ASTRAY),
    "a key appended by every lane": (swap(r"@p (st\.global\.v2\.b32)", r"\1"), "output|key|race: global"),
    "a value not appended": (swap(r"@p st\.global\.v4\.b32 [^;]*;", ""), "value"),
    "a state that grows": (swap(r"(mul\.f32\s+%r\d+, %r\d+), 0f3FB8AA3B", r"\1, 0fBFB8AA3B"), "output"),
    "a sum over half of the lanes": (swap(r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 4,", r"\1, 0,"), "output"),
    "a copy of 16 bytes less": (swap(r"(cp\.async\.bulk\S+ [^;]*), 16384,", r"\1, 16368,"), "deadlock"),
    "16 bytes less expected": (swap(r"(mov\.b32\s+%r\d+), 16384;", r"\1, 16368;"), "deadlock"),
    "no mbarrier": (swap(r"mbarrier\.init\S+\s+[^;]*;", ""), "mbarrier"),
    "no fence behind the mbarrier": (swap(r"fence\.mbarrier_init\S*;", ""), "missing_fence"),
    "a misaligned load": (swap(r"(ld\.shared\.v4\.b32 [^;]*)\+128\]", r"\1+120]"), "misaligned"),
    "a load behind shared memory": (swap(r"(ld\.shared\.v4\.b32 [^;]*)\+12416\]", r"\1+28800]"), "out_of_bounds"),
}  # fmt: skip


def caught(change: Callable[[str], str]) -> list[str]:
    """What a row that folds and one that reads, and wraps around, find in a changed kernel. Copies are late."""
    scene = replace(SMALL.scene, counts=(5, 3), starts=(4, 5), forced=None)
    try:
        return mistakes(Interpreted.of(scene, Bench(SMALL.arch, "late", change=change)))
    except TroubleError as trouble:
        return [str(trouble)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_caught(fault: str) -> None:
    change, beginning = FAULTS[fault]
    (first, *_) = caught(change)
    assert re.match(beginning, first), first


def test_the_kernel_without_a_fault_passes() -> None:
    assert caught(str) == []
