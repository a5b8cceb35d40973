"""The gate lets the torch twin through and stops every wrong kernel made here from it.

Each wrong kernel is the twin with one fault of a kind that a real one may have: a wrong head, a lost append, a
neighbour overwritten, a fold forgotten. A gate without these teeth would let a fast wrong kernel be timed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replayssm.reference import replay as reference
from replayssm.spec import LayerSpec, ReplaySpec
from tuning.gate import check_commit, check_step
from tuning.measure import GateFailedError
from tuning.workload import Arena, StepWork, arena_bytes, make_inputs, make_pools, make_walking_cursors, make_work

LAYER = LayerSpec("mamba2", num_v_heads=8, num_k_heads=2, head_dim=16, d_state=32)
SLOTS = 12


def work(live_records: int, *, replay: ReplaySpec | None = None, has_z: bool = False, rows: int = 5) -> StepWork:
    replay = replay or ReplaySpec()
    arena = Arena(arena_bytes(LAYER, [replay], SLOTS), "cpu")
    (pool,) = make_pools(arena, LAYER, [replay], SLOTS, ring_layout="record_major")
    inputs = make_inputs(LAYER, rows, dtype=replay.activation_dtype, device="cpu", has_z=has_z)
    return make_work(pool, [live_records] * rows, inputs)


@pytest.mark.parametrize("checkpoint", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("live_records", [0, 8, 16])
def test_the_twin_passes(checkpoint: torch.dtype, live_records: int) -> None:
    check_step(work(live_records, replay=ReplaySpec(checkpoint_dtype=checkpoint)), reference.step)


@pytest.mark.parametrize("activation", [torch.float32, torch.float16], ids=str)
def test_the_twin_passes_in_other_activations(activation: torch.dtype) -> None:
    check_step(work(5, replay=ReplaySpec(activation_dtype=activation), has_z=True), reference.step)


def test_the_plain_step_passes() -> None:
    check_step(work(1, replay=ReplaySpec(window=1)), reference.step)


def wrong_head(pool, cursors, inputs, *, cache_indices, out):
    reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
    out[0, 0, 3] *= 1.03


def unwritten_row(pool, cursors, inputs, *, cache_indices, out):
    kept = out[1].clone()
    reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
    out[1] = kept


def loses_a_record(pool, cursors, inputs, *, cache_indices, out):
    fewer = replace(cursors, num_committed=(cursors.num_committed - 1).clamp_min(0))
    reference.step(pool, fewer, inputs, cache_indices=cache_indices, out=out)


def lost_append(pool, cursors, inputs, *, cache_indices, out):
    before = pool.value.clone()
    reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
    pool.value.copy_(before)


def wrong_dt(pool, cursors, inputs, *, cache_indices, out):
    reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
    slots = cache_indices.long()
    place = (cursors.ring_start[slots] + cursors.num_committed[slots]).long() % pool.replay.ring_capacity
    pool.decay[slots, :, place] += 1e-4


def neighbour_overwritten(pool, cursors, inputs, *, cache_indices, out):
    reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
    slots = cache_indices.long()
    place = (cursors.ring_start[slots] + cursors.num_committed[slots] + 1).long() % pool.replay.ring_capacity
    pool.decay[slots, :, place] = 0


def writes_the_checkpoint(pool, cursors, inputs, *, cache_indices, out):
    reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
    pool.checkpoint.mul_(1.001)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (wrong_head, "output: expected a relative error"),
        (unwritten_row, "output: expected finite"),
        (loses_a_record, "output: expected a relative error"),
        (lost_append, "value ring"),
        (wrong_dt, "decay ring: expected a relative error"),
        (neighbour_overwritten, "decay ring: expected rows other"),
        (writes_the_checkpoint, "checkpoint: expected a relative error"),
    ],
)
def test_a_wrong_step_is_stopped(step, message: str) -> None:
    with pytest.raises(GateFailedError, match=message):
        check_step(work(8), step)


def test_a_forgotten_fold_is_stopped() -> None:
    def forgets(pool, cursors, inputs, *, cache_indices, out):
        before = pool.checkpoint.clone()
        reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
        pool.checkpoint.copy_(before)

    with pytest.raises(GateFailedError, match="checkpoint: expected a relative error"):
        check_step(work(16), forgets)


def test_commits_are_compared_exactly() -> None:
    indices = torch.tensor([3, 0, 7], dtype=torch.int32)
    cursors = make_walking_cursors(ReplaySpec(), SLOTS, "cpu")
    check_commit(cursors, indices, reference.commit)

    def stays(cursors, *, cache_indices):
        reference.commit(cursors, cache_indices=cache_indices[:-1])

    with pytest.raises(GateFailedError, match="1 slots that differ"):
        check_commit(cursors, indices, stays)
