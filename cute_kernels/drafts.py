"""What a CTA of the step of several tokens works on, loads and knows: `verify` does the work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.args import StepTensors
from cute_kernels.configs import ROW_BLOCK, SIZE_BYTES, DraftShape, StepKey, Tile
from cute_kernels.primitives.arithmetic import exp2, select
from cute_kernels.primitives.bulk import bulk_load
from cute_kernels.primitives.convert import pack, unpack
from cute_kernels.primitives.memory import store_words_if
from cute_kernels.primitives.reduce import broadcast, prefix_sums, transposed_place
from cute_kernels.records import LaneDecays, LaneRecords, TileMemory, policy_of
from cute_kernels.recurrences.base import Gate, Recurrence
from cute_kernels.recurrences.kda import Kda
from cute_kernels.replay.channels import ChannelRecords, own_channels
from cute_kernels.replay.codes import SCALED, CodeScales
from cute_kernels.replay.cursor import RowCursor
from cute_kernels.replay.draft import QUAD, DraftDecays, Scores, StagedVectors, Vectors, load_block
from cute_kernels.replay.quant import CopyPlaces, CopyShape
from cute_kernels.replay.window import (
    Place,
    access_words,
    address,
    load_row_words,
    load_scalar_if,
    store_scalar_if,
)

LONE_LANES = (2, 1)  # masks of the lanes that share a row; the first halves what a lane keeps of its sums


@dataclass(frozen=True)
class Channels:
    """The channels of V that a lane has: two for each product of 16 rows of its warp, in runs of 4 or 2 neighbours.

    A run of 8 lanes is followed by the next run of the same lanes: runs of 4 lie 32 rows apart, as do the scales of
    blocks that lie together, and are wide enough for the other loads.

    Args:
        first: local row of the first.
        run: channels of a run.
        inside: for each run, whether the tile has it; True where it has all.
    """

    first: Int32
    run: int
    inside: list[Any]

    @classmethod
    def of(cls, tile: Tile, place: Place) -> Channels:
        products = -(-tile.rows // (ROW_BLOCK * tile.warps))
        run = 4 if products % 2 == 0 else 2
        first, runs = place.warp * (ROW_BLOCK * products) + place.lane // 4 * run, range(2 * products // run)
        if products * ROW_BLOCK * tile.warps == tile.rows:
            return cls(first, run, [True for _ in runs])
        return cls(first, run, [Int32(first + 8 * run * i < tile.rows) for i in runs])

    @property
    def together(self) -> bool:
        """Whether the tile has all of them."""
        return all(inside is True for inside in self.inside)

    @property
    def runs(self) -> list[tuple[Any, int]]:
        """Local row of the first of each run, as (row, rows ahead of it); row 0 where the tile has none."""
        ahead = [8 * self.run * i for i in range(len(self.inside))]
        if self.together:
            return [(self.first, rows) for rows in ahead]
        return [(select(x != 0, self.first + rows, Int32(0)), 0) for x, rows in zip(self.inside, ahead, strict=True)]

    @property
    def pairs(self) -> list[tuple[Any, int]]:
        """The same of the two channels of each product."""
        return [(row, ahead + i) for row, ahead in self.runs for i in range(0, self.run, 2)]

    def place_of(self, index: Any) -> Any:
        """How far a channel is behind the first, where `index` counts them all."""
        return index // self.run * (8 * self.run) + index % self.run

    def load(self, valid: Any, where: Any, dtype: str) -> list[list[Uint32]]:
        """Of each product the words of its two channels, where the lane's first are at address `where`."""
        each, pairs = SIZE_BYTES[dtype] // 2, []
        for i, inside in enumerate(self.inside):
            there = valid if inside is True else inside * Int32(valid)
            at = where + i * (8 * self.run * SIZE_BYTES[dtype])
            words = load_row_words(there, at, each * self.run // 2)
            pairs += [words[j : j + each] for j in range(0, len(words), each)]
        return pairs

    def store(self, valid: Any, where: Any, pairs: list[list[Any]]) -> None:
        """Write the words of all channels likewise."""
        each = self.run // 2
        for i, inside in enumerate(self.inside):
            there = valid if inside is True else inside * valid
            words = [word for pair in pairs[i * each : (i + 1) * each] for word in pair]
            for j in range(0, len(words), access_words(len(words))):
                part = words[j : j + access_words(len(words))]
                store_words_if(there, where, part, offset=i * 32 * len(words) + 4 * j)


@dataclass(frozen=True)
class LoneChannels:
    """Those of a lane's channels of which it has the sums of one token.

    Args:
        rows: local rows.
        inside: of each, whether the tile has it and this lane writes it.
        packed: whether they are neighbours, as many as a word holds at least, and all inside or none.
    """

    rows: list[Any]
    inside: list[Int32]
    packed: bool

    @classmethod
    def of(cls, tile: Tile, place: Place, channels: Channels) -> LoneChannels:
        total = channels.run * len(channels.inside)
        index, count, owns = transposed_place(total, place.lane, LONE_LANES)
        if channels.together and total & (total - 1) == 0:  # so many of a run
            first = channels.first + channels.place_of(index)
            return cls([first + i for i in range(count)], [Int32(owns)] * count, count * tile.activation_size >= 4)
        rows = [channels.first + channels.place_of(index + i) for i in range(count)]
        inside = [Int32(owns) * Int32(index + i < total) * Int32(row < tile.rows) for i, row in enumerate(rows)]
        return cls([select(x != 0, row, Int32(0)) for x, row in zip(inside, rows, strict=True)], inside, packed=False)

    def load(self, valid: Any, where: Any, dtype: str) -> list[Any]:
        """These channels of a tensor whose local row 0 is at address `where`, as `unpacked` takes them: nothing waits
        for them yet."""
        size, count = SIZE_BYTES[dtype], len(self.rows)
        if self.packed:
            return load_row_words(valid * self.inside[0], where + self.rows[0] * size, count * size // 4)
        places = zip(self.rows, self.inside, strict=True)
        return [load_scalar_if(valid * inside, where + row * size, dtype) for row, inside in places]

    def unpacked(self, loaded: list[Any], dtype: str) -> list[Float32]:
        return unpack(loaded, dtype) if self.packed else loaded

    def store(self, valid: Any, where: Any, values: list[Any], dtype: str) -> None:
        """Write them likewise."""
        size = SIZE_BYTES[dtype]
        if self.packed:
            words, at = pack(values, dtype), where + self.rows[0] * size
            width = access_words(len(words))
            for i in range(0, len(words), width):
                store_words_if(valid * self.inside[0], at, words[i : i + width], offset=4 * i)
            return
        for row, inside, value in zip(self.rows, self.inside, values, strict=True):
            store_scalar_if(valid * inside, where + row * size, value, dtype)


@dataclass(frozen=True)
class Cta:
    """What a CTA works on, as one of its threads sees it.

    Args:
        place: its row is the inputs' row, 0 where they hold all rows' tokens one after the other; its head the one that
            the CTA is at.
        channels: of V.
        first_token: where the row's tokens begin on the token axis.
        num_tokens: how many the row has, at most `shape.tokens`; the others count as zeros and are not stored.
        memory: where the tile is; behind it the decays by channel, then the scores, later a fold's records.
    """

    tensors: StepTensors
    key: StepKey
    place: Place
    channels: Channels
    first_token: Any
    num_tokens: Any
    memory: TileMemory

    @property
    def policy(self) -> Recurrence:
        return policy_of(self.key)

    @property
    def tile(self) -> Tile:
        return Tile.of(self.key)

    @property
    def shape(self) -> DraftShape:
        return DraftShape.of(self.key)

    def at_head(self, index: Any) -> Cta:
        """The same at one of its heads."""
        memory = replace(self.memory, state=self.memory.state + index % self.shape.tiles * self.tile.bytes)
        return replace(self, place=replace(self.place, head=self.place.head + index), memory=memory)

    def start_tile(self, slot: Any, arrival: Any, index: Any, policy: Any) -> None:
        """Start the copy of the tile that a head reads, of the checkpoint or of its copy."""
        at, size = self.at_head(index), SIZE_BYTES[self.key.checkpoint_dtype]
        source = self.tensors.pool.checkpoint
        if self.key.read_dtype is not None:
            source = self.tensors.pool.copy.codes
            size = source.element_type.width // 8
        where = address(source, size, slot, at.place.head, at.place.first_row)
        barrier = arrival + index % self.shape.tiles
        bulk_load(self.place.thread, at.memory.state, where, barrier, policy, self.tile.bytes)

    def sync(self) -> None:
        """Wait for the CTA's warps."""
        if self.shape.warps > 1:
            cute.arch.barrier()
        else:
            cute.arch.sync_warp()

    @property
    def lone(self) -> LoneChannels:
        """The channels whose outputs this lane writes where there is one token."""
        return LoneChannels.of(self.tile, self.place, self.channels)

    @property
    def copy_shape(self) -> CopyShape:
        """Of the read copy of a slot."""
        key = self.key
        return CopyShape(key.num_v_heads * key.head_dim, key.d_state, key.checkpoint_dtype, key.read_dtype or "")

    @property
    def terms(self) -> int:
        """bfloat16 terms of a float32 factor."""
        return self.shape.terms

    @property
    def scores(self) -> Scores:
        return Scores(self.memory.staging + self.tile.channel_bytes, self.shape, self.place.lane)

    @property
    def raw_scores(self) -> Scores:
        """The scores as they are, before a head weighs them."""
        shape, base = self.shape, self.scores.base
        if shape.keeps_raw:
            base = base + shape.scores_bytes + shape.between_bytes
        return Scores(base, shape, self.place.lane)

    def vectors(self, words: list[list[Uint32]], decay_rows: list[Any]) -> Vectors:
        """Blocks of queries or keys that `load_block` loaded."""
        return Vectors(self.tile, self.key.activation_dtype, words, decay_rows, self.memory.staging, self.place.lane)

    def probes(self, loaded: list[list[list[Uint32]]]) -> Vectors:
        """What `load_probes` loaded; where channels decay by themselves, decayed since the window."""
        last, tokens = self.shape.tokens - 1, self.probe_tokens
        rows = [self.tile.padded_window + 1 + select(t < last, t, Int32(last)) for t in tokens]
        return self.vectors([words for probe in loaded for words in probe], rows * self.shape.probes)

    @property
    def staged(self) -> StagedVectors:
        """The probes as the state meets them, where channels decay by themselves."""
        base = self.scores.base + self.shape.scores_bytes + self.shape.between_bytes
        return StagedVectors(base, self.tile, self.shape.probe_blocks, self.place.lane)

    @property
    def probe_tokens(self) -> list[Any]:
        """The token whose part this lane has in each block of probes; every lane that of the only one."""
        if self.shape.tokens == 1:
            return [Int32(0)]
        return [b * 8 + self.place.lane // 4 for b in range(self.shape.token_blocks)]

    def own(self, first: int) -> list[Any]:
        """The four of 16 vectors from `first` on whose elements this lane has on the left side of a product."""
        return [first + self.place.lane % 4 * 2 + e for e in (0, 1, 8, 9)]

    def is_token(self, token: Any) -> Int32:
        """Whether the row has this token."""
        return Int32(token < self.num_tokens)

    def token_at(self, token: Any) -> Any:
        """A token's index on the token axis."""
        return self.first_token + token

    @property
    def first_channel(self) -> Any:
        """The channel of V where this lane's loads and stores begin: its first, or the tile's for `LoneChannels`."""
        return self.place.first_row + (0 if self.shape.tokens == 1 else self.channels.first)

    def input_place(self, tensor: cute.Tensor, token: Any, *index: Any) -> Int64:
        """Where a token's part of an input or the output begins."""
        return address(tensor, SIZE_BYTES[self.key.activation_dtype], self.place.row, self.token_at(token), *index)

    def value_place(self, cursor: RowCursor, record: Any, channel: Any) -> Int64:
        """Where a channel of a record is, or goes, in the value ring."""
        size, physical = SIZE_BYTES[self.key.record_dtype], cursor.physical(record)
        return address(self.tensors.pool.value, size, cursor.slot, self.place.head, physical, channel)

    def key_place(self, cursor: RowCursor, record: Any) -> Int64:
        """The same for a record's key."""
        size, physical = SIZE_BYTES[self.key.activation_dtype], cursor.physical(record)
        return address(self.tensors.pool.key, size, cursor.slot, self.place.group, physical)


def load_probes(cta: Cta) -> list[list[list[Uint32]]]:
    """By probe and block of tokens, this lane's words of its vector."""
    policy, place, inputs = cta.policy, cta.place, cta.tensors.inputs
    return [
        [
            load_block(cta.input_place(tensor, t, place.group), cta.is_token(t), place.lane, cta.tile)
            for t in cta.probe_tokens
        ]
        for tensor in (policy.query(inputs), policy.key(inputs))[: cta.shape.probes]
    ]


def probe_factors(cta: Cta, probes: list[list[list[Uint32]]]) -> list[list[Any]]:
    """By probe and block of tokens, what this lane's vector is multiplied by."""
    if cta.shape.probes == 1:
        return [[Float32(1.0)] * cta.shape.token_blocks]
    words = [[unpack(block, cta.key.activation_dtype) for block in probe] for probe in probes]
    of_blocks = [cta.policy.factors(query, key, QUAD) for query, key in zip(*words, strict=True)]
    return [list(of_probe) for of_probe in zip(*of_blocks, strict=True)]


@dataclass(frozen=True)
class TokenChannel:
    """One channel of K of a token, where each decays by itself.

    Args:
        gate: what `Kda.load_channel` loaded.
        query, key: as they came.
    """

    gate: tuple[Any, ...]
    query: Float32
    key: Float32

    @classmethod
    def load(cls, cta: Cta, policy: Kda, token: int, own: tuple[Int32, Int32]) -> TokenChannel:
        place, dtype, (channel, inside) = cta.place, cta.key.activation_dtype, own
        inside = inside * cta.is_token(token)
        inputs: Any = cta.tensors.inputs
        parameters: Any = cta.tensors.parameters
        gate = policy.load_channel(inputs, parameters, place.row, cta.token_at(token), place.head, channel, inside)
        query, key = (
            load_scalar_if(inside, cta.input_place(tensor, token, place.group, channel), dtype)
            for tensor in (policy.query(inputs), policy.key(inputs))
        )
        return cls(gate, query, key)


def load_gate(cta: Cta) -> tuple[Any, ...]:
    """`HeadLoads.gate`."""
    place = cta.place
    own = select(place.lane < cta.num_tokens, place.lane, Int32(0))
    return cta.policy.load_token(cta.tensors.inputs, cta.tensors.parameters, place.row, cta.token_at(own), place.head)


@dataclass(frozen=True)
class HeadLoads:
    """Loads of a head that need neither slot nor cursor.

    Args:
        gate: what `Recurrence.load_token` loaded for the token of this lane; the first one's where there is none.
        values: of each token of this lane (`Cta.own`) what `Channels.load` loaded of its value; empty under a delta rule.
        epilogues: the same of the epilogue's input, empty where there is none. One token's are those of
            `LoneChannels.load`, and so are its values.
        channels: for each channel of K that this thread has, and each token, what its decay needs, its query and key;
            empty where one decay is all.
    """

    gate: tuple[Any, ...]
    values: list[Any]
    epilogues: list[Any]
    channels: list[list[TokenChannel]]

    @classmethod
    def start(cls, cta: Cta, gate: tuple[Any, ...] | None = None) -> HeadLoads:
        policy, shape, place, inputs = cta.policy, cta.shape, cta.place, cta.tensors.inputs
        gate = load_gate(cta) if gate is None else gate

        def of_tokens(tensor: cute.Tensor | None) -> list[Any]:
            tokens = [] if tensor is None else cta.own(0)[: 2 * shape.token_blocks] if shape.tokens > 1 else [Int32(0)]
            having = cta.channels if shape.tokens > 1 else cta.lone
            where = [cta.input_place(tensor, t, place.head, cta.first_channel) for t in tokens]
            return [
                having.load(cta.is_token(t), w, cta.key.activation_dtype) for t, w in zip(tokens, where, strict=True)
            ]

        values = of_tokens(None if policy.value_needs_state else policy.value(inputs))
        epilogues = of_tokens(policy.epilogue_input(inputs))
        channels = []
        if isinstance(policy, Kda):
            for own_channel in own_channels(cta.tile, place.thread):
                channels.append([TokenChannel.load(cta, policy, t, own_channel) for t in range(shape.tokens)])
        return cls(gate, values, epilogues, channels)


def load_keys(cta: Cta, cursor: RowCursor) -> list[list[Uint32]]:
    """Of each block of records that this warp scores, this lane's words of its key."""
    shape, place, key_of = cta.shape, cta.place, cta.policy.key
    keys = []
    for step in range(-(-shape.record_blocks // shape.warps)):
        record = (place.warp + shape.warps * step) * 8 + place.lane // 4
        token, from_window = record - shape.window_columns, record < shape.window_columns
        valid = select(from_window, Int32(record < cursor.count), cta.is_token(token))
        fresh = cta.input_place(key_of(cta.tensors.inputs), token, place.group)
        source = select(from_window, cta.key_place(cursor, record), fresh)
        keys.append(load_block(source, valid, place.lane, cta.tile))
    return keys


@dataclass(frozen=True)
class WindowLoads:
    """Loads of a head that need the cursor.

    Args:
        decays: decay records of the window, by lane or by channel.
        values: of each product of 16 rows, and each 16 records, the words of this lane's channels of its four.
        scales: of this lane's rows of a read copy whose codes have any.
    """

    decays: LaneRecords | ChannelRecords
    values: list[list[list[list[Uint32]]]]
    scales: CodeScales | None

    @classmethod
    def start(cls, cta: Cta, cursor: RowCursor, ahead: Ahead | None = None) -> WindowLoads:
        """`ahead` has those that are loaded already."""
        place, key = cta.place, cta.key
        ahead = Ahead.start(cta, cursor) if ahead is None else ahead
        values: list[Any] = [[] for _ in cta.channels.pairs]
        for first in range(0, cta.shape.window_columns, ROW_BLOCK):
            records = []
            for record in cta.own(first):
                where = cta.value_place(cursor, record, place.first_row + cta.channels.first)
                records.append(cta.channels.load(Int32(record < cursor.count), where, key.record_dtype))
            for of_product, words in zip(values, zip(*records, strict=True), strict=True):
                of_product.append(list(words))
        return cls(ahead.decays, values, ahead.scales)


@dataclass(frozen=True)
class Ahead:
    """The loads of a head whose results are needed first.

    Args:
        gate: as in `HeadLoads`; empty where that has it.
        decays, scales: as in `WindowLoads`.
    """

    gate: tuple[Any, ...]
    decays: Any
    scales: CodeScales | None

    @classmethod
    def start(cls, cta: Cta, cursor: RowCursor, gate: tuple[Any, ...] = ()) -> Ahead:
        place, key, scales = cta.place, cta.key, None
        decays: LaneRecords | ChannelRecords
        if cta.tile.channels:
            decays = ChannelRecords.load(cta.tensors.pool.decay, key.decay_dtype, cta.tile, place, cursor)
        else:
            decays = LaneRecords.load(cta.tensors.pool, key, place, cursor)
        if key.read_dtype in SCALED:
            head = place.head * key.head_dim + place.first_row
            rows = [(head + row, ahead) for row, ahead in cta.channels.runs]
            places = CopyPlaces.of(cta.tensors.pool.copy, cursor.slot)
            together = cta.channels.together and cta.channels.run == 4
            scales = CodeScales.load(cta.copy_shape, cta.tile, places, rows, cta.channels.run, together, place.lane % 4)
        return cls(gate, decays, scales)

    @property
    def leaves(self) -> list[Any]:
        """What was loaded, in order."""
        scales = [] if self.scales is None else [x for row in self.scales.words for x in row] + self.scales.rows
        return [*(x for x in self.gate if x is not None), *self.decays.words, *scales]

    def with_leaves(self, words: list[Uint32]) -> Ahead:
        """The same with other values, from their bits."""
        found = (word.bitcast(type(leaf)) for word, leaf in zip(words, self.leaves, strict=True))
        gate = tuple(None if x is None else next(found) for x in self.gate)
        decays = replace(self.decays, words=[next(found) for _ in self.decays.words])
        scales = self.scales
        if scales is not None:
            of_rows = [[next(found) for _ in row] for row in scales.words]
            scales = replace(scales, words=of_rows, rows=[next(found) for _ in scales.rows])
        return Ahead(gate, decays, scales)


@dataclass(frozen=True)
class Held:
    """`Ahead` of the next head, in registers from one turn of a loop over heads to the next."""

    first: Ahead
    words: cute.Tensor

    @classmethod
    def of(cls, first: Ahead) -> Held:
        held = cls(first, cute.make_rmem_tensor((len(first.leaves),), Uint32))
        held.put(first)
        return held

    def put(self, ahead: Ahead) -> None:
        for i, leaf in enumerate(ahead.leaves):
            self.words[i] = leaf.bitcast(Uint32)

    def get(self) -> Ahead:
        return self.first.with_leaves([self.words[i] for i in range(len(self.first.leaves))])


@dataclass(frozen=True)
class Draft:
    """What the lanes know of the tokens once their gates are computed.

    Args:
        gate: of this lane's token.
        decays: see there.
        factors: what `probe_factors` found.
        lane: this lane.
    """

    gate: Gate
    decays: DraftDecays
    factors: list[list[Any]]
    lane: Int32

    @classmethod
    def of(cls, cta: Cta, early: HeadLoads, records: LaneRecords | ChannelRecords, factors: list[list[Any]]) -> Draft:
        policy, shape, lane = cta.policy, cta.shape, cta.place.lane
        gate = policy.gate(early.gate)
        log2 = Float32(0.0)
        if isinstance(records, LaneRecords):
            log2 = gate.rate * gate.record
            if shape.tokens > 1:
                log2 = select(lane < shape.tokens, log2, Float32(0.0))
        decays = DraftDecays(
            log2=log2,
            since_window=exp2(prefix_sums(log2, lane, shape.tokens)),
            records=LaneDecays.of(policy, gate.rate, records, lane, shape.window),
            token_weight=policy.weight(gate.record),
        )
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
                    broadcast(factor, self.lane % 4 * 8 + 4 * e) * (decay * self.decays.records.window)
                    for e, decay in enumerate(decays)
                ]
            )
        return made

    def in_columns(self, of_token: Any, block: Any) -> list[Any]:
        """What lane s has for token s, for this lane's two columns of a block."""
        return [broadcast(of_token, block * 8 + self.lane % 4 * 2 + e) for e in (0, 1)]
