"""The machine code of a compiled kernel: its control flow, how often each block runs, and which pipe takes what.

NVIDIA's disassembler does the reading; PyPI's nvidia-cuda-nvdisasm brings it, so no CUDA toolkit is needed.

Counts are static. The control flow of these kernels is small: a branch for padding rows, one between rows that read
and rows that fold, a few by the role of a warp (`tuning.known` follows those), loops of a fold and of an encoding, and
waits for a barrier. A warp's path is the heaviest one from the entry to an exit that passes the loops of a fold, or
none of them (a row of padding does less than any other). A wait counts once, since who waits does not issue, and so
does the code that only runs while a barrier is late. A loop runs as often as its counter says where start, step and end
are constants; twice where a flag ends it, which the compiler makes of a loop of two; else its trips follow the records
of the row. Predicated instructions count as if they ran, since they are issued.
"""

from __future__ import annotations

import functools
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cute_kernels.primitives.memory import EVICT_LAST

_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\w+):")
_ENDS = ("BRA", "EXIT", "RET", "BRX", "BRXU", "JMX", "JMP")
_POLICY = f"{EVICT_LAST >> 32:#x}"
_WIDTH = re.compile(r"\.(?:[US]?(8|16)|ENL2\.(256)|(64|128|256))(?=\.|$)")
EXIT = -1
FLAG_TRIPS = 2  # of a loop that a flag ends


@functools.cache
def disassembler() -> pathlib.Path | None:
    """The nvdisasm of the pip package, else the one on the path, else None."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    own = [pathlib.Path(str(file.locate())) for file in files if file.name == "nvdisasm"]
    found = shutil.which("nvdisasm")
    return own[0] if own else pathlib.Path(found) if found else None


def why_no_sass() -> str | None:
    """Why no SASS can be read here, or None if it can."""
    return None if disassembler() else "needs nvdisasm; pip install '.[dev]' brings it"


def disassembled(cubin: bytes) -> str:
    """The SASS of a cubin.

    Raises:
        FileNotFoundError: there is no disassembler.
    """
    tool = disassembler()
    if tool is None:
        raise FileNotFoundError(why_no_sass())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--print-code", "--no-dataflow", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        guard: the predicate that it runs under, e.g. "!P0"; None where it always runs.
        name: opcode with modifiers, e.g. "LDG.E.64".
        operands: as printed.
    """

    guard: str | None
    name: str
    operands: tuple[str, ...]

    @property
    def opcode(self) -> str:
        return self.name.partition(".")[0]

    @property
    def bits(self) -> int:
        """Of a lane's access to memory."""
        width = _WIDTH.search(self.name)
        return int(next(filter(None, width.groups()))) if width else 32


Block = tuple[Instruction, ...]


@dataclass(frozen=True)
class Loop:
    """Blocks that run again and again.

    Args:
        header: the block that it begins with.
        blocks: all of it.
        trips: how often it runs; None where the records of a row say.
    """

    header: int
    blocks: frozenset[int]
    trips: int | None


@dataclass(frozen=True)
class Path:
    """What a warp issues: each instruction with how often it does.

    Args:
        rounds: iterations of loops that load from global memory, each of which waits for what it has loaded.
        loaded_bytes: what they load, of one lane.
    """

    issued: Counter[Instruction]
    rounds: int
    loaded_bytes: int


@dataclass(frozen=True)
class Program:
    """A kernel as blocks in the order of memory, with where each goes on."""

    blocks: tuple[Block, ...]
    successors: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, sass: str) -> Program:
        """From the text of the disassembler, of one kernel.

        Raises:
            NotImplementedError: a branch goes where only a register says.
        """
        blocks, labels = _split(sass)
        successors: list[tuple[int, ...]] = []
        for number, block in enumerate(blocks):
            end = block[-1]
            behind = number + 1 if number + 1 < len(blocks) else EXIT
            conditional = end.guard is not None or (end.opcode == "BRA" and len(end.operands) > 1)
            if end.opcode == "BRA" and end.operands[-1].startswith("`("):
                target = labels[end.operands[-1][2:-1]]
            elif end.opcode in ("EXIT", "RET"):
                target = EXIT
            elif end.opcode in _ENDS:
                raise NotImplementedError(f"control flow: expected branches to labels, got {end}")
            else:
                target, conditional = behind, False
            successors.append((target, behind) if conditional else (target,))
        return cls(tuple(blocks), tuple(successors))

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All loops that can be reached, each header's once."""
        found: dict[int, set[int]] = {}
        for number in self._reached(0):
            for target in self.successors[number]:
                # A jump back to what is not the only way here ends code that was moved out of the way.
                if EXIT < target <= number and number not in self._reached(0, without=target):
                    found.setdefault(target, {target}).update(self._body(target, number))
        return tuple(Loop(header, frozenset(body), self._trips(header, body)) for header, body in found.items())

    def _reached(self, start: int, *, without: int = EXIT) -> set[int]:
        """The block `start` and those that can follow it, without passing another."""
        seen = {start} - {without}
        todo = list(seen)
        while todo:
            for target in self.successors[todo.pop()]:
                if target not in (EXIT, without) and target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    def _body(self, header: int, end: int) -> set[int]:
        """Blocks that lead to `end` without passing the header."""
        body, todo = {header, end}, [] if end == header else [end]
        while todo:
            number = todo.pop()
            for before, targets in enumerate(self.successors):
                if number in targets and before not in body:
                    body.add(before)
                    todo.append(before)
        return body

    def _trips(self, header: int, body: set[int]) -> int | None:
        """How often a loop runs, by the instructions that make the predicate of its exit."""
        inside = [one for number in sorted(body) for one in self.blocks[number]]
        (*_, end) = (n for n in sorted(body) if len(self.successors[n]) > 1 and set(self.successors[n]) - body)
        branch = self.blocks[end][-1]
        guard = (branch.guard or branch.operands[0]).lstrip("!")
        test = _last_writer(inside[: inside.index(branch)], guard)
        if test is not None and test.opcode == "PLOP3":  # a predicate moved from one register to another
            source = next((word.lstrip("!") for word in test.operands[1:] if re.fullmatch(r"!?U?P\d", word)), "PT")
            test = _last_writer(inside[: inside.index(test)], source) or test
        if test is None and any(guard in one.operands for one in inside if one is not branch):
            raise NotImplementedError(f"control flow: it is not known what sets {guard}, which ends a loop")
        if test is None:
            return 1  # what the loop does not set ends it at once, or never
        if test.opcode == "SYNCS":
            return 1  # a wait
        if not test.opcode.endswith("ISETP"):
            return FLAG_TRIPS
        counter, bound = test.operands[2].removesuffix(".reuse"), constant(test.operands[3])
        adds = next((one for one in inside if _step(one, counter, inside)), None)
        if adds is None or not bound:
            return None
        before = [one for block in self.blocks[:header] for one in block]
        first = _last_writer(before, counter)
        start = 0 if first is None else constant(first.operands[-1]) or 0
        beyond = int(".GT" in test.name or ".LE" in test.name)  # the bound itself is within
        late = int(inside.index(test) < inside.index(adds))  # what is tested is the value of this trip, not of the next
        return max(1, -(-(bound + beyond - start) // _step(adds, counter, inside)) + late)

    @property
    def fold_blocks(self) -> frozenset[int]:
        """Blocks of the loops over a row's records, and those that write the state: loops that store 16 bytes at a
        time, and what has the policy of L2 with which nothing else is stored."""
        loops = [loop for loop in self.loops if loop.trips is None or any(map(self._stores_widely, loop.blocks))]
        writing = [n for n in self._reached(0) if any(_POLICY in one.operands for one in self.blocks[n])]
        return frozenset(writing).union(*(loop.blocks for loop in loops))

    def _stores_widely(self, number: int) -> bool:
        return any(one.opcode == "STG" and re.search(r"\.(128|256)", one.name) for one in self.blocks[number])

    def path(self, *, folds: bool, record_trips: int) -> Path:
        """What a warp issues: each instruction with how often it does.

        Args:
            folds: the row folds its records, else it only reads.
            record_trips: iterations that the records of the row make a fold's loop take.

        Raises:
            NotImplementedError: there is no such path.
        """
        times = [1] * len(self.blocks)
        for loop in self.loops:
            for number in loop.blocks:
                times[number] *= record_trips if loop.trips is None else loop.trips
        folding = self.fold_blocks
        backward = {(n, loop.header) for loop in self.loops for n in loop.blocks}

        onward = {n: [t for t in self.successors[n] if (n, t) not in backward] for n in range(len(self.blocks))}
        # By block, and whether the path has folded before it: the heaviest way on from there, and how heavy it is.
        heaviest: dict[tuple[int, bool], tuple[int, tuple[int, ...]]] = {(EXIT, folds): (0, ())}
        for number in _last_first(onward):
            if number in folding and not folds:
                continue
            for before in (False, True):
                ways = (heaviest.get((t, before or number in folding)) for t in onward[number])
                rest = max(filter(None, ways), default=None)
                if rest is not None:
                    weight = rest[0] + times[number] * len(self.blocks[number])
                    heaviest[number, before] = (weight, (number, *rest[1]))
        found = heaviest.get((0, False))
        if found is None:
            raise NotImplementedError(f"control flow: no path of a row that {'folds' if folds else 'only reads'}")
        issued: Counter[Instruction] = Counter()
        loaded: Counter[Instruction] = Counter()
        rounds = 0
        looped = frozenset().union(*(loop.blocks for loop in self.loops))
        for number in found[1]:
            for one in self.blocks[number]:
                issued[one] += times[number]
            if number in looped and any(one.opcode == "LDG" for one in self.blocks[number]):
                rounds += times[number]
                loaded.update(Counter([one for one in self.blocks[number] if one.opcode == "LDG"] * times[number]))
        return Path(issued, rounds, sum(n * one.bits // 8 for one, n in loaded.items()))


def _last_first(onward: dict[int, list[int]]) -> list[int]:
    """The blocks that can be reached from the first, each behind all that follow it."""
    order: dict[int, None] = {}
    todo = [(0, False)]
    while todo:
        number, followed = todo.pop()
        if followed:
            order[number] = None
        elif number not in order and number != EXIT:
            todo += [(number, True), *((target, False) for target in onward[number])]
    return list(order)


def _split(sass: str) -> tuple[list[Block], dict[str, int]]:
    """Blocks, and which of them each label begins."""
    blocks: list[Block] = []
    labels: dict[str, int] = {}
    block: list[Instruction] = []
    for line in sass.splitlines():
        label, one = _LABEL.match(line), _LINE.match(line)
        if label:
            if block:
                blocks.append(tuple(block))
                block = []
            labels[label[1]] = len(blocks)
        elif one:
            block.append(Instruction(one[1], one[2], tuple(word.strip() for word in one[3].split(","))))
            if block[-1].opcode in _ENDS:
                blocks.append(tuple(block))
                block = []
    return ([*blocks, tuple(block)] if block else blocks), labels


def _last_writer(instructions: Sequence[Instruction], name: str) -> Instruction | None:
    """The last instruction whose first operands name a register or predicate as what it writes."""
    for one in reversed(instructions):
        written = next((i for i, word in enumerate(one.operands) if not re.fullmatch(r"U?PT|U?P\d", word)), 0)
        if name in one.operands[: max(1, written + (0 if name.startswith(("P", "UP")) else 1))]:
            return one
    return None


def _step(one: Instruction, counter: str, inside: Sequence[Instruction]) -> int:
    """What an instruction adds to a counter, maybe by way of another register; 0 if it is no such addition."""
    words = [word.removesuffix(".reuse") for word in one.operands]
    if one.opcode not in ("VIADD", "IADD3", "UIADD3", "IADD", "UIADD") or counter not in words[1:]:
        return 0
    moved = any(other.opcode in ("MOV", "UMOV") and other.operands == (counter, words[0]) for other in inside)
    if words[0] != counter and not moved:
        return 0
    return next((value for word in words[1:] if (value := constant(word))), 0)


def constant(word: str) -> int | None:
    """The value of an immediate operand or of a zero register; None of any other."""
    if word in ("RZ", "URZ", "SRZ"):
        return 0
    return int(word, 16) if re.fullmatch(r"-?0x[0-9a-f]+", word) else None
