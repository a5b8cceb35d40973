"""Finds the fastest of some candidates in few samples: a race by rounds, in which the clearly slower ones drop out.

A candidate that cannot be made or fails its correctness gate never starts. In each round every candidate that is left
is sampled once, another one first each time, so that a drift meets all of them. From `FIRST_DROP` rounds on a candidate
drops out when the lower confidence bound of its median lies above the upper bound of the best one's. The
bounds are order statistics: they hold for any distribution of noise, and one outlier moves none of them far.

The first candidate is the incumbent. Another wins only if it is clearly faster, by the same bounds: within the noise a
result does not flip from one run to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tuning.measure import GateFailedError, Timing, percentile, round_robin, summarize

CONFIDENCE = 0.99
FIRST_DROP = 8  # with fewer samples not even the least and the largest one bound the median with this confidence
DEFAULT_ROUNDS = 40
WIDE_SPREAD = 0.1
Sample = Callable[[Sequence[str]], Sequence[float]]
Status = Literal["finished", "dropped", "refused"]


class NoCandidateError(Exception):
    """Every candidate was refused; the message says why each."""


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate.

    Args:
        status: timed to the end, dropped from the race, or refused before it.
        timing: None where it was refused.
        reason: why it was refused, or dropped.
    """

    status: Status
    timing: Timing | None = None
    reason: str = ""


@dataclass(frozen=True)
class Result:
    """A race that is over.

    Args:
        outcomes: by candidate, in the order given.
        winner: its name.
    """

    outcomes: Mapping[str, Outcome]
    winner: str

    @property
    def timing(self) -> Timing:
        """Of the winner."""
        timing = self.outcomes[self.winner].timing
        assert timing is not None
        return timing

    @property
    def medians_us(self) -> dict[str, float]:
        """Of those that were timed: to the end, or until they dropped out."""
        return {name: one.timing.median_us for name, one in self.outcomes.items() if one.timing is not None}

    @property
    def runner_up(self) -> str | None:
        """The next best by median, dropped ones among them."""
        others = {name: median for name, median in self.medians_us.items() if name != self.winner}
        return min(others, key=lambda name: others[name]) if others else None


def is_noisy(median_us: float, p10_us: float | None, p90_us: float | None) -> bool:
    """Whether samples spread so wide that something else must use the device."""
    return p10_us is not None and p90_us is not None and p90_us - p10_us > WIDE_SPREAD * median_us


def bounds(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Between which the median lies with so much confidence, by order statistics; infinite if samples are too few."""
    ordered, count = sorted(samples), len(samples)
    outside = 0.0  # the chance that the median lies outside the k-th sample of either end
    best = None
    for k in range(count // 2):
        outside += 2 * math.comb(count, k) / 2**count
        if outside > 1 - confidence:
            break
        best = k
    return (-math.inf, math.inf) if best is None else (ordered[best], ordered[count - 1 - best])


def refusals(checks: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Make and check every candidate; what was wrong with those that cannot run or whose result is wrong."""
    refused = {}
    for name, check in checks.items():
        try:
            check()
        except GateFailedError as error:
            refused[name] = f"gate failed: {error}"
        except Exception as error:  # whatever a compiler or a launch raises, the other candidates go on
            refused[name] = f"{type(error).__name__}: {error}"
    return refused


def race(
    names: Sequence[str],
    sample: Sample,
    *,
    refused: Mapping[str, str] | None = None,
    rounds: int = DEFAULT_ROUNDS,
    warmup: int = 3,
) -> Result:
    """Sample candidates until one is left or the rounds are over.

    Args:
        names: of the candidates, the incumbent first.
        sample: one time of each of some candidates, in microseconds, in their order.
        refused: candidates that must not run, with the reason (`refusals`).
        rounds: at most so many samples of each; a winner that is alone early is sampled `FIRST_DROP` times.
        warmup: rounds that run first and do not count.

    Raises:
        NoCandidateError: all are refused.
    """
    refused = refused or {}
    left = [name for name in names if name not in refused]
    if not left:
        raise NoCandidateError("; ".join(f"{name}: {refused[name]}" for name in names) or "there was no candidate")
    samples: dict[str, list[float]] = {name: [] for name in left}
    dropped: dict[str, str] = {}
    for order in round_robin(left, warmup):
        sample(order)
    for number in range(rounds):
        start = number % len(left)
        order = (*left[start:], *left[:start])
        for name, time_us in zip(order, sample(order), strict=True):
            samples[name].append(time_us)
        if number + 1 >= FIRST_DROP:
            dropped |= _behind({name: samples[name] for name in left})
            left = [name for name in left if name not in dropped]
            if len(left) == 1:
                break
    outcomes = {}
    for name in names:
        if name in refused:
            outcomes[name] = Outcome("refused", reason=refused[name])
        else:
            status: Status = "dropped" if name in dropped else "finished"
            outcomes[name] = Outcome(status, summarize(samples[name]), dropped.get(name, ""))
    best = min(left, key=lambda name: percentile(samples[name], 0.5))
    return Result(outcomes, names[0] if names[0] in left else best)


def _behind(samples: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Candidates that are clearly slower than the best one, with the bounds that say so."""
    best = min(samples, key=lambda name: percentile(samples[name], 0.5))
    _, upper = bounds(samples[best])
    lowers = {name: bounds(values)[0] for name, values in samples.items()}
    return {
        name: f"median above {lower:.2f} us, that of {best} below {upper:.2f} us, after {len(samples[name])} rounds"
        for name, lower in lowers.items()
        if lower > upper
    }
