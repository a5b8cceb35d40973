"""The space holds every kernel that a search may need once: all are valid, none is left out, none comes twice.

Over all released layers and shards, checkpoints and numbers of tokens the space is compared with a plain enumeration
of every split and every `fold_values` up to 64. Pruning is pinned on a layer whose heads it may not split for memory's
sake, and at a batch where splitting could pay.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels.arch import ARCHES, Arch
from cute_kernels.configs import StepConfig, StepKey, Tile, heuristic_config, invalid_reason
from replayssm.spec import LayerSpec, ReplaySpec
from replayssm.tuned import Shape
from tuning.shapes import MODELS, lookup
from tuning.space import Candidate, candidates, kernel_of, prune_outclassed

ARCH = ARCHES["sm_90a"]
LAYERS = sorted({model.layer for model in MODELS} | {lookup("kimi-k3", tp=8).layer}, key=repr)


def shapes(layer: LayerSpec) -> list[Shape]:
    dtypes = (torch.float32, torch.bfloat16)
    return [Shape.of(layer, ReplaySpec(16, t, dtype), t) for dtype in dtypes for t in (1, 4, 16)]


def enumerated(shape: Shape, arch: Arch) -> list[StepKey]:
    whole = [shape.key({"split": split}, 1, arch) for split in range(1, 129)]
    valid = [key for key in whole if invalid_reason(key, arch) is None]
    return [replace(key, config=replace(key.config, fold_values=f)) for key in valid for f in range(1, 65)]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_every_kernel_once(layer: LayerSpec) -> None:
    for shape in shapes(layer)[::2] if layer.recurrence == "mamba2" else shapes(layer)[1::2]:
        found = candidates(shape, 8, ARCH)
        kernels = [kernel_of(c.key) for c in found]
        assert len(set(kernels)) == len(kernels)
        assert all(invalid_reason(c.key, ARCH) is None for c in found)
        wanted = {kernel_of(key) for key in enumerated(shape, ARCH)}
        powers = {kernel for kernel in wanted if kernel[2].bit_count() == 1}
        assert powers <= set(kernels) <= wanted


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["nemotron-3-super", "nemotron-3-nano-4b", "qwen3.5-27b", "kimi-k3"])
def test_the_heuristics_choice_comes_first_and_all_are_as_exact(name: str, arch: str) -> None:
    for shape in shapes(lookup(name).layer):
        found = candidates(shape, 1, ARCHES[arch])
        assert found[0].config == heuristic_config(found[0].key, 1, ARCHES[arch])
        assert {c.config.precision for c in found} == {found[0].config.precision}
        assert len({c.config.split for c in found}) > 1


def test_the_kernels_of_super() -> None:
    """64 rows of 128 float32 are 16 rows a thread, or 8 or 4 where the head is split, 4 values each; a thread folds at
    most 64 values at a time."""
    found = candidates(Shape.of(lookup("nemotron-3-super").layer, ReplaySpec(), 1), 256, ARCH)
    assert [c.config for c in found[:1]] == [StepConfig(1, 32, "tf32")]
    assert sorted((c.config.split, Tile.of(c.key).fold_block) for c in found) == [
        (1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (2, 1), (2, 2), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4),
    ]  # fmt: skip
    assert found[0].name == "split 1, fold_values 32"
    assert found[0].parameters == {"split": 1, "fold_values": 32}


def test_a_layer_without_kernels_has_no_candidates() -> None:
    assert candidates(Shape.of(LayerSpec("mamba2", 8, 2, 48, 128), ReplaySpec(), 1), 1, ARCH) == ()


def test_ctas_of_a_multiprocessor() -> None:
    """One more would not fit: by the bytes of a tile that are counted here anew."""
    for candidate in candidates(Shape.of(lookup("qwen3.5-27b").layer, ReplaySpec(), 1), 8, ARCH):
        each = Tile.of(candidate.key).smem_bytes + 1024
        assert candidate.ctas * each <= 228 * 1024
        assert candidate.ctas == 16 or (candidate.ctas + 1) * each > 228 * 1024


def test_loaded_bytes_by_hand() -> None:
    shape = Shape.of(LayerSpec("gdn", 4, 2, 64, 128), ReplaySpec(window=3), 1)
    (split,) = [c for c in candidates(shape, 8, ARCH) if c.config.split == 2 and c.config.fold_values == 32][:1]
    assert split.loaded_bytes == 4 * 2 * (32 * 128 * 4 + 3 * (32 * 2 + 128 * 2 + 4))


def test_pruning_keeps_the_first_and_whatever_could_win() -> None:
    found = candidates(Shape.of(lookup("nemotron-3-super").layer, ReplaySpec(), 1), 256, ARCH)
    assert prune_outclassed(1, 132)(found) == list(found)  # 128 CTAs: splitting fills more multiprocessors
    kept = prune_outclassed(256, 132)(found)
    assert kept[0] is found[0]
    dropped = [c for c in found if c not in kept]
    assert dropped
    for candidate in dropped:
        better = [
            c
            for c in kept
            if c.in_flight_bytes >= candidate.in_flight_bytes and c.loaded_bytes < candidate.loaded_bytes
        ]
        assert better


def test_pruning_has_teeth() -> None:
    """With less in flight the one CTA a head is no longer ahead; with as much it is, however small the difference."""
    found = candidates(Shape.of(lookup("nemotron-3-super").layer, ReplaySpec(), 1), 256, ARCH)
    whole = found[0]
    (half,) = [c for c in found if c.config == replace(whole.config, split=2)]
    prune = prune_outclassed(4096, 132)
    equal = Candidate(half.key, 2 * whole.ctas)
    assert prune([equal, half, whole]) == [equal, whole]
    assert prune([half, equal, whole]) == [half, whole]
    assert prune([whole, Candidate(half.key, 2 * whole.ctas + 1)])[1:]
