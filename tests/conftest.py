"""What each test gets: one thread, a fixed seed, poisoned memory, no cache or tables of the user, a GPU or why not."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Several workers share the cores, so each takes one thread. OpenMP reads this once, when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

from replayssm import plan, tuned

OLDEST_CAPABILITY = (9, 0)
LIBRARY = ("replayssm", "cute_kernels")

torch.set_num_threads(1)
# A failing example must fail again on another machine, and a slow machine is no failure.
settings.register_profile("repository", derandomize=True, deadline=None, database=None)
settings.load_profile("repository")


@functools.cache
def why_no_gpu() -> str | None:
    """The reason why tests marked `gpu` cannot run here, or None if they can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device of sm_90 or newer; torch sees none"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < OLDEST_CAPABILITY:
        return f"needs a CUDA device of sm_90 or newer; {torch.cuda.get_device_name()} is sm_{major}{minor}"
    if importlib.util.find_spec("cutlass") is None:
        return "needs nvidia-cutlass-dsl to compile kernels; it is not installed"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail, not skip, if the tests marked gpu cannot run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--require-gpu") and (reason := why_no_gpu()):
        raise pytest.UsageError(f"--require-gpu: {reason}")


def pytest_report_header() -> str:
    return f"torch {torch.__version__}; tests marked gpu: {why_no_gpu() or torch.cuda.get_device_name()}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, then the current CUDA device where there is one."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled kernels out of the user's cache; the workers of one run share a folder."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLAYSSM_CACHE", str(folder))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plan with the heuristic, whatever the user has tuned and the package ships."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "SHIPPED", tmp_path_factory.mktemp("shipped"))
        patch.delenv("REPLAYSSM_TUNED", raising=False)
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        for cache in (tuned.tables, plan._planned):  # which collecting the tests may have filled
            cache.cache_clear()
        yield


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what library code allocates without initialising it, so that reading it before writing shows."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))


def _poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] in LIBRARY:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).min)
        return tensor

    return poisoned


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
