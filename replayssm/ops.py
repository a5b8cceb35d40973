"""The verbs: `step` once a layer, `commit` once a model step, `reset` and `copy_slots` when requests come and go.

Nothing here waits for the device, and nothing is allocated when `out` is given, so that a CUDA graph can capture
`step` and `commit` once their kernels are loaded (call each once before, or use `warmup`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.arch import arch_of_capability
from cute_kernels.configs import Mamba2Options, RowOptions, StepConfig
from replayssm import checks
from replayssm.cursors import Cursors
from replayssm.inputs import Inputs, Mamba2Inputs
from replayssm.plan import Plan, dtype_name, plan_step
from replayssm.pool import Pool
from replayssm.reference import replay as twin
from replayssm.spec import LayerSpec, ReplaySpec


def step(
    pool: Pool,
    cursors: Cursors,
    inputs: Inputs,
    *,
    cache_indices: Tensor,
    out: Tensor | None = None,
    force_fold: Tensor | None = None,
    pad_slot_id: int = -1,
    pdl: bool = False,
    config: StepConfig | None = None,
) -> Tensor:
    """Decode T tokens a row in one layer: append their records, and fold the rows whose window is full.

    A row folds its committed records into the checkpoint first when `num_committed + T > window`, or when `force_fold`
    asks for it and there are any. The cursors do not move until `commit`. Caller must give live rows distinct slots
    within the pool, and cursors in range; `REPLAYSSM_DEBUG=1` checks both, with a synchronisation.

    Args:
        pool: the layer's memory; written in the slots of live rows only.
        cursors: the model's cursors, with the pool's number of slots; read.
        inputs: `Mamba2Inputs`, `GdnInputs` or `KdaInputs` of T tokens a row, 1 to `max_draft`. CUDA kernels exist for
            Mamba-2 with T = 1.
        cache_indices: [rows] int32 or int64, the slot of each row. Rows of `pad_slot_id` or of a negative slot are
            padding: their output is zero, whatever their inputs hold, and nothing else is written.
        out: [rows, T, HV, V] activation dtype, heads packed; written. Allocated when None.
        force_fold: [rows] bool, or None.
        pdl: launch with programmatic dependent launch (CUDA): the kernel starts while the one before it drains.
        config: launch parameters (CUDA); chosen when None.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: an argument has another type, shape, dtype, device or stride than described.
        NotImplementedError: no kernel for this recurrence, geometry, T or GPU, or nvidia-cutlass-dsl is missing.

    Source:
        ReplaySSM (Princeton and NVIDIA, 2026), sections on non-flush and flush steps.
    """
    if pool.checkpoint.is_cuda:
        return _cuda_step(pool, cursors, inputs, cache_indices, out, force_fold, pad_slot_id, (pdl, config))
    checks.check_step(pool, cursors, inputs, cache_indices, out, force_fold)
    if checks.DEBUG:
        checks.check_rows(cursors, cache_indices, pad_slot_id)
    return twin.step(
        pool, cursors, inputs, cache_indices=cache_indices, out=out, force_fold=force_fold, pad_slot_id=pad_slot_id
    )


def commit(
    cursors: Cursors,
    *,
    cache_indices: Tensor,
    num_draft: int = 1,
    num_accepted: Tensor | None = None,
    force_fold: Tensor | None = None,
    pad_slot_id: int = -1,
) -> None:
    """Advance the cursors once after all layers have stepped: past what was folded, and by what was accepted.

    Args:
        cursors: written, in the slots of live rows only.
        cache_indices, force_fold, pad_slot_id: as given to `step`.
        num_draft: T, the tokens a row of that step.
        num_accepted: [rows] int32, how many of the T tokens stay, 0 to T, counting each token that was stepped; None
            keeps all. The records behind them are overwritten by later steps.

    Raises:
        TypeError, ValueError: an argument has another type, shape, dtype or device than described.
    """
    if cursors.ring_start.is_cuda:
        _cuda_commit(cursors, cache_indices, num_draft, num_accepted, force_fold, pad_slot_id)
        return
    checks.check_commit(cursors, cache_indices, num_draft, num_accepted, force_fold)
    if checks.DEBUG:
        checks.check_rows(cursors, cache_indices, pad_slot_id)
    twin.commit(
        cursors,
        cache_indices=cache_indices,
        num_draft=num_draft,
        num_accepted=num_accepted,
        force_fold=force_fold,
        pad_slot_id=pad_slot_id,
    )


def reset(cursors: Cursors, slots: Tensor, *, pools: Iterable[Pool] = ()) -> None:
    """Make slots ready for new requests: no pending records, and a zero state in the pools that are given.

    Args:
        cursors: written at `slots`.
        slots: [n] int64 or int32 of valid slots.
        pools: pools whose checkpoint is set to zero at `slots`. Their rings need no cleaning: records that are not
            pending never reach an output.

    Raises:
        TypeError, ValueError: `slots` is not an integer vector on the cursors' device, or a pool has other slots.
    """
    index, pools = checks.check_slots("slots", slots, cursors), tuple(pools)
    checks.check_pools(cursors, pools)
    cursors.ring_start.index_fill_(0, index, 0)
    cursors.num_committed.index_fill_(0, index, 0)
    for pool in pools:
        pool.checkpoint.index_fill_(0, index, 0)


def copy_slots(cursors: Cursors, source: Tensor, destination: Tensor, *, pools: Iterable[Pool]) -> None:
    """Copy slots with their pending records: checkpoint, rings and cursors.

    Args:
        cursors: written at `destination`.
        source, destination: [n] int64 or int32 of valid slots; Caller must keep `destination` distinct.
        pools: every pool of the model.

    Raises:
        TypeError, ValueError: the slots are not two integer vectors of one length on the cursors' device, or a pool has
            other slots.
    """
    read, write = checks.check_slots("source", source, cursors), checks.check_slots("destination", destination, cursors)
    if read.shape != write.shape:
        raise ValueError(f"destination: expected {tuple(read.shape)} as source, got {tuple(write.shape)}")
    pools = tuple(pools)
    checks.check_pools(cursors, pools)
    for tensor in (cursors.ring_start, cursors.num_committed, *(t for pool in pools for t in pool.tensors)):
        tensor.index_copy_(0, write, tensor.index_select(0, read))


def warmup(
    layer: LayerSpec,
    replay: ReplaySpec,
    options: Mamba2Options,
    *,
    arch: str,
    batches: Sequence[int] = (1, 256),
    index_dtypes: Sequence[str] = ("int32", "int64"),
) -> list[Plan]:
    """Compile a layer's step and commit kernels into the disk cache; needs no GPU.

    Args:
        layer, replay, options: what the model decodes with.
        arch: "sm_90a", "sm_100a" or "sm_103a".
        batches: batch sizes to plan for; sizes that share a plan share a kernel.
        index_dtypes: of `cache_indices`.

    Returns:
        The plans whose kernels are in the cache now.

    Raises:
        NotImplementedError: as `plan_step`, or nvidia-cutlass-dsl is missing.
    """
    step_module, commit_module = _kernels()
    from cute_kernels.compile import ensure_on_disk

    plans = {
        plan_step(layer, replay, options, arch=arch, batch=batch, rows=RowOptions(index_dtype))
        for batch in batches
        for index_dtype in index_dtypes
    }
    for plan in plans:
        make = functools.partial(step_module.fake_arguments, plan.key)
        ensure_on_disk(step_module.step_launch, make, plan.key, arch)
    for index_dtype in index_dtypes:
        key = commit_module.CommitKey(replay.window, 1, index_dtype)
        ensure_on_disk(commit_module.commit_launch, functools.partial(commit_module.fake_arguments, key), key, arch)
    return sorted(plans, key=repr)


def _cuda_commit(
    cursors: Cursors,
    cache_indices: Tensor,
    num_draft: int,
    num_accepted: Tensor | None,
    force_fold: Tensor | None,
    pad_slot_id: int,
) -> None:
    """As `_cuda_step`: full checks when a signature is new, the launch's own checks after that."""
    try:
        signature = (num_draft, cache_indices.dtype, _dtype_of(num_accepted), _dtype_of(force_fold))
        kernel = cursors.kernels[signature]
    except (AttributeError, TypeError, LookupError):
        checks.check_commit(cursors, cache_indices, num_draft, num_accepted, force_fold)
        signature = (num_draft, cache_indices.dtype, _dtype_of(num_accepted), _dtype_of(force_fold))
        kernel = cursors.kernels[signature] = _commit_kernel(cursors, *signature)
    if cache_indices.shape[0] == 0:  # nothing to launch
        return
    if checks.DEBUG:
        checks.check_rows(cursors, cache_indices, pad_slot_id)
    rows = (cache_indices, None if force_fold is None else force_fold.view(torch.uint8))
    try:
        kernel(
            (cursors.ring_start, cursors.num_committed), rows, num_accepted, cursors.replay.ring_capacity, pad_slot_id
        )
    except (TypeError, ValueError):
        checks.check_commit(cursors, cache_indices, num_draft, num_accepted, force_fold)
        raise


def _dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


@dataclass(frozen=True, eq=False)
class _Launch:
    """A step's kernel with what stays the same from call to call, converted once.

    The tensors are kept to be compared by identity, which also keeps them alive.
    """

    kernel: Callable[..., None]
    cursors: Cursors
    parameters: tuple[Tensor | None, ...]
    pool_array: Any
    cursor_array: Any
    parameter_array: Any


def _cuda_step(
    pool: Pool,
    cursors: Cursors,
    inputs: Inputs,
    cache_indices: Tensor,
    out: Tensor | None,
    force_fold: Tensor | None,
    pad_slot_id: int,
    launch_options: tuple[bool, StepConfig | None],
) -> Tensor:
    """Full checks and a plan when a signature is new; later calls rely on the launch's own checks."""
    try:
        x, dt, B, C, A, D, z, dt_bias, softplus = inputs  # type: ignore[misc]
        mask = _dtype_of(force_fold)
        signature = (x.shape, dt.dtype, z is None, softplus, cache_indices.dtype, mask, launch_options, type(inputs))
        launch = pool.launches[signature]
        if launch.cursors is not cursors or not _same(launch.parameters, (A, D, dt_bias)):
            raise LookupError
    except (AttributeError, TypeError, ValueError, LookupError):  # a new signature, or not even tensors
        checks.check_step(pool, cursors, inputs, cache_indices, out, force_fold)
        inputs = _mamba2_decode(inputs)
        x, dt, B, C, A, D, z, dt_bias, softplus = inputs
        if x.shape[0] == 0:  # nothing to launch
            return torch.empty_like(x) if out is None else out
        mask = _dtype_of(force_fold)
        signature = (x.shape, dt.dtype, z is None, softplus, cache_indices.dtype, mask, launch_options, type(inputs))
        launch = pool.launches[signature] = _make_launch(
            pool, cursors, inputs, cache_indices, force_fold is not None, launch_options
        )
    if checks.DEBUG:
        checks.check_rows(cursors, cache_indices, pad_slot_id)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = (cache_indices, None if force_fold is None else force_fold.view(torch.uint8))
    try:
        launch.kernel(
            launch.pool_array,
            launch.cursor_array,
            rows,
            (x, dt, B, C, z),
            launch.parameter_array,
            out,
            pad_slot_id,
        )
    except (TypeError, ValueError):
        checks.check_step(pool, cursors, inputs, cache_indices, out, force_fold)
        raise
    return out


def _same(ours: tuple[object, ...], theirs: tuple[object, ...]) -> bool:
    return ours[0] is theirs[0] and ours[1] is theirs[1] and ours[2] is theirs[2]


def _mamba2_decode(inputs: Inputs) -> Mamba2Inputs:
    """The inputs, if the CUDA kernels cover them."""
    if not isinstance(inputs, Mamba2Inputs):
        raise NotImplementedError(
            f"inputs: CUDA kernels exist for Mamba2Inputs, got {type(inputs).__name__}; move the tensors to the CPU"
        )
    if inputs.x.shape[1] != 1:
        raise NotImplementedError(
            f"inputs.x: CUDA kernels decode 1 token a row, got T = {inputs.x.shape[1]}; move the tensors to the CPU"
        )
    return inputs


def _make_launch(
    pool: Pool,
    cursors: Cursors,
    inputs: Mamba2Inputs,
    cache_indices: Tensor,
    has_force_fold: bool,
    launch_options: tuple[bool, StepConfig | None],
) -> _Launch:
    pdl, config = launch_options
    plan = plan_step(
        pool.layer,
        pool.replay,
        options_of(inputs),
        arch=_arch(pool.device),
        batch=inputs.x.shape[0],
        rows=RowOptions(dtype_name(cache_indices.dtype), has_force_fold, pdl),
        ring_layout=pool.ring_layout,
        config=config,
    )
    kernel = _kernels()[0].kernel(plan.key, plan.arch)
    from tvm_ffi import convert

    parameters = (inputs.A, inputs.D, inputs.dt_bias)
    return _Launch(
        kernel,
        cursors,
        parameters,
        convert(pool.tensors),
        convert((cursors.ring_start, cursors.num_committed)),
        convert(parameters),
    )


def options_of(inputs: Mamba2Inputs) -> Mamba2Options:
    """What a kernel must know of the inputs' optional tensors and dtypes."""
    return Mamba2Options(
        dt_dtype=dtype_name(inputs.dt.dtype),
        D_dtype=None if inputs.D is None else dtype_name(inputs.D.dtype),
        has_z=inputs.z is not None,
        dt_bias_dtype=None if inputs.dt_bias is None else dtype_name(inputs.dt_bias.dtype),
        dt_softplus=bool(inputs.dt_softplus),
    )


def _commit_kernel(
    cursors: Cursors,
    num_draft: int,
    index_dtype: torch.dtype,
    accepted_dtype: torch.dtype | None,
    mask_dtype: torch.dtype | None,
) -> Callable[..., None]:
    module = _kernels()[1]
    has_mask, has_accepted = mask_dtype is not None, accepted_dtype is not None
    key = module.CommitKey(cursors.replay.window, num_draft, dtype_name(index_dtype), has_mask, has_accepted)
    return module.kernel(key, _arch(cursors.device))


def _arch(device: torch.device) -> str:
    return arch_of_capability(torch.cuda.get_device_capability(device)).name


def _kernels() -> tuple[Any, Any]:
    """The kernel modules, which import the compiler."""
    try:
        from cute_kernels import commit, step
    except ImportError as error:
        raise NotImplementedError(
            "CUDA tensors need nvidia-cutlass-dsl and apache-tvm-ffi, which do not import here; "
            "pip install 'nvidia-cutlass-dsl[cu13]>=4.8' apache-tvm-ffi, or move the tensors to the CPU"
        ) from error
    return step, commit
