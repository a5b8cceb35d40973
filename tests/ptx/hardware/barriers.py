"""Barriers of a CTA and mbarrier objects ("Parallel Synchronization and Communication Instructions": bar, barrier,
bar.warp.sync; mbarrier.init and the sections after it)."""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.kernel import kernel, place, zeros
from tests.ptx.hardware.numbers import raw

WORDS = (raw(900, 128) % np.uint64(1000)).astype(np.uint32)
LOAD = f"{place(0, 4)} ld.global.b32 %r1, [%d31];"

BAR_BODY = f"""
{LOAD}
mov.u32 %r10, smem; mad.lo.u32 %r11, %t, 4, %r10; st.shared.b32 [%r11], %r1; barrier.cta.sync.aligned 0;
xor.b32 %r12, %t, 96; mad.lo.u32 %r12, %r12, 4, %r10; ld.shared.b32 %r2, [%r12];
setp.gt.u32 %p0, %r1, 500; bar.red.popc.u32 %r3, 0, %p0; bar.red.popc.u32 %r4, 1, 128, !%p0;
setp.lt.u32 %p1, %r1, 1000; bar.red.and.pred %p2, 2, %p1; bar.red.or.pred %p3, 3, 128, !%p1;
bar.red.and.pred %p4, 4, %p0;
barrier.cta.red.or.aligned.pred %p5, 0, %p0;
selp.b32 %r5, 1, 0, %p2; @%p3 add.u32 %r5, %r5, 2; @%p4 add.u32 %r5, %r5, 4; @%p5 add.u32 %r5, %r5, 8;
barrier.sync 5, 128; barrier.cta.sync 6; membar.cta; bar.cta.sync 0;
{place(1, 16)} st.global.v4.b32 [%d31], {{%r2, %r3, %r4, %r5}};
"""
kernel("bar_sync_and_red", "barriers", BAR_BODY, [WORDS], [zeros(128, 4)], block=128, shared=512)

# Two warps produce, two consume: 1 says full, 2 says empty; 4 rounds through one buffer.
NAMED_BODY = f"""
{LOAD} mov.b32 %r20, 0; mov.b32 %r21, 0; and.b32 %r2, %t, 63; mov.u32 %r10, smem; mad.lo.u32 %r11, %r2, 4, %r10;
xor.b32 %r3, %r2, 33; mad.lo.u32 %r12, %r3, 4, %r10; setp.ge.u32 %p0, %t, 64; @%p0 bra CONSUME;
PRODUCE: bar.sync 2, 128; st.shared.b32 [%r11], %r1; membar.cta; bar.arrive 1, 128; mad.lo.u32 %r1, %r1, 3, 1;
add.u32 %r20, %r20, 1; setp.lt.u32 %p1, %r20, 4; @%p1 bra PRODUCE; bra.uni END;
CONSUME: bar.arrive 2, 128; bar.sync 1, 128; ld.shared.b32 %r4, [%r12]; xor.b32 %r21, %r21, %r4;
add.u32 %r21, %r21, %r20;
add.u32 %r20, %r20, 1; setp.lt.u32 %p1, %r20, 4; @%p1 bra CONSUME;
END: {place(1, 4)} st.global.b32 [%d31], %r21;
"""
kernel("named_barriers", "barriers", NAMED_BODY, [WORDS], [zeros(128)], block=128, shared=256)

WARP_BODY = f"""
{LOAD} mov.u32 %r10, smem; mad.lo.u32 %r11, %t, 4, %r10; st.shared.b32 [%r11], %r1; bar.warp.sync 0xFFFFFFFF;
xor.b32 %r12, %r11, 124; ld.shared.b32 %r2, [%r12]; setp.lt.u32 %p0, %t, 8; @!%p0 bra REST;
bar.warp.sync 0xFF; st.shared.b32 [%r11+128], %r2; bar.warp.sync 0xFF; xor.b32 %r12, %r11, 4;
ld.shared.b32 %r2, [%r12+128];
REST: bar.warp.sync 0xFFFFFFFF; {place(1, 4)} st.global.b32 [%d31], %r2;
"""
kernel("bar_warp_sync", "barriers", WARP_BODY, [WORDS], [zeros(32)], shared=512)

# One lane walks an mbarrier through its phases and notes what each test says.
NOTES: list[str] = []


def note(code: str) -> str:
    """PTX that leaves a value in %r1, and stores it in the next place."""
    NOTES.append(code)
    return f"{code} st.global.b32 [%a0+{4 * (len(NOTES) - 1)}], %r1;"


def test(how: str) -> str:
    return note(f"mbarrier.{how}; selp.b32 %r1, 1, 0, %p1;")


PHASES = f"""
setp.ne.u32 %p0, %t, 0; @%p0 bra END;
mbarrier.init.shared.b64 [smem], 3;
{test("test_wait.parity.shared.b64 %p1, [smem], 0")} {test("test_wait.parity.shared.b64 %p1, [smem], 1")}
mbarrier.arrive.shared.b64 %d1, [smem];
mbarrier.arrive.shared.b64 %d2, [smem], 1;
{test("test_wait.shared.b64 %p1, [smem], %d1")}
mbarrier.arrive.release.cta.shared::cta.b64 %d3, [smem];
{test("test_wait.shared.b64 %p1, [smem], %d1")} {test("try_wait.shared.b64 %p1, [smem], %d3")}
{test("try_wait.parity.shared.b64 %p1, [smem], 0")} {test("test_wait.parity.shared.b64 %p1, [smem], 1")}
mbarrier.arrive.expect_tx.shared.b64 %d4, [smem], 64;
mbarrier.arrive.shared.b64 %d5, [smem], 2; {test("test_wait.shared.b64 %p1, [smem], %d4")}
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [smem], 32; mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [smem], 80;
{test("test_wait.parity.shared.b64 %p1, [smem], 1")}
mbarrier.complete_tx.shared::cta.b64 [smem], 16; {test("test_wait.parity.shared.b64 %p1, [smem], 1")}
{test("test_wait.acquire.cta.shared::cta.b64 %p1, [smem], %d5")}
mbarrier.arrive_drop.shared.b64 %d6, [smem];
mbarrier.arrive.shared.b64 %d7, [smem], 2; {test("test_wait.shared.b64 %p1, [smem], %d6")}
mbarrier.arrive.shared.b64 %d8, [smem];
mbarrier.arrive.shared.b64 %d9, [smem]; {test("test_wait.shared.b64 %p1, [smem], %d8")}
mbarrier.try_wait.parity.shared.b64 %p1, [smem], 1, 1000; selp.b32 %r1, 1, 0, %p1; {note("")}
mbarrier.inval.shared.b64 [smem]; mbarrier.init.shared.b64 [smem], 1;
{test("test_wait.parity.shared.b64 %p1, [smem], 0")}
mov.u64 %d11, smem; mbarrier.arrive.shared.b64 %d13, [%d11]; {test("test_wait.shared.b64 %p1, [%d11], %d13")}
END: mov.b32 %r2, 0;
"""
kernel("mbarrier_phases", "mbarrier", PHASES, [], [zeros(len(NOTES))], shared=64)

# Warp 0 fills one of two buffers, the others read it: full[2] at 0, empty[2] at 16, data at 64; 6 rounds.
RING = f"""
{LOAD} mov.u32 %r10, smem; setp.ne.u32 %p0, %t, 0; @%p0 bra READY;
mbarrier.init.shared::cta.b64 [smem], 32; mbarrier.init.shared::cta.b64 [smem+8], 32;
mbarrier.init.shared::cta.b64 [smem+16], 96; mbarrier.init.shared::cta.b64 [smem+24], 96;
fence.mbarrier_init.release.cluster;
READY: bar.sync 0; and.b32 %r2, %t, 31; mov.b32 %r20, 0; mov.b32 %r21, 0; setp.ge.u32 %p1, %t, 32;
ROUND: and.b32 %r3, %r20, 1; mad.lo.u32 %r4, %r3, 8, %r10; mad.lo.u32 %r5, %r3, 128, %r10; shr.u32 %r6, %r20, 1;
and.b32 %r6, %r6, 1; xor.b32 %r7, %r6, 1; mad.lo.u32 %r5, %r2, 4, %r5; @%p1 bra FULL;
EMPTY: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r4+16], %r7; @!%p2 bra EMPTY;
mad.lo.u32 %r1, %r1, 5, %r20; st.shared.b32 [%r5+64], %r1; mbarrier.arrive.release.cta.shared::cta.b64 _, [%r4];
bra.uni NEXT;
FULL: mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r4], %r6; @!%p2 bra FULL;
ld.shared.b32 %r8, [%r5+64]; add.u32 %r21, %r21, %r8; mul.lo.u32 %r21, %r21, 3;
mbarrier.arrive.shared::cta.b64 %d1, [%r4+16];
NEXT: add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, 6; @%p3 bra ROUND;
{place(1, 4)} st.global.b32 [%d31], %r21;
"""
kernel("mbarrier_ring", "mbarrier", RING, [WORDS], [zeros(128)], block=128, shared=512)
