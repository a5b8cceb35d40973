"""A race finds the fastest candidate in few samples, keeps the incumbent within the noise, and never runs a wrong one.

Times are synthetic: known medians with seeded noise, outliers, a drift of the clock that would fool whoever is sampled
later, and differences too small to see. Over 200 seeds the share of wrong verdicts is held to what the confidence
of the bounds allows.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tuning.measure import GateFailedError
from tuning.search import FIRST_DROP, NoCandidateError, Outcome, bounds, is_noisy, race, refusals


class Clock:
    """Times of candidates with 1 % noise, one sample in 20 three times as long, and a drift per sample taken."""

    def __init__(self, medians: dict[str, float], seed: int = 0, drift: float = 0.0) -> None:
        self.medians, self.drift, self.taken = medians, drift, Counter[str]()
        self.draw = random.Random(seed)

    def __call__(self, order: Sequence[str]) -> list[float]:
        times = []
        for name in order:
            slower = 1 + self.drift * self.taken.total()
            self.taken[name] += 1
            outlier = 3.0 if self.draw.random() < 0.05 else 1.0
            times.append(self.medians[name] * slower * outlier * self.draw.gauss(1.0, 0.01))
        return times


MEDIANS = {"heuristic": 10.0, "faster": 9.5, "slow": 12.0, "slowest": 30.0}


def test_the_fastest_wins_and_the_slow_drop_out_early() -> None:
    clock = Clock(MEDIANS)
    result = race(tuple(MEDIANS), clock)
    assert result.winner == "faster"
    assert result.runner_up == "heuristic"
    assert result.timing.median_us == pytest.approx(9.5, rel=0.01)
    assert clock.taken["slowest"] == clock.taken["slow"] == 3 + FIRST_DROP
    assert {name: outcome.status for name, outcome in result.outcomes.items()} == {
        "heuristic": "dropped", "faster": "finished", "slow": "dropped", "slowest": "dropped",
    }  # fmt: skip
    assert "that of faster below" in result.outcomes["slowest"].reason
    assert list(result.outcomes) == list(MEDIANS)


@pytest.mark.parametrize("drift", [0.0, 0.0002])
def test_verdicts_over_many_seeds(drift: float) -> None:
    """A difference of 5 % is always seen; one of 0.1 % seldom moves the incumbent, in 40 samples of 1 % noise."""
    seen = Counter(race(tuple(MEDIANS), Clock(MEDIANS, seed, drift)).winner for seed in range(200))
    assert seen == {"faster": 200}
    close = {"heuristic": 10.0, "other": 9.99}
    kept = Counter(race(tuple(close), Clock(close, seed, drift)).winner for seed in range(200))
    assert kept["heuristic"] >= 180
    ahead = {"heuristic": 10.0, "other": 10.01}
    assert Counter(race(tuple(ahead), Clock(ahead, seed)).winner for seed in range(200))["heuristic"] >= 190


def test_a_race_is_over_when_one_is_left_or_the_rounds_are() -> None:
    clock = Clock({"a": 1.0, "b": 2.0})
    race(("a", "b"), clock, rounds=100)
    assert 3 + FIRST_DROP <= clock.taken["a"] == clock.taken["b"] < 20  # more than the least where outliers came first
    clock = Clock({"a": 1.0, "b": 1.0})
    race(("a", "b"), clock, rounds=20, warmup=0)
    assert clock.taken == {"a": 20, "b": 20}
    clock = Clock({"a": 1.0})
    assert race(("a",), clock).runner_up is None
    assert clock.taken["a"] == 3 + FIRST_DROP


def test_few_rounds_decide_nothing_against_the_incumbent() -> None:
    result = race(("heuristic", "faster"), Clock(MEDIANS), rounds=FIRST_DROP - 1)
    assert result.winner == "heuristic"
    assert race(("heuristic", "faster"), Clock(MEDIANS), rounds=40).winner == "faster"


def test_every_round_samples_each_once_and_starts_with_another() -> None:
    orders = []

    def sample(order: Sequence[str]) -> list[float]:
        orders.append(tuple(order))
        return [1.0] * len(order)

    race(("a", "b", "c"), sample, rounds=4, warmup=1)
    assert orders == [("a", "b", "c"), ("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]


def test_bounds_by_hand() -> None:
    """Of 8 samples all lie on one side of the median in 2 of 256 cases, and 7 of 8 in 16 more."""
    assert bounds(range(7)) == (float("-inf"), float("inf"))
    assert bounds(range(8)) == (0, 7)
    assert bounds(range(8), confidence=1 - 18 / 256) == (1, 6)
    assert bounds(range(8), confidence=1 - 17 / 256) == (0, 7)
    draw = random.Random(0)
    inside = sum(low <= 0.5 <= high for low, high in (bounds([draw.random() for _ in range(20)]) for _ in range(2000)))
    assert inside / 2000 > 0.99


def test_a_wrong_candidate_is_never_sampled() -> None:
    """Not even where it is the fastest, or the incumbent; nor one that does not compile."""

    def wrong() -> None:
        raise GateFailedError("output: expected 1, got 2")

    def broken() -> None:
        raise RuntimeError("ptxas")

    checks = {"heuristic": wrong, "faster": lambda: None, "slow": broken, "slowest": lambda: None}
    refused = refusals(checks)
    clock = Clock(MEDIANS)
    result = race(tuple(MEDIANS), clock, refused=refused)
    assert clock.taken.keys() == {"faster", "slowest"}
    assert result.winner == "faster"
    assert result.outcomes["heuristic"] == Outcome("refused", reason="gate failed: output: expected 1, got 2")
    assert result.outcomes["slow"] == Outcome("refused", reason="RuntimeError: ptxas")
    with pytest.raises(NoCandidateError, match="a: gate failed: x; b: y"):
        race(("a", "b"), clock, refused={"a": "gate failed: x", "b": "y"})


def test_a_wide_spread_is_told() -> None:
    assert not is_noisy(10.0, 9.6, 10.4)
    assert is_noisy(10.0, 9.4, 10.6)
    assert not is_noisy(10.0, None, None)
