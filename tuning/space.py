"""What the tuner tries: launch parameters of a step that exist, differ, and are not behind another from the start.

Precision and readout are no parameters of a search: they decide how exact the products are, and every candidate has the
heuristic's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cute_kernels.arch import Arch
from cute_kernels.configs import ROW_BLOCK, SIZE_BYTES, StepConfig, StepKey, Tile
from cute_kernels.heuristic import (
    HELD_REGISTERS,
    LONE_REGISTERS,
    MULTIPROCESSOR_REGISTERS,
    SHARED_FOLD_VALUES,
    SHARED_HEADS,
    heuristic_config,
    invalid_reason,
    room,
    room_within,
)
from replayssm.tuned import TUNED_FIELDS, Parameters, Shape

FEW_RESIDENT = 2  # CTAs of a multiprocessor, where smaller tiles are tried too
FOLD_VALUES = (4, 8, 16, 32, 64)
WARPS = (1, 2, 4, 8)
HEADS = (1, 2, 4, 8)
# Registers of a thread: with fewer every step kernel spills, of one token and of several; more none has taken.
FEWEST_REGISTERS, FEWEST_REGISTERS_OF_DRAFTS, MOST_REGISTERS = 56, 80, 224
REGISTERS_OF_SHARED_HEADS = tuple(sorted({HELD_REGISTERS, *(held for _, held in SHARED_HEADS.values() if held)}))


@dataclass(frozen=True)
class Candidate:
    """Launch parameters to try.

    Args:
        key: the whole of what the kernel depends on.
        room: CTAs that fit on a multiprocessor but for registers, which are known only once it is compiled.
    """

    key: StepKey
    room: int

    @property
    def config(self) -> StepConfig:
        return self.key.config

    @property
    def parameters(self) -> Parameters:
        """As a tuned table holds them."""
        return {name: getattr(self.config, name) for name in TUNED_FIELDS}

    @property
    def name(self) -> str:
        """E.g. "split 2, warps 4, ctas 1, fold_values 16, heads 1"."""
        return ", ".join(f"{name} {value}" for name, value in self.parameters.items())

    @property
    def in_flight_bytes(self) -> int:
        """State that a multiprocessor has on its way at once: a tile of each head of a CTA."""
        return self.room * self.key.heads_together * Tile.of(self.key).bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes that the CTAs of one row load from a full window: each its tiles, their values and decays, and all of
        them the keys anew."""
        key, tile = self.key, Tile.of(self.key)
        decays = (key.d_state if tile.channels else 1) * SIZE_BYTES[key.decay_dtype]
        of_heads = key.heads_together * (tile.bytes + key.window * (tile.rows * tile.value_size + decays))
        return key.row_ctas * (of_heads + key.window * key.d_state * tile.activation_size)


Prune = Callable[[Sequence[Candidate]], Sequence[Candidate]]


def candidates(shape: Shape, batch: int, arch: Arch) -> tuple[Candidate, ...]:
    """All that could be launched, each kernel once; the heuristic's choice comes first.

    Args:
        shape: layer, replay and number of tokens.
        batch: rows of the step.

    Returns:
        Nothing where no kernel covers the shape.
    """
    base = shape.key({}, batch, arch)
    if heuristic_config(base, batch, arch) is None:
        return ()
    splits = [split for split in range(1, base.head_dim + 1) if base.head_dim % split == 0]
    tried = [
        replace(base, config=replace(base.config, split=split, heads=heads, warps=warps, ctas=1, fold_values=values))
        for split, heads, warps, values in product(splits, HEADS, WARPS, FOLD_VALUES)
    ]
    valid = [key for key in tried if invalid_reason(key, arch) is None]
    kernels = {kernel_of(base): base}
    for key in valid:
        for one in (key, *_filling(key)):
            kernels.setdefault(kernel_of(one), one)
    return tuple(Candidate(key, room(key)) for key in kernels.values())


def _filling(key: StepKey) -> Iterator[StepKey]:
    """The same with no more registers than leave room for all CTAs that fit otherwise, but where a copy is read, or the
    state from where it lies, for some that drafts take: tiles in shared memory are small then, or none."""
    found = [room(key)]
    if key.read_dtype is not None or key.direct:
        held = REGISTERS_OF_SHARED_HEADS if key.config.heads > 1 else (HELD_REGISTERS, LONE_REGISTERS)[: key.probes]
        found = [room_within(key, registers) for registers in held]
    for ctas in found:
        yield replace(key, config=replace(key.config, ctas=ctas))


def kernel_of(key: StepKey) -> tuple[Any, ...]:
    """What kernels of one shape really differ in; `fold_values` only by the chunks that a fold takes at a time."""
    config = key.config
    return config.split, config.heads, config.warps, config.ctas, config.precision, Tile.of(key).fold_span


def prune_outclassed(rows: int, multiprocessors: int) -> Prune:
    """Drop those behind another split that has more of the state in flight and loads less of it.

    Only splits that are otherwise alike are compared: as many heads and warps, the same fold, both or neither held to
    `room`. Applied where both fill every multiprocessor; below that more CTAs may be worth their loads. The first
    candidate is kept. What is assumed, that a step which memory limits is no faster with less in flight and more to
    load, is no measurement: `replayssm tune --no-prune` tries everything.

    Args:
        rows: of the step.
        multiprocessors: of the device.
    """

    def fills(candidate: Candidate) -> bool:
        return rows * candidate.key.row_ctas >= candidate.room * multiprocessors

    def launch(key: StepKey) -> tuple[int, int, bool, int]:
        return key.config.heads, key.config.warps, key.config.ctas > 1, Tile.of(key).fold_span

    def outclasses(one: Candidate, other: Candidate) -> bool:
        alike = launch(one.key) == launch(other.key)
        ahead = one.in_flight_bytes >= other.in_flight_bytes and one.loaded_bytes < other.loaded_bytes
        return alike and ahead and fills(one) and fills(other)

    def prune(tried: Sequence[Candidate]) -> Sequence[Candidate]:
        return [c for i, c in enumerate(tried) if i == 0 or not any(outclasses(other, c) for other in tried)]

    return prune


def prune_wasteful(rows: int, multiprocessors: int) -> Prune:
    """Drop launches that the kernel has no use for, whatever a compiler makes of them.

    * A fold of fewer than half the values at a time that the first candidate takes: it loads each record that much more
      often for registers that are there (399 and 362 us with 16 and 32, Super in bfloat16, H200, 2026-11-29).
    * Warps beyond 16 rows each where products are made of 16 rows (8 warps for 64 rows: 428 us, 2 warps 285; the same,
      2026-11-30).
    * More CTAs a head where fewer give every multiprocessor one: each repeats the work on the window (at batch 1 to 8
      equal or up to 26 % slower, 2026-11-29), unless their tiles are too large for two of them on a multiprocessor.
    * Several heads a CTA where that leaves a multiprocessor without one, or with a fold of more values than 16 at a
      time, which takes the registers that let more of them run.
    * A share of the registers that no kernel exceeds, which changes nothing, or that every one does, which spills.

    The first candidate is kept. `replayssm tune --no-prune` tries everything.

    Args:
        rows: of the step.
        multiprocessors: of the device.
    """

    def enough(key: StepKey, split: int) -> bool:
        """Whether so many CTAs a head leave no multiprocessor idle, and room for some of them on each."""
        fewer = replace(key, config=replace(key.config, split=split))
        return rows * key.num_v_heads * split >= multiprocessors and room(fewer) > FEW_RESIDENT

    def wasteful(candidate: Candidate, first: Candidate, splits: Sequence[int]) -> bool:
        key, tile = candidate.key, Tile.of(candidate.key)
        if 2 * tile.fold_span < min(Tile.of(first.key).fold_span, tile.fold_chunks):
            return True
        if key.drafts and tile.warps > max(1, tile.rows // ROW_BLOCK):
            return True
        if any(split < key.config.split and enough(key, split) for split in splits):
            return True
        several = key.config.heads > 1
        if several and (rows * key.row_ctas < multiprocessors or key.config.fold_values != SHARED_FOLD_VALUES):
            return True
        share = MULTIPROCESSOR_REGISTERS // (key.threads * key.config.ctas)
        fewest = FEWEST_REGISTERS_OF_DRAFTS if key.drafts else FEWEST_REGISTERS
        return key.config.ctas > 1 and not fewest <= share < MOST_REGISTERS

    def prune(tried: Sequence[Candidate]) -> Sequence[Candidate]:
        splits = sorted({candidate.config.split for candidate in tried})
        return [c for i, c in enumerate(tried) if i == 0 or not wasteful(c, tried[0], splits)]

    return prune
