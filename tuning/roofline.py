"""The bytes that a step must move, and the time that the memory needs for them.

A step of one layer with R rows, T tokens a row and h live records a row moves, with s, a, d and g the bytes of an
element of the checkpoint, the activations, the decay ring (float32, or Kimi's in bfloat16) and the step's gates:

| part | bytes a row | when |
|---|---|---|
| state_read | HV V K s | always |
| state_write | HV V K s | the row folds |
| records | h (HV V a + HK K a + HV D d) | always |
| inputs | T (HV V a + 2 HK K a + gates), + T HV V a with z | always |
| outputs | T HV V a | always |
| appends | T (HV V a + HK K a + HV D d) | always |

D is 1, or K for KDA, whose decay is a vector over the channels. Gates: Mamba-2 HV g (dt), GDN 2 HV g (a, b), KDA
HV K a + HV g (the gate g comes in the activation dtype, as projected; beta beside it). Not counted, below 0.1 % of a
step from batch 1 on: slots, cursors, and per-head parameters, which stay in the caches.

Every byte counts the same, read or written. A step that folds is held against the read-write rate, one that does not
against the read rate; both are measured in the same run (`tuning.measure`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.pool import bytes_per_slot
from replayssm.spec import LayerSpec, ReplaySpec


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step of one layer, by what they are (the table of this module)."""

    state_read_bytes: int
    state_write_bytes: int
    records_bytes: int
    inputs_bytes: int
    outputs_bytes: int
    appends_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.state_read_bytes
            + self.state_write_bytes
            + self.records_bytes
            + self.inputs_bytes
            + self.outputs_bytes
            + self.appends_bytes
        )

    @property
    def folds(self) -> bool:
        return self.state_write_bytes > 0


@dataclass(frozen=True)
class Rates:
    """Memory rates of a device in bytes a microsecond (1e6 bytes/us = 1 TB/s).

    Args:
        read: a kernel that only reads.
        read_write: a kernel that rewrites what it read in place, bytes of both directions counted.
    """

    read: float
    read_write: float

    def limit_us(self, traffic: Traffic) -> float:
        """The least time of a step: its bytes at the rate of its kind."""
        return traffic.total_bytes / (self.read_write if traffic.folds else self.read)


# H200 of 2026-11-29: CUDA C++ probes over 1 GiB read at 4.553 TB/s and rewrote at 3.85 to 4.0 TB/s. Only for plans
# that are printed without a GPU: a benchmark measures its own.
NOMINAL_H200 = Rates(read=4.553e6, read_write=3.97e6)


def step_traffic(
    layer: LayerSpec,
    replay: ReplaySpec,
    *,
    rows: int,
    live_records: int,
    num_tokens: int = 1,
    folds: bool = False,
    has_z: bool = False,
    gate_dtype: torch.dtype = torch.float32,
) -> Traffic:
    """Bytes of a step in which all rows hold as many records and do the same.

    Args:
        layer, replay: geometry and dtypes.
        rows: rows of the batch that are no padding.
        live_records: h, committed records of a row when the step starts, 0 to `replay.window`.
        num_tokens: T, tokens a row.
        folds: every row puts its records into the checkpoint first.
        has_z: Mamba-2 with an output gate.
        gate_dtype: dtype of dt (Mamba-2), a and b (GDN), beta (KDA).

    Raises:
        ValueError: a number is out of range.
    """
    if rows < 0 or num_tokens < 1:
        raise ValueError(f"rows and num_tokens: expected 0 and 1 or more, got {rows} and {num_tokens}")
    if not 0 <= live_records <= replay.window:
        raise ValueError(f"live_records: expected 0 to window={replay.window}, got {live_records}")
    sizes = bytes_per_slot(layer, replay)
    state, copy = sizes["checkpoint"], sum(size for name, size in sizes.items() if name.startswith("read_"))
    record = (sizes["value"] + sizes["key"] + sizes["decay"]) // replay.ring_capacity
    activation = replay.activation_dtype.itemsize
    value = layer.num_v_heads * layer.head_dim * activation
    key = layer.num_k_heads * layer.d_state * activation
    inputs = value * (2 if has_z else 1) + 2 * key + _gate_bytes(layer, activation, gate_dtype.itemsize)
    return Traffic(
        state_read_bytes=rows * (copy if copy and not folds else state),
        state_write_bytes=rows * (state + copy) if folds else 0,
        records_bytes=rows * live_records * record,
        inputs_bytes=rows * num_tokens * inputs,
        outputs_bytes=rows * num_tokens * value,
        appends_bytes=rows * num_tokens * record,
    )


def _gate_bytes(layer: LayerSpec, activation: int, gate: int) -> int:
    heads = layer.num_v_heads
    if layer.recurrence == "mamba2":
        return heads * gate
    if layer.recurrence == "gdn":
        return 2 * heads * gate
    return heads * layer.d_state * activation + heads * gate
