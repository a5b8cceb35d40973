"""Products on tensor cores with float32 sums: mma.sync m16n8k16 of bfloat16 or float16, floats being sums of such
terms, and m16n8k8 of TF32, floats being cut to 11 bits.

A fragment is a lane's share of eight vectors along K, a list of (word, word) for each 16 of K, of TF32 for each 8, and,
within it, for each term: lane 4 g + t has vector g, and of every 16 or 8 elements those that it loaded together. Which
elements those are does not matter to a product as long as both of its sides agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Uint32

from cute_kernels.configs import UNCUT
from cute_kernels.primitives.convert import pack, unpack

ptx = cute.arch.inline_ptx
Fragment = list[list[tuple[Uint32, Uint32]]]
Product = Callable[[list[Any], tuple[Any, ...], tuple[Any, ...]], list[Float32]]
HIGH = 0xFFFF0000


def _mma(shape: str, dtype: str, sums: list[Any], a: tuple[Any, ...], b: tuple[Any, ...]) -> list[Float32]:
    text = (
        f"mma.sync.aligned.{shape}.row.col.f32.{dtype}.{dtype}.f32 {{{{$w0}},{{$w1}},{{$w2}},{{$w3}}}}, "
        "{{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}}, {{$r6},{$r7},{$r8},{$r9}};"
    )
    return list(ptx(text, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *sums]))


def mma_bf16(sums: list[Any], a: tuple[Any, ...], b: tuple[Any, ...]) -> list[Float32]:
    """`sums` + A B: 16 x 8 of 16 products each."""
    return _mma("m16n8k16", "bf16", sums, a, b)


def mma_f16(sums: list[Any], a: tuple[Any, ...], b: tuple[Any, ...]) -> list[Float32]:
    """The same of float16."""
    return _mma("m16n8k16", "f16", sums, a, b)


def mma_tf32(sums: list[Any], a: tuple[Any, ...], b: tuple[Any, ...]) -> list[Float32]:
    """`sums` + A B: 16 x 8 of 8 products each."""
    return _mma("m16n8k8", "tf32", sums, a, b)


def lower_halves(x: Any, y: Any) -> Uint32:
    """The lower 16 bits of two words in one."""
    return ptx("prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410;", write_only_types=[Uint32], read_only_args=[x, y])


def upper_halves(x: Any, y: Any) -> Uint32:
    """The upper 16 bits of two words in one; of two floats, bfloat16 values rounded towards zero."""
    return ptx("prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632;", write_only_types=[Uint32], read_only_args=[x, y])


def bf16_terms(x: Any, y: Any, count: int) -> list[Uint32]:
    """Two floats as sums of `count` bfloat16 each, packed term by term: 8, 16 or all 24 bits; the last is rounded."""
    terms = []
    for _ in range(count - 1):
        terms.append(upper_halves(x, y))
        x, y = (z - (z.bitcast(Uint32) & Uint32(HIGH)).bitcast(Float32) for z in (x, y))
    return [*terms, pack([x, y], "bfloat16")[0]]


def fragment(words: list[Any], dtype: str, terms: int) -> Fragment:
    """The fragment of packed elements, four for each 16 of K; bfloat16 is its own only term."""
    return packed_fragment(words) if dtype == "bfloat16" else float_fragment(unpack(words, dtype), terms)


def f16_terms(x: Any, y: Any, count: int) -> list[Uint32]:
    """The same of `count` float16, each rounded; of 11 bits each as long as they are normal numbers."""
    terms = []
    for n in range(count):
        terms += pack([x, y], "float16")
        if n + 1 < count:
            x, y = (z - part for z, part in zip((x, y), unpack(terms[-1:], "float16"), strict=True))
    return terms


def float_fragment(values: list[Any], terms: int, split: Callable[..., list[Uint32]] = bf16_terms) -> Fragment:
    """The fragment of floats, four for each 16 of K, which `split` makes terms of."""
    made = []
    for i in range(0, len(values), 4):
        low, high = (split(values[j], values[j + 1], terms) for j in (i, i + 2))
        made.append(list(zip(low, high, strict=True)))
    return made


def packed_fragment(words: list[Any]) -> Fragment:
    """The fragment of words that are a product's as they are, two for each of its steps along K."""
    return [[(words[i], words[i + 1])] for i in range(0, len(words), 2)]


def tf32_words(values: list[Any]) -> list[Uint32]:
    """Floats as a product of TF32 takes them, which drops their last 13 bits: times `UNCUT`, so that they are cut as
    often up as down, by two thirds of the last bit at most, and what TF32 holds stays as it is. Loaded words would move
    to where a product takes them, and here the product moves them. A conversion that rounds is twice as long."""
    return [(x * Float32(UNCUT)).bitcast(Uint32) for x in values]


def multiply(
    sums: list[Any],
    upper: Fragment,
    lower: Fragment | None,
    right: Fragment,
    terms: int,
    product: Product = mma_bf16,
) -> list[Any]:
    """`sums` + A B^T, where A is the eight vectors of `upper` above those of `lower`, or zeros, and B those of `right`.

    Products of terms whose places add up to `terms` or more are below the others' rounding and left out. The rest are
    summed beside the largest: tensor cores truncate each sum to 25 bits of its largest part.

    Returns:
        Lane 4 g + t has, for vector g of `upper`, its products with vectors 2 t and 2 t + 1, then those of `lower`.
    """
    small, has_small = [Float32(0.0)] * 4, False
    for k, columns in enumerate(right):
        for i, (a0, a2) in enumerate(upper[k]):
            a1, a3 = (Uint32(0), Uint32(0)) if lower is None else lower[k][i]
            for j, column in enumerate(columns[: max(0, terms - i)]):
                if i + j == 0:
                    sums = product(sums, (a0, a1, a2, a3), column)
                else:
                    small, has_small = product(small, (a0, a1, a2, a3), column), True
    return [x + y for x, y in zip(sums, small, strict=True)] if has_small else sums
