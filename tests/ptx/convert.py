"""Conversions between integers, float32, float16 and bfloat16.

PTX ISA, "Data Movement and Conversion Instructions: cvt" and its table "Operand Size Exceeding Instruction-Type Size":
a source register may be wider than the type, whose low bits count; a wider destination gets the value extended by the
destination type's sign.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ptx.decode import SIGNED, UNSIGNED, Decoder, Run, compute, instruction
from tests.ptx.floating import narrow, to_bits, wrapped
from tests.ptx.integer import INTEGERS, typed, unsigned
from tests.ptx.parser import BITS, Instruction, Register

NAN16 = np.uint16(0x7FFF)
Registers = Callable[..., np.ndarray]


def to_half(x: np.ndarray) -> np.ndarray:
    """float32 lanes to the bits of float16, to nearest even; overflow gives infinity."""
    return np.where(x != x, NAN16, x.astype(np.float16).view(np.uint16))


def to_bfloat(x: np.ndarray) -> np.ndarray:
    """float32 lanes to the bits of bfloat16, to nearest even; overflow gives infinity."""
    word = x.view(np.uint32)
    rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(x != x, NAN16, rounded.astype(np.uint16))


HALVES = {"f16": to_half, "bf16": to_bfloat}


def from_half(word: np.ndarray) -> np.ndarray:
    return to_bits(word.view(np.float16).astype(np.float32))


def from_bfloat(word: np.ndarray) -> np.ndarray:
    return to_bits((word.astype(np.uint32) << np.uint32(16)).view(np.float32))


@instruction("cvt")
def convert(decoder: Decoder, ins: Instruction) -> Run:
    """cvt between the pairs of types that are modelled; any other pair or modifier is refused."""
    if len(ins.parts) < 3:
        decoder.refuse(ins, f"{ins.opcode} is not modelled")
    to, of = ins.parts[-2:]
    if to in ("f16x2", "bf16x2") and of == "f32":
        return pack(decoder, ins)
    function: Registers | None = None
    if to in INTEGERS and of in INTEGERS:
        decoder.modifiers(ins, set(), last=2)
        function = between_integers(decoder, ins)
    elif to == "f32" and of in ("f16", "bf16"):
        decoder.modifiers(ins, set(), last=2)
        function = from_half if of == "f16" else from_bfloat
    elif to == of == "f32":
        function = wrapped(lambda x: x, decoder.modifiers(ins, {"sat", "ftz"}, last=2))
    elif to in HALVES and of == "f32":
        rounding = decoder.modifiers(ins, {"rn"}, last=2)
        if not rounding:
            decoder.refuse(ins, f"{ins.opcode} needs a rounding")
        narrowed = HALVES[to]
        function = lambda x: narrowed(x.view(np.float32))  # noqa: E731
    elif to == "f32" and of in ("s32", "u32"):
        rounding = decoder.modifiers(ins, {"rn", "rz", "rm", "rp"}, last=2)
        if len(rounding) != 1:
            decoder.refuse(ins, f"{ins.opcode} needs a rounding")
        mode, view = next(iter(rounding)), typed(of)
        function = lambda x: narrow(view(x).astype(np.float64), mode).view(np.uint32)  # noqa: E731
    if function is None:
        decoder.refuse(ins, f"conversion {of} to {to} is not modelled")
    destination, source = decoder.operands(ins, 2)
    source_slot = decoder.source(ins, source, BITS[of], wider=of in INTEGERS)
    target = decoder.destination(ins, destination, BITS[to], wider=to in INTEGERS)
    return compute(target, (source_slot,), function)


def between_integers(decoder: Decoder, ins: Instruction) -> Registers:
    """The low bits of the source as its type, extended by its sign, cut to the destination's width."""
    to, of = ins.parts[-2:]
    register = ins.operands[0]
    width = BITS[register.type] if isinstance(register, Register) else BITS[to]
    container = (SIGNED if to[0] == "s" else UNSIGNED)[width]
    view, low, middle = typed(of), UNSIGNED[BITS[of]], (SIGNED if to[0] == "s" else UNSIGNED)[BITS[to]]
    return lambda x: unsigned(view(x.astype(low)).astype(middle).astype(container))


def pack(decoder: Decoder, ins: Instruction) -> Run:
    """cvt.rn.{f16x2,bf16x2}.f32 d, a, b: a becomes the upper half, b the lower ("cvt")."""
    if not decoder.modifiers(ins, {"rn"}, last=2):
        decoder.refuse(ins, f"{ins.opcode} needs a rounding")
    destination, *rest = decoder.operands(ins, 3)
    half = HALVES[ins.parts[-2].removesuffix("x2")]

    def function(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
        a, b = (half(x.view(np.float32)).astype(np.uint32) for x in (upper, lower))
        return (a << np.uint32(16)) | b

    return compute(decoder.destination(ins, destination, 32), decoder.sources(ins, tuple(rest), 32, fp=True), function)
