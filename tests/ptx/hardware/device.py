"""Runs the kernels on the GPU of this machine and stores what they write.

The kernels run in a process of their own, since a fault ends its context for good and a deadlock never returns. After
either the rest goes on in another process, and the kernel that was running is reported by name.
"""

from __future__ import annotations

import ctypes
import datetime
import io
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tests.ptx.hardware import KERNELS, Kernel
from tests.ptx.hardware.compare import FACTS, OUTPUTS, aligned
from tests.ptx.hardware.kernel import Map

SILENCE = 30.0  # seconds without progress after which a process is ended; its start counts too
KINDS = {"u1": 0, "u2": 1, "u4": 2, "f4": 7}  # CUtensorMapDataType of NumPy's types
ROOT = Path(__file__).parents[3]
RUNS = 3  # launches of each kernel, which must agree


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


def driver() -> Any:
    """The bindings of the CUDA driver, initialised, with a current context."""
    from cuda.bindings import driver as cuda

    call(cuda.cuInit(0))
    (context,) = call(cuda.cuDevicePrimaryCtxRetain(call(cuda.cuDeviceGet(0))[0]))
    call(cuda.cuCtxSetCurrent(context))
    return cuda


def call(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a driver call returned; raises DriverError if it failed."""
    error, *rest = result
    if int(error):
        raise DriverError(f"{error.name} ({int(error)})")
    return tuple(rest)


def _jit_log(cuda: Any, ptx: bytes) -> str:
    """What the driver's compiler says about a module that does not load."""
    try:
        log, option = bytearray(4096), cuda.CUjit_option
        options = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        cuda.cuModuleLoadDataEx(ptx, 2, options, [log, len(log)])
        return log.split(b"\0")[0].decode(errors="replace").strip()
    except Exception as failure:
        return f"no log: {failure}"


def load(cuda: Any, kernel: Kernel) -> Any:
    """The kernel's function, compiled by the driver."""
    ptx = kernel.ptx.encode() + b"\0"
    error, module = cuda.cuModuleLoadData(ptx)
    if int(error):
        raise DriverError(f"does not load: {error.name}; {_jit_log(cuda, ptx)}")
    (function,) = call(cuda.cuModuleGetFunction(module, b"k"))
    if kernel.shared > 48 << 10:
        limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(cuda.cuFuncSetAttribute(function, limit, kernel.shared))
    return function


def launch(cuda: Any, function: Any, kernel: Kernel) -> list[np.ndarray]:
    """What the outputs hold after one launch, and the bytes of tensor maps but for the address."""
    addresses = []
    for array in (*kernel.inputs, *kernel.outputs):
        (address,) = call(cuda.cuMemAlloc(max(256, array.nbytes)))
        call(cuda.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
        addresses.append(address)
    held = [np.frombuffer(int(one).to_bytes(8, "little"), np.uint8).copy() for one in addresses]
    held += [np.frombuffer(raw, np.uint8).copy() for raw in kernel.scalars]
    maps = [encoded(kernel, one, int(addresses[one.array])) for one in kernel.maps]
    held += maps
    pointers = np.array([one.ctypes.data for one in held], np.uint64)
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = kernel.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.block
    config.sharedMemBytes, config.hStream = kernel.shared, cuda.CUstream(0)
    if kernel.cluster != (1, 1, 1):
        attribute = cuda.CUlaunchAttribute()
        attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = attribute.value
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = kernel.cluster
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
    call(cuda.cuLaunchKernelEx(config, function, int(pointers.ctypes.data), 0))
    call(cuda.cuCtxSynchronize())
    found = [np.empty_like(array) for array in kernel.outputs]
    for array, address in zip(found, addresses[len(kernel.inputs) :], strict=True):
        call(cuda.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
    for address in addresses:
        call(cuda.cuMemFree(address))
    for one in maps:
        one[:8] = 0  # the address, which differs from launch to launch
    return [*found, *maps]


def encoded(kernel: Kernel, one: Map, address: int) -> np.ndarray:
    """The driver's bytes of a tensor map; called directly, since it wants them at a multiple of 64 bytes."""
    array, found = (*kernel.inputs, *kernel.outputs)[one.array], aligned(np.zeros(128, np.uint8))
    dims, strides = np.array(array.shape[::-1], np.uint64), np.array(array.strides[-2::-1], np.uint64)
    box, steps = np.array(one.box, np.uint32), np.ones(array.ndim, np.uint32)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (dims, strides, box, steps)]
    swizzle = {16: 0, 32: 1, 64: 2, 128: 3}[one.swizzle]
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    to, tensor = ctypes.c_void_p(found.ctypes.data), ctypes.c_void_p(address)
    error = encode(to, KINDS[array.dtype.str[1:]], array.ndim, tensor, *pointers, 0, swizzle, 0, 0)
    if error:
        raise DriverError(f"cuTensorMapEncodeTiled: {error}")
    return found


def worker(folder: Path, names: Iterable[str]) -> None:
    """Run kernels, leaving `name.npz` or `name.error` for each; `name.started` says which was under way."""
    cuda = driver()
    for name in names:
        (folder / f"{name}.started").touch()
        try:
            function = load(cuda, KERNELS[name])
            first, *others = [launch(cuda, function, KERNELS[name]) for _ in range(RUNS)]
            for other in others:
                if any(x.tobytes() != y.tobytes() for x, y in zip(first, other, strict=True)):
                    raise DriverError("launches differ")
            np.savez(folder / f"{name}.partial.npz", *first)
            (folder / f"{name}.partial.npz").rename(folder / f"{name}.npz")
        except Exception as failure:
            (folder / f"{name}.error").write_text(f"{type(failure).__name__}: {failure}")
            if not str(failure).startswith(("does not load", "launches differ")):
                return  # the context may be broken: go on in another process


def _finished(folder: Path, name: str) -> bool:
    return any((folder / f"{name}.{end}").exists() for end in ("npz", "error"))


def run_all(names: Iterable[str]) -> tuple[dict[str, list[np.ndarray]], dict[str, str]]:
    """Outputs by kernel, and what went wrong by kernel."""
    names = list(names)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        while left := [name for name in names if not _finished(folder, name)]:
            command = [sys.executable, "-m", "tests.ptx.hardware", "--worker", str(folder), *left]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
            said = _watch(process, folder, left)
            stopped = [n for n in left if (folder / f"{n}.started").exists() and not _finished(folder, n)]
            if not stopped and not any(_finished(folder, name) for name in left):
                stopped = left  # none was reached, so none will be
            for name in stopped:
                (folder / f"{name}.error").write_text(said)
        errors = {name: path.read_text() for name in names if (path := folder / f"{name}.error").exists()}
        outputs = {}
        for name in names:
            if name not in errors:
                with np.load(folder / f"{name}.npz") as stored:
                    outputs[name] = [stored[f"arr_{i}"] for i in range(len(stored.files))]
    return outputs, errors


def _watch(process: subprocess.Popen[str], folder: Path, names: list[str]) -> str:
    """Wait for a worker while it makes progress; what it said at its end."""
    done, since = -1, time.monotonic()
    while process.poll() is None:
        now = sum(_finished(folder, name) for name in names)
        if now != done:
            done, since = now, time.monotonic()
        if time.monotonic() - since > SILENCE:
            process.kill()
            process.communicate()
            return f"no result after {SILENCE:.0f} s: ended"
        time.sleep(0.05)
    return f"process ended with {process.returncode}: {process.communicate()[1][-600:]}"


def facts() -> dict[str, str]:
    """Which device and driver these are."""
    cuda = driver()
    (device,) = call(cuda.cuDeviceGet(0))
    name = call(cuda.cuDeviceGetName(128, device))[0].split(b"\0")[0].decode()
    version = call(cuda.cuDriverGetVersion())[0]
    major, minor = (
        call(
            cuda.cuDeviceGetAttribute(
                getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"), device
            )
        )[0]
        for part in ("MAJOR", "MINOR")
    )
    return {
        "device": name,
        "capability": f"{major}.{minor}",
        "cuda_driver": f"{version // 1000}.{version % 1000 // 10}",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a .npz whose bytes depend on the arrays alone, packed tighter than NumPy does."""
    with zipfile.ZipFile(path, "w") as packed:
        for name, array in arrays.items():
            data = io.BytesIO()
            np.lib.format.write_array(data, np.ascontiguousarray(array), allow_pickle=False)
            packed.writestr(zipfile.ZipInfo(f"{name}.npy"), data.getvalue(), zipfile.ZIP_LZMA)


def capture(folder: Path, names: Iterable[str] = ()) -> dict[str, str]:
    """Run kernels, all unless named, and write their outputs and what they were taken from; returns the failures."""
    chosen = list(names) or list(KERNELS)
    outputs, errors = run_all(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {f"{name}.{i}": array for name, group in outputs.items() for i, array in enumerate(group)}
    save(folder / OUTPUTS, arrays)
    try:
        found = facts()
    except Exception as failure:
        found = {"device": f"{type(failure).__name__}: {failure}"}
    digests = {name: KERNELS[name].digest for name in outputs}
    (folder / FACTS).write_text(json.dumps({**found, "kernels": digests}, indent=1) + "\n")
    return errors
