"""What the first GPU of a kind is asked, in one command: every check, both readouts side by side, every benchmark.

    python -m tuning.first_run REPORT.md

Each command of `commands` runs as it would by hand; the report has its exit status, its time and the end of its output,
and is rewritten after each, so that an interrupted run leaves what is known so far. Nothing stops the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

import replayssm
from cute_kernels.arch import ARCHES
from cute_kernels.configs import TENSOR_WARPS, StepConfig
from cute_kernels.heuristic import heuristic_config
from replayssm import ReplaySpec
from tuning import gate, workload
from tuning.bench import Machine
from tuning.measure import GateFailedError, measure
from tuning.shapes import ModelShape, lookup

TAIL = 40  # lines of an output that the report keeps
SECONDS = 3 * 3600
MODELS = ("nemotron-3-super", "qwen3.5-122b-a10b", "glm-5.3-flash")
SPECS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"checkpoint_dtype": torch.bfloat16},
    "nvfp4": {"read_dtype": "nvfp4"},
}
TOKENS, ROWS, LIVE = (1, 2, 4, 8, 16), 256, 8


def commands(folder: Path) -> dict[str, list[str]]:
    """What to run, by what it shows; records go into a folder."""
    python = [sys.executable, "-m"]
    sanitizer = ["compute-sanitizer", "--error-exitcode", "1", "--tool"]
    bench = [*python, "tuning", "bench", "--batch", "256", "--no-first-call"]
    return {
        "the machine": [*python, "tuning", "doctor"],
        "results against the reference": [*python, "pytest", "--require-gpu", "-m", "gpu", "-q", "tests"],
        "registers, spills, instructions": [*python, "pytest", "-q", "tests/cute_kernels/test_resources.py"],
        **{tool: [*sanitizer, tool, *python, "tests.cute_kernels.sanitize"] for tool in ("memcheck", "racecheck")},
        "both readouts": [*python, "tuning.first_run", "--compare", str(folder / "readouts.json")],
        **{
            f"bench of {model}": [
                *bench, "--model", model, *(word for t in (1, 8) for word in ("--tokens", str(t))),
                "--read", "none", "--read", "nvfp4", "--json", str(folder / f"{model}.json"),
            ]
            for model in MODELS
        },
    }  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """A command that has run; `status` is its exit status, or why there is none."""

    what: str
    command: str
    status: int | str
    seconds: float
    output: str


def ran(what: str, command: Sequence[str]) -> Ran:
    """Run a command to its end, or until it has had its time."""
    begun = time.monotonic()
    status: int | str
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        status, output = done.returncode, done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        status, output = f"{type(error).__name__}: {error}", ""
    tail = "\n".join(output.splitlines()[-TAIL:])
    return Ran(what, " ".join(command), status, time.monotonic() - begun, tail)


def report(results: Sequence[Ran]) -> Iterator[str]:
    """The report as lines of Markdown: a table of all commands, then what each said."""
    yield from ("# First run", "", "| what | passed | seconds |", "|---|---|---|")
    for result in results:
        passed = "yes" if result.status == 0 else f"no ({result.status})"
        yield f"| {result.what} | {passed} | {result.seconds:.0f} |"
    for result in results:
        yield from ("", f"## {result.what}", "", "```", f"$ {result.command}", result.output, "```")


@dataclass(frozen=True)
class Compared:
    """Medians of one step by readout, in microseconds, or what a gate said of it."""

    model: str
    state: str
    tokens: int
    what: str
    times_us: dict[str, float | str]


def readouts(work: workload.StepWork, arch: str) -> dict[str, StepConfig]:
    """What the architecture's heuristic chooses, and what one without tcgen05 would, where that is another readout; of
    NVFP4 also codes that are decoded, by twice the warps a head: the state takes tensor memory then."""
    chosen = work.plan(arch).key
    other = heuristic_config(chosen, work.out.shape[0], replace(ARCHES[arch], tensor_columns=0))
    configs: dict[str, StepConfig] = {} if other is None else {other.readout: other}
    configs[chosen.config.readout] = chosen.config
    if chosen.tensor and chosen.read_dtype == "nvfp4":
        warps = min(TENSOR_WARPS, 2 * chosen.config.warps)
        configs["tcgen05_f16"] = replace(chosen.config, warps=warps, readout="tcgen05_f16")
    return configs


def compare(model: ModelShape, state: str, tokens: int, machine: Machine, rows: int = ROWS) -> list[Compared]:
    """Check and time each readout of a step of which all rows read, and of which all fold."""
    replay = ReplaySpec(max_draft=tokens, ring_capacity=16 + tokens, **SPECS[state])
    arena = workload.Arena(workload.arena_bytes(model.layer, [replay], rows + 32), machine.device)
    (pool,) = workload.make_pools(arena, model.layer, [replay], rows + 32, ring_layout="record_major")
    inputs = workload.make_inputs(model, rows, dtype=torch.bfloat16, device=machine.device, num_tokens=tokens)
    found = []
    for what, live in (("read", LIVE), ("fold", replay.window)):
        work = workload.make_work(pool, [live] * rows, inputs)
        launches: dict[str, Callable[[], None]] = {}
        times: dict[str, float | str] = {}
        for name, config in readouts(work, machine.arch or "sm_90a").items():
            step = partial(replayssm.step, config=config)
            try:
                gate.check_step(work, step)
                launches[name] = partial(work.launch, step)
            except (GateFailedError, RuntimeError, NotImplementedError) as error:
                times[name] = f"{type(error).__name__}: {error}"
        timings = measure(launches, timer=machine.timer) if launches else {}
        times |= {name: timing.median_us for name, timing in timings.items()}
        found.append(Compared(model.name, state, tokens, what, times))
    return found


@click.command()
@click.argument("path", metavar="REPORT.md", required=False, type=click.Path(path_type=Path))
@click.option("--compare", "record", type=click.Path(path_type=Path), help="Only compare readouts, into a JSON file.")
def main(path: Path | None, record: Path | None) -> None:
    """Ask this GPU everything and write a report, or compare the readouts of a step only."""
    if record is not None:
        machine, rows = Machine.current_cuda(), []
        for model in map(lookup, MODELS):
            for state in SPECS:
                for tokens in TOKENS if state == "nvfp4" else TOKENS[1:]:
                    rows += [asdict(one) for one in compare(model, state, tokens, machine)]
                    record.write_text(json.dumps({"device": machine.device_name, "steps": rows}, indent=1) + "\n")
                    click.echo(rows[-2:])
        raise SystemExit(any(isinstance(t, str) for row in rows for t in row["times_us"].values()))
    if path is None:
        raise click.UsageError("expected REPORT.md, the file to write")
    results: list[Ran] = []
    for what, command in commands(path.resolve().parent).items():
        click.echo(f"{what}: {' '.join(command)}")
        results.append(ran(what, command))
        path.write_text("\n".join(report(results)) + "\n", encoding="utf-8")
    raise SystemExit(any(result.status != 0 for result in results))


if __name__ == "__main__":
    main()
