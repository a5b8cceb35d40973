"""How a verb reaches its CUDA kernel: full checks and a plan when a signature is new, a prepared launch after that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.arch import arch_of_capability
from cute_kernels.configs import Mamba2Options, RowOptions, StepConfig
from replayssm import checks
from replayssm.cursors import Cursors
from replayssm.inputs import Inputs, Mamba2Inputs
from replayssm.plan import dtype_name, plan_step
from replayssm.pool import Pool

MAX_ROWS = 65535  # rows lie along the grid's y axis


def cuda_commit(
    cursors: Cursors,
    cache_indices: Tensor,
    num_draft: int,
    num_accepted: Tensor | None,
    force_fold: Tensor | None,
    pad_slot_id: int,
) -> None:
    """As `cuda_step`: full checks when a signature is new, the launch's own checks after that."""
    try:
        signature = (num_draft, cache_indices.dtype, _dtype_of(num_accepted), _dtype_of(force_fold))
        kernel = cursors.kernels[signature]
    except (AttributeError, TypeError, LookupError):
        checks.check_commit(cursors, cache_indices, num_draft, num_accepted, force_fold)
        kernel = cursors.kernels[signature] = _commit_kernel(cursors, *signature)
    if cache_indices.shape[0] == 0:  # nothing to launch
        return
    if checks.DEBUG:
        checks.check_rows(cursors, cache_indices, pad_slot_id)
        checks.check_accepted(num_accepted, num_draft, cache_indices, pad_slot_id)
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
class Launch:
    """A step's kernel with what stays the same from call to call, converted once.

    The parameters are compared by identity and address: an object may be given other memory (`parameter.data = ...`).
    """

    kernel: Callable[..., None]
    cursors: Cursors
    parameters: tuple[Tensor | None, ...]
    addresses: tuple[int, ...]
    pool_array: Any
    cursor_array: Any
    parameter_array: Any

    def serves(self, *parameters: Tensor | None) -> bool:
        """Whether these are the parameters that were converted, in the memory where they were."""
        A, D, dt_bias = self.parameters
        return (
            parameters[0] is A
            and parameters[1] is D
            and parameters[2] is dt_bias
            and self.addresses == _addresses(parameters)
        )


def cuda_step(
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
        if launch.cursors is not cursors or not launch.serves(A, D, dt_bias):
            raise LookupError
    except (AttributeError, TypeError, ValueError, LookupError):
        # A new signature; or no signature could be read, and the checks refuse what was passed.
        checks.check_step(pool, cursors, inputs, cache_indices, out, force_fold)
        inputs = _mamba2_decode(inputs)
        if x.shape[0] == 0:  # nothing to launch
            return torch.empty_like(x) if out is None else out
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


def _addresses(parameters: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in parameters])


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
) -> Launch:
    if inputs.x.shape[0] > MAX_ROWS:
        raise NotImplementedError(
            f"inputs.x: a launch takes up to {MAX_ROWS} rows, got {inputs.x.shape[0]}; split the batch"
        )
    pdl, config = launch_options
    plan = plan_step(
        pool.layer,
        pool.replay,
        options_of(inputs),
        arch=arch_of(pool.device),
        batch=inputs.x.shape[0],
        rows=RowOptions(dtype_name(cache_indices.dtype), has_force_fold, pdl),
        ring_layout=pool.ring_layout,
        config=config,
    )
    kernel = kernel_modules()[0].kernel(plan.key, plan.arch)
    from tvm_ffi import convert

    parameters = (inputs.A, inputs.D, inputs.dt_bias)
    return Launch(
        kernel,
        cursors,
        parameters,
        _addresses(parameters),
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
    module = kernel_modules()[1]
    has_mask, has_accepted = mask_dtype is not None, accepted_dtype is not None
    key = module.CommitKey(cursors.replay.window, num_draft, dtype_name(index_dtype), has_mask, has_accepted)
    return module.kernel(key, arch_of(cursors.device))


def arch_of(device: torch.device) -> str:
    """The architecture that kernels are compiled for on a CUDA device, e.g. "sm_90a".

    Raises:
        NotImplementedError: none of the supported ones.
    """
    return arch_of_capability(torch.cuda.get_device_capability(device)).name


def kernel_modules() -> tuple[Any, Any]:
    """The kernel modules, which import the compiler."""
    try:
        from cute_kernels import commit, step
    except ImportError as error:
        raise NotImplementedError(
            "CUDA tensors need nvidia-cutlass-dsl and apache-tvm-ffi, which do not import here; "
            "pip install 'nvidia-cutlass-dsl[cu13]>=4.8' apache-tvm-ffi, or move the tensors to the CPU"
        ) from error
    return step, commit
