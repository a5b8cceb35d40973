"""What the tuner tries: launch parameters of a step that exist, differ, and are not behind another from the start.

Precision is no parameter of a search: it decides how exact the products are, and every candidate has the heuristic's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cute_kernels.arch import Arch
from cute_kernels.configs import SIZE_BYTES, THREADS, StepConfig, StepKey, Tile, heuristic_config, invalid_reason
from replayssm.tuned import TUNED_FIELDS, Parameters, Shape

FOLD_VALUES = (4, 8, 16, 32, 64)
# Of a multiprocessor of sm_90 to sm_103: threads, shared memory, and what each CTA takes of it beside its own.
MULTIPROCESSOR_THREADS = 2048
MULTIPROCESSOR_SMEM_BYTES = 228 * 1024
RESERVED_SMEM_BYTES = 1024


@dataclass(frozen=True)
class Candidate:
    """Launch parameters to try.

    Args:
        key: the whole of what the kernel depends on.
        ctas: that fit on a multiprocessor by threads and shared memory; registers are known only once it is compiled.
    """

    key: StepKey
    ctas: int

    @property
    def config(self) -> StepConfig:
        return self.key.config

    @property
    def parameters(self) -> Parameters:
        """As a tuned table holds them."""
        return {name: getattr(self.config, name) for name in TUNED_FIELDS}

    @property
    def name(self) -> str:
        """E.g. "split 2, fold_values 16"."""
        return ", ".join(f"{name} {value}" for name, value in self.parameters.items())

    @property
    def in_flight_bytes(self) -> int:
        """State that a multiprocessor has on its way at once: a tile a CTA."""
        return self.ctas * Tile.of(self.key).bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes that the CTAs of one row load from a full window: each its tile and values, and all of them the keys
        and decays of their head anew."""
        key, tile = self.key, Tile.of(self.key)
        decays = (key.d_state if tile.channels else 1) * SIZE_BYTES[key.decay_dtype]
        record = tile.rows * tile.value_size + key.d_state * tile.activation_size + decays
        return key.num_v_heads * key.config.split * (tile.bytes + key.window * record)


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
    tried = [replace(base, config=replace(base.config, split=s, fold_values=f)) for s in splits for f in FOLD_VALUES]
    kernels: dict[tuple[Any, ...], StepKey] = {}
    for key in (base, *(key for key in tried if invalid_reason(key, arch) is None)):
        kernels.setdefault(kernel_of(key), key)
    return tuple(Candidate(key, _ctas(key, arch)) for key in kernels.values())


def kernel_of(key: StepKey) -> tuple[Any, ...]:
    """What kernels of one shape really differ in: `fold_values` only by the rows that a thread folds at a time."""
    return key.config.split, key.config.precision, Tile.of(key).fold_block


def _ctas(key: StepKey, arch: Arch) -> int:
    """So many share a multiprocessor as each finds room in its part, by the predicate that decides for one."""
    parts = range(2, MULTIPROCESSOR_THREADS // THREADS + 1)
    fitting = [n for n in parts if invalid_reason(key, replace(arch, smem_bytes=_part_bytes(n))) is None]
    return max(fitting, default=1)


def _part_bytes(parts: int) -> int:
    return MULTIPROCESSOR_SMEM_BYTES // parts - RESERVED_SMEM_BYTES


def prune_outclassed(rows: int, multiprocessors: int) -> Prune:
    """Drop candidates behind another with the same fold that has more of the state in flight and loads less of it.

    Applied where both fill every multiprocessor; below that more CTAs may be worth their loads. The first candidate
    is kept. What is assumed, that a step which memory limits is no faster with less in flight and more to load, is no
    measurement: `replayssm tune --no-prune` tries everything.

    Args:
        rows: of the step.
        multiprocessors: of the device.
    """

    def fills(candidate: Candidate) -> bool:
        ctas = rows * candidate.key.num_v_heads * candidate.config.split
        return ctas >= candidate.ctas * multiprocessors

    def outclasses(one: Candidate, other: Candidate) -> bool:
        same_fold = Tile.of(one.key).fold_block == Tile.of(other.key).fold_block
        ahead = one.in_flight_bytes >= other.in_flight_bytes and one.loaded_bytes < other.loaded_bytes
        return same_fold and ahead and fills(one) and fills(other)

    def prune(tried: Sequence[Candidate]) -> Sequence[Candidate]:
        return [c for i, c in enumerate(tried) if i == 0 or not any(outclasses(other, c) for other in tried)]

    return prune
