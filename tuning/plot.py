"""Pictures of records: of a benchmark, time and memory against the window, speed-up and share of the limit against the
batch; of a study of precision, the error against the tokens; of a tuned table, what was gained against the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayssm.pool import bytes_per_slot
from replayssm.spec import LayerSpec
from replayssm.tuned import Shape
from tuning.matrix import replay_of, state_name
from tuning.shapes import released_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Series = dict[str, list[tuple[float, float]]]  # points (x, y) by what they are of
MARKERS = "osv^D<>phX*P"


def series(entries: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """What there is to draw, by panel; a line has two points at least.

    "window": the average step in microseconds against L. "memory": MiB of one slot against L. "speedup": how many times
    faster than plain the average is, against the batch. "limit": per cent of the limit that a step reaches which only
    reads, and one in which every row folds, against the batch. "mamba2", "gdn", "kda": the mean error of a scheme
    against the tokens. "gained", "worst": how many times as long as the tuned step the heuristic's choice and the worst
    candidate take, against the batch.
    """
    panels: dict[str, Series] = {name: {} for name in TITLES}
    for entry in entries:
        if "batches" in entry:
            shape = Shape.from_json(entry)
            facts = f"T = {shape.replay.max_draft}, L = {shape.replay.window}"
            line = f"{released_name(shape.layer)} {state_name(shape.replay)}, {facts}"
            for panel, name in (("gained", "heuristic_us"), ("worst", "worst_us")):
                known = {rows: one for rows, one in entry["batches"].items() if one.get(name)}
                points = [(int(rows), one[name] / one["median_us"]) for rows, one in known.items()]
                panels[panel].setdefault(line, []).extend(points)
            continue
        if "scheme" in entry:
            line = f"{entry['scheme']}, {entry['regime']}"
            panels[entry["recurrence"]].setdefault(line, []).append((entry["tokens"], entry["mean"]))
        if "layer" not in entry or entry["status"] != "measured":
            continue
        layer, replay, rows = entry["layer"], replay_of(entry), entry["rows"]
        name = f"{layer['name']} {state_name(replay)}, T = {entry['num_tokens']}"
        here, batch = f"{name}, batch {rows}", f"{name}, L = {replay.window}"
        if entry["what"] == "average":
            panels["window"].setdefault(here, []).append((replay.window, entry["median_us"]))
            spec = LayerSpec(**{key: value for key, value in layer.items() if key != "name"})
            memory = sum(bytes_per_slot(spec, replay).values()) / 2**20
            panels["memory"].setdefault(name, []).append((replay.window, memory))
            if "speedup" in entry:
                panels["speedup"].setdefault(batch, []).append((rows, entry["speedup"]))
        elif entry["what"] in ("nonflush", "flush"):
            kind = {"nonflush": "reads", "flush": "folds"}[entry["what"]]
            panels["limit"].setdefault(f"{batch}, {kind}", []).append((rows, 100 / entry["ratio"]))
    return {
        panel: {line: sorted(set(points)) for line, points in lines.items() if len({x for x, _ in points}) > 1}
        for panel, lines in panels.items()
    }


MOST_NAMED = 20  # lines of a panel that a legend names
TITLES = {
    "window": ("average step against the window", "window L", "us"),
    "memory": ("one slot of a layer", "window L", "MiB"),
    "speedup": ("average against plain steps", "batch", "times faster"),
    "limit": ("share of the limit", "batch", "% of the limit"),
    "gained": ("the heuristic's choice against the tuned one", "batch", "times as long"),
    "worst": ("the worst candidate against the tuned one", "batch", "times as long"),
    **{
        kind: (f"{name}, outputs against float64", "tokens", "relative error, mean")
        for kind, name in {"mamba2": "Mamba-2", "gdn": "Gated DeltaNet", "kda": "Kimi Delta Attention"}.items()
    },
}


def figure(entries: Iterable[Mapping[str, Any]]) -> Figure:
    """The panels that the record has lines for.

    Raises:
        NotImplementedError: matplotlib is not installed.
        ValueError: it has none: one window, batch or number of tokens.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotImplementedError("--plot: matplotlib is not installed; pip install 'replayssm[plot]'") from error
    panels = {name: lines for name, lines in series(entries).items() if lines}
    if not panels:
        raise ValueError("--plot: expected a record of several windows, batches or tokens, got one of each")
    made = Figure(figsize=(7 * len(panels), 5.5), layout="constrained")
    for axes, (name, lines) in zip(made.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        title, x, y = TITLES[name]
        for number, (line, points) in enumerate(lines.items()):
            axes.plot(*zip(*points, strict=True), marker=MARKERS[number % len(MARKERS)], label=line)
        axes.set(title=title, xlabel=x, ylabel=y)
        if x != "window L":
            axes.set_xscale("log", base=2)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        if x == "tokens":
            axes.set_yscale("log")
            axes.tick_params(axis="x", labelrotation=45)
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(lines) <= MOST_NAMED:
            axes.legend(fontsize="x-small")
    return made


def draw(entries: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write `figure` to a file, in the format of its name."""
    figure(entries).savefig(path, dpi=80)
