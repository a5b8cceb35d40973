"""Decode steps of another package beside this one's, in one run: `python -m tuning.peers`, where it is installed.

Of flash-linear-attention (fla-core on PyPI) the fused recurrent kernels of Gated DeltaNet and Kimi Delta Attention,
with gates, norm and beta in the kernel and the state in the order of ours: a step reads a float32 state and writes
another. Ours reads a checkpoint of that size and 8 records, or folds a full window. The peer's step is compared with
the recurrence in float64 before it is timed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import replayssm
from replayssm.inputs import GdnInputs, Inputs, KdaInputs
from replayssm.pool import default_ring_layout
from replayssm.reference import recurrence
from replayssm.spec import ReplaySpec
from tuning import workload
from tuning.measure import PROTOCOL, Timer, measure
from tuning.options import ListOf, checked, shapes_of
from tuning.shapes import ModelShape
from tuning.store import Record

PACKAGE, MODULE = "fla-core", "fla"
MODELS = ("qwen3.5-122b-a10b", "glm-5.3-flash")
LARGEST_ERROR = 0.01  # of bfloat16 inputs and outputs, relative, in the L2 norm
Step = Callable[[], tuple[Tensor, Tensor]]


class UncheckedError(Exception):
    """A peer's step is not the recurrence; the message says by how much."""


def peer_step(inputs: Inputs, state: Tensor) -> Step:
    """The peer's step of one token a row.

    Args:
        state: [rows, HV, V, K] float32; read only.

    Raises:
        TypeError: the peer has no such recurrence.
    """
    if isinstance(inputs, GdnInputs):
        call = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
        gates: dict[str, Any] = {"g": inputs.a, "beta": inputs.b}
    elif isinstance(inputs, KdaInputs):
        call = importlib.import_module("fla.ops.kda").fused_recurrent_kda
        gates = {"g": inputs.g, "beta": inputs.beta, "lower_bound": inputs.lower_bound}
    else:
        raise TypeError(f"inputs: {PACKAGE} has a fused recurrent step of GDN and KDA, got {type(inputs).__name__}")
    return partial(
        call,
        inputs.q,
        inputs.k,
        inputs.v,
        **gates,
        A_log=inputs.A_log,
        dt_bias=inputs.dt_bias.flatten(),
        scale=inputs.scale,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
    )


def check(inputs: Inputs, state: Tensor, step: Step) -> None:
    """Compare one step with the recurrence.

    Raises:
        UncheckedError: output or state differ by more than `LARGEST_ERROR`.
    """
    for name, found, want in zip(("output", "state"), step(), recurrence.run(inputs, state), strict=True):
        error = float((found.double() - want).norm() / want.norm())
        if not error <= LARGEST_ERROR:
            raise UncheckedError(f"{name}: relative error {error:.2e}, at most {LARGEST_ERROR:.0e}")


def compare(shape: ModelShape, rows: int, *, device: torch.device, timer: Timer, rounds: int) -> list[dict[str, Any]]:
    """Time one layer's steps against each other."""
    replay = ReplaySpec()
    inputs = workload.make_inputs(shape, rows, dtype=replay.activation_dtype, device=device, num_tokens=1)
    layer = shape.layer
    state = torch.randn(rows, layer.num_v_heads, layer.head_dim, layer.d_state, device=device)
    peer = peer_step(inputs, state)
    check(inputs, state, peer)
    arena = workload.Arena(workload.arena_bytes(layer, (replay,), rows), device)
    layout = default_ring_layout(layer)
    (pool,) = workload.make_pools(arena, layer, (replay,), rows, ring_layout=layout)
    live = {"nonflush": replay.window // 2, "flush": replay.window}
    works = {what: workload.make_work(pool, [count] * rows, inputs) for what, count in live.items()}
    launches: dict[str, Callable[[], object]] = {what: partial(w.launch, replayssm.step) for what, w in works.items()}
    timings = measure({PACKAGE: peer, **launches}, timer=timer, rounds=rounds)
    facts = {"status": "measured", "model": shape.name, "rows": rows}
    return [{**facts, "what": what, **asdict(timing)} for what, timing in timings.items()]


@click.command(help=__doc__)
@click.option("--model", "models", default=",".join(MODELS), show_default=True, type=ListOf(click.STRING))
@click.option("--batch", "batches", default="1,32,256", show_default=True, type=ListOf(click.IntRange(min=1)))
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), help="Keep the record.")
def main(models: tuple[str, ...], batches: tuple[int, ...], rounds: int, path: Path | None) -> None:
    """Entry point."""
    shapes = shapes_of(models, (1,))
    if not torch.cuda.is_available() or importlib.util.find_spec(MODULE) is None:
        raise click.UsageError(f"needs a CUDA device and {PACKAGE}; pip install {PACKAGE}")
    from tuning.bench import Machine

    machine = checked(Machine.current_cuda)
    versions = {PACKAGE: importlib.metadata.version(PACKAGE), "triton": importlib.metadata.version("triton")}
    command = [Path(word).name if word == str(path) else word for word in sys.argv[1:]]
    record = Record(path, {"protocol": PROTOCOL, "command": ["peers", *command], "rounds": rounds, "peers": versions})
    for shape in shapes:
        for rows in batches:
            for entry in compare(shape, rows, device=machine.device, timer=machine.timer, rounds=rounds):
                record.add(entry)
                print(json.dumps(entry))


if __name__ == "__main__":
    main()
