"""wgmma ("Asynchronous Warpgroup Level Matrix Instructions"): one warpgroup, operands laid out by the kernel itself.

The elements lie row by row in global memory. The kernel stores each at the offset in shared memory that our reading of
the layouts gives for it, so a wrong layout shows as a wrong product. Rows of A are of all styles of numbers; the first
16 rows and 8 columns are small integers, whose product is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.ptx.hardware import operands
from tests.ptx.hardware.kernel import Kernel, kernel

SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
ROWS = (("integers", 16), ("near", 16), ("wide", 8), ("cancel", 8), ("special", 8), ("tiny", 8))
COLUMNS = (("integers", 8), ("near", 4), ("wide", 4))
AT = 16384  # of B in shared memory


@dataclass(frozen=True)
class Tile:
    """One shape and its layouts.

    Args:
        kinds: formats of A and B.
        total: format of the accumulator.
        n: columns.
        depth: elements along k, over all chained instructions.
        a, b: layout: "k" or "mn" with the bytes of the swizzle, 16 for none; A may be in "registers".
        scale: predicate scale-d of the first instruction.
        signs: the immediates that negate A and B.
        styles: False for integers throughout.
    """

    kinds: tuple[str, str]
    total: str = "f32"
    n: int = 16
    depth: int = 32
    a: str = "k128"
    b: str = "k128"
    scale: int = 1
    signs: tuple[int, int] = (1, 1)
    styles: bool = True

    @property
    def size(self) -> int:
        return SIZE[self.kinds[0]]

    @property
    def steps(self) -> int:
        return self.depth * self.size // 32

    def layout(self, which: str, count: int) -> tuple[np.ndarray, int, int, int]:
        width = int(which.lstrip("kmn"))
        if which.startswith("mn"):
            return operands.mn_major(count, self.depth, width)
        return operands.k_major(count, self.depth, self.size, width)

    def arrays(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A [64, k], B [n, k] and C [64, n]."""
        rows = ROWS if self.styles else (("integers", 64),)
        columns = COLUMNS if self.styles else (("integers", self.n),)
        a = [operands.rows(self.kinds[0], s, seed + 10 * i, count, self.depth) for i, (s, count) in enumerate(rows)]
        b = [operands.rows(self.kinds[1], s, seed + 105 + 10 * i, m, self.depth) for i, (s, m) in enumerate(columns)]
        c = [operands.sums(self.total, s, seed + 207 + 10 * i, count, self.n) for i, (s, count) in enumerate(rows)]
        return np.concatenate(a), operands.paired(np.concatenate(b)), np.concatenate(c)


def _scatter(label: str, data: int, places: int, count: int, size: int, base: int) -> str:
    """PTX that stores each element of an array at its place."""
    narrow = {1: "u8", 2: "u16", 4: "b32"}[size]
    return f"""
mov.u32 %r1, %t; mov.u32 %r2, smem;
{label}: mad.wide.u32 %d1, %r1, {size}, %a{data}; mad.wide.u32 %d2, %r1, 4, %a{places};
ld.global.{narrow} %r3, [%d1]; ld.global.b32 %r4, [%d2]; add.u32 %r4, %r4, %r2;
st.shared.b{8 * size} [%r4+{base}], %r3; add.u32 %r1, %r1, 128; setp.lt.u32 %p0, %r1, {count}; @%p0 bra {label};"""


def _describe(to: int, base: int, constant: int) -> str:
    """PTX for a descriptor whose start address is that of shared memory plus `base`."""
    return (
        f"mov.u32 %r1, smem; add.u32 %r1, %r1, {base}; shr.u32 %r1, %r1, 4; and.b32 %r1, %r1, 0x3FFF;"
        f"cvt.u64.u32 %d{to}, %r1; or.b64 %d{to}, %d{to}, {constant:#x};"
    )


def _instructions(tile: Tile, registers: str, a_step: int, b_step: int) -> str:
    shape = f"m64n{tile.n}k{32 // tile.size}.{tile.total}.{tile.kinds[0]}.{tile.kinds[1]}"
    immediates = "" if tile.total == "s32" else f", {tile.signs[0]}, {tile.signs[1]}"
    if tile.size == 2:
        transposes = [int(which.startswith("mn")) for which in (tile.a, tile.b)]
        immediates += f", {transposes[1]}" if tile.a == "registers" else f", {transposes[0]}, {transposes[1]}"
    lines = []
    for step in range(tile.steps):
        left = f"{{%q{4 * step}, %q{4 * step + 1}, %q{4 * step + 2}, %q{4 * step + 3}}}"
        if tile.a != "registers":
            left = "%d12"
            lines.append(f"add.u64 %d12, %d10, {step * a_step >> 4};")
        lines.append(f"add.u64 %d13, %d11, {step * b_step >> 4};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, {left}, %d13, %p{2 if step else 1}{immediates};"
        )
    return "\n".join(lines)


def multiply(name: str, tile: Tile, seed: int) -> Kernel:
    """A kernel that computes D = A B + C, or what the tile's scales make of it."""
    a, b, c = tile.arrays(seed)
    place_b, leading, stride, b_step = tile.layout(tile.b, tile.n)
    inputs, lines, a_step = [a, b, c, place_b.astype(np.uint32)], [], 0
    lines += [f".reg .b32 %c<{tile.n // 2}>, %q<{4 * tile.steps}>;", _scatter("FILLB", 1, 3, b.size, tile.size, AT)]
    lines += [_describe(11, AT, operands.descriptor(leading, stride, int(tile.b.lstrip("kmn"))))]
    # This thread's row and column, and the addresses of its sums.
    per = 4 // c.itemsize  # columns a register
    lines += [
        "shr.u32 %r5, %t, 5; and.b32 %r6, %t, 31; shr.u32 %r7, %r6, 2; mad.lo.u32 %r8, %r5, 16, %r7;",
        "and.b32 %r9, %t, 3; shl.b32 %r10, %r9, 1;",
        f"mad.lo.u32 %r10, %r8, {tile.n}, %r10; mad.wide.u32 %d20, %r10, {c.itemsize}, %a2;",
        f"mad.wide.u32 %d21, %r10, {c.itemsize}, %a{'5' if tile.a != 'registers' else '4'};",
    ]
    if tile.a == "registers":
        row = tile.depth * tile.size
        lines += [f"mad.wide.u32 %d22, %r8, {row}, %a0; mad.wide.u32 %d22, %r9, 4, %d22;"]
        for i in range(4 * tile.steps):
            at = i // 4 * 32 + i % 2 * 8 * row + i // 2 % 2 * 16
            lines += [f"ld.global.b32 %q{i}, [%d22+{at}];"]
    else:
        place_a, leading, stride, a_step = tile.layout(tile.a, 64)
        inputs += [place_a.astype(np.uint32)]
        lines += [_scatter("FILLA", 0, 4, a.size, tile.size, 0)]
        lines += [_describe(10, 0, operands.descriptor(leading, stride, int(tile.a.lstrip("kmn"))))]
    spots = [(j * 8, half, f"%c{(4 // per) * j + (2 // per) * half}") for j in range(tile.n // 8) for half in range(2)]
    for column, half, first in spots:
        at = (column + 8 * half * tile.n) * c.itemsize
        pair = f"v2.b32 {{{first}, %c{int(first[2:]) + 1}}}" if per == 1 else f"b32 {first}"
        lines += [f"ld.global.{pair}, [%d20+{at}];"]
    registers = ", ".join(f"%c{i}" for i in range(tile.n // 2 // per))
    lines += [
        f"setp.ne.b32 %p1, {tile.scale}, 0; setp.ne.b32 %p2, 1, 0; fence.proxy.async.shared::cta; bar.sync 0;",
        "wgmma.fence.sync.aligned;",
        _instructions(tile, registers, a_step, b_step),
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
    ]
    for column, half, first in spots:
        at = (column + 8 * half * tile.n) * c.itemsize
        pair = f"v2.b32 [%d21+{at}], {{{first}, %c{int(first[2:]) + 1}}}" if per == 1 else f"b32 [%d21+{at}], {first}"
        lines += [f"st.global.{pair};"]

    def expected() -> np.ndarray:
        product = operands.numbers(a, tile.kinds[0]) @ operands.numbers(b, tile.kinds[1]).T
        found = tile.signs[0] * tile.signs[1] * product + tile.scale * operands.numbers(c, tile.total)
        found = operands.fitted(found, tile.total)
        return found[:16, :8] if tile.styles else found

    shared = {"block": 128, "shared": AT + 16384, "kind": tile.total, "expected": expected}
    return kernel(name, "wgmma", "\n".join(lines), inputs, [np.zeros_like(c)], **shared)


HALF, BRAIN, SHORT = ("f16", "f16"), ("bf16", "bf16"), ("tf32", "tf32")
TILES = {
    # How the tensor core adds up.
    "f16": Tile(HALF, a="k16", b="k16"),
    "f16_sum_f16": Tile(HALF, "f16", depth=64),
    "f16_registers": Tile(HALF, a="registers", depth=64),
    "bf16": Tile(BRAIN, depth=64),
    "bf16_registers": Tile(BRAIN, a="registers", b="k64"),
    "tf32": Tile(SHORT),
    "tf32_registers": Tile(SHORT, a="registers", b="k32", depth=8),
    "e4m3": Tile(("e4m3", "e4m3"), depth=128),
    "e4m3_one_step": Tile(("e4m3", "e4m3"), a="k32", b="k32"),
    "e5m2": Tile(("e5m2", "e5m2"), a="k64", b="k64", depth=64),
    "e4m3_e5m2_sum_f16": Tile(("e4m3", "e5m2"), "f16", a="k16", b="k16", depth=64),
    "e5m2_registers": Tile(("e5m2", "e4m3"), a="registers", b="k16"),
    "s8": Tile(("s8", "s8"), "s32", depth=64, styles=False),
    "u8_s8": Tile(("u8", "s8"), "s32", depth=32, styles=False),
    "s8_registers": Tile(("s8", "u8"), "s32", a="registers", depth=32, styles=False),
    # Scales.
    "no_sum": Tile(HALF, scale=0, styles=False),
    "minus_a": Tile(HALF, signs=(-1, 1), styles=False),
    "minus_b": Tile(BRAIN, signs=(1, -1), styles=False, scale=0),
    "minus_both": Tile(SHORT, signs=(-1, -1), styles=False),
    # Layouts, on integers.
    "k32": Tile(HALF, a="k32", b="k32", depth=16, styles=False),
    "k64": Tile(HALF, a="k64", b="k64", styles=False, n=8),
    "k128": Tile(HALF, depth=64, styles=False, n=64),
    "k_mixed": Tile(BRAIN, a="k16", b="k128", depth=64, styles=False, n=24),
    "tf32_k16": Tile(SHORT, a="k16", b="k64", depth=16, styles=False),
    "mn16": Tile(HALF, a="mn16", b="mn16", styles=False, n=32),
    "mn32": Tile(BRAIN, a="mn32", b="mn32", styles=False, n=32),
    "mn64": Tile(HALF, a="mn64", b="mn64", styles=False, n=64),
    "mn128": Tile(BRAIN, a="mn128", b="mn128", styles=False, n=64),
    "mn_and_k": Tile(HALF, a="mn128", b="k64", styles=False),
    "k_and_mn": Tile(HALF, a="k128", b="mn32", styles=False, depth=64),
    "registers_and_mn": Tile(HALF, a="registers", b="mn32", styles=False),
    "mn128_wide": Tile(HALF, a="mn128", b="mn128", styles=False, n=128, depth=16),
}
for number, (title, tile) in enumerate(TILES.items()):
    multiply(f"wgmma_{title}", tile, 5000 + 400 * number)
