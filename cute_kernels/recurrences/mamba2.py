"""Mamba-2: h <- e^(dt A) h + dt x B^T, y = h C + D x, then y silu(z). Records are (x, B, dt after softplus)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.args import Mamba2Parameters, Mamba2Tensors
from cute_kernels.configs import SIZE_BYTES, Mamba2Options
from cute_kernels.primitives.arithmetic import LOG2_E, silu, softplus
from cute_kernels.recurrences.base import Gate
from cute_kernels.replay.window import address, load_scalar_if


@dataclass(frozen=True)
class Mamba2:
    """The policy of a Mamba-2 layer."""

    options: Mamba2Options
    activation_dtype: str
    value_needs_state: bool = False
    decays_per_channel: bool = False

    def key(self, inputs: Mamba2Tensors) -> cute.Tensor:
        return inputs.B

    def query(self, inputs: Mamba2Tensors) -> cute.Tensor:
        return inputs.C

    def value(self, inputs: Mamba2Tensors) -> cute.Tensor:
        return inputs.x

    def factors(self, query: list[Any], key: list[Any], lanes: tuple[int, ...]) -> tuple[Any, Any]:
        return Float32(1.0), Float32(1.0)

    def load_token(
        self, inputs: Mamba2Tensors, parameters: Mamba2Parameters, row: Any, token: Any, head: Any
    ) -> tuple[Any, ...]:
        options = self.options

        def scalar(tensor: cute.Tensor | None, dtype: str | None, *index: Any) -> Float32 | None:
            return None if dtype is None else load_scalar_if(True, address(tensor, SIZE_BYTES[dtype], *index), dtype)

        return (
            scalar(inputs.dt, options.dt_dtype, row, token, head),
            scalar(parameters.dt_bias, options.dt_bias_dtype, head),
            scalar(parameters.A, "float32", head),
            scalar(parameters.D, options.D_dtype, head),
        )

    def gate(self, loaded: tuple[Any, ...]) -> Gate:
        dt, dt_bias, decay_rate, skip = loaded
        if dt_bias is not None:
            dt = dt + dt_bias
        if self.options.dt_softplus:
            dt = softplus(dt)
        return Gate(record=dt, rate=decay_rate * Float32(LOG2_E), skip=Float32(0.0) if skip is None else skip)

    def load_rate(self, decay_rate: cute.Tensor | None, head: Any) -> Float32:
        return load_scalar_if(True, address(decay_rate, 4, head), "float32") * Float32(LOG2_E)

    def weight(self, record: Any) -> Float32:
        return record

    def epilogue_input(self, inputs: Mamba2Tensors) -> cute.Tensor | None:
        return inputs.z if self.options.has_z else None

    def epilogue(self, loaded: Any) -> Any:
        return None if loaded is None else silu(loaded)

    def finish(self, output: Any, epilogue: Any) -> Float32:
        return output if epilogue is None else output * epilogue
