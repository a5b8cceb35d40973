"""The step of one layer for several tokens a row, one launch, on tensor cores (`replay.draft`).

A CTA works on `Tile.rows` rows of one head of one row of the batch:

1. start the loads that need neither slot nor cursor: gates, queries and keys, the tokens' values;
2. load slot and cursor, start the bulk copy of its tile of the checkpoint, then the loads of the window's records;
3. score the records with the tokens, each warp some of them, and append the tokens' keys and decays;
4. after a barrier each warp multiplies 16 rows of the tile by all probes at once, adds the window's part, and, under a
   delta rule, solves for the tokens' records; it writes outputs and appends values;
5. a row that folds then folds its committed records into the tile and writes it back: outputs never wait for that.

The committed records are read the same way whether a row folds or not, and an append lands outside of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.args import StepTensors
from cute_kernels.configs import LANES_PER_RECORD, SIZE_BYTES, TERMS, THREADS, WARP, DraftShape, StepKey, Tile
from cute_kernels.primitives.arithmetic import exp2, select
from cute_kernels.primitives.bulk import bulk_init, bulk_load, bulk_wait
from cute_kernels.primitives.control import when
from cute_kernels.primitives.convert import pack, unpack
from cute_kernels.primitives.memory import EVICT_NORMAL, store_words_if
from cute_kernels.primitives.mma import Fragment, float_fragment, fragment, multiply
from cute_kernels.primitives.reduce import broadcast, prefix_sums
from cute_kernels.records import LaneRecords, leads_group, policy_of
from cute_kernels.recurrences.base import Gate, Recurrence
from cute_kernels.replay.cursor import RowCursor, is_padding, load_force, load_slot
from cute_kernels.replay.decay import decay_to_end
from cute_kernels.replay.delta import columns
from cute_kernels.replay.draft import QUAD, DraftDecays, Scores, load_block, read_state
from cute_kernels.replay.fold import FoldStage, FoldStatics, fold_tile, stage_record
from cute_kernels.replay.window import (
    LoadedRecord,
    Place,
    address,
    load_key,
    load_row_words,
    load_values,
    store_scalar_if,
)

WARPS = THREADS // WARP


@dataclass(frozen=True)
class Channels:
    """The channels that a lane has in 16 rows of its warp: two neighbours.

    Args:
        first: local row of the first.
        inside: whether the tile has these rows.
    """

    first: Int32
    inside: Int32

    @classmethod
    def of(cls, tile: Tile, place: Place) -> list[Channels]:
        """One for each 16 rows that the warp takes."""
        rows = [(place.warp + WARPS * i) * 16 for i in range(-(-tile.rows // (16 * WARPS)))]
        return [cls(row + place.lane // 4 * 2, Int32(row < tile.rows)) for row in rows]


@dataclass(frozen=True)
class Cta:
    """What a CTA works on, as one of its threads sees it."""

    tensors: StepTensors
    key: StepKey
    place: Place
    channels: list[Channels]

    @property
    def policy(self) -> Recurrence:
        return policy_of(self.key)

    @property
    def tile(self) -> Tile:
        return Tile.of(self.key)

    @property
    def shape(self) -> DraftShape:
        return DraftShape.of(self.key)

    @property
    def terms(self) -> int:
        """bfloat16 terms of a float32 factor."""
        return TERMS[self.key.config.precision]

    def own(self, first: int) -> list[Any]:
        """The four of 16 vectors from `first` on whose elements this lane has on the left side of a product."""
        return [first + self.place.lane % 4 * 2 + e for e in (0, 1, 8, 9)]

    def is_token(self, token: Any) -> Int32:
        """Whether the step has this token."""
        return Int32(token < self.shape.tokens)

    def input_place(self, tensor: cute.Tensor, token: Any, *index: Any) -> Int64:
        """Where a token's part of an input or the output begins."""
        return address(tensor, SIZE_BYTES[self.key.activation_dtype], self.place.row, token, *index)

    def value_place(self, cursor: RowCursor, record: Any, channel: Any) -> Int64:
        """Where a channel of a record is, or goes, in the value ring."""
        size, physical = SIZE_BYTES[self.key.record_dtype], cursor.physical(record)
        return address(self.tensors.pool.value, size, cursor.slot, self.place.head, physical, channel)

    def key_place(self, cursor: RowCursor, record: Any) -> Int64:
        """The same for a record's key."""
        size, physical = SIZE_BYTES[self.key.activation_dtype], cursor.physical(record)
        return address(self.tensors.pool.key, size, cursor.slot, self.place.group, physical)


def load_pair(valid: Any, where: Any, dtype: str) -> list[Uint32]:
    """The words of two neighbouring channels."""
    return load_row_words(valid, where, SIZE_BYTES[dtype] // 2)


@dataclass(frozen=True)
class DraftLoads:
    """Loads that need neither slot nor cursor.

    Args:
        gate: what `Recurrence.load_token` loaded for the token of this lane; the last one's from there on.
        probes: by probe and block of tokens, this lane's words of its vector.
        values: for each 16 rows of the warp, the words of this lane's channels of its tokens (`Cta.own`); empty under
            a delta rule.
        epilogues: for each 16 rows and each block of tokens, what `load_epilogue` loaded for channel and token, channel
            and next token, next channel and token, next channel and next token.
    """

    gate: tuple[Any, ...]
    probes: list[list[list[Uint32]]]
    values: list[list[list[Uint32]]]
    epilogues: list[list[list[Any]]]

    @classmethod
    def start(cls, cta: Cta) -> DraftLoads:
        policy, shape, place, inputs = cta.policy, cta.shape, cta.place, cta.tensors.inputs
        own = select(place.lane < shape.tokens, place.lane, Int32(shape.tokens - 1))
        gate = policy.load_token(inputs, cta.tensors.parameters, place.row, own, place.head)
        tokens = [b * 8 + place.lane // 4 for b in range(shape.token_blocks)]
        probes = [
            [load_block(cta.input_place(tensor, t, place.group), cta.is_token(t), place.lane, cta.tile) for t in tokens]
            for tensor in (policy.query(inputs), policy.key(inputs))[: shape.probes]
        ]
        values, epilogues = [], []
        for part in cta.channels:
            channel = place.first_row + part.first
            own_tokens = cta.own(0)[: 2 * shape.token_blocks]
            inside = [part.inside * cta.is_token(t) for t in own_tokens]
            words = []
            for t, valid in zip([] if policy.value_needs_state else own_tokens, inside, strict=False):
                where = cta.input_place(policy.value(inputs), t, place.head, channel)
                words.append(load_pair(valid, where, cta.key.activation_dtype))
            values.append(words)
            epilogues.append(
                [
                    [
                        policy.load_epilogue(inputs, place.row, own_tokens[i], place.head, channel + c, inside[i])
                        for c in (0, 1)
                        for i in (2 * b, 2 * b + 1)
                    ]
                    for b in range(shape.token_blocks)
                ]
            )
        return cls(gate, probes, values, epilogues)


@dataclass(frozen=True)
class WindowLoads:
    """Loads that need the cursor.

    Args:
        decays: decay records of the window.
        keys: of each block of records that this warp scores, this lane's words of its key.
        values: for each 16 rows of the warp, and each 16 records, the words of this lane's channels of its four.
    """

    decays: LaneRecords
    keys: list[list[Uint32]]
    values: list[list[list[list[Uint32]]]]

    @classmethod
    def start(cls, cta: Cta, cursor: RowCursor) -> WindowLoads:
        shape, place, key_of = cta.shape, cta.place, cta.policy.key
        decays = LaneRecords.load(cta.tensors.pool, cta.key, place, cursor)
        keys = []
        for step in range(-(-shape.record_blocks // WARPS)):
            record = (place.warp + WARPS * step) * 8 + place.lane // 4
            token, from_window = record - shape.window_columns, record < shape.window_columns
            valid = select(from_window, Int32(record < cursor.count), cta.is_token(token))
            fresh = cta.input_place(key_of(cta.tensors.inputs), token, place.group)
            source = select(from_window, cta.key_place(cursor, record), fresh)
            keys.append(load_block(source, valid, place.lane, cta.tile))
        values = [
            [
                [
                    load_pair(
                        part.inside * Int32(record < cursor.count),
                        cta.value_place(cursor, record, place.first_row + part.first),
                        cta.key.record_dtype,
                    )
                    for record in cta.own(first)
                ]
                for first in range(0, shape.window_columns, 16)
            ]
            for part in cta.channels
        ]
        return cls(decays, keys, values)


@dataclass(frozen=True)
class Draft:
    """What the lanes know of the tokens once their gates are computed.

    Args:
        gate: of this lane's token.
        decays: see there.
        factors: by probe and block of tokens, what this lane's vector is multiplied by.
        lane: this lane.
    """

    gate: Gate
    decays: DraftDecays
    factors: list[list[Any]]
    lane: Int32

    @classmethod
    def of(cls, cta: Cta, early: DraftLoads, records: LaneRecords) -> Draft:
        policy, shape, lane = cta.policy, cta.shape, cta.place.lane
        gate = policy.gate(early.gate)
        log2 = select(lane < shape.tokens, gate.rate * gate.record, Float32(0.0))
        after, window = decay_to_end([gate.rate * r for r in records.words], lane, shape.window)
        decays = DraftDecays(
            log2=log2,
            since_window=exp2(prefix_sums(log2, lane, shape.tokens)),
            weights=[policy.weight(r) * f for r, f in zip(records.words, after, strict=True)],
            window=window,
            token_weight=policy.weight(gate.record),
        )
        factors: list[list[Any]] = [[Float32(1.0)] * shape.token_blocks]
        if shape.probes == 2:
            words = [[unpack(block, cta.key.activation_dtype) for block in probe] for probe in early.probes]
            of_blocks = [policy.factors(query, key, QUAD) for query, key in zip(*words, strict=True)]
            factors = [list(of_probe) for of_probe in zip(*of_blocks, strict=True)]
        return cls(gate, decays, factors, lane)

    def row_factors(self) -> list[Any]:
        """By probe block: factor of this lane's probe, that of a key times the token's strength."""
        factors = list(self.factors[0])
        for b, factor in enumerate(self.factors[1] if len(self.factors) == 2 else []):
            factors.append(factor * broadcast(self.gate.strength, b * 8 + self.lane // 4))
        return factors

    def column_factors(self) -> list[list[Any]]:
        """By probe block: the same for this lane's two columns of a product, with the decay of the state."""
        made = []
        for block, factor in enumerate(self.row_factors()):
            decays = self.in_columns(self.decays.since_window, block % len(self.factors[0]))
            made.append(
                [
                    broadcast(factor, self.lane % 4 * 8 + 4 * e) * (decay * self.decays.window)
                    for e, decay in enumerate(decays)
                ]
            )
        return made

    def in_columns(self, of_token: Any, block: Any) -> list[Any]:
        """What lane s has for token s, for this lane's two columns of a block."""
        return [broadcast(of_token, block * 8 + self.lane % 4 * 2 + e) for e in (0, 1)]


def score_records(
    cta: Cta, cursor: RowCursor, early: DraftLoads, loads: WindowLoads, draft: Draft, scores: Scores
) -> None:
    """Score this warp's blocks of records with every probe, and append the keys of tokens among them."""
    shape, dtype = cta.shape, cta.key.activation_dtype
    probes = [fragment(words, dtype, cta.terms) for probe in early.probes for words in probe]
    factors = draft.row_factors()
    for step, words in enumerate(loads.keys):
        keys = fragment(words, dtype, cta.terms)
        found = []
        for first in range(0, shape.probe_blocks, 2):
            blocks = list(range(first, min(first + 2, shape.probe_blocks)))
            lower = probes[first + 1] if len(blocks) == 2 else None
            raw = multiply([Float32(0.0)] * 4, probes[first], lower, keys, cta.terms)
            found.append((blocks, raw, [factors[b] for b in blocks]))
        block = cta.place.warp + WARPS * step - shape.window_columns // 8

        def store_window(step: int = step, found: list[Any] = found) -> None:
            for blocks, raw, chosen in found:
                scores.store_window(blocks, raw, step, chosen, draft.decays, cta.place.warp)

        def store_tokens(block: Any = block, found: list[Any] = found, words: list[Any] = words) -> None:
            store_token_block(cta, cursor, draft, scores, block, found, words)

        when(block < 0, store_window)
        when((block >= 0) & (block < shape.token_blocks), store_tokens)


def store_token_block(
    cta: Cta, cursor: RowCursor, draft: Draft, scores: Scores, block: Any, found: list[Any], words: list[Any]
) -> None:
    """Weigh and store the scores of a block of tokens with every probe, and append the tokens' keys."""
    scores.store_decays(block, draft.decays)
    cute.arch.sync_warp()
    weights = draft.in_columns(draft.decays.token_weight, block)
    factor = Float32(1.0)
    if cta.shape.probes == 2:
        factor = draft.factors[1][0]
        for b in range(1, cta.shape.token_blocks):
            factor = select(block == b, draft.factors[1][b], factor)
        weights = [w * broadcast(factor, cta.place.lane % 4 * 8 + 4 * e) for e, w in enumerate(weights)]
    for blocks, raw, chosen in found:
        scores.store_tokens(block, blocks, raw, chosen, weights, draft.gate.skip)
    append_key(cta, cursor, block * 8 + cta.place.lane // 4, words, factor)


def append_key(cta: Cta, cursor: RowCursor, token: Any, words: list[Any], factor: Any) -> None:
    """Write a token's key to the ring as a block of records holds it, normalised where the layer does that."""
    dtype, vector_bytes = cta.key.activation_dtype, cta.tile.vector * cta.tile.activation_size
    if cta.policy.value_needs_state:
        words = pack([x * factor for x in unpack(words, dtype)], dtype)
    mine = cta.is_token(token) * leads_group(cta.key, cta.place)
    start = cta.key_place(cursor, cursor.count + token) + cta.place.lane % 4 * vector_bytes
    size = vector_bytes // 4
    for c in range(len(words) // size):
        for first in range(0, size, 4):
            part = words[c * size + first : c * size + min(first + 4, size)]
            store_words_if(mine, start, part, offset=c * 4 * vector_bytes + first * 4)


def append_decays(cta: Cta, cursor: RowCursor, gate: Gate) -> None:
    """Write the tokens' decay records, a lane each."""
    place = cta.place
    mine = cta.is_token(place.lane) * Int32(place.warp == 0) * Int32(place.first_row == 0)
    physical = cursor.physical(cursor.count + place.lane)
    where = address(cta.tensors.pool.decay, 4, cursor.slot, place.head, physical)
    store_words_if(mine, where, [gate.record.bitcast(Uint32)])


def value_fragments(words: list[list[Uint32]], dtype: str, terms: int) -> tuple[Fragment, Fragment]:
    """The left side of a product: two channels of up to four records, as pairs of words."""
    pairs = [unpack(pair, dtype)[:2] for pair in words]
    pairs += [[Float32(0.0), Float32(0.0)]] * (4 - len(pairs))
    exact = 1 if dtype == "bfloat16" else terms
    upper, lower = (float_fragment([pair[c] for pair in pairs], exact) for c in (0, 1))
    return upper, lower


def read_rows(
    cta: Cta, cursor: RowCursor, early: DraftLoads, loads: WindowLoads, draft: Draft, state: Any, scores: Scores
) -> None:
    """This warp's rows of all outputs, and of the tokens' values."""
    shape, place, terms = cta.shape, cta.place, cta.terms
    probes = [fragment(words, cta.key.activation_dtype, terms) for probe in early.probes for words in probe]
    factors = draft.column_factors()
    window = [
        [scores.load(b, column, terms) for column in range(0, shape.window_columns, 16)]
        for b in range(shape.probe_blocks)
    ]
    for i, part in enumerate(cta.channels):
        first_row = select(part.inside != 0, part.first - place.lane // 4 * 2, Int32(0))
        readouts = read_state(cta.tile, cta.key.checkpoint_dtype, state, first_row, probes, place.lane, terms)
        for b, of_block in enumerate(readouts):
            readouts[b] = [x * factors[b][j % 2] for j, x in enumerate(of_block)]
        for g, words in enumerate(loads.values[i]):
            upper, lower = value_fragments(words, cta.key.record_dtype, terms)
            for b in range(shape.probe_blocks):
                readouts[b] = multiply(readouts[b], upper, lower, window[b][g], terms)
        epilogues = [[cta.policy.epilogue(x) for x in block] for block in early.epilogues[i]]
        if cta.policy.value_needs_state:
            blocks = shape.token_blocks
            right = []
            for b in range(blocks):
                strengths = draft.in_columns(draft.gate.strength, b)
                right.append([strengths[j % 2] * epilogues[b][j] - readouts[blocks + b][j] for j in range(4)])
            records, outputs = scores.solve(right, readouts[:blocks])
            append_values(cta, cursor, part, records)
        else:
            outputs = add_tokens(cta, cursor, part, early.values[i], readouts, scores)
        write_outputs(cta, part, outputs, epilogues)


def add_tokens(
    cta: Cta, cursor: RowCursor, part: Channels, words: list[list[Uint32]], readouts: list[list[Any]], scores: Scores
) -> list[list[Any]]:
    """Outputs with what the tokens' own values add, which are inputs; appends those."""
    half = cta.shape.token_blocks == 1
    upper, lower = value_fragments(words, cta.key.activation_dtype, cta.terms)
    for b in range(cta.shape.token_blocks):
        own = scores.load(b, cta.shape.window_columns, cta.terms, half=half)
        readouts[b] = multiply(readouts[b], upper, lower, own, cta.terms)
    for pair, token in zip(words, cta.own(0), strict=False):
        where = cta.value_place(cursor, cursor.count + token, cta.place.first_row + part.first)
        store_words_if(part.inside * cta.is_token(token), where, pair)
    return readouts


def append_values(cta: Cta, cursor: RowCursor, part: Channels, records: list[list[Any]]) -> None:
    """Write the tokens' records of two channels, as `Scores.solve` returns them."""
    for b, block in enumerate(records):
        for e, token in enumerate(cta.own(0)[2 * b : 2 * b + 2]):
            where = cta.value_place(cursor, cursor.count + token, cta.place.first_row + part.first)
            words = pack([block[e], block[2 + e]], cta.key.record_dtype)
            store_words_if(part.inside * cta.is_token(token), where, words)


def write_outputs(cta: Cta, part: Channels, outputs: list[list[Any]], epilogues: list[list[Any]]) -> None:
    """Write two channels of every output after the layer's epilogue."""
    for b, block in enumerate(outputs):
        for e, token in enumerate(cta.own(0)[2 * b : 2 * b + 2]):
            pair = [cta.policy.finish(block[i], epilogues[b][i]) for i in (e, 2 + e)]
            where = cta.input_place(cta.tensors.out, token, cta.place.head, cta.place.first_row + part.first)
            store_words_if(part.inside * cta.is_token(token), where, pack(pair, cta.key.activation_dtype))


def fold_records(cta: Cta, cursor: RowCursor, draft: Draft, state: Any, staging: Any) -> None:
    """Fold the committed records into the tile and write it back, for a row that folds."""
    key, place, tile = cta.key, cta.place, cta.tile
    statics = FoldStatics(tile, key.checkpoint_dtype, key.activation_dtype, key.record_dtype)
    stage = FoldStage.of(tile, state, staging, place.thread)
    lane8 = place.lane % LANES_PER_RECORD
    for first in range(0, key.window, tile.records_per_pass):
        index = first + place.thread // LANES_PER_RECORD
        valid = Int32(index < cursor.count)
        key_ring, value_ring = cta.key_place(cursor, index), cta.value_place(cursor, index, place.first_row)
        keys, values = load_key(key_ring, valid, lane8, tile), load_values(value_ring, valid, lane8, tile)
        weight = broadcast(draft.decays.weights[first // WARP], first % WARP + place.thread // LANES_PER_RECORD)
        stage_record(stage, statics, index, lane8, LoadedRecord(keys, values, key_ring, value_ring), weight)
    cute.arch.barrier()
    size = SIZE_BYTES[key.checkpoint_dtype]
    checkpoint = address(cta.tensors.pool.checkpoint, size, cursor.slot, place.head, place.first_row)
    no_probes = columns([[Float32(0.0)]])
    fold_tile(stage, statics, state, checkpoint, cursor.count, columns([[draft.decays.window]]), no_probes)


@cute.kernel
def verify_kernel(tensors: StepTensors, pad_slot: Int32, key: cutlass.Constexpr):
    """One CTA: see this module's docstring, and `step.step_kernel` for the order of its loads."""
    tile, shape, config = Tile.of(key), DraftShape.of(key), key.config
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
    cta = Cta(tensors, key, place, Channels.of(tile, place))
    smem = cutlass.AddressSpace.smem
    state_memory = cutlass.Array(Uint32, (tile.bytes // 4,), space=smem, alignment=128)
    staging_memory = cutlass.Array(Uint32, (shape.staging_bytes(tile) // 4,), space=smem, alignment=16)
    barrier = cutlass.Array(Int64, (1,), space=smem, alignment=8).data_ptr()
    state, staging = Int32(state_memory.data_ptr().toint()), Int32(staging_memory.data_ptr().toint())
    scores = Scores(staging, shape, place.lane)
    if cutlass.const_expr(key.rows.pdl):
        cute.arch.griddepcontrol_wait()
    slot = load_slot(tensors.rows, row, key.rows.index_dtype)
    early = DraftLoads.start(cta)
    bulk_init(thread, barrier)
    cute.arch.barrier()
    if is_padding(slot, pad_slot):
        for token in cutlass.range_constexpr(shape.tokens):
            where = cta.input_place(tensors.out, token, head, place.first_row + thread)
            store_scalar_if(thread < tile.rows, where, Float32(0.0), key.activation_dtype)
    else:
        cursor = RowCursor.load(
            tensors.cursors,
            slot,
            load_force(tensors.rows, row),
            capacity=key.ring_capacity,
            window=key.window,
            tokens=shape.tokens,
        )
        tile_at = address(tensors.pool.checkpoint, SIZE_BYTES[key.checkpoint_dtype], slot, head, place.first_row)
        bulk_load(thread, state, tile_at, barrier, Int64(EVICT_NORMAL), tile.bytes)
        cute.arch.barrier()
        loads = WindowLoads.start(cta, cursor)
        if cutlass.const_expr(key.rows.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        draft = Draft.of(cta, early, loads.decays)
        score_records(cta, cursor, early, loads, draft, scores)
        append_decays(cta, cursor, draft.gate)
        cute.arch.barrier()
        bulk_wait(barrier)
        read_rows(cta, cursor, early, loads, draft, state, scores)
        if cursor.folds:
            cute.arch.barrier()
            fold_records(cta, cursor, draft, state, staging)
