"""What the host code of a compiled kernel launches, on a machine without a GPU.

The object that `cute_kernels.compile` would put into its cache is linked with a runtime that only records
(`recorder.c`), and called as on a GPU. Its own checks of the arguments run, and the launch that follows is kept: grid,
block, cluster, shared memory, attributes and the bytes of every argument. The tensors live in CPU memory and claim to
be on cuda:0, so the pointers among those bytes lead into memory that an interpreter can use in place.

The runtime is linked in rather than put in front of the real one, so it serves its kernel alone, whatever this process
loaded before and whether or not the machine has a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("recorder.c")
NAME = "kernel"
CUDA = 2  # kDLCUDA of DLPack
DEVICE_OFFSET = 8  # of the device in DLManagedTensor, behind the data pointer
MAX_ATTRIBUTES, MAX_ARGUMENTS, MAX_ARGUMENT_BYTES = 16, 64, 4096  # as in recorder.c
CLUSTER = 4
ATTRIBUTES = {2: "cooperative", 6: "programmatic_stream_serialization"}  # cudaLaunchAttributeID
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[bsuf](\d+)\s+[\w$]+(?:\[(\d+)\])?")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch.

    Args:
        ptx: the module's text.
        entry: the kernel's name; None where the module has one kernel.
        grid, block, cluster: CTAs of the grid, threads of a CTA, CTAs of a cluster; x, y, z.
        shared_bytes: dynamic shared memory of a CTA.
        attributes: launch attributes by name, beside the cluster.
        arguments: the bytes of each parameter.
    """

    ptx: str
    entry: str | None = None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    attributes: dict[str, int]
    arguments: list[bytes]


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("padding", ctypes.c_int32), ("value", ctypes.c_uint32 * 16))


class _Record(ctypes.Structure):
    _fields_ = (
        ("launches", ctypes.c_uint32),
        ("attribute_count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("attributes", _Attribute * MAX_ATTRIBUTES),
        ("arguments", ctypes.c_uint8 * MAX_ARGUMENT_BYTES),
        ("kernel", ctypes.c_char * 1024),
    )


def why_no_recorder() -> str | None:
    """Why kernels cannot be recorded here, or None if they can."""
    return None if _compiler() else "needs a C compiler (cc, gcc or clang) to build the recording runtime"


def record(module: ModuleType, key: Hashable, arch: str, *groups: Any) -> Launch:
    """Call the host code of a compiled kernel on CPU tensors and return what it launches.

    Args:
        module: `cute_kernels.step` or `cute_kernels.commit`.
        key: the kernel's key.
        arch: e.g. "sm_90a".
        groups: what the kernel is called with: tensors, numbers, None and tuples of them. The tensors are on the CPU;
            what is no torch tensor is passed on as it is.

    Raises:
        TypeError, ValueError: the host code refuses an argument.
        RuntimeError: it made no launch, or several.
    """
    host = _host(module, key, arch)
    before = host.last.launches
    host.call(*(_fakes(group) for group in groups))
    if host.last.launches != before + 1:
        raise RuntimeError(f"expected one launch, got {host.last.launches - before}")
    return _launch_of(host)


def fake_cuda(tensor: Tensor) -> Any:
    """The same memory as a tensor that claims to be on cuda:0; strides, dtype and lifetime are kept."""
    import tvm_ffi

    capsule = torch.utils.dlpack.to_dlpack(tensor)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    device = ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + DEVICE_OFFSET)
    device.value = CUDA
    return tvm_ffi.from_dlpack(_Exported(capsule))


def buffers_of(*groups: Any, writeable: bool = True) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """The bytes of each tensor among the arguments of `record`, in place, from its first element to its last.

    The gaps of a strided tensor are in its buffer as well. Tensors without elements have none.

    Args:
        writeable: whether the arrays are; the tensors are in any case.
    """
    buffers = [_bytes_of(tensor) for tensor in _tensors(groups) if tensor.numel()]
    for buffer in buffers:
        buffer.flags.writeable = writeable
    return buffers


@dataclass(frozen=True)
class _Exported:
    """What `from_dlpack` asks for."""

    capsule: Any

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0


@dataclass(frozen=True)
class _Host:
    """A loaded kernel: its host function, the record that it writes, its PTX and the bytes of its parameters."""

    call: Callable[..., None]
    last: _Record
    ptx: str
    sizes: tuple[int, ...]
    library: ctypes.CDLL


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that lives as long as the process."""
    return tempfile.TemporaryDirectory(prefix="recorder-")


@functools.cache
def _host(module: ModuleType, key: Hashable, arch: str) -> _Host:
    import tvm_ffi
    from cutlass.base_dsl import compiler

    from cute_kernels.compile import compile_only

    folder = Path(tempfile.mkdtemp(dir=_folder().name))
    function = getattr(module, module.__name__.rpartition(".")[2] + "_launch")
    keep = (compiler.KeepPTX(True), compiler.DumpDir(str(folder)))
    kernel = compile_only(function, functools.partial(module.fake_arguments, key), arch, *keep)
    kernel.export_to_c(str(folder / "kernel.o"), function_name=NAME)
    library, ptx = folder / "kernel.so", kernel.artifacts.PTX
    # -Bsymbolic: the kernel's calls reach the runtime beside it even if another library offers the same names.
    command = [_compiler() or "cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-Bsymbolic"]
    subprocess.run([*command, "-o", library, SOURCE, folder / "kernel.o"], check=True)
    call = getattr(tvm_ffi.load_module(library), NAME)
    handle, sizes = ctypes.CDLL(str(library)), parameter_bytes(ptx)
    if len(sizes) > MAX_ARGUMENTS:
        raise ValueError(f"ptx: at most {MAX_ARGUMENTS} parameters are recorded, got {len(sizes)}")
    ctypes.c_uint32.in_dll(handle, "recorder_argument_count").value = len(sizes)
    (ctypes.c_uint32 * MAX_ARGUMENTS).in_dll(handle, "recorder_argument_bytes")[: len(sizes)] = list(sizes)
    return _Host(call, _Record.in_dll(handle, "recorder_last"), ptx, sizes, handle)


def parameter_bytes(ptx: str) -> tuple[int, ...]:
    """The size of each parameter of the one kernel in a module."""
    heads = re.findall(r"\.entry\s+[\w$]+\s*\(([^)]*)\)", ptx)
    if len(heads) != 1:
        raise ValueError(f"ptx: expected one kernel with parameters, got {len(heads)}")
    found = PARAMETER.findall(heads[0])
    if len(found) != heads[0].count(".param"):
        raise ValueError(f"ptx: a parameter of another form than known in {heads[0]!r}")
    return tuple(int(bits) // 8 * int(count or 1) for bits, count in found)


def _launch_of(host: _Host) -> Launch:
    last = host.last
    attributes = {one.id: tuple(one.value) for one in last.attributes[: last.attribute_count]}
    cluster = attributes.pop(CLUSTER, (1, 1, 1))
    if unknown := set(attributes) - set(ATTRIBUTES):
        raise ValueError(f"launch: attributes {sorted(unknown)} are not known to the recorder")
    ends = np.cumsum(host.sizes).tolist()
    memory = bytes(last.arguments)
    return Launch(
        ptx=host.ptx,
        entry=last.kernel.decode(),
        grid=tuple(last.grid),
        block=tuple(last.block),
        cluster=cluster[:3],
        shared_bytes=last.shared_bytes,
        attributes={ATTRIBUTES[name]: value[0] for name, value in attributes.items()},
        arguments=[memory[end - size : end] for end, size in zip(ends, host.sizes, strict=True)],
    )


def _fakes(group: Any) -> Any:
    if isinstance(group, tuple):
        return tuple(map(_fakes, group))
    return fake_cuda(group) if isinstance(group, Tensor) else group


def _tensors(group: Any) -> Iterator[Tensor]:
    if isinstance(group, tuple):
        for one in group:
            yield from _tensors(one)
    elif isinstance(group, Tensor):
        yield group


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = tensor.storage_offset() * tensor.itemsize
    whole = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    return whole[first : first + extent * tensor.itemsize]
