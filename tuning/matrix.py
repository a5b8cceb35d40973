"""What a benchmark times, how many bytes each case must move, and the goals; no tensors, no clock.

For each layer, checkpoint dtype, window, number of tokens T a row and batch:

* nonflush: no row folds; each holds half a window of records with one token (8 for a window of 16), and `RECORDS` with
  several, or as many as a step of T tokens still reads;
* flush: every row folds a full window, then decodes its tokens;
* mixed: the rows stand as in a server that has run for a while (`tuning.acceptance`, from 32 rows on), so a step has
  rows that read beside rows that fold; with one token evenly over the window;
* plain: without a copy and with a window of T, so that every step reads the state, folds what the last one kept, and
  writes it: with one token what decoding without replay moves, with several what folding at each commit does, by the
  same kernel;
* nonflush_z: as nonflush, with the output gate (Mamba-2, largest batch only);
* average: of a step in the long run, derived: (1 - f) nonflush + f flush where rows fold by themselves and a share f of
  them does, each of the two brought to the records that rows then hold, by the least time of their bytes. A batch
  takes longer where rows that fold and rows that read get in each other's way: that is what mixed measures. (15
  nonflush + 1 flush) / 16 for one token and a window of 16. Also how many times faster than plain, and the time for
  each token that stays;
* read: as many bytes as nonflush moves, read by the probe: the floor at a small batch, where the launch weighs more
  than the bytes.

A window of T has only plain. Besides, `what` may be commit (cursors of a whole batch), host (one eager call),
first_call_cold or first_call_from_disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch

from replayssm.keys import dtype_name, dtype_of
from replayssm.pool import RingLayout
from replayssm.spec import ReadDtype, Recurrence, ReplaySpec
from tuning.acceptance import Position, acceptance, fold_share, positions, spread
from tuning.goals import DEFAULT_MODEL, DRAFT_GOALS, GOALS, READ_GOALS, Goal
from tuning.roofline import Rates, Traffic, step_traffic
from tuning.shapes import ModelShape

STEPS = ("nonflush", "flush", "mixed", "plain", "nonflush_z")
BATCHES = (1, 8, 32, 64, 128, 256)
MIXED_FROM_ROWS = 32
RECORDS = 8
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
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
class Options:
    """What to benchmark and for how long.

    Args:
        reads: copies that steps read, None for the checkpoint itself.
        decay: dtype of decays by channel.
        windows, tokens: each window with each T that fits into it.
        accepted: tokens of a step that stay on average; half of T, at least 1, when None.
        ring_layout: the layer's own when None.
    """

    shapes: tuple[ModelShape, ...]
    batches: tuple[int, ...] = BATCHES
    checkpoints: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    activation: torch.dtype = torch.bfloat16
    reads: tuple[ReadDtype | None, ...] = (None,)
    decay: torch.dtype = torch.float32
    windows: tuple[int, ...] = (16,)
    tokens: tuple[int, ...] = (1,)
    accepted: float | None = None
    ring_layout: RingLayout | None = None
    rounds: int = 30
    time_limit_s: float | None = None
    first_call: bool = True


@dataclass(frozen=True)
class Subject:
    """What an entry of the record is about.

    Args:
        shape: the layer.
        replay: how it is replayed; a step has `max_draft` tokens a row.
        rows: of the batch.
        what: was timed.
        accepted: tokens of a step that stay on average.
    """

    shape: ModelShape
    replay: ReplaySpec
    rows: int
    what: str
    accepted: float = 1.0

    @property
    def num_tokens(self) -> int:
        """T, the tokens of a step."""
        return self.replay.max_draft


class StepCase(Subject):
    """One step to time; pure facts, no tensors. `what` is one of `STEPS`."""

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where rows stand in the long run."""
        return positions(self.replay.window, acceptance(self.num_tokens, self.accepted))

    @property
    def live_records(self) -> tuple[int, ...]:
        """Records that each row holds when the step starts."""
        window, num_tokens = self.replay.window, self.num_tokens
        if self.what in ("mixed", "plain"):
            return spread(self.positions, self.rows)
        if self.what == "flush":
            return (window,) * self.rows
        return (window // 2 if num_tokens == 1 else min(RECORDS, window - num_tokens),) * self.rows

    def traffic(self, records: int, rows: int) -> Traffic:
        """Bytes of so many rows that hold so many records."""
        return step_traffic(
            self.shape.layer,
            self.replay,
            rows=rows,
            live_records=records,
            num_tokens=self.num_tokens,
            folds=records + self.num_tokens > self.replay.window,
            has_z=self.what == "nonflush_z",
            gate_dtype=self.replay.activation_dtype,
        )

    @property
    def _parts(self) -> list[Traffic]:
        """By the records that rows hold."""
        return [self.traffic(records, rows) for records, rows in Counter(self.live_records).items()]

    @property
    def num_bytes(self) -> int:
        """Bytes that the step must move (`tuning.roofline`)."""
        return sum(part.total_bytes for part in self._parts)

    def limit_us(self, rates: Rates) -> float:
        """The least time of the step."""
        return sum(map(rates.limit_us, self._parts))


@dataclass(frozen=True)
class Group:
    """The cases of one layer, checkpoint dtype, window and T, which share their pools."""

    shape: ModelShape
    replay: ReplaySpec
    plain: ReplaySpec
    batches: tuple[tuple[StepCase, ...], ...]


def plan(options: Options) -> tuple[Group, ...]:
    """Everything that `run` will time, in its order.

    Raises:
        ValueError: no T fits into any window, or fewer tokens are stepped than `options.accepted`.
        NotImplementedError: a copy has as many bits as the checkpoint.
    """
    pairs = [(window, tokens) for tokens in options.tokens for window in options.windows if tokens <= window]
    if not pairs:
        raise ValueError(f"tokens: expected some that fit into a window of {options.windows}, got {options.tokens}")
    groups = []
    for shape, checkpoint, read in product(options.shapes, options.checkpoints, options.reads):
        decay = options.decay if shape.layer.decays_per_channel else torch.float32
        for window, tokens in pairs:
            replay = ReplaySpec(window, tokens, checkpoint, options.activation, decay_dtype=decay, read_dtype=read)
            groups.append(_group(options, shape, replay))
    return tuple(groups)


def _group(options: Options, shape: ModelShape, replay: ReplaySpec) -> Group:
    tokens = replay.max_draft
    accepted = max(1.0, tokens / 2) if options.accepted is None else options.accepted
    acceptance(tokens, accepted)  # refuses a mean that cannot be
    plain = replace(replay, window=tokens, ring_capacity=0, read_dtype=None)
    batches = tuple(
        tuple(
            StepCase(shape, plain if what == "plain" else replay, rows, what, accepted)
            for what in _whats(options, replay, rows, shape.layer.recurrence)
        )
        for rows in options.batches
    )
    return Group(shape, replay, plain, batches)


def _whats(options: Options, replay: ReplaySpec, rows: int, recurrence: Recurrence) -> tuple[str, ...]:
    if replay.window == replay.max_draft:
        return ("plain",)
    whats: tuple[str, ...] = ("nonflush", "flush", "plain")
    if rows >= MIXED_FROM_ROWS:
        whats = (*whats, "mixed")
    if rows == max(options.batches) and recurrence == "mamba2":
        whats = (*whats, "nonflush_z")
    return whats


def goal_of(subject: Subject, device: str | None) -> Goal | None:
    """The goal of an entry, None where none is set: goals hold for single layers on one device."""
    replay, tokens = subject.replay, subject.replay.max_draft
    if device is None or "H200" not in device or replay.activation_dtype != torch.bfloat16:
        return None
    if replay.read_dtype is not None:
        if replay.checkpoint_dtype != torch.float32 or (replay.window != 16 and subject.what != "average"):
            return None
        read = dtype_name(replay.read_dtype)
        return READ_GOALS.get((subject.shape.name, read, subject.rows, tokens, subject.what))
    layer = (subject.shape.name, dtype_name(replay.checkpoint_dtype), subject.rows)
    if tokens == 1:
        return GOALS.get((*layer, subject.what)) if replay.window == 16 else None
    reads_all = subject.what == "nonflush" and replay.window >= RECORDS + tokens
    return DRAFT_GOALS.get((*layer, tokens)) if reads_all else None


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


def state_name(replay: ReplaySpec) -> str:
    """Dtypes of the state, of its copy and, of decays by channel, of these if they are not float32: "fp32+nvfp4"."""
    names = [dtype_name(dtype) for dtype in (replay.checkpoint_dtype, replay.read_dtype) if dtype is not None]
    state = "+".join(_SHORT.get(name, name) for name in names)
    decay = dtype_name(replay.decay_dtype)
    return state if decay == "float32" else f"{state}, {_SHORT[decay]} decays"


def replay_of(entry: Mapping[str, Any]) -> ReplaySpec:
    """What an entry says of how its layer was replayed."""
    facts, names = entry["replay"], {"checkpoint": "checkpoint_dtype", "activation": "activation_dtype"}
    names |= {"read": "read_dtype", "decay": "decay_dtype"}
    dtypes: dict[str, Any] = {name: dtype_of(facts[fact]) for fact, name in names.items() if fact in facts}
    return ReplaySpec(facts["window"], entry["num_tokens"], **dtypes)


def facts_of(subject: Subject) -> dict[str, Any]:
    """The part of an entry that says what it is about."""
    facts: dict[str, Any] = {
        "layer": {"name": subject.shape.name, **asdict(subject.shape.layer)},
        "replay": {
            "window": subject.replay.window,
            "checkpoint": dtype_name(subject.replay.checkpoint_dtype),
            "activation": dtype_name(subject.replay.activation_dtype),
        },
        "rows": subject.rows,
        "num_tokens": subject.num_tokens,
        "what": subject.what,
    }
    replay = subject.replay
    if replay.read_dtype is not None:
        facts["replay"] |= {"read": dtype_name(replay.read_dtype)}
    if replay.decay_dtype != torch.float32:
        facts["replay"] |= {"decay": dtype_name(replay.decay_dtype)}
    if subject.num_tokens > 1:
        facts["accepted"] = subject.accepted
    if isinstance(subject, StepCase):
        facts["records"] = sum(subject.live_records) / subject.rows
    return facts


def average_entry(
    entries: Mapping[str, Mapping[str, Any]], cases: Mapping[str, StepCase], rates: Rates, *, device: str | None
) -> dict[str, Any] | None:
    """The derived entry of one batch: mean step in the long run and its speedup over the plain step.

    Args:
        entries, cases: by what was measured; None is returned unless nonflush and flush both were, and there is no
            speedup unless plain was.
    """
    if not {"nonflush", "flush"} <= set(entries):
        return None
    case = cases["nonflush"]
    beyond = {what: entries[what]["median_us"] - cases[what].limit_us(rates) for what in ("nonflush", "flush")}
    median = limit = num_bytes = 0.0
    for place in case.positions:
        traffic = case.traffic(place.records, case.rows)
        median += place.share * (beyond["flush" if place.folds else "nonflush"] + rates.limit_us(traffic))
        limit += place.share * rates.limit_us(traffic)
        num_bytes += place.share * traffic.total_bytes
    measured: dict[str, Any] = {
        "median_us": median,
        "derived": True,
        "fold_share": fold_share(case.positions),
        "us_per_token": median / case.accepted,
    }
    if "plain" in entries:
        measured["speedup"] = entries["plain"]["median_us"] / median
    subject = Subject(case.shape, case.replay, case.rows, "average", case.accepted)
    return entry_of(subject, measured, device=device, num_bytes=round(num_bytes), limit_us=limit)


def exit_code(entries: Sequence[Mapping[str, Any]]) -> int:
    """1 where a gate or a process failed, else 0: a goal that is missed, or work left out for time, is a result."""
    return int(any(entry["status"] in ("gate failed", "failed") for entry in entries))
