"""Which branches a warp of a CTA takes that its number decides: constants followed through machine code.

Kernels give warps different work: one allocates, one issues, some convert what all need. What decides is made of the
thread's number by a few integer instructions, so their values are followed, a number for each lane; whatever else an
instruction writes counts as not known. Where ways meet, a value is known if all of them agree. A branch whose predicate
is known goes one way only, or both where lanes differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from tuning.sass import EXIT, Instruction, Program, constant

LANES = range(32)
Value = tuple[int, ...]  # of each lane; of a predicate 0 or 1
State = dict[str, Value]
_PREDICATE, _REGISTER = re.compile(r"!?U?P(?:T|\d)"), re.compile(r"(U?R)(\d+)")
_NO_RESULT = ("ST", "RED", "BRA", "EXIT", "UBLK", "LDGSTS")
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "EQ": int.__eq__,
    "NE": int.__ne__,
    "LT": int.__lt__,
    "LE": int.__le__,
    "GT": int.__gt__,
    "GE": int.__ge__,
}


def of_warp(program: Program, warp: int) -> Program:
    """The same program with only those ways on that a warp of this number can go."""
    states: dict[int, State] = {0: {}}
    ways: dict[int, tuple[int, ...]] = {}
    todo = [0]
    while todo:
        number = todo.pop()
        state, block = dict(states[number]), program.blocks[number]
        for one in block[:-1]:
            _run(one, state, warp)
        ways[number] = _ways(block[-1], state, program.successors[number])
        _run(block[-1], state, warp)
        for target in ways[number]:
            if target == EXIT:
                continue
            before = states.get(target)
            met = state if before is None else {k: v for k, v in before.items() if state.get(k) == v}
            if met != before:
                states[target] = dict(met)
                todo.append(target)
    return replace(program, successors=tuple(ways.get(n, ()) for n in range(len(program.blocks))))


def _ways(end: Instruction, state: State, successors: tuple[int, ...]) -> tuple[int, ...]:
    """Where lanes go on behind a block that ends with this instruction."""
    if len(successors) == 1:
        return successors
    asked = [word for word in (end.guard, *end.operands) if word and _PREDICATE.fullmatch(word)]
    goes: list[Value | None] = [_read(word, state) for word in asked]
    if any(value == (0,) * len(LANES) for value in goes):
        return successors[1:]
    known = [value for value in goes if value is not None]
    if not goes or len(known) < len(goes) or not all(map(all, known)):
        return successors
    return successors[:1]


def _read(word: str, state: State) -> Value | None:
    """The value of an operand."""
    word = word.removesuffix(".reuse")
    if word.startswith("!"):
        value = _read(word[1:], state)
        return None if value is None else tuple(1 - x for x in value)
    if word in ("PT", "UPT"):
        return (1,) * len(LANES)
    if word[:1] in "-~" and _REGISTER.fullmatch(word[1:]):
        value = _read(word[1:], state)
        return None if value is None else tuple((-x if word[0] == "-" else ~x) & 0xFFFFFFFF for x in value)
    number = constant(word)
    return state.get(word) if number is None else (number & 0xFFFFFFFF,) * len(LANES)


def _run(one: Instruction, state: State, warp: int) -> None:
    """Enter what an instruction writes."""
    guard = (1,) * len(LANES) if one.guard is None else _read(one.guard, state)
    if guard is not None and not any(guard):
        return
    old = dict(state)
    found = _results(one, old, warp)
    for name in _written(one):
        state.pop(name, None)
        new, before = found.get(name), old.get(name)
        if new is None or (guard != (1,) * len(LANES) and (guard is None or before is None)):
            continue
        if not name.endswith(("RZ", "PT")):
            state[name] = tuple(n if g else b for g, n, b in zip(guard or (), new, before or new, strict=True))


def _written(one: Instruction) -> Iterable[str]:
    """Registers and predicates that an instruction may write."""
    words = [word.removesuffix(".reuse") for word in one.operands]
    if one.opcode == "R2P":
        return [f"P{i}" for i in range(7)]
    if one.opcode in ("PLOP3", "UPLOP3", "VOTE", "VOTEU", "ELECT"):
        words = words[: 2 if one.opcode.endswith("PLOP3") else 1]
    elif "SETP" in one.opcode or one.opcode == "FCHK":
        words = [word for word in words[:2] if _PREDICATE.fullmatch(word)]
    elif one.opcode.startswith(_NO_RESULT):
        return []
    found: list[str] = []
    registers = 0
    for word in words:
        register = _REGISTER.fullmatch(word)
        if _PREDICATE.fullmatch(word) and not word.startswith("!"):
            found.append(word)
        elif register and (not registers or "ENL2" in one.name):
            found += [f"{register[1]}{int(register[2]) + i}" for i in range(_words(one))]
            registers += 1
        elif word not in ("RZ", "URZ") or registers:
            break
        else:
            registers += 1
    return found


def _words(one: Instruction) -> int:
    """Registers that a result takes, at most."""
    if "MMA" in one.opcode:
        return 4
    if one.opcode in ("LDTM", "LDSM"):
        count = re.search(r"\.(?:x|M88\.|MT88\.)(\d+)", one.name)
        return 4 * int(count[1] if count else 1)
    if (one.opcode[-1] == "2" and one.opcode[0] == "F") or "WIDE" in one.name or one.opcode in ("CS2R", "IADD64"):
        return 2
    return max(1, one.bits // 32) if one.opcode.startswith(("LD", "ATOM")) else 2 if ".64" in one.name else 1


def _results(one: Instruction, state: State, warp: int) -> State:
    """What an instruction writes, as far as it is known."""
    words = [word.removesuffix(".reuse") for word in one.operands]
    kind = one.opcode.removeprefix("U")
    if one.opcode == "S2R" and words[1] == "SR_TID.X":
        return {words[0]: tuple(warp * len(LANES) + lane for lane in LANES)}
    if kind == "PLOP3":
        values = [_read(word, state) for word in words[2:5]]
        return _each(words[0], values, lambda a, b, c: _constant(words[5]) >> (4 * a + 2 * b + c) & 1)
    if kind == "ISETP" and ".EX" not in one.name:
        return _compared(one, words, state)
    if one.opcode == "VOTEU" and _PREDICATE.fullmatch(words[0]):
        value = _read(words[1], state)
        return {} if value is None else {words[0]: (int((all if ".ALL" in one.name else any)(value)),) * len(LANES)}
    if not _REGISTER.fullmatch(words[0]):
        return {}
    sources = words[1:]
    # Carries stand in front of the sources, and predicates that are asked for behind them.
    while sources and _PREDICATE.fullmatch(sources[0]):
        sources.pop(0)
    return _each(words[0], [_read(word, state) for word in sources], _function(one, kind, sources))


def _constant(word: str) -> int:
    return constant(word) or 0


def _each(name: str, values: list[Value | None], function: Callable[..., int] | None) -> State:
    """The result of a function of each lane's values, where all are known."""
    known = [value for value in values if value is not None]
    if function is None or len(known) < len(values):
        return {}
    return {name: tuple(function(*lane) & 0xFFFFFFFF for lane in zip(*known, strict=True))}


def _compared(one: Instruction, words: list[str], state: State) -> State:
    """Both predicates of a comparison of integers."""
    _, how, *modifiers = one.name.split(".")
    left, right, other = (_read(word, state) for word in words[2:5])
    if how not in _COMPARE or left is None or right is None or other is None:
        return {}
    signed = "U32" not in modifiers
    pairs = [(_signed(a), _signed(b)) if signed else (a, b) for a, b in zip(left, right, strict=True)]
    join = int.__or__ if "OR" in modifiers else int.__and__
    holds = [int(_COMPARE[how](a, b)) for a, b in pairs]
    first = tuple(join(x, y) for x, y in zip(holds, other, strict=True))
    second = tuple(join(1 - x, y) for x, y in zip(holds, other, strict=True))
    return {} if "XOR" in modifiers else {words[0]: first, words[1]: second}


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _function(one: Instruction, kind: str, sources: list[str]) -> Callable[..., int] | None:
    """What an instruction computes of its sources; None if that is not modelled."""
    if ".X" in one.name or (".HI" in one.name and kind != "SHF") or "WIDE" in one.name or ".64" in one.name:
        return None
    if kind in ("MOV", "R2UR") and len(sources) == 1:
        return lambda a: a
    if (kind == "IADD3" and len(sources) == 3) or kind == "VIADD":
        return lambda *terms: sum(terms)
    if kind == "IMAD" and len(sources) == 3:
        return lambda a, b, c: a * b + c
    if kind == "SEL" and len(sources) == 3:
        return lambda a, b, p: a if p else b
    if kind == "LEA" and len(sources) == 3:
        return lambda a, b, shift: (a << shift) + b
    if kind == "LOP3" and len(sources) >= 4:
        table = _constant(sources[3])
        return lambda a, b, c, *_: _lookup(a, b, c, table)
    if kind == "SHF" and ".R" in one.name and sources[0] in ("RZ", "URZ"):
        return lambda a, shift, high: (_signed(high) if ".S32" in one.name else high) >> min(shift, 31)
    if kind == "SHF" and ".L" in one.name and ".HI" not in one.name:
        return lambda low, shift, high: low << min(shift, 32)
    return None


def _lookup(a: int, b: int, c: int, table: int) -> int:
    """Bit by bit what a table of 8 says of three bits."""
    result = 0
    for entry in range(8):
        if table >> entry & 1:
            result |= (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
    return result
