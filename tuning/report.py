"""Tables and lines for the terminal, from plans and from entries of a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Column, Table

from replayssm.pool import bytes_per_slot
from replayssm.spec import MAX_DRAFT, ReplaySpec
from tuning.matrix import Group, Subject, replay_of, state_name
from tuning.roofline import Rates
from tuning.shapes import ModelShape


def plan_table(groups: Sequence[Group], rates: Rates) -> Table:
    """What a run would time: bytes of each case, and its least time at the given rates."""
    numbers = [_right(name) for name in ("rows", "T", "window", "records", "MB", "limit us")]
    table = Table("layer", "state", *numbers[:3], "what", *numbers[3:], title="plan (nothing measured)")
    for group in groups:
        for cases in group.batches:
            for case in cases:
                table.add_row(
                    case.shape.name,
                    state_name(case.replay),
                    str(case.rows),
                    str(case.num_tokens),
                    str(case.replay.window),
                    case.what,
                    f"{sum(case.live_records) / case.rows:.1f}",
                    f"{case.num_bytes / 1e6:.2f}",
                    f"{case.limit_us(rates):.1f}",
                )
    return table


def _right(header: str) -> Column:
    return Column(header, justify="right")


def batch_line(subject: Subject, entries: Mapping[str, Mapping[str, Any]], refused: Mapping[str, str]) -> str:
    """One line of progress: medians of a batch by what was timed."""
    state = state_name(subject.replay)
    parts = [f"{what} {entry['median_us']:.2f}" for what, entry in entries.items()]
    parts += [f"{what}: {reason}" for what, reason in refused.items()]
    tokens = f" T={subject.num_tokens} L={subject.replay.window}" if subject.num_tokens > 1 else ""
    return f"{subject.shape.name} {state} x{subject.rows}{tokens} (us): " + ", ".join(parts)


def results_table(entries: Iterable[Mapping[str, Any]]) -> Table:
    """Medians and spread, rate, share of the limit and goals of all entries that are about a layer."""
    table = Table(
        "layer",
        "state",
        *(_right(name) for name in ("rows", "T", "window")),
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
        state, window = state_name(replay_of(entry)), entry["replay"]["window"]
        numbers = (str(number) for number in (entry["rows"], entry["num_tokens"], window))
        head = (entry["layer"]["name"], state, *numbers, entry["what"])
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


def time_of(us: float) -> str:
    """A time, in milliseconds from 10 of them on."""
    return f"{us:.1f} us" if us < 1e4 else f"{us / 1e3:.0f} ms"


def _goal(entry: Mapping[str, Any]) -> str:
    speedup = f"{entry['speedup']:.2f}x plain" if "speedup" in entry else ""
    if "goal" not in entry:
        return speedup
    bounds = {"us": "<= {:g} us", "ratio": "<= {:g} x limit", "speedup": ">= {:g} x plain"}
    wanted = ", ".join(
        bounds[name].format(value) if name != "us" or value < 1e4 else f"<= {value / 1e3:g} ms"
        for name, value in entry["goal"].items()
    )
    return f"{speedup + ', ' if speedup else ''}{'met' if entry['goal_met'] else 'MISSED'}: {wanted}"


Found = dict[str, Mapping[str, Any]]  # entries of one batch, by what was measured
STEP_COLUMNS = "| non-flush | x limit | fold | x limit | average | plain | ratio |"
LAYER_COLUMNS = "| layer, heads/groups x V x K | state | batch "


def markdown_table(entries: Iterable[Mapping[str, Any]]) -> str:
    """The steps of a record as Markdown, a row for each layer, state and batch, times in microseconds.

    With several tokens or windows each has a row, and where there is a choice of windows a second table says which of
    them has the least average.
    """
    rows = steps_of(entries)
    if len({(tokens, window) for *_, tokens, window in rows}) <= 1 and all(tokens == 1 for *_, tokens, _ in rows):
        lines = [LAYER_COLUMNS + STEP_COLUMNS, "|---" * 10 + "|"]
        lines += [line(*head[:3], *_times(found)) for head, found in rows.items()]
        return "\n".join(lines)
    lines = [
        LAYER_COLUMNS + "| T | window " + STEP_COLUMNS[:-2] + " | accepted | folding | a token | mixed |",
        "|---" * 16 + "|",
    ]
    for head, found in rows.items():
        average = found["average"]
        kept = f"{average.get('accepted', 1.0):g}", f"{average['fold_share']:.3f}", f"{average['us_per_token']:.1f}"
        mixed = f"{found['mixed']['median_us']:.1f}" if "mixed" in found else ""
        lines.append(line(*head, *_times(found), *kept, mixed))
    return "\n".join(lines + _best_windows(rows))


def steps_of(entries: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], Found]:
    """The batches of which all steps were measured, by layer, state, rows, T and window."""
    rows: dict[tuple[Any, ...], Found] = {}
    plain: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for entry in entries:
        if "layer" in entry and entry["status"] == "measured":
            layer, replay = entry["layer"], entry["replay"]
            head = (layer_name(layer), state_name(replay_of(entry)), entry["rows"], entry["num_tokens"])
            if entry["what"] == "plain":  # whose window is its own, and which reads no copy
                plain[head] = entry
            else:
                rows.setdefault((*head, replay["window"]), {})[entry["what"]] = entry
    return {
        head: {**found, "plain": plain[_without_copy(head)]}
        for head, found in rows.items()
        if {"nonflush", "flush", "average"} <= found.keys() and _without_copy(head) in plain
    }


def layer_name(layer: Mapping[str, Any]) -> str:
    """Name and geometry of an entry's layer, in a table."""
    heads = f"{layer['num_v_heads']}/{layer['num_k_heads']}"
    return f"{layer['name'].split('@')[0]}, {heads} x {layer['head_dim']} x {layer['d_state']}"


def _without_copy(head: tuple[Any, ...]) -> tuple[Any, ...]:
    """The head of the plain steps of these rows."""
    name, state, rows, tokens, _ = head
    kept, comma, decay = state.partition(",")
    return name, kept.partition("+")[0] + comma + decay, rows, tokens


def line(*cells: object) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def _times(found: Found) -> list[str]:
    """What `STEP_COLUMNS` names."""
    reads, folds, plain, average = (found[what] for what in ("nonflush", "flush", "plain", "average"))
    cells = [f"{e[kind]:.{digits}f}" for e in (reads, folds) for kind, digits in (("median_us", 1), ("ratio", 2))]
    return [*cells, f"{average['median_us']:.1f}", f"{plain['median_us']:.1f}", f"{average['speedup']:.2f}"]


def windows_table(entries: Iterable[Mapping[str, Any]]) -> str:
    """Averages of the layers, states, batches and T that have several windows, which is least, and what a window of 16
    takes against it, as Markdown."""
    choices: dict[tuple[Any, ...], dict[int, float]] = {}
    for head, found in steps_of(entries).items():
        choices.setdefault(head[:-1], {})[head[-1]] = found["average"]["median_us"]
    lines = [LAYER_COLUMNS + "| T | averages by window | best | 16 / best |", "|---" * 7 + "|"]
    for head, averages in choices.items():
        if len(averages) == 1:
            continue
        shown = ", ".join(f"{window}: {averages[window]:.1f}" for window in sorted(averages))
        best = min(averages, key=lambda window: averages[window])
        lines.append(line(*head, shown, best, f"{averages[16] / averages[best]:.3f}" if 16 in averages else ""))
    return "\n".join(lines)


def _best_windows(rows: Mapping[tuple[Any, ...], Found]) -> list[str]:
    """The window with the least average of each layer, state, batch and T that has several."""
    choices: dict[tuple[Any, ...], dict[int, float]] = {}
    for head, found in rows.items():
        choices.setdefault(head[:-1], {})[head[-1]] = found["average"]["median_us"]
    lines = ["", LAYER_COLUMNS + "| T | windows | best | average |", "|---" * 7 + "|"]
    for head, averages in choices.items():
        if len(averages) > 1:
            best = min(averages, key=lambda window: averages[window])
            lines.append(line(*head, ", ".join(map(str, averages)), best, f"{averages[best]:.1f}"))
    return lines if len(lines) > 3 else []


def goals_table(entries: Iterable[Mapping[str, Any]]) -> str:
    """The entries of a record that have a goal, as Markdown, times in microseconds."""
    lines = [LAYER_COLUMNS + "| T | window | what | goal | measured | x limit | |", "|---" * 10 + "|"]
    for entry in entries:
        if "goal" in entry:
            head = (layer_name(entry["layer"]), state_name(replay_of(entry)), entry["rows"], entry["num_tokens"])
            outcome, goal = _goal(entry).rsplit(": ", 1)
            ratio = f"{entry['ratio']:.3f}" if "ratio" in entry else ""
            us = entry["median_us"]
            measured = f"{us / 1e3:.0f} ms" if entry["goal"].get("us", 0) >= 1e4 else f"{us:.1f}"
            cells = (goal, measured, ratio, outcome.replace("MISSED", "missed"))
            lines.append(line(*head, entry["replay"]["window"], entry["what"], *cells))
    return "\n".join(lines)


def memory_table(shapes: Sequence[ModelShape], replay: ReplaySpec) -> str:
    """MiB of state that a request takes in all layers together, by T, as Markdown: computed, nothing measured.

    ReplaySSM holds one state and a ring of `window` + T records. A scheme of snapshots writes a state behind each
    token, so that the one behind the last accepted token can be kept: T states where the next step reads one of them,
    T + 1 where they lie beside the state of the request.

    Args:
        shapes: with `num_layers`.
        replay: window and dtypes.
    """
    columns = [f"{shape.name}: {what}" for shape in shapes for what in ("ReplaySSM", "T states", "T + 1 states")]
    lines = [line("T", *columns), "|---" * (1 + len(columns)) + "|"]
    for tokens in range(1, min(MAX_DRAFT, replay.window) + 1):
        own = replace(replay, max_draft=tokens, ring_capacity=0)
        cells = []
        for shape in shapes:
            sizes = bytes_per_slot(shape.layer, own)
            state, layers = sizes["checkpoint"], shape.num_layers or 1
            cells += [
                f"{layers * each / 2**20:.1f}" for each in (sum(sizes.values()), tokens * state, (tokens + 1) * state)
            ]
        lines.append(line(tokens, *cells))
    return "\n".join(lines)
