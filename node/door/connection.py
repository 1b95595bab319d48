"""One connection of a client: its state, its timer and its address."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Any, Protocol

from twisted.internet.interfaces import IReactorTime

from node.base.alarm import Alarm


class Session(Protocol):
    """The protocol of one connection: knows the calls under way, and can end the connection gracefully.

    `relayed`: gRPC's server answers the calls, and sends GOAWAY when it stops.
    """

    @property
    def relayed(self) -> bool: ...
    def hold(self) -> None:
        """Begin no further call, as far as the protocol allows."""

    def finish(self, now: bool, streams: bool) -> bool:
        """End the connection if nothing is under way. Returns whether no call waits for an answer here.

        `now`: end it also if a request has not arrived completely. `streams`: end it also if streams are open.
        """


class Connection:
    """Its one timer runs while the node waits for the client, and not while the node answers.

    `secured`: the TLS handshake is done. `known`: the client has shown a key. `idle`: all its requests are answered.
    `over`: the connection was cut or lost; further events are ignored. `since`: when it was accepted. `network` is what
    counts as its address, `address` is for logs.
    """

    def __init__(self, reactor: IReactorTime, transport: Any, left: Callable[[Connection], None]) -> None:
        """`left` is called when the connection is lost."""
        self._reactor = reactor
        self._left = left
        self._alarm = Alarm(reactor, lambda: self._action())
        self._action: Callable[[], None] = self.cut
        self.transport = transport
        self.peer = transport.getPeer()
        host = str(getattr(self.peer, "host", ""))
        self.network = network(host)
        # A dual-stack listener has IPv4 addresses in IPv6's form.
        self.address = host.removeprefix("::ffff:")
        self.known = False
        self.secured = False
        self.idle = False
        self.idle_since = 0.0
        self.since = reactor.seconds()
        self.session: Session | None = None
        self.over = False

    def arm(self, seconds: float, action: Callable[[], None], idle: bool = False) -> None:
        """Start the timer: call `action` after this many seconds. Replaces the timer before it."""
        if not self.over:
            self.idle, self._action = idle, action
            self._alarm.set(seconds)

    def arm_instead(self, action: Callable[[], None]) -> None:
        """Call this instead when the running timer fires."""
        self._action = action

    def disarm(self) -> None:
        self._alarm.cancel()
        self.idle = False

    def rest(self, seconds: float, action: Callable[[], None]) -> None:
        """Everything is answered: call `action` if no request comes within these seconds."""
        self.idle_since = self._reactor.seconds()
        self.arm(seconds, action, idle=True)

    def rested(self, since: float) -> bool:
        """Whether all requests were answered before that time; a connection without a key only has to be older."""
        return (self.idle and self.idle_since < since) or (not self.known and self.since < since)

    def cut(self) -> None:
        """Abort the connection at once, without an answer."""
        self.disarm()
        self.over = True
        self.transport.abortConnection()

    def leave(self) -> None:
        """The connection is lost: give its place up."""
        self.disarm()
        self.over = True
        self._left(self)


def network(host: str) -> str:
    """Return what counts as one address: for IPv6 its first 64 bits, which a customer has at least."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # no IP address: a transport of a test, or none
        return host
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or int(address) >> 64)
    return str(address)
