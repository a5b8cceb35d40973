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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.args import (
    CursorTensors,
    GdnParameters,
    GdnTensors,
    Mamba2Parameters,
    Mamba2Tensors,
    PoolTensors,
    RowTensors,
    StepTensors,
)
from cute_kernels.compile import compiled
from cute_kernels.configs import LANES_PER_RECORD, SIZE_BYTES, THREADS, WARP, GdnOptions, StepKey, Tile
from cute_kernels.dtypes import CUTLASS_DTYPE
from cute_kernels.primitives.arithmetic import exp2, opaque, select
from cute_kernels.primitives.bulk import bulk_init, bulk_load, bulk_wait
from cute_kernels.primitives.convert import unpack
from cute_kernels.primitives.memory import (
    EVICT_FIRST,
    EVICT_NORMAL,
    STREAM,
    load_shared_floats,
    load_words_if,
    store_words_if,
)
from cute_kernels.primitives.reduce import broadcast
from cute_kernels.recurrences.base import Gate, Recurrence
from cute_kernels.recurrences.gdn import Gdn
from cute_kernels.recurrences.mamba2 import Mamba2
from cute_kernels.replay.cursor import RowCursor, is_padding, load_force, load_slot
from cute_kernels.replay.decay import decay_to_end
from cute_kernels.replay.delta import columns, correction, dot, store_key
from cute_kernels.replay.fold import FoldStage, FoldStatics, fold_tile, stage_record
from cute_kernels.replay.readout import ROW_LANES, OutputRows, add_weighted, read_tile, score, store_partial_sums
from cute_kernels.replay.window import (
    LoadedRecord,
    Place,
    address,
    copy_row,
    load_key,
    load_row_words,
    load_scalar_if,
    load_values,
    store_scalar_if,
)

TOKENS = 1


def policy_of(key: StepKey) -> Recurrence:
    """The recurrence's policy for a key."""
    if isinstance(key.options, GdnOptions):
        return Gdn(key.options, key.activation_dtype)
    return Mamba2(key.options, key.activation_dtype)


def load_record(
    pool: PoolTensors, inputs: Any, key: StepKey, place: Place, cursor: RowCursor, first_record: int
) -> LoadedRecord:
    """This thread's part of the record that its 8 lanes share in the pass that starts at `first_record`.

    The record behind the last committed one is the token itself, for a row that reads, where it is an input.
    """
    policy, tile, size = policy_of(key), Tile.of(key), SIZE_BYTES[key.activation_dtype]
    record = first_record + place.thread // LANES_PER_RECORD
    lane8 = place.lane % LANES_PER_RECORD
    inputs_too = not policy.value_needs_state
    is_token = (record == cursor.count) & (cursor.folds == 0) if inputs_too else Boolean(False)
    valid = Int32((record < cursor.count) | is_token)
    physical = cursor.physical(record)
    key_ring = source = address(pool.key, size, cursor.slot, place.group, physical)
    if inputs_too:
        source = select(is_token, address(policy.key(inputs), size, place.row, 0, place.group), key_ring)
    keys = load_key(source, valid, lane8, tile)
    value_ring = source = address(pool.value, size, cursor.slot, place.head, physical, place.first_row)
    if inputs_too:
        value_token = address(policy.value(inputs), size, place.row, 0, place.head, place.first_row)
        source = select(is_token, value_token, value_ring)
    values = load_values(source, valid, lane8, tile)
    return LoadedRecord(keys, values, key_ring, value_ring)


def leads_group(key: StepKey, place: Place) -> Int32:
    """Whether this CTA is the one of its group that appends the key."""
    return Int32(place.head % (key.num_v_heads // key.num_k_heads) == 0) * Int32(place.first_row == 0)


def append_record(record: LoadedRecord, is_token: Any, key: StepKey, place: Place) -> None:
    """Write the token's key and value behind the committed ones, by the lanes that hold them."""
    mine = Int32(is_token)
    stores_key = mine * leads_group(key, place)
    record.store(place.lane % LANES_PER_RECORD, Tile.of(key), stores_key=stores_key, stores_values=mine)


def append_folded_record(
    pool: PoolTensors, inputs: Any, key: StepKey, place: Place, cursor: RowCursor, gate: Gate
) -> None:
    """The same for a row that folds, whose window does not hold the token: warp 0 the value, warp 1 the key."""
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


@dataclass(frozen=True)
class LaneRecords:
    """Decay records of the window: record lane + 32 w in word w of every warp.

    Args:
        indices: the logical record of each word.
        addresses: its place in the ring.
        words: its value, 0 where there is none.
    """

    indices: list[Int32]
    addresses: list[Int64]
    words: list[Float32]

    @classmethod
    def load(cls, pool: PoolTensors, key: StepKey, place: Place, cursor: RowCursor) -> LaneRecords:
        indices = [place.lane + WARP * w for w in range(-(-key.window // WARP))]
        rows = [address(pool.decay, 4, cursor.slot, place.head, cursor.physical(i)) for i in indices]
        words = [
            load_words_if(i < cursor.count, row, 1, cache=STREAM)[0].bitcast(Float32)
            for i, row in zip(indices, rows, strict=True)
        ]
        return cls(indices, rows, words)

    def with_token(self, token: Any, cursor: RowCursor) -> list[Float32]:
        """The records that decay this step's window: for a row that reads, the token is the last of them."""
        reads = cursor.folds == 0
        return [
            select((i == cursor.count) & reads, token, word) for i, word in zip(self.indices, self.words, strict=True)
        ]

    def append(self, token: Any, place: Place, cursor: RowCursor) -> None:
        """Write the token's record behind the committed ones."""
        for i, row in zip(self.indices, self.addresses, strict=True):
            mine = Int32(i == cursor.count) * Int32(place.warp == 0) * Int32(place.first_row == 0)
            store_words_if(mine, row, [token.bitcast(Uint32)])


def load_probes(inputs: Any, key: StepKey, place: Place) -> list[list[list[Uint32]]]:
    """This thread's vectors of the query, and of the key where the state meets it too, packed."""
    policy, size = policy_of(key), SIZE_BYTES[key.activation_dtype]
    return [
        load_key(address(tensor, size, place.row, 0, place.group), True, place.lane % LANES_PER_RECORD, Tile.of(key))
        for tensor in (policy.query(inputs), policy.key(inputs))[: key.probes]
    ]


def unpacked_probes(loaded: list[list[list[Uint32]]], key: StepKey) -> list[list[list[Float32]]]:
    """What `load_probes` loaded, as the state meets it."""
    probes = [[unpack(words, key.activation_dtype) for words in vectors] for vectors in loaded]
    if not policy_of(key).value_needs_state:
        return probes
    query, keys = ([x for vector in probe for x in vector] for probe in probes)
    flat = policy_of(key).probes(query, keys, ROW_LANES)
    size = len(probes[0][0])
    return [[list(probe[i : i + size]) for i in range(0, len(probe), size)] for probe in flat]


def write_output(
    out: cute.Tensor, key: StepKey, place: Place, local_row: Any, value: Any, epilogue: Any, inside: Any
) -> None:
    """Apply the epilogue to one channel and write it."""
    where = address(out, SIZE_BYTES[key.activation_dtype], place.row, 0, place.head, place.first_row + local_row)
    store_scalar_if(inside, where, policy_of(key).finish(value, epilogue), key.activation_dtype)


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory: addresses of the tile and of the records or partial sums; the barrier of the copy."""

    state: Int32
    staging: Int32
    barrier: Any


@dataclass(frozen=True)
class TokenLoads:
    """Loads that need neither slot nor cursor, under way while those are fetched.

    Args:
        token: what `Recurrence.load_token` loaded.
        probes: this thread's vectors of the query, and of the key where the state meets it too, packed.
        outputs: the rows that this thread writes if the row only reads.
        epilogues: what `Recurrence.load_epilogue` loaded for each of them.
    """

    token: tuple[Any, ...]
    probes: list[list[list[Uint32]]]
    outputs: OutputRows
    epilogues: list[Any]

    @classmethod
    def start(cls, tensors: StepTensors, key: StepKey, place: Place) -> TokenLoads:
        policy, inputs = policy_of(key), tensors.inputs
        token = policy.load_token(inputs, tensors.parameters, place.row, place.head)
        probes = load_probes(inputs, key, place)
        outputs = OutputRows.of(Tile.of(key), place.lane, place.warp)
        epilogues = [
            policy.load_epilogue(inputs, place.row, place.head, place.first_row + row, inside)
            for row, inside in zip(outputs.rows, outputs.inside, strict=True)
        ]
        return cls(token, probes, outputs, epilogues)


@dataclass(frozen=True)
class RowLoads:
    """What a CTA has loaded, or is loading, before it computes.

    Args:
        cursor: the row's cursor.
        early: the loads that did not wait for it.
        lane_records: decay records of the window.
        first: this thread's part of the first pass of records.
    """

    cursor: RowCursor
    early: TokenLoads
    lane_records: LaneRecords
    first: LoadedRecord

    @classmethod
    def start(cls, tensors: StepTensors, key: StepKey, place: Place, cursor: RowCursor, early: TokenLoads) -> RowLoads:
        lane_records = LaneRecords.load(tensors.pool, key, place, cursor)
        first = load_record(tensors.pool, tensors.inputs, key, place, cursor, 0)
        return cls(cursor, early, lane_records, first)


@dataclass(frozen=True)
class Window:
    """A row's window with its decay.

    Args:
        weights: weight of record lane + 32 w in word w: its decay to the end of the window times its own factor.
        decay: product of the decays of the window.
    """

    weights: list[Float32]
    decay: Float32

    @classmethod
    def of(cls, key: StepKey, place: Place, loads: RowLoads, gate: Gate) -> Window:
        policy = policy_of(key)
        records = loads.lane_records.with_token(gate.record, loads.cursor)
        factors, decay = decay_to_end([gate.rate * r for r in records], place.lane, key.window)
        return cls([policy.weight(r) * f for r, f in zip(records, factors, strict=True)], decay)

    def passes(self, tensors: StepTensors, key: StepKey, place: Place, loads: RowLoads) -> Iterator[Any]:
        """Yield (this thread's record of the pass, its logical index, its weight) for each pass over the window."""
        for first in range(0, key.window, Tile.of(key).records_per_pass):
            record = loads.first
            if first > 0:
                record = load_record(tensors.pool, tensors.inputs, key, place, loads.cursor, first)
            lane = first % WARP + place.thread // LANES_PER_RECORD
            index = first + place.thread // LANES_PER_RECORD
            yield record, index, broadcast(self.weights[first // WARP], lane)


def read_row(tensors: StepTensors, key: StepKey, place: Place, loads: RowLoads, shared: Shared) -> None:
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
        for p, probe in enumerate(probes):
            factor = weight * score(record.key, probe, dtype)
            if not delta:
                factor = factor + select(is_token, gate.skip, Float32(0.0))
            sums[p] = add_weighted(sums[p], record.values, factor, dtype)
    partial_bytes = tile.warps * tile.rows * 4
    for p, of_probe in enumerate(sums):
        store_partial_sums(of_probe, tile, shared.staging + p * partial_bytes, place.lane, place.warp)
    loads.lane_records.append(gate.record, place, loads.cursor)
    own_score = append_key(tensors.pool, key, place, loads.cursor, probes) if delta else None
    cute.arch.barrier()
    bulk_wait(shared.barrier)
    products = read_tile(tile, key.checkpoint_dtype, shared.state, probes, place.lane, outputs.first_row)
    for i, row in enumerate(outputs.rows):
        values = []
        for p, of_probe in enumerate(products):
            value = of_probe[i] * window.decay
            for warp in range(tile.warps):
                partial = shared.staging + p * partial_bytes + (warp * tile.rows + row) * 4
                value = value + load_shared_floats(partial, 1, 4)[0]
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
    size, physical = SIZE_BYTES[key.activation_dtype], cursor.physical(cursor.count)
    where = address(pool.value, size, cursor.slot, place.head, physical, place.first_row + local_row)
    store_scalar_if(inside, where, value, key.activation_dtype)


def fold_row(tensors: StepTensors, key: StepKey, place: Place, loads: RowLoads, shared: Shared) -> None:
    """A row that folds its committed records first."""
    policy, tile, size = policy_of(key), Tile.of(key), SIZE_BYTES[key.activation_dtype]
    gate = policy.gate(tuple(None if x is None else opaque(x) for x in loads.early.token))
    window = Window.of(key, place, loads, gate)
    statics = FoldStatics(tile, key.checkpoint_dtype, key.activation_dtype)
    stage = FoldStage.of(tile, shared.staging, place.thread)
    for record, index, weight in window.passes(tensors, key, place, loads):
        stage_record(stage, statics, index, place.lane % LANES_PER_RECORD, record, weight)
    probes, score_token = load_fold_probes(tensors, key, place, loads.cursor, stage)
    cute.arch.barrier()
    bulk_wait(shared.barrier)
    slot, head = loads.cursor.slot, place.head
    checkpoint = address(tensors.pool.checkpoint, SIZE_BYTES[key.checkpoint_dtype], slot, head, place.first_row)
    fold_tile(stage, statics, shared.state, checkpoint, loads.cursor.count, window.decay, probes)
    if policy.value_needs_state:
        append_folded_decay(tensors.pool, place, loads.cursor, gate)
    else:
        append_folded_record(tensors.pool, tensors.inputs, key, place, loads.cursor, gate)
    cute.arch.barrier()
    inside = Int32(place.thread < tile.rows)
    channel = place.first_row + place.thread
    value_at = address(policy.value(tensors.inputs), size, place.row, 0, head, channel)
    token_value = load_scalar_if(inside, value_at, key.activation_dtype)
    epilogue = policy.epilogue(policy.load_epilogue(tensors.inputs, place.row, head, channel, inside))
    local_row = select(inside != 0, place.thread, Int32(0))
    products = [
        load_shared_floats(stage.products + (p * tile.rows + local_row) * 4, 1, 4)[0] for p in range(tile.probes)
    ]
    if policy.value_needs_state:
        decay = exp2(gate.rate * gate.record)
        value, update = correction([x * decay for x in products], token_value, gate.strength, score_token)
        append_value(tensors.pool, key, place, loads.cursor, place.thread, update, inside)
    else:
        own = policy.weight(gate.record) * score_token + gate.skip
        value = products[0] * exp2(gate.rate * gate.record) + own * token_value
    write_output(tensors.out, key, place, place.thread, value, epilogue, inside)


def load_fold_probes(
    tensors: StepTensors, key: StepKey, place: Place, cursor: RowCursor, stage: FoldStage
) -> tuple[cute.Tensor, Float32]:
    """This thread's columns of the probes as the fold multiplies them, and the product of token's key and query.

    With a delta rule the key that the state meets is appended here, by the lanes of the tile's first row.
    """
    policy, tile, size = policy_of(key), Tile.of(key), SIZE_BYTES[key.activation_dtype]
    vector_bytes, lanes = tile.vector * size, tuple(1 << b for b in range(tile.fold_lanes.bit_length() - 1))
    loaded: list[list[Any]] = [[], []]
    starts = [
        address(tensor, size, place.row, 0, place.group)
        for tensor in (policy.query(tensors.inputs), policy.key(tensors.inputs))
    ]
    for c in range(tile.fold_chunks):
        skip = (c * tile.fold_lanes + stage.column_lane) * vector_bytes
        for probe, start in zip(loaded, starts, strict=True):
            probe += unpack(load_row_words(True, start + skip, vector_bytes // 4), key.activation_dtype)
    probes = policy.probes(loaded[0], loaded[1], lanes)
    if policy.value_needs_state:
        mine = Int32(place.thread < tile.fold_lanes) * leads_group(key, place)
        where = address(tensors.pool.key, size, cursor.slot, place.group, cursor.physical(cursor.count))
        start = where + stage.column_lane * vector_bytes
        store_key(mine, start, probes[1], tile.vector, tile.fold_lanes * tile.vector, key.activation_dtype)
    return columns(list(probes)[: tile.probes]), dot(*probes, lanes)


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
    barrier = cutlass.Array(Int64, (1,), space=smem, alignment=8)
    shared = Shared(Int32(state.data_ptr().toint()), Int32(staging.data_ptr().toint()), barrier.data_ptr())
    if cutlass.const_expr(key.rows.pdl):
        cute.arch.griddepcontrol_wait()
    slot = load_slot(tensors.rows, row, key.rows.index_dtype)
    early = TokenLoads.start(tensors, key, place)
    bulk_init(thread, shared.barrier)
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
        bulk_load(thread, shared.state, tile_at, shared.barrier, policy, tile.bytes)
        cute.arch.barrier()
        loads = RowLoads.start(tensors, key, place, cursor, early)
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
    strides = list(group.stride)
    if len(strides) > 2 and group.shape[1] == TOKENS and not isinstance(strides[1], int):
        strides[1] = 0  # the token axis, of extent 1
    return cute.make_tensor(group.iterator, cute.make_layout(tuple(1 for _ in strides), stride=tuple(strides)))


@cute.jit
def step_launch(
    pool: PoolTensors,
    cursors: CursorTensors,
    rows: RowTensors,
    inputs: Mamba2Tensors | GdnTensors,
    parameters: Mamba2Parameters | GdnParameters,
    out: cute.Tensor,
    pad_slot: Int32,
    key: cutlass.Constexpr,
    stream: Any,
):
    """Host side of the launch: one CTA for each part of each head of each row."""
    tensors = StepTensors(pool, cursors, rows, inputs, parameters, out)
    step_kernel(compact(tensors), pad_slot, key).launch(
        grid=[key.num_v_heads * key.config.split, out.shape[0], 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=key.rows.pdl,
    )


def fake_arguments(key: StepKey) -> tuple[Any, ...]:
    """Fake tensors of the shapes, dtypes, strides and alignments that a step kernel admits."""
    activation, options = CUTLASS_DTYPE[key.activation_dtype], key.options
    hv, hk, v, k = key.num_v_heads, key.num_k_heads, key.head_dim, key.d_state
    slots, batch, capacity = cute.sym_int64(), cute.sym_int64(), key.ring_capacity

    def tensor(dtype: Any, shape: tuple[Any, ...], steps: tuple[Any, ...], align: int) -> Any:
        """A tensor whose strides are free, in units of the alignment, where `steps` says None."""
        unit = max(1, align * 8 // dtype.width)
        strides = tuple(cute.sym_int64(divisibility=unit) if step is None else step for step in steps)
        return make_fake_tensor(dtype, shape, strides, assumed_align=align)

    def rows_of(dtype: Any, shape: tuple[int, ...], align: int) -> Any:
        """[batch, tokens, *shape] with `shape` packed."""
        steps = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return tensor(dtype, (batch, TOKENS, *shape), (None, None, *steps), align)

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

    int32, index = CUTLASS_DTYPE["int32"], CUTLASS_DTYPE[key.rows.index_dtype]
    state = CUTLASS_DTYPE[key.checkpoint_dtype]
    pool = PoolTensors(
        checkpoint=tensor(state, (slots, hv, v, k), (None, v * k, k, 1), 16),
        value=ring(activation, hv, (v,), 16),
        key=ring(activation, hk, (k,), 16),
        decay=ring(CUTLASS_DTYPE["float32"], hv, (), 4),
    )
    cursors = CursorTensors(tensor(int32, (slots,), (1,), 4), tensor(int32, (slots,), (1,), 4))
    rows = RowTensors(
        cache_indices=tensor(index, (batch,), (1,), index.width // 8),
        force_fold=tensor(CUTLASS_DTYPE["uint8"], (batch,), (1,), 1) if key.rows.has_force_fold else None,
    )

    def scalars(dtype: str) -> Any:
        return rows_of(CUTLASS_DTYPE[dtype], (hv,), CUTLASS_DTYPE[dtype].width // 8)

    values, keys = (lambda: rows_of(activation, (hv, v), 16)), (lambda: rows_of(activation, (hk, k), 16))
    if isinstance(options, GdnOptions):
        inputs = GdnTensors(keys(), keys(), values(), scalars(options.a_dtype), scalars(options.b_dtype))
        parameters = GdnParameters(vector("float32"), vector("float32"))
    else:
        z = values() if options.has_z else None
        inputs = Mamba2Tensors(x=values(), dt=scalars(options.dt_dtype), B=keys(), C=keys(), z=z)
        parameters = Mamba2Parameters(vector("float32"), vector(options.D_dtype), vector(options.dt_bias_dtype))
    out = rows_of(activation, (hv, v), 16)
    return pool, cursors, rows, inputs, parameters, out, Int32(-1), key, make_fake_stream(use_tvm_ffi_env_stream=True)


def kernel(key: StepKey, arch: str) -> Callable[..., None]:
    """The compiled step: call it as `step_launch`, without the last two."""
    return compiled(step_launch, lambda: fake_arguments(key), key, arch)
