"""Hugging Face transformers: decode the Mamba-2 layers of an unmodified model with ReplaySSM.

    from replayssm.integrations.transformers import disable, enable

    enable(model, window=16)
    model.generate(...)             # as always: batches, left padding, sampling, beams
    disable(model)

Tested with the model types mamba2, nemotron_h, bamba, granitemoehybrid, zamba2 and falcon_h1 of transformers 5.17.0 to
5.24.0. `enable` refuses a version whose layers or caches are not built as these are.

What runs where. A forward with several tokens (prefill, chunked prefill) is the model's own. A forward with one token
on a cache that has a state decodes here: the projections, the convolution with its state in the cache, the gated norm
and the output projection are the model's own calls, `replayssm.step` stands in for its state update. `commit` runs
once a forward, after the module that contains all Mamba-2 layers.

Memory. The checkpoint of a pool *is* the cache's own state tensor: nothing is copied, unless its dtype differs from
`checkpoint_dtype`; then it is converted once, on the first decoded token, and the cache holds the converted tensor.
The records and cursors hang on the cache object, so a new cache starts clean and a deep copy takes them along.
Whoever else reads a state from the cache (a multi-token forward, beam reordering, a model after `disable`, the user)
gets it with all pending records folded in. Beam search therefore folds on every token: right, but no faster.

Limits. `time_step_limit` clamps dt in prefill only, as in the models' own decode step, which ignores it. Inference
only; no model that accelerate has spread or offloaded; under `torch.compile` the steps stay eager. Caches that record
their past for assisted decoding take the model's own path. falcon_h1 with `mamba_rms_norm` decodes at batch 1 only,
as it does without ReplaySSM.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import replayssm
from replayssm.cursors import Cursors, make_cursors
from replayssm.inputs import Mamba2Inputs
from replayssm.launch import arch_of
from replayssm.plan import plan_step
from replayssm.pool import Pool, make_pool
from replayssm.spec import LayerSpec, ReplaySpec

_ON_CACHE = "_replayssm_records"
_ON_MODEL = "_replayssm_hook"


@dataclass(frozen=True)
class _Family:
    """Where the mixers of a family differ between their input and output projections."""

    project: Callable[[Any, Tensor], Tensor]
    gate_in_step: Callable[[Any], bool]


_PLAIN = _Family(lambda mixer, hidden: mixer.in_proj(hidden), lambda mixer: False)
_FALCON_H1 = _Family(
    lambda mixer, hidden: mixer.in_proj(hidden * mixer.ssm_in_multiplier) * mixer.mup_vector,
    lambda mixer: not mixer.mamba_rms_norm,
)
FAMILIES = {
    "Mamba2Mixer": _PLAIN,
    "NemotronHMamba2Mixer": _PLAIN,
    "BambaMixer": _PLAIN,
    "GraniteMoeHybridMambaLayer": _PLAIN,
    "Zamba2MambaMixer": _PLAIN,
    "FalconH1Mixer": _FALCON_H1,
}


def enable(model: nn.Module, *, window: int = 16, checkpoint_dtype: torch.dtype = torch.float32) -> None:
    """Make the Mamba-2 layers of a Hugging Face model decode with ReplaySSM, until `disable`.

    On CUDA the layers run the kernels, on other devices the torch twin, which is a reference and no fast path.

    Args:
        model: a model of transformers, on one device; its parameters, buffers and state dict stay as they are.
        window: records that may be pending before they are folded into the state, 1 to 64.
        checkpoint_dtype: dtype of the state in the cache: float32, bfloat16 or float16.

    Raises:
        ImportError: transformers is missing or older than 5.17.
        ValueError: `window` is out of range or a layer has sizes that no pool can hold.
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
    devices = {mixer.A_log.device for mixer in mixers.values()}
    if len(devices) > 1:
        raise NotImplementedError(f"model: expected all Mamba-2 layers on one device, got {sorted(map(str, devices))}")
    dtypes = {mixer.conv1d.weight.dtype for mixer in mixers.values()}
    if len(dtypes) > 1:
        raise NotImplementedError(f"model: expected one dtype in all Mamba-2 layers, got {sorted(map(str, dtypes))}")
    forwards = {}
    for name, mixer in mixers.items():
        replay = ReplaySpec(window, checkpoint_dtype=checkpoint_dtype, activation_dtype=mixer.conv1d.weight.dtype)
        forwards[name] = _MixerForward(mixer, replay)
        _check_supported(forwards[name].layer, replay, mixer.A_log.device)
    for name, mixer in mixers.items():
        mixer.forward = forwards[name]
    root: Any = _common_ancestor(model, list(mixers))
    setattr(root, _ON_MODEL, root.register_forward_hook(_commit_after_forward, with_kwargs=True))


def disable(model: nn.Module) -> None:
    """Undo `enable`; does nothing to a model that is not enabled. Caches in use stay valid: their next reader folds."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _MixerForward):
            del module.forward
        handle = module.__dict__.pop(_ON_MODEL, None)
        if handle is not None:
            handle.remove()


def layer_specs(model: nn.Module) -> list[LayerSpec]:
    """The geometry of each Mamba-2 layer of a model, enabled or not.

    Raises:
        NotImplementedError: no layer of a supported family.
    """
    return [_layer_spec(mixer) for mixer in _find_mixers(model).values()]


class _MixerForward:
    """The `forward` of one mixer while ReplaySSM is enabled."""

    def __init__(self, mixer: Any, replay: ReplaySpec) -> None:
        self.mixer = mixer
        self.replay = replay
        self.layer = _layer_spec(mixer)
        self._rate: tuple[object, Tensor] | None = None

    def _decay_rate(self) -> Tensor:
        """A = -exp(A_log), computed again only when the parameter has changed: a step prepares its launch for it."""
        A_log = self.mixer.A_log
        if A_log.is_inference():  # counts no versions
            return -torch.exp(A_log.float())
        seen = (A_log.data_ptr(), A_log._version, A_log.dtype, A_log.device)
        if self._rate is None or self._rate[0] != seen:
            self._rate = (seen, -torch.exp(A_log.detach().float()))
        return self._rate[1]

    def __call__(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        mixer = self.mixer
        if cache is None:
            cache = kwargs.pop("cache_params", None)  # its name before transformers 5.24
        if (
            cache is None
            or hidden_states.shape[1] != 1
            or not cache.has_previous_state(mixer.layer_idx)
            or cache.layers[mixer.layer_idx].record_past
        ):
            return type(mixer).forward(mixer, hidden_states, cache, attention_mask, **kwargs)
        if attention_mask is not None:
            # The models pass none here, since a decoded token is no padding.
            raise NotImplementedError("attention_mask of a Mamba-2 layer for a single decoded token; pass None")
        if torch.compiler.is_compiling():
            # Without fullgraph this makes a graph break, and the frame runs eagerly.
            raise NotImplementedError("torch.compile with fullgraph=True of a ReplaySSM step; compile without it")
        return self._decode(hidden_states, cache)

    def _decode(self, hidden_states: Tensor, cache: Any) -> Tensor:
        mixer, layer, rows = self.mixer, self.layer, hidden_states.shape[0]
        family = FAMILIES[type(mixer).__name__]
        projected = family.project(mixer, hidden_states)
        if torch.is_grad_enabled() and projected.requires_grad:
            raise NotImplementedError("gradients through a ReplaySSM step; decode under torch.no_grad()")
        gate, conv_in, dt = projected.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
        conv_out = sys.modules[type(mixer).__module__].causal_conv1d_update(
            conv_in.transpose(1, 2),
            cache.layers[mixer.layer_idx].conv_states[0],
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            activation=mixer.activation,
        )
        group_size = layer.num_k_heads * layer.d_state
        x, B, C = conv_out.transpose(1, 2).contiguous().split([mixer.intermediate_size, group_size, group_size], dim=-1)
        heads, groups = (layer.num_v_heads, layer.head_dim), (layer.num_k_heads, layer.d_state)
        inputs = Mamba2Inputs(
            x=x.unflatten(-1, heads),
            dt=dt,
            B=B.unflatten(-1, groups),
            C=C.unflatten(-1, groups),
            A=self._decay_rate(),
            D=mixer.D,
            z=gate.contiguous().unflatten(-1, heads) if family.gate_in_step(mixer) else None,
            dt_bias=mixer.dt_bias,
            dt_softplus=True,
        )
        out = _records_of(cache, self.replay, rows, x).step(self, cache, inputs).reshape(rows, 1, -1)
        if not family.gate_in_step(mixer):
            out = mixer.norm(out, gate)
        return mixer.out_proj(out.to(hidden_states.dtype))


@dataclass(eq=False)
class _Records:
    """What is pending for one cache: the cursors that its Mamba-2 layers share, and a pool of each layer."""

    replay: ReplaySpec
    cursors: Cursors
    slots: Tensor
    pools: dict[int, Pool] = field(default_factory=dict)
    inputs: dict[int, Mamba2Inputs] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    pending: bool = False

    def step(self, forward: _MixerForward, cache: Any, inputs: Mamba2Inputs) -> Tensor:
        index = forward.mixer.layer_idx
        if index in self.stepped:
            self._refuse_unfinished()
        pool = self._pool(index, forward.layer, cache.layers[index])
        self.inputs[index] = inputs
        self.stepped.add(index)
        return replayssm.step(pool, self.cursors, inputs, cache_indices=self.slots)

    def commit(self) -> None:
        if self.stepped:
            replayssm.commit(self.cursors, cache_indices=self.slots)
            self.stepped.clear()
            self.pending = True

    def flush(self) -> None:
        """Fold all pending records: the layers step their last token again, fold before it, and it is rejected."""
        if self.stepped:
            self._refuse_unfinished()
        if not self.pending:
            return
        every_row = torch.ones_like(self.slots, dtype=torch.bool)
        for index, pool in self.pools.items():
            replayssm.step(pool, self.cursors, self.inputs[index], cache_indices=self.slots, force_fold=every_row)
        none = torch.zeros_like(self.slots)
        replayssm.commit(self.cursors, cache_indices=self.slots, num_accepted=none, force_fold=every_row)
        self.pending = False

    def _pool(self, index: int, layer: LayerSpec, cache_layer: Any) -> Pool:
        """The pool over the state that the cache holds now; its rings survive when the cache replaced the state."""
        if not isinstance(cache_layer.recurrent_states, _FoldedStates):
            cache_layer.recurrent_states = _FoldedStates(cache_layer.recurrent_states)
        states = cache_layer.recurrent_states
        states.records = self
        state, pool = states.data[0], self.pools.get(index)
        if pool is None or pool.checkpoint is not state:
            states.data[0] = state = state.to(self.replay.checkpoint_dtype).contiguous()
            pool = pool or make_pool(layer, self.replay, len(self.slots), device=state.device)
            self.pools[index] = pool = replace(pool, checkpoint=state)
        return pool

    def __deepcopy__(self, memo: dict[int, Any]) -> _Records:
        """Copies the tensors but no kernels; a checkpoint stays one with the copied cache's own tensor."""
        cursors = Cursors(self.replay, *copy.deepcopy((self.cursors.ring_start, self.cursors.num_committed), memo))
        copied = replace(self, cursors=cursors, slots=self.slots.clone(), inputs=dict(self.inputs))
        copied.pools = {
            index: Pool(pool.layer, pool.replay, *copy.deepcopy(pool.tensors, memo))
            for index, pool in self.pools.items()
        }
        copied.stepped = set(self.stepped)
        return copied

    def _refuse_unfinished(self) -> None:
        raise RuntimeError(
            f"cache: layers {sorted(self.stepped)} have decoded a token that was never committed, because a forward "
            "failed or their layers were called outside of the model; start again from a new cache"
        )


class _FoldedStates(UserDict[int, Tensor]):
    """The `recurrent_states` of a cache layer: a reader or writer finds no pending records."""

    records: _Records | None = None

    def __getitem__(self, index: int) -> Tensor:
        self._flush()
        return self.data[index]

    def __setitem__(self, index: int, state: Tensor) -> None:
        self._flush()
        self.data[index] = state

    def _flush(self) -> None:
        if self.records is not None:
            self.records.flush()


def _records_of(cache: Any, replay: ReplaySpec, rows: int, x: Tensor) -> _Records:
    """The records of a cache, made anew when its rows, the device, the dtype or the settings have changed."""
    replay = replace(replay, activation_dtype=x.dtype)
    records = getattr(cache, _ON_CACHE, None)
    if records is None or records.replay != replay or (len(records.slots), records.slots.device) != (rows, x.device):
        if records is not None:
            records.flush()
        slots = torch.arange(rows, dtype=torch.int32, device=x.device)
        records = _Records(replay, make_cursors(replay, rows, device=x.device), slots)
        setattr(cache, _ON_CACHE, records)
    return records


def _commit_after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    for value in (*args, *kwargs.values()):
        records = getattr(value, _ON_CACHE, None)
        if isinstance(records, _Records):
            records.commit()


def _find_mixers(model: nn.Module) -> dict[str, Any]:
    mixers = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ in FAMILIES and type(module).__module__.startswith("transformers.models.")
    }
    if not mixers:
        raise NotImplementedError(
            f"model: expected Mamba-2 layers of transformers ({', '.join(FAMILIES)}), got {type(model).__name__} "
            "without any; models of trust_remote_code bring their own layers, load them without it"
        )
    return mixers


def _check_supported(layer: LayerSpec, replay: ReplaySpec, device: torch.device) -> None:
    """Raise what the first decoded token would, as far as sizes, dtypes and the device tell."""
    make_pool(layer, replay, 1, device="meta")
    if device.type == "cuda":
        from cute_kernels.configs import Mamba2Options

        plan_step(layer, replay, Mamba2Options(), arch=arch_of(device), batch=1)


def _layer_spec(mixer: Any) -> LayerSpec:
    return LayerSpec("mamba2", mixer.num_heads, mixer.n_groups, mixer.head_dim, mixer.ssm_state_size)


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
        if not callable(getattr(sys.modules[kind.__module__], "causal_conv1d_update", None)):
            missing.append(f"a function causal_conv1d_update in {kind.__module__}, got none")
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
