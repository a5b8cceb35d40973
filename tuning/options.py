"""What the commands have in common: their types, and how a wrong command line is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from rich.console import Console

from cute_kernels.arch import ARCHES
from replayssm.launch import arch_of
from replayssm.spec import MAX_WINDOW, ReadDtype
from tuning.shapes import ModelShape, lookup

T = TypeVar("T")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE = click.Choice(tuple(DTYPES))
READS: dict[str, ReadDtype | None] = {
    "none": None,
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp8",
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
READ = click.Choice(tuple(READS))
WINDOW = click.IntRange(1, MAX_WINDOW)
PLOT = click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Picture of the record, e.g. a PNG."
)


class ListOf(click.ParamType):  # type: ignore[type-arg]
    """Values separated by commas, each once."""

    def __init__(self, item: click.ParamType[Any]) -> None:
        self._item = item
        self.name = f"{item.name}s"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        inner = self._item.get_metavar(param, ctx) or self._item.name.upper()
        return f"{inner},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(dict.fromkeys(self._item.convert(word.strip(), param, ctx) for word in str(value).split(",")))


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal, or as the tables are; on stderr beside JSON that a program reads."""
    return Console(width=None if sys.stdout.isatty() else 180, soft_wrap=False, stderr=stderr)


def shapes_of(models: Sequence[str], tps: Sequence[int]) -> tuple[ModelShape, ...]:
    """The layers of the models, in each of the shards."""
    return checked(lambda: tuple(lookup(model, tp=tp) for model in models for tp in tps))


def checked(build: Callable[[], T]) -> T:
    """Build from the command line's words; a refused one is a wrong command line."""
    try:
        return build()
    except (ValueError, NotImplementedError, OSError) as error:
        raise click.UsageError(str(error)) from error


def own_arch() -> str:
    """The architecture of this machine's GPU."""
    if not torch.cuda.is_available():
        raise click.UsageError(f"no CUDA device here; pass --arch, one of {', '.join(ARCHES)}")
    return checked(lambda: arch_of(torch.device("cuda")))
