"""The tuner behind `replayssm.autotune`: one shape and batch, when a step meets it."""

from __future__ import annotations

import functools

import replayssm
from replayssm.spec import LayerSpec, ReplaySpec
from replayssm.tuned import Choice
from tuning.bench import Machine
from tuning.search import NoCandidateError
from tuning.shapes import MODELS, ModelShape
from tuning.store import Journal
from tuning.tuner import Field, Job, Tuner, compilers, multiprocessors

machine = functools.cache(Machine.current_cuda)


def tune_step(layer: LayerSpec, replay: ReplaySpec, rows: int, arch: str) -> Choice:
    """The launch parameters of a step of `replay.max_draft` tokens in each of so many rows, half of which stay.

    Raises:
        NoCandidateError: every candidate was refused.
    """
    known = next((shape for shape in MODELS if shape.layer == layer), None)
    shape = known or ModelShape(layer.recurrence, layer, None, "a pool that was stepped")
    here = machine()
    job = Job(shape, replay, rows, max(1.0, replay.max_draft / 2))
    found: list[Choice | str] = []
    with compilers() as executor:
        tuner = Tuner(here, Journal(None, {}), replayssm.step, executor=executor)
        tuner.run([Field.of(job, arch, multiprocessors())], lambda _, result: found.append(result))
    (result,) = found
    if isinstance(result, str):
        raise NoCandidateError(result)
    return result
