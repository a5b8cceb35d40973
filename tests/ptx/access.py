"""Loads and stores of parameters, global and shared memory.

PTX ISA, "Data Movement and Conversion Instructions: ld, st": weak accesses of scalars and vectors. Cache operators and
L2 policies are performance hints and change nothing ("Cache Operators"; "Cache Eviction Priority Hints"). A register
wider than the type is extended by the type's sign, or cut ("Operand Size Exceeding Instruction-Type Size").
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.decode import FULL, SIGNED, UNSIGNED, Decoder, Run, check_defined, instruction, lanes, write
from tests.ptx.parser import BITS, Address, Immediate, Instruction, Register, Symbol

HINTS = {"cs", "L2::cache_hint"}
ADDRESS_BITS = {"global": (64,), "shared": (32, 64)}


def address_of(decoder: Decoder, ins: Instruction, operand: Any, space: str) -> tuple[int, int]:
    """(slot, offset) of an address operand."""
    if not isinstance(operand, Address):
        decoder.refuse(ins, f"{operand} is no address")
    base, widths = operand.base, ADDRESS_BITS[space]
    if isinstance(base, Register) and BITS[base.type] in widths:
        return base.slot, operand.offset
    if isinstance(base, (Symbol, Immediate)):
        return decoder.source(ins, base, widths[0]), operand.offset
    decoder.refuse(ins, f"{base} is no address in {space} memory")


def addresses(warp: Any, slot: int, offset: int, mask: int) -> np.ndarray:
    """Byte addresses of the active lanes."""
    check_defined(warp, (slot,), mask)
    base = warp.regs[slot] if mask == FULL else warp.regs[slot][lanes(mask)]
    return base + base.dtype.type(offset % (1 << 8 * base.dtype.itemsize)) if offset else base


def shape(decoder: Decoder, ins: Instruction, hints: set[str]) -> tuple[str, int]:
    """(type, number of elements) of an access."""
    kind = ins.parts[-1]
    modifiers = decoder.modifiers(ins, hints | {"v2", "v4"}, skip=2)
    counts = [int(m[1]) for m in modifiers if m in ("v2", "v4")]
    if kind not in BITS or BITS[kind] < 8 or len(counts) > 1 or (counts and counts[0] * BITS[kind] > 128):
        decoder.refuse(ins, f"{ins.opcode} is not modelled")
    return kind, counts[0] if counts else 1


def operands_of(decoder: Decoder, ins: Instruction, *, stores: bool) -> tuple[str, tuple[int, int], list[Any], Any]:
    """(type, slot and offset of the address, registers, slots of the L2 policy) of a global or shared access."""
    space = ins.parts[1]
    kind, count = shape(decoder, ins, HINTS if space == "global" else set())
    first, second, *policy = decoder.operands(ins, 3 if "L2::cache_hint" in ins.parts else 2)
    where, registers = (first, second) if stores else (second, first)
    policies = decoder.sources(ins, tuple(policy), 64)
    at = address_of(decoder, ins, where, space)
    items = decoder.items(registers)
    if len(items) != count:
        decoder.refuse(ins, f"{len(items)} registers for {count} elements")
    return kind, at, items, policies


@instruction("ld.param")
def load_parameter(decoder: Decoder, ins: Instruction) -> Run:
    """A parameter's bytes, the same for every thread ("Parameter State Space")."""
    kind, count = shape(decoder, ins, set())
    destination, source = decoder.operands(ins, 2)
    if count != 1 or not isinstance(source, Address) or not isinstance(source.base, Symbol):
        decoder.refuse(ins, "only a scalar of a named parameter is modelled")
    name, offset, size = source.base.name, source.offset, BITS[kind] // 8
    parameter = decoder.parameters.get(name)
    if parameter is None or not 0 <= offset <= parameter.size - size or offset % size:
        decoder.refuse(ins, "no such part of a parameter")
    target = decoder.destination(ins, destination, BITS[kind])

    def run(warp: Any, mask: int) -> None:
        value = np.frombuffer(warp.cta.arguments[name], UNSIGNED[8 * size], 1, offset)
        write(warp, target, np.repeat(value, 32), mask)

    return run


@instruction("ld.global", "ld.shared")
def load(decoder: Decoder, ins: Instruction) -> Run:
    space = ins.parts[1]
    kind, (slot, offset), items, policies = operands_of(decoder, ins, stores=False)
    size, count = BITS[kind] // 8, len(items)
    targets = [decoder.destination(ins, item, BITS[kind], wider=True) for item in items]
    element = (SIGNED if kind[0] == "s" else UNSIGNED)[BITS[kind]]
    widths = [BITS[decoder.types[target]] for target in targets]

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, policies, mask)
        where = addresses(warp, slot, offset, mask)
        memory = warp.cta.memory
        data = (
            memory.load(where, size * count)
            if space == "global"
            else warp.cta.shared.load(where, size * count, warp.id)
        )
        values = data.view(element)
        for i, (target, width) in enumerate(zip(targets, widths, strict=True)):
            value = values[:, i].astype((SIGNED if kind[0] == "s" else UNSIGNED)[width]).view(UNSIGNED[width])
            if mask != FULL:
                full = np.zeros(32, UNSIGNED[width])
                full[lanes(mask)] = value
                value = full
            write(warp, target, value, mask)

    return run


@instruction("st.global", "st.shared")
def store(decoder: Decoder, ins: Instruction) -> Run:
    space, line = ins.parts[1], ins.line
    kind, (slot, offset), items, policies = operands_of(decoder, ins, stores=True)
    size, count, element = BITS[kind] // 8, len(items), UNSIGNED[BITS[kind]]
    values = tuple(decoder.source(ins, item, BITS[kind], wider=True) for item in items)
    needed = (*values, *policies)

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, needed, mask)
        where = addresses(warp, slot, offset, mask)
        data = np.empty((32, count), element)
        for i, value in enumerate(values):
            data[:, i] = warp.regs[value].astype(element)
        raw = data.view(np.uint8).reshape(32, size * count)
        raw = raw if mask == FULL else raw[lanes(mask)]
        if space == "global":
            warp.cta.memory.store(where, raw)
        else:
            warp.cta.shared.store(where, raw, warp.id, line)

    return run
