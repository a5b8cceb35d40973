"""Between packed words of memory and Float32 values."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Uint32

ptx = cute.arch.inline_ptx


def unpack(words: list[Any], dtype: str) -> list[Float32]:
    """The values of packed words, in memory order."""
    if dtype == "float32":
        return [word.bitcast(Float32) for word in words]
    if dtype == "bfloat16":  # the upper 16 bits of a float: one shift or mask a value
        pairs = [((word << 16).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)) for word in words]
    else:
        text = "{.reg .b16 l,h; mov.b32 {l,h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h;}"
        pairs = [ptx(text, write_only_types=[Float32] * 2, read_only_args=[word]) for word in words]
    return [value for pair in pairs for value in pair]


def pack(values: list[Any], dtype: str) -> list[Uint32]:
    """Packed words of the values, rounded to nearest even; an odd last value fills a low half."""
    if dtype == "float32":
        return [value.bitcast(Uint32) for value in values]
    if len(values) % 2:
        values = [*values, Float32(0.0)]
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    text = "cvt.rn.%s.f32 {$w0}, {$r1}, {$r0};" % kind  # PTX puts its first source into the upper half
    return [
        ptx(text, write_only_types=[Uint32], read_only_args=[values[i], values[i + 1]])
        for i in range(0, len(values), 2)
    ]


def pack_e4m3(values: list[Any]) -> list[Uint32]:
    """Packed words of e4m3 codes, four each, rounded to nearest even and saturated."""
    text = (
        "{.reg .b16 l,h; cvt.rn.satfinite.e4m3x2.f32 l, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 h, {$r3}, {$r2};"
        " mov.b32 {$w0}, {l,h};}"
    )
    return [ptx(text, write_only_types=[Uint32], read_only_args=values[i : i + 4]) for i in range(0, len(values), 4)]


def unpack_e4m3(word: Any) -> list[Float32]:
    """The values of a word's four e4m3 codes."""
    text = "{.reg .b16 l,h; mov.b32 {l,h}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, l; cvt.rn.f16x2.e4m3x2 {$w1}, h;}"
    return unpack(list(ptx(text, write_only_types=[Uint32] * 2, read_only_args=[word])), "float16")


def low_bytes(words: list[Any]) -> Uint32:
    """The lowest bytes of four words, in one."""
    text = (
        "{.reg .b32 l,h; prmt.b32 l, {$r0}, {$r1}, 0x0040; prmt.b32 h, {$r2}, {$r3}, 0x0040;"
        " prmt.b32 {$w0}, l, h, 0x5410;}"
    )
    return ptx(text, write_only_types=[Uint32], read_only_args=words)
