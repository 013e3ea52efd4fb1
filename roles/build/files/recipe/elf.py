"""What Seatrial reads from an ELF file (64 bit, little-endian): its segments and what it needs.

Source: System V ABI, chapters 4 and 5.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HEADER_BYTES = 64
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB = 0, 1, 5


class Segment(NamedTuple):
    """A program header: what the loader maps. Bytes."""

    kind: int
    offset: int
    address: int
    file_size: int


def elf_files(root: Path) -> Iterator[Path]:
    """Regular files under `root` that are 64-bit little-endian ELF, in a fixed order."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(6) == b"\x7fELF\x02\x01":
                    yield path


def segments(path: Path) -> list[Segment]:
    """The program headers of an ELF file."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        (table,) = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        file.seek(table)
        raw = file.read(size * count)
    found = []
    for i in range(count):
        kind, _, offset, address, _, file_size = struct.unpack_from("<IIQQQQ", raw, i * size)
        found.append(Segment(kind, offset, address, file_size))
    return found


def needed(path: Path) -> list[str]:
    """The sonames that the loader looks for when it loads this file."""
    parts = segments(path)
    dynamic = next((part for part in parts if part.kind == PT_DYNAMIC), None)
    if dynamic is None:
        return []
    with path.open("rb") as file:
        file.seek(dynamic.offset)
        entries = list(struct.iter_unpack("<QQ", file.read(dynamic.file_size)))
        names = [value for tag, value in entries if tag == DT_NEEDED]
        strings = file_offset(parts, next(value for tag, value in entries if tag == DT_STRTAB))
        return [read_string(path, strings + name) for name in names]


def file_offset(parts: list[Segment], address: int) -> int:
    """Where in the file the bytes lie that are loaded at `address`."""
    part = next(
        p for p in parts if p.kind == PT_LOAD and p.address <= address < p.address + p.file_size
    )
    return address - part.address + part.offset


def read_string(path: Path, offset: int) -> str:
    """The zero-ended string at `offset`."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(4096).split(b"\0", 1)[0].decode()


def strip(path: Path) -> int:
    """Cut off what the loader never maps (symbol tables, debug information); bytes saved."""
    end = max(part.offset + part.file_size for part in segments(path))
    saved = path.stat().st_size - end
    if saved > 0:
        with path.open("r+b") as file:
            file.truncate(end)
            # The section table went with it: its offset, entry count and name index become 0.
            file.seek(40)
            file.write(bytes(8))
            file.seek(58)
            file.write(bytes(6))
    return max(saved, 0)
