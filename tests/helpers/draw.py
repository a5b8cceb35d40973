"""Random inputs and pools of each recurrence, and what a test must know of a layer to treat all of them alike.

Inputs are `case.T` tokens a row, drawn in the dtype that they are passed in. The heads run from a long memory to a
short one, both in the inputs and in the records of a pool; of a delta rule, some pending records decay so strongly
that exp of the opposite sign would overflow. A recurrence is one entry in each table below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.configs import RingLayout
from replayssm import GdnInputs, KdaInputs, LayerSpec, Mamba2Inputs, Pool, ReplaySpec, make_pool
from replayssm.inputs import Inputs
from replayssm.pool import record_shapes
from replayssm.reference import recurrence
from replayssm.spec import Recurrence
from tests.helpers.cases import ODD, Case

F32, F64 = torch.float32, torch.float64
KERNELS: tuple[Recurrence, ...] = ("mamba2", "gdn", "kda")  # that have a CUDA kernel; the torch twin has all


@dataclass(frozen=True)
class Given:
    """Which optional inputs a Mamba-2 layer has, by dtype; `dt` is the activation dtype when None."""

    D: torch.dtype | None = F32
    z: bool = True
    dt_bias: torch.dtype | None = F32
    dt_softplus: bool = True
    dt: torch.dtype | None = None

    @property
    def id(self) -> str:
        present = [name for name in ("D", "z", "dt_bias", "dt_softplus") if getattr(self, name)]
        return "+".join(present) or "none"


@dataclass(frozen=True)
class DeltaGiven:
    """How a Gated DeltaNet or Kimi Delta Attention layer is called.

    Args:
        scale, l2norm_eps: as in its inputs; without an epsilon q and k are drawn normalised.
        round_beta: of Gated DeltaNet.
        lower_bound: of Kimi Delta Attention.
        gate, beta: dtypes of a and b, or of g and beta; the activation dtype when None.
    """

    scale: float | None = None
    l2norm_eps: float | None = 1e-6
    round_beta: bool = False
    lower_bound: float | None = None
    gate: torch.dtype | None = None
    beta: torch.dtype | None = None

    @property
    def id(self) -> str:
        words = {
            "scale": self.scale is not None,
            "normalised": self.l2norm_eps is None,
            "round_beta": self.round_beta,
            "lower_bound": self.lower_bound is not None,
            "gate_fp32": self.gate is F32,
            "beta_fp32": self.beta is F32,
        }
        return "+".join(word for word, holds in words.items() if holds) or "default"


AnyGiven = Given | DeltaGiven
ALL, BARE, DELTA = Given(), Given(None, False, None, False), DeltaGiven()
DEFAULT: dict[Recurrence, AnyGiven] = {"mamba2": ALL, "gdn": DELTA, "kda": DELTA}


def _base(kind: Recurrence) -> Case:
    """The geometry of the behaviour tests: two groups of two heads, so that heads, groups and rows can be mixed up."""
    case = next(c for c in ODD if c.recurrence == kind and (c.V, c.K, c.window) == (64, 64, 5))
    return replace(case, HV=4, HK=2)


BASES: dict[Recurrence, Case] = {kind: _base(kind) for kind in DEFAULT}
BASE = BASES["mamba2"]


def base_of(kind: Recurrence, device: torch.device) -> Case:
    """The base case of a recurrence; skips the test where its kernel is missing."""
    if device.type == "cuda" and kind not in KERNELS:
        pytest.skip(f"no CUDA kernel for {kind}; the CPU runs the torch twin")
    return BASES[kind]


# What the layers call the tensors that all of them have; "gate" is what decays are made of, "rate" a parameter of it.
ROLES: dict[type, dict[str, str]] = {
    Mamba2Inputs: {"value": "x", "key": "B", "query": "C", "gate": "dt", "rate": "A"},
    GdnInputs: {"value": "v", "key": "k", "query": "q", "gate": "a", "rate": "A_log"},
    KdaInputs: {"value": "v", "key": "k", "query": "q", "gate": "g", "rate": "A_log"},
}


def part(inputs: Inputs, role: str) -> Tensor:
    """The tensor of a role of `ROLES`."""
    return getattr(inputs, ROLES[type(inputs)][role])


def with_parts(inputs: Any, **parts: Tensor) -> Any:
    """The inputs with other tensors, by their roles."""
    return inputs._replace(**{ROLES[type(inputs)][role]: tensor for role, tensor in parts.items()})


def tensors_of(inputs: Inputs) -> dict[str, Tensor]:
    """Every tensor by its name."""
    return {name: t for name, t in inputs._asdict().items() if isinstance(t, Tensor)}


def tokens_of(inputs: Inputs) -> dict[str, Tensor]:
    """The tensors that have a row axis; parameters have two axes at most."""
    return {name: t for name, t in tensors_of(inputs).items() if t.dim() > 2}


def per_token(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`change` applied to every tensor that has a row axis."""
    return inputs._replace(**{name: change(t) for name, t in tokens_of(inputs).items()})


def of_one_key(inputs: Any) -> Any:
    """Tokens of a delta rule with nearly one key and nothing forgotten: each takes back most of what the one before
    wrote. Random keys are nearly orthogonal, and forgive whatever is done to the system that couples the tokens."""
    key, strength = inputs.k, "b" if isinstance(inputs, GdnInputs) else "beta"
    given = with_parts(inputs, key=key[:, :1] + key * 0.1, gate=torch.full_like(part(inputs, "gate"), -20.0))
    return given._replace(**{strength: torch.full_like(getattr(inputs, strength), 3.0)})


def decay_record(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """What each token's decay record holds, [rows, T, HV], KDA [rows, T, HV, K]."""
    if isinstance(inputs, Mamba2Inputs):
        return recurrence.mamba2_dt(inputs, dtype)
    log_decay = recurrence.tokens(inputs, dtype).log_decay
    return log_decay if isinstance(inputs, KdaInputs) else log_decay.squeeze(-1)


def make_inputs(case: Case, rows: int, generator: torch.Generator, given: AnyGiven | None = None) -> Any:
    """`case.T` random tokens a row, on the CPU; everything that is optional is given when `given` is None."""
    return _DRAW[case.recurrence](case, rows, generator, given or DEFAULT[case.recurrence])


def _normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _mamba2(case: Case, rows: int, generator: torch.Generator, given: Given) -> Mamba2Inputs:
    activation, heads = case.activation, case.HV
    dt = torch.randn(rows, case.T, heads, generator=generator)
    if not given.dt_softplus:  # it must not be negative, or the state grows
        dt = dt.abs() / 4
    bias = torch.linspace(-4.0, 0.5, heads) if given.dt_softplus else torch.linspace(0.0, 0.5, heads)
    return Mamba2Inputs(
        x=_normal(generator, activation, rows, case.T, heads, case.V),
        dt=dt.to(given.dt or activation),
        B=_normal(generator, activation, rows, case.T, case.HK, case.K),
        C=_normal(generator, activation, rows, case.T, case.HK, case.K),
        A=-torch.logspace(-1.5, 0.6, heads),
        D=None if given.D is None else _normal(generator, given.D, heads),
        z=_normal(generator, activation, rows, case.T, heads, case.V) if given.z else None,
        dt_bias=None if given.dt_bias is None else bias.to(given.dt_bias),
        dt_softplus=given.dt_softplus,
    )


def _delta(case: Case, rows: int, generator: torch.Generator, given: DeltaGiven) -> dict[str, Any]:
    """What Gated DeltaNet and Kimi Delta Attention share."""
    activation = case.activation
    q, k = (torch.randn(rows, case.T, case.HK, case.K, generator=generator) for _ in range(2))
    if given.l2norm_eps is None:
        q, k = (recurrence.l2norm(t, 0.0) for t in (q, k))
    v = _normal(generator, activation, rows, case.T, case.HV, case.V)
    rates = torch.linspace(log(0.03), log(4.0), case.HV)
    return {"q": q.to(activation), "k": k.to(activation), "v": v, "A_log": rates, "scale": given.scale,
            "l2norm_eps": given.l2norm_eps}  # fmt: skip


def _gdn(case: Case, rows: int, generator: torch.Generator, given: DeltaGiven) -> GdnInputs:
    return GdnInputs(
        **_delta(case, rows, generator, given),
        a=_normal(generator, given.gate or case.activation, rows, case.T, case.HV),
        b=_normal(generator, given.beta or case.activation, rows, case.T, case.HV),
        dt_bias=torch.linspace(-4.0, 0.5, case.HV),
        round_beta=given.round_beta,
    )


def _kda(case: Case, rows: int, generator: torch.Generator, given: DeltaGiven) -> KdaInputs:
    return KdaInputs(
        **_delta(case, rows, generator, given),
        g=_normal(generator, given.gate or case.activation, rows, case.T, case.HV, case.K),
        beta=_normal(generator, given.beta or case.activation, rows, case.T, case.HV),
        dt_bias=torch.linspace(-4.0, 0.5, case.HV * case.K).view(case.HV, case.K),
        lower_bound=given.lower_bound,
    )


_DRAW: dict[Recurrence, Callable[..., Inputs]] = {"mamba2": _mamba2, "gdn": _gdn, "kda": _kda}


def random_pool(
    layer: LayerSpec,
    replay: ReplaySpec,
    start: Tensor,
    count: Tensor,
    generator: torch.Generator,
    layout: RingLayout,
) -> Pool:
    """A pool on the CPU with random states and records; NaN in all that is not pending, by `start` and `count`.

    A slot with a negative count holds nothing but NaN.
    """
    slots, rows = len(start), torch.arange(replay.ring_capacity)
    live = ((rows - start[:, None]) % replay.ring_capacity < count[:, None])[:, None]
    pool = make_pool(layer, replay, slots, ring_layout="record_major" if layout == "strided" else layout)
    if layout == "strided":
        tensors = {
            name: torch.zeros((slots, shape[0], shape[1] + 1, *shape[2:]), dtype=dtype)[:, :, : shape[1]]
            for name, (shape, dtype) in record_shapes(layer, replay).items()
            if name in ("value", "key", "decay")
        }
        pool = replace(pool, **tensors)
    pool.checkpoint.copy_(torch.randn(pool.checkpoint.shape, generator=generator))
    pool.checkpoint[count < 0] = float("nan")
    pool.value.copy_(torch.randn(pool.value.shape, generator=generator))
    key = torch.randn(pool.key.shape, generator=generator)
    pool.key.copy_(key if layer.recurrence == "mamba2" else recurrence.l2norm(key, 0.0))
    pool.decay.copy_(_decays(layer, pool.decay.shape, generator))
    for ring in (pool.value, pool.key, pool.decay):
        ring.masked_fill_(~(live[..., None] if ring.dim() == 4 else live), float("nan"))
    return pool


def hard_states(slots: int, heads: int, rows: int, channels: int) -> Tensor:
    """States [slots, HV, V, K], at least 4, for formats to encode.

    The slots: of one magnitude a row; of one a number; ties of codes and, in odd rows, of the scales of blocks, with
    their neighbours; from the fourth on zeros, subnormals and the largest. The first, second and fourth have an
    infinity, its negative and a NaN.
    """
    generator = torch.Generator().manual_seed(rows + channels)

    def powers(*extents: int, low: int = -150, high: int = 127) -> Tensor:
        return torch.ldexp(torch.ones(extents), torch.randint(low, high, extents, generator=generator))

    def integers(low: int, high: int, *extents: int) -> Tensor:
        return torch.randint(low, high, extents, generator=generator).float()

    state = torch.randn((slots, heads, rows, channels), generator=generator)
    state[0] *= powers(heads, rows, 1)
    state[1] *= powers(heads, rows, channels, low=-12, high=0) * powers(heads, rows // 16, 1).repeat_interleave(16, 1)
    state[2] = integers(-28, 29, heads, rows, channels) / 4
    blocks = (heads, rows // 2, channels // 16)
    middle = (6 + integers(0, 2, *blocks) / 2) * (2 * integers(8, 16, *blocks) + 1) / 16
    state[2, :, 1::2] = torch.rand((heads, rows // 2, channels), generator=generator) * 6
    state[2, :, 1::2, ::16] = torch.nextafter(middle, middle + integers(-1, 2, *blocks))
    state[2] *= powers(heads, rows, 1, low=-4, high=4)
    state[3:, :, 16:32] *= 1e-41
    state[3:, :, 32:48] = torch.where(torch.arange(channels) % 3 == 0, -0.0, 0.0)
    largest = torch.finfo(torch.float32).max
    for row, number in enumerate((0.0, -0.0, 1e-45, -1e-42, 2.0**-127, -(2.0**-126), largest, -largest)):
        state[3:, :, row] = number
    state[0, 0, 3, -1], state[1, 0, -1, 0], state[3, :, 50, 0] = torch.inf, -torch.inf, torch.nan
    return state


def _decays(layer: LayerSpec, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Decay records: dt of Mamba-2, else log-decays, of which an eighth beside those of the first head are strong."""
    drawn = torch.rand(shape, generator=generator)
    if layer.recurrence == "mamba2":
        return drawn
    heads = layer.num_v_heads
    strong = torch.rand(shape, generator=generator) < 1 / 8
    strong[:, 0] = False
    return -drawn * torch.logspace(-2.0, 0.5, heads).view(heads, *[1] * (len(shape) - 2)) - 100 * drawn * strong
