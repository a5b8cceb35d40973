"""What a step's kernel is specialised for, from the specs of a layer: for plans, tuned tables and the tuner."""

from __future__ import annotations

import torch

from cute_kernels.configs import (
    GdnOptions,
    KdaOptions,
    Mamba2Options,
    Options,
    RingLayout,
    RowOptions,
    StepConfig,
    StepKey,
)
from replayssm.spec import LayerSpec, ReadDtype, Recurrence, ReplaySpec

DEFAULT_ROWS = RowOptions()
# For what depends on the recurrence alone, not on a step's inputs: a fold, and whether a configuration fits.
ANY_OPTIONS: dict[Recurrence, Options] = {"mamba2": Mamba2Options(), "gdn": GdnOptions(1.0), "kda": KdaOptions(1.0)}


def dtype_name(dtype: ReadDtype) -> str:
    """The name of a dtype as the kernels know it, e.g. "bfloat16" or "nvfp4"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> ReadDtype:
    """The dtype of a name that `dtype_name` gave.

    Raises:
        ValueError: no dtype has that name.
    """
    packed: dict[str, ReadDtype] = {"nvfp4": "nvfp4", "mxfp8": "mxfp8"}
    if name in packed:
        return packed[name]
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected the name of one, got {name!r}")
    return dtype


def step_key(
    layer: LayerSpec,
    replay: ReplaySpec,
    options: Options,
    *,
    num_tokens: int = 1,
    rows: RowOptions = DEFAULT_ROWS,
    ring_layout: RingLayout = "record_major",
    config: StepConfig | None = None,
) -> StepKey:
    """The key of a step of `num_tokens` tokens a row, valid or not; arguments as for `plan_step`."""
    return StepKey(
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
        read_dtype=dtype_name(replay.read_dtype) if replay.read_dtype and num_tokens else None,
        rounding=replay.rounding,
    )
