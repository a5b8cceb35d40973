"""Hugging Face models decode the same with ReplaySSM as without.

Claims: greedy tokens are identical; logits differ from an fp64 run of the model by no more than a small multiple of
what the model's own run in the same precision does; whatever else reads or rearranges the cache sees the true state;
a new or reset cache starts clean; `disable` leaves no trace; bad requests are refused before anything changes.

Grid: every supported model type at a window that wraps often (3); one or two of each recurrence also at 1 (the plain
recurrence) and 16 (the default), over 20 or 40 tokens, batch 3, left padding. What does not depend on the recurrence is
shown on mamba2.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import replayssm
from replayssm.integrations.transformers import FAMILIES, disable, enable, layer_specs
from replayssm.launch import options_of

pytest.importorskip("transformers", minversion="5.17")
import transformers

from tests.integrations.tiny_models import (
    MODELS,
    PROMPT,
    ROWS,
    SINGLE,
    assert_as_exact_as_the_model,
    build,
    cache_name,
    error,
    feed,
    forward,
    generate,
    in_fp64,
    mixers_of,
    model_of,
    tokens,
)

WINDOWED = ("mamba2", "nemotron_h", "qwen3_5", "kimi_linear")
GRID = [*((kind, 3) for kind in MODELS), *((kind, window) for kind in WINDOWED for window in (1, 16))]
each_recurrence = pytest.mark.parametrize("kind", ["mamba2", "qwen3_5", "kimi_linear"])
each_delta = pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "kimi_linear"])


@pytest.fixture
def mamba2() -> Any:
    return build("mamba2")


@pytest.mark.parametrize(("kind", "window"), GRID, ids=[f"{kind}-L{window}" for kind, window in GRID])
def test_greedy_tokens_are_identical_and_a_second_call_repeats_the_first(kind: str, window: int) -> None:
    model, count = model_of(kind), 40 if window == 16 else 20
    expected = generate(model, count)
    enable(model, window=window)
    try:
        first, second = generate(model, count), generate(model, count)
    finally:
        disable(model)
    assert torch.equal(first, expected)
    assert torch.equal(second, first)
    assert len(expected[:, PROMPT:].unique()) > 10, "a model that repeats one token proves nothing"


@pytest.mark.parametrize(("kind", "window"), GRID, ids=[f"{kind}-L{window}" for kind, window in GRID])
def test_logits_are_as_exact_as_the_models_own(kind: str, window: int) -> None:
    assert_as_exact_as_the_model(model_of(kind), (PROMPT, *SINGLE[: 40 if window == 16 else 20]), window)


def test_rows_of_a_padded_batch_decode_as_they_do_alone() -> None:
    model, (ids, mask) = build("qwen3_next"), (t[:, :PROMPT] for t in tokens())
    together = generate(model, 20)[:, PROMPT:]
    enable(model, window=3)
    assert torch.equal(generate(model, 20)[:, PROMPT:], together)
    for row, live in enumerate(mask.bool()):
        alone = model.generate(ids[row : row + 1, live], max_new_tokens=20, do_sample=False)
        assert torch.equal(alone[0, live.sum() :], together[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_recurrence
def test_low_precision_models(kind: str, dtype: torch.dtype) -> None:
    """Without experts: one that is chosen differently would hide all else."""
    model = build(kind, mlp_layer_types=["dense"] * 3) if kind == "kimi_linear" else copy.deepcopy(model_of(kind))
    assert_as_exact_as_the_model(model.to(dtype), (PROMPT, *SINGLE), 5)


def test_falcon_h1_with_its_gated_norm_at_batch_one() -> None:
    """At larger batches the decode of transformers 5.17 to 5.24 itself mixes the rows of this variant."""
    model = build("falcon_h1", mamba_rms_norm=True)
    ids = tokens()[0][:1, :PROMPT]
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    enable(model, window=3)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)


def test_time_step_limits_act_as_in_the_models_own_decode(mamba2: Any) -> None:
    model = build("mamba2", time_step_limit=(0.4, 0.6))
    assert not torch.equal(feed(model, (PROMPT,))[0], feed(mamba2, (PROMPT,))[0])
    assert_as_exact_as_the_model(model, (PROMPT, *SINGLE), 3)


def states_of(cache: Any) -> list[Tensor]:
    return [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]


def test_checkpoint_dtype_is_the_dtype_of_the_cached_state(mamba2: Any) -> None:
    truth, _ = feed(in_fp64(mamba2), (PROMPT, *SINGLE))
    own, cache = feed(mamba2, (PROMPT,))
    for layer in cache.layers:
        layer.recurrent_states[0] = layer.recurrent_states[0].bfloat16()
    rounded = torch.cat([own, feed(mamba2, SINGLE, cache, PROMPT)[0]], dim=1)
    enable(mamba2, window=4, checkpoint_dtype=torch.bfloat16)
    ours, cache = feed(mamba2, (PROMPT, *SINGLE))
    assert {state.dtype for state in states_of(cache)} == {torch.bfloat16}
    assert error(ours, truth) <= error(rounded, truth)


def test_the_checkpoint_is_the_caches_own_tensor(mamba2: Any) -> None:
    enable(mamba2, window=4)
    _, cache = feed(mamba2, (PROMPT,))
    before = [state.data_ptr() for state in states_of(cache)]
    _, cache = feed(mamba2, SINGLE, cache, PROMPT)
    assert [state.data_ptr() for state in states_of(cache)] == before


@each_delta
def test_a_state_with_k_before_v_is_converted_once(kind: str) -> None:
    model = build(kind)
    enable(model, window=4)
    _, cache = feed(model, (PROMPT, 1))
    before = states_of(cache)
    assert all(state.mT.is_contiguous() for state in before)
    _, cache = feed(model, (5, 1, 1, 1, 1, 1), cache, PROMPT + 1)
    pools = cache._replayssm_records.pools.values()
    for state, then, pool in zip(states_of(cache), before, pools, strict=True):
        assert state is then
        assert pool.checkpoint.is_set_to(state.mT)


@each_recurrence
def test_the_cache_holds_what_the_models_own_decode_leaves_in_it(kind: str) -> None:
    model = model_of(kind)
    _, own = feed(model, (PROMPT, *SINGLE[:10]))
    enable(model, window=4)
    try:
        _, ours = feed(model, (PROMPT, *SINGLE[:10]))
        assert max(ours._replayssm_records.cursors.num_committed) > 0
        for state, expected in zip(states_of(ours), states_of(own), strict=True):
            assert (state.shape, state.dtype) == (expected.shape, expected.dtype)
            assert (state - expected).norm() <= 1e-5 * expected.norm()
    finally:
        disable(model)
    assert torch.equal(ours.layers[0].conv_states[0], own.layers[0].conv_states[0])


def roll_heads(inputs: Any) -> Any:
    return inputs._replace(v=inputs.v.roll(1, dims=2))


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("fault", ["axes of the state", "order of the value heads", "norm of q and k", "decay"])
def test_a_wrong_hand_over_is_noticed(kind: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V are of one width here, so that no shape gives the fault away."""
    sizes = {"linear_value_head_dim": 16} if kind == "qwen3_next" else {}
    model, faults = build(kind, **sizes), {
        "order of the value heads": roll_heads,
        "norm of q and k": lambda inputs: inputs._replace(l2norm_eps=1e-3),
        "decay": lambda inputs: inputs._replace(dt_bias=inputs.dt_bias * 1.01),
    }  # fmt: skip
    widths = (PROMPT, *SINGLE[:10])
    truth, own = feed(in_fp64(model), widths)[0], feed(model, widths)[0]
    family = FAMILIES[type(mixers_of(model)[0]).__name__]
    enable(model, window=3)
    assert error(feed(model, widths)[0], truth) <= 1.5 * error(own, truth)
    if fault in faults:
        right, wrong = family.inputs, faults[fault]
        monkeypatch.setattr(family, "inputs", lambda *arguments: wrong(right(*arguments)))
    else:
        monkeypatch.setattr(family, "state_is_transposed", False)
    assert error(feed(model, widths)[0], truth) > 30 * error(own, truth)


@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h", "qwen3_next", "kimi_linear", "glm5_next"])
@pytest.mark.parametrize("widths", [(PROMPT, 1, 1, 6, 1, 1, 1, 1, 6, 6, 1), (1, 1, 1, 3, 1)], ids=str)
def test_continuing_with_several_tokens(kind: str, widths: tuple[int, ...]) -> None:
    assert_as_exact_as_the_model(model_of(kind), widths, 3)


def test_torch_compile_leaves_the_step_to_eager_code(mamba2: Any) -> None:
    truth, _ = feed(in_fp64(mamba2), (PROMPT, 1, 1))
    own, _ = feed(mamba2, (PROMPT, 1, 1))
    enable(mamba2, window=3)
    first, cache = feed(mamba2, (PROMPT,))
    second, _ = feed(torch.compile(mamba2, backend="eager"), (1, 1), cache, PROMPT)
    assert cache._replayssm_records.cursors.num_committed.tolist() == [2] * ROWS
    assert error(torch.cat([first, second], dim=1), truth) <= 1.5 * error(own, truth)


def test_a_static_cache() -> None:
    model = model_of("nemotron_h")
    expected = generate(model, 20)
    enable(model, window=3)
    try:
        assert torch.equal(generate(model, 20, cache_implementation="static"), expected)
    finally:
        disable(model)


@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h", "qwen3_5"])
def test_beam_search(kind: str) -> None:
    model = model_of(kind)
    expected = generate(model, 16, num_beams=3, num_return_sequences=2)
    enable(model, window=5)
    try:
        assert torch.equal(generate(model, 16, num_beams=3, num_return_sequences=2), expected)
    finally:
        disable(model)


@each_recurrence
def test_rows_can_be_dropped_and_reordered_midway(kind: str) -> None:
    model, rows = build(kind), torch.tensor([2, 0])
    logits = []
    for window in (None, 5):
        if window:
            enable(model, window=window)
        _, cache = feed(model, (PROMPT, 1, 1, 1))
        cache.reorder_cache(rows)
        ids, mask = (t[rows] for t in tokens())
        parts = []
        for place in range(PROMPT + 3, PROMPT + 20):
            out, cache = forward(model, ids[:, place : place + 1], mask[:, : place + 1], cache)
            parts.append(out)
        logits.append(torch.cat(parts, dim=1))
    truth, _ = feed(in_fp64(build(kind)), (PROMPT, *(1,) * 20))
    own, ours = ((part - truth[rows, PROMPT + 3 : PROMPT + 20]).square().mean() for part in logits)
    assert ours <= 4 * own


@pytest.mark.parametrize("change", ["disable", "another window", "deep copies"])
@each_recurrence
def test_settings_may_change_while_records_are_pending(kind: str, change: str) -> None:
    model = original = build(kind)
    truth, _ = feed(in_fp64(model), (PROMPT, *SINGLE[:24]))
    own, _ = feed(model, (PROMPT, *SINGLE[:24]))
    enable(model, window=7)
    first, cache = feed(model, (PROMPT, *SINGLE[:12]))
    if change == "deep copies":
        others = cache
        model, cache = copy.deepcopy((original, cache))
        feed(original, SINGLE[:3], others, PROMPT + 12)
        assert not any(
            copied.is_set_to(state) for copied, state in zip(states_of(cache), states_of(others), strict=True)
        )
    else:
        disable(model)
    if change == "another window":
        enable(model, window=2)
    second, _ = feed(model, SINGLE[12:24], cache, PROMPT + 12)
    assert error(torch.cat([first, second], dim=1), truth) <= 1.5 * error(own, truth)


@each_recurrence
def test_a_reset_cache_starts_clean_whatever_its_rings_hold(kind: str) -> None:
    """As in the model's own decode: the attention layers of a hybrid keep their length over a reset."""
    model, widths, seconds = build(kind), (PROMPT, *SINGLE[:12]), []
    for window in (None, 4):
        if window:
            enable(model, window=window)
        first, cache = feed(model, widths)
        cache.reset()
        for pool in cache._replayssm_records.pools.values() if window else ():
            for ring in (pool.value, pool.key, pool.decay):
                ring.fill_(torch.nan)
        second, again = feed(model, widths, cache)
        assert again is cache
        assert kind != "mamba2" or torch.equal(first, second)
        seconds.append(second)
    assert error(seconds[1], seconds[0].double()) < 1e-4


@each_recurrence
def test_a_corrupt_pending_record_is_noticed(kind: str) -> None:
    model = build(kind)
    truth, _ = feed(in_fp64(model), (PROMPT, *SINGLE[:20]))
    own, _ = feed(model, (PROMPT, *SINGLE[:20]))
    enable(model, window=16)
    first, cache = feed(model, (PROMPT, *SINGLE[:10]))
    records = cache._replayssm_records
    assert records.cursors.num_committed.tolist() == [10] * ROWS
    records.pools[2].value[0, 2, 7] += 0.5
    second, _ = feed(model, SINGLE[10:20], cache, PROMPT + 10)
    assert error(torch.cat([first, second], dim=1), truth) > 100 * error(own, truth)


def test_one_commit_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = build("nemotron_h"), list[int]()
    commit = replayssm.commit
    monkeypatch.setattr(replayssm, "commit", lambda *args, **kwargs: (calls.append(1), commit(*args, **kwargs)))
    enable(model, window=16)
    _, cache = feed(model, (PROMPT, 1, 1))
    assert len(calls) == 2
    model.model(input_ids=tokens()[0][:, :1], use_cache=True, **{cache_name(model): cache})
    assert len(calls) == 3
    assert cache._replayssm_records.cursors.num_committed.tolist() == [3] * ROWS


def test_a_forward_that_failed_midway_is_not_continued(mamba2: Any) -> None:
    enable(mamba2)
    _, cache = feed(mamba2, (PROMPT, 1))
    hook = mamba2.backbone.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        feed(mamba2, (1,), cache, PROMPT + 1)
    hook.remove()
    with pytest.raises(RuntimeError, match="never committed"):
        feed(mamba2, (1,), cache, PROMPT + 1)
    with pytest.raises(RuntimeError, match="never committed"):
        cache.layers[0].recurrent_states[0]
    feed(mamba2, (PROMPT, 1))


@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h", "qwen3_5", "kimi_linear"])
def test_disable_restores_the_model(kind: str) -> None:
    model = build(kind)
    before, attributes, expected = model.state_dict(), traces(model), feed(model, (PROMPT, *SINGLE[:12]))[0]
    enable(model)
    generate(model, 12)
    assert traces(model) != attributes
    assert list(model.state_dict()) == list(before)
    disable(model)
    assert traces(model) == attributes
    assert torch.equal(feed(model, (PROMPT, *SINGLE[:12]))[0], expected)
    disable(model)


def traces(model: nn.Module) -> list[Any]:
    """Names of the attributes of every module, and how many hooks it has."""
    return [(sorted(vars(m)), *(len(vars(m)[key]) for key in vars(m) if "hooks" in key)) for m in model.modules()]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mamba2", [replayssm.LayerSpec("mamba2", 4, 2, 16, 16)] * 3),
        ("qwen3_5", [replayssm.LayerSpec("gdn", 4, 2, 8, 16)] * 2),
        ("kimi_linear", [replayssm.LayerSpec("kda", 4, 4, 8, 8)] * 2),
    ],
)
def test_layer_specs_of_an_enabled_model(kind: str, expected: list[replayssm.LayerSpec]) -> None:
    model = build(kind)
    assert layer_specs(model) == expected
    enable(model)
    assert layer_specs(model) == expected


def test_refusals_come_early_and_change_nothing(mamba2: Any) -> None:
    attributes = traces(mamba2)
    for window in (0, 65):
        with pytest.raises(ValueError, match="window"):
            enable(mamba2, window=window)
    with pytest.raises(NotImplementedError, match="checkpoint_dtype"):
        enable(mamba2, checkpoint_dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="activation_dtype"):
        enable(in_fp64(mamba2))
    mixer = mamba2.backbone.layers[0].mixer
    mixer.conv1d.bfloat16()
    with pytest.raises(NotImplementedError, match="one dtype"):
        enable(mamba2)
    mixer.conv1d.float()
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "vocab_size": 8}
    sizes |= {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
    for name in ("Llama", "OlmoHybrid"):
        other = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
        with pytest.raises(NotImplementedError, match=rf"Mamba-2, .*KimiLinearDeltaAttention.*got {name}ForCausalLM"):
            enable(other)
    assert traces(mamba2) == attributes


def test_layers_that_no_pool_can_hold_are_refused_before_the_first_token() -> None:
    model = build("qwen3_5", linear_value_head_dim=6)
    attributes = traces(model)
    with pytest.raises(ValueError, match="16-byte"):
        enable(model)
    assert traces(model) == attributes


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear", "glm5_next"])
def test_what_is_planned_for_a_gpu_is_what_the_first_token_asks_for(kind: str) -> None:
    model = build(kind).bfloat16()
    enable(model)
    _, cache = feed(model, (PROMPT, 1))
    mixer = mixers_of(model)[0]
    inputs = cache._replayssm_records.inputs[mixer.layer_idx]
    assert options_of(inputs) == mixer.forward.family.options(mixer, "bfloat16")


@each_recurrence
def test_parameters_are_prepared_once_until_they_change(kind: str) -> None:
    """A new tensor in each step would be prepared and checked anew in each."""
    model = build(kind).bfloat16()
    enable(model)
    mixer = mixers_of(model)[0]
    family, A_log = mixer.forward.family, mixer.forward.family.learned(mixer)[0]
    first = mixer.forward._parameters()
    assert all(a is b for a, b in zip(mixer.forward._parameters(), first, strict=True))
    assert {parameter.dtype for parameter in first} == {torch.float32}
    for change in (lambda: A_log.add_(1.0), lambda: setattr(A_log, "data", A_log.data + 1.0)):
        change()
        again = mixer.forward._parameters()
        assert not torch.equal(again[0], first[0])
        assert torch.equal(again[0], family.prepared(mixer, family.learned(mixer))[0])
        first = again


def test_an_enabled_or_patched_model_is_refused(mamba2: Any) -> None:
    enable(mamba2)
    for model in (mamba2, mamba2.backbone):
        with pytest.raises(RuntimeError, match="disable"):
            enable(model)
    disable(mamba2)
    mixer = mamba2.backbone.layers[0].mixer
    mixer.forward = mixer.forward
    with pytest.raises(NotImplementedError, match="replaced"):
        enable(mamba2)


def forward_with_another_name(self: Any, hidden_states: Any, state: Any = None, attention_mask: Any = None) -> None: ...


def forward_with_another_order(
    self: Any, hidden_states: Any, attention_mask: Any = None, cache: Any = None, **kwargs: Any
) -> None: ...


def forward_with_one_more(
    self: Any, hidden_states: Any, cache: Any = None, attention_mask: Any = None, seq_idx: Any = None, **kwargs: Any
) -> None: ...


def forward_with_keywords_only(
    self: Any, hidden_states: Any, *, cache: Any = None, attention_mask: Any = None, **kwargs: Any
) -> None: ...


def forward_with_what_you_like(self: Any, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    "other",
    [
        forward_with_another_name,
        forward_with_another_order,
        forward_with_one_more,
        forward_with_keywords_only,
        forward_with_what_you_like,
    ],
)
def test_a_mixer_that_is_called_differently_is_refused(
    mamba2: Any, monkeypatch: pytest.MonkeyPatch, other: Callable[..., None]
) -> None:
    attributes = traces(mamba2)
    monkeypatch.setattr(type(mamba2.backbone.layers[0].mixer), "forward", other)
    with pytest.raises(NotImplementedError) as refusal:
        enable(mamba2)
    for part in (
        transformers.__version__,
        "Mamba2Mixer.forward(self, hidden_states, cache",
        str(inspect.signature(other)),
    ):
        assert part in str(refusal.value)
    assert traces(mamba2) == attributes


@pytest.mark.parametrize(
    ("kind", "function"), [("mamba2", "causal_conv1d_update"), ("qwen3_5", "apply_mask_to_padding_states")]
)
def test_a_mixer_without_a_function_of_its_file_is_refused(
    kind: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(kind)
    monkeypatch.delattr(sys.modules[type(mixers_of(model)[0]).__module__], function)
    with pytest.raises(NotImplementedError, match=rf"{transformers.__version__}.*{function}"):
        enable(model)


@pytest.mark.parametrize("change", ["no class", "recurrent_states", "conv_states", "record_past", "has_previous_state"])
def test_a_cache_that_is_built_differently_is_refused(
    mamba2: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    attributes, layer = traces(mamba2), transformers.cache_utils.LinearAttentionLayer
    enable(mamba2)
    disable(mamba2)

    def changed() -> Any:
        other = layer()
        setattr(other, change, [None])
        return other

    if change == "no class":
        monkeypatch.delattr(transformers.cache_utils, "LinearAttentionLayer")
    else:
        monkeypatch.setattr(transformers.cache_utils, "LinearAttentionLayer", changed)
    wanted = "LinearAttentionLayer" if change == "no class" else f"{change} in LinearAttentionLayer"
    with pytest.raises(NotImplementedError, match=rf"transformers {transformers.__version__}: .*{wanted}"):
        enable(mamba2)
    assert traces(mamba2) == attributes


def test_an_older_transformers_is_refused(mamba2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The module that was imported first may be another one: transformers puts a lazy module in its own place.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.16.2")
    with pytest.raises(ImportError, match=r"5\.17 or newer.*5\.16\.2"):
        enable(mamba2)


@pytest.mark.parametrize("name", ["by position", "cache", "cache_params"])
def test_a_mixer_called_directly_decodes_here_whatever_its_cache_is_called(mamba2: Any, name: str) -> None:
    mixer, hidden = mamba2.backbone.layers[0].mixer, torch.randn(ROWS, 1, 32)
    enable(mamba2, window=4)
    _, cache = feed(mamba2, (PROMPT,))
    if name == "by position":
        mixer(hidden, cache)
    else:
        mixer(hidden, **{name: cache})
    assert cache._replayssm_records.stepped == {0}


def test_a_mask_of_a_decoded_token_is_refused(mamba2: Any) -> None:
    mixer, hidden, mask = mamba2.backbone.layers[0].mixer, torch.randn(ROWS, 1, 32), torch.ones(ROWS, 1)
    enable(mamba2)
    _, cache = feed(mamba2, (PROMPT,))
    with pytest.raises(NotImplementedError, match="attention_mask"):
        mixer(hidden, cache, mask)


@each_delta
def test_a_mask_of_a_decoded_token_acts_as_in_the_models_own_decode(kind: str) -> None:
    model, hidden, mask = build(kind), torch.randn(ROWS, 1, 32), torch.tensor([[1], [0], [1]]).bool()
    mixer = mixers_of(model)[0]
    _, cache = feed(model, (PROMPT,))
    (masked, unmasked), (_, other) = (
        (mixer(hidden, copy.deepcopy(cache), m) for m in (mask, None)),
        feed(model, (PROMPT,)),
    )
    enable(model)
    ours = mixer(hidden, other, mask)
    assert other._replayssm_records.stepped == {0}
    assert (ours - masked).abs().max() < 1e-5 < (ours - unmasked).abs().max()


@each_recurrence
def test_gradients_are_refused(kind: str) -> None:
    model = build(kind)
    enable(model.requires_grad_(True))
    _, cache = feed(model, (PROMPT,))
    with pytest.raises(NotImplementedError, match="no_grad"):
        feed(model, (1,), cache, PROMPT)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h", "qwen3_next", "qwen3_5", "kimi_linear", "glm5_next"])
def test_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    """Head sizes that the kernel takes; continuation, too, since it folds through the kernel."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    sizes = {
        "mamba2": {"num_heads": 4, "head_dim": 64, "state_size": 64, "hidden_size": 128},
        "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 64},
        "qwen3_next": {"linear_key_head_dim": 64, "linear_value_head_dim": 128},
        "qwen3_5": {"linear_key_head_dim": 128, "linear_value_head_dim": 64},
        "kimi_linear": {"linear_head_dim": 64, "mlp_layer_types": ["dense"] * 3},
        "glm5_next": {"linear_head_dim": 64, "mlp_layer_types": ["dense"] * 3},
    }
    model = build(kind, **sizes[kind]).cuda()
    model.set_experts_implementation("eager")
    if dtype == torch.float32:
        expected = generate(model)
        enable(model, window=3)
        assert torch.equal(generate(model), expected)
        disable(model)
    assert_as_exact_as_the_model(model.to(dtype), (PROMPT, *SINGLE[:20], 5, *SINGLE[:8]), 3)
