"""What a kernel's machine code is made of: instructions of its SASS, counted by class.

Memory classes are named after the opcode and the bits that a lane moves: LDG.128 is a load from global memory of 16
bytes. Allocating tensor memory is some instructions of its own, among them atomics of shared memory that the compiler
adds. Predicated instructions count as if they ran, loops once, and the padding behind the code (NOP) not at all.
"""

from __future__ import annotations

import re
from collections import Counter

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")
WIDTH = re.compile(r"\.(?:[US]?(8|16)|ENL2\.(256)|(64|128|256))(?=\.|$)")
MEMORY = ("LDG", "STG", "LDS", "STS")
# Opcodes by class; one that ends in * stands for all that begin so. The first class that matches is taken.
CLASSES = {
    "local": "LDL STL",
    "generic": "LD ST",
    "allocation": "UTCATOMSWS ATOMS BPT UVIRTCOUNT",
    "atomic": "ATOM* RED",
    "bulk": "UBLK* UTMA* LDGSTS* LDGDEPBAR DEPBAR",
    "tensor": "UTC* LDTM STTM",
    "matrix": "HMMA* IMMA* QMMA* DMMA* HGMMA* LDSM STSM",
    "mbarrier": "SYNCS",
    "barrier": "BAR* B2R* MEMBAR FENCE CCTL* ERRBAR UCGABAR*",
    "shuffle": "SHFL REDUX CREDUX VOTE* MATCH",
    "FFMA": "FFMA*",
    "FMUL": "FMUL*",
    "FADD": "FADD*",
    "MUFU": "MUFU*",
    "half": "HFMA2* HADD2* HMUL2* HMNMX2* HSET* FHFMA FHADD",
    "convert": "F2F* I2F* F2I* FRND I2I*",
    "select": "FSEL FSETP FMNMX* FSET SEL SEL64 FCHK PLOP3 ISETP P2R R2P",
    "constant": "LDC LDCU ULDC",
    "control": "BRA BRX EXIT CALL* RET* BSSY BSYNC WARPSYNC ENDCOLLECTIVE NANOSLEEP ACQBULK PREEXIT ELECT YIELD BREAK",
    "uniform": "U* R2UR* S2UR CS2UR",
    "integer": "IMAD* IADD* VIADD* VIMNMX* LEA* LOP3 SHF SHL SHR PRMT MOV* IABS IMNMX POPC FLO BREV SGXT S2R CS2R",
}


def class_of(instruction: str) -> str:
    """The class of an instruction with its modifiers, e.g. "LDG.E.64"; "other" if none is known."""
    opcode = instruction.partition(".")[0]
    if opcode in MEMORY:
        width = WIDTH.search(instruction)
        return f"{opcode}.{next(filter(None, width.groups())) if width else 32}"
    for name, opcodes in CLASSES.items():
        for known in opcodes.split():
            if opcode == known or (known.endswith("*") and opcode.startswith(known[:-1])):
                return name
    return "other"


def histogram(sass: str) -> dict[str, int]:
    """Instructions by class, and their total: memory by width first, then the classes in their order."""
    found = Counter(class_of(one) for one in INSTRUCTION.findall(sass) if one != "NOP")
    order = [*(f"{opcode}.{width}" for opcode in MEMORY for width in (256, 128, 64, 32, 16, 8)), *CLASSES, "other"]
    assert set(found) <= set(order), set(found) - set(order)
    return {name: found[name] for name in order if found[name]} | {"total": found.total()}
