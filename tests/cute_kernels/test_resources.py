"""The compiled kernels cost what the committed report says: registers, memory, and instructions of the SASS.

Grid: the kernels of `resources.KERNELS` for their architectures. With the compiler that wrote the report all numbers
must be equal: it is deterministic. With another, only the rules that hold for every compiler are checked, and the test
says so. Teeth: rows of the report edited as a spill, a lost wide load, more registers and so on would change them, a
kernel that does spill, and kernels too few or too many.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cutlass.base_dsl import compiler

from cute_kernels import step
from cute_kernels.compile import compile_only
from tests.cute_kernels import resources
from tests.cute_kernels.resources import KERNELS, PATH, Row, findings, measure, regressions, stale_kernels, violations
from tests.helpers.sass import class_of, histogram
from tuning.sass import disassembled, why_no_sass

needs_sass = pytest.mark.skipif(why_no_sass() is not None, reason=str(why_no_sass()))


@pytest.fixture(scope="module")
def report(repository: Path) -> Row:
    return json.loads((repository / PATH).read_text(encoding="utf-8"))


@needs_sass
@pytest.mark.parametrize(("name", "arch"), [(name, arch) for name, kernel in KERNELS.items() for arch in kernel.arches])
def test_a_kernel_costs_what_the_report_says(name: str, arch: str, report: Row) -> None:
    compilers, row = measure(name, arch)
    assert findings(report, [row], compilers) == []
    if compilers != report["compilers"]:
        pytest.skip(f"only the rules were checked: this is {compilers}, the report is of {report['compilers']}")


def test_the_report_has_every_kernel_once_and_none_breaks_a_rule(report: Row, repository: Path) -> None:
    assert stale_kernels(report) == []
    assert [fault for row in report["rows"] for fault in violations(row)] == []
    assert "\n".join(resources.lines(report)) + "\n" == (repository / PATH).read_text(encoding="utf-8")


# Teeth.


def moved(name: str, by: str) -> Callable[[Row], None]:
    """An instruction of one class becomes one of another."""

    def change(row: Row) -> None:
        found = row["instructions"]
        found[name], found[by] = found[name] - 1, found.get(by, 0) + 1

    return change


def raised(name: str, by: int) -> Callable[[Row], None]:
    return lambda row: row.update({name: row[name] + by})


STEP = "step-HV128-G8-V64-K128-L16-T1-bf16-fp32"
# What happens to a step, and what must be said of it: by the same compiler, and by any.
CHANGES: dict[str, tuple[Callable[[Row], None], str, str | None]] = {
    "a spill": (moved("integer", "local"), "1 of local", "1 of local"),
    "a frame": (raised("frame_bytes", 8), "a frame of 8 bytes", "a frame of 8 bytes"),
    "an unknown address": (moved("LDG.128", "generic"), "1 of generic", "1 of generic"),
    "an unknown opcode": (moved("integer", "other"), "1 of other", "1 of other"),
    "a register": (raised("registers", 1), "registers 70 -> 71", None),
    "too many registers": (raised("registers", 59), "129 registers, at most 128", "129 registers, at most 128"),
    "shared memory": (raised("dynamic_shared_bytes", 16), "dynamic_shared_bytes 39432 -> 39448", None),
    "a wide load taken apart": (moved("LDG.128", "LDG.32"), "LDG.128 2 -> 1", None),
    "a wide store taken apart": (moved("STG.128", "STG.32"), "STG.128 18 -> 17", None),
    "a wide shared load taken apart": (moved("LDS.128", "LDS.32"), "LDS.128 32 -> 31", None),
    "a narrow load": (moved("integer", "LDG.16"), "narrow LDG 9 -> 10", None),
    "another instruction": (moved("FMUL", "FFMA"), "stale", None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_flagged(what: str, report: Row) -> None:
    change, said, said_by_any = CHANGES[what]
    row = copy.deepcopy(next(row for row in report["rows"] if row["kernel"] == STEP))
    assert findings(report, [row], report["compilers"]) == []
    change(row)
    same, other = findings(report, [row], report["compilers"]), findings(report, [row], "another compiler")
    assert any(said in fault for fault in same), same
    assert other == [] if said_by_any is None else any(said_by_any in fault for fault in other), other


def test_no_wide_access_at_all_is_flagged_for_any_compiler(report: Row) -> None:
    for row in copy.deepcopy([row for row in report["rows"] if row["kernel"] in (STEP, "probe-rewrite")]):
        del row["instructions"]["LDG.128"]
        assert findings(report, [row], "another compiler") == [f"{row['kernel']} {row['arch']}: no LDG.128"]


def test_a_verification_without_tensor_cores_is_flagged(report: Row) -> None:
    row = copy.deepcopy(next(row for row in report["rows"] if row["kernel"].startswith("verify-")))
    del row["instructions"]["matrix"]
    assert findings(report, [row], "another compiler") == [f"{row['kernel']} {row['arch']}: no matrix"]


def test_the_better_is_no_regression_but_stale(report: Row) -> None:
    before, after = (copy.deepcopy(report["rows"][0]) for _ in range(2))
    after["registers"] -= 1
    assert regressions(before, after) == []
    (finding,) = findings(report, [after], report["compilers"])
    assert "stale" in finding


def test_a_missing_and_a_strange_kernel_are_flagged(report: Row) -> None:
    fewer, more, twice = (copy.deepcopy(report) for _ in range(3))
    gone = fewer["rows"].pop(1)
    more["rows"].append({**gone, "kernel": "step-of-the-past"})
    twice["rows"].append(gone)
    assert stale_kernels(fewer) == [f"{gone['kernel']} {gone['arch']}: missing from the report"]
    assert stale_kernels(more) == [f"step-of-the-past {gone['arch']}: in the report, but no such kernel"]
    assert stale_kernels(twice) == ["the report has a kernel twice"]
    (finding,) = findings(fewer, [gone], report["compilers"])
    assert "not in the report" in finding


@needs_sass
def test_a_kernel_that_spills_shows_it_in_its_instructions(tmp_path: Path) -> None:
    few = compiler.PtxasOptions("-maxrregcount=32 -override-directive-values")
    keep = (compiler.KeepPTX(True), compiler.KeepCUBIN(True), compiler.DumpDir(str(tmp_path)))
    arguments = functools.partial(KERNELS[STEP].arguments, "sm_103a")
    cubin = compile_only(step.step_launch, arguments, "sm_103a", *keep, few).artifacts.CUBIN
    assert histogram(disassembled(cubin))["local"] > 0


# The reading of SASS.

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P1 LDG.E.EF.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @UP2 UIADD3 UR24, UP2, UR6, UR24, URZ ;
        /*0030*/              @!PT STL.64 [R1+0x8], R4 ;
        /*0040*/                   FFMA.SAT R0, R0, R1, R2 ;
        /*0050*/                   NOP;
.L_x_1:
        /*10060*/                  BRA `(.L_x_1);
"""


def test_instructions_are_counted() -> None:
    found = {"LDG.128": 1, "local": 1, "FFMA": 1, "constant": 1, "control": 1, "uniform": 1, "total": 6}
    assert histogram(SASS) == found
    assert histogram("") == {"total": 0}


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [
        ("LDG.E", "LDG.32"),
        ("LDG.E.64.CONSTANT", "LDG.64"),
        ("LDG.E.ENL2.256", "LDG.256"),
        ("LDG.E.U8", "LDG.8"),
        ("STG.E.EF.S16", "STG.16"),
        ("LDS.U.128", "LDS.128"),
        ("ST.E.128", "generic"),
        ("UBLKCP.S.G", "bulk"),
        ("LDGSTS.E.BYPASS.128", "bulk"),
        ("SYNCS.PHASECHK.TRANS64", "mbarrier"),
        ("UTCHMMA", "tensor"),
        ("UTCATOMSWS.FIND_AND_SET.ALIGN", "allocation"),
        ("HMMA.16816.F32", "matrix"),
        ("FFMA2", "FFMA"),
        ("ULDC.64", "constant"),
        ("UISETP.NE.AND", "uniform"),
        ("WARPSYNC.COLLECTIVE", "control"),
        ("ENDCOLLECTIVE", "control"),
        ("LDX", "other"),
    ],
)
def test_an_instruction_has_a_class(instruction: str, wanted: str) -> None:
    assert class_of(instruction) == wanted


def test_the_launch_names_its_shared_memory_once() -> None:
    configuration = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
    host = (
        "  %1 = llvm.mlir.constant(7 : i64) : i64\n  %1 = llvm.mlir.constant(4096 : i64) : i64\n"
        f"  %2 = llvm.getelementptr %0[0, 2] : (!llvm.ptr) -> !llvm.ptr, {configuration}\n"
        "  llvm.store %1, %2 : i64, !llvm.ptr\n  %1 = llvm.mlir.constant(9 : i64) : i64\n"
    )
    assert resources.dynamic_shared_bytes(host) == 4096
    with pytest.raises(ValueError, match="unpack"):
        resources.dynamic_shared_bytes(host + host)
