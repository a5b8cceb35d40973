"""How a verb reaches its CUDA kernel: full checks and a plan when a signature is new, a prepared launch after that."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.arch import arch_of_capability
from cute_kernels.configs import GdnOptions, KdaOptions, Mamba2Options, Options, RowOptions, StepConfig
from replayssm import checks, debug, met
from replayssm.cursors import Cursors
from replayssm.inputs import GdnInputs, Inputs, KdaInputs, Mamba2Inputs
from replayssm.keys import dtype_name
from replayssm.plan import in_tables, plan_step
from replayssm.pool import Pool

MAX_ROWS = 65535  # rows lie along the grid's y axis


def cuda_commit(
    cursors: Cursors,
    cache_indices: Tensor,
    num_draft: int,
    cu_seqlens: Tensor | None,
    num_accepted: Tensor | None,
    force_fold: Tensor | None,
    pad_slot_id: int,
) -> None:
    """As `cuda_step`: full checks when a signature is new, the launch's own checks after that."""
    tensors = (cache_indices, cu_seqlens, num_accepted, force_fold)
    try:
        signature = (num_draft, _extra_rows(cache_indices, cu_seqlens), *map(_dtype_of, tensors))
        kernel = cursors.launches[signature]
    except (AttributeError, TypeError, LookupError):
        checks.check_commit(cursors, cache_indices, num_draft, cu_seqlens, num_accepted, force_fold)
        kernel = cursors.launches[signature] = _commit_kernel(cursors, num_draft, *tensors)
    if cache_indices.shape[0] == 0:  # nothing to launch
        return
    if debug.DEBUG:
        debug.check_committed(cursors, cache_indices, num_draft, cu_seqlens, num_accepted, pad_slot_id)
    rows = (cache_indices, None if force_fold is None else force_fold.view(torch.uint8), cu_seqlens)
    try:
        kernel(cursors.tensors, rows, num_accepted, cursors.replay.ring_capacity, pad_slot_id)
    except (TypeError, ValueError):
        checks.check_commit(cursors, cache_indices, num_draft, cu_seqlens, num_accepted, force_fold)
        raise


def _extra_rows(cache_indices: Tensor, cu_seqlens: Tensor | None) -> int:
    """How many more numbers `cu_seqlens` has than there are rows, which no launch compares; 0 where it is absent."""
    return 0 if cu_seqlens is None else cu_seqlens.shape[0] - cache_indices.shape[0]


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
    x, dt, B, C, A, D, z, dt_bias, softplus, cu_seqlens = inputs
    return (x, dt, B, C, z), (A, D, dt_bias), (_extent(x, cu_seqlens), dt.dtype, z is None, softplus)


def _split_gdn(inputs: GdnInputs) -> Split:
    q, k, v, a, b, A_log, dt_bias, *settings, cu_seqlens = inputs
    return (q, k, v, a, b), (A_log, dt_bias), (_extent(v, cu_seqlens), a.dtype, b.dtype, *settings)


def _split_kda(inputs: KdaInputs) -> Split:
    q, k, v, g, beta, A_log, dt_bias, *settings, cu_seqlens = inputs
    return (q, k, v, g, beta), (A_log, dt_bias), (_extent(v, cu_seqlens), g.dtype, beta.dtype, *settings)


def _extent(value: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """The shape of the values, without their number where it changes from step to step."""
    return value.shape if cu_seqlens is None else (*value.shape[:1], *value.shape[2:])


# By type of inputs: their tensors with a row axis and their parameters, as the kernel takes them, and all else that a
# launch depends on, beside the rows.
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
        cu_seqlens = inputs.cu_seqlens
        rows = (cache_indices.dtype, _dtype_of(force_fold), _dtype_of(cu_seqlens))
        signature = (type(inputs), facts, rows, _extra_rows(cache_indices, cu_seqlens), launch_options)
        launch = pool.launches[signature]
        if launch.cursors is not cursors or not launch.serves(parameters):
            raise LookupError
    except (AttributeError, TypeError, ValueError, LookupError):
        # A new signature; or no signature could be read, and the checks refuse what was passed.
        checks.check_step(pool, cursors, inputs, cache_indices, out, force_fold)
        _check_decodes(inputs, cache_indices.shape[0])
        value = value_of(inputs)
        if value.numel() == 0:  # nothing to launch
            return torch.empty_like(value) if out is None else out
        launch = pool.launches[signature] = _make_launch(
            pool, cursors, inputs, parameters, cache_indices, force_fold is not None, launch_options
        )
    if debug.DEBUG:
        debug.check_rows(cursors, cache_indices, pad_slot_id)
        debug.check_lengths(cu_seqlens, pool.replay.max_draft, value_of(inputs).shape[1])
    value = value_of(inputs)
    if out is None:
        make = torch.empty if cu_seqlens is None else torch.zeros  # tokens behind the last row are no row's to write
        out = make(value.shape, dtype=value.dtype, device=value.device)
    if value.shape[1] == 0:  # no row has a token
        return out
    try:
        launch.kernel(
            launch.pool_array,
            launch.cursor_array,
            (cache_indices, None if force_fold is None else force_fold.view(torch.uint8), cu_seqlens),
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


def check_row_count(name: str, rows: int) -> None:
    """Refuse more rows than a grid has."""
    if rows > MAX_ROWS:
        raise NotImplementedError(f"{name}: a launch takes up to {MAX_ROWS} rows, got {rows}; split the batch")


def _check_decodes(inputs: Inputs, rows: int) -> None:
    """Refuse what the CUDA kernels do not cover."""
    if type(inputs) not in SPLIT:
        raise NotImplementedError(
            f"inputs: CUDA kernels exist for {', '.join(kind.__name__ for kind in SPLIT)}, got "
            f"{type(inputs).__name__}; move the tensors to the CPU"
        )
    check_row_count("cache_indices", rows)


def _make_launch(
    pool: Pool,
    cursors: Cursors,
    inputs: Inputs,
    parameters: tuple[Tensor | None, ...],
    cache_indices: Tensor,
    has_force_fold: bool,
    launch_options: tuple[bool, StepConfig | None],
) -> Launch:
    (pdl, config), has_cu_seqlens = launch_options, inputs.cu_seqlens is not None
    arch, batch = arch_of(pool.device), cache_indices.shape[0]
    num_tokens = pool.replay.max_draft if has_cu_seqlens else value_of(inputs).shape[1]
    rows = RowOptions(dtype_name(cache_indices.dtype), has_force_fold, pdl, has_cu_seqlens)
    if config is None and in_tables(num_tokens, rows):
        met.meet(pool.layer, pool.replay, num_tokens=num_tokens, batch=batch, arch=arch)
    plan = plan_step(
        pool.layer,
        pool.replay,
        options_of(inputs),
        arch=arch,
        batch=batch,
        num_tokens=num_tokens,
        rows=rows,
        ring_layout=pool.ring_layout,
        config=config,
    )
    kernel = kernel_modules().step.kernel(plan.key, plan.arch)
    from tvm_ffi import convert

    return Launch(
        kernel,
        cursors,
        parameters,
        _addresses(parameters),
        convert((*pool.tensors[:4], *pool.read_parts, pool.seed)),
        convert(cursors.tensors),
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
    cache_indices: Tensor,
    cu_seqlens: Tensor | None,
    num_accepted: Tensor | None,
    force_fold: Tensor | None,
) -> Callable[..., None]:
    module = kernel_modules().commit
    key = module.CommitKey(
        window=cursors.replay.window,
        num_draft=num_draft if cu_seqlens is None else cursors.replay.max_draft,
        index_dtype=dtype_name(cache_indices.dtype),
        has_force_fold=force_fold is not None,
        has_num_accepted=num_accepted is not None,
        has_cu_seqlens=cu_seqlens is not None,
        counts_folds=cursors.fold_count is not None,
    )
    return module.kernel(key, arch_of(cursors.device))


def arch_of(device: torch.device) -> str:
    """The architecture that kernels are compiled for on a CUDA device, e.g. "sm_90a".

    Raises:
        NotImplementedError: none of the supported ones.
    """
    return arch_of_capability(torch.cuda.get_device_capability(device)).name


class KernelModules(NamedTuple):
    """The modules of `cute_kernels` that launch."""

    step: Any
    commit: Any
    materialize: Any
    empty: Any
    encode: Any


def kernel_modules() -> KernelModules:
    """The kernel modules, which import the compiler."""
    try:
        from cute_kernels import commit, empty, encode, materialize, step
    except ImportError as error:
        raise NotImplementedError(
            "CUDA tensors need nvidia-cutlass-dsl and apache-tvm-ffi, which do not import here; "
            "pip install 'nvidia-cutlass-dsl[cu13]>=4.8' apache-tvm-ffi, or move the tensors to the CPU"
        ) from error
    return KernelModules(step, commit, materialize, empty, encode)
