"""Loads and stores of 2, 4, 8 or 16 bytes by byte address, with cache policies and predicates.

Addresses are Int64 (global) or Int32 (shared) byte addresses. A false predicate loads zeros and stores nothing.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

ptx = cute.arch.inline_ptx

STREAM = ".cs"  # evict-first: read once, so that lines written beside it stay in L2
KEEP = ""

EVICT_NORMAL = 0x1000000000000000  # L2 policy words of cp.async.bulk and of stores with a cache hint
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000


def _braced(kind: str, first: int, count: int) -> str:
    names = ",".join("{$%s%d}" % (kind, first + i) for i in range(count))
    return "{%s}" % names if count > 1 else names


def _vector(count: int) -> str:
    return f".v{count}" if count > 1 else ""


def _as_list(values: Any, count: int) -> list[Any]:
    return list(values) if count > 1 else [values]


def load_words(address: Any, count: int, *, cache: str = KEEP, offset: int = 0) -> list[Uint32]:
    """`count` (1, 2 or 4) 32-bit words of global memory; the address is aligned to their total size."""
    text = f"ld.global{cache}{_vector(count)}.b32 {_braced('w', 0, count)}, [{{$r0}}+{offset}];"
    return _as_list(ptx(text, write_only_types=[Uint32] * count, read_only_args=[address]), count)


def load_pair(address: Any, *, offset: int = 0) -> list[Int64]:
    """Two neighbouring 64-bit words of global memory; the address is 16-byte aligned."""
    text = f"ld.global.v2.b64 {_braced('w', 0, 2)}, [{{$r0}}+{offset}];"
    return list(ptx(text, write_only_types=[Int64] * 2, read_only_args=[address]))


def load_words_if(predicate: Any, address: Any, count: int, *, cache: str = KEEP, offset: int = 0) -> list[Uint32]:
    """As `load_words`; zeros, and no access, where the predicate is false."""
    if predicate is True:
        return load_words(address, count, cache=cache, offset=offset)
    zeros = " ".join("mov.b32 {$w%d}, 0;" % i for i in range(count))
    text = "{.reg .pred p; setp.ne.s32 p, {$r1}, 0; %s @p ld.global%s%s.b32 %s, [{$r0}+%d];}" % (
        zeros,
        cache,
        _vector(count),
        _braced("w", 0, count),
        offset,
    )
    arguments = [address, Int32(predicate)]
    return _as_list(ptx(text, write_only_types=[Uint32] * count, read_only_args=arguments), count)


def store_words(address: Any, words: list[Any], *, hint: int = 0, offset: int = 0) -> None:
    """Store 1, 2 or 4 words to global memory, with an L2 policy word where `hint` is not 0."""
    count = len(words)
    policy, tail, extra = (".L2::cache_hint", f", {{$r{1 + count}}}", [Int64(hint)]) if hint else ("", "", [])
    text = f"st.global{policy}{_vector(count)}.b32 [{{$r0}}+{offset}], {_braced('r', 1, count)}{tail};"
    ptx(text, read_only_args=[address, *words, *extra])


def store_words_if(predicate: Any, address: Any, words: list[Any], *, offset: int = 0) -> None:
    """As `store_words`; no access where the predicate is false."""
    count = len(words)
    text = "{.reg .pred p; setp.ne.s32 p, {$r1}, 0; @p st.global%s.b32 [{$r0}+%d], %s;}" % (
        _vector(count),
        offset,
        _braced("r", 2, count),
    )
    ptx(text, read_only_args=[address, Int32(predicate), *words])


def load_half_if(predicate: Any, address: Any, *, cache: str = KEEP) -> Uint32:
    """A 16-bit value of global memory in the low half of a word."""
    text = (
        "{.reg .pred p; .reg .b16 h; mov.b16 h, 0; setp.ne.s32 p, {$r1}, 0; @p ld.global%s.b16 h, [{$r0}];"
        " cvt.u32.u16 {$w0}, h;}"
    ) % cache
    return ptx(text, write_only_types=[Uint32], read_only_args=[address, Int32(predicate)])


def store_half_if(predicate: Any, address: Any, word: Any) -> None:
    """Store the low 16 bits of a word to global memory."""
    text = "{.reg .pred p; .reg .b16 h; cvt.u16.u32 h, {$r2}; setp.ne.s32 p, {$r1}, 0; @p st.global.b16 [{$r0}], h;}"
    ptx(text, read_only_args=[address, Int32(predicate), word])


def load_byte(address: Any) -> Uint32:
    """A byte of global memory, zero-extended."""
    return ptx("ld.global.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def store_byte_if(predicate: Any, address: Any, word: Any) -> None:
    """Store the low 8 bits of a word to global memory where the predicate holds."""
    text = "{.reg .pred p; setp.ne.s32 p, {$r1}, 0; @p st.global.b8 [{$r0}], {$r2};}"
    ptx(text, read_only_args=[address, Int32(predicate), word])


def load_shared(address: Any, count: int, *, offset: int = 0) -> list[Uint32]:
    """`count` (1, 2 or 4) words of shared memory."""
    text = f"ld.shared{_vector(count)}.b32 {_braced('w', 0, count)}, [{{$r0}}+{offset}];"
    return _as_list(ptx(text, write_only_types=[Uint32] * count, read_only_args=[address]), count)


def load_matrices(address: Any, *, offset: int = 0) -> list[Uint32]:
    """Four 8 x 8 matrices of 16 bits in shared memory, transposed: lane 8 i + j has the address of row j of the i-th.

    Returns:
        Of each matrix, in lane 4 c + r, elements (2 r, c) and (2 r + 1, c).
    """
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}+%d];" % offset
    return list(ptx(text, write_only_types=[Uint32] * 4, read_only_args=[address]))


def store_shared(address: Any, words: list[Any], *, offset: int = 0) -> None:
    """Store 1, 2 or 4 words to shared memory."""
    count = len(words)
    text = f"st.shared{_vector(count)}.b32 [{{$r0}}+{offset}], {_braced('r', 1, count)};"
    ptx(text, read_only_args=[address, *words])


def store_shared_if(predicate: Any, address: Any, words: list[Any]) -> None:
    """As `store_shared`; no access where the predicate is false."""
    text = "{.reg .pred p; setp.ne.s32 p, {$r1}, 0; @p st.shared%s.b32 [{$r0}], %s;}" % (
        _vector(len(words)),
        _braced("r", 2, len(words)),
    )
    ptx(text, read_only_args=[address, Int32(predicate), *words])


def store_shared_half_if(predicate: Any, address: Any, word: Any) -> None:
    """Store the low 16 bits of a word to shared memory where the predicate holds."""
    text = "{.reg .pred p; .reg .b16 h; cvt.u16.u32 h, {$r2}; setp.ne.s32 p, {$r1}, 0; @p st.shared.b16 [{$r0}], h;}"
    ptx(text, read_only_args=[address, Int32(predicate), word])


def store_shared_byte(address: Any, word: Any) -> None:
    """Store the low 8 bits of a word to shared memory."""
    ptx("st.shared.b8 [{$r0}], {$r1};", read_only_args=[address, word])


def load_shared_words(address: Any, count: int, alignment: int, *, offset: int = 0) -> list[Uint32]:
    """`count` words of shared memory by the widest loads that an address of this alignment admits."""
    width = max(w for w in (1, 2, 4) if alignment % (4 * w) == 0 and count % w == 0)
    return [w for i in range(0, count, width) for w in load_shared(address, width, offset=offset + 4 * i)]


def load_shared_floats(address: Any, count: int, alignment: int, *, offset: int = 0) -> list[Float32]:
    """The same as floats."""
    return [w.bitcast(Float32) for w in load_shared_words(address, count, alignment, offset=offset)]
