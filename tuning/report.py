"""Tables and lines for the terminal, from plans and from entries of a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from replayssm.plan import dtype_name
from tuning.matrix import Group, Subject
from tuning.roofline import Rates

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def plan_table(groups: Sequence[Group], rates: Rates) -> Table:
    """What a run would time: bytes of each case, and its least time at the given rates."""
    table = Table("layer", "state", "rows", "what", _right("MB"), _right("limit us"), title="plan (nothing measured)")
    for group in groups:
        for cases in group.batches:
            for case in cases:
                table.add_row(
                    case.shape.name,
                    _SHORT[dtype_name(case.replay.checkpoint_dtype)],
                    str(case.rows),
                    case.what,
                    f"{case.num_bytes / 1e6:.2f}",
                    f"{case.limit_us(rates):.1f}",
                )
    return table


def _right(header: str) -> Column:
    return Column(header, justify="right")


def batch_line(subject: Subject, entries: Mapping[str, Mapping[str, Any]], refused: Mapping[str, str]) -> str:
    """One line of progress: medians of a batch by what was timed."""
    state = _SHORT[dtype_name(subject.replay.checkpoint_dtype)]
    parts = [f"{what} {entry['median_us']:.2f}" for what, entry in entries.items()]
    parts += [f"{what}: {reason}" for what, reason in refused.items()]
    return f"{subject.shape.name} {state} x{subject.rows} (us): " + ", ".join(parts)


def results_table(entries: Iterable[Mapping[str, Any]]) -> Table:
    """Medians and spread, rate, share of the limit and goals of all entries that are about a layer."""
    table = Table(
        "layer",
        "state",
        _right("rows"),
        "what",
        _right("us"),
        _right("p10-p90"),
        _right("MB"),
        _right("GB/s"),
        _right("limit us"),
        _right("% of limit"),
        "goal",
        title="results",
    )
    for entry in entries:
        if "layer" not in entry:
            continue  # the probes, which have their own line
        head = (entry["layer"]["name"], _SHORT[entry["replay"]["checkpoint"]], str(entry["rows"]), entry["what"])
        if entry["status"] == "measured":
            table.add_row(*head, *_figures(entry), style=None if entry.get("goal_met", True) else "yellow")
        else:
            table.add_row(*head, "", "", "", "", "", "", f"{entry['status']}: {entry['reason']}", style="red")
    return table


def _figures(entry: Mapping[str, Any]) -> tuple[str, ...]:
    median, num_bytes, limit = entry["median_us"], entry.get("bytes"), entry.get("limit_us")
    return (
        f"{median:.2f}",
        f"{entry['p10_us']:.2f}-{entry['p90_us']:.2f}" if "p10_us" in entry else "",
        f"{num_bytes / 1e6:.1f}" if num_bytes else "",
        f"{num_bytes / median / 1e3:.0f}" if num_bytes else "",
        f"{limit:.1f}" if limit else "",
        f"{100 * limit / median:.1f}" if limit else "",
        _goal(entry),
    )


def _goal(entry: Mapping[str, Any]) -> str:
    speedup = f"{entry['speedup']:.2f}x plain" if "speedup" in entry else ""
    if "goal" not in entry:
        return speedup
    bounds = {"us": "<= {:g} us", "ratio": "<= {:g} x limit", "speedup": ">= {:g} x plain"}
    wanted = ", ".join(bounds[name].format(value) for name, value in entry["goal"].items())
    return f"{speedup + ', ' if speedup else ''}{'met' if entry['goal_met'] else 'MISSED'}: {wanted}"


def markdown_table(entries: Iterable[Mapping[str, Any]]) -> str:
    """The steps of a record as a Markdown table, a row for each layer, state and batch, times in microseconds."""
    rows: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for entry in entries:
        if "layer" in entry and entry["status"] == "measured":
            layer = entry["layer"]
            heads = f"{layer['num_v_heads']}/{layer['num_k_heads']}"
            name = f"{layer['name'].split('@')[0]}, {heads} x {layer['head_dim']} x {layer['d_state']}"
            key = (name, _SHORT[entry["replay"]["checkpoint"]], entry["rows"])
            rows.setdefault(key, {})[entry["what"]] = entry
    lines = [
        "| layer, heads/groups x V x K | state | batch "
        "| non-flush | x limit | fold | x limit | average | plain | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, state, batch), found in rows.items():
        if not {"nonflush", "flush", "plain", "average"} <= found.keys():
            continue
        reads, folds, plain, average = (found[what] for what in ("nonflush", "flush", "plain", "average"))
        cells = [name, state, str(batch)]
        cells += [f"{e[kind]:.{digits}f}" for e in (reads, folds) for kind, digits in (("median_us", 1), ("ratio", 2))]
        cells += [f"{average['median_us']:.1f}", f"{plain['median_us']:.1f}", f"{average['speedup']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
