"""One form of message for every refused argument: name, expected, got, remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replayssm import debug
from replayssm.inputs import GdnInputs, Inputs, KdaInputs, Mamba2Inputs
from replayssm.spec import LayerSpec, ReplaySpec

if TYPE_CHECKING:
    from replayssm.cursors import Cursors
    from replayssm.pool import Pool

ALIGNMENT_BYTES = 16


def describe(tensor: Tensor) -> str:
    """The facts of a tensor that a message needs, e.g. "(8, 1) int64 on cuda:0"."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def check_tensor(
    name: str,
    tensor: object,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    contiguous_from: int | None = None,
) -> None:
    """Refuse a tensor of another shape, dtype, device or inner layout than expected.

    Args:
        name: the argument as the caller wrote it.
        shape: expected sizes; None admits any.
        dtypes: admitted dtypes.
        device: expected device.
        contiguous_from: axes from this one on must be densely packed, e.g. 1 leaves the first stride free.

    Raises:
        TypeError: not a tensor, or a wrong dtype.
        ValueError: a wrong shape, device or stride.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    sizes = "(" + ", ".join("any" if s is None else str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"
    names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    expected = f"{name}: expected {sizes} {names} on {device}, got {describe(tensor)}"
    if len(tensor.shape) != len(shape) or any(
        w is not None and w != g for w, g in zip(shape, tensor.shape, strict=True)
    ):
        raise ValueError(f"{expected}; {_reshape_remedy(name, tensor, shape)}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{expected}; pass {name}.to({dtypes[0]})")
    if tensor.device != device:
        raise ValueError(f"{expected}; pass {name}.to({str(device)!r})")
    if contiguous_from is not None:
        step = 1
        for axis in range(len(shape) - 1, contiguous_from - 1, -1):
            if tensor.shape[axis] != 1 and tensor.stride(axis) != step:
                raise ValueError(
                    f"{name}: expected axes {contiguous_from} to {len(shape) - 1} densely packed, "
                    f"got strides {tensor.stride()} for shape {tuple(tensor.shape)}; pass {name}.contiguous()"
                )
            step *= tensor.shape[axis]


def _reshape_remedy(name: str, tensor: Tensor, shape: Sequence[int | None]) -> str:
    if tensor.dim() == len(shape) + 1 and 1 in tensor.shape:
        return f"pass {name}.squeeze({list(tensor.shape).index(1)})"
    if tensor.dim() == len(shape) - 1:
        return f"pass {name}.unsqueeze(1) if it holds one token a row"
    return "see the shapes in the docstring"


def check_slots(name: str, slots: object, cursors: Cursors) -> Tensor:
    """Refuse anything but an integer vector on the cursors' device; returns it."""
    length = slots.shape[0] if isinstance(slots, Tensor) and slots.dim() else None
    check_tensor(name, slots, (length,), (torch.int64, torch.int32), cursors.device)
    assert isinstance(slots, Tensor)
    if debug.DEBUG and slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < cursors.num_slots:
        raise ValueError(f"{name}: expected slots of 0 to {cursors.num_slots - 1}, got {slots.tolist()}")
    return slots


def check_commit(
    cursors: Cursors,
    cache_indices: object,
    num_draft: int,
    cu_seqlens: object,
    num_accepted: object,
    force_fold: object,
) -> None:
    """Refuse arguments of `commit` that do not fit the cursors."""
    limit = cursors.replay.max_draft
    if not isinstance(num_draft, int) or not 1 <= num_draft <= limit:
        raise ValueError(f"num_draft: expected 1 to max_draft = {limit}, got {num_draft!r}; raise ReplaySpec.max_draft")
    rows = _check_rows_of("cache_indices", cache_indices, None, (torch.int32, torch.int64), cursors.device)
    if cu_seqlens is not None:
        _check_rows_of("cu_seqlens", cu_seqlens, rows + 1, (torch.int32,), cursors.device)
        if num_draft != 1:
            raise ValueError(f"num_draft: expected none beside cu_seqlens, got {num_draft}; pass one of the two")
    if num_accepted is not None:
        _check_rows_of("num_accepted", num_accepted, rows, (torch.int32,), cursors.device)
    if force_fold is not None:
        _check_rows_of("force_fold", force_fold, rows, (torch.bool,), cursors.device)


def check_materialize(cursors: Cursors, source: object, destination: object, num_records: object) -> None:
    """Refuse rows of `materialize` that do not fit the cursors."""
    rows = _check_rows_of("source", source, None, (torch.int32, torch.int64), cursors.device)
    assert isinstance(source, Tensor)
    _check_rows_of("destination", destination, rows, (source.dtype,), cursors.device)
    if num_records is not None:
        _check_rows_of("num_records", num_records, rows, (torch.int32,), cursors.device)


def check_flush(cursors: Cursors, slots: object) -> None:
    """Refuse slots of `flush` that do not fit the cursors."""
    _check_rows_of("slots", slots, None, (torch.int32, torch.int64), cursors.device)


def check_step(
    pool: Pool, cursors: Cursors, inputs: Inputs, cache_indices: object, out: object, force_fold: object
) -> None:
    """Refuse arguments of `step` that do not fit the pool, before anything is written."""
    layer, replay, device = pool.layer, pool.replay, pool.device
    fields = _INPUTS[layer.recurrence]
    if type(inputs) is not fields:
        raise TypeError(
            f"inputs: expected {fields.__name__} for a {layer.recurrence} layer, got {type(inputs).__name__}"
        )
    for name in ("window", "max_draft", "ring_capacity", "rounding"):
        if getattr(cursors.replay, name) != getattr(replay, name):
            raise ValueError(
                f"cursors: expected {name} {getattr(replay, name)} as the pool's, got {getattr(cursors.replay, name)}"
            )
    if cursors.num_slots != pool.num_slots or cursors.device != device:
        raise ValueError(
            f"cursors: expected {pool.num_slots} slots on {device} as the pool, "
            f"got {cursors.num_slots} on {cursors.device}; make both with one number of slots"
        )
    rows = _check_rows_of("cache_indices", cache_indices, None, (torch.int32, torch.int64), device)
    value = getattr(inputs, "x" if layer.recurrence == "mamba2" else "v")
    tokens = value.shape[1] if isinstance(value, Tensor) and value.dim() == 4 else None
    packed = inputs.cu_seqlens is not None
    if packed:
        _check_rows_of("inputs.cu_seqlens", inputs.cu_seqlens, rows + 1, (torch.int32,), device)
    extent = 1 if packed else rows
    for name, (shape, dtypes, packed_from) in input_fields(layer, replay, extent, tokens).items():
        tensor = getattr(inputs, name)
        if tensor is None and name in _OPTIONAL and layer.recurrence == "mamba2":
            continue
        check_tensor(f"inputs.{name}", tensor, shape, dtypes, device, contiguous_from=packed_from)
        if len(shape) == 4:
            check_alignment(f"inputs.{name}", tensor, 2)
    for name in ("scale", "l2norm_eps", "lower_bound"):
        number = getattr(inputs, name, None)
        if number is not None and not isinstance(number, (int, float)):
            raise TypeError(f"inputs.{name}: expected a number or None, got {type(number).__name__}")
    if (bound := getattr(inputs, "lower_bound", None)) is not None and not bound < 0:
        raise ValueError(f"inputs.lower_bound: expected a negative number or None, got {bound}")
    assert isinstance(tokens, int)
    if not packed and not 1 <= tokens <= replay.max_draft:
        raise ValueError(
            f"inputs: expected 1 to max_draft = {replay.max_draft} tokens a row, got T = {tokens}; "
            "make the pool with a larger ReplaySpec.max_draft"
        )
    if out is not None:
        shape = (extent, tokens, layer.num_v_heads, layer.head_dim)
        check_tensor("out", out, shape, (replay.activation_dtype,), device, contiguous_from=2)
        assert isinstance(out, Tensor)
        check_alignment("out", out, 2)
        check_own_memory("out", out)
    if force_fold is not None:
        _check_rows_of("force_fold", force_fold, rows, (torch.bool,), device)


_INPUTS: dict[str, type] = {"mamba2": Mamba2Inputs, "gdn": GdnInputs, "kda": KdaInputs}
_OPTIONAL = ("D", "z", "dt_bias")
_Field = tuple[tuple[int | None, ...], tuple[torch.dtype, ...], int | None]


def input_fields(layer: LayerSpec, replay: ReplaySpec, rows: int, tokens: int | None) -> dict[str, _Field]:
    """Shape, dtypes and first packed axis of each tensor of a step's inputs."""
    act, free, f32 = (replay.activation_dtype,), (replay.activation_dtype, torch.float32), (torch.float32,)
    hv, hk = layer.num_v_heads, layer.num_k_heads
    value: _Field = ((rows, tokens, hv, layer.head_dim), act, 2)
    key: _Field = ((rows, tokens, hk, layer.d_state), act, 2)
    scalar: _Field = ((rows, tokens, hv), free, 2)
    if layer.recurrence == "mamba2":
        heads: _Field = ((hv,), free, 0)
        return {
            "x": value, "dt": scalar, "B": key, "C": key, "A": ((hv,), f32, 0), "D": heads, "z": value, "dt_bias": heads
        }  # fmt: skip
    common = {"q": key, "k": key, "v": value, "A_log": ((hv,), f32, 0)}
    if layer.recurrence == "gdn":
        return {**common, "a": scalar, "b": scalar, "dt_bias": ((hv,), f32, 0)}
    channels: _Field = ((rows, tokens, hv, layer.d_state), free, 2)
    return {**common, "g": channels, "beta": scalar, "dt_bias": ((hv, layer.d_state), f32, 0)}


def _check_rows_of(
    name: str, tensor: object, rows: int | None, dtypes: Sequence[torch.dtype], device: torch.device
) -> int:
    check_tensor(name, tensor, (rows,), dtypes, device, contiguous_from=0)
    assert isinstance(tensor, Tensor)
    return tensor.shape[0]


def check_own_memory(name: str, tensor: Tensor) -> None:
    """Refuse a tensor of which two elements may share memory.

    Raises:
        ValueError: by the strides, an axis steps within the extent of those with smaller strides.
    """
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < extent:
            raise ValueError(
                f"{name}: expected memory of its own for each element, got strides {tensor.stride()} for shape "
                f"{tuple(tensor.shape)}; pass {name}.contiguous()"
            )
        extent = stride * (size - 1) + extent


def check_pools(cursors: Cursors, pools: Iterable[Pool]) -> tuple[Pool, ...]:
    """Refuse pools that do not have the cursors' slots, window and ring rows on the cursors' device; returns them."""
    from replayssm.pool import Pool

    if not isinstance(pools, Iterable):
        raise TypeError(f"pools: expected the pools of the model, got {type(pools).__name__}; pass [pool]")
    pools = tuple(pools)
    for i, pool in enumerate(pools):
        if not isinstance(pool, Pool):
            raise TypeError(f"pools[{i}]: expected a Pool, got {type(pool).__name__}")
        if pool.num_slots != cursors.num_slots or pool.device != cursors.device:
            raise ValueError(
                f"pools[{i}]: expected {cursors.num_slots} slots on {cursors.device} as the cursors, "
                f"got {pool.num_slots} on {pool.device}; make both with one number of slots"
            )
        for name in ("window", "max_draft", "ring_capacity", "rounding"):
            if (ours := getattr(pool.replay, name)) != (theirs := getattr(cursors.replay, name)):
                raise ValueError(
                    f"pools[{i}]: expected {name} {theirs} as the cursors', got {ours}; make both with one ReplaySpec"
                )
    return pools


def check_model(
    cursors: Cursors, pools: Iterable[Pool], A: object
) -> tuple[tuple[Pool, ...], tuple[Tensor | None, ...]]:
    """Refuse pools that are not all layers of one model, each once, and an `A` that is not theirs; returns both.

    Raises:
        TypeError, ValueError: as `check_pools`; no pool, or one twice; `A` is missing, superfluous, or not one packed
            [HV] float32 tensor a Mamba-2 pool.
    """
    pools = check_pools(cursors, pools)
    seen: dict[int, int] = {}
    if not pools:
        raise ValueError("pools: expected every pool of the model, got none; their records would be lost")
    for i, pool in enumerate(pools):
        first = seen.setdefault(pool.checkpoint.data_ptr(), i)
        if first != i:
            raise ValueError(f"pools[{i}]: expected each layer once, got the checkpoint of pools[{first}] again")
    return pools, _check_rates(pools, A)


def _check_rates(pools: tuple[Pool, ...], A: object) -> tuple[Tensor | None, ...]:
    needed = [pool.layer.recurrence == "mamba2" for pool in pools]
    expected = "A: expected a sequence of one [HV] float32 tensor a Mamba-2 pool, whose records hold dt"
    if not any(needed):
        if A is not None:
            raise ValueError(
                f"A: expected None, as {pools[0].layer.recurrence} records hold log-decays, got {type(A).__name__}; "
                "leave it out"
            )
        return (None,) * len(pools)
    if A is None or isinstance(A, Tensor | str) or not isinstance(A, Iterable):
        remedy = "pass [A]" if isinstance(A, Tensor) else "pass the A of each layer's inputs"
        raise TypeError(f"{expected}, got {type(A).__name__}; {remedy}")
    rates = tuple(A)
    if len(rates) != len(pools):
        raise ValueError(f"{expected}, got {len(rates)} for {len(pools)} pools; give one for each, in their order")
    for i, (pool, rate) in enumerate(zip(pools, rates, strict=True)):
        if needed[i]:
            check_tensor(f"A[{i}]", rate, (pool.layer.num_v_heads,), (torch.float32,), pool.device, contiguous_from=0)
        elif rate is not None:
            raise ValueError(f"A[{i}]: expected None for a {pool.layer.recurrence} pool, got {type(rate).__name__}")
    return rates


def check_alignment(name: str, tensor: Tensor, packed_from: int) -> None:
    """Refuse a tensor whose rows (the axes from `packed_from` on) do not start on 16-byte boundaries."""
    size = tensor.element_size()
    strides = [tensor.stride(axis) * size for axis in range(packed_from) if tensor.shape[axis] > 1]
    if any(offset % ALIGNMENT_BYTES for offset in (tensor.data_ptr(), *strides)):
        raise ValueError(
            f"{name}: expected rows on {ALIGNMENT_BYTES}-byte boundaries, got address {tensor.data_ptr():#x} and "
            f"strides {tensor.stride()} of {size}-byte elements; pad the rows or pass a contiguous copy"
        )
