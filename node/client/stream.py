"""The base of the streams of log lines and of events: they reconnect, with backoff."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Generic, Self, TypeVar

from twisted.application.internet import backoffPolicy
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.client.failures import NoReply
from node.client.inbox import Inbox

# What is read from a connection; what the stream yields of it.
S = TypeVar("S")
T = TypeVar("T")

# Seconds before the next attempt to connect, by its number.
_delay = backoffPolicy(initialDelay=0.1, maxDelay=10.0, factor=2.0)


class Stream(Generic[S, T]):
    """An async iterator, for `async with`; or `next`, which returns all items that are there.

    If the connection breaks, the stream reconnects for up to `patience` seconds. `connect` begins at a place.
    """

    def __init__(self, reactor: IReactorTime, connect: Callable[[Any], Awaitable[Inbox[S]]], patience: float) -> None:
        self._reactor = reactor
        self._connect = connect
        self._patience = patience
        self._ready: deque[T] = deque()
        self._source: Inbox[S] = Inbox(reactor)

    async def open(self) -> Self:
        """Connect for the first time, without retries. Raises `NodeError`."""
        raise NotImplementedError

    def close(self) -> None:
        """End the stream."""
        raise NotImplementedError

    async def next(self, wait: float | None = None) -> list[T]:
        """Return the next items; none after `wait` seconds, or at the end. Raises the error that ended the stream."""
        items = await self._arrived(wait)
        if items:
            self._took(items[-1])
        return items

    async def _arrived(self, wait: float | None) -> list[T]:
        """As `next`, before the items were taken."""
        raise NotImplementedError

    def _took(self, item: T) -> None:
        """Note that all items up to this one were taken."""

    async def _reconnect(self) -> None:
        """Make one attempt to connect again, and to go on where the last connection broke. Raises `NoReply`."""
        raise NotImplementedError

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
