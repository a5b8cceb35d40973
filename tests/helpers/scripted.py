"""A machine whose times are written down beforehand: the verbs run the torch twin, so the gates are real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cute_kernels.configs import StepConfig
from replayssm.reference import replay as reference
from replayssm.tuned import TUNED_FIELDS
from tuning.bench import Machine


def launch_of(config: StepConfig) -> StepConfig:
    """What of it is searched: all but precision and readout, the latter that of sm_90a."""
    return replace(config, precision=StepConfig.precision)


def tabled(config: StepConfig) -> dict[str, int]:
    """As a tuned table holds it."""
    return {name: getattr(config, name) for name in TUNED_FIELDS}


def printed(config: StepConfig) -> str:
    """As the commands print it."""
    return ", ".join(f"{name} {value}" for name, value in tabled(config).items())


@dataclass
class ScriptedSteps:
    """A step that takes what its launch parameters are said to take; twice as much where every row folds.

    Args:
        times: by `launch_of` a configuration, in microseconds; others take `default`.
        wrong: launch parameters whose result is wrong.
    """

    times: Mapping[StepConfig, float] = field(default_factory=dict)
    default: float = 100.0
    wrong: frozenset[StepConfig] = frozenset()
    launched: list[StepConfig] = field(default_factory=list)
    sampled: list[StepConfig] = field(default_factory=list)

    def step(self, pool: Any, cursors: Any, inputs: Any, *, config: StepConfig, **rest: Any) -> None:
        launch = launch_of(config)
        reference.step(pool, cursors, inputs, **rest)
        if launch in self.wrong:
            rest["out"].mul_(1.5)
        self.launched.append(launch)
        self._all_fold = bool((cursors.num_committed[rest["cache_indices"].long()] == pool.replay.window).all())

    def capture(self, launch: Callable[[], object]) -> tuple[StepConfig, float]:
        launch()
        launched = self.launched[-1]
        return launched, self.times.get(launched, self.default) * (2 if self._all_fold else 1)

    def sample(self, captured: Sequence[tuple[StepConfig, float]]) -> list[float]:
        self.sampled += [launched for launched, _ in captured]
        return [time_us for _, time_us in captured]

    def machine(self, device_name: str = "NVIDIA H200", arch: str = "sm_90a") -> Machine:
        """The machine that these steps are timed on."""
        nothing: Any = lambda *args: None  # noqa: E731
        return Machine(torch.device("cpu"), device_name, arch, self, nothing, nothing, nothing)
