"""The choice of the window L, from measured steps: time for each token that stays, memory of a request, slowest step.

A longer window folds less often; it takes more memory and more records to read. How the rows' folds lie in time matters
as much, and a batch has one of two habits:

* together: its rows were admitted in one step, keep as many tokens as each other, and fold in one step. Its mean time
  is the mean over a walk through the window, and its slowest step is one in which every row folds.
* staggered: rows stand anywhere in the window, so that each step folds a few of them. All steps take about as long,
  and that is what `mixed` of a benchmark measures: folding rows that get in the others' way cost more there than their
  share of a step in which all fold.

Rows that keep a random number of tokens stagger by themselves within some steps (`folding_after`). With one token a row
they keep the habit that they were admitted with: an engine that wants them staggered folds row i early, once, with
`force_fold` (`stagger`); one that wants the least mean time and can bear the slowest step admits them together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from replayssm.pool import bytes_per_slot
from replayssm.spec import LayerSpec, ReplaySpec
from tuning.acceptance import Position, fold_share, positions
from tuning.matrix import replay_of, state_name
from tuning.roofline import Rates, step_traffic

Habit = Literal["together", "staggered"]
RARE = 1e-3  # share of the steps that may be slower than the slowest one that is told of staggered rows


@dataclass(frozen=True)
class Cost:
    """Measured times of the steps of one layer and batch at one window, in microseconds.

    Args:
        layer, replay: of the step; `replay.max_draft` is its number of tokens.
        rows: of the batch.
        nonflush_us, nonflush_records: no row folds, and how many records each holds.
        flush_us: every row folds a full window.
        mixed_us: rows stand anywhere in the window; None where that was not measured.
        read_record_us, fold_record_us: of one record more in every row that reads or folds.
    """

    layer: LayerSpec
    replay: ReplaySpec
    rows: int
    nonflush_us: float
    nonflush_records: float
    flush_us: float
    mixed_us: float | None = None
    read_record_us: float = 0.0
    fold_record_us: float = 0.0

    def step_us(self, records: float, folds: bool) -> float:
        """A step in which every row holds so many records and does the same."""
        if folds:
            return self.flush_us - (self.replay.window - records) * self.fold_record_us
        return self.nonflush_us + (records - self.nonflush_records) * self.read_record_us

    @property
    def request_bytes(self) -> int:
        """State and ring of a request in this layer."""
        return sum(bytes_per_slot(self.layer, replace(self.replay, ring_capacity=0)).values())


@dataclass(frozen=True)
class Trade:
    """What one window costs.

    Args:
        window: L.
        habit: of the batch.
        us_per_token: of a step for each token that stays in a row.
        mean_us, slowest_us: of a step; all but one in a thousand are no slower.
        request_bytes: of one layer.
        fold_share: of the rows that fold in a step, in the long run.
    """

    window: int
    habit: Habit
    us_per_token: float
    mean_us: float
    slowest_us: float
    request_bytes: int
    fold_share: float


def trade(cost: Cost, accepted: Sequence[float], habit: Habit = "staggered") -> Trade:
    """What a window costs where 0, 1, .. T of T tokens stay with the probabilities `accepted`.

    Without a measured `mixed_us` a staggered step takes what its rows would on average, which is too little where rows
    that fold hold up the others.

    Raises:
        ValueError: `accepted` has other tokens than the step, or is none (`tuning.acceptance.positions`).
    """
    if len(accepted) - 1 != cost.replay.max_draft:
        raise ValueError(
            f"accepted: expected probabilities of 0 to {cost.replay.max_draft} tokens, got {len(accepted)}"
        )
    places = positions(cost.replay.window, accepted)
    share, mean = fold_share(places), _mean_us(cost, places)
    slowest = cost.flush_us
    if habit == "staggered":
        reads, folds = (_mean_us(cost, [p for p in places if p.folds is kind]) for kind in (False, True))
        mean = cost.mixed_us if cost.mixed_us is not None else mean
        more = _rarely_above(cost.rows, share) / cost.rows - share  # rows beyond the usual that fold
        slowest = min(cost.flush_us, mean + more * (folds - reads)) if share < 1 else mean
    kept = sum(number * probability for number, probability in enumerate(accepted))
    return Trade(cost.replay.window, habit, mean / kept, mean, slowest, cost.request_bytes, share)


def _mean_us(cost: Cost, places: Sequence[Position]) -> float:
    total = sum(place.share for place in places)
    return sum(place.share * cost.step_us(place.records, place.folds) for place in places) / total if total else 0.0


def _rarely_above(rows: int, share: float) -> int:
    """The least number of rows, each of which folds with the chance `share`, that more than `RARE` of the steps do not
    exceed."""
    if share >= 1:
        return rows
    below, log_ratio = 0.0, math.log(share) - math.log1p(-share)
    log_chance = rows * math.log1p(-share)
    for count in range(rows + 1):
        below += math.exp(log_chance)
        if below >= 1 - RARE:
            return count
        log_chance += math.log((rows - count) / (count + 1)) + log_ratio
    return rows


def choose(trades: Iterable[Trade], *, budget_bytes: float = math.inf, slowest_us: float = math.inf) -> Trade:
    """The least time a token within the limits; of equals the one with less memory.

    Args:
        budget_bytes: of one layer of a request.
        slowest_us: that a step may take.

    Raises:
        ValueError: no window is within the limits; the message says what the most modest one needs.
    """
    offered = list(trades)
    fitting = [one for one in offered if one.request_bytes <= budget_bytes and one.slowest_us <= slowest_us]
    if fitting:
        return min(fitting, key=lambda one: (one.us_per_token, one.request_bytes))
    if not offered:
        raise ValueError("window: expected the times of at least one window, got none; benchmark some")
    raise ValueError(
        f"window: expected one of at most {budget_bytes:g} bytes a request and layer, and {slowest_us:g} us a step; "
        f"the least of those measured are {min(one.request_bytes for one in offered)} bytes and "
        f"{min(one.slowest_us for one in offered):.1f} us"
    )


def folding_after(window: int, accepted: Sequence[float]) -> Iterator[float]:
    """The share of rows that fold in each step, of rows that all start without records; it tends to `fold_share`, or
    comes back for ever where all rows keep as many tokens.

    Args:
        accepted: the probabilities that 0, 1, .. T tokens stay.
    """
    positions(window, accepted)  # refuses what is no acceptance
    num_tokens = len(accepted) - 1
    rows = [1.0] + [0.0] * window  # by records
    while True:
        folds = sum(rows[window - num_tokens + 1 :])
        yield folds
        reading = rows[: window - num_tokens + 1]
        reading[0] += folds
        rows = [0.0] * (window + 1)
        for records, share in enumerate(reading):
            for kept, probability in enumerate(accepted):
                rows[records + kept] += share * probability


def staggers_within(
    window: int, accepted: Sequence[float], *, tolerance: float = 0.1, horizon: int = 1024
) -> int | None:
    """Steps after which no step folds more than `tolerance` beyond the usual share of rows that started together; None
    where that is not within `horizon`: such rows stay together."""
    usual = fold_share(positions(window, accepted))
    steps = folding_after(window, accepted)
    above = [number for number in range(horizon) if next(steps) > usual * (1 + tolerance)]
    last = above[-1] + 1 if above else 0
    return last if last < horizon - window else None


def stagger(rows: int, window: int) -> tuple[int, ...]:
    """For each row of one token a step the step, counted from their admission together, in which to force a fold once:
    from then on at most `ceil(rows / window)` rows fold in a step, by themselves. Step 0 finds no records and needs no
    force."""
    return tuple(row * window // rows for row in range(rows))


def advice(cost: Cost, accepted: Sequence[float]) -> str:
    """What an engine should do about rows that are admitted together, with the times that speak for it."""
    within = staggers_within(cost.replay.window, accepted)
    together, staggered = (trade(cost, accepted, habit) for habit in ("together", "staggered"))
    if together.fold_share == 1:
        return "every step folds every row: nothing to stagger"
    if within is None:
        return (
            f"rows admitted together stay together: {together.mean_us:.1f} us a step on average, "
            f"{together.slowest_us:.1f} when they fold; where the longest step matters more than the mean, force one "
            f"fold a row early to stagger them: {staggered.mean_us:.1f} us a step, seldom above "
            f"{staggered.slowest_us:.1f}"
        )
    places = positions(cost.replay.window, accepted)
    reads, folds = (_mean_us(cost, [p for p in places if p.folds is kind]) for kind in (False, True))
    peak = max(islice(folding_after(cost.replay.window, accepted), within + 1))
    return (
        f"rows admitted together stagger by themselves within {within} steps, of which the longest folds {peak:.0%} of "
        f"them and takes about {reads + peak * (folds - reads):.1f} us; nothing to do"
    )


def costs_of(entries: Iterable[Mapping[str, Any]], rates: Rates) -> dict[tuple[Any, ...], Cost]:
    """The costs in the entries of a benchmark's record, by layer name, state, rows, T and window.

    Args:
        rates: probed in the same run.
    """
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for entry in entries:
        if "layer" in entry and entry["status"] == "measured" and entry["what"] in ("nonflush", "flush", "mixed"):
            replay = replay_of(entry)
            head = (entry["layer"]["name"], state_name(replay), entry["rows"], entry["num_tokens"], replay.window)
            found.setdefault(head, {})[entry["what"]] = entry
    return {head: _cost(steps, rates) for head, steps in found.items() if {"nonflush", "flush"} <= steps.keys()}


def _cost(steps: Mapping[str, Mapping[str, Any]], rates: Rates) -> Cost:
    entry = steps["nonflush"]
    layer = LayerSpec(**{name: value for name, value in entry["layer"].items() if name != "name"})
    replay = replay_of(entry)
    record_bytes = step_traffic(layer, replay, rows=entry["rows"], live_records=1).records_bytes
    return Cost(
        layer,
        replay,
        entry["rows"],
        nonflush_us=entry["median_us"],
        nonflush_records=entry["records"] if "records" in entry else replay.window // 2,
        flush_us=steps["flush"]["median_us"],
        mixed_us=steps["mixed"]["median_us"] if "mixed" in steps else None,
        read_record_us=record_bytes / rates.read,
        fold_record_us=record_bytes / rates.read_write,
    )
