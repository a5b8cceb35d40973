"""How a verb reaches its CUDA kernel: full checks and a plan when a signature is new, a prepared launch after that."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.arch import arch_of_capability
from cute_kernels.configs import GdnOptions, KdaOptions, Mamba2Options, Options, RowOptions, StepConfig
from replayssm import checks
from replayssm.cursors import Cursors
from replayssm.inputs import GdnInputs, Inputs, KdaInputs, Mamba2Inputs
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

    def serves(self, parameters: tuple[Tensor | None, ...]) -> bool:
        """Whether these are the parameters that were converted, in the memory where they were."""
        return all(map(operator.is_, parameters, self.parameters)) and self.addresses == _addresses(parameters)


Split = tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...], tuple[Any, ...]]


def _split_mamba2(inputs: Mamba2Inputs) -> Split:
    x, dt, B, C, A, D, z, dt_bias, softplus = inputs
    return (x, dt, B, C, z), (A, D, dt_bias), (x.shape, dt.dtype, z is None, softplus)


def _split_gdn(inputs: GdnInputs) -> Split:
    q, k, v, a, b, A_log, dt_bias, *settings = inputs
    return (q, k, v, a, b), (A_log, dt_bias), (v.shape, a.dtype, b.dtype, *settings)


def _split_kda(inputs: KdaInputs) -> Split:
    q, k, v, g, beta, A_log, dt_bias, *settings = inputs
    return (q, k, v, g, beta), (A_log, dt_bias), (v.shape, g.dtype, beta.dtype, *settings)


# By type of inputs: their tensors with a row axis and their parameters, as the kernel takes them, and all else that a
# launch depends on.
SPLIT: dict[type, Callable[[Any], Split]] = {
    Mamba2Inputs: _split_mamba2,
    GdnInputs: _split_gdn,
    KdaInputs: _split_kda,
}


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
        tensors, parameters, facts = SPLIT[type(inputs)](inputs)
        signature = (type(inputs), facts, cache_indices.dtype, _dtype_of(force_fold), launch_options)
        launch = pool.launches[signature]
        if launch.cursors is not cursors or not launch.serves(parameters):
            raise LookupError
    except (AttributeError, TypeError, ValueError, LookupError):
        # A new signature; or no signature could be read, and the checks refuse what was passed.
        checks.check_step(pool, cursors, inputs, cache_indices, out, force_fold)
        _check_decodes(inputs)
        value = value_of(inputs)
        if value.shape[0] == 0:  # nothing to launch
            return torch.empty_like(value) if out is None else out
        launch = pool.launches[signature] = _make_launch(
            pool, cursors, inputs, parameters, cache_indices, force_fold is not None, launch_options
        )
    if checks.DEBUG:
        checks.check_rows(cursors, cache_indices, pad_slot_id)
    if out is None:
        value = value_of(inputs)
        out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    rows = (cache_indices, None if force_fold is None else force_fold.view(torch.uint8))
    try:
        launch.kernel(
            launch.pool_array,
            launch.cursor_array,
            rows,
            tensors,
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


def value_of(inputs: Any) -> Tensor:
    """The tensor that has the output's shape and dtype."""
    return inputs.x if isinstance(inputs, Mamba2Inputs) else inputs.v


def _check_decodes(inputs: Inputs) -> None:
    """Refuse what the CUDA kernels do not cover."""
    name = "x" if isinstance(inputs, Mamba2Inputs) else "v"
    if type(inputs) not in SPLIT:
        raise NotImplementedError(
            f"inputs: CUDA kernels exist for {', '.join(kind.__name__ for kind in SPLIT)}, got "
            f"{type(inputs).__name__}; move the tensors to the CPU"
        )
    if (rows := value_of(inputs).shape[0]) > MAX_ROWS:
        raise NotImplementedError(f"inputs.{name}: a launch takes up to {MAX_ROWS} rows, got {rows}; split the batch")


def _make_launch(
    pool: Pool,
    cursors: Cursors,
    inputs: Inputs,
    parameters: tuple[Tensor | None, ...],
    cache_indices: Tensor,
    has_force_fold: bool,
    launch_options: tuple[bool, StepConfig | None],
) -> Launch:
    pdl, config = launch_options
    plan = plan_step(
        pool.layer,
        pool.replay,
        options_of(inputs),
        arch=arch_of(pool.device),
        batch=value_of(inputs).shape[0],
        num_tokens=value_of(inputs).shape[1],
        rows=RowOptions(dtype_name(cache_indices.dtype), has_force_fold, pdl),
        ring_layout=pool.ring_layout,
        config=config,
    )
    kernel = kernel_modules()[0].kernel(plan.key, plan.arch)
    from tvm_ffi import convert

    return Launch(
        kernel,
        cursors,
        parameters,
        _addresses(parameters),
        convert(pool.tensors),
        convert((cursors.ring_start, cursors.num_committed)),
        convert(parameters),
    )


def options_of(inputs: Inputs) -> Options:
    """What a kernel must know of the inputs beside their tensors."""
    if isinstance(inputs, KdaInputs):
        return KdaOptions(
            scale=inputs.q.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale,
            g_dtype=dtype_name(inputs.g.dtype),
            beta_dtype=dtype_name(inputs.beta.dtype),
            lower_bound=inputs.lower_bound,
            l2norm_eps=inputs.l2norm_eps,
        )
    if isinstance(inputs, GdnInputs):
        return GdnOptions(
            scale=inputs.q.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale,
            a_dtype=dtype_name(inputs.a.dtype),
            b_dtype=dtype_name(inputs.b.dtype),
            l2norm_eps=inputs.l2norm_eps,
            round_beta=inputs.round_beta,
        )
    assert isinstance(inputs, Mamba2Inputs)
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
    cursors.replay.check_cuda()
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
