"""What the node keeps on disk: what an earlier node saved, changes to it, and the parts that have it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from node.base.part import Part
from node.contract.counters import Counters, Row, Scope


class Packed(NamedTuple):
    """One event: its number, and the serialised message without the epoch."""

    sequence: int
    body: bytes


class Margins(NamedTuple):
    """The range of stored events: of this epoch, from `first` on; numbers up to `ceiling` are never used again."""

    epoch: str
    first: int
    ceiling: int


@dataclass
class Changes:
    """Changes to write in one transaction. Users and rows of later changes overwrite those of earlier ones.

    `clean`: delete everything first. `request`: a serialised Backend without users; None for no change, empty for no
    backend. `left`: remaining seconds of its keep-alive, None for no change. `routing`: its packed routing changes,
    None for no change. `clean_users`: delete all users first; with `staged` the staged users take their place. `users`:
    in stored order; None is a removal. `rows`: traffic not yet delivered; `totals`: sums since the state file began.
    `limits`: records of users, by key; None is a removal. `events` are appended; those before `margins.first` are
    deleted. `booked`: counters of runs that the rows include, by the runs' marks and the beginnings of their names;
    `booked_only`: delete those of all other runs. `days`: those of the bill, by date; None for one to delete.
    """

    clean: bool = False
    request: bytes | None = None
    left: float | None = None
    routing: bytes | None = None
    clean_users: bool = False
    staged: bool = False
    users: dict[str, bytes | None] = field(default_factory=dict)
    rows: dict[tuple[Scope, str], Row] = field(default_factory=dict)
    totals: dict[tuple[Scope, str], Row] = field(default_factory=dict)
    limits: dict[str, bytes | None] = field(default_factory=dict)
    margins: Margins | None = None
    events: list[Packed] = field(default_factory=list)
    booked: dict[str, dict[str, Counters]] = field(default_factory=dict)
    booked_only: Collection[str] | None = None
    days: dict[str, bytes | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return vars(self) != _NONE


_NONE = vars(Changes())


@dataclass(frozen=True)
class Saved:
    """The state from an earlier node: the serialised Backend (empty: none), its users, the rows not yet delivered.

    `left`: remaining seconds of the keep-alive; None for all. `routing`: packed routing changes. `margins` and
    `events`: the journal; None before the first event. `totals`: sums since the state file began. `limits`: records of
    users with their keys. `booked`: counters of runs that the rows include, by the runs' marks. `days`: those of the
    bill with their dates.
    """

    request: bytes = b""
    left: float | None = None
    users: tuple[bytes, ...] = ()
    rows: tuple[Row, ...] = ()
    routing: bytes = b""
    margins: Margins | None = None
    events: tuple[Packed, ...] = ()
    totals: tuple[Row, ...] = ()
    limits: tuple[tuple[str, bytes], ...] = ()
    booked: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    days: tuple[tuple[str, bytes], ...] = ()


class Lasting(Part):
    """A part whose state outlives the node. It overrides those of these methods that concern it."""

    def restore(self, saved: Saved) -> None:
        """Take over what an earlier node saved: before the start, or later if the disk could not be read then."""

    def save(self, changes: Changes) -> None:
        """Add everything that this part keeps on disk, for an empty state file."""

    def stored(self, margins: Margins) -> None:
        """Note that these margins of the journal are on disk."""

    def disk(self, fault: str) -> None:
        """Note that the disk fails or, with an empty text, that it works again."""

    def damaged(self, text: str) -> None:
        """Note that the state file was damaged and moved aside."""
