"""Folding the committed records into the checkpoint: state <- decay * state + sum over j of w_j value_j key_j^T."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.configs import LANES_PER_RECORD, ROW_BLOCK, WARP, Tile
from cute_kernels.primitives.bulk import bulk_prefetch_if
from cute_kernels.primitives.convert import pack, unpack
from cute_kernels.primitives.memory import (
    EVICT_LAST,
    load_shared,
    load_shared_words,
    load_words,
    store_shared,
    store_shared_half_if,
    store_shared_if,
    store_words,
)
from cute_kernels.primitives.reduce import transposed_place, transposing_sum
from cute_kernels.replay.noise import Noise
from cute_kernels.replay.window import LoadedRecord

AHEAD = 2  # blocks of rows that are brought to L2 before they are read


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
        """Parts of a fold whose copy is made part by part: 16 rows a warp, where blocks of rows make up such."""
        rows = ROW_BLOCK * tile.warps
        return tile.rows // rows if tile.rows % rows == 0 and rows % (tile.fold_block * tile.fold_rows) == 0 else 1

    @property
    def blocks(self) -> int:
        """Blocks of rows of a part."""
        return self.tile.fold_steps // self.tile.fold_block // self.parts

    @property
    def block_bytes(self) -> int:
        """Of the CTA's block of rows in the checkpoint."""
        tile = self.tile
        return tile.fold_block * tile.fold_rows * tile.d_state * tile.state_size


@dataclass(frozen=True)
class FoldStage:
    """Where the records of a fold lie in shared memory, and which of the tile a thread folds.

    Keys are [record][K] in the activation dtype, or float and scaled. Values are [record][row % n][row // n] with
    n = `tile.fold_rows`, so that the rows of one thread are consecutive: float and weighted, or as the ring has them.
    They are those of all rows, or of one of `tile.value_parts` at a time.

    Args:
        keys, values: byte addresses in shared memory.
        products: where the new rows' products with the probes go (`product_at`).
        column_lane: which of the row's `tile.fold_lanes` lanes this thread is.
        first_row: the first of this thread's rows; they are `tile.fold_rows` apart.
    """

    keys: Int32
    values: Int32
    products: Int32
    column_lane: Int32
    first_row: Int32

    @classmethod
    def of(cls, tile: Tile, state: Any, staging: Any, thread: Any) -> FoldStage:
        """The stage of a thread of the CTA, with its records at shared address `staging` and the tile at `state`."""
        values = staging + tile.values_at
        products = (
            state if tile.products_in_rows else values + tile.padded_window * tile.staged_values * tile.staged_size
        )
        return cls(staging, values, products, thread % tile.fold_lanes, thread // tile.fold_lanes)


def stage_record(
    stage: FoldStage, statics: FoldStatics, record: Any, lane8: Any, loaded: LoadedRecord, weight: Any
) -> None:
    """Write one record, as the 8 lanes that share it have loaded it, with its values weighted, if it is one of the
    padded window; where values are staged in parts, without them."""
    tile = statics.tile
    kept = True if tile.whole_passes else Int32(record < tile.padded_window)
    vector_bytes = tile.vector * tile.key_size
    where = stage.keys + record * (tile.d_state * tile.key_size) + lane8 * vector_bytes
    for c, words in enumerate(loaded.key):
        for first in range(0, len(words), 4):
            skip = c * LANES_PER_RECORD * vector_bytes + 4 * first
            if tile.whole_passes:
                store_shared(where, words[first : first + 4], offset=skip)
            else:
                store_shared_if(kept, where + skip, words[first : first + 4])
    if tile.value_parts == 1:
        stage_values(stage, statics, record, lane8, loaded, weight, 0)


def stage_values(
    stage: FoldStage, statics: FoldStatics, record: Any, lane8: Any, loaded: LoadedRecord, weight: Any, part: int
) -> None:
    """Write the values of one of `tile.value_parts` likewise."""
    tile = statics.tile
    record_values = stage.values + record * (tile.staged_values * tile.staged_size)
    vectors = len(loaded.values) // tile.value_parts
    for c, words in enumerate(loaded.values[part * vectors : (part + 1) * vectors]):
        vector = c * LANES_PER_RECORD + lane8
        inside = vector < tile.value_vectors
        if not tile.whole_passes:
            inside = Int32(record < tile.padded_window) * Int32(inside)
        for e, x in enumerate(unpack(words, statics.value_dtype)):
            row = vector * tile.value_vector + e
            steps = tile.fold_steps // tile.value_parts
            place = (row % tile.fold_rows) * steps + row // tile.fold_rows
            word = (x * weight).bitcast(Int32) if tile.staged_size == 4 else pack([x], statics.value_dtype)[0]
            if tile.staged_size == 4:
                store_shared_if(inside, record_values + place * 4, [word])
            else:
                store_shared_half_if(inside, record_values + place * 2, word)


def load_fold_key(stage: FoldStage, statics: FoldStatics, record: Any, ahead: int) -> list[Float32]:
    """This thread's columns of the key of record `record + ahead`."""
    tile = statics.tile
    key_bytes, vector_bytes = tile.d_state * tile.key_size, tile.vector * tile.key_size
    where = stage.keys + record * key_bytes + stage.column_lane * vector_bytes
    words = []
    for c in range(tile.fold_chunks):
        for first in range(0, vector_bytes, 16):
            skip = ahead * key_bytes + c * tile.fold_lanes * vector_bytes + first
            words += load_shared(where, min(4, vector_bytes // 4), offset=skip)
    return unpack(words, statics.key_dtype)


def load_fold_values(stage: FoldStage, statics: FoldStatics, record: Any, ahead: int, block: Any) -> list[Float32]:
    """The weighted values of this thread's rows of a block of those that are staged, of record `record + ahead`."""
    tile = statics.tile
    size, values, steps = tile.staged_size, tile.staged_values, tile.fold_steps // tile.value_parts
    where = stage.values + (record * values + stage.first_row * steps + block * tile.fold_block) * size
    alignment = size * _power_of_two_in(tile.fold_block, steps, values)
    words = load_shared_words(where, tile.fold_block * size // 4, alignment, offset=ahead * values * size)
    return unpack(words, "float32" if size == 4 else statics.value_dtype)


def _power_of_two_in(*counts: int) -> int:
    """The largest power of two up to 8 that divides every count."""
    return max(n for n in (1, 2, 4, 8) if all(count % n == 0 for count in counts))


@cute.jit
def fold_tile(
    stage: FoldStage,
    statics: cutlass.Constexpr,
    state: Int32,
    checkpoint: Int64,
    num_records: Int32,
    decays: cute.Tensor,
    probes: cute.Tensor,
    noise: Noise | None,
    number: Int32,
):
    """Fold the staged records into a part of the tile and write it to the checkpoint.

    Args:
        state: shared address of the tile [rows][K] as read from the checkpoint, where it is staged; receives products
            (`product_at`).
        checkpoint: global address of the same tile.
        num_records: staged records; zeros follow, since the window is staged in whole passes.
        decays: product of the decays of all staged records, one for all columns or one for each of this thread's.
        probes: this thread's columns of each probe, one after the other, in registers.
        noise: of stochastic rounding, else None. The products are those of the state before it is rounded.
        number: of the part, of `statics.parts`.
    """
    tile = statics.tile
    unroll = tile.fold_unroll
    columns = tile.vector * tile.fold_chunks
    row_bytes = tile.d_state * tile.state_size
    sums = cute.make_rmem_tensor((tile.fold_block * columns,), Float32)
    for block in cutlass.range(number * statics.blocks, (number + 1) * statics.blocks, unroll=1):
        if cutlass.const_expr(not statics.staged and not tile.channels):  # there it costs registers, which spill
            prefetch_block(stage, statics, checkpoint, block + AHEAD)
        first_row = stage.first_row + block * (tile.fold_block * tile.fold_rows)
        staged = block - number * statics.blocks if tile.value_parts > 1 else block
        offset = first_row * row_bytes + stage.column_lane * 16
        for i in cutlass.range_constexpr(tile.fold_block):
            for c in cutlass.range_constexpr(tile.fold_chunks):
                skip = i * tile.fold_rows * row_bytes + c * tile.fold_lanes * 16
                words = (
                    load_shared(state + offset, 4, offset=skip)
                    if statics.staged
                    else load_words(checkpoint + Int64(offset), 4, offset=skip)
                )
                values = unpack(words, statics.state_dtype)
                for e in cutlass.range_constexpr(tile.vector):
                    decay = decays[c * tile.vector + e if tile.channels else 0]
                    sums[i * columns + c * tile.vector + e] = values[e] * decay
        for group in cutlass.range((num_records + (unroll - 1)) // unroll, unroll=1):
            for u in cutlass.range_constexpr(unroll):
                key = load_fold_key(stage, statics, group * unroll, u)
                weighted = load_fold_values(stage, statics, group * unroll, u, staged)
                for i in cutlass.range_constexpr(tile.fold_block):
                    for e in cutlass.range_constexpr(columns):
                        sums[i * columns + e] = sums[i * columns + e] + weighted[i] * key[e]
        dots: list[list[Any]] = [[] for _ in range(tile.probes)]
        for i in cutlass.range_constexpr(tile.fold_block):
            dot = [Float32(0.0)] * tile.probes
            for c in cutlass.range_constexpr(tile.fold_chunks):
                part = [sums[i * columns + c * tile.vector + e] for e in range(tile.vector)]
                where = checkpoint + Int64(offset)
                skip = i * tile.fold_rows * row_bytes + c * tile.fold_lanes * 16
                if cutlass.const_expr(noise is None):
                    words = pack(part, statics.state_dtype)
                else:
                    row, vector = first_row + i * tile.fold_rows, c * tile.fold_lanes + stage.column_lane
                    words = noise.rounded(part, statics.state_dtype, row, vector)
                store_words(where, words, hint=EVICT_LAST, offset=skip)
                for e in cutlass.range_constexpr(tile.vector):
                    for p in cutlass.range_constexpr(tile.probes):
                        dot[p] = dot[p] + part[e] * probes[p * columns + c * tile.vector + e]
            for p in cutlass.range_constexpr(tile.probes):
                dots[p].append(dot[p])
        if cutlass.const_expr(tile.products_in_rows):
            cute.arch.sync_warp()  # every lane has read the rows that the products are about to overwrite
        for p in cutlass.range_constexpr(tile.probes):
            store_products(stage, statics, dots[p], first_row, p)


def prefetch_block(stage: FoldStage, statics: FoldStatics, checkpoint: Any, block: Any) -> None:
    """Have a block of rows brought to L2, if the tile has it, by the first thread."""
    first = Int32(stage.column_lane == 0) * Int32(stage.first_row == 0)
    there = first * Int32(block < statics.blocks * statics.parts)
    bulk_prefetch_if(there, checkpoint + Int64(block * statics.block_bytes), statics.block_bytes)


def product_at(stage: FoldStage, tile: Tile, row: Any, probe: int) -> Int32:
    """Where a new row's product with a probe lies: among themselves, or in the row once it is folded, a bank further
    from row to row."""
    if not tile.products_in_rows:
        return stage.products + row * 4
    row_bytes = tile.d_state * tile.state_size
    places = min(WARP, row_bytes // (4 * tile.probes))
    return stage.products + row * row_bytes + (row % places) * 4 + probe * places * 4


def store_products(stage: FoldStage, statics: FoldStatics, dots: list[Any], first_row: Any, probe: int) -> None:
    """Sum the dots of this thread's rows with a probe over the row's lanes and write them to `product_at`."""
    tile = statics.tile
    masks = tuple(1 << b for b in reversed(range(tile.fold_lanes.bit_length() - 1)))
    kept = transposing_sum(dots, stage.column_lane, masks)
    first, _, owner = transposed_place(tile.fold_block, stage.column_lane, masks)
    for i, dot in enumerate(kept):
        inside = owner & (first + i < tile.fold_block)
        row = first_row + (first + i) * tile.fold_rows
        store_shared_if(inside, product_at(stage, tile, row, probe), [dot.bitcast(Int32)])
