"""Tiny models of every supported type with seeded random weights, and what the tests of the integration do with them.

The parameters of the decays are drawn so that the state carries most of the output: with the initial dt of 0.001 to 0.1
of Mamba-2, or the decay rates of up to 16 of the others, a lost record would hardly show.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replayssm.integrations.transformers import FAMILIES, disable, enable

transformers = pytest.importorskip("transformers", minversion="5.17")

ROWS, PROMPT, VOCABULARY = 3, 9, 64
SINGLE = (1,) * 40
HYBRID = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "num_hidden_layers": 3}
IBM_MIXER = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
# Two value heads a key head, and a width of V that is not that of K: an order of heads or axes that is wrong shows.
GDN = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 8},
    **{**LINEAR, "head_dim": 16},
}
QWEN_MOE = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
KDA = {
    **{**LINEAR, "linear_num_heads": 4, "linear_head_dim": 8, "num_key_value_heads": 2, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2, "num_hidden_layers": 3, "chunk_size": 8},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **{"hybrid_override_pattern": "M-M*ME", "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16},
            **{"n_groups": 2, "chunk_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
            **{"intermediate_size": 32, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
            "n_routed_experts": 4,
        },
    ),
    "bamba": ("Bamba", {**HYBRID, **IBM_MIXER, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **HYBRID,
            **IBM_MIXER,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_intermediate_size": 32,
            "num_local_experts": 2,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **HYBRID,
            **{"n_mamba_heads": 4, "mamba_d_state": 16, "mamba_ngroups": 2, "chunk_size": 8, "num_key_value_heads": 2},
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        },
    ),
    "falcon_h1": ("FalconH1", {**HYBRID, **IBM_MIXER, "mamba_d_ssm": 64, "ssm_in_multiplier": 0.7}),
    "qwen3_next": ("Qwen3Next", {**HYBRID, **GDN, **QWEN_MOE}),
    "qwen3_5": ("Qwen3_5", {**HYBRID, **GDN}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**HYBRID, **GDN, **QWEN_MOE}),
    "qwen4_exp": (
        "Qwen4Exp",
        {
            **{**HYBRID, **GDN, **QWEN_MOE, "hc_count": 2, "hc_lowrank": 8, "eos_token_id": 2},
            **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
            **{"indexer_compress_ratio": 2, "ple_layer_ids": [1], "ple_embed_dim": 32, "heads_per_ngram": 2},
            **{"ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1},
        },
    ),
    "kimi_linear": ("KimiLinear", {**HYBRID, **KDA, "qk_rope_head_dim": 16, "num_local_experts": 4}),
    "glm5_next": (
        "Glm5Next",
        {
            **{**HYBRID, **KDA, "qk_rope_head_dim": 0, "n_routed_experts": 4, "q_lora_rank": 16, "hc_mult": 2},
            **{"index_topk": 8, "index_kpool": 2, "index_head_dim": 16, "index_n_heads": 2},
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
}


def build(kind: str, **changes: Any) -> Any:
    name, sizes = MODELS[kind]
    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    fields: dict[str, Any] = {**common, **sizes, "initializer_range": 0.3, **changes}
    configuration = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    if hasattr(transformers, f"{name}ForCausalLM"):
        config, causal = configuration(**fields), f"{name}ForCausalLM"
    else:  # only with eyes, which stay shut
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 1, "out_hidden_size": 32}
        wrapper = getattr(transformers, f"{name}Config")
        config, causal = wrapper(text_config=fields, vision_config=vision), f"{name}ForConditionalGeneration"
    torch.manual_seed(0)
    model = getattr(transformers, causal)(config).eval().requires_grad_(False)
    for mixer in mixers_of(model):
        holder = getattr(mixer, "forget_gate", mixer)
        holder.A_log.uniform_(-4.0, 0.0)
        holder.dt_bias.normal_(-0.5, 0.5)
        if hasattr(mixer, "D"):
            mixer.D.normal_()
    return model


def mixers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ in FAMILIES]


def in_fp64(model: Any) -> Any:
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")
    return model


@functools.cache
def model_of(kind: str) -> Any:
    return build(kind)


@functools.cache
def tokens() -> tuple[Tensor, Tensor]:
    """Token ids and mask of ROWS rows: a prompt of unequal lengths padded on the left, then what is decoded."""
    ids = torch.randint(3, VOCABULARY, (ROWS, PROMPT + 64), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 4, 7)):
        ids[row, :padding] = mask[row, :padding] = 0
    return ids, mask


def generate(model: Any, count: int = len(SINGLE), **options: Any) -> Tensor:
    ids, mask = (t[:, :PROMPT].to(model.device) for t in tokens())
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, **options}
    return model.generate(input_ids=ids, attention_mask=mask, **options)


def cache_name(model: Any) -> str:
    """What the forward of a model calls its cache: `cache` since transformers 5.24, one of two names before."""
    forward = type(getattr(model, "_orig_mod", model)).forward  # torch.compile wraps the model
    names = {"cache", "cache_params", "past_key_values"} & set(inspect.signature(forward).parameters)
    assert len(names) == 1
    return names.pop()


def forward(model: Any, ids: Tensor, mask: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
    name = cache_name(model)
    result = model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=ids.shape[1], **{name: cache})
    return result.logits, result[name]


def feed(model: Any, widths: tuple[int, ...], cache: Any = None, start: int = 0) -> tuple[Tensor, Any]:
    """Logits of the given tokens, fed in forwards of the given widths; [rows, sum(widths), vocabulary]."""
    logits = []
    for width in widths:
        ids, mask = (t.to(model.device) for t in tokens())
        out, cache = forward(model, ids[:, start : start + width], mask[:, : start + width], cache)
        logits.append(out)
        start += width
    return torch.cat(logits, dim=1), cache


def error(logits: Tensor, truth: Tensor) -> float:
    """Root of the mean square deviation over the tokens that are no padding; steadier than the largest one."""
    mask = tokens()[1][:, : logits.shape[1]].bool().to(logits.device)
    return (logits.double() - truth.to(logits.device))[mask].square().mean().sqrt().item()


@contextlib.contextmanager
def torch_paths(model: Any) -> Iterator[None]:
    """The model's own torch code, also where flash-linear-attention is installed, whose kernels take no float64."""
    with pytest.MonkeyPatch.context() as patch:
        for module in {sys.modules[type(part).__module__] for part in model.modules()}:
            for name, function in list(vars(module).items()):
                if getattr(function, "__module__", "") == module.__name__ and hasattr(function, "__wrapped__"):
                    patch.setattr(module, name, inspect.unwrap(function))
        yield


def assert_as_exact_as_the_model(model: Any, widths: tuple[int, ...], window: int) -> None:
    with torch_paths(model):
        truth, _ = feed(in_fp64(model), widths)
    own, _ = feed(model, widths)
    enable(model, window=window)
    try:
        ours, _ = feed(model, widths)
    finally:
        disable(model)
    assert not torch.equal(ours, own), "the model's own decode step has run"
    assert error(ours, truth) <= 1.5 * error(own, truth)
