"""PTX text to a module: variables, entries with parameters, registers and instructions with their source lines.

Only the syntax is known here (PTX ISA, "Syntax" and "Directives"); what an opcode means is the business of `decode`.
Braces inside a body open a scope with registers and labels of its own, as inline assembly uses them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from tests.ptx.trouble import TroubleError

BITS = {kind + str(bits): bits for bits in (8, 16, 32, 64) for kind in ("b", "u", "s")} | {"f16": 16, "f32": 32}
BITS |= {"bf16": 16, "f16x2": 32, "bf16x2": 32, "f64": 64, "pred": 1}
TOKEN = re.compile(r'"[^"]*"|[%$.\w](?:[\w.$%]|::)*|[^\s]')
NUMBER = re.compile(r"0[xX][0-9a-fA-F]+U?|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+U?")


class Register(NamedTuple):
    """A declared register; `slot` numbers those of an entry."""

    name: str
    type: str
    slot: int


class Immediate(NamedTuple):
    """A constant: an integer's value, or the bits of a float."""

    value: int
    is_float: bool = False


class Symbol(NamedTuple):
    """A name that is no register: a variable, parameter, label or special register."""

    name: str


class Address(NamedTuple):
    """[base + offset], or [tensor map, {coordinates}]."""

    base: Register | Symbol | Immediate
    offset: int
    coordinates: tuple[Operand, ...] = ()


class Negated(NamedTuple):
    """!p."""

    register: Register


class Vector(NamedTuple):
    """{a, b, ...}."""

    items: tuple[Operand, ...]


class Pair(NamedTuple):
    """d|p: two destinations of one instruction; `_` as one of them is a Symbol."""

    first: Operand
    second: Operand


Operand = Register | Immediate | Symbol | Address | Negated | Vector | Pair


class Instruction(NamedTuple):
    """One instruction; `target` is the index of the one that a branch leads to."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    line: int
    text: str
    target: int = -1

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    def registers(self, first: int = 0) -> list[Register]:
        """All that its operands from one on name, addresses and vectors included."""
        found, left = [], list(self.operands[first:])
        while left:
            operand = left.pop()
            if isinstance(operand, Register):
                found.append(operand)
            elif isinstance(operand, tuple):
                left += operand
        return found


class Variable(NamedTuple):
    """A parameter of an entry, or an array in shared memory; `size` 0 stands for what the launch gives."""

    name: str
    size: int
    align: int
    offset: int = 0


@dataclass
class Entry:
    """A kernel."""

    name: str
    parameters: list[Variable] = field(default_factory=list)
    block: tuple[int, ...] | None = None
    registers: list[Register] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class Module:
    """A PTX file."""

    target: str = ""
    shared: list[Variable] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)


@dataclass
class _Scope:
    registers: dict[str, Register] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)


def _without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match.group().count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        rows = enumerate(_without_comments(text).splitlines(), 1)
        self.tokens = [(match.group(), number) for number, row in rows for match in TOKEN.finditer(row)]
        self.at = 0
        self.module = Module()

    @property
    def token(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def refuse(self, what: str) -> NoReturn:
        line = self.tokens[min(self.at, len(self.tokens) - 1)][1]
        raise TroubleError("syntax", what, line=line, text=self.lines[line - 1])

    def take(self, expected: str = "") -> str:
        token = self.token
        if not token or (expected and token != expected):
            self.refuse(f"expected {expected or 'more'}, found {token or 'the end'}")
        self.at += 1
        return token

    def accept(self, token: str) -> bool:
        found = self.token == token
        self.at += found
        return found

    def number(self) -> int:
        sign = -1 if self.accept("-") else 1
        if not NUMBER.fullmatch(self.token) or self.token[:2].lower() in ("0f", "0d"):
            self.refuse(f"expected an integer, found {self.token}")
        return sign * int(self.take().rstrip("U"), 0)

    def parse(self) -> Module:
        while self.token:
            word = self.take()
            if word in (".version", ".address_size"):
                self.take()
            elif word == ".target":
                self.module.target = self.take()
            elif word == ".entry":
                self.entry()
            elif word == ".shared":
                self.module.shared.append(self.variable())
                self.take(";")
            elif word not in (".visible", ".extern"):
                self.at -= 1
                self.refuse(f"{word} is not modelled at module level")
        return self.module

    def variable(self) -> Variable:
        """[.align N] .type name [[count]], after its state space."""
        align = self.number() if self.accept(".align") else 0
        kind = self.take()[1:]
        if kind not in BITS:
            self.refuse(f"type {kind} is not modelled")
        while self.token in (".ptr", ".global", ".shared", ".align"):  # what a pointer leads to
            if self.take() == ".align":
                self.number()
        name, count, size = self.take(), 1, BITS[kind] // 8
        if self.accept("["):
            count = 0 if self.token == "]" else self.number()
            self.take("]")
        return Variable(name, size * count, align or size)

    def entry(self) -> None:
        entry, offset = Entry(self.take()), 0
        self.take("(")
        while not self.accept(")"):
            self.take(".param")
            found = self.variable()
            offset = -(-offset // found.align) * found.align
            entry.parameters.append(Variable(found.name, found.size, found.align, offset))
            offset += found.size
            self.accept(",")
        while not self.accept("{"):
            directive = self.take()
            if directive not in (".reqntid", ".minnctapersm", ".maxnreg", ".maxntid", ".reqnctapercluster"):
                self.refuse(f"{directive} is not modelled")
            sizes = [self.number()]
            while self.accept(","):
                sizes.append(self.number())
            if directive == ".reqntid":
                entry.block = tuple(sizes)
        self.body(entry)
        self.module.entries[entry.name] = entry

    def body(self, entry: Entry) -> None:
        scopes, branches = [_Scope()], []
        while scopes:
            if self.accept("{"):
                scopes.append(_Scope())
            elif self.accept("}"):
                scopes.pop()
            elif self.accept(".reg"):
                self.declare(entry, scopes[-1])
            elif self.accept(".pragma"):
                self.take()  # advice to the assembler
                self.take(";")
            elif self.tokens[self.at + 1][0] == ":":
                scopes[-1].labels[self.take()] = len(entry.instructions)
                self.take(":")
            else:
                entry.instructions.append(self.instruction(scopes))
                branches.append(tuple(scopes))
        for i, (instruction, visible) in enumerate(zip(entry.instructions, branches, strict=True)):
            if instruction.parts[0] == "bra":
                entry.instructions[i] = self.resolved(instruction, visible)

    def declare(self, entry: Entry, scope: _Scope) -> None:
        kind = self.take()[1:]
        if kind not in BITS:
            self.refuse(f"registers of type {kind} are not modelled")
        while True:
            name, names = self.take(), []
            if self.accept("<"):
                names = [f"{name}{i}" for i in range(self.number())]
                self.take(">")
            for one in names or [name]:
                scope.registers[one] = Register(one, kind, len(entry.registers))
                entry.registers.append(scope.registers[one])
            if not self.accept(","):
                break
        self.take(";")

    def instruction(self, scopes: list[_Scope]) -> Instruction:
        line, guard = self.tokens[self.at][1], None
        if self.accept("@"):
            negated = self.accept("!")
            register = self.operand(scopes)
            if not isinstance(register, Register):
                self.refuse("a guard is a predicate register")
            guard = (register, negated)
        opcode, operands = self.take(), []
        while not self.accept(";"):
            operand = self.operand(scopes)
            operands.append(Pair(operand, self.operand(scopes)) if self.accept("|") else operand)
            if self.token not in (",", ";"):
                self.refuse(f"{self.token} is not modelled in an operand")
            self.accept(",")
        return Instruction(opcode, tuple(operands), guard, line, self.lines[line - 1])

    def operand(self, scopes: list[_Scope]) -> Operand:
        if self.accept("{"):
            items = [self.operand(scopes)]
            while self.accept(","):
                items.append(self.operand(scopes))
            self.take("}")
            return Vector(tuple(items))
        if self.accept("["):
            base = self.operand(scopes)
            offset = 0
            if self.accept("+") or self.token == "-":
                offset = self.number()
            coordinates = self.operand(scopes) if self.accept(",") else Vector(())
            self.take("]")
            if not isinstance(base, (Register, Symbol, Immediate)) or not isinstance(coordinates, Vector):
                self.refuse("an address is a name or number plus an offset")
            return Address(base, offset, coordinates.items)
        if self.accept("!"):
            register = self.operand(scopes)
            if not isinstance(register, Register):
                self.refuse("only a predicate register is negated")
            return Negated(register)
        if self.token[:2].lower() in ("0f", "0d") and NUMBER.fullmatch(self.token):
            return Immediate(int(self.take()[2:], 16), is_float=True)
        if self.token == "-" or NUMBER.fullmatch(self.token):
            return Immediate(self.number())
        name = self.take()
        if not re.match(r"[%$\w]", name):
            self.refuse(f"{name} is no operand")
        for scope in reversed(scopes):
            if name in scope.registers:
                return scope.registers[name]
        return Symbol(name)

    def resolved(self, instruction: Instruction, visible: tuple[_Scope, ...]) -> Instruction:
        """A branch with its target: a label of its own scope or of one around it."""
        (label,) = instruction.operands
        labels = [scope.labels for scope in reversed(visible) if isinstance(label, Symbol)]
        found = [known[label.name] for known in labels if label.name in known]
        if not found:
            raise TroubleError("syntax", "no such label", line=instruction.line, text=instruction.text)
        return instruction._replace(target=found[0])


def parse(text: str) -> Module:
    """The module that PTX text spells; raises TroubleError("syntax") with the line where it is not understood."""
    return _Parser(text).parse()
