"""The only place that compiles: in memory first, then the cache on disk, then `cute.compile`.

An entry of the disk cache is a folder `<root>/<arch>/<digest>/` with the host stub and cubin in `kernel.o` and the
SHA-256 of that file in `kernel.sha256`. The digest covers this package's sources, the compiler's version, the GPU's
architecture, the host's, and the key, so a change of any of them is a miss. An entry that does not load is reported,
removed and made anew. The root is `$REPLAYSSM_CACHE`, else `$XDG_CACHE_HOME/replayssm`, else `~/.cache/replayssm`.
Where that cannot be written, a temporary folder serves the process, and a warning says so.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import tvm_ffi  # noqa: F401  (load_module needs it: imported here, it costs the first kernel of a process nothing)
from cutlass.base_dsl import compiler
from cutlass.cute.runtime import load_module

_loaded: dict[tuple[str, Hashable, str], tuple[Callable[..., None], object]] = {}
_lock = threading.Lock()
_substitute_root: list[Path] = []  # holds the temporary folder once the root could not be written


def cache_root() -> Path:
    """Folder of the disk cache."""
    if _substitute_root:
        return _substitute_root[0]
    if root := os.environ.get("REPLAYSSM_CACHE"):
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "replayssm"


@functools.cache
def _sources_digest() -> str:
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def entry_path(function: Callable[..., Any], key: Hashable, arch: str) -> Path:
    """Folder of one kernel in the disk cache; it exists once the kernel was compiled."""
    host = (sys.platform, platform.machine())
    facts = (_sources_digest(), cutlass.__version__, arch, host, function.__module__, function.__qualname__, repr(key))
    return cache_root() / arch / hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def compile_only(
    function: Callable[..., Any], make_arguments: Callable[[], tuple[Any, ...]], arch: str, *options: Any
) -> Any:
    """Compile for an architecture, past the caches. The result exports, and runs where this machine has that GPU.

    Args:
        function: a `@cute.jit` function.
        make_arguments: makes the fake tensors and constants that it is specialised for.
        options: compiler options, e.g. `compiler.KeepPTX(True)`.
    """
    settings = (compiler.GPUArch(arch), compiler.EnableTVMFFI(True), *options)
    return cute.compile[settings](function, *make_arguments())


def launch_limits(ctas: int) -> dict[str, int]:
    """Arguments of a launch that keep the registers of a CTA to its share where a multiprocessor is to hold so many;
    without a word on shared memory the launch would ask a device."""
    return {"min_blocks_per_mp": ctas, "preferred_smem_carveout": 100} if ctas > 1 else {}


def compiled(
    function: Callable[..., Any], make_arguments: Callable[[], tuple[Any, ...]], key: Hashable, arch: str
) -> Callable[..., None]:
    """The compiled form of a `@cute.jit` function, from memory, disk or the compiler.

    Args:
        function: a `@cute.jit` function whose run-time arguments are tensors.
        make_arguments: as for `compile_only`; called on a miss only.
        key: everything that the arguments and constants depend on; its repr must tell keys apart.
        arch: e.g. "sm_90a".

    Returns:
        A callable that takes the torch tensors positionally and launches on torch's current stream.
    """
    memory_key = (f"{function.__module__}.{function.__qualname__}", key, arch)
    if memory_key not in _loaded:
        with _lock:
            if memory_key not in _loaded:
                entry = ensure_on_disk(function, make_arguments, key, arch)
                try:
                    _loaded[memory_key] = _load(entry)
                except (RuntimeError, AttributeError, OSError) as error:
                    _remove(entry, error)
                    _loaded[memory_key] = _load(ensure_on_disk(function, make_arguments, key, arch))
    return _loaded[memory_key][0]


def ensure_on_disk(
    function: Callable[..., Any], make_arguments: Callable[[], tuple[Any, ...]], key: Hashable, arch: str
) -> Path:
    """Compile into the disk cache unless a sound entry is there; returns its folder."""
    entry = entry_path(function, key, arch)
    if entry.exists() and not _is_sound(entry):
        _remove(entry, "its checksum is not that of the file")
    if not entry.exists():
        kernel = compile_only(function, make_arguments, arch)
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=entry.parent).close()
        except OSError as error:
            _substitute_root.append(Path(tempfile.mkdtemp(prefix="replayssm-")))
            warnings.warn(f"kernels are cached for this process only: {error}", RuntimeWarning, stacklevel=3)
            entry = entry_path(function, key, arch)
            entry.parent.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=entry.parent, prefix="making-") as folder:
            made = Path(folder) / entry.name
            made.mkdir()
            kernel.export_to_c(str(made / "kernel.o"), function_name=_symbol(entry))
            (made / "kernel.sha256").write_text(_file_digest(made / "kernel.o"))
            try:
                os.rename(made, entry)  # atomic; fails where another process was first, whose entry serves as well
            except OSError:
                if not entry.exists():
                    raise
    return entry


def _remove(entry: Path, reason: object) -> None:
    warnings.warn(f"removed a corrupt compiled kernel: {entry}: {reason}", RuntimeWarning, stacklevel=4)
    shutil.rmtree(entry, ignore_errors=True)


def _symbol(entry: Path) -> str:
    return f"kernel_{entry.name}"


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_sound(entry: Path) -> bool:
    try:
        return (entry / "kernel.sha256").read_text() == _file_digest(entry / "kernel.o")
    except OSError:
        return False


def _load(entry: Path) -> tuple[Callable[..., None], object]:
    module = load_module(str(entry / "kernel.o"), enable_tvm_ffi=True)
    return getattr(module, _symbol(entry)), module  # the module owns the code
