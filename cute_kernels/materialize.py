"""Fold records outside of a step, one launch for the layers of a geometry: in place, or into other slots.

A CTA works on `Tile.rows` rows of one head, for one row of the call, in one layer:

1. load source and destination slot, the layer's row of the table, and the cursor of the source;
2. start the bulk copy of its tile of the source's checkpoint, then the loads of the records that are asked for;
3. fold them into the tile, as a step that folds does, and write it to the destination's checkpoint; without records,
   write the tile as it came.

Layers differ in their addresses and strides alone. Both stand in a table in device memory, so that one launch takes all
of them, with rings of any layout. Cursors are only read: `empty` moves them once every layer is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.args import CursorTensors, MoveTensors, PoolTensors, fake_cursors, fake_vector
from cute_kernels.compile import compiled, launch_limits
from cute_kernels.configs import SIZE_BYTES, StepKey, Tile
from cute_kernels.dtypes import CUTLASS_DTYPE
from cute_kernels.primitives.bulk import bulk_init, bulk_load, bulk_wait
from cute_kernels.primitives.memory import EVICT_NORMAL, load_pair, load_shared, load_words, store_words, store_words_if
from cute_kernels.records import LaneDecays, LaneRecords, TileMemory, fold_staged, policy_of, stage_fold
from cute_kernels.replay.channels import ChannelRecords, own_channels
from cute_kernels.replay.cursor import RowCursor, load_slot
from cute_kernels.replay.window import Place, address

# int64 words of a layer in the table. Each tensor has its byte address and strides in elements: checkpoint and its
# stride by slot, A, and seed or a 0, which are packed; then of value, key and decay the ring, and its strides by slot,
# head and record.
TABLE_COLUMNS = 16
CTAS = 4  # that the registers of a multiprocessor have room for; left alone, the compiler spills to fit more


@dataclass(frozen=True)
class MaterializeKey:
    """Everything that one compiled kernel depends on, beside the architecture.

    Args:
        layer: geometry, dtypes, configuration and `rows.index_dtype`, as of a step of no tokens; its `ring_layout` and
            what its options say of inputs mean nothing.
        has_destination: slots go into other slots; else records are folded in place.
        has_num_records: rows say how many records they fold; else all that are committed.
    """

    layer: StepKey
    has_destination: bool = False
    has_num_records: bool = False


def layer_tensors(table: cute.Tensor, layer: Any, key: StepKey) -> tuple[PoolTensors, cute.Tensor]:
    """The pool of a layer, and its A, as its row of the table describes them."""
    row = table.iterator.toint() + Int64(layer) * (TABLE_COLUMNS * 8)
    words = [word for c in range(0, TABLE_COLUMNS, 2) for word in load_pair(row, offset=c * 8)]

    def tensor(dtype: str, where: Any, *strides: Any) -> cute.Tensor:
        pointer = cute.make_ptr(CUTLASS_DTYPE[dtype], where, cute.AddressSpace.gmem)
        return cute.make_tensor(pointer, cute.make_layout((1,) * len(strides), stride=strides))

    channel = (1,) if Tile.of(key).channels else ()
    pool = PoolTensors(
        checkpoint=tensor(key.checkpoint_dtype, *words[:2], key.head_dim * key.d_state, key.d_state),
        value=tensor(key.record_dtype, *words[4:8], 1),
        key=tensor(key.activation_dtype, *words[8:12], 1),
        decay=tensor(key.decay_dtype, *words[12:16], *channel),
        seed=tensor("int64", words[3], 1) if key.rounding == "stochastic" else None,
    )
    return pool, tensor("float32", words[2], 1)


def load_decays(
    pool: PoolTensors, rate: cute.Tensor, key: StepKey, place: Place, cursor: RowCursor, shared: TileMemory
) -> LaneDecays:
    """Decays of the cursor's records; those by channel are staged, and the caller must put a barrier behind that."""
    policy, tile = policy_of(key), Tile.of(key)
    records: LaneRecords | ChannelRecords
    if policy.decays_per_channel:
        records = ChannelRecords.load(pool.decay, key.decay_dtype, tile, place, cursor)
        records.stage_draft(tile, place, [[] for _ in own_channels(tile, place.thread)], shared.staging)
    else:
        records = LaneRecords.load(pool, key, place, cursor)
    return LaneDecays.of(policy, policy.load_rate(rate, place.head), records, place.lane, key.window)


def copy_seed(pool: PoolTensors, source: Any, destination: Any, head: Any, place: Any) -> None:
    """Give a destination the seed of its source, by one thread of its first head."""
    first = Int32(head == 0) * Int32(place == 0)
    store_words_if(first, address(pool.seed, 8, destination), load_words(address(pool.seed, 8, source), 2))


@cute.jit
def store_tile(thread: Int32, state: Int32, to: Int64, tile: cutlass.Constexpr):
    """Write the tile in shared memory to global memory, bit for bit."""
    for i in cutlass.range(tile.bytes // (tile.threads * 16), unroll=4):
        offset = (i * tile.threads + thread) * 16
        store_words(to + Int64(offset), load_shared(state + offset, 4))


@cute.kernel
def materialize_kernel(table: cute.Tensor, cursors: CursorTensors, rows: MoveTensors, key: cutlass.Constexpr):
    """One CTA: see this module's docstring."""
    layer, tile = key.layer, Tile.of(key.layer)
    _, row, number = cute.arch.block_idx()
    place = Place.of(layer, row)
    thread, head = place.thread, place.head
    shared = TileMemory.allocate(tile.bytes, tile.staging_bytes)
    source = load_slot(rows.source, row, layer.rows.index_dtype)
    destination = source
    if cutlass.const_expr(key.has_destination):
        destination = load_slot(rows.destination, row, layer.rows.index_dtype)
    pool, rate = layer_tensors(table, number, layer)
    bulk_init(thread, shared.arrival)
    cute.arch.barrier()
    if (source >= 0) & (destination >= 0):
        most = None
        if cutlass.const_expr(key.has_num_records):
            most = Int32(load_words(rows.num_records.iterator.toint() + Int64(row) * 4, 1)[0])
        cursor = RowCursor.load_prefix(cursors, source, most, capacity=layer.ring_capacity, window=layer.window)
        writes = cursor.folds
        if cutlass.const_expr(key.has_destination):
            writes = Boolean(True)
        if writes:
            size = SIZE_BYTES[layer.checkpoint_dtype]
            tile_at, to = (
                address(pool.checkpoint, size, Int64(slot), head, place.first_row) for slot in (source, destination)
            )
            bulk_load(thread, shared.state, tile_at, shared.arrival, Int64(EVICT_NORMAL), tile.bytes)
            cute.arch.barrier()  # the loads of the records stay behind the copy, as in a step
            decays = load_decays(pool, rate, layer, place, cursor, shared)
            if cutlass.const_expr(tile.channels):
                cute.arch.barrier()
            if cutlass.const_expr(layer.rounding == "stochastic" and key.has_destination):
                copy_seed(pool, source, destination, head, thread + place.first_row)
            if cursor.folds:
                fold = stage_fold(pool, cursors, layer, place, cursor, decays, shared, to)
                fold_staged(fold, shared.state, to, cursor.count, Int32(0))
            else:
                bulk_wait(shared.arrival)
                store_tile(thread, shared.state, to, tile)


@cute.jit
def materialize_launch(
    table: cute.Tensor, cursors: CursorTensors, rows: MoveTensors, key: cutlass.Constexpr, stream: Any
):
    """Host side of the launch: one CTA for each part of each head, of each row, in each layer."""
    materialize_kernel(table, cursors, rows, key).launch(
        grid=[key.layer.num_v_heads * key.layer.config.split, rows.source.shape[0], table.shape[0]],
        block=[Tile.of(key.layer).threads, 1, 1],
        **launch_limits(CTAS),
        stream=stream,
    )


def fake_arguments(key: MaterializeKey) -> tuple[Any, ...]:
    """Fake tensors of the shapes and dtypes that a kernel admits."""
    batch, slots, index = cute.sym_int64(), cute.sym_int64(), key.layer.rows.index_dtype
    shape = (cute.sym_int64(), TABLE_COLUMNS)
    table = make_fake_tensor(CUTLASS_DTYPE["int64"], shape, (TABLE_COLUMNS, 1), assumed_align=16)
    rows = MoveTensors(
        source=fake_vector(index, batch),
        destination=fake_vector(index, batch) if key.has_destination else None,
        num_records=fake_vector("int32", batch) if key.has_num_records else None,
    )
    cursors = fake_cursors(slots, key.layer.rounding == "stochastic")
    return table, cursors, rows, key, make_fake_stream(use_tvm_ffi_env_stream=True)


def kernel(key: MaterializeKey, arch: str) -> Callable[..., None]:
    """The compiled kernel: call it with (table, cursor tensors, row tensors)."""
    return compiled(materialize_launch, lambda: fake_arguments(key), key, arch)
