"""What a benchmark times, how many bytes each case must move, and the goals; no tensors, no clock.

For each layer, checkpoint dtype and batch:

* nonflush: no row folds, each holds as many records as a step finds on average (8 for a window of 16);
* flush: every row folds a full window, then decodes its token;
* mixed: the rows stand evenly spread over the window, as in a server that has run for a while (from 32 rows on);
* plain: window 1, so every step reads the state and writes it: what decoding without replay moves, by the same kernel;
* nonflush_z: as nonflush, with the output gate (Mamba-2, largest batch only);
* average: (15 nonflush + 1 flush) / 16 at a window of 16, derived, and how many times faster than plain that is;
* read: as many bytes as nonflush moves, read by the probe: the floor at a small batch, where the launch weighs more
  than the bytes.

Besides, `what` may be commit (cursors of a whole batch), host (one eager call), first_call_cold or
first_call_from_disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from replayssm.plan import dtype_name
from replayssm.pool import RingLayout
from replayssm.spec import Recurrence, ReplaySpec
from tuning.roofline import Rates, mean_live_records, step_traffic, window_average_us, window_steps
from tuning.shapes import ModelShape

STEPS = ("nonflush", "flush", "mixed", "plain", "nonflush_z")
BATCHES = (1, 8, 32, 64, 128, 256)
MIXED_FROM_ROWS = 32
DEFAULT_MODEL = "nemotron-3-super"
# By recurrence, name and shards of what a full run times; models of one layer shape stand here once.
ALL_MODELS: dict[Recurrence, tuple[tuple[str, int], ...]] = {
    "mamba2": (
        *((DEFAULT_MODEL, tp) for tp in (1, 2, 4, 8)),
        ("nemotron-3-nano-4b", 1),
        ("nemotron-3-nano-30b", 1),
        ("nemotron-3-ultra", 1),
    ),
    "gdn": (
        *(("qwen3.5-122b-a10b", tp) for tp in (1, 2, 4, 8)),
        ("qwen3.5-27b", 1),
        ("qwen3.5-4b", 1),  # and 35b-a3b
    ),
    "kda": (("glm-5.3-flash", 1), ("kimi-k3", 1), ("kimi-k3", 8), ("kimi-linear-48b-a3b", 1)),
}


@dataclass(frozen=True)
class Goal:
    """What an entry is to reach: at most `us` microseconds, `ratio` times its limit; at least `speedup`."""

    us: float | None = None
    ratio: float | None = None
    speedup: float | None = None

    def met_by(self, entry: Mapping[str, Any]) -> bool:
        """Whether a measured entry reaches all of the goal."""
        return (
            (self.us is None or entry["median_us"] <= self.us)
            and (self.ratio is None or entry["ratio"] <= self.ratio)
            and (self.speedup is None or entry.get("speedup", 0.0) >= self.speedup)
        )


# H200, bf16 activations, window 16: (layer, checkpoint dtype, rows, what).
GOALS: dict[tuple[str, str, int, str], Goal] = {
    (DEFAULT_MODEL, "float32", 256, "nonflush"): Goal(us=252, ratio=1.02),
    (DEFAULT_MODEL, "float32", 256, "flush"): Goal(us=560),
    (DEFAULT_MODEL, "float32", 256, "average"): Goal(us=272, speedup=2.06),
    (DEFAULT_MODEL, "bfloat16", 256, "nonflush"): Goal(us=135),
    (DEFAULT_MODEL, "float16", 256, "nonflush"): Goal(us=135),
    (DEFAULT_MODEL, "float32", 1, "nonflush"): Goal(us=6.5),
    (DEFAULT_MODEL, "float32", 8, "nonflush"): Goal(us=13.5),
    (DEFAULT_MODEL, "float32", 32, "nonflush"): Goal(us=36),
    (DEFAULT_MODEL, "bfloat16", 1, "nonflush"): Goal(us=6.2),
    (DEFAULT_MODEL, "bfloat16", 8, "nonflush"): Goal(us=10.2),
    (DEFAULT_MODEL, "bfloat16", 32, "nonflush"): Goal(us=22.5),
    (DEFAULT_MODEL, "float32", 1, "host"): Goal(us=10),
    (DEFAULT_MODEL, "bfloat16", 1, "host"): Goal(us=10),
    (DEFAULT_MODEL, "float16", 1, "host"): Goal(us=10),
    (DEFAULT_MODEL, "float32", 8, "first_call_cold"): Goal(us=1e6),
    (DEFAULT_MODEL, "float32", 8, "first_call_from_disk"): Goal(us=5e4),
    ("qwen3.5-122b-a10b", "float32", 256, "nonflush"): Goal(us=257, ratio=1.03),
    ("qwen3.5-122b-a10b", "float32", 256, "flush"): Goal(us=570),
    ("qwen3.5-122b-a10b", "float32", 256, "average"): Goal(us=277),
    ("qwen3.5-122b-a10b", "bfloat16", 256, "nonflush"): Goal(ratio=1.05),
    ("qwen3.5-122b-a10b", "float32", 1, "nonflush"): Goal(us=7),
    ("qwen3.5-122b-a10b", "float32", 32, "nonflush"): Goal(us=37),
    ("glm-5.3-flash", "float32", 256, "nonflush"): Goal(ratio=1.05),
    ("kimi-k3@tp8", "float32", 256, "nonflush"): Goal(ratio=1.08),
    ("kimi-k3@tp8", "float32", 1, "nonflush"): Goal(us=6.5),
}


@dataclass(frozen=True)
class Options:
    """What to benchmark and for how long."""

    shapes: tuple[ModelShape, ...]
    batches: tuple[int, ...] = BATCHES
    checkpoints: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    activation: torch.dtype = torch.bfloat16
    window: int = 16
    ring_layout: RingLayout | None = None  # None: the layer's own
    rounds: int = 30
    time_limit_s: float | None = None
    first_call: bool = True


@dataclass(frozen=True)
class Subject:
    """What an entry of the record is about: a layer, how it is replayed, rows of the batch, and what was timed."""

    shape: ModelShape
    replay: ReplaySpec
    rows: int
    what: str


class StepCase(Subject):
    """One step to time; pure facts, no tensors. `what` is one of `STEPS`."""

    @property
    def live_records(self) -> tuple[int, ...]:
        """Records that each row holds when the step starts."""
        steps = window_steps(self.replay)
        if self.what == "mixed":
            return tuple(steps[i % len(steps)][0] for i in range(self.rows))
        if self.what in ("flush", "plain"):
            return (steps[-1][0],) * self.rows
        return (round(mean_live_records(self.replay)),) * self.rows

    def _parts(self, rates: Rates) -> list[tuple[int, float]]:
        """Bytes and least time of the rows that hold equally many records."""
        parts = []
        for live, rows in Counter(self.live_records).items():
            traffic = step_traffic(
                self.shape.layer,
                self.replay,
                rows=rows,
                live_records=live,
                folds=live + 1 > self.replay.window,
                has_z=self.what == "nonflush_z",
                gate_dtype=self.replay.activation_dtype,
            )
            parts.append((traffic.total_bytes, rates.limit_us(traffic)))
        return parts

    @property
    def num_bytes(self) -> int:
        """Bytes that the step must move (`tuning.roofline`)."""
        return sum(num_bytes for num_bytes, _ in self._parts(Rates(1.0, 1.0)))

    def limit_us(self, rates: Rates) -> float:
        """The least time of the step."""
        return sum(limit for _, limit in self._parts(rates))


@dataclass(frozen=True)
class Group:
    """The cases of one layer and one checkpoint dtype, which share their pools."""

    shape: ModelShape
    replay: ReplaySpec
    plain: ReplaySpec
    batches: tuple[tuple[StepCase, ...], ...]


def plan(options: Options) -> tuple[Group, ...]:
    """Everything that `run` will time, in its order."""
    groups = []
    for shape in options.shapes:
        for checkpoint in options.checkpoints:
            replay = ReplaySpec(options.window, 1, checkpoint, options.activation)
            plain = replace(replay, window=1, ring_capacity=0)
            batches = tuple(
                tuple(
                    StepCase(shape, plain if what == "plain" else replay, rows, what)
                    for what in _whats(options, rows, shape.layer.recurrence)
                )
                for rows in options.batches
            )
            groups.append(Group(shape, replay, plain, batches))
    return tuple(groups)


def _whats(options: Options, rows: int, recurrence: Recurrence) -> tuple[str, ...]:
    if options.window == 1:
        return ("plain",)
    whats: tuple[str, ...] = ("nonflush", "flush", "plain")
    if rows >= MIXED_FROM_ROWS:
        whats = (*whats, "mixed")
    if rows == max(options.batches) and recurrence == "mamba2":
        whats = (*whats, "nonflush_z")
    return whats


def goal_of(subject: Subject, device: str | None) -> Goal | None:
    """The goal of an entry, None where none is set: goals hold for single layers on one device."""
    replay = subject.replay
    fits = replay.window == 16 and replay.activation_dtype == torch.bfloat16 and device is not None and "H200" in device
    key = (subject.shape.name, dtype_name(replay.checkpoint_dtype), subject.rows, subject.what)
    return GOALS.get(key) if fits else None


def entry_of(
    subject: Subject,
    measured: Mapping[str, Any],
    *,
    device: str | None,
    num_bytes: int | None = None,
    limit_us: float | None = None,
) -> dict[str, Any]:
    """One entry of the record, with its ratio to the limit and, where a goal is set, whether it is met.

    Args:
        subject: what was measured.
        measured: `median_us` and the like.
        device: name of the GPU.
        num_bytes, limit_us: what must move, and the least time for it; None where that means nothing.
    """
    entry: dict[str, Any] = {
        **facts_of(subject),
        "status": "measured",
        "bytes": num_bytes,
        "limit_us": limit_us,
        **measured,
    }
    if limit_us:
        entry["ratio"] = entry["median_us"] / limit_us
    goal = goal_of(subject, device)
    if goal is not None:
        entry["goal"] = {name: value for name, value in asdict(goal).items() if value is not None}
        entry["goal_met"] = goal.met_by(entry)
    return entry


def facts_of(subject: Subject) -> dict[str, Any]:
    """The part of an entry that says what it is about."""
    return {
        "layer": {"name": subject.shape.name, **asdict(subject.shape.layer)},
        "replay": {
            "window": subject.replay.window,
            "checkpoint": dtype_name(subject.replay.checkpoint_dtype),
            "activation": dtype_name(subject.replay.activation_dtype),
        },
        "rows": subject.rows,
        "num_tokens": 1,
        "what": subject.what,
    }


def average_entry(
    entries: Mapping[str, Mapping[str, Any]], cases: Mapping[str, StepCase], rates: Rates, *, device: str | None
) -> dict[str, Any] | None:
    """The derived entry of one batch: mean step over a window and its speedup over the plain step.

    Args:
        entries, cases: by what was measured; None is returned unless nonflush and flush both were, and there is no
            speedup unless plain was.
    """
    if not {"nonflush", "flush"} <= set(entries):
        return None
    case = cases["nonflush"]
    median = window_average_us(
        case.replay, nonflush_us=entries["nonflush"]["median_us"], flush_us=entries["flush"]["median_us"]
    )
    limits = {what: cases[what].limit_us(rates) for what in ("nonflush", "flush")}
    limit = window_average_us(case.replay, nonflush_us=limits["nonflush"], flush_us=limits["flush"])
    steps = len(window_steps(case.replay))
    num_bytes = ((steps - 1) * cases["nonflush"].num_bytes + cases["flush"].num_bytes) // steps
    measured: dict[str, Any] = {"median_us": median, "derived": True}
    if "plain" in entries:
        measured["speedup"] = entries["plain"]["median_us"] / median
    subject = Subject(case.shape, case.replay, case.rows, "average")
    return entry_of(subject, measured, device=device, num_bytes=num_bytes, limit_us=limit)


def exit_code(entries: Sequence[Mapping[str, Any]]) -> int:
    """1 where a gate or a process failed, else 0: a goal that is missed, or work left out for time, is a result."""
    return int(any(entry["status"] in ("gate failed", "failed") for entry in entries))
