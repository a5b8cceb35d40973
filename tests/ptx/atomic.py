"""Atomic operations on global and shared memory: atom and red.

PTX ISA, "Parallel Synchronization and Communication Instructions: atom, red". The lanes act one after another. Those
without an order of their own are relaxed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.access import HINTS, ORDERS, SCOPES, SPACES, address_of, addresses, located, observe, publish, space_of
from tests.ptx.decode import UNSIGNED, Decoder, Run, check_defined, instruction, lanes, write
from tests.ptx.floating import evaluated
from tests.ptx.integer import paired, typed, unsigned
from tests.ptx.parser import BITS, Instruction

Combine = Callable[..., np.ndarray]
BITWISE: dict[str, Combine] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
OTHER: dict[str, Combine] = {
    "exch": lambda old, new: new,
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
    "inc": lambda old, limit: np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1)),
}


def combine(name: str, kind: str) -> Combine | None:
    """What an operation puts in the place of an old value."""
    if name in BITWISE or name in OTHER:
        return (BITWISE | OTHER)[name]
    base = kind.removesuffix("x2")
    if name == "add" and base in ("f16", "bf16", "f32", "f64"):
        return paired(kind, evaluated(base, np.add, ()))
    if name in ("add", "min", "max") and kind[0] in "us":
        choose = {"add": np.add, "min": np.minimum, "max": np.maximum}[name]
        view = typed(kind)
        return lambda old, new: unsigned(choose(view(old), view(new)))
    return None


@instruction("atom", "red")
def atomic(decoder: Decoder, ins: Instruction) -> Run:
    """Replace a value by its combination with a register; atom returns the old one."""
    names = {"add", "min", "max", *BITWISE, *OTHER}
    modifiers = decoder.modifiers(ins, names | SPACES | ORDERS | SCOPES | HINTS | {"noftz"})
    kind, space, returns = ins.parts[-1], space_of(ins), ins.parts[0] == "atom"
    function = combine(next(iter(modifiers & names), ""), kind)
    decoder.refuse_if(ins, function is None or len(modifiers & names) != 1)
    width, count = BITS[kind], returns + 2 + ("cas" in modifiers) + ("L2::cache_hint" in modifiers)
    operands = list(decoder.operands(ins, count))
    target = decoder.destination(ins, operands.pop(0), width) if returns else None
    slot, offset = address_of(decoder, ins, operands.pop(0), space)
    policy = (decoder.source(ins, operands.pop(), 64),) if "L2::cache_hint" in modifiers else ()
    values = decoder.sources(ins, tuple(operands), width)

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, (*values, *policy), mask)
        memory, where = located(warp, space, addresses(warp, slot, offset, mask))
        access, old = warp.access(ins.line, strong=True), np.zeros(32, UNSIGNED[width])
        observe(warp, memory, where, ins)
        publish(warp, memory, where, ins)
        for i, lane in enumerate(np.flatnonzero(lanes(mask))):
            at, one = where[i : i + 1], slice(lane, lane + 1)
            old[one] = memory.load(at, width // 8, access).view(UNSIGNED[width])[0]
            new = function(old[one], *[warp.regs[value][one] for value in values])
            memory.store(at, new.view(np.uint8).reshape(1, -1), access)
        if target is not None:
            write(warp, target, old, mask)

    return run
