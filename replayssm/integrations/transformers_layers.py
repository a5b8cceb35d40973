"""The layers of Hugging Face models by family: what their decode steps do before and after the state update.

The projections, the norms and the output projection are a layer's own modules, called in the order of its own decode
step; here a family says which they are, what their results are called in a step, and where its cache keeps the state.
A step has one token a row, or several when drafts are verified.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from replayssm.inputs import GdnInputs, Inputs, KdaInputs, Mamba2Inputs
from replayssm.spec import LayerSpec

if TYPE_CHECKING:
    from cute_kernels.configs import Options

NORM_EPS = 1e-6  # of the l2 norm of q and k: the layers write it into the call, no configuration holds it


class Projected(NamedTuple):
    """Tokens after the input projections: what goes into the convolution [rows, T, channels], and what does not."""

    conv_in: Tensor
    beside: tuple[Tensor, ...]


class Family(ABC):
    """How the layers of one family are built; holds no layer itself.

    `state_is_transposed` says that the cache keeps a state as [rows, HV, K, V], with the axes of a checkpoint swapped.
    `functions` are those that a layer's modeling file must have, `out_proj` is the name of the output projection.
    """

    name: str
    state_is_transposed = False
    functions: tuple[str, ...] = ("causal_conv1d_update",)
    out_proj = "out_proj"

    @abstractmethod
    def geometry(self, mixer: Any) -> LayerSpec:
        """Recurrence and sizes of a layer."""

    @abstractmethod
    def learned(self, mixer: Any) -> tuple[Tensor, ...]:
        """The parameters that `prepared` starts from."""

    @abstractmethod
    def prepared(self, mixer: Any, learned: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The parameters as a step takes them; computed again only when the learned ones have changed."""

    @abstractmethod
    def project(self, mixer: Any, hidden: Tensor) -> Projected:
        """The input projections of T tokens a row, [rows, T, hidden size]."""

    @abstractmethod
    def inputs(self, mixer: Any, conv_out: Tensor, beside: tuple[Tensor, ...], prepared: tuple[Tensor, ...]) -> Inputs:
        """A step's inputs from the convolution's output [rows, T, channels], which is packed."""

    @abstractmethod
    def normed(self, mixer: Any, out: Tensor, beside: tuple[Tensor, ...]) -> Tensor:
        """A step's output [rows, T, HV, V] as the output projection takes it, after the norm if there is one."""

    @abstractmethod
    def options(self, mixer: Any, dtype: str) -> Options:
        """What a kernel would have to know of the layer with activations of a dtype."""

    def mask(self, mixer: Any, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """A token without what its mask [rows, 1] takes away."""
        raise NotImplementedError(f"attention_mask of a {self.name} layer for a single decoded token; pass None")


class Mamba2(Family):
    """Mamba-2 with one projection for gate, convolution and dt."""

    name = "Mamba-2"

    def geometry(self, mixer: Any) -> LayerSpec:
        return LayerSpec("mamba2", mixer.num_heads, mixer.n_groups, mixer.head_dim, mixer.ssm_state_size)

    def learned(self, mixer: Any) -> tuple[Tensor, ...]:
        return (mixer.A_log,)

    def prepared(self, mixer: Any, learned: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (-torch.exp(learned[0].detach().float()),)

    def in_proj(self, mixer: Any, hidden: Tensor) -> Tensor:
        """The input projection with all that is multiplied into it."""
        return mixer.in_proj(hidden)

    def gate_in_step(self, mixer: Any) -> bool:
        """Whether the step multiplies by the gate, because no norm does."""
        return False

    def project(self, mixer: Any, hidden: Tensor) -> Projected:
        sizes = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
        gate, conv_in, dt = self.in_proj(mixer, hidden).split(sizes, dim=-1)
        return Projected(conv_in, (gate, dt))

    def inputs(self, mixer: Any, conv_out: Tensor, beside: tuple[Tensor, ...], prepared: tuple[Tensor, ...]) -> Inputs:
        gate, dt = beside
        group_size = mixer.n_groups * mixer.ssm_state_size
        heads, groups = (mixer.num_heads, mixer.head_dim), (mixer.n_groups, mixer.ssm_state_size)
        x, B, C = conv_out.split([mixer.intermediate_size, group_size, group_size], dim=-1)
        return Mamba2Inputs(
            x=x.unflatten(-1, heads),
            dt=dt,
            B=B.unflatten(-1, groups),
            C=C.unflatten(-1, groups),
            A=prepared[0],
            D=mixer.D,
            z=gate.contiguous().unflatten(-1, heads) if self.gate_in_step(mixer) else None,
            dt_bias=mixer.dt_bias,
            dt_softplus=True,
        )

    def normed(self, mixer: Any, out: Tensor, beside: tuple[Tensor, ...]) -> Tensor:
        out = out.flatten(-2)
        return out if self.gate_in_step(mixer) else mixer.norm(out, beside[0])

    def options(self, mixer: Any, dtype: str) -> Options:
        from cute_kernels.configs import Mamba2Options

        return Mamba2Options(dt_dtype=dtype)


class FalconH1(Mamba2):
    """Mamba-2 with multipliers around its projection and, in most models, no norm."""

    def in_proj(self, mixer: Any, hidden: Tensor) -> Tensor:
        return mixer.in_proj(hidden * mixer.ssm_in_multiplier) * mixer.mup_vector

    def gate_in_step(self, mixer: Any) -> bool:
        return not mixer.mamba_rms_norm


class DeltaRule(Family):
    """What Gated DeltaNet and Kimi Delta Attention share: the layout of their states, and a mask that zeroes tokens."""

    state_is_transposed = True
    functions = ("causal_conv1d_update", "apply_mask_to_padding_states")

    def mask(self, mixer: Any, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        return sys.modules[type(mixer).__module__].apply_mask_to_padding_states(hidden, attention_mask)


class GatedDeltaNet(DeltaRule):
    """Gated DeltaNet with one projection each for the convolution, the gate of the norm, beta and the decay."""

    name = "Gated DeltaNet"

    def geometry(self, mixer: Any) -> LayerSpec:
        return LayerSpec("gdn", mixer.num_v_heads, mixer.num_k_heads, mixer.head_v_dim, mixer.head_k_dim)

    def learned(self, mixer: Any) -> tuple[Tensor, ...]:
        return mixer.A_log, mixer.dt_bias

    def prepared(self, mixer: Any, learned: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(parameter.detach().float() for parameter in learned)

    def project(self, mixer: Any, hidden: Tensor) -> Projected:
        beside = mixer.in_proj_z(hidden), mixer.in_proj_b(hidden), mixer.in_proj_a(hidden)
        return Projected(mixer.in_proj_qkv(hidden), beside)

    def inputs(self, mixer: Any, conv_out: Tensor, beside: tuple[Tensor, ...], prepared: tuple[Tensor, ...]) -> Inputs:
        q, k, v = conv_out.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        _, b, a = beside
        return GdnInputs(
            q=q.unflatten(-1, (mixer.num_k_heads, mixer.head_k_dim)),
            k=k.unflatten(-1, (mixer.num_k_heads, mixer.head_k_dim)),
            v=v.unflatten(-1, (mixer.num_v_heads, mixer.head_v_dim)),
            a=a,
            b=b,
            A_log=prepared[0],
            dt_bias=prepared[1],
            l2norm_eps=NORM_EPS,
            round_beta=True,  # the layers take the sigmoid in the dtype of b
        )

    def normed(self, mixer: Any, out: Tensor, beside: tuple[Tensor, ...]) -> Tensor:
        width = mixer.head_v_dim
        return mixer.norm(out.reshape(-1, width), beside[0].reshape(-1, width)).view(*out.shape[:2], -1)

    def options(self, mixer: Any, dtype: str) -> Options:
        from cute_kernels.configs import GdnOptions

        scale = mixer.head_k_dim**-0.5
        return GdnOptions(scale, a_dtype=dtype, b_dtype=dtype, l2norm_eps=NORM_EPS, round_beta=True)


class Qwen3Next(GatedDeltaNet):
    """Gated DeltaNet whose projections come interleaved by key head; the layer has a method that sorts them."""

    def project(self, mixer: Any, hidden: Tensor) -> Projected:
        mixed = mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden)
        q, k, v, z, b, a = mixer.fix_query_key_value_ordering(*mixed)
        return Projected(torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1), (z, b, a))


class KimiDelta(DeltaRule):
    """Kimi Delta Attention; its forget gate is a module that also holds the parameters of the decay."""

    name = "Kimi Delta Attention"
    out_proj = "o_proj"

    def geometry(self, mixer: Any) -> LayerSpec:
        return LayerSpec("kda", mixer.num_heads, mixer.num_heads, mixer.head_dim, mixer.head_dim)

    def learned(self, mixer: Any) -> tuple[Tensor, ...]:
        return mixer.forget_gate.A_log, mixer.forget_gate.dt_bias

    def prepared(self, mixer: Any, learned: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        A_log, dt_bias = (parameter.detach().float() for parameter in learned)
        return A_log.flatten(), dt_bias.view(mixer.num_heads, mixer.head_dim)

    def lower_bound(self, mixer: Any) -> float | None:
        """Of the log-decay; None for the softplus gate."""
        return None

    def project(self, mixer: Any, hidden: Tensor) -> Projected:
        gate = mixer.forget_gate
        conv_in = torch.cat([mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden)], dim=-1)
        decay, norm_gate = gate.f_b_proj(gate.f_a_proj(hidden)), mixer.g_b_proj(mixer.g_a_proj(hidden))
        return Projected(conv_in, (norm_gate, mixer.b_proj(hidden), decay))

    def inputs(self, mixer: Any, conv_out: Tensor, beside: tuple[Tensor, ...], prepared: tuple[Tensor, ...]) -> Inputs:
        heads = (mixer.num_heads, mixer.head_dim)
        q, k, v = (part.unflatten(-1, heads) for part in conv_out.split(mixer.qkv_dim, dim=-1))
        _, beta, decay = beside
        return KdaInputs(
            q=q,
            k=k,
            v=v,
            g=decay.unflatten(-1, heads),
            beta=beta,
            A_log=prepared[0],
            dt_bias=prepared[1],
            lower_bound=self.lower_bound(mixer),
            l2norm_eps=NORM_EPS,
        )

    def normed(self, mixer: Any, out: Tensor, beside: tuple[Tensor, ...]) -> Tensor:
        return mixer.o_norm(out, beside[0].view_as(out)).flatten(-2)

    def options(self, mixer: Any, dtype: str) -> Options:
        from cute_kernels.configs import KdaOptions

        bound, scale = self.lower_bound(mixer), mixer.head_dim**-0.5
        return KdaOptions(scale, g_dtype=dtype, beta_dtype=dtype, lower_bound=bound, l2norm_eps=NORM_EPS)


class Glm5Next(KimiDelta):
    """Kimi Delta Attention whose decay has a lower bound, unless the configuration takes it away."""

    def lower_bound(self, mixer: Any) -> float | None:
        return mixer.forget_gate.safe_gate_lower_bound


# By the class of a layer, whatever its model calls it.
FAMILIES: dict[str, Family] = {
    "Mamba2Mixer": Mamba2(),
    "NemotronHMamba2Mixer": Mamba2(),
    "BambaMixer": Mamba2(),
    "GraniteMoeHybridMambaLayer": Mamba2(),
    "Zamba2MambaMixer": Mamba2(),
    "FalconH1Mixer": FalconH1(),
    "Qwen3NextGatedDeltaNet": Qwen3Next(),
    "Qwen3_5GatedDeltaNet": GatedDeltaNet(),
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet(),
    "Qwen4ExpTextGatedDeltaNet": GatedDeltaNet(),
    "KimiLinearDeltaAttention": KimiDelta(),
    "Glm5NextTextLinearAttention": Glm5Next(),
}
