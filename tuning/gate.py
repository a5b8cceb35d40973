"""The gate that a kernel passes before it is timed: one call against the torch twin.

A time of a wrong kernel is worth nothing, and a wrong kernel is often fast: so no gate, no time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from replayssm.cursors import Cursors
from replayssm.inputs import Mamba2Inputs
from replayssm.pool import Pool
from replayssm.reference import replay as reference
from replayssm.reference import storage
from replayssm.reference.recurrence import tokens
from tuning.measure import GateFailedError
from tuning.workload import Step, StepWork

GATED_ROWS = 3
# A kernel may err this many times as much as torch in the same precision. A 16-bit result errs by its final rounding,
# which both share; float32 also carries the hardware's exp2 (2**-22 against torch's 2**-24, so 4 by itself).
FACTOR_16_BIT = 2.0
FACTOR_FLOAT32 = 8.0
# Where the twin errs at all, its error counts as one rounding at least: over the decays of few heads it may err by
# chance far less, which no kernel can follow.
ROUNDING_FLOAT32 = torch.finfo(torch.float32).eps / 2


def check_commit(cursors: Cursors, commit: Step, **rows: Any) -> None:
    """The gate of `commit`: a window of commits against the torch twin, exactly.

    Args:
        cursors: written.
        rows: the arguments of `commit` beside the cursors.

    Raises:
        GateFailedError: the cursors differ.
    """
    twin = Cursors(cursors.replay, cursors.ring_start.clone(), cursors.num_committed.clone())
    for i in range(cursors.replay.window + 1):
        commit(cursors, **rows)
        reference.commit(twin, **rows)
        for name in ("ring_start", "num_committed"):
            wrong = int((getattr(cursors, name) != getattr(twin, name)).sum())
            if wrong:
                raise GateFailedError(f"{name}: expected the twin's after commit {i}, got {wrong} slots that differ")


def check_step(work: StepWork, step: Step) -> None:
    """The gate of one step over one workload, which the step leaves behind (`StepGate`)."""
    StepGate(work).check(step)


class StepGate:
    """The gate: one call against the torch twin in fp64, on a few rows, token by token and head by head.

    Compared are the outputs, the checkpoint after a fold and the appended records; over all rows, that the output is
    finite. The bound is the error of the twin in float32 times a factor (see the constants of this module); where the
    twin makes none, as with the x and B of Mamba-2, which are only stored, none is allowed.

    Args:
        work: as the steps that are checked will find it, in the compared rows: what one has written there is taken back
            before the next. The twin runs once for all of them.
    """

    def __init__(self, work: StepWork) -> None:
        rows = torch.linspace(0, len(work.out) - 1, min(GATED_ROWS, len(work.out))).long().unique().to(work.out.device)
        self._work, self._rows = work, rows
        self._before, self._twin, exact = (_excerpt(work, rows) for _ in range(3))
        self._slots = torch.arange(len(rows), device=work.out.device)
        self._want = torch.empty_like(exact.out, dtype=torch.float64)
        folded = _fold_counts(exact)
        self._want_state = _folded_state(exact, self._slots, folded, torch.float64)
        twin_state = _folded_state(exact, self._slots, folded, torch.float32)
        self._twin_state = twin_state.to(work.pool.checkpoint.dtype)
        self._record = _exact_record(exact, self._slots)  # before the step writes the checkpoint
        replace(exact, out=self._want).launch(lambda *a, **k: reference.step(*a, **k, dtype=torch.float64))
        self._twin.launch(reference.step)

    def check(self, step: Step) -> None:
        """Launch a step once.

        Raises:
            GateFailedError: what differs and by how much.
        """
        work, slots = self._work, self._work.cache_indices[self._rows].long()
        for name in _written(work.pool):
            getattr(work.pool, name)[slots] = getattr(self._before.pool, name)
        work.out.fill_(float("nan"))
        work.launch(step)
        if not bool(torch.isfinite(work.out).all()):
            wrong = int((~work.out.isfinite()).sum())
            raise GateFailedError(f"output: expected finite numbers, got {wrong} that are not")
        got = _excerpt(work, self._rows)
        outputs = (work.out[self._rows], self._twin.out, self._want)
        _bound("output", *(out.flatten(0, 1) for out in outputs), head_axis=1)
        _bound("checkpoint", got.pool.checkpoint, self._twin_state, self._want_state, head_axis=1)
        _check_appended(got, self._twin, self._record, self._slots)


def _written(pool: Pool) -> tuple[str, ...]:
    """The tensors of a pool that a step writes."""
    return ("value", "key", "decay", *pool.state_names)


def _excerpt(work: StepWork, rows: Tensor) -> StepWork:
    """The rows with copies of all that a step writes; row i of the result lives in slot i."""
    slots = work.cache_indices[rows].long()
    tensors = {name: getattr(work.pool, name)[slots].contiguous() for name in _written(work.pool)}
    pool = Pool(work.pool.layer, work.pool.replay, **tensors)
    cursors = Cursors(work.cursors.replay, work.cursors.ring_start[slots], work.cursors.num_committed[slots])
    # Tensors of tokens have three axes or four, parameters one or two.
    of_tokens: dict[str, Any] = {
        name: t[rows] for name, t in work.inputs._asdict().items() if isinstance(t, Tensor) and t.dim() >= 3
    }
    indices = torch.arange(len(rows), dtype=work.cache_indices.dtype, device=rows.device)
    return StepWork(pool, cursors, work.inputs._replace(**of_tokens), indices, work.out[rows].clone())


def _fold_counts(work: StepWork) -> Tensor:
    count = work.cursors.num_committed.long()
    return count.where(count + work.out.shape[1] > work.pool.replay.window, torch.zeros_like(count))


def _folded_state(work: StepWork, slots: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    A = work.inputs.A if isinstance(work.inputs, Mamba2Inputs) else None
    return reference.fold(work.pool, work.cursors, slots, count, A=A, dtype=dtype)


def _bound(name: str, got: Tensor, twin: Tensor, want: Tensor, *, head_axis: int) -> None:
    """Refuse a result that errs, in its worst head, more than the allowed multiple of the twin's worst head."""
    error, baseline = (_worst_head(t, want, head_axis) for t in (got, twin))
    factor = FACTOR_16_BIT if got.dtype.itemsize == 2 else FACTOR_FLOAT32
    if got.dtype == torch.float32 and baseline:
        baseline = max(baseline, ROUNDING_FLOAT32)
    if not error <= factor * baseline:
        raise GateFailedError(
            f"{name}: expected a relative error of at most {factor:g} x {baseline:.2e} (torch in the same precision, "
            f"worst head), got {error:.2e}"
        )


def _worst_head(got: Tensor, want: Tensor, head_axis: int) -> float:
    axes = [axis for axis in range(want.dim()) if axis not in (0, head_axis)]
    norm = want.norm(dim=axes).clamp_min(torch.finfo(torch.float64).tiny)
    return float(((got.double() - want).norm(dim=axes) / norm).max())


def _check_appended(got: StepWork, twin: StepWork, record: dict[str, Tensor], slots: Tensor) -> None:
    """The record of each token must be as exact as the twin's, and no other row of a ring may change."""
    capacity, num_tokens = got.pool.replay.ring_capacity, got.out.shape[1]
    first = got.cursors.ring_start.long() + got.cursors.num_committed.long()
    places = (first[:, None] + torch.arange(num_tokens, device=first.device)) % capacity
    others = torch.ones(len(slots), capacity, dtype=torch.bool, device=slots.device)
    others[slots[:, None], places] = False
    for name, want in record.items():
        ring, its = (getattr(one.pool, name).transpose(1, 2) for one in (got, twin))
        if not torch.equal(ring[others], its[others]):
            raise GateFailedError(f"{name} ring: expected rows other than the appended ones kept")
        appended = [rows.flatten(0, 1) for rows in (ring[slots[:, None], places], its[slots[:, None], places], want)]
        # One number a head has no norm of its own: its row of heads has.
        _bound(f"{name} ring", *appended, head_axis=1 if want.dim() == 4 else 0)


def _exact_record(work: StepWork, slots: Tensor) -> dict[str, Tensor]:
    """The tokens' records in fp64 by ring, [rows, T, ...]: from the folded state token by token rather than by the
    twin's algebra."""
    fresh = tokens(work.inputs, torch.float64)
    if not fresh.delta_rule:
        return {"value": fresh.value, "key": fresh.key, "decay": fresh.strength}
    pool, values = work.pool, []
    if pool.replay.read_dtype is not None:  # tokens meet the copy, whether their row folds or not
        plain = replace(pool.replay, checkpoint_dtype=torch.float32, read_dtype=None)
        pool = Pool(pool.layer, plain, storage.read_copy(pool, slots), pool.value, pool.key, pool.decay)
    state = _folded_state(replace(work, pool=pool), slots, work.cursors.num_committed.long(), torch.float64)
    for t in range(fresh.value.shape[1]):
        state = state * torch.exp(fresh.log_decay[:, t])[..., None, :]
        key = fresh.key[:, t].repeat_interleave(work.pool.layer.heads_per_group, dim=1)
        answer = torch.einsum("rhvk,rhk->rhv", state, key)
        values.append(fresh.strength[:, t, :, None] * (fresh.value[:, t] - answer))
        state = state + values[-1][..., None] * key[:, :, None]
    decay = fresh.log_decay if work.pool.layer.decays_per_channel else fresh.log_decay.squeeze(-1)
    return {"value": torch.stack(values, 1), "key": fresh.key, "decay": decay}
