"""Read copies are what their formats say, bit for bit, and err no more than the formats must.

The definition is written a second time here, on numpy scalars block by block, and compared for every format on states
of every scale, with zeros, subnormals and non-finite numbers in them. Errors are held against what a format's spacing
allows and against the plain scheme; the layout against the formula of the scale-factor atom of tcgen05 block-scaled MMA
and as a bijection, over every geometry of the test cases. Each has a case that must fail.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from replayssm.pool import bytes_per_slot
from replayssm.reference import formats, quant
from replayssm.spec import READ_FORMATS, ReadDtype, ReplaySpec, scale_bytes
from tests.helpers.cases import RELEASED
from tests.helpers.tolerance import same_bytes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, on overflow and NaN
FORMATS = tuple(READ_FORMATS)
E2M1, E4M3 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn
LEAST = np.float32(2.0**-100)
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between codes of e2m1
each_format = pytest.mark.parametrize("dtype", FORMATS, ids=str)


def states(*shape: int) -> Tensor:
    """Rows, columns and heads of very different sizes, some of them zero."""
    shape = shape or (2, 3, 24, 64)
    size = torch.exp2(4 * torch.randn(*shape[:-2], 1, 1) + torch.randn(*shape[:-1], 1) + torch.randn(shape[-1]))
    state = torch.randn(shape) * size
    state[0, 0, 3], state[-1, -1], state[0, -1, :, 16:32] = 0, 0, 0
    return state


# The definition, again.


def f32(x: Any) -> np.float32:
    return np.float32(x)


def codes_nvfp4(state: np.ndarray, divisors: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nibbles, scale bytes [HV, V, K / 16] and tile scales of one slot."""
    heads, rows, columns = state.shape
    nibbles, scales = np.zeros(state.shape, np.uint8), np.zeros((heads, rows, columns // 16), np.uint8)
    tiles = np.zeros((heads, -(-rows // 16)), np.float32)
    for head in range(heads):
        for t in range(tiles.shape[1]):
            largest = np.abs(state[head, 16 * t : 16 * t + 16]).max()
            if largest:
                tiles[head, t] = max(LEAST, f32(2.0 ** np.ceil(np.log2(float(f32(largest / f32(448 * 4)))))))
        for row in range(rows):
            tile = tiles[head, row // 16]
            for b in range(columns // 16):
                part, best = state[head, row, 16 * b : 16 * b + 16], np.inf
                power = -125 if not part.any() else max(np.frexp(np.abs(part).max())[1], -125)  # 0.5 to 1 times that
                part = np.ldexp(part, 2 - power).astype(np.float16)
                largest = f32(np.abs(part).max())
                for divisor in divisors:
                    scale = max(largest * f32(1 / divisor), f32(2.0**-6)).astype(E4M3)
                    scaled = np.abs(part) * f32(2.0**-14 / float(scale)).astype(np.float16)
                    code = np.searchsorted(MIDDLES, scaled.astype(np.float64) * 2**14, side="right").astype(np.uint8)
                    code += np.uint8(8) * np.signbit(part)
                    exact = code.view(E2M1).astype(np.float64) * float(scale)
                    errors = (part.astype(np.float64) - exact).astype(np.float16)
                    squares = errors[::2] * errors[::2]
                    sums = (errors[1::2].astype(np.float64) ** 2 + squares).astype(np.float16)
                    while len(sums) > 1:
                        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
                    if sums[0] < best or divisor == divisors[0]:
                        best = sums[0]
                        nibbles[head, row, 16 * b : 16 * b + 16] = code
                        held = float(scale) * 2.0 ** (power - 2) / float(tile) if tile else 0.0
                        scales[head, row, b] = np.array(held, E4M3).view(np.uint8) if held >= 2.0**-6 else 0
    return nibbles, scales, tiles


each_magnitude = pytest.mark.parametrize("exponent", [-145, -135, -125, -105, -90, 0, 100, 118])


def states_about(exponent: int, *shape: int) -> Tensor:
    """From states of subnormals alone to those of the largest numbers."""
    largest = torch.finfo(torch.float32).max
    return (states(*shape).double() * 2.0**exponent).clamp(-largest, largest).float()


@each_magnitude
@pytest.mark.parametrize("divisors", [quant.SEARCH, quant.PLAIN])
def test_nvfp4_is_the_definition(divisors: tuple[float, ...], exponent: int) -> None:
    state = states_about(exponent, 1, 3, 20, 32)
    parts = quant.encode(state, "nvfp4", divisors)
    nibbles, scales, tiles = codes_nvfp4(state[0].numpy(), divisors)
    assert parts["tile_scale"][0].tolist() == tiles.tolist()
    assert quant.from_atoms(parts["scale"], scales.shape)[0].tolist() == scales.tolist()  # type: ignore[arg-type]
    assert parts["codes"][0].tolist() == (nibbles[..., ::2] | nibbles[..., 1::2] << 4).tolist()
    values = nibbles.view(E2M1).astype(np.float32).reshape(3, 20, 2, 16)
    spread = np.repeat(tiles, 16, 1)[:, :20, None]
    expected = values * (scales.view(E4M3).astype(np.float32) * spread)[..., None]
    assert quant.decode(parts, "nvfp4")[0].tolist() == expected.reshape(3, 20, 32).tolist()


MUTANTS: dict[str, tuple[str, Any]] = {
    "the high nibble first": ("pack_e2m1", lambda code: code[..., 1::2] | code[..., ::2] << 4),
    "codes cut, not rounded": ("round_e2m1", lambda x, encode=formats.round_e2m1: encode(x * 0.9)),
    "scales rounded up": ("encode_e4m3", lambda x, encode=formats.encode_e4m3: encode(x * 1.06)),
    "signs lost": ("code_e2m1", lambda x, encode=formats.code_e2m1: encode(x.abs())),
    "tiles twice as large": ("encode_ue8m0", lambda x, encode=formats.encode_ue8m0: encode(x * 2)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_another_rounding_is_not_the_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, *MUTANTS[name])
    with pytest.raises(AssertionError):
        test_nvfp4_is_the_definition(quant.SEARCH, 0)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.int8, 127.0), ("mxfp8", 448.0)])
@each_magnitude
def test_8_bit_copies_are_the_definition(dtype: Any, largest: float, exponent: int) -> None:
    state = states_about(exponent)
    blocks = state.numpy().reshape(2, 3, 24, *((2, 32) if dtype == "mxfp8" else (1, 64)))
    scale = (np.abs(blocks).max(-1, keepdims=True) / f32(largest)).astype(np.float32)
    if dtype == "mxfp8":
        scale = np.exp2(np.ceil(np.log2(np.maximum(scale, f32(2.0**-127)).astype(np.float64)))).astype(np.float32)
    else:
        scale = np.where(scale == 0, scale, np.maximum(scale, LEAST))
    inverse = np.divide(f32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    scaled = blocks * inverse
    code = np.rint(scaled) if dtype == torch.int8 else np.clip(scaled, -448, 448).astype(E4M3).astype(np.float32)
    expected = (code * scale).reshape(state.shape)
    assert torch.equal(quant.decode(quant.encode(state, dtype), dtype), torch.from_numpy(expected))


@each_format
def test_a_copy_is_as_near_as_its_format_allows(dtype: ReadDtype) -> None:
    """Half a unit at most: of the number for floating codes, of the row's or block's largest for the others."""
    state = torch.randn(4, 2, 48, 64)
    error = (quant.decode(quant.encode(state, dtype), dtype) - state).abs()
    half_unit = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.int8: 0.5 / 127}
    block = {"nvfp4": 16, "mxfp8": 32}.get(str(dtype), 64)
    largest = state.unflatten(-1, (-1, block)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, -1, block).flatten(-2)
    if dtype in (torch.bfloat16, torch.float16):
        bound = state.abs() * half_unit[dtype] * 2 + 2.0**-25  # type: ignore[index]
    elif dtype == "nvfp4":  # codes are 2 apart at 6 and may be taken for 4 or 6.5; the scale itself errs 1 / 16
        bound = largest * (1 / 4) * (1 + 1 / 16)
    elif dtype is torch.int8:
        bound = largest * half_unit[torch.int8] * 1.001
    else:
        bound = torch.maximum(state.abs() / 16, largest * 2.0**-9) * 1.001
    assert (error <= bound).all()
    assert not (error <= bound / 4).all()  # teeth: the bound is not idle


@each_format
def test_zero_is_zero_bytes(dtype: ReadDtype) -> None:
    """So a pool that was set to zero holds the copy of a zero state."""
    assert not any(part.any() for part in quant.encode(torch.zeros(2, 3, 24, 64), dtype).values())


@each_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_and_stays_where_it_is(dtype: ReadDtype, bad: float) -> None:
    state = states(1, 2, 48, 64).abs() + 1
    poisoned = state.clone()
    poisoned[0, 1, 18, 37] = bad
    clean, got = (quant.decode(quant.encode(x, dtype), dtype) for x in (state, poisoned))
    touched = torch.zeros(1, 2, 48, 64, dtype=torch.bool)
    rows, columns = {"nvfp4": (slice(16, 32), slice(None)), "mxfp8": (18, slice(32, 64))}.get(
        str(dtype), (18, 37 if READ_FORMATS[dtype].bits == 16 else slice(None))
    )
    touched[0, 1, rows, columns] = True
    assert not got[touched].isfinite().any()
    assert torch.equal(got[~touched], clean[~touched])


@each_format
def test_a_copy_of_a_copy_is_the_copy(dtype: ReadDtype) -> None:
    """Where nothing is left to round; int8 and FP8 rows may move by the rounding of their scale."""
    state = quant.decode(quant.encode(states(), dtype), dtype)
    again = quant.decode(quant.encode(state, dtype), dtype)
    assert torch.allclose(again, state, rtol=2.0**-22, atol=0)


def test_the_search_and_the_tile_pay() -> None:
    state = states(4, 4, 64, 128)

    def error(parts: dict[str, Tensor]) -> Tensor:
        return (quant.decode(parts, "nvfp4") - state).unflatten(-1, (-1, 16)).square().sum(-1)

    plain, searched = error(quant.encode(state, "nvfp4", quant.PLAIN)), error(quant.encode(state, "nvfp4"))
    # By definition, but for float16: a value of 4 errs 2**-10, which is 2**-6 of what errors are, some 2**-4.
    assert (searched <= plain * (1 + 2.0**-6)).all()
    assert searched.sum() < 0.9 * plain.sum()


def test_columns_are_fitted_to_columns() -> None:
    """A state of one size but for its rows and columns: both come out, up to a factor; with them the error falls."""
    rows, columns = torch.exp2(3 * torch.randn(2, 64, 1)), torch.exp2(3 * torch.randn(2, 1, 128))
    state = torch.randn(2, 64, 128) * rows * columns
    fitted = quant.fit_columns(state) / columns
    assert (fitted / fitted.mean(-1, keepdim=True)).log2().abs().max() < 1
    assert fitted.shape == columns.shape
    within = {}
    for name, scale in (("two axes", quant.fit_columns(state)), ("one", torch.ones_like(columns))):
        copy = quant.decode(quant.encode(state / scale, "nvfp4"), "nvfp4") * scale
        within[name] = ((copy - state) / (rows * columns)).norm()  # each value by its own size
    assert within["two axes"] < 0.5 * within["one"]


# Where scale bytes lie.


def atom_offset(row: int, block: int, num_blocks: int) -> int:
    """The formula of the scale-factor operand, 128 rows by 4 blocks in 512 bytes, atoms along K first."""
    atom = (row // 128) * ((num_blocks + 3) // 4) + block // 4
    r = row % 128
    return atom * 512 + (r % 32) * 16 + (r // 32) * 4 + block % 4


@pytest.mark.parametrize(("rows", "blocks"), [(128, 4), (128, 8), (256, 8), (96, 3), (5 * 80, 16), (1, 1)])
def test_the_order_of_scales(rows: int, blocks: int) -> None:
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)
    index = quant.scale_index(row, block, blocks)
    assert index.tolist() == [[atom_offset(r, b, blocks) for b in range(blocks)] for r in range(rows)]
    assert index.unique().numel() == rows * blocks  # no byte twice
    assert int(index.max()) < scale_bytes(rows, blocks)
    if rows % 128 == 0 and blocks % 4 == 0:  # nothing is padding
        assert sorted(index.flatten().tolist()) == list(range(scale_bytes(rows, blocks)))
    if blocks % 4 == 0:  # the scales of a row come in aligned words
        words = index.unflatten(1, (-1, 4))
        assert (words[..., 0] % 4 == 0).all() and (words.diff(dim=-1) == 1).all()


def test_heads_follow_each_other_in_the_rows() -> None:
    scale = torch.randint(1, 256, (2, 3, 80, 5), dtype=torch.uint8)
    atoms = quant.to_atoms(scale)
    assert torch.equal(quant.from_atoms(atoms, (3, 80, 5)), scale)
    assert int((atoms != 0).sum()) == scale.numel()
    for slot, head, row, block in [(0, 0, 0, 0), (1, 2, 79, 4), (0, 1, 48, 3), (1, 1, 0, 0)]:
        assert atoms[slot, atom_offset(80 * head + row, block, 5)] == scale[slot, head, row, block]
    narrow = atoms.roll(32 * 4, -1)  # teeth: rows taken in tiles of another height
    assert not torch.equal(quant.from_atoms(narrow, (3, 80, 5)), scale)


@pytest.mark.parametrize("case", RELEASED, ids=lambda case: case.id)
def test_bytes_of_released_layers(case: Any) -> None:
    """9 bits a value and 4 bytes for 16 rows; no released layer needs padding."""
    sizes = bytes_per_slot(case.layer, replace(case.replay, read_dtype="nvfp4"))
    values = case.HV * case.V * case.K
    assert sizes["read_codes"] == values // 2
    assert sizes["read_scale"] == values // 16
    assert sizes["read_tile_scale"] == 4 * case.HV * case.V // 16
    assert ReplaySpec(read_dtype="nvfp4").read_format == READ_FORMATS["nvfp4"]


class ByInverse(TorchFunctionMode):
    """Quotients by a number as torch takes them on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__truediv__, Tensor.div, torch.div) and not isinstance(args[1], Tensor):
            return args[0] * (1 / args[1])
        return func(*args, **(kwargs or {}))


@each_format
def test_every_device_gives_the_same_bits(dtype: ReadDtype, device: torch.device) -> None:
    state = states()
    expected = quant.encode(state, dtype)
    with ByInverse():
        got = quant.encode(state.to(device), dtype)
        assert not torch.equal(state / 448.0, state / torch.full_like(state, 448.0))  # teeth
    assert all(same_bytes(got[name].cpu(), part) for name, part in expected.items())


def test_parts_are_independent_of_the_batch() -> None:
    state = states(3, 2, 32, 64)
    for dtype in FORMATS:
        whole = quant.encode(state, dtype)
        for slot in range(3):
            one = quant.encode(state[slot : slot + 1], dtype)
            assert all(same_bytes(one[name], whole[name][slot : slot + 1]) for name in whole)
