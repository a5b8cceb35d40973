"""The space holds every kernel that a search may need once: all are valid, none is left out, none comes twice.

Over all released layers and shards, checkpoints and numbers of tokens the space is compared with a plain enumeration
of every split, all warps and every `fold_values` up to 64, with registers left to the compiler and held to what lets
all CTAs in that have room otherwise; that room is counted here anew. Pruning is pinned on a layer whose heads it may
not split for memory's sake, and at a batch where splitting could pay.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels.arch import ARCHES, Arch
from cute_kernels.configs import StepConfig, StepKey, Tile
from cute_kernels.heuristic import heuristic_config, invalid_reason, smem_bytes
from replayssm.spec import LayerSpec, ReadDtype, ReplaySpec
from replayssm.tuned import Shape
from tuning.matrix import ALL_MODELS
from tuning.shapes import MODELS, lookup
from tuning.space import Candidate, candidates, kernel_of, prune_outclassed, prune_wasteful, room
from tuning.tuner import BATCHES

ARCH = ARCHES["sm_90a"]
ANY_WARPS = {1, 2, 4, 8}
LAYERS = sorted({model.layer for model in MODELS} | {lookup("kimi-k3", tp=8).layer}, key=repr)


def shapes(layer: LayerSpec) -> list[Shape]:
    dtypes = (torch.float32, torch.bfloat16)
    return [Shape.of(layer, ReplaySpec(16, t, dtype), t) for dtype in dtypes for t in (1, 4, 16)]


def fitting(key: StepKey) -> int:
    """CTAs that a multiprocessor takes: one after the other, each with 1 KiB of the 228 beside its own."""
    each, threads, ctas = smem_bytes(key) + 1024, 32 * key.config.warps, 1
    while (ctas + 1) * each <= 228 * 1024 and (ctas + 1) * threads <= 2048 and ctas < 32:
        ctas += 1
    return ctas


def fillings(key: StepKey) -> set[int]:
    """So many, but where a copy is read, or the state from where it lies, no more than 128 registers a thread leave
    room for, or with two probes 160."""
    if key.read_dtype is None and not key.direct:
        return {fitting(key)}
    return {min(fitting(key), 65536 // (32 * key.config.warps * registers)) for registers in (128, 160)[: key.probes]}


def enumerated(shape: Shape, arch: Arch) -> list[StepKey]:
    whole = [shape.key({"split": s, "warps": w, "ctas": 1}, 1, arch) for s in range(1, 129) for w in range(1, 17)]
    valid = [key for key in whole if invalid_reason(key, arch) is None]
    folds = [replace(key, config=replace(key.config, fold_values=f)) for key in valid for f in range(1, 65)]
    folds = [key for key in folds if invalid_reason(key, arch) is None]
    return folds + [replace(key, config=replace(key.config, ctas=n)) for key in folds for n in fillings(key)]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_every_kernel_once(layer: LayerSpec) -> None:
    for shape in shapes(layer)[::2] if layer.recurrence == "mamba2" else shapes(layer)[1::2]:
        found = candidates(shape, 8, ARCH)
        kernels = [kernel_of(c.key) for c in found]
        assert len(set(kernels)) == len(kernels)
        assert all(invalid_reason(c.key, ARCH) is None for c in found)
        assert all(c.room == fitting(c.key) for c in found)
        assert all(c.config.ctas in {1, *fillings(c.key)} for c in found[1:])
        wanted = {kernel_of(key) for key in [found[0].key, *enumerated(shape, ARCH)]}
        powers = {kernel for kernel in wanted if kernel[-1].bit_count() == 1}
        assert powers <= set(kernels) <= wanted


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["nemotron-3-super", "nemotron-3-nano-4b", "qwen3.5-27b", "kimi-k3"])
def test_the_heuristics_choice_comes_first_and_all_are_as_exact(name: str, arch: str) -> None:
    for shape in shapes(lookup(name).layer):
        found = candidates(shape, 1, ARCHES[arch])
        assert found[0].config == heuristic_config(found[0].key, 1, ARCHES[arch])
        assert 1 <= found[0].config.ctas <= fitting(found[0].key)
        assert {c.config.precision for c in found} == {found[0].config.precision}
        assert {c.config.readout for c in found} == {found[0].config.readout}
        # Heads of 64 rows are whole on tcgen05.
        assert len({c.config.split for c in found}) > 1 or found[0].config.readout == "tcgen05"


def test_the_kernels_of_super() -> None:
    """A thread folds up to 8 vectors of two of 64 rows of 128 float32 at a time, a power of two of them, 64 values at
    most. 8 warps read 32 rows at once, so that 16 are too few."""
    found = candidates(Shape.of(lookup("nemotron-3-super").layer, ReplaySpec(), 1), 256, ARCH)
    assert [c.config for c in found[:1]] == [StepConfig(fold_values=32, precision="tf32")]
    kernels = [(c.config.split, c.config.warps, Tile.of(c.key).fold_span, c.config.ctas) for c in found]
    rooms = {(1, 4): 5, (1, 8): 5, (2, 4): 10, (2, 8): 8, (4, 4): 16}
    assert sorted(kernels) == sorted(
        (*part, 1 << n, ctas) for part, most in rooms.items() for n in range(4) for ctas in (1, most)
    )
    assert found[0].name == "split 1, warps 4, ctas 1, fold_values 32, heads 1"
    assert found[0].parameters == {"split": 1, "warps": 4, "ctas": 1, "fold_values": 32, "heads": 1}


@pytest.mark.parametrize(
    ("name", "replay", "warps"),
    [
        ("nemotron-3-super", ReplaySpec(), {1: {4, 8}, 2: {4, 8}, 4: {4}}),
        ("nemotron-3-nano-4b", ReplaySpec(), {1: {4}, 5: {4}}),
        ("nemotron-3-super", ReplaySpec(max_draft=4), {1: ANY_WARPS, 2: ANY_WARPS, 4: ANY_WARPS}),
        ("nemotron-3-super", ReplaySpec(read_dtype="nvfp4"), {1: ANY_WARPS, 2: ANY_WARPS, 4: ANY_WARPS}),
        ("nemotron-3-nano-4b", ReplaySpec(max_draft=4), {1: ANY_WARPS, 5: ANY_WARPS}),
        ("kimi-k3", ReplaySpec(), {1: {4, 8}, 2: {4, 8}, 4: {4, 8}, 8: {4}}),
    ],
)
def test_all_warps_that_a_split_leaves_rows_for(name: str, replay: ReplaySpec, warps: dict[int, set[int]]) -> None:
    found = candidates(Shape.of(lookup(name).layer, replay, replay.max_draft), 8, ARCH)
    assert {c.config.split for c in found} == set(warps)
    assert {split: {c.config.warps for c in found if c.config.split == split} for split in warps} == warps


def test_a_layer_without_kernels_has_no_candidates() -> None:
    assert candidates(Shape.of(LayerSpec("mamba2", 8, 2, 48, 128), ReplaySpec(), 1), 1, ARCH) == ()


def test_the_room_of_a_multiprocessor_by_hand() -> None:
    """What limits each is shared memory, threads (8 warps are 256 of 2048), and that no more than 32 CTAs are taken."""
    rows = Shape.of(lookup("nemotron-3-super").layer, ReplaySpec(), 1)
    whole = rows.key({}, 8, ARCH)
    # The tile; a fold's keys, 16 bytes further from record to record; its values and products.
    each = 64 * 128 * 4 + 16 * (128 * 2 + 16) + 16 * 64 * 2 + 64 * 4 + 16
    assert smem_bytes(whole) == each
    assert room(whole) == 5 == 228 * 1024 // (each + 1024)
    assert room(rows.key({"split": 2, "warps": 8}, 8, ARCH)) == 8
    assert room(rows.key({"split": 2, "warps": 4}, 8, ARCH)) == 10
    small = Shape.of(LayerSpec("mamba2", 4, 2, 64, 64), ReplaySpec(16, 4, torch.bfloat16), 4)
    least = small.key({"split": 4, "warps": 1}, 8, ARCH)
    assert smem_bytes(least) == 16 * 64 * 2 + 16 * (64 * 2 + 16) + 16 * 16 * 2 + 16
    assert room(least) == 32 < 228 * 1024 // (smem_bytes(least) + 1024)


def test_loaded_bytes_by_hand() -> None:
    shape = Shape.of(LayerSpec("gdn", 4, 2, 64, 128), ReplaySpec(window=3), 1)
    split = Candidate(shape.key({"split": 2}, 8, ARCH), 1)
    assert split.loaded_bytes == 4 * 2 * (32 * 128 * 4 + 3 * (32 * 2 + 128 * 2 + 4))


def test_pruning_keeps_the_first_and_whatever_could_win() -> None:
    found = candidates(Shape.of(lookup("nemotron-3-super").layer, ReplaySpec(), 1), 256, ARCH)
    assert prune_outclassed(1, 132)(found) == list(found)  # 128 CTAs: splitting fills more multiprocessors
    kept = prune_outclassed(256, 132)(found)
    assert kept[0] is found[0]
    dropped = [c for c in found if c not in kept]
    assert dropped
    for one in dropped:
        like = [c for c in kept if alike(c, one)]
        assert [c for c in like if c.in_flight_bytes >= one.in_flight_bytes and c.loaded_bytes < one.loaded_bytes]
    launches = {(c.config.warps, c.config.ctas > 1) for c in dropped}
    assert launches == {(4, False), (4, True), (8, False), (8, True)}


def alike(one: Candidate, other: Candidate) -> bool:
    """But for the split, and how many CTAs fit for it."""
    first, second = one.config, other.config
    same_fold = Tile.of(one.key).fold_span == Tile.of(other.key).fold_span
    return same_fold and first.warps == second.warps and (first.ctas == 1) == (second.ctas == 1)


def test_pruning_has_teeth() -> None:
    """With less in flight the one CTA a head is no longer ahead; with as much it is, however small the difference."""
    found = candidates(Shape.of(lookup("nemotron-3-super").layer, ReplaySpec(), 1), 256, ARCH)
    whole = found[0]
    (half,) = [c for c in found if c.config == replace(whole.config, split=2)]
    prune = prune_outclassed(4096, 132)
    equal = Candidate(half.key, 2 * whole.room)
    assert prune([equal, half, whole]) == [equal, whole]
    assert prune([half, equal, whole]) == [half, whole]
    assert prune([whole, Candidate(half.key, 2 * whole.room + 1)])[1:]


def test_only_what_is_otherwise_alike_is_compared() -> None:
    """A half of a head is behind the whole, unless it has other warps, another fold or another way with registers."""
    shape = Shape.of(lookup("nemotron-3-super").layer, ReplaySpec(), 1)
    prune = prune_outclassed(4096, 132)

    def made(**parameters: int) -> Candidate:
        return Candidate(shape.key({"fold_values": 16, **parameters}, 256, ARCH), {1: 5, 2: 9}[parameters["split"]])

    whole, half = made(split=1), made(split=2)
    assert prune([whole, half]) == [whole]
    for other in (made(split=2, warps=8), made(split=2, fold_values=4), made(split=2, ctas=9)):
        assert prune([whole, other]) == [whole, other]
    held = made(split=1, ctas=5)
    assert prune([whole, held, made(split=2, ctas=9)]) == [whole, held]


def kept_of(name: str, replay: ReplaySpec, rows: int) -> list[StepConfig]:
    found = candidates(Shape.of(lookup(name).layer, replay, replay.max_draft), rows, ARCH)
    return [c.config for c in prune_outclassed(rows, 132)(prune_wasteful(rows, 132)(found))]


@pytest.mark.parametrize(("name", "tp"), [layer for layers in ALL_MODELS.values() for layer in layers])
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("read", [None, "nvfp4"])
def test_few_candidates_are_left_to_compile(name: str, tp: int, tokens: int, read: ReadDtype | None) -> None:
    """Over all batches of a table at most 80 kernels of up to 220, and the heuristic's stays the first."""
    shape = lookup(name, tp=tp).layer
    for state in (torch.float32,) if read else (torch.float32, torch.bfloat16):
        replay = ReplaySpec(16, tokens, state, read_dtype=read)
        all_of = {kernel_of(c.key) for c in candidates(Shape.of(shape, replay, tokens), 256, ARCH)}
        compiled, timed = set(), 0
        for rows in BATCHES:
            found = candidates(Shape.of(shape, replay, tokens), rows, ARCH)
            kept = prune_outclassed(rows, 132)(prune_wasteful(rows, 132)(found))
            assert kept[0] is found[0]
            compiled |= {kernel_of(c.key) for c in kept}
            timed += len(kept)
        assert len(compiled) <= 80 and timed <= 230
        assert len(compiled) <= max(20, 0.8 * len(all_of))


@pytest.mark.parametrize(
    ("name", "replay", "rows", "fastest"),
    [
        ("nemotron-3-super", ReplaySpec(max_draft=8), 256, StepConfig(1, 2, 5, 64)),
        ("nemotron-3-super", ReplaySpec(16, 8, torch.bfloat16), 256, StepConfig(1, 2, 8, 32)),
        ("nemotron-3-super", ReplaySpec(16, 1, torch.bfloat16), 256, StepConfig(1, 4, 1, 32)),
        ("nemotron-3-super", ReplaySpec(read_dtype="nvfp4"), 256, StepConfig(1, 1, 6, 16, 4)),
        ("qwen3.5-122b-a10b", ReplaySpec(max_draft=8), 256, StepConfig(2, 2, 5, 64)),
        ("qwen3.5-122b-a10b", ReplaySpec(read_dtype="nvfp4"), 256, StepConfig(1, 1, 8, 16, 2)),
        ("glm-5.3-flash", ReplaySpec(max_draft=8), 256, StepConfig(1, 4, 4, 32)),
        ("glm-5.3-flash", ReplaySpec(), 256, StepConfig(1, 4, 3, 32)),
        ("glm-5.3-flash", ReplaySpec(16, 1, torch.bfloat16), 256, StepConfig(1, 4, 4, 32)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_was_fastest_is_not_dropped(name: str, replay: ReplaySpec, rows: int, fastest: StepConfig) -> None:
    """On an H200, 2026-11-29 and 30: docs/performance.md, and the reasons in `cute_kernels.heuristic`."""
    assert replace(fastest, precision="tf32") in kept_of(name, replay, rows)


def test_what_no_kernel_has_use_for_is_dropped() -> None:
    drafts = ReplaySpec(max_draft=8)
    kept = kept_of("nemotron-3-super", drafts, 256)
    assert not [c for c in kept if c.warps == 8]  # 64 rows are four times 16
    assert not [c for c in kept if c.fold_values < 32] and [c for c in kept if c.fold_values == 32]
    assert {c.split for c in kept} == {1} and {c.split for c in kept_of("nemotron-3-super", drafts, 1)} == {1, 2}
    shares = {65536 // (32 * c.warps * c.ctas) for c in kept if c.ctas > 1}
    assert shares and min(shares) >= 80 and max(shares) < 224
    # One CTA a multiprocessor more is no use where the first is large; there the choice stays open.
    assert {c.split for c in kept_of("qwen3.5-122b-a10b", ReplaySpec(), 256)} >= {1, 2}


def test_the_first_candidate_is_never_wasteful() -> None:
    found = candidates(Shape.of(lookup("nemotron-3-super").layer, ReplaySpec(max_draft=8), 8), 256, ARCH)
    worst = next(c for c in found if c.config.warps == 8 and c.config.fold_values == 4)
    assert prune_wasteful(256, 132)([worst])[0] is worst
    assert worst not in prune_wasteful(256, 132)([found[0], worst])
