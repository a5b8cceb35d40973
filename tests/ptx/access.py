"""Loads, stores and addresses of parameters, global and shared memory.

PTX ISA, "Data Movement and Conversion Instructions: ld, st": scalars and vectors. Cache operators and L2 policies are
performance hints and change nothing ("Cache Operators"; "Cache Eviction Priority Hints"). A register wider than the
type is extended by the type's sign, or cut ("Operand Size Exceeding Instruction-Type Size"). Strong accesses order
others: a release publishes what the warp has seen at the address, an acquire takes it up ("Release and Acquire
Patterns"); relaxed ones do so by fences around them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.decode import FULL, UNSIGNED, Decoder, Run, check_defined, compute, dtype_of, instruction, lanes, write
from tests.ptx.memory import PARAM_WINDOW, RANK_SHIFT, SHARED_WINDOW
from tests.ptx.parser import BITS, Address, Immediate, Instruction, Register, Symbol
from tests.ptx.trouble import fault_if

HINTS = {"cs", "ca", "cg", "lu", "cv", "wb", "wt", "nc", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"}
HINTS |= {f"{level}::{how}" for level in ("L1", "L2") for how in ("evict_first", "evict_last", "evict_normal")}
HINTS |= {"L1::no_allocate", "L1::evict_unchanged"}
SPACES = {"global", "shared", "shared::cta", "shared::cluster"}
ORDERS, SCOPES = {"relaxed", "acquire", "release", "acq_rel", "volatile"}, {"cta", "cluster", "gpu", "sys"}
VECTORS = {"v2", "v4", "v8"}


def address_of(decoder: Decoder, ins: Instruction, operand: Any, space: str) -> tuple[int, int]:
    """(slot, offset) of an address operand, 32 or 64 bits wide in shared and tensor memory.

    Where the opcode does not name shared memory, its addresses are generic ("Generic Addressing").
    """
    decoder.refuse_if(ins, not isinstance(operand, Address), f"{operand} is no address")
    base, offset, widths = operand.base, operand.offset, (64,)
    if space == "shared" and "shared" not in ins.opcode:
        offset -= SHARED_WINDOW
    elif space.startswith(("shared", "tensor")):
        widths = (32, 64)
    if isinstance(base, Register) and BITS[base.type] in widths:
        return base.slot, offset
    if isinstance(base, (Symbol, Immediate)):
        return decoder.source(ins, base, widths[0]), offset
    decoder.refuse(ins, f"{base} is no address in {space} memory")


def addresses(warp: Any, slot: int, offset: int, mask: int) -> np.ndarray:
    """Byte addresses of the active lanes."""
    check_defined(warp, (slot,), mask)
    base = warp.regs[slot] if mask == FULL else warp.regs[slot][lanes(mask)]
    return base + base.dtype.type(offset % (1 << 8 * base.dtype.itemsize)) if offset else base


def space_of(ins: Instruction) -> str:
    """The state space that an opcode names; "generic" if none."""
    return next((part for part in ins.parts if part in SPACES), "generic")


def located(warp: Any, space: str, where: np.ndarray) -> tuple[Any, np.ndarray]:
    """The memory that all of the addresses lie in, and the addresses there."""
    if space == "global":
        return warp.cta.memory, where
    if space == "generic":
        windows = where >> np.uint64(56)
        fault_if((windows != windows[0]).any(), "unmodelled", "generic addresses in several state spaces")
        if windows[0] == 0:
            return warp.cta.memory, where
        where = where & np.uint64(SHARED_WINDOW - 1)
        fault_if(windows[0] != SHARED_WINDOW >> 56, "unmodelled", "a generic address in this state space")
    if space in ("shared", "shared::cta"):
        return warp.cta.shared, where
    ranks = where >> where.dtype.type(RANK_SHIFT)
    fault_if((ranks != ranks[0]).any(), "unmodelled", "addresses in shared memory of several CTAs")
    return warp.cluster.shared_of(int(where[0])), where


def publish(warp: Any, memory: Any, where: np.ndarray, ins: Instruction) -> None:
    """Before a strong store: what whoever reads it will know. A read-modify-write goes on with what was there."""
    releases = not {"release", "acq_rel"}.isdisjoint(ins.parts)
    clock = warp.cluster.clocks.release(warp.agent) if releases else warp.fenced
    for address in where.tolist() if clock is not None else ():
        number, before = memory.published.get(address, (None, None))
        goes_on = ins.parts[0] != "st" and number == warp.cluster.number
        memory.published[address] = (warp.cluster.number, np.maximum(before, clock) if goes_on else clock)


def observe(warp: Any, memory: Any, where: np.ndarray, ins: Instruction) -> None:
    """After a strong load: what whoever wrote there had published, at once or by the next fence."""
    acquires = not {"acquire", "acq_rel"}.isdisjoint(ins.parts)
    for address in where.tolist():
        found = memory.published.get(address)
        if found and acquires:
            warp.take_up(*found)
        elif found:
            warp.observed[id(memory), address] = found


def shape(decoder: Decoder, ins: Instruction, allowed: set[str]) -> tuple[str, int]:
    """(type, number of elements) of an access."""
    kind = ins.parts[-1]
    modifiers = decoder.modifiers(ins, allowed | VECTORS)
    counts = [int(m[1]) for m in modifiers & VECTORS]
    wide = 256 if ins.parts[1:2] == ["global"] else 128
    if kind not in BITS or BITS[kind] < 8 or len(counts) > 1 or (counts and counts[0] * BITS[kind] > wide):
        decoder.refuse(ins, f"{ins.opcode} is not modelled")
    return kind, counts[0] if counts else 1


def operands_of(decoder: Decoder, ins: Instruction, *, stores: bool) -> tuple[str, tuple[int, int], list[Any], Any]:
    """(type, slot and offset of the address, registers, slots of the L2 policy) of an access."""
    kind, count = shape(decoder, ins, HINTS | SPACES | ORDERS | SCOPES | {"weak"})
    first, second, *policy = decoder.operands(ins, 3 if "L2::cache_hint" in ins.parts else 2)
    where, registers = (first, second) if stores else (second, first)
    policies = decoder.sources(ins, tuple(policy), 64)
    at = address_of(decoder, ins, where, space_of(ins))
    return kind, at, decoder.registers(ins, registers, count), policies


@instruction("ld.param")
def load_parameter(decoder: Decoder, ins: Instruction) -> Run:
    """A parameter's bytes, the same for every thread ("Parameter State Space")."""
    kind, count = shape(decoder, ins, {"param"})
    destination, source = decoder.operands(ins, 2)
    items, size = decoder.items(destination), BITS[kind] // 8
    if len(items) != count or not isinstance(source, Address) or not isinstance(source.base, Symbol):
        decoder.refuse(ins, "only a named parameter is modelled")
    name, offset = source.base.name, source.offset
    parameter = decoder.parameters.get(name)
    if parameter is None or not 0 <= offset <= parameter.size - size * count or offset % (size * count):
        decoder.refuse(ins, "no such part of a parameter")
    targets = [decoder.destination(ins, item, BITS[kind], wider=True) for item in items]

    def run(warp: Any, mask: int) -> None:
        values = np.frombuffer(warp.cta.arguments[name], dtype_of(kind), count, offset)
        for target, value in zip(targets, values, strict=True):
            write(warp, target, np.repeat(extended(value, kind, BITS[decoder.types[target]]), 32), mask)

    return run


def extended(value: Any, kind: str, width: int) -> Any:
    """Values of a type in registers of a width, extended by the type's sign."""
    return value.astype(dtype_of(kind, width)).view(UNSIGNED[width])


@instruction("ld")
def load(decoder: Decoder, ins: Instruction) -> Run:
    space, strong = space_of(ins), not ORDERS.isdisjoint(ins.parts)
    kind, (slot, offset), items, policies = operands_of(decoder, ins, stores=False)
    size, count = BITS[kind] // 8, len(items)
    targets = [decoder.destination(ins, item, BITS[kind], wider=True) for item in items]
    widths = [BITS[decoder.types[target]] for target in targets]

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, policies, mask)
        memory, where = located(warp, space, addresses(warp, slot, offset, mask))
        if strong:
            observe(warp, memory, where, ins)
        raw = np.zeros((32, size * count), np.uint8)
        raw[lanes(mask)] = memory.load(where, size * count, warp.access(ins.line, strong))
        values = raw.view(dtype_of(kind))
        for i, (target, width) in enumerate(zip(targets, widths, strict=True)):
            write(warp, target, extended(values[:, i], kind, width), mask)

    return run


@instruction("st")
def store(decoder: Decoder, ins: Instruction) -> Run:
    space, strong = space_of(ins), not ORDERS.isdisjoint(ins.parts)
    kind, (slot, offset), items, policies = operands_of(decoder, ins, stores=True)
    size, count, unit = BITS[kind] // 8, len(items), UNSIGNED[BITS[kind]]
    values = tuple(decoder.source(ins, item, BITS[kind], wider=True) for item in items)
    needed = (*values, *policies)

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, needed, mask)
        memory, where = located(warp, space, addresses(warp, slot, offset, mask))
        if strong:
            publish(warp, memory, where, ins)
        data = np.stack([warp.regs[value].astype(unit) for value in values], 1)[lanes(mask)]
        memory.store(where, data.view(np.uint8).reshape(-1, size * count), warp.access(ins.line, strong))

    return run


CONVERSIONS = {"shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "shared::cluster": SHARED_WINDOW}
CONVERSIONS |= {"global": 0, "param": PARAM_WINDOW}


@instruction("cvta")
def convert_address(decoder: Decoder, ins: Instruction) -> Run:
    """Between a state space and generic addresses ("cvta")."""
    space = ins.parts[-2]
    decoder.modifiers(ins, {"to", *CONVERSIONS})
    destination, source = decoder.operands(ins, 2)
    window = np.uint64(CONVERSIONS[space])
    target = decoder.destination(ins, destination, 64)
    away = (lambda x: x - window) if "to" in ins.parts else (lambda x: x + window)
    return compute(target, (decoder.source(ins, source, 64),), away)


@instruction("mapa.shared::cluster", types=("u32", "u64"))
def map_address(decoder: Decoder, ins: Instruction) -> Run:
    """An address of this CTA's shared memory in the CTA of a rank ("mapa")."""
    destination, source, rank = decoder.operands(ins, 3)
    width = BITS[ins.parts[-1]]
    slots = (decoder.source(ins, source, width), decoder.source(ins, rank, 32))

    def function(address: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        inside = address & address.dtype.type((1 << RANK_SHIFT) - 1)
        return inside | (ranks.astype(address.dtype) << address.dtype.type(RANK_SHIFT))

    return compute(decoder.destination(ins, destination, width), slots, function)
