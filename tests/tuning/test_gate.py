"""The gate lets the torch twin through and stops every wrong kernel made here from it.

Each wrong kernel is the twin with one fault of a kind that a real one may have: a wrong head, a lost append, a
neighbour overwritten, a fold forgotten, for a delta rule a u, a key or a decay of another convention. A gate without
these teeth would let a fast wrong kernel be timed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replayssm.inputs import GdnInputs
from replayssm.pool import Pool
from replayssm.reference import replay as reference
from replayssm.reference.recurrence import tokens
from replayssm.spec import LayerSpec, ReadDtype, ReplaySpec
from tuning.gate import StepGate, check_commit, check_step
from tuning.measure import GateFailedError
from tuning.shapes import ModelShape
from tuning.workload import Arena, StepWork, arena_bytes, make_inputs, make_pools, make_walking_cursors, make_work

SHAPES = {
    "mamba2": ModelShape("mamba2", LayerSpec("mamba2", 8, 2, head_dim=16, d_state=32), None, "made for this test"),
    "gdn": ModelShape("gdn", LayerSpec("gdn", 8, 4, head_dim=16, d_state=32), None, "made for this test"),
    "kda": ModelShape("kda", LayerSpec("kda", 4, 4, head_dim=16, d_state=32), None, "made for this test"),
    "kda_bounded": ModelShape("kda", LayerSpec("kda", 4, 4, 16, 32), None, "made for this test", lower_bound=-5.0),
}
SLOTS = 12
each_layer = pytest.mark.parametrize("kind", SHAPES)


def work(
    live_records: int, kind: str = "mamba2", *, replay: ReplaySpec | None = None, has_z: bool = False, rows: int = 5
) -> StepWork:
    """Of as many tokens a row as `replay` has at most."""
    replay, shape = replay or ReplaySpec(), SHAPES[kind]
    arena = Arena(arena_bytes(shape.layer, [replay], SLOTS), "cpu")
    (pool,) = make_pools(arena, shape.layer, [replay], SLOTS, ring_layout="record_major")
    tokens = replay.max_draft
    inputs = make_inputs(shape, rows, dtype=replay.activation_dtype, device="cpu", num_tokens=tokens, has_z=has_z)
    return make_work(pool, [live_records] * rows, inputs)


@each_layer
@pytest.mark.parametrize("checkpoint", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("live_records", [0, 8, 16])
def test_the_twin_passes(checkpoint: torch.dtype, live_records: int, kind: str) -> None:
    check_step(work(live_records, kind, replay=ReplaySpec(checkpoint_dtype=checkpoint)), reference.step)


@each_layer
@pytest.mark.parametrize("activation", [torch.float32, torch.float16], ids=str)
def test_the_twin_passes_in_other_activations(activation: torch.dtype, kind: str) -> None:
    check_step(work(5, kind, replay=ReplaySpec(activation_dtype=activation), has_z=True), reference.step)


@each_layer
def test_the_plain_step_passes(kind: str) -> None:
    check_step(work(1, kind, replay=ReplaySpec(window=1)), reference.step)


@each_layer
@pytest.mark.parametrize("read", ["nvfp4", torch.float8_e4m3fn, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("live_records", "tokens"), [(8, 1), (16, 1), (8, 4)])
def test_a_step_that_reads_a_copy_passes(live_records: int, tokens: int, read: ReadDtype, kind: str) -> None:
    check_step(work(live_records, kind, replay=ReplaySpec(max_draft=tokens, read_dtype=read)), reference.step)


@each_layer
@pytest.mark.parametrize("live_records", [8, 16])
def test_a_step_that_reads_the_checkpoint_instead_is_stopped(live_records: int, kind: str) -> None:
    def reads_the_checkpoint(pool, cursors, inputs, *, cache_indices, out):
        plain = replace(pool.replay, read_dtype=None)
        unread = Pool(pool.layer, plain, pool.checkpoint, pool.value, pool.key, pool.decay)
        reference.step(unread, cursors, inputs, cache_indices=cache_indices, out=out)

    with pytest.raises(GateFailedError, match="output"):
        check_step(work(live_records, kind, replay=ReplaySpec(read_dtype="nvfp4")), reads_the_checkpoint)


def wrong_head(pool, cursors, inputs, *, cache_indices, out):
    reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
    out[0, 0, 3] *= 1.03


def unwritten_row(pool, cursors, inputs, *, cache_indices, out):
    kept = out[1].clone()
    reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
    out[1] = kept


def loses_a_record(pool, cursors, inputs, *, cache_indices, out):
    fewer = replace(cursors, num_committed=(cursors.num_committed - 1).clamp_min(0))
    reference.step(pool, fewer, inputs, cache_indices=cache_indices, out=out)


def lost_append(pool, cursors, inputs, *, cache_indices, out):
    before = pool.value.clone()
    reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
    pool.value.copy_(before)


def wrong_decay(pool, cursors, inputs, *, cache_indices, out):
    reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
    slots = cache_indices.long()
    place = (cursors.ring_start[slots] + cursors.num_committed[slots]).long() % pool.replay.ring_capacity
    pool.decay[slots, :, place] += 1e-4


def neighbour_overwritten(pool, cursors, inputs, *, cache_indices, out):
    reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
    slots = cache_indices.long()
    place = (cursors.ring_start[slots] + cursors.num_committed[slots] + 1).long() % pool.replay.ring_capacity
    pool.decay[slots, :, place] = 0


def writes_the_checkpoint(pool, cursors, inputs, *, cache_indices, out):
    reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
    pool.checkpoint.mul_(1.001)


@each_layer
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (wrong_head, "output: expected a relative error"),
        (unwritten_row, "output: expected finite"),
        (loses_a_record, "output: expected a relative error"),
        (lost_append, "value ring"),
        (wrong_decay, "decay ring: expected a relative error"),
        (neighbour_overwritten, "decay ring: expected rows other"),
        (writes_the_checkpoint, "checkpoint: expected a relative error"),
    ],
)
def test_a_wrong_step_is_stopped(step, message: str, kind: str) -> None:
    with pytest.raises(GateFailedError, match=message):
        check_step(work(8, kind), step)


@each_layer
@pytest.mark.parametrize("read", [None, "nvfp4"])
def test_one_gate_serves_several_steps(read: ReadDtype | None, kind: str) -> None:
    """Each finds the rows as the first one did, whatever those before have written: also folds, and a wrong step."""

    def spoils(pool, cursors, inputs, *, cache_indices, out):
        reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
        for name in ("value", "key", "decay", *pool.state_names):
            getattr(pool, name).fill_(1)

    gate = StepGate(work(16, kind, replay=ReplaySpec(read_dtype=read)))
    gate.check(reference.step)
    with pytest.raises(GateFailedError, match="checkpoint"):
        gate.check(spoils)
    gate.check(reference.step)


def appends(name: str, record):
    """The twin's step, then a record of its own choice: `record(pool, inputs, twin's record, slots)`."""

    def step(pool, cursors, inputs, *, cache_indices, out):
        reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
        slots, ring = cache_indices.long(), getattr(pool, name)
        place = (cursors.ring_start[slots] + cursors.num_committed[slots]).long() % pool.replay.ring_capacity
        ring[slots, :, place] = record(pool, inputs, ring[slots, :, place].float(), slots).to(ring.dtype)

    return step


def beta(inputs):
    return torch.sigmoid((inputs.b if isinstance(inputs, GdnInputs) else inputs.beta)[:, 0].float())[..., None]


@pytest.mark.parametrize("live_records", [0, 8, 16])
@pytest.mark.parametrize("kind", ["gdn", "kda", "kda_bounded"])
@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("value", lambda pool, inputs, u, slots: inputs.v[:, 0]),  # as a layer without delta rule stores it
        ("value", lambda pool, inputs, u, slots: beta(inputs) * inputs.v[:, 0].float()),  # no correction
        ("value", lambda pool, inputs, u, slots: u / beta(inputs)),
        ("value", lambda pool, inputs, u, slots: u * 1.01),
        ("key", lambda pool, inputs, k, slots: inputs.k[:, 0]),  # not normalised
        ("key", lambda pool, inputs, k, slots: k * pool.layer.d_state**-0.5),  # scaled as the query is
        ("decay", lambda pool, inputs, g, slots: g.exp()),
        ("decay", lambda pool, inputs, g, slots: -g),
        ("decay", lambda pool, inputs, g, slots: g.bfloat16()),
    ],
)
def test_a_wrong_record_of_a_delta_rule_is_stopped(name: str, record, kind: str, live_records: int) -> None:
    with pytest.raises(GateFailedError, match=f"{name} ring: expected a relative error"):
        check_step(work(live_records, kind), appends(name, record))


def test_the_gate_of_a_bound_is_not_a_clamp() -> None:
    def clamps(pool, cursors, inputs, *, cache_indices, out):
        unbounded = inputs._replace(lower_bound=None)
        reference.step(pool, cursors, unbounded, cache_indices=cache_indices, out=out)

    with pytest.raises(GateFailedError, match="output: expected a relative error"):
        check_step(work(8, "kda_bounded"), clamps)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_decays_of_few_heads_may_err_by_the_hardware_exp2(kind: str) -> None:
    def as_hardware(pool, inputs, g, slots):
        # Powers by ex2.approx err 2**-22 at most, here by half of it; torch may err by nothing in one row of heads.
        exact = tokens(inputs, torch.float64).log_decay[:, 0]
        return (exact * (1 + torch.empty_like(exact).uniform_(-(2.0**-23), 2.0**-23))).view(g.shape)

    for _ in range(20):
        check_step(work(8, kind, rows=1), appends("decay", as_hardware))


@pytest.mark.parametrize("name", ["value", "key"])
def test_stored_inputs_of_mamba2_arrive_bit_for_bit(name: str) -> None:
    step = appends(
        name, lambda pool, inputs, record, slots: torch.nextafter(record.bfloat16(), torch.ones(()).bfloat16())
    )
    with pytest.raises(GateFailedError, match=f"{name} ring: expected a relative error of at most 2 x 0"):
        check_step(work(8), step)


@each_layer
@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "live_records"), [(2, 0), (4, 8), (8, 9), (8, 16), (16, 0), (16, 16)])
def test_the_twin_passes_with_several_tokens(
    num_tokens: int, live_records: int, activation: torch.dtype, kind: str
) -> None:
    replay = ReplaySpec(max_draft=num_tokens, activation_dtype=activation)
    check_step(work(live_records, kind, replay=replay, has_z=True), reference.step)


def token_wrong(token: int, by: float):
    """A wrong output of one head of one token of the first row."""

    def step(pool, cursors, inputs, *, cache_indices, out):
        reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
        out[0, token, 3] *= by

    return step


def record_wrong(name: str, token: int, record):
    """The twin's step, then another record of one token."""

    def step(pool, cursors, inputs, *, cache_indices, out):
        reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
        slots, ring = cache_indices.long(), getattr(pool, name)
        first = (cursors.ring_start[slots] + cursors.num_committed[slots]).long()
        place = (first + token) % pool.replay.ring_capacity
        ring[slots, :, place] = record(ring[slots, :, place].float()).to(ring.dtype)

    return step


def tokens_in_another_order(pool, cursors, inputs, *, cache_indices, out):
    turned = {name: t.flip(1) for name, t in inputs._asdict().items() if isinstance(t, torch.Tensor) and t.dim() > 2}
    reference.step(pool, cursors, inputs._replace(**turned), cache_indices=cache_indices, out=out)


@each_layer
@pytest.mark.parametrize("live_records", [8, 16])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (token_wrong(0, 1.03), "output"),
        (token_wrong(3, 1.03), "output"),
        (tokens_in_another_order, "output"),
        (record_wrong("value", 3, lambda u: u * 1.03), "value ring: expected a relative error"),
        (record_wrong("key", 1, lambda k: k * 1.03), "key ring: expected a relative error"),
        (record_wrong("decay", 3, lambda g: g * 1.0001), "decay ring: expected a relative error"),
        (record_wrong("decay", 4, lambda g: g * 0), "decay ring: expected rows other"),
        (record_wrong("value", -1, lambda u: u * 1.01), "value ring: expected rows other"),
    ],
)
def test_a_wrong_token_is_stopped(step, message: str, live_records: int, kind: str) -> None:
    with pytest.raises(GateFailedError, match=message):
        check_step(work(live_records, kind, replay=ReplaySpec(max_draft=4)), step)


@pytest.mark.parametrize("live_records", [8, 16])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_token_that_does_not_see_those_before_it_is_stopped(kind: str, live_records: int) -> None:
    """Every token as if it were the first: its output and record lack what the tokens before it added."""

    def alone(pool, cursors, inputs, *, cache_indices, out):
        for t in reversed(range(out.shape[1])):
            one = {
                n: x[:, t : t + 1] for n, x in inputs._asdict().items() if isinstance(x, torch.Tensor) and x.dim() > 2
            }
            part = out[:, t : t + 1].clone()
            reference.step(pool, cursors, inputs._replace(**one), cache_indices=cache_indices, out=part)
            out[:, t : t + 1] = part

    with pytest.raises(GateFailedError, match="output: expected a relative error"):
        check_step(work(live_records, kind, replay=ReplaySpec(max_draft=4)), alone)


@each_layer
def test_a_forgotten_fold_is_stopped(kind: str) -> None:
    def forgets(pool, cursors, inputs, *, cache_indices, out):
        before = pool.checkpoint.clone()
        reference.step(pool, cursors, inputs, cache_indices=cache_indices, out=out)
        pool.checkpoint.copy_(before)

    with pytest.raises(GateFailedError, match="checkpoint: expected a relative error"):
        check_step(work(16, kind), forgets)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_commits_are_compared_exactly(num_tokens: int) -> None:
    rows = {"cache_indices": torch.tensor([3, 0, 7], dtype=torch.int32)}
    if num_tokens > 1:
        rows |= {"num_draft": num_tokens, "num_accepted": torch.tensor([2, 0, 4], dtype=torch.int32)}
    cursors = make_walking_cursors(ReplaySpec(max_draft=num_tokens), SLOTS, "cpu")
    check_commit(cursors, reference.commit, **rows)

    def stays(cursors, **rows):
        reference.commit(cursors, **{name: t[:-1] if isinstance(t, torch.Tensor) else t for name, t in rows.items()})

    with pytest.raises(GateFailedError, match="1 slots that differ"):
        check_commit(cursors, stays, **rows)


def test_a_commit_that_keeps_every_draft_is_stopped() -> None:
    def keeps_all(cursors, *, num_accepted, **rows):
        reference.commit(cursors, **rows)

    cursors = make_walking_cursors(ReplaySpec(max_draft=4), SLOTS, "cpu")
    accepted = torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(GateFailedError, match="1 slots that differ"):
        check_commit(cursors, keeps_all, cache_indices=torch.tensor([3, 5]), num_draft=4, num_accepted=accepted)
