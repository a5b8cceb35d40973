"""The JSON record of a run: device, date, versions, protocol, and one entry for each thing measured.

The file is rewritten whole after each entry, so a run that is cut off leaves a valid record of what it did.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


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
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.draft")
        try:
            draft.write_text(json.dumps({**self.header, "entries": self.entries}, indent=1) + "\n")
            os.replace(draft, self._path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
