"""What a CTA of `verify` loads, and what its lanes know of the tokens then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.configs import ROW_BLOCK, SIZE_BYTES, WARP
from cute_kernels.copy_shape import CopyShape
from cute_kernels.drafts import Cta
from cute_kernels.primitives.arithmetic import exp2, power_over, select
from cute_kernels.primitives.control import words_if
from cute_kernels.primitives.convert import unpack
from cute_kernels.primitives.memory import load_shared, load_words
from cute_kernels.primitives.reduce import broadcast, prefix_sums
from cute_kernels.records import LaneDecays, LaneRecords
from cute_kernels.recurrences.base import Gate
from cute_kernels.recurrences.kda import Kda
from cute_kernels.replay.channels import ChannelRecords, own_channels
from cute_kernels.replay.codes import SCALED, CodeScales, Load
from cute_kernels.replay.cursor import RowCursor
from cute_kernels.replay.draft import LANES, QUAD, DraftDecays, load_block
from cute_kernels.replay.quant import CopyPlaces, largest_of
from cute_kernels.replay.window import load_row_words, load_scalar_if


def load_probes(cta: Cta) -> list[list[list[Uint32]]]:
    """By probe and block of tokens, this lane's words of its vector."""
    place = cta.place
    return [
        [
            load_block(cta.input_place(tensor, t, place.group), cta.is_token(t), place.lane, cta.tile)
            for t in cta.probe_tokens
        ]
        for tensor in cta.probe_tensors
    ]


@dataclass(frozen=True)
class ProbeParts:
    """The probes in parts whose lanes together have each number once: what a norm or a largest value is made of.

    Args:
        words: by probe and block of tokens, as `load_probes` loaded them, or of one token, whose vectors all groups of
            four lanes have, a lane's 32nd.
        lanes: masks of the lanes that have the other parts.
    """

    words: list[list[list[Uint32]]]
    lanes: tuple[int, ...]

    @classmethod
    def of(cls, cta: Cta, probes: list[list[list[Uint32]]]) -> ProbeParts:
        if not cta.shape.loads_parts:
            return cls(probes, QUAD)
        place = cta.place
        size = cta.key.d_state * cta.tile.activation_size // WARP
        words = [
            [load_row_words(cta.is_token(0), cta.input_place(tensor, 0, place.group) + place.lane * size, size // 4)]
            for tensor in cta.probe_tensors
        ]
        return cls(words, LANES)

    def factors(self, cta: Cta) -> list[list[Any]]:
        """By probe and block of tokens, what this lane's vector is multiplied by."""
        if cta.shape.probes == 1:
            return [[Float32(1.0)] * cta.shape.token_blocks]
        words = [[unpack(block, cta.key.activation_dtype) for block in probe] for probe in self.words]
        of_blocks = [cta.policy.factors(query, key, self.lanes) for query, key in zip(*words, strict=True)]
        return [list(of_probe) for of_probe in zip(*of_blocks, strict=True)]

    def scales(self, cta: Cta) -> list[Float32]:
        """By probe block, the power of two that brings the largest of this lane's vector to 2**14 at least and less
        than 2**15; 1 where they came as float16. Empty where state and probes do not meet as such."""
        blocks, dtype = [block for probe in self.words for block in probe], cta.key.activation_dtype
        if not cta.shape.halves or dtype == "float16":
            return [Float32(1.0)] * len(blocks) if cta.shape.halves else []
        return [power_over(largest_of(unpack(words, dtype), self.lanes), 14) for words in blocks]


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
class HeadLoads:
    """Loads of a head that need neither slot nor cursor.

    Args:
        gate: what `Recurrence.load_token` loaded for the token of this lane; the first one's where there is none.
        values: of each token of this lane (`Cta.own`) what `Channels.load` loaded of its value, or `LoneChannels.load`
            of the only one; empty under a delta rule.
        epilogues: the same of the epilogue's input, empty where there is none.
        channels: for each channel of K that this thread has, and each token, what its decay needs, its query and key;
            empty where one decay is all.
    """

    gate: tuple[Any, ...]
    values: list[Any]
    epilogues: list[Any]
    channels: list[list[TokenChannel]]

    @classmethod
    def start(cls, cta: Cta) -> HeadLoads:
        policy, shape, place, inputs = cta.policy, cta.shape, cta.place, cta.tensors.inputs
        own = select(place.lane < cta.num_tokens, place.lane, Int32(0))
        gate = policy.load_token(inputs, cta.tensors.parameters, place.row, cta.token_at(own), place.head)

        def of_tokens(tensor: cute.Tensor | None) -> list[Any]:
            tokens = [] if tensor is None else [Int32(0)] if shape.lone else cta.own(0)[: 2 * shape.token_blocks]
            having = cta.lone if shape.lone else cta.channels
            where = [cta.input_place(tensor, t, place.head, cta.first_channel) for t in tokens]
            dtype, cache = cta.key.activation_dtype, cta.value_cache
            return [having.load(cta.is_token(t), w, dtype, cache=cache) for t, w in zip(tokens, where, strict=True)]

        values = of_tokens(None if policy.value_needs_state else policy.value(inputs))
        epilogues = of_tokens(policy.epilogue_input(inputs))
        channels = []
        if isinstance(policy, Kda):
            for own_channel in own_channels(cta.tile, place.thread):
                channels.append([TokenChannel.load(cta, policy, t, own_channel) for t in range(shape.tokens)])
        return cls(gate, values, epilogues, channels)


def load_keys(cta: Cta, cursor: RowCursor) -> list[list[Uint32]]:
    """Of each block of records that this warp scores, this lane's words of its key."""
    shape, place, key_of, (warp, warps) = cta.shape, cta.place, cta.policy.key, cta.scorer
    keys = []
    for step in range(-(-shape.record_blocks // warps)):
        record = (warp + warps * step) * 8 + place.lane // 4
        token, from_window = record - shape.window_columns, record < shape.window_columns
        valid = select(from_window, Int32(record < cursor.count), cta.is_token(token))
        fresh = cta.input_place(key_of(cta.tensors.inputs), token, place.group)
        source = select(from_window, cta.key_place(cursor, record), fresh)
        keys.append(load_block(source, valid, place.lane, cta.tile))
    return keys


def code_runs(cta: Cta, head: Any) -> list[tuple[Any, int]]:
    """This lane's runs of rows, counted from where so many heads before its own are."""
    return [(cta.rows_before(head) + row, ahead) for row, ahead in cta.channels.runs]


def load_blocks(cta: Cta, scales: CodeScales, head: Any, load: Load, base: Any) -> CodeScales:
    """The scales with those of blocks, which `load` has at address `base`, this head's behind those of so many."""
    together = cta.channels.together and cta.channels.run == 4
    return scales.of_blocks(load, base, code_runs(cta, head), cta.channels.run, together=together)


def staged_blocks(cta: Cta, scales: CodeScales) -> CodeScales:
    """The same from shared memory, behind the tiles of all heads, once they are there."""
    base = cta.memory.state + (cta.shape.heads - cta.local_head) * cta.tile.bytes
    return load_blocks(cta, scales, cta.local_head, load_shared, base)


def load_values(cta: Cta, cursor: RowCursor, first: int) -> list[list[list[Uint32]]]:
    """Of each product of 16 rows, and each of this lane's four of 16 records from `first` on, its channels' words.

    Records behind the first 16 are passed by where there are none: loads that are only predicated off take their time
    too (Super, 12 tokens, window 32, 8 records, batch 256: 314 -> 309 us, Qwen3.5-122B, 8 tokens: 324 -> 312; H200,
    2026-11-30).
    """
    place, pairs, dtype = cta.place, len(cta.channels.pairs), cta.key.record_dtype
    each = SIZE_BYTES[dtype] // 2

    def load() -> list[Uint32]:
        words = []
        for record in cta.own(first):
            where = cta.value_place(cursor, record, place.first_row + cta.channels.first)
            found = cta.channels.load(Int32(record < cursor.count), where, dtype, cache=cta.value_cache)
            words += [word for pair in found for word in pair]
        return words

    words = words_if(cursor.count > first, 4 * pairs * each, load) if first > 0 and not cta.tile.channels else load()
    parts = [words[i : i + each] for i in range(0, len(words), each)]
    return [parts[i::pairs] for i in range(pairs)]


@dataclass(frozen=True)
class WindowLoads:
    """Loads of a head that need the cursor.

    Args:
        decays: decay records of the window, by lane or by channel.
        values: of each product of 16 rows, and each 16 records, the words of this lane's channels of its four.
        scales: of this lane's rows of a read copy whose codes have any; without those of blocks that are copied
            (`DraftShape.scale_bytes`).
    """

    decays: LaneRecords | ChannelRecords
    values: list[list[list[list[Uint32]]]]
    scales: CodeScales | None

    @classmethod
    def start(cls, cta: Cta, cursor: RowCursor) -> WindowLoads:
        place, key, scales = cta.place, cta.key, None
        decays: LaneRecords | ChannelRecords
        if cta.tile.channels:
            decays = ChannelRecords.load(cta.tensors.pool.decay, key.decay_dtype, cta.tile, place, cursor)
        else:
            decays = LaneRecords.load(cta.tensors.pool, key, place, cursor)
        if key.read_dtype in SCALED and not cta.operands:
            runs, places = code_runs(cta, place.head), CopyPlaces.of(cta.tensors.pool.copy, cursor.slot)
            scales = CodeScales.load(CopyShape.of(key), cta.tile, places, runs, cta.channels.run, place.lane % 4)
            if not cta.shape.scale_bytes:
                scales = load_blocks(cta, scales, place.head, load_words, places.scale)
        groups = [load_values(cta, cursor, first) for first in range(0, cta.shape.window_columns, ROW_BLOCK)]
        return cls(decays, [list(of_product) for of_product in zip(*groups, strict=True)], scales)


@dataclass(frozen=True)
class Draft:
    """What the lanes know of the tokens once their gates are computed.

    Args:
        gate: of this lane's token.
        decays: see there.
        factors: what `ProbeParts.factors` found.
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
