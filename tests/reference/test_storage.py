"""States that are stored with stochastic rounding are right on average, and each slot has noise of its own.

Statistics over 512 slots that hold one request and differ in their seeds, in both 16-bit dtypes. The same storage is
compared bit by bit through the verbs in `tests/test_read_copy.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import replayssm
from replayssm import Cursors, LayerSpec, ReplaySpec, make_cursors, make_pool
from replayssm.reference import replay
from tests.helpers.tolerance import same_bytes

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def test_folds_are_unbiased_reproducible_and_independent() -> None:
    """512 slots of one request but for their seeds: the mean of what they fold lies within 4 standard errors of the
    float32 fold, and two draws for what is rare; rounding to nearest does not."""
    for dtype in (F16, BF16):
        spec = ReplaySpec(4, 1, dtype, F32, rounding="stochastic")
        layer, slots = LayerSpec("gdn", 2, 2, 8, 16), 512
        generator = torch.Generator().manual_seed(0)
        cursors = make_cursors(spec, slots)
        cursors.num_committed.fill_(4)
        pool = make_pool(layer, spec, slots)
        for tensor in (pool.checkpoint, pool.value, pool.key, pool.decay):
            tensor.copy_(torch.randn(tensor.shape[1:], generator=generator))
        pool.decay.copy_(-pool.decay.abs())
        exact = replay.fold(pool, cursors, torch.arange(1), torch.tensor([4]), dtype=F32)[0].double()
        again = replace(pool, checkpoint=pool.checkpoint.clone())
        copied = Cursors(spec, *(getattr(cursors, n).clone() for n in cursors.names))
        replayssm.flush(cursors, torch.arange(slots), pools=[pool])
        got = pool.checkpoint.double()
        unit = torch.exp2(exact.abs().log2().floor() - (10 if dtype is F16 else 7))
        share = exact.abs() / unit % 1
        spread = unit * ((share * (1 - share) / slots).sqrt() * 4 + 2 / slots)
        assert ((got.mean(0) - exact).abs() <= spread).all()
        assert ((exact.to(dtype).double() - exact).abs() <= spread).double().mean() < 0.5  # teeth
        noise = ((got - exact) / unit)[:64].flatten(1)
        assert (torch.corrcoef(noise) - torch.eye(64)).abs().max() < 5 / noise.shape[1] ** 0.5  # 2016 pairs
        replayssm.flush(copied, torch.arange(slots).flip(0), pools=[again])
        assert same_bytes(again.checkpoint, pool.checkpoint)  # in any order of rows
        assert not same_bytes(pool.checkpoint[0], pool.checkpoint[1])
