"""Bytes and limits of a step: the figures of docs and goals come from this formula, so they are pinned here.

Pinned are the published limits of whole steps at batch 256 (three layers, several T) and a small step counted byte by
byte by hand.
"""

from __future__ import annotations

import pytest
import torch

from replayssm.spec import LayerSpec, ReplaySpec
from tuning.roofline import NOMINAL_H200, Rates, step_traffic
from tuning.shapes import lookup

SUPER = lookup("nemotron-3-super").layer
READ = Rates(read=4.553e6, read_write=1.0)


def limit(name: str, dtype: torch.dtype, num_tokens: int) -> float:
    replay = ReplaySpec(max_draft=8, checkpoint_dtype=dtype)
    traffic = step_traffic(lookup(name).layer, replay, rows=256, live_records=8, num_tokens=num_tokens)
    return READ.limit_us(traffic)


@pytest.mark.parametrize(
    ("name", "dtype", "num_tokens", "published_us"),
    [
        ("nemotron-3-super", torch.float32, 1, 247.5),
        ("nemotron-3-super", torch.float32, 4, 257.0),
        ("nemotron-3-super", torch.float32, 8, 269.7),
        ("nemotron-3-super", torch.bfloat16, 1, 129.6),
        ("nemotron-3-super", torch.float16, 1, 129.6),
        ("nemotron-3-super", torch.bfloat16, 4, 139.1),
        ("nemotron-3-super", torch.bfloat16, 8, 151.8),
    ],
)
def test_limits_of_super_at_batch_256(name: str, dtype: torch.dtype, num_tokens: int, published_us: float) -> None:
    assert limit(name, dtype, num_tokens) == pytest.approx(published_us, abs=0.06)


@pytest.mark.parametrize(
    ("name", "num_tokens", "published_us"),
    [
        ("qwen3.5-122b-a10b", 1, 249),
        ("qwen3.5-122b-a10b", 4, 259),
        ("qwen3.5-122b-a10b", 8, 273),
        ("glm-5.3-flash", 1, 274),
        ("glm-5.3-flash", 8, 332),
    ],
)
def test_limits_of_delta_rules_at_batch_256(name: str, num_tokens: int, published_us: float) -> None:
    assert limit(name, torch.float32, num_tokens) == pytest.approx(published_us, abs=0.5)


def test_fold_of_a_full_window_of_super() -> None:
    traffic = step_traffic(SUPER, ReplaySpec(), rows=256, live_records=16, folds=True)
    assert traffic.total_bytes == 2_239_496_192
    assert NOMINAL_H200.limit_us(traffic) == pytest.approx(564, abs=0.5)


def test_one_small_step_counted_by_hand() -> None:
    layer = LayerSpec("mamba2", num_v_heads=4, num_k_heads=2, head_dim=8, d_state=16)
    replay = ReplaySpec(window=4, max_draft=2, checkpoint_dtype=torch.float16, activation_dtype=torch.bfloat16)
    traffic = step_traffic(
        layer, replay, rows=3, live_records=2, num_tokens=2, folds=True, has_z=True, gate_dtype=torch.bfloat16
    )
    x, B, dt = 4 * 8 * 2, 2 * 16 * 2, 4 * 4
    assert traffic.state_read_bytes == traffic.state_write_bytes == 3 * 4 * 8 * 16 * 2
    assert traffic.records_bytes == 3 * 2 * (x + B + dt)
    assert traffic.inputs_bytes == 3 * 2 * (2 * x + 2 * B + 4 * 2)
    assert traffic.outputs_bytes == 3 * 2 * x
    assert traffic.appends_bytes == 3 * 2 * (x + B + dt)
    parts = vars(traffic).values()
    assert traffic.total_bytes == sum(parts)


def test_steps_read_the_copy_and_folds_write_both() -> None:
    layer = LayerSpec("mamba2", num_v_heads=4, num_k_heads=2, head_dim=32, d_state=64)
    replay = ReplaySpec(window=4, read_dtype="nvfp4")
    state, copy = 4 * 32 * 64 * 4, 4 * 32 * (64 // 2 + 64 // 16) + 4 * 2 * 4
    read, fold = (step_traffic(layer, replay, rows=3, live_records=2, folds=folds) for folds in (False, True))
    assert (read.state_read_bytes, read.state_write_bytes) == (3 * copy, 0)
    assert (fold.state_read_bytes, fold.state_write_bytes) == (3 * state, 3 * (state + copy))


def test_the_kind_of_a_step_decides_its_rate() -> None:
    rates = Rates(read=10.0, read_write=5.0)
    kept = step_traffic(SUPER, ReplaySpec(), rows=1, live_records=3)
    folded = step_traffic(SUPER, ReplaySpec(), rows=1, live_records=3, folds=True)
    assert rates.limit_us(kept) == kept.total_bytes / 10
    assert rates.limit_us(folded) == folded.total_bytes / 5
    assert folded.total_bytes - kept.total_bytes == 128 * 64 * 128 * 4


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"rows": -1, "live_records": 0}, "rows and num_tokens"),
        ({"rows": 1, "live_records": 17}, "live_records: expected 0 to window=16"),
        ({"rows": 1, "live_records": 1, "num_tokens": 0}, "rows and num_tokens"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_traffic(SUPER, ReplaySpec(), **numbers)
