"""How kernels are timed.

Protocol, for every number that this package reports:

1. A correctness gate runs before any timing. Where it fails there is no time to report.
2. Each candidate is captured in a CUDA graph of one launch, so host time is not in the figure. The floor (an empty
   kernel) is reported beside it, not subtracted.
3. Before each replay the L2 is filled by a pass that only *reads* 512 MB. A pass that writes leaves dirty lines, whose
   write-back is charged to the kernel: 8 to 25 us more at batch 256 on an H200 (2026-11-29).
4. Events around the replay give one sample. Candidates are interleaved, round robin, starting with another one each
   round: a drift of clocks or temperature meets all of them. The first rounds are dropped.
5. Reported are the median and the 10th and 90th percentiles.
   Whether the fill empties the L2 also of lines that were stored with evict_last, which give way last, is itself
   measured: `Probes.after_rewrite` against `Probes.cold`. Were the first shorter, folds would be timed part warm.
6. Rates of pure reads and of rewrites in place are probed in the same run (`probe`), and times are quoted against
   them: two machines of one kind differ by 1 to 2 %.

Host time (`host_time`) is wall clock over bursts of calls without a sync, at a batch so small that the GPU keeps up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tuning.roofline import Rates

FILL_BYTES = 512 * 10**6
DEFAULT_ROUNDS = 30
WARMUP_ROUNDS = 3
RESIDUE_BYTES = 32 << 20  # about half of an H200's L2
PROTOCOL = (
    "median of events around one CUDA-graph replay; before each a pass that reads 512 MB; candidates interleaved "
    "round robin; correctness gate before timing; probes of the read and read-write rate in the same run"
)

Launch = Callable[[], object]


class GateFailedError(Exception):
    """A kernel's result is wrong, so it has no time. The message says what differs and by how much."""


@dataclass(frozen=True)
class Timing:
    """Statistics of the samples of one candidate, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int


class Timer(Protocol):
    """What takes the samples; `GraphTimer` on a GPU."""

    def capture(self, launch: Launch) -> Any:
        """Prepare one candidate."""

    def sample(self, captured: Sequence[Any]) -> list[float]:
        """Run each in order and return its time in microseconds."""


def percentile(samples: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the samples lie, interpolated between neighbours.

    Raises:
        ValueError: no samples, or a fraction outside 0 to 1.
    """
    if not samples or not 0 <= fraction <= 1:
        raise ValueError(f"percentile: expected samples and a fraction of 0 to 1, got {len(samples)} and {fraction}")
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    between = ordered[below] + (position - below) * (ordered[above] - ordered[below])
    return min(between, ordered[above])  # rounding may pass it by one unit in the last place


def summarize(samples: Sequence[float]) -> Timing:
    """Median and spread of samples in microseconds."""
    return Timing(
        median_us=percentile(samples, 0.5),
        p10_us=percentile(samples, 0.1),
        p90_us=percentile(samples, 0.9),
        samples=len(samples),
    )


def round_robin(names: Sequence[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """The order of the candidates in each round; round r starts with candidate r modulo their number."""
    for r in range(rounds):
        start = r % len(names) if names else 0
        yield (*names[start:], *names[:start])


def failed_gates(gates: Mapping[str, Callable[[], None]]) -> dict[str, str]:
    """Run every gate; what the failing ones say, by candidate."""
    failed = {}
    for name, gate in gates.items():
        try:
            gate()
        except GateFailedError as error:
            failed[name] = str(error)
    return failed


def measure(
    candidates: Mapping[str, Launch],
    *,
    timer: Timer,
    rounds: int = DEFAULT_ROUNDS,
    warmup: int = WARMUP_ROUNDS,
    gates: Mapping[str, Callable[[], None]] | None = None,
) -> dict[str, Timing]:
    """Time callables against each other by the protocol of this module.

    Args:
        candidates: each launches its kernel once, on torch's current stream, and can be captured in a graph.
        timer: takes the samples.
        rounds: samples of each candidate.
        warmup: rounds that run first and do not count.
        gates: checks by candidate; all run before the first sample. A candidate without one is not checked.

    Raises:
        GateFailedError: a gate refused; nothing was timed.
        ValueError: a gate names no candidate, or no round is asked for.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected 1 or more, got {rounds}")
    unknown = sorted(set(gates or {}) - set(candidates))
    if unknown:
        raise ValueError(f"gates: expected names of candidates {sorted(candidates)}, got {unknown}")
    failed = failed_gates(gates or {})
    if failed:
        raise GateFailedError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    captured = {name: timer.capture(launch) for name, launch in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for index, order in enumerate(round_robin(list(candidates), warmup + rounds)):
        times = timer.sample([captured[name] for name in order])
        if index >= warmup:
            for name, time_us in zip(order, times, strict=True):
                samples[name].append(time_us)
    return {name: summarize(values) for name, values in samples.items()}


def host_time(
    call: Launch,
    *,
    synchronize: Callable[[], object],
    calls: int = 200,
    bursts: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Host microseconds of one call: bursts of `calls` without a sync between them, a sync between bursts.

    Caller must choose work that the GPU finishes faster than the host issues it; else the full launch queue is
    measured.
    """
    samples = []
    for _ in range(bursts + 1):
        synchronize()
        start = clock()
        for _ in range(calls):
            call()
        samples.append((clock() - start) * 1e6 / calls)
    synchronize()
    return summarize(samples[1:])


class GraphTimer:
    """Samples on the current CUDA device; holds the 512 MB that fill the L2."""

    def __init__(self) -> None:
        # Random, so that no compression of memory shortens the pass.
        self._filler = torch.randn(FILL_BYTES // 4, device="cuda")
        self._total = torch.empty((), device="cuda")
        self._stream = torch.cuda.Stream()

    def capture(self, launch: Launch) -> torch.cuda.CUDAGraph:
        """Launch once to compile and load, then capture one launch."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            launch()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        return graph

    def sample(self, captured: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
        """Times of one replay of each graph, with the L2 filled before it."""
        pairs = []
        for graph in captured:
            torch.sum(self._filler, dim=(0,), out=self._total)
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e3 for start, stop in pairs]


@dataclass(frozen=True)
class Probes:
    """Limits of the device as measured.

    Args:
        num_bytes: bytes that `read` reads and `rewrite` rewrites in place.
        empty: a kernel that does nothing.
        after_rewrite: a read of `RESIDUE_BYTES` that were rewritten, with evict_last stores, before the fill.
        cold: a read of as many that were not.
    """

    num_bytes: int
    read: Timing
    rewrite: Timing
    empty: Timing
    after_rewrite: Timing
    cold: Timing

    @property
    def rates(self) -> Rates:
        """Bytes a microsecond; a rewrite moves every byte twice."""
        return Rates(read=self.num_bytes / self.read.median_us, read_write=2 * self.num_bytes / self.rewrite.median_us)


def probe(words: Tensor, *, timer: Timer, arch: str, rounds: int = DEFAULT_ROUNDS) -> Probes:
    """Probe the memory rates over all of `words`, which are rewritten.

    Args:
        words: [n] uint32 on the GPU, 1 GiB for the rates that are quoted.
        arch: the GPU's architecture, e.g. "sm_90a".
    """
    from cute_kernels import probes

    small = RESIDUE_BYTES // 4
    if words.numel() < 2 * small:
        raise ValueError(f"words: expected {2 * small} or more, got {words.numel()}")
    first, last = words[:small], words[-small:]
    limits: dict[str, Launch] = {
        "read": lambda: probes.launch_read(words, arch),
        "rewrite": lambda: probes.launch_rewrite(words, arch),
        "empty": lambda: probes.launch_empty(words, arch),
    }
    residue: dict[str, Launch] = {
        "touch": lambda: probes.launch_rewrite(first, arch),
        "after_rewrite": lambda: probes.launch_read(first, arch),
        "cold": lambda: probes.launch_read(last, arch),
    }
    timings = measure(limits, timer=timer, rounds=rounds, gates={"read": lambda: _check_probes(words, arch)})
    timings |= measure(residue, timer=timer, rounds=rounds)
    del timings["touch"]
    num_bytes = words.numel() // probes.TILE_WORDS * probes.TILE_BYTES
    return Probes(num_bytes=num_bytes, **timings)


def _check_probes(words: Tensor, arch: str) -> None:
    """A probe that skips memory would report a limit that no kernel reaches: see that every word is visited."""
    from cute_kernels import probes

    whole = words[: words.numel() // probes.TILE_WORDS * probes.TILE_WORDS].view(torch.int32)
    before = whole.clone()
    probes.launch_rewrite(words, arch)
    changed = torch.equal(whole, before ^ 1)
    probes.launch_read(words, arch)
    probes.launch_rewrite(words, arch)
    if not changed or not torch.equal(whole, before):
        raise GateFailedError("probes: expected a rewrite to flip the lowest bit of every word, and a read to keep all")
