"""The documents quote the records: each table in them is what the record beside them prints today.

Grid: every record of a benchmark or a study in the repository (other kinds of record have no entries); a table whose
figures were typed by hand, or whose record was replaced, differs. The table of several tokens and windows is pinned on
entries made here, that of memory, which is computed, as the documents quote it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from replayssm.spec import LayerSpec, ReplaySpec
from replayssm.tuned import Shape
from tuning.__main__ import main
from tuning.documents import OTHERS, TABLES, records_of, refreshed
from tuning.report import markdown_table
from tuning.shapes import lookup

ROOT = Path(__file__).resolve().parents[2]


def is_of_steps(path: Path) -> bool:
    """Whether a record is of `bench` or `precision`."""
    record = json.loads(path.read_text())
    return "entries" in record and "peers" not in record


RECORDS = [path for path in sorted((ROOT / "docs" / "records").glob("*.json")) if is_of_steps(path)]


def test_there_are_records() -> None:
    assert RECORDS


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_documents_quote_the_record(record: Path) -> None:
    printed = CliRunner().invoke(main, ["report", str(record)]).output.strip()
    assert printed.count("\n") >= 2  # a head and a row
    document = "precision" if "precision" in record.stem else "performance"
    text = (ROOT / "docs" / f"{document}.md").read_text()
    assert all(table in text for table in printed.split("\n\n"))


def test_a_changed_figure_shows() -> None:
    entries = json.loads(RECORDS[0].read_text())["entries"]
    table = markdown_table(entries)
    next(e for e in entries if e["what"] == "nonflush")["median_us"] += 1.0
    assert markdown_table(entries) != table


def test_what_was_not_measured_has_no_row() -> None:
    entries = json.loads(RECORDS[0].read_text())["entries"]
    rows = markdown_table(entries).count("\n")
    failed = next(e for e in entries if e["what"] == "flush")
    failed["status"] = "gate failed"
    assert markdown_table(entries).count("\n") == rows - 1


def entry(what: str, tokens: int, window: int, us: float, **more: float) -> dict[str, Any]:
    layer = {"name": "qwen3.5-4b", **asdict(lookup("qwen3.5-4b").layer)}
    replay = {"window": window, "checkpoint": "float32", "activation": "bfloat16"}
    head = {"layer": layer, "replay": replay, "rows": 256, "num_tokens": tokens, "what": what, "status": "measured"}
    return {**head, "median_us": us, "ratio": us / 100, **more}


def batch(tokens: int, window: int, us: float, *, mixed: bool = True) -> list[dict[str, Any]]:
    average = {"accepted": tokens / 2, "fold_share": 0.25, "us_per_token": 2 * us / tokens, "speedup": 400 / us}
    entries = [entry("nonflush", tokens, window, us - 10), entry("flush", tokens, window, us + 200)]
    entries += [entry("plain", tokens, tokens, 400.0)] + [entry("mixed", tokens, window, us + 5)] * mixed
    return [*entries, entry("average", tokens, window, us, **average)]


def test_several_tokens_have_a_row_each() -> None:
    head, _, first, second = markdown_table(batch(4, 16, 140.0) + batch(8, 16, 160.0, mixed=False)).splitlines()
    layer = "| qwen3.5-4b, 32/16 x 128 x 128 | fp32 | 256 "
    assert head.count("|") == first.count("|") == 17
    assert first == layer + "| 4 | 16 | 130.0 | 1.30 | 340.0 | 3.40 | 140.0 | 400.0 | 2.86 | 2 | 0.250 | 70.0 | 145.0 |"
    assert second == layer + "| 8 | 16 | 150.0 | 1.50 | 360.0 | 3.60 | 160.0 | 400.0 | 2.50 | 4 | 0.250 | 40.0 |  |"


def test_the_best_window_is_named() -> None:
    *_, blank, head, _, choice = markdown_table(
        batch(4, 16, 140.0) + batch(4, 24, 135.5) + batch(4, 32, 150.0) + batch(8, 16, 160.0)
    ).splitlines()
    assert blank == ""
    assert head.endswith("| T | windows | best | average |")
    assert choice.endswith("| 4 | 16, 24, 32 | 24 | 135.5 |")


def test_documents_quote_the_memory() -> None:
    printed = CliRunner().invoke(main, ["memory"]).output.strip()
    assert printed in (ROOT / "docs" / "performance.md").read_text()


def test_tables_are_made_from_the_records_that_a_document_names(tmp_path: Path) -> None:
    for document in (ROOT / "docs" / "performance.md", ROOT / "docs" / "tuning.md"):
        assert refreshed(document) == document.read_text()
    (tmp_path / "r.json").write_text(json.dumps({"entries": json.loads(RECORDS[0].read_text())["entries"]}))
    stale = tmp_path / "d.md"
    stale.write_text("before\n<!-- goals r.json -->\nby hand\n<!-- end -->\nafter\n")
    assert CliRunner().invoke(main, ["refresh", str(stale)]).exit_code == 0
    assert "by hand" not in stale.read_text() and stale.read_text().count("met |") >= 3
    assert stale.read_text().startswith("before\n<!-- goals r.json -->\n| layer") and stale.read_text().endswith(
        "\nafter\n"
    )
    stale.write_text("<!-- steps lost.json -->\n<!-- end -->")
    lost = CliRunner().invoke(main, ["refresh", str(stale)])
    assert lost.exit_code == 2 and "lost.json" in lost.output


def table_of(name: str, *words: str) -> list[list[str]]:
    """The cells of a table of the documents, below its head."""
    records = [json.loads((ROOT / "docs" / word).read_text()) for word in words if word.endswith(".json")]
    text = TABLES[name](records, [word for word in words if not word.endswith(".json")])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()[2:]]


SUPER, COPIES = "records/2026-11-29-h200-nemotron-3-super.json", "records/2026-12-01-h200-nemotron-3-super-copies.json"


def test_probes_are_the_first_of_each_run() -> None:
    rows = table_of("probes", SUPER, COPIES)
    dates = [json.loads((ROOT / "docs" / path).read_text())["date"] for path in (SUPER, COPIES)]
    assert [row[0] for row in rows] == [date[:16].replace("T", " ") for date in dates]
    first = json.loads((ROOT / "docs" / SUPER).read_text())["entries"][0]
    assert first["what"] == "probes" and rows[0][1] == f"{first['read']['median_us']:.1f}"
    assert float(rows[0][2]) == pytest.approx(2**30 / first["read"]["median_us"] / 1e6, abs=0.01)
    assert float(rows[0][4]) == pytest.approx(2**31 / first["rewrite"]["median_us"] / 1e6, abs=0.01)


def test_others_are_what_the_words_name() -> None:
    assert {row[4] for row in table_of("others", SUPER, "commit")} == {"commit"}
    everything = table_of("others", SUPER)
    assert {row[4] for row in everything} == set(OTHERS.values())
    entries = json.loads((ROOT / "docs" / SUPER).read_text())["entries"]
    assert len(everything) == sum(entry["what"] in OTHERS for entry in entries)
    assert next(row[5] for row in everything if row[4] == "first call, compiled").endswith(" ms")


def test_a_change_shows_what_two_records_have_in_common() -> None:
    def record(read: float, fold: float, average: float) -> list[dict[str, Any]]:
        steps = {"nonflush": read, "flush": fold, "average": average, "plain": 22.0}
        return [entry(what, 1, 16, us, speedup=2, fold_share=0.1, us_per_token=us) for what, us in steps.items()]

    old, new = record(10, 20, 11), record(9, 21, 10)
    text = TABLES["change"]([{"entries": old}, {"entries": [*new, entry("nonflush", 4, 16, 30)]}], [])
    assert text.splitlines()[2:] == [
        "| qwen3.5-4b, 32/16 x 128 x 128 | fp32 | 256 | 1 | 16 | 10.0 | 9.0 | 20.0 | 21.0 | 11.0 | 10.0 |"
    ]


def test_windows_are_compared_where_there_are_several() -> None:
    paths = [f"records/2026-11-29-h200-qwen3.5-122b{part}.json" for part in ("-window-8", "", "-window-32")]
    ((layer, state, rows, tokens, averages, best, share),) = table_of("windows", *paths)
    assert (state, rows, tokens) == ("fp32", "256", "1") and layer.startswith("qwen3.5-122b")
    by_window = dict(part.split(": ") for part in averages.split(", "))
    assert list(by_window) == ["8", "16", "32"] and best == min(by_window, key=lambda window: float(by_window[window]))
    assert (best, share) == ("16", "1.000")


def test_a_window_of_16_is_best_but_where_the_document_says() -> None:
    text = " ".join((ROOT / "docs" / "tuning.md").read_text().split("\n"))
    said = (
        "but for 4 and 8 tokens a step of Super, with a bfloat16 state for GLM-5.3-Flash, and with FP8 copies and "
        "Qwen3.5-122B's NVFP4 copy."
    )
    assert f"is the best of them, or within 1 %, {said}" in text
    rows = table_of("windows", *re.search("<!-- windows (.*) -->", text)[1].split())
    assert len(rows) >= 30
    others = [row for row in rows if row[5] != "16" and float(row[6]) > 1.01]
    better = {" ".join((row[0].split(",")[0], row[1], row[3])) for row in others}
    copies = {f"{name} fp32+fp8 1" for name in ("nemotron-3-super", "qwen3.5-122b-a10b", "glm-5.3-flash")}
    drafts = {"nemotron-3-super fp32 4", "nemotron-3-super fp32 8"}
    assert better == drafts | copies | {"glm-5.3-flash bf16 1", "qwen3.5-122b-a10b fp32+nvfp4 1"}


def choice(us: float, **more: Any) -> dict[str, Any]:
    return {"parameters": {"split": 2, "heads": 1}, "median_us": us, **more}


def test_a_tuned_table_shows_what_tuning_gained() -> None:
    """A choice whose companions were not kept has a time alone; where the heuristic's stayed, it gains nothing."""
    shape = Shape.of(lookup("kimi-k3", tp=8).layer, ReplaySpec(), 1)
    other = Shape.of(LayerSpec("gdn", 3, 3, 64, 64), ReplaySpec(max_draft=4, read_dtype="nvfp4"), 4)
    entries = [
        {**shape.to_json(), "batches": {"1": choice(6.0, heuristic_us=6.0, worst_us=9.0), "8": choice(10.0)}},
        {**other.to_json(), "batches": {"32": choice(40.0, heuristic_us=50.0, worst_us=100.0)}},
    ]
    summary, _, head, _, first, second, _, _, _, gain = TABLES["tuned"]([{"entries": entries}], []).splitlines()
    assert summary.startswith("3 entries, 2 of them") and "stayed for 1," in summary
    assert "by up to 20.0%" in summary and "2.00 times as long in the median, at most 2.50 times" in summary
    assert head == "| layer | state | L | T | 1 rows | 8 rows | 32 rows |"
    assert first == "| kimi-k3, 12/12 x 128 x 128 | fp32 | 16 | 1 | 6.0 / 6.0 / 9.0 | 10.0 |  |"
    assert second == "| gdn, 3/3 x 64 x 64 | fp32+nvfp4 | 16 | 4 |  |  | 40.0 / 50.0 / 100.0 |"
    assert gain == "| gdn, 3/3 x 64 x 64 | fp32+nvfp4 | 16 | 4 | 32 | split 2, heads 1 | 40.00 | 50.00 | 20.0% |"
    lone = TABLES["tuned"]([{"entries": [{**shape.to_json(), "batches": {"8": choice(10.0)}}]}], [])
    assert lone.startswith("1 entries; beside none") and len(lone.splitlines()) == 5


def test_resources_are_those_that_begin_so() -> None:
    rows = table_of("resources", "records/resources.json", "probe-")
    assert {row[0] for row in rows} == {"probe-read", "probe-rewrite"} and all(row[3] == "0" for row in rows)


def test_every_record_of_a_benchmark_is_shown() -> None:
    shown = {
        name for name in ("performance", "precision", "prediction") for name in records_of(ROOT / f"docs/{name}.md")
    }
    assert {f"records/{path.name}" for path in RECORDS} <= shown


def test_an_unknown_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"entries": []}')
    (tmp_path / "d.md").write_text("<!-- stepps r.json -->\n<!-- end -->")
    refused = CliRunner().invoke(main, ["refresh", str(tmp_path / "d.md")])
    assert refused.exit_code == 2 and "stepps" in refused.output and "steps" in refused.output
