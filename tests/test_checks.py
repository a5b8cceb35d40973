"""Bad input is refused before anything is written, with a message that names it: argument, expected, got, remedy.

Every argument of the verbs that can be wrong in rank, shape, dtype, device, stride or range is made wrong once, on
a first call and on a later one (on CUDA a later call takes a short way past the checks), and all memory is compared
byte for byte before and after. What only the device knows (slots out of range, a slot twice, senseless cursors) is
checked in debug mode.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_kernels
import replayssm
from cute_kernels.arch import arch_of_capability
from cute_kernels.configs import Mamba2Options
from replayssm import GdnInputs, KdaInputs, Mamba2Inputs, ReplaySpec, make_cursors, make_pool
from replayssm.spec import Recurrence
from tests.helpers.draw import BASES, KERNELS, ROLES, base_of, make_inputs, part, tensors_of, with_parts
from tests.helpers.oracle import BASE, Scene, Work, busy_scene, per_token
from tests.helpers.tolerance import same_bytes

META = torch.device("meta")


def elsewhere(tensor: Tensor) -> Tensor:
    """The same facts on another device."""
    return tensor.cpu() if tensor.is_cuda else tensor.to(META)


def misaligned(tensor: Tensor) -> Tensor:
    """A packed copy that starts one element behind a boundary of 16 bytes."""
    return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)


def every_other(tensor: Tensor) -> Tensor:
    """The same shape with a gap behind each element of the last axis."""
    return torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)[..., 0]


def refuse(work: Work, call: Callable[[], object], error: type[Exception], *words: str) -> None:
    """The call must raise exactly this error, say all the words, and leave every byte of the work."""
    before = work.clone()
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert all(word in message for word in words), message
    assert all(same_bytes(a, b) for a, b in zip(before.written(), work.written(), strict=True)), "memory was written"


def inputs_with(**changes: Callable[[Tensor], object]) -> Callable[[Work], dict[str, Any]]:
    """A call whose inputs are changed field by field."""

    def arguments(work: Work) -> dict[str, Any]:
        return {"inputs": work.inputs._replace(**{n: change(getattr(work.inputs, n)) for n, change in changes.items()})}

    return arguments


def gdn(work: Work) -> GdnInputs:
    x, dt, B, C, A, *_ = work.inputs
    return GdnInputs(C, B, x, dt, dt, A, A)


V, T = ValueError, TypeError
Bad = tuple[Callable[[Work], dict[str, Any]], type[Exception], tuple[str, ...]]
BAD_STEP: dict[str, Bad] = {
    "inputs of another layer": (lambda w: {"inputs": gdn(w)}, T, ("inputs", "Mamba2Inputs", "mamba2", "GdnInputs")),
    "inputs as a tuple": (lambda w: {"inputs": tuple(w.inputs)}, T, ("inputs", "Mamba2Inputs", "got tuple")),
    "no inputs": (lambda w: {"inputs": None}, T, ("inputs", "Mamba2Inputs", "NoneType")),
    "x of rank 3": (inputs_with(x=lambda x: x.squeeze(1)), V, ("inputs.x", "expected (9,", "4, 64)", "unsqueeze(1)")),
    "x of rank 5": (inputs_with(x=lambda x: x[:, :, None]), V, ("inputs.x", "squeeze(1)")),
    "x of another head_dim": (inputs_with(x=lambda x: x[..., :32]), V, ("inputs.x", "64", "got (9, 1, 4, 32)")),
    "x of fewer heads": (inputs_with(x=lambda x: x[:, :, :2]), V, ("inputs.x", "got (9, 1, 2, 64)")),
    "x of fewer rows": (inputs_with(x=lambda x: x[:3]), V, ("inputs.x", "expected (9", "got (3, 1, 4, 64)")),
    "x of another dtype": (inputs_with(x=lambda x: x.half()), T, ("inputs.x", "bfloat16", "got", "float16", ".to(")),
    "x as a list": (inputs_with(x=lambda x: x.tolist()), T, ("inputs.x", "torch.Tensor", "got list")),
    "x missing": (inputs_with(x=lambda x: None), T, ("inputs.x", "torch.Tensor", "NoneType")),
    "x elsewhere": (inputs_with(x=elsewhere), V, ("inputs.x", "expected", "got", ".to(")),
    "x with gaps": (inputs_with(x=every_other), V, ("inputs.x", "densely packed", "strides", "contiguous()")),
    "x misaligned": (inputs_with(x=misaligned), V, ("inputs.x", "16-byte", "got address")),
    "dt of rank 2": (inputs_with(dt=lambda t: t.squeeze(1)), V, ("inputs.dt", "expected (9, 1, 4)", "unsqueeze(1)")),
    "dt expanded over channels": (
        inputs_with(dt=lambda t: t[..., None].expand(-1, -1, -1, 64)), V, ("inputs.dt", "expected (9, 1, 4)")),
    "dt of another dtype": (inputs_with(dt=lambda t: t.half()), T, ("inputs.dt", "bfloat16 or float32", "float16")),
    "dt in float64": (inputs_with(dt=lambda t: t.double()), T, ("inputs.dt", "bfloat16 or float32", "float64")),
    "dt with gaps": (inputs_with(dt=every_other), V, ("inputs.dt", "densely packed")),
    "B of other groups": (inputs_with(B=lambda t: t[:, :, :1]), V, ("inputs.B", "expected (9, 1, 2, 64)")),
    "B of another d_state": (inputs_with(B=lambda t: t[..., :32]), V, ("inputs.B", "got (9, 1, 2, 32)")),
    "B in float32": (inputs_with(B=lambda t: t.float()), T, ("inputs.B", "bfloat16", "float32")),
    "C of other rows": (inputs_with(C=lambda t: t[:1]), V, ("inputs.C", "got (1, 1, 2, 64)")),
    "C misaligned": (inputs_with(C=misaligned), V, ("inputs.C", "16-byte")),
    "A in 16 bits": (inputs_with(A=lambda t: t.bfloat16()), T, ("inputs.A", "float32", "got", "bfloat16")),
    "A of other heads": (inputs_with(A=lambda t: t[:2]), V, ("inputs.A", "expected (4,)", "got (2,)")),
    "A expanded over the state": (
        inputs_with(A=lambda t: t[:, None, None].expand(-1, 64, 64)), V, ("inputs.A", "expected (4,)")),
    "A expanded from one": (inputs_with(A=lambda t: t[:1].expand(4)), V, ("inputs.A", "densely packed")),
    "A missing": (inputs_with(A=lambda t: None), T, ("inputs.A", "torch.Tensor")),
    "D per channel": (inputs_with(D=lambda t: t[:, None].expand(-1, 64)), V, ("inputs.D", "expected (4,)")),
    "D in float64": (inputs_with(D=lambda t: t.double()), T, ("inputs.D", "float64")),
    "D as a number": (inputs_with(D=lambda t: 1.0), T, ("inputs.D", "torch.Tensor", "float")),
    "z of another shape": (inputs_with(z=lambda t: t[..., :32]), V, ("inputs.z", "got (9, 1, 4, 32)")),
    "z in float32": (inputs_with(z=lambda t: t.float()), T, ("inputs.z", "bfloat16")),
    "z elsewhere": (inputs_with(z=elsewhere), V, ("inputs.z", "expected")),
    "dt_bias of other heads": (inputs_with(dt_bias=lambda t: t[:3]), V, ("inputs.dt_bias", "got (3,)")),
    "more tokens than max_draft": (
        lambda w: {"inputs": per_token(w.inputs, lambda t: torch.cat([t, t], 1))},
        V, ("inputs", "max_draft = 1", "T = 2", "larger ReplaySpec.max_draft")),
    "no tokens": (lambda w: {"inputs": per_token(w.inputs, lambda t: t[:, :0])}, V, ("inputs", "max_draft", "T = 0")),
    "indices as a list": (lambda w: {"cache_indices": w.cache_indices.tolist()}, T, ("cache_indices", "got list")),
    "indices missing": (lambda w: {"cache_indices": None}, T, ("cache_indices", "NoneType")),
    "indices of rank 2": (lambda w: {"cache_indices": w.cache_indices[:, None]}, V, ("cache_indices", "squeeze(1)")),
    "indices in int16": (lambda w: {"cache_indices": w.cache_indices.short()}, T, ("cache_indices", "int32 or int64")),
    "indices in float": (lambda w: {"cache_indices": w.cache_indices.float()}, T, ("cache_indices", "float32")),
    "indices with gaps": (lambda w: {"cache_indices": every_other(w.cache_indices)}, V, ("cache_indices", "packed")),
    "indices elsewhere": (lambda w: {"cache_indices": elsewhere(w.cache_indices)}, V, ("cache_indices", ".to(")),
    "out of another shape": (lambda w: {"out": w.inputs.x.squeeze(1).clone()}, V, ("out", "expected (9, 1, 4, 64)")),
    "out of another dtype": (lambda w: {"out": w.inputs.x.float()}, T, ("out", "bfloat16", "float32")),
    "out with gaps": (lambda w: {"out": every_other(w.inputs.x)}, V, ("out", "densely packed")),
    "out misaligned": (lambda w: {"out": misaligned(w.inputs.x)}, V, ("out", "16-byte")),
    "out elsewhere": (lambda w: {"out": elsewhere(w.inputs.x)}, V, ("out", "expected")),
    "a mask of bytes": (lambda w: {"force_fold": w.force_fold.byte()}, T, ("force_fold", "bool", "uint8")),
    "a mask of integers": (lambda w: {"force_fold": w.force_fold.int()}, T, ("force_fold", "bool", "int32")),
    "a mask of other rows": (lambda w: {"force_fold": w.force_fold[:3]}, V, ("force_fold", "expected (9,)", "(3,)")),
    "a mask as a list": (lambda w: {"force_fold": w.force_fold.tolist()}, T, ("force_fold", "got list")),
    "a mask elsewhere": (lambda w: {"force_fold": elsewhere(w.force_fold)}, V, ("force_fold", "expected")),
    "cursors of another window": (
        lambda w: {"cursors": make_cursors(replace(w.pool.replay, window=4), w.pool.num_slots, device=w.pool.device)},
        V, ("cursors", "window 5", "got 4")),
    "cursors of another ring": (
        lambda w: {"cursors": make_cursors(ReplaySpec(5), w.pool.num_slots, device=w.pool.device)},
        V, ("cursors", "ring_capacity 7", "got 6")),
    "cursors of other slots": (
        lambda w: {"cursors": make_cursors(w.pool.replay, 3, device=w.pool.device)},
        V, ("cursors", "9 slots", "got 3")),
}  # fmt: skip


def role(name: str, change: Callable[[Tensor], object]) -> Callable[[Work], dict[str, Any]]:
    """A call whose inputs have one tensor changed, named by its role."""
    return lambda work: {"inputs": with_parts(work.inputs, **{name: change(part(work.inputs, name))})}


def mamba2(work: Work) -> Mamba2Inputs:
    inputs = make_inputs(BASE, len(work.cache_indices), torch.Generator())
    return inputs._replace(**{name: t.to(work.pool.device) for name, t in tensors_of(inputs).items()})


# Of the delta rules: v, q, k, A_log and dt_bias are of both, the gate is a or g, beta is b or beta.
OF_DELTA_RULE: dict[str, Bad] = {
    "inputs of another layer": (lambda w: {"inputs": mamba2(w)}, T, ("inputs", "Mamba2Inputs", "layer, got")),
    "v of rank 3": (role("value", lambda t: t.squeeze(1)), V, ("inputs.v", "expected (9,", "4, 64)", "unsqueeze(1)")),
    "v of another head_dim": (role("value", lambda t: t[..., :32]), V, ("inputs.v", "64", "got (9, 1, 4, 32)")),
    "v of the heads of k": (role("value", lambda t: t[:, :, :2]), V, ("inputs.v", "got (9, 1, 2, 64)")),
    "v of another dtype": (role("value", lambda t: t.half()), T, ("inputs.v", "bfloat16", "float16", ".to(")),
    "v with gaps": (role("value", every_other), V, ("inputs.v", "densely packed", "contiguous()")),
    "v misaligned": (role("value", misaligned), V, ("inputs.v", "16-byte")),
    "q repeated for all heads": (
        role("query", lambda t: t.repeat_interleave(2, 2)), V, ("inputs.q", "expected (9, 1, 2, 64)", "(9, 1, 4, 64)")),
    "q of another d_state": (role("query", lambda t: t[..., :32]), V, ("inputs.q", "got (9, 1, 2, 32)")),
    "q misaligned": (role("query", misaligned), V, ("inputs.q", "16-byte")),
    "k in float32": (role("key", lambda t: t.float()), T, ("inputs.k", "bfloat16", "float32")),
    "k of other rows": (role("key", lambda t: t[:1]), V, ("inputs.k", "got (1, 1, 2, 64)")),
    "k elsewhere": (role("key", elsewhere), V, ("inputs.k", "expected", ".to(")),
    "a gate of another dtype": (role("gate", lambda t: t.half()), T, ("inputs.", "bfloat16 or float32", "float16")),
    "a gate with gaps": (role("gate", every_other), V, ("inputs.", "densely packed")),
    "A_log in 16 bits": (role("rate", lambda t: t.bfloat16()), T, ("inputs.A_log", "float32", "bfloat16")),
    "A_log of other heads": (role("rate", lambda t: t[:2]), V, ("inputs.A_log", "expected (4,)", "got (2,)")),
    "A_log missing": (role("rate", lambda t: None), T, ("inputs.A_log", "torch.Tensor")),
    "dt_bias in 16 bits": (inputs_with(dt_bias=lambda t: t.bfloat16()), T, ("inputs.dt_bias", "float32", "bfloat16")),
    "dt_bias of other heads": (inputs_with(dt_bias=lambda t: t[:3]), V, ("inputs.dt_bias", "expected (4")),
    "dt_bias missing": (inputs_with(dt_bias=lambda t: None), T, ("inputs.dt_bias", "torch.Tensor")),
    "scale as a tensor": (
        lambda w: {"inputs": w.inputs._replace(scale=torch.ones(1))}, T, ("inputs.scale", "number", "Tensor")),
    "l2norm_eps as a word": (
        lambda w: {"inputs": w.inputs._replace(l2norm_eps="1e-6")}, T, ("inputs.l2norm_eps", "number", "str")),
    "no tokens": (BAD_STEP["no tokens"][0], V, ("inputs", "max_draft", "T = 0")),
    "out of another dtype": (lambda w: {"out": part(w.inputs, "value").float()}, T, ("out", "bfloat16", "float32")),
}  # fmt: skip
OF_ONE: dict[Recurrence, dict[str, Bad]] = {
    "mamba2": BAD_STEP,
    "gdn": OF_DELTA_RULE | {
        "a of rank 2": (inputs_with(a=lambda t: t.squeeze(1)), V, ("inputs.a", "expected (9, 1, 4)", "unsqueeze(1)")),
        "a by channel": (
            inputs_with(a=lambda t: t[..., None].expand(-1, -1, -1, 64)), V, ("inputs.a", "expected (9, 1, 4)")),
        "b of another dtype": (inputs_with(b=lambda t: t.half()), T, ("inputs.b", "bfloat16 or float32", "float16")),
        "b of fewer heads": (inputs_with(b=lambda t: t[..., :2]), V, ("inputs.b", "got (9, 1, 2)")),
    },
    "kda": OF_DELTA_RULE | {
        "g of one number a head": (inputs_with(g=lambda t: t[..., 0]), V, ("inputs.g", "expected (9, 1, 4, 64)")),
        "g of the heads of k": (inputs_with(g=lambda t: t[:, :, :2]), V, ("inputs.g", "got (9, 1, 2, 64)")),
        "beta of rank 2": (inputs_with(beta=lambda t: t.squeeze(1)), V, ("inputs.beta", "expected (9, 1, 4)")),
        "beta of another dtype": (inputs_with(beta=lambda t: t.half()), T, ("inputs.beta", "or float32", "float16")),
        "lower_bound above zero": (
            lambda w: {"inputs": w.inputs._replace(lower_bound=5.0)}, V, ("inputs.lower_bound", "negative", "5.0")),
        "dt_bias of one number a head": (
            inputs_with(dt_bias=lambda t: t[:, 0]), V, ("inputs.dt_bias", "expected (4, 64)", "got (4,)")),
    },
}  # fmt: skip
WRONG = [(kind, name) for kind, table in OF_ONE.items() for name in table]


def refuse_step(kind: Recurrence, name: str, work: Work) -> None:
    """One entry of the table against this work, which must go on working."""
    change, error, words = OF_ONE[kind][name]
    changed: dict[str, Any] = {"cursors": work.cursors, "inputs": work.inputs, "cache_indices": work.cache_indices}
    changed |= {"force_fold": work.force_fold} | change(work)
    out = changed.get("out")
    marked = out.clone() if isinstance(out, Tensor) else None
    cursors, inputs = changed.pop("cursors"), changed.pop("inputs")
    refuse(work, lambda: replayssm.step(work.pool, cursors, inputs, **changed), error, *words)
    assert marked is None or marked.is_meta or same_bytes(marked, out)
    work.step()


@pytest.mark.parametrize(("kind", "name"), WRONG)
def test_step_refuses(kind: Recurrence, name: str, device: torch.device) -> None:
    refuse_step(kind, name, busy_scene(base_of(kind, device)).on(device))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "name"), WRONG)
def test_a_later_step_refuses(kind: Recurrence, name: str) -> None:
    work = busy_scene(base_of(kind, torch.device("cuda"))).on("cuda")
    work.step()
    refuse_step(kind, name, work)


BAD_COMMIT: dict[str, Bad] = {
    "no draft": (lambda w: {"num_draft": 0}, V, ("num_draft", "1 to max_draft = 1", "got 0", "ReplaySpec.max_draft")),
    "a longer draft": (lambda w: {"num_draft": 2}, V, ("num_draft", "max_draft = 1", "got 2")),
    "a draft in words": (lambda w: {"num_draft": "1"}, V, ("num_draft", "got '1'")),
    "indices as a list": (lambda w: {"cache_indices": w.cache_indices.tolist()}, T, ("cache_indices", "got list")),
    "indices of rank 2": (lambda w: {"cache_indices": w.cache_indices[:, None]}, V, ("cache_indices", "squeeze(1)")),
    "indices in int16": (lambda w: {"cache_indices": w.cache_indices.short()}, T, ("cache_indices", "int32 or int64")),
    "indices elsewhere": (lambda w: {"cache_indices": elsewhere(w.cache_indices)}, V, ("cache_indices", "expected")),
    "acceptance in int64": (lambda w: {"num_accepted": w.cache_indices}, T, ("num_accepted", "int32", "int64")),
    "acceptance as a list": (lambda w: {"num_accepted": [1] * 9}, T, ("num_accepted", "got list")),
    "acceptance of other rows": (lambda w: {"num_accepted": w.cache_indices[:2].int()}, V, ("num_accepted", "(2,)")),
    "a mask of bytes": (lambda w: {"force_fold": w.force_fold.byte()}, T, ("force_fold", "bool", "uint8")),
    "a mask of other rows": (lambda w: {"force_fold": w.force_fold[:2]}, V, ("force_fold", "expected (9,)", "(2,)")),
    "a mask as a list": (lambda w: {"force_fold": [False] * 9}, T, ("force_fold", "got list")),
}  # fmt: skip


def refuse_commit(name: str, work: Work) -> None:
    """One entry of the table against this work."""
    change, error, words = BAD_COMMIT[name]
    arguments = {"cache_indices": work.cache_indices, "force_fold": work.force_fold, **change(work)}
    refuse(work, lambda: replayssm.commit(work.cursors, **arguments), error, *words)


@pytest.mark.parametrize("name", BAD_COMMIT)
def test_commit_refuses(name: str, device: torch.device) -> None:
    refuse_commit(name, busy_scene(BASE).on(device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", BAD_COMMIT)
def test_a_later_commit_refuses(name: str) -> None:
    work = busy_scene(BASE).on("cuda")
    work.commit()
    work.commit(num_accepted=torch.zeros_like(work.cache_indices, dtype=torch.int32))
    refuse_commit(name, work)


BAD_SLOTS: dict[str, tuple[Callable[[Tensor], object], type[Exception], tuple[str, ...]]] = {
    "a list": (lambda t: t.tolist(), T, ("torch.Tensor", "got list")),
    "a number": (lambda t: 0, T, ("torch.Tensor", "got int")),
    "a scalar": (lambda t: t[0], V, ("expected",)),
    "rank 2": (lambda t: t[:, None], V, ("expected",)),
    "int16": (lambda t: t.short(), T, ("int64 or int32", "int16")),
    "a mask": (lambda t: t > 0, T, ("int64 or int32", "bool")),
    "elsewhere": (elsewhere, V, ("expected", "got")),
}


@pytest.mark.parametrize("name", BAD_SLOTS)
def test_reset_and_copy_refuse(name: str, device: torch.device) -> None:
    change, error, words = BAD_SLOTS[name]
    work = Scene(BASE, (2, 5)).on(device)
    good, pools = work.slots, [work.pool]
    bad: Any = change(good)
    refuse(work, lambda: replayssm.reset(work.cursors, bad, pools=pools), error, "slots", *words)
    refuse(work, lambda: replayssm.copy_slots(work.cursors, bad, good, pools=pools), error, "source", *words)
    refuse(work, lambda: replayssm.copy_slots(work.cursors, good, bad, pools=pools), error, "destination", *words)


def test_copy_refuses_vectors_of_two_lengths(device: torch.device) -> None:
    work = Scene(BASE, (2, 5)).on(device)
    slots, copy = work.slots, replayssm.copy_slots
    refuse(work, lambda: copy(work.cursors, slots, slots[:1], pools=[work.pool]), V, "destination", "(2,)", "(1,)")


# What only the device knows.


def with_duplicate(work: Work) -> None:
    work.cache_indices[0] = work.cache_indices[1]


def with_cursor(name: str, value: int) -> Callable[[Work], object]:
    """The cursor of the first live row's slot is set to a value."""
    return lambda work: getattr(work.cursors, name)[int(work.slots[0])].fill_(value)


DEBUG: dict[str, tuple[Callable[[Work], object], tuple[str, ...]]] = {
    "two rows on one slot": (with_duplicate, ("cache_indices", "distinct", "more than once")),
    "a slot out of range": (lambda w: w.cache_indices[0].fill_(9), ("cache_indices", "below 9", "got 9")),
    "a ring start below 0": (with_cursor("ring_start", -1), ("ring_start", "0 to 6", "got -1")),
    "a ring start out of range": (with_cursor("ring_start", 7), ("ring_start", "0 to 6", "got 7")),
    "more records than the window": (with_cursor("num_committed", 6), ("num_committed", "0 to 5", "got 6", "reset a")),
    "fewer records than none": (with_cursor("num_committed", -2), ("num_committed", "0 to 5", "got -2")),
}


@pytest.mark.parametrize("name", DEBUG)
def test_debug_mode_refuses(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    change, words = DEBUG[name]
    monkeypatch.setattr("replayssm.debug.DEBUG", True)
    work = busy_scene(BASE).on(device)
    work.clone().step()  # padding repeats -1, and unused slots hold senseless cursors: neither is refused
    work.clone().commit()
    change(work)
    refuse(work, work.step, V, *words)
    refuse(work, work.commit, V, *words)


def test_debug_mode_refuses_what_rows_accept_and_slots_beyond_the_ends(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayssm.debug.DEBUG", True)
    work = busy_scene(BASE).on(device)
    accepted = torch.ones_like(work.cache_indices, dtype=torch.int32)
    accepted[work.cache_indices < 0] = 99  # of padding it says nothing
    work.clone().commit(num_accepted=accepted)
    live = int((work.cache_indices >= 0).nonzero()[0])
    for count in (-1, 2):
        accepted[live] = count
        refuse(work, lambda: work.commit(num_accepted=accepted), V, "num_accepted", "num_draft = 1", f"got {count}")
    for slot in (-1, work.pool.num_slots):
        slots = torch.tensor([slot], device=device)
        refuse(work, lambda slots=slots: replayssm.reset(work.cursors, slots), V, "slots", f"[{slot}]")
    first, beyond = torch.tensor([0], device=device), torch.tensor([-1], device=device)
    refuse(work, lambda: replayssm.copy_slots(work.cursors, first, beyond, pools=[work.pool]), V, "destination", "[-1]")


@pytest.mark.parametrize("value", ["1", "0", None])
def test_debug_mode_is_asked_for_by_the_environment(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("REPLAYSSM_DEBUG", raising=False)
    else:
        monkeypatch.setenv("REPLAYSSM_DEBUG", value)
    spec = importlib.util.find_spec("replayssm.debug")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (value == "1") is module.DEBUG


# What this machine lacks.


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nvidia-cutlass-dsl were not installed."""
    for name in ("step", "commit", "compile", "dtypes"):
        monkeypatch.delitem(sys.modules, f"cute_kernels.{name}", raising=False)
        monkeypatch.delattr(cute_kernels, name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cutlass"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cutlass", None)


MISSING = ("nvidia-cutlass-dsl", "pip install", "move the tensors to the CPU")


def test_a_missing_compiler_is_named(no_compiler: None) -> None:
    with pytest.raises(NotImplementedError) as caught:
        replayssm.warmup(BASE.layer, BASE.replay, Mamba2Options(), arch="sm_90a")
    assert all(word in str(caught.value) for word in MISSING)


def test_the_cpu_needs_no_compiler(no_compiler: None) -> None:
    work = busy_scene(BASE).on("cpu")
    work.step()
    work.commit()


@pytest.mark.gpu
def test_cuda_tensors_without_a_compiler_are_refused(no_compiler: None) -> None:
    work = busy_scene(BASE).on("cuda")
    refuse(work, work.step, NotImplementedError, *MISSING)
    refuse(work, work.commit, NotImplementedError, *MISSING)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (12, 0), (12, 1)])
def test_a_gpu_without_kernels_is_named(capability: tuple[int, int]) -> None:
    """Older than sm_90, or of a consumer family that datacentre code hangs or crashes on."""
    with pytest.raises(NotImplementedError) as caught:
        arch_of_capability(capability)
    assert all(word in str(caught.value) for word in ("compute capability", str(capability), "(9, 0)", "CPU"))


@pytest.mark.gpu
def test_cuda_tensors_on_an_old_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    work = busy_scene(BASE).on("cuda")
    refuse(work, work.step, NotImplementedError, "compute capability", "(8, 0)")
    refuse(work, work.commit, NotImplementedError, "compute capability", "(8, 0)")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KERNELS)
def test_geometries_without_a_kernel_are_refused(kind: Recurrence) -> None:
    for V_, K_, word in ((32, 64, "head_dim"), (64, 32, "d_state")):
        case = replace(BASES[kind], V=V_, K=K_)
        work = Scene(case, (0, 5)).on("cuda")
        refuse(work, work.step, NotImplementedError, word, "supported")


@pytest.mark.gpu
def test_tensors_of_two_devices_are_refused() -> None:
    """A pool on one device, cursors or all inputs on the other."""
    on_cpu, on_gpu = busy_scene(BASE).on("cpu"), busy_scene(BASE).on("cuda")
    for pool, cursors, inputs, indices in (
        (on_gpu, on_cpu, on_gpu, on_gpu), (on_cpu, on_gpu, on_cpu, on_cpu), (on_cpu, on_cpu, on_gpu, on_cpu),
    ):  # fmt: skip
        for watched in (on_cpu, on_gpu):
            refuse(
                watched,
                lambda p=pool, c=cursors, i=inputs, s=indices: replayssm.step(
                    p.pool, c.cursors, i.inputs, cache_indices=s.cache_indices
                ),
                V,
                "expected",
                "got",
            )


@pytest.mark.parametrize("kind", OF_ONE)
def test_inputs_are_named_as_the_docstring_names_them(kind: Recurrence) -> None:
    """The tables above name every field, and the pool's own checks are those of `test_pool`."""
    layer = {"mamba2": Mamba2Inputs, "gdn": GdnInputs, "kda": KdaInputs}[kind]
    tested = {name.partition(" ")[0] for name in OF_ONE[kind]} & set(layer._fields)
    tested |= {ROLES[layer]["gate"]}  # "a gate"
    assert tested == set(layer._fields) - {"dt_softplus", "round_beta", "cu_seqlens"}
    assert make_pool(BASES[kind].layer, BASES[kind].replay, 1).num_slots == 1
