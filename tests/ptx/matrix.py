"""Matrix instructions of warps and warpgroups: ldmatrix, stmatrix, mma.sync, wgmma.

PTX ISA, "Warp Level Matrix Instructions" and "Asynchronous Warpgroup Level Matrix Instructions". Fragments: lane l
holds, of each 8 rows, row l / 4, and of the columns those that fill its register. A wgmma takes effect when issued, but
its registers may not be used before a wait, and it reads shared memory as an asynchronous agent; each warp computes its
16 rows.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.ptx.access import address_of, addresses
from tests.ptx.decode import Decoder, Op, Run, aligned, check_defined, instruction, write
from tests.ptx.memory import ASYNC, INDEX
from tests.ptx.operands import FORMATS, Layout, elements, fused_products, read_shared
from tests.ptx.parser import Immediate, Instruction, Vector
from tests.ptx.trouble import FaultError

LANE = np.arange(32)
MMA = re.compile(r"m(\d+)n(\d+)k(\d+)")


@instruction("ldmatrix.sync.aligned.m8n8", "stmatrix.sync.aligned.m8n8", types=("b16",))
def move_matrices(decoder: Decoder, ins: Instruction) -> Op:
    """1, 2 or 4 matrices of 8 rows of 16 bytes; lane 8 i + j gives the address of row j of matrix i ("ldmatrix")."""
    modifiers = decoder.modifiers(ins, {"x1", "x2", "x4", "trans", "shared", "shared::cta"}, skip=4)
    loads, operands = ins.parts[0] == "ldmatrix", decoder.operands(ins, 2)
    registers, where = operands if loads else operands[::-1]
    slot, offset = address_of(decoder, ins, where, "shared")
    count = int(next((m for m in modifiers if m[0] == "x"), "x0")[1:])
    items = decoder.registers(ins, registers, count)
    slots = [decoder.destination(ins, i, 32) if loads else decoder.source(ins, i, 32) for i in items]
    row, pair = LANE // 4, LANE % 4 * 2
    halves = np.stack([row * 8 + pair, row * 8 + pair + 1], 1)  # [lane, half]: which of the 64 elements
    if "trans" in modifiers:
        halves = halves % 8 * 8 + halves // 8

    def run(warp: Any, mask: int) -> None:
        used = (1 << 8 * count) - 1
        where = addresses(warp, slot, offset, used)
        place = warp.cta.shared.offsets(where, 16)[:, None] + INDEX[16]
        if loads:
            data = warp.cta.shared.read(place, warp.access(ins.line)).view(np.uint16).reshape(count, 64)
            for i, target in enumerate(slots):
                write(warp, target, np.ascontiguousarray(data[i][halves]).view(np.uint32)[:, 0], mask)
            return
        check_defined(warp, tuple(slots), mask)
        data = np.empty((count, 64), np.uint16)
        for i, source in enumerate(slots):
            data[i][halves] = warp.regs[source].view(np.uint16).reshape(32, 2)
        warp.cta.shared.write(place, data.view(np.uint8).reshape(-1, 16), warp.access(ins.line))

    return aligned(run)


def fragment(registers: int, bits: int, *, a: bool) -> tuple[np.ndarray, np.ndarray]:
    """(row or column, k) of the elements in the registers of A or B: arrays [lane, register, element].

    "Matrix Fragments for mma": the registers of A cycle through two groups of 8 rows, then through K; those of B
    through K.
    """
    per = 32 // bits
    register, element = np.arange(registers)[None, :, None], np.arange(per)[None, None, :]
    lane, part = LANE[:, None, None], register // 2 if a else register
    k = part * 4 * per + lane % 4 * per + element
    major = lane // 4 + (register % 2 * 8 if a else 0 * register) + 0 * element
    return major, k


def gather(values: list[np.ndarray], name: str, shape: tuple[int, int], *, a: bool) -> np.ndarray:
    """A matrix [rows or columns, K] from its fragments."""
    major, k = fragment(len(values), FORMATS[name][0], a=a)
    raw = np.ascontiguousarray(np.stack(values, 1)).view(np.uint8).reshape(32, len(values), 4)
    out = np.zeros(shape)
    out[major, k] = elements(raw, name)
    return out


def accumulators(count: int, halves: bool) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) [lane, value] of a D fragment: pairs of columns, two groups of 8 rows, then the next 8 columns."""
    value = np.arange(count * (2 if halves else 1))[None, :]
    return LANE[:, None] // 4 + value // 2 % 2 * 8, LANE[:, None] % 4 * 2 + value % 2 + value // 4 * 8


def load_accumulator(values: list[np.ndarray], name: str, columns: int) -> np.ndarray:
    row, column = accumulators(len(values), name == "f16")
    raw = np.ascontiguousarray(np.stack(values, 1)).view(FORMATS[name][1]).astype(np.float64)
    out = np.zeros((16, columns))
    out[row, column] = raw
    return out


def spread(total: np.ndarray, name: str, count: int) -> list[np.ndarray]:
    """Registers of a D fragment; a NaN is the one that the hardware makes."""
    row, column = accumulators(count, name == "f16")
    part = total[row, column]
    if name == "s32":
        words = part.astype(np.int64).astype(np.uint32)
    elif name == "f16":
        words = np.where(np.isnan(part), np.uint16(0x7FFF), part.astype(np.float16).view(np.uint16))
        words = np.ascontiguousarray(words).view(np.uint32)
    else:
        words = np.where(np.isnan(part), np.uint32(0x7FFFFFFF), part.astype(np.float32).view(np.uint32))
    return [np.ascontiguousarray(words[:, i]) for i in range(count)]


@instruction("mma.sync.aligned")
def mma(decoder: Decoder, ins: Instruction) -> Op:
    """D = A B + C of a warp, 16 rows by 8 columns ("mma")."""
    found = MMA.fullmatch(ins.parts[3])
    to, of_a, of_b, of_c = ins.parts[-4:]
    if not found or ins.parts[4:6] != ["row", "col"] or len(ins.parts) != 10 or not {of_a, of_b, to} <= FORMATS.keys():
        decoder.refuse(ins, f"{ins.opcode} is not modelled")
    m, n, k = map(int, found.groups())
    bits = FORMATS[of_a][0]
    if (m, n) != (16, 8) or k * bits not in (128, 256) or bits != FORMATS[of_b][0] or bits < 8 or of_c != to:
        decoder.refuse(ins, f"{ins.opcode} is not modelled")
    d, *rest = (decoder.items(operand) for operand in decoder.operands(ins, 4))
    a, b, c = (decoder.sources(ins, operand, 32) for operand in rest)
    targets = [decoder.destination(ins, item, 32) for item in d]
    count = 2 if to == "f16" else 4
    if (len(a), len(b), len(c), len(d)) != (2 * (k * bits // 128), k * bits // 128, count, count):
        decoder.refuse(ins, "a fragment of another size")

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, (*a, *b, *c), mask)
        x, y, z = ([warp.regs[slot] for slot in slots] for slots in (a, b, c))
        left, right = gather(x, of_a, (16, k), a=True), gather(y, of_b, (8, k), a=False)
        old = load_accumulator(z, to, 8)
        if bits == 8 and to == "f32":
            # The assembler makes this of two products in f16, of the first and the last two of each four K, and a sum.
            first = np.arange(k) % 4 < 2
            total = fused_products(left[:, first], right[:, first], np.zeros_like(old), "f16")
            total = (fused_products(left[:, ~first], right[:, ~first], total, "f16") + old).astype(np.float32)
        else:
            total = fused_products(left, right, old, of_a, to)
        for target, value in zip(targets, spread(total, to, count), strict=True):
            write(warp, target, value, mask)

    return aligned(run)


@instruction("wgmma.mma_async.sync.aligned")
def wgmma(decoder: Decoder, ins: Instruction) -> Op:
    """D = A B + D of a warpgroup, 64 rows, B from shared memory, A from there or from registers ("wgmma.mma_async")."""
    found = MMA.fullmatch(ins.parts[4])
    to, of_a, of_b = ins.parts[-3:]
    decoder.refuse_if(ins, not found or not {of_a, of_b, to} <= FORMATS.keys() or len(ins.parts) != 8)
    _, n, k = map(int, found.groups())
    bits, size = FORMATS[of_a][0], FORMATS[of_a][0] // 8
    d, a, b, scale, *flags = ins.operands
    targets = [decoder.destination(ins, item, 32) for item in decoder.items(d)]
    decoder.refuse_if(ins, k * bits != 256 or n % 8 or len(targets) != n // (4 if to == "f16" else 2))
    decoder.refuse_if(ins, not all(isinstance(flag, Immediate) for flag in flags), "a flag that is no constant")
    signs, transposes = [f.value for f in flags[:2]], [bool(f.value) for f in flags[2:]]  # type: ignore[union-attr]
    in_registers = isinstance(a, Vector)
    transposes = [False] * (2 - len(transposes)) + transposes
    left = decoder.sources(ins, decoder.items(a), 32 if in_registers else 64)
    right, (keep, flip) = decoder.source(ins, b, 64), decoder.predicate(ins, scale)

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, (*left, right, keep), mask)
        if not warp.warpgroup_fenced:
            raise FaultError("missing_fence", "no wgmma.fence since the registers were last written or waited for")
        stream = warp.stream("wgmma")
        (access,) = stream.accesses(ins.line, ASYNC)

        def operand(slot: int, name: str, rows: int, transposed: bool) -> np.ndarray:
            layout = Layout.of(int(warp.regs[slot][0]), "sm_90")
            where = layout.bytes_of(rows, k, size, transposed=transposed)
            return elements(read_shared(warp.cta.shared, where, access), name)

        if in_registers:
            x = gather([warp.regs[slot] for slot in left], of_a, (16, k), a=True)
        else:
            # The product is one of all four warps, so that each has to come after whoever wrote any of its rows.
            x = operand(left[0], of_a, 64, transposes[0])[16 * (warp.id % 4) :][:16]
        y = operand(right, of_b, n, transposes[1])
        total = np.zeros((16, n))
        if (warp.regs[keep] ^ flip) & 1:
            check_defined(warp, tuple(targets), mask)
            total = load_accumulator([warp.regs[slot] for slot in targets], to, n)
        total = fused_products(x * signs[0] if signs else x, y * signs[1] if signs else y, total, of_a, to)
        for target, value in zip(targets, spread(total, to, len(targets)), strict=True):
            write(warp, target, value, mask)
        warp.loading |= dict.fromkeys((*targets, *left) if in_registers else targets, access.epoch)
        stream.open.append((mask, access.epoch))

    return aligned(run)


@instruction("wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned")
def wgmma_group(decoder: Decoder, ins: Instruction) -> Run:
    """Order of registers before a wgmma, and groups of them to wait for ("wgmma.fence", "wgmma.wait_group")."""
    name = ins.parts[1]
    operands = decoder.operands(ins, 1 if name == "wait_group" else 0)
    left = operands[0].value if operands and isinstance(operands[0], Immediate) else 0

    def run(warp: Any, mask: int) -> None:
        stream = warp.stream("wgmma")
        if name == "fence":
            warp.warpgroup_fenced = True
        elif name == "commit_group":
            stream.commit(mask)
        else:
            warp.arrived(stream.wait(mask, left))
            warp.warpgroup_fenced = False

    return run
