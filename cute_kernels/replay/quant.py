"""Read copies of a state: a warp encodes 16 rows of it, with the bits of `replayssm.reference.quant.encode`.

A lane takes 16 neighbours of a row, a block of NVFP4, so a block is rounded without the other lanes: what its
candidates for a scale cost is paid once, and errors are summed in the order of the definition. Where that rounds a
product, a quotient or a sum, one instruction does; quotients by constants and reciprocals of short numbers are exact by
arguments of their own (`primitives.arithmetic`). NVFP4 reads the rows twice, the second time from L1, so that a tile of
any width takes few registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_kernels.args import CopyTensors
from cute_kernels.configs import CODE_BITS, SIZE_BYTES, WARP
from cute_kernels.primitives.arithmetic import (
    difference,
    exact_reciprocal,
    larger_magnitude,
    product,
    quotient,
    quotient_by,
    rounded,
    select,
    short_reciprocal,
    total,
)
from cute_kernels.primitives.convert import low_bytes, pack, pack_e4m3, unpack, unpack_e4m3
from cute_kernels.primitives.memory import load_words, store_byte_if, store_words, store_words_if
from cute_kernels.primitives.reduce import butterfly
from cute_kernels.replay.window import address

BLOCK = {"nvfp4": 16, "mxfp8": 32}
LARGEST_CODE = {"float8_e4m3fn": 448.0, "int8": 127.0}
TILE_ROWS = 16
LANE_VALUES = 16
ATOM_ROWS, ATOM_BLOCKS = 128, 4  # the scale bytes that lie together
LEAST_SCALE = 2.0**-100
NAN, INFINITY = 0x7FC00000, 0x7F800000
ROUND_UP = 0x7FFFFF  # added to a float's bits: the exponent becomes that of the next power of two
# The largest scale of a block, 448 times the largest value by the least divisor, 4, is 1.75 * 2**10: a power of two is
# that much below a number where the mantissa is no more than that of 1.75.
ROUND_UP_175, EXPONENT_1792 = 0x7FFFFF - 0x600000, 10


@dataclass(frozen=True)
class CopyShape:
    """The state of a slot and the format of its copy.

    Args:
        rows: of all heads, HV * V, a multiple of 16.
        d_state: 64, 128 or 256.
    """

    rows: int
    d_state: int
    state_dtype: str
    read_dtype: str

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return self.d_state // LANE_VALUES

    @property
    def rows_at_once(self) -> int:
        return WARP // self.lanes

    @property
    def row_bytes(self) -> int:
        return self.d_state * SIZE_BYTES[self.state_dtype]

    @property
    def code_bytes(self) -> int:
        """Of a row."""
        return self.d_state * CODE_BITS[self.read_dtype] // 8

    @property
    def blocks(self) -> int:
        """Of a row; 0 where scales are not those of blocks."""
        return self.d_state // BLOCK[self.read_dtype] if self.read_dtype in BLOCK else 0

    @property
    def atoms(self) -> int:
        """Groups of four scale bytes that a row takes."""
        return -(-self.blocks // ATOM_BLOCKS)

    @property
    def tiles(self) -> int:
        """16 rows each; with scales of blocks also those that pad the last atom."""
        unit = ATOM_ROWS if self.blocks else TILE_ROWS
        return -(-self.rows // unit) * (unit // TILE_ROWS)


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
        finite: whether all of the rows are.
    """

    value: Float32
    inverse: Float32
    finite: Boolean

    @classmethod
    def of(cls, largest: Any) -> TileScale:
        """The least power of two for which no block scale exceeds e4m3."""
        word, finite = largest.bitcast(Uint32), is_finite(largest)
        exponent = Int32((word + Uint32(ROUND_UP_175)) >> 23) - Int32(EXPONENT_1792)
        least = Int32(127 - 100)
        exponent = select(exponent < least, least, exponent)
        value, inverse = (
            select(largest == Float32(0.0), Float32(0.0), (e << 23).bitcast(Float32))
            for e in (exponent, 254 - exponent)
        )
        return cls(or_nan(finite, value), or_nan(finite, inverse), finite)


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


def halving_sum(x: list[Any]) -> Float32:
    """The sum of a power of two of values, halves added onto each other."""
    while len(x) > 1:
        x = [total(a, b) for a, b in zip(x[: len(x) // 2], x[len(x) // 2 :], strict=True)]
    return x[0]


def round_e2m1(x: Any) -> tuple[Float32, Float32]:
    """A magnitude to nearest even: a float that ends in the code, as `e2m1_word` reads it, and the value.

    Added to 2**22 a float loses what is below 0.5, to 2**23 below 1, to 2**24 below 2.
    """
    x = rounded("min.f32", x, Float32(6.0))
    exponent = rounded("max.f32", x, Float32(1.0)).bitcast(Uint32) & Uint32(INFINITY)
    place = (exponent + Uint32(22 << 23)).bitcast(Float32)
    code = total(x, place)
    return code, difference(code, place)


def e2m1_word(codes: list[Any], values: list[Any]) -> Uint32:
    """Eight codes in a word: what `round_e2m1` gave, and signs of the values.

    The last bits count units of the exponent, 2 more for each; its bits from 22 on are 298 for 2**22, so 6 modulo 8
    takes them away.
    """
    word = Uint32(0)
    for i, (code, value) in enumerate(zip(codes, values, strict=True)):
        bits = code.bitcast(Uint32)
        magnitude = (bits + (bits >> 22) + Uint32(6)) & Uint32(7)
        sign = (value.bitcast(Uint32) >> 28) & Uint32(8)
        word = word | ((magnitude | sign) << (4 * i))
    return word


def encode_nvfp4(values: list[Any], tile: TileScale) -> tuple[list[Uint32], Uint32]:
    """Two words of codes and the scale byte of a block: the largest value becomes 6, 6.5 or 4, the first that errs
    least."""
    share = product(largest_of(values), tile.inverse)
    sizes = [rounded("abs.f32", value) for value in values]
    wanted = [quotient_by(share, 6.0), quotient_by(share, 6.5), product(share, Float32(0.25)), Float32(0.0)]
    (scales,) = pack_e4m3(wanted)
    best: Any = None
    for i, scale in enumerate(unpack_e4m3(scales)[:3]):
        unit = product(scale, tile.value)
        inverse = select(unit == Float32(0.0), Float32(0.0), short_reciprocal(unit))
        found = [round_e2m1(product(size, inverse)) for size in sizes]
        errors = [difference(product(value, unit), size) for (_, value), size in zip(found, sizes, strict=True)]
        error, byte = halving_sum([product(x, x) for x in errors]), scales >> (8 * i)
        made = [error, byte, *(code for code, _ in found)]
        if best is not None:
            better = error < best[0]
            made = [select(better, one, other) for one, other in zip(made, best, strict=True)]
        best = made
    _, byte, *codes = best
    # A tile that is not finite has the code of its NaN, +6, throughout: signs are those of the values.
    kept = select(tile.finite, Uint32(0xFFFFFFFF), Uint32(0x77777777))
    return [e2m1_word(codes[i : i + 8], values[i : i + 8]) & kept for i in (0, 8)], byte


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


def load_values(shape: CopyShape, source: Any) -> list[Float32]:
    """A lane's 16 values."""
    num_bytes = LANE_VALUES * SIZE_BYTES[shape.state_dtype]
    return unpack(
        [w for skip in range(0, num_bytes, 16) for w in load_words(source, 4, offset=skip)], shape.state_dtype
    )


def scale_at(shape: CopyShape, row: Any, block: Any) -> Int32:
    """The byte of a block's scale: see `quant.scale_index` of the reference."""
    atom = (row >> 7) * shape.atoms + (block >> 2)
    return (atom << 9) + ((row & 31) << 4) + ((row >> 5 & 3) << 2) + (block & 3)


def encode_part(shape: CopyShape, values: list[Any], tile: TileScale, to: CopyPlaces, row: Any, part: Any) -> None:
    """Encode a lane's 16 values, part `part` of a row."""
    read_dtype = shape.read_dtype
    if read_dtype == "nvfp4":
        words, byte = encode_nvfp4(values, tile)
        store_byte_if(True, to.scale + Int64(scale_at(shape, row, part)), byte)
    elif read_dtype == "mxfp8":
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
    where = to.codes + Int64(row) * shape.code_bytes + Int64(part * (4 * len(words)))
    for i in range(0, len(words), 4):
        store_words(where, words[i : i + 4], offset=4 * i)


@cute.jit
def encode_rows(shape: cutlass.Constexpr, source: Int64, to: CopyPlaces, first_row: Int32, lane: Int32):
    """Encode 16 rows of a slot's state.

    Args:
        source: byte address of the slot's state; what other threads wrote there must be visible.
        first_row: a multiple of 16, of the rows of all heads.
    """
    part, first = lane % shape.lanes, first_row + lane // shape.lanes
    here = source + Int64(first) * shape.row_bytes + Int64(part * (LANE_VALUES * SIZE_BYTES[shape.state_dtype]))
    steps, step_bytes = TILE_ROWS // shape.rows_at_once, shape.rows_at_once * shape.row_bytes
    tile = TileScale(Float32(0.0), Float32(0.0), Boolean(True))
    if cutlass.const_expr(shape.read_dtype == "nvfp4"):
        largest = Float32(0.0)
        for step in cutlass.range(steps, unroll=2):
            largest = larger_magnitude(largest, largest_of(load_values(shape, here + Int64(step * step_bytes))))
        tile = TileScale.of(largest_of([largest], lane_masks(WARP)))
        place = to.tile_scale + Int64(first_row // TILE_ROWS * 4)
        store_words_if(Int32(lane == 0), place, [tile.value.bitcast(Uint32)])
    for step in cutlass.range(steps, unroll=1):
        values = load_values(shape, here + Int64(step * step_bytes))
        encode_part(shape, values, tile, to, first + step * shape.rows_at_once, part)


def clear_scales(shape: CopyShape, to: CopyPlaces, first_row: Any, lane: Any) -> None:
    """Zeros for the scales of 16 rows that pad the last atom."""
    for atom in range(shape.atoms):
        where = to.scale + Int64(scale_at(shape, first_row + lane, Int32(atom * ATOM_BLOCKS)))
        store_words_if(Int32(lane < TILE_ROWS), where, [Uint32(0)])
