"""The host code of the compiled kernels launches what it should and refuses what it must, run as it is without a GPU.

Launches: the grid, the shared memory and the dependent launch for each way of calling, and every argument by its
bytes. Refusals: a tensor of another dtype, shape, stride, device or alignment than the kernel was compiled for, each
with a message that names the argument.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels import commit, step
from cute_kernels.configs import RowOptions, StepConfig, StepKey, Tile
from replayssm import plan_step
from replayssm.launch import options_of
from tests.helpers.oracle import BARE, BASE, PAD, Given, Scene, Work
from tests.ptx import recorder
from tests.ptx.launches import Bench, Interpreted
from tests.ptx.recorder import buffers_of, fake_cuda, parameter_bytes, record

recorded = pytest.mark.skipif(recorder.why_no_recorder() is not None, reason=str(recorder.why_no_recorder()))
SMALL = replace(BASE, HV=2, HK=1)
MBARRIER_BYTES = 8
SCENE = Scene(SMALL, (0, 5, PAD), forced=(0,))


def key_of(work: Work, *, pdl: bool = False, split: int = 1) -> StepKey:
    index, force = str(work.cache_indices.dtype).removeprefix("torch."), work.force_fold is not None
    return plan_step(
        work.pool.layer,
        work.pool.replay,
        options_of(work.inputs),
        arch="sm_90a",
        batch=1,
        rows=RowOptions(index, force, pdl),
        ring_layout=work.pool.ring_layout,
        config=StepConfig(split),
    ).key


def groups_of(work: Work, out: Tensor) -> list[Any]:
    """The arguments of a step as `ops` passes them."""
    x, dt, B, C, A, D, z, dt_bias, *_ = work.inputs
    rows = (work.cache_indices, None if work.force_fold is None else work.force_fold.view(torch.uint8), None)
    cursors = (work.cursors.ring_start, work.cursors.num_committed, work.cursors.fold_count)
    pool = (*work.pool.tensors[:4], *work.pool.read_parts, work.pool.seed)
    return [pool, cursors, rows, (x, dt, B, C, z), (A, D, dt_bias), out, work.pad_slot_id]


def flat(groups: list[Any]) -> list[Tensor]:
    return [t for group in groups for t in (group if isinstance(group, tuple) else (group,)) if isinstance(t, Tensor)]


# Launches.


@recorded
@pytest.mark.parametrize(
    ("arch", "split", "pdl", "rows"), [("sm_90a", 1, False, 3), ("sm_90a", 2, True, 1), ("sm_103a", 4, True, 300)]
)
def test_a_step_launches_its_grid(arch: str, split: int, pdl: bool, rows: int) -> None:
    """A CTA for each part of each head of each row. The attribute of a dependent launch is set only when asked for, and
    shared memory is the tile, what is staged beside it and one mbarrier: of the 128 bytes that `Tile.smem_bytes` keeps
    for the barrier and its alignment, 8 are used."""
    bench = Bench(arch)
    work = Interpreted.of(replace(SCENE, counts=(2,) * rows), bench)
    work.step(pdl=pdl, config=StepConfig(split))
    (launch,) = bench.launches
    tile = Tile.of(key_of(work, split=split))
    assert launch.grid == (SMALL.HV * split, rows, 1)
    assert launch.block == (128, 1, 1)
    assert launch.cluster == (1, 1, 1)
    assert launch.attributes == {"programmatic_stream_serialization": int(pdl), "cooperative": 0}
    assert launch.shared_bytes == tile.bytes + tile.staging_bytes + MBARRIER_BYTES <= tile.smem_bytes
    assert f".target {arch}" in launch.ptx
    assert launch.entry is not None and f".entry {launch.entry}(" in launch.ptx


@recorded
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 1), (129, 2), (1000, 8)])
def test_a_commit_launches_a_thread_for_each_row(rows: int, blocks: int) -> None:
    bench = Bench()
    work = Interpreted.of(replace(SCENE, counts=(2,) * rows, forced=None), bench)
    work.commit()
    (launch,) = bench.launches
    assert (launch.grid, launch.block, launch.cluster) == ((blocks, 1, 1), (128, 1, 1), (1, 1, 1))
    assert launch.shared_bytes == 0
    assert not any(launch.attributes.values())
    pointers = [struct.unpack("<Q", argument[:8])[0] for argument in launch.arguments[:-2]]
    assert pointers == [t.data_ptr() for t in (work.cursors.ring_start, work.cursors.num_committed, work.cache_indices)]
    numbers = [struct.unpack("<i", argument)[0] for argument in launch.arguments[-2:]]
    assert numbers == [work.pool.replay.ring_capacity, work.pad_slot_id]


@recorded
@pytest.mark.parametrize("given", [Given(), BARE], ids=lambda given: given.id)
@pytest.mark.parametrize("layout", ["record_major", "strided"])
def test_each_argument_is_a_tensor(given: Given, layout: Any) -> None:
    """In order, each parameter begins with the address of its tensor; absent tensors have none. The strides that follow
    are those over slots, for the pool, and over rows, for inputs and output."""
    forced = None if given is BARE else (0,)
    work = Scene(SMALL, (0, 5, PAD), forced=forced, given=given, ring_layout=layout).on("cpu")
    work = replace(work, pad_slot_id=7)
    groups = groups_of(work, torch.zeros_like(work.inputs.x))
    *arguments, pad = record(step, key_of(work), "sm_90a", *groups).arguments
    tensors = flat(groups)
    assert [struct.unpack("<Q", argument[:8])[0] for argument in arguments] == [t.data_ptr() for t in tensors]
    assert pad == struct.pack("<i", 7)
    for argument, tensor in zip(arguments, tensors, strict=True):
        if tensor.dim() > 1:
            assert struct.unpack("<q", argument[8:16])[0] == tensor.stride(0)


@recorded
def test_a_later_call_leaves_a_recorded_launch_alone() -> None:
    bench = Bench()
    one, two = Interpreted.of(SCENE, bench), Interpreted.of(replace(SCENE, counts=(1, 2)), bench)
    for work in (one, two, one):
        work.step(config=StepConfig())
    first, other, again = bench.launches
    assert first.arguments[0] == again.arguments[0] != other.arguments[0]
    assert (first.grid, other.grid) == ((2, 3, 1), (2, 2, 1))


# Refusals.


def moved(tensor: Tensor, by: int) -> Tensor:
    """The same values and strides, `by` elements further into memory."""
    memory = torch.zeros(tensor.numel() + by, dtype=tensor.dtype)
    return memory[by:].view(tensor.shape).copy_(tensor)


def apart(tensor: Tensor, by: int) -> Tensor:
    """The same values, with rows `by` elements further apart."""
    stride = tensor.stride(0) + by
    memory = torch.zeros(tensor.shape[0] * stride, dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, (stride, *tensor.stride()[1:])).copy_(tensor)


def on_the_cpu(tensor: Tensor) -> Any:
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)


POOL, CURSORS, ROWS, INPUTS, PARAMETERS = range(5)
NAMES = ("pool", "cursors", "rows", "inputs", "parameters")
WRONG: dict[str, tuple[int, int, Callable[[Tensor], Any], str, str]] = {
    "state dtype": (POOL, 0, Tensor.bfloat16, "", "dtype=float32"),
    "index dtype": (ROWS, 0, Tensor.int, "", "dtype=int64"),
    "parameter dtype": (PARAMETERS, 0, Tensor.double, "", "dtype=float32"),
    "no tensor": (PARAMETERS, 0, lambda t: None, "", "Tensor"),
    "dimensions": (INPUTS, 1, lambda t: t[:, 0], "", "ndim=3"),
    "heads": (INPUTS, 0, lambda t: t[:, :, :1], ".shape[2]", "to be 2"),
    "tokens": (INPUTS, 0, lambda t: t.expand(-1, 2, -1, -1), ".shape[1]", "to be 1"),
    "rows": (INPUTS, 2, lambda t: t[:2], ".shape[0]", "to match rows[0].shape[0]"),
    "slots": (CURSORS, 1, lambda t: t[:2], ".shape[0]", "to match pool[0].shape[0]"),
    "strides": (INPUTS, 0, lambda t: t.mT.contiguous().mT, ".strides[2]", "to be 64"),
    "stride units": (INPUTS, 0, lambda t: apart(t, 4), ".strides[0]", "to be divisible by 8"),
    "alignment": (INPUTS, 0, lambda t: moved(t, 4), "", "data alignment=16 bytes"),
    "device": (INPUTS, 0, on_the_cpu, "", "device_type=cuda"),
}


@recorded
@pytest.mark.parametrize("wrong", WRONG)
def test_the_host_code_refuses(wrong: str) -> None:
    group, index, change, part, expected = WRONG[wrong]
    work = SCENE.on("cpu")
    key, groups = key_of(work), groups_of(work, torch.zeros_like(work.inputs.x))
    record(step, key, "sm_90a", *groups)
    groups[group] = tuple(change(t) if i == index else t for i, t in enumerate(groups[group]))
    with pytest.raises((TypeError, ValueError)) as refused:
        record(step, key, "sm_90a", *groups)
    message = str(refused.value)
    assert re.match(rf"(Mismatched|Misaligned|Invalid) .*{re.escape(f'{NAMES[group]}[{index}]{part}')} ", message)
    assert message.endswith(f"expected {expected}")


@recorded
def test_the_commit_refuses() -> None:
    work = SCENE.on("cpu")
    cursors, rows = groups_of(work, work.inputs.x)[1:3]
    key, accepted = commit.CommitKey(5, 1, "int64", True, True), torch.ones(3, dtype=torch.int32)
    assert record(commit, key, "sm_90a", cursors, rows, accepted, 7, -1).grid == (1, 1, 1)
    for other in (accepted.long(), accepted[:2], None, accepted.view(3, 1)):
        with pytest.raises((TypeError, ValueError), match=r"^Mismatched .*num_accepted"):
            record(commit, key, "sm_90a", cursors, rows, other, 7, -1)


# The recorder itself.


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8], ids=str
)
def test_a_fake_is_the_same_memory(dtype: torch.dtype) -> None:
    tensor = torch.arange(60).to(dtype).view(3, 4, 5)[1:, :, ::2]
    fake = fake_cuda(tensor)
    assert (tuple(fake.shape), tuple(fake.strides), str(fake.device)) == ((2, 4, 3), (20, 5, 2), "cuda:0")
    assert fake.data_ptr() == tensor.data_ptr()
    assert str(fake.dtype) == str(dtype).removeprefix("torch.")
    (buffer,) = buffers_of((tensor, None, 3))
    assert buffer.ctypes.data == tensor.data_ptr()
    assert buffer.size == (1 * 20 + 3 * 5 + 2 * 2 + 1) * dtype.itemsize
    buffer[-dtype.itemsize :] = 0
    assert int(tensor[1, 3, 2]) == 0 != int(tensor[1, 3, 1])


def test_a_fake_outlives_its_tensor() -> None:
    tensor = torch.arange(1000, dtype=torch.int32)
    fake, address = fake_cuda(tensor), tensor.data_ptr()
    del tensor
    others = [torch.zeros(1000, dtype=torch.int32) for _ in range(20)]
    assert fake.data_ptr() == address
    assert address not in [other.data_ptr() for other in others]


def test_parameters_are_sized_by_their_declarations() -> None:
    ptx = ".visible .entry k$1(\n\t.param .align 8 .b8 k_0[16],\n\t.param .u32 k_1,\n\t.param .f64 k_2\n)\n{ ret; }"
    assert parameter_bytes(ptx) == (16, 4, 8)
    with pytest.raises(ValueError, match="expected one kernel"):
        parameter_bytes(ptx + ptx)
    with pytest.raises(ValueError, match="another form"):
        parameter_bytes(ptx.replace(".f64", ".texref"))


def test_a_machine_without_a_c_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "C compiler" in str(recorder.why_no_recorder())
