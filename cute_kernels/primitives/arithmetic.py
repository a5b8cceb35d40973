"""Float arithmetic with the rounding that the kernels rely on."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

LOG2_E = 1.4426950408889634
SOFTPLUS_THRESHOLD = 20.0


def select(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`, without a branch."""
    return type(yes)(cutlass.select_(condition, yes, no))


def at_most(x: Int32, limit: Int32) -> Int32:
    """The smaller of two integers, taken as unsigned: the limit where x is negative."""
    return select(Uint32(x) < Uint32(limit), x, limit)


def exp2(x: Any) -> Float32:
    """2**x by one hardware instruction: relative error 2**-22, subnormal results flushed to zero."""
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def rounded(opcode: str, *values: Any) -> Float32:
    """One instruction with its own rounding: the compiler fuses none whose opcode names one."""
    operands = ", ".join("{$r%d}" % i for i in range(len(values)))
    return cute.arch.inline_ptx(f"{opcode} {{$w0}}, {operands};", write_only_types=[Float32], read_only_args=[*values])


def paired(opcode: str, *values: list[Any]) -> list[Float32]:
    """One instruction for each two floats of some lists, a list for each source, e.g. "mul.rn.f32x2"; not on sm_90a."""
    found: list[Float32] = []
    for i in range(0, len(values[0]), 2):
        words = [x for of_source in values for x in of_source[i : i + 2]]
        names = "".join("s%d, " % n for n in range(len(values)))
        packs = " ".join("mov.b64 s%d, {{$r%d}, {$r%d}};" % (n, 2 * n, 2 * n + 1) for n in range(len(values)))
        text = "{.reg .b64 d, %s; %s %s d, %s; mov.b64 {{$w0}, {$w1}}, d;}" % (
            names[:-2],
            packs,
            opcode,
            names[:-2],
        )
        found += cute.arch.inline_ptx(text, write_only_types=[Float32] * 2, read_only_args=words)
    return found


def power_over(largest: Any, exponent: int) -> Float32:
    """The power of two that brings `largest`, which is not negative, to 2**exponent at least and less than twice that;
    2**126 at most. That of infinity is that of 2**128."""
    biased = Int32(largest.bitcast(Uint32) >> 23)
    least = Int32(1 + exponent)
    return ((Int32(254 + exponent) - select(biased < least, least, biased)) << 23).bitcast(Float32)


def inverse_power(power: Any) -> Float32:
    """1 over a power of two from 2**-126 to 2**126."""
    return (Uint32(254 << 23) - power.bitcast(Uint32)).bitcast(Float32)


def product(x: Any, y: Any) -> Float32:
    """x * y, rounded to nearest even, subnormals kept."""
    return rounded("mul.rn.f32", x, y)


def total(x: Any, y: Any) -> Float32:
    """x + y, rounded to nearest even."""
    return rounded("add.rn.f32", x, y)


def quotient(x: Any, y: Any) -> Float32:
    """x / y, rounded to nearest even."""
    return rounded("div.rn.f32", x, y)


def quotient_by(x: Any, divisor: float) -> Float32:
    """x / divisor, rounded to nearest even, without the subroutine of a division; neither may be near the ends of the
    range.

    The correction of the first quotient is exact to 2**-46, and with a divisor of up to 7 bits no quotient of a float
    lies as near to the middle of two (tests/ptx/test_encode_kernel.py).
    """
    inverse = Float32(1.0 / divisor)
    first = product(x, inverse)
    return rounded("fma.rn.f32", rounded("fma.rn.f32", first, Float32(-divisor), x), inverse, first)


def exact_reciprocal(x: Any) -> Float32:
    """1/x, rounded to nearest even."""
    return rounded("rcp.rn.f32", x)


def wide_product(x: Any, y: int) -> tuple[Uint32, Uint32]:
    """The lower and the upper half of the product of two words."""
    text = (
        "{.reg .b64 p; .reg .b32 l,h; mul.wide.u32 p, {$r0}, {$r1}; mov.b64 {l,h}, p;"
        " mov.b32 {$w0}, l; mov.b32 {$w1}, h;}"
    )
    low, high = cute.arch.inline_ptx(text, write_only_types=[Uint32] * 2, read_only_args=[x, Uint32(y)])
    return low, high


def larger_magnitude(x: Any, y: Any) -> Float32:
    """max(|x|, |y|), not a number where either is none."""
    text = "{.reg .f32 a,b; abs.f32 a, {$r0}; abs.f32 b, {$r1}; max.NaN.f32 {$w0}, a, b;}"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x, y])


def reciprocal(x: Any) -> Float32:
    """1/x by one hardware instruction, within 1 ulp."""
    return cute.arch.inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def opaque(x: Float32) -> Float32:
    """The same value, which the compiler cannot know to be the same."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def softplus(x: Any) -> Float32:
    """log(1 + e**x), and x itself above 20, where e**x would lose the 1 and later overflow."""
    large = x > Float32(SOFTPLUS_THRESHOLD)
    return select(large, x, cute.math.log1p(cute.math.exp(select(large, Float32(SOFTPLUS_THRESHOLD), x))))


def sigmoid(x: Any) -> Float32:
    """1 / (1 + e**-x); 0 far left, where e**-x overflows."""
    return reciprocal(Float32(1.0) + exp2(x * Float32(-LOG2_E)))


def silu(x: Any) -> Float32:
    """x * sigmoid(x); the sigmoid underflows to 0 far left, where the product is 0 too."""
    return x * reciprocal(Float32(1.0) + exp2(x * Float32(-LOG2_E)))
