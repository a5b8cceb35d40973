"""The decode step of one layer, one launch: rows that only read their checkpoint beside rows that fold.

A CTA works on `Tile.rows` rows of one head of one row of the batch:

1. start the loads that need neither slot nor cursor: gate, query, epilogue;
2. load slot and cursor, start the bulk copy of its tile of the checkpoint, then the loads of the window's records;
3. a row that reads: score the records, reduce their weighted values over the CTA, then multiply the tile by the query;
   a row that folds: stage the records, fold them into the tile, write it back, multiply the new tile by the query;
4. append the token behind the committed records and write the output.

An append lands outside the live window, so the CTAs of a head never race.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.args import (
    CursorTensors,
    GdnParameters,
    GdnTensors,
    InputTensors,
    KdaParameters,
    KdaTensors,
    Mamba2Parameters,
    Mamba2Tensors,
    ParameterTensors,
    PoolTensors,
    RowTensors,
    StepTensors,
    fake_cursors,
    fake_vector,
)
from cute_kernels.compile import compiled, launch_limits
from cute_kernels.configs import LANES_PER_RECORD, SIZE_BYTES, WARP, GdnOptions, KdaOptions, StepKey, Tile
from cute_kernels.copy_shape import CopyShape
from cute_kernels.dtypes import CUTLASS_DTYPE
from cute_kernels.encode import fake_copy
from cute_kernels.primitives.arithmetic import exp2, opaque, select
from cute_kernels.primitives.bulk import bulk_init, bulk_load, bulk_wait
from cute_kernels.primitives.convert import unpack
from cute_kernels.primitives.memory import (
    EVICT_FIRST,
    EVICT_NORMAL,
    load_shared_floats,
    store_words_if,
)
from cute_kernels.records import (
    LaneRecords,
    RowLoads,
    TileMemory,
    TokenLoads,
    Window,
    append_record,
    leads_group,
    load_epilogue,
    policy_of,
    probe_factors,
    probe_places,
    scaled,
    stage_channels,
    unpacked_probes,
)
from cute_kernels.recurrences.base import Gate
from cute_kernels.replay.channels import column_decays, decayed, scaled_key, window_decays
from cute_kernels.replay.cursor import RowCursor, is_padding, load_force, load_slot
from cute_kernels.replay.delta import columns, correction, dot, store_key
from cute_kernels.replay.fold import (
    FoldProbes,
    FoldStage,
    FoldStatics,
    fold_tile,
    product_at,
    stage_record,
    stage_values,
)
from cute_kernels.replay.noise import Noise
from cute_kernels.replay.readout import ROW_LANES, add_weighted, read_tile, score, store_partial_sums
from cute_kernels.replay.window import (
    Place,
    address,
    copy_row,
    load_key,
    load_scalar_if,
    store_scalar_if,
)
from cute_kernels.verify import verify_kernel

TOKENS = 1


def write_output(
    out: cute.Tensor, key: StepKey, place: Place, local_row: Any, value: Any, epilogue: Any, inside: Any
) -> None:
    """Apply the epilogue to one channel and write it."""
    where = address(out, SIZE_BYTES[key.activation_dtype], place.row, 0, place.head, place.first_row + local_row)
    store_scalar_if(inside, where, policy_of(key).finish(value, epilogue), key.activation_dtype)


def read_row(tensors: StepTensors, key: StepKey, place: Place, loads: RowLoads, shared: TileMemory) -> None:
    """A row that only reads its checkpoint."""
    policy, tile, dtype = policy_of(key), Tile.of(key), key.activation_dtype
    delta, outputs = policy.value_needs_state, loads.early.outputs
    probes = unpacked_probes(loads.early.probes, key)
    gate = policy.gate(loads.early.token)
    epilogues = [policy.epilogue(loaded) for loaded in loads.early.epilogues]
    window = Window.of(key, place, loads, gate)
    sums = [[Float32(0.0)] * (-(-tile.value_vectors // LANES_PER_RECORD) * tile.value_vector) for _ in probes]
    for record, index, weight in window.passes(tensors, key, place, loads):
        is_token = index == loads.cursor.count
        if not delta:
            append_record(record, is_token, key, place)
        keys, key_dtype = record.key, dtype
        if policy.decays_per_channel:
            keys, key_dtype = scaled_key(tile, record.key, dtype, shared.staging, index, place), "float32"
        for p, probe in enumerate(probes):
            factor = weight * score(keys, probe, key_dtype)
            if not delta:
                factor = factor + select(is_token, gate.skip, Float32(0.0))
            sums[p] = add_weighted(sums[p], record.values, factor, key.record_dtype)
    if tile.partials_over_decays:
        cute.arch.sync_warp()  # every lane has read these
    for p, of_probe in enumerate(sums):
        store_partial_sums(of_probe, tile, shared.staging + tile.partials_at(p, place.warp), place.lane)
    if isinstance(loads.decays, LaneRecords):
        loads.decays.append(gate.record, place, loads.cursor)
    if policy.decays_per_channel:  # the probes are spent before they are scaled, which saves as many registers
        own_score = append_key(tensors.pool, key, place, loads.cursor, probes)
        probes = decayed(tile, probes, shared.staging, place)
    cute.arch.barrier()
    bulk_wait(shared.arrival)
    products = read_tile(tile, key.checkpoint_dtype, shared.state, probes, place.lane, outputs.first_row)
    if delta and not policy.decays_per_channel:  # late: 0.5 us of 137 at batch 256 (bfloat16, H200, 2026-11-29)
        own_score = append_key(tensors.pool, key, place, loads.cursor, probes)
    for i, row in enumerate(outputs.rows):
        values = []
        for p, of_probe in enumerate(products):
            value = of_probe[i] * window.decay
            for warp in range(tile.warps):
                partials = shared.staging + tile.partials_at(p, warp)
                value = value + load_shared_floats(partials + row * 4, 1, 4)[0]
            values.append(value)
        value = values[0]
        if delta:
            value, update = correction(values, epilogues[i], gate.strength, own_score)
            append_value(tensors.pool, key, place, loads.cursor, row, update, outputs.inside[i])
        write_output(tensors.out, key, place, row, value, epilogues[i], outputs.inside[i])


def append_key(pool: PoolTensors, key: StepKey, place: Place, cursor: RowCursor, probes: list[list[list[Any]]]) -> Any:
    """Write the key that the state met to the ring, by the first 8 lanes; returns its product with the query."""
    tile, size = Tile.of(key), SIZE_BYTES[key.activation_dtype]
    query, keys = ([x for vector in probe for x in vector] for probe in probes)
    mine = Int32(place.thread < LANES_PER_RECORD) * leads_group(key, place)
    where = address(pool.key, size, cursor.slot, place.group, cursor.physical(cursor.count))
    start = where + place.lane % LANES_PER_RECORD * (tile.vector * size)
    store_key(mine, start, keys, tile.vector, LANES_PER_RECORD * tile.vector, key.activation_dtype)
    return dot(query, keys, ROW_LANES)


def append_value(
    pool: PoolTensors, key: StepKey, place: Place, cursor: RowCursor, local_row: Any, value: Any, inside: Any
) -> None:
    """Write one channel of the token's record to the ring."""
    size, physical = SIZE_BYTES[key.record_dtype], cursor.physical(cursor.count)
    where = address(pool.value, size, cursor.slot, place.head, physical, place.first_row + local_row)
    store_scalar_if(inside, where, value, key.record_dtype)


def fold_row(tensors: StepTensors, key: StepKey, place: Place, loads: RowLoads, shared: TileMemory) -> None:
    """A row that folds its committed records first."""
    policy, tile, size = policy_of(key), Tile.of(key), SIZE_BYTES[key.activation_dtype]
    gate = policy.gate(tuple(None if x is None else opaque(x) for x in loads.early.token))
    window = Window.of(key, place, loads, gate)
    factors, score_token = own_product(tensors, key, place, loads)
    channels = policy.decays_per_channel
    key_dtype = "float32" if channels else key.activation_dtype
    statics = FoldStatics(tile, key.checkpoint_dtype, key_dtype, key.record_dtype, parts=tile.value_parts)
    lane8 = place.lane % LANES_PER_RECORD
    stage = FoldStage.of(tile, shared.state, shared.staging, place)
    noise = Noise.load(tensors.pool.seed, tensors.cursors, loads.cursor.slot, place)
    for record, index, weight in window.passes(tensors, key, place, loads):
        if channels:
            keys = scaled_key(tile, record.key, key.activation_dtype, shared.staging, index, place)
            record = dataclasses.replace(record, key=keys)
        stage_record(stage, statics, index, lane8, record, weight)
    probes = fold_probes(tensors, key, place, shared)
    decays: Any = window_decays(tile, shared.staging) if channels else columns([[window.decay]])
    if tile.value_parts > 1:  # which take that place
        decays = columns([column_decays(tile, decays, c, stage.column) for c in range(tile.fold_chunks)])
    cute.arch.barrier()
    bulk_wait(shared.arrival)
    slot, head = loads.cursor.slot, place.head
    checkpoint = address(tensors.pool.checkpoint, SIZE_BYTES[key.checkpoint_dtype], slot, head, place.first_row)
    count = loads.cursor.count
    for part in range(tile.value_parts):
        if part > 0:
            cute.arch.barrier()  # every thread has read the part before
        if tile.value_parts > 1:  # of a window of one pass
            stage_values(stage, statics, index, lane8, record, part)
            cute.arch.barrier()
        fold_tile(stage, statics, shared.state, checkpoint, count, decays, probes, noise, Int32(part))
    if policy.value_needs_state:
        if not channels:
            append_folded_decay(tensors.pool, place, loads.cursor, gate)
    else:
        append_folded_record(tensors.pool, tensors.inputs, key, place, loads.cursor, gate)
    cute.arch.barrier()
    inside = Int32(place.thread < tile.rows)
    channel = place.first_row + place.thread
    value_at = address(policy.value(tensors.inputs), size, place.row, 0, head, channel)
    token_value = load_scalar_if(inside, value_at, key.activation_dtype)
    epilogue = policy.epilogue(load_epilogue(tensors.inputs, key, place, channel, inside))
    local_row = select(inside != 0, place.thread, Int32(0))
    products = [
        load_shared_floats(product_at(stage, tile, local_row, p), 1, 4)[0] * factor for p, factor in enumerate(factors)
    ]
    if policy.value_needs_state:
        decay = Float32(1.0) if channels else exp2(gate.rate * gate.record)
        value, update = correction([x * decay for x in products], token_value, gate.strength, score_token)
        append_value(tensors.pool, key, place, loads.cursor, place.thread, update, inside)
    else:
        own = policy.weight(gate.record) * score_token + gate.skip
        value = products[0] * exp2(gate.rate * gate.record) + own * token_value
    write_output(tensors.out, key, place, place.thread, value, epilogue, inside)


def append_folded_record(
    pool: PoolTensors, inputs: Any, key: StepKey, place: Place, cursor: RowCursor, gate: Gate
) -> None:
    """Append the record of a row that folds, whose window does not hold the token: warp 0 the value, warp 1 the key."""
    policy, tile, size = policy_of(key), Tile.of(key), SIZE_BYTES[key.activation_dtype]
    physical = cursor.physical(cursor.count)
    is_value = place.warp == 0
    key_bytes = select(place.warp == 1, leads_group(key, place) * (key.d_state * size), Int32(0))
    copy_row(
        select(
            is_value,
            address(policy.value(inputs), size, place.row, 0, place.head, place.first_row),
            address(policy.key(inputs), size, place.row, 0, place.group),
        ),
        select(
            is_value,
            address(pool.value, size, cursor.slot, place.head, physical, place.first_row),
            address(pool.key, size, cursor.slot, place.group, physical),
        ),
        select(is_value, Int32(tile.rows * size), key_bytes),
        max(tile.rows, key.d_state) * size,
        place.lane,
    )
    append_folded_decay(pool, place, cursor, gate)


def append_folded_decay(pool: PoolTensors, place: Place, cursor: RowCursor, gate: Gate) -> None:
    """The decay record of a row that folds, by one thread of a head."""
    one_thread = Int32(place.thread == 2 * WARP) * Int32(place.first_row == 0)
    decay_ring = address(pool.decay, 4, cursor.slot, place.head, cursor.physical(cursor.count))
    store_words_if(one_thread, decay_ring, [gate.record.bitcast(Uint32)])


def fold_probes(tensors: StepTensors, key: StepKey, place: Place, shared: TileMemory) -> FoldProbes:
    """The probes as a fold multiplies them, whose products are to be times what `probe_factors` finds."""
    tile, places = Tile.of(key), probe_places(tensors.inputs, key, place)
    token = shared.staging + tile.padded_window * tile.d_state * 4 if tile.channels else None
    return FoldProbes(places, key.activation_dtype, token)


def own_product(tensors: StepTensors, key: StepKey, place: Place, loads: RowLoads) -> tuple[list[Any], Float32]:
    """The factors of a folding row's probes, and the product of the token's key and query.

    With a delta rule the key that the state meets is appended here.
    """
    policy, tile, size = policy_of(key), Tile.of(key), SIZE_BYTES[key.activation_dtype]
    probes = [[unpack(words, key.activation_dtype) for words in vectors] for vectors in loads.early.probes]
    if policy.value_needs_state:
        factors = probe_factors(probes, key)
        return factors, append_key(tensors.pool, key, place, loads.cursor, scaled(probes, factors))
    where = address(policy.key(tensors.inputs), size, place.row, 0, place.group)
    own = load_key(where, True, place.lane % LANES_PER_RECORD, tile)
    return [Float32(1.0)], score(own, probes[0], key.activation_dtype)


@cute.kernel
def step_kernel(tensors: StepTensors, pad_slot: Int32, key: cutlass.Constexpr):
    """One CTA: see this module's docstring.

    All loads are issued before anything is computed from them: the hardware issues in order, so an instruction that
    waits for one load would hold up those behind it. The compiler moves loads towards their use and long chains away
    from theirs, but not across a CTA barrier or a branch: the first barrier holds the loads that need no slot in front
    of the wait for it, the second the tile's copies in front of the records (H200, 2026-11: without it a single copy
    moved behind them, 150 instead of 136 us for bfloat16 at batch 256), and the gate, a long chain, is computed in
    each branch.
    """
    tile = Tile.of(key)
    _, row, _ = cute.arch.block_idx()
    place = Place.of(key, row)
    thread, head = place.thread, place.head
    shared = TileMemory.allocate(tile.bytes, tile.staging_bytes)
    if cutlass.const_expr(key.rows.pdl):
        cute.arch.griddepcontrol_wait()
    slot = load_slot(tensors.rows.cache_indices, row, key.rows.index_dtype)
    early = TokenLoads.start(tensors, key, place)
    bulk_init(thread, shared.arrival)
    cute.arch.barrier()
    if is_padding(slot, pad_slot):
        where = address(tensors.out, SIZE_BYTES[key.activation_dtype], row, 0, head, place.first_row + thread)
        store_scalar_if(thread < tile.rows, where, Float32(0.0), key.activation_dtype)
    else:
        cursor = RowCursor.load(
            tensors.cursors,
            slot,
            load_force(tensors.rows, row),
            capacity=key.ring_capacity,
            window=key.window,
            tokens=TOKENS,
        )
        # Rows that only read stream the checkpoint through L2 without keeping it, so that the lines written beside it
        # stay (265 -> 251 us at batch 256); rows that fold write it back, and evict-first would cost 559 -> 583 us.
        policy = select(cursor.folds, Int64(EVICT_NORMAL), Int64(EVICT_FIRST))
        tile_at = address(tensors.pool.checkpoint, SIZE_BYTES[key.checkpoint_dtype], slot, head, place.first_row)
        bulk_load(thread, shared.state, tile_at, shared.arrival, policy, tile.bytes)
        cute.arch.barrier()
        loads = RowLoads.start(tensors, key, place, cursor, early)
        if cutlass.const_expr(tile.channels):
            stage_channels(tensors, key, place, loads, shared.staging)
            cute.arch.barrier()
        if cutlass.const_expr(key.rows.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        if cursor.folds == 0:
            read_row(tensors, key, place, loads, shared)
        else:
            fold_row(tensors, key, place, loads, shared)


def compact(group: Any) -> Any:
    """The same tensors with unit shapes and as few strides that vary as can be: pointer and slot or row stride remain.

    A kernel's arguments are read from constant memory, a cache line at a time and cold in small batches, so nothing
    travels that the kernel does not use.
    """
    if group is None:
        return None
    if dataclasses.is_dataclass(group):
        return type(group)(*(compact(getattr(group, field.name)) for field in dataclasses.fields(group)))
    # One row or one token has no neighbour.
    alone = [isinstance(extent, int) and extent == 1 for extent in group.shape]
    strides = [
        0 if one and len(alone) > 2 and not isinstance(stride, int) else stride
        for one, stride in zip(alone, group.stride, strict=True)
    ]
    return cute.make_tensor(group.iterator, cute.make_layout(tuple(1 for _ in strides), stride=tuple(strides)))


@cute.jit
def step_launch(
    pool: PoolTensors,
    cursors: CursorTensors,
    rows: RowTensors,
    inputs: InputTensors,
    parameters: ParameterTensors,
    out: cute.Tensor,
    pad_slot: Int32,
    key: cutlass.Constexpr,
    stream: Any,
):
    """Host side of the launch: one CTA for each part of each head of each row, or for heads that it takes together."""
    tensors = StepTensors(pool, cursors, rows, inputs, parameters, out)
    if cutlass.const_expr(key.drafts):
        prepared = verify_kernel(compact(tensors), Int32(out.shape[1]), pad_slot, key)
    else:
        prepared = step_kernel(compact(tensors), pad_slot, key)
    prepared.launch(
        grid=[key.row_ctas, cute.size(rows.cache_indices), 1],
        block=[key.threads, 1, 1],
        **launch_limits(key.config.ctas),
        stream=stream,
        use_pdl=key.rows.pdl,
    )


def _fake_copy(slots: Any, key: StepKey) -> dict[str, Any]:
    return {f"read_{name}": part for name, part in vars(fake_copy(slots, CopyShape.of(key), key.num_v_heads)).items()}


def fake_arguments(key: StepKey) -> tuple[Any, ...]:
    """Fake tensors of the shapes, dtypes, strides and alignments that a step kernel admits."""
    activation, options = CUTLASS_DTYPE[key.activation_dtype], key.options
    hv, hk, v, k = key.num_v_heads, key.num_k_heads, key.head_dim, key.d_state
    slots, batch, total, capacity = cute.sym_int64(), cute.sym_int64(), cute.sym_int64(), key.ring_capacity

    def tensor(dtype: Any, shape: tuple[Any, ...], steps: tuple[Any, ...], align: int) -> Any:
        """A tensor whose strides are free, in units of the alignment, where `steps` says None."""
        unit = max(1, align * 8 // dtype.width)
        strides = tuple(cute.sym_int64(divisibility=unit) if step is None else step for step in steps)
        return make_fake_tensor(dtype, shape, strides, assumed_align=align)

    def rows_of(dtype: Any, shape: tuple[int, ...], align: int) -> Any:
        """[batch, tokens, *shape], or [1, total, *shape], with `shape` packed."""
        steps = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        extent = (1, total) if key.rows.has_cu_seqlens else (batch, key.num_tokens)
        return tensor(dtype, (*extent, *shape), (None, None, *steps), align)

    def ring(dtype: Any, heads: int, width: tuple[int, ...], align: int) -> Any:
        """[slots, heads, capacity, *width] in the layout of the key."""
        size = math.prod(width)
        steps = {
            "record_major": (size, heads * size),
            "head_major": (capacity * size, size),
            "strided": (None, None),
        }[key.ring_layout]
        return tensor(dtype, (slots, heads, capacity, *width), (None, *steps, *(1 for _ in width)), align)

    def vector(dtype: str | None) -> Any:
        return None if dtype is None else tensor(CUTLASS_DTYPE[dtype], (hv,), (1,), CUTLASS_DTYPE[dtype].width // 8)

    channels = isinstance(options, KdaOptions)
    int32, index = CUTLASS_DTYPE["int32"], CUTLASS_DTYPE[key.rows.index_dtype]
    state = CUTLASS_DTYPE[key.checkpoint_dtype]
    pool = PoolTensors(
        checkpoint=tensor(state, (slots, hv, v, k), (None, v * k, k, 1), 16),
        value=ring(CUTLASS_DTYPE[key.record_dtype], hv, (v,), 16),
        key=ring(activation, hk, (k,), 16),
        decay=ring(CUTLASS_DTYPE[key.decay_dtype], hv, *(((k,), 16) if channels else ((), 4))),
        seed=fake_vector("int64", slots) if key.rounding == "stochastic" else None,
        **({} if key.read_dtype is None else _fake_copy(slots, key)),
    )
    rows = RowTensors(
        cache_indices=tensor(index, (batch,), (1,), index.width // 8),
        force_fold=tensor(CUTLASS_DTYPE["uint8"], (batch,), (1,), 1) if key.rows.has_force_fold else None,
        cu_seqlens=tensor(int32, (cute.sym_int64(),), (1,), 4) if key.rows.has_cu_seqlens else None,
    )

    def scalars(dtype: str) -> Any:
        return rows_of(CUTLASS_DTYPE[dtype], (hv,), CUTLASS_DTYPE[dtype].width // 8)

    values, keys = (lambda: rows_of(activation, (hv, v), 16)), (lambda: rows_of(activation, (hk, k), 16))
    if isinstance(options, GdnOptions):
        inputs = GdnTensors(keys(), keys(), values(), scalars(options.a_dtype), scalars(options.b_dtype))
        parameters = GdnParameters(vector("float32"), vector("float32"))
    elif isinstance(options, KdaOptions):
        g_dtype = CUTLASS_DTYPE[options.g_dtype]
        inputs = KdaTensors(keys(), keys(), values(), rows_of(g_dtype, (hv, k), 16), scalars(options.beta_dtype))
        parameters = KdaParameters(vector("float32"), tensor(CUTLASS_DTYPE["float32"], (hv, k), (k, 1), 16))
    else:
        z = values() if options.has_z else None
        inputs = Mamba2Tensors(x=values(), dt=scalars(options.dt_dtype), B=keys(), C=keys(), z=z)
        parameters = Mamba2Parameters(vector("float32"), vector(options.D_dtype), vector(options.dt_bias_dtype))
    out = rows_of(activation, (hv, v), 16)
    cursors, stream = fake_cursors(slots, key.rounding == "stochastic"), make_fake_stream(use_tvm_ffi_env_stream=True)
    return pool, cursors, rows, inputs, parameters, out, Int32(-1), key, stream


def kernel(key: StepKey, arch: str) -> Callable[..., None]:
    """The compiled step: call it as `step_launch`, without the last two."""
    return compiled(step_launch, lambda: fake_arguments(key), key, arch)
