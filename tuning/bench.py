"""Runs a benchmark: what `tuning.matrix` plans, by the protocol of `tuning.measure`, into a record of `tuning.store`.

Pools are carved from one allocation that the probes use first; each case passes its gate before it is timed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import replayssm
from replayssm.launch import arch_of
from replayssm.pool import Pool, default_ring_layout
from replayssm.spec import ReplaySpec
from tuning import gate, workload
from tuning.acceptance import acceptance
from tuning.first_call import first_call_in_new_process
from tuning.matrix import Group, Options, StepCase, Subject, average_entry, entry_of, facts_of, plan
from tuning.measure import GraphTimer, Launch, Probes, Timer, Timing, failed_gates, host_time, measure, probe
from tuning.report import batch_line
from tuning.roofline import Rates
from tuning.store import Record

FIRST_CALL_ROWS = 8
FIRST_CALL_S = 40.0  # two processes, each of which imports torch and makes a CUDA context
SETTLE_S = 5.0  # kept back for the entries that close a run


class Deadline:
    """Seconds left of a run; without a limit there are always enough."""

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if limit_s is None else clock() + limit_s

    @property
    def left_s(self) -> float:
        return float("inf") if self._end is None else self._end - self._clock()


@dataclass(frozen=True)
class Machine:
    """What a run needs of the machine it measures.

    Args:
        device: where the tensors go.
        device_name: decides which goals apply.
        arch: that kernels are planned for; None where none run.
        timer: takes the samples.
        probe: measures the limits over a uint32 tensor, in so many rounds.
        reader: a launch that reads a uint32 tensor once.
        synchronize: waits for the device.
        probe_bytes: memory that the limits are probed over.
        host_calls: calls between two syncs when host time is measured.
    """

    device: torch.device
    device_name: str
    arch: str | None
    timer: Timer
    probe: Callable[[Tensor, int], Probes]
    reader: Callable[[Tensor], Launch]
    synchronize: Callable[[], object]
    probe_bytes: int = 1 << 30
    host_calls: int = 200

    @classmethod
    def current_cuda(cls) -> Machine:
        """The current CUDA device.

        Raises:
            NotImplementedError: no kernels exist for it, or nvidia-cutlass-dsl is missing.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        arch = arch_of(device)
        try:
            from cute_kernels.probes import launch_read
        except ImportError as error:
            raise NotImplementedError("nvidia-cutlass-dsl does not import here; install it to benchmark") from error
        timer = GraphTimer()
        return cls(
            device=device,
            device_name=torch.cuda.get_device_name(device),
            arch=arch,
            timer=timer,
            probe=lambda words, rounds: probe(words, timer=timer, arch=arch, rounds=rounds),
            reader=lambda words: partial(launch_read, words, arch),
            synchronize=torch.cuda.synchronize,
        )


class Bench:
    """One run.

    Args:
        options: what to time.
        machine: where.
        record: receives an entry for each thing timed, skipped or refused.
        console: receives a line for each batch.
    """

    def __init__(self, options: Options, machine: Machine, record: Record, console: Console) -> None:
        self._options, self._machine, self._record, self._console = options, machine, record, console
        self._deadline = Deadline(options.time_limit_s)
        self._device_name = machine.device_name
        self._groups = plan(options)
        self._slots = max(options.batches) + workload.SPARE_SLOTS
        sizes = [workload.arena_bytes(g.shape.layer, (g.replay, g.plain), self._slots) for g in self._groups]
        self._arena = workload.Arena(max([machine.probe_bytes, *sizes]), machine.device)

    def run(self) -> None:
        """Time everything; what the time limit leaves out gets entries that say so."""
        rates = self._probe("probes")
        committed: set[int] = set()  # a commit is timed once for each number of tokens
        for group in self._groups:
            with_commit = group.replay.max_draft not in committed
            committed.add(group.replay.max_draft)
            self._arena.reset()
            pools = workload.make_pools(
                self._arena,
                group.shape.layer,
                (group.replay, group.plain),
                self._slots,
                ring_layout=self._options.ring_layout or default_ring_layout(group.shape.layer),
            )
            for cases in group.batches:
                if self._deadline.left_s < SETTLE_S:
                    self._skip(cases)
                    continue
                self._batch(cases, {p.replay: p for p in pools}, rates, with_commit=with_commit)
        if self._options.first_call:
            self._first_calls(self._groups[0])
        self._probe("probes_at_end")

    def _probe(self, what: str) -> Rates:
        """Measure the limits of the device over 1 GiB of the arena, which this fills anew."""
        self._arena.reset()
        words = self._arena.take((self._machine.probe_bytes // 4,), torch.float32).normal_().view(torch.uint32)
        probes = self._machine.probe(words, self._options.rounds)
        rates = probes.rates
        self._record.add({"what": what, "status": "measured", **asdict(probes), "bytes_per_us": asdict(rates)})
        self._console.print(
            f"{what}: read {rates.read / 1e3:.0f} GB/s, read-write {rates.read_write / 1e3:.0f} GB/s, "
            f"empty kernel {probes.empty.median_us:.2f} us, 32 MiB read {probes.cold.median_us:.2f} us cold and "
            f"{probes.after_rewrite.median_us:.2f} us when rewritten before the L2 fill"
        )
        return rates

    def _batch(
        self, cases: Sequence[StepCase], pools: Mapping[ReplaySpec, Pool], rates: Rates, *, with_commit: bool
    ) -> None:
        by_what = {case.what: case for case in cases}
        works = {case.what: self._work(case, pools) for case in cases}
        failed = self._refused(by_what, works)
        launches: dict[str, Launch] = {
            what: partial(work.launch, replayssm.step) for what, work in works.items() if what not in failed
        }
        if "nonflush" in launches:
            launches["read"] = self._machine.reader(self._arena.words(by_what["nonflush"].num_bytes))
        subject = Subject(cases[0].shape, cases[0].replay, cases[0].rows, "commit", cases[0].accepted)
        if with_commit:
            self._add_commit(subject, launches)
        timings = measure(launches, timer=self._machine.timer, rounds=self._options.rounds)
        entries = {
            what: {
                **self._entry(by_what[what], timing, by_what[what].num_bytes, by_what[what].limit_us(rates)),
                **self._config(works[what]),
            }
            for what, timing in timings.items()
            if what in by_what
        }
        average = average_entry(entries, by_what, rates, device=self._device_name)
        if average is not None:
            entries["average"] = average
        for what in ("read", "commit"):
            if what in timings:
                num_bytes = by_what["nonflush"].num_bytes if what == "read" else None
                other = replace(subject, what=what)
                entries[what] = self._entry(other, timings[what], num_bytes, None)
        if subject.rows == min(self._options.batches) and "nonflush" in launches:
            host = host_time(
                launches["nonflush"], synchronize=self._machine.synchronize, calls=self._machine.host_calls
            )
            other = replace(subject, what="host")
            entries["host"] = self._entry(other, host, None, None)
        for entry in entries.values():
            self._record.add(entry)
        self._console.print(batch_line(subject, entries, failed))

    def _entry(self, subject: Subject, timing: Timing, num_bytes: int | None, limit_us: float | None) -> dict[str, Any]:
        return entry_of(subject, asdict(timing), device=self._device_name, num_bytes=num_bytes, limit_us=limit_us)

    def _work(self, case: StepCase, pools: Mapping[ReplaySpec, Pool]) -> workload.StepWork:
        """The case over tensors of its own."""
        inputs = workload.make_inputs(
            case.shape,
            case.rows,
            dtype=case.replay.activation_dtype,
            device=self._machine.device,
            num_tokens=case.num_tokens,
            has_z=case.what == "nonflush_z",
        )
        return workload.make_work(pools[case.replay], case.live_records, inputs)

    def _config(self, work: workload.StepWork) -> dict[str, Any]:
        """The launch parameters that the step chose, precision of the products among them, and on what grounds."""
        if self._machine.arch is None:
            return {}
        chosen = work.plan(self._machine.arch)
        return {"config": {**asdict(chosen.key.config), "source": chosen.source}}

    def _refused(self, cases: Mapping[str, StepCase], works: Mapping[str, workload.StepWork]) -> dict[str, str]:
        """Cases without a time: those that the package does not support and those whose gate is red."""
        refused = {}
        for what, work in works.items():
            check = partial(gate.check_step, work, replayssm.step)
            try:
                reasons, status = failed_gates({what: check}), "gate failed"
            except NotImplementedError as error:
                reasons, status = {what: str(error)}, "not supported"
            except Exception as error:  # a call that raises has no right result either; the other cases go on
                reasons, status = {what: f"{type(error).__name__}: {error}"}, "gate failed"
            if reasons:
                self._record.add({**facts_of(cases[what]), "status": status, "reason": reasons[what]})
                refused[what] = f"{status}: {reasons[what]}"
        return refused

    def _add_commit(self, subject: Subject, launches: dict[str, Launch]) -> None:
        """Add the commit of a whole batch, whose cursors walk round the window from replay to replay. Of several tokens
        it reads how many stay, as after a verification."""
        device = self._machine.device
        cursors = workload.make_walking_cursors(subject.replay, self._slots, device)
        rows: dict[str, Any] = {"cache_indices": torch.randperm(self._slots, device=device)[: subject.rows].int()}
        if subject.num_tokens > 1:
            accepted = torch.tensor(acceptance(subject.num_tokens, subject.accepted))
            drawn = torch.multinomial(accepted, subject.rows, replacement=True).to(device, torch.int32)
            rows |= {"num_draft": subject.num_tokens, "num_accepted": drawn}
        failed = failed_gates({"commit": lambda: gate.check_commit(cursors, replayssm.commit, **rows)})
        if failed:
            self._record.add({**facts_of(subject), "status": "gate failed", "reason": failed["commit"]})
            return
        launches["commit"] = partial(replayssm.commit, cursors, **rows)

    def _skip(self, cases: Sequence[StepCase]) -> None:
        for case in cases:
            self._record.add({**facts_of(case), "status": "skipped", "reason": "time limit"})

    def _first_calls(self, group: Group) -> None:
        """First call of the step in a new process, with an empty cache on disk and then with what it left there."""
        first = group.batches[0][0]
        subject = Subject(group.shape, group.replay, FIRST_CALL_ROWS, "first_call_cold", first.accepted)
        if self._deadline.left_s < FIRST_CALL_S + SETTLE_S:
            self._record.add({**facts_of(subject), "status": "skipped", "reason": "time limit"})
            return
        step = facts_of(first)
        for entry in self._record.entries:
            if entry["status"] == "not supported" and step.items() <= entry.items():
                self._record.add({**facts_of(subject), "status": "not supported", "reason": entry["reason"]})
                return
        with tempfile.TemporaryDirectory(prefix="replayssm-cache-") as cache:
            for what in ("first_call_cold", "first_call_from_disk"):
                other = replace(subject, what=what)
                try:
                    measured = first_call_in_new_process(group.shape, group.replay, FIRST_CALL_ROWS, cache)
                except RuntimeError as error:
                    self._record.add({**facts_of(other), "status": "failed", "reason": str(error)})
                    return
                self._record.add(entry_of(other, measured, device=self._device_name))
                self._console.print(
                    f"{what}: {measured['median_us'] / 1e3:.0f} ms "
                    f"(and {measured['import_us'] / 1e3:.0f} ms to import the compiler)"
                )
