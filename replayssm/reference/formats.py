"""Element formats of stored states: float32 values to codes and back, to nearest even or stochastically.

Codes are those of PTX `cvt ... .satfinite`. Every input is defined:

| input | e2m1 | e4m3 | ue8m0 (rounded up) | int8 | float16, bfloat16 |
|---|---|---|---|---|---|
| zero | 0, its sign kept | 0, its sign kept | 2**-127, code 0 | 0 | 0, its sign kept |
| below the smallest code | to the nearest of 0 and 0.5 | subnormals, 2**-9 apart | 2**-127 | | subnormals |
| beyond the largest | 6 | 448 | 2**127 | 127, so that -128 is never written | infinity |
| infinity | 6 of its sign | 448 of its sign | 2**127 | 127 of its sign | infinity |
| NaN | +6, code 7 | NaN, code 0x7F | NaN, code 0xFF | 0 | NaN |
| negative | | | its magnitude | | |

Stochastic rounding cuts |x| / unit + r * 2**-bits, with the unit of x in the format and r a random number of so many
bits. A value of the format stays itself; any other goes up with its fraction's probability to within 2**-bits. `cvt.rs`
takes one random word for two or four values. Bits 0-12 and 16-28 are for the lower and upper float16 of a pair, bits
0-15 and 16-31 for its two bfloat16; of the four e4m3 of a word the lower two share bits 0-15, the others 16-31. PTX
leaves the alignment to a figure. Here bits align at the top, as in the interpreter of tests/ptx/convert.py: a model
that no sm_100a hardware has confirmed yet. int8 has no `cvt.rs` and takes its bits as e4m3 does.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

E2M1_MAX, E4M3_MAX, INT8_MAX = 6.0, 448.0, 127.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Stochastic = Literal["float16", "bfloat16", "e4m3", "int8"]


class Draw(NamedTuple):
    """How a format takes random bits: their number, the values that share a word, and where the bits of each start."""

    bits: int
    starts: tuple[int, ...]


DRAWS: dict[Stochastic, Draw] = {
    "float16": Draw(13, (0, 16)),
    "bfloat16": Draw(16, (0, 16)),
    "e4m3": Draw(16, (0, 0, 16, 16)),
    "int8": Draw(16, (0, 0, 16, 16)),
}
# Bits of the mantissa, least exponent, largest value; int8 is a mantissa of 7 bits below one exponent.
_GRID = {
    "float16": (10, -14, 65504.0),
    "bfloat16": (7, -126, (2 - 2.0**-7) * 2.0**127),
    "e4m3": (3, -6, E4M3_MAX),
    "int8": (7, 7, INT8_MAX),
}


def encode_e2m1(x: Tensor) -> Tensor:
    """float32 to codes 0 to 15 in uint8, to nearest even."""
    # The midpoints of neighbours; at a tie the even code wins, so half of them lie just below theirs.
    ends = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device)
    ends[1::2] = torch.nextafter(ends[1::2], ends[:1])
    code = torch.bucketize(x.abs(), ends)  # NaN comes last, as 7
    return (code + 8 * (torch.signbit(x) & ~x.isnan())).to(torch.uint8)


def round_e2m1(x: Tensor) -> Tensor:
    """float16 in units of 2**-14, below 7 of them, to the nearest codes in such units, a tie to the larger.

    In these units the exponents of e2m1 are those of float16, so the last 9 bits are what is rounded.
    """
    return ((x.view(torch.int16) + 256) & -512).view(torch.float16)


def code_e2m1(x: Tensor) -> Tensor:
    """The codes of what `round_e2m1` gave, in uint8."""
    bits = x.view(torch.int16)
    return ((bits >> 9 & 7) + 8 * (bits < 0)).to(torch.uint8)


def decode_e2m1(code: Tensor) -> Tensor:
    """Codes 0 to 15 to float32."""
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=code.device)
    return table[code.long()]


def pack_e2m1(code: Tensor) -> Tensor:
    """Codes along the last axis, two a byte, the first in the low nibble."""
    return code[..., ::2] | code[..., 1::2] << 4


def unpack_e2m1(packed: Tensor) -> Tensor:
    """The inverse of `pack_e2m1`."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def encode_e4m3(x: Tensor) -> Tensor:
    """float32 to codes in uint8, to nearest even."""
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return code.where(~x.isnan(), 0x7F)


def decode_e4m3(code: Tensor) -> Tensor:
    """Codes to float32."""
    return code.view(torch.float8_e4m3fn).float()


def encode_ue8m0(x: Tensor) -> Tensor:
    """|x| in float32 to the exponent of a power of two that is not below it, biased by 127, in uint8."""
    mantissa, exponent = torch.frexp(x.double().abs())  # mantissa in [0.5, 1), also of float32 subnormals
    power = exponent - (mantissa == 0.5).int() + 127
    power = power.where(mantissa > 0, 0).where(~x.isinf(), 254).clamp(0, 254)
    return power.where(~x.isnan(), 255).to(torch.uint8)


def decode_ue8m0(code: Tensor) -> Tensor:
    """Codes to float32."""
    power = torch.ldexp(torch.ones_like(code, dtype=torch.float32), code.int() - 127)
    return power.where(code != 255, torch.nan)


def encode_int8(x: Tensor) -> Tensor:
    """float32 to int8, to nearest even."""
    return x.round().clamp(-INT8_MAX, INT8_MAX).nan_to_num(0.0).to(torch.int8)


def round_stochastic(x: Tensor, form: Stochastic, words: Tensor) -> Tensor:
    """float32 to values of a format, still as float32; saturated as by its encoder, which then keeps the value.

    Args:
        x: [..., n].
        words: [..., n / the values of a word], uint32 in int64.
    """
    bits, starts = DRAWS[form]
    digits, low, largest = _GRID[form]
    shifts = torch.tensor(starts, device=x.device)
    random = (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)
    exact = x.double()
    unit = torch.ldexp(torch.ones_like(exact), (torch.frexp(exact)[1] - 1).clamp_min(low) - digits)
    size = torch.floor(exact.abs() / unit + random * 2.0**-bits) * unit
    size = size.where(size <= largest, torch.inf if form in ("float16", "bfloat16") else largest)
    return torch.copysign(size, exact).where(~x.isnan(), x.double()).float()
