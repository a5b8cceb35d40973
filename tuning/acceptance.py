"""How many of a step's tokens stay, and with how many records the rows of a server that runs for long then stand.

The records of a row walk by the cursor rule: a step of T tokens that finds n records folds them if n + T exceeds the
window, and leaves (0 if it folded, else n) + the number accepted. Behind a fold the walk starts anew, whatever came
before, so how often a row stands at n follows exactly from one such cycle (`positions`).
"""

from __future__ import annotations

import functools
import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

BISECTIONS = 60


@functools.cache
def acceptance(num_tokens: int, mean: float) -> tuple[float, ...]:
    """The probability that 0, 1, .. T of T tokens stay, with `mean` of them on average.

    The first token is no draft and always stays. Each draft behind it is as likely to be right as the others, and the
    first wrong one ends the row, so the mean is 1 + p + .. + p**(T - 1) with p the chance of a draft.

    Raises:
        ValueError: the mean is not 1 to `num_tokens`.
    """
    if not 1 <= mean <= num_tokens:
        raise ValueError(f"accepted: expected a mean of 1 to {num_tokens} tokens, got {mean:g}")
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        chance = (low + high) / 2
        if sum(chance**i for i in range(num_tokens)) < mean:
            low = chance
        else:
            high = chance
    chance = 0.0 if mean == 1 else 1.0 if mean == num_tokens else high
    return (0.0, *(chance ** (a - 1) * (1 - chance) for a in range(1, num_tokens)), chance ** (num_tokens - 1))


@dataclass(frozen=True)
class Position:
    """Where a row may stand when a step begins.

    Args:
        records: that it holds.
        folds: whether the step folds them.
        share: of all steps, in the long run.
    """

    records: int
    folds: bool
    share: float


def positions(window: int, accepted: Sequence[float]) -> tuple[Position, ...]:
    """Every position in which a step finds a row in the long run, fewest records first.

    With a window of 16 and one token that always stays: 1 to 16 records, a sixteenth of the steps each, of which the
    last folds. With a window of 1 every step folds one record: the plain recurrence.

    Args:
        window: L; a row folds at more than L - T records.
        accepted: the probabilities that 0, 1, .. T tokens stay.

    Raises:
        ValueError: these are no probabilities, nothing is ever accepted, or T exceeds the window.
    """
    num_tokens = len(accepted) - 1
    if not 1 <= num_tokens <= window:
        raise ValueError(
            f"accepted: expected probabilities of 0 to T tokens, T 1 to window={window}, got T={num_tokens}"
        )
    if min(accepted) < 0 or not math.isclose(sum(accepted), 1) or accepted[0] >= 1:
        raise ValueError(f"accepted: expected probabilities that sum to 1, not all of 0 tokens, got {accepted}")
    visits: list[float] = []  # to each number of records, from one fold to the next
    for records in range(window + 1):
        came = accepted[records] if records <= num_tokens else 0.0
        for before in range(max(0, records - num_tokens), min(records, window - num_tokens + 1)):
            came += visits[before] * accepted[records - before]
        reads = records + num_tokens <= window
        visits.append(came / (1 - accepted[0]) if reads else came)
    total = sum(visits)
    return tuple(
        Position(records, records + num_tokens > window, count / total) for records, count in enumerate(visits) if count
    )


def fold_share(places: Sequence[Position]) -> float:
    """The share of steps in which a row folds, or of rows that fold in a step where each row folds by itself."""
    return sum(place.share for place in places if place.folds)


def spread(places: Sequence[Position], rows: int) -> tuple[int, ...]:
    """Records of so many rows, as near to the shares as whole rows come, in an order that is random but always the
    same: rows that fold stand anywhere in a batch."""
    bounds = list(accumulate(place.share for place in places))
    last = len(places) - 1
    chosen = [places[min(bisect_left(bounds, (i + 0.5) / rows), last)].records for i in range(rows)]
    random.Random(0).shuffle(chosen)
    return tuple(chosen)
