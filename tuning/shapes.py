"""Layer shapes of released models: one row a model, and the shards that tensor parallelism makes of them.

Add a row only with its source. `tests/helpers/cases.py` and `tuning.bench` both read this table, so a shape that is
benchmarked is a shape that is tested.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from replayssm.spec import LayerSpec

_MEGATRON_BRIDGE = (
    "github.com/NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/models/nemotronh/nemotron_h_provider.py, class "
)


@dataclass(frozen=True)
class ModelShape:
    """One kind of state-space layer of one model, on one device.

    Args:
        name: lower-case name of the model; a shard carries the suffix "@tp4".
        layer: the layer's geometry.
        num_layers: state-space layers in the model; None where no source says.
        source: where the numbers were read.
        lower_bound: of the gate of a KDA layer (`KdaInputs.lower_bound`); None for the softplus gate and elsewhere.
    """

    name: str
    layer: LayerSpec
    num_layers: int | None
    source: str
    lower_bound: float | None = None


def _mamba2(heads: int, head_dim: int, d_state: int, groups: int = 8) -> LayerSpec:
    return LayerSpec("mamba2", num_v_heads=heads, num_k_heads=groups, head_dim=head_dim, d_state=d_state)


def _gdn(key_heads: int, value_heads: int) -> LayerSpec:
    return LayerSpec("gdn", num_v_heads=value_heads, num_k_heads=key_heads, head_dim=128, d_state=128)


def _kda(heads: int) -> LayerSpec:
    # Every released KDA model has as many key heads as value heads.
    return LayerSpec("kda", num_v_heads=heads, num_k_heads=heads, head_dim=128, d_state=128)


MODELS: tuple[ModelShape, ...] = (
    # head_dim 80 is no power of two: 80 = 5 * 16.
    ModelShape("nemotron-3-nano-4b", _mamba2(96, 80, 128), 21, "Hugging Face config.json (mamba_num_heads 96)"),
    ModelShape("nemotron-3-nano-30b", _mamba2(64, 64, 128), 23, _MEGATRON_BRIDGE + "Nemotron3NanoProvider"),
    ModelShape("nemotron-3-super", _mamba2(128, 64, 128), 40, _MEGATRON_BRIDGE + "Nemotron3SuperProvider"),
    ModelShape("nemotron-3-ultra", _mamba2(256, 64, 128), 48, "Hugging Face config.json, 550B-A55B"),
    ModelShape("nemotron-nano-9b-v2", _mamba2(128, 80, 128), 27, _MEGATRON_BRIDGE + "NemotronNanoModelProvider9Bv2"),
    ModelShape("nemotron-nano-12b-v2", _mamba2(128, 80, 128), 28, _MEGATRON_BRIDGE + "NemotronNanoModelProvider12Bv2"),
    ModelShape("nemotron-h-4b", _mamba2(112, 64, 128), 24, _MEGATRON_BRIDGE + "NemotronHModelProvider4B"),
    ModelShape("nemotron-h-8b", _mamba2(128, 64, 128), 24, _MEGATRON_BRIDGE + "NemotronHModelProvider8B"),
    ModelShape("nemotron-h-47b", _mamba2(256, 64, 256), 45, _MEGATRON_BRIDGE + "NemotronHModelProvider47B"),
    ModelShape("nemotron-h-56b", _mamba2(256, 64, 256), 54, _MEGATRON_BRIDGE + "NemotronHModelProvider56B"),
    ModelShape("qwen3.5-0.8b", _gdn(16, 16), None, "github.com/vllm-project/vllm/pull/54181"),
    ModelShape("qwen3.5-4b", _gdn(16, 32), 24, "github.com/zz774ever/fp8-replayssm-gdn-kernel, README"),
    ModelShape("qwen3.5-27b", _gdn(16, 48), 48, "Hugging Face config.json; also the 3.6 and 3.8 27B"),
    ModelShape(
        "qwen3.5-35b-a3b", _gdn(16, 32), 30, "github.com/vllm-project/vllm, tests/kernels/test_fused_gdn_post_conv.py"
    ),
    ModelShape("qwen3.5-122b-a10b", _gdn(16, 64), 36, "Hugging Face config.json"),
    ModelShape("qwen3.5-397b-a17b", _gdn(16, 64), 45, "Hugging Face config.json"),
    ModelShape("qwen3-next-80b-a3b", _gdn(16, 32), 36, "transformers, defaults of Qwen3NextConfig"),
    ModelShape("qwen3.8-flash-next", _gdn(16, 48), 36, "Hugging Face config.json (qwen4_exp)"),
    ModelShape("kimi-linear-48b-a3b", _kda(32), None, "github.com/huggingface/transformers/pull/48250"),
    ModelShape("kimi-k3", _kda(96), 69, "github.com/sgl-project/sglang/pull/33071", lower_bound=-5.0),
    ModelShape("glm-5.3-flash", _kda(64), 34, "github.com/sgl-project/sglang, configs/glm5_next.py", lower_bound=-5.0),
    ModelShape(
        "ling-3.0-flash", _kda(32), None, "github.com/sgl-project/sglang/pull/37739 (8 heads at TP 4)", lower_bound=-5.0
    ),
)


def names(recurrence: str | None = None) -> tuple[str, ...]:
    """Names of all models, or of those whose layers are of one recurrence."""
    return tuple(m.name for m in MODELS if recurrence in (None, m.layer.recurrence))


def lookup(name: str, *, tp: int = 1) -> ModelShape:
    """The shape of a model, or of one of its tensor-parallel shards.

    Args:
        name: one of `names()`, or a shard's own name such as "nemotron-3-super@tp4", case does not matter; or the path
            of a config.json of Hugging Face.
        tp: devices that share the heads.

    Raises:
        ValueError: no such model (the message lists them) or no such file (see `tuning.model_config`), or the heads
            cannot be shared by `tp`.
    """
    if name.endswith(".json"):
        from tuning.model_config import shape_of_config

        return shard(shape_of_config(name), tp)
    wanted, _, suffix = name.lower().partition("@tp")
    if suffix.isdigit():
        tp *= int(suffix)
    for model in MODELS:
        if model.name == wanted:
            return shard(model, tp)
    close = difflib.get_close_matches(wanted, names(), n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"model: expected a known name, got {name!r}; {hint}known are {', '.join(names())}")


def released(tps: Sequence[int]) -> tuple[ModelShape, ...]:
    """Every model in each of these shards that its heads can be shared by, whole layers before parts of them."""
    found = []
    for tp, model in product(sorted(tps), MODELS):
        with contextlib.suppress(ValueError):
            found.append(shard(model, tp))
    return tuple(found)


def released_name(layer: LayerSpec) -> str:
    """Name of the first model or shard that has the layer; its recurrence where none has."""
    return next((one.name for one in released((1, 2, 4, 8)) if one.layer == layer), layer.recurrence)


def shard(shape: ModelShape, tp: int) -> ModelShape:
    """The shape that one of `tp` devices holds.

    Value heads are split. Key heads (Mamba-2: groups) are split too, and where there are fewer of them than devices
    each is replicated, so that a device always holds at least one.

    Raises:
        ValueError: `tp` is below 1, or does not divide the value heads, or neither divides the key heads nor is a
            multiple of them.
    """
    layer = shape.layer
    if tp < 1:
        raise ValueError(f"tp: expected 1 or more, got {tp}")
    if layer.num_v_heads % tp:
        raise ValueError(f"tp: expected a divisor of the {layer.num_v_heads} heads of {shape.name}, got {tp}")
    if layer.num_k_heads % tp and tp % layer.num_k_heads:
        raise ValueError(
            f"tp: expected a divisor or a multiple of the {layer.num_k_heads} key heads of {shape.name}, got {tp}"
        )
    if tp == 1:
        return shape
    part = replace(layer, num_v_heads=layer.num_v_heads // tp, num_k_heads=max(1, layer.num_k_heads // tp))
    return replace(shape, name=f"{shape.name}@tp{tp}", layer=part)
