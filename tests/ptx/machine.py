"""Runs a launch: clusters of CTAs one after another or some at a time, of warps in a random order that a seed fixes.

A warp runs for a random number of instructions, or until all its lanes wait. When every warp is stuck, a piece of
asynchronous work that one of them waits for completes.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from tests.ptx import barrier, mbarrier
from tests.ptx.asynchronous import Work
from tests.ptx.decode import Decoder, Op
from tests.ptx.memory import RANK_SHIFT, SHARED_BASE, Clocks, GlobalMemory, SharedMemory, TensorMemory
from tests.ptx.parser import Entry, Module, parse
from tests.ptx.trouble import FaultError, TroubleError
from tests.ptx.warp import Warp

__all__ = ["Launch", "Report", "TroubleError", "run_launch"]
# Importing one registers its instructions.
FAMILIES = ("access", "atomic", "convert", "copies", "floating", "integer", "matrix", "shuffle", "tensor")
for _family in (*FAMILIES, "tensormap", "votes"):
    importlib.import_module(f"tests.ptx.{_family}")
MAX_SLICE = 256
Mode = Literal["early", "late"]
Place = tuple[int, ...]


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

    def add(self, code: Program, counts: list[int]) -> None:
        """Count a CTA."""
        self.ctas += 1
        for ins, op, count in zip(code.entry.instructions, code.ops, counts, strict=True):
            if count:
                self.opcodes[ins.opcode] += count
                if op.approximate:
                    self.approximate.add(ins.opcode)


class Program(NamedTuple):
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
    names = [name] if name is not None else list(module.entries)
    if len(names) != 1 or names[0] not in module.entries:
        raise TroubleError("launch", f"the module has the entries {list(module.entries)}: name one, not {name}")
    entry = module.entries[names[0]]
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


class Cta:
    """A cooperative thread array: its warps, shared and tensor memory, and barriers."""

    def __init__(self, cluster: Cluster, rank: int, place: Place) -> None:
        self.cluster, self.launch, self.program = cluster, cluster.launch, cluster.program
        self.memory, self.rank, self.place = cluster.memory, rank, place
        self.threads, self.warp_count = cluster.threads, cluster.warp_count
        parameters = self.program.entry.parameters
        self.arguments = dict(zip((p.name for p in parameters), self.launch.arguments, strict=True))
        self.shared = SharedMemory(self.program.static_bytes + self.launch.shared_bytes, rank)
        self.tensor = TensorMemory()
        self.barriers: dict[int, barrier.Barrier] = {}
        self.counts = [0] * len(self.program.ops)
        self.warps: list[Warp] = []


class Cluster:
    """CTAs that run at the same time and reach each other's shared memory, with their work under way."""

    def __init__(
        self, launch: Launch, code: Program, memory: GlobalMemory, number: int, first: Place, mode: Mode, strict: bool
    ) -> None:
        self.launch, self.program, self.memory, self.number, self.mode = launch, code, memory, number, mode
        self.strict, self.shape = strict, shape_of(launch)
        self.threads = math.prod(launch.block)
        self.warp_count = -(-self.threads // 32)
        corners = [tuple(reversed(at)) for at in itertools.product(*(range(n) for n in reversed(self.shape)))]
        self.clocks = Clocks(len(corners) * self.warp_count)
        self.mbarriers: dict[int, mbarrier.MBarrier] = {}
        self.barrier = barrier.Barrier()
        self.pending: list[Work] = []
        self.ctas = [Cta(self, i, tuple(map(sum, zip(first, at, strict=True)))) for i, at in enumerate(corners)]
        for cta in self.ctas:
            cta.warps = [Warp(cta, n) for n in range(self.warp_count)]
        self.running = [warp for cta in self.ctas for warp in cta.warps]
        self.stuck: set[Warp] = set()

    def turn(self, rng: random.Random) -> None:
        """Let a warp that is not stuck run for a while."""
        warp = rng.choice([warp for warp in self.running if warp not in self.stuck])
        if warp.run(rng.randint(1, MAX_SLICE)):
            self.stuck.clear()
        else:
            self.stuck.add(warp)
        if not warp.groups:
            self.running.remove(warp)

    def issue(self, work: Work) -> None:
        if self.mode == "early":
            work.take_effect()
        else:
            self.pending.append(work)

    def awaited(self) -> list[Work]:
        """Work under way that a warp waits for."""
        wanted = set().union(*(warp.wanted for warp in self.running))
        return [work for work in self.pending if work.wakes in wanted]

    def shared_of(self, address: int) -> SharedMemory:
        """The shared memory that an address of shared::cluster lies in; its CTA must not have ended."""
        rank = address >> RANK_SHIFT
        if rank >= len(self.ctas):
            raise FaultError("out_of_bounds", f"shared: {address:#x} is in none of {len(self.ctas)} CTAs")
        if all(warp not in self.running for warp in self.ctas[rank].warps):
            raise FaultError("lifetime", f"shared: {address:#x} is in CTA {self.ctas[rank].place}, which has ended")
        return self.ctas[rank].shared

    def end(self) -> None:
        """Nothing may be left behind."""
        left = [work for work in self.pending if not work.signal]
        if left:
            raise left[0].trouble(FaultError("pending_copy", "the CTA ends before it"))
        for cta in self.ctas:
            if cta.tensor.owned:
                raise TroubleError("leak", f"tensor memory of columns {cta.tensor.owned} is not freed", cta=cta.place)

    def deadlock(self) -> TroubleError:
        """Which lanes wait where; the position is that of the first group."""
        instructions = self.program.entry.instructions
        groups = [(w, instructions[pc], mask) for w in self.running for pc, mask in sorted(w.groups.items())]
        notes = [f"warp {w.id} of {w.cta.place} lanes {mask:#010x} at line {ins.line}" for w, ins, mask in groups]
        for cta in self.ctas:
            notes += [f"barrier {n} has {len(b.arrived)} warps of {b.expected // 32}" for n, b in cta.barriers.items()]
            notes += [f"warp {warp.id} has ended" for warp in cta.warps if warp not in self.running]
        notes += [f"mbarrier {m.address:#x} lacks {m.pending} arrivals, {m.tx} bytes" for m in self.mbarriers.values()]
        warp, ins, mask = groups[0]
        return warp.trouble(FaultError("deadlock", "; ".join(notes)), ins, mask)


def shape_of(launch: Launch) -> tuple[int, int, int]:
    x, y, z = launch.cluster or (1, 1, 1)
    return max(x, 1), max(y, 1), max(z, 1)


def _check(launch: Launch, code: Program) -> None:
    """The launch fits the kernel."""
    parameters, faults = code.entry.parameters, []
    if [p.size for p in parameters] != [len(raw) for raw in launch.arguments]:
        faults.append(f"parameters of {[p.size for p in parameters]} bytes, got {[len(a) for a in launch.arguments]}")
    if code.entry.block not in (None, tuple(launch.block)):
        faults.append(f"compiled for blocks of {code.entry.block}, launched with {launch.block}")
    if any(g % c for g, c in zip(launch.grid, shape_of(launch), strict=True)):
        faults.append(f"a grid of {launch.grid} is not made of clusters of {shape_of(launch)}")
    if faults:
        raise TroubleError("launch", "; ".join(faults))


def run_launch(
    launch: Launch, buffers: list[Any], mode: Mode = "early", seed: int = 0, together: int = 1, strict: bool = True
) -> Report:
    """Execute a launch over host memory, in place.

    Args:
        buffers: all global memory that the kernel may touch, contiguous, at the addresses that the arguments hold;
            an array that is not writeable is read-only.
        mode: when asynchronous work completes.
        seed: fixes the order of CTAs and warps.
        together: how many clusters run at the same time.
        strict: tcgen05.ld needs a wait, and the lanes of its warp in the address; tensor memory needs a fence behind
            what synchronises threads, the asynchronous proxy one behind ordinary writes. So PTX has it, while code
            that runs on hardware leaves out each of these.

    Raises:
        TroubleError: the kernel does something wrong, or something that is not modelled.
    """
    if mode not in ("early", "late"):
        raise ValueError(f"mode: early or late, got {mode!r}")
    start, code = time.perf_counter(), program(launch.ptx, launch.entry)
    _check(launch, code)
    memory, rng, report = GlobalMemory(buffers), random.Random(seed), Report()
    steps = [range(0, n, c) for n, c in zip(launch.grid, shape_of(launch), strict=True)]
    corners = list(itertools.product(*steps))
    rng.shuffle(corners)  # PTX leaves the order of CTAs open
    waiting = enumerate(corners)
    live: list[Cluster] = []
    with np.errstate(all="ignore"):
        while True:
            for number, corner in itertools.islice(waiting, together - len(live)):
                live.append(Cluster(launch, code, memory, number, corner, mode, strict))
            if not live:
                break
            able = [cluster for cluster in live if len(cluster.stuck) < len(cluster.running)]
            if not able:
                _complete_something(live, rng)
                continue
            cluster = rng.choice(able)
            cluster.turn(rng)
            if not cluster.running:
                live.remove(cluster)
                cluster.end()
                for cta in cluster.ctas:
                    report.add(code, cta.counts)
    report.seconds = time.perf_counter() - start
    return report


def _complete_something(live: list[Cluster], rng: random.Random) -> None:
    """All warps are stuck: complete work that one of them waits for, or report a deadlock."""
    works = [work for cluster in live for work in cluster.awaited()]
    if not works:
        raise live[0].deadlock()
    rng.choice(works).complete()
    for cluster in live:
        cluster.stuck.clear()
