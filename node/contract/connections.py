"""Live connections of users, for limits: the protocols of runs that can list, end and pace them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

# An IP address in network order: 4 or 16 bytes; an IPv4-mapped IPv6 address is given as IPv4.
Address = bytes
# Identifies a connection within its run, for as long as the connection lives.
Handle = bytes
# Called with a user's key and an address when a run learns of a new connection.
Arrived = Callable[[str, Address], None]


class Live(NamedTuple):
    """A snapshot of a user's connection; `key` is the user's, `tag` that of the inbound.

    `silent`: seconds since the client sent or acknowledged data. `sent`: bytes that the client has acknowledged, and
    `received`: bytes that it has sent, since the connection began. `waiting`: bytes queued for the client.
    `round_trip`: the shortest one seen, in seconds.
    """

    key: str
    address: Address
    handle: Handle
    silent: float = 0.0
    sent: int = 0
    received: int = 0
    waiting: int = 0
    round_trip: float = 0.0
    tag: str = ""


@runtime_checkable
class SeesConnections(Protocol):
    """A generation that knows which user each connection belongs to; `unseen` names inbounds where it does not."""

    arrived: Arrived

    @property
    def unseen(self) -> Mapping[str, str]:
        """The managed inbounds whose connections it cannot attribute to users, and why, for an operator."""

    @property
    def mixed(self) -> Mapping[str, str]:
        """The managed inbounds with a connection that carries several users now, which is no user's, and why."""

    def may_carry(self, key: str) -> bool:
        """Whether the user may have a connection. False only if the run is sure. Called very often."""

    async def look(self, keys: Collection[str]) -> list[Live]:
        """The connections of these users. Raises `errors.CoreFailed` if they cannot be listed now."""

    async def end(self, connections: Iterable[Live]) -> int:
        """End these connections, and no others. Returns how many were ended, without those already gone."""


@runtime_checkable
class SeesForwarded(Protocol):
    """A generation whose users may come through a reverse proxy, which reports their addresses."""

    async def forwarded(self, keys: Collection[str]) -> Mapping[str, Collection[Address]]:
        """The addresses from which these users are connected in that way, by key.

        Raises `errors.CoreFailed`, and `errors.Unsupported`.
        """


@runtime_checkable
class KeepsOut(SeesConnections, SeesForwarded, Protocol):
    """A generation that cannot close connections through a reverse proxy, but can refuse new ones.

    `arrived` is called for them, and `look` does not list them. `fronted` names the inbounds, with what an operator
    should know. `barred` has the networks from which users were kept out when the run began, or was taken over.
    """

    fronted: Mapping[str, str]
    barred: Mapping[str, Sequence[str]]

    async def keep_out(self, barred: Mapping[str, Sequence[str]]) -> None:
        """Refuse new connections of these users, by key, from these networks, and of no others.

        Raises `errors.CoreFailed`, and `errors.Unsupported`.
        """


@runtime_checkable
class Paces(SeesConnections, Protocol):
    """A generation that can limit the speed of connections."""

    @property
    def unpaced(self) -> Mapping[str, str]:
        """The managed inbounds, besides the unseen ones, whose connections cannot be paced, and why."""

    async def pace(self, rates: Mapping[Handle, int | None]) -> set[Handle]:
        """Limit the bytes a second that these connections send to their clients; None: no limit.

        Returns the connections to which the limit now applies.
        """

    async def pace_new(self, rates: Mapping[str, int | None]) -> bool:
        """Limit new connections in the same way, by managed inbound, until `pace` sets another rate for them.

        Returns whether this applies now, as far as inbounds can be paced.
        """

    async def narrow(self, windows: Mapping[Handle, int | None]) -> set[Handle]:
        """Limit the receive windows of these connections to so many bytes; None: the kernel's default."""
