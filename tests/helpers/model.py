"""Layers that share cursors, as `flush` and `materialize` take them, and the states that their records stand for.

What is right is the recurrence over the very records in float64, one after the other; what it errs in float32, rounded
to the dtype of the checkpoint, is the measure. All that is not pending is NaN from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import replayssm
from cute_kernels.configs import RingLayout
from replayssm import Cursors, Pool
from replayssm.pool import record_shapes
from tests.helpers.cases import Case
from tests.helpers.draw import make_inputs, random_pool, tensors_of
from tests.helpers.oracle import F32, F64, copy_cursors, like
from tests.helpers.tolerance import excess, same_bytes

SPARE_ROWS = 3  # of a ring, beside the window


def fitting(case: Case, device: torch.device) -> Case:
    """The case with a state that kernels have, on a GPU; the twin takes any, and a small one is faster."""
    return replace(case, V=max(case.V, 64), K=max(case.K, 64)) if device.type == "cuda" else case


@dataclass
class Model:
    """Layers that share cursors."""

    cases: list[Case]
    cursors: Cursors
    pools: list[Pool]
    A: list[Tensor] | None

    def clone(self) -> Model:
        """The same in memory of its own."""
        pools = [
            Pool(
                p.layer,
                p.replay,
                **{name: like(getattr(p, name), p.device) for name in record_shapes(p.layer, p.replay)},
            )
            for p in self.pools
        ]
        return replace(self, cursors=copy_cursors(self.cursors), pools=pools)

    def flush(self, slots: Tensor) -> None:
        replayssm.flush(self.cursors, slots, pools=self.pools, A=self.A)

    def materialize(self, source: Tensor, destination: Tensor, num_records: Tensor | None) -> None:
        replayssm.materialize(self.cursors, source, destination, num_records, pools=self.pools, A=self.A)

    def decode(self, slots: Tensor, seed: int, force: bool = False) -> Tensor:
        """One token of these slots in every layer; the outputs of all layers."""
        generator, outs = torch.Generator().manual_seed(seed), []
        for i, pool in enumerate(self.pools):
            inputs = make_inputs(self.cases[i], len(slots), generator)
            inputs = inputs._replace(**{name: t.to(slots.device) for name, t in tensors_of(inputs).items()})
            inputs = inputs if self.A is None else inputs._replace(A=self.A[i])
            mask = torch.full_like(slots, force, dtype=torch.bool)
            outs.append(replayssm.step(pool, self.cursors, inputs, cache_indices=slots, force_fold=mask).flatten())
        replayssm.commit(self.cursors, cache_indices=slots, force_fold=mask)
        return torch.cat(outs)

    def memory(self) -> list[Tensor]:
        held = (getattr(self.cursors, name) for name in self.cursors.names)
        return [*(t for pool in self.pools for t in pool.tensors), *held]

    def same_as(self, other: Model) -> bool:
        return all(same_bytes(a, b) for a, b in zip(self.memory(), other.memory(), strict=True))


def model_of(
    case: Case,
    device: torch.device,
    counts: list[int],
    *,
    free: int,
    starts: list[int] | None = None,
    layers: Sequence[tuple[Case, RingLayout]] = (),
) -> Model:
    """Slots with so many pending records each, then `free` slots of NaN with senseless cursors.

    Without `layers` there are three of the case's kind, the second with other heads and in head-major order.
    """
    generator, replay = torch.Generator().manual_seed(len(counts)), case.replay
    replay = replace(replay, ring_capacity=case.window + SPARE_ROWS)
    start = torch.tensor(starts or [7 * i % replay.ring_capacity for i in range(len(counts))], dtype=torch.int32)
    nowhere = torch.full((free,), torch.iinfo(torch.int32).min, dtype=torch.int32)
    start, count = torch.cat([start, nowhere]), torch.cat([torch.tensor(counts, dtype=torch.int32), nowhere])
    case, pools = fitting(case, device), []
    layers = layers or [(case, "record_major"), (replace(case, HV=3, HK=1), "head_major"), (case, "record_major")]
    for one, layout in layers:
        pool = random_pool(one.layer, replay, start, count, generator, layout)
        pools.append(Pool(one.layer, replay, *(like(t, device) for t in pool.tensors)))
    A = [-torch.logspace(-1.5 - i, 0.6, one.HV, device=device) for i, (one, _) in enumerate(layers)]
    cursors = Cursors(replay, start.to(device), count.to(device))
    return Model([one for one, _ in layers], cursors, pools, A if case.recurrence == "mamba2" else None)


def one_by_one(model: Model, layer: int, slots: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    """The states after the first `count` records of each slot, record after record."""
    pool = model.pools[layer]
    state = pool.checkpoint[slots].to(dtype)
    for j in range(pool.replay.window):
        place = (model.cursors.ring_start[slots].long() + j) % pool.replay.ring_capacity
        value, key, decay = (t[slots, :, place].to(dtype) for t in pool.tensors[1:4])
        if model.A is not None:
            value, decay = decay[..., None] * value, decay * model.A[layer].to(dtype)
        decay = decay if decay.dim() == 3 else decay[..., None]
        key = key.repeat_interleave(pool.layer.heads_per_group, dim=1)
        after = state * torch.exp(decay)[:, :, None] + value[..., None] * key[:, :, None]
        state = after.where((j < count)[:, None, None, None], state)
    return state


def excesses(model: Model, given: Model, source: Tensor, destination: Tensor, count: Tensor) -> list[str]:
    """What is wrong with the checkpoints at `destination`, which the records of `given` determine."""
    findings = []
    for i, pool in enumerate(model.pools):
        exact, torchs = (one_by_one(given, i, source, count, dtype) for dtype in (F64, F32))
        got = pool.checkpoint[destination]
        findings += excess(f"layer {i}", got, torchs.to(got.dtype), exact, keep=(0, 1))
    return findings


def untouched(model: Model, given: Model, destination: Tensor) -> list[str]:
    """What beside the checkpoints at `destination` and cursors that became empty there was written."""
    want = given.clone()
    want.cursors.ring_start[destination] = 0
    want.cursors.num_committed[destination] = 0
    for ours, theirs in zip(model.pools, want.pools, strict=True):
        theirs.checkpoint[destination] = ours.checkpoint[destination]
    return [
        f"tensor {i}"
        for i, (a, b) in enumerate(zip(model.memory(), want.memory(), strict=True))
        if not same_bytes(a, b)
    ]


def every_prefix(case: Case, device: torch.device) -> tuple[Model, Tensor, Tensor, Tensor]:
    """A source for every ring start and number of records, a row for each of its prefixes, and a free slot a row."""
    pairs = [(start, count) for start in range(case.window + SPARE_ROWS) for count in range(case.window + 1)]
    rows = [(slot, prefix) for slot, (_, count) in enumerate(pairs) for prefix in range(count + 1)]
    starts, counts = (list(column) for column in zip(*pairs, strict=True))
    model = model_of(case, device, counts, free=len(rows) + 1, starts=starts)
    source, records = (torch.tensor(column, device=device) for column in zip(*rows, strict=True))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).to(device)
    return model, source, len(pairs) + order, records.int()
