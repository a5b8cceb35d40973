"""The one list of geometries that tests run on: small, odd, and those of released models (`tuning.shapes`).

Pick from it with `pick`; a test adds a case here rather than a geometry of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from replayssm.spec import LayerSpec, Recurrence, ReplaySpec
from tuning.shapes import MODELS, ModelShape, lookup

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Case:
    """A geometry with its replay parameters; HV value heads, HK key heads (Mamba-2: groups), V and K their sizes,
    T the tokens of a step."""

    recurrence: Recurrence
    HV: int
    HK: int
    V: int
    K: int
    window: int = 16
    T: int = 1
    activation: torch.dtype = torch.bfloat16
    checkpoint: torch.dtype = torch.float32
    value_dtype: torch.dtype | None = None
    decay_dtype: torch.dtype = torch.float32

    @property
    def id(self) -> str:
        """E.g. mamba2-HV128-G8-V64-K128-L16-T1-bf16-fp32; records of other dtypes than by default are named last."""
        groups = "G" if self.recurrence == "mamba2" else "HK"
        return (
            f"{self.recurrence}-HV{self.HV}-{groups}{self.HK}-V{self.V}-K{self.K}-L{self.window}-T{self.T}"
            f"-{_SHORT[self.activation]}-{_SHORT[self.checkpoint]}"
            f"{f'-u{_SHORT[self.value_dtype]}' if self.value_dtype else ''}"
            f"{'' if self.decay_dtype is torch.float32 else f'-g{_SHORT[self.decay_dtype]}'}"
        )

    @property
    def layer(self) -> LayerSpec:
        return LayerSpec(self.recurrence, self.HV, self.HK, self.V, self.K)

    @property
    def replay(self) -> ReplaySpec:
        return ReplaySpec(
            self.window,
            self.T,
            self.checkpoint,
            self.activation,
            value_dtype=self.value_dtype,
            decay_dtype=self.decay_dtype,
        )


_FP32 = {"activation": torch.float32, "checkpoint": torch.float32}

# Large enough for every branch of the algebra, small enough for fp64 on one CPU thread.
SMALL = (
    Case("mamba2", 4, 2, 8, 16, window=4, **_FP32),
    Case("mamba2", 4, 2, 8, 16, window=8, T=3, **_FP32),
    Case("mamba2", 8, 2, 16, 32),
    Case("gdn", 4, 2, 8, 16, window=4, **_FP32),
    Case("gdn", 4, 2, 8, 16, window=8, T=3, **_FP32),
    Case("gdn", 8, 4, 16, 32),
    Case("kda", 2, 2, 8, 16, window=4, **_FP32),
    Case("kda", 2, 2, 8, 16, window=8, T=3, **_FP32),
    Case("kda", 4, 4, 16, 32),
)

_DELTA_ODD = (
    Case("gdn", 1, 1, 64, 128),
    Case("gdn", 3, 1, 64, 64, window=5),
    Case("gdn", 4, 4, 128, 128, window=1),
    Case("gdn", 6, 2, 128, 128, window=2, checkpoint=torch.bfloat16),
    Case("gdn", 4, 1, 128, 256, window=33, checkpoint=torch.float16),
    Case("gdn", 8, 2, 64, 256, window=64, activation=torch.float16, checkpoint=torch.float16),
    Case("gdn", 2, 2, 80, 64, window=7, activation=torch.float32, checkpoint=torch.bfloat16),
    Case("gdn", 7, 7, 64, 128, window=3, **_FP32),
    Case("gdn", 4, 2, 64, 64, window=6, value_dtype=torch.float32),
)

# Where a shortcut breaks: one head, a group a head, ratios and sizes that are no power of two, extreme windows,
# a draft as long as the window, every dtype of checkpoint and activations.
ODD = (
    Case("mamba2", 1, 1, 64, 128),
    Case("mamba2", 3, 1, 64, 64, window=5),
    Case("mamba2", 5, 5, 64, 128, window=1),
    Case("mamba2", 6, 2, 80, 128, window=2),
    Case("mamba2", 12, 4, 80, 64, window=7, checkpoint=torch.bfloat16),
    Case("mamba2", 2, 1, 128, 256, window=64),
    Case("mamba2", 4, 1, 128, 128, window=33, checkpoint=torch.float16),
    Case("mamba2", 16, 1, 64, 256, activation=torch.float16, checkpoint=torch.float16),
    Case("mamba2", 7, 7, 64, 128, window=3, **_FP32),
    Case("mamba2", 4, 2, 80, 256, activation=torch.float32, checkpoint=torch.bfloat16),
    Case("mamba2", 3, 3, 8, 16, window=4, T=4, **_FP32),
    Case("gdn", 3, 1, 8, 24, window=5, T=2, **_FP32),
    Case("gdn", 1, 1, 16, 8, window=1),
    Case("gdn", 6, 2, 16, 16, window=16, T=16, **_FP32),
    Case("kda", 3, 1, 8, 24, window=5, T=2, **_FP32),
    Case("kda", 1, 1, 16, 8, window=1),
    Case("kda", 2, 2, 16, 16, window=16, T=16, **_FP32),
    *_DELTA_ODD,
    *(replace(case, recurrence="kda") for case in _DELTA_ODD),
    Case("kda", 2, 1, 128, 128, window=17, decay_dtype=torch.bfloat16),
)


def _of_model(model: ModelShape, checkpoint: torch.dtype = torch.float32) -> Case:
    layer = model.layer
    return Case(
        layer.recurrence, layer.num_v_heads, layer.num_k_heads, layer.head_dim, layer.d_state, checkpoint=checkpoint
    )


def _released() -> tuple[Case, ...]:
    """Each layer shape of the table once, Super's shards, and Super with 16-bit checkpoints."""
    shards = [lookup("nemotron-3-super", tp=tp) for tp in (2, 4, 8, 16)]
    half = [_of_model(lookup("nemotron-3-super"), dtype) for dtype in (torch.bfloat16, torch.float16)]
    return tuple(dict.fromkeys([*(_of_model(model) for model in (*MODELS, *shards)), *half]))


RELEASED = _released()
ALL = (*SMALL, *ODD, *RELEASED)


def pick(
    cases: tuple[Case, ...] = ALL, *, recurrence: Recurrence | None = None, num_tokens: int | None = None
) -> list[Case]:
    """Cases of one recurrence, of one T, or both; for `pytest.mark.parametrize(..., ids=lambda case: case.id)`."""
    return [case for case in cases if recurrence in (None, case.recurrence) and num_tokens in (None, case.T)]
