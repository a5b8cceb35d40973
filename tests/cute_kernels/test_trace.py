"""Every kind of kernel compiles for every architecture, within its registers and shared memory, and spills nothing.

No GPU is needed: the compiler brings its own assembler, and registers and stack frames stand in the cubin
(`helpers.cubin`). Grid: nine step kernels for each recurrence and each of the three architectures, in which every dtype
of checkpoint and activations, every head_dim, d_state and extreme window, and every option, on and off, occurs at least
once; the pairings differ from one architecture to the next. Three kernels of `materialize` for each recurrence and
architecture; a commit and an `empty` for each architecture. Of the released layers with a delta rule, whose tile
differs by the dtype of the checkpoint alone, each ratio of heads with each dtype on one of the architectures.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cutlass.base_dsl import compiler

from cute_kernels import commit, empty, materialize, step
from cute_kernels.arch import ARCHES
from cute_kernels.compile import compile_only
from cute_kernels.configs import THREADS, GdnOptions, KdaOptions, Mamba2Options, Options, RowOptions, StepKey, Tile
from cute_kernels.heuristic import heuristic_config
from replayssm import LayerSpec, ReplaySpec, plan_step
from replayssm.spec import Recurrence
from tests.helpers.cases import RELEASED, Case, pick
from tuning.cubin import FRAME, REGISTERS, Resources, resources

MAX_REGISTERS_CURSORS = 32
# A CTA has 128 threads: with 128 registers a thread four CTAs share a multiprocessor, so that the copies of three tiles
# are in flight while the fourth is multiplied.
MULTIPROCESSOR = {"registers": 65536, "shared_bytes": 228 * 1024, "reserved_bytes": 1024}  # of each architecture here
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("float32", "bfloat16", "float16")
HEAD_DIMS, STATES, WINDOWS = (64, 80, 128), (64, 128, 256), (16, 1, 64)
HEADS = ((8, 2), (48, 16), (3, 3))
LAYOUTS = ("record_major", "head_major", "strided")


def mamba2_options(act: str, on: list[bool], number: int) -> Options:
    return Mamba2Options(
        dt_dtype=act if on[0] else "float32",
        D_dtype="float32" if on[1] else None,
        has_z=on[2],
        dt_bias_dtype=(act if number % 4 < 2 else "float32") if on[3] else None,
        dt_softplus=number % 3 != 0,
    )


def gdn_options(act: str, on: list[bool], number: int) -> Options:
    return GdnOptions(
        scale=0.125,
        a_dtype=act if on[0] else "float32",
        b_dtype=act if on[1] else "float32",
        l2norm_eps=1e-6 if number % 3 else None,
        round_beta=on[2],
    )


def kda_options(act: str, on: list[bool], number: int) -> Options:
    return KdaOptions(
        scale=0.125,
        g_dtype=act if on[0] else "float32",
        beta_dtype=act if on[1] else "float32",
        lower_bound=-5.0 if on[2] else None,
        l2norm_eps=1e-6 if number % 3 else None,
    )


OPTIONS: dict[Recurrence, Callable[[str, list[bool], int], Options]] = {
    "mamba2": mamba2_options,
    "gdn": gdn_options,
    "kda": kda_options,
}


def key_of(arch: str, number: int, kind: Recurrence = "mamba2") -> StepKey:
    """Kernel `number` of 9. Dtypes, head_dim and d_state are the columns of an orthogonal array, in which every two
    hold every pair of values; the rest cycles against them, and the architecture shifts them."""
    shift = list(ARCHES).index(arch)
    a, b = number // 3, number % 3
    checkpoint, activation, head_dim, d_state = a, b, (a + b + shift) % 3, (a + 2 * b + shift) % 3
    heads, groups = HEADS[(a + shift) % 3]
    act, on = NAMES[activation], [(number + shift + i) % 2 == 0 for i in range(6)]
    window, dtypes = WINDOWS[(a * a + b + 2 * shift) % 3], (DTYPES[checkpoint], DTYPES[activation])
    return plan_step(
        LayerSpec(kind, heads, groups, HEAD_DIMS[head_dim], STATES[d_state]),
        ReplaySpec(
            window,
            1,
            *dtypes,
            value_dtype=torch.float32 if kind != "mamba2" and number % 4 == 1 else None,
            decay_dtype=torch.bfloat16 if kind == "kda" and number % 3 == 1 else torch.float32,
        ),
        OPTIONS[kind](act, on, number),
        arch=arch,
        batch=(1, 256)[b % 2],
        rows=RowOptions(("int32", "int64")[on[4]], on[5], number in (1, 5, 6)),
        ring_layout=LAYOUTS[(b + shift) % 3],
    ).key


KERNELS = [(kind, arch, number) for kind in OPTIONS for arch in ARCHES for number in range(9)]
ptxas = compiler.PtxasOptions


def assemble(launch: Any, make: Any, arch: str, folder: Path, *options: Any) -> tuple[str, dict[str, Resources]]:
    """PTX, and registers and frames by kernel."""
    keep = (compiler.KeepPTX(True), compiler.KeepCUBIN(True), compiler.DumpDir(str(folder)))
    artifacts = compile_only(launch, make, arch, *keep, *options).artifacts
    return artifacts.PTX, resources(artifacts.CUBIN)


def faults(ptx: str, used: dict[str, Resources], arch: str, max_registers: int) -> list[str]:
    """What is wrong with a compiled kernel."""
    found = [f"{name}: a frame of {r.frame_bytes} bytes" for name, r in used.items() if r.frame_bytes]
    found += [f"{name}: {r.registers} registers" for name, r in used.items() if r.registers > max_registers]
    if len(used) != 1:
        found.append(f"expected one kernel, got {sorted(used)}")
    if not re.search(rf"^\.target {arch}\b", ptx, re.M):
        found.append(f"not compiled for {arch}")
    if re.search(r"\.local\b", ptx):
        found.append("local memory in the PTX")
    return found


def released_keys(arch: str) -> list[StepKey]:
    """Of the released layers with a delta rule: each ratio of heads with one dtype of the checkpoint, and over the
    architectures with each."""
    cases = pick(RELEASED, recurrence="gdn", num_tokens=1) + pick(RELEASED, recurrence="kda", num_tokens=1)
    ratios: dict[tuple[str, int], Case] = {(case.recurrence, case.HV // case.HK): case for case in cases}
    made = {"gdn": GdnOptions(0.0625), "kda": KdaOptions(0.0625, lower_bound=-5.0)}
    return [
        plan_step(
            case.layer,
            replace(case.replay, checkpoint_dtype=DTYPES[(i + list(ARCHES).index(arch)) % 3]),
            made[kind],
            arch=arch,
            batch=64,
        ).key
        for i, ((kind, _), case) in enumerate(sorted(ratios.items()))
    ]


@pytest.mark.parametrize(("arch", "number"), [(arch, i) for arch in ARCHES for i in range(len(released_keys(arch)))])
def test_a_released_layer_compiles_within_its_budget(arch: str, number: int, tmp_path: Path) -> None:
    check_step(released_keys(arch)[number], arch, tmp_path)


def test_released_layers_have_every_ratio_and_dtype() -> None:
    keys = [key for arch in ARCHES for key in released_keys(arch)]
    ratios = {(type(key.options), key.num_v_heads // key.num_k_heads) for key in keys}
    assert ratios == {(GdnOptions, ratio) for ratio in (1, 2, 3, 4)} | {(KdaOptions, 1)}
    assert {(key.head_dim, key.d_state) for key in keys} == {(128, 128)}
    assert {key.checkpoint_dtype for key in keys} == set(NAMES)


@pytest.mark.parametrize(("kind", "arch", "number"), KERNELS)
def test_a_step_compiles_within_its_budget(kind: Recurrence, arch: str, number: int, tmp_path: Path) -> None:
    # A delta rule keeps two probes, and by channel a decay of each record, and a fold splits 256 columns of float32
    # keys into terms: in these odd geometries three CTAs will do.
    key = key_of(arch, number, kind)
    splits = key.d_state == 256 and key.activation_dtype == "float32"
    check_step(key, arch, tmp_path, ctas=3 if splits or kind != "mamba2" else 4)


def max_registers(key: StepKey, ctas: int) -> int:
    """What lets so many CTAs share a multiprocessor, or as many as shared memory lets, if fewer, or as the key says."""
    if key.config.ctas > 1:
        return MULTIPROCESSOR["registers"] // (key.config.ctas * THREADS) // 8 * 8
    room = MULTIPROCESSOR["shared_bytes"] // (Tile.of(key).smem_bytes + MULTIPROCESSOR["reserved_bytes"])
    return MULTIPROCESSOR["registers"] // (min(ctas, room) * THREADS) // 8 * 8


def check_step(key: StepKey, arch: str, tmp_path: Path, *, ctas: int = 4) -> None:
    ptx, used = assemble(step.step_launch, functools.partial(step.fake_arguments, key), arch, tmp_path)
    assert faults(ptx, used, arch, max_registers(key, ctas)) == [], key
    assert Tile.of(key).smem_bytes <= ARCHES[arch].smem_bytes
    # The checkpoint comes by bulk copies and leaves by 16-byte stores; records and tokens come by 16-byte loads.
    assert "cp.async.bulk" in ptx
    assert re.search(r"ld\.global[\w.:]*\.v4\.b32", ptx)
    assert re.search(r"st\.global[\w.:]*\.v4\.b32", ptx)
    assert ("griddepcontrol.wait" in ptx) == key.rows.pdl
    assert ("griddepcontrol.launch_dependents" in ptx) == key.rows.pdl


def fold_key_of(kind: Recurrence, arch: str, number: int) -> materialize.MaterializeKey:
    """Kernel `number` of 3: another dtype of checkpoint each, and of activations."""
    shift = list(ARCHES).index(arch)
    layer = replace(key_of(arch, 3 * number + (2 * number + shift) % 3, kind), num_tokens=0)
    config = heuristic_config(layer, 1, ARCHES[arch])
    assert config is not None
    return materialize.MaterializeKey(replace(layer, config=config), number != shift, number == 2)


FOLDS = [(kind, arch, number) for kind in OPTIONS for arch in ARCHES for number in range(3)]


@pytest.mark.parametrize(("kind", "arch", "number"), FOLDS)
def test_a_materialize_compiles_within_its_budget(kind: Recurrence, arch: str, number: int, tmp_path: Path) -> None:
    key = fold_key_of(kind, arch, number)
    make = functools.partial(materialize.fake_arguments, key)
    ptx, used = assemble(materialize.materialize_launch, make, arch, tmp_path)
    assert faults(ptx, used, arch, max_registers(key.layer, 4)) == [], key
    assert Tile.of(key.layer).smem_bytes <= ARCHES[arch].smem_bytes
    assert "cp.async.bulk" in ptx
    assert re.search(r"ld\.global[\w.:]*\.v4\.b32", ptx)
    assert len(re.findall(r"st\.global", ptx)) == len(re.findall(r"st\.global[\w.:]*\.v4\.b32", ptx)) > 0


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_grid_of_materialize_holds_every_dtype(kind: Recurrence) -> None:
    for arch in ARCHES:
        layers = [fold_key_of(kind, arch, number).layer for number in range(3)]
        assert {one.checkpoint_dtype for one in layers} == {one.activation_dtype for one in layers} == set(NAMES)
    keys = [fold_key_of(*how) for how in FOLDS if how[0] == kind]
    assert {(key.has_destination, key.has_num_records) for key in keys} >= {(False, False), (True, False), (True, True)}
    assert ({key.layer.head_dim for key in keys}, {key.layer.d_state for key in keys}) == (set(HEAD_DIMS), set(STATES))
    assert {key.layer.window for key in keys} == {16, 64}
    assert {key.layer.rows.index_dtype for key in keys} == {"int32", "int64"}


def values(key: StepKey) -> set[tuple[str, object]]:
    """Each part of a key that a kernel may depend on."""
    found: set[tuple[str, object]] = {
        (name, getattr(key, name))
        for name in (
            "head_dim", "d_state", "window", "checkpoint_dtype", "activation_dtype", "ring_layout", "value_dtype",
            "decay_dtype",
        )
    }  # fmt: skip
    for part in (key.options, key.rows):
        found |= {(f.name, getattr(part, f.name) is not None and getattr(part, f.name)) for f in fields(part)}
    return found


OPTION_VALUES: dict[Recurrence, set[tuple[str, object]]] = {
    "mamba2": {(name, on) for name in ("has_z", "dt_softplus") for on in (False, True)}
    | {("D_dtype", False), ("D_dtype", "float32"), ("dt_bias_dtype", False), ("dt_dtype", "float32")},
    "gdn": {("round_beta", False), ("round_beta", True), ("l2norm_eps", False), ("l2norm_eps", 1e-6)}
    | {(name, dtype) for name in ("a_dtype", "b_dtype") for dtype in NAMES}
    | {("value_dtype", None), ("value_dtype", "float32")},
    "kda": {("lower_bound", False), ("lower_bound", -5.0), ("l2norm_eps", False), ("l2norm_eps", 1e-6)}
    | {(name, dtype) for name in ("g_dtype", "beta_dtype") for dtype in NAMES}
    | {("value_dtype", None), ("value_dtype", "float32"), ("decay_dtype", "float32"), ("decay_dtype", "bfloat16")},
}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kind", OPTIONS)
def test_the_grid_holds_every_value(kind: Recurrence, arch: str) -> None:
    held = set().union(*(values(key_of(arch, number, kind)) for number in range(9)))
    wanted = {("head_dim", v) for v in HEAD_DIMS} | {("d_state", v) for v in STATES} | {("window", v) for v in WINDOWS}
    wanted |= {(name, dtype) for name in ("checkpoint_dtype", "activation_dtype") for dtype in NAMES}
    wanted |= {("ring_layout", v) for v in LAYOUTS} | {("index_dtype", v) for v in ("int32", "int64")}
    wanted |= {(name, on) for name in ("has_force_fold", "pdl") for on in (False, True)} | OPTION_VALUES[kind]
    assert wanted <= held, wanted - held
    ratios = {key_of(arch, n, kind).num_v_heads // key_of(arch, n, kind).num_k_heads for n in range(9)}
    assert {1, 3, 4} <= ratios
    assert len({repr(key_of(a, n, kind)) for a in ARCHES for n in range(9)}) >= 25


@pytest.mark.parametrize("arch", ARCHES)
def test_a_commit_compiles_within_its_budget(arch: str, tmp_path: Path) -> None:
    number = list(ARCHES).index(arch)
    key = commit.CommitKey(
        (16, 1, 64)[number], (1, 1, 4)[number], ("int32", "int64")[number % 2], number > 0, number > 1
    )
    ptx, used = assemble(commit.commit_launch, functools.partial(commit.fake_arguments, key), arch, tmp_path)
    assert faults(ptx, used, arch, MAX_REGISTERS_CURSORS) == []


@pytest.mark.parametrize("arch", ARCHES)
def test_an_empty_compiles_within_its_budget(arch: str, tmp_path: Path) -> None:
    number = list(ARCHES).index(arch)
    key = empty.EmptyKey(("int32", "int64")[number % 2], number > 0)
    ptx, used = assemble(empty.empty_launch, functools.partial(empty.fake_arguments, key), arch, tmp_path)
    assert faults(ptx, used, arch, MAX_REGISTERS_CURSORS) == []


# Teeth.


def test_a_kernel_that_spills_is_seen(tmp_path: Path) -> None:
    few = ptxas("-maxrregcount=32 -override-directive-values")
    key = key_of("sm_90a", 1)
    ptx, used = assemble(step.step_launch, functools.partial(step.fake_arguments, key), "sm_90a", tmp_path, few)
    (kernel,) = used.values()
    assert kernel.registers <= 32
    assert any("frame" in fault for fault in faults(ptx, used, "sm_90a", 128))


GOOD = ".target sm_90a\n"
FAULTY = {
    "a frame": (GOOD, {"k": Resources(32, 8)}),
    "too many registers": (GOOD, {"k": Resources(129, 0)}),
    "local memory": (GOOD + ".local .align 16 .b8 depot[64];", {"k": Resources(32, 0)}),
    "another architecture": (".target sm_90\n", {"k": Resources(32, 0)}),
    "no kernel": (GOOD, {}),
    "two kernels": (GOOD, {"k": Resources(32, 0), "l": Resources(32, 0)}),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_the_budget_sees(fault: str) -> None:
    assert faults(GOOD, {"k": Resources(128, 0)}, "sm_90a", 128) == []
    assert len(faults(*FAULTY[fault], "sm_90a", 128)) == 1


def elf(info: bytes) -> bytes:
    """A 64-bit ELF file with two symbols and a .nv.info section of these bytes."""
    strings, names = b"\0first\0second\0", b"\0.nv.info\0.symtab\0.strtab\0.shstrtab\0"
    symbols = b"".join(struct.pack("<IBBHQQ", at, 0, 0, 0, 0, 0) for at in (0, 1, 7))
    bodies = [b"", info, symbols, strings, names]
    starts = [64 + sum(len(b) for b in bodies[:i]) for i in range(5)]
    header = b"\x7fELF\x02\x01\x01".ljust(0x28, b"\0") + struct.pack(
        "<QIHHHHHH", starts[4] + len(names), 0, 64, 0, 0, 64, 5, 4
    )
    titles = [0, 1, 10, 18, 26]
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", title, 0, 0, 0, start, len(body), 0, 0, 0, 0)
        for title, start, body in zip(titles, starts, bodies, strict=True)
    )
    return header + b"".join(bodies) + table


def record(attribute: int, symbol: int, value: int) -> bytes:
    return struct.pack("<BBHII", 4, attribute, 8, symbol, value)


def test_a_cubin_is_read_record_by_record() -> None:
    other = struct.pack("<BBH", 3, 0x55, 0x2F04)  # a record without a length, whose payload looks like a header
    info = other + record(REGISTERS, 1, 40) + record(0x12, 1, 9) + record(FRAME, 2, 504) + record(REGISTERS, 2, 255)
    assert resources(elf(info)) == {"first": Resources(40, 0), "second": Resources(255, 504)}
    assert resources(elf(record(FRAME, 1, 16))) == {}


@pytest.mark.parametrize("bad", [b"", b"\x7fELF\x01" + bytes(64), b"PK" + bytes(64)])
def test_what_is_no_cubin_is_refused(bad: bytes) -> None:
    with pytest.raises(ValueError, match="64-bit ELF"):
        resources(bad)


def test_a_file_without_resources_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\.nv\.info"):
        resources(elf(b"").replace(b".nv.info", b".nv.none"))


def test_a_window_is_part_of_a_key() -> None:
    """`replace` on a key gives another kernel: the grid above is not one kernel compiled again and again."""
    key = key_of("sm_90a", 0)
    assert step.fake_arguments(key)[-2] is key
    assert replace(key, window=2) != key
