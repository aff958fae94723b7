"""An image (`hybrid.kernels.cpu.image`) from an object file: a linker for what LLVM makes of functions of ours on Linux
and x86-64 ("System V Application Binary Interface, AMD64 Architecture Processor Supplement", 2018, tables 4.9, 4.10).
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from hybrid.kernels.cpu.image import ADDRESS, Image

HEADER = b"\x7fELF\x02\x01"
"""An object file of 64 bits, the lowest byte first."""

KIND = Struct("<HH")
RELOCATABLE, X86_64 = 1, 62
"""Kind of file and machine, from byte 16 on."""

CONTENT, SYMBOLS, RELOCATIONS = 1, 2, 4
"""Types of sections: bytes, symbols, and relocations with addends."""

WRITTEN = 1
"""A flag of sections: it is written while code runs, or, where the name begins with READ_ONLY, when code is loaded."""

READ_ONLY = b".data.rel.ro"

ABSOLUTE, RELATIVE, CALL = 1, 2, 4
"""Types of relocations: an address, and two distances from the place itself."""

DISTANCE = Struct("<i")

JUMP = b"\xff\x25\x02\x00\x00\x00\x90\x90"
"""`jmp [rip + 2]`: to the address that follows. A function of the C library may be too far for a distance."""


class Section(NamedTuple):
    """A section's header, as it is in the file."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class Symbol(NamedTuple):
    """A symbol, as it is in the file."""

    name: int
    info: int
    other: int
    section: int
    value: int
    size: int


class Relocation(NamedTuple):
    """A place of a section that depends on where a symbol is."""

    place: int
    type: int
    symbol: int
    addend: int


class ObjectFile:
    """The parts of an object file."""

    def __init__(self, code: bytes) -> None:
        (start,), (count, names) = Struct("<Q").unpack_from(code, 40), Struct("<HH").unpack_from(code, 60)
        own, symbol, relocation = Struct("<IIQQQQIIQQ"), Struct("<IBBHQQ"), Struct("<QIIq")
        self.code = code
        self.sections = [Section(*own.unpack_from(code, start + own.size * each)) for each in range(count)]
        self.names = self.sections[names]
        (table,) = (section for section in self.sections if section.type == SYMBOLS)
        self.symbols = [Symbol(*each) for each in symbol.iter_unpack(self.content(table))]
        self.names_of_symbols = self.sections[table.link]
        self.relocations: dict[int, list[Relocation]] = {}
        for section in self.sections:
            if section.type == RELOCATIONS:
                found = (Relocation(*each) for each in relocation.iter_unpack(self.content(section)))
                self.relocations.setdefault(section.info, []).extend(found)

    def content(self, section: Section) -> bytes:
        """The bytes of a section that has some."""
        return self.code[section.offset : section.offset + section.size]

    def name(self, names: Section, place: int) -> bytes:
        """A name in a section of names."""
        start = names.offset + place
        return self.code[start : self.code.index(b"\0", start)]


class NotKnownError(ValueError):
    """An object file holds something that is not known here."""


class Linker:
    """Lays out what a function needs of an object file: sections, each when it is first referred to."""

    def __init__(self, file: ObjectFile) -> None:
        self.content = bytearray()
        self.pointers: list[int] = []
        self.symbols: dict[str, int] = {}
        self._file = file
        self._places: dict[int, int] = {}
        self._jumps: dict[str, int] = {}

    def place(self, symbol: Symbol) -> int:
        """Where a symbol is in the image."""
        if symbol.section == 0:
            return self._jump(self._file.name(self._file.names_of_symbols, symbol.name).decode())
        if symbol.section not in self._places:
            self._add(symbol.section)
        return self._places[symbol.section] + symbol.value

    def _add(self, index: int) -> None:
        """Add a section, and what it refers to."""
        if index >= len(self._file.sections):
            raise NotKnownError("a symbol that is in no section")
        section = self._file.sections[index]
        is_constant = not section.flags & WRITTEN or self._file.name(self._file.names, section.name).startswith(
            READ_ONLY
        )
        if section.type != CONTENT or not is_constant:
            raise NotKnownError("a section that is written while code runs")
        self._places[index] = start = self._append(self._file.content(section), section.alignment)
        for relocation in self._file.relocations.get(index, ()):
            self._fill_in(start + relocation.place, relocation)

    def _fill_in(self, place: int, relocation: Relocation) -> None:
        symbol = self._file.symbols[relocation.symbol]
        value = self.place(symbol) + relocation.addend
        if relocation.type in (RELATIVE, CALL):
            DISTANCE.pack_into(self.content, place, value - place)
        elif relocation.type == ABSOLUTE and symbol.section:
            ADDRESS.pack_into(self.content, place, value)
            self.pointers.append(place)
        else:
            raise NotKnownError(f"a relocation of type {relocation.type}")

    def _jump(self, name: str) -> int:
        """Where code is that jumps to a function of the C library."""
        if name not in self._jumps:
            self._jumps[name] = self._append(JUMP + bytes(ADDRESS.size), ADDRESS.size)
            self.symbols[name] = self._jumps[name] + len(JUMP)
        return self._jumps[name]

    def _append(self, content: bytes, alignment: int) -> int:
        self.content += bytes(-len(self.content) % max(alignment, 1)) + content
        return len(self.content) - len(content)


def link(code: bytes, name: str) -> Image | None:
    """The image of a function of an object file; None: there is something in the file that is not known here."""
    if not code.startswith(HEADER) or KIND.unpack_from(code, 16) != (RELOCATABLE, X86_64):
        return None
    file = ObjectFile(code)
    linker = Linker(file)
    (own,) = (each for each in file.symbols if file.name(file.names_of_symbols, each.name) == name.encode())
    try:
        entry = linker.place(own)
    except NotKnownError:
        return None
    return Image(bytes(linker.content), entry, linker.pointers, linker.symbols)
