"""What this machine has of what the kernels need: versions, GPU, compiler, cache, tuned tables, and what follows."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

import replayssm
from cute_kernels.arch import ARCHES, arch_of_capability
from replayssm import tuned
from replayssm.launch import kernel_modules
from replayssm.plan import OPTIONS

State = Literal["works", "missing", "broken"]
PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "transformers")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        state: it works; it is missing, and what needs it does not run; or it is there and broken.
    """

    what: str
    state: State
    details: str


def diagnosis() -> list[Finding]:
    """Everything that was found; nothing is changed or compiled."""
    versions = [Finding("replayssm", "works", f"{replayssm.__version__}, Python {platform.python_version()}")]
    versions += [_version(package) for package in PACKAGES]
    gpu, compiler = _gpu(), _compiler()
    return [*versions, gpu, compiler, *_cache(compiler), *_tables(), *_kernels(gpu, compiler)]


def _version(package: str) -> Finding:
    try:
        return Finding(package, "works", metadata.version(package))
    except metadata.PackageNotFoundError:
        return Finding(package, "missing", "not installed, or on PYTHONPATH only")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "torch sees no CUDA device" if built else f"torch {torch.__version__} is built without CUDA"
        return Finding("GPU", "missing", why)
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    try:
        arch = arch_of_capability(capability).name
    except NotImplementedError as error:
        return Finding("GPU", "missing", f"{name}: {error}")
    return Finding("GPU", "works", f"{name}, {arch}")


def _compiler() -> Finding:
    try:
        kernel_modules()
    except NotImplementedError as error:
        cause = f": {error.__cause__}" if error.__cause__ else ""
        return Finding("compiler", "missing", f"{error}{cause}")
    return Finding("compiler", "works", f"kernels compile for {', '.join(ARCHES)}")


def _cache(compiler: Finding) -> Iterator[Finding]:
    if compiler.state != "works":
        return
    from cute_kernels.compile import cache_root

    root = cache_root()
    files = list(root.rglob("kernel.o")) if root.exists() else []
    size = sum(path.stat().st_size for path in files)
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(there, os.W_OK):
        yield Finding("kernel cache", "broken", f"{root} cannot be written; name another folder in REPLAYSSM_CACHE")
        return
    yield Finding("kernel cache", "works", f"{_short(root)}, {len(files)} kernels, {size / 2**20:.1f} MiB")


def _short(path: Path) -> str:
    """With ~ for the user's home."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def _tables() -> Iterator[Finding]:
    path = tuned.user_path()
    if path.exists() or os.environ.get(tuned.ENVIRONMENT):
        yield _table("user's table", path)
    else:
        yield Finding("user's table", "missing", f"{_short(path)}: `replayssm tune` makes it")
    shipped = sorted(tuned.SHIPPED.glob("*.json"))
    yield from (_table("shipped table", path) for path in shipped)
    if not shipped:
        yield Finding("shipped tables", "missing", "none in this version; the heuristic chooses")


def _table(what: str, path: Path) -> Finding:
    read: Callable[[Path], Any] = tuned.read_table
    try:
        table = read(path)
    except tuned.TunedTableError as error:
        return Finding(what, "broken", str(error))
    count = sum(len(choices) for choices in table.entries.values())
    return Finding(what, "works", f"{_short(path)}: {count} entries {table.basis} for {table.device}, {table.arch}")


def _kernels(gpu: Finding, compiler: Finding) -> Iterator[Finding]:
    """By recurrence, what a step on a CUDA tensor would meet; the twin runs anywhere."""
    reasons = [f"{one.what}: {one.details}" for one in (gpu, compiler) if one.state != "works"]
    for recurrence in OPTIONS:
        if reasons:
            yield Finding(f"{recurrence} kernels", "missing", f"only the torch twin runs; no {'; no '.join(reasons)}")
        else:
            yield Finding(f"{recurrence} kernels", "works", "step of 1 to 16 tokens, commit, flush, materialize")
