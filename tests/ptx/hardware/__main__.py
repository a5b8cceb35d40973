"""`python -m tests.ptx.hardware FOLDER [KERNEL ...]`: run the kernels on this machine's GPU and store their outputs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.ptx.hardware import KERNELS
from tests.ptx.hardware.compare import FACTS, OUTPUTS
from tests.ptx.hardware.device import capture, worker


def main(arguments: list[str]) -> int:
    """Capture, or be the process that capture starts."""
    if arguments[:1] == ["--worker"]:
        worker(Path(arguments[1]), arguments[2:])
        return 0
    if not arguments or arguments[0].startswith("-") or set(arguments[1:]) - set(KERNELS):
        print(__doc__, file=sys.stderr)
        return 2
    folder, start = Path(arguments[0]), time.monotonic()
    errors = capture(folder, arguments[1:])
    count = len(arguments[1:]) or len(KERNELS)
    causes: dict[str, list[str]] = {}
    for name, what in errors.items():
        causes.setdefault(what, []).append(name)
    for what, names in causes.items():
        print(f"FAILED {', '.join(names)}: {what}")
    size = (folder / OUTPUTS).stat().st_size
    print(f"{count - len(errors)} of {count} kernels, {size} bytes, {time.monotonic() - start:.0f} s, in {folder}")
    print((folder / FACTS).read_text().partition('"kernels"')[0])
    return bool(errors)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
