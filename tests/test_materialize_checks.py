"""`flush` and `materialize` refuse bad arguments before anything is written: name, expected, got, remedy.

Every argument that can be wrong in type, rank, dtype, device or length is made wrong once, on a Mamba-2 model of two
layers (whose records need A) and on one of a delta rule (which must not get one), and all memory is compared byte for
byte before and after. What only the device knows is checked in debug mode, which must let padding pass. The checks of
pools are those of `reset` and `copy_slots` too. "HERE" stands for the device in the words of a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import replayssm
from replayssm import Cursors, Pool, make_cursors, make_pool
from replayssm.spec import Recurrence
from tests.helpers.cases import Case
from tests.helpers.model import fitting
from tests.helpers.tolerance import same_bytes

V, T = ValueError, TypeError
Arguments = dict[str, Any]
Bad = tuple[Callable[[Arguments], Arguments], type[Exception], tuple[str, ...]]


def arguments(kind: Recurrence, device: torch.device) -> Arguments:
    """A call of `materialize` that is right: slots 0 to 2 have 2, 5 and 0 records, 3 to 5 hold nothing."""
    case = fitting(Case(kind, 4, 2, 8, 16, window=5), device)
    cursors = make_cursors(case.replay, 6, device=device)
    cursors.num_committed[:2] = torch.tensor([2, 5], dtype=torch.int32, device=device)
    cursors.ring_start[3:] = -7  # never used
    return {
        "cursors": cursors,
        "source": torch.tensor([0, 1, 2], device=device),
        "destination": torch.tensor([5, 3, 4], device=device),
        "num_records": torch.tensor([2, 3, 0], dtype=torch.int32, device=device),
        "pools": [make_pool(case.layer, case.replay, 6, device=device) for _ in range(2)],
        "A": [-torch.ones(4, device=device) for _ in range(2)] if kind == "mamba2" else None,
    }


def materialize(call: Arguments) -> None:
    replayssm.materialize(*(call[n] for n in ("cursors", "source", "destination", "num_records")), **named(call))


def flush(call: Arguments) -> None:
    replayssm.flush(call["cursors"], call["source"], **named(call))


def named(call: Arguments) -> Arguments:
    return {name: call[name] for name in ("pools", "A")}


def refuse(call: Callable[[], object], good: Arguments, error: type[Exception], *words: str) -> None:
    """The call must raise exactly this error, say all the words, and leave every byte of the good arguments' memory."""
    memory = [good["cursors"].ring_start, good["cursors"].num_committed, *(t for p in good["pools"] for t in p.tensors)]
    before = [t.clone() for t in memory]
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error, caught.value
    here = str(good["cursors"].device)
    assert all(word.replace("HERE", here) in str(caught.value) for word in words), caught.value
    assert all(same_bytes(a, b) for a, b in zip(before, memory, strict=True)), "memory was written"


def other_pool(call: Arguments, **changes: Any) -> Pool:
    pool = call["pools"][0]
    return make_pool(pool.layer, replace(pool.replay, **changes), 6, device=pool.device)


def given(name: str, change: Callable[[Any], object]) -> Callable[[Arguments], Arguments]:
    return lambda call: {name: change(call[name])}


def gaps(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], dim=1)[:, 0]


ROWS: dict[str, Bad] = {
    "source as a list": (given("source", lambda t: t.tolist()), T, ("torch.Tensor", "got list")),
    "source as a number": (given("source", lambda t: 0), T, ("torch.Tensor", "got int")),
    "source of rank 2": (given("source", lambda t: t[:, None]), V, ("expected (any,)", "got (3, 1)", "squeeze(1)")),
    "source in int16": (given("source", lambda t: t.short()), T, ("int32 or int64", "got (3,) int16", ".to(")),
    "source as a mask": (given("source", lambda t: t > 0), T, ("int32 or int64", "bool")),
    "source elsewhere": (given("source", lambda t: t.to("meta")), V, ("on HERE", "on meta", ".to(")),
    "source with gaps": (given("source", gaps), V, ("densely packed", "strides", "contiguous()")),
}
MATERIALIZE: dict[str, Bad] = {
    "destination as a list": (given("destination", lambda t: t.tolist()), T, ("destination", "got list")),
    "destination missing": (given("destination", lambda t: None), T, ("destination", "NoneType")),
    "destination of another length": (given("destination", lambda t: t[:2]), V, ("destination: expected (3,)", "(2,)")),
    "destination of another dtype": (
        given("destination", lambda t: t.int()), T, ("destination", "int64", "got (3,) int32", "destination.to(")),
    "destination elsewhere": (given("destination", lambda t: t.to("meta")), V, ("destination", "on HERE", "on meta")),
    "destination with gaps": (given("destination", gaps), V, ("destination", "densely packed")),
    "num_records as a number": (given("num_records", lambda t: 3), T, ("num_records", "torch.Tensor", "got int")),
    "num_records in int64": (given("num_records", lambda t: t.long()), T, ("num_records", "int32", "int64", ".to(")),
    "num_records of another length": (given("num_records", lambda t: t[:1]), V, ("num_records: expected (3,)", "(1,)")),
    "num_records elsewhere": (given("num_records", lambda t: t.to("meta")), V, ("num_records", "on meta")),
    "num_records with gaps": (given("num_records", gaps), V, ("num_records", "densely packed")),
}  # fmt: skip
POOLS: dict[str, Bad] = {
    "one pool alone": (given("pools", lambda p: p[0]), T, ("pools:", "got Pool", "pass [pool]")),
    "no pools at all": (given("pools", lambda p: None), T, ("pools:", "NoneType")),
    "tensors for pools": (given("pools", lambda p: [p[0], p[1].checkpoint]), T, ("pools[1]", "Pool", "got Tensor")),
    "a pool of other slots": (
        lambda c: {"pools": [c["pools"][0], make_pool(c["pools"][0].layer, c["pools"][0].replay, 7)]},
        V, ("pools[1]: expected 6 slots", "got 7", "one number of slots")),
    "a pool elsewhere": (
        lambda c: {"pools": [make_pool(c["pools"][0].layer, c["pools"][0].replay, 6, device="meta")]},
        V, ("pools[0]", "on HERE as the cursors", "got 6 on meta")),
    "a pool of another ring": (
        lambda c: {"pools": [c["pools"][0], other_pool(c, ring_capacity=9)]},
        V, ("pools[1]: expected ring_capacity 6", "got 9", "one ReplaySpec")),
    "a pool of another window": (
        lambda c: {"pools": [other_pool(c, window=4, ring_capacity=6)]},
        V, ("pools[0]: expected window 5 as the cursors', got 4",)),
    "a pool of longer drafts": (
        lambda c: {"pools": [other_pool(c, window=4, max_draft=2)], "cursors": Cursors(
            replace(c["cursors"].replay, window=4, ring_capacity=6), *cursor_tensors(c))},
        V, ("pools[0]: expected max_draft 1", "got 2")),
}  # fmt: skip
MODEL: dict[str, Bad] = {
    "an empty list of pools": (given("pools", lambda p: []), V, ("pools:", "every pool", "got none", "lost")),
    "a pool twice": (given("pools", lambda p: [p[0], p[1], p[0]]), V, ("pools[2]", "once", "pools[0] again")),
}
RATES: dict[str, Bad] = {
    "A missing": (given("A", lambda a: None), T, ("A: expected", "[HV] float32", "got NoneType", "layer's inputs")),
    "A as one tensor": (given("A", lambda a: a[0]), T, ("A: expected a sequence", "got Tensor", "pass [A]")),
    "A stacked": (given("A", torch.stack), T, ("A: expected a sequence", "got Tensor")),
    "A as a number": (given("A", lambda a: -1.0), T, ("A: expected a sequence", "got float")),
    "A as a word": (given("A", lambda a: "A"), T, ("A: expected a sequence", "got str")),
    "A of fewer layers": (given("A", lambda a: a[:1]), V, ("A: expected", "got 1 for 2 pools")),
    "A of more layers": (given("A", lambda a: [*a, a[0]]), V, ("A: expected", "got 3 for 2 pools")),
    "A of other heads": (given("A", lambda a: [a[0], a[1][:2]]), V, ("A[1]: expected (4,)", "got (2,)")),
    "A expanded over the state": (
        given("A", lambda a: [a[0], a[1][:, None, None].expand(-1, 8, 16)]), V, ("A[1]: expected (4,)",)),
    "A in 16 bits": (given("A", lambda a: [a[0].bfloat16(), a[1]]), T, ("A[0]", "float32", "got (4,) bfloat16")),
    "A of one layer missing": (given("A", lambda a: [a[0], None]), T, ("A[1]", "torch.Tensor", "NoneType")),
    "A elsewhere": (given("A", lambda a: [a[0].to("meta"), a[1]]), V, ("A[0]", "on HERE", "on meta")),
    "A with gaps": (given("A", lambda a: [gaps(a[0]), a[1]]), V, ("A[0]", "densely packed")),
}  # fmt: skip
NO_RATES: dict[str, Bad] = {
    "A where there is none": (
        given("A", lambda a: [torch.ones(4)] * 2), V, ("A: expected None", "gdn records hold log-decays", "got list")),
    "A of a mixed model": (
        lambda c: {"pools": [c["pools"][0], arguments("mamba2", c["cursors"].device)["pools"][0]], "A": [
            torch.ones(4), torch.ones(4)]},
        V, ("A[0]: expected None for a gdn pool", "got Tensor")),
}  # fmt: skip


def cursor_tensors(call: Arguments) -> tuple[Tensor, Tensor]:
    return call["cursors"].ring_start, call["cursors"].num_committed


BOTH = ROWS | POOLS | MODEL | RATES | NO_RATES


@pytest.mark.parametrize("name", BOTH | MATERIALIZE)
def test_materialize_refuses(name: str, device: torch.device) -> None:
    change, error, words = (BOTH | MATERIALIZE)[name]
    good = arguments("gdn" if name in NO_RATES else "mamba2", device)
    refuse(lambda: materialize(good | change(good)), good, error, *(("source",) if name in ROWS else ()), *words)
    materialize(good)


@pytest.mark.parametrize("name", BOTH)
def test_flush_refuses(name: str, device: torch.device) -> None:
    change, error, words = BOTH[name]
    good = arguments("gdn" if name in NO_RATES else "mamba2", device)
    refuse(lambda: flush(good | change(good)), good, error, *(("slots",) if name in ROWS else ()), *words)
    flush(good)


@pytest.mark.parametrize("name", POOLS)
def test_reset_and_copy_slots_refuse_such_pools(name: str, device: torch.device) -> None:
    change, error, words = POOLS[name]
    good = arguments("mamba2", device)
    bad = good | change(good)
    refuse(lambda: replayssm.reset(bad["cursors"], bad["source"], pools=bad["pools"]), good, error, *words)
    refuse(
        lambda: replayssm.copy_slots(bad["cursors"], bad["source"], bad["destination"], pools=bad["pools"]),
        good, error, *words,
    )  # fmt: skip


# What only the device knows.


def at(name: str, row: int, value: int) -> Callable[[Arguments], Arguments]:
    """One number of a vector is set."""
    return given(name, lambda t: t.clone().index_fill_(0, torch.tensor([row], device=t.device), value))


def with_cursor(name: str, value: int) -> Callable[[Arguments], Arguments]:
    def change(call: Arguments) -> Arguments:
        getattr(call["cursors"], name)[1] = value
        return {}

    return change


DEBUG: dict[str, tuple[Callable[[Arguments], Arguments], tuple[str, ...], tuple[str, ...] | None]] = {
    # A change, what materialize says, and what flush says where it refuses too.
    "a source beyond the end": (at("source", 1, 6), ("source", "below 6", "got 6"), ("slots", "below 6", "got 6")),
    "a destination beyond the end": (at("destination", 1, 99), ("destination", "below 6", "got 99"), None),
    "two rows into one slot": (at("destination", 0, 3), ("destination", "distinct", "got 3 more than once"), None),
    "a source that is written": (at("destination", 0, 2), ("destination", "no source", "got 2", "flush"), None),
    "a slot into itself": (at("destination", 2, 2), ("destination", "no source", "got 2", "flush"), None),
    "more records than there are": (
        at("num_records", 0, 3), ("num_records", "0 to num_committed = 2 of slot 0", "got 3"), None),
    "fewer records than none": (at("num_records", 1, -1), ("num_records", "num_committed = 5 of slot 1", "-1"), None),
    "a slot twice": (at("source", 2, 1), (), ("slots", "distinct", "got 1 more than once")),
    "a senseless count": (
        with_cursor("num_committed", 6), ("num_committed", "0 to 5", "got 6 in slot 1", "reset a slot"),
        ("num_committed", "0 to 5", "got 6 in slot 1")),
    "a senseless start": (with_cursor("ring_start", -1), ("ring_start", "got -1"), ("ring_start", "got -1")),
}  # fmt: skip


@pytest.mark.parametrize("name", DEBUG)
def test_debug_mode_refuses(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    change, by_materialize, by_flush = DEBUG[name]
    monkeypatch.setattr("replayssm.debug.DEBUG", True)
    good = arguments("mamba2", device)
    bad = good | change(good)
    if by_materialize:
        refuse(lambda: materialize(bad), good, V, *by_materialize)
    else:  # a source may have several rows
        materialize(bad | {"num_records": None})
    if by_flush:
        refuse(lambda: flush(bad), good, V, *by_flush)


def test_debug_mode_lets_padding_pass(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayssm.debug.DEBUG", True)
    good = arguments("mamba2", device)
    padded = good | {
        "source": torch.tensor([-1, 0, 99, -1], device=device),
        "destination": torch.tensor([0, 3, -5, 0], device=device),
        "num_records": torch.tensor([99, 1, -1, 7], dtype=torch.int32, device=device),
    }
    materialize(padded)
    flush(good | {"source": torch.tensor([-1, 1, -1, -9], device=device)})
    nothing = torch.tensor([-1, -1], device=device)
    materialize(good | {"source": nothing, "destination": nothing, "num_records": None})
    flush(good | {"source": nothing})
    assert good["cursors"].num_committed.tolist() == [2, 0, 0, 0, 0, 0]


def test_debug_mode_refuses_copies_into_one_slot(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayssm.debug.DEBUG", True)
    good = arguments("gdn", device)
    twice = torch.tensor([4, 3, 4], device=device)
    copy = replayssm.copy_slots
    refuse(
        lambda: copy(good["cursors"], good["source"], twice, pools=good["pools"]), good, V, "destination", "got 4 more"
    )
    copy(good["cursors"], good["source"], good["source"].flip(0), pools=good["pools"])
