"""The table of model shapes: rows are valid and sourced, names are found, shards keep whole heads and groups.

The shards named here are those that serving engines use; each is compared with head counts written out by hand. The
list of test cases builds on the table, so it is checked here too.
"""

from __future__ import annotations

import pytest

from tests.helpers import cases
from tuning.shapes import MODELS, lookup, names, released, shard


def test_rows_are_named_once_in_lower_case_and_carry_a_source() -> None:
    assert len(set(names())) == len(MODELS)
    assert all(model.name == model.name.lower() and len(model.source) > 10 for model in MODELS)
    assert all(model.num_layers is None or model.num_layers > 0 for model in MODELS)


def test_names_by_recurrence_partition_the_table() -> None:
    parts = [names(recurrence) for recurrence in ("mamba2", "gdn", "kda")]
    assert all(parts)
    assert sorted(sum(parts, ())) == sorted(names())


@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        ("nemotron-3-super", (128, 8, 64, 128)),
        ("nemotron-3-nano-4b", (96, 8, 80, 128)),
        ("nemotron-h-47b", (256, 8, 64, 256)),
        ("qwen3.5-122b-a10b", (64, 16, 128, 128)),
        ("kimi-k3", (96, 96, 128, 128)),
    ],
)
def test_geometry_of_a_model(name: str, geometry: tuple[int, ...]) -> None:
    layer = lookup(name).layer
    assert (layer.num_v_heads, layer.num_k_heads, layer.head_dim, layer.d_state) == geometry


@pytest.mark.parametrize(
    ("name", "tp", "heads"),
    [
        ("nemotron-3-super", 1, (128, 8)),
        ("nemotron-3-super", 2, (64, 4)),
        ("nemotron-3-super", 4, (32, 2)),
        ("nemotron-3-super", 8, (16, 1)),
        ("nemotron-3-super", 16, (8, 1)),  # more devices than groups: each group lives on two of them
        ("qwen3.5-397b-a17b", 8, (8, 2)),
        ("kimi-k3", 8, (12, 12)),
        ("qwen3.5-27b", 4, (12, 4)),
    ],
)
def test_shards_hold_their_part_of_the_heads(name: str, tp: int, heads: tuple[int, int]) -> None:
    whole, part = lookup(name), lookup(name, tp=tp)
    assert (part.layer.num_v_heads, part.layer.num_k_heads) == heads
    assert (part.layer.head_dim, part.layer.d_state) == (whole.layer.head_dim, whole.layer.d_state)
    assert part == shard(whole, tp) == lookup(part.name.upper())
    assert (part.name == whole.name) == (tp == 1)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_shard_never_loses_a_head_or_its_last_group(model) -> None:
    sharded = 0
    for tp in range(1, model.layer.num_v_heads + 1):
        try:
            part = shard(model, tp)
        except ValueError:
            continue
        sharded += 1
        assert part.layer.num_v_heads * tp == model.layer.num_v_heads
        assert part.layer.num_k_heads * tp >= model.layer.num_k_heads
    assert sharded >= 4


def test_the_released_shards_are_those_that_the_heads_allow() -> None:
    """Of 96 key heads 3 devices make shards, of 16 or 8 they make none; whole layers come first."""
    assert [shape.name for shape in released([1])] == [model.name for model in MODELS]
    thirds = released([3, 1])[len(MODELS) :]
    assert [shape.name for shape in thirds] == ["kimi-k3@tp3"]
    eighths = released([1, 2, 4, 8])
    assert len(eighths) == 4 * len(MODELS)
    assert eighths[-1] == lookup(MODELS[-1].name, tp=8)


@pytest.mark.parametrize(
    ("name", "tp", "message"),
    [
        ("nemotron-3-supper", 1, "did you mean 'nemotron-3-super'.*kimi-k3"),
        ("nothing-like-it", 1, "known are nemotron-3-nano-4b"),
        ("nemotron-3-super", 3, "divisor of the 128 heads"),
        ("qwen3.5-27b", 3, "multiple of the 16 key heads"),
        ("nemotron-3-super", 0, "tp: expected 1 or more"),
    ],
)
def test_refusals_name_the_remedy(name: str, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lookup(name, tp=tp)


def test_cases_are_distinct_and_valid() -> None:
    ids = [case.id for case in cases.ALL]
    assert len(set(ids)) == len(ids)
    for case in cases.ALL:
        assert case.layer.heads_per_group * case.HK == case.HV
        assert case.replay.ring_capacity == case.window + case.T
    assert cases.ALL[-1].id == "mamba2-HV128-G8-V64-K128-L16-T1-bf16-fp16"


def test_cases_are_picked_by_recurrence_and_tokens() -> None:
    picked = cases.pick(recurrence="gdn", num_tokens=1)
    assert {case.recurrence for case in picked} == {"gdn"}
    assert {case.T for case in picked} == {1}
    assert {model.layer.head_dim for model in MODELS} <= {case.V for case in cases.pick(cases.RELEASED)}
