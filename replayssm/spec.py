"""What is decoded (`LayerSpec`) and how it is replayed (`ReplaySpec`): plain integers and dtypes, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

Recurrence = Literal["mamba2", "gdn", "kda"]
RECURRENCES: tuple[Recurrence, ...] = ("mamba2", "gdn", "kda")
CHECKPOINT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DECAY_DTYPES = (torch.float32, torch.bfloat16)
Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")
ReadDtype = torch.dtype | Literal["nvfp4", "mxfp8"]
MAX_WINDOW = 64
MAX_DRAFT = 16


class ReadFormat(NamedTuple):
    """How a read copy stores a state.

    Args:
        codes: dtype of the tensor of codes.
        bits: of a value's code; one of 4 shares a byte with its neighbour.
        block: values along K that share a scale byte; 0 for none.
        row_scale: a float32 scale for each row of V.
        tile_rows: rows of V that share a float32 scale above those of the blocks; 0 for none.
    """

    codes: torch.dtype
    bits: int
    block: int = 0
    row_scale: bool = False
    tile_rows: int = 0


# A dtype of torch names a copy in it, the 8-bit ones with a float32 scale a row; the other formats are made of blocks.
# A tile of NVFP4 is 16 rows, those of an MMA fragment: a warp that folds them asks no other for their largest value.
READ_FORMATS: dict[ReadDtype, ReadFormat] = {
    torch.bfloat16: ReadFormat(torch.bfloat16, 16),
    torch.float16: ReadFormat(torch.float16, 16),
    torch.float8_e4m3fn: ReadFormat(torch.uint8, 8, row_scale=True),
    torch.int8: ReadFormat(torch.int8, 8, row_scale=True),
    "mxfp8": ReadFormat(torch.uint8, 8, block=32),
    "nvfp4": ReadFormat(torch.uint8, 4, block=16, tile_rows=16),
}
ROW_BYTES = 16  # the rows of a read copy are made of loads of this size
SCALE_ATOM = (128, 4)  # rows by blocks whose scale bytes lie together


def scale_bytes(num_rows: int, num_blocks: int) -> int:
    """Bytes of the block scales of a slot of HV * V rows, padded to whole atoms on both sides."""
    rows, blocks = SCALE_ATOM
    return -(-num_rows // rows) * -(-num_blocks // blocks) * rows * blocks


def _require(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")


@dataclass(frozen=True)
class LayerSpec:
    """Geometry of one state-space layer.

    Args:
        recurrence: "mamba2", "gdn" (Gated DeltaNet) or "kda" (Kimi Delta Attention).
        num_v_heads: value heads HV (Mamba-2: heads), 1 or more.
        num_k_heads: key heads HK (Mamba-2: groups); divides `num_v_heads`.
        head_dim: V, channels of a value head.
        d_state: K, channels of a key head; the contiguous axis of the state.

    Raises:
        ValueError: a number is out of range, or `num_v_heads % num_k_heads != 0`.
    """

    recurrence: Recurrence
    num_v_heads: int
    num_k_heads: int
    head_dim: int
    d_state: int

    def __post_init__(self) -> None:
        _require(self.recurrence in RECURRENCES, "recurrence", f"one of {RECURRENCES}", self.recurrence)
        for name in ("num_v_heads", "num_k_heads", "head_dim", "d_state"):
            value = getattr(self, name)
            _require(isinstance(value, int) and value >= 1, name, "an int of 1 or more", value)
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"num_v_heads: expected a multiple of num_k_heads={self.num_k_heads}, got {self.num_v_heads}; "
                "every key head must serve the same number of value heads"
            )

    @property
    def heads_per_group(self) -> int:
        """Value heads that share one key head."""
        return self.num_v_heads // self.num_k_heads

    @property
    def decays_per_channel(self) -> bool:
        """True when the log-decay is a vector over K (KDA), False when it is a scalar per head."""
        return self.recurrence == "kda"


@dataclass(frozen=True)
class ReplaySpec:
    """How a layer's recent inputs are kept; shared by all layers of one model.

    Args:
        window: L, records that may be pending before a row folds, 1 to 64. A row folds at the start of the step
            in which `num_committed + num_draft > window`.
        max_draft: the largest number of tokens in one step, 1 to 16, at most `window`.
        checkpoint_dtype: dtype of the state in memory: float32, bfloat16 or float16.
        activation_dtype: dtype of the activations and of the key and value records.
        ring_capacity: physical rows of a ring, at least `window + max_draft` (the default).
        value_dtype: of the value records of GDN and KDA, which are computed: the activation dtype when None, or
            float32, which keeps what rounding them to 16 bits would lose.
        decay_dtype: of KDA's decay records: float32, or bfloat16, half as many bytes.
        read_dtype: of a copy of the state that steps read instead of it, smaller than the checkpoint: "nvfp4", "mxfp8",
            or float8_e4m3fn, int8, bfloat16 or float16; None for no copy. Folds start from the checkpoint.
        rounding: of folded states to a 16-bit checkpoint: "nearest" even, or "stochastic" by the slot's seed.

    Raises:
        ValueError: a number is out of range.
        NotImplementedError: a dtype, or a combination of them, that no path supports.
    """

    window: int = 16
    max_draft: int = 1
    checkpoint_dtype: torch.dtype = torch.float32
    activation_dtype: torch.dtype = torch.bfloat16
    ring_capacity: int = field(default=0)
    value_dtype: torch.dtype | None = None
    decay_dtype: torch.dtype = torch.float32
    read_dtype: ReadDtype | None = None
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        for name in ("window", "max_draft", "ring_capacity"):
            _require(type(getattr(self, name)) is int, name, "an int", getattr(self, name))
        _require(1 <= self.window <= MAX_WINDOW, "window", f"1 to {MAX_WINDOW}", self.window)
        limit = min(MAX_DRAFT, self.window)
        _require(1 <= self.max_draft <= limit, "max_draft", f"1 to min({MAX_DRAFT}, window) = {limit}", self.max_draft)
        for name, dtypes in (("checkpoint_dtype", CHECKPOINT_DTYPES), ("activation_dtype", ACTIVATION_DTYPES)):
            if getattr(self, name) not in dtypes:
                raise NotImplementedError(f"{name}: supported are {dtypes}, got {getattr(self, name)}")
        choices = {"value_dtype": (None, self.activation_dtype, torch.float32), "decay_dtype": DECAY_DTYPES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise NotImplementedError(f"{name}: supported are {allowed}, got {getattr(self, name)}")
        _require(self.rounding in ROUNDINGS, "rounding", f"one of {ROUNDINGS}", self.rounding)
        self._check_precisions()
        needed = self.window + self.max_draft
        if self.ring_capacity == 0:
            object.__setattr__(self, "ring_capacity", needed)
        _require(
            self.ring_capacity >= needed, "ring_capacity", f"window + max_draft = {needed} or more", self.ring_capacity
        )

    @property
    def read_format(self) -> ReadFormat | None:
        """How the read copy stores a state, or None."""
        return None if self.read_dtype is None else READ_FORMATS[self.read_dtype]

    def _check_precisions(self) -> None:
        bits = self.checkpoint_dtype.itemsize * 8
        if self.rounding == "stochastic" and bits == 32:
            raise NotImplementedError(
                "rounding: a float32 checkpoint is not rounded, so 'stochastic' says nothing; leave it 'nearest'"
            )
        if self.read_dtype is None:
            return
        if self.read_dtype not in READ_FORMATS:
            raise NotImplementedError(f"read_dtype: supported are {(None, *READ_FORMATS)}, got {self.read_dtype!r}")
        if READ_FORMATS[self.read_dtype].bits >= bits:
            raise NotImplementedError(
                f"read_dtype: a copy takes fewer bits than the {self.checkpoint_dtype} checkpoint, "
                f"got {self.read_dtype!r}; leave it None"
            )
