"""What ptxas gave each kernel of a cubin, read from the ELF file alone: no CUDA tool is needed.

Section .nv.info is a row of records: format and attribute, one byte each, then for format 4 a 16-bit length and that
many bytes, for the others two bytes of payload.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

SIZED = 4  # format of a record with a length
NOBITS = 8  # section type
REGISTERS, FRAME = 0x2F, 0x11  # attributes: (symbol, registers) and (symbol, bytes of stack frame)


@dataclass(frozen=True)
class Resources:
    """Of one kernel. A frame holds spilled registers and local arrays; a good kernel has none. Shared memory is what is
    declared: the system's own part, and none of what a launch adds."""

    registers: int
    frame_bytes: int
    shared_bytes: int = 0


def resources(cubin: bytes) -> dict[str, Resources]:
    """Registers, stack frame and declared shared memory of every kernel.

    Raises:
        ValueError: not a 64-bit ELF file with a .nv.info section and a symbol table.
    """
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"cubin: expected a 64-bit ELF file, got one that starts with {cubin[:5]!r}")
    sections = _sections(cubin)
    for needed in (".nv.info", ".symtab", ".strtab"):
        if needed not in sections:
            raise ValueError(f"cubin: expected a section {needed}, got {sorted(sections)}")
    names = _symbol_names(sections[".symtab"], sections[".strtab"])
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for attribute, payload in _records(sections[".nv.info"]):
        if attribute in (REGISTERS, FRAME):
            symbol, value = struct.unpack_from("<II", payload)
            (registers if attribute == REGISTERS else frames)[names[symbol]] = value
    shared = {name: len(body) for name, body in sections.items() if name.startswith(".nv.shared.")}
    return {
        name: Resources(count, frames.get(name, 0), shared.get(f".nv.shared.{name}", 0))
        for name, count in registers.items()
    }


def _sections(elf: bytes) -> dict[str, bytes]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    # A section of type NOBITS has a size and nothing in the file.
    contents = [bytes(size) if kind == NOBITS else elf[at : at + size] for _, kind, _, _, at, size in headers]
    return {_string(contents[names_index], header[0]): body for header, body in zip(headers, contents, strict=True)}


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _symbol_names(symbols: bytes, strings: bytes) -> list[str]:
    return [_string(strings, struct.unpack_from("<I", symbols, at)[0]) for at in range(0, len(symbols), 24)]


def _records(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        payload = info[at + 4 : at + 4 + size] if form == SIZED else info[at + 2 : at + 4]
        at += 4 + (size if form == SIZED else 0)
        yield attribute, payload
