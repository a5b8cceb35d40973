"""Stochastic rounding of folded states to 16 bits, with the bits of `replayssm.reference.storage.round_state`.

The random words are those of Philox4x32-10 (`replayssm.reference.philox`): the slot's seed is the key, and the counter
is (vector of the row, row, head, folds of the slot). A call gives four words, the bits of 8 values: the 16 bytes that a
lane of the fold stores.

All arithmetic is integer or exact, on every architecture. sm_100a and sm_103a have `cvt.rs`, of which PTX leaves open
where its random bits line up; until hardware has confirmed the reference's model of it, its bits are not relied upon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.args import CursorTensors
from cute_kernels.primitives.arithmetic import wide_product
from cute_kernels.primitives.convert import pack_stochastic
from cute_kernels.primitives.memory import load_words
from cute_kernels.replay.window import Place, address

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


@dataclass(frozen=True)
class Noise:
    """What the random words of a fold depend on, beside a value's place in its tile.

    Args:
        seed: the two halves of the slot's seed.
        folds: of the slot so far.
        first_row: of the tile, within its head.
    """

    seed: tuple[Uint32, Uint32]
    folds: Uint32
    head: Int32
    first_row: Int32

    @classmethod
    def load(cls, seed: cute.Tensor | None, cursors: CursorTensors, slot: Any, place: Place) -> Noise | None:
        """Of a slot; None where the pool has no seeds, as its states are rounded to nearest."""
        if seed is None or cursors.fold_count is None:
            return None
        low, high = load_words(address(seed, 8, slot), 2)
        (folds,) = load_words(address(cursors.fold_count, 4, slot), 1)
        return cls((low, high), folds, place.head, place.first_row)

    def words(self, row: Any, vector: Any) -> list[Uint32]:
        """Four random words, of one vector of one row of the tile."""
        c0, c1, c2, c3 = Uint32(vector), Uint32(self.first_row + row), Uint32(self.head), self.folds
        k0, k1 = self.seed
        for _ in range(ROUNDS):
            low0, high0 = wide_product(c0, MULTIPLIERS[0])
            low1, high1 = wide_product(c2, MULTIPLIERS[1])
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
            k0, k1 = k0 + Uint32(KEY_STEPS[0]), k1 + Uint32(KEY_STEPS[1])
        return [c0, c1, c2, c3]

    def rounded(self, values: list[Float32], dtype: str, row: Any, vector: Any) -> list[Uint32]:
        """Packed words of 8 values, a vector of a row of the tile."""
        return pack_stochastic(values, dtype, self.words(row, vector))
