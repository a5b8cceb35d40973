"""Registers, memory and instructions of the compiled kernels, for each architecture: the report and its rules.

    make resources          compile them and rewrite docs/records/resources.json

The report has one line for each kernel and architecture, so a change of a kernel shows in a diff what it costs. No GPU
is needed: registers, frame and declared shared memory stand in the cubin, the dynamic shared memory in the host code of
the launch, and the instructions are those of the SASS (`helpers.sass`).
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cutlass
import torch
from cutlass.base_dsl import compiler

from cute_kernels import commit, empty, encode, materialize, probes, step
from cute_kernels.arch import ARCHES
from cute_kernels.compile import compile_only
from cute_kernels.configs import GdnOptions, KdaOptions, Mamba2Options, Options, RowOptions, StepConfig
from replayssm import plan_step, tuned
from replayssm.keys import dtype_name
from replayssm.model_launch import plan_fold
from replayssm.pool import default_ring_layout
from replayssm.spec import READ_FORMATS
from tests.helpers.cases import ODD, RELEASED, Case
from tests.helpers.sass import histogram
from tuning.cubin import resources
from tuning.sass import disassembled

PATH = Path("docs/records/resources.json")
LAYER = Mamba2Options(dt_dtype="bfloat16", D_dtype="float32", dt_bias_dtype="float32", dt_softplus=True)
# A CTA has 128 threads: four of them on a multiprocessor, two where several tokens are verified.
MAX_REGISTERS = {"step": 128, "verify": 255, "materialize": 128, "encode": 128, "commit": 32, "empty": 32, "probe": 128}
KIMI_STEP_REGISTERS = 168  # three tiles of 64 KiB are all that fit
# Bytes of a frame that a kernel may have: held to fewer registers it spills outside of its loops, and was faster for
# it (Super, NVFP4, 8 tokens 155 -> 147 us; GLM-5.3-Flash, NVFP4 199 -> 168; batch 256, H200, 2026-11-30).
SPILLS = {
    "verify-mamba2-HV128-G8-V64-K128-L16-T8-bf16-fp32-nvfp4 sm_90a": 24,
    "verify-kda-HV64-HK64-V128-K128-L16-T1-bf16-fp32-nvfp4 sm_90a": 8,
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Kernel:
    """A jit function with what it is specialised for, by architecture, and the architectures to report."""

    function: Callable[..., Any]
    arguments: Callable[[str], tuple[Any, ...]]
    arches: tuple[str, ...] = tuple(ARCHES)


def _step(
    case: Case, options: Options = LAYER, read: str | None = None, rounding: Any = "nearest", **how: Any
) -> Kernel:
    def arguments(arch: str) -> tuple[Any, ...]:
        read_dtype = next((r for r in READ_FORMATS if read == dtype_name(r)), None)
        replay = replace(case.replay, read_dtype=read_dtype, rounding=rounding)
        known = {"ring_layout": default_ring_layout(case.layer), **how}
        plan = plan_step(case.layer, replay, options, arch=arch, batch=64, num_tokens=case.T, **known)
        return step.fake_arguments(plan.key)

    # Both Blackwells in the middle only: what compiles for one compiles nearly alike for the other, and time is short.
    return Kernel(step.step_launch, arguments, tuple(ARCHES) if case.T in (1, 8) else ("sm_90a", "sm_103a"))


def _materialize(case: Case, *how: bool) -> Kernel:
    def arguments(arch: str) -> tuple[Any, ...]:
        layer = plan_fold(case.layer, case.replay, arch, "int64")
        return materialize.fake_arguments(materialize.MaterializeKey(layer, *how))

    return Kernel(materialize.materialize_launch, arguments)


def _kernels() -> dict[str, Kernel]:
    """Steps of released models with each dtype of checkpoint and each head_dim and d_state that they have, a step with
    everything that is optional, two that round stochastically, one of d_state 64 and one of full precision; of each
    delta rule the layer with the most heads with both dtypes of checkpoint in use, and an odd one; of each recurrence a
    layer that verifies 4, 8 and 16 tokens and one that reads copies, of Mamba-2 one whose heads share a CTA and one
    that decodes them into tensor memory, a flush and a materialize; both commits, and the cursors behind a flush; read
    copies in each format, and the largest tile; the probes."""
    by_id = {case.id: case for case in (*RELEASED, *ODD)}
    steps = [
        "mamba2-HV128-G8-V64-K128-L16-T1-bf16-fp32",
        "mamba2-HV128-G8-V64-K128-L16-T1-bf16-bf16",
        "mamba2-HV128-G8-V64-K128-L16-T1-bf16-fp16",
        "mamba2-HV128-G8-V80-K128-L16-T1-bf16-fp32",
        "mamba2-HV256-G8-V64-K256-L16-T1-bf16-fp32",
        "mamba2-HV12-G4-V80-K64-L7-T1-bf16-bf16",
    ]
    kernels = {f"step-{name.removeprefix('mamba2-')}": _step(by_id[name]) for name in steps}
    for name in steps[1:3]:
        kernels[f"step-{name.removeprefix('mamba2-')}-stochastic"] = _step(by_id[name], rounding="stochastic")
    full = Mamba2Options("float32", "float32", True, "float32", True)
    everything = {"rows": RowOptions("int64", True, True), "ring_layout": "strided"}
    kernels["step-HV7-G7-V64-K128-L3-T1-fp32-fp32-all"] = _step(
        by_id["mamba2-HV7-G7-V64-K128-L3-T1-fp32-fp32"], full, **everything
    )
    odd = "HV2-HK2-V80-K64-L7-T1-fp32-bf16"
    for layer, some, most in (
        ("gdn-HV64-HK16", GdnOptions(128**-0.5), GdnOptions(0.5, "float32", "float32", round_beta=True)),
        ("kda-HV96-HK96", KdaOptions(128**-0.5, lower_bound=-5.0), KdaOptions(0.5, "float32", "float32")),
    ):
        case, kind = by_id[f"{layer}-V128-K128-L16-T1-bf16-fp32"], layer[:3]
        kernels[f"step-{case.id}"] = _step(case, some)
        kernels[f"step-{case.id[:-4]}bf16"] = _step(replace(case, checkpoint=torch.bfloat16), some)
        kernels[f"step-{kind}-{odd}-all"] = _step(by_id[f"{kind}-{odd}"], most, **everything)
    for name, some in {
        "mamba2-HV128-G8-V64-K128-L16-T1-bf16-fp32": LAYER,
        "gdn-HV64-HK16-V128-K128-L16-T1-bf16-fp32": GdnOptions(128**-0.5),
        "kda-HV64-HK64-V128-K128-L16-T1-bf16-fp32": KdaOptions(128**-0.5, lower_bound=-5.0),
    }.items():
        for case in (replace(by_id[name], T=tokens) for tokens in (4, 8, 16)):
            kernels[f"verify-{case.id}"] = _step(case, some)
        for case, read in (
            (by_id[name], "nvfp4"),
            (replace(by_id[name], T=8), "nvfp4"),
            (by_id[name], "float8_e4m3fn"),
        ):
            kernels[f"verify-{case.id}-{read}"] = _step(case, some, read)
    for case in (replace(by_id["mamba2-HV128-G8-V64-K128-L16-T1-bf16-fp32"], T=tokens) for tokens in (1, 8)):
        shared = _step(case, LAYER, "nvfp4", config=StepConfig(warps=1, heads=4, precision="tf32"))
        kernels[f"verify-{case.id}-nvfp4-heads4"] = replace(shared, arches=("sm_90a",))
    case = replace(by_id["mamba2-HV128-G8-V64-K128-L16-T1-bf16-fp32"], T=8)
    decoded = StepConfig(warps=2, fold_values=32, precision="tf32", readout="tcgen05_f16")
    decodes = _step(case, LAYER, "nvfp4", config=decoded)
    kernels[f"verify-{case.id}-nvfp4-f16"] = replace(decodes, arches=("sm_100a", "sm_103a"))
    for name, key in {
        "commit-L16-T1": commit.CommitKey(16, 1),
        "commit-L16-T4-all": commit.CommitKey(16, 4, "int64", True, True),
    }.items():
        kernels[name] = Kernel(commit.commit_launch, lambda arch, key=key: commit.fake_arguments(key))
    for layer in ("mamba2-HV128-G8-V64", "gdn-HV64-HK16-V128", "kda-HV96-HK96-V128"):
        case = by_id[f"{layer}-K128-L16-T1-bf16-fp32"]
        half = replace(case, checkpoint=torch.bfloat16)
        kernels[f"materialize-{case.id}-flush"] = _materialize(case)
        kernels[f"materialize-{half.id}-all"] = _materialize(half, True, True)
    for name, key in {"flush": empty.EmptyKey(), "materialize": empty.EmptyKey("int64", True)}.items():
        kernels[f"empty-{name}"] = Kernel(empty.empty_launch, lambda arch, key=key: empty.fake_arguments(key))
    for key in _encodings():
        sizes = f"HV{key.num_v_heads}-V{key.head_dim}-K{key.d_state}-{key.checkpoint_dtype}-{key.read_dtype}"
        kernels[f"encode-{sizes}"] = Kernel(encode.encode_launch, lambda arch, key=key: encode.fake_arguments(key))
    for name, function in (("read", probes.read_tiles), ("rewrite", probes.rewrite_tiles)):
        kernels[f"probe-{name}"] = Kernel(function, lambda arch: probes.fake_arguments())
    return kernels


def _encodings() -> list[encode.EncodeKey]:
    formats = ("nvfp4", "mxfp8", "float8_e4m3fn", "int8", "bfloat16", "float16")
    return [
        *(encode.EncodeKey(128, 64, 128, "float32", read) for read in formats),
        encode.EncodeKey(12, 80, 256, "bfloat16", "nvfp4", "int64", True),
    ]


KERNELS = _kernels()


def measure(name: str, arch: str) -> tuple[str, Row]:
    """Compile one kernel; the versions of the compiler and the kernel's line of the report."""
    kernel = KERNELS[name]
    tuned.SHIPPED = Path(os.devnull)  # the heuristic's choices, whatever tables there are
    with tempfile.TemporaryDirectory() as folder:
        keep = (compiler.KeepPTX(True), compiler.KeepCUBIN(True), compiler.DumpDir(folder))
        made = compile_only(kernel.function, functools.partial(kernel.arguments, arch), arch, *keep)
        cubin = made.artifacts.CUBIN
    (used,) = resources(cubin).values()
    # The wheel may hold several assemblers and take one by the driver; the PTX says which it was.
    (assembler,) = re.findall(r"Cuda compilation tools, release [\d.]+, (V[\d.]+)", made.artifacts.PTX)
    return f"cutlass_dsl {cutlass.__version__}, CUDA tools {assembler}", {
        "kernel": name,
        "arch": arch,
        "registers": used.registers,
        "frame_bytes": used.frame_bytes,
        "declared_shared_bytes": used.shared_bytes,
        "dynamic_shared_bytes": dynamic_shared_bytes(str(made.ir_module)),
        "instructions": histogram(disassembled(cubin)),
    }


def dynamic_shared_bytes(host: str) -> int:
    """The third member of the one launch configuration in a module's host code: (grid, block, bytes, ...)."""
    member = (
        r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] .*struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    )
    (place,) = re.finditer(member, host)
    store = re.compile(rf"llvm\.store (%\w+), {place[1]} : i64").search(host, place.end())
    assert store is not None
    *_, value = re.findall(rf"^\s*{store[1]} = llvm\.mlir\.constant\((\d+) : i64\)", host[: store.start()], re.M)
    return int(value)


def violations(row: Row) -> list[str]:
    """What no kernel may have, whatever the compiler: spills, a frame beyond `SPILLS`, addresses whose memory the
    compiler does not know, atomics, an opcode of no known class, too many registers, or a step or a fold without its
    wide accesses or, of several tokens, without tensor cores."""
    at, found = f"{row['kernel']} {row['arch']}", row["instructions"]
    kind = row["kernel"].partition("-")[0]
    faults = [f"{at}: a frame of {row['frame_bytes']} bytes"] if row["frame_bytes"] > SPILLS.get(at, 0) else []
    unwanted = [*([] if at in SPILLS else ["local"]), "generic", "atomic", "other"]
    faults += [f"{at}: {found[name]} of {name}" for name in unwanted if name in found]
    if "allocation" in found and "tensor" not in found:
        faults.append(f"{at}: {found['allocation']} of allocation, and nothing that uses tensor memory")
    most = KIMI_STEP_REGISTERS if row["kernel"].startswith("step-kda") else MAX_REGISTERS[kind]
    if row["registers"] > most:
        faults.append(f"{at}: {row['registers']} registers, at most {most}")
    wide = ("LDG.128", "STG.128", "LDS.128", "bulk")
    needed: tuple[str, ...] = {
        "step": wide, "materialize": wide, "verify": (*wide, "matrix"), "encode": ("LDG.128",), "probe": ("bulk",)
    }.get(kind, ())  # fmt: skip
    if "tensor" in found:  # the tile is an operand
        needed = tuple(name for name in needed if name != "LDS.128")
    elif re.match(r"verify-kda-\S*-fp32$", row["kernel"]):  # lanes load the state from where it lies
        needed = tuple(name for name in needed if name != "bulk")
    if row["kernel"] == "probe-rewrite":
        needed = ("LDG.128", "STG.128")
    return faults + [f"{at}: no {name}" for name in needed if name not in found]


def regressions(before: Row, after: Row) -> list[str]:
    """What of a kernel became worse: more registers or shared memory, fewer of the widest accesses of a kind or more of
    the narrow ones (32 bits and less)."""
    at, faults = f"{before['kernel']} {before['arch']}", []
    for name in ("registers", "frame_bytes", "declared_shared_bytes", "dynamic_shared_bytes"):
        if after[name] > before[name]:
            faults.append(f"{at}: {name} {before[name]} -> {after[name]}")
    old, new = before["instructions"], after["instructions"]
    for kind in ("LDG", "STG", "LDS", "STS"):
        widest = next((f"{kind}.{width}" for width in (256, 128, 64) if f"{kind}.{width}" in old), None)
        if widest and new.get(widest, 0) < old[widest]:
            faults.append(f"{at}: {widest} {old[widest]} -> {new.get(widest, 0)}")
        narrow = [sum(one.get(f"{kind}.{width}", 0) for width in (32, 16, 8)) for one in (old, new)]
        if narrow[1] > narrow[0]:
            faults.append(f"{at}: narrow {kind} {narrow[0]} -> {narrow[1]}")
    return faults


def findings(report: Row, rows: list[Row], compilers: str) -> list[str]:
    """What is wrong with freshly measured rows, given the committed report.

    The same compiler gives the same code, so then any difference is a finding: a regression, or a report that is stale.
    With another compiler, only `violations` are.
    """
    known = {(row["kernel"], row["arch"]): row for row in report["rows"]}
    found = [fault for row in rows for fault in violations(row)]
    for row in rows:
        before = known.get((row["kernel"], row["arch"]))
        if before is None:
            found.append(f"{row['kernel']} {row['arch']}: not in the report; run make resources")
        elif compilers == report["compilers"] and before != row:
            worse = regressions(before, row)
            found += worse or [f"{row['kernel']} {row['arch']}: the report is stale; run make resources"]
    return found


def stale_kernels(report: Row) -> list[str]:
    """How the kernels of the report differ from those that are to be in it."""
    wanted = {(name, arch) for name, kernel in KERNELS.items() for arch in kernel.arches}
    listed = [(row["kernel"], row["arch"]) for row in report["rows"]]
    found = [f"{name} {arch}: missing from the report" for name, arch in sorted(wanted - set(listed))]
    found += [f"{name} {arch}: in the report, but no such kernel" for name, arch in sorted(set(listed) - wanted)]
    return found + (["the report has a kernel twice"] if len(set(listed)) < len(listed) else [])


def lines(report: Row) -> Iterator[str]:
    """The report as JSON, a line for each row."""
    head = {name: value for name, value in report.items() if name != "rows"}
    yield json.dumps(head)[:-1] + ', "rows": ['
    rows = [json.dumps(row) for row in report["rows"]]
    yield from (f"{row}," for row in rows[:-1])
    yield f"{rows[-1]}\n]}}"


def main() -> None:
    """Rewrite the report, unless a kernel breaks a rule."""
    measured = [measure(name, arch) for name, kernel in KERNELS.items() for arch in kernel.arches]
    rows = [row for _, row in measured]
    if faults := [fault for row in rows for fault in violations(row)]:
        raise SystemExit("\n".join(faults))
    report = {"compilers": measured[0][0], "rows": rows}
    PATH.write_text("\n".join(lines(report)) + "\n", encoding="utf-8")
    print(f"{PATH}: {len(rows)} rows")


if __name__ == "__main__":
    main()
