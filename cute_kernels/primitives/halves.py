"""Arithmetic on pairs of float16 in a word, two for one instruction, subnormals kept."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import numpy as np
from cutlass import Uint32

ptx = cute.arch.inline_ptx


def _pair(opcode: str, *words: Any) -> Uint32:
    operands = ", ".join("{$r%d}" % i for i in range(len(words)))
    return ptx(f"{opcode}.f16x2 {{$w0}}, {operands};", write_only_types=[Uint32], read_only_args=[*words])


def pair_of(x: float) -> Uint32:
    """A number twice, in a register, as PTX takes no immediate pair."""
    word = int(np.float16(x).view(np.uint16)) * 0x10001
    return ptx(f"mov.b32 {{$w0}}, {word:#x};", write_only_types=[Uint32])


def pair_product(x: Any, y: Any) -> Uint32:
    """x * y, rounded to nearest even."""
    return _pair("mul.rn", x, y)


def pair_total(x: Any, y: Any) -> Uint32:
    """x + y, rounded to nearest even."""
    return _pair("add.rn", x, y)


def pair_fused(x: Any, y: Any, z: Any) -> Uint32:
    """x * y + z, rounded once, to nearest even."""
    return _pair("fma.rn", x, y, z)


def pair_opposite(x: Any) -> Uint32:
    """-x."""
    return _pair("neg", x)


def swapped(x: Any) -> Uint32:
    """The halves of a word in the other order."""
    return ptx("prmt.b32 {$w0}, {$r0}, {$r0}, 0x1032;", write_only_types=[Uint32], read_only_args=[x])


def repeated(x: Any, half: int) -> Uint32:
    """One half of a word twice: 0 for the lower."""
    bytes_of_half = (0x1010, 0x3232)[half]
    return ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r0}}, {bytes_of_half:#x};", write_only_types=[Uint32], read_only_args=[x]
    )
