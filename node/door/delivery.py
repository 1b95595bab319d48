"""Watch the delivery of replies: one is delivered when the client's kernel has acknowledged every byte of it.

Twisted has no event for this. Bytes wait in its queues and in the kernel's, and a response counts as finished as soon
as it is queued. So the end of a reply is noted as a position in the connection's stream, and the kernel is asked how
far the other side has acknowledged. Bytes written after the reply do not matter.
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
from twisted.internet.interfaces import IReactorTime
from twisted.protocols.policies import ProtocolWrapper
from twisted.protocols.tls import BufferingTLSTransport
from twisted.python.failure import Failure

from node.base.alarm import Alarm
from node.base.logs import Logger
from node.base.waiting import fire

# Seconds between two looks at a connection: the first, and the longest.
FIRST_LOOK = 0.001
LAST_LOOK = 0.25

# From linux/tcp.h: the offset of tcpi_bytes_acked in struct tcp_info, and the state TCP_CLOSE.
_BYTES_ACKED = 120
_CLOSED = 7


@dataclass(frozen=True)
class Progress:
    """The kernel's state of a connection: acknowledged bytes of its stream, and bytes that the kernel has taken.

    `over`: no more will be acknowledged.
    """

    acknowledged: int
    given: int
    over: bool


def progress(link: socket.socket) -> Progress:
    """Read the progress of a TCP connection; after its end, too, while the socket is open. Raises `OSError`."""
    _, acknowledged = _info(link)
    while True:
        # Bytes that are not acknowledged, sent or not: tcp(7), SIOCOUTQ. A connection that was reset keeps the number.
        (waiting,) = struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)))
        before, (state, acknowledged) = acknowledged, _info(link)
        # Else some bytes were acknowledged between the two calls: they are in neither number.
        if acknowledged == before:
            return Progress(acknowledged, acknowledged + waiting, state == _CLOSED)


def _info(link: socket.socket) -> tuple[int, int]:
    """Read the state and the number of acknowledged bytes from struct tcp_info."""
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    (acknowledged,) = struct.unpack_from("Q", info, _BYTES_ACKED)
    return info[0], acknowledged


def tcp(transport: Any) -> Any:
    """Return the TCP transport below TLS."""
    while isinstance(transport, ProtocolWrapper):
        transport = transport.transport
    return transport


def flush(transport: Any) -> None:
    """Have TLS write now what it buffers for a reactor turn. Twisted has no public API for this."""
    if isinstance(transport, BufferingTLSTransport):
        aggregator: Any = transport._aggregator
        aggregator.flush()
        # What it has scheduled has nothing to do any more, and would cost the reactor a turn.
        if scheduled := getattr(aggregator, "_scheduled", None):
            aggregator._scheduled = scheduled.cancel()


def written(transport: Any) -> int:
    """Return the length of the TCP stream with all that was written to `transport` so far, TLS's own bytes included.

    Twisted has no public API for this: TLS buffers small writes for a reactor turn, TCP keeps what the kernel did not
    take. Bytes that TLS itself holds back or drops, because the connection ends, are not counted.
    """
    below = tcp(transport)
    flush(transport)
    return progress(below.getHandle()).given + queued(below)


def queued(below: Any) -> int:
    """Return the number of bytes that the kernel has not taken yet."""
    return int(len(below.dataBuffer) - below.offset + below._tempDataLen)


class Deliveries:
    """The replies under way whose delivery is watched."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._under_way: dict[Delivery, Any] = {}

    def write(self, request: Any, body: bytes, delivered: Deferred[bool]) -> None:
        """Write the whole body of a response; fire `delivered` with whether it was delivered, when that is known."""
        with ExitStack() as failed:
            failed.callback(fire, delivered, False)
            transport = request.channel.transport
            begin = written(transport)
            request.write(body)
            end = written(transport)
            # More than the body is written, the headers at least; an ending connection takes nothing.
            if end - begin > len(body):
                failed.pop_all()
                self.watch(transport, end, delivered)

    def watch(self, transport: Any, end: int, delivered: Deferred[bool]) -> None:
        """Fire `delivered` when it is known whether the stream was delivered up to position `end`: see `written`."""
        with ExitStack() as failed:
            failed.callback(fire, delivered, False)
            # A duplicate: the transport closes its own before it reports that the connection is lost.
            link = tcp(transport).getHandle().dup()
            failed.pop_all()

        def over(_: object) -> None:
            del self._under_way[delivery]
            link.close()

        delivery = Delivery(self._reactor, lambda: progress(link), end, delivered)
        self._under_way[delivery] = transport
        delivered.addCallback(over)

    @property
    def under_way(self) -> bool:
        """Whether any delivery is being watched."""
        return bool(self._under_way)

    def when_known(self, transport: Any, act: Callable[[], object]) -> None:
        """Call `act` as soon as no delivery on this transport is being watched."""
        if waiting := self._of(transport):
            waiting[-1].delivered.addCallback(lambda _: self.when_known(transport, act))
        else:
            act()

    def lost(self, transport: Any, reason: Failure) -> None:
        """The connection of this transport is lost. Unless it was aborted, the kernel may still be delivering."""
        for delivery in self._of(transport):
            if reason.check(ConnectionAborted):
                delivery.give_up()
            else:
                delivery.lost(short=queued(tcp(transport)) > 0)

    def _of(self, transport: Any) -> list[Delivery]:
        return [delivery for delivery, of in self._under_way.items() if of is transport]

    def close(self) -> None:
        """The node ends: decide all deliveries by what is known now."""
        for delivery in tuple(self._under_way):
            delivery.give_up()


class Delivery:
    """One watched reply. Polls the connection, with growing pauses, until `delivered` is fired."""

    log = Logger()

    def __init__(
        self, reactor: IReactorTime, look: Callable[[], Progress], end: int, delivered: Deferred[bool]
    ) -> None:
        self._look = look
        self._end = end
        self.delivered = delivered
        self._lost = False
        self._pause = FIRST_LOOK
        self._alarm = Alarm(reactor, self._again)
        self._alarm.set(self._pause)
        # Also when the node's end fires it.
        delivered.addCallback(lambda _: self._alarm.cancel())

    def lost(self, short: bool) -> None:
        """The connection is lost: the kernel gets no more bytes. `short`: it did not get all that were written.

        Then the FIN has the position of the next byte, and would be taken for that byte when it is acknowledged.
        """
        self._lost = True
        self._end += short
        self._decide()

    def give_up(self) -> None:
        """Decide now: without an acknowledgement the reply counts as not delivered."""
        self._decide()
        fire(self.delivered, False)

    def _again(self) -> None:
        """Poll. It ends in any case: the kernel ends a connection that makes no progress (`connections.DEAD_AFTER`)."""
        self._alarm.set(self._pause)
        self._pause = min(2 * self._pause, LAST_LOOK)
        self._decide()

    def _decide(self) -> None:
        """Fire `delivered` if the outcome is known, once."""
        delivered = None if self.delivered.called else self._fate()
        if delivered is not None:
            fire(self.delivered, delivered)

    def _fate(self) -> bool | None:
        try:
            seen = self._look()
        except OSError:
            self.log.failure("cannot read from the kernel whether a reply was delivered; it counts as not delivered")
            return False
        if seen.acknowledged >= self._end:
            return True
        return False if seen.over or (self._lost and seen.given < self._end) else None
