"""Sizes of what a CTA of the step of several tokens keeps, or of one that reads a copy, derived from a key."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.configs import ROW_BLOCK, TERMS, UNCUT, KdaOptions, StepKey, Tile
from cute_kernels.copy_shape import ATOM_BLOCKS, ATOM_ROWS, CopyShape

HALVES = ("float16", "float8_e4m3fn")  # dtypes of states that may meet their probes as float16
MOST_LIFTED = 512  # bytes of a row: its part is 64 registers of a lane


@dataclass(frozen=True)
class DraftShape:
    """Sizes of the products of several tokens, derived from a key.

    Vectors go to the tensor cores in blocks of 8. The probe blocks are those of the queries, then with two probes those
    of the keys. A score is a probe's product with a record's key; the columns of the scores are the window, padded to
    whole 16s, then the tokens.

    Args:
        tf32: whether floats meet as TF32 where they are many, those of a float32 state and keys of decaying channels,
            which outputs and records of bfloat16 do not show: to split them into terms took a third of a step's
            instructions.
        halves: whether state and probes meet as float16, the probes times powers of two of their own: one instruction
            makes that of two codes of e4m3, where bfloat16 takes seven for four. Where channels decay, what is largest
            in a probe would be known too late for that; with longer windows and more than two blocks of probes it
            would spill (H200, 2026-12-01, batch 256: Qwen3.5-122B, FP8 copy, 90.5 -> 83.4 us, of 4 tokens 113 -> 108;
            Super, FP8, 4 and 8 tokens 96.6 -> 90.0 and 109.2 -> 104.6; in float16, 4 tokens 154 -> 147).
        scale_bytes: of the scales of blocks that are copied to shared memory behind the tiles of several heads, where
            these are whole atoms (Super, NVFP4, one token: 89 registers instead of 104); else 0, and lanes load them.
    """

    tokens: int
    probes: int
    window: int
    terms: int
    channels: bool
    warps: int
    heads: int
    copies: bool
    tensor: bool
    tf32: bool
    halves: bool
    scale_bytes: int

    @classmethod
    def of(cls, key: StepKey) -> DraftShape:
        config, scale_bytes = key.config, 0
        short = key.window <= ROW_BLOCK and key.probes * -(-key.num_tokens // 8) <= 2
        if config.heads > 1:
            copy, rows = CopyShape.of(key), config.heads * key.head_dim
            scale_bytes = rows * copy.atoms * ATOM_BLOCKS if rows % ATOM_ROWS == 0 else 0
        return cls(
            tokens=key.num_tokens,
            probes=key.probes,
            window=key.window,
            terms=TERMS[config.precision],
            channels=isinstance(key.options, KdaOptions),
            warps=config.warps,
            heads=key.heads_together,
            copies=key.read_dtype is not None,
            tensor=key.tensor,
            tf32=config.precision == "tf32" and key.activation_dtype == "bfloat16" and key.num_tokens > 1,
            halves=key.state_dtype in HALVES and short and not isinstance(key.options, KdaOptions) and not key.tensor,
            scale_bytes=scale_bytes,
        )

    @property
    def lone(self) -> bool:
        """Whether one token is read by `StateRows.lone_products`."""
        return self.tokens == 1 and not self.tensor

    @property
    def block_vectors(self) -> int:
        """Vectors of a staged block of probes: of one token each is a block, which every lane has a part of."""
        return 1 if self.lone else 8

    @property
    def keeps_raw(self) -> bool:
        """Whether scores lie in shared memory as they are too, beside those that a head has weighed."""
        return self.heads > 1 and not self.lone

    @property
    def loads_probes_anew(self) -> bool:
        """Whether the warps that score the window load the probes again: where channels decay those are few, unless the
        window is long, and the registers are better spent on what comes before (GLM-5.3-Flash, batch 256, 4 and 8
        tokens: 350 -> 322 us and 384 -> 373; at a window of 32 433 -> 451; H200, 2026-11-30)."""
        return self.channels and (self.token_blocks > 1 or self.window_columns == 16)

    @property
    def loads_parts(self) -> bool:
        """Whether lanes load a 32nd of one token's probes besides, for their norms and largest values: fewer
        instructions and registers than from what every group of four lanes has of them, but where two probes meet as
        float16 the loads cost more (batch 256: Qwen3.5-122B, NVFP4, 87.6 -> 84.7 us, GLM-5.3-Flash 171.6 -> 167.1,
        Super, FP8, 78.7 -> 77.5; Qwen3.5-122B, FP8, 83.6 -> 85.0; H200, 2026-12-01)."""
        return self.lone and self.halves == (self.probes == 1)

    @property
    def token_blocks(self) -> int:
        return -(-self.tokens // 8)

    @property
    def block_tokens(self) -> int:
        """Of a block, at most."""
        return min(self.tokens, 8)

    @property
    def probe_blocks(self) -> int:
        return self.probes * self.token_blocks

    @property
    def window_columns(self) -> int:
        return -(-self.window // 16) * 16

    @property
    def record_blocks(self) -> int:
        """Blocks of keys that are scored: of the window, then of the tokens."""
        return self.window_columns // 8 + self.token_blocks

    @property
    def score_stride(self) -> int:
        """Floats between the scores of two probes: an odd number of times 8, so that 4 rows of 8 lie in all banks."""
        return -(-(self.window_columns + 8 * self.token_blocks - 8) // 16) * 16 + 8

    @property
    def lone_columns(self) -> int:
        """Columns of a product that the terms of one token's probe take, a power of two."""
        return 2 if self.terms <= 2 else 4

    @property
    def scores_bytes(self) -> int:
        return self.probe_blocks * 8 * self.score_stride * 4

    @property
    def between_bytes(self) -> int:
        """Shared memory of what passes between tokens: decays [token block][token][token of the block], or where
        channels decay by themselves the scores that each warp has summed over its channels (`replay.draft.Scores`)."""
        tables, row = (self.warps, self.tokens) if self.channels else (self.token_blocks, self.block_tokens)
        return -(-tables * self.tokens * row * 4 // 16) * 16

    def state_tf32(self, tile: Tile) -> bool:
        """Whether the state is multiplied as TF32."""
        return self.tf32 and tile.read_bits == 32

    @property
    def score_scale(self) -> float:
        """What the decays of probes that are scored are to be times, where channels decay: see `mma.tf32_words`."""
        return UNCUT if self.tf32 else 1.0

    def vectors_bytes(self, tile: Tile) -> int:
        """Shared memory of the probes as the state meets them, where channels decay by themselves: [term][probe][K];
        none where they are an operand of tcgen05."""
        if not self.channels or self.tensor:
            return 0
        size = tile.staged_tf32_bytes if self.state_tf32(tile) else self.terms * tile.staged_vector_bytes
        return self.probe_blocks * self.block_vectors * size

    @property
    def folds_over_tiles(self) -> bool:
        """Whether a fold stages its records where the tiles were: copies, which no fold reads. Decays by channel are
        staged beside the tile, and a fold needs them."""
        return self.copies and not self.channels

    def lifted_bytes(self, tile: Tile) -> int:
        """Of the end of the tile, what a fold takes into registers, for its records to lie there: 16 rows a warp.

        So it does with more records than 16, which would leave room for a CTA fewer (Super, window 32, 8 records, 8 and
        16 tokens: 293 -> 284 us and 335 -> 317, with rows anywhere in the window 363 -> 351 and 503 -> 472; H200,
        2026-12-01).
        """
        rows = ROW_BLOCK * tile.warps
        fits = tile.rows % rows == 0 and tile.d_state * tile.state_size <= MOST_LIFTED
        if self.copies or self.channels or self.tensor or self.window <= ROW_BLOCK or not fits:
            return 0
        return rows * tile.d_state * tile.state_size

    def head_bytes(self, tile: Tile) -> int:
        """Shared memory of a head, behind tiles and scales: decays by channel, the scores that it has weighed or those
        of the only head, what is between tokens, probes."""
        scores = self.scores_bytes if self.keeps_raw or self.heads == 1 else 0
        return tile.channel_bytes + scores + self.between_bytes + self.vectors_bytes(tile)

    def staging_bytes(self, tile: Tile) -> int:
        """The same of all heads, and the scores that they share; later a fold's records of each, unless they take the
        place of operands (`operands.OperandShape.fold_bytes`)."""
        own = self.heads * self.head_bytes(tile) + (self.scores_bytes if self.heads > 1 else 0)
        if self.tensor and not self.channels:
            return own
        before = self.heads * tile.bytes + self.scale_bytes if self.folds_over_tiles else self.lifted_bytes(tile)
        return max(own, self.heads * tile.staging_bytes - before)
