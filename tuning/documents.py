"""Documents whose figures come from records: tables and numbers between comments, made anew by `refresh`.

A table stands between `<!-- NAME RECORD -->`, with a name of `TABLES`, and `<!-- end -->`. The path of a record is
relative to the document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tuning.prediction import prediction_table, summary_table
from tuning.report import goals_table, markdown_table

TABLES: dict[str, Callable[[Iterable[Mapping[str, Any]]], str]] = {
    "steps": markdown_table,
    "goals": goals_table,
    "predictions": prediction_table,
    "prediction-summary": summary_table,
}
MADE = re.compile(r"<!-- ([\w-]+) (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def refreshed(document: Path) -> str:
    """The text of a document with its tables made anew from the records that it names."""

    def table(found: re.Match[str]) -> str:
        record = json.loads((document.parent / found[2]).read_text())
        entries = record["entries"] if "entries" in record else record["predictions"]
        return f"<!-- {found[1]} {found[2]} -->\n{TABLES[found[1]](entries)}\n<!-- end -->"

    return MADE.sub(table, document.read_text(encoding="utf-8"))
