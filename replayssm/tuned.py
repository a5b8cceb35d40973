"""Launch parameters that were measured or predicted: tables as JSON files, and where a step looks them up.

| order | source | where |
|---|---|---|
| 1 | explicit | `config=` of the call; no table is read |
| 2 | user | the file named by `REPLAYSSM_TUNED`, else `replayssm/tuned.json` in `$XDG_CONFIG_HOME` (`~/.config`) |
| 3 | shipped | `replayssm/data/tuned/*.json` of this device |
| 4 | autotuned | what `replayssm.autotune` has found in this process |
| 5 | predicted | a table of either place whose times were predicted for the architecture, not measured |
| 6 | heuristic | `cute_kernels.heuristic.heuristic_config` |

Files are read once a process, at the first plan of an architecture. A measured table holds for its device, which must
be the current one then; where the machine has no GPU of the planned architecture, as when kernels are compiled ahead,
that of any device of the architecture serves. A predicted table holds for every device of its architecture, and only
for shapes that no measured one has; one table never mixes the two. A file that cannot be used is an error where
`REPLAYSSM_TUNED` names it, else a warning, once, and the next source serves. Within an entry a batch takes the smallest
batch of the table that is not below it, else the largest.

A table says how a kernel is launched, never how exact it is: the precision of products is not in it, nor the readout,
which decides how exact a precision is.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from cute_kernels.arch import ARCHES, Arch, arch_of_capability
from cute_kernels.configs import StepConfig, StepKey
from cute_kernels.heuristic import heuristic_config, invalid_reason
from replayssm.keys import ANY_OPTIONS, dtype_name, dtype_of, step_key
from replayssm.spec import LayerSpec, ReplaySpec

SCHEMA = 2
ENVIRONMENT = "REPLAYSSM_TUNED"
SHIPPED = Path(__file__).parent / "data" / "tuned"
TUNED_FIELDS = tuple(field.name for field in fields(StepConfig) if field.name not in ("precision", "readout"))
LARGEST_BUCKET = 1 << 16
Basis = Literal["measured", "predicted"]
Source = Literal["explicit", "user", "shipped", "autotuned", "predicted", "heuristic"]
Parameters = Mapping[str, Any]  # ints, by the names of `TUNED_FIELDS`
_kept: dict[tuple[Shape, int, str], Choice] = {}  # by shape, batch and architecture
_DTYPES = ("checkpoint_dtype", "activation_dtype", "value_dtype", "decay_dtype", "read_dtype")


class TunedTableError(ValueError):
    """A table that cannot be used; the message names the file, what was expected, what came and the remedy."""


def bucket(batch: int) -> int:
    """The batch that plans of `batch` rows are made for: the next power of two."""
    return min(1 << max(0, batch - 1).bit_length(), LARGEST_BUCKET)


@dataclass(frozen=True)
class Shape:
    """What an entry is for: a layer and its replay, whose `max_draft` is the number of tokens of the step."""

    layer: LayerSpec
    replay: ReplaySpec

    @classmethod
    def of(cls, layer: LayerSpec, replay: ReplaySpec, num_tokens: int) -> Shape:
        """Without what no launch parameter depends on: the ring's capacity and the most tokens of other steps."""
        value_dtype = replay.value_dtype or replay.activation_dtype
        return cls(layer, replace(replay, max_draft=num_tokens, ring_capacity=0, value_dtype=value_dtype))

    def key(self, parameters: Parameters, batch: int, arch: Arch) -> StepKey:
        """A step's key with these launch parameters, and the precision and readout that one without a table has."""
        key = step_key(self.layer, self.replay, ANY_OPTIONS[self.layer.recurrence], num_tokens=self.replay.max_draft)
        return replace(key, config=replace(heuristic_config(key, batch, arch) or StepConfig(), **parameters))

    def to_json(self) -> dict[str, Any]:
        dtypes = {name: getattr(self.replay, name) for name in _DTYPES}
        replay = {name: None if dtype is None else dtype_name(dtype) for name, dtype in dtypes.items()}
        facts = {"window": self.replay.window, "num_tokens": self.replay.max_draft, **replay}
        return {"layer": asdict(self.layer), "replay": facts}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Shape:
        replay = dict(entry["replay"])
        window, num_tokens = replay.pop("window"), replay.pop("num_tokens")
        if sorted(replay) != sorted(_DTYPES):
            raise ValueError(
                f"replay: expected window, num_tokens, {', '.join(_DTYPES)}, got {sorted(entry['replay'])}"
            )
        dtypes: dict[str, Any] = {n: None if name is None else dtype_of(str(name)) for n, name in replay.items()}
        return cls.of(LayerSpec(**entry["layer"]), ReplaySpec(window, num_tokens, **dtypes), num_tokens)


@dataclass(frozen=True)
class Choice:
    """The launch parameters of one batch and what they were chosen on.

    Args:
        parameters: of `StepConfig`, all of `TUNED_FIELDS`.
        median_us, p10_us, p90_us: of the time that they were chosen by; the percentiles None where it was predicted.
        runner_up, runner_up_us: the next best; None where there was one candidate.
        heuristic_us, worst_us: medians of the heuristic's choice and of the slowest that was right, in the same race,
            of one that dropped out until then; None where they were not kept.
    """

    parameters: Parameters
    median_us: float
    p10_us: float | None = None
    p90_us: float | None = None
    runner_up: Parameters | None = None
    runner_up_us: float | None = None
    heuristic_us: float | None = None
    worst_us: float | None = None


@dataclass(frozen=True)
class Table:
    """All entries of one device.

    Args:
        device: its name, as torch gives it.
        arch: e.g. "sm_90a".
        basis: whether the times were measured or predicted; a table has one kind.
        versions: of the packages and the compiler that it was made with.
        protocol: how times were taken.
        entries: by shape, then by batch.
    """

    device: str
    arch: str
    basis: Basis
    versions: Mapping[str, str | None]
    protocol: str
    entries: Mapping[Shape, Mapping[int, Choice]]

    def find(self, shape: Shape, batch: int) -> tuple[int, Choice] | None:
        """The choice for a batch, with the batch that it was made for."""
        choices = self.entries.get(shape)
        if not choices:
            return None
        nearest = min((b for b in choices if b >= batch), default=max(choices))
        return nearest, choices[nearest]

    def to_json(self) -> dict[str, Any]:
        entries = [
            shape.to_json() | {"batches": {str(batch): asdict(choices[batch]) for batch in sorted(choices)}}
            for shape, choices in self.entries.items()
        ]
        facts = {name: getattr(self, name) for name in ("device", "arch", "basis", "protocol")}
        return {"schema": SCHEMA, **facts, "versions": dict(self.versions), "entries": entries}


def read_table(path: Path) -> Table:
    """The table in a file, every entry of it checked.

    Raises:
        TunedTableError: it cannot be read, is no table of this schema, or no kernel exists for an entry's parameters.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TunedTableError(
            f"{path}: expected a file that can be read, got {error.strerror}; tune, or name another"
        ) from error
    except ValueError as error:
        raise TunedTableError(f"{path}: expected JSON, got {error}; remove it, or tune again") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise TunedTableError(f"{path}: expected a table of schema {SCHEMA}, got schema {schema!r}; tune again")
    where = "header"
    try:
        arch, basis = ARCHES[data["arch"]], data["basis"]
        if basis not in get_args(Basis):
            raise ValueError(f"basis: expected one of {get_args(Basis)}, got {basis!r}")
        entries: dict[Shape, dict[int, Choice]] = {}
        for number, entry in enumerate(data["entries"]):
            where = f"entry {number}, {entry.get('layer')}, {entry.get('replay')}"
            shape = Shape.from_json(entry)
            if shape in entries:
                raise ValueError("expected one entry a shape, got a second")
            entries[shape] = {}
            for text, choice in entry["batches"].items():
                batch = _batch(text)
                entries[shape][batch] = _choice(choice, shape, batch, arch)
        return Table(data["device"], arch.name, basis, data["versions"], data["protocol"], entries)
    except (KeyError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise TunedTableError(f"{path}: {where}: {reason}; correct it, or tune again") from error


def _batch(text: str) -> int:
    batch = int(text)
    if batch < 1 or bucket(batch) != batch:
        raise ValueError(f"batch: expected a power of two of 1 to {LARGEST_BUCKET}, got {text}")
    return batch


def _choice(data: Mapping[str, Any], shape: Shape, batch: int, arch: Arch) -> Choice:
    choice, base = Choice(**data), shape.key({}, batch, arch)
    for parameters in filter(None, (choice.parameters, choice.runner_up)):
        positive = all(type(value) is int and value >= 1 for value in parameters.values())
        if set(parameters) != set(TUNED_FIELDS) or not positive:
            raise ValueError(f"batch {batch}: expected {TUNED_FIELDS} as ints of 1 or more, got {parameters}")
        if reason := invalid_reason(replace(base, config=replace(base.config, **parameters)), arch):
            raise ValueError(f"batch {batch}, {parameters}: {reason}")
    if not choice.median_us > 0:
        raise ValueError(f"batch {batch}: expected a median_us above 0, got {choice.median_us}")
    return choice


def user_path() -> Path:
    """The user's table, which need not exist."""
    if named := os.environ.get(ENVIRONMENT):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "replayssm" / "tuned.json"


def local_device(arch: str) -> str | None:
    """The name of the current CUDA device if kernels for `arch` run on it."""
    if not torch.cuda.is_available():
        return None
    try:
        local = arch_of_capability(torch.cuda.get_device_capability())
    except NotImplementedError:
        return None
    return torch.cuda.get_device_name() if local.name == arch else None


@functools.cache
def tables(arch: str) -> tuple[tuple[Source, Path, Table], ...]:
    """The tables for this machine's device, or for any of the architecture where it has none, measured ones first; the
    first one that has a shape decides.

    Raises:
        TunedTableError: the file that `REPLAYSSM_TUNED` names cannot be used.
    """
    device = local_device(arch)
    found: list[tuple[Source, Path, Table]] = []
    path, named = user_path(), bool(os.environ.get(ENVIRONMENT))
    if named or path.exists():
        try:
            found.append(("user", path, _table_for(path, arch, device)))
        except TunedTableError as error:
            if named:
                raise
            warnings.warn(f"tuned table not used: {error}", RuntimeWarning, stacklevel=2)
    for path in sorted(SHIPPED.glob("*.json")):
        try:
            table = read_table(path)
        except TunedTableError as error:
            warnings.warn(f"tuned table not used: {error}", RuntimeWarning, stacklevel=2)
            continue
        if mismatch(table, arch, device) is None:
            found.append(("shipped", path, table))
    measured = [one for one in found if one[2].basis == "measured"]
    return (*measured, *(("predicted", path, table) for _, path, table in found if table.basis == "predicted"))


def _table_for(path: Path, arch: str, device: str | None) -> Table:
    table = read_table(path)
    if reason := mismatch(table, arch, device):
        raise TunedTableError(f"{path}: {reason}; tune on this device, or unset {ENVIRONMENT}")
    return table


def mismatch(table: Table, arch: str, device: str | None) -> str | None:
    """Why a table does not hold for an architecture and a device (None where it is not known), or None."""
    if table.arch != arch:
        return f"expected a table for {arch}, got one for {table.arch} ({table.device})"
    if table.basis == "measured" and device not in (None, table.device):
        return f"expected a table for {device}, got one for {table.device}"
    return None


@dataclass(frozen=True)
class Found:
    """A choice with the file, if it came from one, and the batch that it was measured for."""

    source: Source
    path: Path | None
    basis: Basis
    batch: int
    choice: Choice


def find(layer: LayerSpec, replay: ReplaySpec, *, num_tokens: int, batch: int, arch: str) -> Found | None:
    """What the tables say of a step of `num_tokens` tokens in each of `batch` rows, or None.

    Raises:
        TunedTableError: as `tables`.
    """
    usable: Sequence[tuple[Source, Path, Table]] = tables(arch)
    if not (usable or _kept) or num_tokens < 1:
        return None
    shape, rows = Shape.of(layer, replay, num_tokens), bucket(batch)
    kept = _kept.get((shape, rows, arch))
    for source, path, table in usable:
        if table.basis == "predicted" and kept is not None:
            break
        if hit := table.find(shape, rows):
            return Found(source, path, table.basis, *hit)
    return None if kept is None else Found("autotuned", None, "measured", rows, kept)


def keep(shape: Shape, batch: int, arch: str, choice: Choice) -> None:
    """Let a choice serve this process where no table has one; `plan.forget` makes plans anew."""
    _kept[shape, batch, arch] = choice
