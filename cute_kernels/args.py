"""The tensors that cross from a jit function to its kernel, in groups."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute


@dataclass(frozen=True)
class PoolTensors:
    """checkpoint [slots, HV, V, K]; value [slots, HV, R, V]; key [slots, HK, R, K]; decay [slots, HV, R]."""

    checkpoint: cute.Tensor
    value: cute.Tensor
    key: cute.Tensor
    decay: cute.Tensor


@dataclass(frozen=True)
class RowTensors:
    """cache_indices [rows]; ring_start, num_committed [slots] int32; force_fold [rows] bytes or None."""

    cache_indices: cute.Tensor
    ring_start: cute.Tensor
    num_committed: cute.Tensor
    force_fold: cute.Tensor | None


@dataclass(frozen=True)
class LocatedRows:
    """table [rows, 4] int32: slot, ring_start, num_committed, whether the row folds; slot -1 is padding."""

    table: cute.Tensor


@dataclass(frozen=True)
class Mamba2Tensors:
    """x, z, out [rows, 1, HV, V]; dt [rows, 1, HV]; B, C [rows, 1, G, K]; A, D, dt_bias [HV]."""

    x: cute.Tensor
    dt: cute.Tensor
    B: cute.Tensor
    C: cute.Tensor
    A: cute.Tensor
    D: cute.Tensor | None
    z: cute.Tensor | None
    dt_bias: cute.Tensor | None
