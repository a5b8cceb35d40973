"""How long the first call of a kernel takes in a new process: compiled, or loaded from the cache on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

import replayssm
from replayssm.spec import LayerSpec, ReplaySpec
from tuning import workload
from tuning.shapes import ModelShape

TIMEOUT_S = 120.0


def first_call(shape: ModelShape, replay: ReplaySpec, rows: int) -> dict[str, float]:
    """Time one call of the step of `replay.max_draft` tokens on the current CUDA device, the first in this process.

    Not in `median_us` are the CUDA context, the tensors, and the import of the kernels' modules with the compiler,
    which is `import_us`.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    arena = workload.Arena(workload.arena_bytes(shape.layer, (replay,), rows), device)
    (pool,) = workload.make_pools(arena, shape.layer, (replay,), rows, ring_layout="record_major")
    inputs = workload.make_inputs(
        shape, rows, dtype=replay.activation_dtype, device=device, num_tokens=replay.max_draft
    )
    work = workload.make_work(pool, [replay.window // 2] * rows, inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    import cute_kernels.commit
    import cute_kernels.step  # noqa: F401

    imported = time.perf_counter()
    work.launch(replayssm.step)
    torch.cuda.synchronize()
    return {"median_us": (time.perf_counter() - imported) * 1e6, "import_us": (imported - start) * 1e6}


def first_call_in_new_process(shape: ModelShape, replay: ReplaySpec, rows: int, cache: str) -> dict[str, Any]:
    """`first_call` in a process of its own.

    Args:
        shape: of the layer.
        cache: folder of the cache on disk, empty for a cold call.

    Raises:
        RuntimeError: the process failed; the message holds the end of what it wrote.
    """
    facts = [replay.window, replay.max_draft, replay.checkpoint_dtype, replay.activation_dtype, rows]
    words = [json.dumps(asdict(shape)), *(str(fact).removeprefix("torch.") for fact in facts)]
    done = subprocess.run(
        [sys.executable, "-m", "tuning.first_call", *words],
        env={**os.environ, "REPLAYSSM_CACHE": cache},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"first call: the process ended with {done.returncode}: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(words: list[str]) -> None:
    """Entry point of the new process: shape, window, T, checkpoint dtype, activation dtype, rows; prints JSON."""
    text, window, num_tokens, checkpoint, activation, rows = words
    facts = json.loads(text)
    shape = ModelShape(**{**facts, "layer": LayerSpec(**facts["layer"])})
    replay = ReplaySpec(int(window), int(num_tokens), getattr(torch, checkpoint), getattr(torch, activation))
    print(json.dumps(first_call(shape, replay, int(rows))))


if __name__ == "__main__":
    main(sys.argv[1:])
