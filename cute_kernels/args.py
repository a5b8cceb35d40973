"""The tensors that cross from a jit function to its kernel, in groups.

With `RowTensors.cu_seqlens` the axes [rows, T] of inputs and output are [1, total] instead: the rows' tokens one after
the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.dtypes import CUTLASS_DTYPE


@dataclass(frozen=True)
class CopyTensors:
    """codes [slots, HV, V, K or bytes]; scale [slots, HV, V] float32 or [slots, bytes]; tile_scale [slots, HV, V / 16];
    None where the format has no such part."""

    codes: cute.Tensor
    scale: cute.Tensor | None
    tile_scale: cute.Tensor | None


@dataclass(frozen=True)
class PoolTensors:
    """checkpoint [slots, HV, V, K]; value [slots, HV, R, V]; key [slots, HK, R, K]; decay [slots, HV, R] or [.., K];
    of the read copy what `CopyTensors` says, None where steps read the checkpoint; seed [slots] int64 of stochastic
    rounding, else None."""

    checkpoint: cute.Tensor
    value: cute.Tensor
    key: cute.Tensor
    decay: cute.Tensor
    read_codes: cute.Tensor | None = None
    read_scale: cute.Tensor | None = None
    read_tile_scale: cute.Tensor | None = None
    seed: cute.Tensor | None = None

    @property
    def copy(self) -> CopyTensors:
        """The read copy, which must be there."""
        return CopyTensors(self.read_codes, self.read_scale, self.read_tile_scale)


@dataclass(frozen=True)
class CursorTensors:
    """ring_start, num_committed, fold_count [slots] int32; fold_count None where states are rounded to nearest."""

    ring_start: cute.Tensor
    num_committed: cute.Tensor
    fold_count: cute.Tensor | None = None


@dataclass(frozen=True)
class RowTensors:
    """cache_indices [rows]; force_fold [rows] bytes or None; cu_seqlens [rows + 1] int32 or None."""

    cache_indices: cute.Tensor
    force_fold: cute.Tensor | None
    cu_seqlens: cute.Tensor | None


@dataclass(frozen=True)
class MoveTensors:
    """source, destination [rows]; num_records [rows] int32. A destination is the source, and all records are meant,
    where None."""

    source: cute.Tensor
    destination: cute.Tensor | None
    num_records: cute.Tensor | None


@dataclass(frozen=True)
class Mamba2Tensors:
    """x, z [rows, T, HV, V]; dt [rows, T, HV]; B, C [rows, T, G, K]."""

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
    """q, k [rows, T, HK, K]; v [rows, T, HV, V]; a, b [rows, T, HV]."""

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
    """q, k [rows, T, HK, K]; v [rows, T, HV, V]; g [rows, T, HV, K]; beta [rows, T, HV]."""

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
    """All tensors of a step; `out` is [rows, T, HV, V]."""

    pool: PoolTensors
    cursors: CursorTensors
    rows: RowTensors
    inputs: InputTensors
    parameters: ParameterTensors
    out: cute.Tensor


def fake_cursors(slots: Any, counts_folds: bool) -> CursorTensors:
    """Cursors to compile for."""
    return CursorTensors(*(fake_vector("int32", slots) for _ in range(2 + counts_folds)))


def fake_vector(dtype: str, extent: Any) -> Any:
    """A packed vector to compile for."""
    element = CUTLASS_DTYPE[dtype]
    return make_fake_tensor(element, (extent,), (1,), assumed_align=element.width // 8)
