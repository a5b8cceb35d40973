"""Which readout steps of several tokens get on each architecture, for the layers of released models, and why.

Where an architecture has tcgen05 its readout is taken, unless `why` names a reason; then, and on sm_90a, mma.sync is.
Every reason of `cute_kernels.operands.unfit_reason` is met.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.arch import ARCHES, TENSOR_COLUMNS
from cute_kernels.configs import StepConfig, StepKey
from cute_kernels.heuristic import invalid_reason, room
from cute_kernels.operands import OperandShape, unfit_reason
from replayssm import LayerSpec, ReplaySpec
from tests.test_plan import plan
from tuning.shapes import MODELS, ModelShape, lookup

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SPECS: dict[str, ReplaySpec] = {
    "fp32": ReplaySpec(max_draft=8),
    "bf16": ReplaySpec(checkpoint_dtype=BF16, max_draft=8),
    "nvfp4": ReplaySpec(max_draft=8, read_dtype="nvfp4"),
    "fp8": ReplaySpec(max_draft=8, read_dtype=torch.float8_e4m3fn),
}
ROWS_80 = "64 or 128 rows"  # of head_dim 80
# Of each geometry: the heads that a CTA takes together, for a state in each format; 0 stands for mma.sync.
HEADS: dict[tuple[str, int, int, int], dict[str, int]] = {
    # recurrence, head_dim, d_state, value heads a key head
    ("mamba2", 80, 128, 12): {"fp32": 0, "bf16": 0, "nvfp4": 0, "fp8": 0},
    ("mamba2", 80, 128, 16): {"fp32": 0, "bf16": 0, "nvfp4": 0, "fp8": 0},
    ("mamba2", 64, 128, 8): {"fp32": 2, "bf16": 2, "nvfp4": 4, "fp8": 0},
    ("mamba2", 64, 128, 14): {"fp32": 2, "bf16": 2, "nvfp4": 2, "fp8": 0},
    ("mamba2", 64, 128, 16): {"fp32": 2, "bf16": 2, "nvfp4": 4, "fp8": 0},
    ("mamba2", 64, 128, 32): {"fp32": 2, "bf16": 2, "nvfp4": 4, "fp8": 0},
    ("mamba2", 64, 256, 32): {"fp32": 1, "bf16": 2, "nvfp4": 4, "fp8": 0},
    ("gdn", 128, 128, 1): {"fp32": 1, "bf16": 1, "nvfp4": 1, "fp8": 0},
    ("gdn", 128, 128, 2): {"fp32": 1, "bf16": 1, "nvfp4": 2, "fp8": 0},
    ("gdn", 128, 128, 3): {"fp32": 1, "bf16": 1, "nvfp4": 1, "fp8": 0},
    ("gdn", 128, 128, 4): {"fp32": 1, "bf16": 1, "nvfp4": 4, "fp8": 0},
    ("kda", 128, 128, 1): {"fp32": 1, "bf16": 1, "nvfp4": 1, "fp8": 0},
}


def geometry(layer: LayerSpec) -> tuple[str, int, int, int]:
    return layer.recurrence, layer.head_dim, layer.d_state, layer.num_v_heads // layer.num_k_heads


def on_tensor(key: StepKey, **config: Any) -> StepKey:
    """The same step with a readout on tcgen05."""
    return replace(key, config=replace(key.config, **({"readout": "tcgen05", "warps": 4} | config)))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_each_model_gets_the_readout_that_its_shape_admits(model: ModelShape, arch: str) -> None:
    columns = ARCHES[arch].tensor_columns
    for name, spec in SPECS.items():
        key = plan(model.layer, spec, num_tokens=8, arch=arch).key
        heads = HEADS[geometry(model.layer)][name] if columns else 0
        assert key.config.readout == ("tcgen05" if heads else "mma"), name
        assert key.heads_together == max(1, heads), name
        if not heads:
            reason = unfit_reason(on_tensor(key, warps=4), columns)
            why = "no tcgen05" if not columns else "got float8_e4m3fn" if name == "fp8" else ROWS_80
            assert reason is not None and why in reason


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_one_token_of_a_checkpoint_stays_as_it_is(model: ModelShape) -> None:
    for arch in ARCHES:
        assert plan(model.layer, ReplaySpec(), arch=arch).key.config.readout == "mma"
    key = plan(model.layer, ReplaySpec(), arch="sm_103a").key
    assert "one token" in str(unfit_reason(on_tensor(key), TENSOR_COLUMNS))


def test_a_cta_fits_where_its_operands_do() -> None:
    """Two or three CTAs on a multiprocessor, as shared and tensor memory allow, for a float32 state of Super; and no
    step takes more columns than there are."""
    super_ = lookup("nemotron-3-super").layer
    key = plan(super_, SPECS["fp32"], num_tokens=8, arch="sm_103a").key
    assert (room(key), OperandShape.of(key).columns, key.threads) == (3, 32, 128)
    codes = plan(super_, SPECS["nvfp4"], num_tokens=8, arch="sm_103a").key
    assert (room(codes), OperandShape.of(codes).columns, codes.threads) == (4, 128, 128)
    for model in MODELS:
        for tokens in (2, 8, 16):
            for spec in SPECS.values():
                longer = replace(spec, max_draft=tokens, ring_capacity=32)
                made = plan(model.layer, longer, num_tokens=tokens, arch="sm_103a").key
                if made.config.readout == "tcgen05":
                    assert OperandShape.of(made).columns * room(made) <= TENSOR_COLUMNS


SUPER = lookup("nemotron-3-super").layer
REASONS: dict[str, tuple[LayerSpec, ReplaySpec, dict[str, Any]]] = {
    "64 or 128 rows": (SUPER, SPECS["fp32"], {"split": 2}),
    "1, 2 or 4 warps a head, got 8": (SUPER, SPECS["fp32"], {"warps": 8}),
    "groups of a multiple of 2": (replace(SUPER, num_k_heads=128), SPECS["fp32"], {"warps": 2}),
    "tcgen05_f16 reads nvfp4": (SUPER, SPECS["bf16"], {"readout": "tcgen05_f16"}),
    "multiplies float16 by float16": (SUPER, replace(SPECS["bf16"], checkpoint_dtype=F16), {}),
    "shared memory": (replace(SUPER, head_dim=128, d_state=256), SPECS["fp32"], {"warps": 2}),
    "1024 columns of tensor memory, there are 512": (
        LayerSpec("gdn", 16, 4, 128, 64),
        ReplaySpec(max_draft=16, read_dtype="nvfp4"),
        {"warps": 1, "precision": "fp32"},
    ),
}


@pytest.mark.parametrize("words", REASONS)
def test_a_readout_that_does_not_fit_is_refused_with_the_reason(words: str) -> None:
    layer, spec, config = REASONS[words]
    chosen = StepConfig(**({"readout": "tcgen05"} | config))
    with pytest.raises(NotImplementedError, match=words):
        plan(layer, spec, num_tokens=spec.max_draft, arch="sm_100a", config=chosen)


def test_more_heads_share_a_cta_where_there_are_many() -> None:
    """Codes of Gated DeltaNet: conversions are shared by four heads, but few CTAs are better off with two each; so are
    16 tokens, whose sums take all of tensor memory."""
    for batch, tokens, heads in ((256, 8, 4), (1, 8, 2), (256, 16, 2)):
        spec = replace(SPECS["nvfp4"], max_draft=tokens, ring_capacity=32)
        key = plan(lookup("qwen3.5-122b-a10b").layer, spec, num_tokens=tokens, arch="sm_103a", batch=batch).key
        assert key.heads_together == heads


def test_kda_heads_do_not_share_probes_that_differ() -> None:
    """Queries decay channel by channel, another way in each head, so a group of many heads shares none."""
    layer = LayerSpec("kda", 8, 2, 128, 64)
    key = plan(layer, SPECS["bf16"], num_tokens=8, arch="sm_103a").key
    assert (key.config.readout, key.heads_together) == ("tcgen05", 1)
    assert "share probes" in str(invalid_reason(on_tensor(key, warps=2), ARCHES["sm_103a"]))
