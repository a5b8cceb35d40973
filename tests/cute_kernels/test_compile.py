"""A kernel is compiled once: the disk cache hits without the compiler, misses on any change, and heals itself.

It runs on the small kernel that commits. A stub stands in for the compiler wherever only files matter.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import cutlass

import replayssm
from cute_kernels import commit
from cute_kernels import compile as cache
from cute_kernels.arch import arch_of_capability
from cute_kernels.configs import RowOptions
from replayssm import plan_step
from replayssm.launch import options_of
from replayssm.pool import default_ring_layout
from replayssm.spec import Recurrence
from tests.helpers.draw import BASES, KERNELS
from tests.helpers.oracle import busy_scene

ARCH = "sm_90a"
arguments = functools.partial(commit.fake_arguments, commit.CommitKey(window=5, num_draft=1))


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own for each test, on disk and in memory."""
    monkeypatch.setenv("REPLAYSSM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_loaded", {})


class Stub:
    """Counts compilations, and exports text in the place of an object file."""

    def __init__(self, text: str = "object code", during: Callable[[], object] = lambda: None) -> None:
        self.calls, self.text, self.during = 0, text, during

    def __call__(self, function: Any, make_arguments: Any, arch: str, *options: Any) -> Stub:
        self.calls += 1
        return self

    def export_to_c(self, path: str, function_name: str) -> None:
        Path(path).write_text(self.text)
        self.during()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub()
    monkeypatch.setattr(cache, "compile_only", made)
    return made


def other_launch() -> None:
    """Another function to compile."""


def ensure(key: object = "key", arch: str = ARCH, function: Any = commit.commit_launch) -> Path:
    return cache.ensure_on_disk(function, arguments, key, arch)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_a_real_kernel_is_compiled_once_and_loaded_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache.compiled(commit.commit_launch, arguments, "key", ARCH)
    assert cache.compiled(commit.commit_launch, arguments, "key", ARCH) is first
    monkeypatch.setattr(cache, "_loaded", {})  # as in a new process
    monkeypatch.setattr(cache, "compile_only", lambda *_: pytest.fail("compiled again"))
    again = cache.compiled(commit.commit_launch, lambda: pytest.fail("made arguments again"), "key", ARCH)
    assert again is not first
    assert callable(again)


def test_a_hit_needs_no_compiler(stub: Stub) -> None:
    entry = ensure()
    before = {path: path.read_bytes() for path in files(entry)}
    assert ensure() == entry
    assert stub.calls == 1
    assert {path: path.read_bytes() for path in files(entry)} == before


def test_any_change_is_a_miss(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [ensure(), ensure("other key"), ensure(arch="sm_100a"), ensure(function=other_launch)]
    with monkeypatch.context() as patch:
        patch.setattr(cutlass, "__version__", "99.0")
        entries.append(ensure())
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_sources_digest", lambda: "other sources")
        entries.append(ensure())
    assert len(set(entries)) == stub.calls == 6
    assert ensure() == entries[0]
    assert stub.calls == 6


def test_the_sources_are_those_of_the_whole_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that changes changes the kernel, whatever file it lives in."""
    digest = cache._sources_digest.__wrapped__
    package = tmp_path / "package"
    (package / "primitives").mkdir(parents=True)
    monkeypatch.setattr(cache, "__file__", str(package / "compile.py"))
    digests = set()
    for name, text in (("step.py", "a"), ("primitives/copy.py", "a"), ("primitives/copy.py", "b"), ("notes.txt", "c")):
        (package / name).write_text(text)
        digests.add(digest())
    assert len(digests) == 3
    (package / "primitives/copy.py").rename(package / "primitives/move.py")
    assert digest() not in digests


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:4])


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


CORRUPT: dict[str, Callable[[Path], object]] = {
    "truncated": lambda entry: truncate(entry / "kernel.o"),
    "one bit flipped": lambda entry: flip(entry / "kernel.o"),
    "empty": lambda entry: (entry / "kernel.o").write_bytes(b""),
    "gone": lambda entry: (entry / "kernel.o").unlink(),
    "without its checksum": lambda entry: (entry / "kernel.sha256").unlink(),
    "with another checksum": lambda entry: (entry / "kernel.sha256").write_text("0" * 64),
    "an empty folder": lambda entry: [path.unlink() for path in files(entry)],
}


@pytest.mark.parametrize("how", CORRUPT)
def test_a_corrupt_entry_is_reported_removed_and_made_anew(how: str, stub: Stub) -> None:
    entry, untouched = ensure(), ensure("other key")
    before = {path: path.read_bytes() for path in files(entry)}
    CORRUPT[how](entry)
    (entry / "leftover").write_text("")
    with pytest.warns(RuntimeWarning, match="corrupt") as caught:
        assert ensure() == entry
    assert str(entry) in str(caught[0].message)
    assert stub.calls == 3
    assert {path: path.read_bytes() for path in files(entry)} == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensure()
        ensure("other key")
    assert stub.calls == 3
    assert untouched.exists()


def test_a_real_kernel_survives_corruption() -> None:
    entry = ensure()
    truncate(entry / "kernel.o")
    with pytest.warns(RuntimeWarning, match="corrupt"):
        assert callable(cache.compiled(commit.commit_launch, arguments, "key", ARCH))


def test_an_entry_that_does_not_load_is_made_anew() -> None:
    entry, junk = ensure(), b"of another compiler"
    (entry / "kernel.o").write_bytes(junk)
    (entry / "kernel.sha256").write_text(hashlib.sha256(junk).hexdigest())
    with pytest.warns(RuntimeWarning, match="corrupt"):
        assert callable(cache.compiled(commit.commit_launch, arguments, "key", ARCH))


def test_where_nothing_can_be_written_kernels_last_for_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("REPLAYSSM_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(cache, "_substitute_root", [])
    with pytest.warns(RuntimeWarning, match="for this process only"):
        assert callable(cache.compiled(commit.commit_launch, arguments, "another key", ARCH))
    assert cache.cache_root() != tmp_path / "file" / "cache"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (ensure("a third key") / "kernel.o").exists()


@pytest.mark.parametrize("moment", ["compiling", "exporting"])
def test_a_failure_leaves_nothing_behind(moment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no space left")

    broken = fail if moment == "compiling" else Stub(during=fail)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "compile_only", broken)
        with pytest.raises(RuntimeError, match="no space left"):
            ensure()
    assert files(tmp_path / "cache") == []
    monkeypatch.setattr(cache, "compile_only", Stub())
    assert (ensure() / "kernel.o").exists()


def test_an_entry_appears_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is made, another process must find no entry rather than half of one."""
    entry = cache.entry_path(commit.commit_launch, "key", ARCH)
    seen = []
    monkeypatch.setattr(cache, "compile_only", Stub(during=lambda: seen.append(entry.exists())))
    ensure()
    assert seen == [False]
    assert entry.exists()
    assert list(entry.parent.iterdir()) == [entry]


def test_the_slower_of_two_processes_takes_the_others_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    faster = Stub("faster")

    def overtake() -> None:
        monkeypatch.setattr(cache, "compile_only", faster)
        ensure()

    monkeypatch.setattr(cache, "compile_only", Stub("slower", during=overtake))
    entry = ensure()
    assert (entry / "kernel.o").read_text() == "faster"
    assert list(entry.parent.iterdir()) == [entry]
    assert ensure() == entry and faster.calls == 1


def test_threads_compile_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    monkeypatch.setattr(cache, "compile_only", stub)
    monkeypatch.setattr(cache, "_load", lambda entry: (object(), None))
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.compiled(commit.commit_launch, arguments, "key", ARCH)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == stub.calls == 1


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("REPLAYSSM_CACHE", "~/mine")
    roots = [cache.cache_root()]
    monkeypatch.delenv("REPLAYSSM_CACHE")
    roots.append(cache.cache_root())
    monkeypatch.delenv("XDG_CACHE_HOME")
    roots.append(cache.cache_root())
    assert roots == [tmp_path / "mine", tmp_path / "xdg/replayssm", tmp_path / ".cache/replayssm"]
    assert cache.entry_path(commit.commit_launch, "key", ARCH).is_relative_to(roots[-1] / ARCH)


# Warmup.


each_kernel = pytest.mark.parametrize("kind", KERNELS)


@each_kernel
def test_warmup_compiles_what_a_step_will_ask_for(kind: Recurrence, stub: Stub) -> None:
    base = BASES[kind]
    options = options_of(busy_scene(base).on("cpu").inputs)
    plans = replayssm.warmup(base.layer, base.replay, options, arch=ARCH, batches=(1, 8, 256))
    assert stub.calls == len(plans) + 2  # a commit for each index dtype
    layout = replayssm.make_pool(base.layer, base.replay, 1).ring_layout
    for batch in (1, 8, 256):
        for index_dtype in ("int32", "int64"):
            rows = RowOptions(index_dtype)
            asked = plan_step(base.layer, base.replay, options, arch=ARCH, batch=batch, rows=rows, ring_layout=layout)
            assert asked in plans
    assert len({plan.key for plan in plans}) == len(plans)
    replayssm.warmup(base.layer, base.replay, options, arch=ARCH, batches=(1, 8, 256))
    assert stub.calls == len(plans) + 2


@each_kernel
def test_warmup_refuses_what_no_kernel_covers(kind: Recurrence, stub: Stub) -> None:
    """A geometry without a kernel, and the options of another layer."""
    base = BASES[kind]
    options = {other: options_of(busy_scene(BASES[other]).on("cpu").inputs) for other in KERNELS}
    with pytest.raises(NotImplementedError, match="head_dim"):
        replayssm.warmup(replace(base.layer, head_dim=48), base.replay, options[kind], arch=ARCH)
    for other in KERNELS:
        if other != kind:
            with pytest.raises(TypeError, match="options"):
                replayssm.warmup(base.layer, base.replay, options[other], arch=ARCH)
    assert stub.calls == 0


@pytest.mark.gpu
@each_kernel
def test_after_warmup_a_decode_compiles_nothing(kind: Recurrence, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = default_ring_layout(BASES[kind].layer)
    work = busy_scene(BASES[kind], forced=None, ring_layout=layout).on("cuda")
    arch = arch_of_capability(torch.cuda.get_device_capability()).name
    options = options_of(work.inputs)
    replayssm.warmup(work.pool.layer, work.pool.replay, options, arch=arch, batches=(9,), index_dtypes=("int64",))
    monkeypatch.setattr(cache, "compile_only", lambda *_: pytest.fail("compiled during the decode"))
    work.step()
    work.commit()
