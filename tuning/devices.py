"""What a prediction knows of a device: one table, each number with its source.

| | H200 | B200, B300 |
|---|---|---|
| multiprocessors | 132 (a) | 148 (b) |
| clock, MHz | 1,980 (c) | 1,965 (b) |
| reads of HBM, TB/s | 4.645 (d) | 7.74 (e) |
| writes to HBM, TB/s | 3.69 (f) | 6.15 (e) |
| reads of L2, TB/s | 5.6 (g) | 9.3 (e) |
| L2, MB | 60 (a) | 65.5 (b) |
| empty launch, us | 3.1 (a) | 3.1 (h) |

* (a) device properties, and `probes` in every record of docs/records.
* (b) published tables of B200 (hmc-tech.com/gpus: 18,944 cores at 128 a multiprocessor, boost clock); its L2 is given
  as twice that elsewhere. B300 is taken as B200. Clocks under load are not known.
* (c) under load, H200, 2026-11-29.
* (d) how the `read` entries of docs/records grow with their bytes.
* (e) 8 TB/s as NVIDIA publishes for both, times the share that the H200 reaches of its 4.8 TB/s.
* (f) what rewriting 1 GiB takes longer than reading it: 526.3 and 235.4 us.
* (g) what public microbenchmarks of H100 reach; it only weighs in what an encoding reads again.
* (h) as on the H200: not known.

The calibrated constants below are of the H200 and serve every device. They were fitted to 243 medians of rows that
read, rows that fold and plain steps, of kernels before those that docs/prediction.md compares, by least fourth powers
of the logarithm of the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULERS = 4  # of a multiprocessor, each with 16,384 registers
CHAIN_US = 2.3  # slot, cursor, then tile and records: loads that wait for one another, cold, before all else overlaps
ROUND_US = 0.27  # an iteration that loads from global memory and waits
CYCLES_PER_INSTRUCTION = 2.1  # of a warp that has its scheduler for itself
CONTENTION = 2.1  # n warps of a scheduler issue in n of n + CONTENTION cycles
# Resources that are busy at once get in each other's way: of times a and b together take (a^p + b^p)^(1/p).
OVERLAP = 3.4


@dataclass(frozen=True)
class Device:
    """One GPU.

    Args:
        arch: what its kernels are compiled for.
        read_rate, write_rate, l2_rate: bytes a microsecond.
        launch_us: of an empty kernel, by the protocol of `tuning.measure`.
    """

    name: str
    arch: str
    multiprocessors: int
    clock_mhz: float
    read_rate: float
    write_rate: float
    l2_rate: float
    l2_bytes: int
    launch_us: float = 3.1


def _blackwell(name: str, arch: str) -> Device:
    scale = 8.0 / 4.8
    return Device(name, arch, 148, 1965.0, 4.645e6 * scale, 3.69e6 * scale, 5.6e6 * scale, 65_500_000)


DEVICES = {
    device.name: device
    for device in (
        Device("H200", "sm_90a", 132, 1980.0, 4.645e6, 3.69e6, 5.6e6, 60_000_000),
        _blackwell("B200", "sm_100a"),
        _blackwell("B300", "sm_103a"),
    )
}
