"""Claim: both references equal an implementation by other people, the torch paths of transformers.

Three levels. Functions: the step and the chunk form of each family, fed the same tensors. Modules: a whole layer of a
tiny model, whose projections and convolution are redone here, so that the gates of the layer are compared too. Both
sides of a bound are float32 (transformers computes its states in it): FACTOR times what `recurrence.run` in float32
differs from float64, in relative 2-norms over all tokens. Every family has a torch path in transformers 5.17 to
5.24; one that is gone from a later release is skipped by name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm.cursors import make_cursors
from replayssm.inputs import GdnInputs, Inputs, KdaInputs, Mamba2Inputs
from replayssm.pool import make_pool
from replayssm.reference import recurrence, replay
from replayssm.spec import LayerSpec, Recurrence, ReplaySpec

pytest.importorskip("transformers")
for package in ("fla", "mamba_ssm", "causal_conv1d"):
    if importlib.util.find_spec(package):
        pytest.skip(f"transformers would call {package} in place of its torch paths", allow_module_level=True)

ROWS, TOKENS, HV, HK, V, K = 2, 13, 4, 2, 8, 16
FACTOR = 2  # the worst ratio seen is 1.4
SPEC = ReplaySpec(5, 3, activation_dtype=torch.float32)
F32, F64 = torch.float32, torch.float64


def family(name: str, *attributes: str) -> ModuleType:
    """The modeling module of a family, or a skip that says which family or function is missing."""
    path = f"transformers.models.{name}.modeling_{name}"
    module = pytest.importorskip(path, reason=f"transformers has no {name}")
    missing = [a for a in attributes if not hasattr(module, a)]
    if missing:
        pytest.skip(f"the {name} of this transformers has no {', '.join(missing)}")
    return module


def configuration(name: str, cls: str, **changes: Any) -> Any:
    module = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    return getattr(module, cls)(**changes)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def replayed(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens through a window of 5 in steps of 3, 2 and 1, and the state at the end, all in float32."""
    kind: Recurrence = {Mamba2Inputs: "mamba2", GdnInputs: "gdn", KdaInputs: "kda"}[type(inputs)]
    key = inputs.B if isinstance(inputs, Mamba2Inputs) else inputs.k
    layer = LayerSpec(kind, state.shape[1], key.shape[2], *state.shape[2:])
    pool, cursors, slots = make_pool(layer, SPEC, len(state)), make_cursors(SPEC, len(state)), torch.arange(len(state))
    pool.checkpoint.copy_(state)
    outs, done = [], 0
    while done < key.shape[1]:
        tokens = min(3 - len(outs) % 3, key.shape[1] - done)
        cut = slice(done, done + tokens)
        part = {n: t[:, cut] for n, t in inputs._asdict().items() if isinstance(t, Tensor) and t.dim() > 2}
        outs.append(replay.step(pool, cursors, inputs._replace(**part), cache_indices=slots))
        replay.commit(cursors, cache_indices=slots, num_draft=tokens)
        done += tokens
    A = inputs.A if isinstance(inputs, Mamba2Inputs) else None
    return torch.cat(outs, 1), replay.fold(pool, cursors, slots, cursors.num_committed.long(), A=A, dtype=F32)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def agree(theirs: Tensor, ours: dict[str, Tensor]) -> bool:
    """Whether their result, ours in float32 and the replay are all within the bound around ours in float64."""
    bound = FACTOR * relative_error(ours["float32"], ours["float64"])
    return max(relative_error(x, ours["float64"]) for x in (theirs, ours["replay"])) <= bound


def references(inputs: Inputs, state: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and last states [rows, HV, V, K] of the three ways we compute them."""
    results = {
        "float64": recurrence.run(inputs, state, F64),
        "float32": recurrence.run(inputs, state, F32),
        "replay": replayed(inputs, state),
    }
    return {n: r[0] for n, r in results.items()}, {n: r[1] for n, r in results.items()}


def mamba2_case() -> tuple[Mamba2Inputs, Tensor]:
    x, z = normal(ROWS, TOKENS, HV, V, seed=1), normal(ROWS, TOKENS, HV, V, seed=2)
    dt, A = normal(ROWS, TOKENS, HV, seed=3), -torch.tensor([0.3, 1.0, 2.0, 4.0])
    B, C = normal(ROWS, TOKENS, HK, K, seed=4), normal(ROWS, TOKENS, HK, K, seed=5)
    inputs = Mamba2Inputs(x, dt, B, C, A, normal(HV, seed=6), z, normal(HV, seed=7) - 1, True)
    return inputs, normal(ROWS, HV, V, K, seed=8)


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h"])
def test_mamba2_step(name: str) -> None:
    step = family(name, "mamba2_selective_state_update").mamba2_selective_state_update
    inputs, state = mamba2_case()
    ours, our_states = references(inputs, state)
    theirs, their_state = [], state.clone()

    def wide(x: Tensor) -> Tensor:
        return x[..., None].expand(*x.shape, V)

    assert inputs.D is not None
    assert inputs.z is not None
    assert inputs.dt_bias is not None
    for t in range(TOKENS):
        out = step(
            their_state,
            inputs.x[:, t],
            wide(inputs.dt[:, t]),
            inputs.A[:, None, None].expand(HV, V, K),
            inputs.B[:, t],
            inputs.C[:, t],
            wide(inputs.D),
            z=inputs.z[:, t],
            dt_bias=wide(inputs.dt_bias),
            dt_softplus=True,
        )
        theirs.append(out)
    assert agree(torch.stack(theirs, 1), ours)
    assert agree(their_state, our_states)


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h"])
def test_mamba2_chunks(name: str) -> None:
    scan = family(name, "mamba2_chunk_scan").mamba2_chunk_scan
    full, state = mamba2_case()
    inputs = full._replace(z=None)
    ours, our_states = references(inputs, state)
    theirs, their_state = scan(
        inputs.x,
        inputs.dt,
        inputs.A,
        inputs.B,
        inputs.C,
        chunk_size=4,
        D=inputs.D,
        dt_bias=inputs.dt_bias,
        initial_states=state,
        dt_softplus=True,
        return_final_states=True,
    )
    assert agree(theirs, ours)
    assert agree(their_state, our_states)
    assert not agree(theirs, references(inputs._replace(D=inputs.D * 1.0001), state)[0])


def delta_case(kind: str, key_heads: int, lower_bound: float | None = None) -> tuple[GdnInputs | KdaInputs, Tensor]:
    q, k = normal(ROWS, TOKENS, key_heads, K, seed=1), normal(ROWS, TOKENS, key_heads, K, seed=2)
    v, beta = normal(ROWS, TOKENS, HV, V, seed=3), normal(ROWS, TOKENS, HV, seed=4)
    A_log, state = normal(HV, seed=5), normal(ROWS, HV, V, K, seed=6)
    if kind == "gdn":
        return GdnInputs(q, k, v, normal(ROWS, TOKENS, HV, seed=7), beta, A_log, normal(HV, seed=8)), state
    g = normal(ROWS, TOKENS, HV, K, seed=7)
    return KdaInputs(q, k, v, g, beta, A_log, normal(HV, K, seed=8), lower_bound), state


DELTA_FUNCTIONS = [
    pytest.param("gdn", name, function, None, id=f"{name}-{form}")
    for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
    for form, function in (("step", "torch_recurrent_gated_delta_rule"), ("chunk", "torch_chunk_gated_delta_rule"))
] + [
    pytest.param("kda", name, function, bound, id=f"{name}-{form}")
    for name, bound in (("kimi_linear", None), ("glm5_next", -5.0))
    for form, function in (("step", "recurrent_kimi_delta_attention"), ("chunk", "chunk_kimi_delta_attention"))
]


@pytest.mark.parametrize(("kind", "name", "function", "lower_bound"), DELTA_FUNCTIONS)
def test_delta_rule(kind: str, name: str, function: str, lower_bound: float | None) -> None:
    """Their functions take log-decay and beta after the gates and as many key heads as value heads."""
    rule = getattr(family(name, function), function)
    inputs, state = delta_case(kind, HK, lower_bound)
    ours, our_states = references(inputs, state)
    tokens = recurrence.tokens(inputs, F32)
    log_decay = tokens.log_decay.squeeze(-1) if kind == "gdn" else tokens.log_decay

    def theirs(beta: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (x.repeat_interleave(HV // HK, 2) for x in (inputs.q, inputs.k))
        chunk = {"chunk_size": 4} if "chunk" in function else {}
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, **chunk}
        out, last = rule(q, k, inputs.v, g=log_decay, beta=beta, initial_state=state.mT.contiguous(), **options)
        return out, last.mT

    out, last = theirs(tokens.strength)
    assert agree(out, ours)
    assert agree(last, our_states)
    assert not agree(theirs(tokens.strength * 1.0001)[0], ours)


@pytest.mark.parametrize(
    ("kind", "name", "function"),
    [
        ("gdn", "qwen3_5", "torch_recurrent_gated_delta_rule"),
        ("kda", "kimi_linear", "recurrent_kimi_delta_attention"),
    ],
)
def test_the_epsilon_of_the_norm(kind: str, name: str, function: str) -> None:
    """Queries and keys so short that the epsilon of 1e-6 that their functions write out weighs as much as they do."""
    rule = getattr(family(name, function), function)
    inputs, state = delta_case(kind, HV)
    inputs = inputs._replace(q=inputs.q * 3e-4, k=inputs.k * 3e-4)
    tokens = recurrence.tokens(inputs, F32)
    decay, options = tokens.log_decay, {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    decay = decay.squeeze(-1) if kind == "gdn" else decay
    theirs, _ = rule(
        inputs.q, inputs.k, inputs.v, g=decay, beta=tokens.strength, initial_state=state.mT.contiguous(), **options
    )
    assert agree(theirs, references(inputs, state)[0])
    assert not agree(theirs, references(inputs._replace(l2norm_eps=1.001e-6), state)[0])


def test_beta_is_rounded_as_a_layer_in_bfloat16_rounds_it() -> None:
    inputs, _ = delta_case("gdn", HK)
    assert isinstance(inputs, GdnInputs)
    b = inputs.b.bfloat16()
    rounded, exact = (recurrence.tokens(inputs._replace(b=b, round_beta=r), F32).strength for r in (True, False))
    assert torch.equal(rounded, b.sigmoid().float())
    assert not torch.equal(exact, rounded)


def initialise(module: torch.nn.Module) -> None:
    """Weights of the size of a trained layer's; the norms and decays away from their defaults."""
    with torch.no_grad():
        for i, (name, weight) in enumerate(sorted(module.named_parameters())):
            noise = normal(*weight.shape, seed=100 + i)
            small = name.rsplit(".", 1)[-1] in ("A_log", "dt_bias", "D")
            weight.copy_(noise if small else 1 + 0.1 * noise if "norm" in name else noise * weight[0].numel() ** -0.5)


def convolved(modeling: ModuleType, layer: Any, mixed: Tensor) -> Tensor:
    conv = layer.conv1d
    return modeling.causal_conv1d_fn(
        mixed.transpose(1, 2), conv.weight.squeeze(1), conv.bias, activation=layer.activation
    ).transpose(1, 2)


def mamba2_layer(modeling: ModuleType, layer: Any, hidden: Tensor) -> tuple[Mamba2Inputs, Callable[[Tensor], Tensor]]:
    gate, mixed, dt = layer.in_proj(hidden).split([HV * V, HV * V + 2 * HK * K, HV], -1)
    x, B, C = convolved(modeling, layer, mixed).split([HV * V, HK * K, HK * K], -1)
    inputs = Mamba2Inputs(
        x=x.unflatten(-1, (HV, V)),
        dt=dt,
        B=B.unflatten(-1, (HK, K)),
        C=C.unflatten(-1, (HK, K)),
        A=-layer.A_log.exp(),
        D=layer.D,
        dt_bias=layer.dt_bias,
        dt_softplus=True,
    )
    return inputs, lambda out: layer.out_proj(layer.norm(out.flatten(-2), gate))


def qwen_layer(modeling: ModuleType, layer: Any, hidden: Tensor) -> tuple[GdnInputs, Callable[[Tensor], Tensor]]:
    if hasattr(layer, "in_proj_qkv"):
        mixed, z = layer.in_proj_qkv(hidden), layer.in_proj_z(hidden).unflatten(-1, (HV, V))
        b, a = layer.in_proj_b(hidden), layer.in_proj_a(hidden)
    else:
        *qkv, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
        mixed = torch.cat([x.flatten(2) for x in qkv], -1)
    q, k, v = convolved(modeling, layer, mixed).split([HK * K, HK * K, HV * V], -1)
    q, k, v = q.unflatten(-1, (HK, K)), k.unflatten(-1, (HK, K)), v.unflatten(-1, (HV, V))
    inputs = GdnInputs(q, k, v, a, b, layer.A_log, layer.dt_bias)
    return inputs, lambda out: layer.out_proj(layer.norm(out.flatten(0, 2), z.flatten(0, 2)).view(*a.shape[:2], -1))


def kimi_layer(modeling: ModuleType, layer: Any, hidden: Tensor) -> tuple[KdaInputs, Callable[[Tensor], Tensor]]:
    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (HV, K))

    mixed = torch.cat([layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)], -1)
    q, k, v = (heads(x) for x in convolved(modeling, layer, mixed).chunk(3, -1))
    gate, bound = layer.forget_gate, getattr(layer.forget_gate, "safe_gate_lower_bound", None)
    g, bias = gate.f_b_proj(gate.f_a_proj(hidden)), gate.dt_bias.view(HV, K)
    inputs = KdaInputs(q, k, v, heads(g), layer.b_proj(hidden), gate.A_log.flatten(), bias, bound)
    norm_gate = heads(layer.g_b_proj(layer.g_a_proj(hidden)))
    return inputs, lambda out: layer.o_proj(layer.o_norm(out, norm_gate).flatten(-2))


QWEN = {
    "hidden_size": 24, "linear_num_value_heads": HV, "linear_num_key_heads": HK, "linear_key_head_dim": K,
    "linear_value_head_dim": V, "layer_types": ["linear_attention"], "num_hidden_layers": 1,
}  # fmt: skip
KIMI = {
    "hidden_size": 24, "linear_num_heads": HV, "linear_head_dim": K, "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
}  # fmt: skip
NEMOTRON = {
    "hidden_size": 24, "mamba_num_heads": HV, "mamba_head_dim": V, "n_groups": HK, "ssm_state_size": K,
    "chunk_size": 4, "layers_block_type": ["mamba"], "time_step_min": 0.0,
}  # fmt: skip
MAMBA = {
    "hidden_size": 16, "expand": 2, "num_heads": HV, "head_dim": V, "n_groups": HK, "state_size": K,
    "chunk_size": 4, "num_hidden_layers": 1,
}  # fmt: skip
LAYERS = [
    pytest.param("mamba2", "Mamba2Mixer", "Mamba2Config", MAMBA, mamba2_layer, id="mamba2"),
    pytest.param("nemotron_h", "NemotronHMamba2Mixer", "NemotronHConfig", NEMOTRON, mamba2_layer, id="nemotron_h"),
    pytest.param("qwen3_next", "Qwen3NextGatedDeltaNet", "Qwen3NextConfig", QWEN, qwen_layer, id="qwen3_next"),
    pytest.param("qwen3_5", "Qwen3_5GatedDeltaNet", "Qwen3_5TextConfig", QWEN, qwen_layer, id="qwen3_5"),
    pytest.param("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeTextConfig", QWEN, qwen_layer, id="qwen3_5_moe"),
    pytest.param("qwen4_exp", "Qwen4ExpTextGatedDeltaNet", "Qwen4ExpTextConfig", QWEN, qwen_layer, id="qwen4_exp"),
    pytest.param("kimi_linear", "KimiLinearDeltaAttention", "KimiLinearConfig", KIMI, kimi_layer, id="kimi_linear"),
    pytest.param("glm5_next", "Glm5NextTextLinearAttention", "Glm5NextTextConfig", KIMI, kimi_layer, id="glm5_next"),
]


@pytest.mark.parametrize(("name", "cls", "config", "fields", "split"), LAYERS)
@torch.no_grad()
def test_layer(name: str, cls: str, config: str, fields: dict[str, Any], split: Callable[..., Any]) -> None:
    """NemotronH clamps dt from below by `time_step_min` in this path and not when decoding; it is 0 here."""
    modeling = family(name, cls, "causal_conv1d_fn")
    layer = getattr(modeling, cls)(configuration(name, config, **fields), layer_idx=0).eval()
    initialise(layer)
    hidden = normal(ROWS, TOKENS, fields["hidden_size"], seed=9)
    inputs, finish = split(modeling, layer, hidden)
    heads, value_width = recurrence.tokens(inputs, F32).value.shape[2:]
    state = torch.zeros(ROWS, heads, value_width, K)
    theirs = layer(hidden)
    ours = {n: finish(out.float()) for n, out in references(inputs, state)[0].items()}
    assert agree(theirs, ours)
    off = {"dt_bias": inputs.dt_bias * 1.0003}
    assert not agree(theirs, {n: finish(o.float()) for n, o in references(inputs._replace(**off), state)[0].items()})
