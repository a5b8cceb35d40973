"""Kernels of our own, one or more for every instruction family of sm_90a: a GPU and the interpreter run the same PTX.

`python -m tests.ptx.hardware FOLDER` runs them on the GPU of this machine and stores their outputs. The repository has
those of an H200 in `tests/ptx/vectors`; `tests/ptx/test_hardware.py` compares the interpreter with them bit for bit.
"""

from __future__ import annotations

from tests.ptx.hardware import (  # importing one enters its kernels
    atomics,
    barriers,
    clusters,
    conversions,
    copies,
    floats,
    integers,
    matrices,
    memory,
    mma,
    narrow,
    tensors,
    warpgroups,
    warps,
)
from tests.ptx.hardware.kernel import KERNELS, Bound, Kernel

FAMILIES = (integers, floats, narrow, conversions, memory, warps, barriers)
FAMILIES += (copies, tensors, clusters, atomics, matrices, mma, warpgroups)
__all__ = ["FAMILIES", "KERNELS", "Bound", "Kernel"]
