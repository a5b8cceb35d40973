"""From instructions to closures: the registry of families, operands as slots, and the shapes that most of them share.

A warp's register file is a list: declared registers first, then constants and special registers, so that every source
operand is a slot. A value is a NumPy array of 32 unsigned lanes and is never changed in place; a predicate is a Python
int of 32 bits. `defined` holds, for each slot, the lanes that were ever written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from tests.ptx.parser import BITS, Entry, Immediate, Instruction, Negated, Operand, Pair, Register, Symbol, Vector
from tests.ptx.trouble import FaultError, TroubleError

FULL = 0xFFFFFFFF
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
VECTORS = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
SPECIAL = {f"%{name}.{axis}" for name in VECTORS for axis in "xyz"}
SPECIAL |= {"%laneid", "%warpid", "%nwarpid", "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster"}
SPECIAL |= {"%dynamic_smem_size"} | {f"%lanemask_{relation}" for relation in ("eq", "lt", "le", "gt", "ge")}
Operands = tuple[Operand, ...]
Run = Callable[[Any, int], Any]
Make = Callable[["Decoder", Instruction], "Run | Op"]
_families: dict[tuple[str, str], Make] = {}


class Op(NamedTuple):
    """A decoded instruction.

    Args:
        run: takes the warp and the mask of active lanes; what it returns matters for kind "waits" only.
        kind: "plain"; "branch"; "exit"; or "waits", whose run returns False where the lanes must wait.
        approximate: the hardware's result may differ within the bound that PTX states.
    """

    run: Run
    kind: str = "plain"
    approximate: bool = False


def instruction(*prefixes: str, types: tuple[str, ...] = ("",)) -> Callable[[Make], Make]:
    """Register what decodes opcodes that start with a prefix, and end in one of the types if any are given."""

    def register(make: Make) -> Make:
        for prefix in prefixes:
            for kind in types:
                if _families.setdefault((prefix, kind), make) is not make:
                    raise ValueError(f"{prefix} {kind} is registered twice")
        return make

    return register


@functools.lru_cache(4096)
def lanes(mask: int) -> np.ndarray:
    """A mask as 32 booleans."""
    return np.array([mask >> i & 1 for i in range(32)], bool)


def bits(flags: np.ndarray) -> int:
    """32 booleans as a mask."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def dtype_of(kind: str, width: int = 0) -> Any:
    """NumPy's integer with the sign of a type, and its width or another."""
    return (SIGNED if kind[0] == "s" else UNSIGNED)[width or BITS[kind]]


def first_lane(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def nth_lane(mask: int, index: int) -> int:
    """The lane of the `index`-th active one."""
    return int(np.flatnonzero(lanes(mask))[index])


def undefined(warp: Any, slots: tuple[int, ...], mask: int) -> NoReturn:
    """Report the first of the slots that a lane reads without having written it."""
    slot = next(s for s in slots if mask & ~warp.defined[s])
    missing = mask & ~warp.defined[slot]
    index = bin(mask & ((1 << first_lane(missing)) - 1)).count("1")
    raise FaultError("uninitialised", f"register {warp.names[slot]} is read before it was written", index)


class Decoder:
    """Turns the instructions of one entry into `Op`s and lays out its register file."""

    def __init__(self, entry: Entry, symbols: dict[str, int]) -> None:
        self.entry, self.symbols = entry, symbols
        self.parameters = {p.name: p for p in entry.parameters}
        self.types = [register.type for register in entry.registers]
        self.names = [register.name for register in entry.registers]
        zeros = {width: np.zeros(32, dtype) for width, dtype in UNSIGNED.items()}
        self.initial: list[Any] = [0 if t == "pred" else zeros[BITS[t]] for t in self.types]
        self.special: dict[str, int] = {}
        self.shared_addresses: set[int] = set()  # constants to which a CTA's place in the cluster is added
        self._constants: dict[tuple[int, int, str], int] = {}

    def decode(self, ins: Instruction) -> Op:
        parts = ins.parts
        for length in range(len(parts), 0, -1):
            prefix = ".".join(parts[:length])
            make = _families.get((prefix, parts[-1])) or _families.get((prefix, ""))
            if make:
                made = make(self, ins)
                return made if isinstance(made, Op) else Op(made)
        self.refuse(ins, f"instruction {ins.opcode} is not modelled")

    def refuse(self, ins: Instruction, why: str) -> NoReturn:
        raise TroubleError("unmodelled", why, line=ins.line, text=ins.text)

    def refuse_if(self, ins: Instruction, unknown: Any, why: str = "") -> None:
        if unknown:
            self.refuse(ins, why or f"{ins.opcode} is not modelled")

    def modifiers(self, ins: Instruction, allowed: set[str], *, skip: int = 1, last: int = 1) -> set[str]:
        """The opcode's parts between the first `skip` and the `last`, each of which must be allowed."""
        parts = ins.parts
        found = parts[skip : len(parts) - last]
        for part in found:
            if part not in allowed:
                self.refuse(ins, f"modifier .{part} of {ins.opcode} is not modelled")
        if len(set(found)) != len(found):
            self.refuse(ins, f"{ins.opcode} repeats a modifier")
        return set(found)

    def operands(self, ins: Instruction, *counts: int) -> tuple[Operand, ...]:
        if len(ins.operands) not in counts:
            self.refuse(ins, f"{ins.opcode} with {len(ins.operands)} operands is not modelled")
        return ins.operands

    def add_slot(self, name: str, kind: str, value: Any) -> int:
        self.types.append(kind)
        self.names.append(name)
        self.initial.append(value)
        return len(self.types) - 1

    def constant(self, value: int, width: int, name: str = "") -> int:
        key = (value & ((1 << width) - 1), width, name)
        if key not in self._constants:
            lane_values = np.full(32, key[0], UNSIGNED[width])
            self._constants[key] = self.add_slot(str(value), f"b{width}", lane_values)
        return self._constants[key]

    def source(self, ins: Instruction, operand: Operand, width: int, *, wider: bool = False, fp: bool = False) -> int:
        """Slot of a source of `width` bits; `wider` admits a larger register, `fp` refuses an integer constant."""
        if isinstance(operand, Register):
            size = BITS[operand.type]
            if size == width or (wider and size > width):
                return operand.slot
            self.refuse(ins, f"{operand.name} has {size} bits, {ins.opcode} takes {width}")
        if isinstance(operand, Immediate) and (operand.is_float or not fp):
            if not -(1 << (width - 1)) <= operand.value < 1 << width:
                self.refuse(ins, f"constant {operand.value} has more than {width} bits")
            return self.constant(operand.value, width)
        if isinstance(operand, Symbol) and operand.name in self.symbols:
            slot = self.constant(self.symbols[operand.name], width, operand.name)
            self.shared_addresses.add(slot)
            return slot
        if isinstance(operand, Symbol) and operand.name in self.parameters and width == 64:
            return self.constant(self.parameters[operand.name].offset, width)
        if isinstance(operand, Symbol) and operand.name in SPECIAL and width == 32:
            if operand.name not in self.special:
                self.special[operand.name] = self.add_slot(operand.name, "b32", np.zeros(32, np.uint32))
            return self.special[operand.name]
        self.refuse(ins, f"operand {operand} of {ins.opcode} is not modelled")

    def sources(self, ins: Instruction, operands: Operands, width: int, *, fp: bool = False) -> tuple[int, ...]:
        return tuple(self.source(ins, operand, width, fp=fp) for operand in operands)

    def destination(self, ins: Instruction, operand: Operand, width: int, *, wider: bool = False) -> int:
        if not isinstance(operand, Register) or operand.type == "pred":
            self.refuse(ins, f"{ins.opcode} writes a register")
        return self.source(ins, operand, width, wider=wider)

    def predicate(self, ins: Instruction, operand: Operand) -> tuple[int, int]:
        """(slot, mask to xor with) of a predicate operand."""
        register = operand.register if isinstance(operand, Negated) else operand
        if isinstance(register, Immediate) and register.value in (-1, 0, 1):
            value = FULL if register.value else 0
            return self.add_slot(str(register.value), "pred", value), 0
        if not isinstance(register, Register) or register.type != "pred":
            self.refuse(ins, f"{ins.opcode} takes a predicate")
        return register.slot, FULL if isinstance(operand, Negated) else 0

    def pair(self, operand: Operand) -> tuple[Operand, Operand | None]:
        """The parts of d|p, or d alone."""
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.items if isinstance(operand, Vector) else (operand,)

    def registers(self, ins: Instruction, operand: Operand, count: int) -> tuple[Operand, ...]:
        """The items of an operand that must have so many."""
        items = self.items(operand)
        self.refuse_if(ins, len(items) != count, f"{len(items)} registers for {count} in {ins.opcode}")
        return items


def write(warp: Any, slot: int, value: np.ndarray, mask: int) -> None:
    """Put a value into a register for the active lanes."""
    if mask == FULL:
        warp.regs[slot] = value
        warp.defined[slot] = FULL
    else:
        warp.regs[slot] = np.where(lanes(mask), value, warp.regs[slot])
        warp.defined[slot] |= mask


def write_predicate(warp: Any, slot: int, value: int, mask: int) -> None:
    warp.regs[slot] = (warp.regs[slot] & ~mask) | (value & mask)
    warp.defined[slot] |= mask


def check_defined(warp: Any, slots: tuple[int, ...], mask: int) -> None:
    defined = warp.defined
    for slot in slots:
        if mask & ~defined[slot]:
            undefined(warp, slots, mask)


def compute(destination: int, sources: tuple[int, ...], function: Callable[..., np.ndarray]) -> Run:
    """destination = function(sources), lane by lane."""

    def run(warp: Any, mask: int) -> None:
        regs, defined = warp.regs, warp.defined
        for slot in sources:
            if mask & ~defined[slot]:
                undefined(warp, sources, mask)
        value = function(*[regs[slot] for slot in sources])
        if mask == FULL:
            regs[destination] = value
            defined[destination] = FULL
        else:
            write(warp, destination, value, mask)

    return run


def aligned(run: Run) -> Op:
    """An instruction of whole warps, whose lanes wait until all that live have come, and while `run` returns False."""
    return Op(lambda warp, mask: mask == warp.live and run(warp, mask) is not False, "waits")


def compute_predicate(destination: int, sources: tuple[int, ...], function: Callable[..., Any]) -> Run:
    """As `compute`, for a predicate: the function returns 32 booleans, or the mask itself."""

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, sources, mask)
        value = function(*[warp.regs[slot] for slot in sources])
        write_predicate(warp, destination, value if isinstance(value, int) else bits(value), mask)

    return run
