"""Statistics, order and gates of the timing protocol, with a scripted timer in place of a GPU.

The claim that matters most is that a red gate leaves no time: no sample may be taken before every gate has passed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.measure import (
    GateFailedError,
    Probes,
    Timing,
    failed_gates,
    host_time,
    measure,
    percentile,
    round_robin,
    summarize,
)


class ScriptedTimer:
    """Gives each candidate's times in turn and remembers the order in which they ran."""

    def __init__(self, times: dict[str, list[float]]) -> None:
        self._times = {name: iter(values) for name, values in times.items()}
        self.order: list[str] = []

    def capture(self, launch):
        return launch()

    def sample(self, captured: Sequence[str]) -> list[float]:
        self.order += captured
        return [next(self._times[name]) for name in captured]


def scripted(**times: list[float]):
    return {name: (lambda name=name: name) for name in times}, ScriptedTimer(times)


def refuse() -> None:
    raise GateFailedError("output: expected 1, got 2")


def test_percentiles_of_known_samples() -> None:
    samples = [50.0, 10.0, 40.0, 20.0, 30.0]
    assert [percentile(samples, f) for f in (0, 0.1, 0.5, 0.9, 1)] == pytest.approx([10, 14, 30, 46, 50])
    assert percentile([7.0], 0.9) == 7.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_summary_is_ordered_and_within_the_samples(samples: list[float]) -> None:
    timing = summarize(samples)
    assert min(samples) <= timing.p10_us <= timing.median_us <= timing.p90_us <= max(samples)
    assert timing.samples == len(samples)


@pytest.mark.parametrize(("samples", "fraction"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_percentile_refuses(samples: list[float], fraction: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(samples, fraction)


def test_every_round_visits_all_and_every_candidate_starts_equally_often() -> None:
    rounds = list(round_robin("abc", 6))
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert [order[0] for order in rounds] == list("abcabc")
    assert list(round_robin([], 2)) == [(), ()]


def test_candidates_interleave_and_warmup_rounds_do_not_count() -> None:
    candidates, timer = scripted(a=[1000.0, 1.0, 2.0, 3.0], b=[2000.0, 10.0, 20.0, 30.0])
    timings = measure(candidates, timer=timer, rounds=3, warmup=1)
    assert timer.order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert timings["a"].median_us == 2.0
    assert timings["b"].median_us == 20.0
    assert timings["a"].samples == 3


def test_a_red_gate_leaves_no_time() -> None:
    candidates, timer = scripted(a=[1.0] * 9, b=[1.0] * 9)
    ran = []
    gates = {"a": lambda: ran.append("a"), "b": refuse}
    with pytest.raises(GateFailedError, match="b: output: expected 1, got 2"):
        measure(candidates, timer=timer, rounds=2, gates=gates)
    assert ran == ["a"]
    assert timer.order == []


def test_green_gates_run_once_before_the_first_sample() -> None:
    candidates, timer = scripted(a=[1.0] * 9)
    seen: list[int] = []
    measure(candidates, timer=timer, rounds=2, gates={"a": lambda: seen.append(len(timer.order))})
    assert seen == [0]


def test_failed_gates_reports_refusals_and_lets_other_errors_through() -> None:
    assert failed_gates({"good": lambda: None, "bad": refuse}) == {"bad": "output: expected 1, got 2"}
    with pytest.raises(ZeroDivisionError):
        failed_gates({"broken": lambda: 1 / 0})  # type: ignore[dict-item]


def test_measure_refuses_gates_of_nothing_and_no_rounds() -> None:
    candidates, timer = scripted(a=[1.0])
    with pytest.raises(ValueError, match="gates: expected names of candidates"):
        measure(candidates, timer=timer, gates={"z": refuse})
    with pytest.raises(ValueError, match="rounds: expected 1 or more"):
        measure(candidates, timer=timer, rounds=0)


def test_host_time_syncs_between_bursts_only() -> None:
    now, events = [0.0], []

    def call() -> None:
        now[0] += 3e-6
        events.append("call")

    def synchronize() -> None:
        now[0] += 1.0  # must not be charged to the calls
        events.append("sync")

    timing = host_time(call, synchronize=synchronize, calls=4, bursts=2, clock=lambda: now[0])
    assert timing.median_us == pytest.approx(3.0, rel=1e-3)
    assert timing.samples == 2
    assert events == [*["sync", *["call"] * 4] * 3, "sync"]


def test_a_rewrite_counts_its_bytes_twice() -> None:
    rates = Probes(1000, *(Timing(t, t, t, 1) for t in (100.0, 250.0, 4.0, 12.0, 12.0))).rates
    assert rates.read == 10.0
    assert rates.read_write == 8.0
