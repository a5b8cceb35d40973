"""Single-precision arithmetic as PTX rounds it, and approximations.

PTX ISA, "Floating Point Instructions": results round to nearest even unless .rz, .rm or .rp says otherwise; .ftz
replaces subnormal inputs and results by zeros of their sign; .sat clamps to [0, 1] and turns NaN into 0; a NaN result
is 0x7fffffff. A sum or fused product is exact as the sum of two float64 values; the first, rounded to odd, rounds to
float32 like the exact value (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008), in any mode.

Approximations are computed in float64 and rounded once: the hardware's last bits may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.decode import Decoder, Op, Run, compute, compute_predicate, instruction
from tests.ptx.integer import COMPARE
from tests.ptx.parser import Instruction

NAN = np.uint32(0x7FFFFFFF)
SMALLEST_NORMAL = np.float32(2.0**-126)
ROUNDINGS = {"rn", "rz", "rm", "rp"}
Floats = Callable[..., np.ndarray]


def flush(x: np.ndarray) -> np.ndarray:
    """Zeros of the same sign in place of subnormals."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def saturate(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0))


def to_bits(x: np.ndarray) -> np.ndarray:
    """Lanes of a register, with PTX's one NaN."""
    nan = x != x
    return np.where(nan, NAN, x.view(np.uint32)) if nan.any() else x.view(np.uint32)


def sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in float64, rounded to odd: an inexact sum has its last bit set."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)  # exact (Knuth's TwoSum); NaN where the sum is not finite
    bits = total.view(np.int64)
    away = (error > 0) == (total > 0)
    fix = ((error < 0) | (error > 0)) & ((bits & 1) == 0)
    return (bits + np.where(fix, np.where(away, 1, -1), 0)).view(np.float64)


def narrow(exact: np.ndarray, rounding: str) -> np.ndarray:
    """float64 to float32 in a rounding mode; `exact` is the value itself or rounded to odd."""
    nearest = exact.astype(np.float32)
    if rounding == "rn":
        return nearest
    back = nearest.astype(np.float64)
    if rounding == "rz":
        beyond, towards = np.abs(back) > np.abs(exact), np.zeros_like(nearest)
        beyond &= np.isfinite(exact)
    else:
        up = rounding == "rp"
        beyond = ((back < exact) if up else (back > exact)) & np.isfinite(exact)
        towards = np.full_like(nearest, np.inf if up else -np.inf)
    return np.where(beyond, np.nextafter(nearest, towards), nearest)


def directed_sum(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    """a + b of float64 terms, rounded once to float32."""
    out = narrow(sum_to_odd(a, b), rounding)
    if rounding == "rm":  # an exact zero is -0, unless both terms are +0 (IEEE 754, 6.3)
        negative = (a == -b) & (np.signbit(a) | np.signbit(b))
        out = np.where(negative, np.float32(-0.0), out)
    return out


def add(rounding: str) -> Floats:
    if rounding == "rn":
        return lambda x, y: x + y
    return lambda x, y: directed_sum(x.astype(np.float64), y.astype(np.float64), rounding)


def multiply(rounding: str) -> Floats:
    if rounding == "rn":
        return lambda x, y: x * y
    return lambda x, y: narrow(x.astype(np.float64) * y.astype(np.float64), rounding)  # 48 bits: exact


def fused(rounding: str) -> Floats:
    return lambda x, y, z: directed_sum(x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64), rounding)


def subtract(rounding: str) -> Floats:
    plus = add(rounding)
    return lambda x, y: plus(x, -y)


ARITHMETIC: dict[str, tuple[Callable[[str], Floats], int]] = {
    "add": (add, 2),
    "sub": (subtract, 2),
    "mul": (multiply, 2),
    "fma": (fused, 3),
}


def wrapped(function: Floats, modifiers: set[str]) -> Floats:
    """A function of registers from one of float32 values, with .ftz and .sat."""
    ftz, sat = "ftz" in modifiers, "sat" in modifiers
    if not ftz and not sat:
        return lambda *xs: to_bits(function(*[x.view(np.float32) for x in xs]))

    def run(*registers: np.ndarray) -> np.ndarray:
        values = [x.view(np.float32) for x in registers]
        out = function(*[flush(v) for v in values] if ftz else values)
        out = flush(out) if ftz else out
        return to_bits(saturate(out) if sat else out)

    return run


@instruction(*ARITHMETIC, types=("f32",))
def arithmetic(decoder: Decoder, ins: Instruction) -> Run:
    """add, sub, mul, fma: "Floating Point Instructions"; fma has to name its rounding."""
    modifiers = decoder.modifiers(ins, ROUNDINGS | {"ftz", "sat"})
    rounding = modifiers & ROUNDINGS
    make, count = ARITHMETIC[ins.parts[0]]
    if len(rounding) > 1 or (ins.parts[0] == "fma" and not rounding):
        decoder.refuse(ins, f"{ins.opcode} names {len(rounding)} roundings")
    destination, *rest = decoder.operands(ins, 1 + count)
    function = wrapped(make(next(iter(rounding), "rn")), modifiers)
    return compute(decoder.destination(ins, destination, 32), decoder.sources(ins, tuple(rest), 32, fp=True), function)


@instruction("neg", "abs", types=("f32",))
def sign(decoder: Decoder, ins: Instruction) -> Run:
    """neg and abs change the sign bit; which NaN comes out of a NaN is open, here the one of `to_bits`."""
    modifiers = decoder.modifiers(ins, {"ftz"})
    destination, a = decoder.operands(ins, 2)
    function = np.negative if ins.parts[0] == "neg" else np.abs
    sources = decoder.sources(ins, (a,), 32, fp=True)
    return compute(decoder.destination(ins, destination, 32), sources, wrapped(function, modifiers))


APPROXIMATE: dict[str, Callable[[Any], Any]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sqrt": np.sqrt,
}


@instruction(*(f"{name}.approx" for name in APPROXIMATE), types=("f32",))
def approximate(decoder: Decoder, ins: Instruction) -> Op:
    """ex2, lg2, rcp, rsqrt, sqrt with .approx: special values as PTX's tables say, the rest within their bounds.

    ex2.approx.ftz.f32: relative error at most 2^-22; rcp.approx.ftz.f32: 1 ulp ("ex2", "rcp").
    """
    modifiers = decoder.modifiers(ins, {"ftz"}, skip=2)
    destination, a = decoder.operands(ins, 2)
    exact = APPROXIMATE[ins.parts[0]]
    function = wrapped(lambda x: exact(x.astype(np.float64)).astype(np.float32), modifiers)
    sources = decoder.sources(ins, (a,), 32, fp=True)
    return Op(compute(decoder.destination(ins, destination, 32), sources, function), approximate=True)


@instruction("setp", types=("f32",))
def compare(decoder: Decoder, ins: Instruction) -> Run:
    """Ordered comparisons are false for NaN, those with a final u true; ne is ordered, neu is not ("setp")."""
    ordered = set(COMPARE)
    modifiers = decoder.modifiers(ins, ordered | {name + "u" for name in ordered} | {"ftz"})
    (test,) = modifiers - {"ftz"} if len(modifiers - {"ftz"}) == 1 else ("",)
    if not test:
        decoder.refuse(ins, f"{ins.opcode} is not modelled")
    destination, *rest = decoder.operands(ins, 3)
    relation, unordered, ftz = COMPARE[test[:2]], test.endswith("u"), "ftz" in modifiers

    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = a.view(np.float32), b.view(np.float32)
        if ftz:
            x, y = flush(x), flush(y)
        nan = (x != x) | (y != y)
        return (relation(x, y) & ~nan) | (nan & unordered)

    slot, _ = decoder.predicate(ins, destination)
    return compute_predicate(slot, decoder.sources(ins, tuple(rest), 32, fp=True), function)
