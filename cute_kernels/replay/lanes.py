"""Which channels of V a lane has of the products of `replay.draft`, and how it loads and stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Uint32

from cute_kernels.configs import ROW_BLOCK, SIZE_BYTES, Tile
from cute_kernels.primitives.arithmetic import select
from cute_kernels.primitives.convert import pack, unpack
from cute_kernels.primitives.memory import KEEP
from cute_kernels.primitives.reduce import transposed_place
from cute_kernels.replay.window import Place, load_row_words, load_scalar_if, store_row_words, store_scalar_if

LONE_LANES = (2, 1)  # masks of the lanes that share a row; the first halves what a lane keeps of its sums


@dataclass(frozen=True)
class Channels:
    """The channels of V that a lane has: two for each product of 16 rows of its warp, in runs of 4 or 2 neighbours.

    A run of 8 lanes is followed by the next run of the same lanes: runs of 4 lie 32 rows apart, as do the scales of
    blocks that lie together, and are wide enough for the other loads. Where tcgen05 reads the state, which puts a row
    where it is told to, all of a lane's are one run (`tensor.Operands.tile_row`).

    Args:
        first: local row of the first.
        run: channels of a run.
        step: rows from one run to the next.
        inside: for each run, whether the tile has it; True where it has all.
        width: channels of a load.
    """

    first: Int32
    run: int
    step: int
    inside: list[Any]
    width: int

    @classmethod
    def of(cls, tile: Tile, place: Place, *, tensor: bool) -> Channels:
        """`tensor`: tcgen05 reads the state."""
        products, lane8 = -(-tile.rows // (ROW_BLOCK * tile.warps)), place.lane // 4
        run = 2 * products if tensor else 4 if products % 2 == 0 else 2
        step, first = 8 * run, place.warp * (ROW_BLOCK * products) + lane8 * run
        runs = range(2 * products // run)
        # Where channels of K decay, wide loads are the registers too many that make 16 tokens spill.
        width = 2 if tensor and tile.channels and tile.tokens > 8 else run
        if products * ROW_BLOCK * tile.warps == tile.rows:
            return cls(first, run, step, [True for _ in runs], width)
        return cls(first, run, step, [Int32(first + step * i < tile.rows) for i in runs], width)

    @property
    def together(self) -> bool:
        """Whether the tile has all of them."""
        return all(inside is True for inside in self.inside)

    @property
    def runs(self) -> list[tuple[Any, int]]:
        """Local row of the first of each run, as (row, rows ahead of it); row 0 where the tile has none."""
        ahead = [self.step * i for i in range(len(self.inside))]
        if self.together:
            return [(self.first, rows) for rows in ahead]
        return [(select(x != 0, self.first + rows, Int32(0)), 0) for x, rows in zip(self.inside, ahead, strict=True)]

    @property
    def pairs(self) -> list[tuple[Any, int]]:
        """The same of the two channels of each product."""
        return [(row, ahead + i) for row, ahead in self.runs for i in range(0, self.run, 2)]

    def place_of(self, index: Any) -> Any:
        """How far a channel is behind the first, where `index` counts them all."""
        return index // self.run * self.step + index % self.run

    def load(self, valid: Any, where: Any, dtype: str, *, cache: str = KEEP) -> list[list[Uint32]]:
        """Of each product the words of its two channels, where the lane's first are at address `where`."""
        each, pairs = SIZE_BYTES[dtype] // 2, []
        for i, inside in enumerate(self.inside):
            there = valid if inside is True else inside * Int32(valid)
            at = where + i * (self.step * SIZE_BYTES[dtype])
            for first in range(0, self.run, self.width):
                part = at + first * SIZE_BYTES[dtype]
                words = load_row_words(there, part, each * self.width // 2, cache=cache)
                pairs += [words[j : j + each] for j in range(0, len(words), each)]
        return pairs

    def store(self, valid: Any, where: Any, pairs: list[list[Any]]) -> None:
        """Write the words of all channels likewise."""
        each = self.run // 2
        for i, inside in enumerate(self.inside):
            there = valid if inside is True else inside * valid
            words = [word for pair in pairs[i * each : (i + 1) * each] for word in pair]
            store_row_words(there, where, words, offset=i * (self.step // self.run) * 4 * len(words))


@dataclass(frozen=True)
class LoneChannels:
    """Those of a lane's channels of which it has the sums of one token.

    Args:
        rows: local rows.
        inside: of each, whether the tile has it and this lane writes it.
        packed: whether they are neighbours, as many as a word holds at least, and all inside or none.
    """

    rows: list[Any]
    inside: list[Int32]
    packed: bool

    @classmethod
    def of(cls, tile: Tile, place: Place, channels: Channels) -> LoneChannels:
        total = channels.run * len(channels.inside)
        index, count, owns = transposed_place(total, place.lane, LONE_LANES)
        if channels.together and total & (total - 1) == 0:  # so many of a run
            first = channels.first + channels.place_of(index)
            return cls([first + i for i in range(count)], [Int32(owns)] * count, count * tile.activation_size >= 4)
        rows = [channels.first + channels.place_of(index + i) for i in range(count)]
        inside = [Int32(owns) * Int32(index + i < total) * Int32(row < tile.rows) for i, row in enumerate(rows)]
        return cls([select(x != 0, row, Int32(0)) for x, row in zip(inside, rows, strict=True)], inside, packed=False)

    def load(self, valid: Any, where: Any, dtype: str, *, cache: str = KEEP) -> list[Any]:
        """These channels of a tensor whose local row 0 is at address `where`, as `unpacked` takes them: nothing waits
        for them yet."""
        size, count = SIZE_BYTES[dtype], len(self.rows)
        if self.packed:
            first = where + self.rows[0] * size
            return load_row_words(valid * self.inside[0], first, count * size // 4, cache=cache)
        places = zip(self.rows, self.inside, strict=True)
        return [load_scalar_if(valid * inside, where + row * size, dtype, cache=cache) for row, inside in places]

    def unpacked(self, loaded: list[Any], dtype: str) -> list[Float32]:
        return unpack(loaded, dtype) if self.packed else loaded

    def store(self, valid: Any, where: Any, values: list[Any], dtype: str) -> None:
        """Write them likewise."""
        size = SIZE_BYTES[dtype]
        if self.packed:
            store_row_words(valid * self.inside[0], where + self.rows[0] * size, pack(values, dtype))
            return
        for row, inside, value in zip(self.rows, self.inside, values, strict=True):
            store_scalar_if(valid * inside, where + row * size, value, dtype)
