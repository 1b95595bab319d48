"""Long work on the reactor, in slices: other work gets a turn between two of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

T = TypeVar("T")


def a_turn(reactor: IReactorTime) -> Deferred[None]:
    """Fires in the reactor's next turn."""
    return deferLater(reactor, 0)


async def slices(reactor: IReactorTime, items: Iterable[T], size: int) -> AsyncIterator[list[T]]:
    """Yield the items in lists of `size`, with a turn of the reactor between two."""
    rest = iter(items)
    part = list(islice(rest, size))
    while part:
        yield part
        if part := list(islice(rest, size)):
            await a_turn(reactor)
