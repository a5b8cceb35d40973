"""Barriers of a CTA, a warp and a cluster, fences, and instructions that only advise the hardware.

A run that returns False leaves its lanes at the instruction, to be tried again once something has happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.ptx.decode import FULL, Decoder, Op, Run, aligned, check_defined, first_lane, instruction, lanes, write
from tests.ptx.memory import ASYNC, BEFORE, GENERIC, TENSOR
from tests.ptx.parser import Instruction
from tests.ptx.trouble import FaultError, fault_if


@dataclass
class Barrier:
    """One of a CTA's 16 barriers, or a cluster's: who has arrived, and what those that may go on take along."""

    arrived: dict[int, bool] = field(default_factory=dict)  # agent: whether it will wait
    expected: int = 0
    votes: int = 0
    voters: int = 0
    clock: np.ndarray | None = None
    released: dict[int, tuple[int, int, np.ndarray]] = field(default_factory=dict)

    def arrive(self, warp: Any, clock: np.ndarray, votes: int = 0, voters: int = 0, waits: bool = True) -> None:
        fault_if(warp.agent in self.arrived, "barrier", "arrives a second time at the same barrier")
        if not self.arrived:
            self.votes, self.voters, self.clock = 0, 0, np.zeros_like(clock)
        self.arrived[warp.agent] = waits
        self.votes, self.voters, self.clock = self.votes + votes, self.voters + voters, np.maximum(self.clock, clock)

    def open(self) -> None:
        waiting = [agent for agent, waits in self.arrived.items() if waits]
        self.released |= dict.fromkeys(waiting, (self.votes, self.voters, self.clock))
        self.arrived.clear()


FORMS = [f"{name}.{how}" for name in ("bar", "bar.cta", "barrier", "barrier.cta") for how in ("sync", "arrive", "red")]
REDUCE = {"popc": lambda votes, voters: votes, "and": int.__eq__, "or": lambda votes, voters: votes > 0}


@instruction(*FORMS)
def barrier(decoder: Decoder, ins: Instruction) -> Op:
    """Wait for all threads of the CTA, or for a count of them; .arrive does not wait, .red combines a predicate.

    PTX ISA, "Parallel Synchronization and Communication Instructions: bar, barrier". All threads of a warp come
    together, as .aligned has it; where PTX lets them come one by one this is stricter.
    """
    how = next(part for part in ins.parts if part in ("sync", "arrive", "red"))
    decoder.modifiers(ins, {"cta", "sync", "arrive", "red", "aligned", "all", *REDUCE, "u32", "pred"}, last=0)
    result, rest = None, list(decoder.operands(ins, *((3, 4) if how == "red" else (1, 2))))
    target, predicate, flip = -1, -1, 0
    if how == "red":
        result = next(part for part in ins.parts if part in REDUCE)
        first = rest.pop(0)
        target = decoder.destination(ins, first, 32) if result == "popc" else decoder.predicate(ins, first)[0]
        predicate, flip = decoder.predicate(ins, rest.pop())
    sources = decoder.sources(ins, tuple(rest), 32)

    def arrive(warp: Any, mask: int, found: Barrier, number: int, count: int) -> None:
        if not 0 <= number < 16 or count % 32 or count <= 0:
            raise FaultError("barrier", f"barrier {number} of {count} threads: one of 16, in multiples of a warp")
        if found.arrived and found.expected != count:
            raise FaultError("barrier", f"barrier {number}: {count} threads here, {found.expected} by another warp")
        if predicate >= 0:
            check_defined(warp, (predicate,), mask)
        votes = (warp.regs[predicate] ^ flip) & mask if predicate >= 0 else 0
        found.expected = count
        clock = warp.cluster.clocks.release(warp.agent)
        found.arrive(warp, clock, votes.bit_count(), mask.bit_count(), how != "arrive")
        if 32 * len(found.arrived) >= count:  # a warp counts whole: PTX rounds the thread count up to warps
            found.open()

    def run(warp: Any, mask: int) -> bool:
        check_defined(warp, sources, mask)
        number, *count = (int(warp.regs[slot][first_lane(mask)]) for slot in sources)
        found = warp.cta.barriers.setdefault(number, Barrier())
        if warp.agent not in found.released and (how == "arrive" or warp.agent not in found.arrived):
            if mask != warp.live:
                return False
            arrive(warp, mask, found, number, count[0] if count else 32 * warp.cta.warp_count)
        if how == "arrive":
            return True
        if warp.agent not in found.released:
            return False
        votes, voters, clock = found.released.pop(warp.agent)
        warp.cluster.clocks.acquire(warp.agent, clock)
        if result == "popc":
            write(warp, target, np.full(32, votes, np.uint32), mask)
        elif result:
            warp.regs[target] = warp.regs[target] & ~mask | mask * REDUCE[result](votes, voters)
            warp.defined[target] |= mask
        return True

    return Op(run, "waits")


@instruction("bar.warp.sync")
def warp_barrier(decoder: Decoder, ins: Instruction) -> Op:
    """Wait for the lanes of a mask ("bar.warp.sync")."""
    (member,) = decoder.sources(ins, decoder.operands(ins, 1), 32)
    return Op(lambda warp, mask: together(warp, mask, member), "waits")


def together(warp: Any, mask: int, member: int) -> bool:
    """Whether all live lanes of the member mask in a register have come; those that have must be in it."""
    check_defined(warp, (member,), mask)
    members = int(warp.regs[member][first_lane(mask)])
    if mask & ~members or (warp.regs[member][lanes(mask)] != members).any():
        raise FaultError("membermask", f"lanes {mask:#x} execute it with the member mask {members:#x}")
    return not members & warp.live & ~mask


@instruction("barrier.cluster.arrive", "barrier.cluster.wait")
def cluster_barrier(decoder: Decoder, ins: Instruction) -> Op:
    """All threads of a cluster that have not exited ("barrier.cluster"); arrive releases, unless relaxed."""
    modifiers = decoder.modifiers(ins, {"release", "relaxed", "acquire", "aligned"}, skip=3, last=0)
    decoder.operands(ins, 0)
    arrives = ins.parts[2] == "arrive"

    def run(warp: Any, mask: int) -> bool:
        found, cluster = warp.cluster.barrier, warp.cluster
        if arrives:
            fault_if(warp.agent in found.released, "barrier", "arrives a second time at the barrier of the cluster")
            clock = cluster.clocks.zero() if "relaxed" in modifiers else cluster.clocks.release(warp.agent)
            found.arrive(warp, clock)
            return True
        if warp.agent not in found.released:
            if warp.agent not in found.arrived:
                raise FaultError("barrier", "waits for the barrier of the cluster without having arrived")
            if not {other.agent for other in cluster.running} <= found.arrived.keys():
                return False
            found.open()
        cluster.clocks.acquire(warp.agent, found.released.pop(warp.agent)[2])
        return True

    return aligned(run)


@instruction("fence.proxy.async")
def fence_proxy(decoder: Decoder, ins: Instruction) -> Run:
    """Shows the asynchronous proxy what this thread has seen ("membar, fence", "Proxies").

    Forms for one state space are taken as the whole.
    """
    decoder.modifiers(ins, {"proxy", "async", "global", "shared::cta", "shared::cluster"}, last=0)
    decoder.operands(ins, 0)

    def run(warp: Any, mask: int) -> None:
        clocks = warp.cluster.clocks
        mine = clocks.state[warp.agent]
        np.maximum(mine[ASYNC], mine[GENERIC], out=mine[ASYNC])
        clocks.release(warp.agent)

    return run


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence_tensor(decoder: Decoder, ins: Instruction) -> Run:
    """Orders tensor-memory accesses before, or after, what synchronises threads ("tcgen05.fence")."""
    decoder.operands(ins, 0)
    to, of = (BEFORE, GENERIC) if "before" in ins.opcode else (TENSOR, BEFORE)

    def run(warp: Any, mask: int) -> None:
        mine = warp.cluster.clocks.state[warp.agent]
        np.maximum(mine[to], mine[of], out=mine[to])

    return run


@instruction("fence", "membar")
def fence(decoder: Decoder, ins: Instruction) -> Run:
    """Puts what this thread did before in front of its later strong accesses, and the reverse ("membar, fence")."""
    allowed = {"sc", "acq_rel", "acquire", "release", "sync_restrict::shared::cta", "sync_restrict::shared::cluster"}
    decoder.modifiers(ins, allowed | {"cta", "cluster", "gpu", "sys", "gl"}, last=0)
    decoder.operands(ins, 0)

    def run(warp: Any, mask: int) -> None:
        clocks = warp.cluster.clocks
        for found in warp.observed.values():
            warp.take_up(*found)
        warp.observed.clear()
        warp.fenced = clocks.release(warp.agent)

    return run


@instruction("griddepcontrol.wait", "griddepcontrol.launch_dependents", "setmaxnreg", "nanosleep", "prefetch")
@instruction("prefetchu", "cp.async.bulk.prefetch", "applypriority", "discard", "createpolicy")
@instruction("fence.proxy.tensormap::generic.release")
def advice(decoder: Decoder, ins: Instruction) -> Run:
    """No effect here. Launches run one after another, so what this one depends on is over ("griddepcontrol");
    registers are unlimited ("setmaxnreg"), time and caches are not modelled."""
    if ins.parts[0] == "createpolicy":
        target = decoder.destination(ins, ins.operands[0], 64)
        return lambda warp, mask: write(warp, target, np.full(32, FULL, np.uint64), mask)
    return lambda warp, mask: None
