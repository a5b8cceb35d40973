"""Operands of matrix instructions: rows of different styles, and where elements lie in shared memory.

Rows of small integers have one exact product whatever the order of accumulation; the other styles show how the hardware
aligns, truncates and rounds.
"""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.numbers import FORMATS, edges, floats, raw, small, to_bits, values

STYLES = ("integers", "near", "wide", "cancel", "special", "tiny")
# Name: exponents of near, wide and tiny numbers; products of tiny ones underflow the accumulator where they can.
RANGES = {
    "f16": ((-2, 1), (-12, 10), (-14, -8)),
    "bf16": ((-2, 1), (-30, 30), (-75, -62)),
    "tf32": ((-2, 1), (-30, 30), (-75, -62)),
    "f32": ((-2, 2), (-30, 30), (-140 + 14, -124)),
    "f64": ((-2, 1), (-60, 60), (-540, -520)),
    "e4m3": ((-2, 1), (-6, 7), (-6, -4)),
    "e5m2": ((-2, 1), (-14, 14), (-14, -10)),
}
RANGES["f16 sum"] = ((-2, 2), (-12, 12), (-14, -12))


def rows(kind: str, style: str, seed: int, count: int, depth: int) -> np.ndarray:
    """`count` rows of `depth` elements, as bits."""
    if kind in ("s8", "u8"):
        return (raw(seed, count, depth) >> np.uint64(13)).astype(np.uint8)
    near, wide, tiny = RANGES[kind]
    if style == "integers":
        return small(seed, (count, depth), kind)
    if style in ("near", "special"):
        found = floats(seed, (count, depth), kind, *near)
        if style == "special":  # one special number a row, the others near 1
            some = np.resize(np.roll(edges(kind), -seed), count)
            found[np.arange(count), np.arange(count) * 3 % depth] = some
        return found
    if style == "cancel":  # large numbers in pairs that cancel where the other operand has the same number twice
        found = floats(seed, (count, depth), kind, *near)
        found[:, 0::4] = floats(seed + 2, found[:, 0::4].shape, kind, wide[1] // 2, wide[1])
        width = 8 * found.dtype.itemsize - 1
        found[:, 1::4] = found[:, 0::4] ^ found.dtype.type(1 << width)
        return found
    return floats(seed, (count, depth), kind, *(tiny if style == "tiny" else wide))


def paired(matrix: np.ndarray) -> np.ndarray:
    """The matrix with each second of four columns like the first, so that `cancel` rows cancel."""
    found = matrix.copy()
    found[:, 1::4] = found[:, 0::4]
    return found


def sums(kind: str, style: str, seed: int, count: int, width: int) -> np.ndarray:
    """What the products are added to, as bits of f32, f16, f64 or s32."""
    if kind == "s32":
        found = (raw(seed, count, width) >> np.uint64(40)).astype(np.uint32) - np.uint32(1 << 23)
        found[:, ::5], found[:, 1::5] = found[:, ::5] | 0x7FFFFF00, found[:, 1::5] & 0x800000FF  # sums overflow
        return found
    near, wide, tiny = RANGES["f16 sum" if kind == "f16" else kind]
    if style == "integers":
        return small(seed, (count, width), kind, 9)
    if style == "special":
        some = np.where(
            np.arange(count * width) % 5 == 0, np.resize(edges(kind), count * width), to_bits(np.ones(1), kind)
        )
        return some.reshape(count, width).astype(FORMATS[kind][0])
    return floats(seed, (count, width), kind, *{"wide": wide, "tiny": tiny}.get(style, near))


def numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """The numbers that an operand's bits stand for."""
    integers = {"s8": np.int8, "u8": np.uint8, "s32": np.int32}
    return bits.view(integers[kind]).astype(np.float64) if kind in integers else values(bits, kind)


def fitted(sums_of: np.ndarray, kind: str) -> np.ndarray:
    """Exact sums as the accumulator holds them: integers wrap around."""
    return (sums_of + 2.0**31) % 2.0**32 - 2.0**31 if kind == "s32" else sums_of


# Operands of wgmma in shared memory: "Asynchronous Warpgroup Level Matrix Shared Memory Layout", "Strides",
# "Matrix Descriptor Format". A core matrix is 8 rows of 16 bytes. Without swizzling its rows follow one another. With
# swizzling of 32, 64 or 128 bytes, rows of that size follow one another in groups of 8, and bits 4 to 6 of an address
# are exchanged by XOR with bits 7 to 9, as many as the size needs.


def swizzled(address: np.ndarray, width: int) -> np.ndarray:
    """The address with its 16-byte chunk exchanged; `width` is 16 for no swizzling."""
    return address ^ ((address >> 7 & width // 16 - 1) << 4)


def k_major(count: int, depth: int, size: int, width: int) -> tuple[np.ndarray, int, int, int]:
    """Byte offset of each element [count, depth], leading and stride byte offset, and bytes from one step of 32 bytes
    along k to the next; rows of `depth` elements of `size` bytes, no longer than the swizzle where there is one."""
    row, k = np.arange(count)[:, None], np.arange(depth)[None, :] * size
    if width == 16:
        leading = 16 * count
        return row // 8 * 128 + k // 16 * leading + row % 8 * 16 + k % 16, leading, 128, 2 * leading
    return swizzled(row * width + k, width), 16, 8 * width, 32


def mn_major(count: int, depth: int, width: int) -> tuple[np.ndarray, int, int, int]:
    """The same for 2-byte elements of which those along m or n follow one another; a step is 16 along k."""
    m, k = np.arange(count)[:, None] * 2, np.arange(depth)[None, :]
    if width == 16:  # leading: from 8 along k to the next 8; stride: from 8 along m or n to the next
        stride, leading = 128, 16 * count
        return m // 16 * stride + k // 8 * leading + k % 8 * 16 + m % 16, leading, stride, 2 * leading
    stride = 8 * width  # from 8 along k to the next 8; leading: from `width` bytes along m or n to the next
    leading = depth // 8 * stride
    return swizzled(m // width * leading + k * width + m % width, width), leading, stride, 2 * stride


def descriptor(leading: int, stride: int, width: int) -> int:
    """A descriptor without its start address."""
    swizzle = {16: 0, 128: 1, 64: 2, 32: 3}[width]
    return (leading >> 4) << 16 | (stride >> 4) << 32 | swizzle << 62
