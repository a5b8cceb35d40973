"""ReplaySSM: decode state-space layers from a checkpoint and a ring of recent inputs.

The verbs take plain tensors. On CUDA tensors they launch CuTe DSL kernels, on CPU tensors the same verbs run a plain
torch twin. Importing this package needs neither cutlass nor CUDA nor a GPU.
"""

from replayssm.cursors import Cursors, make_cursors
from replayssm.inputs import GdnInputs, KdaInputs, Mamba2Inputs
from replayssm.met import autotune
from replayssm.ops import commit, copy_slots, flush, materialize, reset, step, warmup, write_read_copy
from replayssm.plan import Plan, plan_step
from replayssm.pool import Pool, bytes_per_slot, make_pool
from replayssm.spec import LayerSpec, ReplaySpec

__version__ = "0.1.0"

__all__ = [
    "Cursors",
    "GdnInputs",
    "KdaInputs",
    "LayerSpec",
    "Mamba2Inputs",
    "Plan",
    "Pool",
    "ReplaySpec",
    "autotune",
    "bytes_per_slot",
    "commit",
    "copy_slots",
    "flush",
    "make_cursors",
    "make_pool",
    "materialize",
    "plan_step",
    "reset",
    "step",
    "warmup",
    "write_read_copy",
]
