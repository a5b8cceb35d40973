"""Copies of boxes of tensors by tensor maps, which host code fills.

PTX ISA, "Tensors: Tensor-map, Tiled mode" and "cp.async.bulk.tensor". The bits of a tensor map are not documented:
their meaning here was found by varying what CuTe DSL's host code encodes, an H200 and its driver agree with it, and
anything else in them is refused. Modelled are tiled maps, dense in shared memory, with zeros read beyond the tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.ptx.access import address_of, addresses
from tests.ptx.copies import BULK, with_mbarrier
from tests.ptx.decode import Decoder, Run, check_defined, instruction
from tests.ptx.mbarrier import mbarrier_at
from tests.ptx.memory import ASYNC, PARAM_WINDOW, RANK_SHIFT
from tests.ptx.parser import Address, Instruction
from tests.ptx.tensor import one_lane, uniform
from tests.ptx.trouble import FaultError, fault_if

BITS = {0: 8, 1: 16, 2: 32, 4: 64, 6: 16, 7: 32, 9: 64, 10: 16, 11: 4}  # of an element, by the type's number
SIZE = 128


class TensorMap(NamedTuple):
    """A tensor in global memory, dimension 0 contiguous, and the box of it that a copy moves.

    Args:
        bits: of an element.
        dims, box: elements; strides: bytes, from dimension 1 on.
        swizzle: bytes of a row of the pattern; 16 for none.
    """

    address: int
    bits: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @classmethod
    def of(cls, raw: bytes) -> TensorMap:
        words = np.frombuffer(raw, np.uint64, 8)
        halves, tail = words.view(np.uint32).tolist(), np.frombuffer(raw, np.uint8, 64).tolist()
        word = int(words[1])
        rank, kind = (word >> 4 & 7) + 1, word >> 7 & 15
        known = 0xF | 7 << 4 | 15 << 7 | 3 << 13 | 1 << 16 | 3 << 17 | 1 << 21 | 0xFFFFFFFF << 32
        if word & ~known or word & 15 not in (0, 2) or rank > 5 or kind not in BITS:
            raise FaultError("unmodelled", f"a tensor map with {word:#x} in its second word")
        dims, strides = (n + 1 for n in halves[8 : 8 + rank]), (n * 16 for n in halves[3 : 2 + rank])
        box, swizzle = (n + 1 for n in tail[55 : 55 + rank]), 16 << (word >> 13 & 3)
        return cls(int(words[0]), BITS[kind], tuple(dims), tuple(strides), tuple(box), swizzle)

    def places(self, corner: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Of each byte of the box, in its order in shared memory: its global address, and whether it is inside."""
        row = self.box[0] * self.bits // 8
        if (self.swizzle > 16 and row != self.swizzle) or row % 16:
            raise FaultError("unmodelled", f"a box with rows of {row} bytes, and a swizzle of {self.swizzle}")
        byte = np.arange(row) + corner[0] * self.bits // 8
        where, inside = self.address + byte, (byte >= 0) & (byte < self.dims[0] * self.bits // 8)
        for at, box, size, stride in zip(corner[1:], self.box[1:], self.dims[1:], self.strides, strict=True):
            index = np.arange(box) + at
            where = (index * stride).reshape(-1, *(1,) * where.ndim) + where
            inside = ((index >= 0) & (index < size)).reshape(-1, *(1,) * inside.ndim) & inside
        return where.ravel(), inside.ravel()


def read_map(warp: Any, address: int) -> TensorMap:
    """From a generic address: a parameter of the kernel, or global memory."""
    if address < PARAM_WINDOW:
        return TensorMap.of(warp.cta.memory.range(address, SIZE).tobytes())
    for parameter in warp.cta.program.entry.parameters:
        if parameter.offset == address - PARAM_WINDOW and parameter.size == SIZE:
            return TensorMap.of(warp.cta.arguments[parameter.name])
    raise FaultError("out_of_bounds", f"no tensor map at {address:#x}")


FORMS = BULK | {"tile", "multicast::cluster"} | {f"{n}d" for n in range(1, 6)}


@instruction("cp.async.bulk.tensor")
def copy_tensor(decoder: Decoder, ins: Instruction) -> Run:
    """A box between global and shared memory; to shared memory its bytes count on an mbarrier, whole, also zeros."""
    modifiers = decoder.modifiers(ins, FORMS, skip=4, last=0)
    loads = ins.parts[5].startswith("shared")
    operands = list(decoder.operands(ins, 2 + loads + len(modifiers & {"multicast::cluster", "L2::cache_hint"})))
    tensor, shared = operands[:2][::-1] if loads else operands[:2]
    if not isinstance(tensor, Address) or len(tensor.coordinates) != int(ins.parts[4][0]):
        decoder.refuse(ins, "a tensor map and coordinates are expected")
    map_slot, _ = address_of(decoder, ins, tensor, "global")
    coordinates = decoder.sources(ins, tensor.coordinates, 32)
    slot, offset = address_of(decoder, ins, shared, "shared")
    barrier, barrier_at = address_of(decoder, ins, operands[2], "shared") if loads else (slot, 0)
    to = decoder.source(ins, operands[3], 16) if "multicast::cluster" in modifiers else None

    def run(warp: Any, mask: int) -> None:
        one_lane(mask)
        check_defined(warp, (map_slot, *coordinates), mask)
        found, cluster, memory = read_map(warp, uniform(warp, map_slot, mask)), warp.cluster, warp.cta.memory
        corner = [int(np.int32(np.uint32(uniform(warp, c, mask)))) for c in coordinates]
        where, inside = found.places(corner)
        place, counter = int(addresses(warp, slot, offset, mask)[0]), int(addresses(warp, barrier, barrier_at, mask)[0])
        fault_if(place % 128, "misaligned", f"a box at {place:#x}")
        low = int(where[inside].min()) if inside.any() else 0
        span = int(where[inside].max()) + 1 - low if inside.any() else 0

        def target(at: int) -> tuple[Any, np.ndarray]:
            memory_there = cluster.shared_of(at)
            line = memory_there.places(at, len(where)) + memory_there.base
            return memory_there, (line ^ (line >> 3 & (found.swizzle - 16))) - memory_there.base

        def load(access: Any, at: int) -> None:
            data = np.zeros(len(where), np.uint8)
            if span:
                data[inside] = memory.range(low, span, access)[where[inside] - low]
            there, index = target(at)
            there.write(index, data, access)

        if loads:
            chosen = uniform(warp, to, mask) if to is not None else 1 << (place >> RANK_SHIFT)
            local = (1 << RANK_SHIFT) - 1
            for rank in (r for r in range(16) if chosen >> r & 1):
                at = place & local | rank << RANK_SHIFT
                object_there = mbarrier_at(warp, counter & local | rank << RANK_SHIFT, 0, asynchronous=True)
                with_mbarrier(warp, ins, mask, object_there, len(where), lambda access, at=at: load(access, at))
            return
        stream = warp.stream("bulk")
        (access,) = stream.accesses(ins.line, ASYNC)

        def store() -> None:
            there, index = target(place)
            data = there.read(index, access)
            for start in range(0, len(where), found.box[0] * found.bits // 8):
                row = slice(start, start + found.box[0] * found.bits // 8)
                if inside[row].any():
                    memory.range(int(where[row][0]), int(inside[row].sum()), access, data[row][inside[row]])

        stream.open.append((mask, access.epoch))
        stream.issue(store, ins, mask)

    return run
