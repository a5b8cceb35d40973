"""Asynchronous copies: cp.async and its groups, bulk and tensor copies, st.async.

PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy". Non-bulk copies belong to the generic proxy,
the others to the asynchronous one. A copy completes as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.access import address_of, addresses
from tests.ptx.asynchronous import Work
from tests.ptx.decode import Decoder, Run, check_defined, instruction, lanes
from tests.ptx.mbarrier import MBarrier, each, mbarrier_at
from tests.ptx.memory import ASYNC, GENERIC
from tests.ptx.parser import BITS, Immediate, Instruction
from tests.ptx.trouble import FaultError, fault_if

HINTS = {"L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"}
BULK = {"shared::cta", "shared::cluster", "global", "mbarrier::complete_tx::bytes", "bulk_group", "L2::cache_hint"}


def scalars(warp: Any, slots: tuple[int, ...], mask: int) -> list[np.ndarray]:
    """Values of registers in the active lanes."""
    check_defined(warp, slots, mask)
    return [warp.regs[slot][lanes(mask)] for slot in slots]


@instruction("cp.async.ca.shared", "cp.async.cg.shared", "cp.async.ca.shared::cta", "cp.async.cg.shared::cta")
def copy_async(decoder: Decoder, ins: Instruction) -> Run:
    """4, 8 or 16 bytes a thread from global to shared memory, zeros behind the source's size ("cp.async")."""
    decoder.modifiers(ins, {"shared", "shared::cta", "global"} | HINTS, skip=3, last=0)
    hinted = "L2::cache_hint" in ins.parts
    to, of, size, *rest = decoder.operands(ins, *((4, 5) if hinted else (3, 4)))
    if not isinstance(size, Immediate) or size.value not in ((16,) if ins.parts[2] == "cg" else (4, 8, 16)):
        decoder.refuse(ins, "copies 4, 8 or 16 bytes, past the first level only 16")
    (a, at), (b, source_at) = address_of(decoder, ins, to, "shared"), address_of(decoder, ins, of, "global")
    policy = (decoder.source(ins, rest.pop(), 64),) if hinted else ()
    given = decoder.source(ins, rest[0] if rest else size, 32)
    count = size.value

    def run(warp: Any, mask: int) -> None:
        check_defined(warp, (given, *policy), mask)
        stream, cta, given_sizes = warp.stream("cp.async"), warp.cta, warp.regs[given][lanes(mask)]
        targets, origins = addresses(warp, a, at, mask), addresses(warp, b, source_at, mask)
        cta.shared.offsets(targets, count)
        fault_if((given_sizes > count).any(), "out_of_bounds", f"a source of more than {count} bytes")
        (access,) = stream.accesses(ins.line, GENERIC)

        def copy() -> None:
            data = np.zeros((len(targets), count), np.uint8)
            for n in {int(n) for n in given_sizes if n}:
                these = given_sizes == n
                for piece in range(0, n, n & -n):  # aligned pieces of a source of any size
                    part = cta.memory.load(origins[these] + np.uint64(piece), n & -n, access)
                    data[these, piece : piece + (n & -n)] = part
            cta.shared.store(targets, data, access)

        stream.open.append((mask, access.epoch))
        stream.issue(copy, ins, mask)

    return run


@instruction("cp.async.commit_group", "cp.async.bulk.commit_group", "cp.async.wait_all")
@instruction("cp.async.wait_group", "cp.async.bulk.wait_group")
def groups(decoder: Decoder, ins: Instruction) -> Run:
    """Groups of copies by lane, and waits for all but the latest ("cp.async.commit_group", "cp.async.wait_group")."""
    bulk, name = "bulk" in ins.parts, next(p for p in ins.parts if p.startswith(("commit", "wait")))
    decoder.modifiers(ins, {"bulk", name} | ({"read"} if bulk else set()), skip=2, last=0)
    operands = decoder.operands(ins, 1 if name == "wait_group" else 0)
    if operands and not isinstance(operands[0], Immediate):
        decoder.refuse(ins, "a count that is no constant is not modelled")
    left = operands[0].value if operands else 0  # type: ignore[union-attr]

    def run(warp: Any, mask: int) -> None:
        stream = warp.stream("bulk" if bulk else "cp.async")
        if name != "wait_group":
            stream.commit(mask)
        if name != "commit_group":
            stream.wait(mask, left)

    return run


@instruction("cp.async.mbarrier.arrive")
def arrive_behind(decoder: Decoder, ins: Instruction) -> Run:
    """Arrive once a lane's copies so far are over; without .noinc the count grows ("cp.async.mbarrier.arrive")."""
    decoder.modifiers(ins, {"noinc", "shared", "shared::cta", "b64"}, skip=4, last=0)
    slot, offset = address_of(decoder, ins, decoder.operands(ins, 1)[0], "shared")

    def run(warp: Any, mask: int) -> None:
        stream, cluster = warp.stream("cp.async"), warp.cluster
        for i, address in each(warp, mask, slot, offset):
            found, epoch = mbarrier_at(warp, address, i), stream.issued
            found.pending += "noinc" not in ins.parts

            def arrive(found: MBarrier = found, epoch: int = epoch) -> None:
                clock = cluster.clocks.zero()
                stream.observe(clock, epoch)
                found.arrive(clock)

            stream.issue(arrive, ins, mask, wakes=address, signal=True)

    return run


def with_mbarrier(
    warp: Any, ins: Instruction, mask: int, found: MBarrier, size: int, copy: Callable[[Any], None]
) -> None:
    """Issue a copy that counts its bytes on an mbarrier when it is over ("complete-tx operation")."""
    clock = warp.cluster.clocks.release(warp.agent)

    def run() -> None:
        copy(found.access(ins.line, clock, warp.cluster))
        found.tx -= size
        found.settle()

    warp.cluster.issue(Work(run, warp, ins, mask, wakes=found.address))


@instruction("cp.async.bulk.shared::cluster", "cp.async.bulk.shared::cta", "cp.async.bulk.global")
def bulk_copy(decoder: Decoder, ins: Instruction) -> Run:
    """Bytes between global memory and the cluster's shared memory, in place and size by 16 ("cp.async.bulk")."""
    decoder.modifiers(ins, BULK, skip=3, last=0)
    target_space, source_space = ("global" if "global" in part else "shared" for part in ins.parts[3:5])
    counted = "mbarrier::complete_tx::bytes" in ins.parts
    hinted = "L2::cache_hint" in ins.parts
    decoder.refuse_if(ins, counted == ("bulk_group" in ins.parts) or counted != (target_space == "shared"))
    to, of, size, *rest = decoder.operands(ins, 3 + counted + hinted)
    (a, at), (b, source_at) = address_of(decoder, ins, to, target_space), address_of(decoder, ins, of, source_space)
    c, barrier_at = address_of(decoder, ins, rest.pop(0), "shared") if counted else (a, at)
    sources = (decoder.source(ins, size, 32), *decoder.sources(ins, tuple(rest), 64))

    def run(warp: Any, mask: int) -> None:
        (sizes, *_), cluster = scalars(warp, sources, mask), warp.cluster
        origins, mbarriers = addresses(warp, b, source_at, mask), addresses(warp, c, barrier_at, mask)

        def memory(space: str, address: int) -> Any:
            return cluster.shared_of(address) if space == "shared" else warp.cta.memory

        for i, target in each(warp, mask, a, at):
            origin, count = int(origins[i]), int(sizes[i])
            if target % 16 or origin % 16 or count % 16:
                raise FaultError("misaligned", f"copies {count} bytes from {origin:#x} to {target:#x}", i)

            memory(source_space, origin).range(origin, count)
            memory(target_space, target).range(target, count)

            def copy(access: Any, target: int = target, origin: int = origin, count: int = count) -> None:
                data = memory(source_space, origin).range(origin, count, access)
                memory(target_space, target).range(target, count, access, data)

            if counted:
                found = mbarrier_at(warp, int(mbarriers[i]), i, asynchronous=True)
                with_mbarrier(warp, ins, mask, found, count, copy)
            else:
                stream = warp.stream("bulk")
                (access,) = stream.accesses(ins.line, ASYNC)
                stream.open.append((mask, access.epoch))
                stream.issue(lambda copy=copy, access=access: copy(access), ins, mask)

    return run


@instruction("st.async")
def store_async(decoder: Decoder, ins: Instruction) -> Run:
    """A register to shared memory of the cluster, with its bytes counted on an mbarrier there ("st.async")."""
    decoder.modifiers(ins, {"weak", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4"}, skip=2)
    where, value, barrier = decoder.operands(ins, 3)
    width, items = BITS[ins.parts[-1]], decoder.items(value)
    (a, at), (b, barrier_at) = address_of(decoder, ins, where, "shared"), address_of(decoder, ins, barrier, "shared")
    values = decoder.sources(ins, items, width)
    size = width // 8 * len(items)

    def run(warp: Any, mask: int) -> None:
        words, cluster = np.stack(scalars(warp, values, mask), axis=1), warp.cluster
        mbarriers = addresses(warp, b, barrier_at, mask)
        for i, target in each(warp, mask, a, at):
            found = mbarrier_at(warp, int(mbarriers[i]), i, asynchronous=True)
            data, where = words[i : i + 1].view(np.uint8), np.array([target])

            def copy(access: Any, data: Any = data, where: Any = where) -> None:
                cluster.shared_of(int(where[0])).store(where, data, access)

            with_mbarrier(warp, ins, mask, found, size, copy)

    return run
