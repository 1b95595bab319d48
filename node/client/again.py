"""Reconnect streams, with backoff."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count

from twisted.application.internet import backoffPolicy
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.client.failures import NoReply

# Seconds before the next attempt to connect, by its number.
_delay = backoffPolicy(initialDelay=0.1, maxDelay=10.0, factor=2.0)


async def until_done(
    reactor: IReactorTime, attempt: Callable[[], Awaitable[None]], patience: float, error: NoReply
) -> None:
    """Retry until an attempt succeeds. After `patience` seconds raise the last error, which is `error` at first."""
    end = reactor.seconds() + patience
    for number in count():
        left = end - reactor.seconds()
        if left <= 0:
            raise error
        await deferLater(reactor, min(left, _delay(number)))
        try:
            await attempt()
            return
        except NoReply as again:
            error = again
