"""Conversions between integers and floating-point formats, one at a time or packed.

PTX ISA, "Data Movement and Conversion Instructions: cvt" and its table "Operand Size Exceeding Instruction-Type Size":
a source register may be wider than the type, whose low bits count; a wider destination gets the value extended by the
destination type's sign. Values go through float64, which holds them exactly or rounded to odd, and round once.
"""

from __future__ import annotations

import functools

import numpy as np

from tests.ptx.decode import UNSIGNED, Decoder, Op, Run, compute, dtype_of, instruction
from tests.ptx.floating import FORMATS, ROUND, ROUNDINGS, decode, encode, flush, rounded, sum_to_odd, to_bits
from tests.ptx.integer import INTEGERS, typed, unsigned
from tests.ptx.parser import BITS, Instruction

INTEGRAL = {mode + "i": function for mode, function in ROUND.items()}
WHOLE, FLOATS = (*INTEGERS, "u8", "s8"), ("f16", "bf16", "f32", "f64")
WIDENING = {("f32", "f16"), ("f32", "bf16"), ("f64", "f16"), ("f64", "bf16"), ("f64", "f32")}
KEEPING = WIDENING - {("f32", "f16")} | {*((kind, "f64") for kind in FLOATS), ("rna", "f32")}  # see `nan_of`
SMALL = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
# How many random bits .rs takes, and where those of each part start, the lowest part first.
RANDOM_BITS = {"f16": (13, (0, 16)), "bf16": (16, (0, 16)), "e2m1": (8, (0, 16, 8, 24))}
HALVES = {kind: functools.partial(encode, kind) for kind in ("f16", "bf16")}  # float32 values to bits, to nearest


@instruction("cvt")
def convert(decoder: Decoder, ins: Instruction) -> Run | Op:
    """cvt between the pairs of types that are modelled; any other pair or modifier is refused."""
    to, of = ins.parts[-2:] if len(ins.parts) > 2 else ("", "")
    if to[-2:-1] == "x":
        return packed(decoder, ins)
    decoder.refuse_if(ins, not {to, of} <= {*WHOLE, *FLOATS} and (to, of) != ("tf32", "f32"))
    mode, others = rounding(decoder, ins, *choices(to, of, set(ins.parts)))
    destination, source = decoder.operands(ins, 2)
    slot = decoder.source(ins, source, BITS[of], wider=of in WHOLE, fp=of in FLOATS)
    target = decoder.destination(ins, destination, BITS.get(to, 32), wider=to in WHOLE)
    register, low = dtype_of(to, BITS[decoder.types[target]]), UNSIGNED[BITS[of]]
    quick = not mode or mode in INTEGRAL or (mode == "rn" and of == "f32" and to in HALVES)  # encode rounds a float32
    after = others if to == "f32" else others - {"ftz"}
    keeps = (mode if to == "tf32" else to, of) in KEEPING and others <= ({"ftz"} if "f64" in (to, of) else set())

    def function(x: np.ndarray) -> np.ndarray:
        x = to_bits(flush(x.view(np.float32))) if "ftz" in others and of == "f32" else x
        value = typed(of)(x.astype(low)) if of in WHOLE else decode(of, x)
        value = INTEGRAL[mode](value) if mode in INTEGRAL else value
        if to in WHOLE:
            return unsigned(integer(value, to, of, "sat" in others).astype(register))
        value = to_odd(value) if of in WHOLE and to != "f64" else value.astype(np.float64)
        code, nan = encode(to, value if quick else rounded(to, value, mode), after), value != value
        return np.where(nan, nan_of(to, of, x), code).astype(code.dtype) if keeps and nan.any() else code

    return compute(target, (slot,), function)


def nan_of(to: str, of: str, x: np.ndarray) -> np.ndarray:
    """The sign and first bits of NaNs, and quiet if f64 is one of the types: PTX leaves it open, an H200 does so."""
    if "f64" not in (to, of):
        return x.astype(np.uint32) << 16 if of == "bf16" else x & np.uint32(0xFFFFE000)
    bits = decode(of, x).view(np.uint64) | np.uint64(1 << 51)
    return bits >> 63 << BITS[to] - 1 | bits >> 53 - FORMATS[to].digits & (1 << BITS[to] - 1) - 1


def choices(to: str, of: str, parts: set[str]) -> tuple[set[str], set[str]]:
    """(roundings, of which one has to be named if there are any; other modifiers)."""
    ftz = {"ftz"} if "f32" in (to, of) and to != "tf32" else set()
    if to in WHOLE and of in WHOLE:
        ends, own = np.iinfo(dtype_of(to)), np.iinfo(dtype_of(of))
        return set(), {"sat"} if own.min < ends.min or own.max > ends.max else set()
    if to in WHOLE:
        return set(INTEGRAL), {"sat"} | ftz
    if of in WHOLE:
        return {"rn"} if to == "f64" else ROUNDINGS, set()
    others = ftz | ({"sat"} if to in ("f16", "f32", "f64") else set())
    others |= {"relu", "satfinite"} if of == "f32" and to in ("f16", "bf16", "tf32") else set()
    if to == of:
        return set(INTEGRAL) if parts & set(INTEGRAL) else set(), others
    return set() if (to, of) in WIDENING else {"rn", "rz", "rna"} if to == "tf32" else ROUNDINGS, others


def rounding(decoder: Decoder, ins: Instruction, modes: set[str], others: set[str]) -> tuple[str, set[str]]:
    """(the one rounding, the other modifiers) that an instruction names."""
    modifiers = decoder.modifiers(ins, modes | others, last=2)
    decoder.refuse_if(ins, len(modifiers & modes) != bool(modes), f"{ins.opcode} needs a rounding")
    return "".join(modifiers & modes), modifiers - modes


def integer(value: np.ndarray, to: str, of: str, clamps: bool) -> np.ndarray:
    """Clamped to a type if asked, and always from floats, whose NaN gives 0, or the top bit where a type has 64 bits.

    PTX ISA, "cvt", "Integer Notes".
    """
    ends = np.iinfo(dtype_of(to))
    if of in FLOATS:
        inside = (value > ends.min) & (value < float(ends.max))
        nan = 0 if BITS[to] < 64 and of != "f64" else ends.min or 1 << BITS[to] - 1
        found = np.array([ends.min, ends.max, nan], ends.dtype)[np.where(value != value, 2, value > 0)]
        return np.where(inside, np.where(inside, value, 0).astype(ends.dtype), found)
    own = np.iinfo(value.dtype)
    return (np.clip(value, max(ends.min, own.min), min(ends.max, own.max)) if clamps else value).astype(ends.dtype)


def to_odd(value: np.ndarray) -> np.ndarray:
    """Integers as float64, rounded to odd."""
    if value.dtype.itemsize < 8:
        return value.astype(np.float64)
    return sum_to_odd((value >> 32).astype(np.float64) * 2.0**32, (value & 0xFFFFFFFF).astype(np.float64))


def part_bits(kind: str) -> int:
    """Width of a part of a packed type; formats of 6 bits are padded to 8."""
    return 4 if kind == "e2m1" else BITS.get(kind, 8)


def packs(to: str, of: str, count: int) -> bool:
    """Whether `count` parts of a format come from a type: f32 operands, or one register with two parts."""
    if of == "f32":
        return to in SMALL or (count == 2 and (to in HALVES or to == "ue8m0"))
    pairs = {(half, small) for half in HALVES for small in SMALL} | {("bf16", "ue8m0")}
    return count == 2 and of[-2:] == "x2" and ((to, of[:-2]) in pairs or (of[:-2], to) in pairs)


def packed(decoder: Decoder, ins: Instruction) -> Run | Op:
    """Two or four parts, of which the first operand, or the upper part of the only one, becomes the highest ("cvt").

    .rs adds random bits to those cut off a mantissa. PTX leaves to a figure which of the bits each part gets and how
    they align; here the bits that its text names come in the order of the parts, and align at the top.
    """
    (to, of), base, count = ins.parts[-2:], ins.parts[-2][:-2], int(ins.parts[-2][-1])
    source, halves, single = of.removesuffix("x2"), base in HALVES, of == "f32"
    decoder.refuse_if(ins, not packs(base, of, count), f"conversion {of} to {to} is not modelled")
    modes = {"rs"} if count == 4 else {"rn", "rz", "rs"} if halves and single else {"rn"}
    others = ({"satfinite"} if single or not halves else set()) | ({"relu"} if "ue8m0" not in (base, source) else set())
    mode, others = rounding(decoder, ins, {"rz", "rp"} if base == "ue8m0" else modes, others)
    decoder.refuse_if(ins, base in SMALL and "satfinite" not in others, f"{ins.opcode} needs .satfinite")
    destination, *rest = decoder.operands(ins, (3 if single and count == 2 else 2) + (mode == "rs"))
    items = tuple(item for operand in rest for item in decoder.items(operand))
    if len(items) != (count if single else 1) + (mode == "rs"):
        decoder.refuse(ins, f"{len(items)} sources for {count} parts")
    bits, width = part_bits(base), 32 if single else 2 * part_bits(source)
    target = decoder.destination(ins, destination, count * bits)
    random, starts = RANDOM_BITS.get(base, (16, (0, 0, 16, 16)))

    def function(*xs: np.ndarray) -> np.ndarray:
        if single:
            value = np.stack(xs[count - 1 :: -1], 1).view(np.float32)
        elif source == "e2m1":
            value = decode(source, np.stack([xs[0] & 15, xs[0] >> 4], 1))
        else:
            value = decode(source, xs[0].view(UNSIGNED[width // 2]).reshape(32, 2))
        value = np.maximum(np.abs(value), 2.0**-127) if base == "ue8m0" else value
        if mode != "rn":
            noise = (xs[-1][:, None] >> np.array(starts) & (1 << random) - 1) * 2.0**-random if mode == "rs" else 0.0
            value = rounded(base, value.astype(np.float64), mode, noise)
        codes = encode(base, value, others)  # rounds to nearest what came from float32 or less
        codes = codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes
        return codes.view(UNSIGNED[count * bits]).ravel()

    sources = decoder.sources(ins, items, width, fp=single)
    return Op(compute(target, sources, function), approximate=mode == "rs" and base != "bf16")
