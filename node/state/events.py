"""Events as they lie on disk."""

from __future__ import annotations

from typing import NamedTuple


class Packed(NamedTuple):
    """One event: its number, and the serialised message without the epoch."""

    sequence: int
    body: bytes


class Margins(NamedTuple):
    """Which events there are: of this epoch, from `first` on; no number up to `ceiling` is given out again."""

    epoch: str
    first: int
    ceiling: int
