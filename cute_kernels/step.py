"""The decode step of one layer, one launch: rows that only read their checkpoint beside rows that fold.

A CTA works on `Tile.rows` rows of one head of one row of the batch:

1. start the bulk copies of its tile of the checkpoint (they need the slot alone);
2. load the cursor, the gate, the query, the window's records and this step's token;
3. a row that reads: score the records, reduce their weighted values over the CTA, then multiply the tile by the query;
   a row that folds: stage the records, fold them into the tile, write it back, multiply the new tile by the query;
4. append the token behind the committed records and write the output.

An append lands outside the live window, so the CTAs of a head never race.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.args import Mamba2Tensors, PoolTensors, RowTensors
from cute_kernels.compile import compiled
from cute_kernels.configs import LANES_PER_RECORD, SIZE_BYTES, WARP, StepKey, Tile
from cute_kernels.dtypes import CUTLASS_DTYPE
from cute_kernels.primitives.arithmetic import exp2, select
from cute_kernels.primitives.bulk import bulk_load, bulk_wait
from cute_kernels.primitives.convert import unpack
from cute_kernels.primitives.memory import EVICT_FIRST, load_shared_floats, store_words_if
from cute_kernels.primitives.reduce import broadcast, sum_lanes
from cute_kernels.recurrences.base import Gate, Recurrence
from cute_kernels.recurrences.mamba2 import Mamba2
from cute_kernels.replay.cursor import RowCursor, is_padding, load_slot
from cute_kernels.replay.decay import decay_to_end
from cute_kernels.replay.fold import FoldStage, FoldStatics, fold_tile, stage_record
from cute_kernels.replay.readout import add_weighted, read_tile, score, store_partial_sums
from cute_kernels.replay.window import (
    LoadedRecord,
    Place,
    TokenRow,
    address,
    load_key,
    load_row_words,
    load_scalar_if,
    load_values,
    select_decay_record,
    store_scalar_if,
)

TOKENS = 1


def policy_of(key: StepKey) -> Recurrence:
    """The recurrence's policy for a key."""
    return Mamba2(key.options, key.activation_dtype)


def load_record(
    pool: PoolTensors, inputs: Any, key: StepKey, place: Place, cursor: RowCursor, first_record: int
) -> LoadedRecord:
    """This thread's part of the record that its 8 lanes share in the pass that starts at `first_record`.

    The record behind the last committed one is the token itself, for a row that reads.
    """
    policy, tile, size = policy_of(key), Tile.of(key), SIZE_BYTES[key.activation_dtype]
    record = first_record + place.thread // LANES_PER_RECORD
    lane8 = place.lane % LANES_PER_RECORD
    is_token = (record == cursor.count) & (cursor.folds == 0)
    valid = Int32((record < cursor.count) | is_token)
    physical = cursor.physical(record)
    key_ring = address(pool.key, size, cursor.slot, place.group, physical)
    key_token = address(policy.key(inputs), size, place.row, 0, place.group)
    keys = load_key(select(is_token, key_token, key_ring), valid, lane8, tile)
    value_ring = address(pool.value, size, cursor.slot, place.head, physical, place.first_row)
    value_token = address(policy.value(inputs), size, place.row, 0, place.head, place.first_row)
    values = load_values(select(is_token, value_token, value_ring), valid, lane8, tile)
    return LoadedRecord(keys, values)


def load_token_rows(pool: PoolTensors, inputs: Any, key: StepKey, place: Place, cursor: RowCursor) -> list[TokenRow]:
    """The token's value (warp 0) and key (warp 1, first CTA of the group) on their way into the ring."""
    policy, tile, size = policy_of(key), Tile.of(key), SIZE_BYTES[key.activation_dtype]
    physical = cursor.physical(cursor.count)
    value = TokenRow.load(
        address(policy.value(inputs), size, place.row, 0, place.head, place.first_row),
        address(pool.value, size, cursor.slot, place.head, physical, place.first_row),
        tile.rows * size,
        place.lane,
        place.warp == 0,
    )
    leads_group = Int32(place.head % (key.num_v_heads // key.num_k_heads) == 0) * Int32(place.first_row == 0)
    key_row = TokenRow.load(
        address(policy.key(inputs), size, place.row, 0, place.group),
        address(pool.key, size, cursor.slot, place.group, physical),
        key.d_state * size,
        place.lane,
        leads_group * Int32(place.warp == 1),
    )
    return [value, key_row]


def append(pool: PoolTensors, token_rows: list[TokenRow], gate: Gate, place: Place, cursor: RowCursor) -> None:
    """Write the token's record behind the committed ones."""
    for token_row in token_rows:
        token_row.store()
    where = address(pool.decay, 4, cursor.slot, place.head, cursor.physical(cursor.count))
    one_thread = Int32(place.thread == 2 * WARP) * Int32(place.first_row == 0)
    store_words_if(one_thread, where, [gate.record.bitcast(Uint32)])


def load_query(inputs: Any, key: StepKey, place: Place) -> list[list[Float32]]:
    """This thread's vectors of the query as the readout multiplies them."""
    size = SIZE_BYTES[key.activation_dtype]
    where = address(policy_of(key).query(inputs), size, place.row, 0, place.group)
    vectors = load_key(where, True, place.lane % LANES_PER_RECORD, Tile.of(key))
    return [unpack(words, key.activation_dtype) for words in vectors]


def lane_records(pool: PoolTensors, key: StepKey, place: Place, cursor: RowCursor, gate: Gate) -> list[Float32]:
    """Decay records of the window, record lane + 32 w in word w; 0 where there is none."""
    return [
        select_decay_record(place.lane + WARP * w, cursor, pool.decay, place.head, gate.record)
        for w in range(-(-key.window // WARP))
    ]


def write_output(
    inputs: Any, out: cute.Tensor, key: StepKey, place: Place, local_row: Any, value: Any, inside: Any
) -> None:
    """Apply the epilogue to one channel and write it."""
    size = SIZE_BYTES[key.activation_dtype]
    channel = place.first_row + local_row
    value = policy_of(key).finish(inputs, place.row, place.head, channel, value, inside)
    where = address(out, size, place.row, 0, place.head, channel)
    store_scalar_if(inside, where, value, key.activation_dtype)


@dataclass(frozen=True)
class Shared:
    """Byte addresses in a CTA's shared memory: the tile, the records or partial sums, and float [rows]."""

    state: Int32
    staging: Int32
    products: Int32


@dataclass(frozen=True)
class Window:
    """What a row's window is once its first loads are under way.

    Args:
        first: this thread's part of the first pass of records.
        weights: weight of record lane + 32 w in word w: its decay to the end of the window times its own factor.
        decay: product of the decays of the window.
    """

    first: LoadedRecord
    weights: list[Float32]
    decay: Float32


def window_passes(pool: PoolTensors, inputs: Any, key: StepKey, place: Place, cursor: RowCursor, window: Window) -> Any:
    """Yield (first record, this thread's record, its weight) for each pass over the window."""
    per_pass = Tile.of(key).records_per_pass
    for first in range(0, key.window, per_pass):
        record = window.first if first == 0 else load_record(pool, inputs, key, place, cursor, first)
        lane = first % WARP + place.thread // LANES_PER_RECORD
        yield first, record, broadcast(window.weights[first // WARP], lane)


def read_row(
    passes: Any, key: StepKey, place: Place, query: list[list[Float32]], count: Any, skip: Any, shared: Shared
) -> None:
    """The window's part of the output of a row that only reads, as partial sums of each warp in shared memory."""
    tile = Tile.of(key)
    sums = [Float32(0.0)] * (-(-tile.value_vectors // LANES_PER_RECORD) * tile.value_vector)
    for first, record, weight in passes:
        is_token = first + place.thread // LANES_PER_RECORD == count
        factor = weight * score(record.key, query, key.activation_dtype) + select(is_token, skip, Float32(0.0))
        sums = add_weighted(sums, record.values, factor, key.activation_dtype)
    store_partial_sums(sums, tile, shared.staging, place.lane, place.warp)


def write_read_row(
    inputs: Any, out: cute.Tensor, key: StepKey, place: Place, query: Any, decay: Any, shared: Shared, barriers: Any
) -> None:
    """Multiply the tile by the query, add the window's part, and write the outputs."""
    tile = Tile.of(key)
    kept, local_rows, owner = read_tile(
        tile, key.checkpoint_dtype, shared.state, barriers, key.config.chunks, query, place.lane, place.warp
    )
    for product, local_row in zip(kept, local_rows, strict=True):
        inside = Int32(owner) * Int32(local_row < tile.rows)
        value = product * decay
        for warp in range(tile.warps):
            where = shared.staging + (warp * tile.rows + local_row) * 4
            value = value + load_shared_floats(where, 1, 4)[0]
        write_output(inputs, out, key, place, local_row, value, inside)


def fold_row(
    pool: PoolTensors,
    inputs: Any,
    key: StepKey,
    place: Place,
    cursor: RowCursor,
    passes: Any,
    decay: Any,
    shared: Shared,
    barriers: Any,
) -> Float32:
    """Fold a row's committed records; leaves the products of the new state with the query in shared memory.

    Returns:
        The product of the token's key with the query.
    """
    policy, tile, size = policy_of(key), Tile.of(key), SIZE_BYTES[key.activation_dtype]
    statics = FoldStatics(tile, key.checkpoint_dtype, key.activation_dtype)
    stage = FoldStage.of(tile, shared.staging, place.thread)
    for first, record, weight in passes:
        index = first + place.thread // LANES_PER_RECORD
        stage_record(stage, statics, index, place.lane % LANES_PER_RECORD, record, weight)
    query_at = address(policy.query(inputs), size, place.row, 0, place.group)
    token_at = address(policy.key(inputs), size, place.row, 0, place.group)
    columns = tile.vector * tile.fold_chunks
    query = cute.make_rmem_tensor((columns,), Float32)
    score_token = Float32(0.0)
    vector_bytes = tile.vector * size
    for c in range(tile.fold_chunks):
        skip = (c * tile.fold_lanes + stage.column_lane) * vector_bytes
        q = unpack(load_row_words(True, query_at + skip, vector_bytes // 4), key.activation_dtype)
        k = unpack(load_row_words(True, token_at + skip, vector_bytes // 4), key.activation_dtype)
        for e in range(tile.vector):
            query[c * tile.vector + e] = q[e]
            score_token = score_token + q[e] * k[e]
    masks = tuple(1 << b for b in range(tile.fold_lanes.bit_length() - 1))
    score_token = sum_lanes(score_token, masks)
    cute.arch.barrier()
    for chunk in range(key.config.chunks):
        bulk_wait(barriers, chunk)
    checkpoint = address(pool.checkpoint, SIZE_BYTES[key.checkpoint_dtype], cursor.slot, place.head, place.first_row)
    fold_tile(stage, statics, shared.state, checkpoint, shared.products, cursor.count, decay, query)
    cute.arch.barrier()
    return score_token


def write_fold_row(
    inputs: Any, out: cute.Tensor, key: StepKey, place: Place, gate: Gate, score_token: Any, shared: Shared
) -> None:
    """Outputs of a row that folded: the new state's products, decayed by the token, plus the token's own part."""
    policy, tile, dtype = policy_of(key), Tile.of(key), key.activation_dtype
    inside = Int32(place.thread < tile.rows)
    where = address(policy.value(inputs), SIZE_BYTES[dtype], place.row, 0, place.head, place.first_row + place.thread)
    token_value = load_scalar_if(inside, where, dtype)
    local_row = select(inside != 0, place.thread, Int32(0))
    product = load_shared_floats(shared.products + local_row * 4, 1, 4)[0]
    own = policy.weight(gate.record) * score_token + gate.skip
    value = product * exp2(gate.rate * gate.record) + own * token_value
    write_output(inputs, out, key, place, place.thread, value, inside)


@cute.jit
def live_row(
    pool: PoolTensors,
    rows: RowTensors,
    inputs: Mamba2Tensors,
    out: cute.Tensor,
    place: Place,
    slot: Int32,
    shared: Shared,
    barriers: Any,
    key: cutlass.Constexpr,
):
    """The work of a CTA whose row carries a request; the copies of its tile are under way."""
    policy = policy_of(key)
    cursor = RowCursor.load(rows, place.row, slot, capacity=pool.value.shape[2], window=key.window, tokens=TOKENS)
    query = load_query(inputs, key, place)
    gate = policy.gate(inputs, place.row, place.head)
    records = lane_records(pool, key, place, cursor, gate)
    first = load_record(pool, inputs, key, place, cursor, 0)
    token_rows = load_token_rows(pool, inputs, key, place, cursor)
    factors, decay = decay_to_end([gate.rate * r for r in records], place.lane, key.window)
    weights = [policy.weight(r) * f for r, f in zip(records, factors, strict=True)]
    window = Window(first, weights, decay)
    if cursor.folds:
        passes = window_passes(pool, inputs, key, place, cursor, window)
        score_token = fold_row(pool, inputs, key, place, cursor, passes, decay, shared, barriers)
        append(pool, token_rows, gate, place, cursor)
        write_fold_row(inputs, out, key, place, gate, score_token, shared)
    else:
        passes = window_passes(pool, inputs, key, place, cursor, window)
        read_row(passes, key, place, query, cursor.count, gate.skip, shared)
        append(pool, token_rows, gate, place, cursor)
        cute.arch.barrier()
        write_read_row(inputs, out, key, place, query, decay, shared, barriers)


@cute.kernel
def step_kernel(
    pool: PoolTensors,
    rows: RowTensors,
    inputs: Mamba2Tensors,
    out: cute.Tensor,
    pad_slot: Int32,
    key: cutlass.Constexpr,
):
    """One CTA: see this module's docstring."""
    tile, config = Tile.of(key), key.config
    thread, _, _ = cute.arch.thread_idx()
    block, row, _ = cute.arch.block_idx()
    head = block // config.split
    place = Place(
        row=row,
        head=head,
        group=head // (key.num_v_heads // key.num_k_heads),
        first_row=(block % config.split) * tile.rows,
        thread=thread,
        lane=thread % WARP,
        warp=thread // WARP,
    )
    smem = cutlass.AddressSpace.smem
    state = cutlass.Array(Uint32, (tile.bytes // 4,), space=smem, alignment=128)
    staging = cutlass.Array(Uint32, (tile.staging_bytes // 4,), space=smem, alignment=16)
    products = cutlass.Array(Float32, (tile.rows,), space=smem, alignment=16)
    barriers = cutlass.Array(Int64, (config.chunks,), space=smem, alignment=8)
    if cutlass.const_expr(key.pdl):
        cute.arch.griddepcontrol_wait()
    slot = load_slot(rows, row, key.index_dtype)
    if is_padding(slot, pad_slot):
        where = address(out, SIZE_BYTES[key.activation_dtype], row, 0, head, place.first_row + thread)
        store_scalar_if(thread < tile.rows, where, Float32(0.0), key.activation_dtype)
    else:
        shared = Shared(
            state=Int32(state.data_ptr().toint()),
            staging=Int32(staging.data_ptr().toint()),
            products=Int32(products.data_ptr().toint()),
        )
        bulk_load(
            thread,
            shared.state,
            address(pool.checkpoint, SIZE_BYTES[key.checkpoint_dtype], slot, head, place.first_row),
            barriers.data_ptr(),
            tile.bytes // config.chunks,
            config.chunks,
            EVICT_FIRST if config.evict_first else 0,
        )
        live_row(pool, rows, inputs, out, place, slot, shared, barriers.data_ptr(), key)
    if cutlass.const_expr(key.pdl):
        cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def step_launch(
    pool: PoolTensors,
    rows: RowTensors,
    inputs: Mamba2Tensors,
    out: cute.Tensor,
    pad_slot: Int32,
    key: cutlass.Constexpr,
    stream: Any,
):
    """Host side of the launch: one CTA for each part of each head of each row."""
    step_kernel(pool, rows, inputs, out, pad_slot, key).launch(
        grid=[key.num_v_heads * key.config.split, cute.size(rows.cache_indices), 1],
        block=[key.config.threads, 1, 1],
        stream=stream,
        use_pdl=key.pdl,
    )


def fake_arguments(key: StepKey) -> tuple[Any, ...]:
    """Fake tensors of the shapes, dtypes, strides and alignments that a step kernel admits."""
    activation, options = CUTLASS_DTYPE[key.activation_dtype], key.options
    hv, hk, v, k = key.num_v_heads, key.num_k_heads, key.head_dim, key.d_state
    slots, batch, ring = cute.sym_int64(), cute.sym_int64(), cute.sym_int64()

    def strided(dtype: Any, shape: tuple[Any, ...], packed: int, align: int = 16) -> Any:
        """A tensor whose last `packed` axes are packed and whose other strides are free, in units of the alignment."""
        steps, step = [], 1
        for extent in reversed(shape[len(shape) - packed :]):
            steps.insert(0, step)
            step *= extent
        divisibility = max(1, align * 8 // dtype.width)
        free = [cute.sym_int64(divisibility=divisibility) for _ in shape[: len(shape) - packed]]
        return make_fake_tensor(dtype, shape, (*free, *steps), assumed_align=align)

    def vector(dtype: str | None) -> Any:
        return None if dtype is None else strided(CUTLASS_DTYPE[dtype], (hv,), 1, SIZE_BYTES[dtype])

    int32 = CUTLASS_DTYPE["int32"]
    index = CUTLASS_DTYPE[key.index_dtype]
    pool = PoolTensors(
        checkpoint=strided(CUTLASS_DTYPE[key.checkpoint_dtype], (slots, hv, v, k), 2),
        value=strided(activation, (slots, hv, ring, v), 1),
        key=strided(activation, (slots, hk, ring, k), 1),
        decay=strided(CUTLASS_DTYPE["float32"], (slots, hv, ring), 0, 4),
    )
    rows = RowTensors(
        cache_indices=strided(index, (batch,), 1, index.width // 8),
        ring_start=strided(int32, (slots,), 1, 4),
        num_committed=strided(int32, (slots,), 1, 4),
        force_fold=strided(CUTLASS_DTYPE["uint8"], (batch,), 1, 1) if key.has_force_fold else None,
    )
    dt_dtype = CUTLASS_DTYPE[options.dt_dtype]
    inputs = Mamba2Tensors(
        x=strided(activation, (batch, TOKENS, hv, v), 1),
        dt=strided(dt_dtype, (batch, TOKENS, hv), 0, dt_dtype.width // 8),
        B=strided(activation, (batch, TOKENS, hk, k), 1),
        C=strided(activation, (batch, TOKENS, hk, k), 1),
        A=vector("float32"),
        D=vector(options.D_dtype),
        z=strided(activation, (batch, TOKENS, hv, v), 1) if options.has_z else None,
        dt_bias=vector(options.dt_bias_dtype),
    )
    out = strided(activation, (batch, TOKENS, hv, v), 1)
    return pool, rows, inputs, out, Int32(-1), key, make_fake_stream(use_tvm_ffi_env_stream=True)


def kernel(key: StepKey, arch: str) -> Callable[..., None]:
    """The compiled step: call it with (pool tensors, row tensors, input tensors, out, pad slot)."""
    return compiled(step_launch, lambda: fake_arguments(key), key, arch)
