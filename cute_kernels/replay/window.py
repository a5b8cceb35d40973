"""Bringing records from the ring, or from this step's inputs, to the threads that use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.configs import LANES_PER_RECORD, WARP, StepKey, Tile
from cute_kernels.primitives.convert import pack, unpack
from cute_kernels.primitives.memory import KEEP, STREAM, load_half_if, load_words_if, store_half_if, store_words_if


@dataclass(frozen=True)
class Place:
    """Which row, head and part of its rows a thread works on, and which thread it is of those of its CTA that do."""

    row: Int32
    head: Int32
    group: Int32
    first_row: Int32
    thread: Int32
    lane: Int32
    warp: Int32

    @classmethod
    def of(cls, key: StepKey, row: Any) -> Place:
        """The place of this thread, where the CTAs of a row lie along the grid's x axis, those of a head together."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        head, tile = block // key.config.split, Tile.of(key)
        if key.heads_together > 1:
            head = head * key.heads_together + thread // tile.threads
            thread = thread % tile.threads
        return cls(
            row=row,
            head=head,
            group=head // (key.num_v_heads // key.num_k_heads),
            first_row=(block % key.config.split) * tile.rows,
            thread=thread,
            lane=thread % WARP,
            warp=thread // WARP if tile.warps > 1 else Int32(0),
        )


def address(tensor: cute.Tensor, size: int, *index: Any) -> Int64:
    """Byte address of an element of a tensor; trailing axes may be left out.

    Axes whose stride is known while tracing lie within a slot or a row, so 32 bits hold their offset; the others are
    multiplied in 64 bits.
    """
    near, far = Int32(0), Int64(0)
    for i, stride in zip(index, tensor.stride, strict=False):
        if isinstance(stride, int):
            near = near + i * (stride * size)
        else:
            far = far + Int64(i) * stride * size
    return tensor.iterator.toint() + far + Int64(near)


def load_scalar_if(predicate: Any, where: Any, dtype: str, *, cache: str = KEEP) -> Float32:
    """One value of any activation dtype as Float32, 0 where the predicate is false."""
    if dtype == "float32":
        return load_words_if(predicate, where, 1, cache=cache)[0].bitcast(Float32)
    return unpack([load_half_if(predicate, where, cache=cache)], dtype)[0]


def access_words(num_words: int) -> int:
    """Words of an access, at most 4, of which some make so many."""
    return min(4, num_words & -num_words)


def load_row_words(predicate: Any, where: Any, num_words: int, *, cache: str = KEEP) -> list[Uint32]:
    """Consecutive words by accesses of at most 16 bytes; the address is aligned to the largest that divides them."""
    width = access_words(num_words)
    return [
        word
        for offset in range(0, num_words, width)
        for word in load_words_if(predicate, where, width, cache=cache, offset=4 * offset)
    ]


def store_row_words(predicate: Any, where: Any, words: list[Uint32], *, offset: int = 0) -> None:
    """Write consecutive words by such accesses, the first `offset` bytes behind the address."""
    width = access_words(len(words))
    for first in range(0, len(words), width):
        store_words_if(predicate, where, words[first : first + width], offset=offset + 4 * first)


def key_cache(key: StepKey) -> str:
    """The policy of a key's or query's loads: what no other head reads streams by (GLM-5.3-Flash, batch 256, H200,
    2026-11-29 and 30: keys 305 -> 300 us, queries too 282.6 -> 281.5)."""
    return KEEP if key.num_v_heads > key.num_k_heads else STREAM


def load_key(source: Any, valid: Any, lane8: Any, tile: Tile, *, cache: str = KEEP) -> list[list[Uint32]]:
    """This lane's vectors of a key whose first byte is at `source`: vector c * 8 + lane8 for each chunk c."""
    vector_bytes = tile.vector * tile.activation_size
    start = source + lane8 * vector_bytes
    step = LANES_PER_RECORD * vector_bytes
    return [load_row_words(valid, start + c * step, vector_bytes // 4, cache=cache) for c in range(tile.key_chunks)]


def values_inside(valid: Any, chunk: int, lane8: Any, tile: Tile) -> Any:
    """Whether this lane has a vector of a record's values in a chunk of 8 vectors."""
    if (chunk + 1) * LANES_PER_RECORD <= tile.value_vectors:
        return valid
    return Int32(valid) * Int32(chunk * LANES_PER_RECORD + lane8 < tile.value_vectors)


def load_values(source: Any, valid: Any, lane8: Any, tile: Tile) -> list[list[Uint32]]:
    """This lane's 16-byte vectors of the values of a record, the first of the tile at `source`."""
    start = source + lane8 * 16
    return [
        load_words_if(values_inside(valid, c, lane8, tile), start, 4, cache=STREAM, offset=c * LANES_PER_RECORD * 16)
        for c in range(-(-tile.value_vectors // LANES_PER_RECORD))
    ]


@dataclass(frozen=True)
class LoadedRecord:
    """One record as 8 lanes share it: this lane's vectors of the key and of the values, zeros where there is none.

    Args:
        key, values: packed words, as `load_key` and `load_values` place them.
        key_ring, value_ring: addresses of the record's place in the rings.
    """

    key: list[list[Uint32]]
    values: list[list[Uint32]]
    key_ring: Int64
    value_ring: Int64

    def store(self, lane8: Any, tile: Tile, *, stores_key: Any, stores_values: Any) -> None:
        """Write the record to its place in the rings, each part where its predicate holds."""
        vector_bytes = tile.vector * tile.activation_size
        for c, words in enumerate(self.key):
            for first in range(0, len(words), 4):
                offset = c * LANES_PER_RECORD * vector_bytes + 4 * first
                store_words_if(
                    stores_key, self.key_ring + lane8 * vector_bytes, words[first : first + 4], offset=offset
                )
        for c, words in enumerate(self.values):
            inside = values_inside(stores_values, c, lane8, tile)
            store_words_if(inside, self.value_ring + lane8 * 16, words, offset=c * LANES_PER_RECORD * 16)


def copy_row(source: Any, destination: Any, num_bytes: Any, most_bytes: int, lane: Any) -> None:
    """Copy a row of this step's inputs into the ring by the lanes of a warp: `num_bytes`, at most `most_bytes`."""
    firsts = range(0, most_bytes, WARP * 16)
    predicates = [Int32((first + lane * 16) < num_bytes) for first in firsts]
    words = [
        load_words_if(inside, source + lane * 16, 4, offset=first)
        for inside, first in zip(predicates, firsts, strict=True)
    ]
    for inside, first, row in zip(predicates, firsts, words, strict=True):
        store_words_if(inside, destination + lane * 16, row, offset=first)


def store_scalar_if(predicate: Any, where: Any, value: Any, dtype: str) -> None:
    """One Float32 value to memory in any activation dtype."""
    word = pack([value], dtype)[0]
    if dtype == "float32":
        store_words_if(predicate, where, [word])
    else:
        store_half_if(predicate, where, word)
