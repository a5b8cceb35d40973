"""Bit operations, division, packing and votes against Python's integers; refusals and faults of all arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tests.ptx.votes  # noqa: F401
from tests.ptx.machine import TroubleError
from tests.ptx.test_formats import same
from tests.ptx.test_instructions import FLOATS, INTS, lanewise, run

# Integers.

WORDS = INTS, np.roll(INTS, 5), np.roll(INTS, 11)
MASK = (1 << 64) - 1


def s(x: Any, bits: int = 32) -> Any:
    return (x + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def toward_zero(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def permuted(a: int, b: int, c: int) -> int:
    data = (b << 32 | a).to_bytes(8, "little")
    picks = [(c >> 4 * i) & 15 for i in range(4)]
    return int.from_bytes(bytes(data[p] if p < 8 else 255 * (data[p - 8] >> 7) for p in picks), "little")


def field(x: int, at: int, count: int, bits: int, is_signed: bool) -> int:
    """bfe bit by bit, as PTX writes it down."""
    at, count = at & 255, count & 255
    sign = x >> min(at + count - 1, bits - 1) & 1 if is_signed and count else 0
    found = [x >> at + i & 1 if i < count and at + i < bits else sign for i in range(bits)]
    return sum(bit << i for i, bit in enumerate(found))


def inserted(x: int, into: int, at: int, count: int, bits: int) -> int:
    at, count = at & 255, count & 255
    chosen = [x >> i - at & 1 if at <= i < at + count else into >> i & 1 for i in range(bits)]
    return sum(bit << i for i, bit in enumerate(chosen))


SMALL_B = "and.b32 %r4, %r2, 63; and.b32 %r5, %r3, 63;"
WIDE = "mov.b64 %d1, {%r1, %r2}; mov.b64 %d2, {%r3, %r1};"
# By lane: the words a, b, c, and the pairs v = {a, b} and w = {c, a}, which WIDE puts into %d1 and %d2.
INTEGER: dict[str, Callable[..., int]] = {
    "popc.b32 %r0, %r1;": lambda a, b, c, v, w: bin(a).count("1"),
    "clz.b32 %r0, %r1;": lambda a, b, c, v, w: 32 - len(bin(a)) + 2 if a else 32,
    "brev.b32 %r0, %r1;": lambda a, b, c, v, w: sum((a >> i & 1) << 31 - i for i in range(32)),
    "bfind.u32 %r0, %r1;": lambda a, b, c, v, w: len(bin(a)) - 3 if a else -1,
    "bfind.s32 %r0, %r1;": lambda a, b, c, v, w: max([i for i in range(31) if (a >> i & 1) != a >> 31], default=-1),
    "abs.s32 %r0, %r1;": lambda a, b, c, v, w: abs(s(a)),
    "sad.s32 %r0, %r1, %r2, %r3;": lambda a, b, c, v, w: abs(s(a) - s(b)) + c,
    "prmt.b32 %r0, %r1, %r2, %r3;": lambda a, b, c, v, w: permuted(a, b, c),
    "prmt.b32 %r0, %r1, %r2, 30292;": lambda a, b, c, v, w: permuted(a, b, 0x7654),
    "lop3.b32 %r0, %r1, %r2, %r3, 0x1A;": lambda a, b, c, v, w: (a & b | c) ^ a,
    "lop3.b32 %r0, %r1, %r2, %r3, 64;": lambda a, b, c, v, w: a & b & ~c,
    "lop3.b32 %r0, %r1, %r2, 7, 150;": lambda a, b, c, v, w: a ^ b ^ 7,
    "lop3.b32 %r0, %r1, %r2, %r3, 0;": lambda a, b, c, v, w: 0,
    "shf.l.wrap.b32 %r0, %r1, %r2, %r3;": lambda a, b, c, v, w: v << c % 32 >> 32,
    "shf.r.wrap.b32 %r0, %r1, %r2, %r3;": lambda a, b, c, v, w: v >> c % 32,
    "shf.l.clamp.b32 %r0, %r1, %r2, %r3;": lambda a, b, c, v, w: a if c >= 32 else v << c >> 32,
    "shf.r.clamp.b32 %r0, %r1, %r2, %r3;": lambda a, b, c, v, w: b if c >= 32 else v >> c,
    "bfe.u32 %r0, %r1, %r2, %r3;": lambda a, b, c, v, w: field(a, b, c, 32, False),
    "bfe.s32 %r0, %r1, %r2, %r3;": lambda a, b, c, v, w: field(a, b, c, 32, True),
    f"{SMALL_B} bfe.s32 %r0, %r1, %r4, %r5;": lambda a, b, c, v, w: field(a, b & 63, c & 63, 32, True),
    f"{SMALL_B} bfi.b32 %r0, %r1, %r2, %r4, %r5;": lambda a, b, c, v, w: inserted(a, b, b & 63, c & 63, 32),
    f"{WIDE} bfe.s64 %d0, %d1, %r2, %r3;": lambda a, b, c, v, w: field(v, b, c, 64, True),
    f"{WIDE} {SMALL_B} bfi.b64 %d0, %d1, %d2, %r4, %r5;": lambda a, b, c, v, w: inserted(v, w, b & 63, c & 63, 64),
    f"{WIDE} mul.hi.u64 %d0, %d1, %d2;": lambda a, b, c, v, w: v * w >> 64,
    f"{WIDE} mul.hi.s64 %d0, %d1, %d2;": lambda a, b, c, v, w: s(v, 64) * s(w, 64) >> 64,
    f"{WIDE} mad.hi.s64 %d0, %d1, %d2, %d1;": lambda a, b, c, v, w: (s(v, 64) * s(w, 64) >> 64) + v,
    f"{WIDE} popc.b64 %r0, %d1;": lambda a, b, c, v, w: bin(a).count("1") + bin(b).count("1"),
    f"{WIDE} clz.b64 %r0, %d1;": lambda a, b, c, v, w: 64 - len(bin(v)) + 2 if v else 64,
    f"{WIDE} or.b64 %d4, %d2, 1; div.s64 %d0, %d1, %d4;": lambda a, b, c, v, w: toward_zero(s(v, 64), s(w | 1, 64)),
    f"{WIDE} or.b64 %d4, %d2, 1; rem.u64 %d0, %d1, %d4;": lambda a, b, c, v, w: v % (w | 1),
    "or.b32 %r4, %r2, 1; div.s32 %r0, %r1, %r4;": lambda a, b, c, v, w: toward_zero(s(a), s(b | 1)),
    "or.b32 %r4, %r2, 1; rem.s32 %r0, %r1, %r4;": lambda a, b, c, v, w: s(a) - s(b | 1) * toward_zero(s(a), s(b | 1)),
    "or.b32 %r4, %r2, 1; div.u32 %r0, %r1, %r4;": lambda a, b, c, v, w: a // (b | 1),
    "rem.u32 %r0, %r1, 10;": lambda a, b, c, v, w: a % 10,
    "mad.hi.u32 %r0, %r1, %r2, %r3;": lambda a, b, c, v, w: (a * b >> 32) + c,
    "min.relu.s32 %r0, %r1, %r2;": lambda a, b, c, v, w: max(min(s(a), s(b)), 0),
    "max.s16x2 %r0, %r1, %r2;":
        lambda a, b, c, v, w: sum(max(s(a >> i, 16), s(b >> i, 16)) % 65536 << i for i in (0, 16)),
    "min.u16x2 %r0, %r1, %r2;": lambda a, b, c, v, w: min(a % 65536, b % 65536) | min(a >> 16, b >> 16) << 16,
    "add.u16x2 %r0, %r1, %r2;": lambda a, b, c, v, w: (a + b) % 65536 | ((a >> 16) + (b >> 16)) % 65536 << 16,
    "{ .reg .b8 b0, b1, b2, b3; mov.b32 {b0, b1, b2, b3}, %r1; mov.b32 %r0, {b3, b2, b1, b0}; }":
        lambda a, b, c, v, w: int.from_bytes(a.to_bytes(4, "big"), "little"),
    "{ .reg .b8 x, y; mov.b32 {%h1, %h2}, %r1; mov.b16 {x, y}, %h2; mov.b16 %h3, {y, x}; mov.b32 %r0, {%h3, %h1}; }":
        lambda a, b, c, v, w: (a >> 16 & 255) << 8 | a >> 24 | (a & 0xFFFF) << 16,
    f"{WIDE} mov.b64 {{%h1, %h2, %h3, %h4}}, %d1; mov.b64 %d0, {{%h4, %h1, %h2, %h3}};":
        lambda a, b, c, v, w: v << 16 & MASK | b >> 16,
    f"{WIDE} mov.b64 {{_, %r0}}, %d1;": lambda a, b, c, v, w: b,
    "mov.b64 %d4, 0d3FF8000000000000; mov.f64 %d0, %d4;": lambda a, b, c, v, w: 0x3FF8 << 48,
}  # fmt: skip


@pytest.mark.parametrize("code", INTEGER)
def test_integers(code: str) -> None:
    bits = 64 if "%d0" in code else 32
    rows = zip(*(x.tolist() for x in WORDS), strict=True)
    expected = [INTEGER[code](a, b, c, b << 32 | a, a << 32 | c) % (1 << bits) for a, b, c in rows]
    same(lanewise(code, *WORDS, out=np.uint64 if bits == 64 else np.uint32), expected)


# Votes.

FEW = INTS % 3
HELD = int(np.packbits(FEW > 1, bitorder="little").view(np.uint32)[0])
EQUAL = [sum(1 << i for i in range(32) if FEW[i] == x) for x in FEW]
VOTES = {
    "setp.gt.u32 %p1, %r1, 1; vote.sync.ballot.b32 %r0, %p1, -1;": [HELD] * 32,
    "setp.gt.u32 %p1, %r1, 1; vote.sync.ballot.b32 %r0, !%p1, -1;": [HELD ^ 0xFFFFFFFF] * 32,
    "setp.gt.u32 %p1, %r1, 1; vote.sync.any.pred %p0, %p1, -1; selp.b32 %r0, 1, 0, %p0;": [1] * 32,
    "setp.gt.u32 %p1, %r1, 1; vote.sync.all.pred %p0, %p1, -1; selp.b32 %r0, 1, 0, %p0;": [0] * 32,
    "setp.gt.u32 %p1, %r1, 1; vote.sync.uni.pred %p0, %p1, -1; selp.b32 %r0, 1, 0, %p0;": [0] * 32,
    "setp.gt.u32 %p1, %r1, 9; vote.sync.uni.pred %p0, %p1, -1; selp.b32 %r0, 1, 0, %p0;": [1] * 32,
    "setp.lt.u32 %p1, %r1, 9; vote.sync.all.pred %p0, %p1, -1; selp.b32 %r0, 1, 0, %p0;": [1] * 32,
    "match.any.sync.b32 %r0, %r1, -1;": EQUAL,
    "mov.b64 %d1, {7, %r1}; match.any.sync.b64 %r0, %d1, -1;": EQUAL,
    "match.all.sync.b32 %r4|%p0, %r1, -1; selp.b32 %r0, 5, %r4, %p0;": [0] * 32,
    "match.all.sync.b32 %r4|%p0, 4, -1; selp.b32 %r0, %r4, 5, %p0;": [0xFFFFFFFF] * 32,
    "setp.gt.u32 %p1, %r31, 11; mov.b32 %r0, 0; @%p1 match.any.sync.b32 %r0, 7, 0xFFFFF000;":
        [0] * 12 + [0xFFFFF000] * 20,
    "redux.sync.add.u32 %r0, %r2, -1;": [sum(INTS.tolist()) % (1 << 32)] * 32,
    "redux.sync.min.s32 %r0, %r2, -1;": [min(map(s, INTS.tolist())) % (1 << 32)] * 32,
    "redux.sync.max.u32 %r0, %r2, -1;": [max(INTS)] * 32,
    "redux.sync.xor.b32 %r0, %r2, -1;": [functools.reduce(int.__xor__, INTS.tolist())] * 32,
    "redux.sync.or.b32 %r0, %r1, -1;": [3] * 32,
    "redux.sync.min.f32 %r0, %r3, -1;": [0xFF800000] * 32,
    "redux.sync.min.abs.f32 %r0, %r3, -1;": [0] * 32,
    "redux.sync.max.abs.f32 %r0, %r3, -1;": [0x7F800000] * 32,
    "redux.sync.max.NaN.f32 %r0, %r3, -1;": [0x7FFFFFFF] * 32,
    "selp.f32 %r4, 0f80000000, 0f00000000, -1; redux.sync.min.f32 %r0, %r4, -1;": [1 << 31] * 32,
    "setp.eq.u32 %p0, %r31, 5; selp.f32 %r4, 0f00000000, 0f80000000, %p0; redux.sync.max.f32 %r0, %r4, -1;": [0] * 32,
    "activemask.b32 %r0;": [0xFFFFFFFF] * 32,
    "elect.sync %r4|%p0, -1; selp.b32 %r5, 100, 0, %p0; add.s32 %r0, %r4, %r5;": [100] + [0] * 31,
    "setp.gt.u32 %p1, %r31, 11; mov.b32 %r0, 77; @%p1 elect.sync _|%p0, 0xFFFFF000; @%p1 selp.b32 %r0, 1, 0, %p0;":
        [77] * 12 + [1] + [0] * 19,
}  # fmt: skip
VOTES[
    """setp.lt.u32 %p1, %r31, 12; @%p1 bra LOW; redux.sync.add.u32 %r4, %r31, 0xFFFFF000; bra.uni BOTH;
    LOW: setp.gt.u32 %p2, %r31, 5; @%p2 bra LATE; mov.b32 %r5, 0; LATE: redux.sync.add.u32 %r4, %r31, 0xFFF;
    BOTH: match.any.sync.b32 %r0, %r4, -1;"""
] = [0xFFF] * 12 + [0xFFFFF000] * 20


@pytest.mark.parametrize("code", VOTES)
def test_votes(code: str) -> None:
    same(lanewise(code, FEW.astype(np.uint32), INTS, FLOATS), VOTES[code])


REFUSED = """
cvt.f16.f32 %h0, %r1;
cvt.rn.satfinite.f32.f16 %r0, %h1;
cvt.rn.e4m3x2.f32 %h0, %r1, %r1;
cvt.rna.f16.f32 %h0, %r1;
cvt.rm.f16x2.f32 %r0, %r1, %r1;
cvt.rn.satfinite.e4m3x4.f32 %r0, {%r1, %r1, %r1, %r1};
cvt.rn.s32.f32 %r0, %r1;
cvt.rs.satfinite.e2m1x4.f32 %h0, {%r1, %r1, %r1}, %r1;
cvt.rz.relu.ue8m0x2.f32 %h0, %r1, %r1;
cvt.rn.f16x2.ue8m0x2 %r0, %h1;
cvt.rzi.f64.f32 %d0, %r1;
cvt.rn.f32.f32 %r0, %r1;
cvt.f32.s32 %r0, %r1;
cvt.rz.f64.s64 %d0, %d1;
cvt.rn.f16x2.bf16x2 %r0, %r1;
add.rz.f16 %h0, %h1, %h1;
add.sat.bf16 %h0, %h1, %h1;
fma.f16 %h0, %h1, %h1, %h1;
fma.rn.sat.relu.f16 %h0, %h1, %h1, %h1;
add.rz.f64 %d0, %d1, %d1;
add.sat.f32x2 %d0, %d1, %d1;
mul.f32.f16 %r0, %h1, %r1;
min.xorsign.f32 %r0, %r1, %r1;
min.abs.f32 %r0, %r1, %r1;
max.xorsign.abs.f32 %r0, %r1, %r1, %r1;
min.ftz.bf16 %h0, %h1, %h1;
div.rz.f32 %r0, %r1, %r1;
ex2.approx.bf16 %h0, %h1;
tanh.approx.ftz.f32 %r0, %r1;
setp.eq.ftz.bf16 %p0, %h1, %h1;
neg.ftz.bf16 %h0, %h1;
prmt.b32.rc8 %r0, %r1, %r1, %r1;
lop3.b32 %r0, %r1, %r1, %r1, 256;
lop3.b32 %r0, %r1, %r1, %r1, %r1;
shf.l.b32 %r0, %r1, %r1, 1;
popc.u32 %r0, %r1;
min.relu.u32 %r0, %r1, %r1;
mov.b16 {%h0, %h1}, %h2;
mov.b32 {%r0}, %r1;
sub.u16x2 %r0, %r1, %r1;
vote.sync.none.pred %p0, %p1, -1;
vote.any.pred %p0, %p1;
match.any.sync.b32 %r0|%p0, %r1, -1;
redux.sync.add.f32 %r0, %r1, -1;
redux.sync.min.abs.u32 %r0, %r1, -1;
elect.sync %r0, -1;
add.s32 %r0|%p0, %r1, %r1;
add.s32 _, %r1, %r1;
cvt.rn.sat.f32.s64 %r0, %d1;
bfe.u32.x %r0, %r1, 1, 2;
add.f32.f16.x %r0, %h1, %r1;
"""


@pytest.mark.parametrize("code", REFUSED.strip().splitlines())
def test_what_is_not_modelled_is_refused(code: str) -> None:
    with pytest.raises(TroubleError) as caught:
        run("\n" + code, np.zeros(32, np.uint32))
    assert caught.value.kind == "unmodelled" and caught.value.text == code


FAULTS = {
    "setp.gt.u32 %p0, %r31, 4; mov.b32 %r5, 9; @%p0 mov.b32 %r5, 0;\ndiv.u32 %r0, %r1, %r5;": ("division", 5),
    "setp.gt.u32 %p0, %r31, 8; @!%p0 bra END;\nredux.sync.add.u32 %r0, %r1, 255;\nEND:": ("membermask", 9),
    "setp.gt.u32 %p0, %r31, 8;\n@%p0 vote.sync.ballot.b32 %r0, %p0, -1;": ("deadlock", None),
    "setp.gt.u32 %p0, %r31, 8; @%p0 mov.b32 %r6, 1;\nmatch.any.sync.b32 %r0, %r6, -1;": ("uninitialised", 0),
    "setp.gt.u32 %p0, %r31, 8; @%p0 mov.b32 %r6, 1;\npopc.b32 %r0, %r6;": ("uninitialised", 0),
}


@pytest.mark.parametrize("code", FAULTS)
def test_faults_name_the_lane(code: str) -> None:
    kind, lane = FAULTS[code]
    body = f"mov.u32 %r31, %tid.x; mov.b32 %r1, 3; {code}"
    if kind == "deadlock":
        body += " bar.sync 0;"
    with pytest.raises(TroubleError) as caught:
        run(body, np.zeros(32, np.uint32))
    assert caught.value.kind == kind and (lane is None or caught.value.lane == lane), caught.value
