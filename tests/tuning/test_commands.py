"""The commands end to end, through click, without a GPU: what they print, what they keep, and how they refuse.

Where a command needs a GPU, times that are written down stand in for one and the torch twin for its kernels. Records of
an H200 that the repository holds stand in for a benchmark.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import replayssm
from cute_kernels.arch import ARCHES
from cute_kernels.configs import StepConfig
from replayssm import LayerSpec, ReplaySpec, plan, tuned
from replayssm.tuned import Choice, Shape, Table, read_table
from tests.helpers.scripted import ScriptedSteps, launch_of, printed, tabled
from tuning import bench, commands, doctor
from tuning.__main__ import main
from tuning.bench import Machine
from tuning.shapes import ModelShape, lookup, released
from tuning.space import candidates
from tuning.store import lock, write_json

H200 = "NVIDIA H200"
SMALL = ModelShape("small", LayerSpec("mamba2", 2, 1, 64, 64), None, "made for this test")
SUPER = lookup("nemotron-3-super").layer
BEST, QUARTERS = StepConfig(split=2), StepConfig(split=4, fold_values=16)
WHOLE, HALVES, THIRDS = (StepConfig(split=split, fold_values=32, precision="tf32") for split in (1, 2, 3))
VERSIONS = {"torch": "2", "cuda": "13", "cutlass_dsl": "4.8.1", "driver": "1"}


def run(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def said(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Tables of this test's own, and none read before or kept behind."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tuned, "local_device", lambda arch: None)
    for cache in (tuned.tables, plan._planned):
        cache.cache_clear()
    yield tmp_path / "replayssm" / "tuned.json"
    for cache in (tuned.tables, plan._planned):
        cache.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ScriptedSteps:
    """A machine with a GPU, of one small layer."""
    steps = ScriptedSteps({BEST: 50.0, QUARTERS: 60.0})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Machine, "current_cuda", lambda: steps.machine())
    monkeypatch.setattr(replayssm, "step", steps.step)
    monkeypatch.setattr(commands, "multiprocessors", lambda: 132)
    monkeypatch.setattr(commands, "own_arch", lambda: "sm_90a")
    monkeypatch.setattr(commands, "shapes_of", lambda models, tps: (SMALL,))
    monkeypatch.setattr(commands, "environment", lambda: dict(VERSIONS))
    monkeypatch.setattr(commands, "compilers", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr("cute_kernels.compile.ensure_on_disk", lambda *args: None)
    return steps


def table(config: StepConfig, **facts: Any) -> dict[str, Any]:
    entries = {Shape.of(SUPER, ReplaySpec(), 1): {8: Choice(tabled(config), 9.0)}}
    return Table(H200, "sm_90a", "measured", VERSIONS, "scripted", entries).to_json() | facts


# Tune.


def test_a_dry_run_needs_no_gpu() -> None:
    told = run("tune", "--dry-run", "--model", "nemotron-3-super", "--batch", "1,256", "--tokens", "1,4")
    assert "jobs on sm_90a (nothing measured)" in told.output
    assert "267.3" in told.output
    rows = [line.split("│") for line in told.output.splitlines() if line.startswith("│ nemotron-3-super")]
    assert [(row[4].strip(), row[5].strip()) for row in rows] == [("1", "1"), ("1", "256"), ("4", "1"), ("4", "256")]
    assert told.output.count("heuristic") == 2
    assert "outclassed" in told.output


def test_a_dry_run_of_all_layers() -> None:
    """Once each, whatever models and shards share it."""
    words = ("tune", "--dry-run", "--all", "--tp", "1,8", "--batch", "8", "--checkpoint", "fp32,bf16", "--json")
    facts = json.loads(run(*words).output)
    layers = {shape.layer: shape.name for shape in reversed(released([1, 8]))}
    assert len(layers) < len(released([1, 8]))
    assert [fact["layer"] for fact in facts[::2]] == list(dict.fromkeys(fact["layer"] for fact in facts))
    assert {fact["layer"] for fact in facts} == set(layers.values())
    assert len(facts) == 2 * len(layers)


def test_a_dry_run_as_json() -> None:
    facts = json.loads(run("tune", "--dry-run", "--batch", "256", "--arch", "sm_103a", "--json").output)
    (one,) = facts
    assert (one["layer"], one["rows"], one["arch"], one["limit_us"]) == ("nemotron-3-super", 256, "sm_103a", None)
    first = one["candidates"][0]
    assert first | tabled(WHOLE) | {"pruned": False, "room": 5} == first
    alike = [c for c in one["candidates"] if (c["split"], c["warps"]) == (1, 4)]
    assert {(c["ctas"], c["room"]) for c in alike} == {(1, 5), (5, 5)}
    everything = run("tune", "--dry-run", "--batch", "256", "--no-prune", "--json")
    assert not any(c["pruned"] for c in json.loads(everything.output)[0]["candidates"])
    assert any(c["pruned"] for c in one["candidates"])


def test_tuning_fills_the_users_table_and_plans_follow(gpu: ScriptedSteps, config: Path) -> None:
    told = run("tune", "--batch", "2,32", "--window", "4")
    assert "2 entries written to" in said(told)
    assert printed(BEST) in said(told)
    made = read_table(config)
    assert (made.device, made.arch, made.basis) == (H200, "sm_90a", "measured")
    assert made.versions == {"replayssm": replayssm.__version__, **VERSIONS}
    ((shape, choices),) = made.entries.items()
    assert shape == Shape.of(SMALL.layer, ReplaySpec(window=4), 1)
    assert {batch: choice.parameters for batch, choice in choices.items()} == dict.fromkeys((2, 32), tabled(BEST))
    assert [path.name for path in config.parent.iterdir() if path.suffix != ".lock"] == ["tuned.json"]
    shown = json.loads(run("show", "--arch", "sm_90a", "--batch", "2,3,64", "--window", "4", "--json").output)
    assert [(fact["source"], fact["entry"]["batch"]) for fact in shown] == [("user", 2), ("user", 32), ("user", 32)]
    assert shown[0]["config"] | tabled(BEST) == shown[0]["config"]
    assert "tuned.json: measured at batch 32, 50.00 us" in said(run("show", "--batch", "64", "--window", "4"))


def test_tuning_draws_what_it_gained(gpu: ScriptedSteps, config: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib; pip install '.[plot]' brings it")
    run("tune", "--batch", "2,32", "--window", "4", "--plot", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    told = run("tune", "--batch", "8", "--window", "4", "--plot", str(tmp_path / "b.png"), code=2)
    assert "several windows, batches or tokens" in said(told)
    assert len(next(iter(read_table(config).entries.values()))) == 3  # the table is written before


def test_tuning_again_adds_to_the_table(gpu: ScriptedSteps, config: Path) -> None:
    run("tune", "--batch", "2", "--window", "4")
    facts = json.loads(run("tune", "--batch", "4", "--window", "4", "--json").stdout)
    other = run("tune", "--batch", "8", "--window", "4", "--accepted", "1", code=2)
    assert "half of T tokens of a step stay" in said(other)  # what was tuned for other drafts is not mixed
    assert facts[0]["rows"] == 4
    assert sorted(next(iter(read_table(config).entries.values()))) == [2, 4]


def test_an_interrupted_run_loses_nothing(gpu: ScriptedSteps, config: Path, monkeypatch) -> None:
    words, sample = ("tune", "--batch", "1,2,4,8", "--window", "4"), gpu.sample
    run(*words, "--out", str(config.with_name("whole.json")))
    whole = len(gpu.sampled)
    gpu.sampled.clear()

    def interrupted(captured: Any) -> Any:
        if len(gpu.sampled) > whole / 3:
            raise KeyboardInterrupt
        return sample(captured)

    monkeypatch.setattr(gpu, "sample", interrupted)
    told = run(*words, code=130)
    assert "the same command goes on" in said(told)
    assert not config.exists()
    done = config.with_name("tuned.json.journal").read_text().count("\n")
    assert 0 < done < 4
    monkeypatch.setattr(gpu, "sample", sample)
    gpu.sampled.clear()
    run(*words)
    resumed = len(gpu.sampled)
    assert resumed == whole * (4 - done) // 4
    gpu.sampled.clear()
    run(*words, "--fresh")
    assert len(gpu.sampled) == whole


def test_a_run_that_is_out_of_time_keeps_what_it_has(gpu: ScriptedSteps, config: Path, monkeypatch) -> None:
    """The table has what is finished, and the same command goes on with the rest."""
    words, left = ("tune", "--batch", "1,2,4", "--window", "4"), iter([5.0, 0.0, -1.0])
    with monkeypatch.context() as clock:
        clock.setattr(bench.Deadline, "left_s", property(lambda deadline: next(left)))
        told = run(*words, "--time-limit", "15")
    assert "1 entries written to" in said(told)
    assert "time limit: 2 jobs are left, and the same command goes on with them" in said(told)
    assert sorted(next(iter(read_table(config).entries.values()))) == [1]
    once = len(gpu.sampled)
    gpu.sampled.clear()
    assert "3 entries written to" in said(run(*words))
    assert len(gpu.sampled) == 2 * once
    assert not config.with_name("tuned.json.journal").exists()


def test_a_wrong_candidate_never_wins(gpu: ScriptedSteps, config: Path) -> None:
    gpu.wrong = frozenset({BEST})
    assert f"{printed(QUARTERS)}, 60.00 us" in said(run("tune", "--batch", "32", "--window", "4"))
    every = candidates(Shape.of(SMALL.layer, ReplaySpec(window=5), 1), 32, ARCHES["sm_90a"])
    gpu.wrong = frozenset(launch_of(candidate.config) for candidate in every)
    told = run("tune", "--batch", "32", "--window", "5", code=1)
    assert "no candidate is right" in said(told)
    assert len(read_table(config).entries) == 1  # what was there before stays


def test_noise_is_told(gpu: ScriptedSteps, monkeypatch) -> None:
    sample, calls = gpu.sample, []

    def loud(captured: Any) -> list[float]:
        calls.append(1)
        return [time_us * (1.0 + 0.5 * (len(calls) % 2)) for time_us in sample(captured)]

    monkeypatch.setattr(gpu, "sample", loud)
    assert "is another process using the GPU?" in said(run("tune", "--batch", "32", "--window", "4"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON"),
        (json.dumps(table(HALVES, schema=9)), "schema 9"),
        (json.dumps(table(HALVES, device="NVIDIA H100")), "got one of NVIDIA H100"),
        (json.dumps(table(HALVES)), "protocol: expected a table of"),
    ],
)
def test_a_table_that_cannot_be_added_to_is_left_as_it_is(
    gpu: ScriptedSteps, config: Path, content: str, message: str
) -> None:
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(content)
    assert message in said(run("tune", "--batch", "2", "--window", "4", code=2))
    assert config.read_text() == content
    assert not gpu.sampled


def test_a_second_tuner_and_a_folder_that_cannot_be_written(gpu: ScriptedSteps, config: Path, tmp_path: Path) -> None:
    with lock(config):
        assert "another tuner (process" in said(run("tune", "--batch", "2", "--window", "4", code=2))
    (tmp_path / "file").write_text("")
    assert "file" in said(run("tune", "--batch", "2", "--out", str(tmp_path / "file" / "t.json"), code=2))
    assert not gpu.sampled


# Show.


def test_show_says_what_and_why(config: Path) -> None:
    bare = run("show", "--arch", "sm_90a", "--batch", "8")
    assert f"heuristic {printed(WHOLE)}, precision tf32 no tuned table for sm_90a" in said(bare)
    plan._planned.cache_clear()
    tuned.tables.cache_clear()
    write_json(config, table(HALVES))
    told = said(run("show", "--arch", "sm_90a", "--batch", "8"))
    assert f"user {printed(HALVES)}, precision tf32 tuned.json: measured at batch 8, 9.00 us" in told
    _, shard = json.loads(run("show", "--arch", "sm_90a", "--batch", "8", "--tp", "1,4", "--json").output)
    assert (shard["layer"], shard["source"]) == ("nemotron-3-super@tp4", "heuristic")
    assert shard["why"] == f"not in {config}"


def test_show_says_that_no_kernel_covers_a_layer(monkeypatch) -> None:
    other = ModelShape("other", LayerSpec("mamba2", 8, 2, 48, 128), None, "made for this test")
    monkeypatch.setattr(commands, "shapes_of", lambda models, tps: (other,))
    assert "no kernel: head_dim: supported are 64, 80 and 128" in said(run("show", "--arch", "sm_90a", "--batch", "8"))
    assert "no kernels for other" in said(run("tune", "--dry-run", code=2))


def test_a_named_table_that_cannot_be_used_is_an_error(config: Path, monkeypatch) -> None:
    write_json(config, table(THIRDS))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run("show", "--arch", "sm_90a", "--batch", "8")
    assert len(caught) == 1
    monkeypatch.setenv(tuned.ENVIRONMENT, str(config))
    tuned.tables.cache_clear()
    plan._planned.cache_clear()
    told = said(run("show", "--arch", "sm_90a", "--batch", "8", code=2))
    assert "entry 0" in told
    assert "split: 64 rows do not split into 3 parts" in told


# Check.


@pytest.mark.parametrize(("now", "code", "status"), [(51.0, 0, "in order"), (80.0, 1, "drifted")])
def test_check_times_a_table_again(gpu: ScriptedSteps, config: Path, now: float, code: int, status: str) -> None:
    run("tune", "--batch", "32,64", "--window", "4")
    gpu.times = {BEST: now}
    tuned.tables.cache_clear()
    facts = json.loads(run("check", "--json", code=code).output)
    assert [fact["status"] for fact in facts] == [status] * 2
    assert facts[0]["drift"] == pytest.approx(now / 50 - 1)
    assert status in said(run("check", "--sample", "1", code=code))


def test_check_refuses_a_wrong_kernel_and_a_table_of_another_device(gpu: ScriptedSteps, config: Path) -> None:
    assert "no tuned table for NVIDIA H200" in said(run("check", code=2))
    run("tune", "--batch", "32", "--window", "4")
    gpu.wrong = frozenset({BEST})
    assert "gate failed" in json.loads(run("check", "--table", str(config), "--json", code=1).output)[0]["status"]
    write_json(config, json.loads(config.read_text()) | {"device": "NVIDIA H100"})
    assert "got one for NVIDIA H100" in said(run("check", "--table", str(config), code=2))


# Window.


@pytest.fixture
def records(repository: Path) -> list[str]:
    """Windows of 8, 16 and 32 of one layer on an H200."""
    names = ("qwen3.5-122b-window-8", "qwen3.5-122b", "qwen3.5-122b-window-32")
    return [str(repository / f"docs/records/2026-11-29-h200-{name}.json") for name in names]


def best_window(*words: str, code: int = 0) -> dict[str, Any]:
    facts = json.loads(run("window", *words, "--batch", "256", "--json", code=code).output)
    (found,) = [fact for fact in facts if fact["state"] == "fp32"]
    return found


def test_the_window_of_measured_steps(records: list[str]) -> None:
    found = best_window(*records)
    assert [one["window"] for one in found["trades"]] == [8, 16, 32]
    assert [one["mean_us"] for one in found["trades"]] == pytest.approx([293.2, 282.4, 321.2], abs=0.05)
    assert found["best"] == 16
    together = best_window(*records, "--habit", "together")
    assert [one["slowest_us"] for one in together["trades"]] == pytest.approx([545.7, 560.3, 677.9], abs=0.05)
    assert together["best"] == 16
    assert best_window(*records, "--budget-mib", "4.2")["best"] == 8
    assert best_window(*records, "--habit", "together", "--slowest-us", "550")["best"] == 8
    assert best_window(*records, "--budget-mib", "4", code=1)["reason"].startswith("window: expected one of at most")
    told = said(run("window", *records, "--batch", "256"))
    assert "qwen3.5-122b-a10b fp32 x256: rows admitted together stay together: 274.4 us a step" in told


def test_an_acceptance_from_a_trace(records: list[str], tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("[1, 0, 1, 1]")
    found = best_window(*records, "--trace", str(tmp_path / "trace.json"), "--habit", "together")
    plain = best_window(*records, "--habit", "together")
    assert found["trades"][0]["us_per_token"] > plain["trades"][0]["us_per_token"]
    (tmp_path / "trace.json").write_text("[2]")
    told = run("window", *records, "--trace", str(tmp_path / "trace.json"), code=2)
    assert "trace: expected counts of 0 to 1" in said(told)


# Doctor, and what is refused everywhere.


def findings(code: int = 0) -> dict[str, dict[str, str]]:
    return {one["what"]: one for one in json.loads(run("doctor", "--json", code=code).output)}


def test_doctor_without_a_gpu(config: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = findings()
    assert found["replayssm"]["details"].startswith(replayssm.__version__)
    assert found["torch"]["details"] == version("torch")  # `torch.__version__` may say more, as 2.13.0+cu130
    assert found["GPU"]["state"] == found["gdn kernels"]["state"] == "missing"
    assert "only the torch twin runs; no GPU" in found["gdn kernels"]["details"]
    assert "replayssm/tuned.json" in found["user's table"]["details"]
    monkeypatch.setenv("HOME", str(config.parent.parent))
    assert "~/replayssm/tuned.json: `replayssm tune` makes it" in said(run("doctor"))
    assert "kernel cache" in said(run("doctor"))


def test_doctor_with_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(doctor, "kernel_modules", lambda: None)
    assert findings()["kda kernels"]["state"] == "works"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "supported are" in findings()["kda kernels"]["details"]

    def missing() -> None:
        raise NotImplementedError("CUDA tensors need nvidia-cutlass-dsl") from ImportError("No module named 'cutlass'")

    monkeypatch.setattr(doctor, "kernel_modules", missing)
    found = findings()
    assert "No module named 'cutlass'" in found["compiler"]["details"]
    assert "kernel cache" not in found


def test_doctor_finds_what_is_broken(config: Path, monkeypatch) -> None:
    write_json(config, table(HALVES))
    assert "1 entries measured for NVIDIA H200, sm_90a" in findings()["user's table"]["details"]
    config.write_text("{")
    assert findings(code=1)["user's table"]["state"] == "broken"
    config.unlink()
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    pytest.importorskip("cutlass")
    assert "REPLAYSSM_CACHE" in findings(code=1)["kernel cache"]["details"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune"], "--dry-run prints what would be tuned"),
        (["tune", "--arch", "sm_90a"], "--arch: only with --dry-run"),
        (["tune", "--dry-run", "--batch", "12"], "expected powers of two"),
        (["tune", "--dry-run", "--batch", "1,x"], "'x' is not a valid integer"),
        (["tune", "--dry-run", "--tokens", "17"], "17 is not in the range"),
        (["tune", "--dry-run", "--tokens", "8", "--window", "4"], "max_draft: expected 1 to min(16, window) = 4"),
        (["tune", "--dry-run", "--accepted", "3"], "a mean of 1 to 1 tokens"),
        (["tune", "--dry-run", "--model", "nemotron-3-supper"], "did you mean 'nemotron-3-super'"),
        (["tune", "--dry-run", "--tp", "3"], "divisor of the 128 heads"),
        (["show"], "pass --arch"),
        (["show", "--arch", "sm_90a", "--model", "kimi"], "did you mean 'kimi-k3'"),
        (["check"], "drift can only be measured"),
        (["window"], "Missing argument"),
        (["window", "pyproject.toml"], "expected the record of a benchmark"),
    ],
)
def test_what_is_refused(monkeypatch, repository: Path, words: list[str], message: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(repository)
    assert message in said(run(*words, code=2))


def test_the_document_shows_what_the_commands_print(repository: Path, monkeypatch) -> None:
    """But for `doctor`, whose output is that of one machine."""
    monkeypatch.chdir(repository)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tuned, "SHIPPED", repository / "replayssm/data/tuned")
    blocks = (repository / "docs/tuning.md").read_text().split("```\n$ replayssm ")[1:]
    shown = [block.partition("\n```")[0].splitlines() for block in blocks]
    assert {lines[0].split()[0] for lines in shown} == {"tune", "show", "window", "doctor"}
    for command, *lines in shown:
        if command != "doctor":
            assert [line.rstrip() for line in run(*command.split()).output.rstrip().splitlines()] == lines


def test_every_command_has_help() -> None:
    told = run("--help").output
    for command in ("tune", "show", "check", "window", "doctor", "predict", "bench", "warmup", "report", "memory"):
        assert f"  {command} " in told
        run(command, "--help")
