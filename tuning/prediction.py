"""Predictions beside measurements: which entries of records are compared, and the tables of that.

An entry is compared where its record says with which launch parameters it ran and its kernel is the present one. The
kernel is compiled anew with those parameters, for every device that is asked for; times are of the record's rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from cute_kernels.configs import StepConfig, StepKey
from replayssm.keys import step_key
from replayssm.plan import plan_step
from replayssm.pool import default_ring_layout
from replayssm.tuned import Choice
from tuning.devices import Device
from tuning.matrix import StepCase, replay_of, state_name
from tuning.predict import Kernel, Prediction, facts, predict
from tuning.report import layer_name, line
from tuning.shapes import lookup
from tuning.tuner import DIGITS, Field, launched_key
from tuning.workload import model_options

WITHIN = 0.15  # what a prediction may err by
# How much faster than the heuristic's choice another must be predicted to be. Of the seven pairs in docs/prediction.md
# that were measured the ratio is overrated by up to 6 % (H200, 2026-11-29 and 30).
CLEARLY = 0.1
PREDICTED_PROTOCOL = (
    "predicted from the compiled kernels (tuning/predict.py): nothing was run; mean step of rows anywhere in the window"
)
Entry = Mapping[str, Any]
Make = Callable[[StepKey, str], Kernel]


def _not_followed(entry: Entry) -> bool:
    """Whether the kernel has loops whose turns nothing in its machine code tells: over the parts of a fold that makes a
    copy."""
    return "read" in entry["replay"] and entry["what"] in ("flush", "mixed")


@dataclass(frozen=True)
class Compared:
    """A measured entry with what is needed to predict it."""

    entry: Entry
    record: str
    case: StepCase
    key: StepKey


def compared(
    records: Iterable[Path], whats: Sequence[str] = ("nonflush", "flush", "mixed", "plain")
) -> Iterator[Compared]:
    """The entries of records that are compared."""
    for path in records:
        record = json.loads(path.read_text())
        for entry in record["entries"]:
            if entry["what"] not in whats or entry["status"] != "measured" or "config" not in entry:
                continue
            if _not_followed(entry):
                continue
            shape, replay = lookup(entry["layer"]["name"]), replay_of(entry)
            case = StepCase(shape, replay, entry["rows"], entry["what"], entry.get("accepted", 1.0))
            config = {name: value for name, value in entry["config"].items() if name != "source"}
            yield Compared(entry, path.name, case, key_of(case, StepConfig(**config)))


def key_of(case: StepCase, config: StepConfig) -> StepKey:
    """The key of a benchmark's step with these launch parameters."""
    layer, replay = case.shape.layer, case.replay
    return step_key(
        layer,
        replay,
        model_options(case.shape, replay),
        num_tokens=case.num_tokens,
        ring_layout=default_ring_layout(layer),
        config=config,
    )


def planned_key(case: StepCase, arch: str) -> StepKey:
    """The key that a step plans by itself: from a table, or by the rule of thumb."""
    layer, replay = case.shape.layer, case.replay
    return plan_step(
        layer,
        replay,
        model_options(case.shape, replay),
        arch=arch,
        batch=case.rows,
        num_tokens=case.num_tokens,
        ring_layout=default_ring_layout(layer),
    ).key


def kernels() -> Make:
    """Compiles a kernel when it is asked for first."""
    made: dict[tuple[StepKey, str], Kernel] = {}

    def make(key: StepKey, arch: str) -> Kernel:
        if (key, arch) not in made:
            made[key, arch] = Kernel.compiled(key, arch)
        return made[key, arch]

    return make


def comparison(
    records: Iterable[Path], devices: Sequence[Device], make: Make, done: Callable[[Compared], object]
) -> list[dict[str, Any]]:
    """All compared entries with their predictions, as `docs/records/prediction.json` holds them; without those whose
    control flow cannot be followed for one of the devices."""
    entries = []
    for one in compared(records):
        head = {name: one.entry[name] for name in ("layer", "replay", "rows", "num_tokens", "what", "config")}
        predicted = {}
        try:
            for device in devices:
                predicted[device.name] = facts(predict(make(one.key, device.arch), one.case, device))
        except NotImplementedError:
            continue
        measured = {"record": one.record, "median_us": one.entry["median_us"]}
        entries.append({**head, "status": "predicted", "measured": measured, "predicted": predicted})
        done(one)
    return entries


def predicted_choice(field: Field, device: Device, make: Make) -> Choice:
    """The launch parameters that a job is predicted to be fastest with, and the next best.

    The first candidate, which is the heuristic's, stays unless another is predicted to be faster by more than
    `CLEARLY`. Kernels that spill are left out.

    Raises:
        NotImplementedError: steps read a copy, or no candidate has control flow that can be followed.
    """
    if field.job.replay.read_dtype is not None:
        raise NotImplementedError(
            "--predict: expected steps without a copy, for nothing in the machine code says how often the loops of a "
            "fold turn that makes one; leave --read out, or tune on a GPU"
        )
    times: dict[int, float] = {}
    for number, candidate in enumerate(field.tried):
        kernel = make(launched_key(field.job, candidate), device.arch)
        if kernel.frame_bytes == 0 or number == 0:
            times[number] = sum(share * predict(kernel, case, device).us for case, share in field.job.cases)
    order = sorted(times, key=lambda number: times[number])
    if times[order[0]] * (1 + CLEARLY) > times[0]:
        order.remove(0)
        order.insert(0, 0)
    rounded = {number: round(us, DIGITS) for number, us in times.items()}
    best, second = order[0], order[1] if len(order) > 1 else None
    return Choice(
        field.tried[best].parameters,
        rounded[best],
        runner_up=None if second is None else field.tried[second].parameters,
        runner_up_us=None if second is None else rounded[second],
        heuristic_us=rounded[0],
        worst_us=max(rounded.values()),
    )


def _ratio(entry: Entry) -> float:
    return float(entry["predicted"]["H200"]["us"] / entry["measured"]["median_us"])


def summary_table(entries: Iterable[Entry]) -> str:
    """How many predictions lie within 15 % of what was measured, by kind of step, and which do not, as Markdown."""
    kinds: dict[str, list[Entry]] = {}
    for entry in entries:
        kinds.setdefault(entry["what"], []).append(entry)
    lines = [line("what", "measured", "within 15 %", "least ratio", "largest ratio"), "|---" * 5 + "|"]
    missed = [line("missed", "state", "T", "batch", "what", "predicted", "measured", "ratio"), "|---" * 8 + "|"]
    for what, found in kinds.items():
        ratios = [_ratio(entry) for entry in found]
        good = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
        lines.append(line(what, len(found), good, f"{min(ratios):.2f}", f"{max(ratios):.2f}"))
        for entry, ratio in zip(found, ratios, strict=True):
            if abs(ratio - 1) > WITHIN:
                times = (f"{us:.1f}" for us in (entry["predicted"]["H200"]["us"], entry["measured"]["median_us"]))
                missed.append(line(*_head(entry), what, *times, f"{ratio:.2f}"))
    return "\n".join([*lines, "", *missed] if len(missed) > 2 else lines)


def _head(entry: Entry) -> tuple[Any, ...]:
    return layer_name(entry["layer"]), state_name(replay_of(entry)), entry["num_tokens"], entry["rows"]


def prediction_table(entries: Iterable[Entry]) -> str:
    """Rows that read and rows that fold: bound, predicted and measured on an H200, their ratio, and what is predicted
    for the other devices, as Markdown. Of entries that are alike the first is taken."""
    rows: dict[tuple[Any, ...], dict[str, Entry]] = {}
    for entry in entries:
        rows.setdefault(_head(entry), {}).setdefault(entry["what"], entry)
    others = [name for name in next(iter(next(iter(rows.values())).values()))["predicted"] if name != "H200"]
    columns = ("bound", "predicted", "measured", "ratio", *others)
    lines = [
        line(
            "layer",
            "state",
            "T",
            "batch",
            *(f"read: {columns[0]}", *columns[1:]),
            *(f"fold: {columns[0]}", *columns[1:]),
        )
    ]
    lines.append("|---" * (4 + 2 * len(columns)) + "|")
    for head, found in rows.items():
        if {"nonflush", "flush"} <= found.keys():
            cells = [cell for what in ("nonflush", "flush") for cell in _cells(found[what], others)]
            lines.append(line(*head, *cells))
    return "\n".join(lines)


def _cells(entry: Entry, others: Sequence[str]) -> list[str]:
    predicted = entry["predicted"]
    own = predicted["H200"]
    cells = [own["bound"], f"{own['us']:.1f}", f"{entry['measured']['median_us']:.1f}", f"{_ratio(entry):.2f}"]
    return cells + [f"{predicted[name]['us']:.1f}" for name in others]


def predicted_facts(case: StepCase, key: StepKey, device: Device, prediction: Prediction) -> dict[str, Any]:
    """One prediction without a measurement."""
    head = {"layer": case.shape.name, "state": state_name(case.replay), "tokens": case.num_tokens, "rows": case.rows}
    counts = {
        "instructions": dict(prediction.instructions),
        "pipes": dict(prediction.pipes),
        "shared_bytes": prediction.shared_bytes,
        "bytes": prediction.memory_bytes,
    }
    return {
        **head,
        "what": case.what,
        "device": device.name,
        **facts(prediction),
        **counts,
        "config": asdict(key.config),
    }


def predictions_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Predictions for the terminal."""
    right = partial(Column, justify="right")
    table = Table(
        "layer", "state", right("T"), right("rows"), "what", "device", right("us"), "bound", "parts (us)", right("CTAs")
    )
    for one in found:
        parts = ", ".join(f"{name} {us:.1f}" for name, us in one["parts"].items())
        head = (one["layer"], one["state"], str(one["tokens"]), str(one["rows"]), one["what"], one["device"])
        table.add_row(*head, f"{one['us']:.1f}", one["bound"], parts, str(one["occupancy"]))
    return table
