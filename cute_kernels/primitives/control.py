"""Branches of functions that are not themselves compiled, but called while a kernel is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32


@cute.jit
def when(condition: Any, action: cutlass.Constexpr[Callable[[], None]]):
    """Do `action`, which may store but not return, where the condition holds."""
    if condition:
        action()


def words_if(condition: Any, count: int, load: Callable[[], list[Uint32]]) -> list[Uint32]:
    """The `count` words that `load` loads where the condition holds, else zeros: a branch, and no load."""
    held = cute.make_rmem_tensor((count,), Uint32)
    for i in range(count):
        held[i] = Uint32(0)

    def hold() -> None:
        for i, word in enumerate(load()):
            held[i] = word

    when(condition, hold)
    return [held[i] for i in range(count)]


def barrier_of_zero() -> Float32:
    """A barrier of the CTA that returns 0: what starts from this 0 stays behind the barrier, where the compiler would
    let work that only waits for loads move in front of later ones, and so hold these up."""
    text = (
        "{.reg .pred none, any; setp.ne.u32 none, 0, 0; barrier.cta.red.or.pred any, 0, none;"
        " selp.b32 {$w0}, 0x3f800000, 0, any;}"
    )
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[])
