"""Autotuning: what is met inside of the context is tuned once, what is met outside never.

Grid: a shape that nobody chose for, one that a table has, a batch of another size, a tuner that fails, no tuner, and
the installed one with written times; the step path itself, by the launch that a CUDA call makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import replayssm
from cute_kernels.configs import Mamba2Options, StepConfig
from replayssm import LayerSpec, Plan, ReplaySpec, met, plan, plan_step, tuned
from replayssm.tuned import Choice, Shape
from tests.helpers.scripted import ScriptedSteps, tabled
from tuning import met as tuning_met
from tuning.search import NoCandidateError
from tuning.space import FOLD_VALUES

LAYER, REPLAY = LayerSpec("mamba2", 8, 2, 64, 64), ReplaySpec(window=4)
CHOSEN = StepConfig(split=2, fold_values=16)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing kept from elsewhere, no table, no CUDA graph."""
    monkeypatch.setattr(tuned, "_kept", {})
    monkeypatch.setattr(tuned, "tables", lambda arch: ())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plan.forget()
    yield
    plan.forget()


def planned(batch: int = 8) -> Plan:
    return plan_step(LAYER, REPLAY, Mamba2Options(), arch="sm_90a", batch=batch)


def meet(batch: int = 8, replay: ReplaySpec = REPLAY) -> None:
    met.meet(LAYER, replay, num_tokens=1, batch=batch, arch="sm_90a")


class Tuner:
    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def __call__(self, *asked: Any) -> Choice:
        self.asked.append(asked)
        return Choice(tabled(CHOSEN), 10.0)


def test_a_shape_is_tuned_once_and_serves_behind_the_context() -> None:
    tune = Tuner()
    assert planned().source == "heuristic"
    with replayssm.autotune(tune):
        for batch in (8, 5, 8, 9):
            meet(batch)
    assert [(rows, arch) for _, _, rows, arch in tune.asked] == [(8, "sm_90a"), (16, "sm_90a")]
    assert tune.asked[0][0] == LAYER and Shape.of(LAYER, tune.asked[0][1], 1) == Shape.of(LAYER, REPLAY, 1)
    for batch, source in ((8, "autotuned"), (5, "autotuned"), (16, "autotuned"), (4, "heuristic"), (17, "heuristic")):
        assert planned(batch).source == source
    assert (planned().key.config.split, planned().key.config.fold_values) == (2, 16)


def test_outside_of_the_context_nothing_is_tuned() -> None:
    tune = Tuner()
    meet()
    with replayssm.autotune(tune):
        pass
    meet()
    assert tune.asked == [] and planned().source == "heuristic"


def test_what_a_table_has_is_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {Shape.of(LAYER, REPLAY, 1): {8: Choice(tabled(CHOSEN), 9.0)}}
    table = tuned.Table("NVIDIA H200", "sm_90a", "measured", {}, "", known)
    monkeypatch.setattr(tuned, "tables", lambda arch: (("user", "a.json", table),))
    with replayssm.autotune(tune := Tuner()):
        meet()
        meet(replay=replace(REPLAY, window=3))
    assert [asked[1].window for asked in tune.asked] == [3]


def test_not_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with replayssm.autotune(tune := Tuner()):
        meet()
    assert tune.asked == []


def test_a_tuner_that_fails_leaves_the_heuristic() -> None:
    def fails(*asked: Any) -> Choice:
        raise NoCandidateError("all refused")

    with replayssm.autotune(fails), pytest.warns(RuntimeWarning, match="not tuned, NoCandidateError: all refused"):
        meet()
    assert planned().source == "heuristic"


def test_without_an_installed_tuner_the_context_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(met, "entry_points", lambda group: ())
    with pytest.raises(NotImplementedError, match=r"no entry point replayssm\.tuners"), replayssm.autotune():
        pass


def test_the_installed_tuner_races_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ScriptedSteps(times={StepConfig(split=2, fold_values=values): 50.0 for values in FOLD_VALUES})
    monkeypatch.setattr(tuning_met, "machine", steps.machine)
    monkeypatch.setattr(tuning_met, "compilers", nullcontext)  # nothing is compiled for a machine of written times
    monkeypatch.setattr(tuning_met.replayssm, "step", steps.step)
    choice = tuning_met.tune_step(LAYER, REPLAY, 1, "sm_90a")
    assert choice.parameters["split"] == 2 and choice.median_us < 100
    steps.wrong = frozenset(steps.launched)
    with pytest.raises(NoCandidateError):
        tuning_met.tune_step(LAYER, REPLAY, 1, "sm_90a")


def test_a_launch_meets_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no configuration is passed, and before it is planned; not one that no table would serve."""
    from replayssm import launch

    seen: list[Any] = []
    monkeypatch.setattr(launch.met, "meet", lambda *a, **k: seen.append((a, k)))
    monkeypatch.setattr(launch, "arch_of", lambda device: "sm_90a")

    def stop(*a: Any, **k: Any) -> None:
        seen.append("planned")
        raise NotImplementedError

    monkeypatch.setattr(launch, "plan_step", stop)
    pool = replayssm.make_pool(LAYER, REPLAY, 2)
    inputs = replayssm.Mamba2Inputs(
        x=torch.zeros(2, 1, 8, 64), dt=torch.zeros(2, 1, 8), B=torch.zeros(2, 1, 2, 64), C=torch.zeros(2, 1, 2, 64),
        A=-torch.ones(8),
    )  # fmt: skip
    cursors, rows = replayssm.make_cursors(REPLAY, 2), torch.arange(2, dtype=torch.int32)
    for config in (None, StepConfig()):
        with pytest.raises(NotImplementedError):
            launch._make_launch(pool, cursors, inputs, (), rows, False, (False, config))
    assert seen == [((LAYER, REPLAY), {"num_tokens": 1, "batch": 2, "arch": "sm_90a"}), "planned", "planned"]
    seen.clear()
    ragged = inputs._replace(cu_seqlens=torch.tensor([0, 1, 2], dtype=torch.int32))
    with pytest.raises(NotImplementedError):
        launch._make_launch(pool, cursors, ragged, (), rows, False, (False, None))
    assert seen == ["planned"]
