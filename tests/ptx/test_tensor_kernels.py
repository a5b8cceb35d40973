"""The readout of several tokens on tcgen05, executed instruction by instruction on a CPU: no Blackwell was at hand.

Numbers: one step against the replay form in float64, within the bounds of the tests of mma.sync, and what the readout
alone errs against what `cute_kernels.operands` states. Grid: `RUNS`, in which each way to read a state (16 bits,
float32, NVFP4 as it is) meets each recurrence; 1, 4, 8 and 16 tokens, and for each recurrence a head as a released
model has it; heads that share a CTA, heads alone and halves of one, both architectures, rows of different lengths; in
each, rows that read and that fold, and padding. `EVERY` is all of that product. Each launch runs with
asynchronous work as early and as late as it may be, and must give the same bits and no report. Teeth: what orders is
left out, one statement at a time, and descriptors, places and scales are changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels.arch import ARCHES
from cute_kernels.configs import Precision, Readout, StepConfig
from cute_kernels.operands import KINDS, NVFP4_ERROR, STATE_ERROR
from replayssm.reference import storage
from replayssm.spec import RECURRENCES, ReadDtype, Recurrence
from tests.helpers.cases import Case
from tests.helpers.oracle import BARE, F32, F64, PAD, Scene, mistakes, ragged
from tests.helpers.tolerance import same_bytes
from tests.ptx import recorder
from tests.ptx.launches import Bench, Interpreted, swap
from tests.ptx.machine import Mode, TroubleError

pytestmark = pytest.mark.skipif(recorder.why_no_recorder() is not None, reason=str(recorder.why_no_recorder()))
BF16, F16 = torch.bfloat16, torch.float16
BLACKWELLS = tuple(name for name, arch in ARCHES.items() if arch.tensor_columns)


@dataclass(frozen=True)
class Run:
    """A kernel to run: its layer, how it is called and for which architecture."""

    arch: str
    case: Case
    read: ReadDtype | None = None
    warps: int = 4
    split: int = 1
    precision: Precision = "tf32"
    ragged: bool = False
    readout: Readout = "tcgen05"

    @property
    def id(self) -> str:
        """E.g. sm_103a-gdn-HV1-HK1-V64-K64-L6-T4-bf16-fp32-nvfp4-warps4-split1-tf32."""
        read = "" if self.read is None else f"-{str(self.read).removeprefix('torch.')}"
        read += "-f16" * (self.readout == "tcgen05_f16")
        end = f"-warps{self.warps}-split{self.split}-{self.precision}{'-ragged' * self.ragged}"
        return f"{self.arch}-{self.case.id}{read}{end}"

    @property
    def config(self) -> StepConfig:
        return StepConfig(self.split, self.warps, precision=self.precision, readout=self.readout)

    @property
    def kind(self) -> str:
        """Of the products, by the state's dtype, unless codes are decoded."""
        if self.readout == "tcgen05_f16":
            return "f16"
        return KINDS[str(self.read or self.case.checkpoint).removeprefix("torch.")]

    @property
    def scene(self) -> Scene:
        """Rows that read and that fold, and padding."""
        scene = Scene(self.case, (2, self.case.window, PAD), read_dtype=self.read)
        return ragged(scene) if self.ragged else scene


def case(kind: Recurrence, V: int, K: int, T: int, *dtypes: torch.dtype, heads: int = 1) -> Case:
    """Of heads that share their probes, with dtypes of activation and checkpoint."""
    return Case(kind, heads, 1, V, K, max(5, T + 2), T, *dtypes)


# How a state is read: dtypes of activation and checkpoint, a copy, the precision that its outputs ask for, the readout.
WAYS = (
    (BF16, BF16, None, "tf32", "tcgen05"),
    (BF16, F32, None, "tf32", "tcgen05"),
    (BF16, F32, "nvfp4", "tf32", "tcgen05"),
    (BF16, F32, "nvfp4", "tf32", "tcgen05_f16"),
)
TOKENS = (1, 4, 8, 16)


def of_product(kind: Recurrence, way: int, tokens: int, arch: str) -> Run:
    """A small shape: heads that share their probes, where they may, in twos and fours."""
    *dtypes, read, precision, readout = WAYS[way]
    warps = 4 if kind == "kda" else (2, 4, 1, 1)[way]
    small = case(kind, 64, 64, tokens, *dtypes, heads=4 // warps)
    return Run(arch, small, read, warps, precision=precision, ragged=tokens == 1 and read is None, readout=readout)


EVERY = tuple(
    of_product(kind, way, tokens, arch)
    for kind, way, tokens, arch in product(RECURRENCES, range(len(WAYS)), TOKENS, BLACKWELLS)
)
RUNS = (
    *(
        of_product(kind, way, tokens, BLACKWELLS[(i + way) % 2])
        for i, kind in enumerate(RECURRENCES)
        for way in range(len(WAYS))
        for tokens in (TOKENS[(i + way) % 4], TOKENS[(i + way + 2) % 4])
    ),
    # Heads of released models: in twos, in fours, whole, and a half of one.
    Run("sm_103a", case("mamba2", 64, 128, 8, BF16, F32, heads=2), warps=2),
    Run("sm_103a", case("gdn", 128, 128, 2, BF16, F32, heads=4), "nvfp4", warps=1),
    Run("sm_100a", case("gdn", 128, 128, 4, BF16, BF16)),
    Run("sm_103a", case("kda", 128, 128, 4, BF16, F32), "nvfp4"),
    Run("sm_103a", case("gdn", 128, 128, 2, BF16, F32), split=2),
    # More of a state, or of a probe, than one term; a copy of 16 bits; all of K that there is.
    Run("sm_103a", case("mamba2", 64, 64, 3, F32, F32), precision="fp32", ragged=True),
    Run("sm_100a", case("gdn", 64, 64, 3, F32, F32), precision="fp32"),
    Run("sm_103a", case("kda", 64, 64, 3, F32, F32), precision="fp32"),
    Run("sm_100a", case("mamba2", 64, 64, 3, F16, F16, heads=4), warps=1),
    Run("sm_103a", case("mamba2", 64, 64, 3, F32, F32), BF16, precision="fp32"),
    Run("sm_100a", case("mamba2", 64, 256, 3, F16, BF16)),
    Run("sm_103a", case("gdn", 64, 128, 2, F16, F32), "nvfp4", ragged=True),
    # Codes that are decoded: heads in twos, other dtypes of probes, all of K that there is.
    Run("sm_103a", case("mamba2", 64, 128, 8, BF16, F32, heads=2), "nvfp4", warps=2, readout="tcgen05_f16"),
    Run("sm_100a", case("gdn", 64, 256, 2, F16, F32), "nvfp4", ragged=True, readout="tcgen05_f16"),
    Run("sm_103a", case("kda", 128, 128, 2, F32, F32), "nvfp4", precision="fp32", readout="tcgen05_f16"),
)  # fmt: skip


def after(run: Run, mode: Mode, seed: int) -> list[torch.Tensor]:
    """All that a step wrote, once it is known to be right."""
    bench, outputs = Bench(run.arch, mode, seed), []
    work = Interpreted.of(run.scene, bench)
    found = mistakes(work, after=lambda work, out: outputs.append(out), config=run.config)
    assert found == [], (run, mode, seed)
    (launch,) = bench.launches
    assert f".target {run.arch}" in launch.ptx and f"tcgen05.mma.cta_group::1.kind::{run.kind}" in launch.ptx
    return [*outputs, *work.written()]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_a_step_is_the_replay_form(run: Run) -> None:
    early, late = after(run, "early", 0), after(run, "late", 1)
    assert all(same_bytes(a, b) for a, b in zip(early, late, strict=True))


def test_the_grid_covers_what_it_says() -> None:
    assert {run.arch for run in RUNS} == set(BLACKWELLS)
    for one in (lambda run: run.kind, lambda run: run.case.recurrence):
        groups = {one(run): {other.case.T for other in RUNS if one(other) == one(run)} for run in RUNS}
        assert all(tokens >= set(TOKENS) for tokens in groups.values()), groups
    assert {(run.case.recurrence, run.kind) for run in RUNS} == set(product(RECURRENCES, KINDS.values()))
    assert {run.warps for run in RUNS} == {1, 2, 4}
    decoded = {(run.case.recurrence, run.case.T) for run in RUNS if run.readout == "tcgen05_f16"}
    assert {kind for kind, _ in decoded} == set(RECURRENCES) and {tokens for _, tokens in decoded} >= set(TOKENS)
    assert len(EVERY) == 3 * 4 * 4 * 2


def test_mistakes_of_the_caller_free_tensor_memory_too() -> None:
    """Lengths that leave the inputs, and no row but padding: the machine reports what a CTA has not freed."""
    run = replace(RUNS[0], ragged=True, case=replace(RUNS[0].case, T=4, window=6))
    for change in (lambda work: work.inputs.cu_seqlens.mul_(3), lambda work: work.cache_indices.fill_(PAD)):
        work = Interpreted.of(run.scene, Bench(run.arch, "late"))
        change(work)
        work.step(config=run.config)


def read_error(
    checkpoint: torch.dtype, read: ReadDtype | None, precision: Precision, readout: Readout = "tcgen05"
) -> tuple[float, float]:
    """Of outputs that are the state times the query: the largest error, relative to the sum of magnitudes, of the
    state's values with the query's, and with the largest of each 16 of the query's."""
    run = Run("sm_103a", case("mamba2", 64, 64, 3, F32, checkpoint), read, precision=precision, readout=readout)
    work = Interpreted.of(replace(run.scene, counts=(0, 0), forced=None, given=BARE), Bench(run.arch, "early"))
    work.inputs.x.zero_()
    work.inputs.dt.zero_()
    state = work.pool.checkpoint if read is None else storage.read_copy(work.pool, torch.arange(work.pool.num_slots))
    state, query = state[work.slots, 0].to(F64), work.inputs.C[:, :, 0].to(F64)  # [rows, V, K], [rows, T, K]
    error = (work.step(config=run.config)[:, :, 0].to(F64) - query @ state.mT).abs()
    largest = query.abs().unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, -1)
    return tuple(float((error / (size @ state.abs().mT)).max()) for size in (query.abs(), largest))  # type: ignore


PROBE_ERROR = {
    BF16: {"bf16": 2.0**-8, "tf32": 2.0**-16, "fp32": 2.0**-24},
    F32: {"bf16": 2.0**-11, "tf32": 2.0**-11, "fp32": 2.0**-33},
}
SUM_ERROR = 2.0**-21  # 64 sums of float32, which the machine rounds one by one


@pytest.mark.parametrize(("checkpoint", "read"), [(BF16, None), (F32, None), (F32, "nvfp4")], ids=str)
def test_a_readout_errs_as_stated(checkpoint: torch.dtype, read: ReadDtype | None) -> None:
    """Codes are decoded here, without an error, and meet the terms that a bfloat16 state does."""
    for precision, probe in PROBE_ERROR[BF16 if read else checkpoint].items():
        stated = probe + (0 if read or checkpoint == BF16 else STATE_ERROR[precision])
        error, _ = read_error(checkpoint, read, precision, "tcgen05_f16" if read else "tcgen05")
        assert error < stated + SUM_ERROR
        assert stated < 2.0**-18 or error > stated / 16  # teeth: no other precision was asked for


def test_codes_are_read_as_exactly_as_stated() -> None:
    errors = {precision: read_error(F32, "nvfp4", precision)[1] for precision in NVFP4_ERROR}
    for precision, stated in NVFP4_ERROR.items():
        assert stated / 64 < errors[precision] < stated + SUM_ERROR
    # Of three terms the mean error is less than that of a query in bfloat16.
    assert errors["tf32"] < 2.0**-9


def test_codes_reach_the_tensor_cores_as_they_are() -> None:
    """Four heads take as many conversions of codes as one: all are of probes."""
    counts = set()
    for warps in (1, 4):
        run = Run("sm_103a", case("mamba2", 64, 64, 3, BF16, F32, heads=4), "nvfp4", warps)
        bench = Bench(run.arch)
        Interpreted.of(run.scene, bench).step(config=run.config)
        ptx = bench.launches[0].ptx
        counts.add((len(re.findall(r"cvt\S*e2m1x2", ptx)), len(re.findall(r"cvt\.rn\.satfinite\.e2m1x2", ptx))))
    ((both, made),) = counts
    # 16 values of a probe: 3 terms, of which 2 leave something.
    assert (made, both - made) == (3 * 16 // 2, 2 * 16 // 2)


# Teeth.

ORDERING = re.compile(
    r"bar\.sync[^;]*;|fence\.[^;]*;|tcgen05\.(?:fence|wait|commit|dealloc|cp)[^;]*;|cp\.async\.wait_all;"
    r"|mbarrier\.init[^;]*;|\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:.*?DONE:\s*\}",
    re.S,
)
SMALL = {
    "tf32": Run("sm_103a", case("mamba2", 64, 64, 2, BF16, F32)),
    "f16": Run("sm_100a", case("gdn", 64, 64, 2, BF16, BF16)),
    "mxf4nvf4": Run("sm_103a", case("mamba2", 64, 64, 2, BF16, F32), "nvfp4"),
    "decoded": Run("sm_100a", case("mamba2", 64, 64, 2, BF16, F32), "nvfp4", readout="tcgen05_f16"),
}
# What may go without a report, in the order of the PTX. Either of the first two barriers orders as much as the other,
# or that of the loads behind them. The fences are what PTX asks for around a barrier that orders tensor memory; the
# machine knows of no access that only they order but stores to it, where codes are decoded: allocation and release are
# orders of their own, and an mbarrier orders what tcgen05.commit was behind.
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
NEEDLESS = {
    kind: ["bar.sync", "bar.sync", *([] if kind == "decoded" else [BEFORE, AFTER]), AFTER, BEFORE, AFTER]
    for kind in SMALL
}
# By kind of product: a number, a place or a scale that is wrong.
OTHER_K, OTHER_SWIZZLE = (
    swap(r"(add\.s64 \s*%rd\d+, %rd\d+), 2;", r"\1, 4;"),
    swap("4611756662049538048", "-4611615374805237760"),
)
FAULTS: dict[str, dict[str, Callable[[str], str]]] = {
    "tf32": {
        "a step along K too far": OTHER_K,
        "128 rows": swap("mov.b32 i, 67242256", "mov.b32 i, 134351120"),
        "another swizzle": OTHER_SWIZZLE,
        "a piece in the place of another": swap(r"\[(%r\d+)\+2048\], (\[%rd\d+\+4096\])", r"[\1+4096], \2"),
        "half a row twice": swap(r"(cp\.async\.cg\S+ \[%r\d+\+8192\], \[%rd\d+)\+128\]", r"\1+0]"),
        "the first product adds": swap("setp.ne.u32 p, 0, 0", "setp.eq.u32 p, 0, 0"),
        "other columns are read": swap(r"\[at\+0\]", "[at+8]"),
        "too few columns freed": swap(r"(dealloc\S+ %r\d+), 32;", r"\1, 64;"),
    },
    "f16": {
        "a step along K too far": OTHER_K,
        "another format": swap("mov.b32 i, 67372176", "mov.b32 i, 67371024"),
        "queries for keys": swap(r"\[at\+8\]", "[at+0]"),
    },
    "mxf4nvf4": {
        "the scales of probes for both": swap(r"(add\.s32 \s*%r\d+, %r\d+), 24;", r"\1, 28;"),
        "the scales of other columns of K": swap(r"(cp\.async\.ca\S+ \[%r\d+\], \[%rd\d+)\]", r"\1+4]"),
        "a term twice": swap(r"\[at\+16\]", "[at+8]"),
        "a term without its factor": swap("0f3E800000", "0f3F800000"),
        "codes of half a row": swap(r"(cp\.async\.cg\S+ \[%r\d+\+0\], \[%rd\d+)\+0\]", r"\1+16]"),
        "exponents for scales": swap("mov.b32 i, 134612096", "mov.b32 i, 143000704"),
    },
    "decoded": {
        "a step of the state twice": swap(r"(add\.s32 \s*%r\d+, %r\d+), 24;", r"\1, 16;"),
        "the state in other columns": swap(r"(st\.sync\S+ \[%r\d+)\]", r"\1+8]"),
        "a row in the lane of another": swap(r"(shl\.b32 \s*%r\d+, %r\d+), 21;", r"\1, 22;"),
        "nibbles in another order": swap(r"(and\.b32 \s*%r\d+, %r\d+), 983055;", r"\1, 15728880;"),
        "codes of half a row twice": swap(r"(\n\tld\.global\.v4\.b32 \{[^}]*\}, \[%rd\d+)\+16\]", r"\1+0]"),
        "the scale of another block": swap(r"(mul\.lo\.s32 \s*%r\d+, %r\d+), 1048592;", r"\1, 524296;"),
        "sums without their power": swap("0f5E800000", "0f5F000000"),
    },
}  # fmt: skip


def noticed(run: Run, change: Callable[[str], str]) -> str:
    """What shows that the PTX was changed, in one of two runs."""
    runs: tuple[tuple[Mode, int], ...] = (("late", 0), ("early", 1))
    for mode, seed in runs:
        try:
            found = mistakes(Interpreted.of(run.scene, Bench(run.arch, mode, seed, change)), config=run.config)
        except TroubleError as trouble:
            return str(trouble)
        if found:
            return found[0]
    return ""


def without(number: int) -> Callable[[str], str]:
    """A fault: a statement that orders is not there."""

    def change(ptx: str) -> str:
        start, end = list(ORDERING.finditer(ptx))[number].span()
        return ptx[:start] + ptx[end:]

    return change


@pytest.mark.parametrize("kind", SMALL)
def test_what_orders_is_needed(kind: str) -> None:
    run = SMALL[kind]
    bench = Bench(run.arch)
    Interpreted.of(run.scene, bench).step(config=run.config)
    found = [match.group().split()[0] for match in ORDERING.finditer(bench.launches[0].ptx)]
    assert noticed(run, str) == ""
    missed = [statement for i, statement in enumerate(found) if not noticed(run, without(i))]
    assert missed == NEEDLESS[kind]


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind in FAULTS for fault in FAULTS[kind]])
def test_a_fault_in_the_kernel_is_caught(kind: str, fault: str) -> None:
    assert noticed(SMALL[kind], FAULTS[kind][fault])
