"""Tuning steps as they are met: `with replayssm.autotune(): ...`.

Outside of the context nothing is ever tuned on the way to a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points

import torch

from replayssm import plan, tuned
from replayssm.spec import LayerSpec, ReplaySpec

GROUP = "replayssm.tuners"  # of the entry point that brings the tuner
Tune = Callable[[LayerSpec, ReplaySpec, int, str], tuned.Choice]
_active: list[Tune] = []


@contextmanager
def autotune(tune: Tune | None = None) -> Iterator[None]:
    """Within this context, a step on CUDA tensors whose launch parameters nobody has chosen is tuned before it runs.

    It takes up to a minute a shape, most of which compiles, and memory for a pool of as many rows. What is found serves
    this process from then on; `replayssm tune` keeps it in a table. A shape is met when a pool is first stepped in a
    new way, so a pool that was stepped before keeps its kernels. Not while a CUDA graph is captured: step once before.

    Args:
        tune: chooses the launch parameters of (layer, replay, rows, arch), where `replay.max_draft` is the number of
            tokens; the installed tuner when None.

    Raises:
        NotImplementedError: no tuner is installed.
    """
    _active.append(tune or _installed())
    try:
        yield
    finally:
        _active.pop()


def _installed() -> Tune:
    for entry in entry_points(group=GROUP):
        tune: Tune = entry.load()
        return tune
    raise NotImplementedError(f"autotune: no entry point {GROUP} is installed; pip install replayssm, or pass tune=")


def meet(layer: LayerSpec, replay: ReplaySpec, *, num_tokens: int, batch: int, arch: str) -> None:
    """Tune a step that is about to be planned, if it is to be: see `autotune`."""
    if not _active or torch.cuda.is_current_stream_capturing():
        return
    found = tuned.find(layer, replay, num_tokens=num_tokens, batch=batch, arch=arch)
    if found is not None and found.basis == "measured":
        return
    shape, rows = tuned.Shape.of(layer, replay, num_tokens), tuned.bucket(batch)
    try:
        choice = _active[-1](layer, shape.replay, rows, arch)
    except Exception as error:  # whatever is wrong with tuning, the step itself has a heuristic
        warnings.warn(f"autotune: not tuned, {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
        return
    tuned.keep(shape, rows, arch, choice)
    plan.forget()
