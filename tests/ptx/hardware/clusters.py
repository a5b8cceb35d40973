"""Clusters of CTAs: distributed shared memory, barriers, remote mbarriers, asynchronous stores and copies from one
CTA to another ("Cluster of Cooperative Thread Arrays"; mapa, barrier.cluster, st.async,
cp.async.bulk)."""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.kernel import kernel, place, zeros
from tests.ptx.hardware.numbers import raw

WORDS = (raw(1100, 512) >> np.uint64(13)).astype(np.uint32)
PAIR = {"cluster": (2, 1, 1), "shared": 1024}
SYNC = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
WHERE = f"""
mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x;
mad.lo.u32 %r5, %r3, %r4, %t;
{place(0, 4, "%r5")} ld.global.b32 %r6, [%d31]; {place(1, 16, "%r5", "%d1")}
mov.u32 %r10, smem; mad.lo.u32 %r11, %t, 4, %r10; mapa.shared::cluster.u32 %r12, %r10, %r2;
mapa.shared::cluster.u32 %r13, %r11, %r2;
"""
WAIT = "{name}: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p7, [{at}], {parity}; @!%p7 bra {name};"
INIT = (
    "setp.ne.u32 %p0, %t, 0; @%p0 bra READY; {inits} fence.mbarrier_init.release.cluster; fence.proxy.async; READY: "
    + SYNC
)

DISTRIBUTED = f"""{WHERE}
st.shared.b32 [%r11], %r6; {SYNC}
ld.shared::cluster.b32 %r20, [%r13]; xor.b32 %r14, %r13, 60; add.u32 %r21, %r20, 7;
st.shared::cluster.b32 [%r14+256], %r21;
mapa.shared::cluster.u32 %r15, %r11, %r1; ld.shared::cluster.b32 %r22, [%r15];
cvt.u64.u32 %d2, %r13; cvta.shared::cluster.u64 %d3, %d2; ld.b32 %r23, [%d3];
cvt.u64.u32 %d5, %r12; cvta.shared::cluster.u64 %d6, %d5; ld.v2.b32 {{%r25, %r26}}, [%d6];
cvt.u64.u32 %d8, %r11; mapa.shared::cluster.u64 %d7, %d8, %r2; ld.shared::cluster.b32 %r24, [%d7];
{SYNC}
ld.shared.b32 %r29, [%r11+256]; add.u32 %r23, %r23, %r25; add.u32 %r22, %r22, %r26;
st.global.v4.b32 [%d1], {{%r29, %r22, %r23, %r24}}; barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.aligned;
"""
kernel("distributed_shared_memory", "clusters", DISTRIBUTED, [WORDS], [zeros(128, 4)], grid=(4, 1, 1), **PAIR)

REGISTERS = [
    f"%{name}.{axis}" for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid") for axis in "xyz"
]
REGISTERS += ["%cluster_ctarank", "%cluster_nctarank", "%ctaid.x", "%ctaid.y"]
body = """
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mad.lo.u32 %r3, %r2, 4, %r1; mad.wide.u32 %d1, %r3, 4, %a0;
setp.ne.u32 %p0, %t, 0; @%p0 exit;
""" + "\n".join(f"mov.u32 %r9, {name}; st.global.b32 [%d1+{64 * i}], %r9;" for i, name in enumerate(REGISTERS))
kernel(
    "cluster_registers", "clusters", body, [], [zeros(len(REGISTERS), 16)],
    grid=(4, 4, 1), cluster=(2, 2, 1),
)  # fmt: skip

# Every lane stores to the other CTA, 4, 8 and 16 bytes and 8 in one word, all counted by the other's mbarrier.
STORE_ASYNC = f"""{WHERE} {INIT.format(inits="mbarrier.init.shared.b64 [smem], 1;")}
mad.lo.u32 %r14, %t, 12, %r13; @!%p0 mbarrier.arrive.expect_tx.shared.b64 %d2, [smem], 1152;
add.u32 %r7, %r6, 1; add.u32 %r8, %r6, 2; add.u32 %r9, %r6, 3; cvt.u64.u32 %d3, %r6; mad.lo.u32 %r15, %t, 4, %r13;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r13+64], %r6, [%r12];
st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r15+192], {{%r7, %r8}}, [%r12];
st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r14+512], {{%r9, %r6, %r7, %r8}}, [%r12];
st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%r15+1024], %d3, [%r12];
{WAIT.format(name="FIRST", at="smem", parity=0)}
mad.lo.u32 %r16, %t, 4, %r11; mad.lo.u32 %r17, %t, 12, %r11; ld.shared.b32 %r20, [%r11+64];
ld.shared.v2.b32 {{%r21, %r22}}, [%r16+192];
ld.shared.v4.b32 {{%r24, %r25, %r26, %r27}}, [%r17+512]; ld.shared.b64 %d4, [%r16+1024]; cvt.u32.u64 %r23, %d4;
st.global.v4.b32 [%d1], {{%r20, %r21, %r22, %r23}}; st.global.v4.b32 [%d1+1024], {{%r24, %r25, %r26, %r27}}; {SYNC}
"""
kernel(
    "store_async", "clusters", STORE_ASYNC, [WORDS], [zeros(2, 64, 4)],
    grid=(2, 1, 1), cluster=(2, 1, 1), shared=2048,
)  # fmt: skip

# Each CTA fills the other's memory and arrives at the other's mbarrier, in two rounds and then in pieces. A round has
# its mbarrier: one could complete again before a slow CTA has seen its first phase.
ROUNDS = " ".join(f"mbarrier.init.shared.b64 [smem+{at}], {count};" for at, count in ((0, 32), (8, 2), (16, 32)))
REMOTE = f"""{WHERE} {INIT.format(inits=ROUNDS)}
st.shared::cluster.b32 [%r13+64], %r6; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12];
{WAIT.format(name="FIRST", at="smem", parity=0)} xor.b32 %r14, %t, 31; mad.lo.u32 %r14, %r14, 4, %r10;
ld.shared.b32 %r20, [%r14+64];
add.u32 %r21, %r20, %r6; st.shared::cluster.b32 [%r13+192], %r21;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12+16], 1;
{WAIT.format(name="SECOND", at="smem+16", parity=0)} ld.shared.b32 %r22, [%r14+192];
setp.eq.u32 %p1, %t, 0; setp.eq.u32 %p2, %t, 9;
@%p1 mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r12+8], 16;
fence.acq_rel.cluster;
@%p2 mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r12+8], 8;
@%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12+8];
@%p2 mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r12+8], 24;
{WAIT.format(name="THIRD", at="smem+8", parity=0)}
st.global.v4.b32 [%d1], {{%r20, %r21, %r22, %r6}}; {SYNC}
"""
kernel("remote_mbarrier", "clusters", REMOTE, [WORDS], [zeros(64, 4)], grid=(2, 1, 1), **PAIR)

# Bulk copies to the other CTA, from shared and from global memory.
TWO = " ".join(f"mbarrier.init.shared.b64 [smem+{at}], 1;" for at in (0, 16))
BULK = f"""{WHERE} st.shared.b32 [%r11+128], %r6; fence.proxy.async.shared::cta;
{INIT.format(inits=TWO)}
@%p0 bra FIRST; mbarrier.arrive.expect_tx.shared.b64 %d2, [smem], 128;
mbarrier.arrive.expect_tx.shared.b64 %d2, [smem+16], 128;
add.u32 %r14, %r12, 256; add.u32 %r15, %r12, 16; mad.wide.u32 %d3, %r1, 128, %a0;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r14], [smem+128], 128, [%r12];
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r12+512], [%d3+1024], 128, [%r15];
{WAIT.format(name="FIRST", at="smem", parity=0)} ld.shared.b32 %r20, [%r11+256];
{WAIT.format(name="SECOND", at="smem+16", parity=0)} ld.shared.b32 %r21, [%r11+512];
st.global.v4.b32 [%d1], {{%r20, %r21, %r6, %r1}}; {SYNC}
"""
kernel("cluster_bulk_copy", "clusters", BULK, [WORDS], [zeros(64, 4)], grid=(2, 1, 1), **PAIR)

# All lanes of both CTAs work on words of the first one, and on one of the other CTA; no old value is kept.
ATOMIC = f"""{WHERE} mov.b32 %r20, 0; st.shared.b32 [%r11], %r20; {SYNC}
and.b32 %r7, %r6, 255; mapa.shared::cluster.u32 %r14, %r10, 0; red.relaxed.cluster.shared::cluster.add.u32 [%r14], %r7;
atom.relaxed.cluster.shared::cluster.max.u32 %r21, [%r14+4], %r7;
atom.acq_rel.cluster.shared::cluster.or.b32 %r22, [%r14+8], %r7;
red.release.cluster.shared::cluster.xor.b32 [%r12+12], %r7;
barrier.cluster.arrive; barrier.cluster.wait;
ld.shared::cluster.b32 %r23, [%r14]; ld.shared::cluster.b32 %r24, [%r14+4]; ld.shared::cluster.b32 %r25, [%r14+8];
ld.shared.b32 %r26, [%r11];
st.global.v4.b32 [%d1], {{%r23, %r24, %r25, %r26}}; {SYNC}
"""
kernel("cluster_atomics", "clusters", ATOMIC, [WORDS], [zeros(64, 4)], grid=(2, 1, 1), **PAIR)
