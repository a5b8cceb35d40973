"""The delta rule: a token's record is what the state lacks, so the state meets the token's key beside its query.

With r(x) the readout of the state and the records, decayed to the token, and beta the token's strength,

    u = beta (v - r(k))        o = r(q) + u <k, q>

No state is formed for it: two products of the checkpoint and two scores of each record.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.primitives.convert import pack
from cute_kernels.primitives.memory import store_words_if
from cute_kernels.primitives.reduce import sum_lanes


def dot(left: list[Any], right: list[Any], lanes: tuple[int, ...]) -> Float32:
    """Inner product of two vectors, of which the lanes that differ in the bits of `lanes` hold the parts."""
    total = Float32(0.0)
    for x, y in zip(left, right, strict=True):
        total = total + x * y
    return sum_lanes(total, lanes)


def correction(readouts: list[Any], value: Any, strength: Any, own_score: Any) -> tuple[Float32, Float32]:
    """(output, record) of one channel.

    Args:
        readouts: what the decayed state answers the query and the key.
        own_score: <k, q> of the token.
    """
    update = strength * (value - readouts[1])
    return readouts[0] + update * own_score, update


def store_key(predicate: Any, where: Any, key: list[Any], vector: int, step: int, dtype: str) -> None:
    """A thread's vectors of a key, `step` elements apart from the address on, to the ring."""
    for c in range(len(key) // vector):
        words = pack(key[c * vector : (c + 1) * vector], dtype)
        size = 4 if dtype == "float32" else 2
        for first in range(0, len(words), 4):
            store_words_if(predicate, where, words[first : first + 4], offset=c * step * size + 4 * first)


def columns(probes: list[list[Any]]) -> cute.Tensor:
    """The values of some probes, one after the other, in registers that a loop can index."""
    made = cute.make_rmem_tensor((sum(map(len, probes)),), Float32)
    for i, x in enumerate(x for probe in probes for x in probe):
        made[i] = x
    return made
