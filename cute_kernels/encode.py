"""Read copies of some slots, made from their checkpoints: one launch for a layer, a warp for 16 rows.

Rows of all heads count through: a copy knows no heads. Nothing is shared between warps, and no two of them write into
one word.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.args import CopyTensors, MoveTensors, fake_vector
from cute_kernels.compile import compiled
from cute_kernels.configs import SIZE_BYTES, THREADS, WARP
from cute_kernels.copy_shape import ATOM_BLOCKS, TILE_ROWS, CopyShape
from cute_kernels.dtypes import CUTLASS_DTYPE
from cute_kernels.replay.cursor import load_slot
from cute_kernels.replay.quant import LARGEST_CODE, CopyPlaces, clear_scales, encode_rows
from cute_kernels.replay.window import address


@dataclass(frozen=True)
class EncodeKey:
    """Everything that one compiled kernel depends on, beside the architecture.

    Args:
        has_destination: a row's slot is its destination, and padding where either is negative.
    """

    num_v_heads: int
    head_dim: int
    d_state: int
    checkpoint_dtype: str
    read_dtype: str
    index_dtype: str = "int32"
    has_destination: bool = False

    @property
    def shape(self) -> CopyShape:
        return CopyShape(self.num_v_heads * self.head_dim, self.d_state, self.checkpoint_dtype, self.read_dtype)


def invalid_reason(head_dim: int, d_state: int) -> str | None:
    """Why there is no kernel for a layer of this geometry, or None."""
    if head_dim % TILE_ROWS:
        return f"head_dim: a read copy is made of whole {TILE_ROWS} rows, got {head_dim}"
    return None if d_state in (64, 128, 256) else f"d_state: supported are 64, 128 and 256, got {d_state}"


@cute.kernel
def encode_kernel(checkpoint: cute.Tensor, copy: CopyTensors, rows: MoveTensors, key: cutlass.Constexpr):
    """One warp: 16 rows of a slot, or the scales that pad its last atom."""
    shape = key.shape
    thread, _, _ = cute.arch.thread_idx()
    block, row, _ = cute.arch.block_idx()
    lane, tile = thread % WARP, block * (THREADS // WARP) + thread // WARP
    slot = source = load_slot(rows.source, row, key.index_dtype)
    if cutlass.const_expr(key.has_destination):
        slot = load_slot(rows.destination, row, key.index_dtype)
    if (source >= 0) & (slot >= 0) & (tile < shape.tiles):
        state = address(checkpoint, SIZE_BYTES[key.checkpoint_dtype], Int64(slot))
        places, first_row = CopyPlaces.of(copy, Int64(slot)), tile * TILE_ROWS
        if first_row < shape.rows:
            encode_rows(shape, state, places, first_row, lane)
        elif cutlass.const_expr(shape.blocks > 0):
            clear_scales(shape, places, first_row, lane)


@cute.jit
def encode_launch(checkpoint: cute.Tensor, copy: CopyTensors, rows: MoveTensors, key: cutlass.Constexpr, stream: Any):
    """Host side of the launch."""
    warps = THREADS // WARP
    encode_kernel(checkpoint, copy, rows, key).launch(
        grid=[-(-key.shape.tiles // warps), cute.size(rows.source), 1], block=[THREADS, 1, 1], stream=stream
    )


def _fake_slots(slots: Any, dtype: str, align: int, *extents: int) -> Any:
    element = CUTLASS_DTYPE[dtype]
    steps = [math.prod(extents[i + 1 :]) for i in range(len(extents))]
    slot = cute.sym_int64(divisibility=align * 8 // element.width)
    return make_fake_tensor(element, (slots, *extents), (slot, *steps), assumed_align=align)


def fake_copy(slots: Any, shape: CopyShape, heads: int) -> CopyTensors:
    """A read copy of the shapes, dtypes, strides by slot and alignments that a kernel admits."""
    rows, read_dtype = shape.rows // heads, shape.read_dtype
    codes = read_dtype if read_dtype in CUTLASS_DTYPE else "uint8"
    scale = None
    if shape.blocks:
        scale = _fake_slots(slots, "uint8", 16, shape.tiles * TILE_ROWS * shape.atoms * ATOM_BLOCKS)
    elif read_dtype in LARGEST_CODE:
        scale = _fake_slots(slots, "float32", 16, heads, rows)
    return CopyTensors(
        codes=_fake_slots(slots, codes, 16, heads, rows, shape.code_bytes * 8 // CUTLASS_DTYPE[codes].width),
        scale=scale,
        tile_scale=_fake_slots(slots, "float32", 4, heads, rows // TILE_ROWS) if read_dtype == "nvfp4" else None,
    )


def fake_arguments(key: EncodeKey) -> tuple[Any, ...]:
    """Fake tensors of the shapes, dtypes, strides by slot and alignments that a kernel admits."""
    batch, slots = cute.sym_int64(), cute.sym_int64()
    moved = MoveTensors(
        source=fake_vector(key.index_dtype, batch),
        destination=fake_vector(key.index_dtype, batch) if key.has_destination else None,
        num_records=None,
    )
    checkpoint = _fake_slots(slots, key.checkpoint_dtype, 16, key.num_v_heads, key.head_dim, key.d_state)
    copy = fake_copy(slots, key.shape, key.num_v_heads)
    return checkpoint, copy, moved, key, make_fake_stream(use_tvm_ffi_env_stream=True)


def kernel(key: EncodeKey, arch: str) -> Callable[..., None]:
    """The compiled kernel: call it with (checkpoint, the copy's tensors, row tensors)."""
    return compiled(encode_launch, lambda: fake_arguments(key), key, arch)
