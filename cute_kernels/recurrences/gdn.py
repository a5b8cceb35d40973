"""Gated DeltaNet: S <- e^g S, u = beta (v - S k), S <- S + u k^T, o = S q. Records are (u, k normalised, g)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.args import GdnParameters, GdnTensors
from cute_kernels.configs import SIZE_BYTES, GdnOptions
from cute_kernels.primitives.arithmetic import LOG2_E, exp2, sigmoid, softplus
from cute_kernels.primitives.convert import pack, unpack
from cute_kernels.primitives.reduce import sum_lanes
from cute_kernels.recurrences.base import Gate
from cute_kernels.replay.window import address, load_scalar_if


def norm_factors(
    query: list[Any], key: list[Any], lanes: tuple[int, ...], scale: float, eps: float | None
) -> tuple[Any, Any]:
    """Factors that l2-normalise query and key, unless `eps` is None, and scale the query, from a thread's parts."""
    if eps is None:
        return Float32(scale), Float32(1.0)
    norms = []
    for values in (query, key):
        squares = Float32(0.0)
        for x in values:
            squares = squares + x * x
        norms.append(cute.math.rsqrt(sum_lanes(squares, lanes) + Float32(eps)))
    return norms[0] * Float32(scale), norms[1]


@dataclass(frozen=True)
class Gdn:
    """The policy of a Gated DeltaNet layer."""

    options: GdnOptions
    activation_dtype: str
    value_needs_state: bool = True
    decays_per_channel: bool = False

    def key(self, inputs: GdnTensors) -> cute.Tensor:
        return inputs.k

    def query(self, inputs: GdnTensors) -> cute.Tensor:
        return inputs.q

    def value(self, inputs: GdnTensors) -> cute.Tensor:
        return inputs.v

    def factors(self, query: list[Any], key: list[Any], lanes: tuple[int, ...]) -> tuple[Any, Any]:
        return norm_factors(query, key, lanes, self.options.scale, self.options.l2norm_eps)

    def load_token(
        self, inputs: GdnTensors, parameters: GdnParameters, row: Any, token: Any, head: Any
    ) -> tuple[Any, ...]:
        def scalar(tensor: cute.Tensor, dtype: str, *index: Any) -> Float32:
            return load_scalar_if(True, address(tensor, SIZE_BYTES[dtype], *index), dtype)

        return (
            scalar(inputs.a, self.options.a_dtype, row, token, head),
            scalar(inputs.b, self.options.b_dtype, row, token, head),
            scalar(parameters.A_log, "float32", head),
            scalar(parameters.dt_bias, "float32", head),
        )

    def gate(self, loaded: tuple[Any, ...]) -> Gate:
        a, b, A_log, dt_bias = loaded
        log_decay = softplus(a + dt_bias) * -exp2(A_log * Float32(LOG2_E))
        beta = sigmoid(b)
        if self.options.round_beta:
            beta = unpack(pack([beta], self.options.b_dtype), self.options.b_dtype)[0]
        return Gate(record=log_decay, rate=Float32(LOG2_E), skip=Float32(0.0), strength=beta)

    def load_rate(self, decay_rate: cute.Tensor | None, head: Any) -> Float32:
        return Float32(LOG2_E)

    def weight(self, record: Any) -> Float32:
        return Float32(1.0)

    def epilogue_input(self, inputs: GdnTensors) -> cute.Tensor:
        return inputs.v

    def epilogue(self, loaded: Any) -> Any:
        return loaded

    def finish(self, output: Any, epilogue: Any) -> Float32:
        return output
