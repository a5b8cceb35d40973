"""Bringing records from the ring, or from this step's inputs, to the threads that use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.configs import LANES_PER_RECORD, WARP, Tile
from cute_kernels.primitives.arithmetic import select
from cute_kernels.primitives.convert import pack, unpack
from cute_kernels.primitives.memory import KEEP, STREAM, load_half_if, load_words_if, store_half_if, store_words_if
from cute_kernels.replay.cursor import RowCursor


@dataclass(frozen=True)
class Place:
    """Which row, head and part of its rows a thread works on, and which thread of the CTA it is."""

    row: Int32
    head: Int32
    group: Int32
    first_row: Int32
    thread: Int32
    lane: Int32
    warp: Int32


def address(tensor: cute.Tensor, size: int, *index: Any) -> Int64:
    """Byte address of an element of a strided tensor, in 64-bit arithmetic; trailing axes may be left out."""
    offset = Int64(0)
    for axis, i in enumerate(index):
        offset = offset + Int64(i) * tensor.stride[axis]
    return tensor.iterator.toint() + offset * size


def load_scalar_if(predicate: Any, where: Any, dtype: str, *, cache: str = KEEP) -> Float32:
    """One value of any activation dtype as Float32, 0 where the predicate is false."""
    if dtype == "float32":
        return load_words_if(predicate, where, 1, cache=cache)[0].bitcast(Float32)
    return unpack([load_half_if(predicate, where)], dtype)[0]


def load_row_words(predicate: Any, where: Any, num_words: int, *, cache: str = KEEP) -> list[Uint32]:
    """Consecutive words by accesses of at most 16 bytes; the address is aligned to the smaller of both."""
    width = min(4, num_words)
    return [
        word
        for offset in range(0, num_words, width)
        for word in load_words_if(predicate, where, width, cache=cache, offset=4 * offset)
    ]


def select_decay_record(lane_index: Any, cursor: RowCursor, decay: cute.Tensor, head: Any, token: Any) -> Float32:
    """The decay record of logical index `lane_index`: from the ring, or `token` behind the last of a row that reads."""
    ring = address(decay, 4, cursor.slot, head, cursor.physical(lane_index))
    record = load_words_if(lane_index < cursor.count, ring, 1, cache=STREAM)[0].bitcast(Float32)
    is_token = Int32(lane_index == cursor.count) * Int32(cursor.folds == 0)
    return select(is_token != 0, token, record)


def load_key(source: Any, valid: Any, lane8: Any, tile: Tile) -> list[list[Uint32]]:
    """This lane's vectors of a key whose first byte is at `source`: vector c * 8 + lane8 for each chunk c."""
    vector_bytes = tile.vector * tile.activation_size
    start = source + lane8 * vector_bytes
    step = LANES_PER_RECORD * vector_bytes
    return [load_row_words(valid, start + c * step, vector_bytes // 4) for c in range(tile.key_chunks)]


def load_values(source: Any, valid: Any, lane8: Any, tile: Tile) -> list[list[Uint32]]:
    """This lane's 16-byte vectors of the values of a record, the first of the tile at `source`."""
    vectors = []
    for c in range(-(-tile.value_vectors // LANES_PER_RECORD)):
        index = c * LANES_PER_RECORD + lane8
        inside = valid
        if (c + 1) * LANES_PER_RECORD > tile.value_vectors:
            inside = Int32(valid) * Int32(index < tile.value_vectors)
        vectors.append(load_words_if(inside, source + index * 16, 4, cache=STREAM))
    return vectors


@dataclass(frozen=True)
class LoadedRecord:
    """One record as 8 lanes share it: this lane's vectors of the key and of the values, zeros where there is none."""

    key: list[list[Uint32]]
    values: list[list[Uint32]]


@dataclass(frozen=True)
class TokenRow:
    """A row of this step's inputs on its way into the ring: held in registers between its load and its store."""

    destination: Int64
    predicates: list[Any]
    words: list[list[Uint32]]

    @classmethod
    def load(cls, source: Any, destination: Any, num_bytes: int, lane: Any, active: Any) -> TokenRow:
        """Load `num_bytes` by the lanes of one warp, 16 bytes a lane and access."""
        predicates, words = [], []
        for first in range(0, num_bytes // 16, WARP):
            index = first + lane
            inside = Int32(active)
            if first + WARP > num_bytes // 16:
                inside = inside * Int32(index < num_bytes // 16)
            predicates.append(inside)
            words.append(load_words_if(inside, source + index * 16, 4))
        return cls(destination + lane * 16, predicates, words)

    def store(self) -> None:
        for i, (inside, words) in enumerate(zip(self.predicates, self.words, strict=True)):
            store_words_if(inside, self.destination, words, offset=i * WARP * 16)


def store_scalar_if(predicate: Any, where: Any, value: Any, dtype: str) -> None:
    """One Float32 value to memory in any activation dtype."""
    word = pack([value], dtype)[0]
    if dtype == "float32":
        store_words_if(predicate, where, [word])
    else:
        store_half_if(predicate, where, word)
