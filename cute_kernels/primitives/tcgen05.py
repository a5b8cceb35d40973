"""Tensor memory and the tensor cores of sm_100a and sm_103a that sum into it: tcgen05, for one CTA.

PTX ISA, "TensorCore 5th Generation Family Instructions". Products are asynchronous and issued by one thread; `commit`
has an mbarrier say that they are over. What one thread does to tensor memory another sees behind `before_sync`, a
barrier and `after_sync`. Operands in shared memory are K-major: rows of up to 128 bytes, in whose 16-byte chunks the
row's number is mixed (`swizzled`), 8 rows behind each other; what threads stored there the tensor cores see behind
`fence_operands`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

ptx = cute.arch.inline_ptx
STEP_BYTES = 32  # of a row, which one product takes
FORMATS = {"float16": 0, "bfloat16": 1, "float32": 2, "nvfp4": 1}  # their numbers in an instruction descriptor
SWIZZLES = {128: 2, 64: 4, 32: 6}  # by bytes of a row
FIXED = 1 << 46  # in every matrix descriptor


@cute.jit
def allocate(warp: Int32, slot: Int32, columns: cutlass.Constexpr[int]):
    """Have warp 0 allocate columns of tensor memory, and write where they are to shared address `slot`.

    A barrier must follow. It waits while other CTAs of the multiprocessor hold what it needs.

    Args:
        columns: a power of two from 32 to 512.
    """
    if warp == 0:
        text = f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{{$r0}}], {columns};"
        ptx(text, read_only_args=[slot])
        ptx("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", read_only_args=[])


@cute.jit
def release(warp: Int32, address: Uint32, columns: cutlass.Constexpr[int]):
    """Have warp 0 free what it has allocated, behind a barrier after the last use.

    Args:
        address: what `allocate` wrote.
    """
    if warp == 0:
        ptx(f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {{$r0}}, {columns};", read_only_args=[address])


def before_sync() -> None:
    """Order this thread's tcgen05 work before the barrier that follows."""
    ptx("tcgen05.fence::before_thread_sync;", read_only_args=[])


def after_sync() -> None:
    """Order this thread's tcgen05 work behind the barrier in front."""
    ptx("tcgen05.fence::after_thread_sync;", read_only_args=[])


def fence_operands() -> None:
    """What this thread has stored to shared memory so far is there for asynchronous reads."""
    ptx("fence.proxy.async.shared::cta;", read_only_args=[])


def copy_chunk(to: Any, source: Any, policy: Any, inside: Any, *, offsets: tuple[int, int]) -> None:
    """Start to copy 16 bytes from global to shared memory, or zeros where `inside` is 0.

    Args:
        policy: L2 policy word.
        inside: None if never 0.
        offsets: bytes to add to both addresses.
    """
    size, extra = ("", []) if inside is None else (", {$r3}", [inside * 16])
    places = "[{$r0}+%d], [{$r1}+%d]" % offsets
    text = f"cp.async.cg.shared.global.L2::cache_hint {places}, 16{size}, {{$r2}};"
    ptx(text, read_only_args=[to, source, policy, *extra])


def copy_word(to: Any, source: Any, inside: Any) -> None:
    """The same for 4 bytes."""
    ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};", read_only_args=[to, source, inside * 4])


def wait_for_copies() -> None:
    """Wait for this thread's copies so far."""
    ptx("cp.async.wait_all;", read_only_args=[])


def swizzled(offset: Any, span: int) -> Any:
    """Where a byte of an operand of `span` bytes a row (32, 64 or 128) lies, from the start of the operand."""
    return offset ^ ((offset >> 3) & (span - 16))


def matrix(address: Any, span: int) -> Int64:
    """The descriptor of an operand at a shared address, a multiple of 1024 or of 8 rows; `step_further` moves it."""
    word = 1 << 16 | (8 * span >> 4) << 32 | FIXED | SWIZZLES[span] << 61
    return Int64(address >> 4) | Int64(word - (1 << 64) if word >> 63 else word)


def scale_matrix(address: Any) -> Int64:
    """The descriptor of 512 bytes of block scales, in rows of 16 bytes."""
    return Int64(address >> 4) | Int64(1 << 16 | (128 >> 4) << 32 | FIXED)


def step_further(descriptor: Any, num_bytes: int) -> Int64:
    """A descriptor of what begins so many bytes later."""
    return descriptor + Int64(num_bytes >> 4)


def instruction(dtype: str, rows: int, columns: int) -> int:
    """The instruction descriptor of products of operands of one dtype with float32 sums, as a 32-bit word."""
    word = FORMATS[dtype] << 7 | FORMATS[dtype] << 10 | (columns >> 3) << 17 | (rows >> 4) << 24
    return word if dtype == "nvfp4" else word | 1 << 4


def multiply(kind: str, to: Any, left: Any, right: Any, descriptor: int, *, adds: bool, scales: Any = ()) -> None:
    """Start products of one step along K, by one thread: sums at tensor address `to`, or added to those there.

    Args:
        left, right: matrix descriptors, Int64; or `left`, a Uint32, the tensor address of what `store_rows` stored.
        descriptor: as `instruction` made it.
        scales: tensor addresses of both operands' block scales, where the kind has any.
    """
    scaled = ".block_scale.block16" if scales else ""
    places = ", [{$r3}], [{$r4}]" if scales else ""
    text = (
        "{.reg .pred p; .reg .b32 i; setp.ne.u32 p, %d, 0; mov.b32 i, %d;"
        " tcgen05.mma.cta_group::1.kind::%s%s [{$r0}], %s, {$r2}, i%s, p;}"
    )
    first = "[{$r1}]" if isinstance(left, Uint32) else "{$r1}"
    ptx(text % (adds, descriptor, kind, scaled, first, places), read_only_args=[to, left, right, *scales])


def copy_scales(to: Any, descriptor: Any) -> None:
    """Start to copy 512 bytes of block scales to 4 columns of tensor memory, in front of later products."""
    text = "tcgen05.cp.cta_group::1.32x128b.warpx4 [{$r0}], {$r1};"
    ptx(text, read_only_args=[to, descriptor])


def commit(barrier: Any) -> None:
    """Have an mbarrier count one arrival once this thread's products are over.

    Args:
        barrier: pointer to it in shared memory.
    """
    text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];"
    ptx(text, read_only_args=[Int32(barrier.toint())])


def load_sums(first: Any, columns: list[int]) -> list[list[Float32]]:
    """16 lanes of tensor memory from the tensor address `first` on, 8 columns from each of `columns`.

    Waits for them. Lane 4 g + t of the warp gets, each time, columns 2 t and 2 t + 1 of row g, then of row g + 8.
    """
    loads = [
        "tcgen05.ld.sync.aligned.16x256b.x1.b32 {%s}, [at+%d];"
        % (", ".join("{$w%d}" % (4 * i + j) for j in range(4)), column)
        for i, column in enumerate(columns)
    ]
    # The address is copied, since an output may have the register of an input.
    text = "{.reg .b32 at; mov.b32 at, {$r0}; " + " ".join(loads) + " tcgen05.wait::ld.sync.aligned;}"
    words = ptx(text, write_only_types=[Uint32] * (4 * len(columns)), read_only_args=[first])
    return [[w.bitcast(Float32) for w in words[i : i + 4]] for i in range(0, len(words), 4)]


def store_rows(first: Any, words: list[Any]) -> None:
    """Start to store each lane's words to its own lane of tensor memory, columns from the tensor address `first` on.

    Args:
        words: 1, 2, 4, .. up to 128; `wait_for_stores` must follow.
    """
    operands = ", ".join("{$r%d}" % (i + 1) for i in range(len(words)))
    text = f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [{{$r0}}], {{{operands}}};"
    ptx(text, read_only_args=[first, *words])


def wait_for_stores() -> None:
    """Wait for this warp's stores so far."""
    ptx("tcgen05.wait::st.sync.aligned;", read_only_args=[])


def tf32_terms(value: Any, count: int) -> list[Float32]:
    """A float as the sum of so many floats of 11 bits, each rounded to nearest."""
    terms = []
    for _ in range(count):
        rounded = ptx("cvt.rna.tf32.f32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])
        terms.append(rounded.bitcast(Float32))
        value = value - terms[-1]
    return terms
