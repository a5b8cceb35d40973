"""The documents quote the records: each table in them is what the record beside them prints today.

Grid: every record of a benchmark or a study in the repository (other kinds of record have no entries); a table whose
figures were typed by hand, or whose record was replaced, differs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tuning.__main__ import main
from tuning.report import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RECORDS = [
    path for path in sorted((ROOT / "docs" / "records").glob("*.json")) if "entries" in json.loads(path.read_text())
]


def test_there_are_records() -> None:
    assert RECORDS


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_documents_quote_the_record(record: Path) -> None:
    printed = CliRunner().invoke(main, ["report", str(record)]).output.strip()
    assert printed.count("\n") >= 2  # a head and a row
    document = "precision" if "precision" in record.stem else "performance"
    assert printed in (ROOT / "docs" / f"{document}.md").read_text()


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
