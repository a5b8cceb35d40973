"""What runs leave on disk: the JSON record of a benchmark, and the journal and lock of a tuner.

A record has device, date, versions, protocol, and one entry for each thing measured. It is rewritten whole after each
entry, so a run that is cut off leaves a valid record of what it did.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

INNERMOST = re.compile(r"\{[^{}]*\}")  # JSON breaks no line inside a string


def environment() -> dict[str, Any]:
    """Device, driver, versions and date of this run."""
    facts: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cutlass_dsl": _cutlass_version(),
        "device": None,
        "driver": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["device"] = properties.name
        facts["compute_capability"] = [properties.major, properties.minor]
        facts["multiprocessors"] = properties.multi_processor_count
        facts["memory_bytes"] = properties.total_memory
        facts["driver"] = _driver_version()
    return facts


def _cutlass_version() -> str | None:
    try:
        return metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        pass
    try:  # unpacked on PYTHONPATH rather than installed
        import cutlass
    except ImportError:
        return None
    return str(cutlass.__version__)


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


class Record:
    """Entries of one run, on disk from the first on.

    Args:
        path: the JSON file, replaced if there; None keeps the record in memory only.
        header: facts of the run, beside `environment()`.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self._path = path
        self.header: dict[str, Any] = {**environment(), **header}
        self.entries: list[dict[str, Any]] = []

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append an entry and save."""
        self.entries.append(dict(entry))
        self.save()

    def save(self) -> None:
        """Write the file; a reader sees the old one or the new one, never a part."""
        if self._path is None:
            return
        write_json(self._path, {**self.header, "entries": self.entries})


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file, innermost objects in one line; a reader sees the old one or the new one, never a part.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    try:
        text = INNERMOST.sub(lambda found: re.sub(r"\n *", " ", found[0]), json.dumps(data, indent=1))
        draft.write_text(text + "\n")
        os.replace(draft, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


class BusyError(Exception):
    """Another process has the lock; the message says which and what to do."""


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold `path` for this process, by a lock on a file beside it that ends with the process, however it ends.

    Raises:
        BusyError: another process holds it.
        OSError: the folder cannot be written.
    """
    import fcntl  # not on every system on which the other commands run

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("a+") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.seek(0)
            owner = held.read().strip() or "unknown"
            raise BusyError(
                f"{path}: another tuner (process {owner}) writes it; wait for its end, or name another file with --out"
            ) from None
        held.truncate(0)
        held.write(f"{os.getpid()}\n")
        held.flush()
        yield


class Journal:
    """Finished pieces of work on disk, one a line, so that a run that is cut off goes on where it was.

    Args:
        path: made with the first piece; None keeps them in memory only.
        facts: of the run; pieces that other facts hold for are not taken up.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any]) -> None:
        self._path, self._facts = path, json.dumps(facts, sort_keys=True)
        self._done: dict[str, Any] = {}
        self.unusable = 0  # lines that are torn or of another run
        for line in path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else ():
            try:
                piece = json.loads(line)
                if piece["facts"] != self._facts:
                    raise ValueError
                self._done[piece["work"]] = piece["found"]
            except (ValueError, KeyError, TypeError):
                self.unusable += 1

    def get(self, work: Mapping[str, Any]) -> Any:
        """What was found for a piece of work, or None if it is not done."""
        return self._done.get(json.dumps(work, sort_keys=True))

    def add(self, work: Mapping[str, Any], found: Any) -> None:
        """Note a finished piece; it is on disk when this returns."""
        name = json.dumps(work, sort_keys=True)
        self._done[name] = found
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as journal:
            if journal.tell() and not self._path.read_bytes().endswith(b"\n"):
                journal.write("\n")  # behind a line that a crash tore
            journal.write(json.dumps({"facts": self._facts, "work": name, "found": found}) + "\n")
            journal.flush()
            os.fsync(journal.fileno())

    def remove(self) -> None:
        """Forget the run: its results are where they belong."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
