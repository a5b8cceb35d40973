"""The verbs: `step` once a layer, `commit` once a model step, the others when requests come, go, move or are kept.

`reset` makes slots ready and `copy_slots` copies them as they are; `flush` and `materialize` fold records, in place and
into other slots. docs/protocol.md says which an engine calls when. Nothing here waits for the device, and nothing is
allocated when `out` is given, so that a CUDA graph can capture `step`, `commit`, `flush`, `materialize` and
`write_read_copy` once their kernels are loaded: call each once before, with as many rows, and `flush` and `materialize`
with the same pools and `A`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from torch import Tensor

from cute_kernels.configs import Options, RowOptions, StepConfig
from replayssm import checks, debug, launch, model_launch
from replayssm.cursors import Cursors
from replayssm.inputs import Inputs
from replayssm.plan import Plan, plan_step
from replayssm.pool import Pool, default_ring_layout
from replayssm.reference import replay as twin
from replayssm.reference import storage
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

    T is the same for every row, or with `cu_seqlens` in the inputs each row's own. A row folds its committed records
    into the checkpoint first when `num_committed + T > window`, or when `force_fold` asks for it and there are any. The
    cursors do not move until `commit`. Caller must give live rows distinct slots within the pool, and cursors in range;
    `REPLAYSSM_DEBUG=1` checks both, with a synchronisation.

    Args:
        pool: the layer's memory; written in the slots of live rows only.
        cursors: the model's cursors, with the pool's number of slots; read.
        inputs: `Mamba2Inputs`, `GdnInputs` or `KdaInputs` of T tokens a row, 1 to `max_draft`; with `cu_seqlens` of 0
            to `max_draft`. Caller must keep `cu_seqlens` ascending in such steps and within the tokens that there are:
            else some tokens count as absent. `REPLAYSSM_DEBUG=1` checks it.
        cache_indices: [rows] int32 or int64, the slot of each row. Rows of `pad_slot_id` or of a negative slot are
            padding: their output is zero, whatever their inputs hold, and nothing else is written.
        out: [rows, T, HV, V], or [1, total, HV, V], activation dtype, heads packed; written. Allocated when None.
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
        return launch.cuda_step(pool, cursors, inputs, cache_indices, out, force_fold, pad_slot_id, (pdl, config))
    checks.check_step(pool, cursors, inputs, cache_indices, out, force_fold)
    if debug.DEBUG:
        debug.check_rows(cursors, cache_indices, pad_slot_id)
        debug.check_lengths(inputs.cu_seqlens, pool.replay.max_draft, launch.value_of(inputs).shape[1])
    return twin.step(
        pool, cursors, inputs, cache_indices=cache_indices, out=out, force_fold=force_fold, pad_slot_id=pad_slot_id
    )


def commit(
    cursors: Cursors,
    *,
    cache_indices: Tensor,
    num_draft: int = 1,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    force_fold: Tensor | None = None,
    pad_slot_id: int = -1,
) -> None:
    """Advance the cursors once after all layers have stepped: past what was folded, and by what was accepted.

    Args:
        cursors: written, in the slots of live rows only.
        cache_indices, force_fold, pad_slot_id: as given to `step`.
        num_draft: T, the tokens a row of that step.
        cu_seqlens: [rows + 1] int32, instead of `num_draft` where that step's inputs had it.
        num_accepted: [rows] int32, how many of a row's tokens stay, 0 to T, counting each token that was stepped; None
            keeps all. The records behind them are overwritten by later steps. Caller must keep the range, or the
            nearest number in it counts; `REPLAYSSM_DEBUG=1` checks it.

    Raises:
        TypeError, ValueError: an argument has another type, shape, dtype or device than described.
    """
    if cursors.ring_start.is_cuda:
        launch.cuda_commit(cursors, cache_indices, num_draft, cu_seqlens, num_accepted, force_fold, pad_slot_id)
        return
    checks.check_commit(cursors, cache_indices, num_draft, cu_seqlens, num_accepted, force_fold)
    if debug.DEBUG:
        debug.check_committed(cursors, cache_indices, num_draft, cu_seqlens, num_accepted, pad_slot_id)
    twin.commit(
        cursors,
        cache_indices=cache_indices,
        num_draft=num_draft,
        cu_seqlens=cu_seqlens,
        num_accepted=num_accepted,
        force_fold=force_fold,
        pad_slot_id=pad_slot_id,
    )


def reset(cursors: Cursors, slots: Tensor, *, pools: Iterable[Pool] = ()) -> None:
    """Make slots ready for new requests: no pending records, and a zero state in the pools that are given.

    Args:
        cursors: written at `slots`.
        slots: [n] int64 or int32 of valid slots; a negative one is no padding here. `REPLAYSSM_DEBUG=1` checks them.
        pools: pools whose checkpoint and read copy are set to zero at `slots`. Their rings need no cleaning: records
            that are not pending never reach an output. Seeds stay.

    Raises:
        TypeError, ValueError: `slots` is not an integer vector on the cursors' device, or a pool has other slots or
            another window or ring than the cursors.
    """
    index, pools = checks.check_slots("slots", slots, cursors).long(), checks.check_pools(cursors, pools)
    for name in cursors.names:
        getattr(cursors, name).index_fill_(0, index, 0)
    for pool in pools:
        for name in pool.state_names:
            getattr(pool, name).index_fill_(0, index, 0)


def copy_slots(cursors: Cursors, source: Tensor, destination: Tensor, *, pools: Iterable[Pool]) -> None:
    """Copy slots with their pending records: all tensors of the pools and the cursors. `materialize` copies the state
    alone. A seed goes along, so that a request that moved rounds as if it had stayed.

    Args:
        cursors: written at `destination`.
        source, destination: [n] int64 or int32 of valid slots; a negative one is no padding here. Caller must keep
            `destination` distinct; the two may overlap. `REPLAYSSM_DEBUG=1` checks the range and that.
        pools: every pool of the model.

    Raises:
        TypeError, ValueError: the slots are not two integer vectors of one length on the cursors' device, or a pool has
            other slots or another window or ring than the cursors.
    """
    read = checks.check_slots("source", source, cursors).long()
    write = checks.check_slots("destination", destination, cursors).long()
    if read.shape != write.shape:
        raise ValueError(f"destination: expected {tuple(read.shape)} as source, got {tuple(write.shape)}")
    pools = checks.check_pools(cursors, pools)
    if debug.DEBUG:
        debug.check_distinct("destination", write)
    held = (getattr(cursors, name) for name in cursors.names)
    for tensor in (*held, *(t for pool in pools for t in pool.tensors)):
        tensor.index_copy_(0, write, tensor.index_select(0, read))


def write_read_copy(cursors: Cursors, slots: Tensor, *, pools: Iterable[Pool]) -> None:
    """Make the read copies of some slots from their checkpoints; call it after a prefill has written these.

    The other verbs keep a copy up to date. Pools without copies are left alone.

    Args:
        slots: [n] int64 or int32 of valid slots; a negative one is no padding here.
        cursors: of the pools.
        pools: read copies are written at `slots`.

    Raises:
        TypeError, ValueError: as `reset`.
        NotImplementedError: no kernel for a pool's geometry or this GPU, more than 65535 slots, or nvidia-cutlass-dsl
            is missing.
    """
    index, pools = checks.check_slots("slots", slots, cursors), checks.check_pools(cursors, pools)
    if cursors.device.type == "cuda":
        model_launch.cuda_write_read_copy(index, pools)
        return
    for pool in pools:
        storage.write_copy(pool, index.long())


def flush(cursors: Cursors, slots: Tensor, *, pools: Iterable[Pool], A: Iterable[Tensor | None] | None = None) -> None:
    """Fold all committed records of some slots into their checkpoints now, in every layer.

    The checkpoints get the bits that a forced fold in `step` would write. The cursors move past the records, and no
    ring row is touched. A slot without records keeps its checkpoint bit for bit.

    Args:
        cursors: read, and written at `slots`.
        slots: [n] int32 or int64; a negative one is padding and left alone. Caller must keep the others distinct and
            within the pools, and their cursors in range; `REPLAYSSM_DEBUG=1` checks that.
        pools: every pool of the model, each once; checkpoints are written at `slots`.
        A: for Mamba-2, whose records hold dt, a sequence with the [HV] float32 tensor of each pool's inputs; else None.

    Raises:
        TypeError, ValueError: an argument has another type, shape, dtype, device or length than described, or a pool
            has other slots or another window or ring than the cursors.
        NotImplementedError: no kernel for a pool's geometry or this GPU, more than 65535 rows, or nvidia-cutlass-dsl is
            missing.
    """
    checks.check_flush(cursors, slots)
    pools, rates = checks.check_model(cursors, pools, A)
    if debug.DEBUG:
        debug.check_rows(cursors, slots, -1, "slots")
    if cursors.device.type == "cuda":
        model_launch.cuda_materialize(cursors, slots, None, None, pools, rates)
    else:
        twin.flush(cursors, slots, pools=pools, A=rates)


def materialize(
    cursors: Cursors,
    source: Tensor,
    destination: Tensor,
    num_records: Tensor | None,
    *,
    pools: Iterable[Pool],
    A: Iterable[Tensor | None] | None = None,
) -> None:
    """Write the state after the first `num_records` committed records of some slots as the checkpoints of others.

    Every layer at once. The sources stay as they are: checkpoint, ring and cursors. The destinations have no pending
    records then; what their rings held never reaches an output.

    Args:
        cursors: read at `source`; written at `destination`, as empty (`ring_start` 0, `num_committed` 0).
        source, destination: [n] int32 or int64, both the same. Rows in which either is negative are padding and left
            alone. A source may have several rows. Caller must keep slots within the pools, destinations distinct and
            none of them a source (`flush` folds in place), and the cursors of sources in range; `REPLAYSSM_DEBUG=1`
            checks that.
        num_records: [n] int32, 0 to `num_committed` of the source; None takes all. With 0 the checkpoint is copied bit
            for bit. Not read in padding rows. Caller must keep the range; `REPLAYSSM_DEBUG=1` checks it.
        pools: every pool of the model, each once; checkpoints are written at `destination`.
        A: for Mamba-2, whose records hold dt, a sequence with the [HV] float32 tensor of each pool's inputs; else None.

    Raises:
        TypeError, ValueError: an argument has another type, shape, dtype, device or length than described, or a pool
            has other slots or another window or ring than the cursors.
        NotImplementedError: no kernel for a pool's geometry or this GPU, more than 65535 rows, or nvidia-cutlass-dsl is
            missing.
    """
    checks.check_materialize(cursors, source, destination, num_records)
    pools, rates = checks.check_model(cursors, pools, A)
    if debug.DEBUG:
        debug.check_moves(cursors, source, destination, num_records)
    if cursors.device.type == "cuda":
        model_launch.cuda_materialize(cursors, source, destination, num_records, pools, rates)
    else:
        twin.materialize(cursors, source, destination, num_records, pools=pools, A=rates)


def warmup(
    layer: LayerSpec,
    replay: ReplaySpec,
    options: Options,
    *,
    arch: str,
    batches: Sequence[int] = (1, 256),
    index_dtypes: Sequence[str] = ("int32", "int64"),
) -> list[Plan]:
    """Compile a layer's step and commit kernels into the disk cache; needs no GPU.

    These are the kernels of plain calls on the pools of `make_pool`. Calls with `force_fold`, `num_accepted` or `pdl`,
    pools of another layout, and `flush` and `materialize` have kernels of their own, which their first call compiles.

    Args:
        layer, replay, options: what the model decodes with.
        arch: "sm_90a", "sm_100a" or "sm_103a".
        batches: batch sizes to plan for; sizes that share a plan, as all do where no tuned table has the layer, share
            a kernel.
        index_dtypes: of `cache_indices`.

    Returns:
        The plans whose kernels are in the cache now.

    Raises:
        NotImplementedError: as `plan_step`, or nvidia-cutlass-dsl is missing.
    """
    modules = launch.kernel_modules()
    from cute_kernels.compile import ensure_on_disk

    layout = default_ring_layout(layer)
    plans = {
        plan_step(layer, replay, options, arch=arch, batch=batch, rows=RowOptions(index_dtype), ring_layout=layout)
        for batch in batches
        for index_dtype in index_dtypes
    }
    for plan in plans:
        make = functools.partial(modules.step.fake_arguments, plan.key)
        ensure_on_disk(modules.step.step_launch, make, plan.key, arch)
    for index_dtype in index_dtypes:
        key = modules.commit.CommitKey(replay.window, 1, index_dtype, counts_folds=replay.rounding == "stochastic")
        make = functools.partial(modules.commit.fake_arguments, key)
        ensure_on_disk(modules.commit.commit_launch, make, key, arch)
    return sorted(plans, key=repr)
