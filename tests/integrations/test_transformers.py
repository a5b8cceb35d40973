"""Hugging Face models decode the same with ReplaySSM as without.

Claims: greedy tokens are identical; logits differ from an fp64 run of the model by no more than a small multiple of
what the model's own run in the same precision does; whatever else reads or rearranges the cache sees the true state;
a new or reset cache starts clean; `disable` leaves no trace; bad requests are refused before anything changes.

Grid: every supported model type at a window that wraps often (3); the two that matter most also at 1 (the plain
recurrence) and 16 (the default), over 20 or 40 tokens, batch 3, left padding. The Mamba-2 parameters are drawn so that
the state carries most of the output: with the initial dt of 0.001 to 0.1 a lost record would hardly show.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import replayssm
from replayssm.integrations.transformers import FAMILIES, disable, enable, layer_specs

transformers = pytest.importorskip("transformers", minversion="5.17")

ROWS, PROMPT, VOCABULARY = 3, 9, 64
SINGLE = (1,) * 40
HYBRID = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "num_hidden_layers": 3}
IBM_MIXER = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2, "num_hidden_layers": 3, "chunk_size": 8},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **{"hybrid_override_pattern": "M-M*ME", "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16},
            **{"n_groups": 2, "chunk_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
            **{"intermediate_size": 32, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
            "n_routed_experts": 4,
        },
    ),
    "bamba": ("Bamba", {**HYBRID, **IBM_MIXER, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **HYBRID,
            **IBM_MIXER,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_intermediate_size": 32,
            "num_local_experts": 2,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **HYBRID,
            **{"n_mamba_heads": 4, "mamba_d_state": 16, "mamba_ngroups": 2, "chunk_size": 8, "num_key_value_heads": 2},
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        },
    ),
    "falcon_h1": ("FalconH1", {**HYBRID, **IBM_MIXER, "mamba_d_ssm": 64, "ssm_in_multiplier": 0.7}),
}


def build(kind: str, **changes: Any) -> Any:
    name, sizes = MODELS[kind]
    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = getattr(transformers, f"{name}Config")(**{**common, **sizes, "initializer_range": 0.3, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for mixer in model.modules():
        if type(mixer).__name__ in FAMILIES:
            mixer.A_log.uniform_(-4.0, 0.0)
            mixer.dt_bias.normal_(-0.5, 0.5)
            mixer.D.normal_()
    return model


def in_fp64(model: Any) -> Any:
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")
    return model


@functools.cache
def model_of(kind: str) -> Any:
    return build(kind)


@pytest.fixture
def mamba2() -> Any:
    return build("mamba2")


@functools.cache
def tokens() -> tuple[Tensor, Tensor]:
    """Token ids and mask of ROWS rows: a prompt of unequal lengths padded on the left, then what is decoded."""
    ids = torch.randint(3, VOCABULARY, (ROWS, PROMPT + 64), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 4, 7)):
        ids[row, :padding] = mask[row, :padding] = 0
    return ids, mask


def generate(model: Any, count: int = len(SINGLE), **options: Any) -> Tensor:
    ids, mask = (t[:, :PROMPT].to(model.device) for t in tokens())
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options)


def cache_name(model: Any) -> str:
    """What the forward of a model calls its cache: `cache` since transformers 5.24, one of two names before."""
    forward = type(getattr(model, "_orig_mod", model)).forward  # torch.compile wraps the model
    names = {"cache", "cache_params", "past_key_values"} & set(inspect.signature(forward).parameters)
    assert len(names) == 1
    return names.pop()


def forward(model: Any, ids: Tensor, mask: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
    name = cache_name(model)
    result = model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=ids.shape[1], **{name: cache})
    return result.logits, result[name]


def feed(model: Any, widths: tuple[int, ...], cache: Any = None, start: int = 0) -> tuple[Tensor, Any]:
    """Logits of the given tokens, fed in forwards of the given widths; [rows, sum(widths), vocabulary]."""
    logits = []
    for width in widths:
        ids, mask = (t.to(model.device) for t in tokens())
        out, cache = forward(model, ids[:, start : start + width], mask[:, : start + width], cache)
        logits.append(out)
        start += width
    return torch.cat(logits, dim=1), cache


def error(logits: Tensor, truth: Tensor) -> float:
    """Root of the mean square deviation over the tokens that are no padding; steadier than the largest one."""
    mask = tokens()[1][:, : logits.shape[1]].bool().to(logits.device)
    return (logits.double() - truth.to(logits.device))[mask].square().mean().sqrt().item()


def assert_as_exact_as_the_model(model: Any, widths: tuple[int, ...], window: int) -> None:
    truth, _ = feed(in_fp64(model), widths)
    own, _ = feed(model, widths)
    enable(model, window=window)
    try:
        ours, _ = feed(model, widths)
    finally:
        disable(model)
    assert not torch.equal(ours, own), "the model's own decode step has run"
    assert error(ours, truth) <= 1.5 * error(own, truth)


GRID = [*((kind, 3) for kind in MODELS), ("mamba2", 1), ("mamba2", 16), ("nemotron_h", 1), ("nemotron_h", 16)]


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models(dtype: torch.dtype) -> None:
    assert_as_exact_as_the_model(copy.deepcopy(model_of("mamba2")).to(dtype), (PROMPT, *SINGLE), 5)


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


def test_checkpoint_dtype_is_the_dtype_of_the_cached_state(mamba2: Any) -> None:
    truth, _ = feed(in_fp64(mamba2), (PROMPT, *SINGLE))
    own, cache = feed(mamba2, (PROMPT,))
    for layer in cache.layers:
        layer.recurrent_states[0] = layer.recurrent_states[0].bfloat16()
    rounded = torch.cat([own, feed(mamba2, SINGLE, cache, PROMPT)[0]], dim=1)
    enable(mamba2, window=4, checkpoint_dtype=torch.bfloat16)
    ours, cache = feed(mamba2, (PROMPT, *SINGLE))
    assert {layer.recurrent_states[0].dtype for layer in cache.layers} == {torch.bfloat16}
    assert error(ours, truth) <= error(rounded, truth)


def test_the_checkpoint_is_the_caches_own_tensor(mamba2: Any) -> None:
    enable(mamba2, window=4)
    _, cache = feed(mamba2, (PROMPT,))
    before = [layer.recurrent_states[0].data_ptr() for layer in cache.layers]
    _, cache = feed(mamba2, SINGLE, cache, PROMPT)
    assert [layer.recurrent_states[0].data_ptr() for layer in cache.layers] == before


@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h"])
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


@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h"])
def test_beam_search(kind: str) -> None:
    model = model_of(kind)
    expected = generate(model, 16, num_beams=3, num_return_sequences=2)
    enable(model, window=5)
    try:
        assert torch.equal(generate(model, 16, num_beams=3, num_return_sequences=2), expected)
    finally:
        disable(model)


def test_rows_can_be_dropped_and_reordered_midway(mamba2: Any) -> None:
    rows = torch.tensor([2, 0])
    logits = []
    for window in (None, 5):
        if window:
            enable(mamba2, window=window)
        _, cache = feed(mamba2, (PROMPT, 1, 1, 1))
        cache.reorder_cache(rows)
        ids, mask = (t[rows] for t in tokens())
        parts = []
        for place in range(PROMPT + 3, PROMPT + 20):
            out, cache = forward(mamba2, ids[:, place : place + 1], mask[:, : place + 1], cache)
            parts.append(out)
        logits.append(torch.cat(parts, dim=1))
    truth, _ = feed(in_fp64(build("mamba2")), (PROMPT, *(1,) * 20))
    own, ours = ((part - truth[rows, PROMPT + 3 : PROMPT + 20]).square().mean() for part in logits)
    assert ours <= 4 * own


@pytest.mark.parametrize("change", ["disable", "another window", "deep copies"])
def test_settings_may_change_while_records_are_pending(mamba2: Any, change: str) -> None:
    truth, _ = feed(in_fp64(mamba2), (PROMPT, *SINGLE))
    own, _ = feed(mamba2, (PROMPT, *SINGLE))
    enable(mamba2, window=7)
    first, cache = feed(mamba2, (PROMPT, *SINGLE[:12]))
    model = mamba2
    if change == "deep copies":
        model, cache = copy.deepcopy((mamba2, cache))
        feed(mamba2, SINGLE[:3])
    else:
        disable(model)
    if change == "another window":
        enable(model, window=2)
    second, _ = feed(model, SINGLE[12:], cache, PROMPT + 12)
    assert error(torch.cat([first, second], dim=1), truth) <= 1.5 * error(own, truth)


def test_a_reset_cache_starts_clean_whatever_its_rings_hold(mamba2: Any) -> None:
    enable(mamba2, window=4)
    first, cache = feed(mamba2, (PROMPT, *SINGLE))
    cache.reset()
    for pool in cache._replayssm_records.pools.values():
        for ring in (pool.value, pool.key, pool.decay):
            ring.fill_(torch.nan)
    second, again = feed(mamba2, (PROMPT, *SINGLE), cache)
    assert again is cache
    assert torch.equal(first, second)


def test_a_corrupt_pending_record_is_noticed(mamba2: Any) -> None:
    truth, _ = feed(in_fp64(mamba2), (PROMPT, *SINGLE))
    own, _ = feed(mamba2, (PROMPT, *SINGLE))
    enable(mamba2, window=16)
    first, cache = feed(mamba2, (PROMPT, *SINGLE[:10]))
    records = cache._replayssm_records
    assert records.cursors.num_committed.tolist() == [10] * ROWS
    records.pools[1].value[0, 2, 7] += 0.5
    second, _ = feed(mamba2, SINGLE[10:], cache, PROMPT + 10)
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


@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h"])
def test_disable_restores_the_model(kind: str) -> None:
    model = build(kind)
    before, attributes, expected = model.state_dict(), traces(model), feed(model, (PROMPT, *SINGLE))[0]
    enable(model)
    generate(model)
    assert traces(model) != attributes
    assert list(model.state_dict()) == list(before)
    disable(model)
    assert traces(model) == attributes
    assert torch.equal(feed(model, (PROMPT, *SINGLE))[0], expected)
    disable(model)


def traces(model: nn.Module) -> list[Any]:
    """Names of the attributes of every module, and how many hooks it has."""
    return [(sorted(vars(m)), *(len(vars(m)[key]) for key in vars(m) if "hooks" in key)) for m in model.modules()]


def test_layer_specs_of_an_enabled_model(mamba2: Any) -> None:
    expected = [replayssm.LayerSpec("mamba2", 4, 2, 16, 16)] * 3
    assert layer_specs(mamba2) == expected
    enable(mamba2)
    assert layer_specs(mamba2) == expected


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
    llama = transformers.LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    with pytest.raises(NotImplementedError, match="Mamba-2"):
        enable(transformers.LlamaForCausalLM(llama))
    assert traces(mamba2) == attributes


def test_the_rate_is_computed_once_for_each_parameter(mamba2: Any) -> None:
    """A new tensor in each step would be prepared and checked anew in each."""
    enable(mamba2)
    mixer = mamba2.backbone.layers[0].mixer
    rate = mixer.forward._decay_rate()
    assert mixer.forward._decay_rate() is rate
    with torch.no_grad():
        mixer.A_log.add_(1.0)
    assert torch.equal(mixer.forward._decay_rate(), -torch.exp(mixer.A_log.detach().float()))
    mixer.A_log.data = mixer.A_log.data + 1.0
    assert torch.equal(mixer.forward._decay_rate(), -torch.exp(mixer.A_log.detach().float()))


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


def test_a_mixer_without_its_convolution_function_is_refused(mamba2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[type(mamba2.backbone.layers[0].mixer).__module__], "causal_conv1d_update")
    with pytest.raises(NotImplementedError, match=rf"{transformers.__version__}.*causal_conv1d_update"):
        enable(mamba2)


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


def test_gradients_are_refused(mamba2: Any) -> None:
    enable(mamba2.requires_grad_(True))
    _, cache = feed(mamba2, (PROMPT,))
    with pytest.raises(NotImplementedError, match="no_grad"):
        feed(mamba2, (1,), cache, PROMPT)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h"])
def test_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    """Head sizes that the kernel takes; continuation, too, since it folds through the kernel."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    sizes = {
        "mamba2": {"num_heads": 4, "head_dim": 64, "state_size": 64, "hidden_size": 128},
        "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 64},
    }
    model = build(kind, **sizes[kind]).cuda()
    model.set_experts_implementation("eager")
    if dtype == torch.float32:
        expected = generate(model)
        enable(model, window=3)
        assert torch.equal(generate(model), expected)
        disable(model)
    assert_as_exact_as_the_model(model.to(dtype), (PROMPT, *SINGLE[:20], 5, *SINGLE[:8]), 3)
