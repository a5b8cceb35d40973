"""Read copies of a state: a warp encodes 16 rows of it, with the bits of `replayssm.reference.quant.encode`.

A lane takes 16 neighbours of a row, a block of NVFP4, so a block is rounded without the other lanes: what its
candidates for a scale cost is paid once, and errors are summed in the order of the definition. Where that rounds a
product, a quotient or a sum, one instruction does; quotients by constants and reciprocals of short numbers are exact by
arguments of their own (`primitives.arithmetic`, tests/ptx/test_encode_kernel.py). NVFP4 reads each row once: the scales
of a lane's blocks wait in registers for that of the tile. It takes 18.3 instructions a value, 10 of the ALU, which
issues every other cycle (SASS of sm_90a; 46.2 and 22.9 when it computed in float32 and read twice).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_kernels.args import CopyTensors
from cute_kernels.configs import SIZE_BYTES, WARP
from cute_kernels.copy_shape import ATOM_BLOCKS, LANE_VALUES, TILE_ROWS, CopyShape
from cute_kernels.primitives.arithmetic import (
    exact_reciprocal,
    larger_magnitude,
    product,
    quotient,
    quotient_by,
    reciprocal,
    rounded,
    select,
    total,
)
from cute_kernels.primitives.convert import (
    bits_of,
    bytes_of,
    low_bytes,
    pack,
    pack_e4m3,
    unpack,
    unpack_e4m3,
    upper_bytes,
)
from cute_kernels.primitives.halves import (
    pair_fused,
    pair_of,
    pair_opposite,
    pair_product,
    pair_total,
    repeated,
    swapped,
)
from cute_kernels.primitives.memory import load_words, store_byte_if, store_words, store_words_if
from cute_kernels.primitives.reduce import butterfly
from cute_kernels.replay.window import address

LARGEST_CODE = {"float8_e4m3fn": 448.0, "int8": 127.0}
LEAST_SCALE = 2.0**-100
SEARCH, LEAST_BLOCK_SCALE, LEAST_NORMAL, UNITS = (6.0, 6.5, 4.0), 2.0**-6, 8, 2.0**14  # see the reference
E4M3_NAN = 0x7F
NAN, INFINITY = 0x7FC00000, 0x7F800000
ROUND_UP = 0x7FFFFF  # added to a float's bits: the exponent becomes that of the next power of two
# The largest scale of a block, 448 times the largest value by the least divisor, 4, is 1.75 * 2**10: a power of two is
# that much below a number where the mantissa is no more than that of 1.75.
ROUND_UP_175, EXPONENT_1792 = 0x7FFFFF - 0x600000, 10


@dataclass(frozen=True)
class CopyPlaces:
    """Where the parts of a slot's copy begin, byte addresses; 0 where the format has no such part."""

    codes: Int64
    scale: Int64
    tile_scale: Int64

    @classmethod
    def of(cls, copy: CopyTensors, slot: Any) -> CopyPlaces:
        """The parts of a slot."""
        parts = (copy.codes, copy.scale, copy.tile_scale)
        return cls(*(Int64(0) if t is None else address(t, t.element_type.width // 8, slot) for t in parts))


@dataclass(frozen=True)
class TileScale:
    """The scale of 16 rows.

    Args:
        exponent: biased, as if they were finite and not all 0.
        finite: whether all of the rows are.
    """

    value: Float32
    exponent: Int32
    finite: Boolean

    @classmethod
    def of(cls, largest: Any) -> TileScale:
        """The least power of two for which no block scale exceeds e4m3."""
        word, finite = largest.bitcast(Uint32), is_finite(largest)
        exponent = Int32((word + Uint32(ROUND_UP_175)) >> 23) - Int32(EXPONENT_1792)
        least = Int32(127 - 100)
        exponent = select(exponent < least, least, exponent)
        value = select(largest == Float32(0.0), Float32(0.0), (exponent << 23).bitcast(Float32))
        return cls(or_nan(finite, value), exponent, finite)

    def byte(self, scale: Any) -> Int32:
        """The scale byte of a block: `scale` as `encode_nvfp4` gives it, made relative to the tile's."""
        byte = scale - (self.exponent << 3)
        byte = select(byte < Int32(LEAST_NORMAL), Int32(0), byte)
        return select(self.finite, byte, Int32(E4M3_NAN))


def is_finite(largest: Any) -> Boolean:
    """Whether a largest magnitude is that of numbers."""
    return largest.bitcast(Uint32) < Uint32(INFINITY)


def or_nan(finite: Any, x: Any) -> Float32:
    """x, or the NaN of the definition."""
    return select(finite, x, Uint32(NAN).bitcast(Float32))


def largest_of(values: list[Any], masks: tuple[int, ...] = ()) -> Float32:
    """The largest magnitude of the values, here and in the lanes that differ in the bits of `masks`."""
    largest = functools.reduce(larger_magnitude, values)
    for mask in masks:
        largest = larger_magnitude(largest, butterfly(largest, mask))
    return largest


def lane_masks(lanes: int) -> tuple[int, ...]:
    """Of the lanes in groups of so many."""
    return tuple(1 << b for b in range(lanes.bit_length() - 1))


def halving_sum(x: list[Any]) -> Uint32:
    """The sums of a power of two of pairs, halves added onto each other."""
    while len(x) > 1:
        x = [pair_total(a, b) for a, b in zip(x[: len(x) // 2], x[len(x) // 2 :], strict=True)]
    return x[0]


def block_error(pairs: list[Uint32], inverse: Uint32, unit: Uint32) -> Uint32:
    """The error of a block at a scale, twice: pairs as `encode_nvfp4` makes them, reciprocal and unit of the scale."""
    less = pair_opposite(unit)
    errors = []
    for pair in pairs:
        code = rounded_pair(pair_product(pair, inverse)) & Uint32(0xFE00FE00)
        errors.append(pair_fused(code, less, pair))
    squares = [pair_fused(b, b, pair_product(a, a)) for a, b in zip(errors[::2], errors[1::2], strict=True)]
    error = halving_sum(squares)
    return pair_total(error, swapped(error))


def rounded_pair(steps: Uint32) -> Uint32:
    """Two float16 in units of 2**-14, so that their first bits are the nearest codes of e2m1, a tie's the larger."""
    return steps + Uint32(0x01000100)


def e2m1_word(codes: list[Uint32]) -> Uint32:
    """Eight codes in a word, from `rounded_pair` of numbers 0 and 2, 1 and 3, 4 and 6, 5 and 7.

    In the upper byte of each float16 the first bit is the sign, and bits 1 to 3 are the magnitude.
    """
    even, odd = upper_bytes(codes[0], codes[2]), upper_bytes(codes[1], codes[3])
    low = bits_of(0x07070707, even >> 1, even >> 4)
    high = bits_of(0x80808080, odd, odd << 3)
    return bits_of(0x0F0F0F0F, low, high)


def turned(first: Uint32, second: Uint32, turn: Any) -> list[Uint32]:
    """The halves of two words in another order: half i ^ `turn` is the i-th."""
    chosen = Uint32(turn * 0x2222) ^ Uint32(0x3210)
    return [bytes_of(first, second, chosen), bytes_of(first, second, chosen ^ Uint32(0x4444))]


def encode_nvfp4(values: list[Any], turn: Any) -> tuple[list[Uint32], Int32, Float32]:
    """Two words of codes, the scale and the largest magnitude of a block: that becomes 6, 6.5 or 4, the first that errs
    least. The scale is a code of e4m3 and more, with the block's exponent in it (`TileScale.byte`).

    Args:
        values: of four numbers that lie together, part i ^ `turn` is the i-th. Errors are the same in such an order.
    """
    largest = largest_of(values)
    exponent = Int32(largest.bitcast(Uint32) >> 23)
    exponent = select(exponent < 1, Int32(1), exponent)
    factor = ((Int32(255) - exponent) << 23).bitcast(Float32)
    numbers = [product(value, factor) for value in values]
    pairs = pack([numbers[4 * c + e] for c in range(4) for e in (0, 2, 1, 3)], "float16")
    most = unpack(pack([product(largest, factor)], "float16"), "float16")[0]
    wanted = [rounded("max.f32", product(most, Float32(1 / d)), Float32(LEAST_BLOCK_SCALE)) for d in SEARCH]
    (scales,) = pack_e4m3([*wanted, Float32(0.0)])
    units = [pair_product(word, pair_of(UNITS)) for word in unpack_e4m3(scales)]
    best: Any = None
    for i, unit in enumerate(unpack(units, "float16")[:3]):
        (inverse,) = pack([reciprocal(unit)] * 2, "float16")
        error = block_error(pairs, inverse, repeated(units[i // 2], i % 2))
        made = [error, inverse, scales >> (8 * i)]
        if best is not None:
            better = error < best[0]
            made = [select(better, one, other) for one, other in zip(made, best, strict=True)]
        best = made
    _, inverse, byte = best
    codes = [rounded_pair(pair_product(pair, inverse)) for pair in pairs]
    words = turned(e2m1_word(codes[:4]), e2m1_word(codes[4:]), turn)
    finite = is_finite(largest)
    return (
        [select(finite, word, Uint32(0x77777777)) for word in words],
        Int32(byte & Uint32(0xFF)) + ((exponent - 1) << 3),
        largest,
    )


def encode_mxfp8(values: list[Any]) -> tuple[list[Uint32], Uint32]:
    """Four words of codes and the scale byte of the block that this lane has half of."""
    largest = largest_of(values, (1,))
    finite = is_finite(largest)
    word = quotient(largest, Float32(448.0)).bitcast(Uint32)
    # Half the least normal number and what is below have code 0.
    exponent = select(word <= Uint32(0x400000), Uint32(0), (word + Uint32(ROUND_UP)) >> 23)
    inverse = or_nan(finite, ((Uint32(254) - exponent) << 23).bitcast(Float32))
    return pack_e4m3([product(x, inverse) for x in values]), select(finite, exponent, Uint32(255))


def encode_row(values: list[Any], read_dtype: str, masks: tuple[int, ...]) -> tuple[list[Uint32], Float32]:
    """Four words of 8-bit codes and the scale of the row that the lanes which differ in `masks` share."""
    largest, most = largest_of(values, masks), LARGEST_CODE[read_dtype]
    finite, nothing = is_finite(largest), largest == Float32(0.0)
    scale = rounded("max.f32", quotient_by(largest, most), Float32(LEAST_SCALE))
    scale = or_nan(finite, select(nothing, Float32(0.0), scale))
    inverse = select(nothing, Float32(0.0), exact_reciprocal(scale))
    scaled = [product(x, inverse) for x in values]
    if read_dtype != "int8":
        return pack_e4m3(scaled), scale
    # 1.5 * 2**23 leaves an integer in the last bits. No scaled value rounds beyond 127.
    words = [total(x, Float32(12582912.0)).bitcast(Uint32) for x in scaled]
    kept = select(finite, Uint32(0xFFFFFFFF), Uint32(0))
    return [low_bytes(words[i : i + 4]) & kept for i in range(0, LANE_VALUES, 4)], scale


def turn_of(shape: CopyShape, lane: Any) -> Int32:
    """Which of its parts of four values a lane loads first, so that the loads of 8 lanes lie in all banks of L1."""
    return (lane >> 1) & 3 if SIZE_BYTES[shape.state_dtype] == 4 else (lane >> 2 & 1) << 1


def load_values(shape: CopyShape, source: Any, turn: Any = None) -> list[Float32]:
    """A lane's 16 values; part i ^ `turn` of them is the i-th where one is given."""
    size = SIZE_BYTES[shape.state_dtype]
    skips = range(0, LANE_VALUES * size, 16)
    if turn is None:
        words = [w for skip in skips for w in load_words(source, 4, offset=skip)]
    else:
        places = [source + Int64((turn * (4 * size)) ^ skip) for skip in skips]
        words = [w for place in places for w in load_words(place, 4)]
    return unpack(words, shape.state_dtype)


def scale_at(shape: CopyShape, row: Any, block: Any) -> Int32:
    """The byte of a block's scale: see `quant.scale_index` of the reference."""
    atom = (row >> 7) * shape.atoms + (block >> 2)
    return (atom << 9) + ((row & 31) << 4) + ((row >> 5 & 3) << 2) + (block & 3)


def store_codes(shape: CopyShape, words: list[Uint32], to: CopyPlaces, row: Any, part: Any) -> None:
    """Write the codes of part `part` of a row."""
    where = to.codes + Int64(row) * shape.code_bytes + Int64(part * (4 * len(words)))
    for i in range(0, len(words), 4):
        store_words(where, words[i : i + 4], offset=4 * i)


def encode_part(shape: CopyShape, values: list[Any], to: CopyPlaces, row: Any, part: Any) -> None:
    """Encode a lane's 16 values, part `part` of a row, in any format but NVFP4."""
    read_dtype = shape.read_dtype
    if read_dtype == "mxfp8":
        words, byte = encode_mxfp8(values)
        # The second lane of a block writes a byte that pads the row, where there is one.
        pads = part % 2
        block = part // 2 + pads * shape.blocks
        there, byte = Int32(block < shape.atoms * ATOM_BLOCKS), select(pads != 0, Uint32(0), byte)
        store_byte_if(there, to.scale + Int64(scale_at(shape, row, block)), byte)
    elif read_dtype in LARGEST_CODE:
        words, scale = encode_row(values, read_dtype, lane_masks(shape.lanes))
        store_words_if(Int32(part == 0), to.scale + Int64(row * 4), [scale.bitcast(Uint32)])
    else:
        words = pack(values, read_dtype)
    store_codes(shape, words, to, row, part)


def encode_tile(shape: CopyShape, here: Any, to: CopyPlaces, row: Any, part: Any, lane: Any) -> None:
    """Encode 16 rows in NVFP4, a lane's first at `here`: the scales when the tile's is known, the codes before.

    A lane loads what it encodes next before it encodes, so that a warp waits less.
    """
    steps, step_bytes = TILE_ROWS // shape.rows_at_once, shape.rows_at_once * shape.row_bytes
    turn, largest = turn_of(shape, lane), Float32(0.0)
    scales: list[Int32] = []
    ahead = load_values(shape, here, turn)
    for step in range(steps):
        values = ahead
        if step + 1 < steps:
            ahead = load_values(shape, here + Int64((step + 1) * step_bytes), turn)
        words, scale, own = encode_nvfp4(values, turn)
        store_codes(shape, words, to, row + step * shape.rows_at_once, part)
        scales, largest = [*scales, scale], larger_magnitude(largest, own)
    tile = TileScale.of(largest_of([largest], lane_masks(WARP)))
    store_words_if(Int32(lane == 0), to.tile_scale + Int64((row >> 4) * 4), [tile.value.bitcast(Uint32)])
    for step, scale in enumerate(scales):
        at = scale_at(shape, row + step * shape.rows_at_once, part)
        store_byte_if(True, to.scale + Int64(at), tile.byte(scale))


@cute.jit
def encode_rows(shape: cutlass.Constexpr, source: Int64, to: CopyPlaces, first_row: Int32, lane: Int32):
    """Encode 16 rows of a slot's state.

    Args:
        source: byte address of the slot's state; what other threads wrote there must be visible.
        first_row: a multiple of 16, of the rows of all heads.
    """
    part, first = lane % shape.lanes, first_row + lane // shape.lanes
    here = source + Int64(first) * shape.row_bytes + Int64(part * (LANE_VALUES * SIZE_BYTES[shape.state_dtype]))
    if cutlass.const_expr(shape.read_dtype == "nvfp4"):
        encode_tile(shape, here, to, first, part, lane)
    else:
        for step in cutlass.range(TILE_ROWS // shape.rows_at_once, unroll=1):
            values = load_values(shape, here + Int64(step * (shape.rows_at_once * shape.row_bytes)))
            encode_part(shape, values, to, first + step * shape.rows_at_once, part)


def clear_scales(shape: CopyShape, to: CopyPlaces, first_row: Any, lane: Any) -> None:
    """Zeros for the scales of 16 rows that pad the last atom."""
    for atom in range(shape.atoms):
        where = to.scale + Int64(scale_at(shape, first_row + lane, Int32(atom * ATOM_BLOCKS)))
        store_words_if(Int32(lane < TILE_ROWS), where, [Uint32(0)])
