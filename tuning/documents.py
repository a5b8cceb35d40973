"""Documents whose figures come from records: tables between comments, which `refresh` makes anew.

A table stands between `<!-- NAME RECORD ... -->` and `<!-- end -->`, with a name of `TABLES` and one record or several,
whose paths are relative to the document; a word that is no path is passed on (`resources`: how kernels' names begin).
A new kind of table is one function of records and words, and one line of `TABLES`.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from replayssm.tuned import Shape
from tuning.matrix import replay_of, state_name
from tuning.precision import KINDS, precision_tables
from tuning.prediction import prediction_table, summary_table
from tuning.report import goals_table, layer_name, line, markdown_table, steps_of, time_of, windows_table
from tuning.shapes import released_name

Record = Mapping[str, Any]
Entry = Mapping[str, Any]
Make = Callable[[Sequence[Record], Sequence[str]], str]
# What `others` lists, in this order, and how it is called there.
OTHERS = {
    "nonflush_z": "non-flush with z",
    "mixed": "mixed",
    "commit": "commit",
    "host": "host time of a call",
    "first_call_cold": "first call, compiled",
    "first_call_from_disk": "first call, from disk",
}


def _entries(records: Sequence[Record]) -> list[Entry]:
    return [entry for record in records for entry in record.get("entries", record.get("predictions", ()))]


def _of_entries(make: Callable[[Sequence[Entry]], str]) -> Make:
    return lambda records, words: make(_entries(records))


def probes_table(records: Sequence[Record], words: Sequence[str]) -> str:
    """The limits of the device as each run has probed them first."""
    columns = (
        "run",
        "1 GiB read us",
        "TB/s",
        "1 GiB rewritten us",
        "TB/s",
        "empty us",
        "32 MiB cold us",
        "rewritten us",
    )
    lines = [line(*columns), "|---" * len(columns) + "|"]
    for record in records:
        entry = next(entry for entry in record["entries"] if entry["what"] == "probes")
        read, rewrite, empty, cold, after = (
            entry[name]["median_us"] for name in ("read", "rewrite", "empty", "cold", "after_rewrite")
        )
        rates = (entry["bytes_per_us"][name] / 1e6 for name in ("read", "read_write"))
        shown = [
            f"{x:.{digits}f}" for x, digits in zip((read, next(rates), rewrite, next(rates)), (1, 2, 1, 2), strict=True)
        ]
        lines.append(line(record["date"][:16].replace("T", " "), *shown, *(f"{x:.1f}" for x in (empty, cold, after))))
    return "\n".join(lines)


def others_table(records: Sequence[Record], words: Sequence[str]) -> str:
    """What a record holds beside steps that all read or all fold: `OTHERS`, or of these what the words name."""
    lines = [line("layer", "state", "batch", "T", "what", "measured", "90th percentile", "x limit"), "|---" * 8 + "|"]
    for what in words or OTHERS:
        for entry in _entries(records):
            if entry["what"] == what and entry["status"] == "measured":
                head = (layer_name(entry["layer"]), state_name(replay_of(entry)), entry["rows"], entry["num_tokens"])
                ratio = f"{entry['ratio']:.2f}" if "ratio" in entry else ""
                most = time_of(entry["p90_us"]) if "p90_us" in entry else ""
                lines.append(line(*head, OTHERS[what], time_of(entry["median_us"]), most, ratio))
    return "\n".join(lines)


def change_table(records: Sequence[Record], words: Sequence[str]) -> str:
    """The steps that two records have in common: medians of the first, then of the second."""
    before, after = (steps_of(record["entries"]) for record in records)
    columns = [f"{what}, {when}" for what in ("non-flush", "fold", "average") for when in ("before", "after")]
    lines = [line("layer", "state", "batch", "T", "window", *columns), "|---" * (5 + len(columns)) + "|"]
    for head in (head for head in before if head in after):
        pairs = [
            (found[head][what]["median_us"]) for what in ("nonflush", "flush", "average") for found in (before, after)
        ]
        lines.append(line(*head, *(f"{us:.1f}" for us in pairs)))
    return "\n".join(lines)


def peers_table(records: Sequence[Record], words: Sequence[str]) -> str:
    """Steps of another package beside ours (`peers.compare`)."""
    columns = ("layer", "batch", "peer", "its step", "ours, non-flush", "times", "ours, fold")
    lines = [line(*columns), "|---" * len(columns) + "|"]
    for record in records:
        by_layer: dict[tuple[str, int], dict[str, float]] = {}
        for entry in record["entries"]:
            by_layer.setdefault((entry["model"], entry["rows"]), {})[entry["what"]] = entry["median_us"]
        for (model, rows), times in by_layer.items():
            (peer,) = set(times) - {"nonflush", "flush"}
            ours = times["nonflush"]
            figures = (time_of(times[peer]), time_of(ours), f"{times[peer] / ours:.2f}", time_of(times["flush"]))
            lines.append(line(model, rows, f"{peer} {record['peers'][peer]}", *figures))
    return "\n".join(lines)


def resources_table(records: Sequence[Record], words: Sequence[str]) -> str:
    """Registers, spills, shared memory and instructions of compiled kernels whose names begin with one of the words."""
    lines = [line("kernel", "architecture", "registers", "frame bytes", "shared KiB", "instructions"), "|---" * 6 + "|"]
    for row in (row for record in records for row in record["rows"] if row["kernel"].startswith(tuple(words))):
        shared = (row["declared_shared_bytes"] + row["dynamic_shared_bytes"]) / 1024
        figures = (row["registers"], row["frame_bytes"], f"{shared:.1f}", row["instructions"]["total"])
        lines.append(line(row["kernel"], row["arch"], *figures))
    return "\n".join(lines)


def tuned_table(records: Sequence[Record], words: Sequence[str]) -> str:
    """Tuned tables: of each entry the times of what was chosen, of the heuristic's choice and of the worst candidate;
    a summary in front, and behind it where another than the heuristic's was chosen."""
    entries = [(Shape.from_json(entry), entry["batches"]) for record in records for entry in record["entries"]]
    batches = sorted({int(batch) for _, found in entries for batch in found})
    columns = ("layer", "state", "L", "T", *(f"{batch} rows" for batch in batches))
    lines = [line(*columns), "|---" * len(columns) + "|"]
    others = [line(*columns[:4], "rows", "chosen", "us", "heuristic us", "faster by"), "|---" * 9 + "|"]
    for shape, found in entries:
        name = layer_name({"name": released_name(shape.layer), **asdict(shape.layer)})
        head = (name, state_name(shape.replay), shape.replay.window, shape.replay.max_draft)
        lines.append(line(*head, *(_three(found.get(str(batch))) for batch in batches)))
        for batch, choice in found.items():
            if (heuristic := choice.get("heuristic_us")) and heuristic != choice["median_us"]:
                chosen = ", ".join(f"{name} {value}" for name, value in choice["parameters"].items())
                times = (f"{choice['median_us']:.2f}", f"{heuristic:.2f}")
                others.append(line(*head, batch, chosen, *times, f"{1 - choice['median_us'] / heuristic:.1%}"))
    summary = _tuned_summary([one for _, found in entries for one in found.values()])
    return "\n".join([summary, "", *lines, *(["", *others] if len(others) > 2 else [])])


def _tuned_summary(choices: Sequence[Mapping[str, Any]]) -> str:
    told = [one for one in choices if one.get("heuristic_us") and one.get("worst_us")]
    if not told:
        return f"{len(choices)} entries; beside none of them the times of the heuristic and of the worst were kept."
    gains = sorted(1 - one["median_us"] / one["heuristic_us"] for one in told)
    worst = [one["worst_us"] / one["median_us"] for one in told]
    return (
        f"{len(choices)} entries, {len(told)} of them with the heuristic's time and the worst: the heuristic's choice "
        f"stayed for {sum(gain == 0 for gain in gains)}, elsewhere another is faster by up to {gains[-1]:.1%}. The "
        f"worst takes {statistics.median(worst):.2f} times as long in the median, at most {max(worst):.2f} times."
    )


def _three(choice: Mapping[str, Any] | None) -> str:
    times = [] if choice is None else [choice.get(name) for name in ("median_us", "heuristic_us", "worst_us")]
    return " / ".join(f"{us:.1f}" for us in times if us is not None)


TABLES: dict[str, Make] = {
    "steps": _of_entries(markdown_table),
    "goals": _of_entries(goals_table),
    "windows": _of_entries(windows_table),
    "predictions": _of_entries(prediction_table),
    "prediction-summary": _of_entries(summary_table),
    "probes": probes_table,
    "others": others_table,
    "change": change_table,
    "peers": peers_table,
    "resources": resources_table,
    "tuned": tuned_table,
    "precision": lambda records, words: precision_tables(_entries(records), words or KINDS),
}
MADE = re.compile(r"<!-- ([\w-]+) ((?:\S+ )+)-->\n.*?<!-- end -->", re.DOTALL)


def refreshed(document: Path) -> str:
    """The text of a document with its tables made anew from the records that it names.

    Raises:
        OSError: a record cannot be read.
        ValueError: no table has that name.
    """

    def table(found: re.Match[str]) -> str:
        name, given = found[1], found[2].split()
        if name not in TABLES:
            raise ValueError(f"{document.name}: expected one of {', '.join(TABLES)}, got {name}")
        records = [json.loads((document.parent / word).read_text()) for word in given if word.endswith(".json")]
        words = [word for word in given if not word.endswith(".json")]
        return f"<!-- {name} {' '.join(given)} -->\n{TABLES[name](records, words)}\n<!-- end -->"

    return MADE.sub(table, document.read_text(encoding="utf-8"))


def records_of(document: Path) -> Iterator[str]:
    """The records that a document's tables are made from."""
    for found in MADE.finditer(document.read_text(encoding="utf-8")):
        yield from (word for word in found[2].split() if word.endswith(".json"))
