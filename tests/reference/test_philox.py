"""The random words are those of Philox4x32-10, and each depends on its place, seed and fold alone.

Known answers are those that Random123 publishes with the generator (kat_vectors). Places: words of a small state are
compared with the scalar definition, so that a swapped counter word shows; streams by their means and correlations.
"""

from __future__ import annotations

import pytest
import torch

from replayssm.reference.philox import philox, state_words

KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def scalar(counter: tuple[int, ...], key: tuple[int, int], rounds: int = 10) -> list[int]:
    """The definition, on Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [right >> 32 ^ c[1] ^ k[0], right & 0xFFFFFFFF, left >> 32 ^ c[3] ^ k[1], left & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    seed = key[0] | key[1] << 32
    seed -= (seed >> 63) << 64
    got = philox(tuple(torch.tensor(c) for c in counter), torch.tensor(seed))
    assert " ".join(f"{int(word):08x}" for word in got) == words
    assert scalar(counter, key) == got.tolist()
    assert philox(tuple(torch.tensor(c) for c in counter), torch.tensor(seed), 9).tolist() != got.tolist()


def test_a_word_is_where_its_place_says() -> None:
    seed, folds = torch.tensor([5, -(1 << 40)]), torch.tensor([0, 77])
    words = state_words(seed, folds, (3, 2, 6))
    assert words.shape == (2, 3, 2, 6)
    for slot, head, row, word in [(0, 0, 0, 0), (0, 2, 1, 5), (1, 1, 0, 3), (1, 2, 1, 4), (1, 0, 1, 1)]:
        key = int(seed[slot]) & 0xFFFFFFFF, int(seed[slot]) >> 32 & 0xFFFFFFFF
        assert int(words[slot, head, row, word]) == scalar((word // 4, row, head, int(folds[slot])), key)[word % 4]


def test_places_seeds_and_folds_are_independent() -> None:
    """No word comes twice, and the noise of two streams does not correlate: |r| below 4 / sqrt(n)."""
    shape = (4, 16, 32)
    seeds, folds = torch.tensor([0, 1, 1 << 32, 0]), torch.tensor([0, 0, 0, 1])
    words = state_words(seeds, folds, shape).flatten(1)
    assert words.unique().numel() > words.numel() - 4  # 2**13 draws of 2**32 repeat once in 128 times
    noise = words.double() / 2.0**32
    assert (noise.mean(1) - 0.5).abs().max() < 4 * (1 / 12 / noise.shape[1]) ** 0.5
    correlation = torch.corrcoef(noise) - torch.eye(4)
    assert correlation.abs().max() < 4 / noise.shape[1] ** 0.5
    assert torch.equal(state_words(seeds[2:3], folds[2:3], shape).flatten(1)[0], words[2])  # whatever the batch
