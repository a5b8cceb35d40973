"""Mamba-2: h <- e^(dt A) h + dt x B^T, y = h C + D x, then y silu(z). Records are (x, B, dt after softplus)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.args import Mamba2Tensors
from cute_kernels.configs import SIZE_BYTES, Mamba2Options
from cute_kernels.primitives.arithmetic import LOG2_E, silu, softplus
from cute_kernels.recurrences.base import Gate
from cute_kernels.replay.window import address, load_scalar_if


@dataclass(frozen=True)
class Mamba2:
    """The policy of a Mamba-2 layer."""

    options: Mamba2Options
    activation_dtype: str
    value_needs_state = False

    def key(self, inputs: Mamba2Tensors) -> cute.Tensor:
        return inputs.B

    def query(self, inputs: Mamba2Tensors) -> cute.Tensor:
        return inputs.C

    def value(self, inputs: Mamba2Tensors) -> cute.Tensor:
        return inputs.x

    def gate(self, inputs: Mamba2Tensors, row: Any, head: Any) -> Gate:
        options = self.options
        dt = load_scalar_if(True, address(inputs.dt, SIZE_BYTES[options.dt_dtype], row, 0, head), options.dt_dtype)
        if options.dt_bias_dtype is not None:
            where = address(inputs.dt_bias, SIZE_BYTES[options.dt_bias_dtype], head)
            dt = dt + load_scalar_if(True, where, options.dt_bias_dtype)
        if options.dt_softplus:
            dt = softplus(dt)
        rate = load_scalar_if(True, address(inputs.A, 4, head), "float32") * Float32(LOG2_E)
        skip = Float32(0.0)
        if options.D_dtype is not None:
            skip = load_scalar_if(True, address(inputs.D, SIZE_BYTES[options.D_dtype], head), options.D_dtype)
        return Gate(record=dt, rate=rate, skip=skip)

    def weight(self, record: Any) -> Float32:
        return record

    def finish(self, inputs: Mamba2Tensors, row: Any, head: Any, channel: Any, output: Any, inside: Any) -> Float32:
        if not self.options.has_z:
            return output
        where = address(inputs.z, SIZE_BYTES[self.activation_dtype], row, 0, head, channel)
        return output * silu(load_scalar_if(inside, where, self.activation_dtype))
