"""A log stream that outlives its connections."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from types import TracebackType
from typing import Self

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from node.client.again import until_done
from node.client.failures import NoReply
from node.client.inbox import Inbox
from node.client.line import Line
from node.logs import NODE_MARK, REPLAY, TOO_SLOW

# Seconds without a line after which a new connection has told what it begins with, and seconds after which it has so
# in any case.
QUIET, SETTLED = 0.3, 2.0

# Begins what this client has to say itself.
CLIENT_MARK = "[client] "
# Stands where lines may be missing.
GAP = f"{CLIENT_MARK}the connection broke: lines may be missing here"


class LogStream:
    """The node's log lines, in their order: those that it gives a new reader, then what comes.

    An async iterator of lines, for `async with`; or `next`, which takes all that are there. If the connection breaks,
    it is made again, for as long as `patience` says, and the stream goes on behind the last line that was read. The
    node tells the place of each, so none is missing, and none comes twice. Where more lines came meanwhile than the
    node keeps, it says how many are lost; lines that it had not sent when it ended are, too: `GAP` stands there.

    Older nodes, and any in the deployed dialect, tell no places. What a new connection begins with, the newest REPLAY
    lines of the ring, is laid over what was read last then. So some things cannot be promised there:

    - If more than REPLAY lines came meanwhile, those before the newest REPLAY are lost. `GAP` stands there.
    - Where the same lines come again and again, word for word, one may be taken for its like, and be missing or come
      twice. Lines of cores have their time; those of the node itself have not.
    - After a break, the first lines may come SETTLED seconds late.
    """

    def __init__(
        self, reactor: IReactorTime, connect: Callable[[str], Awaitable[Inbox[Line]]], patience: float = math.inf
    ) -> None:
        self._reactor = reactor
        self._connect = connect
        self._patience = patience
        # What was read last.
        self._last = Line("")
        self._seen: deque[str] = deque(maxlen=REPLAY)
        self._ready: deque[str] = deque()
        self._outbox: Inbox[str] = Inbox(reactor)
        self._source: Inbox[Line] = Inbox(reactor)
        self._following: Deferred[None] | None = None

    async def open(self) -> Self:
        """Connect for the first time, for which there is no patience. Raises `NodeError`."""
        self._source = await self._connect("")
        self._following = Deferred.fromCoroutine(self._follow())
        self._following.addErrback(self._outbox.fail)
        return self

    async def next(self, wait: float | None = None) -> list[str]:
        """The next lines; none if none come within `wait` seconds, or after `close`. Raises what ended the stream."""
        try:
            return await self._outbox.take(wait)
        except _Closed:
            return []

    def close(self) -> None:
        """End the stream. What was read and not taken still can be."""
        self._outbox.end(_Closed())
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            self._source.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if not self._ready:
            self._ready.extend(await self.next())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _follow(self) -> None:
        while True:
            try:
                lines = await self._source.take()
                self._deliver(lines, [] if lines[0].log == self._last.log or not self._last.log else [GAP])
            except NoReply as error:
                await self._resume(error)
            await self._outbox.room()

    async def _resume(self, error: NoReply) -> None:
        """Connect again and deliver what is new there. Raises the error of the last attempt when patience is over."""
        self._source.close()
        await until_done(self._reactor, self._reconnect, self._patience, error)

    async def _reconnect(self) -> None:
        self._source = await self._connect(self._last.place)
        if not self._last.place:
            try:
                self._go_on(await self._beginning())
            except NoReply:
                self._source.close()
                raise

    async def _beginning(self) -> list[Line]:
        """What a new connection begins with, or more."""
        lines: list[Line] = []
        end = self._reactor.seconds() + SETTLED
        while len(lines) < REPLAY and self._reactor.seconds() < end and (more := await self._source.take(QUIET)):
            lines += more
        return lines

    def _go_on(self, lines: list[Line]) -> None:
        known = overlap(list(self._seen), [line.text for line in lines[:REPLAY]])
        if known is None:
            self._seen.clear()
        self._deliver(lines[known or 0 :], [GAP] if known is None else [])

    def _deliver(self, lines: list[Line], before: Sequence[str] = ()) -> None:
        for text, _ in lines:
            if text.startswith(NODE_MARK) and text.endswith(TOO_SLOW):
                self._seen.clear()  # what came before does not stand before what comes
            else:
                self._seen.append(text)
        self._last = lines[-1] if lines else self._last
        self._outbox.put([*before, *(text for text, _ in lines)])


class _Closed(Exception):
    """Nobody wants more lines."""


def overlap(seen: Sequence[str], beginning: Sequence[str]) -> int | None:
    """How many lines at a new stream's beginning were read before, if the last ones read are there; else None.

    The most of what was read counts, and if all of it is there more than once, its first place.
    """
    size = len(seen)
    whole = (end for end in range(size, len(beginning) + 1) if beginning[end - size : end] == seen)
    parts = (end for end in range(min(size, len(beginning)), 0, -1) if beginning[:end] == seen[size - end :])
    return next(chain(whole, parts), None)
