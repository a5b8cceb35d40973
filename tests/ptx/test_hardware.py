"""The interpreter computes what an H200 computed, bit for bit; approximations agree within the bounds that PTX states.

The kernels of `tests/ptx/hardware` ran on the device, and what they wrote is stored in `tests/ptx/vectors`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ptx.hardware import KERNELS, Bound
from tests.ptx.hardware.compare import differences, interpreted, stored, within
from tests.ptx.hardware.operands import numbers

OUTPUTS, FACTS = stored()
needs_vectors = pytest.mark.skipif(not FACTS, reason="no vectors are stored: run python -m tests.ptx.hardware on a GPU")
EXACT = [name for name, kernel in KERNELS.items() if kernel.expected is not None]


def product_of(name: str, outputs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What the leading rows of a matrix product hold, and what they must."""
    kernel = KERNELS[name]
    assert kernel.expected is not None
    with np.errstate(invalid="ignore"):
        truth = kernel.expected()
    return numbers(outputs[0], kernel.kind)[tuple(slice(0, size) for size in truth.shape)], truth


@needs_vectors
def test_every_kernel_has_a_vector_of_its_own() -> None:
    digests = {name: kernel.digest for name, kernel in KERNELS.items()}
    changed = sorted(name for name in digests if FACTS["kernels"].get(name) != digests[name])
    assert not changed, f"capture again; without a vector, or changed since: {changed}"
    assert set(FACTS["kernels"]) == set(OUTPUTS) == set(KERNELS)


@needs_vectors
@pytest.mark.parametrize("mode", ["early", "late"])
@pytest.mark.parametrize("name", KERNELS)
def test_interpreter_and_hardware_agree(name: str, mode: str) -> None:
    assert name in OUTPUTS, "no vector is stored"
    assert FACTS["kernels"][name] == KERNELS[name].digest, "the kernel changed since its vector was taken"
    kernel, count = KERNELS[name], len(KERNELS[name].outputs)
    found = differences(kernel, interpreted(kernel, OUTPUTS[name][count:], mode, seed=1), OUTPUTS[name][:count])
    assert not found, "interpreter, not hardware:\n" + "\n".join(found)


@needs_vectors
@pytest.mark.parametrize("name", EXACT)
def test_hardware_computed_the_exact_product(name: str) -> None:
    """So the kernel itself is right: its layouts, descriptors and fragments."""
    assert name in OUTPUTS, "no vector is stored"
    got, truth = product_of(name, OUTPUTS[name])
    assert (got == truth).all()


def test_differences_are_found() -> None:
    kernel = KERNELS["approximate_curves"]
    ours = [np.full_like(kernel.outputs[0], 0x3F800000)]
    assert not differences(kernel, ours, [ours[0].copy()], exact=True)
    near, far = [ours[0] + np.uint32(2)], [ours[0] + np.uint32(9)]
    assert not differences(kernel, ours, near) and differences(kernel, ours, near, exact=True)
    found = differences(kernel, ours, far)
    assert "[0, 0]" in found[0] and "0x3f800000" in found[0]
    assert len(found) == 9  # eight places and the count: ex2 allows 2 units, tanh 2^-10.987 of the value
    assert differences(kernel, ours, [ours[0][:1]])


def test_bounds_of_approximations() -> None:
    one = np.array([0x3F800000], np.uint32)
    assert within(Bound(ulp=1), one, one + np.uint32(1), "f32").all()
    assert not within(Bound(ulp=1), one, one + np.uint32(2), "f32").any()
    assert within(Bound(relative=2.0**-10), one, one + np.uint32(8192), "f32").all()
    assert not within(Bound(relative=2.0**-10), one, one + np.uint32(8194), "f32").any()
    special = np.array([0x7F800000, 0x7FC00000, 0x7F800000, 0], np.uint32)
    other = np.array([0x7F800000, 0x7FFFFFFF, 0x7F7FFFFF, 0x80000000], np.uint32)
    assert within(Bound(ulp=2), special, other, "f32").tolist() == [True, True, False, True]


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    from tests.ptx.hardware.device import save

    arrays = {"one.0": np.arange(6, dtype=np.uint16).reshape(2, 3), "one.1": np.zeros(0, np.uint8), "two.0": np.ones(1)}
    for _ in range(2):
        save(tmp_path / "sm_90a.npz", arrays)
        packed = (tmp_path / "sm_90a.npz").read_bytes()
        (tmp_path / "sm_90a.json").write_text('{"kernels": {}}')
        found, facts = stored(tmp_path)
        assert packed == (tmp_path / "sm_90a.npz").read_bytes() and facts == {"kernels": {}}
        assert [x.tolist() for x in found["one"]] == [[[0, 1, 2], [3, 4, 5]], []] and found["two"][0] == 1


def test_a_digest_notices_what_changes_a_kernel() -> None:
    import dataclasses

    kernel = KERNELS["mma_f16"]
    changed = [
        {"ptx": kernel.ptx.replace("%r40", "%r41")},
        {"shared": 8},
        {"inputs": (kernel.inputs[0] + np.uint16(1),)},
    ]
    assert len({kernel.digest, *(dataclasses.replace(kernel, **change).digest for change in changed)}) == 4


@needs_vectors
@pytest.mark.gpu
def test_device_repeats_the_stored_outputs(tmp_path: Path) -> None:
    """Bit for bit, approximations too; on another architecture than the vectors' they may differ."""
    from tests.ptx.hardware.device import capture, facts

    if facts()["capability"] != FACTS["capability"]:
        pytest.skip(f"the vectors are of capability {FACTS['capability']}, this is {facts()['capability']}")
    assert not capture(tmp_path)
    again, _ = stored(tmp_path)
    found = {name: differences(KERNELS[name], again[name], OUTPUTS[name], exact=True) for name in KERNELS}
    assert not {name: lines for name, lines in found.items() if lines}
