"""Claim: the gates and the token-by-token recurrences are the published formulas.

The gates are compared with values of Python's `math` at their edges (the softplus threshold, an exponent that would
overflow, both ends of the bounded gate); the recurrences with states small enough to work out by hand, in integers and
powers of two, so those comparisons are exact.
"""

from __future__ import annotations

import math

import pytest
import torch

from replayssm.inputs import GdnInputs, KdaInputs, Mamba2Inputs
from replayssm.reference import recurrence

F64 = torch.float64
LOG_HALF = math.log(0.5)


def column(*numbers: float) -> torch.Tensor:
    """[1, T, 1]: one row, one head."""
    return torch.tensor(numbers, dtype=F64)[None, :, None]


def vectors(*rows: list[float]) -> torch.Tensor:
    """[1, T, 1, channels]: one row, one head."""
    return torch.tensor(rows, dtype=F64)[None, :, None, :]


@pytest.mark.parametrize("x", [-1e4, -100.0, -20.0, -1.0, 0.0, 1.0, 19.99, 20.0])
def test_softplus_below_the_threshold_is_log1p_exp(x: float) -> None:
    expected = math.log1p(math.exp(x))
    got = recurrence.softplus(torch.tensor(x, dtype=F64)).item()
    assert got == pytest.approx(expected, rel=4 * torch.finfo(F64).eps, abs=0.0)


@pytest.mark.parametrize("x", [math.nextafter(20.0, 21.0), 20.01, 89.0, 1e4, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_softplus_above_the_threshold_is_the_identity(x: float, dtype: torch.dtype) -> None:
    tensor = torch.tensor(x, dtype=F64).to(dtype)
    if dtype is F64:
        assert recurrence.softplus(tensor).item() == x
    else:
        assert recurrence.softplus(tensor).item() == pytest.approx(tensor.item(), rel=2e-9, abs=0.0)
    assert torch.isfinite(recurrence.softplus(tensor))


def test_softplus_has_no_visible_step_in_float32() -> None:
    below, above = recurrence.softplus(torch.tensor([20.0, 20.000002]))
    assert 0 < (above - below).item() <= 2 * (20.000002 - 20.0)


def test_l2norm_keeps_epsilon_under_the_root() -> None:
    x = torch.tensor([3.0, 4.0], dtype=F64)
    assert torch.equal(recurrence.l2norm(x, 0.0), x * 25**-0.5)
    assert recurrence.l2norm(x, 11.0)[0].item() == pytest.approx(3 / 6, rel=1e-15)
    assert torch.equal(recurrence.l2norm(torch.zeros(4), 1e-6), torch.zeros(4))
    assert recurrence.l2norm(x, None) is x


def mamba2(dt: torch.Tensor, **changes: object) -> Mamba2Inputs:
    rows, tokens, heads = dt.shape
    flat = torch.zeros(rows, tokens, heads, 1)
    return Mamba2Inputs(flat, dt, flat, flat, -torch.ones(heads))._replace(**changes)


def test_mamba2_dt_adds_the_bias_before_softplus() -> None:
    raw, bias = column(-1.0, 0.5, 30.0), torch.tensor([0.25], dtype=F64)
    assert torch.equal(recurrence.mamba2_dt(mamba2(raw), F64), raw)
    assert torch.equal(recurrence.mamba2_dt(mamba2(raw, dt_bias=bias), F64), raw + 0.25)
    got = recurrence.mamba2_dt(mamba2(raw, dt_bias=bias, dt_softplus=True), F64).flatten().tolist()
    assert got == pytest.approx([math.log1p(math.exp(-0.75)), math.log1p(math.exp(0.75)), 30.25], rel=1e-15)
    assert recurrence.mamba2_dt(mamba2(raw)).dtype is torch.float32


def test_a_huge_dt_neither_overflows_nor_loses_the_token() -> None:
    inputs = mamba2(torch.full((1, 1, 1), 1e30), dt_softplus=True, dt_bias=torch.ones(1))
    inputs = inputs._replace(x=torch.full((1, 1, 1, 1), 1e-30), B=torch.ones(1, 1, 1, 1), C=torch.ones(1, 1, 1, 1))
    out, state = recurrence.run(inputs, torch.full((1, 1, 1, 1), 1e30), torch.float32)
    assert out.item() == pytest.approx(1.0, rel=1e-6)
    assert state.item() == pytest.approx(1.0, rel=1e-6)


def test_gdn_log_decay() -> None:
    A_log, dt_bias = torch.tensor([0.0, 2.0], dtype=F64), torch.tensor([0.5, -0.5], dtype=F64)
    got = recurrence.gdn_log_decay(torch.tensor([1.0, 40.0], dtype=F64), A_log, dt_bias).tolist()
    assert got == pytest.approx([-math.log1p(math.exp(1.5)), -math.exp(2.0) * 39.5], rel=1e-15)


def test_kda_gate_broadcasts_rate_over_channels_and_bias_over_tokens() -> None:
    g = torch.tensor([[[0.0, 1.0], [2.0, 30.0]]], dtype=F64)
    A_log, bias = torch.tensor([0.0, 1.0], dtype=F64), torch.tensor([[0.0, -1.0], [0.5, 0.0]], dtype=F64)
    rate = [1.0, math.e]
    total = (g + bias)[0].tolist()
    free = [[-rate[h] * (x if x > 20 else math.log1p(math.exp(x))) for x in total[h]] for h in range(2)]
    bounded = [[-5 / (1 + math.exp(-rate[h] * x)) for x in total[h]] for h in range(2)]
    torch.testing.assert_close(recurrence.kda_log_decay(g, A_log, bias, None)[0], torch.tensor(free, dtype=F64))
    torch.testing.assert_close(recurrence.kda_log_decay(g, A_log, bias, -5.0)[0], torch.tensor(bounded, dtype=F64))


@pytest.mark.parametrize("A_log", [-10.0, 0.0, 5.0, 80.0])
def test_the_bounded_gate_scales_and_does_not_clamp(A_log: float) -> None:
    g = torch.tensor([-1e30, -30.0, -1.0, 0.0, 1.0, 30.0, 1e30])[:, None, None]
    gate = recurrence.kda_log_decay(g, torch.tensor([A_log]), torch.zeros(1, 1), -5.0).flatten()
    assert torch.isfinite(gate).all()
    assert gate.max() <= 0
    assert gate.min() >= -5
    assert (gate[0], gate[3], gate[-1]) == (0, -2.5, -5)
    assert (gate.diff() <= 0).all()


def test_mamba2_by_hand() -> None:
    inputs = Mamba2Inputs(
        x=vectors([2.0], [4.0]),
        dt=column(1.0, 2.0),
        B=vectors([1.0, 3.0], [0.0, 1.0]),
        C=vectors([1.0, 1.0], [2.0, 1.0]),
        A=torch.tensor([LOG_HALF], dtype=F64),
        D=torch.tensor([10.0], dtype=F64),
    )
    # S0 = [4 8]. Token 0: half of it + 1 * 2 * [1 3] = [4 10]. Token 1: a quarter of that + 2 * 4 * [0 1] = [1 10.5].
    out, state = recurrence.run(inputs, vectors([4.0, 8.0]).reshape(1, 1, 1, 2))
    torch.testing.assert_close(state.flatten(), torch.tensor([1.0, 10.5], dtype=F64), rtol=1e-15, atol=0)
    torch.testing.assert_close(out.flatten(), torch.tensor([14 + 20, 12.5 + 40], dtype=F64), rtol=1e-15, atol=0)

    gated, _ = recurrence.run(inputs._replace(z=vectors([0.0], [100.0])), vectors([4.0, 8.0]).reshape(1, 1, 1, 2))
    torch.testing.assert_close(gated.flatten(), torch.tensor([0.0, 5250.0], dtype=F64), rtol=1e-15, atol=0)


def delta_rule_inputs(kind: str) -> GdnInputs | KdaInputs:
    q, k, v = vectors([1.0, 2.0], [1.0, 1.0]), vectors([1.0, 0.0], [1.0, 1.0]), vectors([6.0], [1.0])
    beta = column(0.0, 1e3)  # 1/2, then 1
    if kind == "gdn":
        # softplus(0) = log 2, so a rate of 1 halves the state.
        zero = torch.zeros(1, dtype=F64)
        return GdnInputs(q, k, v, column(0.0, 0.0), beta, zero, zero, scale=1.0, l2norm_eps=None)
    # Channel 0 halves; channel 1 stays: softplus(-inf) = 0.
    g = vectors([0.0, -1e4], [0.0, -1e4])
    return KdaInputs(
        q, k, v, g, beta, torch.zeros(1, dtype=F64), torch.zeros(1, 2, dtype=F64), None, scale=1.0, l2norm_eps=None
    )


def test_gdn_by_hand() -> None:
    # S0 = [4 8] -> [2 4]; u = 1/2 (6 - 2) = 2 -> [4 4], o = 12. -> [2 2]; u = 1 - 4 = -3 -> [-1 -1], o = -2.
    out, state = recurrence.run(delta_rule_inputs("gdn"), vectors([4.0, 8.0]).reshape(1, 1, 1, 2))
    torch.testing.assert_close(out.flatten(), torch.tensor([12.0, -2.0], dtype=F64), rtol=1e-15, atol=0)
    torch.testing.assert_close(state.flatten(), torch.tensor([-1.0, -1.0], dtype=F64), rtol=1e-15, atol=0)


def test_kda_by_hand() -> None:
    # S0 = [4 8] -> [2 8]; u = 1/2 (6 - 2) = 2 -> [4 8], o = 20. -> [2 8]; u = 1 - 10 = -9 -> [-7 -1], o = -8.
    out, state = recurrence.run(delta_rule_inputs("kda"), vectors([4.0, 8.0]).reshape(1, 1, 1, 2))
    torch.testing.assert_close(out.flatten(), torch.tensor([20.0, -8.0], dtype=F64), rtol=1e-15, atol=0)
    torch.testing.assert_close(state.flatten(), torch.tensor([-7.0, -1.0], dtype=F64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_the_scale_defaults_to_the_root_of_the_key_width(kind: str) -> None:
    inputs, state = delta_rule_inputs(kind), torch.ones(1, 1, 1, 2)
    unscaled, _ = recurrence.run(inputs, state)
    scaled, _ = recurrence.run(inputs._replace(scale=None), state)
    torch.testing.assert_close(scaled, unscaled * 2**-0.5, rtol=1e-15, atol=0)


def test_consecutive_value_heads_share_a_key_head() -> None:
    key = torch.tensor([[[[1.0], [100.0]]]])
    inputs = Mamba2Inputs(torch.ones(1, 1, 4, 1), torch.ones(1, 1, 4), key, torch.ones_like(key), torch.zeros(4))
    out, _ = recurrence.run(inputs, torch.zeros(1, 4, 1, 1))
    assert out.flatten().tolist() == [1, 1, 100, 100]


def test_the_state_given_is_left_alone_and_carries_over() -> None:
    inputs, start = delta_rule_inputs("kda"), torch.tensor([[[[4.0, 8.0]]]])
    whole, end = recurrence.run(inputs, start)
    first, middle = recurrence.run(inputs._replace(**{n: getattr(inputs, n)[:, :1] for n in "qkvg"}), start)
    assert start.flatten().tolist() == [4, 8]
    second, also_end = recurrence.run(
        inputs._replace(beta=inputs.beta[:, 1:], **{n: getattr(inputs, n)[:, 1:] for n in "qkvg"}), middle
    )
    assert torch.equal(torch.cat([first, second], 1), whole)
    assert torch.equal(also_end, end)


def test_other_inputs_are_refused() -> None:
    with pytest.raises(TypeError, match="inputs: expected Mamba2Inputs"):
        recurrence.tokens((torch.zeros(1),), torch.float32)
