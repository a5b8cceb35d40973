"""Conversions and arithmetic of every format against exact arithmetic.

The oracle of a format is the list of its values, made from the fields of its codes: an exact result is looked up there.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.test_instructions import FLOATS, RANDOM, f32, lanewise
from tests.ptx.test_instructions import rounded as rounded_f32

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, on overflow and NaN
NUMBERS = np.random.default_rng(7)
# Bits of exponent and mantissa, bias.
FIELDS = {
    "f16": (5, 10, 15), "bf16": (8, 7, 127), "tf32": (8, 10, 127), "e4m3": (4, 3, 7), "e5m2": (5, 2, 15),
    "e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1),
}  # fmt: skip
IEEE = ("f16", "bf16", "tf32", "e5m2")
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "tf32": 0x3FFFF, "e4m3": 0x7F, "e5m2": 0x7F}
DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn,
          "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}  # fmt: skip
SATFINITE = {kind + "x2" for kind in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")}
BIT_CLASS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


@functools.cache
def table(kind: str) -> list[float]:
    """The finite values of the codes 0, 1, 2, ..., which ascend."""
    exponents, mantissas, bias = FIELDS[kind]
    values = []
    for code in range(((1 << exponents) - (kind in IEEE)) << mantissas):
        exponent, mantissa = code >> mantissas, code & ((1 << mantissas) - 1)
        base = mantissa + ((exponent > 0) << mantissas)
        values.append(math.ldexp(base, max(exponent, 1) - bias - mantissas))
    return values[:-1] if kind == "e4m3" else values


def sign_bit(kind: str) -> int:
    return 1 << sum(FIELDS[kind][:2])


def value(kind: str, code: int) -> float:
    code, negative = int(code) & (sign_bit(kind) - 1), int(code) & sign_bit(kind)
    known = table(kind)
    found = known[code] if code < len(known) else math.inf if code == len(known) and kind in IEEE else math.nan
    return -found if negative else found


def rounds(kind: str, x: Any, mode: str = "rn", *, relu: bool = False, sat: bool = False, draw: Any = 0) -> int:
    """The code that a float or an exact number becomes; `sat` stands for .satfinite."""
    known = table(kind)
    negative = math.copysign(1, x) < 0 if isinstance(x, float) else x < 0
    if x != x:
        return NAN.get(kind, len(known) - 1)
    if relu and negative:
        return 0
    if abs(x) == math.inf:
        code = len(known) - sat
    else:
        exact = abs(Fraction(x))
        code = bisect_right(known, exact) - 1
        low = Fraction(known[code])
        step = Fraction(known[code + 1]) - low if code + 1 < len(known) else low - Fraction(known[code - 1])
        part = (exact - low) / step
        up = {"rn": part > Fraction(1, 2) or (part == Fraction(1, 2) and code & 1), "rna": part >= Fraction(1, 2),
              "rz": False, "rm": negative and part, "rp": part and not negative, "rs": part + draw >= 1}  # fmt: skip
        code = min(code + bool(up[mode]), len(known) - sat)
    return code | (sign_bit(kind) if negative else 0)


def inputs(kind: str) -> np.ndarray:
    """float32 words: the edges, random numbers, and codes with what lies half and nearly half a step above them."""
    known = np.array(table(kind))
    code = np.concatenate([NUMBERS.integers(0, len(known) - 1, 19), [0, 1, len(known) - 2]])
    half = (known[code] + (known[code + 1] - known[code]) / 2).astype(np.float32)
    near = np.concatenate([known[code].astype(np.float32), half, np.nextafter(half, np.float32(0)), [known[-1] * 1.02]])
    near = np.concatenate([near, np.nextafter(half, np.float32(np.inf))]).astype(np.float32)
    near *= np.where(NUMBERS.integers(0, 2, len(near)), np.float32(1), np.float32(-1))
    last = np.float32([known[-1], known[-1] + (known[-1] - known[-2]) / 2, 0.9, 1.1, 300, -1e9, 3e38])
    words = np.concatenate([FLOATS, near.view(np.uint32), last.view(np.uint32), RANDOM[0]])
    return np.resize(words, -(-len(words) // 32) * 32)


def all_lanes(code: str, *arrays: np.ndarray, out: Any = np.uint32) -> np.ndarray:
    """As lanewise, for any multiple of 32 elements."""
    blocks = range(0, len(arrays[0]), 32)
    return np.concatenate([lanewise(code, *[a[i : i + 32] for a in arrays], out=out) for i in blocks])


def same(got: np.ndarray, expected: Any) -> None:
    assert [hex(int(x)) for x in got] == [hex(int(x)) for x in expected]


# The oracle itself.


def test_the_oracle_knows_the_formats() -> None:
    for kind, dtype in DTYPES.items():
        codes = np.arange(2 * sign_bit(kind), dtype=BIT_CLASS[8 * np.dtype(dtype).itemsize])
        known = codes.view(dtype).astype(np.float64)
        assert np.array_equal([value(kind, c) for c in codes], known, equal_nan=True), kind
    words = inputs("bf16")
    with np.errstate(all="ignore"):
        theirs = f32(words).astype(ml_dtypes.bfloat16)
    mine = [rounds("bf16", float(x)) for x in f32(words)]
    same(np.where(np.isnan(theirs), 0x7FFF, theirs.view(np.uint16)), mine)


# Conversions of floats.


@pytest.mark.parametrize(
    "how", ["rn", "rz", "rm", "rp", "rn.relu", "rz.relu.satfinite", "rn.satfinite", "rn.ftz", "rn.sat"]
)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_f32_to_halves(kind: str, how: str) -> None:
    if (kind, how) == ("bf16", "rn.sat"):
        return
    words, parts = inputs(kind), how.split(".")
    numbers = [float(x) for x in f32(words)]
    if "ftz" in parts:
        numbers = [math.copysign(0, x) if abs(x) < 2.0**-126 else x for x in numbers]
    expected = [rounds(kind, x, parts[0], relu="relu" in parts, sat="satfinite" in parts) for x in numbers]
    if "sat" in parts:
        expected = [rounds(kind, min(x, 1.0)) if x > 0 else 0 for x in numbers]
    same(all_lanes(f"cvt.{how}.{kind}.f32 %h0, %r1;", words, out=np.uint16), expected)


@pytest.mark.parametrize("how", ["rna", "rn", "rz", "rn.relu", "rna.satfinite", "rz.relu.satfinite"])
def test_f32_to_tf32(how: str) -> None:
    words, parts = inputs("tf32"), how.split(".")
    codes = [rounds("tf32", float(x), parts[0], relu="relu" in parts, sat="satfinite" in parts) for x in f32(words)]
    cut = [w >> 13 if how == "rna" and x != x else c for w, x, c in zip(words.tolist(), f32(words), codes, strict=True)]
    same(all_lanes(f"cvt.{how}.tf32.f32 %r0, %r1;", words), [code << 13 for code in cut])


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("kind", ["f16x2", "bf16x2", *sorted(SATFINITE)])
def test_f32_pairs(kind: str, mode: str, relu: bool) -> None:
    """The first operand is the upper half."""
    small, base = kind in SATFINITE, kind[:-2]
    if small and mode == "rz":
        return
    upper, width = inputs(base), {"e2m1": 4}.get(base, -(-sign_bit(base).bit_length() // 8) * 8)
    lower = np.roll(upper, 11)
    how = f"cvt.{mode}{'.satfinite' * small}{'.relu' * relu}.{kind}.f32"
    if base == "e2m1":
        code = f"{{ .reg .b8 b; {how} b, %r1, %r2; cvt.u32.u8 %r0, b; }}"
    else:
        code = f"{how} %h1, %r1, %r2; cvt.u32.u16 %r0, %h1;" if width == 8 else f"{how} %r0, %r1, %r2;"
    high, low = ([rounds(base, float(x), mode, relu=relu, sat=small) for x in f32(w)] for w in (upper, lower))
    if width == 4:  # the sign is the top bit of 4
        assert sign_bit(base) == 8
    same(all_lanes(code, upper, lower), [a << width | b for a, b in zip(high, low, strict=True)])


@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e2m1"])
def test_halves_to_and_from_small_formats(kind: str, half: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    pairs = np.concatenate(
        [
            NUMBERS.choice(every, 52),
            [0, 0x8000, 0x7FFF, 0xFC00, 0x7C00, 0x7F80, 0x5F00, 0x4300, 1, 0x3800, 0x4A80, 0x4A81],
        ]
    )
    pairs = pairs.astype(np.uint32) | np.roll(pairs, 5).astype(np.uint32) << 16
    narrow = f"cvt.rn.satfinite.relu.{kind}x2.{half}x2"
    code = f"{narrow} %h1, %r1; cvt.u32.u16 %r0, %h1;"
    wide = f"cvt.u16.u32 %h1, %r1; cvt.rn.{half}x2.{kind}x2 %r0, %h1;"
    width = 8
    if kind == "e2m1":
        code, width = f"{{ .reg .b8 b; {narrow} b, %r1; cvt.u32.u8 %r0, b; }}", 4
        wide = f"{{ .reg .b8 b0, b1, b2, b3; mov.b32 {{b0, b1, b2, b3}}, %r1; cvt.rn.{half}x2.{kind}x2 %r0, b0; }}"
    expected = [[rounds(kind, value(half, x >> s & 0xFFFF), relu=True, sat=True) for s in (0, 16)] for x in pairs]
    same(all_lanes(code, pairs), [low | high << width for low, high in expected])
    codes = np.arange(256, dtype=np.uint32) * (1 if kind == "e2m1" else 257)
    codes ^= 0 if kind == "e2m1" else 0x3F00
    parts = [[rounds(half, value(kind, x >> s & (1 << width) - 1)) for s in (0, width)] for x in codes]
    same(all_lanes(wide, codes), [low | high << 16 for low, high in parts])


@pytest.mark.parametrize("how", ["rz", "rp", "rz.satfinite", "rp.satfinite"])
def test_scales(how: str) -> None:
    powers = np.float32(2.0) ** np.float32([-149, -130, -127, -126, -3, 0, 1, 5, 126, 127])
    numbers = np.concatenate(
        [powers, np.nextafter(powers, np.float32(np.inf)), -powers, [0, np.inf, np.nan, -0.0, 3e38, 1.5]]
    )
    words = np.resize(np.concatenate([numbers.astype(np.float32).view(np.uint32), RANDOM[1]]), 96)

    def scale(x: float) -> int:
        if x != x or (math.isinf(x) and "satfinite" not in how):
            return 255
        if x == 0 or abs(x) < 2.0**-127:
            return 0
        exponent = 254 - 127 if math.isinf(x) else math.frexp(abs(x))[1] - 1
        up = "rp" in how and not math.isinf(x) and abs(x) != 2.0**exponent
        return min(exponent + 127 + up, 254 if "satfinite" in how else 255)

    expected = [scale(float(x)) << 8 | scale(float(y)) for x, y in zip(f32(words), f32(np.roll(words, 3)), strict=True)]
    same(all_lanes(f"cvt.{how}.ue8m0x2.f32 %h0, %r1, %r2;", words, np.roll(words, 3), out=np.uint16), expected)
    pairs = (words >> 16) | np.roll(words, 3) & 0xFFFF0000
    both = [[scale(value("bf16", x >> s & 0xFFFF)) for s in (0, 16)] for x in pairs]
    got = all_lanes(f"cvt.{how}.ue8m0x2.bf16x2 %h0, %r1;", pairs, out=np.uint16)
    same(got, [low | high << 8 for low, high in both])
    codes = np.arange(256, dtype=np.uint16) | (255 - np.arange(256, dtype=np.uint16)) << 8
    back = [
        [0x7FFF if c == 255 else rounds("bf16", 2.0 ** (c - 127)) for c in (x & 255, x >> 8)] for x in codes.tolist()
    ]
    same(all_lanes("cvt.rn.bf16x2.ue8m0x2 %r0, %h1;", codes), [low | high << 16 for low, high in back])


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2", "e4m3x4", "e5m2x4", "e2m1x4"])
def test_stochastic_rounding(kind: str) -> None:
    base, count = kind[:-2], int(kind[-1])
    words, drawn = np.resize(inputs(base), 128), NUMBERS.integers(0, 1 << 32, 128).astype(np.uint32)
    others = [np.roll(words, step) for step in (0, 9, 18, 27)][:count]
    bits, starts = {"f16": (13, (16, 0)), "bf16": (16, (16, 0)), "e2m1": (8, (24, 8, 16, 0))}.get(
        base, (16, (16, 16, 0, 0))
    )
    sat = count == 4
    names = ", ".join(f"%r{i + 1}" for i in range(count))
    how = f"cvt.rs{'.satfinite' * sat}.{kind}.f32"
    target, width = ("%h0", 4) if base == "e2m1" else ("%r0", 32 // count)
    code = f"{how} {target}, {f'{{{names}}}' if sat else names}, %r{count + 1};"
    got = all_lanes(code, *others, drawn, out=np.uint16 if base == "e2m1" else np.uint32)
    expected = []
    for i, random in enumerate(drawn.tolist()):
        result = 0
        for word, start in zip(others, starts, strict=True):
            draw = Fraction(random >> start & (1 << bits) - 1, 1 << bits)
            result = result << width | rounds(base, float(f32(word)[i]), "rs", sat=sat, draw=draw)
        expected.append(result)
    same(got, expected)


DOUBLES = np.array([
    1.5, -2.5, 1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-52, 1 + 3 * 2.0**-24 - 2.0**-52, 2.0**-150, 2.0**-149 * 1.5, 65520.0,
    65519.999, 1e300, -1e300, 2.0**-25 + 2.0**-70, 3.4028235677973366e38, 2.0**63, -(2.0**63), 2.0**64, 0.0, -0.0,
    math.inf, -math.inf, math.nan, 0.5, -0.5, 2.5, 2.0**31 - 0.5, 2.0**31, -(2.0**31) - 0.5, 2.0**52 + 0.5,
    2.0**32 - 0.25, 5e-324, 1 + 2.0**-8 + 2.0**-50, 1 + 2.0**-8,
])  # fmt: skip


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f64_narrows_once(mode: str) -> None:
    got = f32(lanewise(f"cvt.{mode}.f32.f64 %r0, %d1;", DOUBLES.view(np.uint64)))
    for x, y in zip(DOUBLES, got, strict=True):
        if not math.isfinite(x) or x == 0:
            assert np.array_equal(np.float32(x), y, equal_nan=True) and (
                x != x or math.copysign(1, x) == math.copysign(1, y)
            )
        elif abs(x) < 3.4e38:
            assert y == rounded_f32(Fraction(x), mode), (x, y)
        else:
            assert math.isinf(y) == (mode in ("rn", "rp" if x > 0 else "rm"))
    for kind in ("f16", "bf16"):
        got = lanewise(f"cvt.{mode}.{kind}.f64 %h0, %d1;", DOUBLES.view(np.uint64), out=np.uint16)
        beyond = {"rz": table(kind)[-1], "rn": math.inf}
        ends = [beyond.get(mode, math.inf if (mode == "rp") == (x > 0) else table(kind)[-1]) for x in DOUBLES]
        near = [
            math.copysign(e, x) if 1e39 < abs(x) < math.inf else x for x, e in zip(DOUBLES.tolist(), ends, strict=True)
        ]
        expected = [rounds(kind, x, mode) if abs(x) < 2.0**128 else rounds(kind, x) for x in near]
        expected[int(np.isnan(DOUBLES).argmax())] = {"f16": 0x7E00, "bf16": 0x7FC0}[kind]  # a NaN keeps its first bits
        if kind == "bf16" or mode == "rn":
            same(got, expected)


def test_nan_bits_that_conversions_keep() -> None:
    """As in the vectors of an H200; a small mantissa may be cut to that of infinity where no type is f64."""
    f64 = [0x7FF0000000000001, 0xFFFC0123456789AB, 0xFFFFFFFFFFFFFFFF]
    words, halves = [0x7F800001, 0xFFC12345, 0xFFFFFFFF], [0x7C01, 0xFE02, 0xFFFF]
    for code, given, expected in (
        ("cvt.rz.f32.f64 %r0, %d1;", f64, [0x7FC00000, 0xFFE0091A, 0xFFFFFFFF]),
        ("cvt.rn.f16.f64 %h0, %d1;", f64, [0x7E00, 0xFF00, 0xFFFF]),
        ("cvt.rni.f64.f64 %d0, %d1;", f64, [0x7FF8000000000001, *f64[1:]]),
        ("cvt.f64.f32 %d0, %r1;", words, [0x7FF8000020000000, 0xFFF82468A0000000, 0xFFFFFFFFE0000000]),
        ("cvt.ftz.f64.f32 %d0, %r1;", words, [0x7FFFFFFFE0000000] * 3),
        ("cvt.rna.tf32.f32 %r0, %r1;", words, [0x7F800000, 0xFFC12000, 0xFFFFE000]),
        ("cvt.f64.f16 %d0, %h1;", halves, [0x7FF8040000000000, 0xFFF8080000000000, 0xFFFFFC0000000000]),
        ("cvt.f32.f16 %r0, %h1;", halves, [0x7FFFFFFF] * 3),
        ("cvt.f32.bf16 %r0, %h1;", [0x7F81, 0xFFC1, 0xFFFF], [0x7F810000, 0xFFC10000, 0xFFFF0000]),
    ):
        kinds = [{"h": np.uint16, "r": np.uint32, "d": np.uint64}[part[0]] for part in code.split("%")[1:]]
        same(lanewise(code, np.resize(np.array(given, kinds[1]), 32), out=kinds[0])[:3], expected)


def test_f64_and_halves_widen() -> None:
    clamped = np.where(DOUBLES > 0, np.minimum(DOUBLES, 1), 0).view(np.uint64)
    same(lanewise("cvt.sat.f64.f64 %d0, %d1;", DOUBLES.view(np.uint64), out=np.uint64), clamped)
    wide = np.array([float(x) for x in f32(FLOATS)])
    got = lanewise("cvt.f64.f32 %d0, %r1;", FLOATS, out=np.uint64).view(np.float64)
    assert np.array_equal(got, wide, equal_nan=True) and (np.signbit(got) == np.signbit(wide))[~np.isnan(wide)].all()
    for kind in ("f16", "bf16"):
        codes = np.arange(0, 1 << 16, 509, dtype=np.uint16)[:128]
        got = all_lanes(f"cvt.f64.{kind} %d0, %h1;", codes, out=np.uint64).view(np.float64)
        assert np.array_equal(got, [value(kind, c) for c in codes], equal_nan=True)
        other = {"f16": "bf16", "bf16": "f16"}[kind]
        for mode in ("rn", "rz"):
            got = all_lanes(f"cvt.{mode}.{other}.{kind} %h0, %h1;", codes, out=np.uint16)
            finite = [
                rounds(other, value(kind, c), mode, sat=mode == "rz" and not math.isinf(value(kind, c))) for c in codes
            ]
            same(got, finite)
        got = lanewise(f"cvt.f32.{kind} %r0, %h1;", codes[:32])
        assert np.array_equal(f32(got), [value(kind, c) for c in codes[:32]], equal_nan=True)


WHOLE: dict[str, Callable[[Any], int]] = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
ROUGH = np.array([*range(-6, 6)], np.float32) + np.float32(0.5)
ENDS = [
    127.5,
    128,
    -128.5,
    -129,
    255.5,
    256,
    32767.5,
    65535.5,
    -32769,
    2.0**31,
    -(2.0**31),
    2.0**32,
    2.0**63,
    -(2.0**63),
]
ROUGH = np.concatenate([ROUGH, np.float32([*ENDS, 2.0**64, 1e30, -1e30, 0.3, -0.3, 2.0**31 - 128])])


@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_floats_to_integers(to: str, mode: str) -> None:
    bits, is_signed = int(to[1:]), to[0] == "s"
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed else (0, (1 << bits) - 1)

    def whole(x: float, nan: int) -> int:
        return (
            nan if x != x else low if x == -math.inf else high if x == math.inf else min(max(WHOLE[mode](x), low), high)
        )

    register, width = ("%d0", 64) if bits == 64 else ("%r0", 32)
    half = np.concatenate([ROUGH, [np.nan, np.inf]]).astype(np.float16)[:32]
    cases = {
        "f32": (np.concatenate([FLOATS, ROUGH.view(np.uint32)]), f32, "%r1"),
        "f64": (DOUBLES.view(np.uint64), lambda w: w.view(np.float64), "%d1"),
        "f16": (half.view(np.uint16), lambda w: w.view(np.float16), "%h1"),
    }
    for of, (words, view, source) in cases.items():
        nan = 0 if bits < 64 and of != "f64" else 1 << bits - 1
        expected = [whole(float(x), nan) for x in view(words)]
        # s8 in a 32-bit register: the sign goes up, also that of f64's NaN
        expected = [(x - (1 << bits) if is_signed and x > high else x) % (1 << width) for x in expected]
        same(all_lanes(f"cvt.{mode}.{to}.{of} {register}, {source};", words, out=BIT_CLASS[width]), expected)
    for kind in ("f32", "f64"):
        words = ROUGH.astype(BIT_FLOATS[kind])
        code = f"cvt.{mode}.{kind}.{kind} %{'r' if kind == 'f32' else 'd'}0, %{'r' if kind == 'f32' else 'd'}1;"
        got = all_lanes(code, words.view(BIT_CLASS[8 * words.itemsize]), out=BIT_CLASS[8 * words.itemsize])
        assert got.view(words.dtype).tolist() == [WHOLE[mode](float(x)) for x in words]


BIT_FLOATS = {"f32": np.float32, "f64": np.float64}
ODD = [
    0, 1, (1 << 24) + 1, (1 << 25) + 6, (1 << 63) + (1 << 39), (1 << 63) + (1 << 39) + 1, (1 << 64) - 1, (1 << 63) - 1,
    (1 << 53) + 1, (1 << 54) + 2, 65519, 65520, 257, 258 * 2 + 1, 0x8080808080, (1 << 62) + (1 << 54) + 1,
]  # fmt: skip
LONG = np.array(ODD + [(1 << 64) - x for x in ODD[1:]] + [12345], np.uint64)


@pytest.mark.parametrize("of", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_integers_to_floats_round_once(of: str) -> None:
    bits = int(of[1:])
    numbers = [int(x) % (1 << bits) for x in LONG]
    numbers = [x - (1 << bits) if of[0] == "s" and x >> bits - 1 else x for x in numbers]
    for mode in ("rn", "rz", "rm", "rp"):
        got = f32(lanewise(f"cvt.{mode}.f32.{of} %r0, %d1;", LONG))
        assert got.tolist() == [float(rounded_f32(Fraction(x), mode)) if x else 0 for x in numbers], mode
    assert lanewise(f"cvt.rn.f64.{of} %d0, %d1;", LONG, out=np.uint64).view(np.float64).tolist() == [
        float(x) for x in numbers
    ]
    narrow = {16: "cvt.u16.u64 %h9, %d1;", 32: "cvt.u32.u64 %r9, %d1;"}.get(bits, "")
    source = {16: "%h9", 32: "%r9"}.get(bits, "%d1")
    for kind in ("f16", "bf16") if bits > 8 else ("f16",):
        got = lanewise(f"{narrow} cvt.rn.{kind}.{of} %h0, {source};", LONG, out=np.uint16)
        same(got, [rounds(kind, x) for x in numbers])


@pytest.mark.parametrize("of", ["s8", "u8", "s16", "u32", "s64", "u64"])
@pytest.mark.parametrize("to", ["s8", "u8", "u16", "s32", "u32", "s64"])
def test_integers_to_integers(to: str, of: str) -> None:
    bits, ends = int(of[1:]), int(to[1:])
    numbers = [int(x) % (1 << bits) for x in LONG]
    numbers = [x - (1 << bits) if of[0] == "s" and x >> bits - 1 else x for x in numbers]
    low, high = (-(1 << ends - 1), (1 << ends - 1) - 1) if to[0] == "s" else (0, (1 << ends) - 1)
    cut = [x % (1 << ends) for x in numbers]
    cut = [x - (1 << ends) if to[0] == "s" and x >> ends - 1 else x for x in cut]
    same(lanewise(f"cvt.{to}.{of} %d0, %d1;", LONG, out=np.uint64), [x % (1 << 64) for x in cut])
    if min(numbers) < low or max(numbers) > high:  # PTX has no .sat where nothing can be cut off
        clamped = [min(max(x, low), high) % (1 << 64) for x in numbers]
        same(lanewise(f"cvt.sat.{to}.{of} %d0, %d1;", LONG, out=np.uint64), clamped)


# Arithmetic.


def halves(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of three operands of near exponents, with products that the third cancels, ties, and special values."""
    one = rounds(kind, 1.0)
    spread = 6 << FIELDS[kind][1]
    a, b, c = (NUMBERS.integers(one - spread, one + spread, 96) | NUMBERS.choice([0, 0x8000], 96) for _ in "abc")
    for i in range(16):
        c[i] = rounds(kind, -value(kind, a[i]) * value(kind, b[i]))
    special = [
        0,
        0x8000,
        1,
        0x8001,
        rounds(kind, math.inf),
        0x8000 | rounds(kind, math.inf),
        0x7FFF,
        len(table(kind)) - 1,
        one,
    ]
    a[64:], b[64:], c[64:] = (np.resize(np.repeat(special, n), 32) for n in (1, 3, 2))
    ulp, tiny = FIELDS[kind][1], rounds(kind, 2.0**-20)
    a[16], b[16], c[16] = rounds(kind, 1 + 2.0**-ulp), rounds(kind, 1 + 2.0 ** -(ulp // 2 + 1)), tiny
    # 1.5 * (1 + ulp) is a tie: any term, however small, decides it
    a[17:21], b[17:21], c[17:21] = rounds(kind, 1.5), one + 1, [1, 0x8001, 0, tiny]
    return a.astype(np.uint16), b.astype(np.uint16), c.astype(np.uint16)


def special_sum(terms: list[float]) -> float | None:
    """A sum that is not a rational number other than 0, else None."""
    total = math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)
    if not math.isfinite(total) and not all(map(math.isfinite, terms)):
        return total
    if sum(map(Fraction, terms)) == 0:
        return -0.0 if all(math.copysign(1, t) < 0 for t in terms) else 0.0
    return None


def arithmetic(name: str, x: float, y: float, z: float) -> Any:
    if name in ("mul", "fma"):
        product = x * y
        if name == "mul" or not math.isfinite(product) or product == 0:
            exact: Any = product if not math.isfinite(product) or product == 0 else Fraction(x) * Fraction(y)
            if name == "mul":
                return exact
        terms, exact = [product, z], None
        special = special_sum(terms)
        return special if special is not None else Fraction(x) * Fraction(y) + Fraction(z)
    terms = [x, y if name == "add" else -y]
    special = special_sum(terms)
    return special if special is not None else sum(map(Fraction, terms))


@pytest.mark.parametrize("packed", ["", "x2"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma", "fma.rn.relu", "add.sat", "mul.ftz"])
def test_halves_round_once(name: str, kind: str, packed: str) -> None:
    op, *extra = name.split(".")
    if kind == "bf16" and set(extra) & {"sat", "ftz"}:
        return
    codes = halves(kind)
    numbers = [[value(kind, c) for c in column] for column in codes]
    low = 2.0 ** (1 - FIELDS[kind][2])

    def one(*xs: float) -> int:
        if "ftz" in extra:
            xs = tuple(math.copysign(0, x) if abs(x) < low else x for x in xs)
        exact = arithmetic(op, *xs)
        if "sat" in extra:
            exact = 0.0 if exact != exact or exact <= 0 else min(exact, 1)
        code = rounds(kind, exact, relu="relu" in extra)
        return code & 0x8000 if "ftz" in extra and abs(value(kind, code)) < low else code

    expected = [one(*row) for row in zip(*numbers, strict=True)]
    full = name if extra or op != "fma" else "fma.rn"
    operands = ", ".join(f"%{'r' if packed else 'h'}{i}" for i in range(4 if op == "fma" else 3))
    if packed:
        words = [c.astype(np.uint32) | np.roll(c, 1).astype(np.uint32) << 16 for c in codes]
        expected = [x | y << 16 for x, y in zip(expected, np.roll(expected, 1).tolist(), strict=True)]
        same(all_lanes(f"{full}.{kind}x2 {operands};", *words), expected)
    else:
        same(all_lanes(f"{full}.{kind} {operands};", *codes, out=np.uint16), expected)


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("how", ["", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_extremes(kind: str, how: str, name: str) -> None:
    bits = 32 if kind == "f32" else 16
    top, nan = 1 << bits - 1, (1 << bits - 1) - 1
    x = FLOATS if bits == 32 else halves(kind)[0][64:96]
    y = np.concatenate([np.roll(x, 5)[:16], x[:16] ^ x.dtype.type(top)])

    def is_nan(c: int) -> bool:
        return c & nan > (0x7F800000 if bits == 32 else len(table(kind)))

    def one(a: int, b: int) -> int:
        if is_nan(a) or is_nan(b):
            if "NaN" in how or (is_nan(a) and is_nan(b)):
                return nan
            found = b if is_nan(a) else a
            found = found & nan if "abs" in how else found
        elif "abs" in how:
            found = (min if name == "min" else max)(a & nan, b & nan)
        else:
            order = lambda c: -(c & nan) - 1 if c & top else c  # noqa: E731  -0 before +0
            found = (min if name == "min" else max)(a, b, key=order)
        return found | (a ^ b) & top if "xorsign" in how else found

    c = "r" if bits == 32 else "h"
    got = lanewise(f"{name}{how}.{kind} %{c}0, %{c}1, %{c}2;", x, y, out=BIT_CLASS[bits])
    same(got, [one(int(a), int(b)) for a, b in zip(x, y, strict=True)])
    if kind == "f32" and "xorsign" not in how:
        z = np.roll(x, 9)
        got = lanewise(f"{name}{how}.f32 %r0, %r1, %r2, %r3;", x, y, z)
        same(got, [one(one(int(a), int(b)), int(d)) for a, b, d in zip(x, y, z, strict=True)])
    if bits == 16:
        words = [v.astype(np.uint32) | v.astype(np.uint32)[::-1] << 16 for v in (x, y)]
        single = [one(int(a), int(b)) for a, b in zip(x, y, strict=True)]
        same(
            lanewise(f"{name}{how}.{kind}x2 %r0, %r1, %r2;", *words),
            [a | b << 16 for a, b in zip(single, single[::-1], strict=True)],
        )


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_compare_and_change_sign(kind: str) -> None:
    x = halves(kind)[0][64:96]
    y = np.roll(x, 5)
    a, b = ([value(kind, c) for c in v] for v in (x, y))
    number = [p == p and q == q for p, q in zip(a, b, strict=True)]
    less = [p < q for p, q in zip(a, b, strict=True)]
    tests = {"lt": less, "geu": [not x for x in less], "num": number, "nan": [not x for x in number]}
    tests["ne"] = [p != q and n for p, q, n in zip(a, b, number, strict=True)]
    for test, expected in tests.items():
        got = lanewise(f"setp.{test}.{kind} %p0, %h1, %h2; selp.b16 %h0, 1, 0, %p0;", x, y, out=np.uint16)
        assert got.tolist() == expected, test
    number = np.array([p == p for p in a])
    same(lanewise(f"neg.{kind} %h0, %h1;", x, out=np.uint16)[number], (x ^ 0x8000)[number])
    same(lanewise(f"abs.{kind} %h0, %h1;", x, out=np.uint16)[number], (x & 0x7FFF)[number])


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mixed_precision(kind: str, mode: str) -> None:
    a, b, _ = halves(kind)
    z = np.concatenate([RANDOM[0], RANDOM[1]])
    z[:16] = [np.float32(-value(kind, p) * value(kind, q)).view(np.uint32) for p, q in zip(a[:16], b[:16], strict=True)]
    columns = [[value(kind, c) for c in a[:64]], [value(kind, c) for c in b[:64]], [float(x) for x in f32(z)]]
    for name, code in (("fma", "%r0, %h1, %h2, %r3;"), ("add", "%r0, %h1, %r3;"), ("sub", "%r0, %h1, %r3;")):
        got = f32(all_lanes(f"{name}.{mode}.f32.{kind} {code}", a[:64], b[:64], z))
        for out, x, y, c in zip(got, *columns, strict=True):
            exact = (
                Fraction(x) * Fraction(y) + Fraction(c)
                if name == "fma"
                else Fraction(x) + Fraction(c) * (1 - 2 * (name == "sub"))
            )
            assert out == (rounded_f32(exact, mode) if exact else 0), (name, x, y, c)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_packed_singles_are_two_singles(name: str, mode: str) -> None:
    pairs = [[x, np.roll(x, 3)] for x in (np.concatenate([FLOATS[:16], r[:16]]) for r in RANDOM)]
    words = [low.astype(np.uint64) | high.astype(np.uint64) << 32 for low, high in pairs]
    operands = ", ".join(f"{{}}{i}" for i in range(4 if name == "fma" else 3))
    for ftz in ("", ".ftz"):
        got = lanewise(f"{name}.{mode}{ftz}.f32x2 {operands.format(*['%d'] * 4)};", *words, out=np.uint64)
        for i, half in enumerate((got & 0xFFFFFFFF, got >> 32)):
            same(half, lanewise(f"{name}.{mode}{ftz}.f32 {operands.format(*['%r'] * 4)};", *[p[i] for p in pairs]))


def test_doubles() -> None:
    x, y = NUMBERS.standard_normal(64) * 2.0 ** NUMBERS.integers(-30, 30, 64), NUMBERS.standard_normal(64)
    z = NUMBERS.standard_normal(64)
    z[:32] = -(x[:32] * y[:32])
    x[60:], y[60:], z[60:] = [1e300, -1e300, 1e-320, 5e-324], [1e300, 1e10, 0.5, 0.25], [-1.0, 1e308, 5e-324, -0.0]
    words = [v.view(np.uint64) for v in (x, y, z)]
    got = all_lanes("fma.rn.f64 %d0, %d1, %d2, %d3;", *words, out=np.uint64).view(np.float64)
    for out, a, b, c in zip(got.tolist(), x, y, z, strict=True):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        assert out == (float(exact) if abs(exact) < 2**1024 - 2**970 else math.inf * (1 if exact > 0 else -1)), (
            a,
            b,
            c,
        )
    for name, expected in (
        ("add", x + y),
        ("sub", x - y),
        ("mul", x * y),
        ("div.rn", x / y),
        ("min", np.minimum(x, y)),
        ("max", np.maximum(x, y)),
    ):
        got = all_lanes(f"{name}.f64 %d0, %d1, %d2;", *words[:2], out=np.uint64)
        same(got, expected.view(np.uint64))
    got = all_lanes("neg.f64 %d4, %d1; abs.f64 %d5, %d2; copysign.f64 %d0, %d4, %d5;", *words[:2], out=np.uint64)
    same(got, np.copysign(np.abs(y), -x).view(np.uint64))
    got = all_lanes(
        "setp.ltu.f64 %p0, %d1, %d2; selp.f64 %d0, %d1, 0d4000000000000000, %p0;", *words[:2], out=np.uint64
    )
    same(got, np.where(x < y, x, 2.0).view(np.uint64))
    root = all_lanes("abs.f64 %d4, %d1; sqrt.rn.f64 %d4, %d4; rcp.rn.f64 %d0, %d4;", words[0], out=np.uint64)
    same(root, (1 / np.sqrt(np.abs(x))).view(np.uint64))


def test_division_and_roots_are_correctly_rounded() -> None:
    x, y = np.concatenate([RANDOM[0], FLOATS]), np.concatenate([RANDOM[1], RANDOM[2]])
    x[:8] = np.float32(2.0**-126 * np.linspace(1, 2, 8)).view(np.uint32)
    y[:8] = np.float32(2.0**20 * np.linspace(1.3, 1.9, 8)).view(np.uint32)  # subnormal quotients
    quotient, inverse = f32(all_lanes("div.rn.f32 %r0, %r1, %r2;", x, y)), f32(all_lanes("rcp.rn.f32 %r0, %r1;", x))
    root = f32(all_lanes("sqrt.rn.f32 %r0, %r1;", x & 0x7FFFFFFF))
    with localcontext() as context:
        context.prec = 80
        for a, b, q, r, s in zip(f32(x).tolist(), f32(y).tolist(), quotient, inverse, root, strict=True):
            if not math.isfinite(a) or a == 0:
                assert (q != q) == (a != a) and (math.isinf(q) or a != math.inf) and (r == 0 or not math.isinf(a))
                continue
            with np.errstate(all="ignore"):
                assert q == (
                    np.float32(a) / np.float32(b)
                    if abs(a / b) > 3.4e38
                    else rounded_f32(Fraction(a) / Fraction(b), "rn")
                )
                assert r == (math.copysign(math.inf, a) if abs(1 / a) > 3.5e38 else rounded_f32(1 / Fraction(a), "rn"))
            assert s == rounded_f32(Fraction(Decimal(abs(a)).sqrt()), "rn")
    assert lanewise("sqrt.rn.f32 %r0, %r1;", FLOATS | 0x80000000)[1] == 0x7FFFFFFF
    assert (lanewise("div.rn.ftz.f32 %r0, %r1, %r2;", x[:32], y[:32])[:8] == 0).all()


CURVES = {
    "sin.approx.f32": np.sin, "cos.approx.ftz.f32": np.cos, "tanh.approx.f32": np.tanh, "tanh.approx.f16": np.tanh,
    "tanh.approx.bf16": np.tanh, "ex2.approx.f16": np.exp2, "ex2.approx.ftz.bf16": np.exp2,
    "tanh.approx.bf16x2": np.tanh, "ex2.approx.f16x2": np.exp2,
}  # fmt: skip


@pytest.mark.parametrize("name", CURVES)
def test_approximations_are_near(name: str) -> None:
    kind, numbers = name.split(".")[-1], np.linspace(-3, 3, 32)
    base = kind.removesuffix("x2")
    dtype = DTYPES.get(base, np.float32)
    words = numbers.astype(dtype).view(np.uint32 if kind == "f32" else np.uint16)
    numbers = words.view(dtype).astype(np.float64)
    if kind.endswith("x2"):
        both = lanewise(f"{name} %r0, %r1;", words.astype(np.uint32) | words[::-1].astype(np.uint32) << 16)
        got = both.astype(np.uint16)
        assert ((both >> 16) == got[::-1]).all()
    else:
        c = "r" if kind == "f32" else "h"
        got = lanewise(f"{name} %{c}0, %{c}1;", words, out=words.dtype.type)
    error = np.abs(got.view(dtype).astype(np.float64) - CURVES[name](numbers))
    assert error.max() < {"f32": 2.0**-20, "f16": 2.0**-8, "bf16": 2.0**-5}[base] and error.max() > 0


def test_approximate_division() -> None:
    for how in ("approx", "full", "approx.ftz", "full.ftz"):
        got = f32(lanewise(f"div.{how}.f32 %r0, %r1, %r2;", *RANDOM[:2])).astype(np.float64)
        exact = f32(RANDOM[0]).astype(np.float64) / f32(RANDOM[1])
        assert (np.abs(got / exact - 1) < 2.0**-22).all()
    big = np.full(32, np.float32(2.0**127)).view(np.uint32)
    assert (lanewise("div.approx.f32 %r0, %r1, %r2;", big, big.copy()) == 0).all()
    assert (lanewise("div.full.f32 %r0, %r1, %r2;", big, big.copy()) == 0x3F800000).all()


def test_signs_are_copied() -> None:
    got = lanewise("copysign.f32 %r0, %r1, %r2;", RANDOM[0], FLOATS)
    same(got, (RANDOM[0] & 0x80000000) | (FLOATS & 0x7FFFFFFF))
