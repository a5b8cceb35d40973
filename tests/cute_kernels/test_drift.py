"""Decoding for thousands of tokens errs no more than the plain recurrence does in the same precision.

A state that is rounded once too often, or records that are, cost little in a step and add up over a sequence until the
text falls apart; 16-bit states of the delta rule are known for it. Grid: each recurrence, each dtype of the checkpoint,
one token a step and 4, window 16, bfloat16 inputs, every token kept, heads of short memory and of long, of which the
longest forgets a part in 5000 a token. 4096 tokens on a GPU; 320 on a CPU, where the torch twin runs. Against float64,
and printed:

    replay    the public verbs
    float32   the recurrence token by token in float32
    plain     the same, its state rounded to the dtype of the checkpoint at each token
    same      the same, and what a token adds rounded to the dtype of the activations, where that is no input

Replay rounds what `same` rounds, and a 16-bit state only once a window: then it must err no more, and no more than
`plain` where records and state are of one dtype. Outputs are compared by quarters of the sequence, so that late ones
are not hidden by early ones. Teeth: a bfloat16 state fails as a float32 one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replayssm.inputs import Inputs
from replayssm.reference import recurrence
from replayssm.spec import RECURRENCES, Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import base_of, part, per_token, tensors_of, with_parts
from tests.helpers.oracle import F32, F64, Scene, make_inputs
from tests.helpers.tolerance import FACTOR_16_BIT, FACTOR_FLOAT32, worst_error

WINDOW, SLOTS = 16, 2
BF16, F16 = torch.bfloat16, torch.float16
TOKENS = {"cpu": 320, "cuda": 4096}


def sequence(case: Case, tokens: int, device: torch.device) -> Inputs:
    """Inputs [SLOTS, tokens, ...] whose slowest head forgets next to nothing."""
    inputs = make_inputs(replace(case, T=1), SLOTS * tokens, torch.Generator().manual_seed(3))
    inputs = per_token(inputs, lambda x: x.reshape(SLOTS, tokens, *x.shape[2:]))
    rates = torch.logspace(-2, 0.6, case.HV)  # times softplus of about -4
    inputs = with_parts(inputs, rate=-rates if case.recurrence == "mamba2" else rates.log())
    return inputs._replace(**{name: tensor.to(device) for name, tensor in tensors_of(inputs).items()})


def plain(inputs: Inputs, state_dtype: torch.dtype, record_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Output before its rounding, and the state at the end, of the recurrence in float32 from an empty state.

    The state is rounded to `state_dtype` after each token; u and key to `record_dtype`, where one is given, in what
    they add to the state.
    """
    token = recurrence.tokens(inputs, F32)
    ratio = token.value.shape[2] // token.key.shape[2]
    query, key = (t.repeat_interleave(ratio, dim=2) for t in (token.query, token.key))
    state = token.value.new_zeros(len(token.value), *token.value.shape[2:], key.shape[-1])
    readouts = []
    for t in range(token.value.shape[1]):
        state, value = state * torch.exp(token.log_decay[:, t])[..., None, :], token.value[:, t]
        if token.delta_rule:
            value = value - torch.einsum("rhvk,rhk->rhv", state, key[:, t])
        u, k = token.strength[:, t, :, None] * value, key[:, t]
        own = u * (k * query[:, t]).sum(-1, keepdim=True)
        readouts.append(torch.einsum("rhvk,rhk->rhv", state, query[:, t]) + own)
        if record_dtype is not None:
            u, k = (x.to(record_dtype).float() for x in (u, k))
        state = (state + u[..., None] * k[:, :, None]).to(state_dtype).float()
    return token.finish(torch.stack(readouts, 1)), state


def replayed(case: Case, inputs: Inputs, device: torch.device) -> tuple[Tensor, Tensor]:
    """Output of the public verbs from an empty state, and the states at the end, which one more step folds."""
    work = Scene(case, (0,) * SLOTS).on(device)
    work.pool.checkpoint.zero_()
    out = []
    for t in range(0, part(inputs, "value").shape[1], case.T):
        work.inputs = per_token(inputs, lambda x, t=t: x[:, t : t + case.T])
        out.append(work.step())
        work.commit()
    work.force_fold = torch.ones(SLOTS, dtype=torch.bool, device=device)
    work.step()
    return torch.cat(out, 1), work.pool.checkpoint[work.slots].float()


def errors(got: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> list[float]:
    """Of the output, by quarters of the sequence, and of the state."""
    quarters = [worst_error(a, b, keep=(0, 2)) for a, b in zip(got[0].chunk(4, 1), exact[0].chunk(4, 1), strict=True)]
    return [*quarters, worst_error(got[1], exact[1], keep=(0, 1))]


Figures = dict[str, list[float]]


def measured(case: Case, device: torch.device, *, checkpoint: torch.dtype | None = None) -> Figures:
    """Errors by name, printed; `checkpoint` replays with a state of another dtype."""
    inputs = sequence(case, TOKENS[device.type], device)
    exact = recurrence.run(inputs, torch.zeros(SLOTS, case.HV, case.V, case.K, device=device), F64)
    record = None if case.recurrence == "mamba2" else case.activation
    runs = {"replay": replayed(replace(case, checkpoint=checkpoint or case.checkpoint), inputs, device)}
    for name, how in {
        "float32": (F32, None),
        "plain": (case.checkpoint, None),
        "same": (case.checkpoint, record),
    }.items():
        out, state = plain(inputs, *how)
        runs[name] = out.to(case.activation), state
    figures = {name: errors(run, exact) for name, run in runs.items()}
    for name, found in figures.items():
        print(f"{case.id} {name}: output by quarters, state", *(f"{x:.2e}" for x in found))
    return figures


def faults(case: Case, figures: Figures) -> list[str]:
    """Which of the errors are too large."""
    rounded = case.checkpoint is not F32
    exactly = case.recurrence == "mamba2" and not rounded
    bounds = [FACTOR_16_BIT * x for x in figures["same"]]
    bounds[-1] = figures["same"][-1] * (FACTOR_FLOAT32 if exactly else 1.0 if rounded else FACTOR_16_BIT)
    if case.checkpoint is case.activation:
        bounds[-1] = min(bounds[-1], figures["plain"][-1])
    places = [*(f"output, quarter {i}" for i in range(1, 5)), "state"]
    return [
        f"{place}: {x:.2e}, allowed {bound:.2e}"
        for place, x, bound in zip(places, figures["replay"], bounds, strict=True)
        if not x <= bound
    ]


@pytest.mark.parametrize("num_draft", [1, 4])
@pytest.mark.parametrize("checkpoint", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("kind", RECURRENCES)
def test_a_long_sequence_errs_as_the_plain_recurrence(
    kind: Recurrence, checkpoint: torch.dtype, num_draft: int, device: torch.device
) -> None:
    case = replace(base_of(kind, device), window=WINDOW, T=num_draft, checkpoint=checkpoint)
    assert faults(case, measured(case, device)) == []


@pytest.mark.parametrize("kind", RECURRENCES)
def test_a_state_rounded_at_folds_is_seen(kind: Recurrence) -> None:
    case, device = replace(base_of(kind, torch.device("cpu")), window=WINDOW), torch.device("cpu")
    assert any("state" in fault for fault in faults(case, measured(case, device, checkpoint=BF16)))
