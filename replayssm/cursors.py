"""Where each slot's pending records begin and how many there are: one pair of tensors for all layers of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replayssm.checks import check_tensor
from replayssm.spec import ReplaySpec


@dataclass(frozen=True, eq=False)
class Cursors:
    """The cursors of every slot.

    Args:
        replay: the replay parameters that all layers of the model share.
        ring_start: [slots] int32; physical row of the oldest pending record, 0 to ring_capacity - 1. Read; `commit`
            and `reset` write it.
        num_committed: [slots] int32; records accepted and not yet folded, 0 to window. Likewise.
        fold_count: [slots] int32; folds of the slot since its reset, which number the draws of stochastic rounding.
            Likewise; None where the spec rounds to nearest.

    Raises:
        TypeError, ValueError: a tensor is not packed [slots] int32.
    """

    replay: ReplaySpec
    ring_start: Tensor
    num_committed: Tensor
    fold_count: Tensor | None = None
    launches: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.ring_start, Tensor):
            raise TypeError(f"ring_start: expected a torch.Tensor, got {type(self.ring_start).__name__}")
        if (self.fold_count is not None) != (self.replay.rounding == "stochastic"):
            expected = "None" if self.fold_count is not None else "a [slots] int32 tensor"
            raise TypeError(
                f"fold_count: expected {expected}, as the spec has rounding={self.replay.rounding!r}; see make_cursors"
            )
        for name in self.names:
            shape = (self.ring_start.shape[0] if self.ring_start.dim() else 0,)
            check_tensor(name, getattr(self, name), shape, (torch.int32,), self.ring_start.device, contiguous_from=0)

    @property
    def names(self) -> tuple[str, ...]:
        """The cursors that a slot has."""
        return (
            ("ring_start", "num_committed")
            if self.fold_count is None
            else ("ring_start", "num_committed", "fold_count")
        )

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All cursors, in the order of the kernels; None for one that slots have not."""
        return self.ring_start, self.num_committed, self.fold_count

    @property
    def num_slots(self) -> int:
        return self.ring_start.shape[0]

    @property
    def device(self) -> torch.device:
        return self.ring_start.device


def make_cursors(replay: ReplaySpec, num_slots: int, *, device: torch.device | str = "cpu") -> Cursors:
    """Allocate cursors with no pending records.

    Raises:
        ValueError: `num_slots` is below 1.
    """
    if num_slots < 1:
        raise ValueError(f"num_slots: expected 1 or more, got {num_slots}")
    held = 3 if replay.rounding == "stochastic" else 2
    return Cursors(replay, *torch.zeros((held, num_slots), dtype=torch.int32, device=device))
