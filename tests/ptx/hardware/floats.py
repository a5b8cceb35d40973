"""Arithmetic in f32 in every rounding, in f64 to nearest, and the approximations ("Floating Point Instructions").

The bounds of the approximations are those of each instruction's section.
"""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.kernel import Bound, each, lanewise
from tests.ptx.hardware.numbers import edges, floats, triples

MODES = ["rn", "rz", "rm", "rp"]
SINGLE, DOUBLE = list(triples(100, "f32", 112)), list(triples(200, "f64", 80))

lanewise(
    "f32_rounding",
    "f32 arithmetic",
    [
        *each("<op>.<mode>.f32 %r0, %r1, %r2;", op=["add", "sub", "mul"], mode=MODES),
        *each("fma.<mode>.f32 %r0, %r1, %r2, %r3;", mode=MODES),
    ],
    SINGLE,
)
lanewise(
    "f32_modifiers",
    "f32 arithmetic",
    [
        *each("<op>.f32 %r0, %r1, %r2;", op=["add.ftz", "sub.ftz", "mul.ftz", "add.sat", "mul.sat", "sub.ftz.sat"]),
        *each("<op>.f32 %r0, %r1, %r2;", op=["mul.rz.ftz", "add.rm.ftz.sat", "mul.rp.ftz"]),
        *each("fma.<op>.f32 %r0, %r1, %r2, %r3;", op=["rn.ftz", "rn.sat", "rz.ftz.sat", "rp.ftz"]),
        *each("<op>.f32 %r0, %r1;", op=["neg", "abs", "neg.ftz", "abs.ftz"]),
        "copysign.f32 %r0, %r1, %r2;",
    ],
    SINGLE,
)
lanewise(
    "f32_min_max",
    "f32 arithmetic",
    each(
        "<op><how>.f32 %r0, %r1, %r2;",
        op=["min", "max"],
        how=["", ".NaN", ".ftz", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs"],
    ),
    SINGLE,
)
lanewise(
    "f32_divide",
    "f32 division and square root",
    [
        *each("div.rn<ftz>.f32 %r0, %r1, %r2;", ftz=["", ".ftz"]),
        *each("<op>.rn<ftz>.f32 %r0, %r1;", op=["rcp", "sqrt"], ftz=["", ".ftz"]),
    ],
    SINGLE,
)
lanewise(
    "f64_arithmetic",
    "f64 arithmetic",
    [
        *each("<op>.f64 %d0, %d1, %d2;", op=["add", "sub.rn", "mul", "div.rn"]),
        *each("<op>.f64 %d0, %d1;", op=["abs", "neg", "rcp.rn", "sqrt.rn"]),
        "fma.rn.f64 %d0, %d1, %d2, %d3;",
    ],
    DOUBLE,
    np.uint64,
    kind="f64",
    any_nan=True,
)
lanewise(
    "f64_others",
    "f64 arithmetic",
    [
        *each("<op>.f64 %d0, %d1, %d2;", op=["min", "max", "copysign"]),
        *each("setp.<op>.f64 %p0, %d1, %d2; selp.f64 %d0, %d1, %d2, %p0;", op=["lt", "geu", "eq", "nan"]),
    ],
    DOUBLE,
    np.uint64,
)

# One argument: edges, magnitudes from 2^-140 to 2^127, and many near 1.
WIDE = np.concatenate([edges("f32"), floats(300, 40, "f32", -126, 127), floats(302, 34, "f32", -2, 1)])
POSITIVE = WIDE & np.uint32(0x7FFFFFFF)
SMALL = np.concatenate([edges("f32"), floats(304, 74, "f32", -20, 6)])
UNDERFLOW = 2.0**-126
APPROXIMATIONS = {
    "rcp.approx.f32": Bound(ulp=1),
    "rcp.approx.ftz.f32": Bound(ulp=1),
    "sqrt.approx.f32": Bound(relative=2.0**-23, ulp=1),
    "sqrt.approx.ftz.f32": Bound(relative=2.0**-23, ulp=1),
    "rsqrt.approx.f32": Bound(relative=2.0**-22.9),
    "rsqrt.approx.ftz.f32": Bound(relative=2.0**-22.9),
    "lg2.approx.f32": Bound(relative=2.0**-22, absolute=2.0**-22),
    "lg2.approx.ftz.f32": Bound(relative=2.0**-22, absolute=2.0**-22),
}
lanewise(
    "approximate_roots",
    "approximations",
    each("<op> %r0, %r1;", op=list(APPROXIMATIONS)),
    [np.concatenate([POSITIVE[::2], WIDE[::2]])],
    kind="f32",
    bounds=tuple(APPROXIMATIONS.values()),
)
CURVES = {
    "ex2.approx.f32": Bound(ulp=2),
    "ex2.approx.ftz.f32": Bound(ulp=2),
    "tanh.approx.f32": Bound(relative=2.0**-10.987),
}
lanewise(
    "approximate_curves",
    "approximations",
    each("<op> %r0, %r1;", op=list(CURVES)),
    [SMALL],
    kind="f32",
    bounds=tuple(CURVES.values()),
)
# The bound of sine and cosine grows with the argument: 2^-20.5 holds within [-2 pi, 2 pi].
ANGLES = np.concatenate(
    [np.array([0, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x7FC00000], np.uint32), floats(306, 90, "f32", -12, 1)]
)
lanewise(
    "approximate_angles",
    "approximations",
    each("<op>.approx<ftz>.f32 %r0, %r1;", op=["sin", "cos"], ftz=["", ".ftz"]),
    [ANGLES],
    kind="f32",
    bounds=(Bound(absolute=2.0**-20.5),) * 4,
)
# div.approx and div.full state two units in the last place for divisors of magnitudes 2^-126 to 2^126.
DIVIDENDS, DIVISORS = floats(310, 96, "f32", -60, 60), floats(312, 96, "f32", -60, 60)
lanewise(
    "approximate_divide",
    "approximations",
    each("div.<op>.f32 %r0, %r1, %r2;", op=["approx", "approx.ftz", "full", "full.ftz"]),
    [DIVIDENDS, DIVISORS],
    kind="f32",
    bounds=(Bound(ulp=2),) * 4,
)
