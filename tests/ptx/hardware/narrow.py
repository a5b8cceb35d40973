"""Arithmetic in f16 and bf16, single and packed ("Half Precision Floating Point Instructions")."""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.kernel import Bound, each, lanewise
from tests.ptx.hardware.numbers import edges, floats, triples

HALF, BRAIN = list(triples(400, "f16")), list(triples(500, "bf16"))
COMPARE = ["eq", "ne", "lt", "ge", "ltu", "neu", "num", "nan"]


def packed(operands: list[np.ndarray]) -> list[np.ndarray]:
    """Two operands a word: the second half of the lanes above the first."""
    return [(x[: len(x) // 2].astype(np.uint32) | x[len(x) // 2 :].astype(np.uint32) << 16) for x in operands]


lanewise(
    "f16_arithmetic",
    "f16 arithmetic",
    [
        *each("<op><how>.f16 %h0, %h1, %h2;", op=["add", "sub", "mul"], how=["", ".rn.ftz", ".sat", ".ftz.sat"]),
        *each("fma.rn<how>.f16 %h0, %h1, %h2, %h3;", how=["", ".ftz", ".sat", ".relu", ".ftz.relu"]),
    ],
    HALF,
    np.uint16,
)
lanewise(
    "f16_others",
    "f16 arithmetic",
    [
        *each(
            "<op><how>.f16 %h0, %h1, %h2;",
            op=["min", "max"],
            how=["", ".NaN", ".ftz", ".xorsign.abs", ".NaN.xorsign.abs"],
        ),
        *each("<op>.f16 %h0, %h1;", op=["neg", "abs", "neg.ftz", "abs.ftz"]),
        *each("setp.<op>.f16 %p0, %h1, %h2; selp.b16 %h0, %h1, %h2, %p0;", op=COMPARE),
    ],
    HALF,
    np.uint16,
)
lanewise(
    "f16_packed",
    "f16 arithmetic",
    [
        *each(
            "<op>.f16x2 %r0, %r1, %r2;", op=["add", "sub.ftz", "mul.sat", "min", "max.NaN", "min.ftz.NaN.xorsign.abs"]
        ),
        *each("fma.rn<how>.f16x2 %r0, %r1, %r2, %r3;", how=["", ".relu", ".ftz.sat"]),
        *each("<op>.f16x2 %r0, %r1;", op=["neg", "abs"]),
    ],
    packed(HALF),
)
lanewise(
    "bf16_arithmetic",
    "bf16 arithmetic",
    [
        *each("<op>.bf16 %h0, %h1, %h2;", op=["add", "sub.rn", "mul", "min", "max", "min.NaN", "max.NaN.xorsign.abs"]),
        *each("fma.rn<how>.bf16 %h0, %h1, %h2, %h3;", how=["", ".relu"]),
        *each("<op>.bf16 %h0, %h1;", op=["neg", "abs"]),
        *each("setp.<op>.bf16 %p0, %h1, %h2; selp.b16 %h0, %h1, %h2, %p0;", op=COMPARE),
    ],
    BRAIN,
    np.uint16,
)
lanewise(
    "bf16_packed",
    "bf16 arithmetic",
    [
        *each("<op>.bf16x2 %r0, %r1, %r2;", op=["add", "sub", "mul", "min.xorsign.abs", "max", "max.NaN"]),
        *each("fma.rn<how>.bf16x2 %r0, %r1, %r2, %r3;", how=["", ".relu"]),
        *each("<op>.bf16x2 %r0, %r1;", op=["neg", "abs"]),
    ],
    packed(BRAIN),
)
lanewise(
    "mixed_arithmetic",
    "mixed precision",
    [
        "cvt.f32.f16 %r4, %h1; fma.rn.f32 %r4, %r4, %r4, %r4; cvt.rn.f16.f32 %h0, %r4;",
        "cvt.f32.bf16 %r4, %h1; mul.f32 %r4, %r4, %r4; cvt.rn.bf16.f32 %h0, %r4;",
    ],
    [HALF[0]],
    np.uint16,
)
# Approximations: the bounds are relative for ex2 and absolute for tanh, whose values do not exceed 1.
HALF_CURVES = {
    "ex2.approx.f16": Bound(relative=2.0**-9.9),
    "tanh.approx.f16": Bound(absolute=2.0**-10.987),
}
lanewise(
    "approximate_f16",
    "approximations",
    each("<op> %h0, %h1;", op=list(HALF_CURVES)),
    [np.concatenate([edges("f16"), floats(410, 46, "f16", -12, 3)])],
    np.uint16,
    kind="f16",
    bounds=tuple(HALF_CURVES.values()),
)
BRAIN_CURVES = {"ex2.approx.ftz.bf16": Bound(relative=2.0**-7), "tanh.approx.bf16": Bound(absolute=2.0**-8)}
lanewise(
    "approximate_bf16",
    "approximations",
    each("<op> %h0, %h1;", op=list(BRAIN_CURVES)),
    [np.concatenate([edges("bf16"), floats(510, 46, "bf16", -12, 6)])],
    np.uint16,
    kind="bf16",
    bounds=tuple(BRAIN_CURVES.values()),
)
