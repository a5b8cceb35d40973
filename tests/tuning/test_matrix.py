"""What a benchmark plans: the matrix of cases, their bytes, the derived average, and when a goal counts as met."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replayssm.spec import RECURRENCES, Recurrence, ReplaySpec
from tuning.goals import GOALS, Goal
from tuning.matrix import (
    ALL_MODELS,
    BATCHES,
    STEPS,
    Options,
    StepCase,
    Subject,
    average_entry,
    entry_of,
    exit_code,
    facts_of,
    goal_of,
    plan,
)
from tuning.roofline import NOMINAL_H200, Rates
from tuning.shapes import lookup

SUPER = lookup("nemotron-3-super")
H200 = "NVIDIA H200"


def case(what: str, rows: int = 256, window: int = 16, tokens: int = 1, accepted: float = 1.0) -> StepCase:
    return StepCase(SUPER, ReplaySpec(window, tokens), rows, what, accepted)


def test_matrix_of_super() -> None:
    groups = plan(Options(shapes=(SUPER,)))
    assert [g.replay.checkpoint_dtype for g in groups] == [torch.float32, torch.bfloat16, torch.float16]
    whats = {cases[0].rows: [c.what for c in cases] for cases in groups[0].batches}
    assert whats[1] == whats[8] == ["nonflush", "flush", "plain"]
    assert whats[128] == ["nonflush", "flush", "plain", "mixed"]
    assert whats[256] == ["nonflush", "flush", "plain", "mixed", "nonflush_z"]
    plain = {c.replay for g in groups for cases in g.batches for c in cases if c.what == "plain"}
    assert {(r.window, r.ring_capacity) for r in plain} == {(1, 2)}


@pytest.mark.parametrize("name", ["qwen3.5-122b-a10b", "kimi-k3"])
def test_delta_rules_have_no_output_gate_to_time(name: str) -> None:
    (group,) = plan(Options(shapes=(lookup(name),), checkpoints=(torch.float32,), batches=(8, 256)))
    assert [[c.what for c in cases] for cases in group.batches] == [
        ["nonflush", "flush", "plain"],
        ["nonflush", "flush", "plain", "mixed"],
    ]


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_models_of_a_full_run_are_of_its_recurrence_and_differ(recurrence: Recurrence) -> None:
    layers = [lookup(name, tp=tp).layer for name, tp in ALL_MODELS[recurrence]]
    assert {layer.recurrence for layer in layers} == {recurrence}
    assert len(set(layers)) == len(layers)


def test_every_goal_is_of_a_case_that_a_full_run_times() -> None:
    timed = {lookup(name, tp=tp).name for models in ALL_MODELS.values() for name, tp in models}
    assert {name for name, *_ in GOALS} <= timed
    assert {rows for _, _, rows, _ in GOALS} <= set(BATCHES)
    whats = {"average", "host", "first_call_cold", "first_call_from_disk", *STEPS}
    assert {what for *_, what in GOALS} <= whats


def test_window_of_one_has_only_the_plain_step() -> None:
    (group,) = plan(Options(shapes=(SUPER,), windows=(1,), checkpoints=(torch.float32,), batches=(64,)))
    assert [c.what for c in group.batches[0]] == ["plain"]


def test_every_window_with_every_number_of_tokens_that_fits() -> None:
    options = Options(shapes=(SUPER,), windows=(8, 16), tokens=(1, 8, 16), checkpoints=(torch.float32,), batches=(8,))
    groups = plan(options)
    assert [(g.replay.window, g.replay.max_draft, g.replay.ring_capacity) for g in groups] == [
        (8, 1, 9),
        (16, 1, 17),
        (8, 8, 16),
        (16, 8, 24),
        (16, 16, 32),
    ]
    assert [(g.plain.window, g.plain.max_draft) for g in groups] == [(1, 1), (1, 1), (8, 8), (8, 8), (16, 16)]
    assert [len(g.batches[0]) for g in groups] == [4, 4, 1, 4, 1]  # a window of T has only plain
    assert [g.batches[0][0].accepted for g in groups] == [1, 1, 4, 4, 8]
    with pytest.raises(ValueError, match="fit into a window"):
        plan(replace(options, tokens=(16,), windows=(8,)))
    with pytest.raises(ValueError, match="a mean of 1 to 1 tokens"):
        plan(replace(options, accepted=4.0))


@pytest.mark.parametrize(
    ("what", "window", "tokens", "records"),
    [
        ("nonflush", 16, 4, 8),
        ("nonflush", 16, 8, 8),
        ("nonflush", 32, 8, 8),
        ("nonflush", 16, 12, 4),
        ("flush", 32, 8, 32),
    ],
)
def test_records_that_rows_of_several_tokens_hold(what: str, window: int, tokens: int, records: int) -> None:
    assert set(case(what, window=window, tokens=tokens).live_records) == {records}


def test_plain_rows_of_several_tokens_fold_what_the_last_step_kept() -> None:
    held = case("plain", window=4, tokens=4, accepted=2.0).live_records
    assert set(held) == {1, 2, 3, 4}
    assert sum(held) / len(held) == pytest.approx(2, abs=0.05)
    assert set(case("plain", window=4, tokens=4, accepted=4.0).live_records) == {4}


@pytest.mark.parametrize(
    ("what", "window", "records"),
    [("nonflush", 16, 8), ("flush", 16, 16), ("plain", 1, 1), ("nonflush_z", 16, 8), ("nonflush", 2, 1)],
)
def test_records_that_rows_hold(what: str, window: int, records: int) -> None:
    assert set(case(what, window=window).live_records) == {records}


def test_mixed_rows_stand_evenly_over_the_window() -> None:
    mixed = case("mixed")
    assert sorted(mixed.live_records) == sorted(list(range(1, 17)) * 16)
    mean = (15 * case("nonflush").num_bytes + case("flush").num_bytes) / 16
    assert mixed.num_bytes == mean


def test_limits_follow_the_rate_of_each_row() -> None:
    assert case("nonflush").limit_us(NOMINAL_H200) == pytest.approx(247.5, abs=0.1)
    assert case("flush").limit_us(NOMINAL_H200) == pytest.approx(564, abs=0.5)
    assert case("mixed").limit_us(NOMINAL_H200) == pytest.approx((15 * 247.5 + 564) / 16, abs=0.2)
    extra = case("nonflush_z").num_bytes - case("nonflush").num_bytes
    assert extra == 256 * 128 * 64 * 2


def measured(what: str, median: float) -> dict[str, float]:
    return entry_of(case(what), {"median_us": median}, device=H200, limit_us=case(what).limit_us(NOMINAL_H200))


def test_average_is_derived_from_nonflush_and_flush() -> None:
    entries = {what: measured(what, us) for what, us in (("nonflush", 250.0), ("flush", 557.0), ("plain", 561.0))}
    cases = {what: case(what) for what in entries}
    average = average_entry(entries, cases, NOMINAL_H200, device=H200)
    assert average is not None
    assert average["median_us"] == pytest.approx((15 * 250 + 557) / 16)
    assert average["speedup"] == pytest.approx(561 / 269.1875)
    assert average["goal_met"] is True
    assert average["bytes"] == case("mixed").num_bytes
    assert average["fold_share"] == 1 / 16
    assert average["us_per_token"] == average["median_us"]
    del entries["plain"]
    without = average_entry(entries, cases, NOMINAL_H200, device=H200)
    assert without is not None
    assert "speedup" not in without
    assert without["goal_met"] is False
    del entries["flush"]
    assert average_entry(entries, cases, NOMINAL_H200, device=H200) is None


def average_of(nonflush: float, flush: float, **sizes: Any) -> dict[str, Any]:
    cases = {what: case(what, **sizes) for what in ("nonflush", "flush")}
    times = {"nonflush": nonflush, "flush": flush}
    entries = {what: {"median_us": us} for what, us in times.items()}
    average = average_entry(entries, cases, NOMINAL_H200, device=None)
    assert average is not None
    return average


@pytest.mark.parametrize(("tokens", "share"), [(4, 1 / 4), (8, 1 / 2)])
def test_average_of_several_tokens_that_all_stay(tokens: int, share: float) -> None:
    """4, 8, 12 and then 16 records, or 8 and then 16: as many on average as nonflush and flush hold."""
    average = average_of(260.0, 570.0, tokens=tokens, accepted=float(tokens))
    assert average["fold_share"] == pytest.approx(share)
    assert average["median_us"] == pytest.approx((1 - share) * 260 + share * 570)
    assert average["us_per_token"] == average["median_us"] / tokens
    assert average["accepted"] == tokens


def test_average_brings_each_time_to_the_records_that_rows_hold() -> None:
    """Steps that take 10 and 20 us beyond their limits do so whatever rows hold: all of their bytes are averaged."""
    sizes = {"tokens": 8, "accepted": 4.0, "window": 32}
    cases = {what: case(what, **sizes) for what in ("nonflush", "flush")}
    limits = {what: one.limit_us(NOMINAL_H200) for what, one in cases.items()}
    average = average_of(limits["nonflush"] + 10, limits["flush"] + 20, **sizes)
    expected = 0.0
    for place in cases["nonflush"].positions:
        us = NOMINAL_H200.limit_us(cases["nonflush"].traffic(place.records, 256))
        expected += place.share * (us + (20 if place.folds else 10))
    assert average["median_us"] == pytest.approx(expected)
    assert average["median_us"] - average["limit_us"] == pytest.approx(10 * (1 + average["fold_share"]))
    mean = sum(place.share * place.records for place in cases["nonflush"].positions if not place.folds)
    assert mean / (1 - average["fold_share"]) > 10  # teeth: rows hold more than the 8 records of nonflush


@pytest.mark.parametrize(
    ("goal", "entry", "met"),
    [
        (Goal(us=252), {"median_us": 252.0}, True),
        (Goal(us=252), {"median_us": 252.1}, False),
        (Goal(us=252, ratio=1.02), {"median_us": 250.0, "ratio": 1.021}, False),
        (Goal(speedup=2.06), {"median_us": 1.0, "speedup": 2.05}, False),
        (Goal(speedup=2.06), {"median_us": 1.0, "speedup": 2.06}, True),
    ],
)
def test_a_goal_is_met_when_all_of_it_is(goal: Goal, entry: dict[str, float], met: bool) -> None:
    assert goal.met_by(entry) is met


def test_goals_hold_for_one_layer_on_one_device() -> None:
    subject = case("nonflush")
    assert goal_of(subject, H200) == Goal(us=252, ratio=1.02)
    assert goal_of(subject, "NVIDIA B300") is None
    assert goal_of(subject, None) is None
    assert goal_of(Subject(lookup("nemotron-3-super", tp=2), subject.replay, 256, "nonflush"), H200) is None
    assert goal_of(case("nonflush", window=32), H200) is None
    four = case("nonflush", tokens=4, accepted=2.0)
    assert goal_of(four, H200) == Goal(us=270, ratio=1.12)
    assert goal_of(case("flush", tokens=4, accepted=2.0), H200) is None
    assert goal_of(case("nonflush", tokens=16, accepted=2.0, window=24), H200) == Goal(ratio=1.12)
    assert goal_of(case("nonflush", tokens=16, accepted=2.0, window=20), H200) is None
    reads = replace(subject, replay=replace(subject.replay, read_dtype="nvfp4"))
    assert goal_of(reads, H200) == Goal(us=52)
    assert goal_of(replace(reads, replay=replace(reads.replay, window=32, ring_capacity=0)), H200) is None
    average = replace(reads, replay=replace(reads.replay, window=32, ring_capacity=0), what="average")
    assert goal_of(average, H200) == Goal(speedup=6.5)
    assert goal_of(replace(reads, replay=replace(reads.replay, checkpoint_dtype=torch.float16)), H200) is None
    assert facts_of(reads)["replay"]["read"] == "nvfp4" and "read" not in facts_of(subject)["replay"]
    assert "goal" not in entry_of(subject, {"median_us": 1.0}, device=None)


@pytest.mark.parametrize(
    ("name", "checkpoint", "rows", "what", "goal"),
    [
        ("qwen3.5-122b-a10b", torch.float32, 256, "nonflush", Goal(us=257, ratio=1.03)),
        ("qwen3.5-122b-a10b", torch.float32, 256, "average", Goal(us=277)),
        ("qwen3.5-122b-a10b", torch.bfloat16, 256, "nonflush", Goal(ratio=1.05)),
        ("qwen3.5-122b-a10b@tp2", torch.float32, 256, "nonflush", None),
        ("qwen3.5-397b-a17b", torch.float32, 256, "nonflush", None),
        ("glm-5.3-flash", torch.float32, 256, "nonflush", Goal(ratio=1.05)),
        ("kimi-k3", torch.float32, 256, "nonflush", None),
        ("kimi-k3@tp8", torch.float32, 1, "nonflush", Goal(us=6.5)),
    ],
)
def test_goals_of_delta_rules(name: str, checkpoint: torch.dtype, rows: int, what: str, goal: Goal | None) -> None:
    subject = Subject(lookup(name), ReplaySpec(checkpoint_dtype=checkpoint), rows, what)
    assert goal_of(subject, H200) == goal
    assert goal_of(subject, "NVIDIA B300") is None


def test_entry_carries_its_layer_and_its_ratio() -> None:
    entry = entry_of(case("nonflush"), {"median_us": 250.0}, device=H200, num_bytes=100, limit_us=200.0)
    assert entry["ratio"] == 1.25
    assert entry["goal_met"] is False
    assert entry["layer"]["num_v_heads"] == 128
    assert entry["replay"] == {"window": 16, "checkpoint": "float32", "activation": "bfloat16"}


def test_exit_code_tells_wrong_from_slow() -> None:
    slow = {"status": "measured", "goal_met": False}
    skipped, refused = {"status": "skipped"}, {"status": "not supported"}
    assert exit_code([slow, skipped, refused]) == 0
    assert exit_code([slow, {"status": "gate failed"}]) == 1
    assert exit_code([{"status": "failed"}]) == 1


def test_rates_scale_the_limit() -> None:
    double = Rates(read=2 * NOMINAL_H200.read, read_write=2 * NOMINAL_H200.read_write)
    assert case("mixed").limit_us(double) == pytest.approx(case("mixed").limit_us(NOMINAL_H200) / 2)
