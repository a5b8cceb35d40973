"""The scores of a CTA of `verify`: products of probes with the window's records and with the tokens, weighed by head.

A CTA of one head weighs each score as it is made. One of several heads keeps the scores as they are, and the warps of
each head weigh them; those of one token are weighed where they are used (`Scores.lone_weights`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from cute_kernels.draft_loads import Draft, load_probes
from cute_kernels.drafts import Cta
from cute_kernels.primitives.arithmetic import select
from cute_kernels.primitives.control import when
from cute_kernels.primitives.convert import pack, unpack
from cute_kernels.primitives.memory import store_words_if
from cute_kernels.primitives.reduce import broadcast
from cute_kernels.records import leads_group
from cute_kernels.replay.cursor import RowCursor
from cute_kernels.replay.draft import score_block


@dataclass(frozen=True)
class Scoring:
    """The blocks of records that a warp scores, and what it makes of the scores.

    Args:
        probes: what `load_probes` loaded.
        factors: what `ProbeParts.factors` found.
    """

    cta: Cta
    cursor: RowCursor
    probes: list[list[list[Uint32]]]
    factors: list[list[Any]]

    @property
    def pairs(self) -> list[list[int]]:
        """The probe blocks that are scored together."""
        blocks = self.cta.shape.probe_blocks
        return [list(range(b, min(b + 2, blocks))) for b in range(0, blocks, 2)]

    def each_block(
        self, warp: Any, warps: int, of_window: Callable[[int], None], of_tokens: Callable[[int, Any], None]
    ) -> None:
        """Call one of the two, with the step and the block of tokens, for each block of records of a warp of some."""
        shape = self.cta.shape
        for step in range(-(-shape.record_blocks // warps)):
            block = warp + warps * step - shape.window_columns // 8
            group = (block + shape.window_columns // 8) // 2  # a window of one group is always scored
            scored = Boolean(True)
            if shape.window_columns > 16:
                scored = (group * 16 < self.cursor.count) | (group == 0)
            when((block < 0) & scored, functools.partial(of_window, step))
            when((block >= 0) & (block < shape.token_blocks), functools.partial(of_tokens, step, block))

    def column(self, warp: Any, warps: int, step: int) -> Any:
        """The first of the two columns of the scores that this lane has in a block of a warp of some."""
        return (warp + warps * step) * 8 + self.cta.place.lane % 4 * 2

    def score(self, keys: list[list[Uint32]], zero: Any, draft: Draft | None) -> None:
        """Score the records with every probe, append the keys of tokens among them, and weigh them unless `draft`,
        which says how, is None.

        `zero` is what sums start from.
        """
        cta, shape, (warp, warps) = self.cta, self.cta.shape, self.cta.scorer
        first = warp * 8 + cta.place.lane // 4
        rows = [first + 8 * warps * step for step in range(len(keys))]
        vectors = cta.vectors(keys, [select(r < shape.window_columns, r, Int32(0)) for r in rows])

        def raw(probes: Any, pair: list[int], step: int) -> list[Float32]:
            return score_block(probes, pair, vectors, step, cta.terms, zero, tf32=shape.tf32 and shape.channels)

        def of_window(step: int) -> None:
            probes = cta.probes(load_probes(cta) if shape.loads_probes_anew else self.probes)
            for pair in self.pairs:
                self.keep_window(step, pair, raw(probes, pair, step), draft)

        def of_tokens(step: int, block: Any) -> None:
            weights = None if draft is None else self.start_tokens(draft, block)
            for pair in self.pairs:
                found = (
                    cta.scores.load_sums(pair, block) if shape.channels else raw(cta.probes(self.probes), pair, step)
                )
                self.keep_tokens(step, block, pair, found, draft, weights)
            append_key(cta, self.cursor, block * 8 + cta.place.lane // 4, keys[step], self.key_factor(block))

        self.each_block(warp, warps, of_window, of_tokens)

    def weigh(self, draft: Draft) -> None:
        """Weigh what `score` left as it was."""
        raw, own = self.cta.raw_scores, (self.cta.place.warp, self.cta.shape.warps)

        def of_window(step: int) -> None:
            for pair in self.pairs:
                self.keep_window(step, pair, raw.load_pairs(pair, self.column(*own, step)), draft)

        def of_tokens(step: int, block: Any) -> None:
            weights = self.start_tokens(draft, block)
            for pair in self.pairs:
                self.keep_tokens(step, block, pair, raw.load_pairs(pair, self.column(*own, step)), draft, weights)

        self.each_block(*own, of_window, of_tokens)

    def keep_window(self, step: int, pair: list[int], raw: list[Any], draft: Draft | None) -> None:
        if draft is None:
            self.keep(step, pair, raw)
            return
        factors = draft.row_factors()
        self.cta.scores.store_window(pair, raw, step, [factors[b] for b in pair], draft.decays, self.cta.place.warp)

    def keep_tokens(
        self, step: int, block: Any, pair: list[int], raw: list[Any], draft: Draft | None, weights: list[Any] | None
    ) -> None:
        if draft is None or weights is None:
            self.keep(step, pair, raw)
            return
        factors = draft.row_factors()
        self.cta.scores.store_tokens(block, pair, raw, [factors[b] for b in pair], weights, draft.gate.skip)

    def keep(self, step: int, pair: list[int], raw: list[Any]) -> None:
        """Store scores as they are."""
        for i, block in enumerate(pair):
            self.cta.raw_scores.store_pair(block, self.column(*self.cta.scorer, step), raw[2 * i : 2 * i + 2])

    def key_factor(self, block: Any) -> Any:
        """The factor of this lane's key of a block of tokens."""
        if self.cta.shape.probes == 1:
            return Float32(1.0)
        factor = self.factors[1][0]
        for b in range(1, self.cta.shape.token_blocks):
            factor = select(block == b, self.factors[1][b], factor)
        return factor

    def start_tokens(self, draft: Draft, block: Any) -> list[Any]:
        """Store the decays between tokens; weights of this lane's two tokens of a block."""
        cta = self.cta
        if not cta.shape.channels:
            cta.scores.store_decays(block, draft.decays)
            cute.arch.sync_warp()
        weights = draft.in_columns(draft.decays.token_weight, block)
        if cta.shape.probes == 1:
            return weights
        factor = self.key_factor(block)
        return [w * broadcast(factor, cta.place.lane % 4 * 8 + 4 * e) for e, w in enumerate(weights)]


def append_key(cta: Cta, cursor: RowCursor, token: Any, words: list[Any], factor: Any) -> None:
    """Write a token's key to the ring as a block of records holds it, normalised where the layer does that."""
    dtype, vector_bytes = cta.key.activation_dtype, cta.tile.read_vector * cta.tile.activation_size
    if cta.policy.value_needs_state:
        words = pack([x * factor for x in unpack(words, dtype)], dtype)
    mine = cta.is_token(token) * leads_group(cta.key, replace(cta.place, head=cta.first_head))
    start = cta.key_place(cursor, cursor.count + token) + cta.place.lane % 4 * vector_bytes
    size = vector_bytes // 4
    for c in range(len(words) // size):
        for first in range(0, size, 4):
            part = words[c * size + first : c * size + min(first + 4, size)]
            store_words_if(mine, start, part, offset=c * 4 * vector_bytes + first * 4)
