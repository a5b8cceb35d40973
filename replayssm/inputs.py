"""The tensors of one step, named as each layer's own code names them.

With `cu_seqlens`, [rows + 1] int32, rows may have different numbers of tokens, 0 to `max_draft`: the axes [rows, T] of
every tensor are [1, total] then, and row r has the tokens from `cu_seqlens[r]` up to `cu_seqlens[r + 1]`. A row without
tokens is left alone. Outputs behind the last row's are left as they are, or zero where `step` allocates them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Mamba2Inputs(NamedTuple):
    """Inputs of a Mamba-2 step of `rows` rows and T tokens a row.

    Args:
        x: [rows, T, HV, V], activation dtype.
        dt: [rows, T, HV], activation dtype or float32; raw, before `dt_bias` and softplus.
        B: [rows, T, G, K], activation dtype (the key).
        C: [rows, T, G, K], activation dtype (the query).
        A: [HV] float32, negative.
        D: [HV] float32 or activation dtype, or None for no skip connection.
        z: [rows, T, HV, V], activation dtype, or None for no gate; the output is multiplied by silu(z).
        dt_bias: [HV] float32 or activation dtype, or None.
        dt_softplus: apply softplus (identity above 20) to dt + dt_bias.
        cu_seqlens: see this module; None for T tokens in every row.
    """

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    A: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None
    dt_softplus: bool = False
    cu_seqlens: Tensor | None = None


class GdnInputs(NamedTuple):
    """Inputs of a Gated DeltaNet step of `rows` rows and T tokens a row.

    Args:
        q, k: [rows, T, HK, K], activation dtype, before the l2 norm.
        v: [rows, T, HV, V], activation dtype.
        a, b: [rows, T, HV], activation dtype or float32; decay and beta before their gates.
        A_log: [HV] float32.
        dt_bias: [HV] float32.
        scale: factor of q, K ** -0.5 when None.
        l2norm_eps: epsilon under the root of the l2 norm of q and k; None when they come normalised.
        round_beta: sigmoid(b) is rounded to the dtype of b, as engines do that compute it in that dtype.
        cu_seqlens: see this module; None for T tokens in every row.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    scale: float | None = None
    l2norm_eps: float | None = 1e-6
    round_beta: bool = False
    cu_seqlens: Tensor | None = None


class KdaInputs(NamedTuple):
    """Inputs of a Kimi Delta Attention step of `rows` rows and T tokens a row.

    Args:
        q, k: [rows, T, HK, K], activation dtype, before the l2 norm.
        v: [rows, T, HV, V], activation dtype.
        g: [rows, T, HV, K], activation dtype or float32; the gate before its nonlinearity.
        beta: [rows, T, HV], activation dtype or float32; before the sigmoid.
        A_log: [HV] float32.
        dt_bias: [HV, K] float32.
        lower_bound: None for the softplus gate, a negative number for the bounded gate
            lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).
        scale: factor of q, K ** -0.5 when None.
        l2norm_eps: epsilon under the root of the l2 norm of q and k; None when they come normalised.
        cu_seqlens: see this module; None for T tokens in every row.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None = None
    scale: float | None = None
    l2norm_eps: float | None = 1e-6
    cu_seqlens: Tensor | None = None


Inputs = Mamba2Inputs | GdnInputs | KdaInputs
