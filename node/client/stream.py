"""The base of the streams of log lines and of events: they reconnect, with backoff."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from itertools import count
from typing import Any, Generic, Self, TypeVar

from twisted.application.internet import backoffPolicy
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.base.errors import NodeError
from node.client.failures import NoReply
from node.client.inbox import Inbox

# The type that a connection reads, and the type that the stream yields.
S = TypeVar("S")
T = TypeVar("T")

# Seconds before the next attempt to connect, by its number.
_delay = backoffPolicy(initialDelay=0.1, maxDelay=10.0, factor=2.0)


class Closed(Exception):
    """The reader has closed the stream, or it has ended as it was to."""


class Stream(Generic[S, T]):
    """An async iterator, for `async with`; or `next`, which returns all items that are there.

    If the connection breaks, the stream reconnects for up to `patience` seconds.
    """

    def __init__(self, reactor: IReactorTime, patience: float) -> None:
        self._reactor = reactor
        self._patience = patience
        self._source: Inbox[S] = Inbox(reactor)
        self._outbox: Inbox[T] = Inbox(reactor)
        self._ready: deque[T] = deque()
        self._following: Deferred[None] | None = None
        # The error that the reader got: with the next call the stream tries again.
        self._failed: NodeError | None = None

    async def open(self) -> Self:
        """Connect for the first time, without retries. Raises `NodeError`."""
        self._source = await self._connected()
        self._begin(self._follow())
        return self

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._following = Deferred.fromCoroutine(work)
        self._following.addErrback(self._outbox.fail)

    async def next(self, wait: float | None = None) -> list[T]:
        """Return the next items; none after `wait` seconds, or at the end.

        Raises the error of the last attempt to reconnect; another call tries again.
        """
        items = await self._arrived(wait)
        if items:
            self._took(items[-1])
        return items

    def close(self) -> None:
        """End the stream. Items that were read can still be taken."""
        self._outbox.end(Closed())
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            self._source.close()

    async def _connected(self) -> Inbox[S]:
        """Connect after the last item that was read."""
        raise NotImplementedError

    def _deliver(self, items: list[S]) -> None:
        """Put what was read into the outbox."""
        raise NotImplementedError

    def _took(self, item: T) -> None:
        """Note that all items up to this one were taken."""

    async def _arrived(self, wait: float | None) -> list[T]:
        if self._failed is not None:
            error, self._failed = self._failed, None
            self._outbox = Inbox(self._reactor)
            self._begin(self._again(error))
        try:
            return await self._outbox.take(wait)
        except Closed:
            return []
        except NodeError as error:
            self._failed = error
            raise

    async def _again(self, error: NodeError) -> None:
        """Reconnect and go on, after this error had ended that."""
        await self._resume(error if isinstance(error, NoReply) else NoReply(error.text))
        await self._follow()

    async def _follow(self) -> None:
        while True:
            try:
                self._deliver(await self._source.take())
            except NoReply as error:
                await self._resume(error)
            await self._outbox.room()

    async def _reconnect(self) -> None:
        """Make one attempt to reconnect. Raises `NoReply`."""
        self._source = await self._connected()

    async def _resume(self, error: NoReply) -> None:
        """Reconnect after this error. Raises the error of the last attempt after `patience` seconds."""
        self._source.close()
        end = self._reactor.seconds() + self._patience
        for number in count():
            left = end - self._reactor.seconds()
            if left <= 0:
                raise error
            await deferLater(self._reactor, min(left, _delay(number)))
            try:
                await self._reconnect()
            except NoReply as again:
                error = again
            else:
                break

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if not self._ready:
            self._ready.extend(await self._arrived(None))
        if not self._ready:
            raise StopAsyncIteration
        self._took(self._ready[0])
        return self._ready.popleft()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        self.close()
