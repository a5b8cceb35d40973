"""What ReplaySSM keeps on a cache of Hugging Face transformers: cursors, a pool for each layer, and states that fold.

The checkpoint of a pool is memory of the cache: its own state tensor, or, where the layer keeps a state with K and V
swapped, the tensor that the cache's state is a transposed view of.

While a forward verifies drafts, a `Verification` hangs on the cache, too: the tokens are stepped but not committed, and
the state of each convolution stays as it was until it is known how many of them are kept.
"""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import replayssm
from replayssm.cursors import Cursors, make_cursors
from replayssm.inputs import Inputs
from replayssm.launch import value_of
from replayssm.pool import Pool, make_pool
from replayssm.spec import LayerSpec, ReplaySpec

_ON_CACHE = "_replayssm_records"
_VERIFIES = "_replayssm_verification"


@dataclass(eq=False)
class Records:
    """What is pending for one cache: the cursors that its layers share, and a pool of each layer."""

    replay: ReplaySpec
    cursors: Cursors
    slots: Tensor
    pools: dict[int, Pool] = field(default_factory=dict)
    inputs: dict[int, Inputs] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    pending: bool = False

    def step(self, index: int, layer: LayerSpec, cache_layer: Any, inputs: Inputs, *, transposed: bool) -> Tensor:
        """Decode the tokens of every row in the layer of this index, whose cache keeps states transposed or not."""
        if index in self.stepped:
            self._refuse_unfinished()
        pool = self._pool(index, layer, cache_layer, transposed)
        self.inputs[index] = inputs
        self.stepped.add(index)
        return replayssm.step(pool, self.cursors, inputs, cache_indices=self.slots)

    def commit(self, *, num_draft: int = 1, num_accepted: Tensor | None = None) -> None:
        """Keep what the layers have decoded, or the first `num_accepted` of `num_draft` tokens of each row."""
        if self.stepped:
            replayssm.commit(self.cursors, cache_indices=self.slots, num_draft=num_draft, num_accepted=num_accepted)
            self.stepped.clear()
            self.pending = True

    def flush(self) -> None:
        """Fold all pending records: the layers step their last tokens again, fold before, and reject them."""
        if self.stepped:
            self._refuse_unfinished()
        if not self.pending:
            return
        every_row = torch.ones_like(self.slots, dtype=torch.bool)
        for index, pool in self.pools.items():
            replayssm.step(pool, self.cursors, self.inputs[index], cache_indices=self.slots, force_fold=every_row)
        none, width = torch.zeros_like(self.slots), value_of(next(iter(self.inputs.values()))).shape[1]
        replayssm.commit(
            self.cursors, cache_indices=self.slots, num_draft=width, num_accepted=none, force_fold=every_row
        )
        self.pending = False

    def _pool(self, index: int, layer: LayerSpec, cache_layer: Any, transposed: bool) -> Pool:
        """The pool over the state that the cache holds now; its rings survive when the cache replaced the state."""
        if not isinstance(cache_layer.recurrent_states, _FoldedStates):
            cache_layer.recurrent_states = _FoldedStates(cache_layer.recurrent_states)
        states = cache_layer.recurrent_states
        states.records = self
        state, pool = states.data[0].mT if transposed else states.data[0], self.pools.get(index)
        if pool is None or not pool.checkpoint.is_set_to(state):
            checkpoint = state.to(self.replay.checkpoint_dtype).contiguous()
            if not checkpoint.is_set_to(state):
                states.data[0] = checkpoint.mT if transposed else checkpoint
            pool = pool or make_pool(layer, self.replay, len(self.slots), device=state.device)
            self.pools[index] = pool = replace(pool, checkpoint=checkpoint)
        return pool

    def __deepcopy__(self, memo: dict[int, Any]) -> Records:
        """Copies the tensors but no kernels; a checkpoint keeps sharing its memory with the copied cache's state."""
        cursors = Cursors(self.replay, *copy.deepcopy((self.cursors.ring_start, self.cursors.num_committed), memo))
        copied = replace(self, cursors=cursors, slots=self.slots.clone(), inputs=dict(self.inputs))
        copied.pools = {
            index: Pool(pool.layer, pool.replay, *copy.deepcopy(pool.tensors, memo))
            for index, pool in self.pools.items()
        }
        copied.stepped = set(self.stepped)
        return copied

    def _refuse_unfinished(self) -> None:
        raise RuntimeError(
            f"cache: layers {sorted(self.stepped)} have decoded a token that was never committed, because a forward "
            "failed or their layers were called outside of the model; start again from a new cache"
        )


class Verification:
    """One forward of several tokens a row of which only the first few are kept, how many is known after it.

    From its making to `accept`, the layers step the tokens of a forward instead of reading them as a prompt.
    """

    def __init__(self, cache: Any, num_tokens: int) -> None:
        self.cache = cache
        self.num_tokens = num_tokens
        self.windows: list[tuple[Tensor, Tensor]] = []
        setattr(cache, _VERIFIES, self)

    def convolve(self, mixer: Any, state: Tensor, conv_in: Tensor) -> Tensor:
        """The causal convolution of [rows, channels, T] after a state of [rows, channels, width], which stays."""
        from transformers.activations import ACT2FN

        seen = torch.cat([state, conv_in.to(state.dtype)], dim=-1)
        self.windows.append((state, seen))
        conv = mixer.conv1d
        out = F.conv1d(seen.to(conv.weight.dtype), conv.weight, conv.bias, groups=conv.groups)
        return ACT2FN[mixer.activation](out[..., -self.num_tokens :]).to(conv_in.dtype)

    def accept(self, num_accepted: Tensor) -> None:
        """Keep the first `num_accepted` [rows] int32 tokens of each row, 0 to T, and forget the others.

        A convolution's state becomes the inputs that end with the last one that is kept.
        """
        for state, seen in self.windows:
            places = num_accepted.long()[:, None] + torch.arange(state.shape[-1], device=seen.device)
            state.copy_(seen.gather(-1, places[:, None].expand(-1, state.shape[1], -1)))
        getattr(self.cache, _ON_CACHE).commit(num_draft=self.num_tokens, num_accepted=num_accepted)
        delattr(self.cache, _VERIFIES)


def verification_of(cache: Any) -> Verification | None:
    """The verification that a cache is in, if any."""
    return getattr(cache, _VERIFIES, None)


class _FoldedStates(UserDict[int, Tensor]):
    """The `recurrent_states` of a cache layer: a reader or writer finds no pending records."""

    records: Records | None = None

    def __getitem__(self, index: int) -> Tensor:
        self._flush()
        return self.data[index]

    def __setitem__(self, index: int, state: Tensor) -> None:
        self._flush()
        self.data[index] = state

    def _flush(self) -> None:
        if self.records is not None:
            self.records.flush()


def records_of(cache: Any, replay: ReplaySpec, inputs: Inputs) -> Records:
    """The records of a cache, made anew when its rows, the device, the dtype or the settings have changed."""
    value = value_of(inputs)
    rows, device, replay = len(value), value.device, replace(replay, activation_dtype=value.dtype)
    records = getattr(cache, _ON_CACHE, None)
    if records is None or records.replay != replay or (len(records.slots), records.slots.device) != (rows, device):
        if records is not None:
            records.flush()
        slots = torch.arange(rows, dtype=torch.int32, device=device)
        records = Records(replay, make_cursors(replay, rows, device=device), slots)
        setattr(cache, _ON_CACHE, records)
    return records


def commit_after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """The forward hook of the module that contains all layers: commits what they have decoded in its caches, unless
    drafts are being verified."""
    for value in (*args, *kwargs.values()):
        records = getattr(value, _ON_CACHE, None)
        if isinstance(records, Records) and verification_of(value) is None:
            records.commit()
