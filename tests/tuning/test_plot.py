"""A picture shows the figures of the record and nothing else.

Grid: records of several windows, of several batches and of a study of precision, of the repository; one of neither; no
matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from replayssm import ReplaySpec, bytes_per_slot
from replayssm.tuned import Choice, Shape, Table
from tuning.__main__ import main
from tuning.plot import figure, series
from tuning.shapes import lookup

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "docs" / "records"
WINDOWS, BATCHES = (RECORDS / f"2026-12-01-h200-nemotron-3-super-{what}.json" for what in ("windows", "verify"))
PRECISION = RECORDS / "2026-11-30-cpu-precision-near-one.json"


def entries_of(record: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(record.read_text())["entries"]
    return entries


def test_time_and_memory_against_the_window() -> None:
    entries = entries_of(WINDOWS)
    panels = series(entries)
    assert {name for name, lines in panels.items() if lines} == {"window", "memory"}
    line = panels["window"]["nemotron-3-super fp32, T = 8, batch 256"]
    told = {e["replay"]["window"]: e["median_us"] for e in entries if e["what"] == "average" and e["num_tokens"] == 8}
    assert line == sorted(told.items()) and [window for window, _ in line] == [16, 24, 32, 48]
    slot = bytes_per_slot(lookup("nemotron-3-super").layer, ReplaySpec(32, 4))
    assert (32, sum(slot.values()) / 2**20) in panels["memory"]["nemotron-3-super fp32, T = 4"]


def test_speed_up_and_share_of_the_limit_against_the_batch() -> None:
    entries = entries_of(BATCHES)
    panels = series(entries)
    assert {name for name, lines in panels.items() if lines} == {"speedup", "limit"}
    (average,) = [
        e
        for e in entries
        if (e["what"], e.get("num_tokens"), e.get("rows")) == ("average", 4, 256)
        and e["replay"]["checkpoint"] == "bfloat16"
    ]
    assert (256, average["speedup"]) in panels["speedup"]["nemotron-3-super bf16, T = 4, L = 16"]
    assert len(panels["limit"]) == 2 * 2 * 3
    assert all(len(line) == 3 and all(0 < share <= 100 for _, share in line) for line in panels["limit"].values())


def test_error_against_tokens() -> None:
    entries = entries_of(PRECISION)
    panels = series(entries)
    assert {name for name, lines in panels.items() if lines} == {"mamba2", "gdn", "kda"}
    told = [(e["tokens"], e["mean"]) for e in entries if (e["recurrence"], e["scheme"]) == ("gdn", "shared nvfp4")]
    assert panels["gdn"]["shared nvfp4, near-one"] == sorted(told) and len(told) > 1


def test_what_tuning_gained_against_the_batch(tmp_path: Path) -> None:
    """Of entries that kept the times of the heuristic and of the worst."""
    shape = Shape.of(lookup("kimi-k3", tp=8).layer, ReplaySpec(max_draft=4), 4)
    config = {"split": 1, "warps": 2, "ctas": 1, "fold_values": 32, "heads": 1}
    choices = {rows: Choice(config, 10.0, heuristic_us=10.0 + rows, worst_us=20.0 + rows) for rows in (1, 32)}
    choices[8] = Choice(config, 9.0)
    entries = Table("NVIDIA H200", "sm_90a", "measured", {}, "made for this test", {shape: choices}).to_json()[
        "entries"
    ]
    panels = {name: lines for name, lines in series(entries).items() if lines}
    line = "kimi-k3@tp8 fp32, T = 4, L = 16"
    assert panels == {"gained": {line: [(1, 1.1), (32, 4.2)]}, "worst": {line: [(1, 2.1), (32, 5.2)]}}
    (tmp_path / "t.json").write_text(json.dumps({"schema": 2, "entries": entries}))
    told = CliRunner().invoke(main, ["report", str(tmp_path / "t.json")])
    assert told.exit_code == 0 and "| 10.0 / 11.0 / 21.0 | 9.0 | 10.0 / 42.0 / 52.0 |" in told.output


@pytest.mark.parametrize(
    ("record", "panels"), [(WINDOWS, 2), (BATCHES, 2), (PRECISION, 3)], ids=lambda value: str(value)[-12:]
)
def test_the_figure_draws_every_line(record: Path, panels: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib; pip install '.[plot]' brings it")
    entries = entries_of(record)
    drawn = figure(entries).axes
    lines = [lines for lines in series(entries).values() if lines]
    assert [len(axes.lines) for axes in drawn] == [len(panel) for panel in lines] and len(drawn) == panels
    told = CliRunner().invoke(main, ["report", str(record), "--plot", str(tmp_path / "a.png")])
    assert told.exit_code == 0 and (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [e for e in entries_of(BATCHES) if e.get("rows") == 256]
    (tmp_path / "r.json").write_text(json.dumps({"entries": alone}))
    words = ["report", str(tmp_path / "r.json"), "--plot", str(tmp_path / "a.png")]
    told = CliRunner().invoke(main, words)
    assert told.exit_code == 2 and (
        "several windows, batches or tokens" in told.output or "not installed" in told.output
    )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    told = CliRunner().invoke(main, ["report", str(WINDOWS), "--plot", str(tmp_path / "a.png")])
    assert told.exit_code == 2 and "pip install 'replayssm[plot]'" in told.output
    assert not (tmp_path / "a.png").exists()
