"""Branches of functions that are not themselves compiled, but called while a kernel is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute


@cute.jit
def when(condition: Any, action: cutlass.Constexpr[Callable[[], None]]):
    """Do `action`, which may store but not return, where the condition holds."""
    if condition:
        action()
