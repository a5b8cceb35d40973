"""Folding the committed records into the checkpoint: state <- decay * state + sum over j of w_j value_j key_j^T.

The sum is a product on tensor cores: a warp takes 16 rows of the tile, and the weighted values of 16 records at a time
meet their keys, each factor a sum of as many bfloat16 terms as hold its bits; float32 sums begin at zero, and are added
to the decayed state in float32. FMAs took 899 us for 32 records of Super at batch 256, this takes 755, where memory
takes 573 (H200, 2026-11-30). An infinite value becomes NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_kernels.configs import LANES_PER_RECORD, ROW_BLOCK, WARP, Tile
from cute_kernels.primitives.arithmetic import select
from cute_kernels.primitives.convert import bytes_of, pack, unpack
from cute_kernels.primitives.memory import (
    EVICT_LAST,
    load_matrices,
    load_shared,
    load_shared_floats,
    load_words,
    store_shared,
    store_shared_if,
    store_words,
)
from cute_kernels.primitives.mma import Fragment, float_fragment, fragment, mma_bf16
from cute_kernels.primitives.reduce import transposed_place, transposing_sum
from cute_kernels.replay.channels import column_decays
from cute_kernels.replay.noise import Noise
from cute_kernels.replay.window import LoadedRecord, Place, load_row_words

EXACT_TERMS = {"bfloat16": 1, "float16": 2, "float32": 3}  # of bfloat16, which hold all bits of a number
MOST_TERMS = 3  # products of terms whose places add up to so many are below the others' rounding
ROW_LANES = (2, 1)  # masks of the lanes that share a row
# Which of 16 records a lane has, behind its own: two of the first eight, then two of the others.
OWN_RECORDS = (0, 4, 8, 12)


@dataclass(frozen=True)
class FoldStatics:
    """What a fold knows while it is traced.

    Args:
        staged: whether the tile is in shared memory; else it is read where it is written.
        parts: in which a tile is folded.
    """

    tile: Tile
    state_dtype: str
    key_dtype: str
    value_dtype: str
    staged: bool = True
    parts: int = 1

    @classmethod
    def copy_parts(cls, tile: Tile) -> int:
        """Parts of a fold whose copy is made part by part: 16 rows a warp, where the rows make up such."""
        rows = ROW_BLOCK * tile.warps
        return tile.rows // rows if tile.rows % rows == 0 else 1

    @property
    def blocks(self) -> int:
        """Blocks of 16 rows of a part."""
        return self.tile.rows // ROW_BLOCK // self.parts

    @property
    def turns(self) -> int:
        """Blocks of a part that a warp folds, at most."""
        return -(-self.blocks // self.tile.warps)


@dataclass(frozen=True)
class FoldStage:
    """Where the records of a fold lie in shared memory, and which part of the tile a thread folds.

    Keys are [record][K], float and scaled where channels decay by themselves; words of two have the order in which
    `load_keys` loads them, with the record's weight behind them. Values are [record][row] as the ring has them, groups
    of 8 rows turned by `tile.value_turns`. They are of all rows, or of one of `tile.value_parts` at a time.

    Args:
        keys, values: byte addresses in shared memory.
        products: where the new rows' products with the probes go (`product_at`).
        warp: of this thread.
        row, column: of this thread's lane: it has rows `row` and `row` + 8 of a block, and of every
            `tile.fold_lanes` vectors of a row vector `column`.
        lifted: what `lifted_rows` has taken, if the records are staged over that.
    """

    keys: Int32
    values: Int32
    products: Int32
    warp: Int32
    row: Int32
    column: Int32
    lifted: cute.Tensor | None = None

    @classmethod
    def of(cls, tile: Tile, state: Any, staging: Any, place: Place) -> FoldStage:
        """The stage of a thread of the CTA, with its records at shared address `staging` and the tile at `state`."""
        values = staging + tile.values_at
        products = state if tile.products_in_rows else values + tile.padded_window * tile.value_stride
        column = place.lane % tile.fold_lanes
        return cls(staging, values, products, place.warp, place.lane // tile.fold_lanes, column)


def stage_record(
    stage: FoldStage, statics: FoldStatics, record: Any, lane8: Any, loaded: LoadedRecord, weight: Any
) -> None:
    """Write one record, as the 8 lanes that share it have loaded it, with its weight, if it is one of the padded
    window; where values are staged in parts, without them."""
    tile = statics.tile
    kept = True if tile.whole_passes else Int32(record < tile.padded_window)
    where = stage.keys + record * tile.key_stride
    if not tile.channels:
        leads = Int32(lane8 == 0)
        store_shared_if(leads if kept is True else leads * kept, where + weight_offset(tile), [weight.bitcast(Uint32)])
    for c, words in enumerate(loaded.key):
        vector = c * LANES_PER_RECORD + lane8
        if tile.key_size == 4:
            for first in range(0, len(words), 4):
                _store(kept, where + (vector * tile.vector + first) * 4, words[first : first + 4])
        else:
            place = vector // tile.fold_lanes * tile.vector * 8 + vector % tile.fold_lanes * 4
            for j, word in enumerate(words):  # a matrix of 8 columns after the other
                _store(kept, where + place + j * 16, [word])
    if tile.value_parts == 1:
        stage_values(stage, statics, record, lane8, loaded, 0)


def weight_offset(tile: Tile) -> int:
    """Where behind the beginning of a staged key its record's weight is."""
    return tile.d_state * tile.key_size


def stage_values(
    stage: FoldStage, statics: FoldStatics, record: Any, lane8: Any, loaded: LoadedRecord, part: int
) -> None:
    """Write the values of one of `tile.value_parts` likewise."""
    tile = statics.tile
    where = stage.values + record * tile.value_stride
    vectors = len(loaded.values) // tile.value_parts
    for c, words in enumerate(loaded.values[part * vectors : (part + 1) * vectors]):
        vector = c * LANES_PER_RECORD + lane8
        inside: Any = True if (c + 1) * LANES_PER_RECORD <= tile.value_vectors else Int32(vector < tile.value_vectors)
        if not tile.whole_passes:
            inside = Int32(record < tile.padded_window) * Int32(inside)
        row = (vector * tile.value_vector) ^ (record % tile.value_turns * 8)
        _store(inside, where + row * tile.value_size, words)


def _store(predicate: Any, where: Any, words: list[Any]) -> None:
    if predicate is True:
        store_shared(where, words)
    else:
        store_shared_if(predicate, where, words)


def load_rows(stage: FoldStage, statics: FoldStatics, first: Any, block: Any) -> list[tuple[Uint32, ...]]:
    """The left side of a product: by term, values of 16 records from `first` on, of the 16 rows of a staged block,
    times their weights."""
    tile, dtype, size = statics.tile, statics.value_dtype, statics.tile.value_size
    found, weights = [], []
    if not tile.channels:
        where = stage.keys + (first + stage.column) * tile.key_stride + weight_offset(tile)
        for record in OWN_RECORDS:
            weights += load_shared_floats(where, 1, 4, offset=record * tile.key_stride)
    for half in (0, 1):
        row = ((block * 2 + half) ^ (stage.column % tile.value_turns)) * 8 + stage.row
        where = stage.values + (first + stage.column) * tile.value_stride + (row * size & -4)
        words = [load_shared(where, 1, offset=record * tile.value_stride)[0] for record in OWN_RECORDS]
        if size == 2:  # a word has two rows
            chosen = Uint32(0x5410) + Uint32(stage.row % 2) * Uint32(0x2222)
            words = [bytes_of(words[i], words[i + 1], chosen) for i in (0, 2)]
        if weights:
            values = [x * weight for x, weight in zip(unpack(words, dtype), weights, strict=True)]
            found += float_fragment(values, EXACT_TERMS["float32"])
        else:
            found += fragment(words, dtype, EXACT_TERMS[dtype])
    return [(a0, a1, a2, a3) for (a0, a2), (a1, a3) in zip(*found, strict=True)]


def load_keys(stage: FoldStage, statics: FoldStatics, first: Any, chunk: int) -> Fragment:
    """The right side: of each matrix of 8 columns, among `tile.fold_lanes` vectors of a row, keys of 16 records.

    Of a matrix lane 4 r + c receives the sums of columns 2 c and 2 c + 1, which are to be neighbours in vector c:
    matrix j has words j of all vectors.
    """
    tile, lane, dtype = statics.tile, stage.row * 4 + stage.column, statics.key_dtype
    if tile.key_size == 2:
        number, row = lane // 8, lane % 8
        record = first + number % 2 * 8 + row // 2 + row % 2 * 4
        where = stage.keys + record * tile.key_stride + (number // 2) * 16
        pairs = []
        for j in range(0, tile.vector // 2, 2):
            pairs += load_matrices(where, offset=(chunk * tile.vector // 2 + j) * 16)
        return fragment(pairs, dtype, EXACT_TERMS[dtype])
    column = (chunk * tile.fold_lanes + stage.row // 2) * tile.vector + stage.row % 2
    where = stage.keys + (first + stage.column) * tile.key_stride + column * 4
    turned = stage.column > 1  # two of four lanes load the next matrix first: it lies in other banks
    found: Fragment = []
    for j in range(0, tile.vector // 2, 2):
        one, other = (
            [load_shared(at, 1, offset=record * tile.key_stride + j * 8)[0] for record in OWN_RECORDS]
            for at in (where + select(turned != ahead, Int32(8), Int32(0)) for ahead in (False, True))
        )
        for a, b in ((one, other), (other, one)):
            words = [select(turned, y, x) for x, y in zip(a, b, strict=True)]
            found += fragment(words, dtype, EXACT_TERMS[dtype])
    return found


@dataclass(frozen=True)
class FoldProbes:
    """What the new rows of one token's step are multiplied by: this step's inputs as they came.

    Args:
        places: global addresses of the vectors [K].
        dtype: of their elements.
        token: shared address of the token's decays by channel, float [K], which come first; None where one is all.
    """

    places: list[Int64]
    dtype: str
    token: Any

    def load(self, tile: Tile, chunk: int, column: Any) -> list[list[Uint32]]:
        """This lane's vector of a chunk, packed, by probe."""
        first, size = (chunk * tile.fold_lanes + column) * tile.vector, tile.activation_size
        return [load_row_words(True, at + first * size, tile.vector * size // 4) for at in self.places]

    def decayed(self, tile: Tile, chunk: int, column: Any, loaded: list[list[Uint32]]) -> list[list[Float32]]:
        """What `load` has loaded, as the new rows meet it."""
        found = [unpack(words, self.dtype) for words in loaded]
        if self.token is None:
            return found
        decays = column_decays(tile, self.token, chunk, column)
        return [[x * decay for x, decay in zip(of_probe, decays, strict=True)] for of_probe in found]


@dataclass(frozen=True)
class FoldRows:
    """The two rows that a thread has of a block, 8 apart.

    Args:
        block: of the tile.
        first: the first of the two rows.
        state, checkpoint: shared and global address of this thread's first vector.
        dots: by probe, of each row this thread's part of its product.
        lifted: whether this is the block that `lifted_rows` took.
    """

    stage: FoldStage
    statics: FoldStatics
    block: Int32
    first: Int32
    state: Int32
    checkpoint: Int64
    dots: list[list[Float32]]
    lifted: bool

    @classmethod
    def of(
        cls, stage: FoldStage, statics: FoldStatics, state: Any, checkpoint: Any, block: Any, *, lifted: bool = False
    ) -> FoldRows:
        tile, first = statics.tile, block * ROW_BLOCK + stage.row
        offset = first * (tile.d_state * tile.state_size) + stage.column * 16
        dots = [[Float32(0.0)] * 2 for _ in range(tile.probes)]
        return cls(stage, statics, block, first, state + offset, checkpoint + Int64(offset), dots, lifted)

    def load(self, chunk: int) -> list[list[Uint32]]:
        """This thread's vector of both rows, packed."""
        if self.lifted and self.stage.lifted is not None:
            return [[self.stage.lifted[(2 * chunk + half) * 4 + i] for i in range(4)] for half in (0, 1)]
        skips = [self.skip(chunk, half) for half in (0, 1)]
        if self.statics.staged:
            return [load_shared(self.state, 4, offset=skip) for skip in skips]
        return [load_words(self.checkpoint, 4, offset=skip) for skip in skips]

    def skip(self, chunk: int, half: int) -> int:
        """How many bytes behind the first vector that of a chunk is, in either row."""
        tile = self.statics.tile
        return half * 8 * tile.d_state * tile.state_size + chunk * tile.fold_lanes * 16

    def write(
        self,
        chunk: int,
        sums: list[Float32],
        old: list[list[Uint32]],
        met: list[list[Float32]],
        decays: Any,
        noise: Noise | None,
    ) -> None:
        """Update a chunk of columns.

        Args:
            sums: of products with records, by matrix, row and neighbour.
            old: what `load` loaded.
            met: what the new values are multiplied by, by probe.
        """
        tile, dtype = self.statics.tile, self.statics.state_dtype
        decay = decays_of(decays, tile, chunk, self.stage.column)
        for half, words in enumerate(old):
            made = []
            for e, x in enumerate(unpack(words, dtype)):
                made.append(x * decay[e] + sums[e // 2 * 4 + half * 2 + e % 2])
            if noise is None:
                words = pack(made, dtype)
            else:
                words = noise.rounded(made, dtype, self.first + half * 8, chunk * tile.fold_lanes + self.stage.column)
            store_words(self.checkpoint, words, hint=EVICT_LAST, offset=self.skip(chunk, half))
            for dots, probe in zip(self.dots, met, strict=True):
                for x, y in zip(made, probe, strict=True):
                    dots[half] = dots[half] + x * y

    def store_products(self) -> None:
        """Sum the dots of both rows over the row's lanes and write them to `product_at`."""
        tile, column = self.statics.tile, self.stage.column
        for p, dots in enumerate(self.dots):
            kept = transposing_sum(dots, column, ROW_LANES)
            which, _, owner = transposed_place(len(dots), column, ROW_LANES)
            where = product_at(self.stage, tile, self.first + which * 8, p)
            store_shared_if(owner, where, [kept[0].bitcast(Uint32)])


def decays_of(decays: Any, tile: Tile, chunk: int, column: Any) -> list[Float32]:
    """Of this thread's vector of a chunk; see `fold_tile`."""
    if not isinstance(decays, cute.Tensor):
        return column_decays(tile, decays, chunk, column)
    return [decays[chunk * tile.vector + e if tile.channels else 0] for e in range(tile.vector)]


def lifted_rows(stage: FoldStage, statics: FoldStatics, state: Any, checkpoint: Any) -> cute.Tensor:
    """This thread's part of the last block of 16 rows that its warp folds, from the tile in shared memory."""
    block = (statics.turns - 1) * statics.tile.warps + stage.warp
    rows = FoldRows.of(stage, statics, state, checkpoint, block)
    words = [word for c in range(statics.tile.fold_chunks) for half in rows.load(c) for word in half]
    lifted = cute.make_rmem_tensor((len(words),), Uint32)
    for i, word in enumerate(words):
        lifted[i] = word
    return lifted


@cute.jit
def fold_tile(
    stage: FoldStage,
    statics: cutlass.Constexpr,
    state: Int32,
    checkpoint: Int64,
    num_records: Int32,
    decays: Any,
    probes: FoldProbes | None,
    noise: Noise | None,
    number: Int32,
):
    """Fold the staged records into a part of the tile and write it to the checkpoint.

    Args:
        state: shared address of the tile [rows][K] as read from the checkpoint, where it is staged; receives products
            (`product_at`).
        checkpoint: global address of the same tile.
        num_records: staged records; zeros follow, since the window is staged in whole 16s.
        decays: product of the decays of all staged records: in registers one for all columns or one for each of this
            thread's, or the shared address of those of all columns.
        probes: what the new rows are multiplied by, if anything.
        noise: of stochastic rounding, else None. The products are those of the state before it is rounded.
        number: of the part, of `statics.parts`.
    """
    tile, turns = statics.tile, statics.turns
    if cutlass.const_expr(stage.lifted is not None):
        turns = turns - 1
        last = FoldRows.of(stage, statics, state, checkpoint, turns * tile.warps + stage.warp, lifted=True)
        fold_block(last, last.block, num_records, decays, probes, noise)
    for turn in cutlass.range(turns, unroll=1):
        block = turn * tile.warps + stage.warp
        there = Boolean(True)
        if cutlass.const_expr(statics.blocks % tile.warps != 0):
            there = block < statics.blocks
        if there:
            rows = FoldRows.of(stage, statics, state, checkpoint, number * statics.blocks + block)
            staged = block if tile.value_parts > 1 else rows.block
            fold_block(rows, staged, num_records, decays, probes, noise)


@cute.jit
def fold_block(
    rows: FoldRows, staged: Int32, num_records: Int32, decays: Any, probes: FoldProbes | None, noise: Noise | None
):
    """`fold_tile` for one block of 16 rows, whose values are those of block `staged`."""
    stage, statics, tile = rows.stage, rows.statics, rows.statics.tile
    sums = cute.make_rmem_tensor((tile.fold_span * tile.vector * 2,), Float32)
    for first in cutlass.range_constexpr(0, tile.fold_chunks, tile.fold_span):
        if cutlass.const_expr(tile.tokens == 0):
            cute.arch.sync_warp()  # else loads of all passes gather in front of the first, and spill
        clear(sums)
        for group in cutlass.range((num_records + (ROW_BLOCK - 1)) // ROW_BLOCK, unroll=1):
            add_records(stage, statics, sums, group * ROW_BLOCK, staged, first)
        write_rows(rows, first, sums, decays, probes, noise)
    if cutlass.const_expr(tile.products_in_rows):
        cute.arch.sync_warp()  # every lane has read the rows that the products are about to overwrite
    rows.store_products()


def clear(sums: cute.Tensor) -> None:
    """Zeros, one after the other: `fill` takes up to 16 registers more, and then spills (sm_90a, 2026-11-30)."""
    for i in range(cute.size(sums)):
        sums[i] = Float32(0.0)


def write_rows(
    rows: FoldRows,
    first: int,
    sums: cute.Tensor,
    decays: Any,
    probes: FoldProbes | None,
    noise: Noise | None,
) -> None:
    """Update `fold_span` chunks from chunk `first` on: all loads from global memory in front of all stores, which they
    could not pass."""
    tile, column = rows.statics.tile, rows.stage.column
    chunks, size = range(first, first + tile.fold_span), tile.vector * 2
    old = [] if rows.statics.staged else [rows.load(c) for c in chunks]
    met = [[] if probes is None else probes.load(tile, c, column) for c in chunks]
    for i, chunk in enumerate(chunks):
        words = old[i] if old else rows.load(chunk)
        of_probes = [] if probes is None else probes.decayed(tile, chunk, column, met[i])
        rows.write(chunk, [sums[i * size + n] for n in range(size)], words, of_probes, decays, noise)


def add_records(
    stage: FoldStage, statics: FoldStatics, sums: cute.Tensor, first_record: Any, block: Any, first_chunk: int
) -> None:
    """Add the products of 16 records, for a staged block of rows and `fold_span` chunks of columns."""
    at, left = 0, load_rows(stage, statics, first_record, block)
    for c in range(statics.tile.fold_span):
        for right in load_keys(stage, statics, first_record, first_chunk + c):
            made = term_products([sums[at + i] for i in range(4)], left, right)
            for i, x in enumerate(made):
                sums[at + i] = x
            at += 4


def term_products(sums: list[Any], left: list[tuple[Uint32, ...]], right: list[tuple[Uint32, Uint32]]) -> list[Any]:
    """`sums` and the products of terms, the smallest first: tensor cores cut a sum to 25 bits of its largest part.
    `mma.multiply` sums the small ones by themselves instead, in as many registers again."""
    places = [(i, j) for i in range(len(left)) for j in range(len(right)) if i + j < MOST_TERMS]
    for i, j in sorted(places, key=sum, reverse=True):
        sums = mma_bf16(sums, left[i], right[j])
    return sums


def product_at(stage: FoldStage, tile: Tile, row: Any, probe: int) -> Int32:
    """Where a new row's product with a probe lies: among themselves, or in the row once it is folded, a bank further
    from row to row."""
    if not tile.products_in_rows:
        return stage.products + row * 4
    row_bytes = tile.d_state * tile.state_size
    places = min(WARP, row_bytes // (4 * tile.probes))
    return stage.products + row * row_bytes + (row % places) * 4 + probe * places * 4
