"""Tensors that a benchmark steps over: carved from one allocation, aligned, random, and as the case asks."""

from __future__ import annotations

import pytest
import torch

from replayssm.checks import check_step
from replayssm.inputs import GdnInputs, KdaInputs, Mamba2Inputs
from replayssm.reference.recurrence import tokens
from replayssm.spec import LayerSpec, ReplaySpec
from tuning.shapes import ModelShape, lookup
from tuning.workload import ALIGNMENT, Arena, arena_bytes, make_inputs, make_pools, make_work

LAYER = LayerSpec("mamba2", num_v_heads=6, num_k_heads=2, head_dim=16, d_state=32)
SHAPE = ModelShape("tiny", LAYER, 3, "made for this test")
DELTA_LAYERS = (LayerSpec("gdn", 6, 2, 16, 32), LayerSpec("kda", 6, 6, 16, 32))
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
    inputs = make_inputs(SHAPE, 4, dtype=torch.bfloat16, device="cpu", has_z=True)
    assert isinstance(inputs, Mamba2Inputs)
    work = make_work(pool, [1, 2, 3, 5], inputs)
    slots = work.cache_indices.long()
    assert slots.unique().numel() == 4
    assert work.cursors.num_committed[slots].tolist() == [1, 2, 3, 5]
    assert work.out.shape == inputs.x.shape
    assert inputs.z is not None
    assert make_inputs(SHAPE, 4, dtype=torch.bfloat16, device="cpu").z is None


@pytest.mark.parametrize("layer", DELTA_LAYERS, ids=lambda layer: layer.recurrence)
def test_records_of_delta_rules_are_normalised_keys_and_log_decays(layer: LayerSpec) -> None:
    arena = Arena(arena_bytes(layer, REPLAYS, 9), "cpu")
    for pool in make_pools(arena, layer, REPLAYS, 9, ring_layout="record_major"):
        assert float(pool.key.float().norm(dim=-1).mean()) == pytest.approx(1.0, abs=0.1)
        assert -0.1 <= float(pool.decay.min()) < float(pool.decay.max()) <= -0.0009


@pytest.mark.parametrize(
    ("name", "kind", "lower_bound"),
    [
        ("nemotron-3-super@tp8", Mamba2Inputs, None),
        ("qwen3.5-122b-a10b@tp8", GdnInputs, None),
        ("kimi-linear-48b-a3b@tp8", KdaInputs, None),
        ("kimi-k3@tp8", KdaInputs, -5.0),
        ("glm-5.3-flash@tp8", KdaInputs, -5.0),
    ],
)
def test_inputs_are_those_of_the_model(name: str, kind: type, lower_bound: float | None) -> None:
    shape, replay = lookup(name), ReplaySpec(window=2)
    arena = Arena(arena_bytes(shape.layer, [replay], 3), "cpu")
    (pool,) = make_pools(arena, shape.layer, [replay], 3, ring_layout="record_major")
    inputs = make_inputs(shape, 2, dtype=torch.bfloat16, device="cpu")
    work = make_work(pool, [1, 2], inputs)
    check_step(pool, work.cursors, inputs, work.cache_indices, work.out, None)
    assert type(inputs) is kind
    assert getattr(inputs, "lower_bound", None) == lower_bound
    decays = tokens(inputs, torch.float64).log_decay
    assert -50 < float(decays.min()) < -0.1  # neither all forgotten nor
    assert float(decays.max()) < -1e-5  # anything kept for ever


@pytest.mark.parametrize("name", ["nemotron-3-super@tp8", "qwen3.5-122b-a10b@tp8", "kimi-k3@tp8"])
def test_inputs_of_several_tokens(name: str) -> None:
    shape, replay = lookup(name), ReplaySpec(window=8, max_draft=3)
    arena = Arena(arena_bytes(shape.layer, [replay], 3), "cpu")
    (pool,) = make_pools(arena, shape.layer, [replay], 3, ring_layout="record_major")
    inputs = make_inputs(shape, 2, dtype=torch.bfloat16, device="cpu", num_tokens=3)
    work = make_work(pool, [1, 8], inputs)
    check_step(pool, work.cursors, inputs, work.cache_indices, work.out, None)
    assert work.out.shape == (2, 3, shape.layer.num_v_heads, shape.layer.head_dim)
