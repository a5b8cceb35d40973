"""Data between the lanes of a warp: shfl."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests.ptx.barrier import together
from tests.ptx.decode import FULL, Decoder, Op, check_defined, instruction, lanes, undefined, write, write_predicate
from tests.ptx.parser import Instruction
from tests.ptx.trouble import FaultError

LANES = np.arange(32)


@functools.lru_cache(1024)
def source_lanes(mode: str, amount: bytes, packed: bytes) -> tuple[np.ndarray, np.ndarray, int]:
    """(lane that each lane reads, the same as masks, where the lane that was asked for is in range)."""
    step, word = (np.frombuffer(raw, np.uint32).astype(np.int64) & 0x1F1F for raw in (amount, packed))
    step, clamp, segment = step & 31, word & 31, word >> 8
    low = LANES & segment
    high = low | clamp & ~segment
    j = {"up": LANES - step, "down": LANES + step, "bfly": LANES ^ step, "idx": low | step & ~segment}[mode]
    inside = j >= high if mode == "up" else j <= high
    lane = np.where(inside, j, LANES)
    return lane, np.uint32(1) << lane.astype(np.uint32), int(np.packbits(inside, bitorder="little").view(np.uint32)[0])


@instruction("shfl.sync", types=("b32",))
def shuffle(decoder: Decoder, ins: Instruction) -> Op:
    """Each lane reads a register of another ("Data Movement and Conversion Instructions: shfl.sync").

    Every live lane of the member mask has to come, and a lane may read only from those that did. d|p also says
    whether the lane that was asked for is in range.
    """
    modifiers = decoder.modifiers(ins, {"bfly", "down", "up", "idx"}, skip=2)
    destination, *rest = decoder.operands(ins, 5)
    first, second = decoder.pair(destination)
    target, (a, b, c, member) = decoder.destination(ins, first, 32), decoder.sources(ins, tuple(rest), 32)
    predicate = decoder.predicate(ins, second)[0] if second is not None else None
    decoder.refuse_if(ins, len(modifiers) != 1)
    (mode,) = modifiers

    def run(warp: Any, mask: int) -> bool:
        check_defined(warp, (b, c), mask)
        if not together(warp, mask, member):
            return False
        from_lane, from_bit, valid = source_lanes(mode, warp.regs[b].tobytes(), warp.regs[c].tobytes())
        read = from_bit if mask == FULL else from_bit[lanes(mask)]
        needed = int(np.bitwise_or.reduce(read))
        if needed & ~mask:
            bad = (read & np.uint32(needed & ~mask)) != 0
            raise FaultError("shuffle", "reads from a lane that does not take part", int(np.flatnonzero(bad)[0]))
        if needed & ~warp.defined[a]:
            undefined(warp, (a,), needed)
        write(warp, target, warp.regs[a][from_lane], mask)
        if predicate is not None:
            write_predicate(warp, predicate, valid, mask)
        return True

    return Op(run, "waits")
