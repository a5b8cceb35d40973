"""Output from a checkpoint that is only read: the tile in shared memory times the query, and the window's part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32

from cute_kernels.configs import LANES_PER_RECORD, WARP, Tile
from cute_kernels.primitives.arithmetic import select
from cute_kernels.primitives.convert import unpack
from cute_kernels.primitives.memory import load_shared, store_shared_if
from cute_kernels.primitives.reduce import sum_lanes, transposed_place, transposing_sum

ROW_LANES = (4, 2, 1)  # masks of the lanes that share a record or a row
RECORD_LANES = (16, 8)  # masks of the lanes that hold other records in the same place


def add_products(total: Any, words: list[Any], values: list[Any], dtype: str) -> Float32:
    """`total` plus the products of packed words with as many floats."""
    for x, y in zip(unpack(words, dtype), values, strict=True):
        total = total + x * y
    return total


def score(key: list[list[Any]], query: list[list[Any]], dtype: str) -> Float32:
    """Dot product of a record's key with the query, known in the 8 lanes that share it."""
    product = Float32(0.0)
    for words, values in zip(key, query, strict=True):
        product = add_products(product, words, values, dtype)
    return sum_lanes(product, ROW_LANES)


def add_weighted(sums: list[Any], values: list[list[Any]], weight: Any, dtype: str) -> list[Any]:
    """Sums of this lane's values, plus a record's values times its weight."""
    flat = [x for words in values for x in unpack(words, dtype)]
    return [s + x * weight for s, x in zip(sums, flat, strict=True)]


def store_partial_sums(sums: list[Any], tile: Tile, partial: Any, lane: Any) -> None:
    """Reduce the values of a warp's records and write them, float [rows], to shared memory."""
    lane8 = lane % LANES_PER_RECORD
    size = tile.value_vector
    for c in range(len(sums) // size):
        kept = transposing_sum(sums[c * size : (c + 1) * size], lane, RECORD_LANES)
        first, _, _ = transposed_place(size, lane, RECORD_LANES)
        vector = c * LANES_PER_RECORD + lane8
        where = partial + (vector * size + first) * 4
        words = [x.bitcast(Int32) for x in kept]
        store_shared_if(vector < tile.value_vectors, where, words)


@dataclass(frozen=True)
class OutputRows:
    """Which of the tile's rows a thread writes after the readout.

    Args:
        first_row: the first row that this thread's lanes read; the others follow it, so that the rows which a warp
            writes lie together.
        rows: the rows whose sums this lane is left with; any row of the tile where the sum is padding.
        inside: for each of them, whether this lane is the one to write it.
    """

    first_row: Int32
    rows: list[Int32]
    inside: list[Int32]

    @classmethod
    def of(cls, tile: Tile, lane: Any, warp: Any) -> OutputRows:
        read = tile.rows // tile.readout_rows
        first_row = (warp * (WARP // LANES_PER_RECORD) + lane // LANES_PER_RECORD) * read
        first, count, owner = transposed_place(read, lane, ROW_LANES)
        real = [Int32(first + i < read) for i in range(count)]
        rows = [first_row + first + i for i in range(count)]
        inside = [Int32(owner) * one for one in real]
        if read & (read - 1):  # some sums are padding
            rows = [select(one != 0, row, first_row) for row, one in zip(rows, real, strict=True)]
        return cls(first_row, rows, inside)


def read_tile(
    tile: Tile, dtype: str, state: Any, probes: list[list[list[Any]]], lane: Any, first_row: Any
) -> list[list[Float32]]:
    """Products of the tile's rows with each probe: those of `OutputRows.rows`, in order.

    Args:
        state: shared address of the tile.
        probes: this lane's vectors of each probe, as `load_key` places them.
        first_row: `OutputRows.first_row`.
    """
    row_bytes = tile.d_state * tile.state_size
    base = state + first_row * row_bytes + lane % LANES_PER_RECORD * 16
    sums: list[list[Any]] = [[] for _ in probes]
    for i in range(tile.rows // tile.readout_rows):
        products = [Float32(0.0) for _ in probes]
        for c in range(tile.key_chunks):
            words = load_shared(base, 4, offset=i * row_bytes + c * LANES_PER_RECORD * 16)
            products = [add_products(x, words, probe[c], dtype) for x, probe in zip(products, probes, strict=True)]
        for of_probe, product in zip(sums, products, strict=True):
            of_probe.append(product)
    return [transposing_sum(of_probe, lane, ROW_LANES) for of_probe in sums]
