"""The tensors that a benchmark steps over: one allocation, reused from one layer to the next.

Slots are a random permutation, ring starts are random, and there are more slots than rows, as in an engine that has
run for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.configs import Options
from replayssm.cursors import Cursors
from replayssm.inputs import GdnInputs, Inputs, KdaInputs, Mamba2Inputs
from replayssm.launch import options_of, value_of
from replayssm.ops import write_read_copy
from replayssm.plan import Plan, plan_step
from replayssm.pool import Pool, RingLayout, record_shapes
from replayssm.spec import LayerSpec, ReplaySpec
from tuning.shapes import ModelShape

SPARE_SLOTS = 32
ALIGNMENT = 256

Step = Callable[..., object]


class Arena:
    """One allocation that the tensors of one workload after another are carved from.

    Args:
        num_bytes: enough for the largest of them.
        device: where.
    """

    def __init__(self, num_bytes: int, device: torch.device | str) -> None:
        self._memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
        self._base = -self._memory.data_ptr() % ALIGNMENT
        self._used = self._base

    def reset(self) -> None:
        """Give all of it out anew; earlier tensors must be dropped."""
        self._used = self._base

    def words(self, num_bytes: int) -> Tensor:
        """The first `num_bytes` (at most all) as uint32, whatever lies there: something to read."""
        usable = (self._memory.numel() - self._base) // 4 * 4
        return self._memory[self._base : self._base + min(num_bytes, usable)].view(torch.uint32)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A packed tensor of unspecified contents.

        Raises:
            MemoryError: the arena is spent.
        """
        num_bytes = int(torch.Size(shape).numel()) * dtype.itemsize
        end = self._used + num_bytes
        if end > self._memory.numel():
            raise MemoryError(f"arena: expected {end} bytes or more, got {self._memory.numel()}")
        tensor = self._memory[self._used : end].view(dtype).view(*shape)
        self._used = end + -num_bytes % ALIGNMENT
        return tensor


def arena_bytes(layer: LayerSpec, replays: Sequence[ReplaySpec], num_slots: int) -> int:
    """Bytes that `make_pools` takes from an arena."""
    total = 0
    for i, replay in enumerate(replays):
        for name, (shape, dtype) in record_shapes(layer, replay).items():
            if name != "checkpoint" or i == 0:
                total += num_slots * int(torch.Size(shape).numel()) * dtype.itemsize + ALIGNMENT
    return total


def make_pools(
    arena: Arena, layer: LayerSpec, replays: Sequence[ReplaySpec], num_slots: int, *, ring_layout: RingLayout
) -> list[Pool]:
    """Pools of random contents with the same checkpoint, one for each of `replays` (whose dtypes must agree), and where
    these have copies, its copies."""
    delta_rule = layer.recurrence != "mamba2"
    pools: list[Pool] = []
    for replay in replays:
        tensors = {}
        for name, (shape, dtype) in record_shapes(layer, replay).items():
            if name == "checkpoint":
                tensors[name] = pools[0].checkpoint if pools else arena.take((num_slots, *shape), dtype).normal_()
                continue
            if name.startswith("read_"):
                tensors[name] = arena.take((num_slots, *shape), dtype)
                continue
            if ring_layout == "record_major":
                ring = arena.take((num_slots, shape[1], shape[0], *shape[2:]), dtype).transpose(1, 2)
            else:
                ring = arena.take((num_slots, *shape), dtype)
            # dt after softplus or log-decay, as in trained models: most of a window decays little, some heads much.
            if name == "decay":
                tensors[name] = ring.uniform_(-0.1, -0.001) if delta_rule else ring.uniform_(0.001, 0.1)
            else:  # the keys of a delta rule are normalised
                tensors[name] = ring.normal_(std=layer.d_state**-0.5 if delta_rule and name == "key" else 1.0)
        pools.append(Pool(layer, replay, **tensors))
        if replay.read_dtype is not None:
            start, count = torch.zeros(2, num_slots, dtype=torch.int32, device=pools[-1].device)
            slots = torch.arange(num_slots, dtype=torch.int32, device=pools[-1].device)
            write_read_copy(Cursors(replay, start, count), slots, pools=pools[-1:])
    return pools


def make_inputs(
    shape: ModelShape,
    rows: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    num_tokens: int = 1,
    has_z: bool = False,
) -> Inputs:
    """Random inputs of `num_tokens` tokens a row as the model's layer has them.

    All that is projected comes in `dtype`, parameters in float32. Mamba-2 has bias, softplus and D, and z only on
    request (Nemotron-H gates in the norm behind the layer); the delta rules normalise q and k.
    """
    layer = shape.layer
    heads, groups = layer.num_v_heads, layer.num_k_heads
    tokens = (rows, num_tokens)
    value_shape, key_shape = (*tokens, heads, layer.head_dim), (*tokens, groups, layer.d_state)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(shape, device=device).uniform_(low, high)

    if layer.recurrence == "mamba2":
        return Mamba2Inputs(
            x=normal(*value_shape),
            dt=normal(*tokens, heads),
            B=normal(*key_shape),
            C=normal(*key_shape),
            A=-uniform(1.0, 16.0, heads),
            D=torch.randn(heads, device=device),
            z=normal(*value_shape) if has_z else None,
            dt_bias=uniform(-7.0, -2.0, heads),
            dt_softplus=True,
        )
    q, k, v = normal(*key_shape), normal(*key_shape), normal(*value_shape)
    if layer.recurrence == "gdn":
        a, b = normal(*tokens, heads), normal(*tokens, heads)
        return GdnInputs(q, k, v, a, b, A_log=uniform(1.0, 16.0, heads).log(), dt_bias=uniform(-7.0, -2.0, heads))
    # A bounded gate takes the rate inside its sigmoid, where a large one would leave no decay at all.
    rates = (1.0, 16.0) if shape.lower_bound is None else (0.25, 1.0)
    return KdaInputs(
        q,
        k,
        v,
        g=normal(*tokens, heads, layer.d_state),
        beta=normal(*tokens, heads),
        A_log=uniform(*rates, heads).log(),
        dt_bias=uniform(-7.0, -2.0, heads, layer.d_state),
        lower_bound=shape.lower_bound,
    )


def model_options(shape: ModelShape, replay: ReplaySpec) -> Options:
    """What a kernel must know of such inputs, none of which is made."""
    return options_of(make_inputs(shape, 1, dtype=replay.activation_dtype, device="meta"))


@dataclass(frozen=True, eq=False)
class StepWork:
    """One call of the step.

    Args:
        pool, cursors, inputs, cache_indices: as `replayssm.step` takes them.
        out: [rows, T, HV, V], written.
    """

    pool: Pool
    cursors: Cursors
    inputs: Inputs
    cache_indices: Tensor
    out: Tensor

    def launch(self, step: Step) -> None:
        """Call the step once."""
        step(self.pool, self.cursors, self.inputs, cache_indices=self.cache_indices, out=self.out)

    def plan(self, arch: str) -> Plan:
        """What the step chooses for this call."""
        rows, num_tokens = self.out.shape[:2]
        pool = self.pool
        return plan_step(
            pool.layer,
            pool.replay,
            options_of(self.inputs),
            arch=arch,
            batch=rows,
            num_tokens=num_tokens,
            ring_layout=pool.ring_layout,
        )


def make_work(pool: Pool, live_records: Sequence[int], inputs: Inputs) -> StepWork:
    """A step over rows that hold the given numbers of records, in slots and at ring starts of random choice."""
    rows, device = len(live_records), pool.device
    slots = torch.randperm(pool.num_slots, device=device)[:rows]
    start = torch.randint(0, pool.replay.ring_capacity, (pool.num_slots,), device=device, dtype=torch.int32)
    count = torch.zeros(pool.num_slots, device=device, dtype=torch.int32)
    count[slots] = torch.tensor(live_records, device=device, dtype=torch.int32)
    out = torch.empty_like(value_of(inputs))
    return StepWork(pool, Cursors(pool.replay, start, count), inputs, slots.to(torch.int32), out)


def make_walking_cursors(replay: ReplaySpec, num_slots: int, device: torch.device | str) -> Cursors:
    """Cursors of slots that stand anywhere in the window, for commits one after another."""
    start = torch.randint(0, replay.ring_capacity, (num_slots,), device=device, dtype=torch.int32)
    count = torch.randint(1, replay.window + 1, (num_slots,), device=device, dtype=torch.int32)
    return Cursors(replay, start, count)
