"""No instruction that orders anything can be left out of our sm_90a kernels without the bench noticing.

Each statement of `ORDERING` in each kernel of `ORDERED` is dropped, one at a time; the interpreter must report trouble,
or compute something else than the hardware did, in one of three runs. Statements that may go are named in `NEEDLESS`
with the reason. `test_kernels` and `test_tensor` do the same, by hand and also for numbers, descriptors and bounds, to
the kernels of the package and to tensor memory.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest

from tests.ptx.hardware import KERNELS, Kernel
from tests.ptx.hardware.compare import differences, interpreted, stored
from tests.ptx.machine import TroubleError

STEM = r"(?:@!?%p\d+ )?(?:{})[^;]*;".format
ORDERING = re.compile(
    "|".join(
        [
            STEM(r"bar(?:rier)?\.(?:cta\.)?(?:sync|arrive|red)|barrier\.cluster\.(?:arrive|wait)"),
            STEM(r"fence\.|membar\."),
            STEM(r"cp\.async\.(?:bulk\.)?(?:commit|wait)|cp\.async\.mbarrier"),
            STEM(r"wgmma\.(?:fence|commit_group|wait_group)"),
            STEM(r"mbarrier\.(?:init|arrive)"),
            r"@!%p7 bra \w+;",
        ]
    )
)
RUNS = (("late", 0), ("early", 1), ("late", 2))
ORDERED = (
    "bar_sync_and_red", "named_barriers", "mbarrier_ring", "shared_memory", "reductions_shared",
    "cp_async", "cp_async_arrive", "bulk_load", "tensor_load_128",
    "distributed_shared_memory", "store_async", "remote_mbarrier", "cluster_atomics",
    "wgmma_f16", "wgmma_bf16_registers", "wgmma_tf32", "wgmma_e4m3", "wgmma_k128", "wgmma_mn64",
)  # fmt: skip
FENCES = ["fence.mbarrier_init.release.cluster;", "fence.proxy.async;"]
# Statements that may go, and why nothing changes.
NEEDLESS = {
    "bar_sync_and_red": ["barrier.sync 5, 128;", "barrier.cta.sync 6;", "membar.cta;", "bar.cta.sync 0;"],  # at the end
    "named_barriers": ["membar.cta;"],  # the barriers order by themselves
    "mbarrier_ring": FENCES[:1],  # no asynchronous work acts on these objects
    "cp_async_arrive": FENCES,  # its copies belong to the generic proxy
    "cp_async": ["bar.sync 0;"] * 2,  # one warp, whose lanes count as one
    "bulk_load": [
        FENCES[1],
        "bar.sync 0;",
        "fence.proxy.async.shared::cta;",
        "bar.sync 0;",
    ],  # one warp, which only reads
    "tensor_load_128": [FENCES[1], "bar.sync 0;"],  # one warp; the other fence is the one for objects
    "distributed_shared_memory": ["barrier.cluster.wait.aligned;"],  # at the end
    "store_async": [FENCES[1], "barrier.cluster.wait.acquire;"],  # the other fence; at the end
    # No asynchronous work; counts that nothing else depends on; at the end.
    "remote_mbarrier": [*FENCES, "fence.acq_rel.cluster;", "@!%p7 bra THIRD;", "barrier.cluster.wait.acquire;"],
}
OUTPUTS, _ = stored()


def statements(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """(statement, the PTX without it)."""
    for found in ORDERING.finditer(kernel.ptx):
        yield found.group(), kernel.ptx[: found.start()] + kernel.ptx[found.end() :]


def noticed(kernel: Kernel, ptx: str) -> bool:
    stored_outputs, maps = OUTPUTS[kernel.name][: len(kernel.outputs)], OUTPUTS[kernel.name][len(kernel.outputs) :]
    changed = dataclasses.replace(kernel, ptx=ptx)
    for mode, seed in RUNS:
        try:
            if differences(kernel, interpreted(changed, maps, mode, seed), stored_outputs):
                return True
        except TroubleError:
            return True
    return False


@pytest.mark.skipif(not OUTPUTS, reason="no vectors are stored: run python -m tests.ptx.hardware on a GPU")
@pytest.mark.parametrize("name", ORDERED)
def test_what_orders_is_needed(name: str) -> None:
    kernel = KERNELS[name]
    assert not noticed(kernel, kernel.ptx)
    found = list(statements(kernel))
    assert found
    missed = [statement for statement, without in found if not noticed(kernel, without)]
    assert missed == NEEDLESS.get(name, [])


@pytest.mark.skipif(not OUTPUTS, reason="no vectors are stored: run python -m tests.ptx.hardware on a GPU")
@pytest.mark.parametrize("touch", ["mov.b32 %q0, 0;", "add.u32 %q1, %q1, 1;", "mov.b32 %c0, 0;"])
def test_registers_of_a_wgmma_are_left_alone_until_its_wait(touch: str) -> None:
    kernel = KERNELS["wgmma_bf16_registers"]
    ptx = kernel.ptx.replace("wgmma.commit_group", touch + " wgmma.commit_group")
    maps = OUTPUTS[kernel.name][len(kernel.outputs) :]
    with pytest.raises(TroubleError, match="missing_wait"):
        interpreted(dataclasses.replace(kernel, ptx=ptx), maps, "early", 0)
