"""Decay of a window of records. Exponents are sums of log-decays, each <= 0, never a difference of larger sums."""

from __future__ import annotations

from typing import Any

from cutlass import Float32

from cute_kernels.primitives.arithmetic import exp2
from cute_kernels.primitives.reduce import WARP, broadcast, from_above, suffix_sums


def decay_to_end(log2_decays: list[Any], lane: Any, window: int) -> tuple[list[Float32], Float32]:
    """How much each record has decayed by the end of the window, for one scalar decay a record.

    Args:
        log2_decays: word w of a lane is the base-2 log-decay of record lane + 32 w; 0 outside the window.
        window: the most records there can be.

    Returns:
        For each record the product of the decays after it, and the product of all decays; known in every lane.
    """
    factors: list[Any] = [None] * len(log2_decays)
    later = Float32(0.0)
    for word in range(len(log2_decays) - 1, -1, -1):
        width = min(WARP, 1 << max(0, (window - WARP * word - 1)).bit_length())
        after = suffix_sums(from_above(log2_decays[word], 1, lane, width), lane, width)
        factors[word] = exp2(after + later)
        later = later + broadcast(after + log2_decays[word], 0)
    return factors, exp2(later)
