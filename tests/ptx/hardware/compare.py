"""Runs a kernel in the interpreter, and says where outputs differ from stored ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.ptx.hardware.kernel import Bound, Kernel
from tests.ptx.hardware.numbers import FORMATS, values

VECTORS = Path(__file__).parent.parent / "vectors"
OUTPUTS, FACTS = "sm_90a.npz", "sm_90a.json"


@dataclasses.dataclass
class Launch:
    """A launch as `machine.run_launch` takes it."""

    ptx: str
    arguments: list[bytes]
    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    cluster: tuple[int, ...]
    shared_bytes: int
    entry: str | None = None
    attributes: dict[str, int] = dataclasses.field(default_factory=dict)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address as round as those of device memory."""
    room = np.zeros(array.nbytes + 256, np.uint8)
    start = -room.ctypes.data % 256
    found = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def interpreted(kernel: Kernel, maps: list[np.ndarray], mode: Any = "early", seed: int = 0) -> list[np.ndarray]:
    """The outputs after the interpreter ran the kernel; `maps` are the driver's bytes of its tensor maps."""
    from tests.ptx.machine import run_launch

    inputs, outputs = [aligned(a) for a in kernel.inputs], [aligned(a) for a in kernel.outputs]
    for array in inputs:
        array.flags.writeable = False
    arguments = [a.ctypes.data.to_bytes(8, "little") for a in (*inputs, *outputs)] + list(kernel.scalars)
    for one, raw in zip(kernel.maps, maps, strict=True):  # the address comes first
        arguments.append((inputs + outputs)[one.array].ctypes.data.to_bytes(8, "little") + raw[8:].tobytes())
    launch = Launch(kernel.ptx, arguments, kernel.block, kernel.grid, kernel.cluster, kernel.shared)
    run_launch(launch, [*inputs, *outputs], mode=mode, seed=seed)
    return outputs


def stored(folder: Path = VECTORS) -> tuple[dict[str, list[np.ndarray]], dict[str, Any]]:
    """Outputs by kernel, and what is known about them; both empty where there are none."""
    if not (folder / FACTS).exists():
        return {}, {}
    found: dict[str, list[np.ndarray]] = {}
    facts = json.loads((folder / FACTS).read_text())
    with np.load(folder / OUTPUTS) as arrays:
        for key in arrays.files:
            found.setdefault(key.rpartition(".")[0], []).append(arrays[key])
    return found, facts


def within(bound: Bound, ours: np.ndarray, theirs: np.ndarray, kind: str) -> np.ndarray:
    """Which results of the hardware lie within a bound of those that are exact but for one rounding."""
    _, _, mantissa, bias = FORMATS[kind]
    ours, theirs = values(ours, kind), values(theirs, kind)
    _, exponents = np.frexp(np.where(np.isfinite(ours), ours, 0.0))
    unit = np.ldexp(1.0, np.maximum(exponents - 1, 1 - bias) - mantissa)
    with np.errstate(invalid="ignore"):
        allowed = np.maximum(np.maximum(bound.ulp * unit, bound.relative * np.abs(ours)), bound.absolute) + 0.5 * unit
        near = np.abs(ours - theirs) <= allowed
        small = (np.abs(ours) < bound.tiny) & (np.abs(theirs) < bound.tiny)
    return near | small | (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))


def differences(kernel: Kernel, ours: list[np.ndarray], theirs: list[np.ndarray], *, exact: bool = False) -> list[str]:
    """Where outputs differ by more than the kernel's bounds, or at all with `exact`; one line each, the first few."""
    found = []
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine.shape != other.shape or mine.dtype != other.dtype:
            return [f"output {number}: {mine.dtype}{list(mine.shape)} and {other.dtype}{list(other.shape)}"]
        same = mine == other
        if number == 0 and not exact:
            if kernel.any_nan:
                same |= np.isnan(values(mine, kernel.kind)) & np.isnan(values(other, kernel.kind))
            for row, bound in enumerate(kernel.bounds):
                if bound is not None:
                    same[row] = within(bound, mine[row], other[row], kernel.kind)
        for place in np.argwhere(~same)[:8]:
            where = tuple(int(i) for i in place)
            width = 2 * mine.dtype.itemsize
            found.append(
                f"output {number} {list(where)}: {int(mine[where]):#0{width + 2}x}, not {int(other[where]):#x}"
            )
        if (count := int((~same).sum())) > 8:
            found.append(f"output {number}: {count} of {same.size} differ")
    return found
