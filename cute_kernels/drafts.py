"""What a CTA of the step of several tokens, or of one that reads a copy, works on: `verify` does the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.args import StepTensors
from cute_kernels.configs import SIZE_BYTES, WARP, StepKey, Tile
from cute_kernels.draft_shape import DraftShape
from cute_kernels.operands import OperandShape
from cute_kernels.primitives.arithmetic import select
from cute_kernels.primitives.memory import KEEP, STREAM
from cute_kernels.records import TileMemory, policy_of
from cute_kernels.recurrences.base import Recurrence
from cute_kernels.replay.cursor import RowCursor
from cute_kernels.replay.draft import Scores, StagedVectors, Vectors
from cute_kernels.replay.lanes import Channels, LoneChannels
from cute_kernels.replay.tensor import Operands
from cute_kernels.replay.window import Place, address

STREAMED_TOKENS = 5  # at most, of a step whose loads of values stream by: see `Cta.value_cache`


@dataclass(frozen=True)
class Cta:
    """What a CTA works on, as one of its threads sees it.

    Args:
        place: its row is the inputs' row, 0 where they hold all rows' tokens one after the other; its head the one that
            the CTA is at.
        channels: of V.
        first_token: where the row's tokens begin on the token axis.
        num_tokens: how many the row has, at most `shape.tokens`; the others count as zeros and are not stored.
        memory: where the head's tile is, and what it stages: decays by channel, then scores, later a fold's records.
    """

    tensors: StepTensors
    key: StepKey
    place: Place
    channels: Channels
    first_token: Any
    num_tokens: Any
    memory: TileMemory

    @property
    def policy(self) -> Recurrence:
        return policy_of(self.key)

    @property
    def tile(self) -> Tile:
        return Tile.of(self.key)

    @property
    def shape(self) -> DraftShape:
        return DraftShape.of(self.key)

    def source(self, slot: Any) -> Int64:
        """Where the tile that the head reads is, of the checkpoint or of its copy."""
        tensor, size = self.tensors.pool.checkpoint, SIZE_BYTES[self.key.checkpoint_dtype]
        if self.key.read_dtype is not None:
            tensor = self.tensors.pool.copy.codes
            size = tensor.element_type.width // 8
        return address(tensor, size, slot, self.place.head, self.place.first_row)

    def sync(self) -> None:
        """Wait for the CTA's warps."""
        if self.shape.warps > 1:
            cute.arch.barrier()
        else:
            cute.arch.sync_warp()

    @property
    def lone(self) -> LoneChannels:
        """The channels whose outputs this lane writes where there is one token."""
        return LoneChannels.of(self.tile, self.place, self.channels)

    @property
    def operands(self) -> Operands | None:
        """State and probes where tcgen05 multiplies them; None where mma.sync does."""
        if not self.key.tensor:
            return None
        return Operands(OperandShape.of(self.key), self.memory.state, cute.arch.thread_idx()[0])

    @property
    def first_head(self) -> Any:
        """The first of the heads that the CTA works on at once."""
        return self.place.head - self.local_head

    @property
    def local_head(self) -> Any:
        """The head among them."""
        return self.place.head % self.shape.heads if self.shape.heads > 1 else Int32(0)

    def rows_before(self, head: Any) -> Any:
        """Rows in front of the CTA's of a head, of it and of so many heads before it."""
        return head * self.key.head_dim + self.place.first_row

    @property
    def scorer(self) -> tuple[Any, int]:
        """Which of the warps that score the records this is, and how many they are: those of all heads."""
        if self.shape.heads > 1:
            return cute.arch.thread_idx()[0] // WARP, self.shape.heads * self.shape.warps
        return self.place.warp, self.shape.warps

    @property
    def terms(self) -> int:
        """bfloat16 terms of a float32 factor."""
        return self.shape.terms

    @property
    def scores(self) -> Scores:
        """The scores as a head has weighed them; those of one token lie as they are, and are weighed where used."""
        if self.shape.lone:
            return self.raw_scores
        return Scores(self.memory.staging + self.tile.channel_bytes, self.shape, self.place.lane)

    @property
    def raw_scores(self) -> Scores:
        """The scores as they are, behind what each of several heads has staged."""
        shape, base = self.shape, self.memory.staging + self.tile.channel_bytes
        if shape.heads > 1:
            base = base + (shape.heads - self.local_head) * shape.head_bytes(self.tile)
        return Scores(base, shape, self.place.lane)

    def vectors(self, words: list[list[Uint32]], decay_rows: list[Any]) -> Vectors:
        """Blocks of queries or keys that `load_block` loaded."""
        return Vectors(self.tile, self.key.activation_dtype, words, decay_rows, self.memory.staging, self.place.lane)

    def probes(self, loaded: list[list[list[Uint32]]]) -> Vectors:
        """What `load_probes` loaded; where channels decay by themselves, decayed since the window."""
        last, tokens = self.shape.tokens - 1, self.probe_tokens
        rows = [self.tile.padded_window + 1 + select(t < last, t, Int32(last)) for t in tokens]
        return self.vectors([words for probe in loaded for words in probe], rows * self.shape.probes)

    @property
    def staged(self) -> StagedVectors | Operands:
        """The probes as the state meets them, where channels decay by themselves."""
        if self.operands:
            return self.operands
        base = self.scores.base + self.shape.scores_bytes + self.shape.between_bytes
        shape, lane = self.shape, self.place.lane
        return StagedVectors(
            base, self.tile, shape.probe_blocks, shape.block_vectors, lane, shape.state_tf32(self.tile)
        )

    @property
    def probe_tensors(self) -> tuple[cute.Tensor, ...]:
        """The inputs that the state meets: queries, and keys under a delta rule."""
        inputs = self.tensors.inputs
        return (self.policy.query(inputs), self.policy.key(inputs))[: self.shape.probes]

    @property
    def probe_tokens(self) -> list[Any]:
        """The token whose part this lane has in each block of probes; every lane that of the only one."""
        if self.shape.lone:
            return [Int32(0)]
        return [b * 8 + self.place.lane // 4 for b in range(self.shape.token_blocks)]

    @property
    def value_cache(self) -> str:
        """The policy of loads of values, which one head reads. Few tokens let them stream by, for what is written to
        stay in L2; of more it is more than fits there (batch 256, 2, 4, 6 and 8 tokens, Super: 267 -> 256, 274 -> 271,
        280 -> 281, 285 -> 288 us; Qwen3.5-122B: 274 -> 266, 284 -> 281, 291 -> 290, 297 -> 299; H200, 2026-11-30)."""
        return STREAM if self.shape.tokens <= STREAMED_TOKENS else KEEP

    def own(self, first: int) -> list[Any]:
        """The four of 16 vectors from `first` on whose elements this lane has on the left side of a product."""
        return [first + self.place.lane % 4 * 2 + e for e in (0, 1, 8, 9)]

    def is_token(self, token: Any) -> Int32:
        """Whether the row has this token."""
        return Int32(token < self.num_tokens)

    def token_at(self, token: Any) -> Any:
        """A token's index on the token axis."""
        return self.first_token + token

    @property
    def first_channel(self) -> Any:
        """The channel of V where this lane's loads and stores begin: its first, or the tile's for `LoneChannels`."""
        return self.place.first_row + (0 if self.shape.lone else self.channels.first)

    def input_place(self, tensor: cute.Tensor, token: Any, *index: Any) -> Int64:
        """Where a token's part of an input or the output begins."""
        return address(tensor, SIZE_BYTES[self.key.activation_dtype], self.place.row, self.token_at(token), *index)

    def value_place(self, cursor: RowCursor, record: Any, channel: Any) -> Int64:
        """Where a channel of a record is, or goes, in the value ring."""
        size, physical = SIZE_BYTES[self.key.record_dtype], cursor.physical(record)
        return address(self.tensors.pool.value, size, cursor.slot, self.place.head, physical, channel)

    def key_place(self, cursor: RowCursor, record: Any) -> Int64:
        """The same for a record's key."""
        size, physical = SIZE_BYTES[self.key.activation_dtype], cursor.physical(record)
        return address(self.tensors.pool.key, size, cursor.slot, self.place.group, physical)
