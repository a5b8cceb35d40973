"""A spec that exists is one that can run: every number out of range is refused where it is written, by name.

Each field is taken to both ends of its range and one step past them; what is derived is written out by hand.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm import LayerSpec, ReplaySpec

LAYER = LayerSpec("mamba2", 8, 2, 64, 128)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recurrence": "rwkv"}, ("recurrence", "mamba2", "'rwkv'")),
        ({"num_v_heads": 0}, ("num_v_heads", "1 or more", "got 0")),
        ({"num_v_heads": 8.0}, ("num_v_heads", "an int", "got 8.0")),
        ({"num_v_heads": 7}, ("num_v_heads", "multiple of num_k_heads=2", "got 7", "every key head")),
        ({"num_v_heads": 1}, ("num_v_heads", "multiple of num_k_heads=2", "got 1")),
        ({"num_k_heads": 0}, ("num_k_heads", "1 or more", "got 0")),
        ({"num_k_heads": -2}, ("num_k_heads", "got -2")),
        ({"num_k_heads": "2"}, ("num_k_heads", "an int", "'2'")),
        ({"head_dim": 0}, ("head_dim", "1 or more")),
        ({"d_state": 0}, ("d_state", "1 or more")),
    ],
)
def test_a_layer_refuses(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        replace(LAYER, **changes)
    assert all(word in str(caught.value) for word in words), caught.value


@given(st.integers(1, 300), st.integers(1, 300))
def test_heads_are_shared_evenly_or_refused(heads: int, groups: int) -> None:
    if heads % groups:
        with pytest.raises(ValueError, match="num_v_heads"):
            LayerSpec("gdn", heads, groups, 8, 8)
    else:
        assert LayerSpec("gdn", heads, groups, 8, 8).heads_per_group * groups == heads


def test_decays_per_channel_are_those_of_kda() -> None:
    assert [LayerSpec(kind, 2, 2, 8, 8).decays_per_channel for kind in ("mamba2", "gdn", "kda")] == [False, False, True]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 0}, ("window", "1 to 64", "got 0")),
        ({"window": 65}, ("window", "1 to 64", "got 65")),
        ({"window": -1}, ("window", "got -1")),
        ({"max_draft": 0}, ("max_draft", "got 0")),
        ({"max_draft": 17}, ("max_draft", "16", "got 17")),
        ({"window": 3, "max_draft": 4}, ("max_draft", "min(16, window) = 3", "got 4")),
        ({"ring_capacity": 16}, ("ring_capacity", "window + max_draft = 17", "got 16")),
        ({"ring_capacity": -1}, ("ring_capacity", "got -1")),
        ({"window": 16.0}, ("window", "an int", "got 16.0")),
        ({"window": "16"}, ("window", "an int", "got '16'")),
        ({"max_draft": True}, ("max_draft", "an int", "got True")),
    ],
)
def test_a_replay_refuses(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        ReplaySpec(**changes)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", ["checkpoint_dtype", "activation_dtype"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, "float32", None])
def test_a_dtype_without_a_path_is_refused(name: str, dtype: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}: supported are .*float32.*, got {dtype}"):
        ReplaySpec(**{name: dtype})


@given(st.integers(1, 64), st.data())
def test_both_ends_of_every_range_are_accepted(window: int, data: st.DataObject) -> None:
    draft = data.draw(st.integers(1, min(16, window)))
    assert ReplaySpec(window, draft).ring_capacity == window + draft
    assert ReplaySpec(window, draft, ring_capacity=window + draft + 5).ring_capacity == window + draft + 5


def test_defaults_are_those_of_the_docstring() -> None:
    spec = ReplaySpec()
    assert (spec.window, spec.max_draft, spec.ring_capacity) == (16, 1, 17)
    assert (spec.checkpoint_dtype, spec.activation_dtype) == (torch.float32, torch.bfloat16)
    assert (spec.read_dtype, spec.read_format, spec.rounding) == (None, None, "nearest")


def test_specs_are_values() -> None:
    """They key caches: equal when their fields are, and fixed once made."""
    assert LAYER == LayerSpec("mamba2", 8, 2, 64, 128) != replace(LAYER, head_dim=80)
    assert len({ReplaySpec(), ReplaySpec(16, 1), ReplaySpec(ring_capacity=17), ReplaySpec(15)}) == 2
    with pytest.raises(FrozenInstanceError):
        LAYER.head_dim = 80  # type: ignore[misc]
