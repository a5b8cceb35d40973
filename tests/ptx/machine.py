"""Runs a launch: CTAs one after another, each of warps of 32 lanes in a random order that a seed fixes.

PTX ISA, "Programming Model" and "Scalable Data-Parallel Computing using SIMT": the lanes of a warp may diverge. Here
each group of lanes has its own program counter, the group at the lowest one runs first, and groups that meet go on
together. A warp runs for a random number of instructions, or until all its lanes wait.

Asynchronous copies complete when issued ("early") or only when every warp is stuck and one waits for the copy's
mbarrier ("late"). A correct kernel cannot tell these apart.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from tests.ptx import access, collective, convert, floating, integer
from tests.ptx.decode import FULL, Decoder, Op, check_defined, first_lane, nth_lane
from tests.ptx.memory import SHARED_BASE, Clocks, GlobalMemory, SharedMemory
from tests.ptx.parser import Entry, Module, parse
from tests.ptx.trouble import FaultError, TroubleError

__all__ = ["Launch", "Report", "TroubleError", "run_launch"]
FAMILIES = (access, collective, convert, floating, integer)  # importing one registers its instructions
MAX_WARP_INSTRUCTIONS = 4_000_000
MAX_SLICE = 256
Mode = Literal["early", "late"]


class Launch(Protocol):
    """What is launched: PTX and the host's side of it.

    Args:
        entry: name of the kernel; None for a module's only one.
        shared_bytes: dynamic shared memory.
        arguments: raw bytes of each parameter.
    """

    ptx: str
    entry: str | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, ...]
    shared_bytes: int
    arguments: list[bytes]


@dataclass
class Report:
    """What ran.

    Args:
        opcodes: how often each was executed by a warp.
        approximate: opcodes among them whose result the hardware may round otherwise.
    """

    ctas: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)
    approximate: set[str] = field(default_factory=set)
    seconds: float = 0.0

    @property
    def instructions(self) -> int:
        return self.opcodes.total()


@dataclass(frozen=True)
class Program:
    """A decoded kernel: its operations, and the layout of registers and shared memory."""

    entry: Entry
    decoder: Decoder
    ops: list[Op]
    static_bytes: int


def _shared_layout(module: Module) -> tuple[dict[str, int], int]:
    """Addresses of the shared arrays and the end of the static ones; the dynamic part follows them."""
    end, symbols = SHARED_BASE, {}
    for variable in sorted(module.shared, key=lambda v: v.size == 0):
        end = -(-end // variable.align) * variable.align
        symbols[variable.name] = end
        end += variable.size
    return symbols, end - SHARED_BASE


@functools.lru_cache(maxsize=32)
def program(ptx: str, name: str | None) -> Program:
    """The decoded kernel of a PTX text; raises TroubleError where something is not modelled."""
    module = parse(ptx)
    if name is None and len(module.entries) != 1:
        raise TroubleError("launch", f"the module has {len(module.entries)} entries: name one")
    if name is not None and name not in module.entries:
        raise TroubleError("launch", f"the module has no entry {name}")
    entry = module.entries[name] if name is not None else next(iter(module.entries.values()))
    symbols, static = _shared_layout(module)
    decoder = Decoder(entry, symbols)
    return Program(entry, decoder, [_decode(decoder, ins) for ins in entry.instructions], static)


def _decode(decoder: Decoder, ins: Any) -> Op:
    if ins.parts[0] == "bra":
        decoder.modifiers(ins, {"uni"}, last=0)
        return Op(lambda warp, mask: None, "branch")
    if ins.opcode in ("ret", "exit"):
        return Op(lambda warp, mask: None, "exit")
    return decoder.decode(ins)


class Warp:
    """32 lanes: registers, and the groups of lanes by program counter."""

    def __init__(self, cta: Cta, number: int) -> None:
        decoder, first = cta.program.decoder, 32 * number
        self.cta, self.id, self.names = cta, number, decoder.names
        self.live = (1 << min(32, cta.threads - first)) - 1
        self.regs = list(decoder.initial)
        declared = len(cta.program.entry.registers)
        self.defined = [0] * declared + [FULL] * (len(self.regs) - declared)
        self.groups = {0: self.live}
        self.blocked: set[int] = set()
        self.wanted: set[int] = set()
        self.timeouts: set[tuple[int, int]] = set()
        self.unfenced: list[Any] = []
        self.executed = 0
        thread = first + np.arange(32)
        x, y, _ = cta.launch.block
        known = {"%tid.x": thread % x, "%tid.y": thread // x % y, "%tid.z": thread // (x * y), "%laneid": thread % 32}
        sizes = (("%ntid", cta.launch.block), ("%ctaid", cta.place), ("%nctaid", cta.launch.grid))
        known |= {f"{name}.{a}": np.full(32, v) for name, value in sizes for a, v in zip("xyz", value, strict=True)}
        for name, slot in decoder.special.items():
            self.regs[slot] = known[name].astype(np.uint32)

    def join(self, pc: int, mask: int) -> None:
        self.groups[pc] = self.groups.get(pc, 0) | mask
        self.blocked.discard(pc)

    def run(self, limit: int) -> bool:
        """Run for up to `limit` instructions; returns whether any was executed."""
        self.blocked.clear()
        self.wanted.clear()
        start = self.executed
        while self.executed - start < limit:
            ready = [pc for pc in self.groups if pc not in self.blocked]
            if not ready:
                break
            self._run_group(min(ready), start + limit)
        return self.executed > start

    def _run_group(self, pc: int, end: int) -> None:
        """Run the group at `pc` until it branches, waits, exits or has had its share; others that it meets join it."""
        ops, instructions, counts = self.cta.program.ops, self.cta.program.entry.instructions, self.cta.counts
        groups = self.groups
        mask = groups.pop(pc)
        active = mask
        try:
            while self.executed < end:
                if groups and pc in groups:
                    mask |= groups.pop(pc)
                    self.blocked.discard(pc)
                op, ins, active = ops[pc], instructions[pc], mask
                if ins.guard is not None:
                    slot = ins.guard[0].slot
                    check_defined(self, (slot,), mask)
                    active = mask & (~self.regs[slot] if ins.guard[1] else self.regs[slot])
                self.executed += 1
                counts[pc] += 1
                if op.kind == "plain":
                    if active:
                        op.run(self, active)
                    pc += 1
                    continue
                if self._control(op, pc, mask, active):
                    return
                pc += 1
            self.join(pc, mask)
        except FaultError as fault:
            raise self.trouble(fault, pc, active) from fault

    def _control(self, op: Op, pc: int, mask: int, active: int) -> bool:
        """Branch, exit or wait; returns whether the group has to be chosen anew."""
        if not active:
            return False
        target = self.cta.program.entry.instructions[pc].target
        if op.kind == "waits":
            if not op.run(self, active):
                self.executed -= 1
                self.cta.counts[pc] -= 1
                if mask & ~active:
                    self.join(pc + 1, mask & ~active)
                self.join(pc, active)
                self.blocked.add(pc)
                return True
            return False
        if op.kind == "exit":
            self.live &= ~active
        else:
            self.join(target, active)
        if mask & ~active:
            self.join(pc + 1, mask & ~active)
        if self.executed > MAX_WARP_INSTRUCTIONS:
            raise FaultError("endless", f"{MAX_WARP_INSTRUCTIONS} instructions of one warp")
        return True

    def trouble(self, fault: FaultError, pc: int, mask: int) -> TroubleError:
        ins = self.cta.program.entry.instructions[pc]
        lane = first_lane(mask) if fault.index is None else nth_lane(mask, fault.index)
        where: dict[str, Any] = {"cta": self.cta.place, "warp": self.id, "lane": lane}
        return TroubleError(fault.kind, fault.detail, line=ins.line, text=ins.text, **where)


class Cta:
    """A cooperative thread array with its shared memory, barriers and copies under way."""

    def __init__(self, launch: Launch, code: Program, memory: GlobalMemory, place: tuple[int, int, int]) -> None:
        self.launch, self.program, self.memory, self.place = launch, code, memory, place
        self.threads = launch.block[0] * launch.block[1] * launch.block[2]
        count = -(-self.threads // 32)
        self.padded_threads = 32 * count
        self.arguments = dict(zip((p.name for p in code.entry.parameters), launch.arguments, strict=True))
        self.clocks = Clocks(count)
        self.shared = SharedMemory(code.static_bytes + launch.shared_bytes, self.clocks)
        self.barriers: dict[int, collective.Barrier] = {}
        self.mbarriers: dict[int, collective.MBarrier] = {}
        self.pending: list[collective.Copy] = []
        self.counts = [0] * len(code.ops)
        self.warps = [Warp(self, number) for number in range(count)]

    def run(self, mode: Mode, rng: random.Random) -> None:
        self.mode, self.rng = mode, rng
        running = list(self.warps)
        stuck: set[int] = set()
        while running:
            ready = [warp for warp in running if warp.id not in stuck]
            if not ready:
                self.complete_a_copy(running)
                stuck.clear()
                continue
            warp = rng.choice(ready)
            if warp.run(rng.randint(1, MAX_SLICE)):
                stuck.clear()
            else:
                stuck.add(warp.id)
            if not warp.groups:
                running.remove(warp)
        if self.pending:
            self.finish(self.pending[0])
            ins = self.pending[0].instruction
            raise TroubleError("pending_copy", "the CTA ends before it", line=ins.line, text=ins.text, cta=self.place)

    def complete_a_copy(self, running: list[Warp]) -> None:
        """All warps are stuck: complete a copy that one of them waits for, or report a deadlock."""
        wanted = set().union(*(warp.wanted for warp in running))
        able = [copy for copy in self.pending if copy.barrier.address in wanted]
        if not able:
            raise self.deadlock(running)
        copy = self.rng.choice(able)
        self.pending.remove(copy)
        self.finish(copy)

    def finish(self, copy: collective.Copy) -> None:
        ins = copy.instruction
        try:
            copy.complete(self)
        except FaultError as fault:
            where: dict[str, Any] = {"cta": self.place, "warp": copy.warp, "lane": copy.lane}
            raise TroubleError(fault.kind, fault.detail, line=ins.line, text=ins.text, **where) from fault

    def deadlock(self, running: list[Warp]) -> TroubleError:
        """Which lanes wait where; the position is that of the first group."""
        instructions, notes = self.program.entry.instructions, []
        for warp in running:
            for pc, mask in sorted(warp.groups.items()):
                notes.append(f"warp {warp.id} lanes {mask:#010x} at line {instructions[pc].line}")
        barriers = [f"barrier {n} has {len(b.arrived)} warps of {b.expected // 32}" for n, b in self.barriers.items()]
        objects = [f"mbarrier {m.address:#x} lacks {m.pending} arrivals, {m.tx} bytes" for m in self.mbarriers.values()]
        gone = [f"warp {w.id} has ended" for w in self.warps if w not in running]
        pc, mask = min(running[0].groups.items())
        return running[0].trouble(FaultError("deadlock", "; ".join(notes + barriers + objects + gone)), pc, mask)


def _check(launch: Launch, code: Program) -> None:
    """The launch fits the kernel."""
    parameters, faults = code.entry.parameters, []
    if [p.size for p in parameters] != [len(raw) for raw in launch.arguments]:
        faults.append(f"parameters of {[p.size for p in parameters]} bytes, got {[len(a) for a in launch.arguments]}")
    if code.entry.block not in (None, tuple(launch.block)):
        faults.append(f"compiled for blocks of {code.entry.block}, launched with {launch.block}")
    if any(size != 1 for size in launch.cluster or ()):
        faults.append(f"clusters of {launch.cluster} are not modelled")
    if faults:
        raise TroubleError("launch", "; ".join(faults))


def _places(grid: tuple[int, int, int], rng: random.Random) -> Iterator[tuple[int, int, int]]:
    """The grid's CTAs in a random order, which PTX leaves open."""
    places = [(x, y, z) for z, y, x in itertools.product(*(range(n) for n in reversed(grid)))]
    rng.shuffle(places)
    return iter(places)


def run_launch(launch: Launch, buffers: list[np.ndarray], mode: Mode = "early", seed: int = 0) -> Report:
    """Execute a launch over host memory, in place.

    Args:
        buffers: all global memory that the kernel may touch, contiguous, at the addresses that the arguments hold;
            an array that is not writeable is read-only.
        mode: when asynchronous copies complete.
        seed: fixes the order of CTAs and warps.

    Raises:
        TroubleError: the kernel does something wrong, or something that is not modelled.
    """
    if mode not in ("early", "late"):
        raise ValueError(f"mode: early or late, got {mode!r}")
    start, code = time.perf_counter(), program(launch.ptx, launch.entry)
    _check(launch, code)
    memory, rng, report = GlobalMemory(buffers), random.Random(seed), Report()
    with np.errstate(all="ignore"):
        for place in _places(launch.grid, rng):
            cta = Cta(launch, code, memory, place)
            cta.run(mode, rng)
            report.ctas += 1
            for ins, op, count in zip(code.entry.instructions, code.ops, cta.counts, strict=True):
                if count:
                    report.opcodes[ins.opcode] += count
                    if op.approximate:
                        report.approximate.add(ins.opcode)
    report.seconds = time.perf_counter() - start
    return report
