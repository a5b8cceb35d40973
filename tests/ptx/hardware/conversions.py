"""Conversions between all types that sm_90 has ("Data Movement and Conversion Instructions: cvt")."""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.kernel import each, lanewise
from tests.ptx.hardware.numbers import edges, floats, ints

INTEGRAL, MODES = ["rni", "rzi", "rmi", "rpi"], ["rn", "rz", "rm", "rp"]
# Magnitudes around the ends of the 16-bit formats and of the integers, and exact halves between integers.
HALVES = np.array([x + 0.5 for x in range(-6, 6)], np.float32).view(np.uint32)
SINGLE = np.concatenate([
    edges("f32"), floats(600, 18, "f32", -27, -13), floats(602, 12, "f32", 13, 17), floats(604, 8, "f32", 6, 10),
    HALVES, floats(606, 12, "f32", 28, 33), floats(608, 8, "f32", -150 + 24, 120),
])  # fmt: skip
OTHER = np.roll(SINGLE, 17)
DOUBLE = np.concatenate([
    edges("f64"), floats(610, 10, "f64", -150, -120), floats(612, 10, "f64", 28, 33), floats(614, 10, "f64", 60, 64),
    floats(616, 6, "f64", 120, 130), floats(618, 10, "f64", -2, 3), np.arange(-5.5, 6).view(np.uint64),
])  # fmt: skip
HALF = np.concatenate([edges("f16"), floats(620, 20, "f16", -2, 4), floats(622, 10, "f16", 5, 15)])
BRAIN = np.concatenate([edges("bf16"), floats(624, 20, "bf16", -2, 8), floats(626, 10, "bf16", 14, 40)])
ALL_BYTES = np.arange(256, dtype=np.uint16)

lanewise(
    "f32_to_16_bits",
    "conversions",
    [
        *each("cvt.<mode>.f16.f32 %h0, %r1;", mode=["rn", "rz", "rm", "rp", "rn.relu", "rz.relu", "rn.ftz", "rn.sat"]),
        *each("cvt.<mode>.bf16.f32 %h0, %r1;", mode=["rn", "rz", "rm", "rp", "rn.relu", "rz.relu"]),
    ],
    [SINGLE],
    np.uint16,
)
lanewise(
    "f32_to_packed",
    "conversions",
    [
        *each("cvt.<mode>.f16x2.f32 %r0, %r1, %r2;", mode=["rn", "rz", "rn.relu", "rz.relu"]),
        *each("cvt.<mode>.bf16x2.f32 %r0, %r1, %r2;", mode=["rn", "rz", "rn.relu", "rz.relu"]),
        *each("cvt.<mode>.tf32.f32 %r0, %r1;", mode=["rna", "rn", "rz", "rn.relu", "rz.relu"]),
    ],
    [SINGLE, OTHER],
)
lanewise(
    "f32_to_integers",
    "conversions",
    [
        *each("cvt.<mode>.<t>.f32 %r0, %r1;", mode=INTEGRAL, t=["s32", "u32"]),
        *each("cvt.<mode>.<t>.f32 %h1, %r1; cvt.u32.u16 %r0, %h1;", mode=["rni", "rzi"], t=["s16", "u16"]),
        *each("cvt.<mode>.<t>.f32 %r0, %r1;", mode=["rni", "rzi"], t=["s8", "u8"]),
        *each("cvt.<mode>.ftz.<t>.f32 %r0, %r1;", mode=["rmi", "rpi"], t=["s32", "u32"]),
        *each("cvt.<mode>.f32.f32 %r0, %r1;", mode=INTEGRAL),
        *each("cvt.<mode>.f32.f32 %r0, %r1;", mode=["sat", "ftz.sat", "rni.sat", "rzi.ftz"]),
    ],
    [SINGLE],
)
lanewise(
    "f32_to_long",
    "conversions",
    [
        *each("cvt.<mode>.<t>.f32 %d0, %r1;", mode=["rni", "rzi", "rmi"], t=["s64", "u64"]),
        "cvt.f64.f32 %d0, %r1;",
        "cvt.ftz.f64.f32 %d0, %r1;",
    ],
    [SINGLE],
    np.uint64,
)
WORDS, LONG = ints(630, 64), ints(632, 64, 64)
lanewise(
    "integers_to_f32",
    "conversions",
    [
        *each("cvt.<mode>.f32.<t> %r0, %r1;", mode=MODES, t=["s32", "u32"]),
        *each("cvt.<mode>.f32.<t> %r0, %d2;", mode=MODES, t=["s64", "u64"]),
        *each("cvt.rn.f32.<t> %r0, %r1;", t=["s8", "u8"]),
        *each("cvt.u16.u32 %h1, %r1; cvt.rn.f32.<t> %r0, %h1;", t=["s16", "u16"]),
        *each("cvt.<mode>.f16.<t> %h1, %r1; cvt.u32.u16 %r0, %h1;", mode=["rn", "rz"], t=["s32", "u32"]),
        *each("cvt.<mode>.bf16.<t> %h1, %r1; cvt.u32.u16 %r0, %h1;", mode=["rn", "rz"], t=["s32", "u32"]),
        *each(
            "cvt.u16.u32 %h2, %r1; cvt.rn.<f>.<t> %h1, %h2; cvt.u32.u16 %r0, %h1;", f=["f16", "bf16"], t=["s16", "u16"]
        ),
    ],
    [WORDS, LONG],
)
lanewise(
    "integers_to_f64",
    "conversions",
    [
        *each("cvt.rn.f64.<t> %d0, %r1;", t=["s32", "u32", "s8"]),
        *each("cvt.rn.f64.<t> %d0, %d2;", t=["s64", "u64"]),
    ],
    [WORDS, LONG],
    np.uint64,
)
lanewise(
    "integers_to_integers",
    "conversions",
    [
        *each("cvt.<t>.u32 %r0, %r1;", t=["u8", "s8"]),
        *each("cvt.sat.<t>.<f> %r0, %r1;", t=["u8", "s8"], f=["s32", "u32"]),
        *each("cvt.sat.<t>.<f> %h1, %r1; cvt.u32.u16 %r0, %h1;", t=["u16", "s16"], f=["s32", "u32"]),
        *each("cvt.sat.<t>.<f> %r0, %d2;", t=["u32", "s32"], f=["s64", "u64"]),
        "cvt.sat.u32.s32 %r0, %r1;",
        "cvt.sat.s32.u32 %r0, %r1;",
        *each("cvt.<t>.<f> %r0, %r1;", t=["s32", "u32"], f=["s8", "u8"]),
        *each("cvt.u16.u32 %h1, %r1; cvt.<t> %r0, %h1;", t=["s32.s16", "u32.u16", "s32.u16", "u32.s8"]),
        "cvt.u32.u64 %r0, %d2;",
    ],
    [WORDS, LONG],
)
lanewise(
    "f64_to_narrow",
    "conversions",
    [
        *each("cvt.<mode>.f32.f64 %r0, %d1;", mode=[*MODES, "rn.ftz", "rn.sat"]),
        *each("cvt.<mode>.<t>.f64 %r0, %d1;", mode=["rni", "rzi", "rmi", "rpi"], t=["s32", "u32"]),
        *each("cvt.<mode>.<t>.f64 %h1, %d1; cvt.u32.u16 %r0, %h1;", mode=["rn", "rz"], t=["f16", "bf16"]),
    ],
    [DOUBLE],
)
lanewise(
    "f64_to_long",
    "conversions",
    [
        *each("cvt.<mode>.<t>.f64 %d0, %d1;", mode=INTEGRAL, t=["s64", "u64"]),
        *each("cvt.<mode>.f64.f64 %d0, %d1;", mode=[*INTEGRAL, "sat"]),
    ],
    [DOUBLE],
    np.uint64,
)
lanewise(
    "f16_to_others",
    "conversions",
    [
        *each(
            "cvt.<op> %r0, %h1;",
            op=["f32.f16", "ftz.f32.f16", "rni.s32.f16", "rzi.u32.f16", "rmi.s32.f16", "rzi.s8.f16"],
        ),
        *each("cvt.<mode>.f16.f16 %h2, %h1; cvt.u32.u16 %r0, %h2;", mode=[*INTEGRAL, "sat"]),
        *each(
            "cvt.<op> %h2, %h1; cvt.u32.u16 %r0, %h2;", op=["rzi.s16.f16", "rpi.u16.f16", "rn.bf16.f16", "rz.bf16.f16"]
        ),
        "cvt.rzi.s64.f16 %d1, %h1; cvt.u32.u64 %r0, %d1;",
    ],
    [HALF],
)
lanewise(
    "bf16_to_others",
    "conversions",
    [
        *each("cvt.<op> %r0, %h1;", op=["f32.bf16", "ftz.f32.bf16", "rni.s32.bf16", "rzi.u32.bf16", "rmi.s32.bf16"]),
        *each("cvt.<mode>.bf16.bf16 %h2, %h1; cvt.u32.u16 %r0, %h2;", mode=INTEGRAL),
        *each(
            "cvt.<op> %h2, %h1; cvt.u32.u16 %r0, %h2;",
            op=["rzi.s16.bf16", "rpi.u16.bf16", "rn.f16.bf16", "rz.f16.bf16"],
        ),
    ],
    [BRAIN],
)
lanewise("f16_to_f64", "conversions", ["cvt.f64.f16 %d0, %h1;", "cvt.f64.bf16 %d0, %h1;"], [HALF], np.uint64)

# 8-bit floats: f32 and f16 around each format's range, and every byte back.
BYTES = np.concatenate([edges("f32"), floats(640, 34, "f32", -18, -5), floats(642, 34, "f32", -4, 17), HALVES])
BYTES_OTHER = np.roll(BYTES, 31)
PAIRS = (np.concatenate([edges("f16"), floats(644, 46, "f16", -14, 15)]).astype(np.uint32) << 16) | np.concatenate(
    [floats(646, 46, "f16", -12, 9), edges("f16")]
)
FORMATS = ["e4m3x2", "e5m2x2"]
lanewise(
    "to_8_bit_floats",
    "8-bit floats",
    each("cvt.rn.satfinite<relu>.<t>.f32 %h0, %r1, %r2;", relu=["", ".relu"], t=FORMATS),
    [BYTES, BYTES_OTHER],
    np.uint16,
)
lanewise(
    "f16x2_to_8_bit_floats",
    "8-bit floats",
    each("cvt.rn.satfinite<relu>.<t>.f16x2 %h0, %r1;", relu=["", ".relu"], t=FORMATS),
    [PAIRS],
    np.uint16,
)
lanewise(
    "from_8_bit_floats",
    "8-bit floats",
    each("cvt.rn<relu>.f16x2.<t> %r0, %h1;", relu=["", ".relu"], t=FORMATS),
    [ALL_BYTES | ALL_BYTES[::-1] << 8],
)
