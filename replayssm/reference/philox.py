"""Random words that depend on where a number lies and on nothing else: Philox4x32-10.

A state is a value of slot, head, row and column, so its noise does not depend on how a kernel is launched, nor on the
other requests. The key is the slot's 64-bit seed; the counter is (words of the row before this group of 4 / 4, row,
head, folds of the slot since its reset).

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], seed: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Four uint32 words, in int64, for each counter.

    Args:
        counter: four tensors of uint32 in int64 that broadcast together, the first word first.
        seed: int64, broadcast with them; its low half is the first word of the key.

    Returns:
        [..., 4].
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(rounds):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the 64 bits of int64 hold the product, whatever its sign
        c0, c1, c2, c3 = p1 >> 32 & _MASK ^ c1 ^ k0, p1 & _MASK, p0 >> 32 & _MASK ^ c3 ^ k1, p0 & _MASK
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return torch.stack([c0, c1, c2, c3], dim=-1)


def state_words(seed: Tensor, fold_count: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Random words of the states of some slots.

    Args:
        seed: [slots] int64.
        fold_count: [slots] integers, the number of the fold.
        shape: heads, rows and words a row.

    Returns:
        [slots, *shape], uint32 in int64.
    """
    heads, rows, words = shape
    device = seed.device
    group = torch.arange(-(-words // 4), device=device)
    row, head = torch.arange(rows, device=device)[:, None], torch.arange(heads, device=device)[:, None, None]
    folds = fold_count.long().view(-1, 1, 1, 1) & _MASK
    return philox((group, row, head, folds), seed.view(-1, 1, 1, 1)).flatten(-2)[..., :words]
