"""Where rows stand in the long run is what the cursors' own rule does when it runs for long.

Pinned are walks that can be counted by hand (all tokens accepted, two outcomes), and over a grid of windows, drafts and
acceptance the shares are held against a simulation by `commit` of the torch twin and against the balance that a
stationary distribution must satisfy.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from replayssm.cursors import make_cursors
from replayssm.reference import replay as reference
from replayssm.spec import ReplaySpec
from tuning.acceptance import Position, acceptance, fold_share, positions, spread

GRID = [
    (window, num_tokens, mean)
    for window, num_tokens in ((1, 1), (5, 2), (16, 4), (16, 8), (16, 16), (33, 8))
    for mean in sorted({1.0, (num_tokens + 1) / 2, float(num_tokens)})
]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 8, 16])
def test_acceptance_has_the_mean_asked_for(num_tokens: int) -> None:
    for mean in {1.0, 1 + 0.3 * (num_tokens - 1), (num_tokens + 1) / 2, float(num_tokens)}:
        shares = acceptance(num_tokens, mean)
        assert len(shares) == num_tokens + 1
        assert shares[0] == 0
        assert sum(shares) == pytest.approx(1)
        assert sum(a * share for a, share in enumerate(shares)) == pytest.approx(mean)
    assert acceptance(num_tokens, 1.0)[1] == 1 == acceptance(num_tokens, float(num_tokens))[num_tokens]


def test_acceptance_of_two_drafts_by_hand() -> None:
    """Mean 1 + p + p^2 = 1.75 has p = 1/2."""
    assert acceptance(3, 1.75) == pytest.approx((0, 0.5, 0.25, 0.25))


@pytest.mark.parametrize("mean", [0.5, 4.5])
def test_an_impossible_mean_is_refused(mean: float) -> None:
    with pytest.raises(ValueError, match="a mean of 1 to 4 tokens"):
        acceptance(4, mean)


@pytest.mark.parametrize(
    ("window", "num_tokens", "records"),
    [(16, 1, range(1, 17)), (1, 1, [1]), (16, 4, [4, 8, 12, 16]), (16, 8, [8, 16]), (8, 3, [3, 6]), (33, 16, [16, 32])],
)
def test_all_tokens_accepted_walk_evenly(window: int, num_tokens: int, records: range) -> None:
    places = positions(window, acceptance(num_tokens, num_tokens))
    assert [place.records for place in places] == list(records)
    assert [place.folds for place in places] == [False] * (len(records) - 1) + [True]
    assert all(place.share == pytest.approx(1 / len(records)) for place in places)


def test_two_outcomes_by_hand() -> None:
    """Window 4, 2 tokens, 1 or 2 of them kept, equally often. Behind a fold a row stands at 1 or 2; it reads there, and
    stands at 2 (once of 4), 3 (again half of 1 and half of 2) or 4. Visits a cycle: 1/2, 3/4, 1/4 + 3/8, 3/8."""
    places = positions(4, (0.0, 0.5, 0.5))
    assert places == tuple(
        Position(n, n > 2, pytest.approx(visits / 2.25)) for n, visits in ((1, 0.5), (2, 0.75), (3, 0.625), (4, 0.375))
    )
    assert fold_share(places) == pytest.approx(1 / 2.25)


@pytest.mark.parametrize("nothing", [0.0, 0.25])
@pytest.mark.parametrize(("window", "num_tokens", "mean"), GRID)
def test_shares_are_in_balance(window: int, num_tokens: int, mean: float, nothing: float) -> None:
    """A step from the shares gives the shares, also where some steps accept nothing."""
    kept = [share * (1 - nothing) for share in acceptance(num_tokens, mean)]
    kept[0] += nothing
    places = positions(window, kept)
    after: Counter[int] = Counter()
    for place in places:
        for accepted, share in enumerate(kept):
            after[(0 if place.folds else place.records) + accepted] += place.share * share
    assert sum(place.share for place in places) == pytest.approx(1)
    assert {n: share for n, share in after.items() if share} == pytest.approx({p.records: p.share for p in places})


@pytest.mark.parametrize(("window", "num_tokens", "mean"), [(16, 4, 2.0), (16, 8, 4.0), (24, 8, 4.5), (16, 16, 5.0)])
def test_shares_are_those_of_the_cursors(window: int, num_tokens: int, mean: float) -> None:
    """20,000 rows after 60 commits, within 5 standard errors of each share; another acceptance is told apart."""
    rows, kept = 20_000, acceptance(num_tokens, mean)
    cursors, indices = make_cursors(ReplaySpec(window, num_tokens), rows), torch.arange(rows, dtype=torch.int32)
    for _ in range(60):
        drawn = torch.multinomial(torch.tensor(kept), rows, replacement=True).int()
        reference.commit(cursors, cache_indices=indices, num_draft=num_tokens, num_accepted=drawn)
    found = Counter(cursors.num_committed.tolist())

    def differs(places: tuple[Position, ...]) -> bool:
        beyond = 5 * rows**0.5
        far = [abs(found[p.records] - rows * p.share) > beyond * (p.share * (1 - p.share)) ** 0.5 for p in places]
        return any(far) or not found.keys() <= {p.records for p in places}

    assert not differs(positions(window, kept))
    assert differs(positions(window, acceptance(num_tokens, mean + 0.5)))


@pytest.mark.parametrize(
    ("window", "accepted"), [(4, (0.0, 0.5)), (4, (1.0, 0.0)), (4, (-0.5, 1.5)), (1, (0.0, 0.5, 0.5)), (4, (1.0,))]
)
def test_what_is_no_acceptance_is_refused(window: int, accepted: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="accepted: expected probabilities"):
        positions(window, accepted)


@pytest.mark.parametrize(("window", "num_tokens", "mean"), GRID)
@pytest.mark.parametrize("rows", [1, 32, 256])
def test_rows_are_spread_by_the_shares(rows: int, window: int, num_tokens: int, mean: float) -> None:
    places = positions(window, acceptance(num_tokens, mean))
    chosen = spread(places, rows)
    assert chosen == spread(places, rows)
    found = Counter(chosen)
    assert found.total() == rows
    assert found.keys() <= {place.records for place in places}
    assert all(abs(found[place.records] - rows * place.share) <= 1 for place in places)


def test_rows_that_fold_do_not_stand_together() -> None:
    chosen = spread(positions(16, acceptance(1, 1.0)), 256)
    folding = [i for i, records in enumerate(chosen) if records == 16]
    assert len(folding) == 16
    assert len({i // 32 for i in folding}) > 4
