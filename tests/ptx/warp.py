"""A warp: 32 lanes in groups that have diverged, their registers, and what they wait for.

PTX ISA, "Programming Model" and "Scalable Data-Parallel Computing using SIMT". Each group of lanes has its own program
counter, the group at the lowest one runs first, and groups that meet go on together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.asynchronous import Stream
from tests.ptx.decode import FULL, Op, check_defined, first_lane, nth_lane
from tests.ptx.memory import GENERIC, RANK_SHIFT, Access
from tests.ptx.parser import Instruction
from tests.ptx.trouble import FaultError, TroubleError

MAX_WARP_INSTRUCTIONS = 4_000_000


class Warp:
    """32 lanes: registers, and the groups of lanes by program counter."""

    def __init__(self, cta: Any, number: int) -> None:
        decoder, first = cta.program.decoder, 32 * number
        self.cta, self.cluster, self.id, self.names = cta, cta.cluster, number, decoder.names
        self.agent = cta.rank * cta.warp_count + number
        self.live = (1 << min(32, cta.threads - first)) - 1
        self.regs = list(decoder.initial)
        declared = len(cta.program.entry.registers)
        self.defined = [0] * declared + [FULL] * (len(self.regs) - declared)
        self.groups = {0: self.live}
        self.blocked: set[int] = set()
        self.wanted: set[int] = set()
        self.timeouts: set[tuple[int, int]] = set()
        self.unfenced: list[Any] = []
        self.streams: dict[str, Stream] = {}
        self.loading: dict[int, int] = {}  # registers that asynchronous work has yet to fill, and its epoch
        self.warpgroup_fenced = False
        self.fenced: np.ndarray | None = None
        self.observed: dict[Any, tuple[int, np.ndarray]] = {}  # what a fence will take up
        self.executed = 0
        known = self._special(first + np.arange(32))
        for slot in decoder.shared_addresses:
            self.regs[slot] = self.regs[slot] + self.regs[slot].dtype.type(cta.rank << RANK_SHIFT)
        for name, slot in decoder.special.items():
            self.regs[slot] = np.broadcast_to(known[name], 32).astype(np.uint32)

    def _special(self, thread: np.ndarray) -> dict[str, Any]:
        """Values of the special registers ("Special Registers")."""
        cta, cluster = self.cta, self.cta.cluster
        x, y, _ = cta.launch.block
        lane = thread % 32
        known: dict[str, Any] = {"%laneid": lane, "%warpid": self.id, "%nwarpid": cta.warp_count}
        known |= {"%cluster_ctarank": cta.rank, "%cluster_nctarank": len(cluster.ctas), "%is_explicit_cluster": 1}
        known |= {"%dynamic_smem_size": cta.launch.shared_bytes, "%lanemask_eq": 1 << lane}
        known |= {"%lanemask_lt": (1 << lane) - 1, "%lanemask_le": (2 << lane) - 1}
        known |= {"%lanemask_gt": FULL & ~((2 << lane) - 1), "%lanemask_ge": FULL & ~((1 << lane) - 1)}
        vectors = {"%tid": (thread % x, thread // x % y, thread // (x * y)), "%ntid": cta.launch.block}
        vectors |= {"%ctaid": cta.place, "%nctaid": cta.launch.grid, "%cluster_nctaid": cluster.shape}
        vectors["%clusterid"] = tuple(p // n for p, n in zip(cta.place, cluster.shape, strict=True))
        vectors["%nclusterid"] = tuple(g // n for g, n in zip(cta.launch.grid, cluster.shape, strict=True))
        vectors["%cluster_ctaid"] = tuple(p % n for p, n in zip(cta.place, cluster.shape, strict=True))
        return known | {f"{name}.{a}": v for name, value in vectors.items() for a, v in zip("xyz", value, strict=True)}

    def stream(self, kind: str) -> Stream:
        if kind not in self.streams:
            self.streams[kind] = Stream(self, kind)
        return self.streams[kind]

    def access(self, line: int, strong: bool = False) -> Access:
        """An ordinary access of this warp, now."""
        seen = self.cluster.clocks.state[self.agent, GENERIC]
        return Access(self.agent, int(seen[self.agent]), line, seen, seen, self.cluster.number, strong)

    def take_up(self, number: int, clock: np.ndarray) -> None:
        """Acquire what a cluster has published."""
        if number == self.cluster.number:
            self.cluster.clocks.acquire(self.agent, clock)
        else:
            self.cta.memory.trusted.add(self.cluster.number)

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
                if self.loading and active:
                    self._check_loading(ins)
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
            raise self.trouble(fault, instructions[pc], active) from fault

    def _check_loading(self, ins: Instruction) -> None:
        """Registers on their way may be handed on by mov, which the assembler moves behind the wait, but not used."""
        named = [register.slot for register in ins.registers()]
        epochs = [self.loading[slot] for slot in named if slot in self.loading]
        if epochs and ins.parts[0] == "mov" and any(r.slot in self.loading for r in ins.registers(1)):
            self.loading |= dict.fromkeys(named, max(epochs))
        elif epochs and ins.parts[0] != "wgmma":
            name = next(self.names[slot] for slot in named if slot in self.loading)
            raise FaultError("missing_wait", f"register {name} is used before a wait for what fills it")

    def arrived(self, epoch: int) -> None:
        """What asynchronous work up to an epoch fills is there."""
        self.loading = {slot: e for slot, e in self.loading.items() if e > epoch}

    def _control(self, op: Op, pc: int, mask: int, active: int) -> bool:
        """Branch, exit or wait; returns whether the group has to be chosen anew."""
        if not active:
            return False
        if op.kind == "waits" and op.run(self, active):
            return False
        if mask & ~active:
            self.join(pc + 1, mask & ~active)
        if op.kind == "waits":
            self.executed -= 1
            self.cta.counts[pc] -= 1
            self.join(pc, active)
            self.blocked.add(pc)
        elif op.kind == "exit":
            self.live &= ~active
        else:
            self.join(self.cta.program.entry.instructions[pc].target, active)
        if self.executed > MAX_WARP_INSTRUCTIONS:
            raise FaultError("endless", f"{MAX_WARP_INSTRUCTIONS} instructions of one warp")
        return True

    def trouble(self, fault: FaultError, ins: Instruction, mask: int) -> TroubleError:
        lane = first_lane(mask) if fault.index is None else nth_lane(mask, fault.index)
        where: dict[str, Any] = {"cta": self.cta.place, "warp": self.id, "lane": lane}
        return TroubleError(fault.kind, fault.detail, line=ins.line, text=ins.text, **where)
