"""The memory of one layer: a checkpoint of the state and a ring of records for every slot.

| field | shape | dtype | Mamba-2 | Gated DeltaNet | Kimi Delta Attention |
|---|---|---|---|---|---|
| checkpoint | [slots, HV, V, K] | checkpoint dtype | state | state | state |
| value | [slots, HV, R, V] | activation dtype, or `value_dtype` | x | u = beta (v - S k) | u |
| key | [slots, HK, R, K] | activation dtype | B | normalised k | normalised k |
| decay | [slots, HV, R], KDA [.., R, K] | float32, KDA `decay_dtype` | dt after softplus | log-decay g | log-decay g |

With `ReplaySpec.read_dtype` a slot also holds a copy of the checkpoint, which steps read instead of it, and with
stochastic rounding a seed. All of a slot's parts belong together: `copy_slots` and `materialize` move them so.

| field | shape | dtype |
|---|---|---|
| read_codes | [slots, HV, V, K], NVFP4 [.., K / 2] | bfloat16, float16, int8; uint8 for FP8, MXFP8 and NVFP4 |
| read_scale | FP8, int8 [slots, HV, V]; MXFP8, NVFP4 [slots, bytes] | float32; uint8, order in reference/quant.py |
| read_tile_scale | NVFP4 [slots, HV, V / 16 rounded up] | float32 |
| seed | [slots] | int64 |

R is `ReplaySpec.ring_capacity`. A ring may be head-major in memory (the order of its axes) or record-major
(axis 2 before axis 1): the strides say which, and every path takes them as they come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cute_kernels.configs import RingLayout
from replayssm.checks import check_alignment, check_own_memory, check_tensor
from replayssm.spec import ROW_BYTES, LayerSpec, ReplaySpec, scale_bytes

READ_PARTS = ("read_codes", "read_scale", "read_tile_scale")


@dataclass(frozen=True, eq=False)
class Pool:
    """One layer's checkpoint and rings; build it over tensors that an engine owns, or with `make_pool`.

    Nothing is copied: the pool writes into the tensors it is given, strided views included.

    Args:
        layer, replay: the geometry and the replay parameters.
        checkpoint, value, key, decay: see the table of this module; read and written.
        read_codes, read_scale, read_tile_scale: of the read copy; None where the spec's `read_dtype` has no such part.
            Whoever writes a checkpoint calls `write_read_copy` after it.
        seed: of stochastic rounding, else None; the caller may write it, and requests with equal seeds round alike.

    Raises:
        TypeError, ValueError: a tensor has another shape, dtype, device or layout than the table says. A slot of
            `checkpoint`, the last axis of each ring and the seeds must be packed; rows must start on 16-byte
            boundaries.
    """

    layer: LayerSpec
    replay: ReplaySpec
    checkpoint: Tensor
    value: Tensor
    key: Tensor
    decay: Tensor
    read_codes: Tensor | None = None
    read_scale: Tensor | None = None
    read_tile_scale: Tensor | None = None
    seed: Tensor | None = None
    launches: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    tensors: tuple[Tensor, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.checkpoint, Tensor):
            raise TypeError(f"checkpoint: expected a torch.Tensor, got {type(self.checkpoint).__name__}")
        slots, device = self.checkpoint.shape[0] if self.checkpoint.dim() else 0, self.checkpoint.device
        shapes = record_shapes(self.layer, self.replay)
        for name, (shape, dtype) in shapes.items():
            tensor = getattr(self, name)
            packed_from = 1 if name == "checkpoint" or name in READ_PARTS else len(shape)
            if name == "seed":
                check_tensor(name, tensor, (slots,), (dtype,), device, contiguous_from=0)
            elif name == "decay" and not self.layer.decays_per_channel:
                check_tensor(name, tensor, (slots, *shape), (dtype,), device)
            else:
                check_tensor(name, tensor, (slots, *shape), (dtype,), device, contiguous_from=packed_from)
                if name != "read_tile_scale":  # read one at a time
                    check_alignment(name, tensor, packed_from)
            check_own_memory(name, tensor)
        for name in (*READ_PARTS, "seed"):
            if name not in shapes and getattr(self, name) is not None:
                precisions = f"read_dtype={self.replay.read_dtype!r}, rounding={self.replay.rounding!r}"
                raise TypeError(f"{name}: expected None, as the spec has {precisions}, got a tensor; leave it out")
        object.__setattr__(self, "tensors", tuple(getattr(self, name) for name in shapes))

    @property
    def num_slots(self) -> int:
        return self.checkpoint.shape[0]

    @property
    def state_names(self) -> tuple[str, ...]:
        """The tensors that hold the state: the checkpoint and the parts of the read copy."""
        return ("checkpoint", *(name for name in READ_PARTS if getattr(self, name) is not None))

    @property
    def read_parts(self) -> tuple[Tensor | None, ...]:
        """The parts of the read copy, None for one that its format has not."""
        return tuple(getattr(self, name) for name in READ_PARTS)

    @property
    def ring_layout(self) -> RingLayout:
        """The order in which all rings are packed within a slot, or "strided" where they are not."""
        rings = [t if t.dim() == 4 else t.unsqueeze(-1) for t in (self.value, self.key, self.decay)]
        if all(_is_packed(ring[0].transpose(0, 1)) for ring in rings):
            return "record_major"
        return "head_major" if all(_is_packed(ring[0]) for ring in rings) else "strided"

    @property
    def device(self) -> torch.device:
        return self.checkpoint.device


def _is_packed(tensor: Tensor) -> bool:
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= size
    return True


def record_shapes(layer: LayerSpec, replay: ReplaySpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape (without the slot axis) and dtype of each tensor of a pool.

    Raises:
        NotImplementedError: the layer's records cannot have the dtypes asked for.
    """
    if replay.value_dtype not in (None, replay.activation_dtype) and layer.recurrence == "mamba2":
        raise NotImplementedError(f"value_dtype: Mamba-2's value records are inputs, got {replay.value_dtype}")
    if replay.decay_dtype != torch.float32 and not layer.decays_per_channel:
        raise NotImplementedError(f"decay_dtype: one decay a head is kept in float32, got {replay.decay_dtype}")
    hv, hk, rows = layer.num_v_heads, layer.num_k_heads, replay.ring_capacity
    channels = (layer.d_state,) if layer.decays_per_channel else ()
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "checkpoint": ((hv, layer.head_dim, layer.d_state), replay.checkpoint_dtype),
        "value": ((hv, rows, layer.head_dim), replay.value_dtype or replay.activation_dtype),
        "key": ((hk, rows, layer.d_state), replay.activation_dtype),
        "decay": ((hv, rows, *channels), replay.decay_dtype),
        **_read_shapes(layer, replay),
    }
    return shapes if replay.rounding == "nearest" else shapes | {"seed": ((), torch.int64)}


def _read_shapes(layer: LayerSpec, replay: ReplaySpec) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """`record_shapes` of the read copy."""
    form, heads, rows, channels = replay.read_format, layer.num_v_heads, layer.head_dim, layer.d_state
    if form is None:
        return {}
    unit = max(ROW_BYTES * 8 // form.bits, form.block)
    if channels % unit:
        raise NotImplementedError(
            f"d_state: a read copy in {replay.read_dtype!r} takes a multiple of {unit}, got {channels}"
        )
    packed = channels * form.bits // (8 * form.codes.itemsize)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"read_codes": ((heads, rows, packed), form.codes)}
    if form.row_scale:
        shapes["read_scale"] = ((heads, rows), torch.float32)
    if form.block:
        shapes["read_scale"] = ((scale_bytes(heads * rows, channels // form.block),), torch.uint8)
    if form.tile_rows:
        shapes["read_tile_scale"] = ((heads, -(-rows // form.tile_rows)), torch.float32)
    return shapes


def bytes_per_slot(layer: LayerSpec, replay: ReplaySpec) -> dict[str, int]:
    """Bytes that one slot of a layer takes, by tensor, without the alignment of `make_pool`."""
    sizes = {}
    for name, (shape, dtype) in record_shapes(layer, replay).items():
        sizes[name] = int(torch.Size(shape).numel()) * dtype.itemsize
    return sizes


def default_ring_layout(layer: LayerSpec) -> RingLayout:
    """The order in which a layer decodes faster: head-major where each channel has a decay, so that the records of one
    head fill whole pages of memory (KDA, 64 heads, batch 256: 298.5 and 289.2 us; H200, 2026-11-29).
    """
    return "head_major" if layer.decays_per_channel else "record_major"


def make_pool(
    layer: LayerSpec,
    replay: ReplaySpec,
    num_slots: int,
    *,
    device: torch.device | str = "cpu",
    ring_layout: RingLayout | None = None,
    seed: int = 0,
) -> Pool:
    """Allocate a zeroed pool of `num_slots` slots.

    Args:
        seed: of stochastic rounding: slot i gets seed + i. Give each layer a range of its own, as layer << 32.
        ring_layout: "record_major" keeps the heads of one record together, "head_major" the records of one head
            (FlashInfer's order); None takes the faster order for the layer (`default_ring_layout`).

    Raises:
        ValueError: `num_slots` is below 1 or the layout is unknown.
    """
    if num_slots < 1:
        raise ValueError(f"num_slots: expected 1 or more, got {num_slots}")
    ring_layout = default_ring_layout(layer) if ring_layout is None else ring_layout
    if ring_layout not in ("record_major", "head_major"):
        raise ValueError(f"ring_layout: expected 'record_major' or 'head_major', got {ring_layout!r}")
    tensors = {}
    for name, (shape, dtype) in record_shapes(layer, replay).items():
        if name == "seed":
            tensors[name] = torch.arange(seed, seed + num_slots, device=device)
        elif name not in ("value", "key", "decay") or ring_layout == "head_major":
            tensors[name] = torch.zeros((num_slots, *shape), dtype=dtype, device=device)
        else:
            order = (num_slots, shape[1], shape[0], *shape[2:])
            tensors[name] = torch.zeros(order, dtype=dtype, device=device).transpose(1, 2)
    return Pool(layer, replay, **tensors)
