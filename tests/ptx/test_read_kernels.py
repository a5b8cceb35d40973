"""The compiled step reads the copy and folds the checkpoint, executed instruction by instruction on a CPU.

Numbers: one step against the replay form in float64 that starts from the decoded copies, within the bounds of the steps
without copies; what a fold writes against that fold, and its copy bit for bit against `reference.quant.encode`. Grid:
`RUNS`, in which each recurrence meets each format, and 1, 4 and 9 tokens, every d_state and head_dim, every dtype of
checkpoint, splits, both architectures and rows of different lengths occur; in each, rows that read, that fold, that are
forced to, and padding. All codes with random scales; scales at the ends of their range; what is not finite. A copy that
is poison changes no fold. Each launch runs with asynchronous copies as early and as late as they may be, and must give
the same bits. Teeth: faults in the PTX are caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels.configs import StepConfig
from replayssm.pool import READ_PARTS
from replayssm.reference import replay as reference
from replayssm.reference import storage
from replayssm.spec import READ_FORMATS, RECURRENCES, ReadDtype, Recurrence
from tests.helpers.cases import Case
from tests.helpers.oracle import F32, PAD, Given, Scene, Work, mistakes, ragged
from tests.helpers.tolerance import same_bytes
from tests.ptx import recorder
from tests.ptx.launches import Bench, Interpreted, swap
from tests.ptx.machine import TroubleError

pytestmark = pytest.mark.skipif(recorder.why_no_recorder() is not None, reason=str(recorder.why_no_recorder()))
F16, BF16, FP8, INT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8


@dataclass(frozen=True)
class Run:
    """A layer with its copy, how it is called and for which architecture."""

    case: Case
    read: ReadDtype
    arch: str = "sm_90a"
    split: int = 1
    warps: int = 1
    heads: int = 1
    ragged: bool = False

    @property
    def id(self) -> str:
        read = str(self.read).removeprefix("torch.")
        config = f"split{self.split}-warps{self.warps}-heads{self.heads}"
        return f"{self.arch}-{self.case.id}-{read}-{config}{'-ragged' * self.ragged}"

    @property
    def scene(self) -> Scene:
        """Rows that read, fold, are forced to fold, and padding."""
        counts = (2, self.case.window, PAD, 1)
        scene = Scene(self.case, counts, forced=(3,), ring_layout="head_major", read_dtype=self.read)
        return ragged(scene) if self.ragged else scene


def case(kind: Recurrence, V: int, K: int, T: int, *dtypes: torch.dtype, HV: int = 1) -> Case:
    """Of one key head, with dtypes of activation and checkpoint."""
    return Case(kind, HV, 1, V, K, max(5, T + 2), T, *dtypes)


FORMATS: tuple[ReadDtype, ...] = ("nvfp4", "mxfp8", FP8, INT8, BF16, F16)
RUNS = (
    *(
        Run(
            case(kind, 64, 64, 9 if i == j else (1, 4)[(i + j) % 2], (BF16, F32, F16)[j % 3], F32),
            read,
            warps=(1, 2, 4)[(i + j // 2) % 3],
        )
        for i, kind in enumerate(RECURRENCES)
        for j, read in enumerate(FORMATS)
    ),
    Run(case("mamba2", 80, 256, 1, BF16, F32), "nvfp4", warps=2),
    Run(case("mamba2", 64, 128, 1, F32, BF16), FP8, ragged=True),
    Run(case("mamba2", 64, 128, 1, BF16, F32, HV=2), FP8, heads=2),
    Run(case("gdn", 64, 128, 4, BF16, F32), FP8),
    Run(case("gdn", 128, 64, 4, BF16, F16), "nvfp4", "sm_103a", split=2),
    Run(case("gdn", 64, 256, 1, BF16, BF16), "mxfp8", "sm_103a", ragged=True),
    Run(case("kda", 64, 128, 1, F16, F16), "nvfp4", ragged=True),
    Run(case("mamba2", 64, 64, 1, BF16, F32, HV=4), "nvfp4", heads=2),
    Run(case("mamba2", 64, 64, 4, BF16, F32, HV=2), "nvfp4", heads=2, ragged=True),
    Run(case("mamba2", 64, 64, 9, BF16, BF16, HV=2), FP8, "sm_103a", warps=2, heads=2),
    Run(case("gdn", 128, 64, 1, BF16, F32, HV=3), "nvfp4", heads=3, ragged=True),
    Run(replace(case("gdn", 64, 64, 4, BF16, F32, HV=2), window=20), "nvfp4", warps=2, heads=2),
    Run(replace(case("mamba2", 64, 128, 9, BF16, F32, HV=4), window=20), "nvfp4", heads=4),
    Run(case("mamba2", 64, 128, 4, BF16, F32, HV=4), "mxfp8", heads=2),
    Run(case("mamba2", 80, 64, 1, BF16, F32, HV=8), "nvfp4", heads=8),
    Run(case("gdn", 64, 256, 1, BF16, F32, HV=2), "nvfp4", warps=2, heads=2),
)


def after(run: Run, mode: Any, seed: int) -> list[torch.Tensor]:
    """All that a step wrote, once it is known to be right."""
    bench, outputs = Bench(run.arch, mode, seed), []
    work = Interpreted.of(run.scene, bench)
    config = StepConfig(run.split, run.warps, fold_values=32, heads=run.heads)
    assert mistakes(work, after=lambda work, out: outputs.append(out), config=config) == [], (mode, seed)
    (launch,) = bench.launches
    assert f".target {run.arch}" in launch.ptx and "mma.sync" in launch.ptx
    return [*outputs, *work.written()]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_a_step_reads_the_copy_and_folds_the_checkpoint(run: Run) -> None:
    late = after(run, "late", 1)
    if run.split > 1 or run.heads > 1 or run.ragged:
        assert all(same_bytes(a, b) for a, b in zip(late, after(run, "early", 0), strict=True))


def test_the_grid_covers_what_it_says() -> None:
    assert {(run.case.recurrence, run.read) for run in RUNS} == {(k, r) for k in RECURRENCES for r in READ_FORMATS}
    for kind in RECURRENCES:
        runs = [run for run in RUNS if run.case.recurrence == kind]
        assert {run.case.T for run in runs} == {1, 4, 9} and any(run.ragged for run in runs)
        assert {run.case.activation for run in runs} == {F32, BF16, F16}
    assert {run.warps for run in RUNS if run.read == "nvfp4"} == {1, 2, 4}
    assert {(run.case.T > 1, run.warps) for run in RUNS if run.heads > 1} == set(product((False, True), (1, 2)))
    assert {run.case.V for run in RUNS} == {64, 80, 128} and {run.case.K for run in RUNS} == {64, 128, 256}
    assert {run.case.checkpoint for run in RUNS} == {F32, BF16, F16}


# What a copy may hold.

PLAIN = {read: Run(case("mamba2", 64, 64, 1, F32, F32), read) for read in FORMATS}


def with_bytes(run: Run, codes: torch.Tensor, scale: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Work:
    """A step whose copies hold these codes, one after the other, and other scales."""
    work = run.scene.on("cpu")
    held, scales = work.pool.read_codes, work.pool.read_scale
    assert held is not None
    held.view(torch.uint8).copy_(codes.repeat(held.numel() // len(codes) + 1)[: held.numel()].view(held.shape))
    if scale is not None and scales is not None:
        scales.copy_(scale(scales))
    if work.pool.read_tile_scale is not None:
        work.pool.read_tile_scale.fill_(2.0**-3)
    return work


@pytest.mark.parametrize("read", ["nvfp4", "mxfp8", FP8, INT8], ids=str)
def test_every_code_is_read(read: ReadDtype) -> None:
    """All bytes of codes but those of NaN, in an odd period so that each is met in every place, with random scales."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = codes if read in ("nvfp4", INT8) else codes[codes & 0x7F != 0x7F]
    codes = codes[: len(codes) - 1 + len(codes) % 2]
    generator = torch.Generator().manual_seed(3)

    def scale(given: torch.Tensor) -> torch.Tensor:
        if given.is_floating_point():
            return torch.rand(given.shape, generator=generator) + 0.5
        low, high = (0x20, 0x60) if read == "nvfp4" else (124, 130)
        return torch.randint(low, high, given.shape, generator=generator).to(torch.uint8)

    assert mistakes(Interpreted.of(with_bytes(PLAIN[read], codes, scale), Bench("sm_90a", "late"))) == []


@pytest.mark.parametrize("power", [-100, 90])
@pytest.mark.parametrize("T", [1, 4])
def test_probes_of_any_size_are_read(T: int, power: int) -> None:
    """Queries times a power of two give outputs times that, bit for bit."""
    scene = replace(Run(case("mamba2", 64, 64, T, F32, F32), FP8).scene, forced=(), given=Given(D=None, z=False))
    work, changed = scene.on("cpu"), scene.on("cpu")
    changed.inputs.C.mul_(2.0**power)
    outs = [Interpreted.of(one, Bench("sm_90a", "early")).step() for one in (work, changed)]
    assert bool(outs[0].any()) and same_bytes(outs[0] * 2.0**power, outs[1])


@pytest.mark.parametrize(("byte", "low", "high"), [(0, 0.0, 1e-30), (1, 0.0, 1e-30), (60, 0, 1e-12), (190, 1e18, 1e30)])
def test_scales_of_blocks_at_the_ends_of_their_range(byte: int, low: float, high: float) -> None:
    """MXFP8: a block as small as can be counts as 0 at least, never as something else."""
    run = PLAIN["mxfp8"]
    scene = replace(run.scene, counts=(0,), forced=())
    work = scene.on("cpu")
    zero = work.clone()
    for one, codes in ((work, 0x7E), (zero, 0)):
        assert one.pool.read_codes is not None and one.pool.read_scale is not None
        one.pool.read_codes.fill_(codes)
        one.pool.read_scale.fill_(byte)
    outs = [Interpreted.of(one, Bench("sm_90a", "early")).step() for one in (work, zero)]
    reach = (outs[0] - outs[1]).abs()
    assert bool(outs[0].isfinite().all()) and low <= float(reach.max()) <= high


@pytest.mark.parametrize("read", FORMATS, ids=str)
def test_what_is_not_finite_stays_within_what_shares_its_scale(read: ReadDtype) -> None:
    """A NaN and an infinity reach the outputs that the twin says, and no others."""
    work = PLAIN[read].scene.on("cpu")
    work.pool.checkpoint[work.slots, 0, 20, 3], work.pool.checkpoint[work.slots, 0, 50, 40] = torch.nan, torch.inf
    storage.write_copy(work.pool, work.slots)
    twin = work.clone()
    want = reference.step(twin.pool, twin.cursors, twin.inputs, cache_indices=twin.cache_indices)
    out = Interpreted.of(replace(work, force_fold=None), Bench("sm_90a", "late")).step()
    assert torch.equal(out.isfinite(), want.isfinite())
    assert 0 < int((~out.isfinite()).sum()) < out.numel()


@pytest.mark.parametrize("kind", RECURRENCES)
def test_a_poisoned_copy_changes_no_fold(kind: Recurrence) -> None:
    run = Run(case(kind, 64, 64, 4, BF16, F32), "nvfp4")
    clean, poisoned = (Interpreted.of(run.scene, Bench("sm_90a", "late")) for _ in range(2))
    for name in READ_PARTS:
        tensor = getattr(poisoned.pool, name)
        tensor[poisoned.slots] = torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0x7F)[:1]
    folding = clean.slots[clean.fold_counts() > 0]
    outs = [clean.step(), poisoned.step()]
    assert len(folding) == 2 and not same_bytes(*outs)  # teeth
    for name in ("checkpoint", *READ_PARTS):
        assert same_bytes(*(getattr(work.pool, name)[folding] for work in (clean, poisoned))), name


# Teeth.

SEVERAL_WARPS = StepConfig(warps=4, fold_values=32)  # one warp needs no barrier
FAULTS: dict[ReadDtype, dict[str, Callable[[str], str]]] = {
    "nvfp4": {
        "no wait for the codes": swap(r"bra\.uni\s+LAB_WAIT;", ""),
        "the scale of another block": swap(r"shl\.b32(\s+%r\d+, %r\d+), 3;", r"shl.b32\1, 4;", -1),
        "no scale of the tile": swap(r"mul\.f32(\s+%r\d+), (%r\d+), 0f67800000;", r"mov.b32\1, \2;"),
        "a code without its sign": swap("-2118090304", "29360576", 1),
        "a code without its last bit": swap("-2118090304", "-2122284672", 2),
        "a copy that is not made": swap(r"st\.global\.v2\.b32[^;]*;", "", -1),
        "probes in another order": swap(r"prmt\.b32 (%r\d+), (%r\d+), (%r\d+), 0x5410;", r"mov.b32 \1, \2;"),
    },
    "mxfp8": {
        "a power of two too many": swap(r"shl\.b32(\s+%r\d+, %r\d+), 7;", r"shl.b32\1, 8;", -1),
        "a code without its first bit": swap("133171184", "66062320", 1),
        "half of the exponent": swap("2072017792", "1065369472"),
    },
    FP8: {
        "probes half as large": swap("-2046820352", "-2055208960"),
        "sums half as large": swap("-117440512", "-125829120"),
        "codes of one half": swap(r"\{\.reg \.b16 l,h; mov\.b32 \{l,h\}", "{.reg .b16 l,h; mov.b32 {l,l}"),
    },
    INT8: {
        "a sign that is not read": swap("8388736", "0", 1),
        "the scales of the next rows": swap(r"(ld\.global\.v2\.b32 \{%r\d+,\s*%r\d+\}, \[%rd\d+)\+0\];", r"\1+8];", -1),
    },
}  # fmt: skip


def found(run: Run, config: StepConfig, change: Callable[[str], str] = str) -> list[str]:
    """What is wrong with a step whose PTX is changed."""
    try:
        return mistakes(Interpreted.of(run.scene, Bench("sm_90a", "late", change=change)), config=config)
    except TroubleError as trouble:
        return [str(trouble)]


@pytest.mark.parametrize(
    ("read", "fault"), [(read, fault) for read, faults in FAULTS.items() for fault in faults], ids=str
)
def test_a_fault_in_the_kernel_is_caught(read: ReadDtype, fault: str) -> None:
    assert found(Run(case("mamba2", 64, 64, 1, BF16, F32), read), SEVERAL_WARPS, FAULTS[read][fault])


SHARED_CTA = Run(case("mamba2", 64, 64, 4, BF16, F32, HV=2), "nvfp4", heads=2)
TWO_HEADS = StepConfig(warps=1, heads=2)
SHARED_CTA_FAULTS: dict[str, Callable[[str], str]] = {
    "no wait for the scales": swap(r"(mbarrier\.init\S+\s+\[%r\d+\], )%r\d+;", r"\g<1>1;"),
    "the scales of some rows": swap(r"(cp\.async\.bulk\.shared\S+ \S+ \S+ )512,", r"\g<1>496,"),
    "no barrier behind the scores": swap(r"bar\.sync\s+0;", "", 2),
    "no barrier in front of the fold": swap(r"bar\.sync\s+0;", "", 3),
}


@pytest.mark.parametrize("fault", SHARED_CTA_FAULTS)
def test_a_fault_of_heads_that_share_a_cta_is_caught(fault: str) -> None:
    assert found(SHARED_CTA, TWO_HEADS, SHARED_CTA_FAULTS[fault])


@pytest.mark.parametrize("read", FAULTS, ids=str)
def test_the_kernel_without_a_fault_passes(read: ReadDtype) -> None:
    assert found(Run(case("mamba2", 64, 64, 1, BF16, F32), read), SEVERAL_WARPS) == []


def test_the_kernel_of_heads_that_share_a_cta_passes_without_a_fault() -> None:
    assert found(SHARED_CTA, TWO_HEADS) == []


def test_a_shared_tile_holds_codes() -> None:
    """A CTA takes shared memory for the codes, not for the checkpoint, and a fold stages its records over the codes."""
    taken = {}
    for read in (None, "nvfp4"):
        bench = Bench("sm_90a")
        Interpreted.of(
            replace(PLAIN["nvfp4"].scene, read_dtype=read, case=case("mamba2", 64, 64, 4, BF16, F32)), bench
        ).step()
        taken[read] = bench.launches[0].shared_bytes
    assert taken["nvfp4"] == taken[None] - 64 * 64 * 4 > 64 * 64 // 2
