"""Several tokens of a row at once: all of their outputs from the checkpoint, the records and each other, no state.

For token s with probe x (its query; under a delta rule its key too), G_s the log-decay of the tokens up to s, H that of
the window and H_j what follows record j in it,

    r(x) = S x e^(H + G_s) + sum_j u_j <k_j, x> e^(H_j + G_s) + sum_(i <= s) u_i <k_i, x> e^(g_(i+1) + .. + g_s)

The products with S, the scores <k, x> and the sums over the window run on tensor cores; a delta rule's u, which depend
on each other, are solved for token after token in float32. Lane 4 g + t of a warp has the probes g of each block, and
of a product of 16 rows of the state rows 2 g and 2 g + 1 for tokens 2 t and 2 t + 1 of each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.configs import WARP, Tile
from cute_kernels.draft_shape import DraftShape
from cute_kernels.primitives.arithmetic import exp2, inverse_power, select
from cute_kernels.primitives.convert import unpack
from cute_kernels.primitives.memory import (
    load_shared_floats,
    load_shared_words,
    load_words,
    store_shared,
    store_shared_half_if,
    store_shared_if,
)
from cute_kernels.primitives.mma import (
    Fragment,
    Product,
    bf16_terms,
    f16_terms,
    float_fragment,
    fragment,
    mma_bf16,
    mma_f16,
    mma_tf32,
    multiply,
    packed_fragment,
    tf32_words,
)
from cute_kernels.primitives.reduce import broadcast, transposed_place, transposing_sum
from cute_kernels.replay.codes import (
    PROBE_SCALE,
    SUM_POWER,
    TWO_40,
    CodeScales,
    code_fragment,
    halves,
    ordered,
    ordered_pairs,
    ordered_place,
    scales_probes,
    times_constant,
)
from cute_kernels.replay.window import load_row_words

LANES = (16, 8, 4, 2, 1)
SUMMED = 4  # sums that a warp makes at once, at most 32: more are hardly fewer instructions each, and take registers
QUAD = (1, 2)  # masks of the lanes that share a vector


def load_block(source: Any, valid: Any, lane: Any, tile: Tile) -> list[Uint32]:
    """This lane's elements of a key or query whose first byte is at `source`, as `read_state` takes those of a row."""
    vector_bytes = tile.read_vector * tile.activation_size
    start = source + lane % 4 * vector_bytes
    chunks = tile.d_state // (4 * tile.read_vector)
    return [w for c in range(chunks) for w in load_row_words(valid, start + c * 4 * vector_bytes, vector_bytes // 4)]


def chunk_floats(tile: Tile, base: Any, row: Any, chunk: int, lane: Any) -> list[Float32]:
    """Of a row of decays by channel in shared memory, those of this lane's elements in a chunk."""
    where = base + row * (tile.d_state * 4) + lane % 4 * (tile.read_vector * 4)
    return [
        x
        for first in range(0, tile.read_vector, 4)
        for x in load_shared_floats(where, 4, 16, offset=(chunk * 4 * tile.read_vector + first) * 4)
    ]


@dataclass(frozen=True)
class Vectors:
    """Blocks of queries or keys as a lane has them, for products with the state or with each other.

    A chunk is 4 vectors of 16 bytes of the state, one a lane of the four that share a vector. Its elements come in the
    order in which those of the state do (`codes.ordered`).

    Args:
        tile: says how `load_block` took them.
        dtype: of the packed words.
        words: of each block, what `load_block` loaded.
        decay_rows: where channels decay by themselves: for each block the row of decays in shared memory
            (`replay.channels`) that its vector is multiplied by.
        decays: shared address of these rows.
    """

    tile: Tile
    dtype: str
    words: list[list[Uint32]]
    decay_rows: list[Any]
    decays: Int32
    lane: Int32

    @property
    def blocks(self) -> int:
        return len(self.words)

    @property
    def chunks(self) -> int:
        return self.tile.d_state // (4 * self.tile.read_vector)

    def chunk_words(self, block: int, chunk: int) -> list[Uint32]:
        """The packed words of one chunk of a block."""
        size = len(self.words[block]) // self.chunks
        return self.words[block][chunk * size : (chunk + 1) * size]

    def chunk_floats(self, block: int, chunk: int) -> list[Float32]:
        """One chunk of a block, with its decays."""
        values = unpack(self.chunk_words(block, chunk), self.dtype)
        if not self.tile.channels:
            return values
        decays = chunk_floats(self.tile, self.decays, self.decay_rows[block], chunk, self.lane)
        return [x * y for x, y in zip(values, decays, strict=True)]

    def tf32_fragment(self, block: int, chunk: int, *, cut: bool = False) -> Fragment:
        """One chunk of a block; `cut`: of floats that have not been multiplied by `UNCUT` yet."""
        values = self.chunk_floats(block, chunk)
        return packed_fragment(tf32_words(values) if cut else [x.bitcast(Uint32) for x in values])

    def f16_fragment(self, block: int, chunk: int, terms: int, scale: Any) -> Fragment:
        """One chunk of a block as float16, times `scale` but where it came as such."""
        words = self.chunk_words(block, chunk)
        if self.dtype == "float16":
            return packed_fragment(words)
        values = [x * scale for x in unpack(words, self.dtype)]
        return float_fragment(values, 1 if self.dtype == "bfloat16" else terms, f16_terms)

    def fragment(self, block: int, chunk: int, terms: int, bits: int = 16, *, scaled: bool = False) -> Fragment:
        """One chunk of a block, in the order of a state of so many bits an element, times `PROBE_SCALE` if asked."""
        if self.dtype == "bfloat16" and not self.tile.channels:
            pairs = ordered_pairs(self.chunk_words(block, chunk), bits)
            pairs = [times_constant(x, TWO_40) for x in pairs] if scaled else pairs
            return fragment(pairs, self.dtype, terms)
        values = ordered(self.chunk_floats(block, chunk), bits)
        return float_fragment([x * Float32(PROBE_SCALE) for x in values] if scaled else values, terms)


@dataclass(frozen=True)
class StagedVectors:
    """Blocks of queries and keys in shared memory, bfloat16 [term][vector][K] or TF32 [vector][K], as they meet the
    state.

    Args:
        base: shared address.
        blocks: blocks of `of_block` vectors, 8 or of one token 1, which every lane has a part of.
    """

    base: Int32
    tile: Tile
    blocks: int
    of_block: int
    lane: Int32
    tf32: bool

    def store(self, vector: int, channel: Any, inside: Any, pair: list[Any], apart: int, terms: int) -> None:
        """One channel of two vectors, `apart` vectors from each other."""
        if self.tf32:
            for i, value in enumerate(pair):
                row = vector + i * apart
                where = self.base + row * self.tile.staged_tf32_bytes + channel * 4
                store_shared_if(inside, where, [value.bitcast(Uint32)])
            return
        for term, word in enumerate(bf16_terms(pair[0], pair[1], terms)):
            row = term * self.blocks * self.of_block + vector
            where = self.base + row * self.tile.staged_vector_bytes + ordered_place(channel, self.tile.read_bits) * 2
            store_shared_half_if(inside, where, word)
            store_shared_half_if(inside, where + apart * self.tile.staged_vector_bytes, word >> 16)

    def tf32_fragment(self, block: int, chunk: int) -> Fragment:
        """One chunk of a block."""
        vector = self.tile.read_vector
        where = self.base + (block * 8 + self.lane // 4) * self.tile.staged_tf32_bytes + self.lane % 4 * (vector * 4)
        return packed_fragment(load_shared_words(where, vector, 16, offset=chunk * 16 * vector))

    def fragment(self, block: int, chunk: int, terms: int, bits: int, *, scaled: bool) -> Fragment:
        """One chunk of a block, as `Vectors.fragment`; they are stored in the state's order and scaled."""
        vector = self.tile.read_vector
        row = block * 8 + self.lane // 4 if self.of_block == 8 else block
        where = self.base + row * self.tile.staged_vector_bytes + self.lane % 4 * (vector * 2)
        step = self.blocks * self.of_block * self.tile.staged_vector_bytes
        skips = [term * step + chunk * vector * 8 for term in range(terms)]
        words = [load_shared_words(where, vector // 2, 2 * vector, offset=skip) for skip in skips]
        return [[(of_term[i], of_term[i + 1]) for of_term in words] for i in range(0, vector // 2, 2)]


def score_block(
    probes: Vectors, blocks: list[int], keys: Vectors, block: int, terms: int, zero: Any, *, tf32: bool
) -> list[Float32]:
    """Products of one or two blocks of probes with a block of keys, as `multiply` returns them; as TF32 if asked."""
    raw = [zero] * 4
    # Two terms are all of a float16, so no product of theirs is left out.
    kept = max(terms, 3) if probes.dtype == "float16" and not probes.tile.channels else terms
    for c in range(probes.chunks):
        if tf32:
            left, right = [probes.tf32_fragment(b, c) for b in blocks], keys.tf32_fragment(block, c, cut=True)
        else:
            left, right = [probes.fragment(b, c, terms) for b in blocks], keys.fragment(block, c, terms)
        lower = left[1] if len(left) == 2 else None
        raw = multiply(raw, left[0], lower, right, kept, mma_tf32 if tf32 else mma_bf16)
    return raw


@dataclass(frozen=True)
class StateRows:
    """The rows of a tile that a lane multiplies, and what their codes are times.

    Args:
        dtype: of the tile, a checkpoint's or a copy's.
        state: shared address of the tile, or where `direct` its global one.
        pairs: for each product of 16 rows, this lane's first of two, as (row, rows ahead of it).
        scales: of a copy whose codes have any.
    """

    dtype: str
    tile: Tile
    state: Any
    pairs: list[tuple[Any, int]]
    scales: CodeScales | None
    lane: Int32
    direct: bool = False

    def load(self, offset: Any, size: int, skip: int) -> list[Uint32]:
        """The words of so many bytes of the tile, `skip` behind `offset`."""
        if not self.direct:
            return load_shared_words(self.state + offset, size // 4, 16, offset=skip)
        return [w for i in range(0, size, 16) for w in load_words(self.state + Int64(offset), 4, offset=skip + i)]

    def fragments(self, pair: int, chunk: int, probes: StateProbes, *, scaled: bool = True) -> list[Fragment]:
        """Both rows of a pair, one chunk of K, as they meet `probes`; codes of nvfp4 times the scales of their blocks
        if asked."""
        row_bytes, access = (n * self.tile.read_bits // 8 for n in (self.tile.d_state, self.tile.read_vector))
        row, ahead = self.pairs[pair]
        first, made = row * row_bytes + self.lane % 4 * access, []
        for i in (0, 1):
            words = self.load(first, access, (ahead + i) * row_bytes + chunk * 4 * access)
            if probes.tf32:
                made.append(packed_fragment(tf32_words([word.bitcast(Float32) for word in words])))
            elif probes.scales:
                made.append(packed_fragment(halves(words, self.dtype)))
            elif self.scales is None:
                made.append(fragment(words, self.dtype, probes.terms))
            else:
                factors = self.scales.factors(2 * pair + i, chunk) if scaled else []
                made.append(code_fragment(self.dtype, words, factors))
        return made

    def products(self, probes: StateProbes) -> list[list[list[Float32]]]:
        """For each pair of rows their products with each block of probes, as `multiply` returns them."""
        sums = [[[Float32(0.0)] * 4 for _ in range(probes.blocks)] for _ in self.pairs]
        for c in range(probes.chunks):
            rows = [self.fragments(pair, c, probes) for pair in range(len(self.pairs))]
            for b in range(probes.blocks):
                right = probes.fragment(b, c)
                for of_pair, (upper, lower) in zip(sums, rows, strict=True):
                    of_pair[b] = multiply(of_pair[b], upper, lower, right, probes.terms, probes.product)
        for b, inverses in enumerate(probes.column_inverses()):
            for of_pair in sums:
                of_pair[b] = [x * inverses[j % 2] for j, x in enumerate(of_pair[b])]
        if self.scales is None:
            return sums
        power = 0 if probes.scales else SUM_POWER.get(self.dtype, 0)
        return [self.scales.scaled(i, of_pair, power) for i, of_pair in enumerate(sums)]

    def lone_products(self, probes: StateProbes) -> list[list[Float32]]:
        """For each of one token's probes its products with this lane's rows: the four lanes of a row have a part each.

        A lane's part of a row meets the probe in two columns of its own, one for each of two nvfp4 blocks, so the
        scales of blocks are factors of sums and not of codes.
        """
        blocks, power = self.dtype == "nvfp4", 80 if probes.times_power else 0
        sums: list[list[Float32]] = [[] for _ in range(probes.blocks)]
        for pair in range(len(self.pairs)):
            found = [[Float32(0.0)] * 2 for _ in sums]
            raw = [[Float32(0.0)] * 4 for _ in sums]
            for c in range(probes.chunks):
                upper, lower = self.fragments(pair, c, probes, scaled=not blocks)
                for p in range(probes.blocks):
                    start = [Float32(0.0)] * 4 if blocks else raw[p]
                    raw[p] = multiply(start, upper, lower, probes.fragment(p, c), probes.terms, probes.product)
                    if blocks and self.scales is not None:
                        for i in (0, 1):
                            first, second = self.scales.block_scales(2 * pair + i, c)
                            found[p][i] = found[p][i] + raw[p][2 * i] * first + raw[p][2 * i + 1] * second
            for p, of_probe in enumerate(sums):
                of_pair = found[p] if blocks else [raw[p][0], raw[p][2]]
                if probes.scales:
                    of_pair = [x * inverse_power(probes.scales[p]) for x in of_pair]
                if self.scales is not None and self.scales.rows:
                    of_pair = [x * self.scales.of_sums(2 * pair + i, power) for i, x in enumerate(of_pair)]
                of_probe += of_pair
        return sums


@dataclass(frozen=True)
class StateProbes:
    """The probes as a state meets them.

    Args:
        dtype: of the state.
        lone: of one token, for `StateRows.lone_products`: every lane has its part of the vectors.
        scales: where they meet it as float16, the power of two that this lane's vector of each block is times; else
            empty.
    """

    vectors: Vectors | StagedVectors
    dtype: str
    terms: int
    lone: bool
    tf32: bool
    scales: list[Float32]

    @property
    def product(self) -> Product:
        return mma_tf32 if self.tf32 else mma_f16 if self.scales else mma_bf16

    @property
    def times_power(self) -> bool:
        """Whether they are times `codes.PROBE_SCALE`."""
        return not self.scales and scales_probes(self.dtype, lone=self.lone)

    def column_inverses(self) -> list[list[Float32]]:
        """Of each block, what takes `scales` out of this lane's two columns of a product; none where there are none."""
        lane = self.vectors.lane
        inverses = [inverse_power(scale) for scale in self.scales]
        return [[broadcast(x, lane % 4 * 8 + 4 * e) for e in (0, 1)] for x in inverses]

    @property
    def blocks(self) -> int:
        return self.vectors.blocks

    @property
    def chunks(self) -> int:
        return self.vectors.tile.d_state // (4 * self.vectors.tile.read_vector)

    def fragment(self, block: int, chunk: int) -> Fragment:
        """One chunk of a block."""
        vectors = self.vectors
        if self.tf32:
            return vectors.tf32_fragment(block, chunk)
        if self.scales and isinstance(vectors, Vectors):
            words = vectors.f16_fragment(block, chunk, self.terms, self.scales[block])
        else:
            words = vectors.fragment(block, chunk, self.terms, vectors.tile.read_bits, scaled=self.times_power)
        if not self.lone:
            return words
        own = [vectors.lane // 4 == vectors.lane % 4 * 2 + j for j in (0, 1)]
        return [_kept(own[k // 4 if self.dtype == "nvfp4" else 0], x) for k, x in enumerate(words)]


def _kept(condition: Any, terms: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Words of a fragment where the condition holds, else zeros."""
    return [(select(condition, x, Uint32(0)), select(condition, y, Uint32(0))) for x, y in terms]


@dataclass(frozen=True)
class DraftDecays:
    """Decays as the lanes of every warp hold them.

    Args:
        log2: lane s has the base-2 log-decay of token s; 0 beyond the last token.
        since_window: lane s has how much the state has decayed by token s since the end of the window.
        records: of the window.
        token_weight: lane s has the weight of token s beside the decay after it.
    """

    log2: Float32
    since_window: Float32
    records: Any
    token_weight: Float32


@dataclass(frozen=True)
class Scores:
    """The scores of a CTA in shared memory, float [probe][column] (`DraftShape`), and the decays behind them.

    Args:
        base: shared address.
        lane: of the thread that stores or loads.
    """

    base: Int32
    shape: DraftShape
    lane: Int32

    def store_pair(self, block: int, column: Any, pair: list[Any]) -> None:
        """Two neighbouring scores of this lane's probe of a block."""
        store_shared(self._pair_at(block, column), [x.bitcast(Uint32) for x in pair])

    def load_pairs(self, blocks: list[int], column: Any) -> list[Float32]:
        """What `store_pair` stored of one or two blocks."""
        return [x for block in blocks for x in load_shared_floats(self._pair_at(block, column), 2, 8)]

    def _pair_at(self, block: int, column: Any) -> Int32:
        return self.base + ((block * 8 + self.lane // 4) * self.shape.score_stride + column) * 4

    def store_window(
        self, blocks: list[int], raw: list[Any], step: int, factors: list[Any], decays: DraftDecays, warp: Any
    ) -> None:
        """Weigh and store the scores of the window's records 8 n + 2 t and the next, with n = warp + warps x `step`.

        Args:
            blocks: the probe blocks of `raw`, one or two, each with a pair of scores.
            factors: of this lane's probe of each block.
        """
        weights, word = decays.records.weights, step * self.shape.warps * 8 // WARP
        if word >= len(weights):
            return
        weight = weights[word]
        if self.shape.warps * 8 > WARP and word + 1 < len(weights):
            weight = select(warp >= WARP // 8, weights[word + 1], weight)
        first = (warp + self.shape.warps * step) * 8 + self.lane % 4 * 2
        columns = [broadcast(weight, first % WARP + e) for e in (0, 1)]
        for i, block in enumerate(blocks):
            token = block % self.shape.token_blocks * 8 + self.lane // 4
            row = factors[i] * broadcast(decays.since_window, token)
            pair = [raw[2 * i + e] * (row * columns[e]) for e in (0, 1)]
            self.store_pair(block, first, pair)

    def _decays_of(self, block: Any) -> Int32:
        """Where the warp that scores a block of tokens keeps the decays between tokens."""
        return self.base + self.shape.scores_bytes + block * (self.shape.tokens * self.shape.block_tokens * 4)

    def _sums_of(self, warp: Any) -> Int32:
        """Where a warp keeps its sums of the tokens' scores: by token, of its query with each token up to it, then of
        its key with each before it."""
        return self.base + self.shape.scores_bytes + warp * (self.shape.tokens**2 * 4)

    def store_sums(self, values: list[Any], end: int, warp: Any, *, last: bool) -> None:
        """Sum scores over the lanes of a warp, as many at once as pay, and store them; takes them from `values`.

        Args:
            values: the last ones before number `end` of all that the warp sums; what is left of them is to come again.
            last: there are no more.
        """
        while len(values) >= SUMMED or (last and values):
            size = min(SUMMED, 1 << len(values).bit_length() - 1)
            (value,) = transposing_sum(values[:size], self.lane, LANES)
            index, _, owner = transposed_place(size, self.lane, LANES)
            where = self._sums_of(warp) + (index + (end - len(values))) * 4
            store_shared_if(Int32(owner), where, [value.bitcast(Uint32)])
            del values[:size]

    def load_sums(self, blocks: list[int], token_block: Any) -> list[Float32]:
        """Scores of tokens with tokens that all warps have summed, in the places of a product; any score where there is
        none."""
        raw, last = [], self.shape.tokens - 1
        for block in blocks:
            token = block % self.shape.token_blocks * 8 + self.lane // 4
            token = select(token < last, token, Int32(last))
            probe = block // self.shape.token_blocks
            row, latest = token * token + probe * (token + 1), token - probe
            for e in (0, 1):
                earlier = token_block * 8 + self.lane % 4 * 2 + e
                column = row + select(earlier < latest, earlier, latest)
                parts = [
                    load_shared_floats(self._sums_of(Int32(warp)) + column * 4, 1, 4)[0]
                    for warp in range(self.shape.warps)
                ]
                while len(parts) > 1:
                    parts = [x + y for x, y in zip(parts[::2], parts[1::2], strict=True)]
                raw += parts
        return raw

    def store_decays(self, block: Any, decays: DraftDecays) -> None:
        """How much each token of a block has decayed by each later one: float [later][earlier], 0 above the diagonal, 1
        on it."""
        later, tokens = Float32(0.0), self.shape.tokens
        for earlier in range(tokens - 1, -1, -1):
            inside = self.lane >= earlier
            value = select(inside, exp2(later), Float32(0.0))
            where = self._decays_of(block) + (self.lane * self.shape.block_tokens + earlier % 8) * 4
            mine = Int32(self.lane < tokens) * Int32(block == earlier // 8)
            store_shared_if(mine, where, [value.bitcast(Uint32)])
            later = later + select(inside, broadcast(decays.log2, earlier), Float32(0.0))

    def store_tokens(
        self, token_block: Any, blocks: list[int], raw: list[Any], factors: list[Any], columns: list[Any], skip: Any
    ) -> None:
        """Weigh and store the scores of this lane's two tokens of a block, once `store_decays` is done for it.

        Args:
            blocks, raw, factors: as for `store_window`.
            columns: weights of the two tokens.
            skip: added to a query's score of its own token.
        """
        shape, first = self.shape, token_block * 8 + self.lane % 4 * 2
        for i, block in enumerate(blocks):
            token = block % shape.token_blocks * 8 + self.lane // 4
            last = select(token < shape.tokens, token, Int32(shape.tokens - 1))
            pair = []
            for e in (0, 1):
                earlier = first + e
                inside = select(earlier < shape.tokens, earlier - token_block * 8, Int32(0))
                value = raw[2 * i + e] * (factors[i] * columns[e])
                if not shape.channels:
                    where = self._decays_of(token_block) + (last * shape.block_tokens + inside) * 4
                    value = value * load_shared_floats(where, 1, 4)[0]
                if block < shape.token_blocks:
                    own = select(earlier == token, skip, Float32(0.0))
                    pair.append(select(earlier <= token, value, Float32(0.0)) + own)
                else:
                    pair.append(select(earlier < token, value, Float32(0.0)))
            self.store_pair(block, shape.window_columns + first, pair)

    def load(self, block: int, column: int, terms: int, *, half: bool = False) -> Fragment:
        """16 scores of each probe of a block from `column` on, or 8 and zeros, as the right side of a product."""
        row = block * 8 + self.lane // 4
        where = self.base + (row * self.shape.score_stride + column + self.lane % 4 * 2) * 4
        pairs = [load_shared_floats(where, 2, 8, offset=skip) for skip in ((0,) if half else (0, 32))]
        values = [x for pair in pairs for x in pair]
        return float_fragment([*values, *[Float32(0.0)] * (4 - len(values))], terms)

    def lone_weights(self, first: int, weights: list[Any], terms: int) -> tuple[Uint32, Uint32]:
        """The scores of one token's probes with 16 records from `first` on, times `weights` of `LaneDecays`, as the
        right side of a product: each probe has `DraftShape.lone_columns`, its terms in the first of them."""
        width = self.shape.lone_columns
        probe, term = self.lane // 4 // width, self.lane // 4 % width
        row = select(probe < self.shape.probes, probe * 8, Int32(0))
        where = self.base + (row * self.shape.score_stride + self.lane % 4 * 2 + first) * 4
        values = [x for skip in (0, 32) for x in load_shared_floats(where, 2, 8, offset=skip)]
        lanes = [self.lane % 4 * 2 + (first % WARP + e) for e in (0, 1, 8, 9)]
        values = [x * broadcast(weights[first // WARP], lane) for x, lane in zip(values, lanes, strict=True)]
        words = (Uint32(0), Uint32(0))
        for i, found in enumerate(zip(*(bf16_terms(values[j], values[j + 1], terms) for j in (0, 2)), strict=True)):
            mine = (term == i) & (probe < self.shape.probes)
            words = (select(mine, found[0], words[0]), select(mine, found[1], words[1]))
        return words

    def lone_sums(self, probe: int, sums: list[Any]) -> list[Float32]:
        """Of products with `lone_weights`, this lane's part of those of a probe: two rows."""
        pairs = [sums[0] + sums[1], sums[2] + sums[3]]
        if self.shape.probes == 1:
            return pairs
        mine = self.lane % 4 // (self.shape.lone_columns // 2) == probe
        return [select(mine, x, Float32(0.0)) for x in pairs]

    def solve(self, right: list[list[Any]], readouts: list[list[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
        """The records of a delta rule's tokens, one after the other, and the outputs.

        The scores of keys are those times the token's strength.

        Args:
            right: for each block of tokens (channel, token), (channel, next token), (next channel, token), ..: strength
                times what the value lacks of the window's and the state's answer to the key.
            readouts: the same of that answer to the query.

        Returns:
            Records and outputs in the same order.
        """
        blocks, row_bytes = self.shape.token_blocks, self.shape.score_stride * 4
        places = [self.base + (b * 8 + self.lane % 4 * 2) * row_bytes for b in range(2 * blocks)]
        for s in range(self.shape.tokens):
            owner, e = self.lane // 4 * 4 + s % 8 // 2, s % 2
            found = [broadcast(right[s // 8][2 * c + e], owner) for c in (0, 1)]
            for b in range(s // 8, blocks):
                for later in (0, 1):
                    skip = later * row_bytes + (self.shape.window_columns + s) * 4
                    query, key = (load_shared_floats(places[i], 1, 4, offset=skip)[0] for i in (b, blocks + b))
                    for c in (0, 1):
                        i = 2 * c + later
                        readouts[b][i] = readouts[b][i] + query * found[c]
                        right[b][i] = right[b][i] - key * found[c]
        return right, readouts
