"""Tensors that a benchmark steps over: carved from one allocation, aligned, random, and as the case asks."""

from __future__ import annotations

import pytest
import torch

from replayssm.spec import LayerSpec, ReplaySpec
from tuning.workload import ALIGNMENT, Arena, arena_bytes, make_inputs, make_pools, make_work

LAYER = LayerSpec("mamba2", num_v_heads=6, num_k_heads=2, head_dim=16, d_state=32)
REPLAYS = (ReplaySpec(window=5), ReplaySpec(window=1))


def test_arena_gives_out_aligned_memory_once_and_again_after_a_reset() -> None:
    arena = Arena(4 * ALIGNMENT, "cpu")
    first, second = arena.take((3, 5), torch.bfloat16), arena.take((7,), torch.float32)
    assert first.data_ptr() % ALIGNMENT == second.data_ptr() % ALIGNMENT == 0
    first.fill_(1)
    second.fill_(2)
    assert bool((first == 1).all())
    with pytest.raises(MemoryError, match="arena: expected"):
        arena.take((4 * ALIGNMENT,), torch.uint8)
    arena.reset()
    assert arena.take((4,), torch.float32).data_ptr() == first.data_ptr()
    assert arena.words(64).data_ptr() == first.data_ptr()
    assert arena.words(1 << 40).numel() * 4 <= 5 * ALIGNMENT


@pytest.mark.parametrize("ring_layout", ["record_major", "head_major"])
def test_pools_of_both_windows_share_the_checkpoint_and_fit_the_arena(ring_layout) -> None:
    arena = Arena(arena_bytes(LAYER, REPLAYS, 9), "cpu")
    replayed, plain = make_pools(arena, LAYER, REPLAYS, 9, ring_layout=ring_layout)
    assert replayed.checkpoint is plain.checkpoint
    assert (replayed.value.shape[2], plain.value.shape[2]) == (6, 2)
    heads_together = replayed.value.stride(1) < replayed.value.stride(2)
    assert heads_together == (ring_layout == "record_major")
    for tensor in (*replayed.tensors, *plain.tensors):
        assert bool(tensor.isfinite().all())
        assert float(tensor.float().std()) > 0
    with pytest.raises(MemoryError, match="arena: expected"):
        arena.take((arena_bytes(LAYER, REPLAYS, 1),), torch.uint8)


def test_work_holds_the_records_asked_for_in_distinct_slots() -> None:
    arena = Arena(arena_bytes(LAYER, REPLAYS, 9), "cpu")
    pool, _ = make_pools(arena, LAYER, REPLAYS, 9, ring_layout="record_major")
    inputs = make_inputs(LAYER, 4, dtype=torch.bfloat16, device="cpu", has_z=True)
    work = make_work(pool, [1, 2, 3, 5], inputs)
    slots = work.cache_indices.long()
    assert slots.unique().numel() == 4
    assert work.cursors.num_committed[slots].tolist() == [1, 2, 3, 5]
    assert work.out.shape == inputs.x.shape
    assert inputs.z is not None
    assert make_inputs(LAYER, 4, dtype=torch.bfloat16, device="cpu").z is None


def test_other_recurrences_are_refused_until_they_have_kernels() -> None:
    with pytest.raises(NotImplementedError, match="supported is 'mamba2', got 'gdn'"):
        make_inputs(LayerSpec("gdn", 4, 2, 16, 16), 1, dtype=torch.float32, device="cpu")
