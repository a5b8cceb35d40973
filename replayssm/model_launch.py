"""How `flush`, `materialize` and `write_read_copy` reach their kernels.

The first two launch one for all layers of a geometry, one for the read copies of each layer that has them, and one for
the cursors.

Tables on the device say where the layers' memory lies. The first call makes them, later ones find them by their
contents: memory that moved, or a pool that was built anew, has another table, and one that a captured graph reads stays
as long as the cursors do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.configs import RowOptions, StepKey
from replayssm import launch
from replayssm.cursors import Cursors
from replayssm.keys import ANY_OPTIONS, dtype_name
from replayssm.plan import plan_step
from replayssm.pool import Pool
from replayssm.spec import LayerSpec, ReplaySpec

Row = tuple[int, ...]
Geometry = tuple[LayerSpec, ReplaySpec]
Rows = tuple[Tensor, Tensor | None, Tensor | None]  # source, destination, num_records


@dataclass(frozen=True, eq=False)
class ModelLaunch:
    """The kernels of a call, in their order: of each geometry with its table of layers, of each pool's read copies
    (None where it has none), and of the cursors."""

    layers: list[tuple[Callable[..., None], Tensor]]
    copies: list[Callable[..., None] | None]
    empty: Callable[..., None]

    def __call__(self, cursors: Cursors, rows: Rows, pools: tuple[Pool, ...]) -> None:
        tensors = cursors.tensors
        for kernel, table in self.layers:
            kernel(table, tensors, rows)
        source, destination, num_records = rows
        for copy, pool in zip(self.copies, pools, strict=True):
            if copy is not None:
                copy(pool.checkpoint, pool.read_parts, (source, destination, None))
        num_records = None if cursors.fold_count is None else num_records
        self.empty(tensors, (source, destination, num_records), cursors.replay.window, cursors.replay.ring_capacity)


def cuda_materialize(
    cursors: Cursors,
    source: Tensor,
    destination: Tensor | None,
    num_records: Tensor | None,
    pools: tuple[Pool, ...],
    A: tuple[Tensor | None, ...],
) -> None:
    """Fold records of `source` into the checkpoints of `destination`, in place when None, and move the cursors.

    Arguments are checked. Layers of one geometry (`LayerSpec` and `ReplaySpec`) share a launch, whatever their strides.
    """
    launch.check_row_count("slots" if destination is None else "source", source.shape[0])
    if source.shape[0] == 0:  # nothing to launch
        return
    layers = tuple((pool.layer, pool.replay, table_row(pool, rate)) for pool, rate in zip(pools, A, strict=True))
    signature = (source.dtype, destination is not None, num_records is not None, layers)
    made = cursors.launches.get(signature)
    if made is None:
        made = cursors.launches[signature] = _make_launch(cursors, *signature)
    made(cursors, (source, destination, num_records), pools)


def cuda_write_read_copy(slots: Tensor, pools: tuple[Pool, ...]) -> None:
    """Make the read copies of some slots; negative ones are padding. Arguments are checked."""
    launch.check_row_count("slots", slots.shape[0])
    if slots.shape[0] == 0:  # nothing to launch
        return
    for pool in pools:
        if pool.replay.read_dtype is not None:
            signature = ("write_read_copy", slots.dtype)
            kernel = pool.launches.get(signature)
            if kernel is None:
                arch = launch.arch_of(pool.device)
                kernel = pool.launches[signature] = copy_kernel(pool.layer, pool.replay, arch, slots.dtype, False)
            kernel(pool.checkpoint, pool.read_parts, (slots, None, None))


def copy_kernel(
    layer: LayerSpec, replay: ReplaySpec, arch: str, index_dtype: torch.dtype, has_destination: bool
) -> Callable[..., None]:
    """The kernel of a layer's read copies, which it has.

    Raises:
        NotImplementedError: no kernel exists for this layer; the message names the limit.
    """
    assert replay.read_dtype is not None
    module = launch.kernel_modules().encode
    if reason := module.invalid_reason(layer.head_dim, layer.d_state):
        raise NotImplementedError(reason)
    key = module.EncodeKey(
        num_v_heads=layer.num_v_heads,
        head_dim=layer.head_dim,
        d_state=layer.d_state,
        checkpoint_dtype=dtype_name(replay.checkpoint_dtype),
        read_dtype=dtype_name(replay.read_dtype),
        index_dtype=dtype_name(index_dtype),
        has_destination=has_destination,
    )
    return module.kernel(key, arch)


def table_row(pool: Pool, rate: Tensor | None) -> Row:
    """What the kernel must know of a layer's memory: see `cute_kernels.materialize.TABLE_COLUMNS`."""
    checkpoint, *rings = pool.tensors[:4]
    words = [checkpoint.data_ptr(), checkpoint.stride(0)]
    words += [0 if tensor is None else tensor.data_ptr() for tensor in (rate, pool.seed)]
    for ring in rings:
        words += [ring.data_ptr(), *ring.stride()[:3]]
    return tuple(words)


def _make_launch(
    cursors: Cursors,
    index_dtype: torch.dtype,
    has_destination: bool,
    has_num_records: bool,
    layers: tuple[tuple[LayerSpec, ReplaySpec, Row], ...],
) -> ModelLaunch:
    modules, arch = launch.kernel_modules(), launch.arch_of(cursors.device)
    groups: dict[Geometry, list[Row]] = {}
    for layer, replay, row in layers:
        groups.setdefault((layer, replay), []).append(row)
    made = []
    for (layer, replay), rows in groups.items():
        key = modules.materialize.MaterializeKey(
            plan_fold(layer, replay, arch, dtype_name(index_dtype)), has_destination, has_num_records
        )
        table = torch.tensor(rows, dtype=torch.int64, device=cursors.device)
        made.append((modules.materialize.kernel(key, arch), table))
    copies = [
        copy_kernel(layer, replay, arch, index_dtype, has_destination) if replay.read_dtype is not None else None
        for layer, replay, _ in layers
    ]
    counts_folds = cursors.fold_count is not None
    key = modules.empty.EmptyKey(
        dtype_name(index_dtype), has_destination, has_num_records and counts_folds, counts_folds
    )
    return ModelLaunch(made, copies, modules.empty.kernel(key, arch))


def plan_fold(layer: LayerSpec, replay: ReplaySpec, arch: str, index_dtype: str) -> StepKey:
    """The key of a step of no tokens, on rings of any layout.

    Raises:
        NotImplementedError: no kernel exists for this layer; the message names the limit.
    """
    plan = plan_step(
        layer,
        replay,
        ANY_OPTIONS[layer.recurrence],
        arch=arch,
        batch=1,
        num_tokens=0,
        rows=RowOptions(index_dtype),
        ring_layout="strided",
    )
    return plan.key
