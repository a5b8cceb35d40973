"""The test set-up keeps its word: library memory comes poisoned, other memory does not, kernels are cached apart.

Without the poison a kernel that leaves part of its output unwritten would pass wherever that memory held zeros.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

ALLOCATIONS = ("torch.empty(3, 5)", "torch.empty_like(like)", "like.new_empty(2, 2)", "torch.empty_strided((2,), (1,))")


def allocate(expression: str, module: str, dtype: torch.dtype) -> torch.Tensor:
    names: dict[str, Any] = {"__name__": module, "torch": torch, "like": torch.zeros(4, dtype=dtype)}
    exec(f"tensor = {expression}.to({dtype})", names)
    return names["tensor"]


@pytest.mark.parametrize("expression", ALLOCATIONS)
@pytest.mark.parametrize("module", ["replayssm.ops", "cute_kernels.step", "replayssm"])
def test_library_allocations_are_poisoned(expression: str, module: str) -> None:
    assert allocate(expression, module, torch.bfloat16).isnan().all()


def test_integer_allocations_hold_no_valid_slot() -> None:
    assert (allocate("like.new_empty(7)", "replayssm.ops", torch.int32) == torch.iinfo(torch.int32).min).all()


def test_other_allocations_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "fill_", lambda *_: pytest.fail("poisoned memory that is not the library's"))
    for expression in ALLOCATIONS:
        allocate(expression, "transformers.models", torch.float32)
        allocate(expression, "replayssm_of_somebody_else", torch.float32)


def test_kernels_are_cached_apart_from_the_users(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert Path(os.environ["REPLAYSSM_CACHE"]).is_relative_to(tmp_path_factory.getbasetemp().parent)


@given(st.integers(0, 3))
def test_property_tests_may_use_the_device(device: torch.device, size: int) -> None:
    assert torch.zeros(size, device=device).device.type == device.type


def test_one_thread_a_worker() -> None:
    assert torch.get_num_threads() == 1


def test_tables_of_the_user_are_not_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert "REPLAYSSM_TUNED" not in os.environ
    assert Path(os.environ["XDG_CONFIG_HOME"]).is_relative_to(tmp_path_factory.getbasetemp())
