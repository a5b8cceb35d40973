"""The command `replayssm` (also `python -m tuning`): tuning, benchmarks, and a cache of kernels filled ahead of use.

Exit codes: 0 done, 1 a kernel failed its correctness gate or what was checked is not in order, 2 a wrong command line
or a machine that cannot do it, 130 interrupted.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import replayssm
from cute_kernels.arch import ARCHES
from cute_kernels.configs import Options as KernelOptions
from replayssm.launch import options_of
from replayssm.plan import OPTIONS
from replayssm.spec import MAX_DRAFT, Recurrence, ReplaySpec
from tuning import commands
from tuning.documents import refreshed, tuned_table
from tuning.goals import DEFAULT_MODEL
from tuning.matrix import ALL_MODELS, BATCHES, Options, exit_code
from tuning.matrix import plan as plan_matrix
from tuning.measure import DEFAULT_ROUNDS, PROTOCOL
from tuning.options import DTYPE, DTYPES, PLOT, READ, READS, WINDOW, checked, console, own_arch, shapes_of
from tuning.plot import draw
from tuning.precision import CHUNK, LAYERS, MAX_TOKENS, REGIMES, SCHEMES, precision_tables, study
from tuning.precision import __doc__ as PRECISION_PROTOCOL
from tuning.report import markdown_table, memory_table, plan_table, results_table
from tuning.roofline import NOMINAL_H200
from tuning.shapes import ModelShape, lookup, names
from tuning.store import Record
from tuning.workload import make_inputs

LENGTHS = "Tokens after which errors are sampled; repeatable, multiples of 256."
ONE_OF_EACH = (DEFAULT_MODEL, "qwen3.5-122b-a10b", "glm-5.3-flash")
WITH_KERNELS = tuple(name for recurrence in OPTIONS for name in names(recurrence))
# Options of `warmup` that only one recurrence has, by the name of their parameter.
ONLY_FOR = {"parameter": ("--parameter", "mamba2"), "has_z": ("--z", "mamba2"), "round_beta": ("--round-beta", "gdn")}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main() -> None:
    """ReplaySSM kernels: tune them, measure them, compile them ahead."""


@main.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    default=(DEFAULT_MODEL,),
    help="Model of the layer, or a config.json; repeatable.",
)
@click.option("--tp", "tps", multiple=True, default=(1,), type=click.IntRange(min=1), help="Shards; repeatable.")
@click.option("--all", "all_models", is_flag=True, help="The released layers of one recurrence, instead of --model.")
@click.option("--recurrence", type=click.Choice(tuple(ALL_MODELS)), help="With --all: which; mamba2 when left out.")
@click.option("--batch", "batches", multiple=True, default=BATCHES, type=click.IntRange(1, 4096), help="Repeatable.")
@click.option("--checkpoint", "checkpoints", multiple=True, default=tuple(DTYPES), type=DTYPE, help="Repeatable.")
@click.option("--read", "reads", multiple=True, default=("none",), type=READ, help="Copy that steps read; repeatable.")
@click.option("--decay", default="fp32", type=click.Choice(("fp32", "bf16")), help="KDA: dtype of the decay records.")
@click.option("--activation", default="bf16", type=DTYPE)
@click.option("--window", "windows", multiple=True, default=(16,), type=WINDOW, help="Repeatable.")
@click.option(
    "--tokens",
    multiple=True,
    default=(1,),
    type=click.IntRange(1, MAX_DRAFT),
    help="Tokens a row in a step, T; repeatable.",
)
@click.option("--accepted", type=float, help="Tokens of a step that stay on average; half of T when left out.")
@click.option("--ring-layout", type=click.Choice(("record_major", "head_major")), help="The layer's own when left out.")
@click.option("--rounds", default=DEFAULT_ROUNDS, type=click.IntRange(min=1), help="Samples of each candidate.")
@click.option("--time-limit", type=click.FloatRange(min=0), help="Seconds after which nothing new is begun.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Record of the run.")
@click.option("--first-call/--no-first-call", default=True, help="Time a cold and a cached first call (two processes).")
@PLOT
@click.option("--dry-run", is_flag=True, help="Print the plan, with bytes and limits at an H200's nominal rates.")
def bench(
    models: tuple[str, ...],
    tps: tuple[int, ...],
    all_models: bool,
    recurrence: Recurrence | None,
    json_path: Path | None,
    plot: Path | None,
    dry_run: bool,
    **rest: Any,
) -> None:
    """Time the step of real layers against the bytes that they must move."""
    if all_models:
        shapes = tuple(lookup(model, tp=tp) for model, tp in ALL_MODELS[recurrence or "mamba2"])
    elif recurrence:
        raise click.UsageError(f"--recurrence {recurrence}: add --all, whose list it chooses, or name a --model")
    else:
        shapes = shapes_of(models, tps)
    options = Options(
        shapes=shapes,
        batches=tuple(sorted(set(rest["batches"]))),
        checkpoints=tuple(DTYPES[name] for name in rest["checkpoints"]),
        activation=DTYPES[rest["activation"]],
        reads=tuple(READS[name] for name in dict.fromkeys(rest["reads"])),
        decay=DTYPES[rest["decay"]],
        windows=tuple(dict.fromkeys(rest["windows"])),
        tokens=tuple(dict.fromkeys(rest["tokens"])),
        accepted=rest["accepted"],
        ring_layout=rest["ring_layout"],
        rounds=rest["rounds"],
        time_limit_s=rest["time_limit"],
        first_call=rest["first_call"],
    )
    screen = console()
    groups = checked(lambda: plan_matrix(options))
    if dry_run:
        screen.print(plan_table(groups, NOMINAL_H200))
        return
    if not torch.cuda.is_available():
        raise click.UsageError("no CUDA device here; --dry-run prints the plan without one")
    from tuning.bench import Bench, Machine

    command = [Path(word).name if word == str(json_path) else word for word in sys.argv[1:]]
    record = Record(json_path, {"protocol": PROTOCOL, "command": command, "rounds": options.rounds})
    try:
        Bench(options, checked(Machine.current_cuda), record, screen).run()
    finally:
        record.save()
        screen.print(results_table(record.entries))
    if plot is not None:
        checked(lambda: draw(record.entries, plot))
    sys.exit(exit_code(record.entries))


@main.command()
@click.option("--model", required=True, help="Model of the layer: " + ", ".join(WITH_KERNELS) + ".")
@click.option("--tp", default=1, type=click.IntRange(min=1), help="Devices that share the heads.")
@click.option("--window", default=16, type=WINDOW)
@click.option("--activation", default="bf16", type=DTYPE)
@click.option("--checkpoint", default="fp32", type=DTYPE)
@click.option(
    "--gates", "--dt", "gates", type=DTYPE, help="Dtype of dt, a and b, or beta; the activations' when left out."
)
@click.option("--parameter", type=DTYPE, help="Mamba-2: dtype of D and dt_bias; the activations' when left out.")
@click.option("--z/--no-z", "has_z", default=False, help="Mamba-2: the step gets the output gate z.")
@click.option("--round-beta", is_flag=True, help="GDN: beta is rounded to the dtype of b.")
@click.option("--arch", type=click.Choice(tuple(ARCHES)), help="This machine's GPU when left out.")
def warmup(model: str, tp: int, arch: str | None, **rest: Any) -> None:
    """Compile the kernels of a model into the cache on disk, so that a first call only loads them."""
    (shape,) = shapes_of((model,), (tp,))
    activation = DTYPES[rest["activation"]]
    replay = checked(lambda: ReplaySpec(rest["window"], 1, DTYPES[rest["checkpoint"]], activation))
    options = _options(shape, activation, rest)
    arch = arch or own_arch()
    plans = checked(lambda: replayssm.warmup(shape.layer, replay, options, arch=arch, batches=BATCHES))
    for plan in plans:
        click.echo(plan)
    click.echo(f"{shape.name} on {arch}: {len(plans)} step kernels and their commit are in the cache")


@main.command()
@click.option("--tokens", "lengths", multiple=True, default=(2048,), type=click.IntRange(512, MAX_TOKENS), help=LENGTHS)
@click.option("--recurrence", "kinds", multiple=True, default=tuple(LAYERS), type=click.Choice(tuple(LAYERS)))
@click.option("--regime", "regimes", multiple=True, default=REGIMES, type=click.Choice(REGIMES), help="Of the decays.")
@click.option(
    "--scheme", "names", multiple=True, type=click.Choice([one.name for one in SCHEMES]), help="All if none is named."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Record of the run.")
def precision(
    lengths: tuple[int, ...],
    kinds: tuple[Recurrence, ...],
    regimes: tuple[str, ...],
    names: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Compare the outputs of each precision of the state with float64 over many tokens, on the CPU."""
    if any(length % CHUNK for length in lengths):
        raise click.UsageError(f"--tokens: expected multiples of {CHUNK}, got {lengths}")
    record = Record(json_path, {"protocol": PRECISION_PROTOCOL})
    for kind in kinds:
        for regime in regimes:
            schemes = [one for one in SCHEMES if not names or one.name in names]
            for entry in study(kind, regime, sorted(set(lengths)), schemes, functools.partial(click.echo, err=True)):
                record.add(entry)
    click.echo(precision_tables(record.entries))


@main.command()
@click.argument("record", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@PLOT
def report(record: Path, plot: Path | None) -> None:
    """Print a record of `bench` or `precision`, or a tuned table, as Markdown tables."""
    found = json.loads(record.read_text())
    entries = found["entries"]
    if plot is not None:
        checked(lambda: draw(entries, plot))
    if "schema" in found:
        click.echo(tuned_table([found], []))
    else:
        click.echo(precision_tables(entries) if "scheme" in entries[0] else markdown_table(entries))


@main.command()
@click.argument("document", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def refresh(document: Path) -> None:
    """Make the tables of a document anew from the records that it names."""
    document.write_text(checked(lambda: refreshed(document)), encoding="utf-8")


@main.command()
@click.option("--model", "models", multiple=True, default=ONE_OF_EACH, help="Repeatable.")
@click.option("--window", default=16, type=WINDOW)
@click.option("--checkpoint", default="fp32", type=DTYPE)
@click.option("--activation", default="bf16", type=DTYPE)
def memory(models: tuple[str, ...], window: int, checkpoint: str, activation: str) -> None:
    """Print the memory that a request takes by T, and what snapshots of the state would take: computed."""
    replay = ReplaySpec(window, 1, DTYPES[checkpoint], DTYPES[activation])
    click.echo(memory_table(shapes_of(models, (1,)), replay))


def _options(shape: ModelShape, activation: torch.dtype, given: Mapping[str, Any]) -> KernelOptions:
    """What the kernel must know of the inputs: read from inputs without memory, as the command line wants them."""
    recurrence = shape.layer.recurrence
    if recurrence not in OPTIONS:
        raise click.UsageError(f"--model: no kernels for {recurrence}; known are {', '.join(WITH_KERNELS)}")
    for name, (option, owner) in ONLY_FOR.items():
        if given[name] and recurrence != owner:
            raise click.UsageError(f"{option}: only {owner} layers have it, {shape.name} is {recurrence}; leave it out")
    inputs = make_inputs(shape, 1, dtype=activation, device="meta", has_z=given["has_z"])
    gates = DTYPES.get(given["gates"], activation)
    fields = inputs._asdict()
    changed: dict[str, Any] = {n: t.to(gates) for n, t in fields.items() if isinstance(t, Tensor) and t.dim() == 3}
    if recurrence == "mamba2":
        parameter = DTYPES.get(given["parameter"], activation)
        changed |= {name: fields[name].to(parameter) for name in ("D", "dt_bias")}
    if given["round_beta"]:
        changed["round_beta"] = True
    return options_of(inputs._replace(**changed))


for command in commands.ALL:
    main.add_command(command)


if __name__ == "__main__":
    main()
