"""Reductions and scans among the lanes of a warp."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.primitives.arithmetic import select

WARP = 32


def butterfly(x: Any, mask: int) -> Any:
    """The value of the lane whose index differs in the bits of `mask`."""
    return cute.arch.shuffle_sync_bfly(x, offset=mask)


def broadcast(x: Any, lane: Any) -> Any:
    """The value of one lane, which may differ from lane to lane."""
    return cute.arch.shuffle_sync(x, lane)


def sum_lanes(x: Any, masks: tuple[int, ...]) -> Any:
    """Sum over the lanes that differ in the bits of `masks`, known to each of them."""
    for mask in masks:
        x = x + butterfly(x, mask)
    return x


def from_above(x: Any, distance: int, lane: Any, width: int) -> Any:
    """The value of lane + distance; 0 beyond the first `width` lanes, where every value must be 0 already."""
    y = cute.arch.shuffle_sync_down(x, offset=distance)
    return y if width < WARP else select(lane + distance < WARP, y, Float32(0.0))


def suffix_sums(x: Any, lane: Any, width: int) -> Any:
    """Inclusive sums from each lane up to lane `width` - 1; values of the lanes from `width` on must be 0."""
    distance = 1
    while distance < width:
        x = x + from_above(x, distance, lane, width)
        distance *= 2
    return x


def prefix_sums(x: Any, lane: Any, width: int) -> Any:
    """Inclusive sums from lane 0 up to each of the first `width` lanes."""
    distance = 1
    while distance < width:
        y = cute.arch.shuffle_sync_up(x, offset=distance)
        x = x + select(lane >= distance, y, Float32(0.0))
        distance *= 2
    return x


def transposing_sum(values: list[Any], lane: Any, masks: tuple[int, ...]) -> list[Any]:
    """Sum each of `values` over the lanes that differ in the bits of `masks`, sharing the sums out among these lanes.

    Each mask halves the list that a lane keeps while it has more than one value, so n sums over m lanes take about
    n + log2(m) shuffles instead of n log2(m). The list is padded with zeros to a power of two.

    Returns:
        The sums that this lane keeps; `transposed_place` says which they are.
    """
    kept = list(values)
    while len(kept) & (len(kept) - 1):
        kept.append(Float32(0.0))
    for mask in masks:
        if len(kept) > 1:
            upper, half = (lane & mask) != 0, len(kept) // 2
            mine = [select(upper, kept[half + i], kept[i]) for i in range(half)]
            other = [select(upper, kept[i], kept[half + i]) for i in range(half)]
            kept = [m + butterfly(o, mask) for m, o in zip(mine, other, strict=True)]
        else:
            kept = [kept[0] + butterfly(kept[0], mask)]
    return kept


def transposed_place(num_values: int, lane: Any, masks: tuple[int, ...]) -> tuple[Any, int, Any]:
    """Which sums of `num_values` a lane keeps after `transposing_sum`.

    Returns:
        The index of the first, how many follow it consecutively (indices from `num_values` on are padding), and
        whether this lane is the first of those that keep the same ones.
    """
    count = 1 << (num_values - 1).bit_length()
    first, shared = Int32(0), Int32(0)
    for mask in masks:
        if count > 1:
            count //= 2
            first = first + select((lane & mask) != 0, Int32(count), Int32(0))
        else:
            shared = shared | (lane & mask)
    return first, count, shared == 0
