"""The verbs keep their word on every device: what they write, what they must not read, and what may not matter.

On CPU tensors the verbs run the torch twin, on CUDA tensors the kernels; each claim is checked on both, for every
recurrence that runs there. All of it runs on one small geometry with two groups of two heads, a window of 5 in a ring
of 7, and NaN in whatever is not pending (`helpers.oracle`), so that few kernels have to be compiled. Where results may
not depend on something (the order of the rows, the slots, the width of an index, garbage), they are compared bit for
bit; numbers are compared with float64 within a multiple of torch's own error (`helpers.tolerance`). Every comparison
has a case that must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import replayssm
from replayssm import Pool, make_cursors, make_pool
from replayssm.inputs import Inputs
from replayssm.reference import recurrence
from replayssm.reference import replay as reference
from replayssm.spec import RECURRENCES, Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import (
    BARE,
    AnyGiven,
    DeltaGiven,
    base_of,
    decay_record,
    part,
    tensors_of,
    tokens_of,
    with_parts,
)
from tests.helpers.oracle import (
    ALL,
    BASES,
    F32,
    F64,
    NAMES,
    PAD,
    Scene,
    Work,
    busy_scene,
    in_float64,
    make_inputs,
    mistakes,
    per_token,
)
from tests.helpers.tolerance import excess, same_bytes

POISONS = [float("nan"), float("inf"), -float("inf"), 1e38]
BF16, F16 = torch.bfloat16, torch.float16
one_and_several = pytest.mark.parametrize("num_draft", [1, 3])


@pytest.fixture(params=RECURRENCES)
def base(request: pytest.FixtureRequest, device: torch.device) -> Case:
    """The geometry of these tests, of each recurrence that runs on the device."""
    return base_of(request.param, device)


def same_memory(a: Work, b: Work) -> bool:
    return all(same_bytes(x, y) for x, y in zip(a.written(), b.written(), strict=True))


# What one step does.


@pytest.mark.parametrize("layout", ["record_major", "head_major", "strided"])
def test_rows_that_read_and_rows_that_fold_share_a_step(layout: Any, base: Case, device: torch.device) -> None:
    work = busy_scene(base, ring_layout=layout).on(device)
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
    "a wrong decay appended": ("decay", lambda work, out: work.pool.decay[slot(work, 0)].mul_(1.001)),
    "a cursor that moved": ("num_committed", lambda work, out: work.cursors.num_committed[slot(work, 0)].add_(1)),
}


@pytest.mark.parametrize("fault", [*BEFORE, *AFTER])
def test_the_comparison_sees(fault: str, base: Case, device: torch.device) -> None:
    word, change = BEFORE.get(fault) or AFTER[fault]
    findings = mistakes(busy_scene(base).on(device), **{"before" if fault in BEFORE else "after": change})
    assert any(word in finding for finding in findings), findings


def test_a_16_bit_state_that_is_truncated_is_seen(base: Case, device: torch.device) -> None:
    """Truncation errs twice as much as rounding: the factor for 16 bits must lie below 2."""
    case = replace(base, activation=F16, checkpoint=BF16)

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


def test_a_record_may_lie_at_every_ring_row(base: Case, device: torch.device) -> None:
    """Every ring start with every number of pending records, at once: no append may land on a record that is read."""
    capacity = busy_scene(base).replay.ring_capacity
    pairs = [(start, count) for start in range(capacity) for count in range(base.window + 1)]
    starts, counts = zip(*pairs, strict=True)
    scene = Scene(base, counts, forced=tuple(range(0, len(pairs), 5)), starts=starts)
    assert mistakes(scene.on(device)) == []


GIVEN: dict[tuple[Recurrence, str], AnyGiven] = {
    ("mamba2", "none"): BARE,
    ("mamba2", "D"): replace(BARE, D=BF16),
    ("mamba2", "z"): replace(BARE, z=True),
    ("mamba2", "dt_bias"): replace(BARE, dt_bias=BF16),
    ("mamba2", "dt_softplus"): replace(BARE, dt_softplus=True, dt=F32),
    ("mamba2", "all"): ALL,
    ("gdn", "none"): DeltaGiven(),
    ("gdn", "scale"): DeltaGiven(scale=0.25, gate=F32),
    ("gdn", "l2norm_eps"): DeltaGiven(l2norm_eps=None, beta=F32),
    ("gdn", "all"): DeltaGiven(0.25, 9.0, True, gate=F32, beta=F32),
    ("kda", "none"): DeltaGiven(),
    ("kda", "lower_bound"): DeltaGiven(lower_bound=-5.0, gate=F32),
    ("kda", "all"): DeltaGiven(0.25, None, lower_bound=-5.0, gate=F32, beta=F32),
}
WITHOUT: dict[Recurrence, dict[str, Any]] = {
    "mamba2": {"D": None, "z": None, "dt_bias": None, "dt_softplus": False},
    "gdn": {"scale": None, "l2norm_eps": 4.0},
    "kda": {"scale": None, "l2norm_eps": 4.0, "lower_bound": None},
}


@pytest.mark.parametrize(("kind", "given"), GIVEN)
def test_each_input_is_optional(kind: Recurrence, given: str, device: torch.device) -> None:
    """Also: each scalar in both of its dtypes, and (with "none") no force_fold. A gate that misses its bound, or a norm
    that puts its epsilon elsewhere, is another function that tests of shapes and finiteness do not notice."""
    base, how = base_of(kind, device), GIVEN[kind, given]
    scene = busy_scene(base, given=how, forced=None if given == "none" else (0, 8))
    assert mistakes(scene.on(device)) == []
    # Teeth: without what was given, or with what was not, the result is another.
    inputs = scene.on(device).inputs
    for name in WITHOUT[kind] if given == "all" else () if given == "none" else (given,):
        changed = scene.on(device)
        changed.inputs = per_token(inputs, lambda x: x.nan_to_num(0.0))._replace(**{name: WITHOUT[kind][name]})
        out = reference.step(changed.pool, changed.cursors, changed.inputs, cache_indices=changed.cache_indices)
        assert mistakes(scene.on(device), after=lambda work, got, out=out: got.copy_(out)) != [], name


def test_beta_is_rounded_where_an_engine_rounds_it(device: torch.device) -> None:
    """Some engines compute sigmoid(b) in the dtype of b, others in float32: half a unit of it in every record, too
    little for a bound on 16-bit records to see. From an empty state u = beta v, so its mean over the channels tells."""
    base = base_of("gdn", device)
    every = torch.linspace(-3, 3, 385).bfloat16().unique()
    plain = torch.sigmoid(every.float())
    shift = plain.bfloat16().float() / plain - 1
    chosen = every[shift.abs().argsort(descending=True)[: base.HV]].to(device)  # rounding moves these betas most
    for rounds in (False, True):
        work = Scene(base, (0,) * 64, given=DeltaGiven(round_beta=rounds), starts=(0,) * 64).on(device)
        work.pool.checkpoint[work.slots] = 0
        work.inputs = work.inputs._replace(b=chosen.expand_as(work.inputs.b).contiguous())
        assert mistakes(work) == []
        u, v = work.pool.value[work.slots, :, 0].double(), work.inputs.v[:, 0].double()
        got = (u * v).sum((0, 2)) / v.square().sum((0, 2))
        wanted, other = torch.sigmoid(chosen.float()), torch.sigmoid(chosen.float()).bfloat16().float()
        wanted, other = (other, wanted) if rounds else (wanted, other)
        assert bool(((got - wanted).abs() < (got - other).abs() / 2).all()), rounds


@pytest.mark.parametrize(("activation", "checkpoint"), [(F16, F32), (BF16, F32), (F32, F16), (F16, BF16)], ids=str)
def test_each_dtype_is_itself(
    activation: torch.dtype, checkpoint: torch.dtype, base: Case, device: torch.device
) -> None:
    """A kernel that was compiled or cached for one dtype must not read another's bits."""
    scene = busy_scene(replace(base, activation=activation, checkpoint=checkpoint))
    assert mistakes(scene.on(device)) == []
    if activation is F16:  # teeth: the same bits read as bfloat16

        def reinterpret(work: Work) -> None:
            work.inputs = with_parts(work.inputs, value=part(work.inputs, "value").view(BF16).to(F16))

        assert mistakes(scene.on(device), before=reinterpret) != []


def test_extreme_gates_stay_finite(base: Case, device: torch.device) -> None:
    """Softplus is the identity above 20, so e^x cannot overflow; far below 0 a token decays nothing."""
    scene = busy_scene(base)
    for level in (19.0, 21.0, 88.0, 3e4, -30.0, -3e4, -float("inf")):
        work = scene.on(device)
        work.inputs = with_parts(work.inputs, gate=torch.full_like(part(work.inputs, "gate"), level))
        assert mistakes(work) == [], level
    work = Scene(base, (3, 5)).on(device)
    work.inputs = with_parts(work.inputs, gate=torch.full_like(part(work.inputs, "gate"), 3e4))
    empty = torch.zeros(2, *work.pool.checkpoint.shape[1:], device=device)
    out, (exact, twin) = work.step(), (recurrence.run(work.inputs, empty, dtype)[0] for dtype in (F64, F32))
    # Everything before the token has decayed to nothing.
    assert excess("output", out, twin.to(out.dtype), exact, keep=(0, 2)) == []


@one_and_several
@pytest.mark.parametrize("rate", [0.0, 3.0, 6.0, 80.0])
def test_a_strong_decay_neither_overflows_nor_leaks(
    rate: float, num_draft: int, base: Case, device: torch.device
) -> None:
    """Heads with a large rate: a window's log-decays sum far below -88, where exp of the sum is 0 and exp of its
    opposite infinite, so a decay between two records that is a quotient or a product of prefixes is NaN. The digits of
    a record are compared where they matter: a log-decay of -1e34 need not have them all."""
    steep = torch.linspace(0.9 * rate, rate, base.HV)
    for which, shift in (("pending", 0.0), ("token", 4.0)):
        work = busy_scene(replace(base, T=num_draft)).on(device)
        work.inputs = with_parts(work.inputs, gate=part(work.inputs, "gate") + shift)
        if base.recurrence == "mamba2":
            work.inputs = with_parts(work.inputs, rate=-steep.exp().to(device))
        else:
            work.inputs = with_parts(work.inputs, rate=steep.to(device))
            work.pool.decay.mul_(steep.exp().to(device).view(-1, *[1] * (work.pool.decay.dim() - 2)))
        found = mistakes(work)
        assert [one for one in found if rate < 80 or "decay: the appended record: error" not in one] == [], which


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_an_infinite_decay_forgets_everything_before_it(kind: Recurrence, device: torch.device) -> None:
    """A record whose decay is -inf: differences of prefixes would be inf - inf, and a masked product 0 * inf."""
    scene = busy_scene(base_of(kind, device))
    work, row = scene.on(device), 2
    middle = int(work.cursors.ring_start[slot(work, row)] + 2) % work.pool.replay.ring_capacity
    work.pool.decay[slot(work, row), :, middle] = -float("inf")
    forgotten = work.clone()
    forgotten.pool.checkpoint[slot(work, row)] = 7.0
    assert mistakes(work) == mistakes(forgotten) == []


@one_and_several
def test_small_gates_keep_their_digits(num_draft: int, base: Case, device: torch.device) -> None:
    """One statement of the gate, in every element: log(1 + e^x) loses all digits of e^x far below 0, where softplus is
    e^x, and a gate that differs by a rounding drifts for as long as the sequence runs."""
    work = Scene(replace(base, T=num_draft), (0, 1, 5, 2) * 4).on(device)
    gate = part(work.inputs, "gate")
    levels = torch.linspace(-4, -14, gate.numel(), device=device)
    work.inputs = with_parts(work.inputs, gate=levels.to(BF16).view(gate.shape))
    places = work.places()
    work.step()
    got = work.pool.decay[work.slots[:, None], :, places]
    exact, twin = (decay_record(work.inputs, dtype) for dtype in (F64, F32))
    keep = tuple(range(got.dim()))
    assert excess("decay", got, twin, exact, keep) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "softplus", lambda x: torch.log(1 + torch.exp(x)))
        naive = decay_record(work.inputs, F32)
    assert excess("decay", naive, twin, exact, keep) != []


# What must not matter.


def test_the_order_of_the_rows_does_not_matter(base: Case, device: torch.device) -> None:
    scene = busy_scene(base)
    plain, mixed = scene.on(device), scene.on(device)
    order = torch.randperm(len(scene.counts), device=device)
    mixed.inputs = per_token(mixed.inputs, lambda x: x[order])
    mixed.cache_indices, mixed.force_fold = mixed.cache_indices[order], mixed.force_fold[order]
    outs = plain.step(), mixed.step()
    assert same_bytes(outs[0][order], outs[1])
    assert same_memory(plain, mixed)
    assert not same_bytes(*outs)


def test_the_choice_of_slots_does_not_matter(base: Case, device: torch.device) -> None:
    scene = busy_scene(base)
    plain, moved = scene.on(device), scene.on(device)
    order = torch.randperm(plain.pool.num_slots, device=device)  # old slot of each new one
    for new, old in zip(moved.written(), plain.written(), strict=True):
        new.copy_(old[order])
    moved.cache_indices = torch.where(moved.live, order.argsort()[moved.cache_indices], -1)
    assert same_bytes(plain.step(), moved.step())
    assert all(same_bytes(old[order], new) for new, old in zip(moved.written(), plain.written(), strict=True))
    assert not same_bytes(plain.pool.checkpoint, moved.pool.checkpoint)


def test_int32_and_int64_indices_agree(base: Case, device: torch.device) -> None:
    narrow, wide = (busy_scene(base, index_dtype=dtype).on(device) for dtype in (torch.int32, torch.int64))
    assert same_bytes(narrow.step(), wide.step())
    assert same_memory(narrow, wide)


@pytest.mark.parametrize("poison", POISONS)
def test_what_is_not_pending_never_reaches_an_output(poison: float, base: Case, device: torch.device) -> None:
    """Ring rows that are not pending, slots without a row and inputs of padding rows may hold anything: they must be
    masked before exp and before a product with 0, where infinities turn into NaN."""
    scene = busy_scene(base)
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


def test_inputs_may_be_views_of_one_projection(base: Case, device: torch.device) -> None:
    """As a layer has them: slices of the rows that its input projection returns."""
    packed = busy_scene(base).on(device)
    strided, rows = packed.clone(), len(packed.cache_indices)
    pieces = dict(sorted(tokens_of(packed.inputs).items(), key=lambda item: -item[1].dim()))  # scalars last
    widths = {name: piece[0, 0].numel() for name, piece in pieces.items()}
    projection = torch.zeros(rows, 1, -(-sum(widths.values()) // 8) * 8, dtype=base.activation, device=device)
    views, at = {}, 0
    for name, size in widths.items():
        views[name] = projection[..., at : at + size].unflatten(-1, pieces[name].shape[2:])
        views[name].copy_(pieces[name])
        at += size
    strided.inputs = packed.inputs._replace(**views)
    wide = torch.full((rows, 3, base.HV, base.V), 7.0, dtype=base.activation, device=device)
    assert len(views) == 5
    assert not any(view.is_contiguous() for view in views.values())
    assert same_bytes(packed.step(), strided.step(out=wide[:, 1:2]))
    assert same_memory(packed, strided)
    assert bool((wide[:, ::2] == 7.0).all())


def test_out_is_written_and_returned_and_defaults_do_not_alias(base: Case, device: torch.device) -> None:
    scene = busy_scene(base)
    given = torch.full_like(part(scene.on(device).inputs, "value"), float("nan"))
    assert scene.on(device).step(out=given) is given
    work = scene.on(device)
    first = work.step()
    kept = first.clone()
    work.inputs = with_parts(work.inputs, value=-part(work.inputs, "value"))
    second = work.step()
    assert first.data_ptr() != second.data_ptr()
    assert same_bytes(first, kept)
    assert same_bytes(first, given)
    assert not same_bytes(first, second)
    assert first.dtype is base.activation
    assert first.shape == part(work.inputs, "value").shape


# Padding.


@pytest.mark.parametrize("pad", [-1, 0, 3])
def test_padding_rows_write_zeros_and_nothing_else(pad: int, base: Case, device: torch.device) -> None:
    """Padding may be -1, another negative number, or a slot that an engine keeps for it, such as slot 0; rows repeat
    it. Its output is zero, and so finite, whatever that slot and the row's inputs hold."""
    plain = Scene(base, (2, 5, 4, 1)).on(device)
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
    want, got = moved.step(), padded.step(out=torch.full_like(part(padded.inputs, "value"), float("nan")))
    moved.commit()
    padded.commit(num_accepted=torch.where(padding, -9, 1).int())
    assert bool((got[padding] == 0).all())
    assert same_bytes(got[~padding], want)
    assert same_memory(padded, moved)


def test_a_batch_of_padding_writes_zeros_only(base: Case, device: torch.device) -> None:
    work = Scene(base, (2, 5)).on(device)
    before = work.clone()
    work.cache_indices = torch.full_like(work.cache_indices, -1)
    out = torch.full_like(part(work.inputs, "value"), float("nan"))
    work.step(out=out)
    work.commit()
    assert bool((out == 0).all())
    assert same_memory(work, before)


# Commit and rollback.


def test_rejected_tokens_leave_no_trace(base: Case, device: torch.device) -> None:
    """A token that is not accepted, then another: as if the first had never been."""
    scene = Scene(base, (0, 2, 4, 5))  # the last row folds
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
    assert not same_bytes(part(taken.inputs, "value"), retried.step())


# Slots come and go.


def decode(work: Work, slots: Tensor, inputs: Inputs, steps: int = 3) -> Tensor:
    """Outputs of a few tokens of some slots."""
    work.cache_indices, work.force_fold, outs = slots, torch.zeros_like(slots, dtype=torch.bool), []
    for _ in range(steps):
        work.inputs = inputs
        outs.append(work.step().clone())
        work.commit()
    return torch.cat(outs, 1)


def tokens(base: Case, rows: int, device: torch.device) -> Inputs:
    inputs = make_inputs(base, rows, torch.Generator().manual_seed(9))
    return inputs._replace(**{name: t.to(device) for name, t in tensors_of(inputs).items()})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copied_slots_decode_as_their_sources(dtype: torch.dtype, base: Case, device: torch.device) -> None:
    """Pending records move with the checkpoint: a copy of the checkpoint alone is another state."""
    for layout in ("record_major", "head_major"):
        work = Scene(base, (2, 5, 4, 0), ring_layout=layout).on(device)
        source, inputs = work.slots, tokens(base, 4, device)
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


def test_a_step_without_rows_does_nothing(base: Case, device: torch.device) -> None:
    work = busy_scene(base).on(device)
    before = work.clone()
    none = work.cache_indices[:0]
    inputs = per_token(work.inputs, lambda x: x[:0])
    out = replayssm.step(work.pool, work.cursors, inputs, cache_indices=none)
    replayssm.commit(work.cursors, cache_indices=none)
    assert out.shape == (0, *part(work.inputs, "value").shape[1:])
    for ours, theirs in zip(work.pool.tensors, before.pool.tensors, strict=True):
        assert same_bytes(ours, theirs)
    assert torch.equal(work.cursors.num_committed, before.cursors.num_committed)


def test_pools_of_other_slots_are_refused(base: Case, device: torch.device) -> None:
    work = busy_scene(base).on(device)
    other = make_pool(work.pool.layer, work.pool.replay, work.pool.num_slots + 1, device=device)
    slots = torch.tensor([0], device=device)
    for call in (
        lambda: replayssm.reset(work.cursors, slots, pools=[work.pool, other]),
        lambda: replayssm.copy_slots(work.cursors, slots, slots + 1, pools=[work.pool, other]),
    ):
        with pytest.raises(ValueError, match=r"pools\[1\]: expected \d+ slots"):
            call()


def test_slots_may_be_swapped_by_one_copy(base: Case, device: torch.device) -> None:
    work = Scene(base, (2, 5)).on(device)
    before, slots = work.clone(), work.slots
    replayssm.copy_slots(work.cursors, slots, slots.flip(0), pools=iter([work.pool]))
    assert all(same_bytes(n[slots], o[slots.flip(0)]) for n, o in zip(work.written(), before.written(), strict=True))


def test_a_reset_slot_decodes_as_a_new_one(base: Case, device: torch.device) -> None:
    """A recycled slot holds its last tenant's cursors, records and state; none of it may reach the next tenant."""
    work = Scene(base, (3, 5, 1)).on(device)
    slots, inputs = work.slots, tokens(base, 3, device)
    for ring in work.pool.tensors:
        ring[slots[:2]] = float("nan")
    work.cursors.ring_start[slots[:2]] = 6
    before = work.clone()
    replayssm.reset(work.cursors, slots[:2].int(), pools=[work.pool])
    assert bool((work.cursors.num_committed[slots[:2]] == 0).all())
    kept = torch.tensor([s for s in range(5) if s not in slots[:2].tolist()], device=device)
    assert all(same_bytes(n[kept], o[kept]) for n, o in zip(work.written(), before.written(), strict=True))

    fresh = Work(
        make_pool(base.layer, work.pool.replay, 5, device=device),
        make_cursors(work.pool.replay, 5, device=device),
        inputs,
        slots,
    )
    got = decode(work, slots[:2], per_token(inputs, lambda x: x[:2]))
    assert same_bytes(got, decode(fresh, slots[:2], per_token(inputs, lambda x: x[:2])))

    replayssm.reset(before.cursors, slots[:2])  # teeth: the checkpoint is the caller's without `pools`
    assert decode(before, slots[:2], per_token(inputs, lambda x: x[:2])).isnan().any()


# What only the torch twin does: heads of a size that no kernel has.


def drafts(case: Case, device: torch.device, rows: int = 2) -> Inputs:
    """T tokens a row, of which the second half is another than the first."""
    inputs = tokens(replace(case, T=1), rows, device)
    return per_token(inputs, lambda x: torch.cat([x * (-1) ** t for t in range(case.T)], 1))


@pytest.mark.parametrize("kind", RECURRENCES)
@pytest.mark.parametrize("draft", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 48])
def test_what_has_no_kernel_runs_on_a_cpu(kind: Recurrence, draft: int, head_dim: int, device: torch.device) -> None:
    case = replace(BASES[kind], V=head_dim, T=draft, activation=F32)
    pool, cursors = (make(*a, 3, device=device) for make, a in ((make_pool, (case.layer, case.replay)),
                                                                (make_cursors, (case.replay,))))  # fmt: skip
    inputs, slots = drafts(case, device), torch.tensor([2, 0], device=device)
    before = [t.clone() for t in pool.tensors]
    if device.type == "cuda" and head_dim == 48:
        with pytest.raises(NotImplementedError, match="head_dim: supported are 64, 80 and 128, got 48"):
            replayssm.step(pool, cursors, inputs, cache_indices=slots)
        assert all(same_bytes(a, b) for a, b in zip(before, pool.tensors, strict=True))
        return
    out = replayssm.step(pool, cursors, inputs, cache_indices=slots)
    exact, twin = (recurrence.run(inputs, torch.zeros_like(pool.checkpoint[:2]), dtype)[0] for dtype in (F64, F32))
    assert excess("output", out, twin, exact, keep=(0, 1, 2)) == []
    assert excess("output", out.flip(0), twin, exact, keep=(0, 1, 2)) != []
    accepted = torch.tensor([draft, draft - 1], dtype=torch.int32, device=device)
    replayssm.commit(cursors, cache_indices=slots, num_draft=draft, num_accepted=accepted)
    assert cursors.num_committed.tolist() == [draft - 1, 0, draft]


# Rounding, over many folds.


def test_a_float32_state_is_never_rounded_to_the_dtype_of_the_records(base: Case, device: torch.device) -> None:
    """64 folds one after the other of 16-bit records into a float32 state. A fold that passes its tile through the
    activation dtype errs little at once and everywhere in the end; the exact state folds the very same records."""
    work = Scene(replace(base, window=1), (1,) * 4, forced=None).on(device)
    exact, twin = (work.clone().pool.checkpoint[work.slots].to(dtype) for dtype in (F64, F32))
    for _ in range(64):
        for state in (exact, twin):
            one = in_state(work, state)
            A = getattr(work.inputs, "A", None)
            count = torch.ones_like(work.slots)
            state.copy_(reference.fold(one.pool, one.cursors, one.slots, count, A=A, dtype=state.dtype))
        work.step()
        work.commit()
    got = work.pool.checkpoint[work.slots]
    assert excess("state", got, twin, exact, keep=(0, 1)) == []
    assert excess("state", got.to(base.activation).float(), twin, exact, keep=(0, 1)) != []


def in_state(work: Work, state: Tensor) -> Work:
    """The same memory with the checkpoints of all rows put in the place of its own, in their dtype."""
    wide = in_float64(work)
    wide.pool.checkpoint[work.slots] = state.double()
    return wide


def test_names_cover_a_pool() -> None:
    """`mistakes` compares every tensor of a pool: a new one must be added to it."""
    assert {n for n, t in vars(busy_scene(BASES["mamba2"]).on("cpu").pool).items() if isinstance(t, Tensor)} == set(
        NAMES
    )
    assert PAD in busy_scene(BASES["mamba2"]).counts
