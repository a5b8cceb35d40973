"""The compiled kernel of read copies writes the bytes of `reference.quant.encode`, executed by instruction on a CPU.

Grid: `RUNS`, in which every format meets every dtype of checkpoint that a spec admits, every d_state, head_dims of 64,
80 and 128, atoms that are full and padded, strided slots and two architectures. States (`hard_states`): all magnitudes
within a row and from row to row, ties, zeros of both signs, subnormals, the largest numbers, infinities and NaN. Bits
must be equal, but for what a NaN is in 16 bits, which torch leaves open, and nothing else may be written.
The arithmetic that stands for a division is compared with it for every mantissa. Teeth:
faults in the PTX are caught.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels.configs import CODE_BITS
from cute_kernels.copy_shape import ATOM_BLOCKS, ATOM_ROWS, BLOCK, TILE_ROWS
from cute_kernels.replay.quant import LARGEST_CODE, LEAST_BLOCK_SCALE, LEAST_NORMAL, LEAST_SCALE, SEARCH, UNITS
from replayssm import LayerSpec, Pool, ReplaySpec, make_pool, model_launch
from replayssm.keys import dtype_name
from replayssm.reference import formats, quant
from replayssm.spec import READ_FORMATS, RECURRENCES, SCALE_ATOM, ReadDtype, Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import hard_states
from tests.helpers.model import Model, model_of
from tests.helpers.tolerance import same_bytes
from tests.ptx import recorder
from tests.ptx.launches import Bench, InterpretedModel, swap
from tests.ptx.machine import TroubleError

pytestmark = pytest.mark.skipif(recorder.why_no_recorder() is not None, reason=str(recorder.why_no_recorder()))
F32, F16, BF16, FP8, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
FILL = 0x5A  # of copies before they are made


@dataclass(frozen=True)
class Run:
    """A geometry (HV, V, K) with its precisions, and the architecture."""

    arch: str
    sizes: tuple[int, int, int]
    checkpoint: torch.dtype
    read: ReadDtype
    index: torch.dtype = torch.int32

    @property
    def id(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self.checkpoint, self.read)]
        return "-".join([self.arch, *map(str, self.sizes), *names])

    @property
    def pool(self) -> Pool:
        """Slots of `hard_states` and copies of senseless bytes, both with gaps between slots."""
        heads, rows, channels = self.sizes
        spec = ReplaySpec(checkpoint_dtype=self.checkpoint, read_dtype=self.read)
        pool = make_pool(LayerSpec("gdn", heads, 1, rows, channels), spec, 4)
        tensors = {name: getattr(pool, name) for name in ("value", "key", "decay")}
        for name in pool.state_names:
            packed = getattr(pool, name)
            size = packed[0].numel()
            memory = torch.full((5 * (size + 16) * packed.itemsize,), FILL, dtype=torch.uint8).view(packed.dtype)
            tensors[name] = memory.as_strided(packed.shape, (size + 16, *packed.stride()[1:]))
        tensors["checkpoint"].copy_(hard_states(4, *self.sizes))
        return Pool(pool.layer, spec, **tensors)


RUNS = [
    Run("sm_90a", (1, 80, 64), F32, "nvfp4"), Run("sm_103a", (2, 80, 128), F32, "nvfp4", torch.int64),
    Run("sm_90a", (1, 64, 256), BF16, "nvfp4"), Run("sm_90a", (1, 128, 128), F16, "nvfp4"),
    Run("sm_103a", (1, 80, 64), F32, "mxfp8"), Run("sm_90a", (1, 64, 256), F32, "mxfp8"),
    Run("sm_90a", (1, 64, 128), BF16, "mxfp8"), Run("sm_90a", (1, 64, 64), F16, "mxfp8"),
    Run("sm_90a", (2, 80, 64), F32, FP8), Run("sm_103a", (1, 64, 256), F16, FP8),
    Run("sm_90a", (1, 64, 128), BF16, FP8),
    Run("sm_90a", (1, 80, 64), F32, INT8), Run("sm_90a", (2, 64, 128), BF16, INT8),
    Run("sm_90a", (1, 64, 256), F16, INT8),
    Run("sm_90a", (1, 80, 64), F32, BF16), Run("sm_90a", (1, 64, 128), F32, F16),
    Run("sm_103a", (1, 64, 256), F32, F16),
]  # fmt: skip


def differing(pool: Pool, slots: list[int], before: Pool) -> list[str]:
    """Parts of the copies of slots that are not those of the reference, and memory beside them that changed."""
    parts = quant.encode(pool.checkpoint[slots].float(), pool.replay.read_dtype)  # type: ignore[arg-type]
    found = []
    for name, want in parts.items():
        tensor, given = getattr(pool, f"read_{name}"), getattr(before, f"read_{name}")
        got = tensor[slots]
        if want.is_floating_point() and want.itemsize == 2:
            want, got = (torch.where(t.isnan(), torch.nan, t) for t in (want, got))
        if not same_bytes(want, got):
            found.append(name)
        memory, kept = (torch.tensor(t.untyped_storage().tolist(), dtype=torch.uint8) for t in (tensor, given))
        size, step = tensor[0].numel() * tensor.itemsize, tensor.stride(0) * tensor.itemsize
        for slot in slots:
            memory[slot * step : slot * step + size] = FILL
        if not same_bytes(memory, kept):
            found.append(f"beside {name}")
    return found


def encoded(run: Run, bench: Bench, slots: list[int]) -> list[str]:
    """What is wrong after the copies of slots are made."""
    pool = run.pool
    with bench.installed():
        model_launch.cuda_write_read_copy(torch.tensor(slots, dtype=run.index), (pool,))
    return differing(pool, [slot for slot in slots if slot >= 0], run.pool)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_copies_have_the_bits_of_the_reference(run: Run) -> None:
    bench = Bench(run.arch, "late", 1)
    assert encoded(run, bench, [2, 0, -1, 3, 1]) == []
    (launch,) = bench.launches
    assert f".target {run.arch}" in launch.ptx and launch.grid[1] == 5


def test_the_grid_covers_what_it_says() -> None:
    pairs = {(run.checkpoint, run.read) for run in RUNS}
    assert pairs == {
        (one, read) for one in (F32, F16, BF16) for read in READ_FORMATS if READ_FORMATS[read].bits < 8 * one.itemsize
    }
    for read in READ_FORMATS:
        of_read = [run.sizes for run in RUNS if run.read == read]
        assert read in (BF16, F16) or {k for *_, k in of_read} == {64, 128, 256}
    assert {run.sizes[1] for run in RUNS} == {64, 80, 128}
    assert {run.index for run in RUNS} == {torch.int32, torch.int64}
    assert {heads * rows % 128 == 0 for heads, rows, _ in (run.sizes for run in RUNS)} == {True, False}


def test_the_device_knows_the_formats_of_the_spec() -> None:
    named = {dtype_name(read): form for read, form in READ_FORMATS.items()}
    assert {name: form.bits for name, form in named.items()} == CODE_BITS
    assert {name: form.block for name, form in named.items() if form.block} == BLOCK
    assert {name for name, form in named.items() if form.row_scale} == set(LARGEST_CODE)
    assert {form.tile_rows for form in named.values() if form.tile_rows} == {TILE_ROWS}
    assert (ATOM_ROWS, ATOM_BLOCKS) == SCALE_ATOM and quant.LEAST_SCALE == LEAST_SCALE
    assert (quant.SEARCH, 1 / quant.E2M1_UNIT) == (SEARCH, UNITS)
    assert (quant.LEAST_BLOCK_SCALE, quant.LEAST_NORMAL) == (LEAST_BLOCK_SCALE, LEAST_NORMAL)


def mantissas(count: int) -> np.ndarray:
    return (np.arange(count, dtype=np.uint32) * np.uint32(2**23 // count) | np.uint32(0x3F800000)).view(np.float32)


@pytest.mark.parametrize("divisor", [127.0, 448.0])
def test_a_quotient_by_a_short_number_is_exact(divisor: float) -> None:
    """`quotient_by`, for all mantissas: its sums are exact in float64, or rounded there far below float32."""
    x, inverse = mantissas(2**23), np.float32(1 / divisor)
    first = x * inverse
    rest = x.astype(np.float64) - first.astype(np.float64) * divisor
    assert (rest == rest.astype(np.float32)).all()
    assert np.array_equal((rest * inverse + first).astype(np.float32), x / np.float32(divisor))
    assert not np.array_equal(first, x / np.float32(divisor))  # teeth


def test_a_reciprocal_of_a_scale_is_exact_in_float16() -> None:
    """For each of the neighbours that rcp.approx may give, of every unit of a block scale, up to 4 / 4."""
    scales = formats.decode_e4m3(torch.arange(quant.LEAST_NORMAL, 0x39).to(torch.uint8)).double().numpy()
    units = scales / quant.E2M1_UNIT
    assert (units.astype(np.float16) == units).all()
    want = (1 / units).astype(np.float16)
    near = (1 / units).astype(np.float32)
    for first in (near, np.nextafter(near, np.float32(1)), np.nextafter(near, np.float32(0))):
        assert np.array_equal(first.astype(np.float16), want)
    assert want.min() >= 2.0**-14


# The verbs.


def copied(model: Model, read: ReadDtype) -> Model:
    """The same with read copies of senseless bytes."""
    pools = []
    for pool in model.pools:
        spec = replace(pool.replay, read_dtype=read)
        fresh = make_pool(pool.layer, spec, pool.num_slots)
        tensors = {name: getattr(pool, name) for name in ("checkpoint", "value", "key", "decay")}
        parts = {name: getattr(fresh, name) for name in fresh.state_names[1:]}
        for part in parts.values():
            part.view(torch.uint8).fill_(FILL)
        pools.append(Pool(pool.layer, spec, **tensors, **parts))
    return replace(model, pools=pools)


@pytest.mark.parametrize(("kind", "read"), list(zip(RECURRENCES, ("nvfp4", FP8, "mxfp8"), strict=True)), ids=str)
def test_verbs_that_fold_write_the_copies_too(kind: Recurrence, read: ReadDtype) -> None:
    """Of the slots that they write, padding left alone, after every checkpoint is there; a layer without copies has no
    launch. The earlier copy is poison and must not be found again."""
    case = Case(kind, 1, 1, 64, 64, 5, 1, BF16, F32)
    model = model_of(
        case, torch.device("cpu"), [5, 2, 0], free=3, starts=[6, 0, 2], layers=[(case, "record_major")] * 2
    )
    model = replace(copied(model, read), pools=[copied(model, read).pools[0], model.pools[1]])
    rows = {
        "flush": (torch.tensor([1, -1, 2, 0]),),
        "materialize": (torch.tensor([0, 1, -1, 2]), torch.tensor([5, -1, 3, 4]), torch.tensor([3, 1, 1, 0]).int()),
    }
    for verb, written in (("flush", [0, 1, 2]), ("materialize", [4, 5])):
        moved = InterpretedModel.of(model, Bench("sm_90a", "late"))
        getattr(moved, verb)(*rows[verb])
        names = [re.findall(r"entry \w*?(\w+)_kernel", launch.ptx)[0].split("_")[-1] for launch in moved.bench.launches]
        assert names == ["materialize", "materialize", "encode", "empty"]
        assert differing(moved.pools[0], written, model.pools[0]) == []
        moved = InterpretedModel.of(model, Bench("sm_90a", "early"))
        moved.write_read_copy(torch.tensor([2, -1, 0]))
        assert len(moved.bench.launches) == 1
        assert differing(moved.pools[0], [0, 2], model.pools[0]) == []


def test_no_slot_launches_nothing_and_what_has_no_kernel_is_refused() -> None:
    bench, pool = Bench("sm_90a"), RUNS[0].pool
    with bench.installed():
        model_launch.cuda_write_read_copy(torch.zeros(0, dtype=torch.int64), (pool,))
        assert bench.launches == []
        with pytest.raises(NotImplementedError, match=r"slots: .*65535 rows, got 65536"):
            model_launch.cuda_write_read_copy(torch.zeros(65536, dtype=torch.int64), (pool,))
        for rows, channels, field in ((72, 64, "head_dim: .*got 72"), (64, 96, "d_state: .*got 96")):
            odd = make_pool(LayerSpec("gdn", 2, 1, rows, channels), pool.replay, 1)
            with pytest.raises(NotImplementedError, match=field):
                model_launch.cuda_write_read_copy(torch.zeros(1, dtype=torch.int64), (odd,))


# Teeth.


def everywhere(pattern: str, by: str) -> Callable[[str], str]:
    return lambda ptx: re.sub(pattern, by, ptx)


LESS = r"setp\.lt\.u32(\s+%p\d+), (%r\d+), (%r\d+);"
FAULTS: dict[str, dict[str, Callable[[str], str]]] = {
    "nvfp4": {
        "a NaN is passed over": everywhere(r"max\.NaN\.f32", "max.f32"),
        "half of the tile is not looked at": swap(r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 16,", r"\1, 0,"),
        "a tile's scale is not stored": swap(r"@p st\.global\.b32[^;]*;", ""),
        "a block's scale is not stored": swap(r"@p st\.global\.b8[^;]*;", ""),
        "codes are not stored": swap(r"st\.global\.v2\.b32[^;]*;", ""),
        "the padding is not cleared": swap(r"@p st\.global\.b32[^;]*;", "", -1),
        "a tie takes the later scale": everywhere(LESS, r"setp.le.u32\1, \2, \3;"),
        "the second scale is never taken": swap(LESS, r"setp.lt.u32\1, \3, \3;"),
        "the third scale is never taken": swap(LESS, r"setp.lt.u32\1, \3, \3;", 1),
        "an error is left out": swap(
            r"fma\.rn\.f16x2 (%r\d+), (%r\d+), (%r\d+), (%r\d+);", r"mov.b32 \1, \4;", 8),
        "a code is cut": everywhere("16777472", "0"),
        "a scale below the normal ones": everywhere(r"setp\.lt\.s32(\s+%p\d+, %r\d+), 8;", r"setp.lt.s32\1, 1;"),
        "parts in the order of the loads": swap("8738", "0"),
        "no least scale": swap(r"max\.u32(\s+%r\d+, %r\d+), 37;", r"max.u32\1, 12;"),
        "a NaN keeps its sign": swap("2004318071", "-1"),
        "a row of another atom's place": swap(r"and\.b32(\s+%r\d+, %r\d+), 496;", r"and.b32\1, 240;"),
    },
    "mxfp8": {
        "half of a block is not looked at": swap(r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 1,", r"\1, 0,"),
        "the least scale is doubled": swap("4194305", "1"),
        "a power of two is rounded up": swap("8388607", "8388608"),
        "scales are not stored": swap(r"@p st\.global\.b8[^;]*;", ""),
    },
    "int8": {
        "a part of a row is not looked at": swap(r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 2,", r"\1, 0,"),
        "no least scale": swap(r"max\.f32 (%r\d+), (%r\d+), %r\d+;", r"mov.b32 \1, \2;"),
        "a code is cut": swap(r"add\.rn\.f32", "add.rz.f32"),
        "the row's scale is not stored": swap(r"@p st\.global\.b32[^;]*;", ""),
        "a NaN has a code": swap(r"selp\.b32(\s+%r\d+), (%r\d+), 0, (%p\d+);", r"mov.b32\1, \2;", 1),
    },
}  # fmt: skip
SMALL = {dtype_name(run.read): run for run in RUNS if run.sizes == (1, 80, 64)}


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults])
def test_a_fault_in_the_kernel_is_caught(name: str, fault: str) -> None:
    try:
        found = encoded(SMALL[name], Bench("sm_90a", "late", change=FAULTS[name][fault]), [3, 1, 2, 0])
    except TroubleError:
        return
    assert found
