"""The commands about launch parameters and windows: `tune`, `show`, `check`, `window`, `doctor`, `predict`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch

import replayssm
from cute_kernels.arch import ARCHES
from replayssm import tuned
from replayssm.spec import MAX_DRAFT, ReplaySpec
from tuning import prediction
from tuning import tune_report as report
from tuning.acceptance import acceptance, observed
from tuning.devices import DEVICES, Device
from tuning.doctor import diagnosis
from tuning.goals import DEFAULT_MODEL
from tuning.matrix import STEPS, StepCase
from tuning.options import DTYPE, DTYPES, PLOT, READ, READS, WINDOW, ListOf, checked, console, own_arch, shapes_of
from tuning.plot import draw
from tuning.predict import predict
from tuning.roofline import NOMINAL_H200, Rates
from tuning.sass import why_no_sass
from tuning.search import DEFAULT_ROUNDS, NoCandidateError
from tuning.shapes import ModelShape, released
from tuning.space import Candidate
from tuning.store import BusyError, Journal, environment, lock, write_json
from tuning.tuner import BATCHES, TUNED_PROTOCOL, Field, Job, Tuner, compilers, jobs_of, merged, multiprocessors
from tuning.window import Habit, advice, choose, costs_of, trade

VERSIONS = ("torch", "cuda", "cutlass_dsl", "driver")
_COUNT = click.IntRange(min=1)
_TOKENS = click.IntRange(1, MAX_DRAFT)


def _for_layers(command: Any) -> Any:
    """The options that name layers, how they are replayed, and batches."""
    for option in (
        click.option("--activation", default="bf16", type=DTYPE),
        click.option("--tokens", default=(1,), type=ListOf(_TOKENS), help="Tokens a row in a step, T."),
        click.option("--window", "windows", default=(16,), type=ListOf(WINDOW)),
        click.option("--read", "reads", default=("none",), type=ListOf(READ), help="Copy that steps read."),
        click.option("--checkpoint", "checkpoints", default=("fp32",), type=ListOf(DTYPE)),
        click.option("--batch", "batches", default=BATCHES, type=ListOf(_COUNT), help="Rows of a step."),
        click.option("--tp", "tps", default=(1,), type=ListOf(_COUNT), help="Devices that share the heads."),
        click.option("--all", "all_models", is_flag=True, help="Every model in each --tp that divides its heads."),
        click.option("--model", "models", default=(DEFAULT_MODEL,), type=ListOf(click.STRING)),
    ):
        command = option(command)
    return command


def _layers(given: Mapping[str, Any]) -> tuple[tuple[ModelShape, ...], tuple[ReplaySpec, ...]]:
    shapes = released(given["tps"]) if given["all_models"] else shapes_of(given["models"], given["tps"])
    activation = DTYPES[given["activation"]]
    replays = [
        checked(lambda: ReplaySpec(window, tokens, DTYPES[state], activation, read_dtype=READS[read]))  # noqa: B023
        for state in given["checkpoints"]
        for read in given["reads"]
        for window in given["windows"]
        for tokens in given["tokens"]
    ]
    return shapes, tuple(replays)


@click.command()
@_for_layers
@click.option("--accepted", type=float, help="Tokens of a step that stay on average; half of T when left out.")
@click.option("--rounds", default=DEFAULT_ROUNDS, type=_COUNT, help="Samples of a candidate, at most.")
@click.option("--time-limit", type=click.FloatRange(min=0), help="Seconds after which no job is begun.")
@click.option("--no-prune", is_flag=True, help="Time also what is outclassed by the model of tuning/space.py.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Table; the user's own when left out.")
@click.option("--fresh", is_flag=True, help="Forget what an interrupted run has finished.")
@click.option("--arch", type=click.Choice(tuple(ARCHES)), help="With --dry-run; this machine's GPU, or sm_90a.")
@click.option("--dry-run", is_flag=True, help="Print what would be tuned; needs no GPU.")
@click.option("--predict", "predicts", is_flag=True, help="Choose by predicted times, into --out; needs no GPU.")
@PLOT
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def tune(dry_run: bool, predicts: bool, arch: str | None, as_json: bool, no_prune: bool, **given: Any) -> None:
    """Choose the launch parameters of layers by timing them, and keep them in a table."""
    if arch and not (dry_run or predicts):
        raise click.UsageError("--arch: only with --dry-run or --predict; what is timed is this machine's GPU")
    if predicts and given["out"] is None:
        raise click.UsageError("--predict: name a table with --out; measured ones hold no predicted times")
    if (dry_run or predicts) and (given["time_limit"] is not None or given["plot"]):
        raise click.UsageError("--time-limit, --plot: not with --dry-run or --predict, where nothing is timed")
    shapes, replays = _layers(given)
    jobs = checked(lambda: jobs_of(shapes, replays, given["batches"], given["accepted"]))
    here = torch.cuda.is_available()
    if not here and not dry_run and not predicts:
        raise click.UsageError("no CUDA device here; --dry-run prints what would be tuned without one")
    arch = arch or (own_arch() if here else "sm_90a")
    device = next(device for device in DEVICES.values() if device.arch == arch)
    of_device = device.multiprocessors if predicts else multiprocessors()
    fields = [Field.of(job, arch, None if no_prune else of_device) for job in jobs]
    uncovered = sorted({field.job.shape.name for field in fields if not field.tried})
    if uncovered:
        raise click.UsageError(f"--model: no kernels for {', '.join(uncovered)}; see `replayssm show`")
    if dry_run:
        rates = NOMINAL_H200 if arch == "sm_90a" else None
        _print(report.field_facts(fields, arch, rates), report.field_tables(fields, arch, rates), as_json)
        return
    sys.exit(_predicted(fields, device, given["out"], as_json) if predicts else _tune(fields, given, as_json))


def _tune(fields: Sequence[Field], given: Mapping[str, Any], as_json: bool) -> int:
    """Tune on this machine's GPU; the exit code."""
    from tuning.bench import Deadline, Machine

    out, screen = given["out"] or tuned.user_path(), console(stderr=as_json)
    machine = checked(Machine.current_cuda)
    header = _header(machine.device_name, str(machine.arch), given["accepted"])
    base = checked(lambda: tuned.read_table(out)) if out.exists() else None
    checked(lambda: merged(base, {}, header))
    path = out.with_name(f"{out.name}.journal")
    facts = {**header.to_json(), "rounds": given["rounds"]}
    try:
        with lock(out), compilers() as executor:
            if given["fresh"]:
                path.unlink(missing_ok=True)
            journal = Journal(path, facts)
            tuner = Tuner(machine, journal, replayssm.step, rounds=given["rounds"], executor=executor)
            with report.Progress(screen, fields, journal.unusable) as progress:
                choices = tuner.run(fields, progress.done, Deadline(given["time_limit"]))
            if choices:
                write_json(out, merged(base, choices, header).to_json())
            left = len(fields) - progress.told
            if not left:
                journal.remove()
    except KeyboardInterrupt:
        screen.print(f"interrupted; what is finished is in {path}, and the same command goes on from there")
        return 130
    except (BusyError, OSError) as error:
        raise click.UsageError(str(error)) from error
    _print(report.choice_facts(choices), [report.choice_table(choices)], as_json)
    screen.print(f"{len(choices)} entries written to {out}", highlight=False)
    if left:
        screen.print(f"time limit: {left} jobs are left, and the same command goes on with them", highlight=False)
    if given["plot"] is not None and choices:
        checked(lambda: draw(merged(None, choices, header).to_json()["entries"], given["plot"]))
    return int(len(choices) < progress.told)


def _predicted(fields: Sequence[Field], device: Device, out: Path, as_json: bool) -> int:
    """Choose by predicted times; the exit code."""
    if why := why_no_sass():
        raise click.UsageError(why)
    found = environment()
    versions = {"replayssm": replayssm.__version__, "cutlass_dsl": found["cutlass_dsl"]}
    header = tuned.Table(f"NVIDIA {device.name}", device.arch, "predicted", versions, prediction.PREDICTED_PROTOCOL, {})
    base = checked(lambda: tuned.read_table(out)) if out.exists() else None
    checked(lambda: merged(base, {}, header))
    make, choices = prediction.kernels(), {}
    for field in fields:
        choices[field.job] = checked(lambda: prediction.predicted_choice(field, device, make))  # noqa: B023
    write_json(out, merged(base, choices, header).to_json())
    _print(report.choice_facts(choices), [report.choice_table(choices)], as_json)
    return 0


def _header(device: str, arch: str, accepted: float | None) -> tuned.Table:
    """A table without entries of this device, these versions and so many tokens that stay."""
    protocol = f"{TUNED_PROTOCOL}; {'half of T' if accepted is None else f'{accepted:g}'} tokens of a step stay"
    found = environment()
    versions = {"replayssm": replayssm.__version__, **{name: found[name] for name in VERSIONS}}
    return tuned.Table(device, arch, "measured", versions, protocol, {})


@click.command()
@_for_layers
@click.option("--arch", type=click.Choice(tuple(ARCHES)), help="This machine's GPU when left out.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def show(arch: str | None, as_json: bool, **given: Any) -> None:
    """Print which launch parameters a step would use, and why."""
    shapes, replays = _layers(given)
    arch = arch or own_arch()
    jobs = [Job(shape, replay, rows) for shape in shapes for replay in replays for rows in given["batches"]]
    facts = checked(lambda: [report.plan_facts(job, arch) for job in jobs])
    _print(facts, [report.plan_table(facts, arch)], as_json)


@click.command()
@click.option(
    "--table", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The one in use if left out."
)
@click.option("--sample", default=8, type=_COUNT, help="Entries that are timed again.")
@click.option("--tolerance", default=0.05, type=click.FloatRange(min=0), help="Drift that is in order.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def check(table: Path | None, sample: int, tolerance: float, as_json: bool) -> None:
    """Time some entries of a tuned table again and report how far they have drifted."""
    if not torch.cuda.is_available():
        raise click.UsageError("no CUDA device here, and drift can only be measured; `replayssm show` reads tables")
    from tuning.bench import Machine

    machine = checked(Machine.current_cuda)
    arch = str(machine.arch)
    if table is None:
        tables = checked(lambda: tuned.tables(arch))
        if not tables:
            raise click.UsageError(f"no tuned table for {machine.device_name}; `replayssm tune` makes one")
        found = tables[0][2]
    else:
        found = checked(lambda: tuned.read_table(table))
    if reason := tuned.mismatch(found, arch, machine.device_name):
        raise click.UsageError(reason)
    if found.basis != "measured":
        raise click.UsageError(f"the table of {found.device} holds predicted times, which do not drift; tune instead")
    facts = drift(found, Tuner(machine, Journal(None, {}), replayssm.step), sample, tolerance)
    _print(facts, [report.drift_table(facts)], as_json)
    sys.exit(int(any(fact["status"] != "in order" for fact in facts)))


def drift(table: tuned.Table, tuner: Tuner, sample: int, tolerance: float) -> list[dict[str, Any]]:
    """Entries of a table, spread over all of them, with the times that they take now."""
    entries = [(shape, rows, choice) for shape, found in table.entries.items() for rows, choice in found.items()]
    facts = []
    for shape, rows, choice in entries[:: max(1, -(-len(entries) // sample))]:
        tokens = shape.replay.max_draft
        layer = ModelShape(shape.layer.recurrence, shape.layer, None, "a table")
        job = Job(layer, shape.replay, rows, max(1.0, tokens / 2))
        arch = ARCHES[table.arch]
        chosen = Candidate(shape.key(choice.parameters, rows, arch), 1)
        fact: dict[str, Any] = {**shape.to_json(), "rows": rows, "parameters": dict(choice.parameters)}
        fact["table_us"] = choice.median_us
        try:
            now = tuner.time_choice(job, chosen).timing.median_us
        except NoCandidateError as error:
            facts.append({**fact, "status": str(error)})
            continue
        change = now / choice.median_us - 1
        status = "in order" if abs(change) <= tolerance else "drifted"
        facts.append({**fact, "now_us": now, "drift": change, "status": status})
    return facts


@click.command()
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--batch", "rows", type=_COUNT, help="Only batches of so many rows.")
@click.option("--accepted", type=float, help="Tokens of a step that stay on average; half of T when left out.")
@click.option("--trace", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Accepted counts, as JSON.")
@click.option("--budget-mib", type=click.FloatRange(min=0), help="Memory of a request in one layer.")
@click.option("--slowest-us", type=click.FloatRange(min=0), help="That a step of one layer may take.")
@click.option("--habit", default="staggered", type=click.Choice(("staggered", "together")), help="How rows fold.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def window(records: tuple[Path, ...], habit: Habit, as_json: bool, **given: Any) -> None:
    """Choose the window L from benchmark records that hold several (`bench --window 8 --window 16 --json FILE`)."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for path in records:
        for head, cost in _costs(path).items():
            if given["rows"] in (None, cost.rows):
                groups.setdefault(head[:-1], []).append(cost)
    if not groups:
        raise click.UsageError("no steps of that batch in the records; `replayssm bench --json FILE` makes some")
    limits = {"budget_bytes": float("inf"), "slowest_us": given["slowest_us"] or float("inf")}
    if given["budget_mib"] is not None:
        limits["budget_bytes"] = given["budget_mib"] * 2**20
    facts, failed = [], False
    for (name, state, rows, tokens), costs in groups.items():
        kept = _accepted(tokens, given)
        trades = [trade(cost, kept, habit) for cost in sorted(costs, key=lambda cost: cost.replay.window)]
        fact: dict[str, Any] = {"layer": name, "state": state, "rows": rows, "tokens": tokens, "trades": trades}
        try:
            best = choose(trades, **limits)
            fact["best"] = best.window
            fact["advice"] = advice(next(cost for cost in costs if cost.replay.window == best.window), kept)
        except ValueError as error:
            fact["best"], fact["reason"], failed = None, str(error), True
        facts.append(fact)
    told = [f"{one['layer']} {one['state']} x{one['rows']}: {one['advice']}" for one in facts if "advice" in one]
    _print(report.window_facts(facts), [report.window_table(facts), *told], as_json)
    sys.exit(int(failed))


def _costs(path: Path) -> dict[tuple[Any, ...], Any]:
    def read() -> dict[tuple[Any, ...], Any]:
        entries = json.loads(path.read_text())["entries"]
        return costs_of(entries, Rates(**entries[0]["bytes_per_us"]))

    try:
        return read()
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise click.UsageError(f"{path}: expected the record of a benchmark, got {error!r}") from error


def _accepted(tokens: int, given: Mapping[str, Any]) -> tuple[float, ...]:
    if given["trace"] is not None:
        return checked(lambda: observed(json.loads(given["trace"].read_text()), tokens))
    mean = max(1.0, tokens / 2) if given["accepted"] is None else given["accepted"]
    return checked(lambda: acceptance(tokens, mean))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(as_json: bool) -> None:
    """Print versions, GPU, cache, tables, and which kernels run here and why not; ends with 1 if one is broken."""
    findings = diagnosis()
    _print([vars(one) for one in findings], [report.doctor_table(findings)], as_json)
    sys.exit(int(any(one.state == "broken" for one in findings)))


@click.command("predict")
@_for_layers
@click.option("--what", "whats", default=("nonflush", "flush"), type=ListOf(click.Choice(STEPS)), help="Steps.")
@click.option("--device", "devices", default=tuple(DEVICES), type=ListOf(click.Choice(tuple(DEVICES))))
@click.option("--against", "records", multiple=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="With --against: record of the comparison."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def predict_steps(records: tuple[Path, ...], out: Path | None, as_json: bool, **given: Any) -> None:
    """Predict the time of steps from their compiled kernels, or with --against compare that with records of `bench`."""
    devices, make = [DEVICES[name] for name in given["devices"]], prediction.kernels()
    if why := why_no_sass():
        raise click.UsageError(why)
    if records:
        found = prediction.comparison(records, devices, make, lambda one: click.echo(".", nl=False, err=True))
        if out is not None:
            write_json(out, {**environment(), "records": [path.name for path in records], "predictions": found})
        _print(found, [prediction.summary_table(found)], as_json)
        return
    shapes, replays = _layers(given)
    facts = []
    for shape, replay, rows, what, device in product(shapes, replays, given["batches"], given["whats"], devices):
        case = StepCase(shape, replay, rows, what, max(1.0, replay.max_draft / 2))
        key = checked(lambda: prediction.planned_key(case, device.arch))  # noqa: B023
        facts.append(prediction.predicted_facts(case, key, device, predict(make(key, device.arch), case, device)))
    _print(facts, [prediction.predictions_table(facts)], as_json)


def _print(facts: Any, tables: Sequence[Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    screen = console()
    for one in tables:
        screen.print(one, highlight=False)


ALL = (tune, show, check, window, doctor, predict_steps)
