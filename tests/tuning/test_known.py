"""What a warp does by its number: values followed through machine code, against a plain evaluation of each lane.

Small programs have results worked out by hand. Of a compiled kernel the ways of its warps must add up to what is issued
once: one warp starts the products, the units of a conversion are shared out, each record block is scored by one warp.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from replayssm.spec import ReplaySpec
from tests.tuning.test_sass import needs_sass, opcodes, program
from tuning.known import of_warp
from tuning.matrix import StepCase
from tuning.predict import Kernel
from tuning.prediction import planned_key
from tuning.shapes import lookup

BRANCH = """
    S2R R0, SR_TID.X
    {makes}
    @P0 BRA `(.L_x_1)
    FADD R1, R2, R3
    .L_x_1:
    EXIT
"""


def adds(makes: str) -> list[bool]:
    """Of four warps which go through the branch that P0 leads around."""
    code = program(BRANCH.format(makes=makes))
    return ["FADD" in opcodes(of_warp(code, warp), folds=False) for warp in range(4)]


@pytest.mark.parametrize(
    ("makes", "through"),
    [
        ("SHF.R.U32.HI R4, RZ, 0x5, R0\n ISETP.NE.U32.AND P0, PT, R4, 0x2, PT", [2]),
        ("ISETP.NE.U32.AND P0, PT, R0, RZ, PT", [0]),  # one lane of the first
        ("ISETP.GE.U32.AND P0, PT, R0, 0x40, PT", [0, 1]),
        ("IADD3 R4, PT, PT, R0, -0x40, RZ\n ISETP.LT.AND P0, PT, R4, RZ, PT", [2, 3]),
        ("LOP3.LUT R4, R0, 0x20, RZ, 0xc0, !PT\n ISETP.NE.AND P0, PT, R4, RZ, PT", [0, 2]),
        ("LOP3.LUT R4, R0, 0x1f, RZ, 0xc0, !PT\n ISETP.NE.AND P0, PT, R4, RZ, PT", [0, 1, 2, 3]),
        ("SHF.R.U32.HI R4, RZ, 0x5, R0\n R2UR UR4, R4\n UISETP.NE.U32.AND UP0, UPT, UR4, 0x1, UPT\n"
         " PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x8", [1]),
        ("ISETP.GT.U32.AND P1, PT, R0, 0x5f, PT\n ISETP.LT.U32.OR P0, PT, R0, 0x20, P1", [1, 2]),
        ("ISETP.NE.U32.AND P1, P0, R0, R0, PT", []),  # the second is the opposite
        ("IMAD.SHL.U32 R4, R0, 0x2, RZ\n LEA R4, R0, R4, 0x1\n ISETP.NE.AND P0, PT, R4, 0x180, PT", [3]),
        ("ISETP.GE.AND P1, PT, R0, 0x40, PT\n SEL R4, RZ, 0x1, P1\n ISETP.NE.AND P0, PT, R4, RZ, PT", [2, 3]),
        ("MOV R4, RZ\n ISETP.GE.AND P1, PT, R0, 0x20, PT\n @P1 MOV R4, 0x1\n ISETP.NE.AND P0, PT, R4, RZ, PT", [0]),
        ("ISETP.NE.AND P0, PT, R0, RZ, PT\n VOTEU.ALL UP0, P0\n PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x8", [0]),
    ],
)  # fmt: skip
def test_the_number_of_a_warp_decides(makes: str, through: list[int]) -> None:
    assert [warp for warp, goes in enumerate(adds(makes)) if goes] == through


@pytest.mark.parametrize(
    ("writes", "register"),
    [
        ("LDG.E R4, desc[UR4][R2.64]", "R4"),
        ("LDG.E.128 R4, desc[UR4][R2.64]", "R7"),
        ("IMAD.WIDE.U32 R4, R0, 0x4, R2", "R5"),
        ("HMMA.16816.F32.BF16 R4, R8, R10, R12", "R7"),
        ("FFMA2 R4, R8, R10, R12", "R5"),
        ("LDTM.16dp256bit R4, tmem[UR4]", "R7"),
        ("SHFL.IDX PT, R4, R0, R2, 0x1f", "R4"),
        ("@P3 MOV R4, 0x20", "R4"),
        ("LDCU.128 UR4, c[0x0][0x3a0]", "UR7"),
    ],
)
def test_what_is_not_modelled_is_not_known(writes: str, register: str) -> None:
    """A register was known, and what may have been written to it makes both ways possible."""
    before, after = f"MOV {register}, 0x10\n", f"ISETP.NE.AND P0, PT, {register}, 0x20, PT"
    assert adds(before + after) == [False] * 4
    assert adds(before + writes + "\n" + after) == [True] * 4


def test_ways_that_meet_must_agree() -> None:
    text = """
    S2R R0, SR_TID.X
    MOV R4, 0x1
    LDG.E R1, desc[UR4][R2.64]
    ISETP.NE.AND P0, PT, R1, RZ, PT
    @P0 BRA `(.L_x_1)
    MOV R4, {other}
    .L_x_1:
    ISETP.NE.AND P1, PT, R4, 0x1, PT
    @!P1 BRA `(.L_x_2)
    FADD R1, R2, R3
    .L_x_2:
    EXIT
    """
    same, different = (opcodes(of_warp(program(text.format(other=x)), 0), folds=False) for x in ("0x1", "0x2"))
    assert "FADD" not in same and "FADD" in different


def test_a_loop_whose_first_turn_is_known_is_followed_to_its_end() -> None:
    """The counter of a loop begins with the warp's number: those that have no turn leave it out."""
    code = program(
        """
        S2R R0, SR_TID.X
        SHF.R.U32.HI R4, RZ, 0x5, R0
        ISETP.GE.U32.AND P0, PT, R4, 0x2, PT
        @P0 BRA `(.L_x_2)
        .L_x_1:
        FADD R1, R2, R3
        IADD3 R4, PT, PT, R4, 0x2, RZ
        ISETP.LT.U32.AND P1, PT, R4, 0x6, PT
        @P1 BRA `(.L_x_1)
        .L_x_2:
        EXIT
        """
    )
    assert [bool(of_warp(code, warp).loops) for warp in range(4)] == [True, True, False, False]


@needs_sass
def test_warps_of_a_kernel_share_its_work() -> None:
    """Super reads an NVFP4 copy for 8 tokens: 4 heads a CTA, a warp each."""
    replay = ReplaySpec(16, 8, torch.float32, torch.bfloat16, read_dtype="nvfp4")
    key = planned_key(StepCase(lookup("nemotron-3-super"), replay, 256, "nonflush"), "sm_103a")
    assert key.heads_together == 4
    kernel = Kernel.compiled(key, "sm_103a")
    found = []
    for path in kernel.paths(folds=False, records=8):
        counts: Counter[str] = Counter()
        for one, times in path.issued.items():
            counts[one.name if one.opcode == "F2FP" else one.opcode] += times
        found.append(counts)
    assert [counts["UTCOMMA"] > 0 for counts in found] == [True, False, False, False]
    made = [sum(n for name, n in counts.items() if "SATFINITE.E2M1" in name) for counts in found]
    assert made == [0] * 2 + [16 * 3 // 2] * 2  # two units of 16 values a lane, in 3 terms
    scored = [counts["HMMA"] for counts in found]
    assert scored[0] == scored[1] == scored[2] == scored[3] + key.d_state // 16
    heaviest = kernel.program.path(folds=False, record_trips=1).issued.total()
    assert all(counts.total() < heaviest for counts in found)
