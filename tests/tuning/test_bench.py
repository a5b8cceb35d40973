"""A whole benchmark run on the CPU, and its command line: everything but the GPU's own times.

The machine is scripted: the verbs run the torch twin, so the gates are real, and the timer gives times that are known.
Claimed: the record holds every case with bytes, limits and derived figures; a wrong kernel is recorded without a time
and ends in exit code 1; a time limit leaves out the rest and says so; the record on disk is whole after each entry.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

import replayssm
from cute_kernels.configs import GdnOptions, StepConfig
from replayssm.plan import OPTIONS as OPTIONS_OF_PLANS
from replayssm.reference import replay as reference
from replayssm.spec import LayerSpec, Recurrence, ReplaySpec
from tuning import bench, first_call
from tuning.__main__ import main
from tuning.bench import Bench, Deadline, Machine
from tuning.matrix import ALL_MODELS, Options, exit_code
from tuning.measure import Probes, Timing
from tuning.report import results_table
from tuning.shapes import ModelShape, lookup
from tuning.store import Record

TINY = ModelShape("tiny", LayerSpec("mamba2", 4, 2, 16, 32), 3, "made for this test")
TINY_DELTA = {
    "gdn": ModelShape("tiny-gdn", LayerSpec("gdn", 4, 2, 16, 32), 3, "made for this test"),
    "kda": ModelShape("tiny-kda", LayerSpec("kda", 4, 4, 16, 32), 3, "made for this test", lower_bound=-5.0),
}
OPTIONS = Options(
    shapes=(TINY,), batches=(2, 32), checkpoints=(torch.float32,), windows=(4,), rounds=2, first_call=False
)


class ConstantTimer:
    """Every replay takes 10 us; launches run when they are captured."""

    def capture(self, launch):
        launch()
        return launch

    def sample(self, captured):
        return [10.0] * len(captured)


def machine(read: list[int]) -> Machine:
    timings = [Timing(t, t, t, 2) for t in (100.0, 220.0, 4.0, 12.0, 12.0)]
    return Machine(
        device=torch.device("cpu"),
        device_name="a CPU",
        arch=None,
        timer=ConstantTimer(),
        probe=lambda words, rounds: Probes(words.numel() * 4, *timings),
        reader=lambda words: lambda: read.append(words.numel() * 4),
        synchronize=lambda: None,
        probe_bytes=1 << 16,
        host_calls=1,
    )


def run(options: Options = OPTIONS, record: Record | None = None) -> Record:
    record = record or Record(None, {"protocol": "scripted"})
    Bench(options, machine([]), record, Console(quiet=True)).run()
    return record


def test_a_run_records_every_case_with_bytes_and_limits() -> None:
    entries = run().entries
    assert [entries[0]["what"], entries[-1]["what"]] == ["probes", "probes_at_end"]
    got = [(entry["rows"], entry["what"]) for entry in entries[1:-1]]
    steps = ["nonflush", "flush", "plain"]
    assert got == [
        *[(2, what) for what in (*steps, "average", "read", "commit", "host")],
        *[(32, what) for what in (*steps, "mixed", "nonflush_z", "average", "read", "commit")],
    ]
    for entry in entries[1:-1]:
        assert entry["status"] == "measured"
        if entry["what"] in (*steps, "mixed", "nonflush_z"):
            assert entry["median_us"] == 10.0
            assert entry["ratio"] == pytest.approx(10.0 / entry["limit_us"])
            assert entry["bytes"] > 0
        if entry["what"] == "average":
            assert entry["speedup"] == 1.0
    assert exit_code(entries) == 0
    assert results_table(entries).row_count == len(got)


@pytest.mark.parametrize("shape", [TINY, *TINY_DELTA.values()], ids=lambda shape: shape.name)
def test_a_run_of_several_tokens(shape: ModelShape) -> None:
    options = replace(OPTIONS, shapes=(shape,), windows=(4, 6), tokens=(1, 4), accepted=None, batches=(2, 32))
    entries = [entry for entry in run(options).entries if "layer" in entry]
    assert {entry["status"] for entry in entries} == {"measured"}
    groups = dict.fromkeys((e["num_tokens"], e["replay"]["window"]) for e in entries if e["what"] != "plain")
    assert list(groups) == [(1, 4), (1, 6), (4, 4), (4, 6)]
    assert [(e["num_tokens"], e["rows"]) for e in entries if e["what"] == "commit"] == [
        (1, 2),
        (1, 32),
        (4, 2),
        (4, 32),
    ]
    assert {e["what"] for e in entries if (e["num_tokens"], e["replay"]["window"]) == (4, 4)} == {"plain", "commit"}
    several = {e["what"]: e for e in entries if (e["num_tokens"], e["replay"]["window"], e["rows"]) == (4, 6, 32)}
    assert {"nonflush", "flush", "mixed", "average", "read"} <= several.keys()
    assert {e["accepted"] for e in several.values()} == {2.0}
    assert [several[what]["records"] for what in ("nonflush", "flush")] == [2, 6]
    average, mixed = several["average"], several["mixed"]
    assert average["us_per_token"] == average["median_us"] / 2
    assert 0 < average["fold_share"] < 1
    assert mixed["bytes"] == pytest.approx(average["bytes"], rel=0.05)  # as near as 32 rows come to the shares


def test_a_verification_that_loses_a_token_is_recorded_without_a_time(monkeypatch) -> None:
    def forgets_the_last(pool, cursors, inputs, *, cache_indices, out):
        before = pool.value.clone()
        reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
        slots = cache_indices.long()
        last = (cursors.ring_start + cursors.num_committed)[slots].long() + pool.replay.max_draft - 1
        place = last % pool.replay.ring_capacity
        pool.value[slots, :, place] = before[slots, :, place]

    monkeypatch.setattr(replayssm, "step", forgets_the_last)
    entries = run(replace(OPTIONS, windows=(6,), tokens=(4,), batches=(2,))).entries
    failed = {entry["what"]: entry["reason"] for entry in entries if entry["status"] == "gate failed"}
    assert failed.keys() == {"nonflush", "flush", "plain", "nonflush_z"}
    assert all("value ring" in reason for reason in failed.values())
    assert exit_code(entries) == 1


def test_the_record_says_how_the_kernel_is_launched() -> None:
    """A machine that kernels are planned for: shapes that a kernel covers, with the twin in its place."""
    shape = ModelShape("small", LayerSpec("gdn", 2, 1, 64, 64), None, "made for this test")
    record = Record(None, {})
    options = replace(OPTIONS, shapes=(shape,), windows=(6,), tokens=(1, 4), batches=(2,))
    Bench(options, replace(machine([]), arch="sm_90a"), record, Console(quiet=True)).run()
    configs = {e["num_tokens"]: e["config"] for e in record.entries if e["what"] == "nonflush"}
    assert configs[4] == asdict(StepConfig(warps=2, ctas=6, fold_values=64, precision="tf32")) | {"source": "heuristic"}
    assert configs[1]["source"] == "heuristic"
    assert all("config" not in e for e in record.entries if e["what"] in ("commit", "average", "read"))


@pytest.mark.parametrize("recurrence", TINY_DELTA)
def test_a_run_of_a_delta_rule(recurrence: str) -> None:
    entries = run(replace(OPTIONS, shapes=(TINY_DELTA[recurrence],))).entries[1:-1]
    steps = ["nonflush", "flush", "plain"]
    assert [(entry["rows"], entry["what"]) for entry in entries] == [
        *[(2, what) for what in (*steps, "average", "read", "commit", "host")],
        *[(32, what) for what in (*steps, "mixed", "average", "read", "commit")],
    ]
    assert {entry["status"] for entry in entries} == {"measured"}
    assert {entry["layer"]["recurrence"] for entry in entries} == {recurrence}


def test_a_layer_without_a_kernel_is_recorded_as_such(monkeypatch) -> None:
    def refuses(*args, **kwargs):
        raise NotImplementedError("CUDA kernels exist for others")

    monkeypatch.setattr(replayssm, "step", refuses)
    monkeypatch.setattr(bench, "first_call_in_new_process", None)  # no process is started for it
    entries = run(replace(OPTIONS, shapes=(TINY_DELTA["kda"],), batches=(2,), first_call=True)).entries
    refused = {entry["what"] for entry in entries if entry["status"] == "not supported"}
    assert refused == {"nonflush", "flush", "plain", "first_call_cold"}
    assert exit_code(entries) == 0


def test_the_limit_uses_the_rates_probed_in_the_run() -> None:
    entries = run().entries
    rates = entries[0]["bytes_per_us"]
    assert rates == {"read": (1 << 16) / 100.0, "read_write": 2 * (1 << 16) / 220.0}
    by_what = {entry["what"]: entry for entry in entries if entry.get("rows") == 2}
    assert by_what["nonflush"]["limit_us"] == pytest.approx(by_what["nonflush"]["bytes"] / rates["read"])
    assert by_what["flush"]["limit_us"] == pytest.approx(by_what["flush"]["bytes"] / rates["read_write"])


def test_a_wrong_kernel_is_recorded_without_a_time(monkeypatch) -> None:
    def wrong_when_folding(pool, cursors, inputs, *, cache_indices, out):
        reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
        if pool.replay.window == 4 and bool((cursors.num_committed == 4).any()):
            out.mul_(1.1)

    monkeypatch.setattr(replayssm, "step", wrong_when_folding)
    entries = run(replace(OPTIONS, batches=(2,))).entries
    failed = [entry for entry in entries if entry["status"] == "gate failed"]
    assert [entry["what"] for entry in failed] == ["flush"]
    assert "median_us" not in failed[0]
    assert "output: expected a relative error" in failed[0]["reason"]
    assert {entry["what"] for entry in entries} >= {"nonflush", "plain", "commit"}
    assert "average" not in {entry["what"] for entry in entries}
    assert exit_code(entries) == 1
    assert results_table(entries).row_count == len(entries) - 2


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(NotImplementedError("head_dim"), "not supported", 0), (RuntimeError("launch"), "gate failed", 1)],
)
def test_a_step_that_raises_does_not_end_the_run(monkeypatch, error: Exception, status: str, code: int) -> None:
    def refuses(*args, **kwargs):
        raise error

    monkeypatch.setattr(replayssm, "step", refuses)
    entries = run(replace(OPTIONS, batches=(2,))).entries
    assert {entry["what"]: entry["status"] for entry in entries if entry["status"] != "measured"} == {
        "nonflush": status,
        "flush": status,
        "plain": status,
        "nonflush_z": status,
    }
    assert exit_code(entries) == code


def test_a_wrong_commit_is_recorded_without_a_time(monkeypatch) -> None:
    monkeypatch.setattr(replayssm, "commit", lambda cursors, **rows: None)
    entries = run(replace(OPTIONS, batches=(2,))).entries
    assert [entry["status"] for entry in entries if entry.get("what") == "commit"] == ["gate failed"]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_short_run_on_this_gpu(tokens: int) -> None:
    shape = lookup("nemotron-3-super", tp=8)
    options = Options(
        shapes=(shape,),
        batches=(1, 32),
        checkpoints=(torch.float32,),
        tokens=(tokens,),
        rounds=3,
        first_call=False,
    )
    record = Record(None, {})
    Bench(options, Machine.current_cuda(), record, Console()).run()
    rates = record.entries[0]["bytes_per_us"]
    assert 1e6 < rates["read_write"] < rates["read"] < 10e6  # 1 to 10 TB/s: sm_90 to sm_103
    assert {entry["status"] for entry in record.entries} == {"measured"}
    floor = record.entries[0]["empty"]["median_us"]
    assert all(entry["median_us"] > floor for entry in record.entries if entry["what"] in ("nonflush", "flush"))


def test_a_time_limit_leaves_out_the_rest_and_says_so() -> None:
    entries = run(replace(OPTIONS, time_limit_s=0.0, first_call=True)).entries
    assert {(entry["status"], entry.get("reason")) for entry in entries[1:-1]} == {("skipped", "time limit")}
    assert entries[1:-1][-1]["what"] == "first_call_cold"
    assert exit_code(entries) == 0


def test_deadline() -> None:
    now = [100.0]
    deadline = Deadline(60.0, clock=lambda: now[0])
    now[0] = 130.0
    assert deadline.left_s == 30.0
    assert Deadline(None).left_s == float("inf")


def test_the_record_on_disk_is_whole_after_each_entry(tmp_path) -> None:
    path = tmp_path / "made" / "bench.json"
    record = Record(path, {"protocol": "scripted"})
    for count in (1, 2):
        record.add({"what": f"entry {count}", "status": "measured"})
        saved = json.loads(path.read_text())
        assert len(saved["entries"]) == count
    assert saved["protocol"] == "scripted"
    assert {"date", "torch", "cutlass_dsl", "driver", "device"} <= set(saved)
    assert [found.name for found in path.parent.iterdir()] == ["bench.json"]


def test_first_calls_are_cold_and_then_from_disk(monkeypatch) -> None:
    caches: list[str] = []

    def call(shape, replay, rows, cache):
        caches.append(cache)
        return {"median_us": 9e5 if len(caches) == 1 else 3e4, "import_us": 6e5}

    monkeypatch.setattr(bench, "first_call_in_new_process", call)
    entries = run(replace(OPTIONS, batches=(2,), first_call=True)).entries
    calls = [(entry["what"], entry["median_us"]) for entry in entries if entry["what"].startswith("first_call")]
    assert calls == [("first_call_cold", 9e5), ("first_call_from_disk", 3e4)]
    assert len(set(caches)) == 1


def test_a_first_call_that_fails_is_recorded(monkeypatch) -> None:
    done = subprocess.CompletedProcess([], 3, stdout="", stderr="no such GPU")
    monkeypatch.setattr(first_call.subprocess, "run", lambda *args, **kwargs: done)
    entries = run(replace(OPTIONS, batches=(2,), first_call=True)).entries
    (failed,) = [entry for entry in entries if entry["status"] == "failed"]
    assert failed["what"] == "first_call_cold"
    assert "ended with 3: no such GPU" in failed["reason"]


def test_first_call_hands_its_facts_to_the_new_process(monkeypatch) -> None:
    seen = {}

    def run_process(command, *, env, **rest):
        seen.update(command=command, cache=env["REPLAYSSM_CACHE"])
        return subprocess.CompletedProcess(
            command, 0, stdout='noise\n{"median_us": 5.0, "import_us": 1.0}\n', stderr=""
        )

    monkeypatch.setattr(first_call.subprocess, "run", run_process)
    replay = ReplaySpec(window=5, max_draft=3, checkpoint_dtype=torch.float16)
    measured = first_call.first_call_in_new_process(TINY, replay, 8, "a folder")
    assert measured == {"median_us": 5.0, "import_us": 1.0}
    assert seen["command"][1:3] == ["-m", "tuning.first_call"]
    assert seen["cache"] == "a folder"
    called = []
    monkeypatch.setattr(first_call, "first_call", lambda *facts: called.append(facts) or {})
    first_call.main(seen["command"][3:])
    assert called == [(TINY, replay, 8)]


def test_dry_run_prints_the_plan_without_a_gpu() -> None:
    result = CliRunner().invoke(main, ["bench", "--dry-run", "--all", "--batch", "256", "--checkpoint", "fp32"])
    assert result.exit_code == 0
    rows = [line for line in result.output.splitlines() if "nemotron-3-super " in line and " nonflush " in line]
    assert len(rows) == 1
    assert "1126.89" in rows[0]
    assert "247.5" in rows[0]
    for name in ("nemotron-3-super@tp8", "nemotron-3-nano-4b", "nemotron-3-nano-30b", "nemotron-3-ultra"):
        assert name in result.output


@pytest.mark.parametrize("recurrence", ["gdn", "kda"])
def test_dry_run_of_all_layers_of_a_recurrence(recurrence: Recurrence) -> None:
    words = ["bench", "--dry-run", "--all", "--recurrence", recurrence, "--batch", "256", "--window", "32"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0
    for name, tp in ALL_MODELS[recurrence]:
        assert f" {lookup(name, tp=tp).name} " in result.output
    assert "nemotron" not in result.output
    assert "nonflush_z" not in result.output


def test_dry_run_of_several_tokens() -> None:
    words = ["bench", "--dry-run", "--batch", "256", "--checkpoint", "fp32", "--tokens", "4", "--tokens", "8"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    rows = [line.split("│") for line in result.output.splitlines() if " nonflush " in line]
    assert [(row[4].strip(), row[5].strip(), row[9].strip()) for row in rows] == [
        ("4", "16", "257.0"),
        ("8", "16", "269.6"),
    ]


def test_memory_by_tokens() -> None:
    result = CliRunner().invoke(main, ["memory", "--model", "nemotron-3-super"])
    assert result.exit_code == 0, result.output
    head, _, *rows = result.output.strip().splitlines()
    assert head == "| T | nemotron-3-super: ReplaySSM | nemotron-3-super: T states | nemotron-3-super: T + 1 states |"
    # 40 layers of a state of 4 MiB and 20 or 32 records of 16 KiB x, 2 KiB B and 512 bytes of dt.
    assert len(rows) == 16
    assert rows[3] == f"| 4 | {40 * (4 + 20 * 18.5 / 1024):.1f} | 640.0 | 800.0 |"
    assert rows[15] == f"| 16 | {40 * (4 + 32 * 18.5 / 1024):.1f} | 2560.0 | 2720.0 |"
    assert len(CliRunner().invoke(main, ["memory", "--window", "5"]).output.strip().splitlines()) == 2 + 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "--tokens", "17"], "17 is not in the range"),
        (["bench", "--tokens", "8", "--window", "4"], "fit into a window"),
        (["bench", "--tokens", "4", "--accepted", "5"], "a mean of 1 to 4 tokens"),
        (["bench", "--model", "nemotron-3-supper"], "did you mean 'nemotron-3-super'"),
        (["bench", "--window", "65"], "65 is not in the range"),
        (["bench", "--recurrence", "gdn"], "add --all"),
        (["bench", "--all", "--recurrence", "rwkv"], "'mamba2', 'gdn', 'kda'"),
        (["warmup", "--model", "qwen3.5-27b", "--z", "--arch", "sm_90a"], "only mamba2 layers"),
        (["warmup", "--model", "qwen3.5-27b", "--parameter", "bf16", "--arch", "sm_90a"], "only mamba2 layers"),
        (["warmup", "--model", "nemotron-3-super", "--round-beta", "--arch", "sm_90a"], "only gdn layers"),
        (["warmup", "--model", "nemotron-3-super", "--tp", "3", "--arch", "sm_90a"], "divisor of the 128 heads"),
    ],
)
def test_wrong_command_lines_end_with_2_and_a_remedy(words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_warmup_of_a_recurrence_without_kernels_names_models_that_have_some(monkeypatch) -> None:
    monkeypatch.delitem(OPTIONS_OF_PLANS, "kda", raising=False)
    result = CliRunner().invoke(main, ["warmup", "--model", "kimi-k3", "--arch", "sm_90a"])
    assert result.exit_code == 2
    assert "no kernels for kda; known are" in result.output
    assert "qwen3.5-27b" in result.output


def test_without_a_gpu_the_command_says_what_works(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, remedy in ((["bench"], "--dry-run"), (["warmup", "--model", "nemotron-3-super"], "pass --arch")):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 2
        assert remedy in result.output


def test_warmup_compiles_what_the_model_decodes_with(monkeypatch) -> None:
    seen = {}

    def compile_all(layer, replay, options, *, arch, batches):
        seen.update(layer=layer, replay=replay, options=options, arch=arch, batches=batches)
        return ["a plan"]

    monkeypatch.setattr(replayssm, "warmup", compile_all)
    words = ["warmup", "--model", "nemotron-3-super", "--tp", "4", "--window", "8", "--checkpoint", "bf16"]
    words += ["--dt", "fp32", "--z", "--arch", "sm_103a"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "nemotron-3-super@tp4 on sm_103a: 1 step kernels" in result.output
    assert seen["layer"] == LayerSpec("mamba2", 32, 2, 64, 128)
    assert seen["replay"] == ReplaySpec(8, 1, torch.bfloat16, torch.bfloat16)
    options = seen["options"]
    assert (options.dt_dtype, options.D_dtype, options.dt_bias_dtype) == ("float32", "bfloat16", "bfloat16")
    assert options.has_z
    assert options.dt_softplus

    words = ["warmup", "--model", "qwen3.5-122b-a10b", "--gates", "fp32", "--round-beta", "--arch", "sm_90a"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert seen["layer"] == LayerSpec("gdn", 64, 16, 128, 128)
    assert seen["options"] == GdnOptions(128**-0.5, "float32", "float32", round_beta=True)
