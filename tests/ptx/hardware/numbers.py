"""Inputs that are the same on every machine: edges by their bits, and random bits of NumPy's PCG64, a fixed stream.

Floats are handled as bits: random ones take a sign, an exponent from a range and a mantissa, not a library's
distribution.
"""

from __future__ import annotations

import numpy as np

# Name: (dtype of the bits, exponent bits, mantissa bits, bias).
FORMATS: dict[str, tuple[type, int, int, int]] = {
    "f64": (np.uint64, 11, 52, 1023),
    "f32": (np.uint32, 8, 23, 127),
    "tf32": (np.uint32, 8, 23, 127),
    "f16": (np.uint16, 5, 10, 15),
    "bf16": (np.uint16, 8, 7, 127),
    "e4m3": (np.uint8, 4, 3, 7),
    "e5m2": (np.uint8, 5, 2, 15),
}


def raw(seed: int, *shape: int) -> np.ndarray:
    """Random 64-bit words."""
    return np.random.PCG64(seed).random_raw(int(np.prod(shape))).reshape(shape)


def ints(seed: int, n: int, bits: int = 32) -> np.ndarray:
    """Edges of the integer type, small and random values, `n` of them."""
    top = 1 << (bits - 1)
    edges = [
        0,
        1,
        2,
        3,
        7,
        8,
        15,
        16,
        31,
        32,
        33,
        63,
        64,
        255,
        128,
        127,
        top,
        top - 1,
        top + 1,
        2 * top - 1,
        2 * top - 2,
    ]
    edges += [0x5555555555555555 % (2 * top), 0xAAAAAAAAAAAAAAAA % (2 * top), top >> 1]
    words = raw(seed, n)
    shifts = raw(seed + 1, n) % np.uint64(bits)
    words = (words >> np.uint64(64 - bits)) >> np.where(np.arange(n) % 3 == 0, shifts, 0).astype(np.uint64)
    keep = min(len(edges), n // 2)
    words[:keep] = np.array(edges[:keep], np.uint64)
    words[:keep] = np.roll(words[:keep], seed * 5)
    return words.astype({8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits])


def floats(seed: int, shape: tuple[int, ...] | int, kind: str, low: int, high: int) -> np.ndarray:
    """Bits of random floats of magnitudes from 2^low up to 2^(high+1)."""
    dtype, _, mantissa, bias = FORMATS[kind]
    shape = (shape,) if isinstance(shape, int) else shape
    words, exponents = raw(seed, *shape), raw(seed + 1, *shape) % np.uint64(high - low + 1)
    sign = words >> np.uint64(63)
    bits = (words >> np.uint64(7)) & np.uint64((1 << mantissa) - 1)
    bits |= (exponents + np.uint64(bias + low)) << np.uint64(mantissa)
    width = 8 * np.dtype(dtype).itemsize
    return (bits | sign << np.uint64(width - 1)).astype(dtype)


def edges(kind: str) -> np.ndarray:
    """Bits of zeros, subnormals, ends of the range, numbers near 1 and near integers, infinities, NaNs; both signs."""
    dtype, exponent, mantissa, bias = FORMATS[kind]
    one, top, unit = bias << mantissa, (1 << exponent) - 1 << mantissa, 1 << mantissa
    half = one - unit
    found = [0, 1, 2, unit - 1, unit >> 1, unit, unit + 1, 2 * unit, one, one + 1, one - 1, half, half - 1, half + 1]
    found += [one + unit, one + unit + (unit >> 1), one + (unit >> 1), half + (unit >> 2), one + 3 * unit + 1]
    if kind == "e4m3":  # no infinity; the all-ones pattern is NaN
        found += [top | unit - 2, top | unit - 1, top]
    else:
        found += [top - 1, top - 2, top, top | unit >> 1, top | 1, top | unit - 1]
    found += [one + (min(mantissa, bias) - 1) * unit | unit - 1, one + min(mantissa, bias) * unit | 1]
    values = np.array(found, np.uint64)
    width = 8 * np.dtype(dtype).itemsize
    return np.concatenate([values, values | np.uint64(1 << width - 1)]).astype(dtype)


def triples(seed: int, kind: str, n: int = 128) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operands a, b, c of binary and ternary instructions: edges against edges, then random numbers of close exponents,
    then small products that underflow, then ones where c cancels a * b, then wide ranges."""
    some, (dtype, _, mantissa, bias) = edges(kind), FORMATS[kind]
    first = n // 2
    index = np.arange(first)
    parts = [
        [some[(index * step + index // len(some) * 11 + shift) % len(some)] for step, shift in ((1, 0), (5, 3), (7, 8))]
    ]
    rest, wide = n - first, min(bias - 2, 3 * mantissa)
    quarter = rest // 4
    parts += [[floats(seed + 10 * i, quarter, kind, -2, 2) for i in range(3)]]
    down = -(bias // 2)
    parts += [[floats(seed + 10 * i + 3, quarter, kind, down - mantissa // 2, down) for i in range(2)]]
    parts[-1] += [floats(seed + 33, quarter, kind, -bias + 1, -bias + 3)]
    a, b = (floats(seed + 10 * i + 5, quarter, kind, -2, 2) for i in range(2))
    product = to_bits(-values(a, kind) * values(b, kind), kind)
    parts += [[a, b, product ^ (np.arange(quarter) % 2).astype(dtype)]]
    parts += [[floats(seed + 10 * i + 7, rest - 3 * quarter, kind, -wide // 2, wide // 2) for i in range(3)]]
    return tuple(np.concatenate([part[i] for part in parts]).astype(dtype) for i in range(3))  # type: ignore[return-value]


def values(bits: np.ndarray, kind: str) -> np.ndarray:
    """The numbers that bits stand for, in float64."""
    dtype, exponent, mantissa, bias = FORMATS[kind]
    if kind == "f64":
        return bits.view(np.float64)
    if kind == "tf32":  # the tensor cores take no more than 10 mantissa bits
        bits = bits & np.uint32(0xFFFFE000)
    word = bits.astype(np.int64)
    width = 8 * np.dtype(dtype).itemsize
    sign = np.where(word >> (width - 1) & 1, -1.0, 1.0)
    field = word >> mantissa & ((1 << exponent) - 1)
    fraction = word & ((1 << mantissa) - 1)
    normal = np.ldexp((fraction | 1 << mantissa).astype(np.float64), np.maximum(field, 1) - bias - mantissa)
    found = np.where(field == 0, np.ldexp(fraction.astype(np.float64), 1 - bias - mantissa), normal)
    if kind == "e4m3":
        return sign * np.where(word & 0x7F == 0x7F, np.nan, found)
    special = np.where(fraction == 0, np.inf, np.nan)
    return sign * np.where(field == (1 << exponent) - 1, special, found)


def to_bits(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Bits of the nearest number of the format, towards zero where it is no number of the format; within its range."""
    dtype, _, mantissa, bias = FORMATS[kind]
    numbers = np.asarray(numbers, np.float64)
    bits = numbers.view(np.int64)
    sign = bits >> 63 & 1
    power = np.maximum((bits >> 52 & 2047) - 1023, 1 - bias)
    scaled = np.floor(np.ldexp(np.abs(numbers), mantissa - power)).astype(np.int64)
    found = np.where(scaled >> mantissa == 0, scaled, scaled + (power + bias - 1 << mantissa))
    width = 8 * np.dtype(dtype).itemsize
    return (found | sign << (width - 1)).astype(np.uint64).astype(dtype)


def small(seed: int, shape: tuple[int, ...], kind: str, largest: int = 4) -> np.ndarray:
    """Bits of integers up to `largest` in magnitude: their products and sums are exact in every order."""
    numbers = (raw(seed, *shape) >> np.uint64(8)) % np.uint64(2 * largest + 1)
    integers = numbers.astype(np.int64) - largest
    return integers.astype(np.int8).view(np.uint8) if kind in ("s8", "u8") else to_bits(integers, kind)
