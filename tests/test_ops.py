"""The verbs keep their word on every device: what they write, what they must not read, and what may not matter.

On CPU tensors the verbs run the torch twin, on CUDA tensors the kernels; each claim is checked on both. All of it runs
on one small geometry with two groups of two heads, a window of 5 in a ring of 7, and NaN in whatever is not pending
(`helpers.oracle`), so that few kernels have to be compiled. Where results may not depend on something (the order of the
rows, the slots, the width of an index, garbage), they are compared bit for bit; numbers are compared with float64
within a multiple of torch's own error (`helpers.tolerance`). Every comparison has a case that must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import replayssm
from replayssm import Cursors, GdnInputs, KdaInputs, LayerSpec, Mamba2Inputs, Pool, ReplaySpec, make_cursors, make_pool
from replayssm.reference import recurrence
from replayssm.reference import replay as reference
from tests.helpers.oracle import (
    ALL,
    BARE,
    BASE,
    F32,
    F64,
    NAMES,
    PAD,
    Scene,
    Work,
    busy_scene,
    make_inputs,
    mistakes,
    per_token,
)
from tests.helpers.tolerance import excess, same_bytes

POISONS = [float("nan"), float("inf"), -float("inf"), 1e38]
BF16, F16 = torch.bfloat16, torch.float16


def same_memory(a: Work, b: Work) -> bool:
    return all(same_bytes(x, y) for x, y in zip(a.written(), b.written(), strict=True))


# What one step does.


@pytest.mark.parametrize("layout", ["record_major", "head_major", "strided"])
def test_rows_that_read_and_rows_that_fold_share_a_step(layout: Any, device: torch.device) -> None:
    work = busy_scene(BASE, ring_layout=layout).on(device)
    assert work.pool.ring_layout == layout
    assert 0 < int((work.fold_counts() > 0).sum()) < len(work.slots)
    assert mistakes(work) == []


def slot(work: Work, row: int) -> int:
    """The slot of the row-th live row."""
    return int(work.slots[row])


def free_row(work: Work, row: int) -> int:
    """A ring row of that slot that is neither pending nor appended to."""
    return int(work.cursors.ring_start[slot(work, row)] - 1) % work.pool.replay.ring_capacity


# Of `busy_scene`: live row 0 reads nothing, 2 reads most, 1 and 4 fold a full window, 6 is forced to fold.
BEFORE: dict[str, tuple[str, Callable[[Work], object]]] = {
    "a wrong record": ("output", lambda work: work.pool.key[slot(work, 2)].mul_(1.05)),
    "a wrong decay": ("output", lambda work: work.pool.decay[slot(work, 2)].mul_(1.05)),
    "a lost record": ("output", lambda work: work.cursors.num_committed[slot(work, 2)].sub_(1)),
    "a wrong ring start": ("output", lambda work: work.cursors.ring_start[slot(work, 2)].add_(1)),
    "a wrong state": ("output", lambda work: work.pool.checkpoint[slot(work, 0), 1].mul_(1.02)),
    "a fold that did not happen": ("checkpoint", lambda work: work.force_fold.zero_()),
}
AFTER: dict[str, tuple[str, Callable[[Work, Tensor], object]]] = {
    "a wrong head": ("output", lambda work, out: out[0, 0, 3].mul_(1.03)),
    "a wrong channel": ("output", lambda work, out: out[0, 0, 3, 5].add_(0.5)),
    "an output that is not finite": ("output", lambda work, out: out[4, 0, 0, 0].fill_(float("nan"))),
    "padding that is not zero": ("padding", lambda work, out: out[2, 0, 1, 7].fill_(1e-30)),
    "a fold in 16 bits": ("checkpoint", lambda work, out: work.pool.checkpoint.copy_(work.pool.checkpoint.bfloat16())),
    "a state written by a reader": ("checkpoint", lambda work, out: work.pool.checkpoint[slot(work, 0)].mul_(1.0001)),
    "a record not appended": ("value", lambda work, out: work.pool.value[slot(work, 0)].fill_(0.5)),
    "a neighbour overwritten": ("key", lambda work, out: work.pool.key[slot(work, 0), 1, free_row(work, 0), 3].zero_()),
    "a wrong dt appended": ("decay", lambda work, out: work.pool.decay[slot(work, 0)].mul_(1.001)),
    "a cursor that moved": ("num_committed", lambda work, out: work.cursors.num_committed[slot(work, 0)].add_(1)),
}


@pytest.mark.parametrize("fault", [*BEFORE, *AFTER])
def test_the_comparison_sees(fault: str, device: torch.device) -> None:
    word, change = BEFORE.get(fault) or AFTER[fault]
    findings = mistakes(busy_scene(BASE).on(device), **{"before" if fault in BEFORE else "after": change})
    assert any(word in finding for finding in findings), findings


def test_a_16_bit_state_that_is_truncated_is_seen(device: torch.device) -> None:
    """Truncation errs twice as much as rounding: the factor for 16 bits must lie below 2."""
    case = replace(BASE, activation=F16, checkpoint=BF16)

    def truncate(work: Work, out: Tensor) -> None:
        folds, exact = work.fold_counts() > 0, scene.on(device)
        exact_pool = Pool(
            exact.pool.layer, replace(exact.pool.replay, checkpoint_dtype=F32),
            exact.pool.checkpoint.float(), *exact.pool.tensors[1:],
        )  # fmt: skip
        reference.step(
            exact_pool, exact.cursors, exact.inputs, cache_indices=exact.cache_indices, force_fold=exact.force_fold
        )
        state = exact_pool.checkpoint[work.slots[folds]]
        work.pool.checkpoint[work.slots[folds]] = (state.view(torch.int32) & -65536).view(F32).to(BF16)

    scene = busy_scene(case)
    assert mistakes(scene.on(device)) == []
    assert any("checkpoint" in finding for finding in mistakes(scene.on(device), after=truncate))


def test_a_record_may_lie_at_every_ring_row(device: torch.device) -> None:
    """Every ring start with every number of pending records, at once: no append may land on a record that is read."""
    capacity = busy_scene(BASE).replay.ring_capacity
    pairs = [(start, count) for start in range(capacity) for count in range(BASE.window + 1)]
    starts, counts = zip(*pairs, strict=True)
    scene = Scene(BASE, counts, forced=tuple(range(0, len(pairs), 5)), starts=starts)
    assert mistakes(scene.on(device)) == []


GIVEN = {
    "none": BARE,
    "D": replace(BARE, D=BF16),
    "z": replace(BARE, z=True),
    "dt_bias": replace(BARE, dt_bias=BF16),
    "dt_softplus": replace(BARE, dt_softplus=True, dt=F32),
    "all": ALL,
}


@pytest.mark.parametrize("given", GIVEN)
def test_each_input_is_optional(given: str, device: torch.device) -> None:
    """Also: dt, D and dt_bias in both of their dtypes, and (with "none") no force_fold."""
    scene = busy_scene(BASE, given=GIVEN[given], forced=None if given == "none" else (0, 8))
    assert mistakes(scene.on(device)) == []
    # Teeth: without what was given, or with what was not, the result is another.
    inputs = scene.on(device).inputs
    without: dict[str, Any] = {"D": None, "z": None, "dt_bias": None, "dt_softplus": False}
    for name in without if given == "all" else () if given == "none" else (given,):
        changed = scene.on(device)
        changed.inputs = per_token(inputs, lambda x: x.nan_to_num(0.0))._replace(**{name: without[name]})
        out = reference.step(changed.pool, changed.cursors, changed.inputs, cache_indices=changed.cache_indices)
        assert mistakes(scene.on(device), after=lambda work, got, out=out: got.copy_(out)) != []


@pytest.mark.parametrize(("activation", "checkpoint"), [(F16, F32), (BF16, F32), (F32, F16), (F16, BF16)], ids=str)
def test_each_dtype_is_itself(activation: torch.dtype, checkpoint: torch.dtype, device: torch.device) -> None:
    """A kernel that was compiled or cached for one dtype must not read another's bits."""
    scene = busy_scene(replace(BASE, activation=activation, checkpoint=checkpoint))
    assert mistakes(scene.on(device)) == []
    if activation is F16:  # teeth: the same bits read as bfloat16

        def reinterpret(work: Work) -> None:
            work.inputs = work.inputs._replace(x=work.inputs.x.view(BF16).to(F16))

        assert mistakes(scene.on(device), before=reinterpret) != []


def test_extreme_dt_stays_finite(device: torch.device) -> None:
    """Softplus is the identity above 20, so e^x cannot overflow; a dt of 0 neither decays the state nor adds to it."""
    scene = busy_scene(BASE)
    for level in (19.0, 21.0, 88.0, 3e4, -30.0, -3e4, -float("inf")):
        work = scene.on(device)
        work.inputs = work.inputs._replace(dt=torch.full_like(work.inputs.dt, level))
        assert mistakes(work) == [], level
    work = Scene(BASE, (3, 5), given=GIVEN["dt_softplus"]).on(device)
    work.inputs = work.inputs._replace(dt=torch.full_like(work.inputs.dt, 3e4))
    out, token = work.step(), work.inputs
    score = (token.C.double() * token.B.double()).sum(-1).repeat_interleave(BASE.HV // BASE.HK, -1)
    alone = score[..., None] * token.x.double() * 3e4
    # Everything before the token has decayed to nothing.
    assert excess("output", out, alone.to(out.dtype), alone, keep=(0, 2)) == []


def test_small_dt_keeps_its_digits(device: torch.device) -> None:
    """log(1 + e^x) loses all digits of e^x far below 0, where softplus is e^x."""
    work = Scene(BASE, (0, 1, 5, 2) * 4).on(device)
    levels = torch.linspace(-4, -14, work.inputs.dt.numel(), device=device)
    work.inputs = work.inputs._replace(dt=levels.to(BF16).view(work.inputs.dt.shape))
    slots = work.slots
    places = (work.cursors.ring_start + work.cursors.num_committed)[slots].long() % work.pool.replay.ring_capacity
    work.step()
    got = work.pool.decay[slots, :, places]
    exact, twin = (recurrence.mamba2_dt(work.inputs, dtype)[:, 0] for dtype in (F64, F32))
    assert excess("dt", got, twin, exact, keep=(0, 1)) == []
    naive = torch.log(1 + torch.exp(work.inputs.dt.float() + work.inputs.dt_bias))[:, 0]
    assert excess("dt", naive, twin, exact, keep=(0, 1)) != []


# What must not matter.


def test_the_order_of_the_rows_does_not_matter(device: torch.device) -> None:
    scene = busy_scene(BASE)
    plain, mixed = scene.on(device), scene.on(device)
    order = torch.randperm(len(scene.counts), device=device)
    mixed.inputs = per_token(mixed.inputs, lambda x: x[order])
    mixed.cache_indices, mixed.force_fold = mixed.cache_indices[order], mixed.force_fold[order]
    outs = plain.step(), mixed.step()
    assert same_bytes(outs[0][order], outs[1])
    assert same_memory(plain, mixed)
    assert not same_bytes(*outs)


def test_the_choice_of_slots_does_not_matter(device: torch.device) -> None:
    scene = busy_scene(BASE)
    plain, moved = scene.on(device), scene.on(device)
    order = torch.randperm(plain.pool.num_slots, device=device)  # old slot of each new one
    for new, old in zip(moved.written(), plain.written(), strict=True):
        new.copy_(old[order])
    moved.cache_indices = torch.where(moved.live, order.argsort()[moved.cache_indices], -1)
    assert same_bytes(plain.step(), moved.step())
    assert all(same_bytes(old[order], new) for new, old in zip(moved.written(), plain.written(), strict=True))
    assert not same_bytes(plain.pool.checkpoint, moved.pool.checkpoint)


def test_int32_and_int64_indices_agree(device: torch.device) -> None:
    narrow, wide = (busy_scene(BASE, index_dtype=dtype).on(device) for dtype in (torch.int32, torch.int64))
    assert same_bytes(narrow.step(), wide.step())
    assert same_memory(narrow, wide)


@pytest.mark.parametrize("poison", POISONS)
def test_what_is_not_pending_never_reaches_an_output(poison: float, device: torch.device) -> None:
    """Ring rows that are not pending, slots without a row and inputs of padding rows may hold anything: they must be
    masked before exp and before a product with 0, where infinities turn into NaN."""
    scene = busy_scene(BASE)
    clean, dirty = scene.on(device), scene.on(device)
    for tensor in (*dirty.pool.tensors, *(t for t in dirty.inputs if isinstance(t, Tensor) and t.dim() > 2)):
        tensor.masked_fill_(tensor.isnan(), poison)  # the scene marks all of this with NaN
    for tensor in clean.pool.tensors:
        tensor.nan_to_num_(0.0)
    clean.inputs = per_token(clean.inputs, lambda x: x.nan_to_num(0.0))
    outs = clean.step(), dirty.step()
    assert bool(torch.isfinite(outs[0]).all())
    assert same_bytes(*outs)
    assert same_bytes(clean.pool.checkpoint[clean.slots], dirty.pool.checkpoint[dirty.slots])

    dirty = scene.on(device)  # teeth: a pending record does reach the output of its row
    row = int((dirty.cursors.num_committed[dirty.slots] == 4).nonzero()[0])
    slot = dirty.slots[row]
    dirty.pool.value[slot, :, dirty.cursors.ring_start[slot].long()] = poison
    assert not same_bytes(dirty.step(), outs[0])


def test_inputs_may_be_views_of_one_projection(device: torch.device) -> None:
    """x, B, C, z and dt as a layer has them: slices of the rows that its input projection returns."""
    packed = busy_scene(BASE).on(device)
    strided, pieces, rows = packed.clone(), packed.inputs, len(packed.cache_indices)
    widths = {"z": BASE.HV * BASE.V, "x": BASE.HV * BASE.V, "B": BASE.HK * BASE.K, "C": BASE.HK * BASE.K, "dt": BASE.HV}
    width = -(-sum(widths.values()) // 8) * 8
    projection = torch.zeros(rows, 1, width, dtype=BASE.activation, device=device)
    views, at = {}, 0
    for name, size in widths.items():
        view = projection[..., at : at + size]
        views[name] = view if name == "dt" else view.unflatten(-1, getattr(pieces, name).shape[2:])
        views[name].copy_(getattr(pieces, name))
        at += size
    strided.inputs = pieces._replace(**views)
    wide = torch.full((rows, 3, BASE.HV, BASE.V), 7.0, dtype=BASE.activation, device=device)
    assert not any(views[name].is_contiguous() for name in ("z", "x", "B", "C", "dt"))
    assert same_bytes(packed.step(), strided.step(out=wide[:, 1:2]))
    assert same_memory(packed, strided)
    assert bool((wide[:, ::2] == 7.0).all())


def test_out_is_written_and_returned_and_defaults_do_not_alias(device: torch.device) -> None:
    scene = busy_scene(BASE)
    given = torch.full_like(scene.on(device).inputs.x, float("nan"))
    assert scene.on(device).step(out=given) is given
    work = scene.on(device)
    first = work.step()
    kept = first.clone()
    work.inputs = work.inputs._replace(x=-work.inputs.x)
    second = work.step()
    assert first.data_ptr() != second.data_ptr()
    assert same_bytes(first, kept)
    assert same_bytes(first, given)
    assert not same_bytes(first, second)
    assert first.dtype is BASE.activation
    assert first.shape == work.inputs.x.shape


# Padding.


@pytest.mark.parametrize("pad", [-1, 0, 3])
def test_padding_rows_write_zeros_and_nothing_else(pad: int, device: torch.device) -> None:
    """Padding may be -1, another negative number, or a slot that an engine keeps for it, such as slot 0; rows repeat
    it. Its output is zero, and so finite, whatever that slot and the row's inputs hold."""
    plain = Scene(BASE, (2, 5, 4, 1)).on(device)
    homes, slots = torch.tensor([1, 2, 4, 5], device=device), plain.slots
    moved = plain.clone()
    for tensor, old in zip(moved.written(), plain.written(), strict=True):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -7)
        tensor[homes] = old[slots]
    moved.cache_indices = homes
    padded = moved.clone()
    rows = torch.tensor([0, 0, 1, 2, 2, 3], device=device)
    padding = torch.tensor([False, True, False, False, True, False], device=device)
    padded.inputs = per_token(
        plain.inputs, lambda x: x[rows].masked_fill(padding.view(-1, *[1] * (x.dim() - 1)), float("-inf"))
    )
    padded.force_fold, padded.pad_slot_id = padding, pad
    padded.cache_indices = torch.tensor([1, pad, 2, 4, -7, 5], device=device)
    want, got = moved.step(), padded.step(out=torch.full_like(padded.inputs.x, float("nan")))
    moved.commit()
    padded.commit(num_accepted=torch.where(padding, -9, 1).int())
    assert bool((got[padding] == 0).all())
    assert same_bytes(got[~padding], want)
    assert same_memory(padded, moved)


def test_a_batch_of_padding_writes_zeros_only(device: torch.device) -> None:
    work = Scene(BASE, (2, 5)).on(device)
    before = work.clone()
    work.cache_indices = torch.full_like(work.cache_indices, -1)
    out = torch.full_like(work.inputs.x, float("nan"))
    work.step(out=out)
    work.commit()
    assert bool((out == 0).all())
    assert same_memory(work, before)


# Commit and rollback.


def test_rejected_tokens_leave_no_trace(device: torch.device) -> None:
    """A token that is not accepted, then another: as if the first had never been."""
    scene = Scene(BASE, (0, 2, 4, 5))  # the last row folds
    taken, retried = scene.on(device), scene.on(device)
    other = per_token(taken.inputs, lambda x: x.flip(0))
    none = torch.zeros(4, dtype=torch.int32, device=device)
    retried.inputs = per_token(other, lambda x: x * 2)
    retried.step()
    retried.commit(num_accepted=none)
    assert retried.cursors.num_committed[retried.slots].tolist() == [0, 2, 4, 0]
    outs = []
    for work in (taken, retried):
        work.inputs = scene.on(device).inputs
        outs.append(work.step())
        work.commit(num_accepted=none + 1)
    reads = torch.tensor([0, 1, 2], device=device)
    assert same_bytes(outs[0][reads], outs[1][reads])
    assert torch.equal(taken.cursors.num_committed, retried.cursors.num_committed)
    assert torch.equal(taken.cursors.ring_start, retried.cursors.ring_start)
    live = taken.slots[reads]
    assert all(same_bytes(a[live], b[live]) for a, b in zip(taken.written(), retried.written(), strict=True))
    assert not same_bytes(taken.inputs.x, retried.step())


# Slots come and go.


def decode(work: Work, slots: Tensor, inputs: Mamba2Inputs, steps: int = 3) -> Tensor:
    """Outputs of a few tokens of some slots."""
    work.cache_indices, work.force_fold, outs = slots, torch.zeros_like(slots, dtype=torch.bool), []
    for _ in range(steps):
        work.inputs = inputs
        outs.append(work.step().clone())
        work.commit()
    return torch.cat(outs, 1)


def tokens(rows: int, device: torch.device) -> Mamba2Inputs:
    inputs = make_inputs(BASE, rows, torch.Generator().manual_seed(9))
    return inputs._replace(**{n: t.to(device) for n, t in inputs._asdict().items() if isinstance(t, Tensor)})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copied_slots_decode_as_their_sources(dtype: torch.dtype, device: torch.device) -> None:
    """Pending records move with the checkpoint: a copy of the checkpoint alone is another state."""
    for layout in ("record_major", "head_major"):
        work = Scene(BASE, (2, 5, 4, 0), ring_layout=layout).on(device)
        source, inputs = work.slots, tokens(4, device)
        free = torch.tensor([s for s in range(6) if s not in source.tolist()], device=device)
        expected = decode(work.clone(), source[:2], per_token(inputs, lambda x: x[:2]))
        before = work.clone()
        replayssm.copy_slots(work.cursors, source[:2].to(dtype), free.to(dtype), pools=[work.pool])
        assert all(same_bytes(new[free], new[source[:2]]) for new in work.written())
        others = torch.tensor([s for s in range(6) if s not in free.tolist()], device=device)
        assert all(same_bytes(n[others], o[others]) for n, o in zip(work.written(), before.written(), strict=True))
        got = decode(work, free, per_token(inputs, lambda x: x[:2]))
        assert same_bytes(got, expected)

        stale = before.clone()
        replayssm.copy_slots(stale.cursors, source[:2], free, pools=[stale.pool])
        stale.cursors.num_committed[free] = 0
        assert not same_bytes(decode(stale, free, per_token(inputs, lambda x: x[:2])), expected)


def test_a_step_without_rows_does_nothing(device: torch.device) -> None:
    work = busy_scene(BASE).on(device)
    before = work.clone()
    none = work.cache_indices[:0]
    inputs = work.inputs._replace(**{name: getattr(work.inputs, name)[:0] for name in ("x", "dt", "B", "C", "z")})
    out = replayssm.step(work.pool, work.cursors, inputs, cache_indices=none)
    replayssm.commit(work.cursors, cache_indices=none)
    assert out.shape == (0, *work.inputs.x.shape[1:])
    for ours, theirs in zip(work.pool.tensors, before.pool.tensors, strict=True):
        assert same_bytes(ours, theirs)
    assert torch.equal(work.cursors.num_committed, before.cursors.num_committed)


def test_pools_of_other_slots_are_refused(device: torch.device) -> None:
    work = busy_scene(BASE).on(device)
    other = make_pool(work.pool.layer, work.pool.replay, work.pool.num_slots + 1, device=device)
    slots = torch.tensor([0], device=device)
    for call in (
        lambda: replayssm.reset(work.cursors, slots, pools=[work.pool, other]),
        lambda: replayssm.copy_slots(work.cursors, slots, slots + 1, pools=[work.pool, other]),
    ):
        with pytest.raises(ValueError, match=r"pools\[1\]: expected \d+ slots"):
            call()


def test_slots_may_be_swapped_by_one_copy(device: torch.device) -> None:
    work = Scene(BASE, (2, 5)).on(device)
    before, slots = work.clone(), work.slots
    replayssm.copy_slots(work.cursors, slots, slots.flip(0), pools=iter([work.pool]))
    assert all(same_bytes(n[slots], o[slots.flip(0)]) for n, o in zip(work.written(), before.written(), strict=True))


def test_a_reset_slot_decodes_as_a_new_one(device: torch.device) -> None:
    """A recycled slot holds its last tenant's cursors, records and state; none of it may reach the next tenant."""
    work = Scene(BASE, (3, 5, 1)).on(device)
    slots, inputs = work.slots, tokens(3, device)
    for ring in work.pool.tensors:
        ring[slots[:2]] = float("nan")
    work.cursors.ring_start[slots[:2]] = 6
    before = work.clone()
    replayssm.reset(work.cursors, slots[:2].int(), pools=[work.pool])
    assert bool((work.cursors.num_committed[slots[:2]] == 0).all())
    kept = torch.tensor([s for s in range(5) if s not in slots[:2].tolist()], device=device)
    assert all(same_bytes(n[kept], o[kept]) for n, o in zip(work.written(), before.written(), strict=True))

    fresh = Work(
        make_pool(BASE.layer, work.pool.replay, 5, device=device),
        make_cursors(work.pool.replay, 5, device=device),
        inputs,
        slots,
    )
    got = decode(work, slots[:2], per_token(inputs, lambda x: x[:2]))
    assert same_bytes(got, decode(fresh, slots[:2], per_token(inputs, lambda x: x[:2])))

    replayssm.reset(before.cursors, slots[:2])  # teeth: the checkpoint is the caller's without `pools`
    assert decode(before, slots[:2], per_token(inputs, lambda x: x[:2])).isnan().any()


# The other recurrences and more tokens a step.


def gdn_or_kda(kind: str, device: torch.device) -> tuple[Pool, Cursors, GdnInputs | KdaInputs]:
    spec = ReplaySpec(4, 3, activation_dtype=F32)
    pool = make_pool(LayerSpec(kind, 4, 2, 8, 16), spec, 3, device=device)  # type: ignore[arg-type]
    q, k, v, gate = (torch.randn(2, 3, *s, device=device) for s in ((2, 16), (2, 16), (4, 8), (4, 16)))
    rates, b = torch.linspace(-1, 1, 4, device=device), torch.randn(2, 3, 4, device=device)
    if kind == "gdn":
        return pool, make_cursors(spec, 3, device=device), GdnInputs(q, k, v, b, b, rates, rates)
    return pool, make_cursors(spec, 3, device=device), KdaInputs(q, k, v, gate, b, rates, gate[0, 0])


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_other_recurrences_run_where_a_path_exists(kind: str, device: torch.device) -> None:
    pool, cursors, inputs = gdn_or_kda(kind, device)
    slots = torch.tensor([2, 0], device=device)
    before = [t.clone() for t in pool.tensors]
    if device.type == "cuda":
        with pytest.raises(NotImplementedError, match="inputs: CUDA kernels exist for Mamba2Inputs"):
            replayssm.step(pool, cursors, inputs, cache_indices=slots)
        assert all(same_bytes(a, b) for a, b in zip(before, pool.tensors, strict=True))
        return
    out = replayssm.step(pool, cursors, inputs, cache_indices=slots)
    exact, twin = (recurrence.run(inputs, torch.zeros(2, 4, 8, 16), dtype)[0] for dtype in (F64, F32))
    assert excess("output", out, twin, exact, keep=(0, 2)) == []
    assert excess("output", out.flip(0), twin, exact, keep=(0, 2)) != []


def test_several_tokens_run_where_a_path_exists(device: torch.device) -> None:
    spec = ReplaySpec(4, 2)
    pool, cursors = make_pool(BASE.layer, spec, 3, device=device), make_cursors(spec, 3, device=device)
    inputs = per_token(tokens(2, device), lambda x: torch.cat([x, -x], 1))
    slots = torch.tensor([2, 0], device=device)
    if device.type == "cuda":
        with pytest.raises(NotImplementedError, match=r"inputs\.x: .* T = 2"):
            replayssm.step(pool, cursors, inputs, cache_indices=slots)
        assert not pool.value.any()
        return
    out = replayssm.step(pool, cursors, inputs, cache_indices=slots)
    replayssm.commit(cursors, cache_indices=slots, num_draft=2, num_accepted=torch.tensor([2, 1], dtype=torch.int32))
    exact, twin = (recurrence.run(inputs, torch.zeros(2, *pool.checkpoint.shape[1:]), dtype)[0] for dtype in (F64, F32))
    assert excess("output", out, twin.to(out.dtype), exact, keep=(0, 1, 2)) == []
    assert cursors.num_committed.tolist() == [1, 0, 2]


def test_names_cover_a_pool() -> None:
    """`mistakes` compares every tensor of a pool: a new one must be added to it."""
    assert {n for n, t in vars(busy_scene(BASE).on("cpu").pool).items() if isinstance(t, Tensor)} == set(NAMES)
    assert PAD in busy_scene(BASE).counts
