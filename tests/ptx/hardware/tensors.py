"""Copies of boxes by tensor maps that the driver encodes ("Tensors", "cp.async.bulk.tensor",
"cp.async.bulk.prefetch.tensor", "prefetch.tensormap")."""

from __future__ import annotations

import numpy as np

from tests.ptx.hardware.kernel import Map, kernel, place, zeros
from tests.ptx.hardware.numbers import raw

PLANE = (np.arange(24 * 72) % 60000 + 1).astype(np.uint16).reshape(24, 72)
CUBE = (np.arange(5 * 6 * 16) + 1).astype(np.uint16).reshape(5, 6, 16)
CORNERS = ((8, 3), (56, 20), (-8, -2))  # inside, across the last corner, across the first
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p7, [smem], 0; @!%p7 bra WAIT;"
BEGIN = """
setp.ne.u32 %p0, %t, 0; mov.b64 %d1, map0; cvta.param.u64 %d1, %d1; @%p0 bra READY;
mbarrier.init.shared.b64 [smem], 1; fence.mbarrier_init.release.cluster; fence.proxy.async; READY: bar.sync 0;
"""
LOAD = "cp.async.bulk.tensor.{n}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
LOAD += " [smem+{to}], [%d1, {{{at}}}], [smem];"


def _load(
    name: str, tensor: np.ndarray, box: tuple[int, ...], swizzle: int, corners: tuple[tuple[int, ...], ...]
) -> None:
    """Boxes at several corners, dumped from shared memory as they lie there."""
    size = int(np.prod(box)) * tensor.itemsize
    loads = [
        LOAD.format(n=tensor.ndim, to=1024 + size * i, at=", ".join(map(str, corner)))
        for i, corner in enumerate(corners)
    ]
    words = size * len(corners) // 4
    body = f"""{BEGIN} @%p0 bra WAIT; prefetch.tensormap [%d1];
cp.async.bulk.prefetch.tensor.{tensor.ndim}d.L2.global.tile [%d1, {{{", ".join(map(str, corners[0]))}}}];
mbarrier.arrive.expect_tx.shared.b64 %d2, [smem], {size * len(corners)};
{chr(10).join(loads)}
{WAIT} mov.u32 %r10, smem; mov.u32 %r1, %t;
DUMP: mad.lo.u32 %r11, %r1, 4, %r10; ld.shared.b32 %r2, [%r11+1024]; {place(1, 4, "%r1")} st.global.b32 [%d31], %r2;
add.u32 %r1, %r1, 32; setp.lt.u32 %p1, %r1, {words}; @%p1 bra DUMP;
"""
    kernel(name, "tensor maps", body, [tensor], [zeros(words)], shared=1024 + 4 * words, maps=(Map(0, box, swizzle),))


for swizzle in (16, 32, 64, 128):
    _load(f"tensor_load_{swizzle}", PLANE, (max(16, swizzle // 2), 8), swizzle, CORNERS)
_load("tensor_load_3d", CUBE, (16, 4, 2), 16, ((0, 1, 2), (8, 4, 4), (-8, -1, -1)))

FILL = f"""
mov.b64 %d1, map0; cvta.param.u64 %d1, %d1; mov.u32 %r10, smem; mad.lo.u32 %r11, %t, 16, %r10; {place(0, 16)}
ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%d31]; st.shared.v4.b32 [%r11], {{%r1, %r2, %r3, %r4}};
fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p0, %t, 0; @%p0 bra END;
"""
DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END: bar.sync 0;"
WORDS = (raw(1400, 256) % np.uint64(1000)).astype(np.uint32)
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d1, {{{at}}}], [smem];"


def _store(name: str, body: str, swizzle: int = 16) -> None:
    """Boxes of 8 rows of 32 elements from shared memory."""
    kernel(
        name, "tensor maps", f"{FILL} {body} {DONE}", [WORDS[:128]], [np.full((24, 72), 9, np.uint16)],
        shared=1024, maps=(Map(1, (32, 8), swizzle),),
    )  # fmt: skip


# No corner is negative: a store of a box that begins in front of the tensor is an illegal instruction on an H200.
for swizzle in (16, 64):
    _store(f"tensor_store_{swizzle}", " ".join(STORE.format(at=at) for at in ("0, 1", "16, 10", "56, 20")), swizzle)
