"""All open connections of both protocols: their timers, how many there may be, and which one is closed for a new one.

Wrong keys are counted by address: with too many, answers are delayed. Requests with a valid key are never delayed.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any, Protocol

from twisted.internet.interfaces import IReactorTime, ITCPTransport
from twisted.internet.task import deferLater

from node.api.methods import MAX_BODY
from node.base.alarm import Alarm
from node.base.limited_warning import LimitedWarning
from node.base.logs import Logger
from node.base.waiting import until
from node.door.bodies import BUDGET, Bodies
from node.door.bucket import Bucket, Rate
from node.door.delivery import Deliveries, tcp
from node.door.manners import Knows

# Seconds after which a client that acknowledges nothing, or reads nothing, counts as gone (tcp(7), TCP_USER_TIMEOUT).
DEAD_AFTER = 30

# Seconds, at the node's end: between two looks at what is answered, for handshakes under way, for the last bytes of a
# reply, and for those where no client has asked anything lately.
LOOK, SHAKE, LAST, SOON = 0.01, 0.3, 0.1, 0.03
# Looks in a row without a call under way before the node counts as idle: a call may be between two threads.
QUIET = 5

# Wrong keys of one address that are answered at once, and how many more each second; and the delay of further answers
# in seconds. A delayed client's connection counts as one without a key, which a newcomer may replace.
WRONG_KEYS = Rate(60, 1.0)
LATE = 3.0
# Addresses that are remembered: the last ones that sent wrong keys.
REMEMBERED = 4096

_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_AFTER),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_AFTER // 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER * 1000),
)


@dataclass(frozen=True)
class Limits:
    """Limits for clients. Times are in seconds and absolute: bytes that trickle in do not prolong them.

    `deadline` is for the headers of a request; for the first one it includes the TLS handshake. `key` is for the key on
    an HTTP/2 connection, after its first headers. `body_deadline` is from the end of the headers to the end of the
    body: 64 MiB in 120 s is a line of 4.5 Mbit/s, and no known client waits for longer than 30 s. `idle` is for a
    connection on which everything is answered. `linger` is for a refused client: it may still send, so that a reset
    does not destroy the answer before it is read. `strangers` is the number of connections without a key from one
    address. `bodies` is the number of bytes of all bodies together, `max_body` that of one REST body.
    """

    deadline: float = 10.0
    key: float = 10.0
    body_deadline: float = 120.0
    idle: float = 120.0
    linger: float = 5.0
    max_connections: int = 512
    strangers: int = 256
    bodies: int = BUDGET
    max_body: int = MAX_BODY


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
        host = str(getattr(transport.getPeer(), "host", ""))
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
        """Let the timer do nothing. It goes on: moving it later takes less time than making another one."""
        self.idle, self._action = False, _nothing

    def rest(self, seconds: float, action: Callable[[], None]) -> None:
        """Note that all requests are answered; call `action` if no request comes within these seconds."""
        self.idle_since = self._reactor.seconds()
        self.arm(seconds, action, idle=True)

    def rested(self, since: float) -> bool:
        """Whether all requests were answered before that time; a connection without a key only has to be older."""
        return (self.idle and self.idle_since < since) or (not self.known and self.since < since)

    def cut(self) -> None:
        """Abort the connection at once, without an answer."""
        self._end()
        self.transport.abortConnection()

    def _end(self) -> None:
        self._alarm.cancel()
        self.idle, self.over = False, True

    def leave(self) -> None:
        """The connection is lost: give its place up."""
        self._end()
        self._left(self)


class Guesses:
    """Counts wrong keys by address: a token bucket for each."""

    log = Logger()

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._keys = LimitedWarning(reactor, self.log.warn, "a request with a wrong key or none")
        late = "many wrong keys from one address; answers to it are delayed"
        self._late = LimitedWarning(reactor, self.log.warn, late)

    def wrong(self, connection: Connection) -> float:
        """Count a request with a wrong key or none. Returns the seconds by which to delay its answer."""
        self._keys.happened(connection.address)
        now = self._reactor.seconds()
        bucket = self._buckets.setdefault(connection.network, Bucket(WRONG_KEYS, now))
        self._buckets.move_to_end(connection.network)
        if len(self._buckets) > REMEMBERED:
            self._buckets.popitem(last=False)
        if bucket.take(1, now):
            return 0.0
        self._late.happened(connection.address)
        return LATE

    def sum_up(self) -> None:
        """Log the warnings that were only counted."""
        self._keys.sum_up()
        self._late.sum_up()


class Connections:
    """Admits connections while there are places, and keeps track of them until they end.

    `knows` checks the key of a request, by its values of `authorization` and of `x-api-key`.
    """

    log = Logger()

    def __init__(self, reactor: IReactorTime, limits: Limits, knows: Knows) -> None:
        self.reactor = reactor
        self.knows = knows
        self.limits = limits
        self.deliveries = Deliveries(reactor)
        self.guesses = Guesses(reactor)
        self.bodies = Bodies(limits.bodies)
        self.handshakes = LimitedWarning(reactor, self.log.warn, "a TLS handshake failed")
        limit = f"connection limit ({limits.max_connections}) reached"
        limit += "; each new one closes one without a key, or an idle one"
        self._full = LimitedWarning(reactor, self.log.warn, limit)
        limit = f"{limits.strangers} connections without a key from one address; each new one closes one"
        self._crowded = LimitedWarning(reactor, self.log.warn, limit)
        self.unnamed = LimitedWarning(reactor, self.log.warn, "a client that does not know DOOR_NAME was turned away")
        self.no_decoy = LimitedWarning(reactor, self.log.warn, "strangers are cut: DECOY cannot be reached")
        # By TCP transport, oldest first.
        self._open: dict[Any, Connection] = {}

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, transport: Any) -> Connection:
        """Return the connection of this transport, or of the one below it; from here on it is ended by this transport.

        The first call takes a place; without a free one the connection is cut.
        """
        link = tcp(transport)
        connection = self._open.get(link)
        if connection is None:
            connection = Connection(self.reactor, transport, self._left)
            self._admit(connection, link)
        connection.transport = transport
        return connection

    def _admit(self, connection: Connection, link: Any) -> None:
        """Admit a connection. At a limit, cut one without a key or an idle one for it; without such a one, cut it."""
        spare = self._crowding(connection)
        if spare is not None:
            self._crowded.happened(connection.address)
        elif len(self._open) >= self.limits.max_connections:
            self._full.happened(connection.address)
            spare = self._spare()
            if spare is None:
                connection.cut()
                return
        if spare is not None:
            self._left(spare)
            spare.cut()
        self._open[link] = connection
        _notice_death(link)
        connection.arm(self.limits.deadline, connection.cut)

    def _left(self, connection: Connection) -> None:
        self._open.pop(tcp(connection.transport), None)

    def _crowding(self, newcomer: Connection) -> Connection | None:
        """A connection without a key from the newcomer's address, if that address has as many as allowed."""
        crowd = [one for one in self._open.values() if one.network == newcomer.network and not one.known]
        return _stranger(crowd) if len(crowd) >= self.limits.strangers else None

    def _spare(self) -> Connection | None:
        """A connection without a key, otherwise the one that has been idle for longest."""
        idle = (connection for connection in self._open.values() if connection.idle)
        return _stranger(self._open.values()) or min(idle, key=lambda one: one.idle_since, default=None)

    def sum_up(self) -> None:
        """Log the rate-limited warnings that were only counted."""
        for part in (self.handshakes, self.guesses, self._full, self._crowded, self.unnamed, self.no_decoy):
            part.sum_up()

    # The node's end

    def disconnect(self) -> None:
        """Abort every connection when the node ends: log streams never end by themselves."""
        self.deliveries.close()
        self.sum_up()
        for connection in self:
            connection.transport.abortConnection()

    async def dismiss(self) -> None:
        """Close HTTP/1.1 connections when the node ends: at once if idle for `LAST` seconds, else with the next reply.

        Waits for those replies, for at most 2 * `LAST` seconds.
        """
        sessions = [each.session for each in self if each.session is not None and not each.session.relayed]
        for session in sessions:
            session.hold()

        def over() -> bool:
            ended = [session.finish(False, False) for session in sessions]
            return all(ended)

        await self._until(over, 2 * LAST)

    async def finish(self, seconds: float, idle: Callable[[], bool]) -> None:
        """Let calls under way be answered, for at most this many seconds; then end each connection gracefully.

        For a hand-over: the next node process accepts connections on these ports. Clients of HTTP/1.1 get the end with
        their last reply, or at once if they are idle. The node does not read what gRPC clients send meanwhile: by
        GOAWAY they learn that those calls were not processed, and repeat them. `idle`: no call is under way; after that
        has held for a moment, what is open on relays are streams that may last for ever.
        """
        # A connection without a handshake for this long has no call under way.
        early = self.reactor.seconds() - SHAKE
        await self._until(lambda: all(each.secured or each.since < early for each in self), SHAKE)
        for each in self:
            if each.session is not None:
                each.session.hold()
        await deferLater(self.reactor, LOOK)
        looks = 0

        def over() -> bool:
            nonlocal looks
            looks = looks + 1 if idle() else 0
            return self._finished(streams=looks > QUIET)

        await self._until(over, seconds)
        self._finished(streams=True, all_of_them=True)
        # If all clients have had their last answer for long, a shorter wait is enough.
        lately = self.reactor.seconds() - LAST
        await self._until(lambda: not len(self), SOON if all(each.rested(lately) for each in self) else LAST)

    def _finished(self, streams: bool, all_of_them: bool = False) -> bool:
        """End connections whose calls are answered, those without a key and, with `streams`, those with open streams.

        Returns whether no client waits for an answer, and no delivery is being watched.
        """
        waiting = False
        for each in self:
            if each.session is not None:
                waiting |= not each.session.finish(all_of_them or not each.known, streams)
            else:
                each.transport.loseConnection()
        return not (waiting or self.deliveries.under_way)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        await until(self.reactor, condition, self.reactor.seconds() + seconds, LOOK)


def _stranger(connections: Iterable[Connection]) -> Connection | None:
    """The oldest connection whose TLS handshake is not done, otherwise the oldest one without a key."""
    strangers = [connection for connection in connections if not connection.known]
    return next((one for one in strangers if not one.secured), next(iter(strangers), None))


def _nothing() -> None:
    """What the timer of a connection does while the node answers."""


def _notice_death(link: Any) -> None:
    """Make the kernel end the connection when the client is gone without closing it."""
    for option in _KEEP_ALIVE if ITCPTransport.providedBy(link) else ():
        link.getHandle().setsockopt(*option)


def network(host: str) -> str:
    """Return what counts as one address: for IPv6 its first 64 bits, which a customer has at least."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:  # no IP address: a transport of a test, or none
        return host
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or int(address) >> 64)
    return str(address)
