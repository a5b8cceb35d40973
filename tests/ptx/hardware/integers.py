"""Integer arithmetic, bits, comparisons, selection ("Integer Arithmetic Instructions", "Logic and Shift Instructions",
"Comparison and Selection Instructions")."""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.kernel import each, kernel, lanewise, place, zeros
from tests.ptx.hardware.numbers import ints, triples

N = 56
A, B, C = ints(1, N), ints(2, N), ints(3, N)
WORDS = [A, B, C]
LONG = [ints(4, 48, 64), ints(5, 48, 64), ints(6, 48, 64)]
HALF = [ints(7, N, 16), ints(8, N, 16), ints(9, N, 16)]
COMPARE = ["eq", "ne", "lt", "le", "gt", "ge"]

lanewise(
    "int_arithmetic",
    "integer arithmetic",
    [
        *each("<op>.<type> %r0, %r1, %r2;", op=["add", "sub", "mul.lo", "mul.hi", "min", "max"], type=["s32", "u32"]),
        *each("<op>.s32 %r0, %r1, %r2;", op=["min.relu", "max.relu"]),
        *each("<op>.<type> %r0, %r1, %r2, %r3;", op=["mad.lo", "mad.hi", "sad"], type=["s32", "u32"]),
        *each("<op>.s32 %r0, %r1;", op=["abs", "neg"]),
    ],
    WORDS,
)
lanewise(
    "int_divide",
    "integer arithmetic",
    [  # no division by 0, and no quotient that overflows: PTX leaves both open
        "or.b32 %r4, %r2, 1; div.u32 %r0, %r1, %r4;",
        "or.b32 %r4, %r2, 1; rem.u32 %r0, %r1, %r4;",
        "or.b32 %r4, %r2, 1; shr.s32 %r5, %r1, 1; div.s32 %r0, %r5, %r4;",
        "or.b32 %r4, %r2, 1; shr.s32 %r5, %r1, 1; rem.s32 %r0, %r5, %r4;",
        "div.u32 %r0, %r1, 7;",
        "rem.s32 %r0, %r1, 10;",
    ],
    WORDS,
)
lanewise(
    "int_shift",
    "integer shifts",
    [
        *each("<op> %r0, %r1, %r2;", op=["shl.b32", "shr.u32", "shr.s32"]),
        *each("and.b32 %r4, %r2, 31; <op> %r0, %r1, %r4;", op=["shl.b32", "shr.u32", "shr.s32", "shr.b32"]),
        *each("shf.<way>.<mode>.b32 %r0, %r1, %r2, %r3;", way=["l", "r"], mode=["wrap", "clamp"]),
        *each("and.b32 %r4, %r3, 31; shf.<way>.wrap.b32 %r0, %r1, %r1, %r4;", way=["l", "r"]),
        *each(
            "cvt.u16.u32 %h1, %r1; and.b32 %r4, %r2, 31; <op> %h2, %h1, %r4; cvt.u32.u16 %r0, %h2;",
            op=["shl.b16", "shr.u16", "shr.s16"],
        ),
    ],
    WORDS,
)
lanewise(
    "int_bits",
    "bit manipulation",
    [
        *each("<op> %r0, %r1;", op=["popc.b32", "clz.b32", "brev.b32", "bfind.u32", "bfind.s32", "not.b32"]),
        *each("and.b32 %r4, %r2, 255; and.b32 %r5, %r3, 255; <op> %r0, %r1, %r4, %r5;", op=["bfe.u32", "bfe.s32"]),
        *each("and.b32 %r4, %r2, 31; and.b32 %r5, %r3, 31; <op> %r0, %r1, %r4, %r5;", op=["bfe.u32", "bfe.s32"]),
        "and.b32 %r4, %r2, 255; and.b32 %r5, %r3, 255; bfi.b32 %r0, %r1, %r3, %r4, %r5;",
        "and.b32 %r4, %r2, 31; and.b32 %r5, %r3, 31; bfi.b32 %r0, %r1, %r3, %r4, %r5;",
    ],
    WORDS,
)
lanewise(
    "int_permute",
    "byte permutation",
    [
        "prmt.b32 %r0, %r1, %r2, %r3;",
        *each("prmt.b32 %r0, %r1, %r2, <code>;", code=["0x5410", "0x7632", "0x0123", "0xFEDC", "0x8888", "0x4040"]),
    ],
    WORDS,
)
lanewise(
    "int_logic",
    "logic",
    [
        *each("<op>.b32 %r0, %r1, %r2;", op=["and", "or", "xor"]),
        *each(
            "lop3.b32 %r0, %r1, %r2, %r3, <table>;", table=["0x80", "0xFE", "0x96", "0xE8", "0xCA", "0x1B", "0", "255"]
        ),
    ],
    WORDS,
)
lanewise(
    "int_long",
    "64-bit integers",
    [
        *each("<op> %d0, %d1, %d2;", op=["add.s64", "sub.s64", "mul.lo.s64", "mul.hi.s64", "mul.hi.u64", "and.b64"]),
        *each("<op> %d0, %d1, %d2;", op=["min.s64", "max.u64", "or.b64", "xor.b64"]),
        "mad.lo.s64 %d0, %d1, %d2, %d3;",
        "mad.hi.u64 %d0, %d1, %d2, %d3;",
        *each("<op> %d0, %d1;", op=["abs.s64", "neg.s64", "not.b64", "brev.b64"]),
        *each("<op> %r0, %d1; cvt.u64.u32 %d0, %r0;", op=["popc.b64", "clz.b64", "bfind.u64", "bfind.s64"]),
        *each("cvt.u32.u64 %r1, %d2; <op> %d0, %d1, %r1;", op=["shl.b64", "shr.u64", "shr.s64"]),
        *each("cvt.u32.u64 %r1, %d2; and.b32 %r1, %r1, 63; <op> %d0, %d1, %r1;", op=["shl.b64", "shr.u64", "shr.s64"]),
        *each("or.b64 %d4, %d2, 1; <op>.u64 %d0, %d1, %d4;", op=["div", "rem"]),
        *each("or.b64 %d4, %d2, 1; shr.s64 %d5, %d1, 1; <op>.s64 %d0, %d5, %d4;", op=["div", "rem"]),
        *each("cvt.u32.u64 %r1, %d1; cvt.u32.u64 %r2, %d2; mul.wide.<t> %d0, %r1, %r2;", t=["u32", "s32"]),
        *each("cvt.u32.u64 %r1, %d1; cvt.u32.u64 %r2, %d2; mad.wide.<t> %d0, %r1, %r2, %d3;", t=["u32", "s32"]),
        *each(
            "cvt.u32.u64 %r1, %d2; cvt.u32.u64 %r2, %d3; and.b32 %r1, %r1, 63; and.b32 %r2, %r2, 63; <op>;",
            op=["bfe.u64 %d0, %d1, %r1, %r2", "bfe.s64 %d0, %d1, %r1, %r2", "bfi.b64 %d0, %d1, %d3, %r1, %r2"],
        ),
    ],
    LONG,
    np.uint64,
)
lanewise(
    "int_short",
    "16-bit integers",
    [
        *each("<op> %h0, %h1, %h2;", op=["add.s16", "sub.u16", "mul.lo.s16", "mul.hi.u16", "mul.hi.s16", "min.s16"]),
        *each("<op> %h0, %h1, %h2;", op=["min.u16", "max.s16", "max.u16", "and.b16", "or.b16", "xor.b16"]),
        "mad.lo.u16 %h0, %h1, %h2, %h3;",
        *each("<op> %h0, %h1;", op=["abs.s16", "neg.s16", "not.b16"]),
        *each("or.b16 %h4, %h2, 1; <op>.u16 %h0, %h1, %h4;", op=["div", "rem"]),
        *each("or.b16 %h4, %h2, 1; shr.s16 %h5, %h1, 1; <op>.s16 %h0, %h5, %h4;", op=["div", "rem"]),
        *each("setp.<op>.s16 %p0, %h1, %h2; selp.b16 %h0, %h1, 7, %p0;", op=COMPARE),
    ],
    HALF,
    np.uint16,
)
lanewise(
    "int_packed",
    "packed 16-bit integers",
    [
        *each("<op> %r0, %r1, %r2;", op=["add.u16x2", "add.s16x2", "min.u16x2", "min.s16x2", "max.u16x2", "max.s16x2"]),
        *each("<op>.relu.s16x2 %r0, %r1, %r2;", op=["min", "max"]),
        *each("cvt.u16.u32 %h1, %r1; cvt.u16.u32 %h2, %r2; mul.wide.<t> %r0, %h1, %h2;", t=["u16", "s16"]),
        *each("cvt.u16.u32 %h1, %r1; cvt.u16.u32 %h2, %r2; mad.wide.<t> %r0, %h1, %h2, %r3;", t=["u16", "s16"]),
    ],
    WORDS,
)
lanewise(
    "int_compare",
    "comparison and selection",
    [
        *each("setp.<op>.<t> %p0, %r1, %r2; selp.b32 %r0, 1, 0, %p0;", op=COMPARE, t=["s32", "u32"]),
        "selp.s32 %r0, %r1, %r2, 1;",
        *each(
            "setp.lt.s32 %p0, %r1, %r2; setp.lt.u32 %p1, %r2, %r3; <op>; selp.b32 %r0, 1, 0, %p2;",
            op=["and.pred %p2, %p0, %p1", "or.pred %p2, %p0, %p1", "xor.pred %p2, %p0, %p1", "not.pred %p2, %p0"],
        ),
        "setp.lt.s32 %p0, %r1, %r2; mov.b32 %r0, 5; @%p0 add.s32 %r0, %r1, 9; @!%p0 sub.s32 %r0, %r0, %r2;",
    ],
    WORDS,
)
lanewise(
    "float_compare",
    "comparison and selection",
    [
        *each("setp.<op>.f32 %p0, %r1, %r2; selp.b32 %r0, 1, 0, %p0;", op=[*COMPARE, "num", "nan"]),
        *each("setp.<op>u.f32 %p0, %r1, %r2; selp.b32 %r0, 1, 0, %p0;", op=COMPARE),
        *each("setp.<op>.ftz.f32 %p0, %r1, %r2; selp.b32 %r0, 1, 0, %p0;", op=["eq", "lt", "neu"]),
    ],
    list(triples(20, "f32", 96)),
)

CONTROL = f"""
{place(0, 4)}
ld.global.b32 %r1, [%d31]; and.b32 %r1, %r1, 63; add.s32 %r1, %r1, 1; mov.b32 %r2, 0;
LOOP: setp.eq.u32 %p0, %r1, 1; @%p0 bra DONE;
and.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r3, 0; @!%p1 bra ODD;
shr.u32 %r1, %r1, 1; bra.uni NEXT;
ODD: mad.lo.u32 %r1, %r1, 3, 1;
NEXT: add.u32 %r2, %r2, 1; bra LOOP;
DONE: {place(1, 4)}
st.global.b32 [%d31], %r2;
setp.lt.u32 %p2, %r2, 20; @%p2 exit;
st.global.b32 [%d31+224], %r2;
"""
kernel("control_flow", "control flow", CONTROL, [A], [zeros(2, N)], block=N)
