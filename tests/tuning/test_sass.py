"""Control flow of machine code: blocks, loops with their trips, and the path of a row.

Small programs are written down here, with counts worked out by hand; of compiled kernels the counts must satisfy what
holds whatever the compiler does: a fold writes each byte of the tile once, and takes as many trips as its tile has
blocks.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch

from cute_kernels.configs import ROW_BLOCK, WARP, Tile
from replayssm.spec import ReplaySpec
from tuning.matrix import StepCase
from tuning.predict import Kernel
from tuning.prediction import planned_key
from tuning.sass import EXIT, Instruction, Program, why_no_sass
from tuning.shapes import lookup

needs_sass = pytest.mark.skipif(why_no_sass() is not None, reason=str(why_no_sass()))


def program(text: str) -> Program:
    """A program of lines "label:" or "@P0 NAME operands"."""
    lines = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines()))):
        lines.append(line if line.endswith(":") else f"        /*{16 * number:04x}*/   {line} ;")
    return Program.of("\n".join(lines))


LOOP = """
    UBLKCP.S.G [UR10], [UR40], UR6
    {start}
    .L_x_1:
    FFMA R0, R1, R2, R0
    {body}
    @P0 BRA `(.L_x_1)
    EXIT
"""


@pytest.mark.parametrize(
    ("start", "body", "trips"),
    [
        ("MOV R4, RZ", "IADD3 R4, R4, 0x1, RZ\n ISETP.NE.U32.AND P0, PT, R4, 0x4, PT", 4),
        ("IMAD.MOV.U32 R4, RZ, RZ, 0x2", "VIADD R4, R4, 0x2\n ISETP.NE.U32.AND P0, PT, R4.reuse, 0x8, PT", 3),
        ("UMOV UR5, URZ", "UIADD3 UR5, UR5, 0x1, URZ\n UISETP.NE.U32.AND UP0, UPT, UR5, 0x3, UPT\n"
         "PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0", 3),
        ("MOV R4, R9", "ISETP.GT.AND P0, PT, R4, 0x5, PT\n VIADD R4, R4, 0x2", 4),  # 0, 2, 4 and 6, tested before
        ("NOP", "UISETP.GE.U32.AND P0, UPT, UR16, 0x6, UPT\n UIADD3 UR6, UPT, UPT, UR16, 0x2, URZ\n UMOV UR16, UR6", 4),
        ("UPLOP3.LUT UP0, UPT, UPT, UPT, UPT, 0x80, 0x0", "PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0\n"
         "UPLOP3.LUT UP0, UPT, UPT, UPT, UPT, 0x8, 0x0", 2),
        ("NOP", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4+URZ], R5", 1),
        ("MOV R4, R9", "IADD3 R4, R4, 0x1, RZ\n ISETP.NE.U32.AND P0, PT, R4, RZ, PT", None),
        ("MOV R4, RZ", "IADD3 R4, R4, 0x1, RZ\n ISETP.NE.U32.AND P0, PT, R4, R8, PT", None),
    ],
    ids=["counter", "from 2 by 2", "uniform", "tested before", "moved", "flag", "wait", "to zero", "register"],
)  # fmt: skip
def test_trips(start: str, body: str, trips: int | None) -> None:
    code = program(LOOP.format(start=start, body=body))
    (loop,) = code.loops
    assert loop.trips == trips
    folds = trips is None
    issued = code.path(folds=folds, record_trips=7).issued
    assert next(n for one, n in issued.items() if one.opcode == "FFMA") == (7 if trips is None else trips)


ROWS = """
    S2R R0, SR_TID.X
    @P2 BRA P1, `(.L_x_0)
    STG.E.U16 [R2.64], RZ
    EXIT
    .L_x_0:
    UBLKCP.S.G [UR10], [UR40], UR6
    @P0 BRA `(.L_x_1)
    FADD R1, R2, R3
    @P3 BRA `(.L_x_2)
    MUFU.EX2 R4, R5
    .L_x_2:
    STG.E.U16 [R2.64], R1
    EXIT
    .L_x_1:
    MOV R6, RZ
    .L_x_3:
    LDG.E.128 R8, [R2.64]
    FFMA R8, R8, R7, R9
    STG.E.128 [R2.64], R8
    IADD3 R6, R6, 0x1, RZ
    ISETP.NE.U32.AND P0, PT, R6, 0x4, PT
    @P0 BRA `(.L_x_3)
    EXIT
    .L_x_9:
    BRA `(.L_x_9)
"""


def opcodes(code: Program, *, folds: bool) -> Counter[str]:
    found: Counter[str] = Counter()
    for one, times in code.path(folds=folds, record_trips=1).issued.items():
        found[one.opcode] += times
    return found


def test_a_row_takes_its_side_and_no_padding() -> None:
    code = program(ROWS)
    reads, folds = opcodes(code, folds=False), opcodes(code, folds=True)
    assert reads == Counter(S2R=1, BRA=3, UBLKCP=1, FADD=1, MUFU=1, STG=1, EXIT=1)  # MUFU: the heavier side of a branch
    loop = Counter(LDG=4, FFMA=4, STG=4, IADD3=4, ISETP=4, BRA=4)
    assert folds == loop + Counter(S2R=1, BRA=2, UBLKCP=1, MOV=1, EXIT=1)


def test_loads_of_loops() -> None:
    code = program(ROWS)
    path = code.path(folds=True, record_trips=1)
    assert (path.rounds, path.loaded_bytes) == (4, 64)
    path = code.path(folds=False, record_trips=1)
    assert (path.rounds, path.loaded_bytes) == (0, 0)


def test_code_out_of_the_way_is_no_loop() -> None:
    code = program(
        """
        UBLKCP.S.G [UR10], [UR40], UR6
        @!P0 BRA `(.L_x_7)
        .L_x_1:
        EXIT
        .L_x_7:
        NANOSLEEP 0x10
        BRA `(.L_x_1)
        """
    )
    assert code.loops == () and code.successors[-1] == (2 - 1,)
    assert opcodes(code, folds=False) == Counter(UBLKCP=1, BRA=2, EXIT=1, NANOSLEEP=1)


def test_code_out_of_the_way_of_a_loop_is_no_other() -> None:
    code = program(
        """
        MOV R4, RZ
        .L_x_1:
        FFMA R0, R1, R2, R0
        BRA.DIV UR4, `(.L_x_7)
        .L_x_2:
        IADD3 R4, R4, 0x1, RZ
        ISETP.NE.U32.AND P0, PT, R4, 0x4, PT
        @P0 BRA `(.L_x_1)
        EXIT
        .L_x_7:
        WARPSYNC.COLLECTIVE R1, `(.L_x_2)
        BRA `(.L_x_2)
        """
    )
    (loop,) = code.loops
    assert (loop.trips, opcodes(code, folds=False)["IADD3"]) == (4, 4)


def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="BRX"):
        program("BRX R4 -0x10\nEXIT")
    reads = program("UBLKCP.S.G [UR10], [UR40], UR6\nEXIT")
    assert reads.successors == ((EXIT,),)
    with pytest.raises(NotImplementedError, match="row that folds"):
        reads.path(folds=True, record_trips=1)
    folds = program(LOOP.format(start="MOV R4, R9", body="ISETP.NE.U32.AND P0, PT, R4, RZ, PT\n VIADD R4, R4, 0x1"))
    with pytest.raises(NotImplementedError, match="only reads"):
        folds.path(folds=False, record_trips=1)
    odd = program(LOOP.format(start="NOP", body="R2P PR, R4, P0"))
    with pytest.raises(NotImplementedError, match="what sets P0"):
        _ = odd.loops


@functools.cache
def compiled(model: str, state: torch.dtype, tokens: int, read: str | None, arch: str) -> Kernel:
    replay = ReplaySpec(2 * ROW_BLOCK, tokens, state, torch.bfloat16, read_dtype=read)
    return Kernel.compiled(planned_key(StepCase(lookup(model), replay, 256, "flush"), arch), arch)


KERNELS = [
    ("nemotron-3-super", torch.float32, 1, None, "sm_90a"),
    ("nemotron-3-super", torch.bfloat16, 1, None, "sm_103a"),
    ("qwen3.5-122b-a10b", torch.bfloat16, 8, None, "sm_100a"),
    ("glm-5.3-flash", torch.float32, 1, None, "sm_103a"),
]


def issued(kernel: Kernel, *, folds: bool, records: int) -> Counter[Instruction]:
    """By all warps of a CTA."""
    return sum((path.issued for path in kernel.paths(folds=folds, records=records)), Counter())


@needs_sass
@pytest.mark.parametrize("which", KERNELS, ids=lambda which: "-".join(map(str, which)))
def test_a_fold_writes_its_tile_once(which: tuple[str, torch.dtype, int, str | None, str]) -> None:
    kernel = compiled(*which)
    tile = Tile.of(kernel.key)
    once, twice = (issued(kernel, folds=True, records=n) for n in (ROW_BLOCK, 2 * ROW_BLOCK))
    # What some lanes or one warp store is no part of the tile, but the appended record.
    stores = [n for one, n in once.items() if one.opcode == "STG" and one.bits == 128 and one.guard is None]
    written = sum(n for n in stores if n >= tile.warps) * 16
    assert written * WARP == tile.rows * tile.d_state * tile.state_size
    # Records take products only, of three terms: of 16 more one for each 16 rows and 8 columns of the tile.
    more = Counter({one: n - once[one] for one, n in twice.items()})
    products = sum(n for one, n in more.items() if one.opcode == "HMMA")
    assert products == 3 * tile.rows // ROW_BLOCK * tile.d_state // 8


@needs_sass
@pytest.mark.parametrize("which", KERNELS, ids=lambda which: "-".join(map(str, which)))
def test_a_row_that_reads_folds_nothing(which: tuple[str, torch.dtype, int, str | None, str]) -> None:
    kernel = compiled(*which)
    reads = issued(kernel, folds=False, records=8)
    assert reads == issued(kernel, folds=False, records=16)
    assert reads.total() < issued(kernel, folds=True, records=8).total()
