"""Asynchronous copies ("Data Movement and Conversion Instructions: Asynchronous copy": cp.async and its groups,
cp.async.mbarrier.arrive, cp.async.bulk, cp.async.bulk.prefetch; "Async proxy")."""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.kernel import kernel, place, zeros
from tests.ptx.hardware.numbers import raw

BYTES = (raw(1000, 4096) >> np.uint64(13)).astype(np.uint8)
WAIT = "{name}: mbarrier.try_wait.parity.shared.b64 %p7, [{at}], {parity}; @!%p7 bra {name};"
INIT = "setp.ne.u32 %p0, %t, 0; @%p0 bra READY; {inits}"
INIT += " fence.mbarrier_init.release.cluster; fence.proxy.async; READY: bar.sync 0;"

# Three groups; each 16 bytes of a lane come from another kind of copy, some of 0 to 16 bytes by lane.
ASYNC_BODY = f"""
mov.u32 %r10, smem; mad.lo.u32 %r11, %t, 16, %r10; {place(0, 16)}
rem.u32 %r1, %t, 17; and.b32 %r2, %t, 3; rem.u32 %r3, %t, 5; mul.lo.u32 %r4, %r2, 2;
cp.async.ca.shared.global [%r11], [%d31], 4; cp.async.ca.shared.global [%r11+4], [%d31+8], 4;
cp.async.ca.shared::cta.global.L2::128B [%r11+8], [%d31], 8; cp.async.commit_group;
cp.async.cg.shared.global [%r11+512], [%d31+512], 16;
cp.async.cg.shared.global.L2::64B [%r11+1024], [%d31+1024], 16, %r1;
cp.async.commit_group;
cp.async.ca.shared.global [%r11+1536], [%d31+1536], 16, %r1; cp.async.ca.shared.global [%r11+2048], [%d31+2048], 8, %r4;
cp.async.ca.shared.global [%r11+2056], [%d31+2060], 4, %r2; cp.async.ca.shared.global [%r11+2060], [%d31+2056], 4, 1;
cp.async.commit_group;
cp.async.wait_group 2; ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r11]; {place(1, 16, to="%d1")}
st.global.v4.b32 [%d1], {{%r20, %r21, %r22, %r23}};
cp.async.wait_group 1; bar.sync 0; xor.b32 %r12, %r11, 16; ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r12+512];
st.global.v4.b32 [%d1+512], {{%r20, %r21, %r22, %r23}}; ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r12+1024];
st.global.v4.b32 [%d1+1024], {{%r20, %r21, %r22, %r23}};
cp.async.wait_all; bar.sync 0; ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r12+1536];
st.global.v4.b32 [%d1+1536], {{%r20, %r21, %r22, %r23}}; ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r12+2048];
st.global.v4.b32 [%d1+2048], {{%r20, %r21, %r22, %r23}};
"""
kernel("cp_async", "cp.async", ASYNC_BODY, [BYTES], [zeros(5, 32, 4)], shared=2560)

ARRIVE_BODY = f"""
{INIT.format(inits="mbarrier.init.shared.b64 [smem], 64; mbarrier.init.shared.b64 [smem+8], 64;")}
mov.u32 %r10, smem; mad.lo.u32 %r11, %t, 16, %r10; {place(0, 16)} {place(1, 16, to="%d1")}
cp.async.ca.shared.global [%r11+64], [%d31], 16; cp.async.mbarrier.arrive.noinc.shared.b64 [smem];
cp.async.cg.shared.global [%r11+1088], [%d31+1024], 16; cp.async.mbarrier.arrive.shared.b64 [smem+8];
mbarrier.arrive.shared.b64 %d2, [smem+8];
{WAIT.format(name="FIRST", at="smem", parity=0)} xor.b32 %r12, %t, 63; mad.lo.u32 %r12, %r12, 16, %r10;
ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r12+64]; st.global.v4.b32 [%d1], {{%r20, %r21, %r22, %r23}};
{WAIT.format(name="SECOND", at="smem+8", parity=0)} ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r12+1088];
st.global.v4.b32 [%d1+1024], {{%r20, %r21, %r22, %r23}};
"""
kernel("cp_async_arrive", "cp.async", ARRIVE_BODY, [BYTES], [zeros(2, 64, 4)], block=64, shared=4096)

# Two phases of one mbarrier: two copies, then one with a cache policy over the same place.
LOAD_BULK = f"""
{INIT.format(inits="mbarrier.init.shared.b64 [smem], 1;")}
mov.u32 %r10, smem; mad.lo.u32 %r11, %t, 16, %r10; {place(1, 16, to="%d1")} @%p0 bra FIRST;
cp.async.bulk.prefetch.L2.global [%a0], 2048;
mbarrier.arrive.expect_tx.shared.b64 %d2, [smem], 528;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem+128], [%a0+16], 512, [smem];
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem+640], [%a0+1024], 16, [smem];
{WAIT.format(name="FIRST", at="smem", parity=0)}
ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r11+144]; st.global.v4.b32 [%d1], {{%r20, %r21, %r22, %r23}};
fence.proxy.async.shared::cta; bar.sync 0; @%p0 bra SECOND;
createpolicy.fractional.L2::evict_first.b64 %d3, 0f3F800000; mbarrier.arrive.expect_tx.shared.b64 %d2, [smem], 528;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
[smem+128], [%a0+2048], 528, [smem], %d3;
{WAIT.format(name="SECOND", at="smem", parity=1)}
ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r11+144]; st.global.v4.b32 [%d1+512], {{%r20, %r21, %r22, %r23}};
"""
kernel("bulk_load", "bulk copies", LOAD_BULK, [BYTES], [zeros(2, 32, 4)], shared=1024)

STORE_BULK = f"""
mov.u32 %r10, smem; mad.lo.u32 %r11, %t, 16, %r10; {place(0, 16)} ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d31];
st.shared.v4.b32 [%r11], {{%r23, %r21, %r22, %r20}}; fence.proxy.async.shared::cta; bar.sync 0;
setp.ne.u32 %p0, %t, 0; @%p0 bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%a1], [smem+256], 256; cp.async.bulk.commit_group;
cp.async.bulk.global.shared::cta.bulk_group [%a1+256], [smem], 272; cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 1; cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0;
DONE: bar.sync 0;
@%p0 bra END; st.global.b32 [%a1+1024], 1;
END: bar.sync 0;
"""
kernel("bulk_store", "bulk copies", STORE_BULK, [BYTES], [zeros(260)], block=64, shared=1024)
