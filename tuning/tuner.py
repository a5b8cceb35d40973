"""Tunes a device: which launch parameters each layer, replay and batch gets, and what the table says of it.

What is minimised is the mean step of a server that has run for long (`tuning.acceptance`): from `MIXED_FROM_ROWS` rows
on the time of one batch whose rows stand anywhere in the window; below, where so few rows would stand by chance, the
steps without and with a fold by the shares in which they come.

Kernels are compiled ahead by other processes, in the order in which they will be timed. Each finished job is in the
journal before the next one begins.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from cute_kernels.arch import ARCHES
from cute_kernels.configs import RowOptions, StepKey
from replayssm.keys import step_key
from replayssm.pool import default_ring_layout
from replayssm.spec import ReplaySpec
from replayssm.tuned import Choice, Shape, Table, bucket
from tuning import gate, workload
from tuning.acceptance import fold_share
from tuning.bench import Deadline, Machine
from tuning.matrix import MIXED_FROM_ROWS, StepCase, state_name
from tuning.measure import PROTOCOL
from tuning.roofline import Rates
from tuning.search import DEFAULT_ROUNDS, NoCandidateError, Result, race, refusals
from tuning.shapes import ModelShape
from tuning.space import Candidate, candidates, prune_outclassed, prune_wasteful
from tuning.store import Journal
from tuning.workload import Step

TUNED_PROTOCOL = f"{PROTOCOL}; mean step of rows anywhere in the window; racing, the heuristic's choice first"
BATCHES = (1, 8, 32, 128, 256)
H200_MULTIPROCESSORS = 132
DIGITS = 3  # of a microsecond, that a table keeps: the timer has 0.5 ns steps at best
Compile = Callable[[StepKey, str], object]


@dataclass(frozen=True)
class Job:
    """One entry to fill: a layer, its replay, whose `max_draft` is the number of tokens, and a batch.

    Args:
        accepted: tokens of a step that stay on average.
    """

    shape: ModelShape
    replay: ReplaySpec
    rows: int
    accepted: float = 1.0

    @property
    def target(self) -> Shape:
        """What the table knows it by."""
        return Shape.of(self.shape.layer, self.replay, self.replay.max_draft)

    @property
    def cases(self) -> tuple[tuple[StepCase, float], ...]:
        """The steps that are timed, with their shares of the mean."""
        mixed = StepCase(self.shape, self.replay, self.rows, "mixed", self.accepted)
        folds = fold_share(mixed.positions)
        if self.rows >= MIXED_FROM_ROWS or folds == 1:
            return ((mixed, 1.0),)
        return ((replace(mixed, what="nonflush"), 1 - folds), (replace(mixed, what="flush"), folds))

    @property
    def num_bytes(self) -> float:
        """Bytes of the mean step."""
        return sum(share * case.num_bytes for case, share in self.cases)

    def limit_us(self, rates: Rates) -> float:
        """The least time of the mean step."""
        return sum(share * case.limit_us(rates) for case, share in self.cases)

    @property
    def name(self) -> str:
        state, tokens = state_name(self.replay), self.replay.max_draft
        return f"{self.shape.name} {state} L={self.replay.window} T={tokens} x{self.rows}"


def jobs_of(
    shapes: Iterable[ModelShape], replays: Sequence[ReplaySpec], batches: Sequence[int], accepted: float | None = None
) -> tuple[Job, ...]:
    """What a run fills: each entry once, also where models have one layer in common.

    Args:
        batches: powers of two.
        accepted: half of T, at least 1, when None.

    Raises:
        ValueError: a batch is no power of two, or fewer tokens are stepped than `accepted`.
    """
    odd = [batch for batch in batches if bucket(batch) != batch]
    if odd:
        raise ValueError(f"batch: expected powers of two, for a table holds no others, got {odd}")
    found: dict[tuple[Shape, int], Job] = {}
    for shape in shapes:
        for replay in replays:
            kept = max(1.0, replay.max_draft / 2) if accepted is None else accepted
            for rows in batches:
                job = Job(shape, replay, rows, kept)
                _ = job.cases  # refuses a mean that cannot be
                found.setdefault((job.target, rows), job)
    return tuple(found.values())


@dataclass(frozen=True)
class Field:
    """The candidates of a job: those that are timed and those that are outclassed."""

    job: Job
    tried: tuple[Candidate, ...]
    pruned: tuple[Candidate, ...]

    @classmethod
    def of(cls, job: Job, arch: str, multiprocessors: int | None) -> Field:
        """All candidates, or without a number of multiprocessors to prune for all of them tried."""
        found = candidates(job.target, job.rows, ARCHES[arch])
        kept: Sequence[Candidate] = found
        if multiprocessors is not None:
            for prune in (prune_wasteful, prune_outclassed):
                kept = prune(job.rows, multiprocessors)(kept)
        return cls(job, tuple(kept), tuple(c for c in found if c not in kept))

    @property
    def facts(self) -> dict[str, Any]:
        """What its result depends on, for the journal."""
        tried = [candidate.parameters for candidate in self.tried]
        return {**self.job.target.to_json(), "rows": self.job.rows, "accepted": self.job.accepted, "tried": tried}


def compile_step(key: StepKey, arch: str) -> None:
    """Compile a step kernel into the cache on disk, unless it is there; runs in a process of its own."""
    from cute_kernels import step
    from cute_kernels.compile import ensure_on_disk

    ensure_on_disk(step.step_launch, partial(step.fake_arguments, key), key, arch)


@contextmanager
def compilers() -> Iterator[Executor]:
    """Processes that compile ahead, which leave one processor to the one that times. At the end they finish what they
    have begun and give up the rest.

    An interrupt from the keyboard reaches them too, and one that died of it with the queue's lock would leave the
    others, and who waits for them, waiting; so they ignore it.
    """
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    # In a container the machine may have many more processors than this process.
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    executor = ProcessPoolExecutor(max(1, processors - 1), get_context("spawn"), initializer=ignore)
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def multiprocessors() -> int:
    """Of this machine's GPU, or where it has none of an H200."""
    if not torch.cuda.is_available():
        return H200_MULTIPROCESSORS
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def launched_key(job: Job, candidate: Candidate) -> StepKey:
    """The key that a step of the job's workload asks for with the candidate's parameters."""
    layer, replay = job.shape.layer, job.replay
    return step_key(
        layer,
        replay,
        workload.model_options(job.shape, replay),
        num_tokens=replay.max_draft,
        rows=RowOptions("int32"),
        ring_layout=default_ring_layout(layer),
        config=candidate.config,
    )


class Tuner:
    """Runs jobs on a machine.

    Args:
        machine: where; its `arch` must be known.
        journal: takes finished jobs and gives back those of a run that was cut off.
        step: `replayssm.step`.
        rounds: samples of a candidate, at most.
        executor, compile_one: compile ahead; without an executor a candidate is compiled when its turn comes.
    """

    def __init__(
        self,
        machine: Machine,
        journal: Journal,
        step: Step,
        *,
        rounds: int = DEFAULT_ROUNDS,
        executor: Executor | None = None,
        compile_one: Compile = compile_step,
    ) -> None:
        assert machine.arch is not None
        self._machine, self._journal, self._step, self._rounds = machine, journal, step, rounds
        self._arch = machine.arch
        self._executor, self._compile = executor, compile_one
        self._compiling: dict[StepKey, Future[object]] = {}
        self._arena: workload.Arena | None = None

    def run(
        self, fields: Sequence[Field], done: Callable[[Field, Choice | str], object], deadline: Deadline | None = None
    ) -> dict[Job, Choice]:
        """Tune job after job.

        Args:
            done: is called behind each with its choice, or with why there is none.
            deadline: no job is begun behind it.

        Returns:
            The choices; a job of which every candidate was refused has none, nor has one that was not begun.
        """
        open_fields = [field for field in fields if self._journal.get(field.facts) is None]
        self._reserve([field.job for field in open_fields])
        for field in open_fields if self._executor is not None else ():
            for candidate in field.tried:
                self._compile_ahead(launched_key(field.job, candidate))
        choices: dict[Job, Choice] = {}
        for field in fields:
            known = self._journal.get(field.facts)
            if known is None and deadline is not None and deadline.left_s <= 0:
                continue
            try:
                choice = Choice(**known) if known is not None else self._tune(field)
            except NoCandidateError as error:
                done(field, str(error))
                continue
            choices[field.job] = choice
            if known is None:
                self._journal.add(field.facts, asdict(choice))
            done(field, choice)
        return choices

    def time_choice(self, job: Job, candidate: Candidate) -> Result:
        """The time of one candidate by itself, behind its gate.

        Raises:
            NoCandidateError: it was refused.
        """
        self._reserve([job])
        return self._race(Field(job, (candidate,), ()))

    def _reserve(self, jobs: Sequence[Job]) -> None:
        """Memory for the largest of the jobs."""
        sizes = [workload.arena_bytes(j.shape.layer, (j.replay,), j.rows + workload.SPARE_SLOTS) for j in jobs]
        if sizes:
            self._arena = None  # the old one first
            self._arena = workload.Arena(max(sizes), self._machine.device)

    def _compile_ahead(self, key: StepKey) -> None:
        if self._executor is not None and key not in self._compiling:
            self._compiling[key] = self._executor.submit(self._compile, key, self._arch)

    def _tune(self, field: Field) -> Choice:
        return choice_of(field, self._race(field))

    def _race(self, field: Field) -> Result:
        assert self._arena is not None
        job = field.job
        self._arena.reset()
        layer = job.shape.layer
        slots, layout = job.rows + workload.SPARE_SLOTS, default_ring_layout(layer)
        (pool,) = workload.make_pools(self._arena, layer, (job.replay,), slots, ring_layout=layout)
        inputs = workload.make_inputs(
            job.shape,
            job.rows,
            dtype=job.replay.activation_dtype,
            device=self._machine.device,
            num_tokens=job.replay.max_draft,
        )
        works = [(workload.make_work(pool, case.live_records, inputs), share) for case, share in job.cases]
        gates = [gate.StepGate(work) for work, _ in works]
        steps = {one.name: partial(self._step, config=one.config) for one in field.tried}
        checks = {one.name: partial(self._check, job, one, gates) for one in field.tried}
        refused = refusals(checks)
        captured = {
            name: [(self._machine.timer.capture(partial(work.launch, step)), share) for work, share in works]
            for name, step in steps.items()
            if name not in refused
        }

        def sample(order: Sequence[str]) -> list[float]:
            parts = [part for name in order for part in captured[name]]
            times = iter(self._machine.timer.sample([graph for graph, _ in parts]))
            return [sum(share * next(times) for _, share in captured[name]) for name in order]

        return race(tuple(steps), sample, refused=refused, rounds=self._rounds)

    def _check(self, job: Job, candidate: Candidate, gates: Sequence[gate.StepGate]) -> None:
        """The compiler's verdict, then the gate of each step that will be timed."""
        if future := self._compiling.get(launched_key(job, candidate)):
            future.result()
        for one in gates:
            one.check(partial(self._step, config=candidate.config))


def choice_of(field: Field, result: Result) -> Choice:
    """What the table says of a race."""
    by_name = {candidate.name: candidate.parameters for candidate in field.tried}
    timing, runner_up = result.timing, result.runner_up
    medians = {name: round(median, DIGITS) for name, median in result.medians_us.items()}
    return Choice(
        by_name[result.winner],
        medians[result.winner],
        round(timing.p10_us, DIGITS),
        round(timing.p90_us, DIGITS),
        None if runner_up is None else by_name[runner_up],
        None if runner_up is None else medians[runner_up],
        heuristic_us=medians.get(field.tried[0].name),
        worst_us=max(medians.values()),
    )


def merged(base: Table | None, choices: Mapping[Job, Choice], header: Table) -> Table:
    """The table with these choices in the place of older ones for the same shapes and batches.

    Args:
        base: the table so far.
        header: an empty table of this device and these versions.

    Raises:
        ValueError: `base` is of another device, basis or versions, which one table does not mix.
    """
    entries = {} if base is None else {shape: dict(found) for shape, found in base.entries.items()}
    for name in ("device", "arch", "basis", "protocol", "versions"):
        if base is not None and getattr(base, name) != getattr(header, name):
            raise ValueError(
                f"{name}: expected a table of {getattr(header, name)}, got one of {getattr(base, name)}; remove it, or "
                "name another file with --out"
            )
    for job, choice in choices.items():
        entries.setdefault(job.target, {})[job.rows] = choice
    return replace(header, entries=entries)
