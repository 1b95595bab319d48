"""The live connections of users, for limits: what a run of a core can tell of them, and do to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

# An IP address as it travels: 4 bytes or 16; an IPv4-mapped IPv6 address is its IPv4 address.
Address = bytes
# What tells a run which of its connections is meant; of one run only, and as long as the connection lives.
Handle = bytes
# A user (by key) has a connection from there that is new, or of which the run has just heard.
Arrived = Callable[[str, Address], None]


class Live(NamedTuple):
    """A connection of a user (by key) as it is now.

    `silent`: seconds since the client or somebody for it moved a byte. `sent`, `received`: bytes that the client has
    confirmed, and that it has sent, since the connection began. `waiting`: bytes that are to be sent to it.
    `round_trip`: the shortest one that was seen, in seconds.
    """

    key: str
    address: Address
    handle: Handle
    silent: float = 0.0
    sent: int = 0
    received: int = 0
    waiting: int = 0
    round_trip: float = 0.0


@runtime_checkable
class SeesConnections(Protocol):
    """A generation that knows whose its connections are. Those that it does not know are nobody's: see its `unseen`."""

    arrived: Arrived

    @property
    def unseen(self) -> Mapping[str, str]:
        """The managed inbounds whose users' connections it cannot tell, and why, for an operator."""

    def may_carry(self, key: str) -> bool:
        """Whether the user may have a connection. False only where the run is sure; asked very often."""

    async def look(self, keys: Collection[str]) -> list[Live]:
        """The connections of these users. Raises `errors.CoreFailed` if they cannot be known now."""

    async def end(self, connections: Iterable[Live]) -> int:
        """End these, and only these. Returns how many were ended; those that have ended are none."""


@runtime_checkable
class Paces(SeesConnections, Protocol):
    """A generation that can hold connections to a speed."""

    @property
    def unpaced(self) -> Mapping[str, str]:
        """The managed inbounds, beside the unseen, whose connections cannot be paced, and why."""

    async def pace(self, rates: Mapping[Handle, int | None]) -> set[Handle]:
        """Have these connections send to their clients at most so many bytes a second; None: as fast as they can.

        Returns those that are paced so now.
        """

    async def pace_new(self, rates: Mapping[str, int | None]) -> bool:
        """The same for connections to come, by managed inbound; of each until `pace` says otherwise.

        Returns whether it is so now, where it can be.
        """

    async def narrow(self, windows: Mapping[Handle, int | None]) -> set[Handle]:
        """Have these connections take at most so many bytes from their clients at once; None: as the kernel has it."""
