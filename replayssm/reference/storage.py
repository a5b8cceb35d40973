"""How the twin writes a pool's states, by round to nearest or stochastically, and their read copies.

A read copy is a function of the bits of its checkpoint alone, so it never holds anything of an earlier copy and can be
made again wherever a checkpoint arrives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.cursors import Cursors
from replayssm.pool import Pool
from replayssm.reference import formats, philox, quant


def round_state(state: Tensor, dtype: torch.dtype, seed: Tensor, fold_count: Tensor) -> Tensor:
    """States rounded stochastically to a 16-bit dtype.

    Args:
        state: [slots, HV, V, K] float32.
        seed: [slots] int64.
        fold_count: [slots] integers, the folds of the slot before this one.
    """
    form: formats.Stochastic = "float16" if dtype is torch.float16 else "bfloat16"
    heads, rows, columns = state.shape[1:]
    shared = len(formats.DRAWS[form].starts)
    words = philox.state_words(seed, fold_count, (heads, rows, -(-columns // shared)))
    padded = torch.nn.functional.pad(state, (0, -columns % shared))
    return formats.round_stochastic(padded, form, words)[..., :columns].to(dtype)


def rounded(pool: Pool, state: Tensor, slots: Tensor, cursors: Cursors) -> Tensor:
    """States [rows, HV, V, K] in the checkpoint's dtype, as a fold of these slots writes them."""
    if pool.replay.rounding == "nearest":
        return state.to(pool.checkpoint.dtype)
    assert pool.seed is not None and cursors.fold_count is not None
    return round_state(state.float(), pool.checkpoint.dtype, pool.seed[slots], cursors.fold_count[slots])


def write_copy(pool: Pool, slots: Tensor) -> None:
    """Make the read copies of some slots from their checkpoints; nothing for a pool without one."""
    if pool.replay.read_dtype is not None:
        for name, part in quant.encode(pool.checkpoint[slots].float(), pool.replay.read_dtype).items():
            getattr(pool, f"read_{name}")[slots] = part


def read_copy(pool: Pool, slots: Tensor) -> Tensor:
    """The states that the read copies of some slots stand for, [rows, HV, V, K] float32."""
    assert pool.replay.read_dtype is not None
    parts = {name: getattr(pool, f"read_{name}") for name in ("codes", "scale", "tile_scale")}
    held = {name: part[slots] for name, part in parts.items() if part is not None}
    return quant.decode(held, pool.replay.read_dtype)
