"""How a step will run: pure functions of integers and names that return one printable object.

The configuration is what the caller passed (`source="explicit"`), else what a tuned table holds for the shape ("user"
or "shipped", `replayssm.tuned`), else what `replayssm.autotune` found ("autotuned"), else what was predicted for the
architecture ("predicted"), else a rule of thumb ("heuristic").
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from cute_kernels.arch import ARCHES
from cute_kernels.configs import Options, RingLayout, RowOptions, StepConfig, StepKey
from cute_kernels.heuristic import heuristic_config, invalid_reason
from replayssm import tuned
from replayssm.keys import ANY_OPTIONS, DEFAULT_ROWS, step_key
from replayssm.spec import LayerSpec, ReplaySpec

OPTIONS: dict[str, type] = {recurrence: type(options) for recurrence, options in ANY_OPTIONS.items()}


@dataclass(frozen=True)
class Plan:
    """What a step's kernel is specialised for, the architecture, and where its configuration came from."""

    key: StepKey
    arch: str
    source: tuned.Source


def plan_step(
    layer: LayerSpec,
    replay: ReplaySpec,
    options: Options,
    *,
    arch: str,
    batch: int,
    num_tokens: int = 1,
    rows: RowOptions = DEFAULT_ROWS,
    ring_layout: RingLayout = "record_major",
    config: StepConfig | None = None,
) -> Plan:
    """Plan a step of `num_tokens` tokens a row, or with 0 a fold that is no part of one.

    Args:
        options: which optional tensors the layer has, and dtypes.
        arch: "sm_90a", "sm_100a" or "sm_103a".
        batch: rows of the step; batches up to the same power of two share a plan.
        rows: how the step is called.
        ring_layout: of the pool: "record_major", "head_major" or "strided".
        config: launch parameters, or None to have them chosen.

    Raises:
        NotImplementedError: no kernel exists for this layer; the message names the limit.
        TunedTableError: the file that `REPLAYSSM_TUNED` names cannot be used.
    """
    return _planned(layer, replay, options, arch, tuned.bucket(batch), num_tokens, rows, ring_layout, config)


def in_tables(num_tokens: int, rows: RowOptions) -> bool:
    """Whether tuned tables speak of such a step: one token of rows that may have none runs the kernel of several, which
    they have for several only."""
    return num_tokens != 1 or not rows.has_cu_seqlens


def forget() -> None:
    """Make plans anew: what they are chosen from has changed."""
    _planned.cache_clear()


@functools.cache
def _planned(
    layer: LayerSpec,
    replay: ReplaySpec,
    options: Options,
    arch: str,
    batch: int,
    num_tokens: int,
    rows: RowOptions,
    ring_layout: RingLayout,
    config: StepConfig | None,
) -> Plan:
    if not isinstance(options, OPTIONS[layer.recurrence]):
        raise TypeError(f"options: expected {OPTIONS[layer.recurrence].__name__}, got {type(options).__name__}")
    key = step_key(layer, replay, options, num_tokens=num_tokens, rows=rows, ring_layout=ring_layout, config=config)
    source: tuned.Source = "explicit"
    if config is None:
        chosen, source = heuristic_config(key, batch, ARCHES[arch]) or StepConfig(), "heuristic"
        known = in_tables(num_tokens, rows)
        found = tuned.find(layer, replay, num_tokens=num_tokens, batch=batch, arch=arch) if known else None
        if found:
            chosen, source = replace(chosen, **found.choice.parameters), found.source
        key = replace(key, config=chosen)
    if reason := invalid_reason(key, ARCHES[arch]):
        raise NotImplementedError(reason)
    return Plan(key, arch, source)
