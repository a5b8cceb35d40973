"""What lanes of a warp do together, and special registers ("Parallel Synchronization and Communication Instructions":
vote.sync, match.sync, activemask, redux.sync, elect.sync; "shfl.sync"; "Special Registers")."""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.kernel import kernel, lanewise, place, zeros
from tests.ptx.hardware.numbers import ints, raw

WORDS = ints(800, 32)
AMOUNTS = (raw(801, 32) % np.uint64(32)).astype(np.uint32)
SHUFFLES = [
    ("idx", 31),
    ("up", 0),
    ("down", 31),
    ("bfly", 31),
    ("idx", 0x181F),
    ("up", 0x1800),
    ("down", 0x1C1F),
    ("bfly", 0x101F),
]
rows = [
    f"shfl.sync.{mode}.b32 %r4|%p0, %r1, {amount}, {clamp}, 0xFFFFFFFF; selp.b32 %r5, 1, 0, %p0;"
    "mad.lo.u32 %r0, %r4, 2, %r5;"
    for mode, clamp in SHUFFLES
    for amount in ("%r2", "1", "5", "16")
]
lanewise("shuffle", "shfl", rows, [WORDS, AMOUNTS])
HALVES = """
setp.lt.u32 %p1, %t, 12; @%p1 bra LOW;
shfl.sync.down.b32 %r4, %r1, 3, 31, 0xFFFFF000; bra.uni BOTH;
LOW: and.b32 %r2, %r2, 3; shfl.sync.bfly.b32 %r4, %r1, %r2, 31, 0x00000FFF;
BOTH: bar.warp.sync 0xFFFFFFFF; mov.b32 %r0, %r4;
"""
lanewise("shuffle_of_some", "shfl", [HALVES], [WORDS, AMOUNTS])

VALUES = (raw(802, 32) % np.uint64(5)).astype(np.uint32)
VOTES = [
    "setp.gt.u32 %p1, %r1, 2; vote.sync.ballot.b32 %r0, %p1, 0xFFFFFFFF;",
    "setp.gt.u32 %p1, %r1, 2; vote.sync.ballot.b32 %r0, !%p1, 0xFFFFFFFF;",
    *(
        f"setp.{test} %p1, %r1, {value}; vote.sync.{op}.pred %p0, %p1, 0xFFFFFFFF; selp.b32 %r0, 1, 0, %p0;"
        for op in ("any", "all", "uni")
        for test, value in (("gt.u32", 3), ("lt.u32", 5), ("gt.u32", 5))
    ),
    "match.any.sync.b32 %r0, %r1, 0xFFFFFFFF;",
    "match.any.sync.b64 %r0, %d2, 0xFFFFFFFF;",
    "match.all.sync.b32 %r4|%p0, %r1, 0xFFFFFFFF; selp.b32 %r0, %r4, 9, %p0;",
    "match.all.sync.b32 %r4|%p0, 7, 0xFFFFFFFF; selp.b32 %r5, 1, 0, %p0; add.u32 %r0, %r4, %r5;",
    "match.all.sync.b64 %r4|%p0, %d2, 0xFFFFFFFF; mov.b32 %r0, %r4;",
    "activemask.b32 %r0;",
    "elect.sync %r4|%p0, 0xFFFFFFFF; selp.b32 %r5, 100, 0, %p0; add.u32 %r0, %r4, %r5;",
    "elect.sync _|%p0, 0xFFFFFFFF; selp.b32 %r0, 1, 0, %p0;",
]
lanewise("votes", "votes", VOTES, [VALUES, VALUES.astype(np.uint64) << np.uint64(33)])
SOME = """
mov.b32 %r0, 0; setp.ge.u32 %p1, %t, 9; @!%p1 bra OUT;
setp.gt.u32 %p2, %r1, 2; vote.sync.ballot.b32 %r4, %p2, 0xFFFFFE00; match.any.sync.b32 %r5, %r1, 0xFFFFFE00;
redux.sync.add.u32 %r6, %r1, 0xFFFFFE00; elect.sync %r7|%p3, 0xFFFFFE00; selp.b32 %r8, 64, 0, %p3;
xor.b32 %r0, %r4, %r5; add.u32 %r0, %r0, %r6; add.u32 %r0, %r0, %r7; add.u32 %r0, %r0, %r8;
OUT: bar.warp.sync 0xFFFFFFFF;
"""
lanewise("votes_of_some", "votes", [SOME], [VALUES])
REDUCTIONS = ["add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32", "or.b32", "xor.b32"]
lanewise("redux", "redux", [f"redux.sync.{op} %r0, %r1, 0xFFFFFFFF;" for op in REDUCTIONS], [WORDS])

# One row a register, for every thread of a grid of 2 x 2 x 2 CTAs of 4 x 4 x 3 threads.
REGISTERS = [f"{name}.{axis}" for name in ("%tid", "%ntid", "%ctaid", "%nctaid") for axis in "xyz"]
REGISTERS += ["%laneid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge"]
REGISTERS += ["%dynamic_smem_size"]
body = """
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z; mad.lo.u32 %r4, %r3, 2, %r2;
mad.lo.u32 %r4, %r4, 2, %r1;
mov.u32 %r5, %tid.y; mov.u32 %r6, %tid.z; mad.lo.u32 %r7, %r6, 4, %r5; mad.lo.u32 %r7, %r7, 4, %t;
mad.lo.u32 %r8, %r4, 48, %r7; mad.wide.u32 %d1, %r8, 4, %a0;
""" + "\n".join(f"mov.u32 %r9, {name}; st.global.b32 [%d1+{4 * 384 * row}], %r9;" for row, name in enumerate(REGISTERS))
kernel(
    "special_registers", "special registers", body, [], [zeros(len(REGISTERS), 384)],
    block=(4, 4, 3), grid=(2, 2, 2), shared=208,
)  # fmt: skip
kernel(
    "no_effect",
    "hints",
    f"""
nanosleep.u32 100; griddepcontrol.wait; griddepcontrol.launch_dependents;
setmaxnreg.dec.sync.aligned.u32 24; setmaxnreg.inc.sync.aligned.u32 32;
{place(0, 4)} ld.global.b32 %r1, [%d31]; add.u32 %r1, %r1, 1; {place(1, 4)} st.global.b32 [%d31], %r1;
""",
    [np.resize(WORDS, 128)],
    [zeros(128)],
    block=128,
    limits=".maxnreg 32",
)
