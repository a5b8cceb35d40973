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

from cutlass import Float32, Int32, Uint32

from cute_kernels.configs import DraftShape, Tile
from cute_kernels.primitives.arithmetic import exp2, select
from cute_kernels.primitives.memory import load_shared, load_shared_floats, store_shared, store_shared_if
from cute_kernels.primitives.mma import Fragment, float_fragment, fragment, multiply
from cute_kernels.primitives.reduce import broadcast
from cute_kernels.replay.window import load_row_words

QUAD = (1, 2)  # masks of the lanes that share a vector


def load_block(source: Any, valid: Any, lane: Any, tile: Tile) -> list[Uint32]:
    """This lane's elements of a key or query whose first byte is at `source`, as `read_state` takes those of a row."""
    vector_bytes = tile.vector * tile.activation_size
    start = source + lane % 4 * vector_bytes
    chunks = tile.d_state // (4 * tile.vector)
    return [w for c in range(chunks) for w in load_row_words(valid, start + c * 4 * vector_bytes, vector_bytes // 4)]


def read_state(
    tile: Tile, dtype: str, state: Any, first_row: Any, probes: list[Fragment], lane: Any, terms: int
) -> list[list[Float32]]:
    """Products of 16 rows of the tile at shared address `state` with each block of probes."""
    row_bytes = tile.d_state * tile.state_size
    base = state + (first_row + lane // 4 * 2) * row_bytes + lane % 4 * 16
    sums: list[list[Any]] = [[Float32(0.0)] * 4 for _ in probes]
    per_chunk = tile.vector // 4  # times 16 of K
    for c in range(tile.d_state // (4 * tile.vector)):
        upper, lower = (fragment(load_shared(base, 4, offset=i * row_bytes + c * 64), dtype, terms) for i in (0, 1))
        for b, probe in enumerate(probes):
            sums[b] = multiply(sums[b], upper, lower, probe[c * per_chunk : (c + 1) * per_chunk], terms)
    return sums


@dataclass(frozen=True)
class DraftDecays:
    """Decays as the lanes of every warp hold them.

    Args:
        log2: lane s has the base-2 log-decay of token s; 0 beyond the last token.
        since_window: lane s has how much the state has decayed by token s since the end of the window.
        weights: word w of lane j has the weight of record j + 32 w at the end of the window.
        window: decay of the whole window.
        token_weight: lane s has the weight of token s beside the decay after it.
    """

    log2: Float32
    since_window: Float32
    weights: list[Float32]
    window: Float32
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
        row = block * 8 + self.lane // 4
        where = self.base + (row * self.shape.score_stride + column) * 4
        store_shared(where, [x.bitcast(Uint32) for x in pair])

    def store_window(
        self, blocks: list[int], raw: list[Any], step: int, factors: list[Any], decays: DraftDecays, warp: Any
    ) -> None:
        """Weigh and store the scores of the window's records 8 n + 2 t and 8 n + 2 t + 1, with n = warp + 4 `step`.

        Args:
            blocks: the probe blocks of `raw`, one or two, each with a pair of scores.
            factors: of this lane's probe of each block.
        """
        if step >= len(decays.weights):
            return
        first = warp * 8 + self.lane % 4 * 2
        columns = [broadcast(decays.weights[step], first + e) for e in (0, 1)]
        for i, block in enumerate(blocks):
            token = block % self.shape.token_blocks * 8 + self.lane // 4
            row = factors[i] * broadcast(decays.since_window, token)
            pair = [raw[2 * i + e] * (row * columns[e]) for e in (0, 1)]
            self.store_pair(block, step * 32 + first, pair)

    def _decays_of(self, block: Any) -> Int32:
        """Where the warp that scores a block of tokens keeps the decays between tokens."""
        return self.base + self.shape.scores_bytes + block * (self.shape.tokens * self.shape.tokens * 4)

    def store_decays(self, block: Any, decays: DraftDecays) -> None:
        """How much each token has decayed by each later one: float [later][earlier], 0 above the diagonal, 1 on it."""
        later, tokens = Float32(0.0), self.shape.tokens
        for earlier in range(tokens - 1, -1, -1):
            inside = self.lane >= earlier
            value = select(inside, exp2(later), Float32(0.0))
            where = self._decays_of(block) + (self.lane * tokens + earlier) * 4
            store_shared_if(Int32(self.lane < tokens), where, [value.bitcast(Uint32)])
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
                inside = select(earlier < shape.tokens, earlier, Int32(0))
                where = self._decays_of(token_block) + (last * shape.tokens + inside) * 4
                value = raw[2 * i + e] * (factors[i] * columns[e]) * load_shared_floats(where, 1, 4)[0]
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
