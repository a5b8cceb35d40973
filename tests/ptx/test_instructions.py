"""Each instruction family computes what NumPy or exact arithmetic says, and trouble is reported with its place.

A test wraps a few lines of PTX in a kernel that loads 32 lanes of each input and stores 32 lanes of the result. Values
include the edges: zeros of both signs, subnormals, overflow, infinities, NaN, the ends of each integer range.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from tests.ptx.machine import TroubleError, run_launch

CLASS = {1: "c", 2: "h", 4: "r", 8: "d"}
EDGES = np.array(
    [0, 1, 2, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x00800000, 0x007FFFFF, 0x3F7FFFFF, 0x477FF000,
     0x33800001, 0x3F808000, 0x3F818000, 0x38FFFFFF, 0x7FFFFFFF], np.uint32,
)  # fmt: skip
FLOATS = np.concatenate([EDGES, EDGES | np.uint32(1 << 31)])
NUMBERS = np.random.default_rng(0)
RANDOM = [
    NUMBERS.standard_normal(32).astype(np.float32) * np.float32(2.0) ** NUMBERS.integers(-9, 9, 32) for _ in "abc"
]
RANDOM = [x.astype(np.float32).view(np.uint32) for x in RANDOM]
INTS = np.concatenate(
    [[0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE], NUMBERS.integers(0, 1 << 32, 22)]
)
INTS = INTS.astype(np.uint32)


@dataclass
class Launch:
    ptx: str
    arguments: list[bytes]
    block: tuple[int, int, int] = (32, 1, 1)
    shared_bytes: int = 256
    grid: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, ...] = ()
    entry: str | None = None


def kernel(body: str, parameters: int, threads: int = 32) -> str:
    names = ", ".join(f".param .u64 a{i}" for i in range(parameters))
    return f""".version 9.4
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 smem[];
.visible .entry k({names})
.reqntid {threads}, 1, 1
{{
.reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<32>; .reg .b64 %d<16>, %x<8>;
{body}
ret;
}}"""


def run(body: str, *arrays: np.ndarray, mode: str = "early", seed: int = 0, threads: int = 32) -> None:
    """Run a body whose parameters a0, a1, ... are the arrays' addresses."""
    arguments = [a.ctypes.data.to_bytes(8, "little") for a in arrays]
    run_launch(
        Launch(kernel(body, len(arrays), threads), arguments, (threads, 1, 1)), list(arrays), mode=mode, seed=seed
    )


def lanewise(code: str, *inputs: np.ndarray, out: type = np.uint32) -> np.ndarray:
    """Lanes of register 0 of the result's class after code that reads register i of each input's class."""
    lines, result = ["mov.u32 %r31, %tid.x;"], np.zeros(32, out)
    arrays = [np.ascontiguousarray(x) for x in (*inputs, result)]
    for i, array in enumerate(arrays):
        size = array.itemsize
        lines += [f"ld.param.b64 %x{i}, [a{i}]; mad.wide.u32 %x{i}, %r31, {size}, %x{i};"]
        lines += [f"ld.global.b{8 * size} %{CLASS[size]}{i + 1}, [%x{i}];"] if array is not arrays[-1] else [code]
    last = arrays[-1]
    run("\n".join([*lines, f"st.global.b{8 * last.itemsize} [%x{len(inputs)}], %{CLASS[last.itemsize]}0;"]), *arrays)
    return last


def f32(x: np.ndarray) -> np.ndarray:
    return x.view(np.float32)


def same_floats(got: np.ndarray, expected: np.ndarray) -> None:
    expected = expected.astype(np.float32)
    bits = np.where(expected != expected, np.uint32(0x7FFFFFFF), expected.view(np.uint32))
    assert [hex(x) for x in got] == [hex(x) for x in bits]


# Integers.

A, B, C = INTS.astype(object), np.roll(INTS, 5).astype(object), np.roll(INTS, 11).astype(object)


def s(x: np.ndarray) -> np.ndarray:
    """Signed values of 32-bit words."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


INTEGER = {
    "add.s32 %r0, %r1, %r2;": A + B,
    "sub.s32 %r0, %r1, %r2;": A - B,
    "neg.s32 %r0, %r1;": -A,
    "and.b32 %r0, %r1, %r2;": A & B,
    "or.b32 %r0, %r1, %r2;": A | B,
    "xor.b32 %r0, %r1, -2;": A ^ 0xFFFFFFFE,
    "not.b32 %r0, %r1;": ~A,
    "mul.lo.s32 %r0, %r1, %r2;": A * B,
    "mul.hi.u32 %r0, %r1, %r2;": A * B >> 32,
    "mul.hi.s32 %r0, %r1, %r2;": s(A) * s(B) >> 32,
    "mad.lo.s32 %r0, %r1, %r2, %r3;": A * B + C,
    "mul.wide.u32 %d0, %r1, %r2;": A * B,
    "mul.wide.s32 %d0, %r1, -4;": s(A) * -4,
    "min.s32 %r0, %r1, %r2;": np.minimum(s(A), s(B)),
    "max.u32 %r0, %r1, %r2;": np.maximum(A, B),
    "shl.b32 %r0, %r1, %r2;": np.where(B < 32, A << np.minimum(B, 32), 0),
    "shr.u32 %r0, %r1, %r2;": A >> np.minimum(B, 32),
    "shr.s32 %r0, %r1, %r2;": s(A) >> np.minimum(B, 31),
    "cvt.s64.s32 %d0, %r1;": s(A),
    "cvt.u64.u32 %d0, %r1;": A,
    "cvt.u32.u64 %r0, %d4;": A * 3,
    "cvt.u16.u32 %h0, %r1; cvt.u32.u16 %r0, %h0;": A & 0xFFFF,
    "cvt.u16.u32 %h0, %r1; cvt.s32.s16 %r0, %h0;": (A + 0x8000) % 0x10000 - 0x8000,
    "cvt.u16.u32 %h0, %r1; or.b16 %h1, %h0, 2; shr.u16 %h0, %h1, 1; cvt.u32.u16 %r0, %h0;": (A & 0xFFFF | 2) >> 1,
    "mul.lo.s64 %d0, %d4, %d4;": A * A * 9,
    "mad.lo.s64 %d0, %d4, %d4, %d4;": A * A * 9 + A * 3,
    "shl.b64 %d0, %d4, %r2;": np.where(B < 64, A * 3 << np.minimum(B, 64), 0),
    "setp.lt.s32 %p0, %r1, %r2; selp.b32 %r0, %r1, 7, %p0;": np.where(s(A) < s(B), A, 7),
    "setp.lt.u32 %p0, %r1, -9; selp.b32 %r0, 1, 0, %p0;": A < 2**32 - 9,
    "setp.le.s64 %p0, %d4, 99; not.pred %p1, %p0; selp.b64 %d0, %d4, 5, %p1;": np.where(A * 3 > 99, A * 3, 5),
    "setp.gt.u32 %p0, %r1, %r2; setp.ne.b32 %p1, %r3, 0; and.pred %p2, %p0, %p1; selp.b32 %r0, 1, 0, %p2;": (A > B)
    & (C != 0),
    "setp.ge.u32 %p0, %r1, %r2; mov.pred %p1, -1; xor.pred %p2, %p0, %p1; selp.b32 %r0, 1, 0, %p2;": A < B,
    "setp.eq.b32 %p0, %r1, %r2; mov.b32 %r0, 3; @%p0 mov.b32 %r0, 4; @!%p0 add.s32 %r0, %r0, 2;": np.where(
        A == B, 4, 5
    ),
    "mov.b32 {%h0, %h1}, %r1; mov.b32 %r0, {%h1, %h0};": A >> 16 | (A & 0xFFFF) << 16,
    "mov.u32 %r0, %laneid; mov.b32 %r5, %ntid.x; mad.lo.s32 %r0, %r0, 2, %r5;": np.arange(32) * 2 + 32,
}


@pytest.mark.parametrize("code", INTEGER)
def test_integers(code: str) -> None:
    wide = bool(re.search(r"%d0,", code))
    inputs = (INTS, np.roll(INTS, 5), np.roll(INTS, 11), INTS.astype(np.uint64) * 3)
    got = lanewise(code, *inputs, out=np.uint64 if wide else np.uint32)
    assert got.tolist() == [int(x) % (1 << (64 if wide else 32)) for x in INTEGER[code]]


# Floats.


def rounded(exact: Fraction, mode: str) -> np.float32:
    """The float32 that a rounding mode takes for a rational number that is not 0."""
    low = np.float32(float(exact))
    while Fraction(float(low)) > exact:
        low = np.nextafter(low, np.float32(-np.inf))
    while Fraction(float(np.nextafter(low, np.float32(np.inf)))) <= exact:
        low = np.nextafter(low, np.float32(np.inf))
    high = low if Fraction(float(low)) == exact else np.nextafter(low, np.float32(np.inf))
    down, up = exact - Fraction(float(low)), Fraction(float(high)) - exact
    nearest = low if down < up or (down == up and not low.view(np.uint32) & 1) else high
    return {"rn": nearest, "rm": low, "rp": high, "rz": low if exact > 0 else high}[mode]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_rounding_is_that_of_exact_arithmetic(name: str, mode: str) -> None:
    x, y, z = RANDOM
    z = z.copy()
    z[:8] = (f32(x[:8]) * f32(y[:8]) * np.float32(-1)).view(np.uint32)  # cancellation: the product's error is left
    z[8:16] = np.float32(2.0**-140).view(np.uint32)  # a term far below the last bit
    a, b, c = ([Fraction(float(v)) for v in f32(w)] for w in (x, y, z))
    exact = {"add": lambda i: a[i] + c[i], "sub": lambda i: a[i] - c[i], "mul": lambda i: a[i] * b[i]}
    operands = {"add": "%r1, %r3", "sub": "%r1, %r3", "mul": "%r1, %r2", "fma": "%r1, %r2, %r3"}[name]
    got = lanewise(f"{name}.{mode}.f32 %r0, {operands};", x, y, z)
    truth = exact.get(name, lambda i: a[i] * b[i] + c[i])
    same_floats(got, np.array([rounded(truth(i), mode) if truth(i) else np.float32(0) for i in range(32)]))


def test_special_values_and_modifiers() -> None:
    x, y = FLOATS, np.roll(FLOATS, 3)
    with np.errstate(all="ignore"):
        same_floats(lanewise("add.f32 %r0, %r1, %r2;", x, y), f32(x) + f32(y))
        same_floats(lanewise("mul.f32 %r0, %r1, %r2;", x, y), f32(x) * f32(y))
        wide = (f32(x).astype(np.float64) * f32(y) + 1).astype(np.float32)  # the sum rounds once here: checked above
        got = lanewise("fma.rn.f32 %r0, %r1, %r2, 0f3F800000;", x, y)
        assert (np.isnan(f32(got)) == np.isnan(wide)).all() and (np.isinf(f32(got)) == np.isinf(wide)).all()
        tiny = np.abs(f32(x)) < 2.0**-126
        same_floats(lanewise("add.ftz.f32 %r0, %r1, 0f80000000;", x), np.where(tiny, np.copysign(0, f32(x)), f32(x)))
        clamped = np.where(f32(x) > 0, np.minimum(f32(x), 1), 0)
        same_floats(lanewise("cvt.sat.f32.f32 %r0, %r1;", x), clamped)
        same_floats(lanewise("mul.sat.f32 %r0, %r1, 0f3F800000;", x), clamped)
        same_floats(lanewise("neg.f32 %r0, %r1;", x), -f32(x))
        same_floats(lanewise("abs.f32 %r0, %r1;", x), np.abs(f32(x)))
    largest = np.full(32, 0x7F7FFFFF, np.uint32)
    assert (lanewise("add.rz.f32 %r0, %r1, %r1;", largest) == 0x7F7FFFFF).all()
    assert (lanewise("add.rm.f32 %r0, %r1, 0fBF800000;", np.full(32, 0x3F800000, np.uint32)) == 0x80000000).all()


@pytest.mark.parametrize("test", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_of_floats(test: str) -> None:
    x, y = FLOATS, np.roll(FLOATS, 16)
    relation = {
        "eq": "equal",
        "ne": "not_equal",
        "lt": "less",
        "le": "less_equal",
        "gt": "greater",
        "ge": "greater_equal",
    }
    holds, nan = getattr(np, relation[test])(f32(x), f32(y)), np.isnan(f32(x)) | np.isnan(f32(y))
    for name, expected in ((test, holds & ~nan), (test + "u", holds | nan)):
        got = lanewise(f"setp.{name}.f32 %p0, %r1, %r2; selp.f32 %r0, 0f00000001, 0f00000000, %p0;", x, y)
        assert got.tolist() == expected.tolist()


def test_approximations_keep_their_bounds_and_special_values() -> None:
    x = f32(RANDOM[0])
    got = f32(lanewise("ex2.approx.ftz.f32 %r0, %r1;", RANDOM[0])).astype(np.float64)
    assert np.all(np.abs(got / np.exp2(np.clip(x.astype(np.float64), -126, 128)) - 1)[np.abs(x) < 120] < 2.0**-22)
    got = f32(lanewise("rcp.approx.ftz.f32 %r0, %r1;", RANDOM[0]))
    assert np.all(np.abs(got.astype(np.float64) * x - 1) < 2.0**-23)
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0xC3000000, 0x7F000000] * 4, np.uint32)
    got = lanewise("ex2.approx.ftz.f32 %r0, %r1;", special)[:8].tolist()
    assert got == [0x3F800000, 0x3F800000, 0x7F800000, 0, 0x7FFFFFFF, 0x3F800000, 0, 0x7F800000]
    got = lanewise("rcp.approx.ftz.f32 %r0, %r1;", special)[:8].tolist()
    assert got == [0x7F800000, 0xFF800000, 0, 0x80000000, 0x7FFFFFFF, 0x7F800000, 0xBC000000, 0]
    for name, inverse in (("lg2", np.exp2), ("rsqrt", lambda v: v**-2.0), ("sqrt", np.square)):
        got = f32(lanewise(f"{name}.approx.f32 %r0, %r1;", RANDOM[0] & 0x7FFFFFFF)).astype(np.float64)
        assert np.allclose(inverse(got), np.abs(x), rtol=3e-6)


# Conversions.


def test_halves() -> None:
    with np.errstate(all="ignore"):
        half = f32(FLOATS).astype(np.float16)
    bits = np.where(np.isnan(half), np.uint16(0x7FFF), half.view(np.uint16)).astype(np.uint32)
    swapped = np.roll(bits, 7)
    assert (lanewise("cvt.rn.f16x2.f32 %r0, %r1, %r2;", FLOATS, np.roll(FLOATS, 7)) == (bits << 16 | swapped)).all()
    every = np.arange(0, 1 << 16, 1 << 11, dtype=np.uint16) | np.uint16(0x3FF)
    same_floats(lanewise("cvt.f32.f16 %r0, %h1;", every), every.view(np.float16).astype(np.float32))


def test_bfloats() -> None:
    torch = pytest.importorskip("torch")
    bits = torch.from_numpy(f32(FLOATS).copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    bits = np.where(np.isnan(f32(FLOATS)), np.uint16(0x7FFF), bits).astype(np.uint32)
    swapped = np.roll(bits, 7)
    assert (lanewise("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", FLOATS, np.roll(FLOATS, 7)) == (bits << 16 | swapped)).all()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_integers_to_float(mode: str) -> None:
    expected = [rounded(Fraction(int(x)), mode) if x else np.float32(0) for x in s(A)]
    same_floats(lanewise(f"cvt.{mode}.f32.s32 %r0, %r1;", INTS), np.array(expected))


# Memory, warps, barriers, copies.

START = "ld.param.b64 %x0, [a0]; mov.u32 %r1, %tid.x; mul.wide.u32 %x1, %r1, 4; add.s64 %x2, %x0, %x1;"


def test_vectors_and_hints() -> None:
    data, out = NUMBERS.integers(0, 256, 512).astype(np.uint8), np.zeros(512, np.uint8)
    body = """ld.param.b64 %x0, [a0]; ld.param.b64 %x1, [a1]; mov.u32 %r1, %tid.x; mul.wide.u32 %x2, %r1, 16;
    add.s64 %x0, %x0, %x2; add.s64 %x1, %x1, %x2; shl.b32 %r2, %r1, 4; mov.b32 %r3, smem; add.s32 %r3, %r3, %r2;
    ld.global.cs.v4.b32 {%r4, %r5, %r6, %r7}, [%x0+0]; st.shared.v2.b32 [%r3], {%r5, %r4}; st.shared.b32 [%r3+8], %r7;
    ld.shared.v2.b32 {%r8, %r9}, [%r3+0]; ld.shared.b32 %r10, [%r3+8]; ld.global.u8 %r11, [%x0+11];
    st.global.L2::cache_hint.v4.b32 [%x1], {%r8, %r9, %r10, %r11}, 1152921504606846976;"""
    launch = Launch(kernel(body, 2), [x.ctypes.data.to_bytes(8, "little") for x in (data, out)], shared_bytes=512)
    run_launch(launch, [data, out])
    words = data.view(np.uint32).reshape(32, 4)
    expected = np.stack([words[:, 1], words[:, 0], words[:, 3], data.reshape(32, 16)[:, 11]], 1)
    assert (out.view(np.uint32).reshape(32, 4) == expected).all()


@pytest.mark.parametrize(
    ("operands", "source"),
    [
        ("bfly.b32 %r0, %r1, 5, 31, -1", np.arange(32) ^ 5),
        ("down.b32 %r0, %r1, 3, 31, -1", np.where(np.arange(32) + 3 < 32, np.arange(32) + 3, np.arange(32))),
        ("up.b32 %r0, %r1, 3, 0, -1", np.where(np.arange(32) >= 3, np.arange(32) - 3, np.arange(32))),
        ("idx.b32 %r0, %r1, 9, 31, -1", np.full(32, 9)),
        ("idx.b32 %r0, %r1, %r2, 31, -1", (np.arange(32) * 7) % 32),
        ("down.b32 %r0, %r1, 1, 6175, -1", np.where(np.arange(32) % 8 < 7, np.arange(32) + 1, np.arange(32))),
    ],
)
def test_shuffles(operands: str, source: np.ndarray) -> None:
    by = ((np.arange(32) * 7) % 32).astype(np.uint32)
    assert lanewise(f"shfl.sync.{operands};", INTS, by).tolist() == INTS[source].tolist()


def test_divergent_lanes_meet_again() -> None:
    code = """setp.lt.u32 %p0, %r31, 10; mov.b32 %r5, 0; @%p0 bra FAR;
    LOOP: add.s32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, %r31; @%p1 bra LOOP;
    MEET: shfl.sync.bfly.b32 %r0, %r5, 16, 31, -1; bra.uni END;
    FAR: mov.b32 %r5, 100; bra MEET;
    END:"""
    counts = np.where(np.arange(32) < 10, 100, np.arange(32))
    assert lanewise(code, INTS).tolist() == counts[np.arange(32) ^ 16].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_barriers_order_and_count(seed: int) -> None:
    out = np.zeros(128, np.uint32)
    body = f"""{START} mov.b32 %r2, smem; shl.b32 %r3, %r1, 1; xor.b32 %r4, %r3, 254; add.s32 %r3, %r3, %r2;
    add.s32 %r4, %r4, %r2; cvt.u16.u32 %h0, %r1; st.shared.b16 [%r3], %h0; setp.gt.u32 %p0, %r1, 76;
    bar.red.popc.u32 %r5, 0, %p0; ld.shared.u16 %r6, [%r4]; mad.lo.s32 %r6, %r5, 1000, %r6; st.global.b32 [%x2], %r6;"""
    run(body, out, threads=128, seed=seed)
    assert out.tolist() == [51000 + 127 - i for i in range(128)]


COPY = """mov.b32 %r2, smem; setp.ne.b32 %p0, %r1, 0; @%p0 bra READY;
    mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %d0, [%r2], 128; add.s32 %r3, %r2, 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r3], [%x0], 128, [%r2], %x0;
    READY: bar.sync 0;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0, 10000000; @!%p1 bra WAIT;
    and.b32 %r4, %r1, 31; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r2; ld.shared.b32 %r5, [%r4+128];
    ld.param.b64 %x3, [a1]; add.s64 %x3, %x3, %x1; st.global.b32 [%x3], %r5;"""


@pytest.mark.parametrize("mode", ["early", "late"])
@pytest.mark.parametrize("seed", range(3))
def test_bulk_copies(mode: str, seed: int) -> None:
    out = np.zeros(64, np.uint32)
    data = INTS.copy()
    data.flags.writeable = False
    run(START + COPY, data, out, threads=64, mode=mode, seed=seed)
    assert out.tolist() == [*INTS, *INTS]


# Teeth.

SHARED = START + "mov.b32 %r2, smem; shl.b32 %r3, %r1, 2; add.s32 %r3, %r3, %r2;"
BAD = {
    # kind, body, the faulty line, warp, lane
    "unknown instruction": ("unmodelled", "\nfrobnicate.b32 %r1, %r2;", None, None),
    "unknown modifier": ("unmodelled", "\nadd.sat.s32 %r1, %r2, %r3;", None, None),
    "unknown special register": ("unmodelled", "\nmov.u32 %r1, %smid;", None, None),
    "wrong width": ("unmodelled", "\nadd.s64 %x1, %r1, %x1;", None, None),
    "global bound": ("out_of_bounds", START + "\nld.global.b32 %r2, [%x2+16];", 1, 28),
    "global below": ("out_of_bounds", START + "\nld.global.b32 %r2, [%x2+-4];", 0, 0),
    "shared bound": ("out_of_bounds", SHARED + "\nst.shared.b32 [%r3+240], %r1;", 0, 4),
    "misaligned global": ("misaligned", START + "\nst.global.v2.b32 [%x2], {%r1, %r1};", 0, 1),
    "misaligned shared": ("misaligned", SHARED + "\nst.shared.b32 [%r3+2], %r1;", 0, 0),
    "uninitialised shared": ("uninitialised", SHARED + "\nld.shared.b32 %r5, [%r3];", 0, 0),
    "uninitialised register": (
        "uninitialised", START + "setp.gt.u32 %p0, %r1, 4; @!%p0 mov.b32 %r5, 1;\nadd.s32 %r6, %r5, 1;", 0, 5,
    ),
    "lanes disagree": ("race", SHARED + "\nst.shared.b32 [%r2], %r1;", 0, 0),
    "two warps write": (
        "race", SHARED + "and.b32 %r4, %r1, 31; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r2;\nst.shared.b32 [%r4], 7;",
        None, 0,
    ),
    "missing barrier": (
        "race", SHARED + "st.shared.b32 [%r3], %r1; bar.sync 0; xor.b32 %r4, %r3, 128;"
        "\nst.shared.b32 [%r3], 5; ld.shared.b32 %r5, [%r4];", None, 0,
    ),
    "overwrites what others read": (
        "race", SHARED + "st.shared.b32 [%r3], %r1; bar.sync 0; xor.b32 %r4, %r3, 128;"
        "\nld.shared.b32 %r5, [%r4]; st.shared.b32 [%r3], %r5;", None, 0,
    ),
    "half of the warps at a barrier": (
        "deadlock", START + "setp.gt.u32 %p0, %r1, 31; @%p0 bra END;\nbar.sync 0;\nEND:", 0, 0,
    ),
    "half of a warp at a barrier": (
        "deadlock", START + "setp.gt.u32 %p0, %r1, 40; @%p0 bra END;\nbar.sync 0;\nEND: bar.sync 1;", None, None,
    ),
    "shuffle from an absent lane": ("shuffle", START + "setp.lt.u32 %p0, %r1, 16; @!%p0 bra END;"
                                    "\nshfl.sync.bfly.b32 %r5, %r1, 16, 31, 65535;\nEND:", 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_trouble_is_reported_with_its_place(name: str) -> None:
    kind, body, warp, lane = BAD[name]
    threads = 32 if warp == 0 and kind != "deadlock" else 64
    with pytest.raises(TroubleError) as caught:
        run(body, np.zeros(threads, np.uint32), threads=threads)
    trouble, ptx = caught.value, kernel(body, 1, threads).splitlines()
    faulty = body.split("\n")[1]
    assert (trouble.kind, trouble.text) == (kind, faulty), trouble
    assert trouble.line == ptx.index(faulty) + 1 and faulty in str(trouble)
    assert trouble.warp == warp or warp is None
    assert trouble.lane == lane or lane is None
    if kind != "unmodelled":
        assert trouble.cta == (0, 0, 0) and trouble.warp is not None and trouble.lane is not None


BAD_COPIES = {
    "no wait": (r"WAIT: mb[^;]*; @!%p1 bra WAIT;", "", {"uninitialised", "race"}),
    "bytes not expected": (r"%d0, \[%r2\], 128", "%d0, [%r2], 0", {"race", "uninitialised"}),
    "too many bytes expected": (r"%d0, \[%r2\], 128", "%d0, [%r2], 144", {"deadlock"}),
    "no fence": (r"fence.mbarrier_init.release.cluster;", "", {"missing_fence"}),
    "no barrier": (r"bar.sync 0;", "", {"race", "mbarrier"}),
    "misaligned copy": (r"\[%r3\], \[%x0\]", "[%r3+8], [%x0]", {"misaligned"}),
    "copy beyond the source": (r"128, \[%r2\], %x0", "144, [%r2], %x0", {"out_of_bounds"}),
    "a wait that is not repeated": (r"@!%p1 bra WAIT;", "", {"uninitialised"}),
    "ends before its copy": (r"(WAIT: mb[^;]*;) @!%p1 bra WAIT;[\s\S]*", "", {"pending_copy"}),
}
ONLY_LATE = ("a wait that is not repeated", "ends before its copy")  # an early copy is over by then


@pytest.mark.parametrize(("name", "mode"), [(n, m) for n in BAD_COPIES for m in ("early", "late")
                                            if m == "late" or n not in ONLY_LATE])  # fmt: skip
def test_a_broken_copy_is_caught(name: str, mode: str) -> None:
    pattern, by, kinds = BAD_COPIES[name]
    body, found = re.subn(pattern, by, START + COPY)
    assert found == 1
    with pytest.raises(TroubleError) as caught:
        run(body, INTS.copy(), np.zeros(64, np.uint32), threads=64, mode=mode, seed=1)
    assert caught.value.kind in kinds and caught.value.line > 0, caught.value


def test_a_read_only_buffer_is_not_written() -> None:
    data = np.zeros(32, np.uint32)
    data.flags.writeable = False
    with pytest.raises(TroubleError, match="read_only"):
        run(START + "st.global.b32 [%x2], %r1;", data)


def test_a_launch_that_does_not_fit_is_refused() -> None:
    text = kernel("", 1)
    for launch in (
        Launch(text, [bytes(4)]),
        Launch(text, [bytes(8)], (64, 1, 1)),
        Launch(text, [bytes(8)], cluster=(2, 1, 1)),
    ):
        with pytest.raises(TroubleError, match="launch"):
            run_launch(launch, [])


# What is ordered, and what is not.

ONE, OTHER = "setp.lt.u32 %p0, %r1, 32; @!%p0 bra OTHER;", "bra END; OTHER:"
UNORDERED = {
    # name: (kinds, body) of two warps
    "a barrier passed on an arrival of the phase before": (
        {"deadlock"}, f"{START} {ONE} bar.arrive 1, 64; bar.sync 2, 64; bar.sync 1, 64; {OTHER}"
        "bar.sync 1, 64; bar.sync 2, 64; END:",
    ),
    "two arrivals of a warp in one phase": (
        {"barrier"}, f"{START} {ONE} bar.arrive 1, 64; bar.arrive 1, 64; bar.sync 2, 64; {OTHER}"
        "bar.sync 2, 64; bar.sync 1, 64; END:",
    ),
    "each lane has one group, and waits for none": (
        {"race", "uninitialised"}, f"{SHARED} setp.eq.u32 %p0, %r1, 0; setp.eq.u32 %p1, %r1, 1;"
        "@%p0 cp.async.ca.shared.global [%r3], [%x2], 4; @%p0 cp.async.commit_group;"
        "@%p1 cp.async.ca.shared.global [%r3], [%x2], 4; @%p1 cp.async.commit_group;"
        "cp.async.wait_group 1; @%p0 ld.shared.b32 %r4, [%r3];",
    ),
    "a relaxed read and an ordinary write": (
        {"race"}, f"{SHARED} st.shared.b32 [%r3], 0; bar.sync 0; {ONE} ld.relaxed.cta.shared.b32 %r4, [%r2]; {OTHER}"
        "st.shared.b32 [%r2], 1; END:",
    ),
    "two read, and one of them writes": (
        {"race"}, f"{START} ld.global.b32 %r4, [%x0]; setp.eq.u32 %p0, %r1, 32; @%p0 st.global.b32 [%x0], %r4;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNORDERED)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_not_ordered_is_seen_in_any_schedule(name: str, seed: int) -> None:
    kinds, body = UNORDERED[name]
    for mode in ("early", "late"):
        with pytest.raises(TroubleError) as caught:
            run(body, np.zeros(64, np.uint32), mode=mode, seed=seed, threads=64)
        assert caught.value.kind in kinds, caught.value


def grid(body: str, *arrays: np.ndarray, seed: int = 0, threads: int = 32, cluster: tuple[int, ...] = ()) -> None:
    """Run two CTAs at once."""
    arguments = [a.ctypes.data.to_bytes(8, "little") for a in arrays]
    text = kernel(body, len(arrays), threads)
    launch = Launch(text, arguments, (threads, 1, 1), grid=(2, 1, 1), cluster=cluster)
    run_launch(launch, list(arrays), seed=seed, together=2)


MESSAGE = """ld.param.b64 %x0, [a0]; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p0, %r1, 0; @!%p0 bra OTHER;
    st.global.b32 [%x0], 7; fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [%x0+4], 1; bra END;
    OTHER: ld.relaxed.gpu.global.b32 %r2, [%x0+4]; setp.ne.u32 %p1, %r2, 1; @%p1 bra OTHER;
    fence.acq_rel.gpu; ld.global.b32 %r3, [%x0]; st.global.b32 [%x0+8], %r3; END:"""


@pytest.mark.parametrize("seed", range(4))
def test_a_message_between_ctas_needs_both_fences(seed: int) -> None:
    out = np.zeros(4, np.uint32)
    grid(MESSAGE, out, seed=seed)
    assert out.tolist() == [7, 1, 7, 0]
    for body in (MESSAGE.replace("fence.acq_rel.gpu;", "", 1), MESSAGE.replace("fence.acq_rel.gpu; ld", "ld")):
        with pytest.raises(TroubleError, match="race"):
            grid(body, np.zeros(4, np.uint32), seed=seed)


@pytest.mark.parametrize("seed", range(4, 8))
def test_flags_in_shared_memory_of_ctas_that_run_together(seed: int) -> None:
    body = f"""{SHARED} st.shared.b32 [%r3], 0; bar.sync 0; {ONE}
    st.shared.b32 [%r3], %r1; st.release.cta.shared.b32 [%r2+128], 1; {OTHER}
    WAIT: ld.acquire.cta.shared.b32 %r4, [%r2+128]; setp.ne.u32 %p1, %r4, 1; @%p1 bra WAIT;
    ld.shared.b32 %r5, [%r3+-128]; mov.u32 %r6, %ctaid.x; mad.wide.u32 %x2, %r6, 256, %x2; st.global.b32 [%x2], %r5;
    END:"""
    out = np.zeros(128, np.uint32)
    grid(body, out, seed=seed, threads=64)
    assert out.reshape(4, 32)[1::2].tolist() == [list(range(32))] * 2


GENERIC = """mov.b64 %x1, smem; cvta.shared.u64 %x1, %x1; setp.ne.b32 %p0, %r1, 0; @!%p0 mbarrier.init.b64 [%x1], 64;
    bar.sync 0; mbarrier.arrive.b64 %d0, [%x1]; WAIT: mbarrier.test_wait.b64 %p1, [%x1], %d0; @!%p1 bra WAIT;"""


def test_mbarriers_by_generic_addresses() -> None:
    run(START + GENERIC, np.zeros(64, np.uint32), threads=64)
    for one, other in (("cvta.shared.u64 %x1, %x1;", ""), (".b64 %d0", ".shared.b64 %d0")):
        with pytest.raises(TroubleError, match=r"mbarrier|out_of_bounds"):
            run(START + GENERIC.replace(one, other), np.zeros(64, np.uint32), threads=64)


def test_a_wait_is_for_an_mbarrier_of_the_own_cta() -> None:
    body = """mov.b32 %r2, smem; mov.u32 %r1, %tid.x; setp.eq.u32 %p0, %r1, 0; @%p0 mbarrier.init.shared.b64 [%r2], 1;
    barrier.cluster.arrive; barrier.cluster.wait; mapa.shared::cluster.u32 %r3, %r2, 1;
    mbarrier.test_wait.parity.shared.b64 %p1, [%r3], 1; barrier.cluster.arrive; barrier.cluster.wait;"""
    with pytest.raises(TroubleError, match="another CTA"):
        grid(body, cluster=(2, 1, 1))
