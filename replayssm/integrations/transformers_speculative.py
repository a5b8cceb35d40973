"""Speculative greedy decoding of Hugging Face models: drafts from the row's own tokens, verified in one forward.

The loop of `replayssm.integrations.transformers.generate_speculative`. The cache stays rectangular: a forward appends T
columns to the keys and values of every row, those that no row keeps are cut off again, and those that only some rows
keep are masked in the others. The positions of a row's tokens count what it has kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replayssm.integrations.transformers_cache import Verification

Propose = Callable[[list[int], int], Sequence[int]]
# By name: the classes of transformers are known inside functions only. Their keys and values are [..., columns, width];
# a dummy, of a layer without a cache, has none.
CROPPABLE = ("DynamicLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer", "DummyLayer")


@dataclass
class Statistics:
    """What verification was worth.

    Args:
        steps: forwards after that of the prompts.
        plain_steps: forwards that decoding a token at a time takes for the longest row.
        accepted: for each row, the tokens that each of its forwards gave it: kept drafts and the one after them, up to
            where the row ended.
    """

    steps: int = 0
    plain_steps: int = 0
    accepted: list[list[int]] = field(default_factory=list)

    @property
    def mean_accepted(self) -> float:
        """Tokens a row and forward; 1 is what decoding without drafts gives, and what no forward at all counts as."""
        lengths = [length for row in self.accepted for length in row]
        return sum(lengths) / len(lengths) if lengths else 1.0

    @property
    def steps_saved(self) -> int:
        """Forwards that decoding a token at a time would have taken beyond these."""
        return self.plain_steps - self.steps


def prompt_lookup(tokens: list[int], num_draft: int, *, longest: int = 3) -> list[int]:
    """What followed the last tokens of a row where they stood before, most recently; nothing if they never did.

    Args:
        tokens: of the row, prompt included.
        num_draft: tokens to propose. A match close to the end goes on with what it proposes itself.
        longest: tokens to match, at most; the longest match counts.
    """
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                known = list(tokens)
                for place in range(start + size, start + size + num_draft):
                    known.append(known[place])
                return known[len(tokens) :]
    return []


def decode(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    num_draft: int,
    max_new_tokens: int,
    eos: int | Sequence[int] | None,
    propose: Propose,
) -> tuple[Tensor, Statistics]:
    """The loop of `generate_speculative`, which says what the arguments are."""
    mask = _checked_mask(input_ids, attention_mask)
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected an int of 1 or more, got {max_new_tokens!r}")
    stops, padding = _special_tokens(model, eos)
    call = _Forward(model)
    rows = [
        _Row(ids[live].tolist(), max_new_tokens, stops)
        for ids, live in zip(input_ids.cpu(), mask.bool().cpu(), strict=True)
    ]
    logits = call(input_ids, mask, (mask.cumsum(1) - 1).clamp(min=0), keep=1)
    for row, token in zip(rows, logits[:, -1].argmax(-1).tolist(), strict=True):
        row.take([token])

    statistics = Statistics(accepted=[[] for _ in rows])
    while not all(row.ended for row in rows):
        drafts = [_exactly(num_draft, row, propose) for row in rows]
        ids = torch.tensor([[row.tokens[-1], *draft] for row, draft in zip(rows, drafts, strict=True)])
        choices = call.verify(ids.to(input_ids.device), mask).argmax(-1).tolist()
        kept = []
        for row, draft, chosen, lengths in zip(rows, drafts, choices, statistics.accepted, strict=True):
            count = 0 if row.ended else 1 + _agreement(draft, chosen)
            if count:
                lengths.append(row.take(chosen[:count]))
            kept.append(count)
        mask = call.accept(kept, mask)
        statistics.steps += 1
    width = max(len(row.decoded) for row in rows)
    statistics.plain_steps = width - 1
    decoded = [row.decoded + [padding] * (width - len(row.decoded)) for row in rows]
    return torch.cat([input_ids, torch.tensor(decoded).to(input_ids)], dim=1), statistics


class _Row:
    """The tokens of one row; the last one is not in the cache yet."""

    def __init__(self, prompt: list[int], max_new_tokens: int, stops: set[int]) -> None:
        self.tokens, self.start = prompt, len(prompt)
        self.limit, self.stops = len(prompt) + max_new_tokens, stops
        self.ended = False

    @property
    def decoded(self) -> list[int]:
        return self.tokens[self.start :]

    def take(self, tokens: list[int]) -> int:
        """Append tokens until one ends the row; gives how many were."""
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            self.ended = token in self.stops or len(self.tokens) == self.limit
            if self.ended:
                return count
        return len(tokens)


class _Forward:
    """Calls of one model on a new cache; a verification is open between `verify` and `accept`."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        parameters = set(inspect.signature(type(model).forward).parameters)
        names = {"cache", "cache_params", "past_key_values"} & parameters
        if len(names) != 1 or "logits_to_keep" not in parameters:
            raise NotImplementedError(
                "model: expected a causal language model of transformers, whose forward takes a cache and "
                f"logits_to_keep, got {type(model).__name__}"
            )
        self.model, self.cache_name = model, names.pop()
        self.takes_positions = "position_ids" in parameters
        self.cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self.verification: Verification | None = None
        for index, layer in enumerate(self.cache.layers):
            states = getattr(layer, "number_of_states", 1)
            if type(layer).__name__ not in CROPPABLE or states != 1:
                raise NotImplementedError(
                    f"model: expected caches that can be rolled back ({', '.join(CROPPABLE)}, one state each), got "
                    f"{type(layer).__name__} with {states} in layer {index}; decode this model with model.generate"
                )

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor, *, keep: int) -> Tensor:
        """Logits of the last `keep` tokens, [rows, keep, vocabulary]; `mask` covers what is cached and `ids`."""
        options = {"position_ids": positions} if self.takes_positions else {}
        options[self.cache_name] = self.cache
        return self.model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=keep, **options).logits

    def verify(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits of T tokens a row, [rows, T, vocabulary], after what is cached, of which `mask` says what is kept."""
        count = ids.shape[1]
        self.verification = Verification(self.cache, count)
        positions = mask.sum(1, keepdim=True) + torch.arange(count, device=ids.device)
        return self(ids, torch.cat([mask, torch.ones_like(ids)], dim=1), positions, keep=count)

    def accept(self, kept: list[int], mask: Tensor) -> Tensor:
        """Keep the first tokens of each row from the last `verify`; gives the mask of what is cached then."""
        assert self.verification is not None
        num_accepted = torch.tensor(kept, dtype=torch.int32, device=mask.device)
        self.verification.accept(num_accepted)
        rejected = self.verification.num_tokens - max(kept)
        for layer in self.cache.layers if rejected else ():
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[..., :-rejected, :], layer.values[..., :-rejected, :]
        columns = torch.arange(max(kept), device=mask.device)
        return torch.cat([mask, (columns < num_accepted[:, None]).to(mask.dtype)], dim=1)


def _agreement(draft: list[int], chosen: list[int]) -> int:
    """Drafts that the model would have decoded itself, up to the first one that it would not."""
    pairs = enumerate(zip(draft, chosen, strict=False))
    return next((place for place, (drafted, token) in pairs if drafted != token), len(draft))


def _exactly(num_draft: int, row: _Row, propose: Propose) -> list[int]:
    """The drafts of a row, filled up with its last token: every row verifies as many."""
    draft = [] if row.ended else [int(token) for token in propose(list(row.tokens), num_draft)]
    if len(draft) > num_draft:
        raise ValueError(f"propose: expected up to num_draft = {num_draft} tokens, got {len(draft)}")
    return draft + [row.tokens[-1]] * (num_draft - len(draft))


def _checked_mask(input_ids: object, attention_mask: object) -> Tensor:
    """The mask of the prompts as int64, all ones when there is none."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"input_ids: expected a tensor of int64, got {getattr(input_ids, 'dtype', type(input_ids))}")
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids: expected [rows, length] of 1 or more each, got {tuple(input_ids.shape)}")
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.int64)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
        got = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(f"attention_mask: expected {tuple(input_ids.shape)} as input_ids, got {got}")
    mask = (attention_mask != 0).to(input_ids.device, torch.int64)
    if bool((mask[:, 1:] < mask[:, :-1]).any()) or not bool(mask[:, -1].all()):
        raise NotImplementedError(
            "attention_mask: expected padding on the left only and a token in every row, got another mask; tokenize "
            "with padding_side='left'"
        )
    return mask


def _special_tokens(model: Any, eos: int | Sequence[int] | None) -> tuple[set[int], int]:
    """The tokens that end a row, and the one that fills up rows that have ended, as `generate` chooses it."""
    settings = getattr(model, "generation_config", None)
    if eos is None:
        eos = getattr(settings, "eos_token_id", None)
    stops = [] if eos is None else [eos] if isinstance(eos, int) else [int(token) for token in eos]
    padding = getattr(settings, "pad_token_id", None)
    return set(stops), padding if padding is not None else stops[0] if stops else 0
