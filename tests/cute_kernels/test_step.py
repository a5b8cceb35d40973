"""The step on real geometries, over long traces and under every way of launching it, is what the mathematics says.

Numbers: one step against the replay form in float64, and 40 steps against the token-by-token recurrence in float64; the
bound is a multiple of what torch errs in the same precision (`helpers.tolerance`). Grid: of each recurrence, every odd
geometry of `helpers.cases` that a kernel covers (one head, a group a head, ratios of 3, head_dim 80, windows 1 to 64,
every dtype) and the extremes of the released models; in each, rows that read, rows that fold, forced rows and padding
in one launch; and a large layer of each recurrence with 64 rows of 4, 8 and 16 tokens (`tests/test_drafts.py` has the
small ones). Launches, with one token and with 4: CTAs that share a head, dependent launches, graphs in which only the
device knows what was accepted, 1 to 4096 rows, and pools whose offsets pass 2**32 bytes. What a CPU can run, it runs
too: there the torch twin stands in for the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import replayssm
from cute_kernels.configs import StepConfig
from replayssm import GdnInputs, Mamba2Inputs, Pool
from replayssm.launch import options_of, value_of
from replayssm.pool import record_shapes
from replayssm.spec import RECURRENCES, Recurrence
from tests.helpers.cases import ODD, RELEASED, Case, pick
from tests.helpers.draw import BASES, KERNELS, ROLES, base_of, part, with_parts
from tests.helpers.oracle import F32, PAD, Scene, Trace, Work, busy_counts, busy_scene, mistakes, per_token
from tests.helpers.tolerance import same_bytes

HEAD_DIMS, CPU_STATE = (64, 80, 128), 400_000  # values of one row's state that one CPU thread steps in a second


@pytest.fixture(params=RECURRENCES)
def base(request: pytest.FixtureRequest, device: torch.device) -> Case:
    """The geometry of the behaviour tests, of each recurrence that runs on the device."""
    return base_of(request.param, device)


each_kernel = pytest.mark.parametrize("kind", KERNELS)
one_and_several = pytest.mark.parametrize("num_draft", [1, 4])


def _extremes(kind: Recurrence) -> list[Case]:
    """Of the released layers: head_dim 80, the highest and the lowest ratio of heads, the most heads, the largest
    state, the narrowest shard, a 16-bit state."""
    cases = pick(RELEASED, recurrence=kind, num_tokens=1)
    chosen = [max((c for c in cases if c.V == 80), key=lambda c: c.HV // c.HK, default=cases[0])]
    chosen += [most(cases, key=lambda c: c.HV // c.HK) for most in (max, min)] if kind != "mamba2" else []
    chosen += [
        max((c for c in cases if c.K == 128), key=lambda c: c.HV),
        max(cases, key=lambda c: c.HV * c.V * c.K),
        min(cases, key=lambda c: c.HV),
        next((c for c in cases if c.checkpoint is torch.bfloat16), replace(cases[-1], checkpoint=torch.bfloat16)),
    ]
    return list(dict.fromkeys(chosen))


def _numeric(kind: Recurrence) -> list[Case]:
    return [c for c in pick(ODD, recurrence=kind, num_tokens=1) if c.V in HEAD_DIMS] + _extremes(kind)


NUMERIC = [case for kind in RECURRENCES for case in _numeric(kind)]


def skip_if_slow(case: Case, device: torch.device) -> None:
    if device.type == "cpu" and case.HV * case.V * case.K > CPU_STATE:
        pytest.skip("too large for one CPU thread; the GPU runs it")


# Numbers.


@pytest.mark.parametrize("case", NUMERIC, ids=lambda case: case.id)
def test_one_step_is_the_replay_form(case: Case, device: torch.device) -> None:
    """In each geometry, also ratios of 3 heads a group, on which kernels of fixed head blocks hang or crash."""
    base_of(case.recurrence, device)
    skip_if_slow(case, device)
    for seed in range(2 if case.window > 1 else 1):
        assert mistakes(busy_scene(case, seed=seed).on(device)) == []

    def perturb(work: Work) -> None:  # teeth: the records of the fullest row that reads, in the group of long memory
        work.pool.key[int(work.slots[2]), 0].mul_(1.1)
        work.pool.checkpoint[int(work.slots[2]), 0].mul_(1.1)

    assert any("output" in finding for finding in mistakes(busy_scene(case).on(device), before=perturb))


LARGE: dict[Recurrence, tuple[int, int]] = {"mamba2": (128, 8), "gdn": (64, 16), "kda": (64, 64)}


@pytest.mark.parametrize("checkpoint", [F32, torch.bfloat16])
@pytest.mark.parametrize("num_draft", [4, 8, 16])
@pytest.mark.parametrize("kind", RECURRENCES)
def test_several_tokens_of_a_large_layer(
    kind: Recurrence, num_draft: int, checkpoint: torch.dtype, device: torch.device
) -> None:
    case = next(c for c in pick(RELEASED, recurrence=kind) if LARGE[kind] == (c.HV, c.HK))
    case = replace(case, T=num_draft, window=max(16, 2 * num_draft), checkpoint=checkpoint)
    skip_if_slow(case, device)
    counts = (busy_counts(case.window, num_draft) * 8)[:64]
    scene = Scene(case, counts, forced=tuple(range(0, 64, 11)))
    assert mistakes(scene.on(device)) == []

    def perturb(work: Work) -> None:  # teeth: the last token of a row that reads, in the group of long memory
        part(work.inputs, "query")[0, -1, 0].neg_()

    assert any("output" in finding for finding in mistakes(scene.on(device), before=perturb))


@pytest.mark.parametrize("kind", RECURRENCES)
def test_the_grid_covers_what_it_says(kind: Recurrence) -> None:
    cases = [c for c in NUMERIC if c.recurrence == kind]
    assert {c.V for c in cases} == set(HEAD_DIMS)
    assert {c.K for c in cases} == {64, 128, 256}
    assert {c.activation for c in cases} == {c.checkpoint for c in cases} == {F32, torch.bfloat16, torch.float16}
    assert {1, 3} <= {c.HV // c.HK for c in cases} and 1 in {c.HV for c in cases}
    assert max(c.HV for c in cases) == max(c.HV for c in pick(RELEASED, recurrence=kind))
    assert {1, 64} <= {c.window for c in cases}


def run_trace(case: Case, device: torch.device, steps: int = 40) -> Trace:
    trace = Trace(case, device)
    for _ in range(steps):
        trace.step()
    return trace


@pytest.mark.parametrize("window", [1, 5, 16, 33, 64])
def test_every_window_is_the_recurrence(window: int, base: Case, device: torch.device) -> None:
    """Random acceptance, forced folds and padding. All windows agree with the plain recurrence, which is a window of
    1 by another name, and so with each other. In float32, where a lost record or a stale one cannot hide."""
    trace = run_trace(replace(base, window=window, activation=F32), device)
    assert trace.mistakes() == []


@pytest.mark.parametrize("checkpoint", [F32, torch.bfloat16])
def test_16_bit_inputs_are_the_recurrence(checkpoint: torch.dtype, base: Case, device: torch.device) -> None:
    """A float32 state keeps its digits under 16-bit records; a 16-bit state is rounded at folds and only there."""
    activation = base.activation if checkpoint is F32 else torch.float16
    trace = run_trace(replace(base, activation=activation, checkpoint=checkpoint), device)
    assert trace.mistakes() == []


FAULTS: dict[str, Callable[[Work, int], object]] = {
    "a rejected token kept": lambda work, slot: work.cursors.num_committed[slot].add_(1),
    "an accepted token lost": lambda work, slot: work.cursors.num_committed[slot].sub_(1),
    "a cursor off by one": lambda work, slot: work.cursors.ring_start[slot].add_(1),
    "a state rounded to 16 bits": lambda work, slot: work.pool.checkpoint.copy_(work.pool.checkpoint.bfloat16()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_trace_sees(fault: str, base: Case, device: torch.device) -> None:
    trace = run_trace(replace(base, window=5, activation=F32), device, steps=6)
    assert trace.mistakes() == []
    count = trace.work.cursors.num_committed
    slot = next(slot for slot in trace.slots.tolist() if 0 < int(count[slot]) < 4)  # has some, has room for one more
    FAULTS[fault](trace.work, slot)
    assert any("state" in finding for finding in trace.mistakes())


# Launches.


def step_bytes(work: Work, **options: object) -> list[Tensor]:
    """Output and memory after one step from this state, which stays as it is."""
    copy = work.clone()
    return [copy.step(**options), *copy.written()]


@one_and_several
@pytest.mark.parametrize("split", [None, 2, 4])
def test_repeated_launches_agree_bit_for_bit(
    split: int | None, num_draft: int, base: Case, device: torch.device
) -> None:
    """CTAs of one head, and heads of one group, write beside records that their siblings still read. Every pair of ring
    start and record count, five times from the same state: a race shows as a difference in some of them."""
    base = replace(base, T=num_draft)
    capacity = busy_scene(base).replay.ring_capacity
    pairs = [(start, count) for start in range(capacity) for count in range(base.window + 1)] * 3
    starts, counts = zip(*pairs, strict=True)
    work = Scene(base, counts, forced=tuple(range(0, len(pairs), 5)), starts=starts).on(device)
    if device.type == "cpu" and split is not None:
        pytest.skip("the twin has no CTAs")
    config = None if split is None else StepConfig(split=split)
    first, *rest = [step_bytes(work, config=config) for _ in range(5)]
    for again in rest:
        assert all(same_bytes(a, b) for a, b in zip(first, again, strict=True))
    assert mistakes(work, config=config) == []
    other = work.clone()
    other.inputs = per_token(other.inputs, lambda x: x.roll(1, 0))
    assert not same_bytes(step_bytes(other, config=config)[0], first[0])


@one_and_several
@pytest.mark.parametrize("rows", [1, 2, 17, 257, 4096])
def test_any_number_of_rows(rows: int, num_draft: int, base: Case, device: torch.device) -> None:
    base = replace(base, T=num_draft)
    if device.type == "cpu" and rows > 257:
        pytest.skip("too large for one CPU thread; the GPU runs it")
    counts = tuple((PAD, 0, base.window, 2, base.window - 1)[(row + 2) % 5] for row in range(rows))
    assert mistakes(Scene(base, counts).on(device)) == []


def chain(work: Work, layers: int, *, pdl: bool) -> list[Tensor]:
    """Outputs of layers that each read what the one before wrote as soon as it is there, and the memory after all."""
    works = [work.clone() for _ in range(layers)]
    outs = [torch.full_like(value_of(work.inputs), float("nan")) for _ in works]
    for layer, value in zip(works, [value_of(work.inputs), *outs], strict=False):
        layer.inputs = with_parts(layer.inputs, value=value)
    for layer, out in zip(works, outs, strict=True):
        layer.step(out=out, pdl=pdl)
    return [*outs, *(tensor for layer in works for tensor in layer.written())]


@one_and_several
def test_dependent_launches_agree_with_plain_ones(num_draft: int, base: Case, device: torch.device) -> None:
    work = Scene(replace(base, T=num_draft), (0, 5, 4, 2) * 16, forced=(3,)).on(device)
    plain = chain(work, 6, pdl=False)
    assert bool(torch.isfinite(torch.cat(plain[:6])).all())
    for _ in range(1 if device.type == "cpu" else 5):
        assert all(same_bytes(a, b) for a, b in zip(plain, chain(work, 6, pdl=True), strict=True))
    assert not same_bytes(plain[0], plain[1])


def in_pages(work: Work, page_bytes: int) -> Work:
    """The same step with its slots in pages of one allocation, as an engine keeps them: each page begins with the
    checkpoint, value, key and decay of one slot, and lies `page_bytes` behind the one before."""
    shapes, at, used = record_shapes(work.pool.layer, work.pool.replay), {}, 0
    for name, (shape, dtype) in shapes.items():
        at[name] = used
        used += -(-torch.Size(shape).numel() * dtype.itemsize // 256) * 256
    slots = work.pool.num_slots
    pages = torch.empty(page_bytes * (slots - 1) + used, dtype=torch.uint8, device=work.pool.device)
    paged, tensors = work.clone(), {}
    for name, (shape, dtype) in shapes.items():
        packed = getattr(work.pool, name)
        words = pages[at[name] :][: (pages.numel() - at[name]) // dtype.itemsize * dtype.itemsize].view(dtype)
        strides = (page_bytes // dtype.itemsize, *packed.stride()[1:])
        tensors[name] = words.as_strided((slots, *shape), strides, words.storage_offset()).copy_(packed)
    paged.pool = Pool(work.pool.layer, work.pool.replay, **tensors)
    return paged


@one_and_several
@pytest.mark.parametrize("page_bytes", [1 << 17, 1 << 31], ids=["128KiB", "2GiB"])
def test_slots_may_lie_in_an_engines_pages(page_bytes: int, num_draft: int, base: Case, device: torch.device) -> None:
    """In pages of 2 GiB the offsets of the last slots pass 2**31 elements and 2**32 bytes in every tensor, where 32-bit
    products of slot and stride overflow. 12 GiB are reserved then, and next to nothing of it is touched."""
    if device.type == "cpu" and page_bytes > 1 << 20:
        pytest.skip("reserves 12 GiB; the GPU runs it")
    case = replace(base, T=num_draft, activation=torch.float16, checkpoint=torch.bfloat16)
    packed = Scene(case, (5, 3, 0, 5, 4)).on(device)
    free = [slot for slot in range(7) if slot not in packed.slots.tolist()]
    if 6 in free:  # let the last page have a row
        source, target = packed.slots[:1], torch.tensor([6], device=device)
        replayssm.copy_slots(packed.cursors, source, target, pools=[packed.pool])
        packed.cache_indices[0] = 6
    paged = in_pages(packed, page_bytes)
    assert paged.pool.ring_layout == packed.pool.ring_layout
    assert paged.pool.checkpoint.data_ptr() + page_bytes == paged.pool.checkpoint[1:].data_ptr()
    assert same_bytes(packed.step(), paged.step())
    source = packed.slots[:1]
    target = torch.tensor(sorted(set(range(7)) - set(packed.slots.tolist()))[-1:], device=device)
    for work in (packed, paged):
        replayssm.copy_slots(work.cursors, source, target, pools=[work.pool])
        A = [work.inputs.A] if base.recurrence == "mamba2" else None
        replayssm.materialize(work.cursors, source, target, None, pools=[work.pool], A=A)
        replayssm.flush(work.cursors, work.slots, pools=[work.pool], A=A)
    assert all(same_bytes(a, b) for a, b in zip(packed.written(), paged.written(), strict=True))


# Graphs, memory and time.


def restore(work: Work, saved: Work) -> None:
    """Put the memory of a step back in place."""
    for tensor, before in zip(work.written(), saved.written(), strict=True):
        tensor.copy_(before)


@pytest.mark.gpu
@one_and_several
@each_kernel
def test_graph_replay_equals_eager(kind: Recurrence, num_draft: int) -> None:
    """Capture also shows that neither verb waits for the device: that is an error while capturing. The index vector is
    rewritten in place between replays, with other slots and with padding, as an engine does. Of several tokens, how
    many stay follows from the outputs, so the host never knows it."""
    work = busy_scene(replace(BASES[kind], T=num_draft)).on("cuda")
    work.inputs = per_token(work.inputs, lambda x: x.nan_to_num(0.25))  # any row may carry a request here
    out, saved, mine = torch.full_like(value_of(work.inputs), float("nan")), work.clone(), work.cache_indices.clone()
    padded = mine.masked_fill(torch.arange(len(mine), device="cuda") % 2 == 0, -1)
    sequence = [mine, mine, mine.roll(1), padded, mine, mine.flip(0), mine]
    accepted = torch.zeros(len(mine), dtype=torch.int32, device="cuda") if num_draft > 1 else None

    def run(one_step: Callable[[], object]) -> list[Tensor]:
        restore(work, saved)
        outs = []
        for chosen in sequence:
            work.cache_indices.copy_(chosen)
            one_step()
            outs += [out.clone()] if accepted is None else [out.clone(), accepted.clone()]
        return [*outs, *(tensor.clone() for tensor in work.written())]

    def eager() -> None:
        work.step(out=out)
        if accepted is not None:
            accepted.copy_((out[:, :, 0, 0] > 0).sum(1))
        work.commit(num_accepted=accepted)

    expected = run(eager)
    restore(work, saved)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager()
    assert all(same_bytes(a, b) for a, b in zip(work.written(), saved.written(), strict=True))
    out.fill_(float("nan"))
    got = run(graph.replay)
    assert all(same_bytes(a, b) for a, b in zip(expected, got, strict=True))
    outs = got[: -len(work.written())][:: 1 if accepted is None else 2]
    assert not same_bytes(outs[0], outs[1])
    assert bool(torch.isfinite(torch.cat(outs)).all())
    if accepted is not None:
        assert len(torch.cat(got[1 : 2 * len(sequence) : 2]).unique()) > 2


@pytest.mark.gpu
@one_and_several
@each_kernel
def test_a_step_with_out_allocates_nothing(kind: Recurrence, num_draft: int) -> None:
    work = busy_scene(replace(BASES[kind], T=num_draft)).on("cuda")
    out = torch.empty_like(value_of(work.inputs))
    work.step(out=out)
    work.commit()

    def allocations() -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = allocations()
    for _ in range(3):
        work.step(out=out)
        work.commit()
    assert allocations() == before
    work.step()
    assert allocations() > before


def other_inputs(inputs: Any) -> dict[str, Any]:
    """The same inputs with one thing changed: what a launch may not have kept from the one before."""
    made = {
        "inputs": with_parts(inputs, value=-part(inputs, "value"), gate=part(inputs, "gate") / 2),
        "rates": with_parts(inputs, rate=part(inputs, "rate") * 2),
        "bias": inputs._replace(dt_bias=inputs.dt_bias - 1),
    }
    if isinstance(inputs, Mamba2Inputs):
        made["skip"] = inputs._replace(D=inputs.D + 1)
        made["options"] = inputs._replace(D=None, dt_bias=None, dt_softplus=False, dt=inputs.dt.abs() / 4)
    else:
        made["options"] = inputs._replace(l2norm_eps=5.0, scale=0.5)
        made["dtypes"] = with_parts(inputs, gate=part(inputs, "gate").float())
    return made


def test_a_prepared_launch_follows_its_tensors(base: Case, device: torch.device) -> None:
    """Later calls take a short way past the checks: with other inputs, parameters, cursors and rows of the same pool
    they must not use what the first one left behind."""
    work = busy_scene(base).on(device)
    saved, inputs = work.clone(), work.inputs
    assert mistakes(work) == []
    changes = {name: {"inputs": other} for name, other in other_inputs(inputs).items()} | {
        "cursors": {"cursors": replace(saved.cursors, num_committed=saved.cursors.num_committed.clamp(max=3))},
        "mask": {"force_fold": ~work.force_fold},
        "rows": {"inputs": per_token(inputs, lambda x: x[:4]), "cache_indices": work.cache_indices[:4],
                 "force_fold": work.force_fold[:4]},
        "nothing": {},
    }  # fmt: skip
    for name, change in changes.items():
        restore(work, saved)
        assert mistakes(replace(work, **change)) == [], name
    restore(work, saved)
    rate = part(inputs, "rate")
    kept = rate.data
    rate.data = kept * 2  # other memory behind the same object
    assert mistakes(work) == []
    rate.data = kept
    restore(work, saved)
    plain = work.step()
    restore(work, saved)
    assert not same_bytes(plain, replace(work, inputs=with_parts(inputs, rate=rate * 2)).step())


def variants(inputs: Any) -> list[Any]:
    """The same inputs with each thing changed that a kernel is specialised for."""
    gate = part(inputs, "gate")
    if isinstance(inputs, Mamba2Inputs):
        names: list[dict[str, Any]] = [
            {"z": None},
            {"D": None},
            {"D": inputs.D.bfloat16()},
            {"dt_bias": None},
            {"dt_bias": inputs.dt_bias.bfloat16()},
            {"dt": gate.float()},
            {"dt_softplus": False},
        ]
    else:
        names = [
            {"scale": 0.5},
            {"l2norm_eps": None},
            {"l2norm_eps": 1e-5},
            {ROLES[type(inputs)]["gate"]: gate.float()},
        ]
    if isinstance(inputs, GdnInputs):
        names += [{"b": inputs.b.float()}, {"round_beta": True}]
    return [inputs, *(inputs._replace(**change) for change in names)]


def test_options_tell_apart_what_a_kernel_depends_on(base: Case, device: torch.device) -> None:
    """A dtype that is missing from the key of a cache makes one kernel read another's bits."""
    if base.recurrence not in KERNELS:
        pytest.skip("the twin has no options")
    inputs = busy_scene(base).on(device).inputs
    others = variants(inputs)
    assert len({options_of(one) for one in others}) == len(others)
    assert options_of(inputs) == options_of(with_parts(inputs, value=-part(inputs, "value")))
