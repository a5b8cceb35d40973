"""Work that goes on beside the threads: streams that complete in order, their groups, and when each piece completes.

PTX ISA, "Asynchronous operations" and the completion mechanisms of each instruction. A piece of work takes effect when
it completes: at its issue in mode "early", and in mode "late" when a wait needs it or nothing else can go on. A correct
kernel cannot tell these apart. Whoever uses the result must have synchronised with the agent that stands for the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.ptx.memory import ALWAYS, ASYNC, BEFORE, GENERIC, TENSOR, Access
from tests.ptx.parser import Instruction
from tests.ptx.trouble import FaultError, TroubleError

# What a warp's own clock learns when it waits for a kind of work. Non-bulk copies belong to the generic proxy.
OBSERVES = {
    "cp.async": (GENERIC,),
    "bulk": (GENERIC, ASYNC),
    "wgmma": (GENERIC, ASYNC),
    "tcgen05": (GENERIC, ASYNC, BEFORE, TENSOR),
    "tcgen05.ld": (GENERIC, TENSOR),
    "tcgen05.st": (GENERIC, TENSOR),
}


@dataclass(eq=False)
class Work:
    """One piece of asynchronous work.

    Args:
        run: its effect.
        warp, instruction, mask: who issued it, by which instruction, in which lanes.
        stream, epoch: the stream in which it must not overtake, and its number there; None if it is on its own.
        wakes: the mbarrier that its completion acts on.
        signal: whether it does nothing but that, and may be left behind when the kernel ends.
    """

    run: Callable[[], None]
    warp: Any
    instruction: Instruction
    mask: int
    stream: Stream | None = None
    epoch: int = 0
    wakes: int | None = None
    signal: bool = False

    def complete(self) -> None:
        """Take effect, behind what is in front of it in its stream."""
        pending = self.warp.cluster.pending
        for work in [w for w in pending if w is self or (self.stream is not None and w.stream is self.stream)]:
            pending.remove(work)
            work.take_effect()
            if work is self:
                return

    def take_effect(self) -> None:
        try:
            self.run()
        except FaultError as fault:
            raise self.trouble(fault) from fault

    def trouble(self, fault: FaultError) -> TroubleError:
        return self.warp.trouble(FaultError(fault.kind, fault.detail), self.instruction, self.mask)


class Stream:
    """A warp's asynchronous work of one kind: an agent whose epochs number the pieces."""

    def __init__(self, warp: Any, kind: str) -> None:
        self.warp, self.kind = warp, kind
        self.agent: int = warp.cluster.clocks.add_agent()
        self.issued = 0
        self.open: list[tuple[int, int]] = []  # (lanes, epoch) since the last commit
        self.groups: list[tuple[int, int]] = []  # (lanes, last epoch)

    def accesses(self, line: int, *rows: int, ordered: bool = False) -> list[Access]:
        """The next piece's accesses to memory: each comes after what a row of the warp's clock holds.

        `ordered` work comes also after all that is in front of it in the stream.
        """
        self.issued += 1
        clocks = self.warp.cluster.clocks
        clock = clocks.state[self.warp.agent].copy()
        clocks.release(self.warp.agent)  # what the warp does from now on is later
        if ordered:
            clock[:, self.agent] = ALWAYS
        # Overwriting what was read needs no proxy fence.
        rows = rows if self.warp.cluster.strict else (GENERIC,) * len(rows)
        seen = [(clock[row], clock[TENSOR if row == TENSOR else GENERIC]) for row in rows]
        return [Access(self.agent, self.issued, line, *both, self.warp.cluster.number) for both in seen]

    def issue(self, run: Callable[[], None], ins: Instruction, mask: int, **how: Any) -> None:
        """Let the piece that was numbered last, or a signal behind it, take effect now or later."""
        self.warp.cluster.issue(Work(run, self.warp, ins, mask, self, self.issued, **how))

    def commit(self, mask: int) -> None:
        """Put what the lanes have issued since the last commit into a group."""
        mine = [epoch for lanes, epoch in self.open if lanes & mask]
        self.open = [(lanes & ~mask, epoch) for lanes, epoch in self.open if lanes & ~mask]
        self.groups.append((mask, max(mine, default=0)))

    def wait(self, mask: int, left: int = 0) -> int:
        """Let all groups of each lane complete but its `left` latest, and see their effect; returns the last epoch."""
        over = 0
        for lane in (lane for lane in range(32) if mask >> lane & 1):
            mine = [epoch for lanes, epoch in self.groups if lanes >> lane & 1]
            over = max([over, *mine[: max(len(mine) - left, 0)]])
        self.wait_for(over)
        while self.groups and self.groups[0][1] <= over:
            self.groups.pop(0)
        return over

    def wait_for(self, epoch: int) -> None:
        """Let the work up to an epoch complete, and see its effect."""
        for work in [w for w in self.warp.cluster.pending if w.stream is self and w.epoch <= epoch]:
            self.warp.cluster.pending.remove(work)
            work.take_effect()
        self.observe(self.warp.cluster.clocks.state[self.warp.agent], epoch)

    def observe(self, clock: np.ndarray, epoch: int) -> None:
        """Enter into a clock that the work up to an epoch is over."""
        for row in OBSERVES[self.kind]:
            clock[row, self.agent] = max(clock[row, self.agent], epoch)
