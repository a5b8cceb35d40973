"""mma.sync ("Warp Level Matrix Instructions: mma"): every warp multiplies one tile of its own style of numbers.

A lies row by row, B column by column, both with k fastest, so that a register is one word of either.
"""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware import operands
from tests.ptx.hardware.kernel import Kernel, kernel
from tests.ptx.hardware.operands import STYLES


def _arrays(kinds: tuple[str, str], sum_kind: str, depth: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A [case, 16, k], B [case, 8, k], C [case, 16, 8]."""
    a = [operands.rows(kinds[0], style, seed + 20 * i, 16, depth) for i, style in enumerate(STYLES)]
    others = {"cancel": "near", "special": "near"}
    b = [operands.rows(kinds[1], others.get(s, s), seed + 20 * i + 5, 8, depth) for i, s in enumerate(STYLES)]
    b[STYLES.index("cancel")] = operands.paired(b[STYLES.index("cancel")])
    c = [operands.sums(sum_kind, style, seed + 20 * i + 9, 16, 8) for i, style in enumerate(STYLES)]
    return np.stack(a), np.stack(b), np.stack(c)


def tile(name: str, opcode: str, kinds: tuple[str, str], sum_kind: str, depth: int, seed: int) -> Kernel:
    """A kernel of six warps around `mma.sync.aligned.<opcode>`."""
    a, b, c = _arrays(kinds, sum_kind, depth, seed)
    row = depth * a.itemsize
    words = row // 4
    wide = words == 8
    size = c.itemsize
    at_a = [(0, 0), (8, 0), (0, 16), (8, 16)][: 4 if wide else 2]
    load_a = " ".join(f"ld.global.b32 %r{10 + i}, [%d1+{r * row + k}];" for i, (r, k) in enumerate(at_a))
    load_b = " ".join(f"ld.global.b32 %r{20 + i}, [%d2+{16 * i}];" for i in range(2 if wide else 1))
    if size == 4:
        load_c = f"ld.global.v2.b32 {{%r30, %r31}}, [%d3]; ld.global.v2.b32 {{%r32, %r33}}, [%d3+{64 * size}];"
        store = f"st.global.v2.b32 [%d4], {{%r40, %r41}}; st.global.v2.b32 [%d4+{64 * size}], {{%r42, %r43}};"
    else:
        load_c = f"ld.global.b32 %r30, [%d3]; ld.global.b32 %r31, [%d3+{64 * size}];"
        store = f"st.global.b32 [%d4], %r40; st.global.b32 [%d4+{64 * size}], %r41;"
    lists = {
        first: ", ".join(f"%r{first + i}" for i in range(n)) for first, n in ((10, len(at_a)), (20, 2 if wide else 1))
    }
    lists |= {first: ", ".join(f"%r{first + i}" for i in range(size)) for first in (30, 40)}
    body = f"""
shr.u32 %r1, %t, 5; and.b32 %r2, %t, 31; shr.u32 %r3, %r2, 2; and.b32 %r4, %r2, 3;
mad.lo.u32 %r5, %r1, 16, %r3; mad.wide.u32 %d1, %r5, {row}, %a0; mad.wide.u32 %d1, %r4, 4, %d1;
mad.lo.u32 %r6, %r1, 8, %r3; mad.wide.u32 %d2, %r6, {row}, %a1; mad.wide.u32 %d2, %r4, 4, %d2;
mad.lo.u32 %r7, %r5, 4, %r4; mad.wide.u32 %d3, %r7, {2 * size}, %a2; mad.wide.u32 %d4, %r7, {2 * size}, %a3;
{load_a} {load_b} {load_c}
mma.sync.aligned.{opcode} {{{lists[40]}}}, {{{lists[10]}}}, {{{lists[20]}}}, {{{lists[30]}}};
{store}
"""
    exact = len(STYLES) if sum_kind == "s32" else 1

    def expected() -> np.ndarray:
        left, right = operands.numbers(a[:exact], kinds[0]), operands.numbers(b[:exact], kinds[1])
        found = left @ right.transpose(0, 2, 1) + operands.numbers(c[:exact], sum_kind)
        return operands.fitted(found, sum_kind)

    return kernel(
        name, "mma.sync", body, [a, b, c], [np.zeros_like(c)], block=32 * len(STYLES), kind=sum_kind, expected=expected
    )  # fmt: skip


HALF, BRAIN, SHORT, QUARTER = ("f16",) * 2, ("bf16",) * 2, ("tf32",) * 2, ("e4m3",) * 2
tile("mma_f16", "m16n8k16.row.col.f32.f16.f16.f32", HALF, "f32", 16, 2000)
tile("mma_f16_k8", "m16n8k8.row.col.f32.f16.f16.f32", HALF, "f32", 8, 2200)
tile("mma_f16_sum_f16", "m16n8k16.row.col.f16.f16.f16.f16", HALF, "f16", 16, 2400)
tile("mma_f16_k8_sum_f16", "m16n8k8.row.col.f16.f16.f16.f16", HALF, "f16", 8, 2600)
tile("mma_bf16", "m16n8k16.row.col.f32.bf16.bf16.f32", BRAIN, "f32", 16, 2800)
tile("mma_bf16_k8", "m16n8k8.row.col.f32.bf16.bf16.f32", BRAIN, "f32", 8, 3000)
tile("mma_tf32", "m16n8k8.row.col.f32.tf32.tf32.f32", SHORT, "f32", 8, 3200)
tile("mma_tf32_k4", "m16n8k4.row.col.f32.tf32.tf32.f32", SHORT, "f32", 4, 3400)
tile("mma_e4m3", "m16n8k32.row.col.f32.e4m3.e4m3.f32", QUARTER, "f32", 32, 3600)
tile("mma_e5m2_e4m3", "m16n8k32.row.col.f32.e5m2.e4m3.f32", ("e5m2", "e4m3"), "f32", 32, 3800)
tile("mma_e5m2", "m16n8k32.row.col.f32.e5m2.e5m2.f32", ("e5m2", "e5m2"), "f32", 32, 4000)
tile("mma_s8", "m16n8k32.row.col.s32.s8.s8.s32", ("s8", "s8"), "s32", 32, 4200)
tile("mma_u8_s8_k16", "m16n8k16.row.col.s32.u8.s8.s32", ("u8", "s8"), "s32", 16, 4400)
