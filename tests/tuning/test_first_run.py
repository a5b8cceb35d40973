"""The one command for the first GPU of a kind: what it runs exists, its report hides nothing, readouts are compared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import replayssm
from replayssm.spec import LayerSpec
from tests.tuning.test_bench import machine
from tuning import first_run
from tuning.__main__ import main as tuning_command
from tuning.first_run import MODELS, SPECS, Ran, commands, compare, ran, report
from tuning.shapes import ModelShape, lookup

SMALL = ModelShape("small", LayerSpec("mamba2", 4, 2, 64, 64), 1, "made for this test")


def test_every_command_exists(repository: Path, tmp_path: Path) -> None:
    found = commands(tmp_path)
    assert len(found) == 6 + len(MODELS)
    for command in found.values():
        words = command[command.index("-m") + 1 :]
        module = words[0].replace(".", "/")
        assert words[0] == "pytest" or any((repository / f"{module}{end}").exists() for end in (".py", "/__main__.py"))
        assert all((repository / word).exists() for word in words if word.startswith("tests/"))
        if words[:2] == ["tuning", "bench"]:
            planned = CliRunner().invoke(tuning_command, [*words[1:], "--dry-run"])
            assert planned.exit_code == 0, planned.output
    assert all(lookup(model) for model in MODELS)


def test_a_report_says_what_failed_and_what_is_not_there() -> None:
    results = [
        ran("works", [sys.executable, "-c", "print('fine')"]),
        ran("fails", [sys.executable, "-c", "import sys; print('\\n' * 99 + 'wrong'); sys.exit(3)"]),
        ran("is missing", ["no-such-tool"]),
    ]
    assert [result.status for result in results[:2]] == [0, 3]
    lines = list(report(results))
    assert any(line.startswith("| works | yes |") for line in lines)
    assert any(line.startswith("| fails | no (3) |") for line in lines)
    assert any(line.startswith("| is missing | no (FileNotFoundError") for line in lines)
    assert "fine" in "\n".join(lines) and "wrong" in "\n".join(lines)
    assert len(results[1].output.splitlines()) <= first_run.TAIL


def test_the_report_is_there_after_each_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sizes = tmp_path / "report.md", list[int]()

    def scripted(what: str, command: list[str]) -> Ran:
        sizes.append(len(path.read_text()) if path.exists() else 0)
        return Ran(what, " ".join(command), 0 if len(sizes) < 3 else 1, 1.0, "")

    monkeypatch.setattr(first_run, "ran", scripted)
    done = CliRunner().invoke(first_run.main, [str(path)])
    assert done.exit_code == 1
    assert sizes == sorted(set(sizes)) and len(sizes) == len(commands(tmp_path))


def on_twin(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any, torch.Tensor], None]) -> list[str]:
    """Let steps run the torch twin, and `spoil` their outputs; the readouts that were asked for."""
    asked, step = list[str](), replayssm.step

    def scripted(*arguments: Any, config: Any, **more: Any) -> torch.Tensor:
        asked.append(config.readout)
        out = step(*arguments, **more)
        spoil(config, out)
        return out

    monkeypatch.setattr(first_run.replayssm, "step", scripted)
    return asked


@pytest.mark.parametrize("state", SPECS)
def test_all_readouts_are_checked_and_timed(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = on_twin(monkeypatch, lambda config, out: None)
    found = compare(SMALL, state, 4, replace(machine([]), arch="sm_103a"), rows=4)
    assert [one.what for one in found] == ["read", "fold"]
    wanted = {"mma", "tcgen05"} | ({"tcgen05_f16"} if state == "nvfp4" else set())
    assert all(one.times_us == dict.fromkeys(wanted, 10.0) for one in found)
    assert set(asked) == wanted


def test_a_wrong_readout_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    on_twin(monkeypatch, lambda config, out: out.mul_(2) if config.readout == "tcgen05" else None)
    found = compare(SMALL, "fp32", 4, replace(machine([]), arch="sm_103a"), rows=4)
    assert all(one.times_us["mma"] == 10.0 and "GateFailedError" in str(one.times_us["tcgen05"]) for one in found)


def test_an_architecture_without_tcgen05_has_one_readout(monkeypatch: pytest.MonkeyPatch) -> None:
    on_twin(monkeypatch, lambda config, out: None)
    found = compare(SMALL, "fp32", 4, replace(machine([]), arch="sm_90a"), rows=4)
    assert all(list(one.times_us) == ["mma"] for one in found)
