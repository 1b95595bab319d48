"""Whether a reply reached the client's machine: its kernel has acknowledged every byte of it.

No event of Twisted's tells. Bytes wait in its queues and in the kernel's, and a response counts as finished as soon as
it is queued. So the end of a reply is marked as a position in the connection's stream, and the kernel is asked how far
the other side has acknowledged. What is written behind the reply has no part in that.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.protocols.policies import ProtocolWrapper
from twisted.protocols.tls import BufferingTLSTransport
from twisted.python.failure import Failure

from node.logs import Logger
from node.waiting import fire

# Seconds between two looks at a connection: the first, and the longest.
FIRST_LOOK = 0.001
LAST_LOOK = 0.25

# Of linux/tcp.h: where struct tcp_info has tcpi_bytes_acked, and the state that is the end of all.
_BYTES_ACKED = 120
_CLOSED = 7


@dataclass(frozen=True)
class Progress:
    """What the kernel knows of a connection: bytes of its stream that were acknowledged, and bytes it was given.

    `over`: no more will be acknowledged.
    """

    acknowledged: int
    given: int
    over: bool


def progress(link: socket.socket) -> Progress:
    """Of a TCP connection, also after its end for as long as the socket is open. Raises `OSError`."""
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    # Sent or not: tcp(7), SIOCOUTQ. A connection that was reset keeps the number.
    (waiting,) = struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)))
    (acknowledged,) = struct.unpack_from("Q", info, _BYTES_ACKED)
    return Progress(acknowledged, acknowledged + waiting, info[0] == _CLOSED)


def tcp(transport: Any) -> Any:
    """The transport below TLS."""
    while isinstance(transport, ProtocolWrapper):
        transport = transport.transport
    return transport


def written(transport: Any) -> int:
    """The length of the connection's stream with all that was written to `transport` so far, TLS's own bytes included.

    Twisted has no public way to ask: TLS gathers small writes for a turn of the reactor, TCP keeps what the kernel did
    not take. What TLS itself holds back or throws away, because the connection ends, is not in the length.
    """
    below = tcp(transport)
    if isinstance(transport, BufferingTLSTransport):
        transport._aggregator.flush()
    return progress(below.getHandle()).given + queued(below)


def queued(below: Any) -> int:
    """Bytes that the kernel was not given yet."""
    return int(len(below.dataBuffer) - below.offset + below._tempDataLen)


class Deliveries:
    """The replies on their way that somebody asked about."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._under_way: dict[Delivery, Any] = {}

    def write(self, request: Any, body: bytes, delivered: Deferred[bool]) -> None:
        """Write the whole body of a response; `delivered` is fired when it is known what became of it."""
        with ExitStack() as failed:
            failed.callback(fire, delivered, False)
            transport = request.channel.transport
            begin = written(transport)
            # Its own, for the transport closes the other before it tells that the connection is lost.
            link = tcp(transport).getHandle().dup()
            failed.callback(link.close)
            request.write(body)
            end = written(transport)
            # There is more than the body, the headers at least: a connection that is ending took nothing.
            if end - begin > len(body):
                failed.pop_all()
                self._watch(transport, link, end, delivered)

    def watch(self, transport: Any, end: int, delivered: Deferred[bool]) -> None:
        """Fire `delivered` when it is known what became of the connection's stream, as it was `written` up to there."""
        with ExitStack() as failed:
            failed.callback(fire, delivered, False)
            link = tcp(transport).getHandle().dup()
            failed.pop_all()
            self._watch(transport, link, end, delivered)

    def lost(self, transport: Any, reason: Failure) -> None:
        """The connection of this transport is no more. Unless it was aborted, the kernel may still be delivering."""
        for delivery in [one for one, of in self._under_way.items() if of is transport]:
            if reason.check(ConnectionAborted):
                delivery.give_up()
            else:
                delivery.lost(short=queued(tcp(transport)) > 0)

    def close(self) -> None:
        """The node ends: all is told that is known now."""
        for delivery in tuple(self._under_way):
            delivery.give_up()

    def _watch(self, transport: Any, link: socket.socket, end: int, delivered: Deferred[bool]) -> None:
        def over(_: object) -> None:
            del self._under_way[delivery]
            link.close()

        delivery = Delivery(self._reactor, lambda: progress(link), end, delivered)
        self._under_way[delivery] = transport
        delivered.addCallback(over)


class Delivery:
    """One reply on its way. Looks at the connection, first often and then seldom, until `delivered` is fired."""

    log = Logger()

    def __init__(
        self, reactor: IReactorTime, look: Callable[[], Progress], end: int, delivered: Deferred[bool]
    ) -> None:
        self._reactor = reactor
        self._look = look
        self._end = end
        self._delivered = delivered
        self._lost = False
        self._pause = FIRST_LOOK
        self._timer: IDelayedCall = reactor.callLater(self._pause, self._again)
        # Whoever fires it, also the node's end.
        delivered.addCallback(self._stop)

    def lost(self, short: bool) -> None:
        """The kernel is given no more. `short`: it was not given all that was written.

        Then the end of the connection stands where the next byte would be, and is acknowledged like one.
        """
        self._lost = True
        self._end += short
        self._tell()

    def give_up(self) -> None:
        """There is no time to wait for more."""
        self._tell()
        fire(self._delivered, False)

    def _again(self) -> None:
        """The kernel ends a connection that makes no progress: see `site`."""
        self._timer = self._reactor.callLater(self._pause, self._again)
        self._pause = min(2 * self._pause, LAST_LOOK)
        self._tell()

    def _stop(self, _: object) -> None:
        if self._timer.active():
            self._timer.cancel()

    def _tell(self) -> None:
        """Tell what is known, once."""
        delivered = None if self._delivered.called else self._fate()
        if delivered is not None:
            fire(self._delivered, delivered)

    def _fate(self) -> bool | None:
        try:
            seen = self._look()
        except OSError:
            self.log.failure("it cannot be known whether a reply arrived")
            return False
        if seen.acknowledged >= self._end:
            return True
        return False if seen.over or (self._lost and seen.given < self._end) else None
