"""Sizes of a read copy, and how its scales lie: `replayssm.reference.quant` has the definition."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.configs import CODE_BITS, SIZE_BYTES, WARP, StepKey

BLOCK = {"nvfp4": 16, "mxfp8": 32}  # codes of a row that share a scale
TILE_ROWS = 16
LANE_VALUES = 16
ATOM_ROWS, ATOM_BLOCKS = 128, 4  # the scale bytes that lie together


@dataclass(frozen=True)
class CopyShape:
    """The state of a slot and the format of its copy.

    Args:
        rows: of all heads, HV * V, a multiple of 16.
        d_state: 64, 128 or 256.
    """

    rows: int
    d_state: int
    state_dtype: str
    read_dtype: str

    @classmethod
    def of(cls, key: StepKey) -> CopyShape:
        """Of the copy that a step reads."""
        assert key.read_dtype is not None
        return cls(key.num_v_heads * key.head_dim, key.d_state, key.checkpoint_dtype, key.read_dtype)

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return self.d_state // LANE_VALUES

    @property
    def rows_at_once(self) -> int:
        return WARP // self.lanes

    @property
    def row_bytes(self) -> int:
        return self.d_state * SIZE_BYTES[self.state_dtype]

    @property
    def code_bytes(self) -> int:
        """Of a row."""
        return self.d_state * CODE_BITS[self.read_dtype] // 8

    @property
    def blocks(self) -> int:
        """Of a row; 0 where scales are not those of blocks."""
        return self.d_state // BLOCK[self.read_dtype] if self.read_dtype in BLOCK else 0

    @property
    def atoms(self) -> int:
        """Groups of four scale bytes that a row takes."""
        return -(-self.blocks // ATOM_BLOCKS)

    @property
    def tiles(self) -> int:
        """16 rows each; with scales of blocks also those that pad the last atom."""
        unit = ATOM_ROWS if self.blocks else TILE_ROWS
        return -(-self.rows // unit) * (unit // TILE_ROWS)
