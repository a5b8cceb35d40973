"""Atomics and reductions in global and shared memory ("Parallel Synchronization and Communication Instructions: atom",
"red"). Words that several threads share are only used with operations whose outcome does not depend on the order."""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.kernel import kernel, place, zeros
from tests.ptx.hardware.numbers import raw, small

N, M = 64, 32
WORDS = (raw(1200, N) >> np.uint64(13)).astype(np.uint32)
LONG = raw(1201, N)
START = (raw(1202, 32, N) >> np.uint64(13)).astype(np.uint32)
OWN = ["add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32", "or.b32", "xor.b32", "exch.b32"]
OWN += ["inc.u32", "dec.u32"]
OWN_LONG = ["add.u64", "min.u64", "min.s64", "max.u64", "max.s64", "and.b64", "or.b64", "xor.b64", "exch.b64"]

# Every lane has a word of its own, so the value before is fixed: row i of the results, next to the memory after it.
OWN_OPS = [*OWN, "cas.b32", "cas.b16"]


def _own_words(space: str) -> str:
    """Each operation on the lane's word of its row, in global memory or on its way through shared memory."""
    lines = [f"{place(0, 4)} ld.global.b32 %r1, [%d31]; {place(2, 4, to='%d2')} {place(1, 4, to='%d1')}"]
    lines += ["mov.u32 %r10, smem; mad.lo.u32 %r11, %t, 4, %r10; and.b32 %r12, %t, 1; cvt.u16.u32 %h2, %r1;"]
    for i, op in enumerate(OWN_OPS):
        at = 4 * M * i
        lines += [f"ld.global.b32 %r2, [%d2+{at}]; add.u32 %r5, %r2, %r12; cvt.u16.u32 %h1, %r5;"]
        where = f"[%d2+{at}]"
        if space == "shared":
            where = "[%r11]"
            lines += ["st.shared.b32 [%r11], %r2;"]
        operands = {"cas.b32": "%r3, W, %r5, %r1", "cas.b16": "%h3, W, %h1, %h2"}.get(op, "%r3, W, %r1").replace(
            "W", where
        )
        lines += [f"atom.{space}.{op} {operands};" + (" cvt.u32.u16 %r3, %h3;" if op == "cas.b16" else "")]
        if space == "shared":
            lines += [f"ld.shared.b32 %r2, [%r11]; st.global.b32 [%d2+{at}], %r2;"]
        lines += [f"st.global.b32 [%d1+{at}], %r3;"]
    return "\n".join(lines)


for space in ("global", "shared"):
    outputs = [zeros(len(OWN_OPS), M), START[: len(OWN_OPS), :M]]
    kernel(f"atomics_{space}", "atomics", _own_words(space), [WORDS[:M]], outputs, block=M, shared=4 * M)

lines = [f"{place(0, 8)} ld.global.b64 %d3, [%d31]; {place(2, 8, to='%d2')} {place(1, 8, to='%d1')}"]
for i, op in enumerate(OWN_LONG):
    lines.append(f"atom.relaxed.gpu.global.{op} %d4, [%d2+{8 * M * i}], %d3; st.global.b64 [%d1+{8 * M * i}], %d4;")
i = len(OWN_LONG)
lines.append(f"ld.global.b64 %d5, [%d2+{8 * M * i}]; cvt.u64.u32 %d6, %t; and.b64 %d6, %d6, 1; add.u64 %d5, %d5, %d6;")
lines.append(f"atom.acquire.gpu.global.cas.b64 %d4, [%d2+{8 * M * i}], %d5, %d3; st.global.b64 [%d1+{8 * M * i}], %d4;")
kernel(
    "atomics_long", "atomics", "\n".join(lines), [LONG[:M]],
    [zeros(i + 1, M, dtype=np.uint64), raw(1203, i + 1, M)], block=M,
)  # fmt: skip

# Shared words: 4 CTAs of 64 threads on 8 words a row. Floats are small integers, whose sums are exact in any order.
SHARED_OPS = ["add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32", "add.f32"]
CELLS = np.concatenate([START[:7, :8], small(1204, (1, 8), "f32")])
CELLS[6] = 0
lines = [f"mov.u32 %r10, %ctaid.x; mad.lo.u32 %r11, %r10, {N}, %t; {place(0, 4, '%r11')} ld.global.b32 %r1, [%d31];"]
lines += [
    "and.b32 %r12, %t, 7; mad.wide.u32 %d1, %r12, 4, %a1; and.b32 %r2, %r1, 15; cvt.rn.f32.u32 %r3, %r2;",
    "mov.b32 %r4, 0xFFFFFFFF;",
]
for i, op in enumerate(SHARED_OPS):
    operand = {"inc.u32": "%r4", "add.f32": "%r3"}.get(op, "%r1")
    kind = "red.global" if i % 2 else "red.relaxed.gpu.global"
    lines.append(f"{kind}.{op} [%d1+{32 * i}], {operand};")
kernel(
    "reductions_global",
    "atomics",
    "\n".join(lines),
    [np.resize(LONG.view(np.uint32), 4 * N)],
    [CELLS],
    block=N,
    grid=(4, 1, 1),
)

lines = [
    f"{place(0, 4)} ld.global.b32 %r1, [%d31]; mov.u32 %r10, smem; {place(1, 4, to='%d1')}",
    "and.b32 %r12, %t, 7; shl.b32 %r13, %r12, 2;",
]
lines += [
    "ld.global.b32 %r2, [%d1]; mad.lo.u32 %r11, %t, 4, %r10; st.shared.b32 [%r11], %r2; bar.sync 0;",
    "add.u32 %r14, %r10, %r13;",
]
lines += ["and.b32 %r2, %r1, 15; cvt.rn.f32.u32 %r3, %r2; mov.b32 %r4, 0xFFFFFFFF;"]
for i, op in enumerate(SHARED_OPS):
    operand = {"inc.u32": "%r4", "add.f32": "%r3"}.get(op, "%r1")
    kind = "red.shared" if i % 2 else "red.relaxed.cta.shared::cta"
    lines.append(f"{kind}.{op} [%r14+{32 * i}], {operand};")
lines += ["bar.sync 0; ld.shared.b32 %r2, [%r11]; st.global.b32 [%d1], %r2;"]
kernel("reductions_shared", "atomics", "\n".join(lines), [WORDS], [CELLS], block=N, shared=4 * N)

# Floats: each lane adds small integers to one of 8 places of each type, generic and global.
HALVES = small(1205, (N, 4), "f16").view(np.uint32)
BRAINS = small(1206, (N, 4), "bf16").view(np.uint32)
FLOATS = small(1207, (N, 4), "f32")
DOUBLES = small(1208, (N,), "f64")
body = f"""
{place(0, 8)} ld.global.v2.b32 {{%r1, %r2}}, [%d31]; {place(1, 8)} ld.global.v2.b32 {{%r3, %r4}}, [%d31];
{place(2, 16)} ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%d31]; {place(3, 8)} ld.global.b64 %d1, [%d31];
and.b32 %r9, %t, 7; mad.wide.u32 %d2, %r9, 16, %a4; mov.b32 {{%h1, %h2}}, %r1; mov.b32 {{%h3, %h4}}, %r3;
red.global.add.noftz.f16 [%d2], %h1; red.global.add.noftz.f16x2 [%d2+4], %r2; red.add.noftz.bf16 [%d2+8], %h3;
red.relaxed.gpu.global.add.noftz.bf16x2 [%d2+12], %r4; red.global.add.f64 [%d2+128], %d1;
atom.add.f32 %r10, [%d2+136], %r5;
atom.global.add.noftz.f16x2 %r11, [%d2+140], %r2;
"""
kernel("reductions_float", "atomics", body, [HALVES, BRAINS, FLOATS, DOUBLES], [zeros(2, 8, 4)], block=N)
