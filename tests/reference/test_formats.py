"""The models agree with the interpreter's cvt on every code and beside every rounding boundary of every format.

Three oracles: the values of ml_dtypes; exact nearest-even by the list of a format's values (`tests.ptx.test_formats`);
and `cvt` in the PTX interpreter, which brings rounding, saturation, packing and the places of random bits together.
Numbers: all codes; between two neighbours the midpoint and the float32 values beside it; and 65536 words that cover
every exponent of float32, subnormals, infinities and NaNs among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from replayssm.reference import formats
from tests.ptx.floating import encode as cvt
from tests.ptx.floating import rounded as rounded_float64
from tests.ptx.test_formats import all_lanes, rounds

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, on overflow and NaN
F32 = torch.float32
WORDS = np.arange(1 << 16, dtype=np.uint32) << 16
WIDE = np.concatenate([WORDS, WORDS[::7] | 1, WORDS[::11] | 0x8000, WORDS[::13] | 0xFFFF]).view(np.float32)
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 1e38, -1e38, 2.0**-127, 2.0**-126]
ENCODE: dict[str, Callable[[Tensor], Tensor]] = {"e2m1": formats.encode_e2m1, "e4m3": formats.encode_e4m3}
DECODE: dict[str, Callable[[Tensor], Tensor]] = {
    "e2m1": formats.decode_e2m1, "e4m3": formats.decode_e4m3, "ue8m0": formats.decode_ue8m0
}  # fmt: skip
TYPES = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "ue8m0": ml_dtypes.float8_e8m0fnu}


def beside_boundaries(values: Tensor) -> Tensor:
    """Values, their midpoints, what lies right beside either, and all of it with the other sign."""
    ascending = values[values.isfinite() & (values >= 0)].unique()
    points = torch.cat([ascending, (ascending[1:] + ascending[:-1]) / 2, ascending[-1:] * 1.25])
    far = torch.full_like(points, torch.inf)
    points = torch.cat([points, torch.nextafter(points, far), torch.nextafter(points, -far)])
    return torch.cat([points, -points, torch.tensor(SPECIAL)])


def codes_of(kind: str) -> Tensor:
    return torch.arange(16 if kind == "e2m1" else 256, dtype=torch.uint8)


def test_steps_in_float16_round_to_the_nearest_code() -> None:
    """`round_e2m1`, for every float16 below 7 units: to the nearest, a tie to the larger, where `encode_e2m1` takes the
    even code; signs stay."""
    x = torch.arange(1 << 15, dtype=torch.int32).short().view(torch.float16)
    x = x[x < 7 * 2.0**-14]
    got, values = formats.code_e2m1(formats.round_e2m1(x)), x.double() * 2**14
    ties = torch.isin(values, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64))
    even = formats.encode_e2m1(values.float())
    assert torch.equal(got[~ties], even[~ties])
    assert got[ties].tolist() == [1, 2, 3, 4, 5, 6, 7] and even[ties].tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert torch.equal(formats.decode_e2m1(got), formats.round_e2m1(x).float() * 2**14)
    assert torch.equal(formats.code_e2m1(formats.round_e2m1(-x)), got + 8)


@pytest.mark.parametrize("kind", TYPES)
def test_every_code_has_its_value(kind: str) -> None:
    codes = codes_of(kind)
    expected = codes.numpy().view(TYPES[kind]).astype(np.float32)
    assert np.array_equal(DECODE[kind](codes).numpy(), expected, equal_nan=True)
    assert np.array_equal(np.signbit(DECODE[kind](codes).numpy()), np.signbit(expected))


@pytest.mark.parametrize("kind", ENCODE)
def test_every_code_comes_back(kind: str) -> None:
    codes = codes_of(kind)
    back = ENCODE[kind](DECODE[kind](codes))
    assert torch.equal(back, codes.where(~DECODE[kind](codes).isnan(), 0x7F))  # one NaN


@pytest.mark.parametrize("kind", ENCODE)
def test_nearest_even(kind: str) -> None:
    points = beside_boundaries(DECODE[kind](codes_of(kind)))
    expected = [rounds(kind, float(x), sat=True) for x in points]
    assert ENCODE[kind](points).tolist() == expected
    assert ENCODE[kind](torch.from_numpy(WIDE)).tolist() == cvt(kind, WIDE, {"satfinite"}).tolist()


def test_scales_round_up_to_a_power_of_two() -> None:
    points = torch.cat([beside_boundaries(DECODE["ue8m0"](codes_of("ue8m0"))), torch.from_numpy(WIDE)])
    sizes = np.maximum(np.abs(points.numpy()), np.float32(2.0**-127))
    up = rounded_float64("ue8m0", sizes.astype(np.float64), "rp")
    codes = formats.encode_ue8m0(points)
    assert codes.tolist() == cvt("ue8m0", up, {"satfinite"}).tolist()
    assert torch.equal(formats.encode_ue8m0(DECODE["ue8m0"](codes)), codes)
    finite = points[points.isfinite() & (points.abs() <= 2.0**127) & (points.abs() > 2.0**-127)].abs()
    scale = formats.decode_ue8m0(formats.encode_ue8m0(finite))
    assert (scale >= finite).all() and (scale < 2 * finite).all()


def test_int8_keeps_to_its_symmetric_range() -> None:
    halves = torch.arange(-520, 521, dtype=F32) / 4
    points = torch.cat([halves, torch.tensor(SPECIAL)])
    expected = [0 if x != x else int(np.clip(np.rint(x), -127, 127)) for x in points.numpy()]
    assert formats.encode_int8(points).tolist() == expected


def test_the_first_of_a_pair_is_the_low_nibble() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(-1, 1)
    pairs = torch.cat([codes & 15, codes >> 4], dim=1)
    assert torch.equal(formats.pack_e2m1(pairs), codes)
    assert torch.equal(formats.unpack_e2m1(codes), pairs)
    values = torch.linspace(-7, 7, 64).view(32, 2)
    bits = values.numpy().view(np.uint32)
    code = "{.reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, %r1, %r2; cvt.u16.u8 %h0, b;}"
    got = all_lanes(code, bits[:, 1].copy(), bits[:, 0].copy(), out=np.uint16)
    assert formats.pack_e2m1(formats.encode_e2m1(values)).flatten().tolist() == got.tolist()


def test_a_word_of_random_bits_is_shared_as_cvt_shares_it() -> None:
    """The interpreter's cvt.rs on the same words; a place that moved by one bit, or parts in another order, differ."""
    numbers = np.random.default_rng(3)
    words = numbers.integers(0, 1 << 32, 128).astype(np.uint32)
    x = (numbers.standard_normal((128, 4)) * 2.0 ** numbers.integers(-8, 9, (128, 4))).astype(np.float32)
    lanes = [x[:, i].copy().view(np.uint32) for i in range(4)]
    drawn = torch.from_numpy(words.astype(np.int64))[:, None]
    for kind, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        short = {"float16": "f16", "bfloat16": "bf16"}[kind]
        got = all_lanes(f"cvt.rs.{short}x2.f32 %r0, %r2, %r1, %r3;", lanes[0], lanes[1], words)
        mine = formats.round_stochastic(torch.from_numpy(x[:, :2]), kind, drawn).to(dtype).contiguous()  # type: ignore[arg-type]
        assert mine.view(torch.int32).flatten().tolist() == got.view(np.int32).tolist(), kind
    got = all_lanes("cvt.rs.satfinite.e4m3x4.f32 %r0, {%r4, %r3, %r2, %r1}, %r5;", *lanes, words)
    mine = formats.encode_e4m3(formats.round_stochastic(torch.from_numpy(x), "e4m3", drawn)).contiguous()
    assert mine.view(torch.int32).flatten().tolist() == got.view(np.int32).tolist()


GRID: dict[str, Any] = {
    "float16": lambda x: x.half().float(), "bfloat16": lambda x: x.bfloat16().float(),
    "e4m3": lambda x: formats.decode_e4m3(formats.encode_e4m3(x)), "int8": lambda x: formats.encode_int8(x).float(),
}  # fmt: skip


@pytest.mark.parametrize("form", GRID)
def test_values_of_a_format_stay_and_others_go_to_a_neighbour(form: Any) -> None:
    words = torch.randint(1 << 32, (4096, 1))
    shared = len(formats.DRAWS[form].starts)
    x = torch.randn(4096, shared) * torch.exp2(torch.randint(-30, 16, (4096, 1)).float())
    got = formats.round_stochastic(x, form, words)
    assert torch.equal(GRID[form](got), got)
    on_grid = GRID[form](x).where(GRID[form](x).isfinite(), 0)
    assert torch.equal(formats.round_stochastic(on_grid, form, words), on_grid)
    low, high = (formats.round_stochastic(x, form, torch.full_like(words, word)) for word in (0, 0xFFFFFFFF))
    assert ((got == low) | (got == high)).all() and (got != low).any() and (got != high).any()
    assert (low.abs() <= x.abs())[low.isfinite()].all() and torch.equal(torch.signbit(got), torch.signbit(x))
    between = GRID[form]((low + high) / 2)
    assert ((between == low) | (between == high))[high.isfinite()].all()


@pytest.mark.parametrize("form", GRID)
def test_special_numbers_round_stochastically_as_to_nearest(form: Any) -> None:
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e38, -1e38, 0.0])
    if form == "bfloat16":  # which holds 1e38
        x[5:7] = torch.tensor([torch.finfo(F32).max, -torch.finfo(F32).max])
    words = torch.full((8 // len(formats.DRAWS[form].starts),), 0xFFFFFFFF)
    got = formats.round_stochastic(x, form, words)
    expected = GRID[form](x)
    if form == "int8":  # the encoder makes 0 of it
        got = got.nan_to_num(0.0, posinf=127.0, neginf=-127.0)
    assert torch.equal(got.view(torch.int32)[:4], expected.view(torch.int32)[:4]) or form == "int8"
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("form", GRID)
def test_the_mean_is_the_number(form: Any) -> None:
    """Within 4 standard errors and what finitely many bits leave; rounding to nearest is far outside."""
    draws = 1 << 14
    shared, bits = len(formats.DRAWS[form].starts), formats.DRAWS[form].bits
    x = torch.tensor([1.0137, -3.3391, 0.3313, -100.771]).repeat(draws, 1)[:, :shared].float()
    words = torch.randint(1 << 32, (draws, 1))
    got = formats.round_stochastic(x, form, words).double()
    error, spread = got.mean(0) - x[0], got.std(0) / draws**0.5
    unit = got.amax(0) - got.amin(0)
    assert (unit > 0).all()
    assert (error.abs() <= 4 * spread + unit * 2.0**-bits).all()
    assert ((GRID[form](x[0]) - x[0]).abs() > 4 * spread + unit * 2.0**-bits).any()
