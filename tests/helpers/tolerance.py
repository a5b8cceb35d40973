"""How far a result may lie from the exact one: a multiple of what torch errs in the same precision on the same inputs.

Errors are relative 2-norms over the channels of one head of one row, and the worst head is compared with the worst
head, so no lucky element sets a bound and no good head hides a bad one. The exact result is always float64 and never
rounded: two results that were rounded apart differ by a whole unit where a tie flips, which says nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A 16-bit result errs by its one rounding, which torch commits as well: the two errors are nearly equal, and what
# float32 arithmetic adds is far below. A result that was truncated, or rounded twice, errs 2 times as much, so the
# factor must stay below 2.
FACTOR_16_BIT = 1.5
# A float32 result may come from other formulas than torch's: ex2.approx errs 2**-22 where torch's exp errs 2**-24
# (4 by itself), and sums run in another order (2 more).
FACTOR_FLOAT32 = 8.0


def factor_of(dtype: torch.dtype) -> float:
    """How many times the error of torch a result of this dtype may err."""
    return FACTOR_16_BIT if dtype.itemsize == 2 else FACTOR_FLOAT32


def worst_error(got: Tensor, exact: Tensor, keep: tuple[int, ...]) -> float:
    """The largest relative 2-norm of the error; the axes in `keep` tell apart what is compared on its own."""
    axes = [axis for axis in range(exact.dim()) if axis not in keep]
    error, size = got.double() - exact, exact
    if axes:
        error, size = (torch.linalg.vector_norm(t, dim=axes) for t in (error, exact))
    return float((error.abs() / size.abs().clamp_min(torch.finfo(torch.float64).tiny)).max())


def excess(
    name: str, got: Tensor, baseline: Tensor, exact: Tensor, keep: tuple[int, ...], *, dtype: torch.dtype | None = None
) -> list[str]:
    """One finding if `got` errs more than a factor times the error of `baseline`, else none.

    Args:
        keep: as for `worst_error`.
        dtype: the dtype that sets the factor; that of `got` when None.
    """
    if exact.numel() == 0:
        return []
    if not bool(torch.isfinite(got).all()):
        return [f"{name}: {int((~torch.isfinite(got)).sum())} numbers are not finite"]
    error, yardstick = worst_error(got, exact, keep), worst_error(baseline, exact, keep)
    factor = factor_of(dtype or got.dtype)
    if error <= factor * yardstick:
        return []
    return [f"{name}: error {error:.3e}, allowed {factor:g} x {yardstick:.3e} (torch in the same precision)"]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
