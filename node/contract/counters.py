"""What a core has counted, and the rows of bytes that are made of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from node.contract.accounts import key_of

DIRECTIONS = ("uplink", "downlink")


# Bytes up and down.
Both = tuple[int, int]


# What a core has counted, by names as the cores have them: `user>>>NAME>>>traffic>>>uplink`. See `counter_name`.
Reading = Mapping[str, int]


_TRAFFIC = ">>>traffic>>>"


class Scope(Enum):
    """What a traffic counter belongs to."""

    USER = "user"
    INBOUND = "inbound"
    OUTBOUND = "outbound"

    # Members are compared by identity. Enum's own is a call of Python's, for each of 100,000 counters.
    __hash__ = object.__hash__


class Row(NamedTuple):
    """The bytes of one user, inbound or outbound. `name` is spelled as a core was given it."""

    scope: Scope
    name: str
    uplink: int
    downlink: int

    @property
    def key(self) -> str:
        """What a row is told by: two names of users that differ in case are one."""
        return _key(self.scope, self.name)

    @property
    def both(self) -> Both:
        return self.uplink, self.downlink


def counter_name(scope: Scope, name: str, direction: str) -> str:
    """The name of a counter in a reading."""
    return f"{scope.value}>>>{name}{_TRAFFIC}{direction}"


def _key(scope: Scope, name: str) -> str:
    return key_of(name) if scope is Scope.USER else name
