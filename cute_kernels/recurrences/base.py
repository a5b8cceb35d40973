"""The hooks that a recurrence gives to the step kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass.cute as cute
from cutlass import Float32


@dataclass(frozen=True)
class Gate:
    """Scalars of a row's head in this step, known in every thread.

    Args:
        record: the token's decay record, as the ring keeps it.
        rate: base-2 log-decay of a record of 1.
        skip: weight of the token's own value in the output, beside the state.
        strength: factor of the correction that a delta rule makes; None where there is none.
    """

    record: Float32
    rate: Float32
    skip: Float32
    strength: Float32 | None = None


class Recurrence(Protocol):
    """A frozen, hashable policy; its methods are called while a kernel is traced.

    `value_needs_state`: the token's record is not an input but what the state lacks (the delta rule), so the state is
    multiplied by the key too. `decays_per_channel`: each channel of K has a decay of its own, which `load_channel` and
    `log_decay` give (`kda.Kda`); the gate's record and rate then mean nothing.
    """

    @property
    def value_needs_state(self) -> bool: ...

    @property
    def decays_per_channel(self) -> bool: ...

    def key(self, inputs: Any) -> cute.Tensor:
        """The keys of this step's tokens, [rows, T, HK, K]."""

    def query(self, inputs: Any) -> cute.Tensor:
        """The queries of this step's tokens, [rows, T, HK, K]."""

    def value(self, inputs: Any) -> cute.Tensor:
        """The tensor that the tokens' value records come from, [rows, T, HV, V]."""

    def factors(self, query: list[Any], key: list[Any], lanes: tuple[int, ...]) -> tuple[Any, Any]:
        """What query and key are multiplied by before the state meets them, from a thread's part of both.

        `lanes` are the masks of the lanes that hold the other parts.
        """

    def load_token(self, inputs: Any, parameters: Any, row: Any, token: Any, head: Any) -> tuple[Any, ...]:
        """Loads of what a token's gate needs; nothing is computed, so that later loads are not held up."""

    def gate(self, loaded: tuple[Any, ...]) -> Gate:
        """The gate of a row's head."""

    def load_rate(self, decay_rate: cute.Tensor | None, head: Any) -> Float32:
        """Base-2 log-decay of a record of 1; `decay_rate` is A [HV] where the records need it."""

    def weight(self, record: Any) -> Float32:
        """Factor of a record's value, beside the decay of what comes after it."""

    def epilogue_input(self, inputs: Any) -> cute.Tensor | None:
        """The tensor that the epilogue needs beside the output, [rows, T, HV, V]; None where it needs none."""

    def epilogue(self, loaded: Any) -> Any:
        """What the epilogue computes of its input alone, ahead of the output; of None where it has none."""

    def finish(self, output: Any, epilogue: Any) -> Float32:
        """The output of a channel after the layer's epilogue; with a delta rule the epilogue is the value."""
