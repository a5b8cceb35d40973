"""A pool takes memory as an engine laid it out, without a copy, counts its bytes exactly, and refuses what cannot work.

Bytes are compared with numbers computed by hand; views with the addresses they came from. Grid: pools of the three
recurrences in both ring orders, and the views that engines make: slots with gaps, one page for a slot, ring slices of a
larger buffer.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from replayssm import LayerSpec, Pool, ReplaySpec, bytes_per_slot, make_pool
from replayssm.pool import record_shapes
from tests.helpers.cases import ALL as CASES

LAYER = LayerSpec("mamba2", num_v_heads=4, num_k_heads=2, head_dim=16, d_state=32)
SPEC = ReplaySpec(window=6, max_draft=2)
R = 8
SUPER = LayerSpec("mamba2", 128, 8, 64, 128)


@pytest.mark.parametrize(
    ("layer", "replay", "expected"),
    [
        # 128 x 64 x 128 x 4; 128 x 17 x 64 x 2; 8 x 17 x 128 x 2; 128 x 17 x 4
        (SUPER, ReplaySpec(16), (4_194_304, 278_528, 34_816, 8_704)),
        (SUPER, ReplaySpec(16, checkpoint_dtype=torch.bfloat16), (2_097_152, 278_528, 34_816, 8_704)),
        (SUPER, ReplaySpec(16, 4, activation_dtype=torch.float32), (4_194_304, 655_360, 81_920, 10_240)),
        # 32 x 128 x 128 x 4; 32 x 17 x 128 x 2; 16 x 17 x 128 x 2; 32 x 17 x 4
        (LayerSpec("gdn", 32, 16, 128, 128), ReplaySpec(16), (2_097_152, 139_264, 69_632, 2_176)),
        # KDA keeps a decay for each channel: 32 x 17 x 128 x 4
        (LayerSpec("kda", 32, 32, 128, 128), ReplaySpec(16), (2_097_152, 139_264, 139_264, 278_528)),
    ],
)
def test_bytes_of_a_slot(layer: LayerSpec, replay: ReplaySpec, expected: tuple[int, ...]) -> None:
    assert tuple(bytes_per_slot(layer, replay).values()) == expected
    assert list(bytes_per_slot(layer, replay)) == ["checkpoint", "value", "key", "decay"]


@pytest.mark.parametrize("case", [case for case in CASES if case.HV <= 16], ids=lambda case: case.id)
@pytest.mark.parametrize("layout", ["record_major", "head_major"])
def test_a_new_pool_is_zero_and_takes_those_bytes(case: Any, layout: Literal["record_major", "head_major"]) -> None:
    pool = make_pool(case.layer, case.replay, 3, ring_layout=layout)
    held = {name: getattr(pool, name).numel() * getattr(pool, name).element_size() for name in record_shapes_of(pool)}
    assert held == {name: 3 * size for name, size in bytes_per_slot(case.layer, case.replay).items()}
    assert not any(tensor.any() for tensor in pool.tensors)
    assert pool.num_slots == 3
    assert pool.ring_layout == layout or case.HV == case.HK == 1
    assert len({tensor.untyped_storage().data_ptr() for tensor in pool.tensors}) == 4


def record_shapes_of(pool: Pool) -> list[str]:
    return list(record_shapes(pool.layer, pool.replay))


def tensors(slots: int = 5) -> dict[str, Tensor]:
    """Good tensors of a pool, head-major."""
    return {n: torch.zeros(slots, *shape, dtype=dtype) for n, (shape, dtype) in record_shapes(LAYER, SPEC).items()}


def taken_in_place(views: dict[str, Tensor]) -> Pool:
    pool = Pool(LAYER, SPEC, **views)
    for name, view in views.items():
        assert getattr(pool, name) is view
    assert [tensor.data_ptr() for tensor in pool.tensors] == [view.data_ptr() for view in views.values()]
    return pool


def test_slots_may_have_gaps_and_begin_anywhere() -> None:
    """The slots of one layer in a buffer that all layers share, and a slot with room for more than this pool needs."""
    views = {name: torch.zeros(5, 3, *tensor.shape[1:], dtype=tensor.dtype)[:, 1] for name, tensor in tensors().items()}
    pool = taken_in_place(views)
    assert pool.ring_layout == "head_major"
    assert pool.checkpoint.stride(0) == 3 * 4 * 16 * 32


def test_one_page_may_hold_a_slot() -> None:
    sizes = [-(-size // 16) * 16 for size in bytes_per_slot(LAYER, SPEC).values()]
    page, at, views = torch.zeros(5, sum(sizes) + 64, dtype=torch.uint8), 0, {}
    for (name, (shape, dtype)), size in zip(record_shapes(LAYER, SPEC).items(), sizes, strict=True):
        count = torch.Size(shape).numel() * dtype.itemsize
        views[name] = page[:, at : at + count].view(dtype).unflatten(1, shape)
        at += size
    pool = taken_in_place(views)
    assert pool.ring_layout == "head_major"
    pool.checkpoint.fill_(1.0)
    assert page[:, : sizes[0]].view(torch.float32).eq(1.0).all()
    assert not page[:, sizes[0] :].any()


def test_rings_may_be_slices_of_longer_ones() -> None:
    """A ring buffer that an engine made for more records, in the order [slots, heads, records, channels]."""
    views = tensors()
    for name in ("value", "key", "decay"):
        shape = views[name].shape
        views[name] = torch.zeros(*shape[:2], 32, *shape[3:], dtype=views[name].dtype)[:, :, :R]
    assert taken_in_place(views).ring_layout == "strided"


def record_major(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def test_ring_layout_is_what_all_rings_agree_on() -> None:
    views = tensors()
    assert Pool(LAYER, SPEC, **views).ring_layout == "head_major"
    mixed = views | {"key": record_major(views["key"])}
    assert Pool(LAYER, SPEC, **mixed).ring_layout == "strided"
    both = {name: tensor if name == "checkpoint" else record_major(tensor) for name, tensor in views.items()}
    assert Pool(LAYER, SPEC, **both).ring_layout == "record_major"
    assert Pool(LAYER, SPEC, **(both | {"decay": views["decay"]})).ring_layout == "strided"


def padded(tensor: Tensor, extra: int) -> Tensor:
    """The same shape with a gap behind the last axis."""
    return torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + extra, dtype=tensor.dtype)[..., : tensor.shape[-1]]


def behind(tensor: Tensor, elements: int) -> Tensor:
    """The same tensor, some elements behind an aligned address."""
    return torch.zeros(tensor.numel() + elements, dtype=tensor.dtype)[elements:].view(tensor.shape)


def slots_apart(tensor: Tensor, extra: int) -> Tensor:
    """The same tensor with a gap of so many elements behind each slot."""
    inner = tensor[0].numel()
    return torch.zeros(len(tensor), inner + extra, dtype=tensor.dtype)[:, :inner].view(tensor.shape)


GOOD = tensors()
STATE = GOOD["checkpoint"]
BAD: dict[str, tuple[str, Any, type[Exception], tuple[str, ...]]] = {
    "a list for a checkpoint": ("checkpoint", [[0.0]], TypeError, ("torch.Tensor", "list")),
    "no key": ("key", None, TypeError, ("torch.Tensor", "NoneType")),
    "a scalar": ("checkpoint", torch.tensor(0.0), ValueError, ("expected (0, 4, 16, 32)", "got ()")),
    "a state of K by V": ("checkpoint", STATE.transpose(2, 3), ValueError, ("16, 32)", "got (5, 4, 32, 16)")),
    "a state of another dtype": ("checkpoint", STATE.bfloat16(), TypeError, ("float32", "bfloat16")),
    "a state with gaps": ("checkpoint", padded(STATE, 4), ValueError, ("packed", "contiguous()")),
    "a misaligned state": ("checkpoint", behind(STATE, 1), ValueError, ("16-byte", "address")),
    "misaligned slots": ("checkpoint", slots_apart(STATE, 2), ValueError, ("16-byte", "strides")),
    "a ring of fewer slots": ("value", GOOD["value"][:4], ValueError, ("expected (5, 4, 8, 16)", "got (4, 4, 8, 16)")),
    "a ring of fewer records": ("value", GOOD["value"][:, :, :7], ValueError, ("(5, 4, 8, 16)", "(5, 4, 7, 16)")),
    "a ring in record order": ("value", GOOD["value"].transpose(1, 2), ValueError, ("expected (5, 4, 8, 16)",)),
    "a ring of another dtype": ("key", GOOD["key"].half(), TypeError, ("bfloat16", "float16")),
    "a ring elsewhere": ("key", GOOD["key"].to("meta"), ValueError, ("on cpu", "meta")),
    "a ring with gaps": ("key", GOOD["key"].repeat_interleave(2, -1)[..., ::2], ValueError, ("packed", "strides")),
    "a misaligned ring": ("value", behind(GOOD["value"], 3), ValueError, ("16-byte", "address")),
    "misaligned records": ("value", padded(GOOD["value"], 4), ValueError, ("16-byte", "strides")),
    "keys for each value head": ("key", torch.zeros(5, 4, R, 32).bfloat16(), ValueError, ("expected (5, 2, 8, 32)",)),
    "one slot for all": ("checkpoint", STATE[:1].expand(5, -1, -1, -1), ValueError, ("memory of its own", "strides")),
    "one decay for all": ("decay", GOOD["decay"][:1].expand(5, -1, -1), ValueError, ("memory of its own", "strides")),
    "slots that overlap": (
        "checkpoint", STATE.as_strided(STATE.shape, (1024, 512, 32, 1)), ValueError, ("memory of its own",)),
    "records that overlap": (
        "decay", GOOD["decay"].as_strided((5, 4, R), (8, 4, 1)), ValueError, ("memory of its own",)),
    "16-bit decays": ("decay", GOOD["decay"].bfloat16(), TypeError, ("float32", "bfloat16")),
    "decays for each channel": ("decay", torch.zeros(5, 4, R, 32), ValueError, ("expected (5, 4, 8)", "(5, 4, 8, 32)")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_pool_refuses(name: str) -> None:
    field, bad, error, words = BAD[name]
    with pytest.raises(error) as caught:
        Pool(LAYER, SPEC, **(GOOD | {field: bad}))
    assert all(word in str(caught.value) for word in (field, *words)), caught.value


def test_a_kda_pool_wants_a_decay_for_each_channel() -> None:
    layer = LayerSpec("kda", 2, 2, 16, 32)
    good = {n: torch.zeros(3, *shape, dtype=dtype) for n, (shape, dtype) in record_shapes(layer, SPEC).items()}
    assert Pool(layer, SPEC, **good).decay.shape == (3, 2, R, 32)
    with pytest.raises(ValueError, match=r"decay: expected \(3, 2, 8, 32\) float32 on cpu, got \(3, 2, 8\)"):
        Pool(layer, SPEC, **(good | {"decay": good["decay"][..., 0]}))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"num_slots": 0}, "num_slots: expected 1 or more, got 0"), ({"ring_layout": "heads"}, "ring_layout: .*'heads'")],
)
def test_make_pool_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_pool(LAYER, SPEC, **({"num_slots": 2} | arguments))
