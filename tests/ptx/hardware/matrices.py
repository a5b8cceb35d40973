"""8x8 matrices in shared memory and registers ("Warp Level Matrix Instructions": ldmatrix, stmatrix)."""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.kernel import kernel, place, zeros
from tests.ptx.hardware.numbers import raw

BYTES = (raw(1300, 1024) >> np.uint64(13)).astype(np.uint8)
# Row addresses are scattered, 16 bytes each: lane i takes row (i * 13 + 5) mod 32.
FILL = f"""
{place(0, 16)} mov.u32 %r10, smem; mad.lo.u32 %r11, %t, 16, %r10; ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%d31];
mad.lo.u32 %r12, %t, 13, 5; and.b32 %r12, %r12, 31; mad.lo.u32 %r13, %r12, 16, %r10;
"""
VECTORS = {1: "{%r20}", 2: "{%r20, %r21}", 4: "{%r20, %r21, %r22, %r23}"}
rows, at = (
    [FILL, "st.shared.v4.b32 [%r11], {%r1, %r2, %r3, %r4}; bar.warp.sync 0xFFFFFFFF; mad.wide.u32 %d1, %t, 4, %a1;"],
    0,
)
for trans in ("", ".trans"):
    for count, registers in VECTORS.items():
        rows.append(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers}, [%r13];")
        for i in range(count):
            rows.append(f"st.global.b32 [%d1+{128 * at}], %r{20 + i};")
            at += 1
kernel("ldmatrix", "ldmatrix and stmatrix", "\n".join(rows), [BYTES], [zeros(at, 32)], shared=1024)

rows, at = [FILL, "mad.wide.u32 %d1, %t, 16, %a1;"], 0
for trans in ("", ".trans"):
    for count in VECTORS:
        registers = "{" + ", ".join(f"%r{1 + i}" for i in range(count)) + "}"
        rows.append("st.shared.v4.b32 [%r11], {%t, %t, %t, %t}; bar.warp.sync 0xFFFFFFFF;")
        rows.append(
            f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared::cta.b16 [%r13], {registers}; bar.warp.sync 0xFFFFFFFF;"
        )
        rows.append("ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r11];")
        rows.append(f"st.global.v4.b32 [%d1+{512 * at}], {{%r20, %r21, %r22, %r23}};")
        rows.append("bar.warp.sync 0xFFFFFFFF;")
        at += 1
kernel("stmatrix", "ldmatrix and stmatrix", "\n".join(rows), [BYTES], [zeros(at, 32, 4)], shared=1024)
