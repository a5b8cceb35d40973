"""The tensors that cross from a jit function to its kernel, in groups."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute


@dataclass(frozen=True)
class PoolTensors:
    """checkpoint [slots, HV, V, K]; value [slots, HV, R, V]; key [slots, HK, R, K]; decay [slots, HV, R] or [.., K]."""

    checkpoint: cute.Tensor
    value: cute.Tensor
    key: cute.Tensor
    decay: cute.Tensor


@dataclass(frozen=True)
class CursorTensors:
    """ring_start, num_committed [slots] int32."""

    ring_start: cute.Tensor
    num_committed: cute.Tensor


@dataclass(frozen=True)
class RowTensors:
    """cache_indices [rows]; force_fold [rows] bytes or None."""

    cache_indices: cute.Tensor
    force_fold: cute.Tensor | None


@dataclass(frozen=True)
class Mamba2Tensors:
    """x, z [rows, 1, HV, V]; dt [rows, 1, HV]; B, C [rows, 1, G, K]."""

    x: cute.Tensor
    dt: cute.Tensor
    B: cute.Tensor
    C: cute.Tensor
    z: cute.Tensor | None


@dataclass(frozen=True)
class Mamba2Parameters:
    """A, D, dt_bias [HV]."""

    A: cute.Tensor
    D: cute.Tensor | None
    dt_bias: cute.Tensor | None


@dataclass(frozen=True)
class GdnTensors:
    """q, k [rows, 1, HK, K]; v [rows, 1, HV, V]; a, b [rows, 1, HV]."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    a: cute.Tensor
    b: cute.Tensor


@dataclass(frozen=True)
class GdnParameters:
    """A_log, dt_bias [HV] float32."""

    A_log: cute.Tensor
    dt_bias: cute.Tensor


@dataclass(frozen=True)
class KdaTensors:
    """q, k [rows, 1, HK, K]; v [rows, 1, HV, V]; g [rows, 1, HV, K]; beta [rows, 1, HV]."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    g: cute.Tensor
    beta: cute.Tensor


@dataclass(frozen=True)
class KdaParameters:
    """A_log [HV] and dt_bias [HV, K], float32."""

    A_log: cute.Tensor
    dt_bias: cute.Tensor


InputTensors = Mamba2Tensors | GdnTensors | KdaTensors
ParameterTensors = Mamba2Parameters | GdnParameters | KdaParameters


@dataclass(frozen=True)
class StepTensors:
    """All tensors of a step; `out` is [rows, 1, HV, V]."""

    pool: PoolTensors
    cursors: CursorTensors
    rows: RowTensors
    inputs: InputTensors
    parameters: ParameterTensors
    out: cute.Tensor
