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
