"""Matrix operands: element formats, products, and shared memory as matrix descriptors lay it out.

PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: Shared Memory Matrix Layout, Matrix Descriptor" and
"TensorCore 5th Generation Family Instructions: Shared memory descriptor, Canonical Layouts". Layouts are of bytes; a
swizzle acts on bits of the address in shared memory, not of the offset in a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.ptx.floating import TYPES, narrow
from tests.ptx.memory import SHARED_BASE
from tests.ptx.trouble import FaultError

PADDED = {"e2m3": 6, "e3m2": 6, "e2m1": 4}  # formats of less than a byte
# name: (bits of an element, NumPy's type for it)
FORMATS: dict[str, tuple[int, Any]] = {"s8": (8, np.int8), "u8": (8, np.uint8), "s32": (32, np.int32)}
FORMATS |= {name: (PADDED.get(name, 8 * np.dtype(t).itemsize), t) for name, (t, _) in TYPES.items() if name != "f64"}
FORMATS |= {"tf32": FORMATS["f32"], "ue4m3": FORMATS["e4m3"]}
# Sums of products in a tensor core of sm_90: how many are added at once, the fraction bits that stay of each, and those
# of a result in f32.
CHUNK, FRACTION, RESULT = {"tf32": 8, "e4m3": 32, "e5m2": 32}, {"e4m3": 13, "e5m2": 13}, {"e4m3": 13, "e5m2": 13}


def elements(raw: np.ndarray, name: str) -> np.ndarray:
    """Bytes [..., n] to float64 [..., n * 8 / bits]; of elements of less than a byte the first has the lowest bits."""
    bits, dtype = FORMATS[name]
    raw = np.ascontiguousarray(raw)
    if bits < 8:
        stream = np.unpackbits(raw, axis=-1, bitorder="little").reshape(*raw.shape[:-1], -1, bits)
        raw = (stream << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
        return raw.view(dtype).astype(np.float64)
    values = raw.view(np.uint32) & np.uint32(0xFFFFE000) if name == "tf32" else raw
    return values.view(dtype).astype(np.float64)


def exponents(x: np.ndarray, name: str) -> np.ndarray:
    """Exponents as the tensor core aligns by them: that of a subnormal is the smallest of its format."""
    lowest = {"f16": -14, "e4m3": -6, "e5m2": -14}.get(name, -126)
    return np.maximum(np.frexp(x)[1] - 1, lowest)


def fused_products(a: np.ndarray, b: np.ndarray, c: np.ndarray, name: str, to: str = "f32") -> np.ndarray:
    """a [M, K] times b [N, K] transposed, plus c [M, N], as sm_90 adds up: float32 values in float64.

    Some products and the sum so far are aligned to the largest exponent among them, cut behind FRACTION bits, added
    exactly, and the result cut to float32. PTX leaves the accuracy open; this was found on the hardware.
    """
    if to == "s32":
        return a @ b.T + c
    chunk, fraction = CHUNK.get(name, 16), FRACTION.get(name, 25)
    out = c
    for k in range(0, a.shape[1], chunk):
        x, y = a[:, None, k : k + chunk], b[None, :, k : k + chunk]
        products = x * y
        scale = np.where(products == 0, -999, exponents(x, name) + exponents(y, name))
        top = np.maximum(scale.max(-1), np.where(out == 0, -999, exponents(out, "f32")))
        unit = np.ldexp(1.0, np.maximum(top, -900) - fraction)
        total = np.trunc(products / unit[..., None]).sum(-1) + np.trunc(out / unit)
        exact = total * unit
        if name in RESULT and to == "f32":
            last = np.ldexp(1.0, np.maximum(np.frexp(exact)[1] - 1, -126) - RESULT[name])
            exact = np.trunc(exact / last) * last
        exact = np.where(np.abs(exact) >= 2.0**128, np.copysign(np.inf, exact), narrow(exact, "rz").astype(np.float64))
        bad = ~np.isfinite(products).all(-1) | ~np.isfinite(out)
        out = np.where(bad, products.sum(-1) + out, exact)
    return out


class Layout(NamedTuple):
    """A matrix in shared memory.

    Args:
        start, leading, stride: byte address, and the descriptor's two byte offsets.
        swizzle: bytes of a row of the swizzled pattern; 16 for none.
    """

    start: int
    leading: int
    stride: int
    swizzle: int

    @classmethod
    def of(cls, word: int, arch: str) -> Layout:
        """From the bits of a matrix descriptor of "sm_90" or "sm_100"."""
        kind, fixed, spans = word >> 62, word >> 46 & 0xFFFF, {0: 16, 1: 128, 2: 64, 3: 32}
        if arch == "sm_100":
            kind, spans = word >> 61, {0: 16, 2: 128, 4: 64, 6: 32}
            fixed = (word >> 46 & 0x7FFF) ^ 1
        reserved = word >> 14 & 3 | word >> 30 & 3
        if fixed or reserved or kind not in spans:
            raise FaultError("descriptor", f"matrix descriptor {word:#018x} has bits that are not modelled")
        start, leading, stride = ((word >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        return cls(start, leading, stride, spans[kind])

    def bytes_of(self, rows: int, columns: int, size: int, *, transposed: bool = False) -> np.ndarray:
        """Addresses [rows, columns * size] of a matrix of elements of `size` bytes, K along the columns.

        `transposed`: rows are contiguous (M- or N-major), else columns (K-major). "Canonical Layouts": K-major, 8 rows
        of a pattern's width, `stride` from 8 rows to the next; without a swizzle 16 bytes wide, `leading` apart along
        K. Transposed, 8 columns of a pattern's width; from width to width and from 8 columns to 8 go `leading` and
        `stride`, without a swizzle the other way round.
        """
        row, column = np.arange(rows)[:, None, None], np.arange(columns)[None, :, None]
        byte, wide = np.arange(size)[None, None, :], self.swizzle
        if transposed:
            along, across = row * size + byte, column
            far, near = (self.stride, self.leading) if wide == 16 else (self.leading, self.stride)
            offset = along // wide * far + across // 8 * near + across % 8 * wide + along % wide
        else:
            along = column * size + byte
            offset = row // 8 * self.stride + along // wide * self.leading + row % 8 * wide + along % wide
        address = (self.start + offset).reshape(rows, columns * size)
        return address ^ (address >> 3 & (wide - 16))


def read_shared(shared: Any, address: np.ndarray, access: Any) -> np.ndarray:
    """Bytes at addresses of a CTA's own shared memory, as an asynchronous access."""
    index = address - SHARED_BASE
    if index.min() < 0 or index.max() >= len(shared.data):
        raise FaultError("out_of_bounds", f"shared: an operand from {address.min():#x} to {address.max():#x}")
    return shared.read(index, access)
