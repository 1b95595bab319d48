"""Events as they are stored on disk."""

from __future__ import annotations

from typing import NamedTuple


class Packed(NamedTuple):
    """One event: its number, and the serialised message without the epoch."""

    sequence: int
    body: bytes


class Margins(NamedTuple):
    """The range of stored events: of this epoch, from `first` on; numbers up to `ceiling` are never used again."""

    epoch: str
    first: int
    ceiling: int
