"""Address spaces: global memory as registered host buffers, and a CTA's shared memory that knows who touched what.

Accesses take the byte addresses of the active lanes and a size, and check bounds and alignment (PTX ISA, "Addresses as
Operands": a vector access is aligned to its whole size). Shared memory also knows which bytes were ever written, and
orders accesses by happens-before (PTX ISA, "Memory Consistency Model", "Causality order") with vector clocks: an agent
is a warp, or the asynchronous side of one mbarrier. Lanes of one warp count as one agent.
"""

from __future__ import annotations

import bisect

import numpy as np

from tests.ptx.trouble import FaultError

SHARED_BASE = 1024  # not 0, so that a null pointer is out of bounds; the hardware keeps the first 1024 bytes to itself
INDEX = {size: np.arange(size, dtype=np.int64) for size in (1, 2, 4, 8, 16, 32)}


def check_alignment(addresses: np.ndarray, size: int) -> None:
    """Refuse addresses that are no multiple of the access size, a power of two."""
    low = addresses & addresses.dtype.type(size - 1)
    if low.any():
        i = int(np.flatnonzero(low)[0])
        raise FaultError("misaligned", f"{size} bytes at {int(addresses[i]):#x}", i)


class GlobalMemory:
    """Host arrays at their own addresses; an array that is not writeable is read-only to the kernel too."""

    def __init__(self, buffers: list[np.ndarray]) -> None:
        for buffer in buffers:
            if not buffer.flags.c_contiguous:
                raise ValueError("a buffer must be contiguous")
        views = [buffer.reshape(-1).view(np.uint8) for buffer in buffers if buffer.nbytes]
        self.views = sorted(views, key=lambda view: view.ctypes.data)
        self.starts = [view.ctypes.data for view in self.views]
        ends = [start + len(view) for start, view in zip(self.starts, self.views, strict=True)]
        if any(end > start for end, start in zip(ends, self.starts[1:], strict=False)):
            raise ValueError("buffers overlap")

    def _find(self, address: int, size: int, write: bool, lane: int | None) -> tuple[np.ndarray, int]:
        """The buffer that holds `size` bytes at an address, and where it starts."""
        number = bisect.bisect_right(self.starts, address) - 1
        if number < 0 or address + size > self.starts[number] + len(self.views[number]):
            near = f"; the buffer below has {len(self.views[number])} bytes" if number >= 0 else ""
            past = f", byte {address - self.starts[number]} of it" if number >= 0 else ""
            raise FaultError("out_of_bounds", f"global: {size} bytes at {address:#x}{near}{past}", lane)
        if write and not self.views[number].flags.writeable:
            raise FaultError("read_only", f"global: writes {size} bytes at {address:#x}", lane)
        return self.views[number], self.starts[number]

    def _groups(self, addresses: np.ndarray, size: int, write: bool) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(view, lanes, byte indices [lanes, size]) for each buffer that the lanes touch."""
        check_alignment(addresses, size)
        groups, left = [], np.arange(len(addresses))
        while len(left):
            view, start = self._find(int(addresses[left[0]]), size, write, int(left[0]))
            offsets = (addresses[left] - np.uint64(start)).astype(np.int64)
            inside = (offsets >= 0) & (offsets <= len(view) - size)
            groups.append((view, left[inside], offsets[inside][:, None] + INDEX[size]))
            left = left[~inside]
        return groups

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Bytes [lanes, size]."""
        out = np.empty((len(addresses), size), np.uint8)
        for view, lanes, index in self._groups(addresses, size, write=False):
            out[lanes] = view[index]
        return out

    def store(self, addresses: np.ndarray, data: np.ndarray) -> None:
        """Write bytes [lanes, size]; of lanes that write the same byte, the last wins (PTX leaves open which)."""
        for view, lanes, index in self._groups(addresses, data.shape[1], write=True):
            view[index] = data[lanes]

    def range(self, address: int, size: int) -> np.ndarray:
        """A copy of consecutive bytes."""
        view, start = self._find(address, size, False, None)
        return view[address - start : address - start + size].copy()


class Clocks:
    """Vector clocks of agents: row a of `seen` says up to which epoch of each agent a has synchronised."""

    def __init__(self, warps: int) -> None:
        self.seen = np.zeros((warps, warps), np.int32)
        self.agents = warps
        for warp in range(warps):
            self.seen[warp, warp] = 1

    def add_agent(self) -> int:
        """A further agent, of which nobody has seen anything; it has no row of its own."""
        self.seen = np.pad(self.seen, ((0, 0), (0, 1)))
        self.agents += 1
        return self.agents - 1

    def padded(self, clock: np.ndarray) -> np.ndarray:
        """A clock taken earlier, with zeros for the agents that came since."""
        return np.pad(clock, (0, self.agents - len(clock)))

    def release(self, warp: int) -> np.ndarray:
        """What the warp has seen and done so far; what it does from now on is later."""
        clock = self.seen[warp].copy()
        self.seen[warp, warp] += 1
        return clock

    def acquire(self, warp: int, clock: np.ndarray) -> None:
        np.maximum(self.seen[warp], self.padded(clock), out=self.seen[warp])


class SharedMemory:
    """The shared memory of one CTA.

    Args:
        size: bytes, from SHARED_BASE on.
        clocks: of the CTA.
    """

    def __init__(self, size: int, clocks: Clocks) -> None:
        self.data = np.zeros(size, np.uint8)
        self.written = np.zeros(size, bool)
        self.clocks = clocks
        self.writer = np.zeros(size, np.int16)
        self.write_epoch = np.zeros(size, np.int32)
        self.write_line = np.zeros(size, np.int32)
        self.read_epoch = np.zeros((clocks.agents, size), np.int32)
        self.objects: set[int] = set()  # addresses of live mbarriers

    def offsets(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Checked byte offsets of the accesses."""
        check_alignment(addresses, size)
        offsets = addresses.astype(np.int64) - SHARED_BASE
        bad = (offsets < 0) | (offsets > len(self.data) - size)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            where = f"{size} bytes at {int(addresses[i]):#x}, beyond {len(self.data)} from {SHARED_BASE:#x} on"
            raise FaultError("out_of_bounds", f"shared: {where}", i)
        return offsets

    def _fault(self, kind: str, bad: np.ndarray, index: np.ndarray, detail: str) -> FaultError:
        at = tuple(np.argwhere(bad)[0])
        byte = int(index[at])
        last = f", last written at line {self.write_line[byte]}" if self.written[byte] else ""
        lane = int(at[0]) if index.ndim == 2 else None
        return FaultError(kind, f"shared byte {byte + SHARED_BASE:#x} {detail}{last}", lane)

    def check_read(self, index: np.ndarray, seen: np.ndarray) -> None:
        """Refuse to read what was written by an agent that the reader has not synchronised with."""
        bad = self.write_epoch[index] > seen[self.writer[index]]
        if bad.any():
            raise self._fault("race", bad, index, "is read while another agent's write is not ordered before")

    def check_write(self, index: np.ndarray, seen: np.ndarray) -> None:
        """Refuse to write what another agent wrote or read without being ordered before."""
        bad = self.write_epoch[index] > seen[self.writer[index]]
        if bad.any():
            raise self._fault("race", bad, index, "is written while another agent's write is not ordered before")
        for warp, epochs in enumerate(self.read_epoch):
            bad = epochs[index] > seen[warp]
            if bad.any():
                raise self._fault("race", bad, index, f"is written while a read by warp {warp} is not ordered before")

    def load(self, addresses: np.ndarray, size: int, warp: int) -> np.ndarray:
        """Bytes [lanes, size]."""
        index = self.offsets(addresses, size)[:, None] + INDEX[size]
        seen = self.clocks.seen[warp]
        self.check_read(index, seen)
        known = self.written[index]
        if not known.all():
            raise self._fault("uninitialised", ~known, index, "is read before it was written")
        self.read_epoch[warp][index] = seen[warp]
        return self.data[index]

    def store(self, addresses: np.ndarray, data: np.ndarray, warp: int, line: int) -> None:
        """Write bytes [lanes, size]; lanes that write one byte must agree on it."""
        index = self.offsets(addresses, data.shape[1])[:, None] + INDEX[data.shape[1]]
        seen = self.clocks.seen[warp]
        self.check_write(index, seen)
        self.mark(index, data, warp, int(seen[warp]), line)
        clash = self.data[index] != data
        if clash.any():
            raise self._fault("race", clash, index, "gets different values from two lanes of one store")

    def mark(self, index: np.ndarray, data: np.ndarray, agent: int, epoch: int, line: int) -> None:
        """Write bytes at checked offsets as an agent."""
        for address in self.objects:
            if ((index >= address - SHARED_BASE) & (index < address - SHARED_BASE + 8)).any():
                raise FaultError("mbarrier", f"writes over the mbarrier at {address:#x}")
        self.data[index] = data
        self.written[index] = True
        self.writer[index] = agent
        self.write_epoch[index] = epoch
        self.write_line[index] = line
