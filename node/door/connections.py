"""The connections that there are, whichever protocol they speak: each has a place, a deadline, and an address."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any, Protocol

from twisted.internet.interfaces import IDelayedCall, IReactorTime, ITCPTransport
from twisted.internet.task import deferLater

from node.door.bodies import BUDGET, Bodies
from node.door.delivery import Deliveries, tcp
from node.door.guesses import Guesses
from node.door.places import Places
from node.logs import Logger
from node.repeated import Repeated

# Seconds in which a client that acknowledges nothing, or takes nothing, counts as gone (tcp(7), TCP_USER_TIMEOUT).
DEAD_AFTER = 30

# Seconds between two looks at which requests are answered, for hands that are being shaken, and for the last bytes: of
# an answer, or where nobody has asked anything lately.
LOOK, SHAKE, LAST, SOON = 0.01, 0.3, 0.1, 0.03
# Looks in a row at which nothing was under way, before that is believed: a call may be between two threads.
QUIET = 5

_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_AFTER),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_AFTER // 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER * 1000),
)


@dataclass(frozen=True)
class Limits:
    """What a client may take. Times are in seconds and absolute: what trickles in does not prolong them.

    `deadline` is for the headers of a request, of the first one together with TLS's handshake. `key` is for the key on
    an HTTP/2 connection, from there. `body_deadline` is from the end of the headers to that of the body: 64 MiB in
    120 s is a line of 4.5 Mbit/s, and no known client waits for longer than 30 s. `idle` is for a connection on which
    everything is answered. `linger` is for a refused client: it may still send, so that a reset does not destroy the
    answer before it is read. `strangers` is for the connections of one address that have not shown the key. `bodies` is
    for the bytes of all bodies together.
    """

    deadline: float = 10.0
    key: float = 10.0
    body_deadline: float = 120.0
    idle: float = 120.0
    linger: float = 5.0
    max_connections: int = 512
    strangers: int = 256
    bodies: int = BUDGET


class Relayed(Protocol):
    """The side of a client whose calls somebody else answers."""

    def hold(self) -> None:
        """Hear no more of the client."""

    def finish(self, now: bool) -> bool:
        """End it if all its calls are answered; `now`: those that are not are told so. Whether it ends."""


class Connection:
    """One connection. Its one timer is armed for whatever is awaited from the client; none runs while we answer.

    `secured`: hands were shaken. `known`: the client has shown the key. `idle`: all its requests are answered. `over`:
    nothing counts any more. `since`: when it was made.
    """

    def __init__(self, connections: Connections, transport: Any) -> None:
        self._connections = connections
        self._timer: IDelayedCall | None = None
        self._action: Callable[[], None] = self.cut
        self.transport = transport
        self.peer = transport.getPeer()
        host = str(getattr(self.peer, "host", ""))
        self.network = network(host)
        # For people; a listener for both has IPv4's in IPv6's form.
        self.address = host.removeprefix("::ffff:")
        self.known = False
        self.secured = False
        self.idle = False
        self.idle_since = 0.0
        self.since = connections.reactor.seconds()
        self.relay: Relayed | None = None
        self.over = False

    def arm(self, seconds: float, action: Callable[[], None], idle: bool = False) -> None:
        """Have this done after so many seconds, instead of what was to be done before."""
        self.disarm()
        if not self.over:
            self.idle, self._action = idle, action
            self._timer = self._connections.reactor.callLater(seconds, self._due)

    def arm_instead(self, action: Callable[[], None]) -> None:
        """Have this done, at the time that the timer is armed for."""
        self._action = action

    def disarm(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
        self.idle = False

    def rest(self, action: Callable[[], None]) -> None:
        """Everything is answered: have this done if nothing more is asked for long."""
        self.idle_since = self._connections.reactor.seconds()
        self.arm(self._connections.limits.idle, action, idle=True)

    def rested(self, since: float) -> bool:
        """Whether everything has been answered since then, if there was anything."""
        return (self.idle and self.idle_since < since) or (not self.known and self.since < since)

    def cut(self) -> None:
        """End the connection at once, without a word."""
        self.disarm()
        self.over = True
        self.transport.abortConnection()

    def leave(self) -> None:
        """It is lost."""
        self.disarm()
        self.over = True
        self._connections.left(self)

    def _due(self) -> None:
        self._action()


class Connections:
    """Lets connections in, while there are places, and knows them until they end."""

    log = Logger()

    def __init__(self, reactor: IReactorTime, limits: Limits) -> None:
        self.reactor = reactor
        self.limits = limits
        self.places: Places[Connection] = Places(reactor, limits.max_connections, limits.strangers)
        self.deliveries = Deliveries(reactor)
        self.guesses = Guesses(reactor)
        self.bodies = Bodies(limits.bodies)
        self.handshakes = Repeated(reactor, self.log.warn, "a TLS handshake failed")
        self._by_link: dict[Any, Connection] = {}

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self.places))

    def __len__(self) -> int:
        return len(self.places)

    def enter(self, transport: Any) -> Connection:
        """The connection of this transport, or of the one below it, which is ended by this one from here on.

        At the first ask it takes a place; if there is none, it is over.
        """
        link = tcp(transport)
        connection = self._by_link.get(link)
        if connection is None:
            connection = Connection(self, transport)
            self._admit(connection, link)
        connection.transport = transport
        return connection

    def left(self, connection: Connection) -> None:
        self.places.leave(connection)
        self._by_link.pop(tcp(connection.transport), None)

    def disconnect(self) -> None:
        """End every connection, for the node's own end: log streams never end by themselves."""
        self.deliveries.close()
        self.sum_up()
        for connection in self:
            connection.transport.abortConnection()

    async def finish(self, seconds: float, idle: Callable[[], bool]) -> None:
        """Let what is under way be answered, for so many seconds, and end each connection in good order after it.

        For when somebody else accepts here soon. What clients send meanwhile is not read, so that they know that it was
        not heard, and say it again. `idle`: nothing is being done for anybody; once that has been so for a moment, what
        is open on relays are streams that may last for ever.
        """
        # Who has not shaken hands for so long has no call under way.
        early = self.reactor.seconds() - SHAKE
        await self._until(lambda: all(each.secured or each.since < early for each in self), SHAKE)
        for each in self:
            if each.relay is not None:
                each.relay.hold()
        await deferLater(self.reactor, LOOK)
        looks = 0

        def over() -> bool:
            nonlocal looks
            looks = looks + 1 if idle() else 0
            return self._finished(streams=looks > QUIET)

        await self._until(over, seconds)
        self._finished(streams=True, all_of_them=True)
        # Clients that have had their last answer for long may take their time with the end.
        lately = self.reactor.seconds() - LAST
        await self._until(lambda: not len(self), SOON if all(each.rested(lately) for each in self) else LAST)

    def _finished(self, streams: bool, all_of_them: bool = False) -> bool:
        """End those that have their answers, those of strangers, and `streams`. Whether nobody waits for an answer."""
        waiting = False
        for each in self:
            now = all_of_them or not each.known
            if each.relay is not None:
                waiting |= not each.relay.finish(now or streams)
            elif each.idle or now:
                each.transport.loseConnection()
            else:
                waiting = True
        return not waiting

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = self.reactor.seconds() + seconds
        while not condition() and self.reactor.seconds() < deadline:
            await deferLater(self.reactor, LOOK)

    def sum_up(self) -> None:
        """Tell what of strangers was only counted."""
        for part in (self.handshakes, self.guesses, self.places):
            part.sum_up()

    def _admit(self, connection: Connection, link: Any) -> None:
        if self.places.admit(connection):
            self._by_link[link] = connection
            _notice_death(link)
            connection.arm(self.limits.deadline, connection.cut)
        else:
            connection.cut()


def network(host: str) -> str:
    """What counts as one address: of IPv6 the 64 bits that a customer has at least."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # of a test's transport, or none
        return host
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or int(address) >> 64)
    return str(address)


def _notice_death(link: Any) -> None:
    """Have the kernel end the connection when the client is gone without a word."""
    for option in _KEEP_ALIVE if ITCPTransport.providedBy(link) else ():
        link.getHandle().setsockopt(*option)
