"""Integer, logic, comparison and selection instructions, and moves.

PTX ISA, "Integer Arithmetic Instructions", "Logic and Shift Instructions", "Comparison and Selection Instructions" and
"Data Movement and Conversion Instructions: mov, prmt". Integers wrap; a signed operation views the same lanes as
signed, and a packed one views them as twice as many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tests.ptx.decode import (
    Decoder,
    Run,
    check_defined,
    compute,
    compute_predicate,
    dtype_of,
    instruction,
    lanes,
    write,
)
from tests.ptx.parser import BITS, Immediate, Instruction, Symbol, Vector
from tests.ptx.trouble import FaultError

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
UNTYPED = ("b16", "b32", "b64")
PACKED = ("u16x2", "s16x2")
WIDER = {16: 32, 32: 64}
Lanes = Callable[..., np.ndarray]


def typed(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """Views unsigned lanes as a type's."""
    dtype = dtype_of(kind)
    return lambda x: x.view(dtype)


def unsigned(x: np.ndarray) -> np.ndarray:
    return x.view(dtype_of("u", x.dtype.itemsize * 8))


def paired(kind: str, function: Lanes) -> Lanes:
    """A function of lanes, for a packed type applied to each part."""
    if not kind.endswith("x2"):
        return function
    part = dtype_of("u", BITS[kind.removesuffix("x2")])
    return lambda *xs: function(*[x.view(part) for x in xs]).view(xs[0].dtype)


def shaped(decoder: Decoder, ins: Instruction, widths: Sequence[int], function: Lanes, *, fp: bool = False) -> Run:
    """A function of registers; widths of the destination and of each source."""
    destination, *rest = decoder.operands(ins, len(widths))
    sources = tuple(decoder.source(ins, one, width, fp=fp) for one, width in zip(rest, widths[1:], strict=True))
    return compute(decoder.destination(ins, destination, widths[0]), sources, function)


SAME_IN_ANY_SIGN: dict[str, Lanes] = {"add": np.add, "sub": np.subtract, "neg": lambda x: ~x + x.dtype.type(1)}
SAME_IN_ANY_SIGN |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


@instruction("add", types=PACKED)
@instruction("add", "sub", "neg", types=INTEGERS)
@instruction("and", "or", "xor", "not", types=UNTYPED)
def bitwise(decoder: Decoder, ins: Instruction) -> Run:
    """Results whose bits do not depend on the sign."""
    decoder.modifiers(ins, set())
    name, kind = ins.parts[0], ins.parts[-1]
    widths = [BITS.get(kind, 32)] * (2 if name in ("neg", "not") else 3)
    return shaped(decoder, ins, widths, paired(kind, SAME_IN_ANY_SIGN[name]))


@instruction("mul", "mad", types=INTEGERS)
def multiply(decoder: Decoder, ins: Instruction) -> Run:
    """mul and mad: .lo and .hi keep a half of the product, .wide all of it ("Integer Arithmetic Instructions: mul")."""
    name, half, kind = ins.parts[0], ins.parts[1], ins.parts[-1]
    width = BITS[kind]
    decoder.modifiers(ins, {"lo", "hi", "wide"})
    decoder.refuse_if(ins, len(ins.parts) != 3 or (half == "wide" and width == 64))
    out, view, shift = WIDER[width] if half == "wide" else width, typed(kind), width if half == "hi" else 0
    wide = dtype_of(kind, width if half == "lo" else WIDER[width])

    def function(x: np.ndarray, y: np.ndarray, *z: np.ndarray) -> np.ndarray:
        product = view(x).astype(wide, copy=False) * view(y).astype(wide, copy=False)
        product = (product >> shift if shift else product).astype(dtype_of("u", out), copy=False)
        return product + z[0] if z else product

    return shaped(decoder, ins, [out, width, width, *([out] if name == "mad" else [])], function)


@instruction("min", "max", types=(*INTEGERS, *PACKED))
def extreme(decoder: Decoder, ins: Instruction) -> Run:
    """min and max; .relu raises a negative result to 0."""
    kind, choose = ins.parts[-1], np.minimum if ins.parts[0] == "min" else np.maximum
    relu = decoder.modifiers(ins, {"relu"} if kind in ("s32", "s16x2") else set())
    view = typed(kind.removesuffix("x2"))

    def function(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        out = choose(view(x), view(y))
        return unsigned(np.maximum(out, out.dtype.type(0)) if relu else out)

    return shaped(decoder, ins, [BITS.get(kind, 32)] * 3, paired(kind, function))


def extract(kind: str, x: int, at: int, count: int) -> int:
    """bfe: bits beyond the register repeat the sign, as does a signed result above its field."""
    field, count = x >> (at & 255) & (1 << (count & 255)) - 1, count & 255
    return field - (field >> count - 1 << count) if kind[0] == "s" and count else field


def insert(kind: str, x: int, into: int, at: int, count: int) -> int:
    """bfi: the low bits of x at a place of another register."""
    place = (1 << (count & 255)) - 1 << (at & 255)
    return into & ~place | x << (at & 255) & place


# For each instruction its types; widths of destination and sources, 0 for the type's; and a function of one lane.
LONG, BIT = ("u64", "s64"), ("b32", "b64")
LANE_BY_LANE: dict[str, tuple[tuple[str, ...], tuple[int, ...], Callable[..., int]]] = {
    "div": (INTEGERS, (0, 0, 0), lambda kind, x, y: int(Fraction(x, y))),
    "rem": (INTEGERS, (0, 0, 0), lambda kind, x, y: x - y * int(Fraction(x, y))),
    "mul.hi": (LONG, (0, 0, 0), lambda kind, x, y: x * y >> 64),
    "mad.hi": (LONG, (0, 0, 0, 0), lambda kind, x, y, z: (x * y >> 64) + z),
    "abs": (("s16", "s32", "s64"), (0, 0), lambda kind, x: abs(x)),
    "sad": (INTEGERS, (0, 0, 0, 0), lambda kind, x, y, z: abs(x - y) + z),
    "popc": (BIT, (32, 0), lambda kind, x: x.bit_count()),
    "clz": (BIT, (32, 0), lambda kind, x: BITS[kind] - x.bit_length()),
    "bfind": (("u32", "s32", *LONG), (32, 0), lambda kind, x: (~x if x < 0 else x).bit_length() - 1),
    "brev": (BIT, (0, 0), lambda kind, x: int(f"{x:0{BITS[kind]}b}"[::-1], 2)),
    "bfe": (("u32", "s32", *LONG), (0, 0, 32, 32), extract),
    "bfi": (BIT, (0, 0, 0, 32, 32), insert),
    "shf.l.wrap": (("b32",), (0, 0, 0, 0), lambda kind, x, y, n: (y << 32 | x) << (n & 31) >> 32),
    "shf.r.wrap": (("b32",), (0, 0, 0, 0), lambda kind, x, y, n: (y << 32 | x) >> (n & 31)),
    "shf.l.clamp": (("b32",), (0, 0, 0, 0), lambda kind, x, y, n: (y << 32 | x) << min(n, 32) >> 32),
    "shf.r.clamp": (("b32",), (0, 0, 0, 0), lambda kind, x, y, n: (y << 32 | x) >> min(n, 32)),
}


def lane_by_lane(decoder: Decoder, ins: Instruction, name: str) -> Run:
    """In Python's integers, whose low bits are the result; a zero divisor is a fault, PTX leaves the quotient open."""
    kind, (_, shape, function) = ins.parts[-1], LANE_BY_LANE[name]
    decoder.modifiers(ins, set(), skip=len(name.split(".")))
    width, *widths = [w or BITS[kind] for w in shape]
    destination, *rest = decoder.operands(ins, len(shape))
    sources = tuple(decoder.source(ins, one, w) for one, w in zip(rest, widths, strict=True))
    target = decoder.destination(ins, destination, width)

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, sources, mask)
        out, active = np.zeros(32, dtype_of("u", width)), np.flatnonzero(lanes(mask))
        columns = [warp.regs[s].view(dtype_of(kind, w))[active].tolist() for s, w in zip(sources, widths, strict=True)]
        for i, row in enumerate(zip(*columns, strict=True)):
            try:
                out[active[i]] = function(kind, *row) & (1 << width) - 1
            except ZeroDivisionError as error:
                raise FaultError("division", f"{row[0]} by zero", i) from error
        write(warp, target, out, mask)

    return run


for _name, (_types, _, _) in LANE_BY_LANE.items():
    instruction(_name, types=_types)(functools.partial(lane_by_lane, name=_name))


@instruction("lop3", types=("b32",))
def logic(decoder: Decoder, ins: Instruction) -> Run:
    """Any function of three bits: bit 4a + 2b + c of the table ("lop3")."""
    decoder.modifiers(ins, set())
    destination, *sources, table = decoder.operands(ins, 5)
    if not isinstance(table, Immediate) or not 0 <= table.value < 256:
        decoder.refuse(ins, "the table of lop3 is a constant of 8 bits")
    terms = [i for i in range(8) if table.value >> i & 1]

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        some = ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in terms)
        return functools.reduce(np.bitwise_or, some, np.zeros(32, np.uint32))

    return compute(decoder.destination(ins, destination, 32), decoder.sources(ins, tuple(sources), 32), function)


@instruction("prmt", types=("b32",))
def permute(decoder: Decoder, ins: Instruction) -> Run:
    """Picks 4 of 8 bytes, each by a nibble whose top bit asks for the byte's sign ("prmt"); its modes are refused."""
    decoder.modifiers(ins, set())

    def function(a: np.ndarray, b: np.ndarray, control: np.ndarray) -> np.ndarray:
        chosen = control.astype(np.int64)[:, None] >> np.arange(0, 16, 4)
        picked = np.take_along_axis(np.stack([a, b], 1).view(np.uint8), chosen & 7, 1)
        signs = (picked >> np.uint8(7)) * np.uint8(255)
        return np.where(chosen & 8, signs, picked).view(np.uint32).ravel()

    return shaped(decoder, ins, [32] * 4, function)


@instruction("shl", types=UNTYPED)
@instruction("shr", types=(*UNTYPED, *INTEGERS))
def shift(decoder: Decoder, ins: Instruction) -> Run:
    """Amounts are 32 bits wide and clamp at the width; shr of a signed type fills with the sign ("shl", "shr")."""
    decoder.modifiers(ins, set())
    kind = ins.parts[-1]
    width, view = BITS[kind], typed(kind)
    move = np.left_shift if ins.parts[0] == "shl" else np.right_shift

    def function(x: np.ndarray, n: np.ndarray) -> np.ndarray:
        x = view(x)
        inside = np.minimum(n, np.uint32(width - 1)).astype(x.dtype)
        if kind[0] == "s":
            return unsigned(move(x, inside))
        return np.where(n < width, move(x, inside), x.dtype.type(0))

    return shaped(decoder, ins, [width, width, 32], function)


COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
COMPARE |= {"gt": np.greater, "ge": np.greater_equal}


@instruction("setp", types=(*INTEGERS, *UNTYPED))
def compare(decoder: Decoder, ins: Instruction) -> Run:
    """setp without a second destination; bit types know equality only ("setp")."""
    destination, *rest = decoder.operands(ins, 3)
    kind = ins.parts[-1]
    known = {"eq", "ne"} if kind[0] == "b" else set(COMPARE)
    decoder.refuse_if(ins, len(decoder.modifiers(ins, known)) != 1)
    slot, flip = decoder.predicate(ins, destination)
    view, test = typed(kind), COMPARE[ins.parts[1]]
    assert not flip
    return compute_predicate(slot, decoder.sources(ins, tuple(rest), BITS[kind]), lambda x, y: test(view(x), view(y)))


PREDICATES: dict[str, Callable[..., int]] = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}
PREDICATES |= {"mov": lambda p: p, "not": int.__invert__}


@instruction(*PREDICATES, types=("pred",))
def predicates(decoder: Decoder, ins: Instruction) -> Run:
    decoder.modifiers(ins, set())
    name = ins.parts[0]
    destination, *rest = decoder.operands(ins, 2 if name in ("mov", "not") else 3)
    slots, flips = zip(*(decoder.predicate(ins, one) for one in rest), strict=True)
    function = lambda *ps: PREDICATES[name](*map(int.__xor__, ps, flips))  # noqa: E731
    return compute_predicate(decoder.predicate(ins, destination)[0], slots, function)


@instruction("selp", types=(*INTEGERS, *UNTYPED, "f32", "f64"))
def select(decoder: Decoder, ins: Instruction) -> Run:
    """selp: only the chosen operand has to be defined."""
    decoder.modifiers(ins, set())
    destination, a, b, p = decoder.operands(ins, 4)
    kind = ins.parts[-1]
    yes, no = decoder.sources(ins, (a, b), BITS[kind], fp=kind[0] == "f")
    (condition, flip), target = decoder.predicate(ins, p), decoder.destination(ins, destination, BITS[kind])

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, (condition,), mask)
        chosen = warp.regs[condition] ^ flip
        check_defined(warp, (yes,), mask & chosen)
        check_defined(warp, (no,), mask & ~chosen)
        write(warp, target, np.where(lanes(chosen), warp.regs[yes], warp.regs[no]), mask)

    return run


@instruction("mov", types=(*INTEGERS, *UNTYPED, "f32", "f64"))
def move(decoder: Decoder, ins: Instruction) -> Run:
    """mov of a register, constant, special register or the address of a variable; of parts to and from a vector."""
    decoder.modifiers(ins, set())
    destination, source = decoder.operands(ins, 2)
    kind, vector = ins.parts[-1], source if isinstance(source, Vector) else destination
    width, count = BITS[kind], len(decoder.items(vector))
    if isinstance(vector, Vector) and (kind, count) not in {(b, n) for b in UNTYPED for n in (2, 4)} - {("b16", 4)}:
        decoder.refuse(ins, f"{kind} of {count} parts is not modelled")
    part, wide = width // count, dtype_of("u", width)
    if isinstance(destination, Vector):
        return unpack(decoder, ins, destination, decoder.source(ins, source, width))
    target = decoder.destination(ins, destination, width)
    if isinstance(source, Vector):
        slots = decoder.sources(ins, source.items, part)
        return compute(target, slots, lambda *xs: sum(x.astype(wide) << wide(part * i) for i, x in enumerate(xs)))
    fp = kind[0] == "f" and isinstance(source, (Immediate, Symbol))
    return compute(target, (decoder.source(ins, source, width, fp=fp),), lambda x: x)


def unpack(decoder: Decoder, ins: Instruction, destination: Vector, source: int) -> Run:
    """mov.b32 {low, high}, word; a part written to _ is dropped."""
    part = BITS[ins.parts[-1]] // len(destination.items)
    parts = [(item, part * i) for i, item in enumerate(destination.items) if item != Symbol("_")]
    targets = [(decoder.destination(ins, item, part), shift) for item, shift in parts]

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, (source,), mask)
        word = warp.regs[source]
        for target, shift in targets:
            write(warp, target, (word >> word.dtype.type(shift)).astype(dtype_of("u", part)), mask)

    return run
