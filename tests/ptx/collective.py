"""Instructions that threads do together, and asynchronous bulk copies: bar, shfl, mbarrier, cp.async.bulk, fences.

A run that returns False leaves its lanes at the instruction, to be tried again once something has happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.ptx.access import address_of, addresses
from tests.ptx.decode import (
    FULL,
    Decoder,
    Op,
    Run,
    check_defined,
    first_lane,
    instruction,
    lanes,
    undefined,
    write,
)
from tests.ptx.memory import INDEX, SHARED_BASE
from tests.ptx.parser import Immediate, Instruction
from tests.ptx.trouble import FaultError

MAX_PENDING_BYTES = (1 << 20) - 1
LANES = np.arange(32, dtype=np.uint32)


@dataclass
class Barrier:
    """One of a CTA's 16 barriers: who waits, with which lanes, and what those that may go on take with them."""

    arrived: dict[int, int] = field(default_factory=dict)
    expected: int = 0
    line: int = 0
    votes: int = 0
    clock: np.ndarray | None = None
    released: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)


def _arrive(warp: Any, number: int, threads: int, votes: int) -> None:
    barrier = warp.cta.barriers[number]
    if barrier.arrived and barrier.expected != threads:
        raise FaultError(
            "barrier", f"barrier {number}: {threads} threads expected here, {barrier.expected} by another warp"
        )
    if not barrier.arrived:
        barrier.votes, barrier.clock = 0, np.zeros(warp.cta.clocks.agents, np.int32)
    barrier.expected = threads
    barrier.arrived[warp.id] = warp.live
    barrier.votes += votes
    clock = warp.cta.clocks.release(warp.id)
    barrier.clock = np.maximum(warp.cta.clocks.padded(barrier.clock), clock)
    # A warp counts whole: PTX rounds the thread count up to warps.
    if 32 * len(barrier.arrived) >= threads:
        barrier.released |= dict.fromkeys(barrier.arrived, (barrier.votes, barrier.clock))
        barrier.arrived.clear()


@instruction("bar.sync", "bar.red.popc.u32")
def barrier_sync(decoder: Decoder, ins: Instruction) -> Op:
    """Wait for all threads of the CTA, or for a count of them; .red.popc adds up a predicate.

    PTX ISA, "Parallel Synchronization and Communication Instructions: bar": aligned, so all threads of a warp execute
    the same one; it orders the participants' accesses.
    """
    reduces = ins.parts[1] == "red"
    rest = list(decoder.operands(ins, *((3, 4) if reduces else (1, 2))))
    target = decoder.destination(ins, rest.pop(0), 32) if reduces else -1
    predicate, flip = decoder.predicate(ins, rest.pop()) if reduces else (-1, 0)
    if not all(isinstance(operand, Immediate) for operand in rest):
        decoder.refuse(ins, "a barrier whose number or count is no constant is not modelled")
    number, count = [operand.value for operand in rest if isinstance(operand, Immediate)] + [0] * (2 - len(rest))
    if not 0 <= number < 16 or count % 32:
        decoder.refuse(ins, "a barrier is one of 16, its count a multiple of the warp size")

    def run(warp: Any, mask: int) -> bool:
        barrier = warp.cta.barriers.setdefault(number, Barrier())
        if warp.id not in barrier.released and warp.id not in barrier.arrived:
            if mask != warp.live:
                return False
            if reduces:
                check_defined(warp, (predicate,), mask)
            votes = bin((warp.regs[predicate] ^ flip) & mask).count("1") if reduces else 0
            barrier.line = ins.line
            _arrive(warp, number, count or warp.cta.padded_threads, votes)
        if warp.id not in barrier.released:
            return False
        votes, clock = barrier.released.pop(warp.id)
        warp.cta.clocks.acquire(warp.id, clock)
        if reduces:
            write(warp, target, np.full(32, votes, np.uint32), mask)
        return True

    return Op(run, "waits")


@instruction("shfl.sync", types=("b32",))
def shuffle(decoder: Decoder, ins: Instruction) -> Op:
    """Each lane reads a register of another ("Data Movement and Conversion Instructions: shfl.sync").

    Every live lane of the member mask has to come, and a lane may read only from those that did.
    """
    modifiers = decoder.modifiers(ins, {"bfly", "down", "up", "idx"}, skip=2)
    destination, *rest = decoder.operands(ins, 5)
    target, (a, b, c, member) = decoder.destination(ins, destination, 32), decoder.sources(ins, tuple(rest), 32)
    if len(modifiers) != 1:
        decoder.refuse(ins, f"{ins.opcode} is not modelled")
    (mode,) = modifiers
    places: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}

    def source_lanes(amount: np.ndarray, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        key = amount.tobytes() + packed.tobytes()
        if key not in places:
            step, clamp, segment = amount & 31, packed & 31, (packed >> 8) & 31
            low = LANES & segment
            high = low | (clamp & ~segment)
            lane, by = LANES.astype(np.int64), step.astype(np.int64)
            j = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": low | (step & ~segment)}[mode]
            inside = j >= high if mode == "up" else j <= high
            from_lane = np.where(inside, j, lane).astype(np.int64)
            places[key] = (from_lane, np.uint32(1) << from_lane.astype(np.uint32))
            while len(places) > 256:
                places.pop(next(iter(places)))
        return places[key]

    def run(warp: Any, mask: int) -> bool:
        check_defined(warp, (b, c, member), mask)
        regs = warp.regs
        members = int(regs[member][first_lane(mask)])
        if mask & ~members or (regs[member][lanes(mask)] != members).any():
            raise FaultError("shuffle", f"lanes {mask:#x} execute it with the member mask {members:#x}")
        if members & warp.live & ~mask:
            return False
        from_lane, from_bit = source_lanes(regs[b], regs[c])
        read = from_bit if mask == FULL else from_bit[lanes(mask)]
        needed = int(np.bitwise_or.reduce(read))
        if needed & ~mask:
            bad = (read & np.uint32(needed & ~mask)) != 0
            raise FaultError("shuffle", "reads from a lane that does not take part", int(np.flatnonzero(bad)[0]))
        if needed & ~warp.defined[a]:
            undefined(warp, (a,), needed)
        write(warp, target, regs[a][from_lane], mask)
        return True

    return Op(run, "waits")


@dataclass
class MBarrier:
    """An mbarrier object ("Parallel Synchronization and Communication Instructions: mbarrier")."""

    address: int
    count: int
    agent: int
    pending: int
    clock: np.ndarray
    released: np.ndarray
    tx: int = 0
    phase: int = 0
    fenced: bool = False

    def settle(self, cta: Any) -> None:
        """Complete the phase once neither arrivals nor bytes are outstanding ("Phase Completion of the mbarrier")."""
        if not -MAX_PENDING_BYTES <= self.tx <= MAX_PENDING_BYTES:
            raise FaultError("mbarrier", f"a transaction count of {self.tx} is out of range")
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.clock = cta.clocks.padded(self.clock)
            self.clock[self.agent] = self.phase
            self.released = self.clock.copy()


@dataclass
class Copy:
    """A bulk copy under way, with what its issuer had seen."""

    destination: int
    source: int
    size: int
    barrier: MBarrier
    clock: np.ndarray
    instruction: Instruction
    warp: int
    lane: int

    def complete(self, cta: Any) -> None:
        """Copy, as the asynchronous agent of the mbarrier, and count the bytes on it ("complete-tx operation")."""
        index = self.destination - SHARED_BASE + np.arange(self.size)
        clock = cta.clocks.padded(self.clock)
        cta.shared.check_write(index, clock)
        data = cta.memory.range(self.source, self.size)
        cta.shared.mark(index, data, self.barrier.agent, self.barrier.phase + 1, self.instruction.line)
        self.barrier.tx -= self.size
        self.barrier.settle(cta)


def _each(warp: Any, mask: int, slot: int, offset: int) -> Iterator[tuple[int, int]]:
    """(index among the active lanes, address)."""
    return enumerate(int(address) for address in addresses(warp, slot, offset, mask))


def _object(warp: Any, address: int, index: int) -> MBarrier:
    """The mbarrier at an address, whose initialisation has to be ordered before."""
    found = warp.cta.mbarriers.get(address)
    if found is None:
        raise FaultError("mbarrier", f"there is no initialised mbarrier at {address:#x}", index)
    place, seen = address - SHARED_BASE + INDEX[8], warp.cta.clocks.seen[warp.id]
    warp.cta.shared.check_read(place, seen)
    warp.cta.shared.read_epoch[warp.id][place] = seen[warp.id]
    return found


@instruction("mbarrier.init.shared.b64")
def mbarrier_init(decoder: Decoder, ins: Instruction) -> Run:
    """A new object with an arrival count of 1 to 2^20 - 1 ("mbarrier.init")."""
    where, count = decoder.operands(ins, 2)
    (slot, offset), number = address_of(decoder, ins, where, "shared"), decoder.source(ins, count, 32)

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, (number,), mask)
        cta = warp.cta
        counts = warp.regs[number][lanes(mask)]
        cta.shared.offsets(addresses(warp, slot, offset, mask), 8)
        for i, address in _each(warp, mask, slot, offset):
            if address in cta.mbarriers or not 1 <= counts[i] <= MAX_PENDING_BYTES:
                raise FaultError("mbarrier", f"initialises {address:#x} twice, or with a bad count {counts[i]}", i)
            place = address - SHARED_BASE + INDEX[8]
            cta.shared.check_write(place, cta.clocks.seen[warp.id])
            epoch = int(cta.clocks.seen[warp.id, warp.id])
            cta.shared.mark(place, np.zeros(8, np.uint8), warp.id, epoch, ins.line)
            cta.shared.written[place] = False  # the object is opaque: nobody may load it
            agent = cta.clocks.add_agent()
            zero = np.zeros(cta.clocks.agents, np.int32)
            cta.mbarriers[address] = MBarrier(address, int(counts[i]), agent, int(counts[i]), zero, zero)
            cta.shared.objects.add(address)
            warp.unfenced.append(cta.mbarriers[address])

    return run


@instruction("fence.mbarrier_init.release.cluster")
def fence_init(decoder: Decoder, ins: Instruction) -> Run:
    """Makes this thread's initialisations visible to asynchronous operations ("membar, fence")."""
    decoder.operands(ins, 0)

    def run(warp: Any, mask: int) -> None:
        while warp.unfenced:
            warp.unfenced.pop().fenced = True

    return run


@instruction("mbarrier.arrive.expect_tx.shared.b64")
def arrive_expect(decoder: Decoder, ins: Instruction) -> Run:
    """Expect bytes, then arrive once; the state that it returns is opaque ("mbarrier.arrive")."""
    state, where, size = decoder.operands(ins, 3)
    target, (slot, offset) = decoder.destination(ins, state, 64), address_of(decoder, ins, where, "shared")
    count = decoder.source(ins, size, 32)

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, (count,), mask)
        sizes, clocks = warp.regs[count][lanes(mask)], warp.cta.clocks
        for i, address in _each(warp, mask, slot, offset):
            found = _object(warp, address, i)
            if found.pending == 0:
                raise FaultError("mbarrier", f"more arrivals than the {found.count} of the mbarrier at {address:#x}", i)
            found.clock = np.maximum(clocks.padded(found.clock), clocks.release(warp.id))
            found.tx += int(sizes[i])
            found.pending -= 1
            found.settle(warp.cta)
        write(warp, target, np.zeros(32, np.uint64), mask)
        # Only mbarrier.test_wait and try_wait without .parity read the state, and they are not modelled.
        warp.defined[target] &= ~mask

    return run


@instruction("mbarrier.try_wait.parity.shared.b64")
def try_wait(decoder: Decoder, ins: Instruction) -> Op:
    """True once the phase of the given parity has completed; until then it suspends, and may return false.

    PTX ISA, "mbarrier.test_wait, mbarrier.try_wait": how long it suspends is open. Here it returns false once,
    and when tried again it waits. A true result acquires what the arrivals and copies of the phase released.
    """
    result, where, parity, *limit = decoder.operands(ins, 3, 4)
    (slot, offset), phase = address_of(decoder, ins, where, "shared"), decoder.source(ins, parity, 32)
    limits = decoder.sources(ins, tuple(limit), 32)
    target, _ = decoder.predicate(ins, result)

    def run(warp: Any, mask: int) -> bool:
        check_defined(warp, (phase, *limits), mask)
        cta, parities = warp.cta, warp.regs[phase][lanes(mask)]
        waits = set()
        for i, address in _each(warp, mask, slot, offset):
            found = _object(warp, address, i)
            if parities[i] > 1:
                raise FaultError("mbarrier", f"a parity is 0 or 1, not {parities[i]}", i)
            if found.phase & 1 == parities[i]:
                waits.add(address)
        key = (ins.line, mask)
        if waits and key in warp.timeouts:
            warp.wanted |= waits
            return False
        if waits:
            warp.timeouts.add(key)
        else:
            warp.timeouts.discard(key)
            for _, address in _each(warp, mask, slot, offset):
                cta.clocks.acquire(warp.id, cta.mbarriers[address].released)
        warp.regs[target] = warp.regs[target] & ~mask if waits else warp.regs[target] | mask
        warp.defined[target] |= mask
        return True

    return Op(run, "waits")


@instruction("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes")
def bulk_copy(decoder: Decoder, ins: Instruction) -> Run:
    """Global to this CTA's shared memory, 16-byte aligned in place and size ("cp.async.bulk")."""
    hinted = decoder.modifiers(ins, {"L2::cache_hint"}, skip=6, last=0)
    to, of, size, barrier, *policy = decoder.operands(ins, 5 if hinted else 4)
    (a, at), (b, source_at) = address_of(decoder, ins, to, "shared"), address_of(decoder, ins, of, "global")
    c, barrier_at = address_of(decoder, ins, barrier, "shared")
    sources = (decoder.source(ins, size, 32), *decoder.sources(ins, tuple(policy), 64))

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, sources, mask)
        cta, sizes = warp.cta, warp.regs[sources[0]][lanes(mask)]
        origins = addresses(warp, b, source_at, mask)
        active = np.flatnonzero(lanes(mask))
        mbarriers = addresses(warp, c, barrier_at, mask)
        for i, address in _each(warp, mask, a, at):
            origin, count = int(origins[i]), int(sizes[i])
            if address % 16 or origin % 16 or count % 16:
                raise FaultError("misaligned", f"copies {count} bytes from {origin:#x} to {address:#x}", i)
            if not SHARED_BASE <= address <= SHARED_BASE + len(cta.shared.data) - count:
                raise FaultError("out_of_bounds", f"shared: copies {count} bytes to {address:#x}", i)
            cta.memory.range(origin, count)
            found = _object(warp, int(mbarriers[i]), i)
            if not found.fenced:
                raise FaultError("missing_fence", "the mbarrier's initialisation was not followed by a fence", i)
            clock = cta.clocks.release(warp.id)
            copy = Copy(address, origin, count, found, clock, ins, warp.id, int(active[i]))
            if cta.mode == "early":
                copy.complete(cta)
            else:
                cta.pending.append(copy)

    return run


@instruction("griddepcontrol.wait", "griddepcontrol.launch_dependents")
def dependent_launch(decoder: Decoder, ins: Instruction) -> Run:
    """No effect: launches run one after another, so what this one depends on is over ("griddepcontrol")."""
    decoder.operands(ins, 0)
    return lambda warp, mask: None
