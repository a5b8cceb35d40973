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


def pack_stochastic(values: list[Any], dtype: str, random: list[Any]) -> list[Uint32]:
    """Packed words of the values, rounded up with the probability of what they lack, by a random word for two.

    The bits of a word are those that `cvt.rs` takes: 16 for each of two bfloat16, 13 from bit 0 and 13 from bit 16 for
    two float16. Added below what is kept, they carry into it. In float16 a product first brings exponents down to those
    of float32's subnormals, where float16's end too. Beyond the largest lies infinity, which stays itself, and so does
    the NaN of arithmetic, 0x7FFFFFFF, as to that a sum that wraps is the smaller.
    """
    draw = "shr.u32 b, r, 16; and.b32 a, r, 0xFFFF; add.s32 a, a, x; add.s32 b, b, y; max.s32 a, a, x; max.s32 b, b, y;"
    if dtype == "bfloat16":
        text = (
            "{.reg .b32 a,b,x,y,r; mov.b32 x, {$r0}; mov.b32 y, {$r1}; mov.b32 r, {$r2}; %s"
            " prmt.b32 {$w0}, a, b, 0x7632;}"
        )
    else:
        text = (
            "{.reg .b32 a,b,x,y,r; .reg .f32 f,g; mul.rz.f32 f, {$r0}, 0f07800000; mul.rz.f32 g, {$r1}, 0f07800000;"
            " mov.b32 x, f; mov.b32 y, g; and.b32 r, {$r2}, 0x1FFF1FFF; %s and.b32 a, a, 0xFFFFE000;"
            " and.b32 b, b, 0xFFFFE000; mov.b32 f, a; mov.b32 g, b; mul.rn.f32 f, f, 0f77800000;"
            " mul.rn.f32 g, g, 0f77800000; cvt.rn.f16x2.f32 {$w0}, g, f;}"
        )
    pairs = zip(values[::2], values[1::2], random, strict=True)
    return [ptx(text % draw, write_only_types=[Uint32], read_only_args=[*pair]) for pair in pairs]


def pack_e4m3(values: list[Any]) -> list[Uint32]:
    """Packed words of e4m3 codes, four each, rounded to nearest even and saturated."""
    text = (
        "{.reg .b16 l,h; cvt.rn.satfinite.e4m3x2.f32 l, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 h, {$r3}, {$r2};"
        " mov.b32 {$w0}, {l,h};}"
    )
    return [ptx(text, write_only_types=[Uint32], read_only_args=values[i : i + 4]) for i in range(0, len(values), 4)]


def unpack_e4m3(word: Any) -> list[Uint32]:
    """The values of a word's four e4m3 codes, as two pairs of float16."""
    text = "{.reg .b16 l,h; mov.b32 {l,h}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, l; cvt.rn.f16x2.e4m3x2 {$w1}, h;}"
    return list(ptx(text, write_only_types=[Uint32] * 2, read_only_args=[word]))


def bytes_of(low: Any, high: Any, chosen: Any) -> Uint32:
    """Four bytes of two words, by the last bits of the hexadecimal digits of `chosen`."""
    text = "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};"
    return ptx(text, write_only_types=[Uint32], read_only_args=[low, high, chosen])


def upper_bytes(low: Any, high: Any) -> Uint32:
    """The upper byte of each half of two words."""
    return ptx("prmt.b32 {$w0}, {$r0}, {$r1}, 0x7531;", write_only_types=[Uint32], read_only_args=[low, high])


def bits_of(mask: int, x: Any, y: Any) -> Uint32:
    """The bits of x that the mask has, and the others of y."""
    return (x & Uint32(mask)) | (y & Uint32(mask ^ 0xFFFFFFFF))


def pack_e2m1(values: list[Any]) -> list[Uint32]:
    """Packed words of e2m1 codes, eight each, rounded to nearest even and saturated; not on sm_90a."""
    pairs = " ".join("cvt.rn.satfinite.e2m1x2.f32 b%d, {$r%d}, {$r%d};" % (i, 2 * i + 1, 2 * i) for i in range(4))
    text = "{.reg .b8 b0,b1,b2,b3; " + pairs + " mov.b32 {$w0}, {b0,b1,b2,b3};}"
    return [ptx(text, write_only_types=[Uint32], read_only_args=values[i : i + 8]) for i in range(0, len(values), 8)]


def unpack_e2m1(word: Any) -> list[Float32]:
    """The values of a word's eight e2m1 codes; not on sm_90a."""
    pairs = " ".join("cvt.rn.f16x2.e2m1x2 {$w%d}, b%d;" % (i, i) for i in range(4))
    text = "{.reg .b8 b0,b1,b2,b3; mov.b32 {b0,b1,b2,b3}, {$r0}; " + pairs + "}"
    return unpack(list(ptx(text, write_only_types=[Uint32] * 4, read_only_args=[word])), "float16")


def low_bytes(words: list[Any]) -> Uint32:
    """The lowest bytes of four words, in one."""
    text = (
        "{.reg .b32 l,h; prmt.b32 l, {$r0}, {$r1}, 0x0040; prmt.b32 h, {$r2}, {$r3}, 0x0040;"
        " prmt.b32 {$w0}, l, h, 0x5410;}"
    )
    return ptx(text, write_only_types=[Uint32], read_only_args=words)
