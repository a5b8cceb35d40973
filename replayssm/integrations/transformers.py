"""Hugging Face transformers: decode the state-space layers of an unmodified model with ReplaySSM.

    from replayssm.integrations.transformers import disable, enable

    enable(model, window=16)
    model.generate(...)             # as always: batches, left padding, sampling, beams
    disable(model)

    enable(model, window=16, max_draft=5)
    sequences, statistics = generate_speculative(model, input_ids, max_new_tokens=64, num_draft=4)

Tested with these model types of transformers 5.17.0 to 5.24.0; `enable` refuses a version whose layers or caches are
not built as in these.

    Mamba-2                 mamba2, nemotron_h, bamba, granitemoehybrid, zamba2, falcon_h1
    Gated DeltaNet          qwen3_next, qwen3_5, qwen3_5_moe, qwen4_exp
    Kimi Delta Attention    kimi_linear, glm5_next

What runs where. A forward with several tokens (prefill, chunked prefill) is the model's own. A forward with one token
on a cache that has a state decodes here: the projections, the convolution with its state in the cache, the gated norm
and the output projection are the model's own calls, `replayssm.step` stands in for its state update. `commit` runs
once a forward, after the module that contains all layers of these kinds. A forward that verifies drafts
(`generate_speculative`) decodes here, too, with a convolution in torch that can be taken back.

Memory. The checkpoint of a pool *is* the cache's own state: nothing is copied, unless its dtype differs from
`checkpoint_dtype` or its axes are K before V, as in Gated DeltaNet and Kimi Delta Attention. Then it is converted once,
on the first decoded token, and the cache holds the converted tensor, in its own shape as a transposed view.
The records and cursors hang on the cache object, so a new cache starts clean and a deep copy takes them along.
Whoever else reads a state from the cache (a multi-token forward, beam reordering, a model after `disable`, the user)
gets it with all pending records folded in. Beam search therefore folds on every token: right, but no faster.

Limits. `time_step_limit` clamps dt in prefill only, as in the models' own decode step, which ignores it. Kimi Delta
Attention does not round beta to 16 bits, as the models' own code does. Inference only; no model that accelerate has
spread or offloaded; under `torch.compile` the steps stay eager. Caches that record their past for assisted decoding
take the model's own path. falcon_h1 with `mamba_rms_norm` decodes at batch 1 only, as it does without ReplaySSM.
olmo_hybrid, whose beta reaches 2, is refused. `generate_speculative` refuses qwen4_exp and glm5_next, whose caches hold
more than it can roll back.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from replayssm.integrations.transformers_cache import commit_after_forward, records_of, verification_of
from replayssm.integrations.transformers_layers import FAMILIES, Family
from replayssm.integrations.transformers_speculative import Propose, Statistics, decode, prompt_lookup
from replayssm.keys import dtype_name
from replayssm.launch import arch_of
from replayssm.plan import plan_step
from replayssm.pool import make_pool
from replayssm.spec import LayerSpec, ReplaySpec

if TYPE_CHECKING:
    from cute_kernels.configs import Options

__all__ = ["FAMILIES", "Statistics", "disable", "enable", "generate_speculative", "layer_options", "layer_specs",
           "prompt_lookup"]  # fmt: skip

_ON_MODEL = "_replayssm_hook"
_KINDS = "Mamba-2, Gated DeltaNet or Kimi Delta Attention layers"


def enable(
    model: nn.Module, *, window: int = 16, checkpoint_dtype: torch.dtype = torch.float32, max_draft: int = 1
) -> None:
    """Make the state-space layers of a Hugging Face model decode with ReplaySSM, until `disable`.

    On CUDA the layers run the kernels, on other devices the torch twin, which is a reference and no fast path.

    Args:
        model: a model of transformers, on one device; its parameters, buffers and state dict stay as they are.
        window: records that may be pending before they are folded into the state, 1 to 64.
        checkpoint_dtype: dtype of the state in the cache: float32, bfloat16 or float16.
        max_draft: the most tokens a row that a forward may verify, 1 to 16, at most `window`; 1 if none does.

    Raises:
        ImportError: transformers is missing or older than 5.17.
        ValueError: `window` or `max_draft` is out of range or a layer has sizes that no pool can hold.
        NotImplementedError: no layer of a supported family, a dtype, layer size or GPU without a kernel, layers on
            several devices, layers whose `forward` something else has replaced, or a version of transformers whose
            layers or caches are built differently.
        RuntimeError: the model is enabled already.
    """
    _require_transformers()
    mixers = _find_mixers(model)
    _check_version({type(mixer) for mixer in mixers.values()})
    for name, mixer in mixers.items():
        if isinstance(mixer.__dict__.get("forward"), _MixerForward):
            raise RuntimeError(f"model: expected one without ReplaySSM, got {name} enabled; call disable(model) first")
        if "forward" in mixer.__dict__ or hasattr(mixer, "_hf_hook"):
            raise NotImplementedError(
                f"model: the forward of {name} is replaced already, by accelerate or a kernel library; load the model "
                "on one device without device_map offloading and without use_kernels"
            )
    devices = {mixer.conv1d.weight.device for mixer in mixers.values()}
    if len(devices) > 1:
        raise NotImplementedError(
            f"model: expected all state-space layers on one device, got {sorted(map(str, devices))}"
        )
    dtypes = {mixer.conv1d.weight.dtype for mixer in mixers.values()}
    if len(dtypes) > 1:
        raise NotImplementedError(
            f"model: expected one dtype in all state-space layers, got {sorted(map(str, dtypes))}"
        )
    forwards = {}
    for name, mixer in mixers.items():
        dtypes_of_both = {"checkpoint_dtype": checkpoint_dtype, "activation_dtype": mixer.conv1d.weight.dtype}
        forwards[name] = _MixerForward(mixer, ReplaySpec(window, max_draft, **dtypes_of_both))
        _check_supported(forwards[name])
    for name, mixer in mixers.items():
        mixer.forward = forwards[name]
    root: Any = _common_ancestor(model, list(mixers))
    setattr(root, _ON_MODEL, root.register_forward_hook(commit_after_forward, with_kwargs=True))


def disable(model: nn.Module) -> None:
    """Undo `enable`; does nothing to a model that is not enabled. Caches in use stay valid: their next reader folds."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _MixerForward):
            del module.forward
        handle = module.__dict__.pop(_ON_MODEL, None)
        if handle is not None:
            handle.remove()


@torch.no_grad()
def generate_speculative(
    model: nn.Module,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int,
    num_draft: int = 4,
    eos_token_id: int | Sequence[int] | None = None,
    propose: Propose = prompt_lookup,
) -> tuple[Tensor, Statistics]:
    """Decode greedily, and verify `num_draft` proposed tokens a row in each forward; the tokens are those of
    `model.generate(..., do_sample=False)`, up to rounding where two logits are nearly equal.

    A forward has T = 1 + `num_draft` tokens a row: the last one that was decoded and the proposed ones. A row keeps the
    longest prefix that the model would have decoded itself, and the token after it. All rows take part in all forwards;
    a row that has ended keeps nothing of them.

    What a row does not keep is taken back: its records are left behind by `commit(num_accepted=...)`, the state of a
    convolution is the window of inputs that ends with the last kept token, and the keys and values of an attention
    layer are cut off where no row keeps them, and masked elsewhere.

    Args:
        model: enabled with `max_draft` of T or more.
        input_ids: [rows, length] prompts, padded on the left.
        attention_mask: [rows, length], 0 where a prompt is padding; None for no padding.
        max_new_tokens: tokens to decode for each row, 1 or more.
        num_draft: proposed tokens a row and forward, 1 to 15; `step` and `commit` count one more, which is T.
        eos_token_id: tokens that end a row; those of `model.generation_config` when None, none when empty. It is all
            that is read of that configuration, with the padding token: no penalty or other processor runs.
        propose: called with the tokens of a row, without padding, and `num_draft`; gives up to that many tokens to
            verify. It decides how fast decoding is, not what is decoded. `prompt_lookup` when not given.

    Returns:
        The prompts with the decoded tokens [rows, length + tokens of the longest row], padded as `generate` does it,
        and how many forwards that took.

    Raises:
        ValueError, TypeError: an argument has another type, shape or range than described.
        RuntimeError: the model is not enabled.
        NotImplementedError: a layer's cache that cannot be taken back: sliding windows, sparse attention with an
            indexer; prompts padded elsewhere than on the left; no kernel for T tokens a row of this layer.
    """
    forwards = [mixer.__dict__.get("forward") for mixer in _find_mixers(model).values()]
    if not all(isinstance(forward, _MixerForward) for forward in forwards):
        raise RuntimeError(
            "model: expected one with ReplaySSM, got one without; call enable(model, max_draft=...) first"
        )
    limit = min(forward.replay.max_draft for forward in forwards) - 1
    if type(num_draft) is not int or not 1 <= num_draft <= limit:
        raise ValueError(
            f"num_draft: expected 1 to {limit}, one less than the max_draft of enable, got {num_draft!r}; call "
            f"disable(model) and enable(model, max_draft={num_draft + 1 if type(num_draft) is int else '...'})"
        )
    return decode(
        model, input_ids, attention_mask, num_draft=num_draft, max_new_tokens=max_new_tokens, eos=eos_token_id,
        propose=propose,
    )  # fmt: skip


def layer_specs(model: nn.Module) -> list[LayerSpec]:
    """The geometry of each state-space layer of a model, enabled or not.

    Raises:
        NotImplementedError: no layer of a supported family.
    """
    return [_family_of(mixer).geometry(mixer) for mixer in _find_mixers(model).values()]


def layer_options(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> list[Options]:
    """What `plan_step` and `warmup` must know of each state-space layer beside its geometry.

    Args:
        dtype: of the activations.

    Raises:
        NotImplementedError: no layer of a supported family.
    """
    return [_family_of(mixer).options(mixer, dtype_name(dtype)) for mixer in _find_mixers(model).values()]


class _MixerForward:
    """The `forward` of one layer while ReplaySSM is enabled."""

    def __init__(self, mixer: Any, replay: ReplaySpec) -> None:
        self.mixer = mixer
        self.replay = replay
        self.family = _family_of(mixer)
        self.layer = self.family.geometry(mixer)
        self._prepared: tuple[object, tuple[Tensor, ...]] | None = None

    def _parameters(self) -> tuple[Tensor, ...]:
        """The parameters as a step takes them, computed again only when they have changed: a step prepares its launch
        for these tensors."""
        learned = self.family.learned(self.mixer)
        if any(parameter.is_inference() for parameter in learned):  # counts no versions
            return self.family.prepared(self.mixer, learned)
        seen = [(p.data_ptr(), p._version, p.dtype, p.device) for p in learned]
        if self._prepared is None or self._prepared[0] != seen:
            self._prepared = (seen, self.family.prepared(self.mixer, learned))
        return self._prepared[1]

    def __call__(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        mixer = self.mixer
        if cache is None:
            cache = kwargs.pop("cache_params", None)  # its name before transformers 5.24
        verification = verification_of(cache)
        if (
            cache is None
            or (hidden_states.shape[1] != 1 and verification is None)
            or not cache.has_previous_state(mixer.layer_idx, state_idx=0)
            or cache.layers[mixer.layer_idx].record_past
        ):
            return type(mixer).forward(mixer, hidden_states, cache, attention_mask, **kwargs)
        # Most models pass no mask here, since a decoded token is no padding, and neither are drafts.
        if attention_mask is not None and verification is None:
            hidden_states = self.family.mask(mixer, hidden_states, attention_mask)
        if torch.compiler.is_compiling():
            # Without fullgraph this makes a graph break, and the frame runs eagerly.
            raise NotImplementedError("torch.compile with fullgraph=True of a ReplaySSM step; compile without it")
        return self._decode(hidden_states, cache)

    def _decode(self, hidden_states: Tensor, cache: Any) -> Tensor:
        mixer, family, cache_layer = self.mixer, self.family, cache.layers[self.mixer.layer_idx]
        conv_in, beside = family.project(mixer, hidden_states)
        if torch.is_grad_enabled() and conv_in.requires_grad:
            raise NotImplementedError("gradients through a ReplaySSM step; decode under torch.no_grad()")
        conv_state, conv_in = cache_layer.conv_states[0], conv_in.transpose(1, 2)
        if (verification := verification_of(cache)) is not None:
            conv_out = verification.convolve(mixer, conv_state, conv_in)
        else:
            conv_out = sys.modules[type(mixer).__module__].causal_conv1d_update(
                conv_in, conv_state, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, activation=mixer.activation
            )
        inputs = family.inputs(mixer, conv_out.transpose(1, 2).contiguous(), beside, self._parameters())
        records = records_of(cache, self.replay, inputs)
        out = records.step(mixer.layer_idx, self.layer, cache_layer, inputs, transposed=family.state_is_transposed)
        return getattr(mixer, family.out_proj)(family.normed(mixer, out, beside).to(hidden_states.dtype))


def _find_mixers(model: nn.Module) -> dict[str, Any]:
    mixers = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ in FAMILIES and type(module).__module__.startswith("transformers.models.")
    }
    if not mixers:
        raise NotImplementedError(
            f"model: expected {_KINDS} of transformers ({', '.join(FAMILIES)}), got {type(model).__name__} "
            "without any; models of trust_remote_code bring their own layers, load them without it"
        )
    return mixers


def _family_of(mixer: nn.Module) -> Family:
    return FAMILIES[type(mixer).__name__]


def _check_supported(forward: _MixerForward) -> None:
    """Raise what the first decoded token would, as far as sizes, dtypes and the device tell."""
    layer, replay, weight = forward.layer, forward.replay, forward.mixer.conv1d.weight
    pool = make_pool(layer, replay, 1, device="meta")
    if weight.is_cuda:
        options = forward.family.options(forward.mixer, dtype_name(weight.dtype))
        plan_step(layer, replay, options, arch=arch_of(weight.device), batch=1, ring_layout=pool.ring_layout)


def _common_ancestor(model: nn.Module, names: list[str]) -> nn.Module:
    """The innermost module that is called once a forward and contains all modules named."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    path = [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels)]
    while path and isinstance(model.get_submodule(".".join(path)), (nn.ModuleList, nn.ModuleDict)):
        path = path[:-1]
    return model.get_submodule(".".join(path))


def _require_transformers() -> None:
    try:
        import transformers

        if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
            raise ImportError(f"got {transformers.__version__}")
    except ImportError as error:
        raise ImportError(f"transformers 5.17 or newer is needed ({error}); pip install 'replayssm[hf]'") from error


def _check_version(kinds: set[type[nn.Module]]) -> None:
    """Refuse a transformers in which a step would fail, or be left out while the model's own decode runs."""
    import transformers

    missing = []
    for kind in kinds:
        signature = inspect.signature(kind.forward)
        parameters = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        names = ["cache" if p.name == "cache_params" else p.name for p in parameters]
        plain = all(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters)
        if not plain or names != ["self", "hidden_states", "cache", "attention_mask"]:
            wanted = "(self, hidden_states, cache or cache_params, attention_mask, **kwargs)"
            missing.append(f"{kind.__name__}.forward{wanted}, got {signature}")
        for function in FAMILIES[kind.__name__].functions:
            if not callable(getattr(sys.modules[kind.__module__], function, None)):
                missing.append(f"a function {function} in {kind.__module__}, got none")
    layer = getattr(transformers.cache_utils, "LinearAttentionLayer", None)
    attributes = vars(layer()) if layer else {}
    wanted_types = {"conv_states": dict, "recurrent_states": dict, "has_previous_state": dict, "record_past": bool}
    for name, wanted_type in wanted_types.items():
        got = attributes.get(name)
        if not isinstance(got, wanted_type):
            missing.append(f"a {wanted_type.__name__} {name} in LinearAttentionLayer of cache_utils, got {got!r}")
    if missing:
        raise NotImplementedError(
            f"transformers {transformers.__version__}: expected {'; '.join(missing)}. ReplaySSM knows the layers of "
            "transformers 5.17 to 5.24; install one of these"
        )
