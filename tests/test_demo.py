"""The demo tells the truth: it reports equal tokens only where they are, and its figures follow the stated formulas.

Speculative decoding is part of every run here, so that each kind of model verifies drafts once.
"""

from __future__ import annotations

import re

import pytest
import torch

import replayssm
from replayssm import demo
from replayssm.integrations import transformers as hugging_face

pytest.importorskip("transformers", minversion="5.17")
QUICK = ["--model", "mamba2", "--tokens", "18", "--window", "4", "--batch", "3", "--device", "cpu"]


def shorten(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Five layers of a model, every fourth with attention."""
    kinds = ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
    prefix, fields = demo.MODELS[kind]
    fields = {**fields, "num_hidden_layers": 5, "layer_types": kinds, "linear_attn_config": {}}
    monkeypatch.setitem(demo.MODELS, kind, (prefix, fields))
    monkeypatch.setattr(demo, "TEXT", demo.TEXT[:60])


def test_equal_tokens_are_reported_and_everything_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(QUICK) == 0
    out = capsys.readouterr().out
    assert "Decoded tokens identical (fp32): yes, 54 compared" in out
    assert "Speculative decoding, 3 drafts a row verified in one forward:" in out
    assert out.count("identical tokens yes") == 2
    known = re.search(
        r"plain run, one in five spoiled: .*; (\S+) tokens a row .*; (\d+) forwards for 18 .* (\d+) saved", out
    )
    assert known is not None
    assert 2 < float(known[1]) < 4
    assert int(known[2]) + int(known[3]) == 17
    assert int(known[3]) > 5
    assert "16 Mamba-2 layers (from the formula, not measured)" in out
    assert "kernel times and the read limit: not measured, no GPU is used" in out
    difference = re.search(r"Largest logit difference: (\S+),", out)
    assert difference is not None
    assert 0 < float(difference[1]) < 1e-3
    assert re.search(r"plain +18 of 18 tokens\n.*ReplaySSM +prompt read\n", out, re.S)


def test_the_hybrid_model_has_the_published_pattern_and_decodes_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "TEXT", demo.TEXT[:40])
    assert demo.main(["--tokens", "5", "--window", "2", "--batch", "2", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert demo.NANO_30B_PATTERN in out
    assert [demo.NANO_30B_PATTERN.count(kind) for kind in "ME*"] == [23, 23, 6]
    assert "num_v_heads=8, num_k_heads=2, head_dim=64, d_state=128" in out


@pytest.mark.parametrize(
    ("kind", "letter", "name", "layer"),
    [
        ("qwen3_next", "G", "Gated DeltaNet", "'gdn', num_v_heads=4, num_k_heads=2"),
        ("qwen3_5", "G", "Gated DeltaNet", "'gdn', num_v_heads=4, num_k_heads=2"),
        ("kimi_linear", "K", "Kimi Delta Attention", "'kda', num_v_heads=2, num_k_heads=2"),
    ],
)
def test_each_kind_of_model_decodes_the_same(
    kind: str, letter: str, name: str, layer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, kind)
    assert demo.main(["--model", kind, "--tokens", "10", "--window", "4", "--batch", "2", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert f"Model: {letter * 3}*{letter}\n" in out
    assert f"LayerSpec(recurrence={layer}, head_dim=128, d_state=128)" in out
    assert "Decoded tokens identical (fp32): yes, 20 compared" in out
    assert out.count("identical tokens yes") == 2
    assert f"4 {name} layers (from the formula, not measured)" in out


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "kimi_linear"])
def test_the_layers_are_those_of_the_published_model(kind: str) -> None:
    """Three of four layers, but for the two that end Kimi-Linear: 20 of 27, the last with attention."""
    with torch.device("meta"):
        model = demo.build_model(kind, torch.device("meta"))
    expected = {"qwen3_next": "GGG*" * 12, "qwen3_5": "GGG*" * 8, "kimi_linear": "KKK*" * 6 + "KK*"}
    assert demo.layer_pattern(model) == expected[kind]


@pytest.mark.parametrize("kind", ["qwen3_5", "kimi_linear"])
def test_different_tokens_fail_in_each_kind(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, kind)
    forget_records(monkeypatch)
    assert demo.main(["--model", kind, "--tokens", "10", "--batch", "2", "--device", "cpu"]) == 1
    assert "Decoded tokens identical (fp32): NO" in capsys.readouterr().out


def forget_records(monkeypatch: pytest.MonkeyPatch) -> None:
    step = replayssm.step

    def forgetful(pool: replayssm.Pool, *args: object, **kwargs: object) -> torch.Tensor:
        pool.value.zero_()
        return step(pool, *args, **kwargs)

    monkeypatch.setattr(replayssm, "step", forgetful)


def test_different_tokens_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    forget_records(monkeypatch)
    assert demo.main(QUICK) == 1
    assert "Decoded tokens identical (fp32): NO" in capsys.readouterr().out


def test_different_tokens_of_speculative_decoding_alone_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = replayssm.commit

    def keep_all(*args: object, num_accepted: torch.Tensor | None = None, **kwargs: object) -> None:
        commit(*args, **kwargs)

    monkeypatch.setattr(replayssm, "commit", keep_all)
    assert demo.main(QUICK) == 1
    out = capsys.readouterr().out
    assert "Decoded tokens identical (fp32): yes, 54 compared" in out
    assert "identical tokens NO" in out


@pytest.mark.parametrize("reason", ["a window of 1", "no kernel"])
def test_speculative_decoding_that_cannot_run_says_so(
    reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("no kernel for 4 tokens")

    monkeypatch.setattr(hugging_face, "generate_speculative", refuse)
    model, device = demo.build_model("mamba2", torch.device("cpu")), torch.device("cpu")
    prompts, expected = demo.encode("a few words", 2, device), torch.zeros(2, 5, dtype=torch.long)
    assert demo.report_speculation(model, prompts, expected, window=1 if reason == "a window of 1" else 4)
    assert f"not run: {reason}" in capsys.readouterr().out


def test_known_drafts_are_right_as_often_as_they_say() -> None:
    text = torch.randint(demo.PAD, (1000,)).tolist()
    for right in (0.0, 0.8, 1.0):
        propose = demo.known_drafts([[0], text], right=right)
        drafts = [propose(text[:place], 4) for place in range(1, 997)]
        hits = [token == text[place + 1 + i] for place, draft in enumerate(drafts) for i, token in enumerate(draft)]
        assert sum(hits) / len(hits) == pytest.approx(right, abs=0.05)
    assert propose(text[:998], 4) == text[998:]
    assert propose([*text[:5], -1], 4) == []


def test_prompts_are_the_text_byte_by_byte_padded_on_the_left() -> None:
    for batch in (1, 4, 16):
        prompts = demo.encode(demo.TEXT, batch, torch.device("cpu"))
        ids, mask = prompts["input_ids"], prompts["attention_mask"].bool()
        assert len(ids) == batch
        assert torch.equal(mask, ids != demo.PAD)
        assert torch.equal(mask, mask.sort(dim=1, stable=True).values)
        texts = [bytes(row[live].tolist()).decode() for row, live in zip(ids, mask, strict=True)]
        assert all(text and text in demo.TEXT for text in texts)
        assert batch == 1 or len({len(text) for text in texts}) > 1


def test_state_traffic_of_a_nemotron_3_super_layer() -> None:
    replay = replayssm.ReplaySpec(16, activation_dtype=torch.bfloat16)
    state = 128 * 64 * 128 * 4
    record = 128 * 64 * 2 + 8 * 128 * 2 + 128 * 4
    traffic = demo.state_traffic(demo.SUPER_LAYER, replay)
    assert traffic["plain"] == (state, state)
    # A window of 16 steps reads 1 to 16 records: the step that folds reads all of them and leaves its own.
    reads = sum(state + live * record for live in range(1, 17)) / 16
    assert traffic["ReplaySSM"] == pytest.approx((reads, (16 * record + state) / 16))


@pytest.mark.parametrize("arguments", [["--tokens", "1"], ["--batch", "0"], ["--batch", "17"], ["--model", "gpt"]])
def test_bad_arguments_exit_with_a_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(arguments)
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("recurrence", list(demo.RECURRENCES))
def test_random_inputs_fit_the_layer_that_is_timed(recurrence: str) -> None:
    layer, replay = demo.RECURRENCES[recurrence][3], replayssm.ReplaySpec()
    pool, cursors = replayssm.make_pool(layer, replay, 1), replayssm.make_cursors(replay, 1)
    inputs = demo.random_inputs(layer, 1, torch.device("cpu"))
    out = replayssm.step(pool, cursors, inputs, cache_indices=torch.zeros(1, dtype=torch.int32))
    assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("recurrence", list(demo.RECURRENCES))
def test_kernel_times_are_printed_on_a_gpu(recurrence: str, capsys: pytest.CaptureFixture[str]) -> None:
    demo.report_kernel(torch.device("cuda"), recurrence=recurrence, rows=64)
    times = [float(time) for time in re.findall(r"([\d.]+) us", capsys.readouterr().out)]
    assert len(times) == 3
    reading, folding, limit = times
    assert 0.5 * limit < reading < folding
