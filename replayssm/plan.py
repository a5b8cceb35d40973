"""How a step will run: pure functions of integers and names that return one printable object.

The configuration is what the caller passed (`source="explicit"`), else a rule of thumb for the shape and the batch
(`source="heuristic"`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch

from cute_kernels.arch import ARCHES
from cute_kernels.configs import (
    GdnOptions,
    KdaOptions,
    Mamba2Options,
    Options,
    RingLayout,
    RowOptions,
    StepConfig,
    StepKey,
    heuristic_config,
    invalid_reason,
)
from replayssm.spec import LayerSpec, ReplaySpec

Source = Literal["explicit", "heuristic"]
DEFAULT_ROWS = RowOptions()
OPTIONS: dict[str, type] = {"mamba2": Mamba2Options, "gdn": GdnOptions, "kda": KdaOptions}


@dataclass(frozen=True)
class Plan:
    """What a step's kernel is specialised for, the architecture, and where its configuration came from."""

    key: StepKey
    arch: str
    source: Source


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as the kernels know it, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@functools.cache
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
        batch: rows of the step; no shape that was measured wants another plan at another batch.
        rows: how the step is called.
        ring_layout: of the pool: "record_major", "head_major" or "strided".
        config: launch parameters, or None to have them chosen.

    Raises:
        NotImplementedError: no kernel exists for this layer; the message names the limit.
    """
    if not isinstance(options, OPTIONS[layer.recurrence]):
        raise TypeError(f"options: expected {OPTIONS[layer.recurrence].__name__}, got {type(options).__name__}")
    replay.check_cuda()
    key = StepKey(
        num_v_heads=layer.num_v_heads,
        num_k_heads=layer.num_k_heads,
        head_dim=layer.head_dim,
        d_state=layer.d_state,
        window=replay.window,
        ring_capacity=replay.ring_capacity,
        ring_layout=ring_layout,
        checkpoint_dtype=dtype_name(replay.checkpoint_dtype),
        activation_dtype=dtype_name(replay.activation_dtype),
        options=options,
        config=config or StepConfig(),
        rows=rows,
        value_dtype=None if replay.value_dtype is None else dtype_name(replay.value_dtype),
        decay_dtype=dtype_name(replay.decay_dtype),
        num_tokens=num_tokens,
    )
    source: Source = "explicit"
    if config is None:
        chosen = heuristic_config(key, batch, ARCHES[arch])
        key, source = replace(key, config=chosen or StepConfig()), "heuristic"
    if reason := invalid_reason(key, ARCHES[arch]):
        raise NotImplementedError(reason)
    return Plan(key, arch, source)
