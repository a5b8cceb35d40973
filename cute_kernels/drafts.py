"""What a CTA of the step of several tokens works on, loads and knows: `verify` does the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.args import StepTensors
from cute_kernels.configs import ROW_BLOCK, SIZE_BYTES, DraftShape, StepKey, Tile
from cute_kernels.primitives.arithmetic import exp2, select
from cute_kernels.primitives.control import barrier_of_zero
from cute_kernels.primitives.convert import unpack
from cute_kernels.primitives.memory import load_words_if, store_words_if
from cute_kernels.primitives.reduce import broadcast, prefix_sums
from cute_kernels.records import LaneDecays, LaneRecords, TileMemory, policy_of
from cute_kernels.recurrences.base import Gate, Recurrence
from cute_kernels.recurrences.kda import Kda
from cute_kernels.replay.channels import ChannelRecords, own_channels
from cute_kernels.replay.codes import SCALED, CodeScales
from cute_kernels.replay.cursor import RowCursor
from cute_kernels.replay.draft import QUAD, DraftDecays, Scores, StagedVectors, Vectors, load_block
from cute_kernels.replay.quant import CopyPlaces, CopyShape
from cute_kernels.replay.window import Place, address, load_scalar_if


@dataclass(frozen=True)
class Channels:
    """The channels that a lane has in 16 rows of its warp: two neighbours.

    Args:
        first: local row of the first.
        ahead: how many rows these 16 are behind the warp's first.
        inside: whether the tile has these rows.
    """

    first: Int32
    ahead: int
    inside: Int32

    @classmethod
    def of(cls, tile: Tile, place: Place) -> list[Channels]:
        """One for each 16 rows that the warp takes."""
        step = ROW_BLOCK * tile.warps
        rows = [(place.warp * ROW_BLOCK + ahead, ahead) for ahead in range(0, tile.rows, step)]
        return [cls(row + place.lane // 4 * 2, ahead, Int32(row < tile.rows)) for row, ahead in rows]


@dataclass(frozen=True)
class Cta:
    """What a CTA works on, as one of its threads sees it.

    Args:
        place: its row is the inputs' row, 0 where they hold all rows' tokens one after the other.
        channels: of V, in each 16 rows of this warp.
        first_token: where the row's tokens begin on the token axis.
        num_tokens: how many the row has, at most `shape.tokens`; the others count as zeros and are not stored.
        memory: where the tile is; behind it the decays by channel, then the scores, later a fold's records.
    """

    tensors: StepTensors
    key: StepKey
    place: Place
    channels: list[Channels]
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

    def vectors(self, words: list[list[Uint32]], decay_rows: list[Any]) -> Vectors:
        """Blocks of queries or keys that `load_block` loaded."""
        return Vectors(self.tile, self.key.activation_dtype, words, decay_rows, self.memory.staging, self.place.lane)

    def probes(self, loaded: list[list[list[Uint32]]]) -> Vectors:
        """What `load_probes` loaded; where channels decay by themselves, decayed since the window."""
        last = self.shape.tokens - 1
        tokens = [b * 8 + self.place.lane // 4 for b in range(self.shape.token_blocks)]
        rows = [self.tile.padded_window + 1 + select(t < last, t, Int32(last)) for t in tokens]
        return self.vectors([words for probe in loaded for words in probe], rows * self.shape.probes)

    @property
    def staged(self) -> StagedVectors:
        """The probes as the state meets them, where channels decay by themselves."""
        base = self.scores.base + self.shape.scores_bytes + self.shape.between_bytes
        return StagedVectors(base, self.tile, self.shape.probe_blocks, self.place.lane)

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
        """The first of this lane's channels of V; the others are `Channels.ahead` of it."""
        return self.place.first_row + self.channels[0].first

    def input_place(self, tensor: cute.Tensor, token: Any, *index: Any) -> Int64:
        """Where a token's part of an input or the output begins."""
        return address(tensor, SIZE_BYTES[self.key.activation_dtype], self.place.row, self.token_at(token), *index)

    def value_place(self, cursor: RowCursor, record: Any) -> Int64:
        """Where the first of this lane's channels of a record is, or goes, in the value ring."""
        size, physical = SIZE_BYTES[self.key.record_dtype], cursor.physical(record)
        return address(self.tensors.pool.value, size, cursor.slot, self.place.head, physical, self.first_channel)

    def key_place(self, cursor: RowCursor, record: Any) -> Int64:
        """The same for a record's key."""
        size, physical = SIZE_BYTES[self.key.activation_dtype], cursor.physical(record)
        return address(self.tensors.pool.key, size, cursor.slot, self.place.group, physical)


def load_pair(part: Channels, valid: Any, first: Any, dtype: str) -> list[Uint32]:
    """The words of two neighbouring channels, where the lane's first are at address `first`."""
    size = SIZE_BYTES[dtype]
    return load_words_if(valid, first, size // 2, offset=part.ahead * size)


def store_pair(part: Channels, valid: Any, first: Any, words: list[Any]) -> None:
    """Write the words of two channels likewise."""
    store_words_if(part.inside * valid, first, words, offset=part.ahead * 2 * len(words))


def load_probes(cta: Cta) -> list[list[list[Uint32]]]:
    """By probe and block of tokens, this lane's words of its vector."""
    policy, place, inputs = cta.policy, cta.place, cta.tensors.inputs
    tokens = [b * 8 + place.lane // 4 for b in range(cta.shape.token_blocks)]
    return [
        [load_block(cta.input_place(tensor, t, place.group), cta.is_token(t), place.lane, cta.tile) for t in tokens]
        for tensor in (policy.query(inputs), policy.key(inputs))[: cta.shape.probes]
    ]


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


@dataclass(frozen=True)
class DraftLoads:
    """Loads that need neither slot nor cursor.

    Args:
        gate: what `Recurrence.load_token` loaded for the token of this lane; the first one's where there is none.
        probes: by probe and block of tokens, this lane's words of its vector.
        values: for each 16 rows of the warp, the words of this lane's channels of its tokens (`Cta.own`); empty under
            a delta rule.
        channels: for each channel of K that this thread has, and each token, what its decay needs, its query and key;
            empty where one decay is all.
        epilogues: for each 16 rows and each block of tokens, what `load_epilogue` loaded for channel and token, channel
            and next token, next channel and token, next channel and next token.
    """

    gate: tuple[Any, ...]
    probes: list[list[list[Uint32]]]
    values: list[list[list[Uint32]]]
    channels: list[list[TokenChannel]]
    epilogues: list[list[list[Any]]]

    @classmethod
    def start(cls, cta: Cta) -> DraftLoads:
        policy, shape, place, inputs = cta.policy, cta.shape, cta.place, cta.tensors.inputs
        own = select(place.lane < cta.num_tokens, place.lane, Int32(0))
        gate = policy.load_token(inputs, cta.tensors.parameters, place.row, cta.token_at(own), place.head)
        probes = load_probes(cta)
        values, epilogues, row, head = [], [], place.row, place.head
        for part in cta.channels:
            channel = place.first_row + part.first
            own_tokens = cta.own(0)[: 2 * shape.token_blocks]
            inside = [part.inside * cta.is_token(t) for t in own_tokens]
            words = []
            for t, valid in zip([] if policy.value_needs_state else own_tokens, inside, strict=False):
                where = cta.input_place(policy.value(inputs), t, place.head, cta.first_channel)
                words.append(load_pair(part, valid, where, cta.key.activation_dtype))
            values.append(words)
            epilogues.append(
                [
                    [
                        policy.load_epilogue(inputs, row, cta.token_at(own_tokens[i]), head, channel + c, inside[i])
                        for c in (0, 1)
                        for i in (2 * b, 2 * b + 1)
                    ]
                    for b in range(shape.token_blocks)
                ]
            )
        channels = []
        if isinstance(policy, Kda):
            for own_channel in own_channels(cta.tile, place.thread):
                channels.append([TokenChannel.load(cta, policy, t, own_channel) for t in range(shape.tokens)])
        return cls(gate, probes, values, channels, epilogues)


def _load_keys(cta: Cta, cursor: RowCursor) -> list[list[Uint32]]:
    """`WindowLoads.keys`."""
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


def _load_values(cta: Cta, cursor: RowCursor) -> tuple[list[list[list[list[Uint32]]]], list[CodeScales]]:
    """`WindowLoads.values` and `WindowLoads.scales`."""
    shape, place = cta.shape, cta.place
    values = [
        [
            [
                load_pair(
                    part,
                    part.inside * Int32(record < cursor.count),
                    cta.value_place(cursor, record),
                    cta.key.record_dtype,
                )
                for record in cta.own(first)
            ]
            for first in range(0, shape.window_columns, 16)
        ]
        for part in cta.channels
    ]
    scales = []
    if cta.key.read_dtype in SCALED:
        places, first = CopyPlaces.of(cta.tensors.pool.copy, cursor.slot), place.head * cta.key.head_dim
        for part in cta.channels:
            fits = cta.tile.rows % (ROW_BLOCK * cta.tile.warps) == 0
            row = part.first - part.ahead if fits else select(part.inside != 0, part.first, place.lane // 4 * 2)
            row, ahead = first + place.first_row + row, part.ahead if fits else 0
            scales.append(CodeScales.load(cta.copy_shape, cta.tile, places, row, ahead, place.lane % 4))
    return values, scales


@dataclass(frozen=True)
class WindowLoads:
    """Loads that need the cursor.

    Args:
        decays: decay records of the window, by lane or by channel.
        keys: of each block of records that this warp scores, this lane's words of its key.
        values: for each 16 rows of the warp, and each 16 records, the words of this lane's channels of its four.
        scales: for each 16 rows of the warp, of a read copy whose codes have any; else empty.
        zero: what scores start from, so that none is computed before all loads are under way (Super, batch 256, H200,
            2026-11-30: T = 2 281 -> 266 us, T = 4 306 -> 274, T = 8 302 -> 285). Where channels decay by themselves
            much is computed before any score, and a barrier costs more than it brings (GLM-5.3-Flash, T = 8: 513 and
            522 us).
    """

    decays: LaneRecords | ChannelRecords
    keys: list[list[Uint32]]
    values: list[list[list[list[Uint32]]]]
    scales: list[CodeScales]
    zero: Float32

    @classmethod
    def start(cls, cta: Cta, cursor: RowCursor) -> WindowLoads:
        place = cta.place
        decays: LaneRecords | ChannelRecords
        if cta.tile.channels:
            decays = ChannelRecords.load(cta.tensors.pool.decay, cta.key.decay_dtype, cta.tile, place, cursor)
        else:
            decays = LaneRecords.load(cta.tensors.pool, cta.key, place, cursor)
        keys = _load_keys(cta, cursor)
        values, scales = _load_values(cta, cursor)
        return cls(decays, keys, values, scales, Float32(0.0) if cta.tile.channels else barrier_of_zero())


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
    def of(cls, cta: Cta, early: DraftLoads, records: LaneRecords | ChannelRecords) -> Draft:
        policy, shape, lane = cta.policy, cta.shape, cta.place.lane
        gate = policy.gate(early.gate)
        log2 = Float32(0.0)
        if isinstance(records, LaneRecords):
            log2 = select(lane < shape.tokens, gate.rate * gate.record, log2)
        decays = DraftDecays(
            log2=log2,
            since_window=exp2(prefix_sums(log2, lane, shape.tokens)),
            records=LaneDecays.of(policy, gate.rate, records, lane, shape.window),
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
                    broadcast(factor, self.lane % 4 * 8 + 4 * e) * (decay * self.decays.records.window)
                    for e, decay in enumerate(decays)
                ]
            )
        return made

    def in_columns(self, of_token: Any, block: Any) -> list[Any]:
        """What lane s has for token s, for this lane's two columns of a block."""
        return [broadcast(of_token, block * 8 + self.lane % 4 * 2 + e) for e in (0, 1)]
