"""Data between the lanes of a warp: shfl."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.barrier import together
from tests.ptx.decode import FULL, Decoder, Op, check_defined, instruction, lanes, undefined, write, write_predicate
from tests.ptx.parser import Instruction
from tests.ptx.trouble import FaultError

LANES = np.arange(32, dtype=np.uint32)


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
    if len(modifiers) != 1:
        decoder.refuse(ins, f"{ins.opcode} is not modelled")
    (mode,) = modifiers
    places: dict[bytes, tuple[np.ndarray, np.ndarray, int]] = {}

    def source_lanes(amount: np.ndarray, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        key = amount.tobytes() + packed.tobytes()
        if key not in places:
            step, clamp, segment = amount & 31, packed & 31, (packed >> 8) & 31
            low = LANES & segment
            high = low | (clamp & ~segment)
            lane, by = LANES.astype(np.int64), step.astype(np.int64)
            j = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": low | (step & ~segment)}[mode]
            inside = j >= high if mode == "up" else j <= high
            from_lane = np.where(inside, j, lane).astype(np.int64)
            valid = int(np.packbits(inside, bitorder="little").view(np.uint32)[0])
            places[key] = (from_lane, np.uint32(1) << from_lane.astype(np.uint32), valid)
            while len(places) > 256:
                places.pop(next(iter(places)))
        return places[key]

    def run(warp: Any, mask: int) -> bool:
        check_defined(warp, (b, c), mask)
        if not together(warp, mask, member):
            return False
        from_lane, from_bit, valid = source_lanes(warp.regs[b], warp.regs[c])
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
