"""Votes, matches, reductions and elections among the lanes of a warp.

PTX ISA, "Parallel Synchronization and Communication Instructions: vote.sync, match.sync, activemask, redux.sync,
elect.sync": every live lane of the member mask has to come, and none that is not in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.barrier import together
from tests.ptx.decode import Decoder, Op, bits, check_defined, first_lane, instruction, lanes, write, write_predicate
from tests.ptx.floating import NATIVE, decode, encode
from tests.ptx.integer import typed, unsigned
from tests.ptx.parser import BITS, Instruction, Operand, Symbol

SINK = Symbol("_")
Slots = tuple[int, ...]
Work = Callable[[Any, int], tuple[Any, int]]


def finish(decoder: Decoder, ins: Instruction, word: Operand, flag: Operand | None, sources: Slots, work: Work) -> Op:
    """Wait for the lanes of the member mask, the last operand; then write the words and the mask that `work` gives."""
    member = decoder.source(ins, ins.operands[-1], 32)
    target = decoder.destination(ins, word, 32) if word != SINK else -1
    predicate = decoder.predicate(ins, flag)[0] if flag not in (None, SINK) else -1

    def run(warp: Any, mask: int) -> bool:
        check_defined(warp, sources, mask)
        if not together(warp, mask, member):
            return False
        words, flags = work(warp, mask)
        if target >= 0:
            write(warp, target, np.resize(np.asarray(words, np.uint32), 32), mask)
        if predicate >= 0:
            write_predicate(warp, predicate, flags, mask)
        return True

    return Op(run, "waits")


@instruction("vote.sync.all", "vote.sync.any", "vote.sync.uni", types=("pred",))
@instruction("vote.sync.ballot", types=("b32",))
def vote(decoder: Decoder, ins: Instruction) -> Op:
    """Whether all or any lanes hold a predicate, or all the same, or which lanes hold it ("vote.sync")."""
    decoder.modifiers(ins, set(), skip=3)
    destination, condition, _ = decoder.operands(ins, 3)
    (source, flip), name = decoder.predicate(ins, condition), ins.parts[2]

    def work(warp: Any, mask: int) -> tuple[int, int]:
        votes = (warp.regs[source] ^ flip) & mask
        return votes, mask * {"all": votes == mask, "any": votes != 0, "uni": votes in (0, mask)}.get(name, False)

    targets = (destination, None) if name == "ballot" else (SINK, destination)
    return finish(decoder, ins, *targets, (source,), work)


@instruction("match.any.sync", "match.all.sync", types=("b32", "b64"))
def match(decoder: Decoder, ins: Instruction) -> Op:
    """The lanes that hold the same value as this one; or all if their values agree, else none ("match.sync")."""
    decoder.modifiers(ins, set(), skip=3)
    destination, a, _ = decoder.operands(ins, 3)
    source, every = decoder.source(ins, a, BITS[ins.parts[-1]]), ins.parts[1] == "all"
    word, flag = decoder.pair(destination)
    decoder.refuse_if(ins, flag is not None and not every, f"{ins.opcode} writes no predicate")

    def work(warp: Any, mask: int) -> tuple[Any, int]:
        same = [bits(warp.regs[source] == one) & mask for one in warp.regs[source]]
        agree = mask * (same[first_lane(mask)] == mask)
        return agree if every else same, agree

    return finish(decoder, ins, word, flag, (source,), work)


REDUCE = {"add": np.add, "min": np.minimum, "max": np.maximum}
REDUCE |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@instruction("redux.sync.add", "redux.sync.min", "redux.sync.max", types=("u32", "s32"))
@instruction("redux.sync.and", "redux.sync.or", "redux.sync.xor", types=("b32",))
@instruction("redux.sync.min", "redux.sync.max", types=("f32",))
def reduction(decoder: Decoder, ins: Instruction) -> Op:
    """One value from all lanes; of floats NaN decides with .NaN only, and -0 is below +0 ("redux.sync")."""
    kind, name = ins.parts[-1], ins.parts[2]
    modifiers = decoder.modifiers(ins, {"abs", "NaN"} if kind == "f32" else set(), skip=3)
    destination, a, _ = decoder.operands(ins, 3)
    source = decoder.source(ins, a, 32, fp=kind == "f32")

    def work(warp: Any, mask: int) -> tuple[Any, int]:
        value = warp.regs[source][lanes(mask)]
        if kind != "f32":
            return unsigned(REDUCE[name].reduce(typed(kind)(value), dtype=typed(kind)(value).dtype)), 0
        value = np.abs(decode(kind, value)) if "abs" in modifiers else decode(kind, value)
        out = np.nan if "NaN" in modifiers and np.isnan(value).any() else functools.reduce(NATIVE[name][1], value)
        return encode(kind, np.array([out])), 0

    return finish(decoder, ins, destination, None, (source,), work)


@instruction("activemask", types=("b32",))
def active(decoder: Decoder, ins: Instruction) -> Op:
    """The lanes that execute it together, which PTX leaves to the schedule ("activemask")."""
    decoder.modifiers(ins, set())
    target = decoder.destination(ins, *decoder.operands(ins, 1), 32)
    return Op(lambda warp, mask: write(warp, target, np.full(32, mask, np.uint32), mask))


@instruction("elect.sync")
def elect(decoder: Decoder, ins: Instruction) -> Op:
    """One of the lanes, which PTX leaves open but for being the same each time; here the lowest ("elect.sync")."""
    decoder.modifiers(ins, set(), skip=2, last=0)
    destination, _ = decoder.operands(ins, 2)
    word, flag = decoder.pair(destination)
    decoder.refuse_if(ins, flag is None, "elect.sync writes d|p")
    return finish(decoder, ins, word, flag, (), lambda warp, mask: (first_lane(mask), mask & -mask))
