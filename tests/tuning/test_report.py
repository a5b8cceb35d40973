"""The documents quote the records: each table in them is what the record beside them prints today.

Grid: every record of a benchmark or a study in the repository (other kinds of record have no entries); a table whose
figures were typed by hand, or whose record was replaced, differs. The table of several tokens and windows is pinned on
entries made here, that of memory, which is computed, as the documents quote it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

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
    document = ROOT / "docs" / "performance.md"
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


SUPER, COPIES = "records/2026-11-29-h200-nemotron-3-super.json", "records/2026-11-30-h200-nemotron-3-super-copies.json"


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
    ((layer, state, rows, tokens, averages, best),) = table_of("windows", *paths)
    assert (state, rows, tokens) == ("fp32", "256", "1") and layer.startswith("qwen3.5-122b")
    by_window = dict(part.split(": ") for part in averages.split(", "))
    assert list(by_window) == ["8", "16", "32"] and best == min(by_window, key=lambda window: float(by_window[window]))


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
