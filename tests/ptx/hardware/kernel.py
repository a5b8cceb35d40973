"""What a kernel of the comparison with hardware is, and helpers that write its PTX.

A kernel takes the addresses of its inputs and outputs as .u64 parameters a0, a1, ...; the prologue loads them into %a0,
%a1, ... and the thread's index into %t. Registers of one class per width are there: %h (16 bits), %r (32), %d (64), %p.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CLASS = {1: "h", 2: "h", 4: "r", 8: "d"}
Expected = Callable[[], np.ndarray]


@dataclass(frozen=True)
class Bound:
    """How far a result of an approximate instruction may lie from that of the interpreter.

    The interpreter gives the exact value rounded once, so half a unit in the last place is added to what PTX states.

    Args:
        ulp: units in the last place.
        relative: as a fraction of the value.
        absolute: an error; the largest of the three counts.
        tiny: results below it in magnitude may be 0 instead.
    """

    ulp: float = 0.0
    relative: float = 0.0
    absolute: float = 0.0
    tiny: float = 0.0


@dataclass(frozen=True)
class Map:
    """A tensor map, which the driver encodes: the last parameters of a kernel.

    Args:
        array: index of the tensor among inputs and outputs; its last dimension is the tensor's first.
        box: elements, in the tensor map's order.
        swizzle: bytes of the pattern; 16 for none.
    """

    array: int
    box: tuple[int, ...]
    swizzle: int = 16


@dataclass(frozen=True)
class Kernel:
    """A kernel, how it is launched and over which memory.

    Args:
        name: unique; the arrays of its vectors start with it.
        family: of the instructions that it is about.
        ptx: the module's text.
        inputs: arrays that it may only read.
        outputs: arrays that it writes, with what they hold before.
        shared: bytes of dynamic shared memory.
        scalars: bytes of parameters behind the addresses.
        maps: tensor maps, parameters behind those; the driver's bytes are stored with the outputs.
        kind: how the first output's bits are read where bounds apply: f16, bf16, f32 or f64.
        bounds: for each row of the first output, None where it is exact; empty where all is.
        any_nan: PTX leaves the bits of a NaN open, so any NaN equals any other of `kind`.
        expected: what some leading rows of the first output must be by exact arithmetic, for matrix products.
    """

    name: str
    family: str
    ptx: str
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]
    block: tuple[int, int, int] = (32, 1, 1)
    grid: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0
    scalars: tuple[bytes, ...] = ()
    maps: tuple[Map, ...] = ()
    kind: str = ""
    bounds: tuple[Bound | None, ...] = ()
    any_nan: bool = False
    expected: Expected | None = field(default=None, compare=False)

    @property
    def digest(self) -> str:
        """Of all that determines the outputs, so that a vector taken from something else is noticed."""
        found = hashlib.sha256(" ".join(self.ptx.split()).encode())  # where lines break is of no account
        found.update(repr((self.block, self.grid, self.cluster, self.shared, self.scalars, self.maps)).encode())
        for array in (*self.inputs, *self.outputs):
            found.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
        return found.hexdigest()[:16]


KERNELS: dict[str, Kernel] = {}


def add(kernel: Kernel) -> Kernel:
    """Enter a kernel into the table."""
    if kernel.name in KERNELS:
        raise ValueError(f"two kernels are called {kernel.name}")
    KERNELS[kernel.name] = kernel
    return kernel


def module(body: str, addresses: int, *, limits: str, scalars: Sequence[str] = (), top: str = "") -> str:
    """A module of one entry `k` around a body; `limits` are its performance directives, `top` its variables."""
    parameters = ", ".join([f".param .u64 a{i}" for i in range(addresses)] + [f".param {text}" for text in scalars])
    loads = "\n".join(f"ld.param.u64 %a{i}, [a{i}];" for i in range(addresses))
    return f""".version 8.6
.target sm_90a
.address_size 64
{top}
.extern .shared .align 1024 .b8 smem[];
.visible .entry k({parameters})
{limits}
{{
.reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<32>; .reg .b32 %t; .reg .b64 %a<{max(1, addresses)}>;
{loads}
mov.u32 %t, %tid.x;
{body.strip()}
ret;
}}
"""


def kernel(
    name: str, family: str, body: str, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], **how: Any
) -> Kernel:
    """Enter a kernel given by its body.

    Beside the fields of `Kernel`, `how` has `scalars` as declarations with their bytes, `limits` for performance
    directives and `top` for the module's variables; `block` may be a number.
    """
    block = how.pop("block", (32, 1, 1))
    block = block if isinstance(block, tuple) else (block, 1, 1)
    scalars = how.pop("scalars", {})
    maps = [f".align 64 .b8 map{i}[128]" for i in range(len(how.get("maps", ())))]
    text = module(
        body,
        len(inputs) + len(outputs),
        limits=f".reqntid {', '.join(map(str, block))} {how.pop('limits', '')}".strip(),
        scalars=(*scalars, *maps),
        top=how.pop("top", ""),
    )
    copies = [tuple(np.ascontiguousarray(a) for a in group) for group in (inputs, outputs)]
    return add(Kernel(name, family, text, *copies, block=block, scalars=tuple(scalars.values()), **how))


def zeros(*shape: int, dtype: type = np.uint32) -> np.ndarray:
    """An output that holds zeros before."""
    return np.zeros(shape, dtype)


def place(array: int, size: int, register: str = "%t", to: str = "%d31") -> str:
    """PTX that puts the address of element `register` of array a`array` into `to`."""
    return f"mad.wide.u32 {to}, {register}, {size}, %a{array};"


def lanewise(
    name: str,
    family: str,
    rows: Sequence[str],
    inputs: Sequence[np.ndarray],
    out: type = np.uint32,
    **how: Any,
) -> Kernel:
    """A kernel of one thread for each element of the inputs, which stores one result for each of the rows.

    A row is PTX that reads register i + 1 of the class of input i's width, and writes register 0 of the result's.
    """
    threads, size = len(inputs[0]), np.dtype(out).itemsize
    lines = []
    for i, array in enumerate(inputs):
        width = array.dtype.itemsize
        lines += [place(i, width), f"ld.global.b{8 * width} %{CLASS[width]}{i + 1}, [%d31];"]
    lines += [place(len(inputs), size, to="%d30")]
    for number, row in enumerate(rows):
        lines += ["{ " + row.strip(), f"st.global.b{8 * size} [%d30+{number * threads * size}], %{CLASS[size]}0; }}"]
    return kernel(name, family, "\n".join(lines), inputs, [np.zeros((len(rows), threads), out)], block=threads, **how)


def each(template: str, **choices: Sequence[str]) -> list[str]:
    """The template for every combination of what its <name>s stand for; the last name varies fastest."""
    rows = [template]
    for name, options in choices.items():
        rows = [row.replace(f"<{name}>", option) for row in rows for option in options]
    return rows
