"""Compiled folds round stochastically to the bits of `reference.storage.round_state`, executed on a CPU.

What is rounded must be known to the bit, and torch sums in another order: the same kernel with a float32 checkpoint
folds it, and the reference rounds that. Grid: `RUNS`, in which each recurrence meets both 16-bit dtypes, one token and
several, a checkpoint that is read and a copy, both architectures, splits and several heads; flush and materialize; a
commit. Seeds and numbers of folds are random in all their bits. Beside the checkpoint everything has the bits of
the step that rounds to nearest. States of all magnitudes, subnormals, infinities and NaN included. Teeth: faults in
the PTX are caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels.configs import StepConfig
from replayssm import Cursors, Pool
from replayssm.reference import quant, storage
from replayssm.reference import replay as reference
from replayssm.spec import RECURRENCES, Recurrence
from tests.helpers.cases import Case
from tests.helpers.model import Model, model_of
from tests.helpers.oracle import PAD, Scene, Work, drawn_cursors, unrounded
from tests.helpers.tolerance import same_bytes
from tests.ptx import recorder
from tests.ptx.launches import Bench, Interpreted, InterpretedModel, swap
from tests.ptx.machine import TroubleError

pytestmark = pytest.mark.skipif(recorder.why_no_recorder() is not None, reason=str(recorder.why_no_recorder()))
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
WINDOW = 5


@dataclass(frozen=True)
class Run:
    """A step, the architecture and the CTAs of a head."""

    arch: str
    kind: Recurrence
    dtype: torch.dtype
    sizes: tuple[int, int, int, int] = (2, 1, 64, 64)
    tokens: int = 1
    read: Any = None
    split: int = 1

    @property
    def id(self) -> str:
        names = (self.arch, self.kind, *self.sizes, self.tokens, self.read, self.dtype)
        return "-".join(str(name).removeprefix("torch.") for name in names)

    @property
    def scene(self) -> Scene:
        """Rows that fold, are forced to, are padding and only read."""
        case = Case(self.kind, *self.sizes, WINDOW, self.tokens, F32, self.dtype)
        counts = (WINDOW, PAD, 2, 1)
        return Scene(case, counts, forced=(2,), starts=(3, 0, 1, 0), read_dtype=self.read, rounding="stochastic")


RUNS = [
    Run("sm_90a", "mamba2", F16), Run("sm_103a", "mamba2", BF16, (1, 1, 64, 128), split=2),
    Run("sm_90a", "mamba2", BF16, tokens=3), Run("sm_103a", "mamba2", F16, read="nvfp4"),
    Run("sm_103a", "gdn", F16, (2, 2, 64, 64), split=2), Run("sm_90a", "gdn", BF16, (1, 1, 64, 256)),
    Run("sm_103a", "gdn", BF16, tokens=3), Run("sm_90a", "gdn", F16, read=torch.int8),
    Run("sm_90a", "kda", F16, (2, 1, 64, 128), split=2), Run("sm_103a", "kda", BF16),
    Run("sm_90a", "kda", F16, tokens=3), Run("sm_103a", "kda", BF16, read="nvfp4"),
]  # fmt: skip
SMALL = RUNS[0]


def test_the_grid_covers_what_it_says() -> None:
    for kind in RECURRENCES:
        runs = [run for run in RUNS if run.kind == kind]
        assert {run.dtype for run in runs} == {F16, BF16} and {run.arch for run in runs} == {"sm_90a", "sm_103a"}
        assert {run.tokens for run in runs} == {1, 3} and {run.split for run in runs} == {1, 2}
        assert {run.read is None for run in runs} == {True, False} and 2 in {run.sizes[0] for run in runs}


def bits(state: Tensor) -> Tensor:
    """Of 16-bit numbers, with one NaN."""
    return torch.where(state.isnan(), torch.nan, state).to(state.dtype).view(torch.int16)


def differing(run: Run, bench: Bench, prepare: Callable[[Work], object] = lambda work: None) -> list[str]:
    """What a step does not write as it should."""
    given = run.scene.on("cpu")
    prepare(given)
    folding = given.slots[given.fold_counts() > 0]
    pool, counts = given.pool, given.cursors.fold_count
    assert pool.seed is not None and counts is not None and len(folding) == 2
    config = StepConfig(run.split)
    exact, work = (
        Interpreted.of(w, b) for w, b in ((unrounded(given), Bench(run.arch, "late")), (given.clone(), bench))
    )
    spec = replace(pool.replay, rounding="nearest")
    nearest = Interpreted.of(
        replace(
            given.clone(),
            pool=replace(given.clone().pool, replay=spec, seed=None),
            cursors=Cursors(spec, given.cursors.ring_start, given.cursors.num_committed),
        ),
        Bench(run.arch, "late"),
    )
    outs = [one.step(config=config) for one in (work, nearest, exact)]
    state = exact.pool.checkpoint[folding]
    want = storage.round_state(state, run.dtype, pool.seed[folding], counts[folding])
    assert not torch.equal(bits(want), bits(state.to(run.dtype)))  # teeth
    found = [] if torch.equal(bits(work.pool.checkpoint[folding]), bits(want)) else ["the folded states"]
    found += [] if same_bytes(outs[0], outs[1]) else ["the outputs"]
    others = [i for i in range(pool.num_slots) if i not in folding.tolist()]
    for name in ("value", "key", "decay"):
        found += [] if same_bytes(getattr(work.pool, name), getattr(nearest.pool, name)) else [name]
    for name in (*pool.state_names, "seed"):
        found += [] if same_bytes(getattr(work.pool, name)[others], getattr(pool, name)[others]) else [f"other {name}"]
    if run.read is not None:
        parts = quant.encode(work.pool.checkpoint[folding].float(), run.read)
        found += [n for n, p in parts.items() if not same_bytes(p, getattr(work.pool, f"read_{n}")[folding])]
    held = zip(work.cursors.tensors, given.cursors.tensors, strict=True)
    return found + ([] if all(same_bytes(*pair) for pair in held) else ["cursors"])  # type: ignore[arg-type]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_a_fold_draws_the_bits_of_the_reference(run: Run) -> None:
    bench = Bench(run.arch, "early")
    assert differing(run, bench) == []
    assert f".target {run.arch}" in bench.launches[0].ptx


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_states_of_all_magnitudes(dtype: torch.dtype) -> None:
    """Rows of 2**-149 to 2**127, in float16 from below its subnormals to infinity, with values that are not finite."""

    def scale(work: Work) -> None:
        rows, generator = work.pool.layer.head_dim, torch.Generator().manual_seed(1)
        powers = torch.linspace(-149, 127, rows) if dtype is BF16 else torch.linspace(-40, 18, rows)
        value, slots = work.pool.value, work.slots
        value[slots] = torch.randn(value[slots].shape, generator=generator) * torch.exp2(powers.round())
        value[slots, :, :, 3], value[slots, :, :, 5], value[slots, :, :, 9] = torch.inf, -torch.inf, torch.nan
        work.pool.decay[slots] = 1.0  # dt
        work.pool.checkpoint[slots] = 0.0

    assert differing(Run("sm_90a", "mamba2", dtype, (1, 1, 64, 64)), Bench("sm_90a", "late"), scale) == []


# Other verbs.


def seeded(model: Model) -> Model:
    """The same with 16-bit states that are rounded stochastically."""
    spec = replace(model.pools[0].replay, rounding="stochastic")
    pools = []
    for pool in model.pools:
        tensors = {name: getattr(pool, name) for name in ("checkpoint", "value", "key", "decay")}
        pools.append(Pool(pool.layer, spec, **tensors, seed=torch.zeros(pool.num_slots, dtype=torch.int64)))
    cursors = drawn_cursors(
        pools, model.cursors.ring_start, model.cursors.num_committed, torch.Generator().manual_seed(2)
    )
    return replace(model, pools=pools, cursors=cursors)


@pytest.mark.parametrize(
    ("kind", "dtype", "arch"), [("mamba2", F16, "sm_90a"), ("gdn", BF16, "sm_103a"), ("kda", F16, "sm_90a")]
)
def test_flush_and_materialize_draw_as_a_step(kind: Recurrence, dtype: torch.dtype, arch: str) -> None:
    """The bits that a fold of the source would have; a destination takes over seed and number of folds."""
    case = Case(kind, 2, 1, 64, 64, WINDOW, 1, F32, dtype)
    layers: list[Any] = [(case, "record_major"), (replace(case, HV=1), "strided")]
    model = seeded(model_of(case, torch.device("cpu"), [WINDOW, 3, 0], free=3, starts=[2, 0, 1], layers=layers))
    plain = replace(
        model,
        pools=[
            replace(
                p,
                replay=replace(p.replay, checkpoint_dtype=F32, rounding="nearest"),
                checkpoint=p.checkpoint.float(),
                seed=None,
            )
            for p in model.pools
        ],
    )
    plain.cursors = Cursors(plain.pools[0].replay, model.cursors.ring_start, model.cursors.num_committed)
    source, destination = torch.tensor([0, 1, -1, 2, 0]), torch.tensor([4, 5, 3, 3, -1])
    for verb, rows, read, write in (
        ("flush", (torch.tensor([0, -1, 1, 2]),), [0, 1, 2], [0, 1, 2]),
        ("materialize", (source, destination, torch.tensor([2, 3, 1, 0, 1]).int()), [0, 1, 2], [4, 5, 3]),
        ("materialize", (source, destination, None), [0, 1, 2], [4, 5, 3]),
    ):
        work, exact = InterpretedModel.of(model, Bench(arch, "late")), InterpretedModel.of(plain, Bench(arch, "late"))
        twin = model.clone()
        for one in (work, exact):
            getattr(one, verb)(*rows)
        getattr(reference, verb)(twin.cursors, *rows, pools=twin.pools, A=twin.A or [None] * 2)
        assert all(same_bytes(*pair) for pair in zip(work.cursors.tensors, twin.cursors.tensors, strict=True))  # type: ignore[arg-type]
        counts = model.cursors.fold_count
        assert counts is not None and not same_bytes(work.cursors.fold_count, counts)
        for ours, theirs, fold, pool in zip(work.pools, twin.pools, exact.pools, model.pools, strict=True):
            assert pool.seed is not None and same_bytes(ours.seed, theirs.seed)
            assert verb == "flush" or not same_bytes(ours.seed, pool.seed)
            want = storage.round_state(fold.checkpoint[write], dtype, pool.seed[read], counts[read])
            assert torch.equal(bits(ours.checkpoint[write]), bits(want))
            assert same_bytes(ours.checkpoint[write[2]], pool.checkpoint[read[2]])  # nothing to fold


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_a_commit_counts_the_folds(arch: str) -> None:
    work = SMALL.scene.on("cpu")
    ours, twin = Interpreted.of(work.clone(), Bench(arch, "late")), work.clone()
    ours.commit()
    reference.commit(twin.cursors, cache_indices=work.cache_indices, force_fold=work.force_fold)
    assert all(same_bytes(*pair) for pair in zip(ours.cursors.tensors, twin.cursors.tensors, strict=True))  # type: ignore[arg-type]
    counts = ours.cursors.fold_count
    assert counts is not None and work.cursors.fold_count is not None
    assert int((counts != work.cursors.fold_count).sum()) == 2


# Teeth.

WIDE = r"mul\.wide\.u32 p, (%r\d+), -?\d+;"
FAULTS: dict[str, Callable[[str], str]] = {
    "a round is left out": swap(WIDE, r"mul.wide.u32 p, \1, 1;", -1),
    "half of the seed": swap(
        r"ld\.global\.v2\.b32 \{(%r\d+),(%r\d+)\}, \[(%rd\d+)\+0\];", r"ld.global.b32 \1, [\3]; mov.b32 \2, 0;", 1),
    "the bits of a pair swapped": swap(
        r"shr\.u32 b, r, 16; and\.b32 a, r, 0xFFFF;", "shr.u32 a, r, 16; and.b32 b, r, 0xFFFF;"),
    "a value that is cut": swap(r"add\.s32 a, a, x;", "mov.b32 a, x;"),
    "a value that is rounded to nearest": swap(r"and\.b32 a, a, 0xFFFFE000;", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_caught(fault: str) -> None:
    try:
        found = differing(SMALL, Bench("sm_90a", "late", change=FAULTS[fault]))
    except TroubleError:
        return
    assert found
