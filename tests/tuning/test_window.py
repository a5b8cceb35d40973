"""The choice of a window rests on arithmetic over measured times: it must be what a batch that is played out takes.

Times are those of the twin's cursors: batches of up to 4000 rows are stepped with the commit of the reference, each row
charged by what it does. Means are also held against the averages of the benchmark's own records on an H200, and every
limit, tie and refusal is tried on trades made up by hand.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replayssm import LayerSpec, ReplaySpec, bytes_per_slot
from replayssm.cursors import make_cursors
from replayssm.reference import replay as reference
from tuning.acceptance import acceptance, fold_share, observed, positions
from tuning.matrix import replay_of, state_name
from tuning.roofline import Rates
from tuning.window import Cost, Trade, advice, choose, costs_of, folding_after, stagger, staggers_within, trade

LAYER = LayerSpec("gdn", 64, 16, 128, 128)
GRID = [(16, 1, 1.0), (8, 4, 2.0), (16, 4, 2.5), (16, 8, 3.0), (5, 5, 2.0)]
each_walk = pytest.mark.parametrize(("window", "tokens", "mean"), GRID)
RECORDS = ("qwen3.5-122b-window-8", "qwen3.5-122b", "qwen3.5-122b-window-32", "nemotron-3-super")


def cost(window: int, tokens: int = 1, rows: int = 64, **more: float) -> Cost:
    times = {"nonflush_us": 250.0, "nonflush_records": 4.0, "flush_us": 560.0, "read_record_us": 1.5}
    return Cost(LAYER, ReplaySpec(window, tokens), rows, **(times | {"fold_record_us": 2.0} | more))


def played(window: int, accepted: tuple[float, ...], rows: int, steps: int) -> Iterator[list[int]]:
    """Records of every row in each step, by the cursors' own rule; all rows start without any."""
    tokens = len(accepted) - 1
    cursors, indices = make_cursors(ReplaySpec(window, tokens), rows), torch.arange(rows, dtype=torch.int32)
    for _ in range(steps):
        yield cursors.num_committed.tolist()
        drawn = torch.multinomial(torch.tensor(accepted), rows, replacement=True).int()
        reference.commit(cursors, cache_indices=indices, num_draft=tokens, num_accepted=drawn)


@each_walk
def test_times_are_those_of_a_batch_played_out(window: int, tokens: int, mean: float) -> None:
    """Within 2 % of the mean over 300 steps of 500 rows; with folds half as long again it is not."""
    accepted, one = acceptance(tokens, mean), cost(window, tokens, rows=500)
    times = []
    for records in itertools.islice(played(window, accepted, 500, 400), 100, None):
        times += [one.step_us(n, n + tokens > window) for n in records]
    found = sum(times) / len(times)
    told = trade(one, accepted, "together")
    assert told.mean_us == pytest.approx(found, rel=0.02)
    assert told.us_per_token == pytest.approx(found / mean, rel=0.02)
    assert trade(one, accepted).mean_us == told.mean_us
    wrong = replace(one, flush_us=one.flush_us * 1.5)
    assert trade(wrong, accepted, "together").mean_us != pytest.approx(found, rel=0.02)


def test_a_step_by_hand() -> None:
    """250 us at 4 records and 560 at a full window of 16, 1.5 and 2 us a record."""
    one = cost(16, 4)
    assert [one.step_us(n, folds=False) for n in (0, 4, 12)] == [244.0, 250.0, 262.0]
    assert [one.step_us(n, folds=True) for n in (13, 16)] == [554.0, 560.0]


def test_costs_of_a_record_by_hand() -> None:
    """A record of this layer has 64 x 128 values and 16 x 128 keys of 2 bytes, and 64 decays of 4."""
    layer = {"name": "x", "recurrence": "gdn", "num_v_heads": 64, "num_k_heads": 16, "head_dim": 128, "d_state": 128}
    replay = {"window": 16, "checkpoint": "float32", "activation": "bfloat16"}
    shared = {"layer": layer, "replay": replay, "rows": 8, "num_tokens": 4, "status": "measured"}
    steps = [
        {**shared, "what": "nonflush", "median_us": 20.0, "records": 8.0},
        {**shared, "what": "flush", "median_us": 40.0},
        {**shared, "what": "mixed", "median_us": 25.0},
        {**shared, "what": "read", "median_us": 9.0},
        {**shared, "what": "nonflush", "rows": 1, "status": "gate failed"},
        {"what": "probes", "status": "measured"},
    ]
    ((head, one),) = costs_of(steps, Rates(read=4.0, read_write=2.0)).items()
    assert head == ("x", "fp32", 8, 4, 16)
    record_bytes = 8 * (2 * 64 * 128 + 2 * 16 * 128 + 4 * 64)
    assert (one.read_record_us, one.fold_record_us) == (record_bytes / 4, record_bytes / 2)
    assert (one.nonflush_us, one.nonflush_records, one.flush_us, one.mixed_us) == (20.0, 8.0, 40.0, 25.0)
    assert one.replay == ReplaySpec(16, 4)
    assert costs_of(steps[:1], Rates(4.0, 2.0)) == {}


@pytest.mark.parametrize(("rows", "window"), [(1, 16), (64, 16), (256, 8), (256, 32)])
def test_the_slowest_step_of_staggered_rows(rows: int, window: int) -> None:
    """Rows that fold by themselves, 20,000 steps: one in a thousand is slower, and a step of one row less is not rare
    enough."""
    one = cost(window, rows=rows, read_record_us=0.0, fold_record_us=0.0)
    told = trade(one, (0.0, 1.0))
    draw, share = random.Random(1), 1 / window
    folding = sorted(sum(draw.random() < share for _ in range(rows)) for _ in range(20_000 if rows < 256 else 5_000))
    among = folding[int(len(folding) * 0.998)], folding[-1]
    row_us = (one.flush_us - one.nonflush_us) / rows
    count = (told.slowest_us - one.nonflush_us) / row_us
    assert among[0] <= count + 1e-6
    assert count - 1e-6 <= among[1]
    assert trade(one, (0.0, 1.0), "together").slowest_us == one.flush_us >= told.slowest_us


def test_a_measured_mixed_step_is_what_staggered_rows_take() -> None:
    told = trade(cost(16, mixed_us=300.0), (0.0, 1.0))
    assert told.mean_us == told.us_per_token == 300.0
    assert trade(cost(16, mixed_us=300.0), (0.0, 1.0), "together").mean_us < 300.0
    assert trade(cost(1, flush_us=500.0), (0.0, 1.0)).slowest_us == 500.0  # every step folds


@pytest.mark.parametrize("name", RECORDS)
def test_averages_are_those_of_the_records(name: str, repository: Path) -> None:
    record = json.loads((repository / f"docs/records/2026-11-29-h200-{name}.json").read_text())
    rates = Rates(**record["entries"][0]["bytes_per_us"])
    averages = {}
    for entry in record["entries"]:
        if entry["what"] == "average":
            head = (entry["layer"]["name"], state_name(replay_of(entry)), entry["rows"], entry["num_tokens"])
            averages[(*head, entry["replay"]["window"])] = entry["median_us"]
    costs = costs_of(record["entries"], rates)
    assert costs.keys() == averages.keys()
    # The records of 2026-11-29 took (15 nonflush + 1 flush) / 16, without the half record that rows hold more.
    for head, one in costs.items():
        assert trade(one, (0.0, 1.0), "together").mean_us == pytest.approx(averages[head], rel=4e-3)
        assert (one.mixed_us is None) == (one.rows < 32)


@each_walk
def test_how_many_rows_fold_after_they_started_together(window: int, tokens: int, mean: float) -> None:
    """4000 rows, within 5 standard errors of each of 40 steps; another acceptance is told apart."""
    rows, accepted = 4000, acceptance(tokens, mean)
    found = [sum(n + tokens > window for n in records) for records in played(window, accepted, rows, 40)]

    def differs(accepted: tuple[float, ...]) -> bool:
        shares = itertools.islice(folding_after(window, accepted), 40)
        far = (abs(n - rows * p) > 5 * (rows * p * (1 - p)) ** 0.5 + 1e-6 for n, p in zip(found, shares, strict=True))
        return any(far)

    assert not differs(accepted)
    assert tokens in (1, window) or differs(acceptance(tokens, mean + 0.3))
    assert tokens == 1 or list(itertools.islice(folding_after(window, accepted), 400))[-1] == pytest.approx(
        fold_share(positions(window, accepted)), rel=1e-3
    )


def test_rows_of_one_token_stay_together_and_those_of_several_do_not() -> None:
    assert staggers_within(16, (0.0, 1.0)) is None
    assert staggers_within(16, acceptance(4, 4.0)) is None
    steps = staggers_within(16, acceptance(4, 2.5))
    assert steps is not None
    usual = 1.1 * fold_share(positions(16, acceptance(4, 2.5)))
    shares = list(itertools.islice(folding_after(16, acceptance(4, 2.5)), 500))
    assert max(shares[steps:]) <= usual < shares[steps - 1]
    assert staggers_within(1, (0.0, 1.0)) == 0


@pytest.mark.parametrize(("rows", "window"), [(64, 16), (5, 16), (37, 8), (256, 32)])
@pytest.mark.parametrize("forced", [True, False])
def test_one_forced_fold_a_row_staggers_them(rows: int, window: int, forced: bool) -> None:
    """Played out with the cursors for four windows; without the folds all rows fold in one step."""
    cursors, indices = make_cursors(ReplaySpec(window), rows), torch.arange(rows, dtype=torch.int32)
    when, most = torch.tensor(stagger(rows, window)), 0
    for step in range(5 * window):
        count = cursors.num_committed
        force = ((when == step) & (count > 0)) if forced else torch.zeros(rows, dtype=torch.bool)
        folds = int(((count + 1 > window) | force).sum())
        most = max(most, folds) if step >= window else most
        reference.commit(cursors, cache_indices=indices, force_fold=force)
    assert most == (-(-rows // window) if forced else rows)


def test_advice_for_an_engine() -> None:
    """One token: the choice is the engine's, with the times of both. Several: the rows spread by themselves, and the
    largest share that folds in one step is that of 4000 rows played out."""
    one = advice(cost(16, mixed_us=300.0), (0.0, 1.0))
    assert "stay together" in one
    assert "560.0 when they fold" in one
    assert "stagger them: 300.0 us a step, seldom above" in one
    several = advice(cost(16, 8), acceptance(8, 4.0))
    steps = staggers_within(16, acceptance(8, 4.0))
    assert f"within {steps} steps" in several
    folds = [sum(n + 8 > 16 for n in records) / 4000 for records in played(16, acceptance(8, 4.0), 4000, 8)]
    (peak,) = re.findall(r"folds (\d+)%", several)
    assert int(peak) / 100 == pytest.approx(max(folds), abs=0.03)
    assert "nothing to stagger" in advice(cost(1), (0.0, 1.0))


def made(window: int, us: float, num_bytes: int, slowest: float = 100.0) -> Trade:
    return Trade(window, "staggered", us, us, slowest, num_bytes, 1 / window)


def test_the_least_time_within_the_limits() -> None:
    trades = [made(8, 12.0, 80, 70.0), made(16, 10.0, 160), made(24, 10.0, 240), made(32, 11.0, 320)]
    assert choose(trades).window == 16  # as fast as 24, with less memory
    assert choose(trades, budget_bytes=159).window == 8
    assert choose(trades, slowest_us=99.0).window == 8
    with pytest.raises(ValueError, match="least of those measured are 80 bytes and 70"):
        choose(trades, budget_bytes=79)
    with pytest.raises(ValueError, match="at least one window, got none"):
        choose([])


def test_memory_is_that_of_a_slot() -> None:
    for window in (8, 32):
        assert cost(window, 4).request_bytes == sum(bytes_per_slot(LAYER, ReplaySpec(window, 4)).values())


def test_an_acceptance_of_other_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="probabilities of 0 to 4 tokens, got 2"):
        trade(cost(16, 4), (0.0, 1.0))


def test_an_acceptance_read_from_a_trace() -> None:
    assert observed([1, 3, 1, 0, 3], 3) == pytest.approx((0.2, 0.4, 0.0, 0.4))
    drawn = torch.multinomial(torch.tensor(acceptance(4, 2.5)), 50_000, replacement=True).tolist()
    assert observed(drawn, 4) == pytest.approx(acceptance(4, 2.5), abs=0.01)
    for counts in ([], [0, 0], [5], [-1], [1.5]):
        with pytest.raises(ValueError, match="trace: expected"):
            observed(counts, 4)
