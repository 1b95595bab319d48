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
from dataclasses import dataclass
from typing import Any

from twisted.internet.error import ConnectionAborted
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.protocols.policies import ProtocolWrapper
from twisted.protocols.tls import BufferingTLSTransport
from twisted.python.failure import Failure

from node.logs import Logger

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


class Handovers:
    """The replies that somebody waits for, each until it is settled."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._under_way: dict[Handover, Any] = {}

    def write(self, request: Any, body: bytes, settle: Callable[[bool], None]) -> None:
        """Write the whole body of a response and see to it that `settle` is told, once, what became of it."""
        try:
            self._write(request, body, settle)
        except BaseException:
            settle(False)
            raise

    def lost(self, transport: Any, reason: Failure) -> None:
        """The connection of this transport is no more. Unless it was aborted, the kernel may still be delivering."""
        for handover in [one for one, of in self._under_way.items() if of is transport]:
            if reason.check(ConnectionAborted):
                handover.give_up()
            else:
                handover.lost(short=queued(tcp(transport)) > 0)

    def close(self) -> None:
        """The node ends: settle everything by what is known now."""
        for handover in tuple(self._under_way):
            handover.give_up()

    def _write(self, request: Any, body: bytes, settle: Callable[[bool], None]) -> None:
        transport = request.channel.transport
        begin = written(transport)
        # Its own, for the transport closes the other before it tells that the connection is lost.
        link = tcp(transport).getHandle().dup()
        try:
            request.write(body)
            end = written(transport)
        except BaseException:
            link.close()
            raise
        if end - begin <= len(body):
            # There is more than the body, the headers at least: a connection that is ending took nothing.
            link.close()
            settle(False)
            return

        def done(whole: bool) -> None:
            del self._under_way[handover]
            link.close()
            settle(whole)

        handover = Handover(self._reactor, lambda: progress(link), end, done)
        self._under_way[handover] = transport


class Handover:
    """One reply on its way. Looks at the connection, first often and then seldom, until its fate is known."""

    log = Logger()

    def __init__(
        self, reactor: IReactorTime, look: Callable[[], Progress], end: int, done: Callable[[bool], None]
    ) -> None:
        self._reactor = reactor
        self._look = look
        self._end = end
        self._done = done
        self._lost = False
        self._pause = FIRST_LOOK
        self._timer: IDelayedCall = reactor.callLater(self._pause, self._again)

    def lost(self, short: bool) -> None:
        """The kernel is given no more. `short`: it was not given all that was written.

        Then the end of the connection stands where the next byte would be, and is acknowledged like one.
        """
        self._lost = True
        self._end += short
        self._settle(self._fate())

    def give_up(self) -> None:
        """There is no time to wait for more."""
        self._settle(self._fate() or False)

    def _again(self) -> None:
        self._settle(self._fate())

    def _settle(self, whole: bool | None) -> None:
        """Tell what is known, or look again later. The kernel ends a connection that makes no progress: see `site`."""
        if self._timer.active():
            self._timer.cancel()
        if whole is not None:
            self._done(whole)
            return
        self._timer = self._reactor.callLater(self._pause, self._again)
        self._pause = min(2 * self._pause, LAST_LOOK)

    def _fate(self) -> bool | None:
        try:
            seen = self._look()
        except OSError:
            self.log.failure("it cannot be known whether a reply arrived")
            return False
        if seen.acknowledged >= self._end:
            return True
        return False if seen.over or (self._lost and seen.given < self._end) else None
