"""Integer, logic, comparison and selection instructions, and moves.

PTX ISA, "Integer Arithmetic Instructions", "Logic and Shift Instructions", "Comparison and Selection Instructions" and
"Data Movement and Conversion Instructions: mov". Integers wrap; a signed operation views the same lanes as signed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.decode import (
    FULL,
    SIGNED,
    UNSIGNED,
    Decoder,
    Op,
    Run,
    check_defined,
    compute,
    compute_predicate,
    instruction,
    lanes,
    write,
)
from tests.ptx.parser import BITS, Immediate, Instruction, Symbol, Vector

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
UNTYPED = ("b16", "b32", "b64")
WIDER = {16: 32, 32: 64}


def typed(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """Views unsigned lanes as a type's."""
    dtype = SIGNED[BITS[kind]] if kind[0] == "s" else UNSIGNED[BITS[kind]]
    return lambda x: x.view(dtype)


def unsigned(x: np.ndarray) -> np.ndarray:
    return x.view(UNSIGNED[x.dtype.itemsize * 8])


SAME_IN_ANY_SIGN: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "neg": lambda x: ~x + x.dtype.type(1),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}


@instruction("add", "sub", "neg", types=INTEGERS)
@instruction("and", "or", "xor", "not", types=UNTYPED)
def bitwise(decoder: Decoder, ins: Instruction) -> Run:
    """Results whose bits do not depend on the sign."""
    decoder.modifiers(ins, set())
    name, width = ins.parts[0], BITS[ins.parts[-1]]
    destination, *rest = decoder.operands(ins, 2 if name in ("neg", "not") else 3)
    sources = decoder.sources(ins, tuple(rest), width)
    return compute(decoder.destination(ins, destination, width), sources, SAME_IN_ANY_SIGN[name])


@instruction("mul", "mad", types=INTEGERS)
def multiply(decoder: Decoder, ins: Instruction) -> Run:
    """mul and mad: .lo and .hi keep a half of the product, .wide all of it ("Integer Arithmetic Instructions: mul")."""
    name, half, kind = ins.parts[0], ins.parts[1], ins.parts[-1]
    width = BITS[kind]
    decoder.modifiers(ins, {"lo", "wide"} if width == 64 or name == "mad" else {"lo", "hi", "wide"})
    if len(ins.parts) != 3 or (half == "wide" and width == 64):
        decoder.refuse(ins, f"{ins.opcode} is not modelled")
    out = WIDER[width] if half == "wide" else width
    destination, a, b, *c = decoder.operands(ins, 4 if name == "mad" else 3)
    sources = decoder.sources(ins, (a, b), width) + decoder.sources(ins, tuple(c), out)
    view, target = typed(kind), decoder.destination(ins, destination, out)
    if half == "lo":
        function: Callable[..., np.ndarray] = lambda x, y, *z: x * y + z[0] if z else x * y  # noqa: E731
    else:
        wide: Any = (SIGNED if kind[0] == "s" else UNSIGNED)[WIDER[width]]
        part = (
            (lambda p: unsigned(p)) if half == "wide" else lambda p: (p >> p.dtype.type(width)).astype(UNSIGNED[width])
        )

        def function(x: np.ndarray, y: np.ndarray, *z: np.ndarray) -> np.ndarray:
            product = part(view(x).astype(wide) * view(y).astype(wide))
            return product + z[0] if z else product

    return compute(target, sources, function)


@instruction("min", "max", types=INTEGERS)
def extreme(decoder: Decoder, ins: Instruction) -> Run:
    decoder.modifiers(ins, set())
    destination, *rest = decoder.operands(ins, 3)
    kind, choose = ins.parts[-1], np.minimum if ins.parts[0] == "min" else np.maximum
    view, width = typed(kind), BITS[kind]
    sources = decoder.sources(ins, tuple(rest), width)
    return compute(
        decoder.destination(ins, destination, width), sources, lambda x, y: unsigned(choose(view(x), view(y)))
    )


@instruction("shl", types=UNTYPED)
@instruction("shr", types=(*UNTYPED, *INTEGERS))
def shift(decoder: Decoder, ins: Instruction) -> Run:
    """Amounts are 32 bits wide and clamp at the width; shr of a signed type fills with the sign ("shl", "shr")."""
    decoder.modifiers(ins, set())
    destination, value, amount = decoder.operands(ins, 3)
    kind = ins.parts[-1]
    width, view = BITS[kind], typed(kind)
    move = np.left_shift if ins.parts[0] == "shl" else np.right_shift

    def function(x: np.ndarray, n: np.ndarray) -> np.ndarray:
        x = view(x)
        inside = np.minimum(n, np.uint32(width - 1)).astype(x.dtype)
        if kind[0] == "s":
            return unsigned(move(x, inside))
        return np.where(n < width, move(x, inside), x.dtype.type(0))

    sources = (decoder.source(ins, value, width), decoder.source(ins, amount, 32))
    return compute(decoder.destination(ins, destination, width), sources, function)


COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@instruction("setp", types=(*INTEGERS, *UNTYPED))
def compare(decoder: Decoder, ins: Instruction) -> Run:
    """setp without a second destination; bit types know equality only ("setp")."""
    destination, *rest = decoder.operands(ins, 3)
    kind = ins.parts[-1]
    known = {"eq", "ne"} if kind[0] == "b" else set(COMPARE)
    if len(decoder.modifiers(ins, known)) != 1:
        decoder.refuse(ins, f"{ins.opcode} is not modelled")
    slot, flip = decoder.predicate(ins, destination)
    view, test = typed(kind), COMPARE[ins.parts[1]]
    assert not flip
    return compute_predicate(slot, decoder.sources(ins, tuple(rest), BITS[kind]), lambda x, y: test(view(x), view(y)))


LOGIC = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}


@instruction("and", "or", "xor", types=("pred",))
def combine(decoder: Decoder, ins: Instruction) -> Run:
    decoder.modifiers(ins, set())
    destination, a, b = decoder.operands(ins, 3)
    (x, flip_x), (y, flip_y) = decoder.predicate(ins, a), decoder.predicate(ins, b)
    join = LOGIC[ins.parts[0]]
    return compute_predicate(decoder.predicate(ins, destination)[0], (x, y), lambda p, q: join(p ^ flip_x, q ^ flip_y))


@instruction("mov", "not", types=("pred",))
def copy_predicate(decoder: Decoder, ins: Instruction) -> Run:
    decoder.modifiers(ins, set())
    destination, a = decoder.operands(ins, 2)
    source, flip = decoder.predicate(ins, a)
    flip ^= FULL if ins.parts[0] == "not" else 0
    return compute_predicate(decoder.predicate(ins, destination)[0], (source,), lambda p: p ^ flip)


@instruction("selp", types=(*INTEGERS, *UNTYPED, "f32"))
def select(decoder: Decoder, ins: Instruction) -> Run:
    """selp: only the chosen operand has to be defined."""
    decoder.modifiers(ins, set())
    destination, a, b, p = decoder.operands(ins, 4)
    kind = ins.parts[-1]
    yes, no = decoder.sources(ins, (a, b), BITS[kind], fp=kind == "f32")
    (condition, flip), target = decoder.predicate(ins, p), decoder.destination(ins, destination, BITS[kind])

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, (condition,), mask)
        chosen = warp.regs[condition] ^ flip
        check_defined(warp, (yes,), mask & chosen)
        check_defined(warp, (no,), mask & ~chosen)
        write(warp, target, np.where(lanes(chosen), warp.regs[yes], warp.regs[no]), mask)

    return run


@instruction("mov", types=(*INTEGERS, *UNTYPED, "f32"))
def move(decoder: Decoder, ins: Instruction) -> Run | Op:
    """mov of a register, constant, special register or the address of a variable; of 2 halves to and from a pair."""
    decoder.modifiers(ins, set())
    destination, source = decoder.operands(ins, 2)
    kind = ins.parts[-1]
    width = BITS[kind]
    if isinstance(destination, Vector):
        return unpack(decoder, ins, destination, decoder.source(ins, source, width))
    target = decoder.destination(ins, destination, width)
    if isinstance(source, Vector):
        if kind not in ("b32", "b64") or len(source.items) != 2:
            decoder.refuse(ins, f"a pack of {len(source.items)} into {kind} is not modelled")
        halves, wide, shift = (
            decoder.sources(ins, source.items, width // 2),
            UNSIGNED[width],
            UNSIGNED[width](width // 2),
        )
        return compute(target, halves, lambda low, high: low.astype(wide) | (high.astype(wide) << shift))
    if isinstance(source, (Immediate, Symbol)):
        value = decoder.source(ins, source, width, fp=kind == "f32")
        return compute(target, (value,), lambda x: x)
    return compute(target, (decoder.source(ins, source, width),), lambda x: x)


def unpack(decoder: Decoder, ins: Instruction, destination: Vector, source: int) -> Run:
    """mov.b32 {low, high}, word."""
    kind = ins.parts[-1]
    if kind not in ("b32", "b64") or len(destination.items) != 2:
        decoder.refuse(ins, f"an unpack of {kind} into {len(destination.items)} is not modelled")
    half = BITS[kind] // 2
    low, high = (decoder.destination(ins, item, half) for item in destination.items)

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, (source,), mask)
        word = warp.regs[source]
        write(warp, low, word.astype(UNSIGNED[half]), mask)
        write(warp, high, (word >> word.dtype.type(half)).astype(UNSIGNED[half]), mask)

    return run
