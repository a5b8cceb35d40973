"""The three recurrences one token at a time, and the only place where their gates are written.

With state S [V, K] of a value head, every layer does per token

    S <- S * exp(log_decay)         a scalar per head, or one number per channel of K (KDA)
    u  = strength * (value - S k)   Mamba-2: u = strength * value
    S <- S + u k^T
    o  = S q                        Mamba-2: then + D x, then * silu(z)

`tokens` brings the inputs of any layer to that form; `run` here and `replay.step` both start from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.inputs import GdnInputs, Inputs, KdaInputs, Mamba2Inputs

SOFTPLUS_THRESHOLD = 20.0


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), and x itself above 20, where exp could overflow and the two agree to float32 precision."""
    return torch.where(x > SOFTPLUS_THRESHOLD, x, torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_THRESHOLD))))


def l2norm(x: Tensor, eps: float | None) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis; x unchanged when `eps` is None."""
    return x if eps is None else x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def mamba2_dt(inputs: Mamba2Inputs, dtype: torch.dtype = torch.float32) -> Tensor:
    """The time step after bias and softplus, [rows, T, HV] in `dtype`: what a Mamba-2 record stores."""
    dt = inputs.dt.to(dtype)
    if inputs.dt_bias is not None:
        dt = dt + inputs.dt_bias.to(dtype)
    return softplus(dt) if inputs.dt_softplus else dt


def gdn_log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """-exp(A_log) * softplus(a + dt_bias).

    Args:
        a: [..., HV].
        A_log, dt_bias: [HV].
    """
    return -torch.exp(A_log) * softplus(a + dt_bias)


def kda_log_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """The log-decay of each channel: -exp(A_log) * softplus(g + dt_bias), or with a bound
    lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), which scales into [lower_bound, 0] and does not clamp.

    Args:
        g: [..., HV, K].
        A_log: [HV].
        dt_bias: [HV, K].
        lower_bound: a negative number, or None for the unbounded gate.
    """
    rate = torch.exp(A_log)[:, None]
    if lower_bound is None:
        return -rate * softplus(g + dt_bias)
    return lower_bound * torch.sigmoid(rate * (g + dt_bias))


class Tokens(NamedTuple):
    """The tokens of a step in the form that all layers share, in one compute dtype.

    Args:
        query, key: [rows, T, HK, K]; query scaled, both normalised where the layer does that.
        value: [rows, T, HV, V].
        log_decay: [rows, T, HV, 1], KDA [rows, T, HV, K]; 0 or less.
        strength: [rows, T, HV]; dt or beta.
        delta_rule: u is a correction of what the state already answers (GDN, KDA).
        skip: [rows, T, HV, V] added to the output, or None.
        gate: [rows, T, HV, V]; the output is multiplied by silu(gate), or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    strength: Tensor
    delta_rule: bool
    skip: Tensor | None = None
    gate: Tensor | None = None

    def select(self, rows: Tensor) -> Tokens:
        """The tokens of some rows; `rows` is an index or a mask over axis 0."""
        return self._each(lambda t: t[rows])

    def unpacked(self, places: Tensor, present: Tensor) -> Tokens:
        """Tokens of one row as those of several: token (r, t) is that at `places[r, t]`, or zeros where not `present`.

        Args:
            places: [rows, T] int64.
            present: [rows, T] bool.
        """
        return self._each(lambda t: t[0, places].where(present.view(*present.shape, *[1] * (t.dim() - 2)), 0))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        changed: dict[str, Any] = {name: change(t) for name, t in self._asdict().items() if isinstance(t, Tensor)}
        return self._replace(**changed)

    def finish(self, readout: Tensor) -> Tensor:
        """The output [rows, T, HV, V] from S q: skip connection, then gate."""
        if self.skip is not None:
            readout = readout + self.skip
        return readout if self.gate is None else readout * (self.gate * torch.sigmoid(self.gate))


def tokens(inputs: Inputs, dtype: torch.dtype) -> Tokens:
    """Apply the gates, the norm and the scale of a layer; everything is computed in `dtype`.

    Raises:
        TypeError: `inputs` is none of the three input types.
    """
    if isinstance(inputs, Mamba2Inputs):
        x, dt = inputs.x.to(dtype), mamba2_dt(inputs, dtype)
        return Tokens(
            query=inputs.C.to(dtype),
            key=inputs.B.to(dtype),
            value=x,
            log_decay=(inputs.A.to(dtype) * dt)[..., None],
            strength=dt,
            delta_rule=False,
            skip=None if inputs.D is None else inputs.D.to(dtype)[:, None] * x,
            gate=None if inputs.z is None else inputs.z.to(dtype),
        )
    if not isinstance(inputs, GdnInputs | KdaInputs):
        raise TypeError(f"inputs: expected Mamba2Inputs, GdnInputs or KdaInputs, got {type(inputs).__name__}")
    A_log, dt_bias = inputs.A_log.to(dtype), inputs.dt_bias.to(dtype)
    if isinstance(inputs, GdnInputs):
        log_decay, beta = gdn_log_decay(inputs.a.to(dtype), A_log, dt_bias)[..., None], inputs.b
    else:
        log_decay, beta = kda_log_decay(inputs.g.to(dtype), A_log, dt_bias, inputs.lower_bound), inputs.beta
    strength = torch.sigmoid(beta.to(dtype))
    if isinstance(inputs, GdnInputs) and inputs.round_beta:
        strength = strength.to(beta.dtype).to(dtype)
    scale = inputs.q.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale
    return Tokens(
        query=l2norm(inputs.q.to(dtype), inputs.l2norm_eps) * scale,
        key=l2norm(inputs.k.to(dtype), inputs.l2norm_eps),
        value=inputs.v.to(dtype),
        log_decay=log_decay,
        strength=strength,
        delta_rule=True,
    )


def run(inputs: Inputs, state: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Decode T tokens one after the other.

    Args:
        inputs: the tokens of `rows` rows.
        state: [rows, HV, V, K]; read only.
        dtype: dtype of all arithmetic and of both results.

    Returns:
        out [rows, T, HV, V] and the state after the last token [rows, HV, V, K].

    Source: Mamba-2 (arXiv 2405.21060), Gated DeltaNet (arXiv 2412.06464), Kimi Linear (arXiv 2510.26692).
    """
    step = tokens(inputs, dtype)
    heads_per_group = step.value.shape[2] // step.key.shape[2]
    query, key = (t.repeat_interleave(heads_per_group, dim=2) for t in (step.query, step.key))
    state = state.to(dtype)
    readouts = []
    for t in range(step.value.shape[1]):
        state = state * torch.exp(step.log_decay[:, t])[..., None, :]
        value = step.value[:, t]
        if step.delta_rule:
            value = value - torch.einsum("rhvk,rhk->rhv", state, key[:, t])
        update = step.strength[:, t, :, None] * value
        state = state + update[..., None] * key[:, t, :, None, :]
        readouts.append(torch.einsum("rhvk,rhk->rhv", state, query[:, t]))
    return step.finish(torch.stack(readouts, dim=1)), state
