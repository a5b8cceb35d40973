"""The readout of several tokens where tcgen05 computes it: what a CTA of `verify` does at each of its stages.

1. `start`, once the slot is known: tensor memory, and the copies of the tile, or loads where codes are decoded;
2. `stage`, behind a barrier and the scores, whose registers it takes: the probes, while the copies are under way;
3. `arrive`, in front of a barrier: the tile is there;
4. `multiply`, behind it: one thread starts all products;
5. `sums`, once `arrival` says that they are over;
6. `finish`: tensor memory is given back, and what a fold stages takes the place of the operands.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from cute_kernels.copy_shape import CopyShape
from cute_kernels.drafts import Cta
from cute_kernels.primitives import tcgen05
from cute_kernels.primitives.memory import load_shared, load_words
from cute_kernels.records import TileMemory
from cute_kernels.replay.codes import SUM_POWER
from cute_kernels.replay.cursor import RowCursor
from cute_kernels.replay.quant import CopyPlaces
from cute_kernels.replay.tensor import DecodedRow, Operands


def operands_of(cta: Cta) -> Operands:
    """The operands of a CTA whose readout is that of tcgen05."""
    assert cta.operands is not None
    return cta.operands


def start(cta: Cta, cursor: RowCursor, source: Any, policy: Any) -> list[DecodedRow]:
    """Allocate tensor memory and start the copies of the tile, that of this thread's head at a global address; a
    barrier must follow.

    Returns:
        What `arrive` decodes.
    """
    operands, rows = operands_of(cta), []
    first = cta.rows_before(cta.first_head)
    source = source - Int64((cta.rows_before(cta.place.head) - first) * operands.shape.read_bytes)
    if operands.shape.decoded:
        places = CopyPlaces.of(cta.tensors.pool.copy, cursor.slot)
        rows = operands.load_codes(source, CopyShape.of(cta.key), places, first)
    else:
        operands.copy_state(source, policy)
    if operands.shape.scaled:
        places = CopyPlaces.of(cta.tensors.pool.copy, cursor.slot)
        operands.copy_scales(CopyShape.of(cta.key), places, first)
    tcgen05.allocate(operands.warp, operands.slot, operands.shape.columns)
    return rows


def stage(cta: Cta, probes: list[list[list[Uint32]]]) -> None:
    """Write the operand of what `draft_loads.load_probes` loaded."""
    operands_of(cta).stage_probes(probes, cta.key.activation_dtype)


def arrive(cta: Cta, rows: list[DecodedRow]) -> None:
    """Wait for this thread's copies, or decode its rows; a barrier must follow."""
    operands_of(cta).arrive(rows)


def multiply(cta: Cta, arrival: Any) -> None:
    """Start the products; `arrival` says when they are over."""
    operands_of(cta).start_products(arrival)


def sums(cta: Cta, cursor: RowCursor, factors: list[list[Any]]) -> list[Any]:
    """Products of this warp's rows of the tile with each block of probes, as `StateRows.products` returns them, times
    factors of the block's two columns."""
    scale, shape = None, operands_of(cta).shape
    if shape.scaled or shape.decoded:
        places = CopyPlaces.of(cta.tensors.pool.copy, cursor.slot)
        row = cta.rows_before(cta.place.head) + cta.channels.first
        (word,) = load_words(places.tile_scale + (row >> 4) * 4, 1)
        scale = word.bitcast(Float32)
    if shape.decoded:
        scale = scale * Float32(2.0 ** SUM_POWER["nvfp4"])
    return operands_of(cta).sums(len(cta.channels.pairs), factors, scale)


def finish(cta: Cta) -> TileMemory:
    """Give tensor memory back once every warp has its sums, behind a barrier; the memory for a fold of this head."""
    operands = operands_of(cta)
    (address,) = load_shared(operands.slot, 1)
    cute.arch.barrier()
    tcgen05.after_sync()
    tcgen05.release(operands.warp, address, operands.shape.columns)
    if not operands.shape.fold_bytes:
        return cta.memory
    head = operands.thread // cta.tile.threads
    return replace(cta.memory, staging=operands.base + head * operands.shape.fold_bytes)
