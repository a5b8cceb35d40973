"""The compiled `materialize` and `flush` write the states that records stand for, executed by instruction on a CPU.

Host code and PTX are those that a GPU would run; only the device is interpreted. Numbers: the recurrence over the very
records in float64, within the bounds of the twin's tests (`helpers.model`), and the bits that a forced fold of the
compiled step writes. Grid: `RUNS`, in which every dtype, head_dim, d_state, window, split, layout, index dtype and
architecture occurs for each recurrence, with two layers in one launch; rows of no, some and all records, around the end
of the ring, and padding, with NaN in all that is not pending. Each launch runs with asynchronous copies as early and as
late as they may be, and with warps in another order, and must give the same bits. Teeth: faults in the PTX are caught.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels.configs import RingLayout
from replayssm import model_launch
from replayssm.reference import replay as reference
from replayssm.spec import RECURRENCES, Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import make_inputs
from tests.helpers.model import Model, excesses, model_of, untouched
from tests.helpers.oracle import F32
from tests.helpers.tolerance import same_bytes
from tests.ptx import recorder
from tests.ptx.launches import Bench, Interpreted, InterpretedModel, swap
from tests.ptx.machine import Mode, TroubleError

pytestmark = pytest.mark.skipif(recorder.why_no_recorder() is not None, reason=str(recorder.why_no_recorder()))
BF16, F16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
each_kind = pytest.mark.parametrize("kind", RECURRENCES)


@dataclass(frozen=True)
class Run:
    """Layers of one geometry, and the architecture."""

    arch: str
    case: Case
    layouts: tuple[RingLayout, ...] = ("record_major",)
    index: torch.dtype = torch.int32

    @property
    def id(self) -> str:
        return f"{self.arch}-{self.case.id}"

    @property
    def model(self) -> Model:
        """Slots with a full window that wraps around, one with some records and one with none, and four free ones."""
        window = self.case.window
        layers = [(self.case, layout) for layout in self.layouts]
        counts, starts = [window, window // 2 + 1, 0], [window, 0, window + 2]
        return model_of(self.case, CPU, counts, free=4, starts=starts, layers=layers)

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Source, destination and number of records: all, some, none, and padding."""
        source, destination = torch.tensor([0, 1, 0, -1, 1]), torch.tensor([6, 3, 5, 4, -1])
        records = torch.tensor([self.case.window, self.case.window // 2, 0, 9, -9], dtype=torch.int32)
        return source.to(self.index), destination.to(self.index), records


def case(kind: Recurrence, sizes: tuple[int, int, int, int], window: int, *dtypes: torch.dtype, **more: Any) -> Case:
    """A case of (value heads, key heads, head_dim, d_state), dtypes of activation and checkpoint."""
    return Case(kind, *sizes, window, 1, *dtypes, **more)


def runs_of(kind: Recurrence) -> list[Run]:
    odd: dict[str, Any] = {"mamba2": {}, "gdn": {"value_dtype": F32}, "kda": {"decay_dtype": BF16}}[kind]
    return [
        Run("sm_90a", case(kind, (1, 1, 64, 64), 5, BF16, F32), ("record_major", "strided")),
        Run("sm_103a", case(kind, (2, 1, 80, 64), 16, F32, BF16), ("head_major",), torch.int64),
        Run("sm_103a", case(kind, (1, 1, 64, 256), 1, F32, F32)),
        Run("sm_90a", case(kind, (1, 1, 64, 128), 33, F16, F16, **odd)),
        Run("sm_90a", case(kind, (1, 1, 128, 128), 16, BF16, F32)),
    ]


RUNS = [run for kind in RECURRENCES for run in runs_of(kind)]
SMALL = {kind: Run("sm_90a", case(kind, (1, 1, 64, 64), 5, BF16, F32)) for kind in RECURRENCES}


def live_of(source: Tensor, destination: Tensor, records: Tensor) -> list[Tensor]:
    """The rows that are no padding, as int64."""
    live = (source >= 0) & (destination >= 0)
    return [rows[live].long() for rows in (source, destination, records)]


def after(run: Run, mode: Mode, seed: int) -> list[Tensor]:
    """All memory once the states in it are known to be right."""
    model, (source, destination, records) = run.model, run.rows
    bench = Bench(run.arch, mode, seed)
    moved = InterpretedModel.of(model, bench)
    moved.materialize(source, destination, records)
    read, write, count = live_of(source, destination, records)
    assert excesses(moved, model, read, write, count) == []
    assert untouched(moved, model, write) == []
    none = count == 0
    for pool in moved.pools:
        assert same_bytes(pool.checkpoint[write[none]], pool.checkpoint[read[none]])
    assert [launch.grid[1:] for launch in bench.launches] == [(len(source), len(run.layouts)), (1, 1)]
    assert all(f".target {run.arch}" in launch.ptx for launch in bench.launches)
    return moved.memory()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_materialize_writes_the_states_of_prefixes(run: Run) -> None:
    early, late = after(run, "early", 0), after(run, "late", 1)
    assert all(same_bytes(a, b) for a, b in zip(early, late, strict=True))


@each_kind
def test_the_grid_covers_what_it_says(kind: Recurrence) -> None:
    runs = runs_of(kind)
    cases = [run.case for run in runs]
    assert {c.activation for c in cases} == {c.checkpoint for c in cases} == {F32, BF16, F16}
    assert ({c.V for c in cases}, {c.K for c in cases}) == ({64, 80, 128}, {64, 128, 256})
    assert {c.window for c in cases} == {1, 5, 16, 33}
    assert {c.HV // c.HK for c in cases} == {1, 2}
    assert {layout for run in runs for layout in run.layouts} == {"record_major", "head_major", "strided"}
    assert {run.index for run in runs} == {torch.int32, torch.int64}
    assert {run.arch for run in runs} == {"sm_90a", "sm_103a"}
    assert len({(c.value_dtype, c.decay_dtype) for c in cases}) == 1 + (kind != "mamba2")
    (split,) = [run for run in runs if run.case.K == 256]
    bench = Bench(split.arch)
    InterpretedModel.of(split.model, bench).materialize(*split.rows)
    assert bench.launches[0].grid[0] == (1 if kind == "kda" else 2) * split.case.HV


@pytest.mark.parametrize(
    "run",
    [SMALL["mamba2"], Run("sm_90a", case("gdn", (1, 1, 64, 64), 5, F16, F16, value_dtype=F32)), SMALL["kda"]],
    ids=lambda run: run.id,
)
def test_a_flush_is_a_forced_fold_of_the_step(run: Run) -> None:
    """The same bits, in place; cursors move as by the twin, and nothing else is written."""
    model, slots = run.model, torch.tensor([1, -1, 0, 2, -7], dtype=run.index)
    bench = Bench(run.arch, "late")
    flushed, want, forced = InterpretedModel.of(model, bench), model.clone(), model.clone()
    flushed.flush(slots)
    reference.flush(want.cursors, slots, pools=[], A=[])
    live = slots[slots >= 0].long()
    inputs = make_inputs(run.case, len(live), torch.Generator().manual_seed(0))
    for i, pool in enumerate(forced.pools):
        given = inputs if model.A is None else inputs._replace(A=model.A[i])
        Interpreted(pool, forced.cursors, given, live, torch.ones(len(live), dtype=torch.bool), bench=bench).step()
        want.pools[i].checkpoint[live] = pool.checkpoint[live]
    assert flushed.same_as(want)
    assert not same_bytes(flushed.pools[0].checkpoint[live[:1]], model.pools[0].checkpoint[live[:1]])


@each_kind
def test_strong_and_infinite_decays_stay_finite(kind: Recurrence) -> None:
    """Sums of log-decays far below -88, and of a delta rule records of -inf: a difference of prefixes would be NaN."""
    model, rows = SMALL[kind].model, SMALL[kind].rows
    for pool in model.pools:
        pool.decay.mul_(1e3)
        if kind != "mamba2":
            pool.decay[:2, :, ::2] = -float("inf")
    moved = InterpretedModel.of(model, Bench("sm_90a", "early"))
    moved.materialize(*rows)
    read, write, count = live_of(*rows)
    assert excesses(moved, model, read, write, count) == []


def test_geometries_have_a_launch_each_and_share_the_cursors() -> None:
    case = SMALL["gdn"].case
    model = model_of(case, CPU, [5, 2], free=2, layers=[(case, "head_major"), (replace(case, HV=2), "record_major")])
    bench = Bench("sm_90a", "early")
    moved = InterpretedModel.of(model, bench)
    source, destination, count = torch.tensor([0, 1]), torch.tensor([3, 2]), torch.tensor([4, 2])
    moved.materialize(source, destination, count.int())
    assert [launch.grid for launch in bench.launches] == [(1, 2, 1), (2, 2, 1), (1, 1, 1)]
    assert excesses(moved, model, source, destination, count) == []
    assert untouched(moved, model, destination) == []


def test_a_table_is_made_once_and_follows_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, tables, make = SMALL["mamba2"].rows, [], torch.tensor
    model = InterpretedModel.of(SMALL["mamba2"].model, Bench("sm_90a"))
    monkeypatch.setattr(model_launch.torch, "tensor", lambda *args, **how: tables.append(args) or make(*args, **how))
    for _ in range(2):
        model.materialize(*rows)
        assert len(tables) == 1
    model.bench.mode = "early"
    assert model.A is not None
    for tensor in (*model.pools[0].tensors, model.A[0]):  # the same objects over other memory
        tensor.data = tensor.clone()
    given = model.clone()
    model.materialize(*rows)
    read, write, count = live_of(*rows)
    assert excesses(model, given, read, write, count) == []
    assert len([args for args in tables if args[0] and isinstance(args[0][0], tuple)]) == 2


def test_no_row_launches_nothing_and_too_many_are_refused() -> None:
    model = InterpretedModel.of(SMALL["gdn"].model, Bench("sm_90a"))
    nothing, many = torch.zeros(0, dtype=torch.int64), torch.full((65536,), -1)
    model.flush(nothing)
    model.materialize(nothing, nothing, None)
    with pytest.raises(NotImplementedError, match=r"slots: .*65535 rows, got 65536"):
        model.flush(many)
    with pytest.raises(NotImplementedError, match=r"source: .*65535 rows, got 65536"):
        model.materialize(many, many, None)
    assert model.bench.launches == []


def test_senseless_rows_stay_within_the_ring() -> None:
    """Any negative slot is padding; beyond the range of `num_records`, which callers must keep, lies no other slot's
    memory."""
    run = SMALL["gdn"]
    model = run.model
    moved = InterpretedModel.of(model, Bench("sm_90a", "early"))
    least = torch.iinfo(torch.int64).min
    source, destination = torch.tensor([0, 1, least, 0, -(2**32)]), torch.tensor([3, 4, 5, -(2**31), -1])
    moved.materialize(source, destination, torch.tensor([99, -3, 1, 1, 1], dtype=torch.int32))
    assert excesses(moved, model, source[:2], destination[:2], torch.tensor([5, 0])) == []
    assert untouched(moved, model, destination[:2]) == []


@pytest.mark.parametrize(("arch", "index"), [("sm_90a", torch.int64), ("sm_103a", torch.int32)])
def test_cursors_move_as_by_the_twin(arch: str, index: torch.dtype) -> None:
    """130 rows in two CTAs, padding among them: every number of records from every ring row."""
    layer, rows = SMALL["gdn"].case, torch.arange(130)
    counts, starts = [i % 6 for i in range(130)], [i % 8 for i in range(130)]
    model = replace(model_of(layer, CPU, counts, free=130, starts=starts), pools=[], A=None)
    slots, free = ((rows + first).where(rows % every != 3, -1).to(index) for first, every in ((0, 7), (130, 11)))
    for verb, given in (("flush", (slots,)), ("materialize", (slots, free, None))):
        twin, ours = model.clone(), InterpretedModel.of(model, Bench(arch, "early"))
        getattr(ours, verb)(*given)
        getattr(reference, verb)(twin.cursors, *given, pools=[], A=[])
        assert torch.equal(ours.cursors.ring_start, twin.cursors.ring_start)
        assert torch.equal(ours.cursors.num_committed, twin.cursors.num_committed)
        assert not torch.equal(ours.cursors.num_committed, model.cursors.num_committed)


# Teeth.


def of_kernel(name: str, change: Callable[[str], str]) -> Callable[[str], str]:
    """A fault in one of the two kernels of a call."""
    return lambda ptx: change(ptx) if f"{name}_kernel" in ptx else ptx


BARRIER, WAIT, UNORDERED = r"bar\.sync\s+0;", r"bra\.uni\s+LAB_WAIT;", "race: shared|uninitialised: shared"
WRONG, ASTRAY = "layer|race: global", "layer|out_of_bounds: global"
FOLDED, COPIED = r"st\.global\.L2::cache_hint[^;]*;", r"st\.global\.v4[^;]*;"
Fault = tuple[Callable[[str], str], str]
EVERYWHERE = (
    "no barrier behind the staged records",
    "no wait of a fold",
    "the number of records not read",
    "the decay of a later record",
    "a part of a fold not written",
)


def faults(kind: Recurrence) -> dict[str, Fault]:
    """The change, and how its report or the first wrong result begins: all of them in one recurrence, a part of them in
    the others. The first two barriers only order loads."""
    changes: dict[str, Fault] = {
        "no barrier behind the staged records": (swap(BARRIER, "", -1), UNORDERED),
        "no wait of a fold": (swap(WAIT, "", 0), UNORDERED),
        "no wait of a copy": (swap(WAIT, "", 1), UNORDERED),
        "no mbarrier": (swap(r"mbarrier\.init\S+\s+[^;]*;", ""), "mbarrier"),
        "no fence behind the mbarrier": (swap(r"fence\.mbarrier_init\S*;", ""), "missing_fence"),
        "a ring one row too long": (swap(r"(add\.s32\s+%r\d+, %r\d+), -8;", r"\1, -9;", -1), ASTRAY),
        "the number of records not read": (swap(r"min\.u32(\s+%r\d+, %r\d+), %r\d+;", r"mov.b32\1;"), WRONG),
        "the first layer for all": (swap(r"%ctaid\.z", "0"), WRONG),
        "a layer's keys for its values": (swap(r"(v2\.b64 [^;]*)\+32\]", r"\1+64]"), ASTRAY),
        "a stride by slot forgotten": (
            swap(r"(v2\.b64 \{%rd\d+,(%rd\d+)\}, \[%rd\d+\+0\];)", r"\1 mov.b64 \2, 0;"), WRONG),
        "the decay of a later record": (swap(r"@p (ld\.global\.cs\.b32)", r"\1", -1), WRONG),
        "a part of a fold not written": (swap(FOLDED, "", 3), WRONG),
        "a part of a copy not written": (swap(COPIED, "", 2), WRONG),
    }  # fmt: skip
    own: dict[Recurrence, dict[str, Fault]] = {
        "mamba2": {"a state that grows": (swap("0f3FB8AA3B", "0fBFB8AA3B", -1), WRONG)},
        "gdn": {"a state that grows": (swap("0f3FB8AA3B", "0fBFB8AA3B", -1), WRONG)},
        "kda": {
            "no barrier behind the staged decays": (swap(BARRIER, "", 2), UNORDERED),
            "a channel that grows": (swap("0f3FB8AA3B", "0fBFB8AA3B", -1), WRONG),
        },
    }
    shared = {name: fault for name, fault in changes.items() if kind == "gdn" or name in EVERYWHERE}
    return {name: (of_kernel("materialize", change), said) for name, (change, said) in (shared | own[kind]).items()}


OF_CURSORS: dict[str, Fault] = {
    "a start that stays": (of_kernel("empty", swap(r"st\.global\.b32[^;]*;", "", 0)), "cursors"),
    "records that stay": (of_kernel("empty", swap(r"st\.global\.b32[^;]*;", "", 1)), "cursors"),
}


def caught(kind: Recurrence, change: Callable[[str], str]) -> list[str]:
    """What a row that folds records around the end of its ring, and one that copies, find in changed kernels."""
    layer = SMALL[kind].case
    model = model_of(layer, CPU, [5, 2], free=2, starts=[6, 0], layers=[(layer, "record_major")] * 2)
    moved = InterpretedModel.of(model, Bench("sm_90a", "late", change=change))
    source, destination, count = torch.tensor([0, 1]), torch.tensor([3, 2]), torch.tensor([4, 0])
    try:
        moved.materialize(source, destination, count.int())
    except TroubleError as trouble:
        return [str(trouble)]
    found = excesses(moved, model, source, destination, count)
    return found or [f"cursors: {where}" for where in untouched(moved, model, destination)]


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind in RECURRENCES for fault in faults(kind)])
def test_a_fault_in_the_kernel_is_caught(kind: Recurrence, fault: str) -> None:
    change, beginning = faults(kind)[fault]
    first = next(iter(caught(kind, change)), "nothing")
    assert re.match(beginning, first), first


@pytest.mark.parametrize("fault", OF_CURSORS)
def test_a_fault_in_the_cursors_is_caught(fault: str) -> None:
    change, beginning = OF_CURSORS[fault]
    first = next(iter(caught("gdn", change)), "nothing")
    assert re.match(beginning, first), first


@each_kind
def test_the_kernel_without_a_fault_passes(kind: Recurrence) -> None:
    assert caught(kind, str) == []
