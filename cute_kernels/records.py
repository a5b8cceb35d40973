"""What a CTA of the step loads and appends: the token, its cursor's window of records, and the token's own record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_kernels.args import CursorTensors, PoolTensors, StepTensors
from cute_kernels.configs import LANES_PER_RECORD, SIZE_BYTES, WARP, GdnOptions, KdaOptions, StepKey, Tile
from cute_kernels.primitives.arithmetic import select
from cute_kernels.primitives.bulk import bulk_wait
from cute_kernels.primitives.control import barrier_of_zero
from cute_kernels.primitives.convert import unpack
from cute_kernels.primitives.memory import STREAM, load_words_if, store_words_if
from cute_kernels.primitives.reduce import broadcast
from cute_kernels.recurrences.base import Gate, Recurrence
from cute_kernels.recurrences.gdn import Gdn
from cute_kernels.recurrences.kda import Kda
from cute_kernels.recurrences.mamba2 import Mamba2
from cute_kernels.replay.channels import ChannelRecords, own_channels, scaled_key, window_decays
from cute_kernels.replay.cursor import RowCursor
from cute_kernels.replay.decay import decay_to_end
from cute_kernels.replay.delta import columns
from cute_kernels.replay.fold import FoldStage, FoldStatics, fold_tile, lifted_rows, stage_record
from cute_kernels.replay.noise import Noise
from cute_kernels.replay.readout import ROW_LANES, OutputRows
from cute_kernels.replay.window import (
    LoadedRecord,
    Place,
    address,
    key_cache,
    load_key,
    load_scalar_if,
    load_values,
)

LONGEST_HELD = 32  # records of a window whose loads are all held in front of Kimi's decays


def policy_of(key: StepKey) -> Recurrence:
    """The recurrence's policy for a key."""
    if isinstance(key.options, GdnOptions):
        return Gdn(key.options, key.activation_dtype)
    if isinstance(key.options, KdaOptions):
        return Kda(key.options, key.activation_dtype)
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
    keys = load_key(source, valid, lane8, tile, cache=key_cache(key))
    ring_size = SIZE_BYTES[key.record_dtype]
    value_ring = source = address(pool.value, ring_size, cursor.slot, place.head, physical, place.first_row)
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


@dataclass(frozen=True)
class TileMemory:
    """Shared addresses of a CTA: its tile of the checkpoint, and what is staged beside it.

    `arrival` is the barrier of the tile's copy, None for a fold that need not wait for it.
    """

    state: Int32
    staging: Int32
    arrival: Any

    @classmethod
    def allocate(cls, tile_bytes: int, staging_bytes: int) -> TileMemory:
        """Reserve it; `bulk_init` must make the barrier. A symbol each: an address that is a sum takes a register."""
        smem = cutlass.AddressSpace.smem
        state = cutlass.Array(Uint32, (tile_bytes // 4,), space=smem, alignment=128)
        staging = cutlass.Array(Uint32, (staging_bytes // 4,), space=smem, alignment=16)
        barrier = cutlass.Array(Int64, (1,), space=smem, alignment=8)
        return cls(Int32(state.data_ptr().toint()), Int32(staging.data_ptr().toint()), barrier.data_ptr())

    @classmethod
    def in_one(cls, tile_bytes: int, staging_bytes: int, alignment: int) -> TileMemory:
        """The same with what is staged right behind the tile, at a multiple of `alignment`: a fold may cover both."""
        smem = cutlass.AddressSpace.smem
        memory = cutlass.Array(Uint32, ((tile_bytes + staging_bytes) // 4,), space=smem, alignment=alignment)
        barrier = cutlass.Array(Int64, (1,), space=smem, alignment=8)
        return cls(state := Int32(memory.data_ptr().toint()), state + tile_bytes, barrier.data_ptr())


@dataclass(frozen=True)
class LaneDecays:
    """Decays of a window: word w of lane j has the weight of record j + 32 w at its end; and of all of it.

    All are 1 where channels decay by themselves.
    """

    weights: list[Float32]
    window: Float32

    @classmethod
    def of(cls, policy: Recurrence, rate: Any, records: Any, lane: Any, window: int) -> LaneDecays:
        """Of the records that `LaneRecords` or `ChannelRecords` loaded."""
        if not isinstance(records, LaneRecords):
            return cls([Float32(1.0)] * -(-window // WARP), Float32(1.0))
        after, decay = decay_to_end([rate * r for r in records.words], lane, window)
        return cls([policy.weight(r) * f for r, f in zip(records.words, after, strict=True)], decay)


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


def probe_places(inputs: Any, key: StepKey, place: Place) -> list[Int64]:
    """Where the query is, and the key where the state meets it too."""
    policy, size = policy_of(key), SIZE_BYTES[key.activation_dtype]
    tensors = (policy.query(inputs), policy.key(inputs))[: key.probes]
    return [address(tensor, size, place.row, 0, place.group) for tensor in tensors]


def load_probes(inputs: Any, key: StepKey, place: Place) -> list[list[list[Uint32]]]:
    """This thread's vectors of the query, and of the key where the state meets it too, packed."""
    tile, lane8, cache = Tile.of(key), place.lane % LANES_PER_RECORD, key_cache(key)
    return [load_key(where, True, lane8, tile, cache=cache) for where in probe_places(inputs, key, place)]


def unpacked_probes(loaded: list[list[list[Uint32]]], key: StepKey) -> list[list[list[Float32]]]:
    """What `load_probes` loaded, as the state meets it."""
    probes = [[unpack(words, key.activation_dtype) for words in vectors] for vectors in loaded]
    return scaled(probes, probe_factors(probes, key)) if policy_of(key).value_needs_state else probes


def probe_factors(probes: list[list[list[Any]]], key: StepKey) -> list[Float32]:
    """Of a query and a key as they came: what they are times when they meet the state."""
    query, keys = ([x for vector in probe for x in vector] for probe in probes)
    return list(policy_of(key).factors(query, keys, ROW_LANES))


def scaled(probes: list[list[list[Any]]], factors: list[Any]) -> list[list[list[Float32]]]:
    """The probes times their factors."""
    return [[[x * factor for x in vector] for vector in probe] for probe, factor in zip(probes, factors, strict=True)]


def load_epilogue(inputs: Any, key: StepKey, place: Place, channel: Any, inside: Any) -> Any:
    """One channel of the epilogue's input for the row's only token, None where there is none."""
    tensor, dtype = policy_of(key).epilogue_input(inputs), key.activation_dtype
    if tensor is None:
        return None
    return load_scalar_if(inside, address(tensor, SIZE_BYTES[dtype], place.row, 0, place.head, channel), dtype)


@dataclass(frozen=True)
class TokenLoads:
    """Loads that need neither slot nor cursor, under way while those are fetched.

    Args:
        token: what `Recurrence.load_token` loaded.
        probes: this thread's vectors of the query, and of the key where the state meets it too, packed.
        outputs: the rows that this thread writes if the row only reads.
        epilogues: what `load_epilogue` loaded for each of them.
        channels: for each channel of K that this thread has, what its decay needs; empty where one decay is all.
    """

    token: tuple[Any, ...]
    probes: list[list[list[Uint32]]]
    outputs: OutputRows
    epilogues: list[Any]
    channels: list[Any]

    @classmethod
    def start(cls, tensors: StepTensors, key: StepKey, place: Place) -> TokenLoads:
        policy = policy_of(key)
        inputs: Any = tensors.inputs
        parameters: Any = tensors.parameters
        token = policy.load_token(inputs, parameters, place.row, 0, place.head)
        probes = load_probes(inputs, key, place)
        outputs = OutputRows.of(Tile.of(key), place.lane, place.warp)
        epilogues = [
            load_epilogue(inputs, key, place, place.first_row + row, inside)
            for row, inside in zip(outputs.rows, outputs.inside, strict=True)
        ]
        channels = []
        if isinstance(policy, Kda):
            channels = [
                policy.load_channel(inputs, parameters, place.row, 0, place.head, channel, inside)
                for channel, inside in own_channels(Tile.of(key), place.thread)
            ]
        return cls(token, probes, outputs, epilogues, channels)


@dataclass(frozen=True)
class RowLoads:
    """What a CTA has loaded, or is loading, before it computes.

    Args:
        cursor: the row's cursor.
        early: the loads that did not wait for it.
        decays: decay records of the window, by lane or by channel.
        first: this thread's part of the first pass of records.
    """

    cursor: RowCursor
    early: TokenLoads
    decays: LaneRecords | ChannelRecords
    first: LoadedRecord

    @classmethod
    def start(cls, tensors: StepTensors, key: StepKey, place: Place, cursor: RowCursor, early: TokenLoads) -> RowLoads:
        decays: LaneRecords | ChannelRecords
        if policy_of(key).decays_per_channel:
            decays = ChannelRecords.load(tensors.pool.decay, key.decay_dtype, Tile.of(key), place, cursor)
        else:
            decays = LaneRecords.load(tensors.pool, key, place, cursor)
        first = load_record(tensors.pool, tensors.inputs, key, place, cursor, 0)
        return cls(cursor, early, decays, first)


@dataclass(frozen=True)
class Window:
    """A row's window with its decay.

    Args:
        weights: weight of record lane + 32 w in word w: its decay to the end of the window times its own factor.
            Empty where the channels decay by themselves: then keys are scaled instead.
        decay: product of the decays of the window.
    """

    weights: list[Float32]
    decay: Float32

    @classmethod
    def of(cls, key: StepKey, place: Place, loads: RowLoads, gate: Gate) -> Window:
        policy = policy_of(key)
        if not isinstance(loads.decays, LaneRecords):
            return cls([], Float32(1.0))
        records = loads.decays.with_token(gate.record, loads.cursor)
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
            weight = broadcast(self.weights[first // WARP], lane) if self.weights else Float32(1.0)
            yield record, index, weight


def stage_channels(tensors: StepTensors, key: StepKey, place: Place, loads: RowLoads, staging: Any) -> None:
    """Stage the decays by channel, if this recurrence has them, and append the token's.

    The caller must put a barrier between this and the first use.
    """
    policy, tile = policy_of(key), Tile.of(key)
    if isinstance(policy, Kda) and isinstance(loads.decays, ChannelRecords):
        # Else decays wait for the first loads while others are not under way yet (GLM-5.3-Flash, batch 256: 285.6 ->
        # 281.5 us; H200, 2026-12-01). Of longer windows all at once would take too many registers.
        zero = barrier_of_zero() if tile.window <= LONGEST_HELD else Float32(0.0)
        token = tuple(x + zero for x in loads.early.token)
        decays = [policy.log_decay(channel, token) for channel in loads.early.channels]
        loads.decays.stage(tile, place, loads.cursor.folds == 0, decays, staging)
        loads.decays.append(tensors.pool.decay, key.decay_dtype, tile, place, loads.cursor, decays)


@dataclass(frozen=True)
class StagedFold:
    """A fold whose records are in shared memory: what `fold_tile` needs."""

    stage: FoldStage
    statics: FoldStatics
    decays: Any
    noise: Noise | None


def stage_fold(
    pool: PoolTensors,
    cursors: CursorTensors,
    key: StepKey,
    place: Place,
    cursor: RowCursor,
    decays: LaneDecays,
    shared: TileMemory,
    to: Any,
    *,
    lifts: bool = False,
) -> StagedFold:
    """Stage the cursor's records, to be folded into the tile in shared memory, or where that holds a copy into the
    checkpoint itself at address `to`; with `lifts` over the end of the tile.

    Where channels decay by themselves, their decays must be staged already, the window ending with these records.
    """
    tile, size, ring_size = Tile.of(key), SIZE_BYTES[key.activation_dtype], SIZE_BYTES[key.record_dtype]
    assert tile.value_parts == 1
    statics = FoldStatics(
        tile=tile,
        state_dtype=key.checkpoint_dtype,
        key_dtype="float32" if tile.channels else key.activation_dtype,
        value_dtype=key.record_dtype,
        staged=key.read_dtype is None and not key.tensor and not key.direct,
        parts=1 if key.read_dtype is None else FoldStatics.copy_parts(tile),
    )
    stage = FoldStage.of(tile, shared.state, shared.staging, place)
    noise = Noise.load(pool.seed, cursors, cursor.slot, place)
    if lifts:
        stage = replace(stage, lifted=lifted_rows(stage, statics, shared.state, to))
        cute.arch.barrier()
    lane8 = place.lane % LANES_PER_RECORD
    for first in range(0, tile.padded_window, tile.records_per_pass):
        index = first + place.thread // LANES_PER_RECORD
        valid, physical = Int32(index < cursor.count), cursor.physical(index)
        key_ring = address(pool.key, size, cursor.slot, place.group, physical)
        value_ring = address(pool.value, ring_size, cursor.slot, place.head, physical, place.first_row)
        keys, values = load_key(key_ring, valid, lane8, tile), load_values(value_ring, valid, lane8, tile)
        if tile.channels:
            keys = scaled_key(tile, keys, key.activation_dtype, shared.staging, index, place)
        weight = broadcast(decays.weights[first // WARP], first % WARP + place.thread // LANES_PER_RECORD)
        stage_record(stage, statics, index, lane8, LoadedRecord(keys, values, key_ring, value_ring), weight)
    cute.arch.barrier()
    if shared.arrival is not None:
        bulk_wait(shared.arrival)
    window = window_decays(tile, shared.staging) if tile.channels else columns([[decays.window]])
    return StagedFold(stage, statics, window, noise)


def fold_staged(fold: StagedFold, state: Any, to: Any, count: Any, part: Any) -> None:
    """Fold a part of a tile without probes; see `fold_tile`."""
    fold_tile(fold.stage, fold.statics, state, to, count, fold.decays, None, fold.noise, part)
