"""Speculative decoding gives the tokens of plain greedy decoding, whatever the drafts are.

Claims: the tokens are those of `model.generate` for drafts that are always right, never right and right now and then;
after every forward the state of each layer, the window of its convolution and the keys and values of attention are
those of a run that has decoded only the tokens that a row kept; a row ends where it would; what cannot be rolled back
is refused before anything runs.

Grid: a model or two of each recurrence, with and without attention, at 1, 3 and 7 drafts and a window of 8, so that
rows fold while drafts are verified, in each forward at 7; the other models that work at 3 drafts. Batch 3 with left
padding, as in all tests of the integration.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import replayssm
from replayssm.integrations.transformers import disable, enable, generate_speculative, prompt_lookup

pytest.importorskip("transformers", minversion="5.17")

from replayssm.integrations import transformers_speculative
from replayssm.integrations.transformers_cache import Verification
from replayssm.integrations.transformers_speculative import Statistics
from tests.integrations.tiny_models import (
    MODELS,
    PROMPT,
    ROWS,
    VOCABULARY,
    build,
    generate,
    model_of,
    tokens,
)

Propose = Callable[[list[int], int], list[int]]
COUNT, WINDOW = 25, 8
DEEP = ("mamba2", "nemotron_h", "qwen3_next", "qwen3_5", "kimi_linear")
REFUSED = ("qwen4_exp", "glm5_next")
OTHERS = [kind for kind in MODELS if kind not in (*DEEP, *REFUSED)]
each_recurrence = pytest.mark.parametrize("kind", ["nemotron_h", "qwen3_5", "kimi_linear"])


@functools.cache
def expected_of(kind: str) -> Tensor:
    """The prompts and COUNT tokens of plain greedy decoding, without ReplaySSM."""
    return generate(model_of(kind), COUNT)


def rows_of(sequences: Tensor) -> list[list[int]]:
    mask = tokens()[1][:, :PROMPT].bool()
    prompts = [row[:PROMPT][live].tolist() for row, live in zip(sequences, mask, strict=True)]
    return [[*prompt, *row[PROMPT:].tolist()] for prompt, row in zip(prompts, sequences, strict=True)]


def drafts(expected: Tensor, right: float) -> Propose:
    """Drafts of which each token is right with a probability, 1 always, 0 never; none for a row that went wrong."""
    rows, draw = rows_of(expected), random.Random(3).random

    def propose(known: list[int], num_draft: int) -> list[int]:
        row = next((row for row in rows if row[: len(known)] == known), None)
        wanted = (row + row[-1:] * num_draft)[len(known) : len(known) + num_draft] if row else []
        return [token if draw() < right else (token + 1) % VOCABULARY for token in wanted]

    return propose


def speculate(model: Any, num_draft: int = 3, **options: Any) -> tuple[Tensor, Statistics]:
    """`generate_speculative` on the prompts of all tests, with a model that is enabled for it alone."""
    ids, mask = (t[:, :PROMPT].to(model.device) for t in tokens())
    enable(model, window=WINDOW, max_draft=1 + num_draft)
    try:
        options = {"max_new_tokens": COUNT, "num_draft": num_draft, **options}
        return generate_speculative(model, ids, attention_mask=mask, **options)
    finally:
        disable(model)


@pytest.mark.parametrize("right", [1.0, 0.0, 0.6], ids=["all right", "none right", "mixed"])
@pytest.mark.parametrize("num_draft", [1, 3, 7])
@pytest.mark.parametrize("kind", DEEP)
def test_tokens_are_those_of_greedy_decoding(
    kind: str, num_draft: int, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    folds = count_folds(monkeypatch)
    sequences, saved = speculate(model_of(kind), num_draft, propose=drafts(expected_of(kind), right))
    assert torch.equal(sequences, expected_of(kind))
    assert sum(folds) > 0, "no row folded while drafts were verified"
    assert saved.plain_steps == COUNT - 1
    assert all(sum(row) == COUNT - 1 for row in saved.accepted)
    if right == 1:
        assert saved.steps == -(-(COUNT - 1) // (1 + num_draft))
    elif right == 0:
        assert (saved.steps, saved.mean_accepted) == (COUNT - 1, 1.0)
    else:
        assert COUNT // (1 + num_draft) < saved.steps < COUNT - 1
        assert 1 < saved.mean_accepted < 1 + num_draft
        assert len({tuple(row) for row in saved.accepted}) == ROWS, "rows that accept alike prove little"
    assert saved.steps_saved == saved.plain_steps - saved.steps


def count_folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows fold, for each commit of several tokens."""
    folds, commit = list[int](), replayssm.commit

    def counted(cursors: Any, *, num_draft: int = 1, **options: Any) -> None:
        if num_draft > 1:
            folds.append(int((cursors.num_committed + num_draft > cursors.replay.window).sum()))
        commit(cursors, num_draft=num_draft, **options)

    monkeypatch.setattr(replayssm, "commit", counted)
    return folds


@pytest.mark.parametrize("kind", OTHERS)
def test_the_other_models_decode_the_same(kind: str) -> None:
    sequences, saved = speculate(model_of(kind), propose=drafts(expected_of(kind), 0.6))
    assert torch.equal(sequences, expected_of(kind))
    assert saved.steps_saved > 0


@pytest.mark.parametrize("kind", DEEP)
def test_prompt_lookup_changes_no_token(kind: str) -> None:
    sequences, saved = speculate(model_of(kind), 4)
    assert torch.equal(sequences, expected_of(kind))
    assert saved.mean_accepted >= 1


class Held:
    """What a cache holds for one row: states and convolution windows of all layers, keys and values of kept tokens."""

    def __init__(self, cache: Any, row: int, live: Tensor) -> None:
        self.parts: list[tuple[str, Tensor]] = []
        for index, layer in enumerate(cache.layers):
            for name in ("conv_states", "recurrent_states"):
                state = getattr(layer, name, {}).get(0)
                if state is not None:
                    self.parts.append((f"{name} of layer {index}", state[row].clone()))
            if getattr(layer, "keys", None) is not None:
                for name in ("keys", "values"):
                    self.parts.append((f"{name} of layer {index}", getattr(layer, name)[row][:, live]))

    def differences(self, other: Held) -> dict[str, float]:
        """The relative error of each part; infinite for another shape."""
        pairs = zip(self.parts, other.parts, strict=True)
        return {
            name: ((a - b).norm() / b.norm()).item() if a.shape == b.shape else float("inf")
            for (name, a), (_, b) in pairs
        }


def held_after_each_token(kind: str) -> list[list[Held]]:
    """Of a run that decodes the expected tokens one by one, without ReplaySSM: [tokens kept][row]."""
    call, ids, held = transformers_speculative._Forward(model_of(kind)), expected_of(kind), list[list[Held]]()
    mask = torch.cat([tokens()[1][:, :PROMPT], torch.ones_like(ids[:, PROMPT:])], dim=1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    for start, end in ((0, PROMPT), *((place, place + 1) for place in range(PROMPT, PROMPT + COUNT - 1))):
        call(ids[:, start:end], mask[:, :end], places[:, start:end], keep=1)
        held.append([Held(call.cache, row, mask[row, :end].bool()) for row in range(ROWS)])
    return held


def worst_differences(kind: str, monkeypatch: pytest.MonkeyPatch, num_draft: int = 3) -> dict[str, float]:
    """The largest difference of each part, over rows and forwards, from the run that decodes one by one."""
    reference, kept, worst = held_after_each_token(kind), [0] * ROWS, dict[str, float]()
    accept = transformers_speculative._Forward.accept

    def watched(self: Any, counts: list[int], mask: Tensor) -> Tensor:
        mask, cache = accept(self, counts, mask), copy.deepcopy(self.cache)  # reading a state folds
        for row, count in enumerate(counts):
            kept[row] += count
            if kept[row] < COUNT:
                held = Held(cache, row, mask[row].bool())
                for name, difference in held.differences(reference[kept[row]][row]).items():
                    worst[name] = max(worst.get(name, 0.0), difference)
        return mask

    monkeypatch.setattr(transformers_speculative._Forward, "accept", watched)
    speculate(model_of(kind), num_draft, propose=drafts(expected_of(kind), 0.6))
    return worst


@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h", "zamba2", "qwen3_next", "kimi_linear"])
def test_after_each_forward_the_cache_is_that_of_the_kept_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worst = worst_differences(kind, monkeypatch)
    assert sum(name.startswith("conv_states") for name in worst) >= 2
    assert kind == "mamba2" or any(name.startswith("keys") for name in worst)
    assert max(worst.values()) < 1e-4, worst


def keep_all_inputs(verification: Verification, num_accepted: Tensor) -> None:
    """The convolution goes on from the rejected drafts, as the models' own code would leave it."""
    for state, seen in verification.windows:
        state.copy_(seen[..., -state.shape[-1] :])
    verification.windows.clear()


def keep_one_input_more(verification: Verification, num_accepted: Tensor) -> None:
    verification.windows = [
        (state, torch.nn.functional.pad(seen, (0, 1))[..., 1:]) for state, seen in verification.windows
    ]


def keep_all_records(verification: Verification, num_accepted: Tensor) -> None:
    num_accepted.fill_(verification.num_tokens)


FAULTS = [keep_all_inputs, keep_one_input_more, keep_all_records]


def with_fault(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Verification, Tensor], None]) -> None:
    accept = Verification.accept

    def faulty(self: Verification, num_accepted: Tensor) -> None:
        num_accepted = num_accepted.clone()
        fault(self, num_accepted)
        accept(self, num_accepted)

    monkeypatch.setattr(Verification, "accept", faulty)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@each_recurrence
def test_a_state_that_is_not_rolled_back_changes_tokens(
    kind: str, fault: Callable[[Verification, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, fault)
    sequences, _ = speculate(model_of(kind), propose=drafts(expected_of(kind), 0.0))
    assert not torch.equal(sequences, expected_of(kind))


@pytest.mark.parametrize(("fault", "part"), [(keep_all_inputs, "conv_states"), (keep_all_records, "recurrent_states")])
def test_a_state_that_is_not_rolled_back_is_seen_in_the_cache(
    fault: Callable[[Verification, Tensor], None], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, fault)
    worst = worst_differences("qwen3_5", monkeypatch)
    assert max(value for name, value in worst.items() if name.startswith(part)) > 0.01


@each_recurrence
def test_keys_of_rejected_drafts_that_stay_visible_change_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = transformers_speculative._Forward.accept
    monkeypatch.setattr(transformers_speculative._Forward, "accept", lambda *given: torch.ones_like(accept(*given)))
    assert not torch.equal(speculate(model_of(kind), propose=drafts(expected_of(kind), 0.6))[0], expected_of(kind))


def plainly(model: Any, **options: Any) -> Tensor:
    ids, mask = (t[:, :PROMPT] for t in tokens())
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=COUNT, do_sample=False, **options)


@pytest.mark.parametrize("right", [1.0, 0.6])
@each_recurrence
def test_a_row_ends_at_its_eos_and_is_padded_as_generate_does(kind: str, right: float) -> None:
    """Tokens that come up in the middle of what the rows decode, in two rows and in all."""
    model, decoded = model_of(kind), expected_of(kind)[:, PROMPT:]
    for rows in ((0, 1), range(ROWS)):
        eos = sorted({int(decoded[row, 7 + 2 * row]) for row in rows})
        expected = plainly(model, eos_token_id=eos)
        assert torch.equal(speculate(model, eos_token_id=eos, propose=drafts(expected_of(kind), right))[0], expected)
        assert (expected[:, PROMPT:] == 0).any(), "no row was padded"


def test_eos_is_that_of_the_model_unless_given() -> None:
    model = build("mamba2")
    expected = expected_of("mamba2")
    model.generation_config.eos_token_id = eos = int(expected[0, PROMPT + 5])
    assert torch.equal(speculate(model)[0], plainly(model))
    assert not torch.equal(speculate(model)[0], expected)
    assert torch.equal(speculate(model, eos_token_id=[])[0], expected)
    model.generation_config.pad_token_id = None
    assert speculate(model, eos_token_id=eos)[0][0, -1] == eos


def test_fewer_tokens_are_a_prefix_and_one_takes_no_forward() -> None:
    for count in (1, 2, 6):
        sequences, saved = speculate(model_of("nemotron_h"), max_new_tokens=count)
        assert torch.equal(sequences, expected_of("nemotron_h")[:, : PROMPT + count])
        assert saved.plain_steps == count - 1
    sequences, saved = speculate(model_of("nemotron_h"), max_new_tokens=1)
    assert (saved.steps, saved.mean_accepted, saved.accepted) == (0, 1.0, [[]] * ROWS)


def test_a_prompt_without_padding_needs_no_mask() -> None:
    model, ids = build("qwen3_next"), tokens()[0][:1, :PROMPT]
    expected = model.generate(ids, max_new_tokens=10, do_sample=False)
    enable(model, window=5, max_draft=4)
    assert torch.equal(generate_speculative(model, ids, max_new_tokens=10, num_draft=2)[0], expected)


@each_recurrence
def test_a_model_that_may_verify_drafts_also_decodes_as_ever(kind: str) -> None:
    model = build(kind)
    enable(model, window=5, max_draft=4)
    ids, mask = (t[:, :PROMPT] for t in tokens())
    for _ in range(2):
        assert torch.equal(generate(model, COUNT), expected_of(kind))
        sequences, _ = generate_speculative(model, ids, attention_mask=mask, max_new_tokens=COUNT, num_draft=3)
        assert torch.equal(sequences, expected_of(kind))


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),  # three tokens match
        ([5, 2, 3, 7, 8, 2, 3], [7, 8, 2, 3]),  # two do
        ([3, 7, 4, 4, 5, 3], [7, 4, 4, 5]),  # one does
        ([3, 1, 3, 2, 3], [2, 3, 2, 3]),  # the last match counts, and goes on with its own tokens
        ([1, 6, 6], [6, 6, 6, 6]),
        ([9, 2, 3, 7, 2, 3, 8, 9, 2, 3], [7, 2, 3, 8]),  # the longest match counts, not the last
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_prompt_lookup_proposes_what_followed_before(known: list[int], expected: list[int]) -> None:
    given = list(known)
    assert prompt_lookup(known, 4) == expected
    assert known == given


@pytest.mark.parametrize("kind", REFUSED)
def test_caches_that_cannot_be_rolled_back_are_refused(kind: str) -> None:
    with pytest.raises(NotImplementedError, match=r"rolled back .*DynamicLayer.* got .* in layer \d"):
        speculate(model_of(kind))


def test_refused_arguments() -> None:
    model, (ids, mask) = build("mamba2"), (t[:, :PROMPT] for t in tokens())
    with pytest.raises(RuntimeError, match="call enable"):
        generate_speculative(model, ids, max_new_tokens=2)
    for max_draft in (0, 9, 17):
        with pytest.raises(ValueError, match="max_draft"):
            enable(model, window=WINDOW, max_draft=max_draft)
    enable(model, window=WINDOW, max_draft=4)
    good = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4, "num_draft": 3}
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, r"num_draft: expected 1 to 3, .*got 4; call disable.*max_draft=5", {"num_draft": 4}),
        (ValueError, "num_draft: .*got 0", {"num_draft": 0}),
        (ValueError, "max_new_tokens: .*got 0", {"max_new_tokens": 0}),
        (TypeError, "input_ids: .*float32", {"input_ids": ids.float()}),
        (ValueError, r"input_ids: .*\(9,\)", {"input_ids": ids[0]}),
        (ValueError, r"attention_mask: expected \(3, 9\)", {"attention_mask": mask[:, 1:]}),
        (NotImplementedError, "attention_mask: .*left", {"attention_mask": mask.flip(1)}),
        (NotImplementedError, "attention_mask: .*left", {"attention_mask": mask * 0}),
        (ValueError, "propose: expected up to num_draft = 3 tokens, got 4", {"propose": lambda *_: [5] * 4}),
    ]
    for kind, message, change in bad:
        with pytest.raises(kind, match=message):
            generate_speculative(model, **{**good, **change})
    assert torch.equal(generate_speculative(model, **good)[0], expected_of("mamba2")[:, : PROMPT + 4])


@pytest.mark.gpu
@pytest.mark.parametrize("right", [1.0, 0.0, 0.6], ids=["all right", "none right", "mixed"])
@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h", "qwen3_next", "qwen3_5"])
def test_on_a_gpu(kind: str, right: float) -> None:
    """Head sizes that the kernels take."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    sizes = {
        "mamba2": {"num_heads": 4, "head_dim": 64, "state_size": 64, "hidden_size": 128},
        "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 64},
        "qwen3_next": {"linear_key_head_dim": 64, "linear_value_head_dim": 128},
        "qwen3_5": {"linear_key_head_dim": 128, "linear_value_head_dim": 64},
    }
    model = build(kind, **sizes[kind]).cuda()
    model.set_experts_implementation("eager")
    expected = generate(model, COUNT).cpu()
    for num_draft in (1, 3, 7):
        sequences, _ = speculate(model, num_draft, propose=drafts(expected, right))
        assert torch.equal(sequences.cpu(), expected)
