"""Floating-point formats, arithmetic as PTX rounds it, and approximations.

PTX ISA, "Floating Point Instructions", "Half Precision Floating Point Instructions" and "Mixed Precision Floating Point
Instructions": results round to nearest even unless .rz, .rm or .rp says otherwise; .ftz replaces subnormal inputs and
results by zeros of their sign; .sat clamps to [0, 1] and turns NaN into 0; a format has one NaN as a result. A sum or
fused product is exact as the sum of two float64 values; the first, rounded to odd, rounds to a narrower format like the
exact value (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008), in any mode.

Approximations are computed in float64 and rounded once: the hardware's last bits may differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.ptx.decode import UNSIGNED, Decoder, Op, Run, compute_predicate, instruction
from tests.ptx.integer import COMPARE, paired, shaped
from tests.ptx.parser import BITS, Instruction

NAN = np.uint32(0x7FFFFFFF)
ROUNDINGS = {"rn", "rz", "rm", "rp"}
HALVES = ("f16", "f16x2", "bf16", "bf16x2")
WIDTHS = BITS | {"f32x2": 64}
Floats = Callable[..., np.ndarray]


class Format(NamedTuple):
    """NumPy's type, bits of the significand, least exponent, largest value, and the NaN, for which some have none."""

    dtype: Any
    digits: int
    low: int
    largest: float
    nan: int | None


TYPES: dict[str, tuple[Any, int | None]] = {
    "f16": (np.float16, 0x7FFF),
    "bf16": (ml_dtypes.bfloat16, 0x7FFF),
    "f32": (np.float32, 0x7FFFFFFF),
    "f64": (np.float64, 0x7FFFFFFFFFFFFFFF),
    "e4m3": (ml_dtypes.float8_e4m3fn, 0x7F),
    "e5m2": (ml_dtypes.float8_e5m2, 0x7F),
    "e2m3": (ml_dtypes.float6_e2m3fn, None),
    "e3m2": (ml_dtypes.float6_e3m2fn, None),
    "e2m1": (ml_dtypes.float4_e2m1fn, None),
    "ue8m0": (ml_dtypes.float8_e8m0fnu, 0xFF),
}
INFO = {kind: ml_dtypes.finfo(dtype) for kind, (dtype, _) in TYPES.items()}
FORMATS = {
    kind: Format(TYPES[kind][0], i.nmant + 1, int(i.minexp), float(i.max), TYPES[kind][1]) for kind, i in INFO.items()
}
FORMATS["tf32"] = Format(np.float32, 11, -126, (2 - 2.0**-10) * 2.0**127, 0x7FFFE000)
ROUND = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}


def flush(x: np.ndarray, kind: str = "f32") -> np.ndarray:
    """Zeros of the same sign in place of subnormals."""
    return np.where(np.abs(x) < 2.0 ** FORMATS[kind].low, np.copysign(np.float32(0), x), x)


def to_bits(x: np.ndarray) -> np.ndarray:
    """Lanes of a register, with PTX's one NaN."""
    nan = x != x
    return np.where(nan, NAN, x.view(np.uint32)) if nan.any() else x.view(np.uint32)


def decode(kind: str, word: np.ndarray) -> np.ndarray:
    """Codes of a format as float64 values."""
    return word.view(FORMATS[kind].dtype).astype(np.float64)


def encode(kind: str, value: np.ndarray, modifiers: Collection[str] = ()) -> np.ndarray:
    """Values as codes of a format, after .ftz, .sat, .relu and .satfinite; float32 values round to nearest."""
    form = FORMATS[kind]
    if "ftz" in modifiers:
        value = flush(value, kind)
    if "sat" in modifiers:
        value = np.where(value > 0, np.minimum(value, 1), 0)
    if "relu" in modifiers:
        value = np.where(value <= 0, 0, value)
    if "satfinite" in modifiers:
        value = np.clip(value, -form.largest, form.largest)
    nan, word = value != value, UNSIGNED[8 * np.dtype(form.dtype).itemsize]
    if form.nan is None:  # NaN becomes the largest value ("cvt", .satfinite)
        return np.where(nan, form.largest, value).astype(form.dtype).view(word)
    code = value.astype(form.dtype).view(word)
    return np.where(nan, word(form.nan), code) if nan.any() else code


def rounded(kind: str, exact: np.ndarray, mode: str, noise: Any = 0.5) -> np.ndarray:
    """float64, exact or rounded to odd, to values of a format: .rn, .rz, .rm, .rp, .rna and .rs ("cvt").

    The last two add noise, in units of the last place, to the magnitude and cut. What exceeds the largest value becomes
    infinity, or the largest where the mode points there.
    """
    form = FORMATS[kind]
    if mode == "rn" and kind in ("f16", "f32", "f64"):
        return exact.astype(form.dtype).astype(np.float64)
    unit = np.maximum(np.frexp(exact)[1] - 1, form.low) - (form.digits - 1)
    scaled = np.ldexp(exact, -unit)
    out = np.ldexp(ROUND[mode](scaled) if mode in ROUND else np.trunc(scaled + np.copysign(noise, scaled)), unit)
    inward = {"rz": True, "rm": exact > 0, "rp": exact < 0}.get(mode, False) & np.isfinite(exact)
    return np.where(np.abs(out) > form.largest, np.copysign(np.where(inward, form.largest, np.inf), exact), out)


def narrow(exact: np.ndarray, rounding: str) -> np.ndarray:
    """float64 to float32 in a rounding mode; `exact` is the value itself or rounded to odd."""
    return rounded("f32", exact, rounding).astype(np.float32)


def sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in float64, rounded to odd: an inexact sum has its last bit set."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)  # exact (Knuth's TwoSum); NaN where the sum is not finite
    bits = total.view(np.int64)
    away = (error > 0) == (total > 0)
    fix = ((error < 0) | (error > 0)) & ((bits & 1) == 0)
    return (bits + np.where(fix, np.where(away, 1, -1), 0)).view(np.float64)


def fused_double(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of float64, rounded once to nearest."""
    out = x * y + z
    for i in np.flatnonzero(np.isfinite(x) & np.isfinite(y) & np.isfinite(z)):
        exact = Fraction(x[i]) * Fraction(y[i]) + Fraction(z[i])
        try:
            out[i] = float(exact) if exact else out[i]  # an exact zero has its sign from the sum
        except OverflowError:
            out[i] = np.inf if exact > 0 else -np.inf
    return out


def smaller(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The minimum: -0 is below +0, and a number goes before NaN."""
    return np.where((x < y) | ((x == y) & np.signbit(x)) | np.isnan(y), x, y)


NATIVE: dict[str, tuple[int, Floats]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "fma": (3, fused_double),
    "neg": (1, np.negative),
    "abs": (1, np.abs),
    "copysign": (2, lambda x, y: np.copysign(y, x)),
    "div": (2, np.divide),
    "rcp": (1, lambda x: 1 / x),
    "sqrt": (1, np.sqrt),
    "min": (2, smaller),
    "max": (2, lambda x, y: -smaller(-x, -y)),
}
# Where the float64 result has to be rounded again. Quotients and roots of float32 are exact enough ("innocuous").
TO_ODD: dict[str, Floats] = {
    "add": sum_to_odd,
    "sub": lambda x, y: sum_to_odd(x, -y),
    "fma": lambda x, y, z: sum_to_odd(x * y, z),
}


def mirrored(function: Floats) -> Floats:
    """-f(-x, ..., -z), which an exact zero of a sum tells from f: its sign for .rm (IEEE 754, 6.3)."""
    return lambda x, *rest: -function(-x, *rest[:-1], -rest[-1])


def evaluated(kind: str, function: Floats, modifiers: Collection[str], mode: str = "rn", of: str = "") -> Floats:
    """A function of registers from one of float64 values, exact or to odd; all but the last may be halves."""

    def run(*registers: np.ndarray) -> np.ndarray:
        values = [decode(of or kind, x) for x in registers[:-1]] + [decode(kind, registers[-1])]
        out = rounded(kind, function(*[flush(v, kind) for v in values] if "ftz" in modifiers else values), mode)
        return encode(kind, out, modifiers)

    return run


def allowed(name: str, kind: str) -> set[str]:
    """Modifiers of `arithmetic`."""
    sums, single = name in ("add", "sub", "mul", "fma"), kind[:3] == "f32"
    found = {"ftz"} if (single or kind[:3] == "f16") and name != "copysign" else set()
    found |= ROUNDINGS if sums and single else {"rn"} if sums or name in ("div", "rcp", "sqrt") else set()
    found |= {"sat"} if sums and kind in ("f32", "f16", "f16x2") else set()
    found |= {"NaN", "xorsign", "abs"} if name in ("min", "max") and kind != "f64" else set()
    return found | ({"relu"} if name == "fma" and kind in HALVES else set())


@instruction("add", "sub", "mul", "fma", types=("f32", "f32x2", "f64", *HALVES))
@instruction("neg", "abs", "min", "max", types=("f32", "f64", *HALVES))
@instruction("copysign", "div.rn", "rcp.rn", "sqrt.rn", types=("f32", "f64"))
def arithmetic(decoder: Decoder, ins: Instruction) -> Run:
    """Correctly rounded operations, those of double precision to nearest; fma has to name its rounding.

    With two types (add, sub, fma) all but the last operand are halves and the result is f32. Which NaN neg and abs make
    of a NaN is open, here the one of the format; copysign changes the sign alone. min and max: see `extreme`.
    """
    name, kind = ins.parts[0], ins.parts[-1]
    mixed = ins.parts[-2] == "f32" and name in TO_ODD and kind in ("f16", "bf16")
    modifiers = decoder.modifiers(ins, ROUNDINGS | {"sat"} if mixed else allowed(name, kind), last=1 + mixed)
    modes, (count, function) = modifiers & ROUNDINGS, NATIVE[name]
    if len(modes) > 1 or (name == "fma" and not modes) or modifiers >= {"sat", "relu"}:
        decoder.refuse(ins, f"{ins.opcode}: this combination of modifiers is not modelled")
    base, mode = "f32" if mixed else kind.removesuffix("x2"), next(iter(modes), "rn")
    if name in ("min", "max"):
        count = len(decoder.operands(ins, *((3, 4) if kind == "f32" else (3,)))) - 1
        function = extreme(decoder, ins, function, modifiers, count)
    if base == "f32" and modifiers <= {"rn"} and name in ("add", "sub", "mul", "neg", "abs") and not mixed:
        made = lambda *xs: to_bits(function(*[x.view(np.float32) for x in xs]))  # noqa: E731
    elif name == "copysign":
        made = lambda *xs: function(*[x.view(FORMATS[kind].dtype) for x in xs]).view(xs[0].dtype)  # noqa: E731
    else:
        function = function if base == "f64" else TO_ODD.get(name, function)
        function = mirrored(function) if mode == "rm" and name in TO_ODD else function
        made = evaluated(base, function, modifiers, mode, kind if mixed else "")
    widths = [32, *[16] * (count - 1), 32] if mixed else [WIDTHS[kind]] * (count + 1)
    return shaped(decoder, ins, widths, paired(kind, made), fp=True)


def extreme(decoder: Decoder, ins: Instruction, choose: Floats, modifiers: set[str], count: int) -> Floats:
    """With .NaN one NaN decides; .xorsign.abs compares magnitudes and multiplies signs; of three, .abs alone."""
    if (modifiers & {"xorsign", "abs"}) not in (set(), {"abs"} if count == 3 else {"xorsign", "abs"}):
        decoder.refuse(ins, f"{ins.opcode} of {count} is not modelled")

    def function(*values: np.ndarray) -> np.ndarray:
        out = functools.reduce(choose, [np.abs(v) for v in values] if "abs" in modifiers else values)
        if "xorsign" in modifiers:
            out = np.copysign(out, np.where(np.signbit(values[0]) ^ np.signbit(values[1]), -1.0, 1.0))
        return np.where(np.isnan(values).any(0), np.nan, out) if "NaN" in modifiers else out

    return function


APPROXIMATE: dict[str, Callable[..., Any]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "div": lambda x, y: np.where(np.abs(y) > 2.0**126, x * np.copysign(0.0, y), x / y),
}


@instruction(*(f"{name}.approx" for name in APPROXIMATE), "div.full", types=("f32",))
@instruction("ex2.approx", "tanh.approx", types=HALVES)
def approximate(decoder: Decoder, ins: Instruction) -> Op:
    """.approx and div.full: special values as PTX's tables say, the rest within their bounds.

    ex2.approx.ftz.f32: relative error at most 2^-22; rcp.approx.ftz.f32: 1 ulp; div.approx.f32: 2 ulp, and zero where
    the divisor is beyond 2^126 ("ex2", "rcp", "div").
    """
    name, kind = ins.parts[0], ins.parts[-1]
    modifiers = decoder.modifiers(ins, {"ftz"} if name != "tanh" and kind[:3] != "f16" else set(), skip=2)
    decoder.refuse_if(ins, name == "ex2" and kind[0] == "b" and not modifiers, f"{ins.opcode} needs .ftz")
    exact = np.divide if ins.parts[1] == "full" else APPROXIMATE[name]
    made = paired(kind, evaluated(kind.removesuffix("x2"), exact, modifiers))
    return Op(shaped(decoder, ins, [BITS[kind]] * (3 if name == "div" else 2), made, fp=True), approximate=True)


@instruction("setp", types=("f32", "f64", "f16", "bf16"))
def compare(decoder: Decoder, ins: Instruction) -> Run:
    """Ordered comparisons are false for NaN, those with a final u true; ne is ordered, neu is not ("setp").

    num holds where neither operand is NaN, nan where one is.
    """
    kind, ordered = ins.parts[-1], set(COMPARE)
    tests = ordered | {name + "u" for name in ordered} | {"num", "nan"}
    modifiers = decoder.modifiers(ins, tests | ({"ftz"} if kind in ("f32", "f16") else set()))
    (test,) = modifiers - {"ftz"} if len(modifiers - {"ftz"}) == 1 else ("",)
    decoder.refuse_if(ins, not test)
    destination, *rest = decoder.operands(ins, 3)
    relation, unordered = COMPARE.get(test[:2]), test == "nan" or test.endswith("u")

    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = decode(kind, a), decode(kind, b)
        if "ftz" in modifiers:
            x, y = flush(x, kind), flush(y, kind)
        nan = np.isnan(x) | np.isnan(y)
        return ((relation(x, y) if relation else test == "num") & ~nan) | (nan & unordered)

    slot, _ = decoder.predicate(ins, destination)
    return compute_predicate(slot, decoder.sources(ins, tuple(rest), BITS[kind], fp=True), function)
