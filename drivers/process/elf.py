"""Read the program interpreter (dynamic linker) of an executable file (elf(5))."""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = b"\x7fELF"
_INTERPRETER = 3


class Script(Exception):
    """The file is not an ELF executable, so another program interprets it."""


def interpreter(executable: Path) -> str | None:
    """Return the path of the dynamic linker; None if the executable needs none. Raises `Script`."""
    try:
        with executable.open("rb") as file:
            head = file.read(4096)
    except OSError:
        return None  # cannot be run either
    if not head.startswith(_MAGIC):
        raise Script
    try:
        return _interpreter(head)
    except struct.error:
        return None


def _interpreter(head: bytes) -> str | None:
    order, wide = "<" if head[5] == 1 else ">", head[4] == 2
    table = struct.unpack_from(order + ("Q" if wide else "I"), head, 32 if wide else 28)[0]
    size, count = struct.unpack_from(order + "HH", head, 54 if wide else 42)
    for number in range(count):
        # A segment: its type, offset in the file, and size.
        kind, place, length = struct.unpack_from(order + ("I4xQ16xQ" if wide else "II8xI"), head, table + number * size)
        if kind == _INTERPRETER:
            return head[place : place + length].rstrip(b"\0").decode("utf-8", "surrogateescape")
    return None
