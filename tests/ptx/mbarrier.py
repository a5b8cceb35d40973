"""mbarrier objects: arrivals and transaction counts, in this CTA's shared memory or another's of the cluster.

PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.ptx.access import address_of, addresses
from tests.ptx.decode import Decoder, Op, Run, check_defined, instruction, lanes, write, write_predicate
from tests.ptx.memory import ASYNC, GENERIC, INDEX, RANK_SHIFT, TENSOR, Access
from tests.ptx.parser import Immediate, Instruction, Symbol
from tests.ptx.trouble import FaultError, fault_if

MAX_PENDING = (1 << 20) - 1
SCOPES = {"cta", "cluster", "shared", "shared::cta", "shared::cluster", "b64"}
SINK = Symbol("_")
ORDERS = {"release", "acquire", "relaxed"}


@dataclass
class MBarrier:
    """One object ("Contents of the mbarrier object"); its asynchronous side is an agent, its phases the epochs."""

    address: int
    count: int
    agent: int
    pending: int
    clock: np.ndarray
    released: np.ndarray
    tx: int = 0
    phase: int = 0
    fenced: bool = False

    def settle(self) -> None:
        """Complete the phase once neither arrivals nor bytes are outstanding ("Phase Completion of the mbarrier")."""
        if not -MAX_PENDING <= self.tx <= MAX_PENDING:
            raise FaultError("mbarrier", f"a transaction count of {self.tx} is out of range")
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.clock[:TENSOR, self.agent] = self.phase
            self.released = self.clock.copy()

    def arrive(self, clock: np.ndarray | None, tx: int = 0, count: int = 1) -> None:
        """Expect bytes, arrive so often, and release a clock."""
        if count > self.pending:
            raise FaultError("mbarrier", f"more arrivals than the {self.count} of the mbarrier at {self.address:#x}")
        if clock is not None:
            self.clock = np.maximum(self.clock, clock)
        self.tx += tx
        self.pending -= count
        self.settle()

    def access(self, line: int, clock: np.ndarray, cluster: Any) -> Access:
        """An access by the asynchronous side, in the phase that is under way."""
        seen = clock[ASYNC if cluster.strict else GENERIC]
        return Access(self.agent, self.phase + 1, line, seen, clock[GENERIC], cluster.number)


def each(warp: Any, mask: int, slot: int, offset: int) -> Iterator[tuple[int, int]]:
    """(index among the active lanes, address)."""
    return enumerate(int(address) for address in addresses(warp, slot, offset, mask))


def mbarrier_at(warp: Any, address: int, index: int, *, asynchronous: bool = False) -> MBarrier:
    """The object at an address of the cluster; it must be initialised before, and fenced for asynchronous work."""
    found = warp.cluster.mbarriers.get(address)
    if found is None:
        raise FaultError("mbarrier", f"there is no initialised mbarrier at {address:#x}", index)
    shared, access = warp.cluster.shared_of(address), warp.access(0)
    place = address - shared.base + INDEX[8]
    shared.check_read(place, access)
    shared.mark_read(place, access)
    if asynchronous and not found.fenced:
        raise FaultError("missing_fence", "the mbarrier's initialisation was not followed by a fence", index)
    return found


@instruction("mbarrier.init")
def mbarrier_init(decoder: Decoder, ins: Instruction) -> Run:
    """A new object with an arrival count of 1 to 2^20 - 1 ("mbarrier.init")."""
    decoder.modifiers(ins, SCOPES, skip=2, last=0)
    where, count = decoder.operands(ins, 2)
    (slot, offset), number = address_of(decoder, ins, where, "shared"), decoder.source(ins, count, 32)

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, (number,), mask)
        cta, cluster = warp.cta, warp.cluster
        counts = warp.regs[number][lanes(mask)]
        places = cta.shared.offsets(addresses(warp, slot, offset, mask), 8)
        for i, address in each(warp, mask, slot, offset):
            if address in cluster.mbarriers or not 1 <= counts[i] <= MAX_PENDING:
                raise FaultError("mbarrier", f"initialises {address:#x} twice, or with a bad count {counts[i]}", i)
            place = int(places[i]) + INDEX[8]
            cta.shared.write(place, 0, warp.access(ins.line))
            cta.shared.written[place] = False  # the object is opaque: nobody may load it
            agent, zero = cluster.clocks.add_agent(), cluster.clocks.zero()
            cluster.mbarriers[address] = MBarrier(address, int(counts[i]), agent, int(counts[i]), zero, zero)
            cta.shared.objects.add(int(places[i]))
            warp.unfenced.append(cluster.mbarriers[address])

    return run


@instruction("mbarrier.inval")
def mbarrier_inval(decoder: Decoder, ins: Instruction) -> Run:
    """The object ends and its memory is free for other use ("mbarrier.inval")."""
    decoder.modifiers(ins, SCOPES, skip=2, last=0)
    slot, offset = address_of(decoder, ins, decoder.operands(ins, 1)[0], "shared")

    def run(warp: Any, mask: int) -> None:
        for i, address in each(warp, mask, slot, offset):
            place = mbarrier_at(warp, address, i).address - warp.cta.shared.base
            warp.cta.shared.check_write(place + INDEX[8], warp.access(ins.line))
            warp.cta.shared.objects.remove(place)
            del warp.cluster.mbarriers[address]

    return run


@instruction("fence.mbarrier_init.release.cluster")
def fence_init(decoder: Decoder, ins: Instruction) -> Run:
    """Makes this thread's initialisations visible to asynchronous operations ("membar, fence")."""
    decoder.operands(ins, 0)

    def run(warp: Any, mask: int) -> None:
        while warp.unfenced:
            warp.unfenced.pop().fenced = True

    return run


@instruction("mbarrier.arrive", "mbarrier.arrive_drop", "mbarrier.expect_tx", "mbarrier.complete_tx")
def mbarrier_arrive(decoder: Decoder, ins: Instruction) -> Run:
    """Arrivals, and changes of the transaction count ("mbarrier.arrive", "arrive_drop", "expect_tx", "complete_tx").

    The state that arrive returns is the number of the phase here; PTX leaves it opaque.
    """
    name = ins.parts[1]
    modifiers = decoder.modifiers(ins, SCOPES | ORDERS | {"expect_tx", "noComplete"}, skip=2, last=0)
    operands = list(decoder.operands(ins, *((1, 2, 3) if name.startswith("arrive") else (2,))))
    decoder.refuse_if(ins, "noComplete" in modifiers or (name == "arrive_drop" and "expect_tx" in modifiers))
    state = operands.pop(0) if name.startswith("arrive") else SINK
    target = decoder.destination(ins, state, 64) if state != SINK else None
    slot, offset = address_of(decoder, ins, operands.pop(0), "shared")
    number = decoder.source(ins, operands.pop() if operands else Immediate(1), 32)
    drops, expects = name == "arrive_drop", name == "expect_tx" or "expect_tx" in modifiers

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, (number,), mask)
        numbers, clocks = warp.regs[number][lanes(mask)], warp.cluster.clocks
        phases = np.zeros(32, np.uint64)
        for (i, address), lane in zip(each(warp, mask, slot, offset), np.flatnonzero(lanes(mask)), strict=True):
            found, n = mbarrier_at(warp, address, i), int(numbers[i])
            phases[lane] = found.phase
            if not name.startswith("arrive"):
                found.tx += n if expects else -n
                found.settle()
                continue
            found.count -= n if drops else 0
            clock = None if "relaxed" in modifiers else clocks.release(warp.agent)
            found.arrive(clock, *((n, 1) if expects else (0, n)))
        if target is not None:
            write(warp, target, phases, mask)

    return run


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def mbarrier_wait(decoder: Decoder, ins: Instruction) -> Op:
    """True once the phase of a parity, or of a state, has completed; until then it may return false.

    PTX ISA, "mbarrier.test_wait, mbarrier.try_wait": how long try_wait suspends is open. Here either returns false
    once, and when tried again it waits. A true result acquires what the arrivals and copies of the phase released.
    """
    modifiers = decoder.modifiers(ins, SCOPES | ORDERS | {"parity"}, skip=2, last=0)
    result, where, phase, *limit = decoder.operands(ins, 3, 4)
    slot, offset = address_of(decoder, ins, where, "shared")
    of_parity = "parity" in modifiers
    wanted = decoder.source(ins, phase, 32 if of_parity else 64)
    limits = decoder.sources(ins, tuple(limit), 32)
    target, _ = decoder.predicate(ins, result)

    def over(found: MBarrier, asked: int, index: int) -> bool:
        fault_if(of_parity and asked > 1, "mbarrier", f"a parity is 0 or 1, not {asked}", index)
        if not of_parity and found.phase not in (asked, asked + 1):
            raise FaultError("mbarrier", f"a state of phase {asked} in phase {found.phase}", index)
        return found.phase & 1 != asked & 1

    def run(warp: Any, mask: int) -> bool:
        check_defined(warp, (wanted, *limits), mask)
        asked, found, waits = warp.regs[wanted][lanes(mask)], [], set()
        for i, address in each(warp, mask, slot, offset):
            found.append(mbarrier_at(warp, address, i))
            if address >> RANK_SHIFT != warp.cta.rank:
                raise FaultError("mbarrier", f"waits for {address:#x}, in another CTA's shared memory", i)
            if not over(found[-1], int(asked[i]), i):
                waits.add(address)
        key = (ins.line, mask)
        if waits and key in warp.timeouts:
            warp.wanted |= waits
            return False
        if waits:
            warp.timeouts.add(key)
        else:
            warp.timeouts.discard(key)
            for one in found if "relaxed" not in modifiers else ():
                warp.cluster.clocks.acquire(warp.agent, one.released)
        write_predicate(warp, target, 0 if waits else mask, mask)
        return True

    return Op(run, "waits")
