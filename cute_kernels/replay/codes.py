"""Fragments of codes for tensor cores: each code times the scale of its block is one exact bfloat16.

Codes become the leading bits of a bfloat16 by shifts and masks, two at a time from the two halves of a word; what that
lacks in exponent, and the scale of the block, are exact products in bfloat16. The scale of a row or of 16 rows
multiplies the float32 sums. Pairs from two halves put the elements of K into another order (`ordered`), which the
probes take too.

| dtype | pairs of a word | a pair is the code times | then times | sums times |
|---|---|---|---|---|
| nvfp4 | nibbles j and j + 4 | 2**-126 | block scale * 2**64 | tile scale * 2**62 |
| mxfp8 | bytes j and j + 2 | 2**-120 | 2**120 and the block scale | |
| float8_e4m3fn | bytes j and j + 2 | 2**-120 | | 2**80 and the row scale; probes are times 2**40 |
| int8 | bytes j and j + 2 | 1, as (128 + low bits) - (128 or 256) | | row scale |

MXFP8 rounds values below 2**-126, those of blocks whose largest is below 2**-115, to bfloat16's subnormals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from cute_kernels.configs import Tile
from cute_kernels.copy_shape import ATOM_BLOCKS, BLOCK, CopyShape
from cute_kernels.primitives.arithmetic import product, select
from cute_kernels.primitives.convert import unpack_e4m3
from cute_kernels.primitives.memory import load_words
from cute_kernels.primitives.mma import Fragment, lower_halves, upper_halves
from cute_kernels.replay.quant import CopyPlaces, scale_at

ptx = cute.arch.inline_ptx
SCALED = ("nvfp4", "mxfp8", "float8_e4m3fn", "int8")
SIGNS = 0x80008000
TWO_40, TWO_92, TWO_120 = 0x53805380, 0x6D806D80, 0x7B807B80  # pairs of bfloat16
# Probes that meet codes as they are, small numbers, are made larger, so that no product is lost among the subnormals.
PROBE_SCALE = 2.0**40
SUM_POWER = {"nvfp4": 62, "float8_e4m3fn": 80}
Runs = list[tuple[Any, int]]
Load = Callable[..., list[Uint32]]  # as `memory.load_words`


def scales_probes(dtype: str, *, lone: bool) -> bool:
    """Whether probes that meet codes of this dtype are times `PROBE_SCALE`; `lone`: by `StateRows.lone_products`."""
    return dtype == "float8_e4m3fn" or (lone and dtype == "nvfp4")


def group(bits: int) -> int:
    """Elements of a word whose pairs come from its two halves; 2 where they are neighbours."""
    return max(2, 32 // bits)


def ordered(values: list[Any], bits: int) -> list[Any]:
    """Elements of K in the order of the pairs of codes of so many bits."""
    half = group(bits) // 2
    places = [first + j + e * half for first in range(0, len(values), 2 * half) for j in range(half) for e in (0, 1)]
    return [values[place] for place in places]


def ordered_pairs(words: list[Any], bits: int) -> list[Uint32]:
    """The same for packed pairs of 16 bits."""
    size, found = group(bits) // 2, []
    if size == 1:
        return words
    for first in range(0, len(words), size):
        for low, high in zip(words[first : first + size // 2], words[first + size // 2 : first + size], strict=True):
            found += [lower_halves(low, high), upper_halves(low, high)]
    return found


def ordered_place(channel: Any, bits: int) -> Any:
    """Where an element of K comes in that order."""
    size = group(bits)
    if size == 2:
        return channel
    within = channel % size
    return channel - within + within % (size // 2) * 2 + within // (size // 2)


def times(x: Any, y: Any) -> Uint32:
    """Products of two pairs of bfloat16."""
    return ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[x, y])


def times_constant(x: Any, pair: int) -> Uint32:
    """Products of a pair of bfloat16 and a constant one."""
    text = "{.reg .b32 c; mov.b32 c, %d; mul.rn.bf16x2 {$w0}, {$r0}, c;}" % pair
    return ptx(text, write_only_types=[Uint32], read_only_args=[x])


def less(x: Any, y: Any) -> Uint32:
    """Differences of two pairs of bfloat16."""
    return ptx("sub.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[x, y])


def shifted(word: Any, left: int) -> Uint32:
    """The word shifted to the left, or where that is negative to the right."""
    return word << left if left > 0 else word >> -left if left < 0 else word


def code_pairs(dtype: str, word: Any, factor: Any) -> list[Uint32]:
    """A word of codes as pairs of bfloat16, in order."""
    if dtype == "nvfp4":
        # One product puts sign and magnitude of a nibble where they go: neither copy reaches what is kept of the other.
        parts = [(source & Uint32(0x000F000F << 4 * j), 6 - 4 * j) for source in (word, word >> 8) for j in (0, 1)]
        pairs = [(x * Uint32(65 << left)) & Uint32(SIGNS | 0x01C001C0) for x, left in parts]
        return pairs if factor is None else [times(x, factor) for x in pairs]
    pairs = []
    for left in (8, 0):
        if dtype == "int8":
            low = shifted(word, left - 8)
            bits, signs = (low & Uint32(mask) | Uint32(0x43004300) for mask in (0x007F007F, 0x00800080))
            pairs.append(less(bits, signs))
            continue
        size = shifted(word, left - 4) & Uint32(0x07F007F0)
        pair = (shifted(word, left) & Uint32(SIGNS)) | size
        pairs.append(pair if factor is None else times(times_constant(pair, TWO_120), factor))
    return pairs


def code_fragment(dtype: str, words: list[Any], factors: list[Any]) -> Fragment:
    """The fragment of a vector of codes.

    Args:
        factors: of each block of 16 codes, where blocks have scales.
    """
    made: Fragment = []
    of_block = BLOCK["nvfp4"] * 4 // 32 if dtype == "nvfp4" else len(words)
    for i, word in enumerate(words):
        pairs = code_pairs(dtype, word, factors[i // of_block] if factors else None)
        made += [[(pairs[j], pairs[j + 1])] for j in range(0, len(pairs), 2)]
    return made


def halves(words: list[Any], dtype: str) -> list[Uint32]:
    """Words of a state in one of `draft_shape.HALVES` as pairs of float16, neighbours in a pair."""
    return words if dtype == "float16" else [pair for word in words for pair in unpack_e4m3(word)]


def block_factors(word: Any, count: int) -> list[Uint32]:
    """The scales of nvfp4 blocks in the lowest bytes of a word, times 2**64, each as a pair of bfloat16."""
    pairs = [((word >> 8 * i & Uint32(0xFF)) * Uint32(0x00100010)) for i in range(count)]
    return [times_constant(times_constant(pair, TWO_92), TWO_92) for pair in pairs]


@dataclass(frozen=True)
class CodeScales:
    """Scales of the rows that a lane has.

    Args:
        words: of each row, and each chunk of K, the four scale bytes among which are those of this lane's blocks; empty
            where scales are those of rows, or not loaded yet.
        rows: float32 scales of the rows; empty where there are none.
        blocks, shifts: for each chunk, the first block of this lane, and by how much a word has to be shifted so that
            this lane's bytes are the lowest.
    """

    shape: CopyShape
    words: list[list[Uint32]]
    rows: list[Float32]
    blocks: list[Any]
    shifts: list[Any]

    @classmethod
    def load(cls, shape: CopyShape, tile: Tile, places: CopyPlaces, runs: Runs, run: int, lane4: Any) -> CodeScales:
        """Start the loads of the scales of rows.

        Args:
            runs: of `run` rows of all heads, each (first row, rows ahead of it), an even number.
        """
        dtype, scales = shape.read_dtype, []
        firsts = range(0, tile.d_state if shape.blocks else 0, 4 * tile.read_vector)
        blocks = [(first + lane4 * tile.read_vector) // BLOCK[dtype] for first in firsts]
        for row, ahead in runs:
            if dtype == "nvfp4":
                (word,) = load_words(places.tile_scale + Int64((row + ahead >> 4) * 4), 1)
                scales += [word.bitcast(Float32)] * run
            elif not shape.blocks:
                of_run = load_words(places.scale + Int64(row * 4), run, offset=ahead * 4)
                scales += [word.bitcast(Float32) for word in of_run]
        return cls(shape, [], scales, blocks, [(block & 3) * 8 for block in blocks])

    def of_blocks(self, load: Load, base: Any, runs: Runs, run: int, *, together: bool) -> CodeScales:
        """The same with the scales of blocks, if there are any.

        Args:
            load, base: from global or shared memory, where the scales of row 0 begin.
            runs: as for `CodeScales.load`, in rows of those.
            together: runs lie 32 rows apart, in one group of 128, and begin at multiples of 4, the first among the
                first 32 of so many times 32 rows as there are runs.
        """
        if not self.blocks:
            return self

        def of_row(row: Any, ahead: int, count: int) -> list[list[Uint32]]:
            """The words of a row, and of those 32, 64, .. rows behind it."""
            where = [base + type(base)(scale_at(self.shape, row, block & -ATOM_BLOCKS)) for block in self.blocks]
            return [list(chunks) for chunks in zip(*(load(at, count, offset=ahead << 4) for at in where), strict=True)]

        if together:
            by_row = [of_row(runs[0][0], i, len(runs)) for i in range(run)]
            return replace(self, words=[by_row[i][n] for n in range(len(runs)) for i in range(run)])
        return replace(self, words=[of_row(row + ahead, i, 1)[0] for row, ahead in runs for i in range(run)])

    def word(self, row: int, chunk: int) -> Uint32:
        """Four scale bytes, this lane's the lowest."""
        return self.words[row][chunk] >> Uint32(self.shifts[chunk])

    def factors(self, row: int, chunk: int) -> list[Uint32]:
        """Of each 16 codes of this lane's vector in a chunk: the scale as a pair of bfloat16, see the table above."""
        if not self.words:
            return []
        word = self.word(row, chunk)
        if self.shape.read_dtype == "mxfp8":
            byte = word & Uint32(0xFF)
            # 2**(byte - 127); 2**-127 is a subnormal.
            half = select(byte == Uint32(0), Uint32(0x40), byte << 7)
            half = select(byte == Uint32(0xFF), Uint32(0x7FC0), half)
            return [half | half << 16]
        return block_factors(word, 2)

    def block_scales(self, row: int, chunk: int) -> list[Float32]:
        """The scales of the two nvfp4 blocks of this lane's vector in a chunk, times 2**6."""
        word = self.word(row, chunk)
        bits = [(word << shift) & Uint32(0xFF << 20) for shift in (20, 12)]
        return [product(x.bitcast(Float32), Float32(2.0**126)) for x in bits]

    def of_sums(self, row: int, power: int) -> Float32:
        """What a sum over a row, which is 2**-power of what it should be but for the scale of the row, is times."""
        return self.rows[row] * Float32(2.0**power) if power else self.rows[row]

    def scaled(self, part: int, sums: list[list[Any]], power: int) -> list[list[Any]]:
        """Sums of products, (row, probe), (row, next probe), (next row, probe), .., which are 2**-power of what they
        should be but for the scales of rows, with those."""
        if not self.rows:
            return sums
        rows = [self.of_sums(2 * part + i, power) for i in (0, 1)]
        return [[x * rows[i // 2] for i, x in enumerate(block)] for block in sums]
