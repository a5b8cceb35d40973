"""Decoding from a checkpoint and a ring of records, in plain torch: the twin of the kernels.

Per value head, with S0 [V, K] the checkpoint, pending records j (u_j, k_j) and tokens s, write G_s for the log-decay
summed over the tokens up to and including s, H_j for the pending log-decay after record j, H for all of it:

    read(x)_s = S0 (x_s e^(H + G_s)) + sum_j u_j <x_s e^(G_s), k_j e^(H_j)> + sum_(i<=s) u_i <x_s, k_i>_(G_s - G_i)
    o_s = read(q)_s          u_s = beta_s (v_s - read(k)_s without i = s), a unit lower triangular system

Records meet tokens at the boundary between the two, so both of their factors have exponents of 0 or less and neither
can overflow. Between tokens the exponent G_s - G_i is summed from its own terms and masked before exp. A prefix is
never subtracted from another, so strong decays do not cancel and an infinite one is harmless.

Precision: a step computes with the u, k and decay of its own tokens, and with a state that it folds, as it has them
in the compute dtype; they are rounded where they are stored and later steps see the rounded values. Where a pool has
read copies, every row takes S0 from its own, and all committed records are pending to it; a fold takes its state from
the checkpoint and writes both, for later steps to see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.cursors import Cursors
from replayssm.inputs import Inputs, Mamba2Inputs
from replayssm.pool import Pool
from replayssm.reference import storage
from replayssm.reference.recurrence import Tokens, tokens


def step(
    pool: Pool,
    cursors: Cursors,
    inputs: Inputs,
    *,
    cache_indices: Tensor,
    out: Tensor | None = None,
    force_fold: Tensor | None = None,
    pad_slot_id: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Decode T tokens a row, append their records, and fold the rows whose window would overflow.

    A row folds its committed records into the checkpoint first when `num_committed + T > window`, T its own where the
    inputs have `cu_seqlens`, or when it is in `force_fold` and has any. The cursors do not move: `commit` does that,
    once for all layers.

    Args:
        pool: checkpoint and rings; written in place, only in the slots of rows that are no padding.
        cursors: read.
        inputs: the tokens, T of 1 to `max_draft`.
        cache_indices: [rows] int32 or int64; the slot of each row. `pad_slot_id` or a negative number marks padding:
            its output is zero. Caller must give other rows distinct slots.
        out: shaped as the values, any floating dtype, written; allocated in the activation dtype when None. Pass one in
            the compute dtype to see the output unrounded.
        force_fold: [rows] bool, or None.
        dtype: compute dtype; float32 when None.

    Returns:
        `out`.
    """
    dtype = dtype or torch.float32
    fresh = tokens(inputs, dtype)
    if out is None:
        out = fresh.value.new_zeros(fresh.value.shape, dtype=pool.replay.activation_dtype)
    if inputs.cu_seqlens is None:
        num_draft = fresh.value.shape[1]
        num_tokens, places = torch.full_like(cache_indices, num_draft, dtype=torch.int64), None
    else:
        num_draft, total = pool.replay.max_draft, fresh.value.shape[1]
        if total == 0:
            return out
        first, num_tokens = spans(inputs.cu_seqlens, num_draft, total)
        places = (first[:, None] + torch.arange(num_draft, device=first.device)).clamp(max=total - 1)
    present = torch.arange(num_draft, device=num_tokens.device) < num_tokens[:, None]
    if places is not None:
        fresh = fresh.unpacked(places, present)
    rows, slots = live_rows(cache_indices, pad_slot_id, num_tokens)
    fresh, appended = fresh.select(rows), present[rows]
    count = cursors.num_committed[slots].long()
    force_fold = None if force_fold is None else force_fold[rows]
    folds = fold_mask(count, num_tokens[rows], pool.replay.window, force_fold)
    A = inputs.A if isinstance(inputs, Mamba2Inputs) else None

    if pool.replay.read_dtype is None:
        held, unfolded = pool.checkpoint[slots].to(dtype), count.where(~folds, 0)
    else:
        held, unfolded = storage.read_copy(pool, slots).to(dtype), count
    folding = slots[folds]
    if len(folding):
        state = fold(pool, cursors, folding, count[folds], A=A, dtype=dtype)
        if pool.replay.read_dtype is None:
            held[folds] = state
        pool.checkpoint[folding] = storage.rounded(pool, state, folding, cursors)
        storage.write_copy(pool, folding)
    readout, update = _attend(held, _records(pool, cursors, slots, unfolded, A, dtype), fresh)
    result = fresh.finish(readout.transpose(1, 2)).to(out.dtype)
    if places is None:
        out.zero_()
        out[rows] = result
    else:
        out[0, places[present]] = 0
        out[0, places[rows][appended]] = result[appended]

    ring_rows = _places(cursors, slots, count, num_draft)
    value = update.transpose(1, 2) if fresh.delta_rule else fresh.value
    decay = fresh.log_decay if fresh.delta_rule else fresh.strength
    decay = decay if pool.layer.decays_per_channel else decay.flatten(2)
    for ring, records in ((pool.value, value), (pool.key, fresh.key), (pool.decay, decay)):
        ring[slots[:, None].expand_as(appended)[appended], :, ring_rows[appended]] = records[appended].to(ring.dtype)
    return out


def spans(cu_seqlens: Tensor, most: int, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Where the tokens of each row begin and how many it has, 0 to `most` and none beyond `total`; [rows] int64."""
    first, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if total is not None:
        first = first.where((first >= 0) & (first < total), total)
        end = end.clamp(max=total)
    return first, (end - first).clamp(0, most)


def fold(
    pool: Pool, cursors: Cursors, slots: Tensor, count: Tensor, *, A: Tensor | None = None, dtype: torch.dtype
) -> Tensor:
    """The state after the first `count` pending records of each slot; nothing is written.

    Args:
        slots: [rows] int64, no padding.
        count: [rows] int64, 0 to `num_committed`; 0 gives the checkpoint itself.
        A: [HV], needed for Mamba-2, whose records hold dt.
        dtype: compute dtype, and that of the result.

    Returns:
        [rows, HV, V, K].
    """
    update, key, log_decay = _records(pool, cursors, slots, count, A, dtype)
    after, total = _suffix_sums(log_decay)
    state = pool.checkpoint[slots].to(dtype) * torch.exp(total)
    return state + torch.einsum("rhjv,rhjk->rhvk", update, key * torch.exp(after))


def commit(
    cursors: Cursors,
    *,
    cache_indices: Tensor,
    num_draft: int = 1,
    cu_seqlens: Tensor | None = None,
    num_accepted: Tensor | None = None,
    force_fold: Tensor | None = None,
    pad_slot_id: int = -1,
) -> None:
    """Move the cursors past the records folded by the last step and the tokens accepted from it.

    Args:
        cursors: written at the slots of rows that are no padding.
        cache_indices, force_fold, pad_slot_id: as given to the `step` of every layer.
        num_draft: T of that step; not read where its inputs had `cu_seqlens`, which then is given here.
        num_accepted: [rows] integers, 0 to a row's tokens; every token when None. Padding rows are not read.
    """
    if cu_seqlens is None:
        num_tokens = torch.full_like(cache_indices, num_draft, dtype=torch.int64)
    else:
        _, num_tokens = spans(cu_seqlens, cursors.replay.max_draft)
    rows, slots = live_rows(cache_indices, pad_slot_id, num_tokens)
    start, count, num_tokens = cursors.ring_start[slots], cursors.num_committed[slots], num_tokens[rows]
    folds = fold_mask(count, num_tokens, cursors.replay.window, None if force_fold is None else force_fold[rows])
    folded = count.where(folds, 0)
    accepted = num_tokens if num_accepted is None else num_accepted[rows].clamp(min=0).minimum(num_tokens)
    cursors.ring_start[slots] = (start + folded) % cursors.replay.ring_capacity
    cursors.num_committed[slots] = count - folded + accepted.to(count.dtype)
    if cursors.fold_count is not None:
        cursors.fold_count[slots] += folds.int()


def flush(
    cursors: Cursors,
    slots: Tensor,
    *,
    pools: Sequence[Pool],
    A: Sequence[Tensor | None],
    dtype: torch.dtype | None = None,
) -> None:
    """Fold all committed records of some slots in place, and move the cursors past them.

    Args:
        cursors: read, and written at `slots`.
        slots: [n] integers; negative ones are padding.
        pools, A: of every layer; checkpoints are written.
        dtype: compute dtype; float32 when None.
    """
    _, slots = live_rows(slots, -1)
    count = cursors.num_committed[slots]
    for pool, rate in zip(pools, A, strict=True):
        _store(pool, cursors, slots, slots, count.long(), rate, dtype or torch.float32)
    cursors.ring_start[slots] = (cursors.ring_start[slots] + count) % cursors.replay.ring_capacity
    cursors.num_committed[slots] = 0
    _count_folds(cursors, slots, slots, count)


def materialize(
    cursors: Cursors,
    source: Tensor,
    destination: Tensor,
    num_records: Tensor | None,
    *,
    pools: Sequence[Pool],
    A: Sequence[Tensor | None],
    dtype: torch.dtype | None = None,
) -> None:
    """Write the state after the first `num_records` records of source slots as the checkpoint of other slots.

    Args:
        cursors: read at `source`; written at `destination`, as empty.
        source, destination: [n] integers; rows with a negative one are padding.
        num_records: [n] integers, 0 to `num_committed` of the source; all when None. Padding rows are not read.
        pools, A: of every layer; checkpoints are written.
        dtype: compute dtype; float32 when None.
    """
    live = (source >= 0) & (destination >= 0)
    read, write = source[live].long(), destination[live].long()
    count = cursors.num_committed[read] if num_records is None else num_records[live]
    for pool, rate in zip(pools, A, strict=True):
        _store(pool, cursors, read, write, count.long(), rate, dtype or torch.float32)
    cursors.ring_start[write] = 0
    cursors.num_committed[write] = 0
    _count_folds(cursors, read, write, count)


def _store(
    pool: Pool, cursors: Cursors, read: Tensor, write: Tensor, count: Tensor, A: Tensor | None, dtype: torch.dtype
) -> None:
    """`fold` rounded into the checkpoints of `write`; without records it is a copy of bits, of -0 and NaN too."""
    state = storage.rounded(pool, fold(pool, cursors, read, count, A=A, dtype=dtype), read, cursors)
    pool.checkpoint[write] = state.where((count > 0)[:, None, None, None], pool.checkpoint[read])
    storage.write_copy(pool, write)
    if pool.seed is not None:
        pool.seed[write] = pool.seed[read]


def _count_folds(cursors: Cursors, read: Tensor, write: Tensor, count: Tensor) -> None:
    if cursors.fold_count is not None:
        cursors.fold_count[write] = cursors.fold_count[read] + (count > 0).int()


def live_rows(cache_indices: Tensor, pad_slot_id: int, num_tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rows that are no padding and have tokens, and their slots, both [live] int64."""
    live = (cache_indices >= 0) & (cache_indices != pad_slot_id)
    rows = torch.nonzero(live if num_tokens is None else live & (num_tokens > 0)).squeeze(1)
    return rows, cache_indices[rows].long()


def fold_mask(num_committed: Tensor, num_tokens: Tensor, window: int, force_fold: Tensor | None) -> Tensor:
    """Which rows fold at the start of a step of `num_tokens` [rows] tokens, [rows] bool."""
    folds = num_committed + num_tokens > window
    return folds if force_fold is None else folds | (force_fold & (num_committed > 0))


def _places(cursors: Cursors, slots: Tensor, offset: Tensor, length: int) -> Tensor:
    """Physical ring rows of `length` records from the logical row `offset` on, [rows, length]."""
    first = cursors.ring_start[slots].long() + offset
    return (first[:, None] + torch.arange(length, device=first.device)) % cursors.replay.ring_capacity


def _records(
    pool: Pool, cursors: Cursors, slots: Tensor, count: Tensor, A: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The first `count` pending records of each slot: u [rows, HV, L, V], k [rows, HV, L, K], log-decay
    [rows, HV, L, 1 or K]. Rows of the ring beyond `count` may hold anything and come back as exact zeros."""
    length = pool.replay.window
    places = _places(cursors, slots, torch.zeros_like(count), length)
    live = torch.arange(length, device=count.device) < count[:, None]

    def load(ring: Tensor) -> Tensor:
        gathered = ring[slots[:, None], :, places].to(dtype)
        return gathered.where(live.view(*live.shape, *[1] * (gathered.dim() - 2)), 0).transpose(1, 2)

    value, key, decay = load(pool.value), load(pool.key), load(pool.decay)
    key = key.repeat_interleave(pool.layer.heads_per_group, dim=1)
    if pool.layer.recurrence != "mamba2":
        return value, key, decay if pool.layer.decays_per_channel else decay[..., None]
    if A is None:
        raise ValueError("A: expected a [HV] tensor for a Mamba-2 pool, got None; pass the A of the layer's inputs")
    dt = decay[..., None]
    return dt * value, key, dt * A.to(dtype)[:, None, None]


def _suffix_sums(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Over axis 2: the sum of the later entries for each entry, and the sum of all, kept as an axis of 1."""
    inclusive = log_decay.flip(2).cumsum(2).flip(2)
    after = torch.cat([inclusive[:, :, 1:], torch.zeros_like(inclusive[:, :, :1])], dim=2)
    return after, inclusive[:, :, :1]


def _attend(state: Tensor, pending: tuple[Tensor, Tensor, Tensor], fresh: Tokens) -> tuple[Tensor, Tensor]:
    """S q of every token and the u of its record, both [rows, HV, T, V].

    Args:
        state: [rows, HV, V, K].
        pending: see `_records`.
    """
    heads_per_group = fresh.value.shape[2] // fresh.key.shape[2]
    query, key = (t.repeat_interleave(heads_per_group, dim=2).transpose(1, 2) for t in (fresh.query, fresh.key))
    value, log_decay = fresh.value.transpose(1, 2), fresh.log_decay.transpose(1, 2)
    strength = fresh.strength.transpose(1, 2)[..., None]

    past_update, past_key, past_log_decay = pending
    after, total = _suffix_sums(past_log_decay)
    past_key = past_key * torch.exp(after)
    to_token = torch.exp(log_decay.cumsum(2))

    def read_past(probe: Tensor) -> Tensor:
        probe = probe * to_token
        scores = torch.einsum("rhsk,rhjk->rhsj", probe, past_key)
        return torch.einsum("rhsk,rhvk->rhsv", probe * torch.exp(total), state) + scores @ past_update

    between = _decay_between(log_decay)

    def scores_of(probe: Tensor) -> Tensor:
        return (probe[:, :, :, None] * key[:, :, None] * between).sum(-1)

    if fresh.delta_rule:
        system = strength * scores_of(key)  # its diagonal is not read: it counts as ones
        right = strength * (value - read_past(key))
        update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    else:
        update = strength * value
    return read_past(query) + scores_of(query) @ update, update


def _decay_between(log_decay: Tensor) -> Tensor:
    """exp of the log-decay from after token i to token s, [rows, HV, s, i, 1 or K]; 0 where i > s."""
    length = log_decay.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).tril()
    steps = log_decay[:, :, :, None].expand(-1, -1, -1, length, -1)
    exponent = steps.where(causal.tril(-1)[..., None], 0).cumsum(2)
    return torch.exp(exponent.where(causal[..., None], -torch.inf))
