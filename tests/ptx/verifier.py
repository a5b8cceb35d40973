"""What the static verifier SentryWard decides about a recorded launch: all schedules of its warps and CTAs at once.

It reads the PTX as the compiler emitted it and a description of the launch, and decides whether barriers and mbarriers
are used soundly and live where they are used, and whether two accesses that conflict can meet without an order between
them: in shared memory, and across CTAs in global memory. What steers the kernel is given as it was recorded: grid,
block, shared memory, strides, and the contents of the integer tensors that the kernel only reads. Numbers stay
symbols, so a verdict is about one pattern of slots and cursors, and about every value of the other tensors.

The tool takes for granted that tensors do not overlap and have no end, and that the launch runs alone. It passes over
fences and griddepcontrol. So bounds, fences and dependent launches are not its matter. It can also prove equality with
a torch reference, but not of a launch with given contents: "comparison context: expected nonnegative integer".

    make static             verify the launches of tests/ptx/test_static.py and rewrite docs/records/static.json
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tests.ptx.recorder import Launch

SCHEMA = "spverify.kernel-input/v1"
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)")
PROPERTIES = ("synchronization", "memory")
SECONDS = 120


def why_no_verifier() -> str | None:
    """Why nothing can be verified here, or None if it can."""
    return None if importlib.util.find_spec("sentryward") else "needs sentryward; pip install '.[dev]' brings it"


def tool_version() -> str:
    return importlib.metadata.version("sentryward")


@dataclass(frozen=True)
class Verdict:
    """In the tool's words: its result, the status of each property, and the first line of its diagnostics, if any."""

    result: str
    synchronization: str
    memory: str
    message: str = ""


def verify(launch: Launch, contents: tuple[Tensor, ...] = ()) -> Verdict:
    """Run the verifier on one launch.

    Args:
        launch: as recorded; one kernel, whose parameters are tensors (a pointer, then 64-bit numbers) and integers.
        contents: integer tensors among the arguments whose values decide what the kernel does. It must not write them.
    """
    import sentryward

    with tempfile.TemporaryDirectory(prefix="verifier-") as name:
        folder = Path(name)
        (folder / "kernel.ptx").write_text(understood(launch.ptx))
        (folder / "input.json").write_text(json.dumps(described(launch, contents)))
        found = sentryward.verify(folder / "kernel.ptx", input=folder / "input.json", timeout_seconds=SECONDS)
    first = next(iter(found["diagnostics"]), {})
    message = first.get("message") or first.get("code", "")
    return Verdict(found["result"], *(found["checks"][name] for name in PROPERTIES), message=significant(message))


def understood(ptx: str) -> str:
    """The same without hints that the tool does not parse and that order nothing, and with the bits of a descriptor as
    a number that is not negative."""
    ptx = re.sub(r"(cp\.async\.c[ag]\S+?)\.L2::cache_hint( [^;]*), %rd\d+;", r"\1\2;", ptx)
    ptx = re.sub(r"(or\.b64\s[^;]*, )(-\d+);", lambda found: f"{found[1]}{int(found[2]) + 2**64};", ptx)
    return ptx.replace(".collector::a::discard", "")


def significant(message: str) -> str:
    """The first line of a message without what differs between runs and the operands that it quotes."""
    line = message.strip().partition("\n")[0]
    return re.sub(r"\s*[;:]? candidate valuation.*", "", line)[:200]


def described(launch: Launch, contents: tuple[Tensor, ...]) -> dict[str, Any]:
    """The tool's input: geometry, which parameters are tensors, their strides, and the contents of some."""
    head = re.search(r"\.entry\s+[\w$]+\s*\(([^)]*)\)", launch.ptx)
    assert head is not None
    known = {tensor.data_ptr(): tensor for tensor in contents}
    declarations: list[dict[str, Any]] = []
    arguments: list[dict[str, Any]] = []
    arrays: list[dict[str, Any]] = []
    for number, ((form, name), value) in enumerate(zip(PARAMETER.findall(head[1]), launch.arguments, strict=True)):
        if form != "b8":
            arguments.append({"parameter": name, "type": form, "value": int.from_bytes(value, "little")})
            continue
        pointer, *numbers = np.frombuffer(value, np.uint64).tolist()
        where = {"parameter": name, "offset": 0}
        declarations.append({**where, "type": "pointer", "space": "global", "object": f"tensor{number}"})
        arguments += [
            {"parameter": name, "offset": 8 * (i + 1), "type": "u64", "value": number}
            for i, number in enumerate(numbers)
        ]
        if pointer in known:
            arrays.append({**where, **array_of(known.pop(pointer))})
    assert not known, f"no parameter points to {[tuple(tensor.shape) for tensor in known.values()]}"
    geometry = {"grid_dim": launch.grid, "block_dim": launch.block, "cluster_dim": launch.cluster}
    return {
        "schema": SCHEMA,
        "launch": {**geometry, "dynamic_shared_bytes": launch.shared_bytes},
        "declarations": declarations,
        "arguments": arguments,
        "shape_arrays": arrays,
    }


def array_of(tensor: Tensor) -> dict[str, Any]:
    """A tensor's bytes as the tool takes them: unsigned words of 64 or 32 bits, padded with zeros."""
    data = tensor.contiguous().view(-1).numpy().tobytes()
    width = 8 if tensor.itemsize == 8 else 4
    words = np.frombuffer(data + bytes(-len(data) % width), f"<u{width}").tolist()
    return {"element_type": f"u{8 * width}", "shapes": [[word] for word in words]}
