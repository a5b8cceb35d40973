"""Tables, facts for `--json` and progress of the commands about launch parameters and windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table

from replayssm import tuned
from replayssm.plan import plan_step
from replayssm.pool import default_ring_layout
from replayssm.tuned import Shape
from tuning import workload
from tuning.doctor import Finding
from tuning.matrix import state_name
from tuning.roofline import Rates
from tuning.search import is_noisy
from tuning.tuner import Field, Job

Facts = dict[str, Any]
_STYLES = {"works": "green", "missing": "yellow", "broken": "red"}


def _table(title: str, *headers: str, right: Sequence[str] = ()) -> Table:
    columns = [Column(name, justify="right" if name in right else "left") for name in headers]
    return Table(*columns, title=title)


def _head(job: Job) -> Facts:
    return {
        "layer": job.shape.name,
        "state": state_name(job.replay),
        "window": job.replay.window,
        "tokens": job.replay.max_draft,
        "rows": job.rows,
    }


_HEADERS = ("layer", "state", "L", "T", "rows")
_NUMBERS = ("L", "T", "rows", "us", "MB", "limit us", "tried", "outclassed", "KB in flight", "p10-p90", "runner-up us")


def _cells(fact: Facts) -> list[str]:
    return [str(fact[name]) for name in ("layer", "state", "window", "tokens", "rows")]


def _parameters(parameters: Mapping[str, Any] | None) -> str:
    """As words; the readout only where it is not the one that every architecture has."""
    return ", ".join(f"{name} {value}" for name, value in (parameters or {}).items() if value != "mma")


def field_facts(fields: Sequence[Field], arch: str, rates: Rates | None) -> list[Facts]:
    """What a run would time, and the least times that are expected: of the bytes, at the given rates."""
    return [
        {
            **_head(field.job),
            "arch": arch,
            "bytes": round(field.job.num_bytes),
            "limit_us": None if rates is None else field.job.limit_us(rates),
            "candidates": [
                {
                    **candidate.parameters,
                    "pruned": candidate in field.pruned,
                    "room": candidate.room,
                    "in_flight_bytes": candidate.in_flight_bytes,
                    "loaded_bytes": candidate.loaded_bytes,
                }
                for candidate in (*field.tried, *field.pruned)
            ],
        }
        for field in fields
    ]


def field_tables(fields: Sequence[Field], arch: str, rates: Rates | None) -> list[Table]:
    """The same: jobs, then the candidates of the last batch of each layer and replay."""
    columns = (*_HEADERS, "MB", "limit us", "tried", "outclassed")
    jobs = _table(f"jobs on {arch} (nothing measured)", *columns, right=_NUMBERS)
    last = {}
    for field, fact in zip(fields, field_facts(fields, arch, rates), strict=True):
        limit = "" if fact["limit_us"] is None else f"{fact['limit_us']:.1f}"
        counts = str(len(field.tried)), str(len(field.pruned))
        jobs.add_row(*_cells(fact), f"{fact['bytes'] / 1e6:.2f}", limit, *counts)
        last[field.job.target] = field
    return [jobs, *(_candidates(field) for field in last.values())]


def _candidates(field: Field) -> Table:
    columns = ("launch parameters", "CTAs an SM", "KB in flight", "MB loaded a row", "")
    table = _table(f"candidates of {field.job.name}", *columns, right=columns[1:4])
    for candidate in (*field.tried, *field.pruned):
        note = "heuristic" if candidate is field.tried[0] else "outclassed" if candidate in field.pruned else ""
        numbers = candidate.room, f"{candidate.in_flight_bytes / 1e3:.0f}", f"{candidate.loaded_bytes / 1e6:.2f}"
        table.add_row(candidate.name, *map(str, numbers), note)
    return table


class Progress:
    """A bar with the time left, and a line for each job that is done; `told` counts them.

    Args:
        unusable: lines of a journal that could not be taken up.
    """

    def __init__(self, console: Console, fields: Sequence[Field], unusable: int = 0) -> None:
        self._console, self.told = console, 0
        if unusable:
            console.print(f"{unusable} results of an earlier run are torn or of other versions, and are left out")
        columns = TextColumn("tuning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._bar = Bar(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("tuning", total=len(fields))

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def done(self, field: Field, choice: tuned.Choice | str) -> None:
        """Tell of a job."""
        self._bar.advance(self._task)
        self.told += 1
        if isinstance(choice, str):
            self._console.print(f"{field.job.name}: no candidate is right: {choice}", style="red", highlight=False)
            return
        noisy = is_noisy(choice.median_us, choice.p10_us, choice.p90_us)
        warning = "; samples spread wide: is another process using the GPU?" if noisy else ""
        text = f"{field.job.name}: {_parameters(choice.parameters)}, {choice.median_us:.2f} us{warning}"
        self._console.print(text, style="yellow" if noisy else None, highlight=False)


def choice_facts(choices: Mapping[Job, tuned.Choice]) -> list[Facts]:
    """What was chosen."""
    return [{**_head(job), **asdict(choice)} for job, choice in choices.items()]


def choice_table(choices: Mapping[Job, tuned.Choice]) -> Table:
    """The same as a table."""
    columns = (*_HEADERS, "launch parameters", "us", "p10-p90", "runner-up", "runner-up us")
    table = _table("tuned", *columns, right=_NUMBERS)
    for fact in choice_facts(choices):
        spread = f"{fact['p10_us']:.2f}-{fact['p90_us']:.2f}" if fact["p10_us"] is not None else ""
        second = f"{fact['runner_up_us']:.2f}" if fact["runner_up_us"] is not None else ""
        times = f"{fact['median_us']:.2f}", spread, _parameters(fact["runner_up"]), second
        table.add_row(*_cells(fact), _parameters(fact["parameters"]), *times)
    return table


def plan_facts(job: Job, arch: str) -> Facts:
    """Which launch parameters a step would use and on what grounds.

    Raises:
        TunedTableError: as `tuned.tables`.
    """
    layer, replay, tokens = job.shape.layer, job.replay, job.replay.max_draft
    try:
        plan = plan_step(
            layer,
            replay,
            workload.model_options(job.shape, replay),
            arch=arch,
            batch=job.rows,
            num_tokens=tokens,
            ring_layout=default_ring_layout(layer),
        )
    except NotImplementedError as error:
        return {**_head(job), "source": None, "config": None, "why": f"no kernel: {error}"}
    found = tuned.find(layer, replay, num_tokens=tokens, batch=job.rows, arch=arch)
    if found is None:
        searched = [path.name if path.parent == tuned.SHIPPED else str(path) for _, path, _ in tuned.tables(arch)]
        where = (
            f"not in {', '.join(searched)}" if searched else f"no tuned table for {tuned.local_device(arch) or arch}"
        )
        return {**_head(job), "source": plan.source, "config": asdict(plan.key.config), "why": where}
    source = "this process" if found.path is None else found.path.name
    why = f"{source}: {found.basis} at batch {found.batch}, {found.choice.median_us:.2f} us"
    entry = {"path": found.path and str(found.path), "basis": found.basis, "batch": found.batch, **asdict(found.choice)}
    return {**_head(job), "source": plan.source, "config": asdict(plan.key.config), "why": why, "entry": entry}


def plan_table(facts: Sequence[Facts], arch: str) -> Table:
    """The same as a table."""
    table = _table(f"launch parameters on {arch}", *_HEADERS, "source", "configuration", "why", right=_NUMBERS)
    for fact in facts:
        table.add_row(*_cells(fact), fact["source"] or "", _parameters(fact["config"]), fact["why"])
    return table


def drift_table(facts: Sequence[Facts]) -> Table:
    """Times of a table beside those that they take now."""
    numbers = ("rows", "T", "L", "table us", "now us", "drift")
    table = _table("drift", "layer", "state", "L", "T", "rows", "launch parameters", *numbers[3:], "", right=numbers)
    for fact in facts:
        layer, replay = fact["layer"], fact["replay"]
        name = f"{layer['recurrence']} {layer['num_v_heads']}/{layer['num_k_heads']}"
        name += f" x {layer['head_dim']} x {layer['d_state']}"
        head = name, state_name(Shape.from_json(fact).replay), replay["window"], replay["num_tokens"], fact["rows"]
        now = (f"{fact['now_us']:.2f}", f"{fact['drift']:+.1%}") if "now_us" in fact else ("", "")
        cells = (*map(str, head), _parameters(fact["parameters"]), f"{fact['table_us']:.2f}", *now, fact["status"])
        table.add_row(*cells, style=None if fact["status"] == "in order" else "red")
    return table


def window_facts(facts: Sequence[Facts]) -> list[Facts]:
    """The trades as plain values."""
    return [{**fact, "trades": [asdict(one) for one in fact["trades"]]} for fact in facts]


def window_table(facts: Sequence[Facts]) -> Table:
    """What each window costs, a row each; the best is marked."""
    numbers = ("rows", "T", "L", "us a token", "mean us", "slowest us", "folding", "MiB a request")
    table = _table("windows, one layer", "layer", "state", *numbers, "", right=numbers)
    for fact in facts:
        for one in fact["trades"]:
            head = fact["layer"], fact["state"], fact["rows"], fact["tokens"], one.window
            times = (f"{value:.1f}" for value in (one.us_per_token, one.mean_us, one.slowest_us))
            best = one.window == fact["best"]
            note = "best" if best else fact.get("reason", "") if one is fact["trades"][-1] else ""
            memory = f"{one.fold_share:.3f}", f"{one.request_bytes / 2**20:.2f}"
            table.add_row(*map(str, head), *times, *memory, note, style="bold" if best else None)
    return table


def doctor_table(findings: Sequence[Finding]) -> Table:
    """What was found on this machine."""
    table = Table("what", "state", "details")
    for one in findings:
        table.add_row(one.what, f"[{_STYLES[one.state]}]{one.state}[/]", one.details)
    return table
