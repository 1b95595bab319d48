"""Traffic counters of a core, and the rows of bytes made of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from node.contract.accounts import key_of

DIRECTIONS = ("uplink", "downlink")


# Bytes up and down.
Both = tuple[int, int]


# Both counters of a name in a run of a core; None for one that it does not have.
Counters = tuple[int | None, int | None]


# Counter values by the cores' names for them: `user>>>NAME>>>traffic>>>uplink`. See `counter_name`.
Reading = Mapping[str, int]


_TRAFFIC = ">>>traffic>>>"


class Scope(Enum):
    """The kind of object that a traffic counter belongs to."""

    USER = "user"
    # A user in one inbound: see `SEPARATOR`. Only with USER_INBOUNDS; the bytes are also those of the user.
    USER_INBOUND = "user_inbound"
    INBOUND = "inbound"
    OUTBOUND = "outbound"

    # Members are compared by identity. Enum's own __hash__ is a Python call, for each of 100,000 counters.
    __hash__ = object.__hash__


# The scopes whose bytes are delivered; those of users by inbound only have totals.
DELIVERED = (Scope.USER, Scope.INBOUND, Scope.OUTBOUND)
# Between a user's name, or key, and the tag of the inbound in names of `USER_INBOUND`. No e-mail has this character.
SEPARATOR = "\x1f"
# Counters that are asked for: those of one name, or of all names (None) of a scope.
Asked = tuple[Scope, str | None]


@dataclass
class Seen:
    """The counters of a reading, with their values, as the core sent them: the next one skips these unparsed."""

    rows: set[bytes] = field(default_factory=set)


class Row(NamedTuple):
    """The bytes of one user, inbound or outbound. `name` has the spelling that the core was given."""

    scope: Scope
    name: str
    uplink: int
    downlink: int

    @property
    def key(self) -> str:
        """The key of the row: names of users that differ only in case are the same."""
        return _key(self.scope, self.name)

    @property
    def both(self) -> Both:
        return self.uplink, self.downlink


def counter_name(scope: Scope, name: str, direction: str) -> str:
    """Build the name of a counter in a reading."""
    return f"{scope.value}>>>{name}{_TRAFFIC}{direction}"


def by_name(counters: Mapping[str, Counters]) -> dict[str, int]:
    """A reading of these counters, which are given by the beginnings of their names."""
    return {
        f"{begin}{_TRAFFIC}{direction}": value
        for begin, both in counters.items()
        for direction, value in zip(DIRECTIONS, both, strict=True)
        if value is not None
    }


def _key(scope: Scope, name: str) -> str:
    return key_of(name) if scope is Scope.USER else name
