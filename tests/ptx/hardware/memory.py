"""Loads and stores of every width, cache hints, and the state spaces ("Data Movement and Conversion Instructions": ld,
ld.global.nc, st, prefetch, createpolicy, cvta; "Memory Consistency Model")."""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.kernel import kernel, place, zeros
from tests.ptx.hardware.numbers import raw

BYTES = (raw(700, 1024) >> np.uint64(13)).astype(np.uint8)
WORDS = (raw(701, 256) >> np.uint64(13)).astype(np.uint32)
LOADS = [  # (type, load, bytes between lanes); narrow loads into wider registers extend the sign or zeros
    ("b32", "ld.global.u8 %r1", 1), ("b32", "ld.global.s8 %r1", 1), ("b32", "ld.global.b8 %r1", 3),
    ("b32", "ld.global.u16 %r1", 2), ("b32", "ld.global.s16 %r1", 2), ("b32", "ld.global.b16 %r1", 6),
    ("b16", "ld.global.s8 %h1", 5), ("b64", "ld.global.s8 %d1", 1), ("b64", "ld.global.u16 %d1", 4),
    ("b64", "ld.global.s32 %d1", 4), ("b64", "ld.global.u32 %d1", 4), ("b64", "ld.global.b64 %d1", 8),
    ("b32", "ld.global.f32 %r1", 12), ("b64", "ld.global.f64 %d1", 8),
    ("v2.b32", "ld.global.v2.u8 {%r1, %r2}", 2), ("v2.b32", "ld.global.v2.s8 {%r1, %r2}", 2),
    ("v4.b32", "ld.global.v4.u8 {%r1, %r2, %r3, %r4}", 4), ("v4.b32", "ld.global.v4.s16 {%r1, %r2, %r3, %r4}", 8),
    ("v2.b16", "ld.global.v2.b16 {%h1, %h2}", 4), ("v2.b32", "ld.global.v2.b32 {%r1, %r2}", 8),
    ("v4.b32", "ld.global.v4.b32 {%r1, %r2, %r3, %r4}", 16), ("v2.b64", "ld.global.v2.b64 {%d1, %d2}", 16),
]  # fmt: skip
REGISTERS = {"b16": "%h1", "b32": "%r1", "b64": "%d1", "v2.b16": "{%h1, %h2}", "v2.b32": "{%r1, %r2}"}
REGISTERS |= {"v4.b32": "{%r1, %r2, %r3, %r4}", "v2.b64": "{%d1, %d2}"}
load_rows = [
    f"{place(0, stride)} {load}, [%d31]; {place(1, 16)} st.global.{kind} [%d31+{512 * row}], {REGISTERS[kind]};"
    for row, (kind, load, stride) in enumerate(LOADS)
]
kernel("load_widths", "loads and stores", "\n".join(load_rows), [BYTES], [zeros(len(LOADS), 32, 4)])

STORES = ["b8 [%d31], %r1", "u16 [%d31+2], %r2", "b32 [%d31+4], %r3", "b8 [%d31+1], %d1", "s16 [%d31+8], %d1"]
STORES += ["v2.u8 [%d31+10], {%r1, %r2}", "v4.b8 [%d31+12], {%r1, %r2, %r3, %r4}", "v2.b16 [%d31+16], {%h1, %h2}"]
STORES += ["v4.u16 [%d31+24], {%r1, %r2, %r3, %r4}", "b64 [%d31+32], %d1", "v2.u32 [%d31+40], {%r3, %r4}"]
STORES += ["v2.f64 [%d31+48], {%d1, %d2}", "v4.f32 [%d31+64], {%r1, %r2, %r3, %r4}"]
STORE_BODY = f"""{place(0, 16)}
ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%d31]; ld.global.v2.b64 {{%d1, %d2}}, [%d31];
mov.b32 {{%h1, %h2}}, %r2;
{place(1, 80)}
""" + "\n".join(f"st.global.{text};" for text in STORES)
kernel("store_widths", "loads and stores", STORE_BODY, [BYTES], [np.full((32, 80), 0xEE, np.uint8)])

HINTED = ["ld.global.nc.b32", "ld.global.ca.b32", "ld.global.cg.b32", "ld.global.cs.b32", "ld.global.lu.b32"]
HINTED += [
    "ld.global.cv.b32",
    "ld.global.nc.L1::no_allocate.b32",
    "ld.global.L1::evict_first.b32",
    "ld.volatile.global.b32",
]
HINTED += ["ld.global.L1::evict_last.b32", "ld.global.L1::no_allocate.L2::128B.b32", "ld.global.nc.L2::256B.b32"]
HINTED += [
    "ld.relaxed.gpu.global.b32",
    "ld.relaxed.cta.global.b32",
    "ld.acquire.gpu.global.b32",
    "ld.acquire.sys.global.b32",
]
HINTED += ["ld.weak.global.b32", "ld.relaxed.gpu.global.L1::no_allocate.b32", "ld.global.L2::64B.b32"]
hint_rows = [
    f"{one} %r1, [%d31+{4 * i}]; add.u32 %r2, %r2, %r1; xor.b32 %r2, %r2, {i};" for i, one in enumerate(HINTED)
]
HINT_BODY = f"""{place(0, 4)}
prefetch.global.L1 [%d31]; prefetch.global.L2 [%d31+128]; prefetch.global.L2::evict_last [%d31+256];
prefetchu.L1 [%d31]; applypriority.global.L2::evict_normal [%a0], 128;
createpolicy.fractional.L2::evict_last.b64 %d1, 0f3F000000;
createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %d2;
createpolicy.range.global.L2::evict_last.L2::evict_first.b64 %d3, [%a0], 256, 512;
mov.b32 %r2, 0;
{chr(10).join(hint_rows)}
ld.global.L2::cache_hint.b32 %r3, [%d31], %d1;
ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {{%r4, %r5, %r6, %r7}}, [%a0+64], %d2;
ld.global.L1::evict_first.L2::cache_hint.b32 %r8, [%d31+8], %d3;
add.u32 %r3, %r3, %r4; add.u32 %r3, %r3, %r7; xor.b32 %r3, %r3, %r8;
{place(1, 4)}
st.global.wb.b32 [%d31], %r2; st.global.cg.b32 [%d31+128], %r2; st.global.cs.b32 [%d31+256], %r3;
st.global.wt.b32 [%d31+384], %r3; st.global.L1::no_allocate.b32 [%d31+512], %r2;
st.global.L2::cache_hint.b32 [%d31+640], %r3, %d2; st.volatile.global.b32 [%d31+768], %r2;
st.relaxed.gpu.global.b32 [%d31+896], %r3; st.release.cta.global.b32 [%d31+1024], %r2;
"""
kernel("cache_hints", "cache hints", HINT_BODY, [WORDS], [zeros(9, 32)])

# Four warps transpose through static and dynamic shared memory; bytes are read back with both signs.
SHARED_BODY = f"""
{place(0, 16)}
ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%d31];
mov.u32 %r10, smem; mov.u32 %r11, still; shl.b32 %r12, %t, 4; add.u32 %r13, %r10, %r12;
st.shared.v4.b32 [%r13], {{%r1, %r2, %r3, %r4}};
shl.b32 %r14, %t, 1; add.u32 %r15, %r11, %r14; st.shared.b16 [%r15], %r1; st.shared.b8 [%r15+256], %r2;
st.shared.s8 [%r15+257], %r3;
bar.sync 0;
xor.b32 %r16, %t, 127; shl.b32 %r17, %r16, 2; add.u32 %r18, %r10, %r17; ld.shared.b32 %r20, [%r18+512];
xor.b32 %r19, %t, 85; shl.b32 %r17, %r19, 1; add.u32 %r18, %r11, %r17; ld.shared.s16 %r21, [%r18];
ld.shared.v2.s8 {{%r22, %r23}}, [%r18+256]; ld.volatile.shared.u8 %r24, [still+300];
{place(1, 20)}
st.global.b32 [%d31], %r20; st.global.b32 [%d31+4], %r21; st.global.b32 [%d31+8], %r22; st.global.b32 [%d31+12], %r23;
st.global.b32 [%d31+16], %r24;
"""
kernel(
    "shared_memory", "shared memory", SHARED_BODY, [np.tile(WORDS, 2)], [zeros(128, 5)],
    block=128, shared=2048, top=".shared .align 16 .b8 still[512];",
)  # fmt: skip

GENERIC_BODY = f"""
cvta.to.global.u64 %d1, %a0; cvta.global.u64 %d2, %d1; mov.u64 %d5, smem; cvta.shared.u64 %d6, %d5;
mad.wide.u32 %d9, %t, 4, %d2; ld.b32 %r5, [%d9];
mad.wide.u32 %d12, %t, 4, %d6; st.b32 [%d12], %r5; cvta.to.shared.u64 %d13, %d12; cvt.u32.u64 %r11, %d13;
bar.warp.sync 0xFFFFFFFF; xor.b32 %r12, %r11, 4; ld.shared.b32 %r13, [%r12]; ld.shared.b32 %r24, [%d13];
ld.param.b32 %r19, [n]; ld.param.v2.b32 {{%r20, %r21}}, [pair]; ld.param.s8 %r22, [pair+7];
{place(1, 32)}
st.global.v4.b32 [%d31], {{%r5, %r13, %r24, %r19}}; st.global.v2.b32 [%d31+16], {{%r20, %r21}};
st.b32 [%d31+24], %r22;
"""
kernel(
    "generic_addresses", "state spaces", GENERIC_BODY, [WORDS], [zeros(32, 8)], shared=256,
    scalars={".u32 n": (77).to_bytes(4, "little"), ".align 8 .b8 pair[8]": bytes([1, 2, 3, 4, 5, 6, 7, 200])},
)  # fmt: skip

# One warp writes data and releases a flag, the other acquires it and reads; then in global memory the CTA that counts
# last adds up what the others have written.
FLAG_BODY = f"""
shr.u32 %r1, %t, 5; and.b32 %r2, %t, 31; mov.u32 %r10, smem; mad.lo.u32 %r3, %r2, 4, %r10;
setp.eq.u32 %p0, %t, 0; @%p0 st.shared.b32 [smem+256], 0; bar.sync 0;
setp.ne.u32 %p1, %r1, 0; @%p1 bra READ;
{place(0, 4)}
ld.global.b32 %r4, [%d31]; st.shared.b32 [%r3], %r4; bar.warp.sync 0xFFFFFFFF;
@%p0 st.release.cta.shared.b32 [smem+256], 1; bra.uni END;
READ: ld.acquire.cta.shared.b32 %r5, [smem+256]; setp.eq.u32 %p2, %r5, 0; @%p2 bra READ;
xor.b32 %r6, %r3, 4; ld.shared.b32 %r7, [%r6]; mad.wide.u32 %d1, %r2, 4, %a1; st.global.b32 [%d1], %r7;
END: bar.sync 0;
"""
kernel("acquire_release", "memory ordering", FLAG_BODY, [WORDS], [zeros(32)], block=64, shared=512)
LAST_BODY = f"""
mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, 32, %t; {place(0, 4, "%r2")} ld.global.b32 %r3, [%d31];
{place(1, 4, "%r2", "%d30")} st.global.b32 [%d30], %r3; fence.acq_rel.gpu; bar.sync 0;
mov.b32 %r4, 0; setp.eq.u32 %p0, %t, 0; @%p0 atom.acq_rel.gpu.global.add.u32 %r4, [%a2], 1;
bar.warp.sync 0xFFFFFFFF; shfl.sync.idx.b32 %r4, %r4, 0, 31, 0xFFFFFFFF; setp.ne.u32 %p1, %r4, 3; @%p1 bra END;
fence.acq_rel.gpu; {place(1, 4)}
ld.relaxed.gpu.global.b32 %r5, [%d31]; ld.relaxed.gpu.global.b32 %r6, [%d31+128];
ld.relaxed.gpu.global.b32 %r7, [%d31+256];
ld.relaxed.gpu.global.b32 %r8, [%d31+384];
add.u32 %r5, %r5, %r6; add.u32 %r7, %r7, %r8; add.u32 %r5, %r5, %r7; {place(2, 4)} st.global.b32 [%d31+4], %r5;
fence.sc.sys; membar.gl; membar.cta; fence.acq_rel.cluster;
END: {place(0, 4)}
"""
kernel("last_cta", "memory ordering", LAST_BODY, [WORDS], [zeros(128), zeros(33)], grid=(4, 1, 1))
