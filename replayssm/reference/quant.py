"""Read copies of a state: codes with scales, how the scales are fitted, and where their bytes lie.

A state is [..., HV, V, K] in float32. `encode` gives the parts of a copy by name, `decode` what they stand for:

| read_dtype | codes | scale | tile_scale | a value is |
|---|---|---|---|---|
| bfloat16, float16 | [HV, V, K] | | | code |
| float8_e4m3fn, int8 | [HV, V, K] bytes | [HV, V] float32 | | code * scale |
| "mxfp8" | [HV, V, K] e4m3 bytes | ue8m0 byte for 32 values along K | | code * scale |
| "nvfp4" | [HV, V, K / 2], low nibble first | e4m3 byte for 16 values | [HV, V / 16] float32 | code * scale * tile |

A block of NVFP4 is encoded in float16, two values at a time: a power of two brings its largest to 2 to 4, where no
reciprocal of a scale, step of a value or unit is subnormal, and in the end the scale's exponent becomes relative to the
tile's. A scale that is then below e4m3's normal numbers becomes 0, so that what is below 2**-12 of a tile's largest may
be 0 too.

Scale bytes lie in atoms of 128 rows by 4 blocks, see `scale_index`; tile scales are powers of two, so that no order of
the two products rounds. Row and tile scales are 0 where all that they cover is. An infinity or a NaN makes all that
shares its row, block (MXFP8) or tile (NVFP4) NaN: it is not hidden, and nothing beyond is touched. (In such a tile
scales have e4m3's code of a NaN, and codes are +6 in the blocks that are not finite.) Row and tile scales of nonzero
states are 2**-100 or more.

Kernels must give the same bits, so the arithmetic is part of the definition: every product, quotient and sum below is
rounded on its own, to float32 or float16 as it says, but for `_square_and`, which is rounded once. The errors of a
block are squared and added two and two, then in the order of a halving tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.reference import formats
from replayssm.spec import READ_FORMATS, SCALE_ATOM, ReadDtype, scale_bytes

ATOM_ROWS, ATOM_BLOCKS = SCALE_ATOM
ATOM_BYTES = ATOM_ROWS * ATOM_BLOCKS
LEAST_SCALE = 2.0**-100
# The block scales that `encode` tries bring the largest magnitude to one of these numbers; the first is kept on a tie.
# On states after 2048 tokens (`tuning.precision`, init and long) 6 alone leaves a mean error of 9.57 %, these three
# 8.59 %, the least of all triples from 4 to 6.5 in quarters; the best four 8.51, all eleven 8.39 % (torch, 2026-11-30).
SEARCH = (6.0, 6.5, 4.0)
PLAIN = (6.0,)
LEAST_BLOCK_SCALE, LEAST_NORMAL = 2.0**-6, 8  # of e4m3, and its code: no step of a value is beyond 6.92, where 7 begin
E2M1_UNIT = (
    2.0**-14
)  # of a float16 whose bits begin as those of the code do, as both formats have their subnormals there
COLUMN_PASSES = 3


def scale_index(row: Tensor, block: Tensor, num_blocks: int) -> Tensor:
    """The byte of a block's scale in the scales of a slot.

    Rows of all heads count through, head by head. 128 rows by 4 blocks along K make an atom of 512 bytes, atoms of one
    128 rows follow each other along K, and both ends are padded to whole atoms. Within an atom lies row r, block b at
    16 * (r % 32) + 4 * (r // 32) + b, as the scale-factor operand of tcgen05 block-scaled MMA wants it; a reader of one
    row finds its 4 scales in one aligned word.

    Args:
        row: integers, 0 to HV * V - 1.
        block: integers, 0 to num_blocks - 1, broadcast with `row`.
        num_blocks: blocks of a row, K / 16 or K / 32.
    """
    atom = row // ATOM_ROWS * -(-num_blocks // ATOM_BLOCKS) + block // ATOM_BLOCKS
    row = row % ATOM_ROWS
    return atom * ATOM_BYTES + row % 32 * 16 + row // 32 * ATOM_BLOCKS + block % ATOM_BLOCKS


def to_atoms(scale: Tensor) -> Tensor:
    """[..., HV, V, blocks] bytes to [..., scale_bytes], zeros in the padding."""
    rows, blocks = scale.shape[-3] * scale.shape[-2], scale.shape[-1]
    atoms = scale.new_zeros(*scale.shape[:-3], scale_bytes(rows, blocks))
    atoms[..., _indices(rows, blocks, scale.device)] = scale.flatten(-3)
    return atoms


def from_atoms(atoms: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The inverse of `to_atoms`; `shape` is HV, V and the blocks of a row."""
    heads, rows, blocks = shape
    return atoms[..., _indices(heads * rows, blocks, atoms.device)].unflatten(-1, shape)


def _indices(rows: int, blocks: int, device: torch.device) -> Tensor:
    row, block = torch.arange(rows, device=device)[:, None], torch.arange(blocks, device=device)
    return scale_index(row, block, blocks).flatten()


def encode(state: Tensor, read_dtype: ReadDtype, divisors: tuple[float, ...] = SEARCH) -> dict[str, Tensor]:
    """The parts of a read copy.

    Args:
        state: [..., HV, V, K] float32; K is a multiple of the format's block.
        divisors: of NVFP4, the block scales to choose from by the error of the block: its largest magnitude over each.
    """
    form = READ_FORMATS[read_dtype]
    if read_dtype == "nvfp4":
        return _encode_nvfp4(state, divisors)
    if read_dtype == "mxfp8":
        blocks = state.unflatten(-1, (-1, form.block))
        scale = formats.encode_ue8m0(_quotient(_largest(blocks, -1), formats.E4M3_MAX))
        code = formats.encode_e4m3(blocks * (1 / formats.decode_ue8m0(scale)))
        return {"codes": code.flatten(-2), "scale": to_atoms(scale.squeeze(-1))}
    if not form.row_scale:
        return {"codes": state.to(form.codes)}
    largest, encoder = (
        (formats.INT8_MAX, formats.encode_int8) if form.codes is torch.int8 else (formats.E4M3_MAX, formats.encode_e4m3)
    )
    row = _nonzero(_largest(state, -1), largest)
    return {"codes": encoder(state * _inverse(row)), "scale": row.squeeze(-1)}


def decode(parts: dict[str, Tensor], read_dtype: ReadDtype) -> Tensor:
    """The state that a read copy stands for, [..., HV, V, K] float32."""
    codes, form = parts["codes"], READ_FORMATS[read_dtype]
    if not form.block:
        value = codes.float() if codes.dtype != torch.uint8 else formats.decode_e4m3(codes)
        return value * parts["scale"][..., None] if form.row_scale else value
    nvfp4 = read_dtype == "nvfp4"
    value = formats.decode_e2m1(formats.unpack_e2m1(codes)) if nvfp4 else formats.decode_e4m3(codes)
    value = value.unflatten(-1, (-1, form.block))
    heads, rows, blocks = value.shape[-4:-1]
    scale = from_atoms(parts["scale"], (heads, rows, blocks))
    if not nvfp4:
        return (value * formats.decode_ue8m0(scale)[..., None]).flatten(-2)
    tile = parts["tile_scale"].repeat_interleave(form.tile_rows, -1)[..., :rows, None]
    return (value * (formats.decode_e4m3(scale) * tile)[..., None]).flatten(-2)


def fit_columns(state: Tensor) -> Tensor:
    """The channel scales of a two-axis copy, [..., HV, 1, K]: encode state / columns, and multiply the queries by them.

    Rows and columns are divided by their root mean squares in turns, `COLUMN_PASSES` times. The scale of a row is then
    dropped, as its block scales take it up; what the turns buy is a column's size apart from that of its rows.
    """
    columns, rows = torch.ones_like(state[..., :1, :]), torch.ones_like(state[..., :1])
    for _ in range(COLUMN_PASSES):
        columns = (state / rows).square().mean(-2, keepdim=True).sqrt().clamp_min(LEAST_SCALE)
        rows = (state / columns).square().mean(-1, keepdim=True).sqrt().clamp_min(LEAST_SCALE)
    return columns


def _encode_nvfp4(state: Tensor, divisors: tuple[float, ...]) -> dict[str, Tensor]:
    form = READ_FORMATS["nvfp4"]
    rows = state.shape[-2]
    padded = torch.nn.functional.pad(state, (0, 0, 0, -rows % form.tile_rows)).unflatten(-2, (-1, form.tile_rows))
    tile = _power_above(_largest(padded, (-2, -1)))[..., 0, 0]
    spread = tile.repeat_interleave(form.tile_rows, -1)[..., :rows, None, None]
    blocks = state.unflatten(-1, (-1, form.block))
    exponent = _exponent(blocks.abs().amax(-1, keepdim=True)).clamp_min(1)
    blocks = (blocks * _float_of(255 - exponent)).half()
    largest = blocks.abs().amax(-1, keepdim=True).float()
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for divisor in divisors:
        wanted = largest * largest.new_full((), 1 / divisor)
        scale = formats.encode_e4m3(wanted.clamp_min(LEAST_BLOCK_SCALE))
        unit = formats.decode_e4m3(scale) / E2M1_UNIT
        codes = formats.round_e2m1(blocks * (torch.ones_like(unit) / unit).half())
        left, right = (blocks - codes * unit.half()).unflatten(-1, (-1, 2)).unbind(-1)
        error = _halving_sum(_square_and(right, left * left))
        if best is not None:
            better = error < best[2]
            scale, codes, error = (
                one.where(better, other) for one, other in zip((scale, codes, error), best, strict=True)
            )
        best = scale, codes, error
    assert best is not None
    # The exponent of a scale has 3 bits of mantissa below it; a block's numbers were brought to 2 to 4.
    scale = best[0].int() + 8 * (exponent - 1 - _exponent(spread.clamp_min(LEAST_SCALE)))
    scale = scale.where(scale >= LEAST_NORMAL, 0).where(spread.isfinite(), 0x7F).to(torch.uint8)
    codes = formats.code_e2m1(best[1]).where(exponent < 255, 7)
    return {"codes": formats.pack_e2m1(codes.flatten(-2)), "scale": to_atoms(scale.squeeze(-1)), "tile_scale": tile}


def _exponent(x: Tensor) -> Tensor:
    """The biased exponent of a float32 that is not negative: 0 of subnormals, 255 of what is no number."""
    return x.view(torch.int32) >> 23


def _float_of(exponent: Tensor) -> Tensor:
    return (exponent << 23).view(torch.float32)


def _square_and(x: Tensor, y: Tensor) -> Tensor:
    """x * x + y of float16, rounded once: through the float32 that is odd where it is not exact."""
    exact = x.double().square() + y.double()
    near = exact.float()
    bits, rest = near.view(torch.int32), exact - near.double()
    odd = bits + rest.sign().int() * (1 - bits % 2)
    return odd.view(torch.float32).half()


def _largest(x: Tensor, axes: int | tuple[int, ...]) -> Tensor:
    """The largest magnitude, NaN where anything is not finite."""
    largest = x.abs().amax(axes, keepdim=True)
    return largest.where(largest.isfinite(), torch.nan)


def _quotient(x: Tensor, divisor: float) -> Tensor:
    # By a number torch divides on CUDA as a product with its inverse, which rounds twice; by a tensor there it divides.
    return x / x.new_full((), divisor)


def _nonzero(largest: Tensor, codes: float) -> Tensor:
    """The scale that brings `largest` to the largest code; 0 for 0."""
    return _quotient(largest, codes).clamp_min(LEAST_SCALE).where(largest != 0, 0)


def _power_above(largest: Tensor) -> Tensor:
    """The least power of two for which no block scale of `SEARCH` exceeds e4m3; 0 for 0."""
    power = formats.decode_ue8m0(formats.encode_ue8m0(_quotient(largest, formats.E4M3_MAX * min(SEARCH))))
    return power.clamp_min(LEAST_SCALE).where(largest != 0, 0)


def _inverse(scale: Tensor) -> Tensor:
    return (1 / scale).where(scale != 0, 0)


def _halving_sum(x: Tensor) -> Tensor:
    """The sum over the last axis, a power of two long, halves added onto each other, kept as an axis of 1."""
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x
