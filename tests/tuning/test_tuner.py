"""Tuning a device from end to end, with times that are written down: what wins is what the table says, and it is right.

Layers are small, so that the torch twin can be their kernel and the gates are real. A run that is cut off, a candidate
that is wrong, one that does not compile and a table of another device each end as they must.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import replayssm
from cute_kernels.arch import ARCHES
from cute_kernels.configs import StepConfig, StepKey
from replayssm import LayerSpec, ReplaySpec
from replayssm.tuned import SHIPPED, Choice, Table, read_table
from tests.helpers.scripted import ScriptedSteps, launch_of, printed, tabled
from tuning import space, tuner
from tuning.bench import Machine
from tuning.roofline import NOMINAL_H200
from tuning.search import FIRST_DROP
from tuning.shapes import ModelShape, lookup
from tuning.space import candidates
from tuning.store import Journal, write_json
from tuning.tuner import Field, Job, Tuner, choice_of, jobs_of, launched_key, merged

SMALL = ModelShape("small", LayerSpec("mamba2", 2, 1, 64, 64), None, "made for this test")
KDA = ModelShape("small-kda", LayerSpec("kda", 1, 1, 64, 64), None, "made for this test", lower_bound=-5.0)
REPLAY = ReplaySpec(window=4)
HEADER = Table("NVIDIA H200", "sm_90a", "measured", {"cutlass_dsl": "4.8.1"}, "scripted", {})
WHOLE, BEST, QUARTERS = StepConfig(), StepConfig(split=2), StepConfig(split=4, fold_values=16)


def fields(*batches: int, shape: ModelShape = SMALL, replay: ReplaySpec = REPLAY) -> list[Field]:
    return [Field.of(job, "sm_90a", None) for job in jobs_of([shape], [replay], batches)]


def tune(steps: ScriptedSteps, todo: list[Field], journal: Journal | None = None, **more: Any) -> dict[Job, Choice]:
    made = Tuner(steps.machine(), journal or Journal(None, {}), steps.step, **more)
    return made.run(todo, lambda field, choice: None)


@pytest.mark.parametrize("shape", [SMALL, KDA], ids=lambda shape: shape.name)
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_fastest_right_candidate_is_chosen(shape: ModelShape, tokens: int) -> None:
    steps = ScriptedSteps({BEST: 50.0, WHOLE: 40.0, QUARTERS: 60.0}, wrong=frozenset({WHOLE}))
    todo = fields(2, 32, shape=shape, replay=ReplaySpec(window=4, max_draft=tokens))
    assert {c.name for c in todo[0].tried} >= {printed(BEST), printed(WHOLE)}
    choices = tune(steps, todo)
    assert [choice.parameters for choice in choices.values()] == [tabled(BEST)] * 2
    assert WHOLE not in steps.sampled
    assert {WHOLE, BEST} <= set(steps.launched)  # it was made and refused
    for job, choice in choices.items():
        mean = sum(share * (100 if case.what == "flush" else 50) for case, share in job.cases)
        assert choice.median_us == round(mean, 3)
        assert choice.runner_up == tabled(QUARTERS)


def test_a_choice_keeps_the_times_of_the_heuristic_and_of_the_worst() -> None:
    """Also of those that dropped out of the race; a wrong one has no time."""
    (field,) = fields(32)
    first = launch_of(field.tried[0].config)
    steps = ScriptedSteps({BEST: 50.0004, QUARTERS: 140.0, first: 70.0})
    (choice,) = tune(steps, [field]).values()
    assert (choice.median_us, choice.heuristic_us, choice.worst_us) == (50.0, 70.0, 140.0)
    (choice,) = tune(replace(steps, wrong=frozenset({first, QUARTERS})), [field]).values()
    assert (choice.median_us, choice.heuristic_us, choice.worst_us) == (50.0, None, 100.0)


def behind_the_heuristic(table: Table) -> list[str]:
    """Entries that are slower than the heuristic's choice by more than the spread of their samples, or than the worst
    candidate at all."""
    choices = [(shape, rows, choice) for shape, found in table.entries.items() for rows, choice in found.items()]
    return [
        f"{shape}, {rows} rows: {choice}"
        for shape, rows, choice in choices
        if choice.median_us - (choice.heuristic_us or choice.median_us) > (choice.p90_us or 0) - (choice.p10_us or 0)
        or choice.median_us > (choice.worst_us or choice.median_us)
    ]


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_are_not_behind_the_heuristic(path: Path) -> None:
    """Where its time was kept; a table that is, is told."""
    table = read_table(path)
    assert behind_the_heuristic(table) == []
    target = next(iter(table.entries))
    parameters = next(iter(table.entries[target].values())).parameters
    for times, number in (
        ((10.0, 9.9, 10.1, 9.7, 11.0), 1),
        ((10.0, 9.9, 10.1, 9.9, 11.0), 0),
        ((9.0, 8.9, 9.1, 9.5, 8.0), 1),
    ):
        median, p10, p90, heuristic, worst = times
        made = Choice(parameters, median, p10, p90, heuristic_us=heuristic, worst_us=worst)
        assert len(behind_the_heuristic(replace(table, entries={target: {1: made}}))) == number


def test_small_batches_weigh_the_steps_and_large_ones_mix_them() -> None:
    small, large = (job for job in jobs_of([SMALL], [REPLAY], [2, 32]))
    assert [(case.what, share) for case, share in small.cases] == [("nonflush", 0.75), ("flush", 0.25)]
    assert [(case.what, share) for case, share in large.cases] == [("mixed", 1.0)]
    (always,) = jobs_of([SMALL], [ReplaySpec(window=1)], [2])
    assert [case.what for case, _ in always.cases] == ["mixed"]
    assert small.num_bytes == sum(share * case.num_bytes for case, share in small.cases)
    assert small.limit_us(NOMINAL_H200) == sum(share * case.limit_us(NOMINAL_H200) for case, share in small.cases)


def test_jobs_are_entries_of_a_table() -> None:
    """Two names of one layer are one entry; a batch that no table holds is refused."""
    twins = [lookup("nemotron-3-super"), replace(lookup("nemotron-3-super"), name="another")]
    assert len(jobs_of(twins, [REPLAY], [1, 8])) == 2
    with pytest.raises(ValueError, match=r"powers of two.*\[12\]"):
        jobs_of([SMALL], [REPLAY], [8, 12])
    with pytest.raises(ValueError, match="a mean of 1 to 1"):
        jobs_of([SMALL], [REPLAY], [8], 2.0)


def test_outclassed_candidates_are_told_apart() -> None:
    (job,) = jobs_of([lookup("nemotron-3-super")], [ReplaySpec()], [256])
    field = Field.of(job, "sm_90a", 132)
    assert field.pruned
    assert {*field.tried, *field.pruned} == set(candidates(job.target, 256, ARCHES["sm_90a"]))
    assert Field.of(job, "sm_90a", None).pruned == ()


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    """What was finished is not run again, and what was not is; other candidates are another job."""
    path, seen = tmp_path / "journal", []

    def interrupt(field: Field, choice: object) -> None:
        seen.append(field.job.rows)
        if field.job.rows == 2:
            raise KeyboardInterrupt

    steps = ScriptedSteps({BEST: 50.0})
    with pytest.raises(KeyboardInterrupt):
        Tuner(steps.machine(), Journal(path, {}), steps.step).run(fields(1, 2, 4), interrupt)
    assert seen == [1, 2]
    again = ScriptedSteps({BEST: 50.0})
    choices = tune(again, fields(1, 2, 4), Journal(path, {}))
    assert [job.rows for job in choices] == [1, 2, 4]
    tried = len(fields(1)[0].tried)
    assert 0 < len(again.sampled) <= 2 * tried * 43  # of one job
    assert choices == tune(ScriptedSteps({BEST: 50.0}), fields(1, 2, 4))
    fewer = [replace(field, tried=field.tried[:2]) for field in fields(1)]
    tune(last := ScriptedSteps(), fewer, Journal(path, {}))
    assert last.sampled


def test_a_job_of_which_all_candidates_are_wrong_has_no_choice() -> None:
    todo = fields(1, 2)
    every = frozenset(launch_of(c.config) for c in todo[0].tried)
    told: list[object] = []
    steps = ScriptedSteps(wrong=every)
    choices = Tuner(steps.machine(), Journal(None, {}), steps.step).run(todo, lambda field, said: told.append(said))
    assert choices == {}
    assert not steps.sampled
    assert all("gate failed: output" in str(said) for said in told)
    assert len(told) == 2


class Recording(ThreadPoolExecutor):
    """Notes what it was asked to do."""

    def __init__(self) -> None:
        super().__init__(2)
        self.asked: list[StepKey] = []

    def submit(self, function: Any, key: StepKey, *rest: Any) -> Any:  # type: ignore[override]
        self.asked.append(key)
        return super().submit(function, key, *rest)


def test_kernels_are_compiled_ahead_once_each() -> None:
    """In the order in which they are timed; one that does not compile is refused with the reason."""

    def compile_one(key: StepKey, arch: str) -> None:
        assert arch == "sm_90a"
        if launch_of(key.config) == BEST:
            raise RuntimeError("ptxas: out of registers")

    steps, todo = ScriptedSteps({BEST: 50.0, QUARTERS: 60.0}), fields(1, 2)
    executor: Executor
    with Recording() as executor:
        choices = tune(steps, todo, executor=executor, compile_one=compile_one)
        assert executor.asked == [launched_key(todo[0].job, c) for c in todo[0].tried]
    assert BEST not in steps.launched
    assert [choice.parameters for choice in choices.values()] == [tabled(QUARTERS)] * 2


def test_as_many_compile_as_the_process_has_processors_but_one(monkeypatch) -> None:
    """Which may be few of the machine's."""
    for processors, count in (({0, 5, 9}, 2), ({3}, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, found=processors: found, raising=False)
        with tuner.compilers() as executor:
            assert executor._max_workers == count


def test_what_was_not_begun_is_given_up_at_the_end() -> None:
    """So that a run which is out of time or interrupted ends soon."""
    with tuner.compilers() as executor:
        waiting = [executor.submit(time.sleep, 0.1) for _ in range(2000)]
        waiting[0].result()
    assert sum(future.cancelled() for future in waiting) > 1000


def test_an_interrupt_stops_no_process_that_compiles() -> None:
    """One that died with the queue's lock would have the others wait for ever, and the run for them."""
    with tuner.compilers() as executor:
        executor.submit(os.getpid).result()
        for process in list(executor._processes.values()) * 3:  # once they wait for work
            process.join(timeout=0.5)
            os.kill(process.pid, signal.SIGINT)
            process.join(timeout=0.5)
            assert process.is_alive()
        assert [executor.submit(abs, -i).result(timeout=60) for i in range(8)] == list(range(8))


def test_the_key_that_is_compiled_is_the_one_that_a_step_asks_for(monkeypatch) -> None:
    """By the plan of the workload's own inputs, pool and indices."""
    from replayssm import plan_step
    from replayssm.launch import options_of
    from tuning import workload

    for shape in (SMALL, KDA, replace(SMALL, layer=LayerSpec("gdn", 4, 2, 64, 64))):
        (field,) = fields(2, shape=shape, replay=ReplaySpec(window=4, max_draft=2))
        arena = workload.Arena(workload.arena_bytes(shape.layer, (field.job.replay,), 2), "cpu")
        layout = tuner.default_ring_layout(shape.layer)
        (pool,) = workload.make_pools(arena, shape.layer, (field.job.replay,), 2, ring_layout=layout)
        inputs = workload.make_inputs(shape, 2, dtype=field.job.replay.activation_dtype, device="cpu", num_tokens=2)
        asked = plan_step(
            pool.layer, pool.replay, options_of(inputs), arch="sm_90a", batch=2, num_tokens=2,
            ring_layout=pool.ring_layout, config=field.tried[-1].config,
        )  # fmt: skip
        assert asked.key == launched_key(field.job, field.tried[-1])


def test_one_choice_by_itself_is_timed_behind_its_gate() -> None:
    (field,) = fields(32)
    steps = ScriptedSteps({BEST: 50.0})
    (best,) = [c for c in field.tried if c.name == printed(BEST)]
    result = Tuner(steps.machine(), Journal(None, {}), steps.step).time_choice(field.job, best)
    assert result.timing.median_us == 50.0
    assert steps.sampled == [BEST] * (3 + FIRST_DROP)
    assert choice_of(replace(field, tried=(best,)), result).runner_up is None


def test_tables_are_merged_entry_by_entry(tmp_path: Path) -> None:
    first, second = (job for job in jobs_of([SMALL], [REPLAY], [1, 8]))
    old, new = Choice(tabled(WHOLE), 9.0), Choice(tabled(BEST), 8.0)
    base = merged(None, {first: old, second: old}, HEADER)
    table = merged(base, {second: new}, HEADER)
    assert table.entries == {first.target: {1: old, 8: new}}
    assert base.entries == {first.target: {1: old, 8: old}}
    write_json(tmp_path / "t.json", table.to_json())
    assert read_table(tmp_path / "t.json") == table


@pytest.mark.parametrize(
    "other", [{"device": "NVIDIA H100"}, {"versions": {"cutlass_dsl": "5"}}, {"basis": "predicted"}, {"protocol": "x"}]
)
def test_what_is_not_alike_is_not_mixed(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(other))}: expected a table of .*--out"):
        merged(replace(HEADER, **other), {}, HEADER)


def test_a_step_is_compiled_into_the_cache(monkeypatch) -> None:
    from cute_kernels import compile as cache

    asked = []
    monkeypatch.setattr(cache, "ensure_on_disk", lambda function, make, key, arch: asked.append((key, arch, make)))
    (field,) = fields(1)
    key = launched_key(field.job, field.tried[0])
    tuner.compile_step(key, "sm_90a")
    assert asked[0][:2] == (key, "sm_90a")
    assert asked[0][2]()  # its arguments can be made


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_layer_is_tuned_on_this_gpu(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate is right, and what wins is no slower than the heuristic's choice by more than the noise.

    With one size of fold, since a space of a hundred kernels takes minutes to compile.
    """
    monkeypatch.setattr(space, "FOLD_VALUES", (16,))
    machine = Machine.current_cuda()
    shape, replay = lookup("nemotron-3-super", tp=8), ReplaySpec(max_draft=tokens)
    todo = [Field.of(job, str(machine.arch), None) for job in jobs_of([shape], [replay], [1, 32])]
    made = Tuner(machine, Journal(None, {}), replayssm.step, rounds=20)
    choices = made.run(todo, lambda field, choice: None)
    assert len(choices) == 2
    for field in todo:
        heuristic = made.time_choice(field.job, field.tried[0]).timing
        assert choices[field.job].median_us <= 1.1 * heuristic.median_us
