"""Kimi Delta Attention: as Gated DeltaNet, with a decay of its own for each channel of K. Records are (u, k, g [K])."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.args import KdaParameters, KdaTensors
from cute_kernels.configs import SIZE_BYTES, KdaOptions
from cute_kernels.primitives.arithmetic import LOG2_E, exp2, sigmoid, softplus
from cute_kernels.recurrences.base import Gate
from cute_kernels.recurrences.gdn import norm_factors
from cute_kernels.replay.window import address, load_scalar_if


@dataclass(frozen=True)
class Kda:
    """The policy of a Kimi Delta Attention layer."""

    options: KdaOptions
    activation_dtype: str
    value_needs_state: bool = True
    decays_per_channel: bool = True

    def key(self, inputs: KdaTensors) -> cute.Tensor:
        return inputs.k

    def query(self, inputs: KdaTensors) -> cute.Tensor:
        return inputs.q

    def value(self, inputs: KdaTensors) -> cute.Tensor:
        return inputs.v

    def factors(self, query: list[Any], key: list[Any], lanes: tuple[int, ...]) -> tuple[Any, Any]:
        return norm_factors(query, key, lanes, self.options.scale, self.options.l2norm_eps)

    def load_token(
        self, inputs: KdaTensors, parameters: KdaParameters, row: Any, token: Any, head: Any
    ) -> tuple[Any, ...]:
        beta_at = address(inputs.beta, SIZE_BYTES[self.options.beta_dtype], row, token, head)
        rate_at = address(parameters.A_log, 4, head)
        return load_scalar_if(True, beta_at, self.options.beta_dtype), load_scalar_if(True, rate_at, "float32")

    def gate(self, loaded: tuple[Any, ...]) -> Gate:
        return Gate(record=Float32(0.0), rate=Float32(LOG2_E), skip=Float32(0.0), strength=sigmoid(loaded[0]))

    def load_channel(
        self, inputs: KdaTensors, parameters: KdaParameters, row: Any, token: Any, head: Any, channel: Any, inside: Any
    ) -> tuple[Any, ...]:
        """Loads of what the log-decay of one channel of K needs."""
        gate_at = address(inputs.g, SIZE_BYTES[self.options.g_dtype], row, token, head, channel)
        bias_at = address(parameters.dt_bias, 4, head, channel)
        return load_scalar_if(inside, gate_at, self.options.g_dtype), load_scalar_if(inside, bias_at, "float32")

    def log_decay(self, channel: tuple[Any, ...], token: tuple[Any, ...]) -> Float32:
        """The log-decay of a channel: unbounded, or a bound times a sigmoid, which scales and does not clamp."""
        gate, rate = channel[0] + channel[1], exp2(token[1] * Float32(LOG2_E))
        if self.options.lower_bound is None:
            return softplus(gate) * -rate
        return sigmoid(rate * gate) * Float32(self.options.lower_bound)

    def load_rate(self, decay_rate: cute.Tensor | None, head: Any) -> Float32:
        return Float32(LOG2_E)

    def weight(self, record: Any) -> Float32:
        return Float32(1.0)

    def epilogue_input(self, inputs: KdaTensors) -> cute.Tensor:
        return inputs.v

    def epilogue(self, loaded: Any) -> Any:
        return loaded

    def finish(self, output: Any, epilogue: Any) -> Float32:
        return output
