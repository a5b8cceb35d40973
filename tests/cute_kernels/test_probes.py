"""The probes compile for every architecture and move a tile by the widest means before the first word is used.

A probe that reads in small steps reports a limit that is too low, and every figure quoted against it flatters.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cutlass.base_dsl import compiler

from cute_kernels import probes
from cute_kernels.arch import ARCHES
from cute_kernels.compile import compile_only

ACCESS = re.compile(r"\b(ld\.global|st\.global|bar\.red|cp\.async\.bulk)[\w.:]*")


def accesses(function, arch: str, folder) -> list[str]:
    """Global accesses and barriers in the order of the PTX, each without what follows its state space."""
    options = (
        compiler.KeepPTX(True),
        compiler.DumpDir(str(folder)),
        compiler.PtxasOptions("--warn-on-spills --warning-as-error"),
    )
    kernel = compile_only(function, probes.fake_arguments, arch, *options)
    return [found.group() for found in ACCESS.finditer(kernel.artifacts.PTX)]


@pytest.mark.parametrize("arch", ARCHES)
def test_read_is_one_bulk_copy_of_a_tile(arch: str, tmp_path) -> None:
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    assert accesses(probes.read_tiles, arch, tmp_path) == [copy]


@pytest.mark.parametrize("arch", ARCHES)
def test_rewrite_stores_the_tile_it_loaded(arch: str, tmp_path) -> None:
    found = accesses(probes.rewrite_tiles, arch, tmp_path)
    stores = ["st.global.L2::cache_hint.v4.b32"] * probes.LOADS
    assert found == [*["ld.global.v4.b32"] * probes.LOADS, "bar.red.popc.u32", *stores]


@pytest.mark.parametrize("arch", ARCHES)
def test_empty_touches_no_memory(arch: str, tmp_path) -> None:
    assert accesses(probes.launch_nothing, arch, tmp_path) == []


def test_a_tile_is_one_fp32_head() -> None:
    assert probes.TILE_BYTES == 64 * 128 * 4 == probes.THREADS * probes.LOADS * 16
