"""Decay of a window channel by channel: each thread has a channel of K, and stages what all threads then multiply by.

In shared memory, float [rows][K]: row j is how much record j has decayed by the end of the window; two rows follow the
padded window, the decay of the token alone and that of the whole window. With several tokens the window ends before
them, and the decay of the whole window is followed by a row for each token, its decay and that of the tokens before it.
Exponents are sums of log-decays, each 0 or less, taken from the last record back; none is a difference. Tokens multiply
what each leaves.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.configs import LANES_PER_RECORD, Tile
from cute_kernels.primitives.arithmetic import LOG2_E, exp2, select
from cute_kernels.primitives.convert import unpack
from cute_kernels.primitives.memory import STREAM, load_shared_floats, store_shared_if
from cute_kernels.replay.cursor import RowCursor
from cute_kernels.replay.window import Place, address, load_scalar_if, store_scalar_if


def own_channels(tile: Tile, thread: Any) -> list[tuple[Int32, Int32]]:
    """(channel, whether it exists) for each that a thread has."""
    channels = [thread + first for first in range(0, tile.d_state, tile.threads)]
    return [(channel, Int32(channel < tile.d_state)) for channel in channels]


@dataclass(frozen=True)
class ChannelRecords:
    """Log-decays of this thread's channels: of each record of the window, 0 where there is none.

    Args:
        words: [channel][record].
    """

    words: list[list[Float32]]

    @classmethod
    def load(cls, ring: cute.Tensor, dtype: str, tile: Tile, place: Place, cursor: RowCursor) -> ChannelRecords:
        size = 4 if dtype == "float32" else 2
        rows = [address(ring, size, cursor.slot, place.head, cursor.physical(Int32(j))) for j in range(tile.window)]
        return cls(
            [
                [
                    load_scalar_if(Int32(j < cursor.count) * inside, row + channel * size, dtype, cache=STREAM)
                    for j, row in enumerate(rows)
                ]
                for channel, inside in own_channels(tile, place.thread)
            ]
        )

    def append(
        self,
        ring: cute.Tensor,
        dtype: str,
        tile: Tile,
        place: Place,
        cursor: RowCursor,
        token: list[Any],
        *,
        ahead: int = 0,
        valid: Any = 1,
    ) -> None:
        """Write a token's log-decays, `ahead` records behind the committed ones, where `valid` holds."""
        size = 4 if dtype == "float32" else 2
        row = address(ring, size, cursor.slot, place.head, cursor.physical(cursor.count + ahead))
        for (channel, inside), decay in zip(own_channels(tile, place.thread), token, strict=True):
            store_scalar_if(inside * valid * Int32(place.first_row == 0), row + channel * size, decay, dtype)

    def stage(self, tile: Tile, place: Place, reads: Any, token: list[Any], base: Any) -> None:
        """Fill the rows in shared memory for one token, which decays the records of a row that reads."""
        for own, words, decay in zip(own_channels(tile, place.thread), self.words, token, strict=True):
            stage_window(tile, base, own, words, select(reads, decay, Float32(0.0)))
            stage_row(tile, base, own, tile.padded_window, exp2(decay * Float32(LOG2_E)))

    def stage_draft(
        self, tile: Tile, place: Place, left: list[list[Any]], base: Any, scale: float = 1.0
    ) -> list[Float32]:
        """Fill the rows for several tokens: [channel][token], what the decay of each leaves; theirs are times `scale`.

        Returns:
            Of each channel what the whole window leaves.
        """
        whole = []
        for own, words, of_channel in zip(own_channels(tile, place.thread), self.words, left, strict=True):
            whole.append(stage_window(tile, base, own, words, Float32(0.0)))
            for s, so_far in enumerate(accumulate(of_channel, operator.mul, initial=Float32(scale))):
                if s > 0:
                    stage_row(tile, base, own, tile.padded_window + s, so_far)
        return whole


def stage_row(tile: Tile, base: Any, own: tuple[Int32, Int32], row: int, factor: Any) -> None:
    """One channel of a row."""
    channel, inside = own
    store_shared_if(inside, base + channel * 4 + row * tile.d_state * 4, [factor.bitcast(Int32)])


def stage_window(tile: Tile, base: Any, own: tuple[Int32, Int32], words: list[Any], later: Any) -> Float32:
    """One channel of the window's rows and of the decay of all of it, with `later` behind it; returns the latter."""
    for j in range(tile.padded_window - 1, -1, -1):
        stage_row(tile, base, own, j, exp2(later * Float32(LOG2_E)))
        if j < tile.window:
            later = later + words[j]
    whole = exp2(later * Float32(LOG2_E))
    stage_row(tile, base, own, tile.window_row, whole)
    return whole


def key_factors(tile: Tile, base: Any, row: Any, lane8: Any) -> list[Float32]:
    """Of a row in shared memory, the channels of a key that one of the 8 lanes that share it has."""
    where = base + row * (tile.d_state * 4) + lane8 * (tile.vector * 4)
    return [
        x
        for c in range(tile.key_chunks)
        for first in range(0, tile.vector, 4)
        for x in load_shared_floats(where, 4, 16, offset=c * LANES_PER_RECORD * tile.vector * 4 + first * 4)
    ]


def window_decays(tile: Tile, base: Any) -> Int32:
    """Where the decays of the whole window lie, float [K]."""
    return base + tile.window_row * tile.d_state * 4


def column_decays(tile: Tile, row: Any, chunk: int, column: Any) -> list[Float32]:
    """Of a row at a shared address, the columns of a chunk that a thread of a fold has."""
    return load_shared_floats(row + (chunk * tile.fold_lanes + column) * tile.vector * 4, tile.vector, 16)


def scaled_key(
    tile: Tile, key: list[list[Any]], dtype: str, base: Any, record: Any, place: Place
) -> list[list[Uint32]]:
    """This thread's vectors of a record's key, each channel times its decay, as words of floats."""
    if not tile.whole_passes:  # no record of the window: a row that no key will be staged in
        record = select(record < tile.padded_window, record, Int32(tile.padded_window))
    factors = key_factors(tile, base, record, place.lane % LANES_PER_RECORD)
    vectors = [unpack(words, dtype) for words in key]
    return [[x.bitcast(Uint32) for x in vector] for vector in _times(vectors, factors)]


def decayed(tile: Tile, probes: list[list[list[Any]]], base: Any, place: Place) -> list[list[list[Any]]]:
    """The probes as the state at the start of the window meets them."""
    factors = key_factors(tile, base, tile.window_row, place.lane % LANES_PER_RECORD)
    return [_times(probe, factors) for probe in probes]


def _times(vectors: list[list[Any]], factors: list[Any]) -> list[list[Any]]:
    size = len(vectors[0])
    return [
        [x * f for x, f in zip(vector, factors[i * size : (i + 1) * size], strict=True)]
        for i, vector in enumerate(vectors)
    ]
