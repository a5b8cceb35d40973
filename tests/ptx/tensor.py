"""Tensor memory and the tensor cores of sm_100: tcgen05.

PTX ISA, "TensorCore 5th Generation Family Instructions". A warp's mma, cp and commit are one stream, in order; ld and
st are two others, and other warps need the fences to see them. Only CTAs on their own (cta_group::1) are modelled. How
mma rounds its sums is open; here each product with its addend is exact and rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.access import address_of, addresses
from tests.ptx.decode import Decoder, Op, Run, aligned, bits, check_defined, first_lane, instruction, lanes, write
from tests.ptx.mbarrier import mbarrier_at
from tests.ptx.memory import ASYNC, COLUMNS, LANES, RANK_SHIFT, TENSOR, TensorMemory
from tests.ptx.operands import FORMATS, Layout, elements, read_shared
from tests.ptx.parser import Address, Immediate, Instruction, Vector
from tests.ptx.trouble import FaultError, fault_if

LANE = np.arange(32)[:, None]
# Formats by the number in an instruction descriptor ("Instruction descriptor").
HALVES = {0: "f16", 1: "bf16"}
NARROW = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
KINDS = {"f16": HALVES, "tf32": {2: "tf32"}, "f8f6f4": NARROW, "mxf8f6f4": NARROW, "mxf4": {1: "e2m1"}}
KINDS["mxf4nvf4"] = KINDS["mxf4"]
COLLECT = {f"collector::a::{how}" for how in ("fill", "use", "lastuse", "discard")}


def uniform(warp: Any, slot: int, mask: int) -> int:
    """The value of a register that must be the same in all active lanes."""
    check_defined(warp, (slot,), mask)
    values = warp.regs[slot][lanes(mask)]
    fault_if((values != values[0]).any(), "tensor", "lanes of a warp give different values")
    return int(values[0])


def one_lane(mask: int) -> None:
    fault_if(mask & (mask - 1), "tensor", f"is issued by each of the lanes {mask:#x}, and acts as often")


@instruction("tcgen05.alloc", "tcgen05.dealloc", "tcgen05.relinquish_alloc_permit")
def allocate(decoder: Decoder, ins: Instruction) -> Op:
    """Columns by powers of 2 from 32 on; alloc waits for free ones and writes where they are to shared memory.

    "Tensor Memory Allocation and Management Instructions". After relinquish_alloc_permit the CTA may not allocate.
    """
    decoder.modifiers(ins, {"cta_group::1", "sync", "aligned", "shared::cta", "b32"}, skip=2, last=0)
    name = ins.parts[1]
    operands = decoder.operands(ins, 0 if name == "relinquish_alloc_permit" else 2)
    count = decoder.source(ins, operands[1], 32) if operands else -1
    slot, offset = address_of(decoder, ins, operands[0], "shared") if name == "alloc" else (-1, 0)
    first = decoder.source(ins, operands[0], 32) if name == "dealloc" else -1

    def run(warp: Any, mask: int) -> bool:
        tensor: TensorMemory = warp.cta.tensor
        if name == "relinquish_alloc_permit":
            tensor.relinquished = True
            return True
        columns = uniform(warp, count, mask)
        fault_if(columns not in (32, 64, 128, 256, 512), "tensor", f"{columns} columns: a power of 2 from 32 to 512")
        if name == "dealloc":
            if tensor.owned.get(uniform(warp, first, mask)) != columns:
                raise FaultError("tensor", f"frees {columns} columns; allocated: {tensor.owned or 'nothing'}")
            cells = tensor.cells(np.arange(LANES)[:, None], uniform(warp, first, mask) + np.arange(columns))
            tensor.check_write(cells, warp.access(ins.line))
            del tensor.owned[uniform(warp, first, mask)]
            return True
        fault_if(tensor.relinquished, "tensor", "allocates after giving up the right to")
        taken = {c for start, n in tensor.owned.items() for c in range(start, start + n)}
        free = [c for c in range(0, COLUMNS, columns) if taken.isdisjoint(range(c, c + columns))]
        if not free:
            return False
        tensor.owned[free[0]] = columns
        tensor.written[tensor.cells(np.arange(LANES)[:, None], free[0] + np.arange(columns))] = False
        where = addresses(warp, slot, offset, 1 << first_lane(mask))
        warp.cta.shared.store(where, np.array([[free[0]]], np.uint32).view(np.uint8), warp.access(ins.line))
        return True

    return aligned(run)


def fragment(shape: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(lane, column) [thread, register] of a ld or st ("Tensor Memory Load/Store: data movement shapes")."""
    i = np.arange(count)[None, :]
    return {
        "32x32b": (LANE + 0 * i, i + 0 * LANE),
        "16x64b": (LANE // 4 + 8 * (LANE % 2) + 0 * i, LANE // 2 % 2 + 2 * i),
        "16x128b": (LANE // 4 + 8 * (i % 2), LANE % 4 + 4 * (i // 2)),
        "16x256b": (LANE // 4 + 8 * (i // 2 % 2), LANE % 4 * 2 + i % 2 + 8 * (i // 4)),
    }[shape]


REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}


@instruction("tcgen05.ld.sync.aligned", "tcgen05.st.sync.aligned", types=("b32",))
def move(decoder: Decoder, ins: Instruction) -> Op:
    """A warp's quarter of the lanes to and from registers; ld fills them, and st takes effect, by the time of a wait.

    .pack::16b puts the low halves of two columns into a register, .unpack::16b takes them apart.
    """
    shape, loads = ins.parts[4], ins.parts[1] == "ld"
    packs = ("pack::16b" if loads else "unpack::16b") in ins.parts
    decoder.refuse_if(ins, shape not in REGISTERS or len(ins.parts) != 7 + packs or (packs and shape != "32x32b"))
    operands = decoder.operands(ins, 2)
    registers, where = operands if loads else operands[::-1]
    slot, offset = address_of(decoder, ins, where, "tensor")
    items = decoder.registers(ins, registers, REGISTERS[shape] * int(ins.parts[5][1:]))
    slots = [decoder.destination(ins, i, 32) if loads else decoder.source(ins, i, 32) for i in items]
    row, column = fragment(shape, len(items) * (1 + packs))

    def run(warp: Any, mask: int) -> None:
        at = uniform(warp, slot, mask) + offset
        lane, first = at >> 16, at & 0xFFFF
        quarter, foreign = 32 * (warp.id % 4), warp.cluster.strict or lane >= 32
        if (foreign and lane // 32 * 32 != quarter) or lane % (32 if shape == "32x32b" else 16):
            raise FaultError("tensor", f"lane {lane}: warp {warp.id} reaches those from {quarter} on")
        lane = quarter + lane % 32
        tensor, stream = warp.cta.tensor, warp.stream("tcgen05.ld" if loads else "tcgen05.st")
        cells = tensor.cells(lane + row, first + column)
        (access,) = stream.accesses(ins.line, TENSOR)
        if not loads:
            check_defined(warp, tuple(slots), mask)
            words = np.stack([warp.regs[source] for source in slots], 1)
            if packs:
                words = np.stack([words & 0xFFFF, words >> 16], 2).reshape(32, -1)
            stream.issue(lambda: tensor.write(cells, words, access), ins, mask)
            return
        tensor.check_read(cells, access)
        tensor.mark_read(cells, access)
        words, known = tensor.data[cells], tensor.written[cells]
        if packs:
            words, known = words[:, ::2] & 0xFFFF | words[:, 1::2] << 16, known[:, ::2] & known[:, 1::2]
        for i, target in enumerate(slots):  # what nobody wrote may be loaded, but not used
            write(warp, target, np.ascontiguousarray(words[:, i]), mask)
            if warp.cluster.strict:
                warp.defined[target] &= bits(known[:, i]) | ~mask
        if warp.cluster.strict:
            warp.loading |= dict.fromkeys(slots, stream.issued)
        else:
            stream.wait_for(stream.issued)

    return aligned(run)


@instruction("tcgen05.wait::ld.sync.aligned", "tcgen05.wait::st.sync.aligned")
def wait(decoder: Decoder, ins: Instruction) -> Run:
    """Wait for this warp's loads, or stores ("tcgen05.wait")."""
    kind = "tcgen05." + ins.parts[1][-2:]

    def run(warp: Any, mask: int) -> None:
        warp.stream(kind).wait_for(warp.stream(kind).issued)
        if kind == "tcgen05.ld":
            warp.loading.clear()

    return run


@instruction("tcgen05.commit")
def commit(decoder: Decoder, ins: Instruction) -> Run:
    """One arrival on an mbarrier once the warp's mma and cp so far are over; multicast to the CTAs of a mask."""
    allowed = {"cta_group::1", "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64"}
    multicast = "multicast::cluster" in decoder.modifiers(ins, allowed, skip=2, last=0)
    where, *mask_of = decoder.operands(ins, 1 + multicast)
    slot, offset = address_of(decoder, ins, where, "shared")
    ranks = decoder.sources(ins, tuple(mask_of), 16)

    def run(warp: Any, mask: int) -> None:
        one_lane(mask)
        stream, at = warp.stream("tcgen05"), int(addresses(warp, slot, offset, mask)[0])
        targets = [at]
        if multicast:
            chosen, inside = uniform(warp, ranks[0], mask), at & ((1 << RANK_SHIFT) - 1)
            targets = [inside | r << RANK_SHIFT for r in range(16) if chosen >> r & 1]
        for target in targets:
            found, epoch = mbarrier_at(warp, target, 0, asynchronous=True), stream.issued
            clock = warp.cluster.clocks.state[warp.agent].copy()
            clock[:, : len(warp.cluster.clocks.state)] = 0  # of what the thread saw, only what its mma came after

            def arrive(found: Any = found, epoch: int = epoch, clock: Any = clock) -> None:
                stream.observe(clock, epoch)
                found.arrive(clock)

            stream.issue(arrive, ins, mask, wakes=target, signal=True)

    return run


CP_ROWS = {"128x256b": (128, 32), "4x256b": (4, 32), "128x128b": (128, 16), "64x128b": (64, 16), "32x128b": (32, 16)}
CP_LANES = {"": (0,), "warpx4": (0, 32, 64, 96), "warpx2::02_13": (0, 64), "warpx2::01_23": (0, 32)}
CP_BITS = {"": 8, "b8x16.b4x16_p64": 4, "b8x16.b6x16_p32": 6}


@instruction("tcgen05.cp.cta_group::1")
def copy(decoder: Decoder, ins: Instruction) -> Run:
    """A matrix of bytes from shared to tensor memory, to one or several groups of lanes ("tcgen05.cp").

    Elements of 4 or 6 bits, each 16 of them padded to 16 bytes, get a byte each.
    """
    shape, rest = ins.parts[3], ins.parts[4:]
    cast = rest.pop(0) if rest and rest[0].startswith("warp") else ""
    form = ".".join(rest)
    decoder.refuse_if(ins, shape not in CP_ROWS or cast not in CP_LANES or form not in CP_BITS)
    where, descriptor = decoder.operands(ins, 2)
    (slot, offset), source = address_of(decoder, ins, where, "tensor"), decoder.source(ins, descriptor, 64)
    (rows, width), size = CP_ROWS[shape], CP_BITS[form]

    def run(warp: Any, mask: int) -> None:
        one_lane(mask)
        at, word = uniform(warp, slot, mask) + offset, uniform(warp, source, mask)
        stream, tensor = warp.stream("tcgen05"), warp.cta.tensor
        of, to = stream.accesses(ins.line, ASYNC, TENSOR, ordered=True)
        address = Layout.of(word, "sm_100").bytes_of(rows, width, 1)
        row = np.arange(rows) if cast != "warpx2::01_23" else np.arange(rows) % 32 + np.arange(rows) // 32 * 64
        lane = (at >> 16) + (row[None, :] + np.array(CP_LANES[cast])[:, None])[..., None]
        cells = tensor.cells(lane, (at & 0xFFFF) + np.arange(width // 4))

        def effect() -> None:
            raw = read_shared(warp.cta.shared, address, of)
            if size < 8:
                raw = widened(raw, size)
            tensor.write(cells, np.broadcast_to(np.ascontiguousarray(raw).view(np.uint32), cells.shape), to)

        stream.issue(effect, ins, mask)

    return run


def unpadded(raw: np.ndarray, size: int) -> np.ndarray:
    """Of each 16 bytes those that hold 16 elements of 4 or 6 bits."""
    return raw.reshape(*raw.shape[:-1], -1, 16)[..., : 2 * size].reshape(*raw.shape[:-1], -1)


def widened(raw: np.ndarray, size: int) -> np.ndarray:
    """A byte for each element: 4 bits become bits 2 to 5, 6 bits bits 0 to 5."""
    stream = np.unpackbits(unpadded(raw, size), axis=-1, bitorder="little").reshape(*raw.shape, size)
    return (stream << (np.arange(size, dtype=np.uint8) + (2 if size == 4 else 0))).sum(-1, dtype=np.uint8)


def narrowed(raw: np.ndarray, name: str) -> np.ndarray:
    """Values of bytes that `widened` made."""
    codes = raw >> (2 if FORMATS[name][0] == 4 else 0)
    return codes.view(FORMATS[name][1]).astype(np.float64)


class Shape:
    """What an instruction descriptor says ("Instruction descriptor": fields by bit)."""

    def __init__(self, word: int, kind: str, scaled: bool) -> None:
        names, mx4 = KINDS[kind], kind.startswith("mxf4")
        codes = (word >> 7 & 7, word >> 10 & (3 if mx4 else 7))
        self.m, self.n = (word >> 24 & 31) << 4, (word >> 17 & 63) << 3
        self.signs = tuple(-1.0 if word >> bit & 1 else 1.0 for bit in (13, 14))
        self.transposed = tuple(bool(word >> bit & 1) for bit in (15, 16))
        self.to = "f32" if scaled or word >> 4 & 3 else "f16"
        self.scale, self.scale_at = ("ue8m0" if word >> 23 & 1 else "ue4m3"), (word >> 29 & 3, word >> 4 & 3)
        must_be_0 = 0xF | 1 << 6 | (1 << 31 if scaled else 1 << 5 | 1 << 23 | 7 << 29) | (0x19 << 12 if mx4 else 0)
        if word & must_be_0 or not all(code in names for code in codes):
            raise FaultError("descriptor", f"instruction descriptor {word:#010x} has bits that are not modelled")
        self.formats = tuple(names[code] for code in codes)
        if self.m not in ((128,) if scaled else (64, 128)) or not 8 <= self.n <= 256:
            raise FaultError("descriptor", f"a product of {self.m} by {self.n} is not modelled")

    def lanes(self) -> np.ndarray:
        """The lane of each row of D, and of A where it is in tensor memory ("Data path layout organization")."""
        row = np.arange(self.m)
        return row if self.m == 128 else row // 16 * 32 + row % 16


@instruction("tcgen05.mma.cta_group::1")
def mma(decoder: Decoder, ins: Instruction) -> Op:
    """D = A B + D, or A B, of M rows and N columns; with block scales each A and B times its scale ("tcgen05.mma").

    A bit of the vector of four registers keeps a lane of D as it is; the last operand halves D so often.
    """
    kind = ins.parts[3].removeprefix("kind::")
    blocks = {"block16": 4, "block32": 2, "scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}
    modifiers = decoder.modifiers(ins, {"block_scale", *blocks} | COLLECT, skip=4, last=0)
    scaled = "block_scale" in modifiers
    decoder.refuse_if(ins, kind not in KINDS or scaled != kind.startswith("mx"))
    default = {"mxf8f6f4": 1, "mxf4": 2, "mxf4nvf4": 4}.get(kind, 0)
    vector = next((blocks[m] for m in modifiers if m in blocks), default)
    d, a, b, described, *rest = ins.operands
    to = address_of(decoder, ins, d, "tensor")
    in_tensor = isinstance(a, Address)
    left = address_of(decoder, ins, a, "tensor") if in_tensor else (decoder.source(ins, a, 64), 0)
    right, shape_slot = decoder.source(ins, b, 64), decoder.source(ins, described, 32)
    scales = [address_of(decoder, ins, rest.pop(0), "tensor") for _ in range(2 * scaled)]
    kept = decoder.sources(ins, decoder.items(rest.pop(0)), 32) if isinstance(rest[0], Vector) else ()
    keep, flip = decoder.predicate(ins, rest.pop(0))
    halvings = rest.pop().value if rest and isinstance(rest[0], Immediate) else 0
    decoder.refuse_if(ins, rest or len(kept) not in (0, 4), f"{len(ins.operands)} operands of {ins.opcode}")

    def run(warp: Any, mask: int) -> None:
        one_lane(mask)
        check_defined(warp, (keep,), mask)
        shape = Shape(uniform(warp, shape_slot, mask), kind, scaled)
        tensor, stream = warp.cta.tensor, warp.stream("tcgen05")
        of, in_tmem = stream.accesses(ins.line, ASYNC, TENSOR, ordered=True)
        words = [uniform(warp, slot, mask) + offset for slot, offset in (left, (right, 0), to, *scales)]
        adds = (warp.regs[keep] ^ flip) & mask
        disabled = np.array([uniform(warp, slot, mask) for slot in kept], np.uint32)

        def cells(word: int, lane: Any, columns: int) -> np.ndarray:
            return tensor.cells((word >> 16) + np.asarray(lane)[:, None], (word & 0xFFFF) + np.arange(columns))

        def operand(which: int, rows: int) -> np.ndarray:
            name = shape.formats[which]
            width = FORMATS[name][0]
            if in_tensor and which == 0:
                raw = tensor.read(cells(words[0], shape.lanes(), 8), in_tmem).view(np.uint8)
                return narrowed(raw, name) if kind.endswith("f8f6f4") and width < 8 else elements(raw, name)
            size = 1 if width < 8 else width // 8
            layout, transposed = Layout.of(words[which], "sm_100"), shape.transposed[which]
            raw = read_shared(warp.cta.shared, layout.bytes_of(rows, 32 // size, size, transposed=transposed), of)
            return elements(unpadded(raw, width) if kind.endswith("f8f6f4") and width < 8 else raw, name)

        def scale(which: int, rows: int, columns: int) -> np.ndarray:
            row = np.arange(rows)
            base = words[3 + which]
            groups = [tensor.cells(32 * g + row % 32, (base & 0xFFFF) + row // 32) for g in range(4)]
            copies = np.stack([tensor.read(group, in_tmem) for group in groups])
            if (copies != copies[0]).any() or base >> 16:
                raise FaultError("tensor", "scales must be the same in each group of 32 lanes, and begin at lane 0")
            raw = copies[0].view(np.uint8).reshape(rows, 4)[:, shape.scale_at[which] :][:, :vector]
            return np.repeat(elements(raw, shape.scale), columns // vector, axis=1)

        def effect() -> None:
            x, y = operand(0, shape.m) * shape.signs[0], operand(1, shape.n) * shape.signs[1]
            if scaled:
                x, y = x * scale(0, shape.m, x.shape[1]), y * scale(1, shape.n, y.shape[1])
            into, total = cells(words[2], shape.lanes(), shape.n), x @ y.T
            if len(disabled):
                on = ~np.unpackbits(disabled.view(np.uint8), bitorder="little").astype(bool)
                into, total = into[on[shape.lanes()]], total[on[shape.lanes()]]
            half = shape.to == "f16"
            if adds:
                old = tensor.read(into, in_tmem)
                addend = old.astype(np.uint16).view(np.float16) if half else old.view(np.float32)
                total = total + addend * 2.0**-halvings
            done = total.astype(np.float16).view(np.uint16) if half else total.astype(np.float32).view(np.uint32)
            tensor.write(into, done.astype(np.uint32), in_tmem)

        stream.issue(effect, ins, mask)

    return Op(run, approximate=True)
