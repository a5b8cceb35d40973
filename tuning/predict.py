"""The time of a step as its compiled kernel says: bytes, instructions by pipe, occupancy, and how they overlap.

For a launch of C CTAs on M multiprocessors, each of which holds k CTAs of w warps:

* memory: bytes from and to HBM (`tuning.roofline`), each direction at its own rate. A row that folds where steps read
  a copy also reads its codes, and the encoding reads the folded rows again: from memory, or where the states of the
  whole launch fit into L2, from there.
* pipe: instructions that the w warps of a CTA issue (`tuning.sass`, of each warp what its number leaves) times C over
  the schedulers, each pipe at its rate, the busiest of them; n warps of a scheduler keep it busy for n / (n +
  `CONTENTION`) of the time.
* warp: what the warp with most to do takes alone for its instructions, and for loops that wait for memory in each
  iteration.
* occupancy: C / (k M) times what a CTA takes by itself, `CHAIN_US` and the warp's time: k CTAs cannot do more.
* floor: an empty launch and `CHAIN_US`.

The time is floor + (max(memory ^p pipe, occupancy) ^p warp) with a ^p b = (a^p + b^p)^(1/p), p = `OVERLAP`; the bound
is the largest of the four and the floor. Rows that fold and rows that read in one launch add up in each; of n rows
that fold among others the last one starts on average at n / (n + 1) of the launch, and takes its warp's time from
there.

Shared memory is counted and reported, but bounds nothing: a load that all lanes take from one address moves its bytes
once, which the SASS does not show, and with full widths folds would take longer than they were measured to.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cute_kernels.configs import ROW_BLOCK, WARP, StepKey, Tile
from cute_kernels.heuristic import MULTIPROCESSOR_REGISTERS, room
from tuning.cubin import resources
from tuning.devices import (
    CHAIN_US,
    CONTENTION,
    CYCLES_PER_INSTRUCTION,
    OVERLAP,
    ROUND_US,
    SCHEDULERS,
    Device,
)
from tuning.known import of_warp
from tuning.matrix import StepCase
from tuning.roofline import Traffic
from tuning.sass import Instruction, Path, Program, disassembled

REGISTER_UNIT = 256  # registers are given to a warp in whole units
# Opcodes by pipe, with the cycles that a scheduler's part of the pipe is busy for a warp; one that ends in * stands for
# all that begin so, and the first that matches is taken. CUDA C++ Programming Guide, throughput of arithmetic
# instructions, compute capability 9.0 and 10.0: float 128 results a cycle and multiprocessor, integer 64, special
# functions 16. An H200 takes 2.0 cycles for LOP3, PRMT, FMNMX, IMAD and F2FP from float32, 2.5 for F2FP from e4m3
# (2026-12-01). A warp's m16n8k16 is taken at half the dense rate of the tensor cores, which mma.sync does not reach.
PIPES: tuple[tuple[str, float, str], ...] = (
    ("fma", 2, "FFMA2 FMUL2 FADD2"),
    ("fma", 1, "FFMA* FMUL* FADD* HFMA2* HADD2* HMUL2* FSWZADD"),
    ("fma", 2, "IMAD*"),
    ("alu", 2, "F2FP*"),
    ("xu", 8, "MUFU* F2F* F2I* I2F FRND* POPC FLO BREV"),
    ("tensor", 8, "HMMA* IMMA* QMMA* OMMA* DMMA*"),
    (
        "alu",
        2,
        "LOP3* IADD* VIADD* VIMNMX* SHF* SHL SHR SEL* FSEL* ISETP* FSETP* HSET* FSET* FMNMX* PRMT* LEA* MOV* PLOP3*",
    ),
    ("alu", 2, "I2FP* IABS IMNMX SGXT* CS2R* P2R* R2P* FCHK"),
    ("tensor memory", 0, "LDTM* STTM*"),
    ("tcgen05", 0, "UTC*"),
    ("lsu", 0, "LD* ST* ATOM* RED* SHFL* S2R BAR* SYNCS* CCTL* MEMBAR* FENCE*"),
    ("branch", 0, "BRA* EXIT* B* WARPSYNC* RET* CALL* NANOSLEEP* YIELD* ENDCOLLECTIVE* NOP* ELECT*"),
    ("uniform", 0, "U* R2UR* S2UR* VOTEU*"),
)
SHARED = ("LDS", "STS", "LDSM", "STSM")


@functools.cache
def pipe_of(opcode: str) -> tuple[str, float]:
    """The pipe of an opcode and the cycles that it is busy; "other", which takes its issue alone, if none is known."""
    for pipe, cycles, opcodes in PIPES:
        if any(opcode == one or (one.endswith("*") and opcode.startswith(one[:-1])) for one in opcodes.split()):
            return pipe, cycles
    return "other", 0.0


@dataclass(frozen=True)
class Kernel:
    """A compiled step: its key, its control flow, and what ptxas gave it."""

    key: StepKey
    arch: str
    program: Program
    registers: int
    frame_bytes: int

    @classmethod
    def compiled(cls, key: StepKey, arch: str) -> Kernel:
        """Compile a step for an architecture; no GPU is needed.

        Raises:
            FileNotFoundError: there is no disassembler.
            NotImplementedError: its control flow cannot be followed.
        """
        from cutlass.base_dsl import compiler

        from cute_kernels import step
        from cute_kernels.compile import compile_only

        with tempfile.TemporaryDirectory() as folder:
            keep = (compiler.KeepCUBIN(True), compiler.DumpDir(folder))
            made = compile_only(step.step_launch, lambda: step.fake_arguments(key), arch, *keep)
            cubin = made.artifacts.CUBIN
        (used,) = resources(cubin).values()
        return cls(key, arch, Program.of(disassembled(cubin)), used.registers, used.frame_bytes)

    @property
    def occupancy(self) -> int:
        """CTAs of a multiprocessor, by registers, and by what `heuristic.room` counts."""
        of_warp = -(-self.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        warps = SCHEDULERS * (MULTIPROCESSOR_REGISTERS // SCHEDULERS // of_warp)
        return max(1, min(warps // (self.key.threads // WARP), room(self.key)))

    @functools.cached_property
    def _programs(self) -> list[Program]:
        """The control flow of each warp of a CTA."""
        return [of_warp(self.program, warp) for warp in range(self.key.threads // WARP)]

    def paths(self, *, folds: bool, records: int) -> list[Path]:
        """What each warp of a CTA issues whose row holds so many records."""
        trips = -(-records // ROW_BLOCK)
        return [program.path(folds=folds, record_trips=trips) for program in self._programs]


@dataclass(frozen=True)
class Prediction:
    """The time of a launch and what it is made of, in microseconds.

    Args:
        us: of the launch.
        bound: what takes longest: "memory", a pipe, "occupancy", "warp" or "floor".
        parts: the times of this module's docstring.
        occupancy: CTAs of a multiprocessor.
        pipes: cycles of a scheduler by pipe, of all warps of all CTAs; "issue" counts every instruction.
        instructions: of a warp on average, by pipe.
        memory_bytes, shared_bytes: through HBM; through shared memory with full widths.
    """

    us: float
    bound: str
    parts: Mapping[str, float]
    occupancy: int
    pipes: Mapping[str, float]
    instructions: Mapping[str, float]
    memory_bytes: float
    shared_bytes: float


@dataclass(frozen=True)
class _Rows:
    """Rows of a launch that do the same."""

    count: int
    traffic: Traffic
    paths: list[Path]

    @functools.cached_property
    def issued(self) -> Counter[Instruction]:
        """By all warps of a CTA."""
        return sum((path.issued for path in self.paths), Counter())

    def warp_us(self, device: Device) -> float:
        """Of the warp with most to do."""
        return max(_warp_us(path, device) for path in self.paths)


def predict(kernel: Kernel, case: StepCase, device: Device) -> Prediction:
    """The time of a step.

    Args:
        kernel: compiled for the device's architecture and for the layer and replay of `case`.
        case: which rows there are and what they hold.

    Raises:
        ValueError: the kernel is for another architecture.
        NotImplementedError: its control flow has no such path.
    """
    if kernel.arch != device.arch:
        raise ValueError(f"kernel: expected one for {device.arch} ({device.name}), got one for {kernel.arch}")
    key, groups = kernel.key, []
    for records, count in Counter(case.live_records).items():
        folds = records + case.num_tokens > case.replay.window
        paths = kernel.paths(folds=folds, records=records)
        groups.append(_Rows(count, case.traffic(records, count), paths))
    row_ctas, cta_warps = key.row_ctas, key.threads // WARP
    ctas = case.rows * row_ctas
    share = ctas / device.multiprocessors
    memory, num_bytes = _memory(kernel, groups, device)
    pipes: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, float] = defaultdict(float)
    shared = 0.0
    for rows in groups:
        for name, number in instructions(rows.issued).items():
            counts[name] += number * rows.count / (case.rows * cta_warps)
        of_rows = rows.count * row_ctas
        for name, cycles in pipe_cycles(rows.issued).items():
            pipes[name] += cycles * of_rows
        shared += of_rows * WARP * sum(n * one.bits // 8 for one, n in rows.issued.items() if one.opcode in SHARED)
    resident = min(kernel.occupancy, max(1.0, share)) * cta_warps / SCHEDULERS
    # A multiprocessor gets whole CTAs.
    uneven = math.ceil(share) / share if share > 1 else 1.0
    cycles_us = (resident + CONTENTION) / resident * uneven / (device.multiprocessors * SCHEDULERS * device.clock_mhz)
    busiest = max((name for name in pipes if name != "other"), key=lambda name: pipes[name])
    pipe = pipes[busiest] * cycles_us
    warp = max(rows.warp_us(device) for rows in groups)
    mean = sum(rows.count * rows.warp_us(device) for rows in groups) / case.rows
    occupancy = share / kernel.occupancy * (CHAIN_US + mean)
    floor = device.launch_us + CHAIN_US
    busy = max(_together(memory, pipe), occupancy)
    total = floor + _together(busy, warp)
    late = sum(rows.count for rows in groups if rows.traffic.folds)
    if late < case.rows:
        total = max(total, floor + late / (late + 1) * busy + warp)
    parts = {"memory": memory, busiest: pipe, "occupancy": occupancy, "warp": warp, "floor": floor}
    bound = max(parts, key=lambda name: parts[name])
    return Prediction(total, bound, parts, kernel.occupancy, dict(pipes), dict(counts), num_bytes, shared)


def _memory(kernel: Kernel, groups: Iterable[_Rows], device: Device) -> tuple[float, float]:
    """Microseconds and bytes of what goes through HBM."""
    key, tile = kernel.key, Tile.of(kernel.key)
    groups = list(groups)
    row_ctas = key.row_ctas
    state = key.num_v_heads * key.head_dim * key.d_state * tile.state_size
    time = num_bytes = 0.0
    # Everything that the launch has touched may lie in L2 when rows are read again.
    again_rate = device.l2_rate if sum(rows.count for rows in groups) * state < device.l2_bytes else device.read_rate
    for rows in groups:
        traffic = rows.traffic
        written = traffic.state_write_bytes + traffic.outputs_bytes + traffic.appends_bytes
        read = traffic.total_bytes - written
        again = 0
        if traffic.folds and key.read_dtype is not None:
            read += rows.count * key.num_v_heads * key.config.split * tile.bytes
            again = sum(path.loaded_bytes for path in rows.paths) * WARP * row_ctas - state
            again = rows.count * min(max(0, again), state)
        time += read / device.read_rate + written / device.write_rate + again / again_rate
        num_bytes += read + written + (again if again_rate == device.read_rate else 0)
    return time, num_bytes


def pipe_cycles(issued: Mapping[Instruction, int]) -> dict[str, float]:
    """Cycles of a scheduler by pipe for what is issued, and "issue" for all of it."""
    found: defaultdict[str, float] = defaultdict(float)
    for one, times in issued.items():
        pipe, cycles = pipe_of(one.opcode)
        found["issue"] += times
        if cycles:
            found[pipe] += times * cycles
    return dict(found)


def instructions(issued: Mapping[Instruction, int]) -> dict[str, int]:
    """Instructions by pipe of what is issued."""
    found: Counter[str] = Counter()
    for one, times in issued.items():
        found[pipe_of(one.opcode)[0]] += times
    return dict(found)


def _warp_us(path: Path, device: Device) -> float:
    return path.issued.total() * CYCLES_PER_INSTRUCTION / device.clock_mhz + path.rounds * ROUND_US


def _together(first: float, second: float) -> float:
    largest = max(first, second)
    return largest * sum((x / largest) ** OVERLAP for x in (first, second)) ** (1 / OVERLAP) if largest else 0.0


def facts(prediction: Prediction) -> dict[str, Any]:
    """A prediction as a record holds it."""
    parts = {name: round(us, 2) for name, us in prediction.parts.items()}
    return {"us": round(prediction.us, 2), "bound": prediction.bound, "occupancy": prediction.occupancy, "parts": parts}
