"""The probes of a device's limits do what their times are quoted for: every byte once, and nothing else.

Each runs as compiled for sm_90a and sm_103a over two whole tiles and a rest that it must leave alone, with the clusters
one after another and together.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels import probes
from tests.ptx import recorder
from tests.ptx.machine import TroubleError, run_launch

pytestmark = pytest.mark.skipif(recorder.why_no_recorder() is not None, reason=str(recorder.why_no_recorder()))
WORDS = 2 * probes.TILE_WORDS + 5


def module_of(name: str) -> ModuleType:
    """A probe as the recorder takes kernels."""
    made: Any = ModuleType(f"probes.{name}")
    functions = {"read": probes.read_tiles, "rewrite": probes.rewrite_tiles, "empty": probes.launch_nothing}
    setattr(made, f"{name}_launch", functions[name])
    made.fake_arguments = lambda key: probes.fake_arguments()
    return made


MODULES = {name: module_of(name) for name in ("read", "rewrite", "empty")}


def words() -> torch.Tensor:
    return torch.randint(0, 1 << 31, (WORDS,), generator=torch.Generator().manual_seed(1)).to(torch.uint32)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize("name", MODULES)
def test_a_probe_moves_what_it_says(name: str, arch: str) -> None:
    for mode, together in (("early", 1), ("late", 2)):
        given = words()
        launch = recorder.record(MODULES[name], name, arch, given)
        report = run_launch(launch, recorder.buffers_of(given, writeable=name == "rewrite"), mode, together=together)
        expected = words().to(torch.int64)
        if name == "rewrite":
            expected[: 2 * probes.TILE_WORDS] ^= 1
        assert torch.equal(given.to(torch.int64), expected)
        assert report.ctas == (1 if name == "empty" else 2)
        loads = sum(n for opcode, n in report.opcodes.items() if opcode.startswith(("ld.global", "cp.async.bulk")))
        warps = probes.THREADS // 32
        assert loads == {"read": 2, "rewrite": 2 * warps * probes.LOADS, "empty": 0}[name]


def test_a_probe_that_does_not_wait_is_caught() -> None:
    given = words()
    launch = recorder.record(MODULES["read"], "read", "sm_90a", given)
    start, end = launch.ptx.index("LAB_WAIT:"), launch.ptx.index("DONE:")
    waits = vars(launch) | {"ptx": launch.ptx[:start] + launch.ptx[end:]}
    with pytest.raises(TroubleError, match="pending_copy"):
        run_launch(type(launch)(**waits), recorder.buffers_of(given), "late")
