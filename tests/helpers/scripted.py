"""A machine whose times are written down beforehand: the verbs run the torch twin, so the gates are real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cute_kernels.configs import StepConfig
from replayssm.reference import replay as reference
from tuning.bench import Machine

Parameters = tuple[int, int]  # split, fold_values


@dataclass
class ScriptedSteps:
    """A step that takes what its launch parameters are said to take; twice as much where every row folds.

    Args:
        times: by (split, fold_values), in microseconds; others take `default`.
        wrong: launch parameters whose result is wrong.
    """

    times: Mapping[Parameters, float] = field(default_factory=dict)
    default: float = 100.0
    wrong: frozenset[Parameters] = frozenset()
    launched: list[Parameters] = field(default_factory=list)
    sampled: list[Parameters] = field(default_factory=list)

    def step(self, pool: Any, cursors: Any, inputs: Any, *, config: StepConfig, **rest: Any) -> None:
        parameters = (config.split, config.fold_values)
        reference.step(pool, cursors, inputs, **rest)
        if parameters in self.wrong:
            rest["out"].mul_(1.5)
        self.launched.append(parameters)
        self._all_fold = bool((cursors.num_committed[rest["cache_indices"].long()] == pool.replay.window).all())

    def capture(self, launch: Callable[[], object]) -> tuple[Parameters, float]:
        launch()
        parameters = self.launched[-1]
        return parameters, self.times.get(parameters, self.default) * (2 if self._all_fold else 1)

    def sample(self, captured: Sequence[tuple[Parameters, float]]) -> list[float]:
        self.sampled += [parameters for parameters, _ in captured]
        return [time_us for _, time_us in captured]

    def machine(self, device_name: str = "NVIDIA H200", arch: str = "sm_90a") -> Machine:
        """The machine that these steps are timed on."""
        nothing: Any = lambda *args: None  # noqa: E731
        return Machine(torch.device("cpu"), device_name, arch, self, nothing, nothing, nothing)
