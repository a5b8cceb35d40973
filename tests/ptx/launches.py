"""The verbs and their kernels on a CPU: checks, plans, host code and PTX as they are, only the device interpreted.

`Bench.installed` puts a stand-in where `cute_kernels` hands out compiled kernels. It lets the real host code record the
launch (`recorder`) and the interpreter execute it on the caller's tensors (`machine`). So a step here plans, checks,
launches and computes as on a GPU, and every test of `helpers.oracle` can be asked of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from cute_kernels import commit, empty, encode, materialize, step
from replayssm import launch as dispatch
from replayssm import model_launch
from tests.helpers.model import Model
from tests.helpers.oracle import Scene, Work
from tests.ptx.recorder import Launch, buffers_of, record

# Which arguments a kernel may write: the pool and the output, the cursors, or the read copy.
WRITTEN: dict[ModuleType, tuple[int, ...]] = {step: (0, 5), commit: (0,), materialize: (), empty: (0,), encode: (1,)}


@dataclass
class Bench:
    """How launches run.

    Args:
        arch: of the PTX.
        mode: when asynchronous work completes, "early" or "late"; None records and runs nothing.
        seed: of the order in which warps run.
        change: what to make of the PTX before it runs; for teeth.
        beyond: memory that `materialize` finds by addresses in its table: what it may write, and what only read.
        launches: every launch so far.
    """

    arch: str = "sm_90a"
    mode: Literal["early", "late"] | None = None
    seed: int = 0
    change: Callable[[str], str] = str
    beyond: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = ((), ())
    launches: list[Launch] = field(default_factory=list)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let `replayssm.launch` launch here."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(dispatch, "arch_of", return_value=self.arch))
            for module in WRITTEN:
                stack.enter_context(mock.patch.object(module, "kernel", self._stand_in(module)))
            yield

    def _stand_in(self, module: ModuleType) -> Callable[[Hashable, str], Callable[..., None]]:
        def kernel(key: Hashable, arch: str) -> Callable[..., None]:
            def launch(*groups: Any) -> None:
                self._run(module, key, arch, as_torch(groups))

            return launch

        return kernel

    def _run(self, module: ModuleType, key: Hashable, arch: str, groups: tuple[Any, ...]) -> None:
        launch: Any = record(module, key, arch, *groups)
        launch = dataclasses.replace(launch, ptx=self.change(launch.ptx))
        self.launches.append(launch)
        if self.mode is not None:
            from tests.ptx.machine import run_launch

            beyond = self.beyond if module is materialize else ((), ())
            written = [group for i, group in enumerate(groups) if i in WRITTEN[module]] + [beyond[0]]
            others = [group for i, group in enumerate(groups) if i not in WRITTEN[module]] + [beyond[1]]
            buffers = buffers_of(*written) + buffers_of(*others, writeable=False)
            run_launch(launch, buffers, mode=self.mode, seed=self.seed)


def swap(pattern: str, by: str, which: int = 0) -> Callable[[str], str]:
    """A fault: the match number `which` of a pattern becomes something else."""

    def change(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))
        start, end = found[which].span()
        return ptx[:start] + found[which].expand(by) + ptx[end:]

    return change


def as_torch(group: Any) -> Any:
    """Torch tensors over the same memory for what `replayssm.launch` converted once, in tuples."""
    import tvm_ffi

    if isinstance(group, (tuple, tvm_ffi.Array)):
        return tuple(map(as_torch, group))
    return torch.from_dlpack(group) if isinstance(group, tvm_ffi.Tensor) else group


@dataclass
class Interpreted(Work):
    """A `Work` on the CPU whose verbs take the way of CUDA tensors."""

    bench: Bench = field(default_factory=Bench)

    @classmethod
    def of(cls, work: Work | Scene, bench: Bench) -> Interpreted:
        made = work.on("cpu") if isinstance(work, Scene) else work
        return cls(**{**vars(made), "bench": bench})

    def step(self, *, out: Tensor | None = None, pdl: bool = False, config: Any = None, **_: Any) -> Tensor:
        rows = (self.cache_indices, out, self.force_fold, self.pad_slot_id)
        with self.bench.installed():
            return dispatch.cuda_step(self.pool, self.cursors, self.inputs, *rows, (pdl, config))

    def run_commit(self, **arguments: Any) -> None:
        order = {"cache_indices": None, "num_draft": 1, "cu_seqlens": None, "num_accepted": None}
        order |= {"force_fold": None, "pad_slot_id": -1}
        with self.bench.installed():
            dispatch.cuda_commit(self.cursors, *(order | arguments).values())


@dataclass
class InterpretedModel(Model):
    """A `Model` on the CPU whose `flush` and `materialize` take the way of CUDA tensors."""

    bench: Bench = field(default_factory=Bench)

    @classmethod
    def of(cls, model: Model, bench: Bench) -> InterpretedModel:
        return cls(**{**vars(model.clone()), "bench": bench})

    def flush(self, slots: Tensor) -> None:
        self._fold(slots, None, None)

    def materialize(self, source: Tensor, destination: Tensor, num_records: Tensor | None) -> None:
        self._fold(source, destination, num_records)

    def write_read_copy(self, slots: Tensor) -> None:
        with self.bench.installed():
            model_launch.cuda_write_read_copy(slots, tuple(self.pools))

    def _fold(self, *rows: Any) -> None:
        rates = tuple(self.A or [None] * len(self.pools))
        rings = tuple(ring for pool in self.pools for ring in pool.tensors[1:4])
        written = tuple(t for pool in self.pools for t in (pool.checkpoint, pool.seed) if t is not None)
        self.bench.beyond = written, (*rings, *(rate for rate in rates if rate is not None))
        with self.bench.installed():
            model_launch.cuda_materialize(self.cursors, *rows, tuple(self.pools), rates)
        self.bench.beyond = ((), ())
