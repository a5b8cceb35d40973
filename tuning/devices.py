"""What a prediction knows of a device: one table, each number with its source.

| | H200 | source | B200, B300 | source |
|---|---|---|---|---|
| multiprocessors | 132 | torch's device properties, in every record of docs/records | 148 | 18,944 cores of B200 as published, at 128 a multiprocessor; B300 taken as B200 |
| clock | 1,980 MHz | under load, H200 probes of 2026-11-29 | 1,965 MHz | boost clock of B200 as published; under load unknown |
| reads | 4.645 TB/s | slope of the `read` entries of docs/records over the bytes | 7.74 TB/s | 8 TB/s as published, times the H200's share of its 4.8 |
| writes | 3.69 TB/s | what a rewrite of 1 GiB takes longer than its read (526.3 and 235.4 us) | 6.15 TB/s | likewise |
| reads from L2 | 5.6 TB/s | published microbenchmarks of H100 | 9.3 TB/s | scaled as memory; unknown |
| L2 | 60 MB | device properties | 65.5 MB | published table of B200; others say twice that |
| empty launch | 3.1 us | `probes` of the records | 3.1 us | taken from the H200 |

The calibrated constants (`CHAIN_US` and what follows) are of the H200. They were fitted to 209 medians of the records of
2026-11-30, least fourth powers of the logarithm of the ratio, and are used for every device.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULERS = 4  # of a multiprocessor, each with 16,384 registers
CHAIN_US = 2.6  # slot, cursor, then tile and records: loads that wait for one another, cold, before all else overlaps
ROUND_US = 0.27  # an iteration that loads from global memory and waits
CYCLES_PER_INSTRUCTION = 1.4  # of a warp that has its scheduler for itself
CONTENTION = 1.5  # n warps of a scheduler issue in n of n + CONTENTION cycles
# Resources that are busy at once get in each other's way: of times a and b together take (a^p + b^p)^(1/p).
OVERLAP = 3.2


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
