"""One small case of each kernel, to run under compute-sanitizer; needs a GPU, checks nothing itself.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.cute_kernels.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.cute_kernels.sanitize

With an argument, only steps, folds and copies whose names contain it. Every step mixes rows that read, rows that fold,
rows that are forced to, and padding. One case for each way that the step is built: whole heads and heads shared by
several CTAs, a window of one pass and of many, 16-bit and 32-bit state and activations, every optional input and none,
packed and strided rings, dependent launches; several tokens, in one block of a matrix instruction and in two, rows of
different numbers of them, and read copies. `commit` with and without its optional arguments. `materialize` with and
without numbers of records, and `flush`, of rows with and without records and padding, in three layers of two
geometries. Read copies in every format, made by themselves and behind folds. Numbers are compared by
`tests/cute_kernels/test_step.py`, `tests/test_drafts.py`, `tests/test_ragged.py`, `tests/test_materialize.py` and
`tests/test_read_copy.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

import replayssm
from cute_kernels.configs import StepConfig
from replayssm import LayerSpec, ReplaySpec, make_cursors, make_pool
from replayssm.spec import READ_FORMATS, ReadDtype
from tests.helpers.cases import Case
from tests.helpers.draw import BASES
from tests.helpers.model import Model, model_of
from tests.helpers.oracle import BARE, BASE, F32, Scene, Work, busy_scene, ragged

HALF = torch.float16
STEPS: dict[str, tuple[Scene, dict[str, object]]] = {
    "bf16, all inputs, forced folds": (busy_scene(BASE), {}),
    "bf16, no optional input": (busy_scene(BASE, given=BARE, forced=None), {}),
    "fp32": (busy_scene(replace(BASE, activation=F32)), {}),
    "fp16 state and activations, int32": (
        busy_scene(replace(BASE, activation=HALF, checkpoint=HALF), index_dtype=torch.int32),
        {},
    ),
    "two CTAs a head": (busy_scene(BASE), {"config": StepConfig(split=2)}),
    "four CTAs a head, dependent": (busy_scene(BASE), {"config": StepConfig(split=4), "pdl": True}),
    "window 64, strided rings": (busy_scene(replace(BASE, window=64), ring_layout="strided"), {}),
    "window 1, head-major rings": (busy_scene(replace(BASE, window=1), ring_layout="head_major"), {}),
    "head_dim 80, d_state 256": (busy_scene(replace(BASE, V=80, K=256)), {}),
    **{
        f"{kind}{name}": (busy_scene(replace(case, **change)), options)
        for kind, case in BASES.items()
        if kind != "mamba2"
        for name, change, options in (
            ("", {}, {}),
            (", fp32", {"activation": F32}, {}),
            (", two CTAs a head, window 33", {"window": 33, "checkpoint": HALF}, {"config": StepConfig(split=2)}),
            (", float records", {"value_dtype": F32}, {"pdl": True}),
        )
    },
    **{
        f"{kind}, {case.T} tokens{name}": (busy_scene(case), options)
        for kind, base in BASES.items()
        for name, case, options in (
            ("", replace(base, T=4), {"pdl": True}),
            (", window 24", replace(base, T=4, V=64, window=24), {"config": StepConfig(warps=2)}),
            (", fp32", replace(base, T=3, activation=F32), {}),
            (
                ", two CTAs a head, window 33",
                replace(base, T=16, window=33, checkpoint=HALF),
                {"config": StepConfig(split=2, precision="tf32")},
            ),
        )
    },
    **{
        f"{kind}, {tokens} tokens, copy in {read}": (
            busy_scene(replace(base, T=tokens, window=max(base.window, tokens)), read_dtype=read),
            {},
        )
        for kind, base in BASES.items()
        for tokens, read in ((1, "nvfp4"), (4, "mxfp8"), (9, torch.int8), (4, torch.float8_e4m3fn))
    },
    **{
        f"{kind}, {tokens} tokens, several heads a CTA": (
            busy_scene(replace(BASES[kind], HV=4, HK=1, T=tokens), read_dtype="nvfp4"),
            {"config": StepConfig(warps=1, heads=4)},
        )
        for kind in ("mamba2", "gdn")
        for tokens in (1, 4)
    },
    **{f"{kind}, up to 4 tokens": (ragged(busy_scene(replace(base, T=4))), {}) for kind, base in BASES.items()},
}


def run(work: Work, options: dict[str, object]) -> None:
    """Two model steps, the second from what the first left behind."""
    work.step(**options)
    work.commit()
    work.step(**options)
    accepted = torch.ones(len(work.cache_indices), dtype=torch.int32, device=work.cache_indices.device)
    work.commit(num_accepted=accepted)


FOLDS = {
    f"{kind}, {name}": replace(case, **change)
    for kind, case in BASES.items()
    for name, change in (
        ("folds", {}),
        ("folds of fp16 state", {"checkpoint": HALF, "activation": HALF}),
        ("folds, two CTAs a head, window 33", {"V": 128, "K": 128, "window": 33, "activation": F32}),
    )
}


def fold(model: Model) -> None:
    """Slots 0 to 2 go into others, by a part of their records and by all, then are folded in place."""
    source, destination = (torch.tensor(one, device="cuda") for one in ([0, 1, -1, 2], [3, 4, 5, -1]))
    model.materialize(source, destination, torch.tensor([1, 0, 9, 9], dtype=torch.int32, device="cuda"))
    model.materialize(source.int(), destination.int(), None)
    model.flush(source)


def encode(read: ReadDtype) -> None:
    """Copies of slots with and without records, and padding, of a last atom that is padded."""
    layer, replay = LayerSpec("gdn", 3, 1, 80, 64), ReplaySpec(read_dtype=read)
    pool, cursors = make_pool(layer, replay, 4, device="cuda"), make_cursors(replay, 4, device="cuda")
    cursors.num_committed[1:].fill_(2)
    slots = torch.tensor([1, -1, 0, 3], device="cuda")
    replayssm.write_read_copy(cursors, slots[[0, 2, 3]].int(), pools=[pool])
    replayssm.materialize(cursors, slots[:2], slots[1:3], None, pools=[pool])
    replayssm.flush(cursors, slots, pools=[pool])


def folded(case: Case) -> None:
    fold(model_of(case, torch.device("cuda"), [case.window, case.window // 2, 0], free=3))


def main(part: str) -> None:
    calls: dict[str, Callable[[], None]] = {
        **{name: partial(lambda scene, options: run(scene.on("cuda"), options), *step) for name, step in STEPS.items()},
        **{name: partial(folded, case) for name, case in FOLDS.items()},
        **{f"copies in {read}": partial(encode, read) for read in READ_FORMATS},
    }
    for name, call in calls.items():
        if part in name:
            call()
            torch.cuda.synchronize()
            print(f"{name}: ran", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
