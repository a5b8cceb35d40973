"""Address spaces: host buffers as global memory, the cells of shared and tensor memory, and who touched what.

Accesses check bounds and alignment (PTX ISA, "Addresses as Operands": a vector access is aligned to its whole size) and
are ordered by happens-before (PTX ISA, "Memory Consistency Model", "Causality order") with vector clocks. An agent is a
warp of the cluster, the asynchronous side of an mbarrier, or one of a warp's streams of asynchronous work; the lanes of
a warp count as one. A warp's clock has a row for each thing that it may have been told:

    GENERIC  what it comes after, for ordinary accesses
    ASYNC    the part of it that a proxy fence has shown to the asynchronous proxy ("Async proxy")
    BEFORE   the part that a tcgen05.fence::before_thread_sync, or a commit, has put in front of a synchronisation
    TENSOR   the part of BEFORE that the warp took up by tcgen05.fence::after_thread_sync ("tcgen05.fence"), and what a
             commit has told it through an mbarrier
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.ptx.trouble import FaultError

# Not 0, so that a null pointer is out of bounds; the hardware keeps the first 1024 bytes to itself. Bits 24 and up are
# the CTA's rank in its cluster, so that an address of shared::cta is also one of shared::cluster.
SHARED_BASE, RANK_SHIFT = 1024, 24
# Generic addresses ("Generic Addressing"): global ones are the host's, other spaces get windows beyond them.
SHARED_WINDOW, PARAM_WINDOW = 1 << 56, 2 << 56
GENERIC, ASYNC, BEFORE, TENSOR = range(4)
ALWAYS = np.iinfo(np.int32).max
INDEX = {size: np.arange(size, dtype=np.int64) for size in (1, 2, 4, 8, 16, 32)}
LANES, COLUMNS = 128, 512  # of tensor memory
MAX_OBJECTS = 256  # mbarriers of a cluster


def check_alignment(addresses: np.ndarray, size: int) -> None:
    """Refuse addresses that are no multiple of the access size, a power of two."""
    low = addresses & addresses.dtype.type(size - 1)
    if low.any():
        i = int(np.flatnonzero(low)[0])
        raise FaultError("misaligned", f"{size} bytes at {int(addresses[i]):#x}", i)


@dataclass(slots=True)
class Access:
    """Who touches memory.

    Args:
        agent, epoch, line: which agent, at which of its epochs, for which instruction.
        writes, reads: up to which epoch of each agent it comes after their writes, and after their reads.
        cluster: number of the cluster.
        strong: whether it is atomic or ordered, so that others of that kind do not race with it.
    """

    agent: int
    epoch: int
    line: int
    writes: np.ndarray
    reads: np.ndarray
    cluster: int
    strong: bool = False


class Clocks:
    """Vector clocks: `state[warp, row]` says up to which epoch of each agent the warp has synchronised."""

    def __init__(self, warps: int) -> None:
        self.agents = warps
        self.state = np.zeros((warps, 4, 8 * warps + MAX_OBJECTS), np.int32)
        self.state[range(warps), GENERIC, range(warps)] = 1

    def add_agent(self) -> int:
        """A further agent, of which nobody has seen anything; it has no rows of its own."""
        if self.agents == self.state.shape[2]:
            raise FaultError("unmodelled", f"more than {MAX_OBJECTS} mbarriers")
        self.agents += 1
        return self.agents - 1

    def zero(self) -> np.ndarray:
        return np.zeros(self.state.shape[1:], np.int32)

    def release(self, warp: int) -> np.ndarray:
        """What the warp has seen and done so far; what it does from now on is later."""
        clock = self.state[warp].copy()
        clock[TENSOR] = 0  # others need a fence of their own
        self.state[warp, GENERIC, warp] += 1
        return clock

    def acquire(self, warp: int, clock: np.ndarray) -> None:
        np.maximum(self.state[warp], clock, out=self.state[warp])


class GlobalMemory:
    """Host arrays at their own addresses; an array that is not writeable is read-only to the kernel too.

    For each byte, the last write and the last reads by two agents are kept. Clusters are ordered only by strong
    accesses: one that ever acquired something is not checked against the others from then on.
    """

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
        # [write, read, earlier read by another agent][cluster, agent, epoch, strong]
        self.touched = [np.full((3, 4, len(view)), -1, np.int32) for view in self.views]
        self.trusted: set[int] = set()
        self.published: dict[int, tuple[int, np.ndarray]] = {}  # by address: by whom, and what

    def _find(self, address: int, size: int, write: bool, lane: int | None) -> int:
        """Number of the buffer that holds `size` bytes at an address."""
        number = bisect.bisect_right(self.starts, address) - 1
        if number < 0 or address + size > self.starts[number] + len(self.views[number]):
            near = f", byte {address - self.starts[number]} of {len(self.views[number])}" if number >= 0 else ""
            raise FaultError("out_of_bounds", f"global: {size} bytes at {address:#x}{near}", lane)
        if write and not self.views[number].flags.writeable:
            raise FaultError("read_only", f"global: writes {size} bytes at {address:#x}", lane)
        return number

    def _groups(self, addresses: np.ndarray, size: int, write: bool) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """(buffer, lanes, byte indices [lanes, size]) for each buffer that the lanes touch."""
        check_alignment(addresses, size)
        groups, left = [], np.arange(len(addresses))
        while len(left):
            number = self._find(int(addresses[left[0]]), size, write, int(left[0]))
            offsets = (addresses[left] - np.uint64(self.starts[number])).astype(np.int64)
            inside = (offsets >= 0) & (offsets <= len(self.views[number]) - size)
            groups.append((number, left[inside], offsets[inside][:, None] + INDEX[size]))
            left = left[~inside]
        return groups

    def _order(self, number: int, index: np.ndarray, access: Access, write: bool) -> None:
        """Refuse an access that is not ordered behind an earlier one to the same bytes, and keep it."""
        touched = self.touched[number]
        earlier = ((access.writes, "write"), (access.reads, "read"), (access.reads, "read"))
        for kind, (seen, what) in enumerate(earlier[: 3 if write else 1]):
            cluster, agent, epoch, strong = touched[kind][:, index]
            bad = epoch > seen[np.where(cluster == access.cluster, agent, 0)]
            bad = np.where(cluster == access.cluster, bad, (cluster >= 0) & (access.cluster not in self.trusted))
            if access.strong:
                bad &= strong != 1
            if bad.any():
                at = tuple(np.argwhere(bad)[0])
                who = f"agent {agent[at]} of cluster {cluster[at]}"
                detail = f"byte {int(index[at])} of a buffer, after a {what} by {who} that is not ordered before"
                raise FaultError("race", f"global: {detail}", int(at[0]) if index.ndim == 2 else None)
        entry = np.array([access.cluster, access.agent, access.epoch, access.strong], np.int32)
        entry = entry.reshape(4, *(1,) * index.ndim)
        if not write:
            last = touched[1][:, index]
            touched[2][:, index] = np.where((last[:2] != entry[:2]).any(0), last, touched[2][:, index])
        touched[0 if write else 1][:, index] = entry

    def load(self, addresses: np.ndarray, size: int, access: Access) -> np.ndarray:
        """Bytes [lanes, size]."""
        out = np.empty((len(addresses), size), np.uint8)
        for number, lanes, index in self._groups(addresses, size, write=False):
            self._order(number, index, access, write=False)
            out[lanes] = self.views[number][index]
        return out

    def store(self, addresses: np.ndarray, data: np.ndarray, access: Access) -> None:
        """Write bytes [lanes, size]; of lanes that write the same byte, the last wins (PTX leaves open which)."""
        for number, lanes, index in self._groups(addresses, data.shape[1], write=True):
            self._order(number, index, access, write=True)
            self.views[number][index] = data[lanes]

    def range(self, address: int, size: int, access: Access | None = None, data: np.ndarray | None = None) -> Any:
        """Consecutive bytes, after `data` was put there if given; without an access only the bounds are checked."""
        number = self._find(address, size, data is not None, None)
        index = address - self.starts[number] + np.arange(size)
        if access is not None:
            self._order(number, index, access, write=data is not None)
        if data is not None:
            self.views[number][index] = data
        return self.views[number][index]


class Cells:
    """Memory of which each cell knows whether it was written, by whom, and who read it."""

    def __init__(self, name: str, count: int, dtype: Any) -> None:
        self.name, self.data, self.written = name, np.zeros(count, dtype), np.zeros(count, bool)
        self.writer, self.strong = np.zeros(count, np.int16), np.zeros(count, bool)
        self.write_epoch, self.write_line = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self.read_epoch: dict[tuple[int, bool], np.ndarray] = {}  # by agent, and whether the reads are strong

    def place(self, cell: int) -> str:
        return f"{self.name} byte {cell + SHARED_BASE:#x}"

    def fault(self, kind: str, bad: np.ndarray, index: np.ndarray, detail: str) -> FaultError:
        at = tuple(np.argwhere(bad)[0])
        cell = int(index[at])
        last = f", last written at line {self.write_line[cell]}" if self.written[cell] else ""
        lane = int(at[0]) if index.ndim == 2 and len(index) <= 32 else None
        return FaultError(kind, f"{self.place(cell)} {detail}{last}", lane)

    def check_read(self, index: np.ndarray, access: Access, what: str = "read") -> None:
        """Refuse to read what another agent wrote without being ordered, and as the proxy needs it, before."""
        bad = self.write_epoch[index] > access.writes[self.writer[index]]
        if access.strong:
            bad &= ~self.strong[index]
        if bad.any():
            raise self.fault("race", bad, index, f"is {what} while another agent's write is not ordered before")

    def check_write(self, index: np.ndarray, access: Access) -> None:
        """Refuse to write what another agent wrote or read without being ordered before."""
        self.check_read(index, access, "written")
        for (agent, strong), epochs in self.read_epoch.items():
            bad = epochs[index] > access.reads[agent]
            if bad.any() and not (strong and access.strong):
                raise self.fault("race", bad, index, f"is written while a read by agent {agent} is not ordered before")

    def mark_read(self, index: np.ndarray, access: Access) -> None:
        key = (access.agent, access.strong)
        if key not in self.read_epoch:
            self.read_epoch[key] = np.zeros(len(self.data), np.int32)
        self.read_epoch[key][index] = access.epoch

    def read(self, index: np.ndarray, access: Access) -> np.ndarray:
        """Values of cells, all of which must have been written."""
        self.check_read(index, access)
        known = self.written[index]
        if not known.all():
            raise self.fault("uninitialised", ~known, index, "is read before it was written")
        self.mark_read(index, access)
        return self.data[index]

    def write(self, index: np.ndarray, data: Any, access: Access) -> None:
        self.check_write(index, access)
        self.data[index] = data
        self.written[index] = True
        self.writer[index], self.write_epoch[index] = access.agent, access.epoch
        self.write_line[index], self.strong[index] = access.line, access.strong


class SharedMemory(Cells):
    """The shared memory of one CTA, `size` bytes from SHARED_BASE on in the window of its rank."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__("shared", size, np.uint8)
        self.base = SHARED_BASE + (rank << RANK_SHIFT)
        self.objects: set[int] = set()  # offsets of live mbarriers
        self.published: dict[int, tuple[int, np.ndarray]] = {}

    def offsets(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Checked byte offsets of the accesses."""
        check_alignment(addresses, size)
        offsets = addresses.astype(np.int64) - self.base
        bad = (offsets < 0) | (offsets > len(self.data) - size)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            where = f"{size} bytes at {int(addresses[i]):#x}, beyond {len(self.data)} from {self.base:#x} on"
            raise FaultError("out_of_bounds", f"shared: {where}", i)
        return offsets

    def range(self, address: int, size: int, access: Any = None, data: Any = None) -> Any:
        """Consecutive bytes, or `data` is put there; without an access only the bounds are checked."""
        index = self.places(address, size)
        if data is not None:
            self.write(index, data, access)
        return self.read(index, access) if access and data is None else None

    def places(self, address: int, size: int) -> np.ndarray:
        """Checked byte offsets of consecutive bytes."""
        if not self.base <= address <= self.base + len(self.data) - size:
            raise FaultError("out_of_bounds", f"shared: {size} bytes at {address:#x}")
        return address - self.base + np.arange(size)

    def load(self, addresses: np.ndarray, size: int, access: Access) -> np.ndarray:
        """Bytes [lanes, size]."""
        return self.read(self.offsets(addresses, size)[:, None] + INDEX[size], access)

    def store(self, addresses: np.ndarray, data: np.ndarray, access: Access) -> None:
        """Write bytes [lanes, size]; lanes that write one byte must agree on it."""
        index = self.offsets(addresses, data.shape[1])[:, None] + INDEX[data.shape[1]]
        self.write(index, data, access)
        clash = self.data[index] != data
        if clash.any():
            raise self.fault("race", clash, index, "gets different values from two lanes of one store")

    def write(self, index: np.ndarray, data: Any, access: Access) -> None:
        for place in self.objects:
            if ((index >= place) & (index < place + 8)).any():
                raise FaultError("mbarrier", f"writes over the mbarrier at {place + self.base:#x}")
        super().write(index, data, access)


class TensorMemory(Cells):
    """A CTA's tensor memory: 128 lanes of 512 columns of 32 bits, of which it owns what it allocates."""

    def __init__(self) -> None:
        super().__init__("tensor memory", LANES * COLUMNS, np.uint32)
        self.owned: dict[int, int] = {}  # first column of an allocation: how many
        self.relinquished = False

    def place(self, cell: int) -> str:
        return f"{self.name} lane {cell // COLUMNS} column {cell % COLUMNS}"

    def cells(self, lane: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Cell numbers of lanes and columns, broadcast; both must exist, and the columns be allocated."""
        low, high = int(column.min()), int(column.max())
        inside = any(first <= low and high < first + count for first, count in self.owned.items())
        if not inside or lane.min() < 0 or lane.max() >= LANES:
            where = f"lanes {lane.min()} to {lane.max()}, columns {low} to {high}; allocated: {self.owned or 'nothing'}"
            raise FaultError("out_of_bounds", f"tensor memory: {where}")
        return lane * COLUMNS + column
