"""Waiting for something that others do: one Deferred a waiter, so that whoever gives up disturbs nobody."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar, cast

from twisted.internet.defer import CancelledError, Deferred, DeferredList, ensureDeferred

T = TypeVar("T")
U = TypeVar("U")


def lasting(work: Deferred[T]) -> Deferred[T]:
    """The outcome of work that goes on when its caller gives up."""
    outcome: Deferred[T] = Deferred()
    work.addCallbacks(outcome.callback, outcome.errback)
    return outcome


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """The outcome of work that is not broken off: a caller who is cancelled hears of that when it has ended."""
    going = ensureDeferred(work)
    try:
        return await lasting(going)
    except CancelledError:
        await going
        raise


async def together(works: Iterable[Coroutine[Any, Any, T] | Deferred[T]]) -> list[T]:
    """The outcomes of all of these, in order, when the last has ended. Raises the first error among them then."""
    ended: list[tuple[bool, Any]] = await DeferredList([ensureDeferred(work) for work in works], consumeErrors=True)
    for succeeded, outcome in ended:
        if not succeeded:
            outcome.raiseException()
    return [outcome for _, outcome in ended]


async def both(work: Coroutine[Any, Any, T], other: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """The outcomes of both when both have ended. Raises as `together`."""
    outcome, another = await together([cast("Coroutine[Any, Any, Any]", work), cast("Coroutine[Any, Any, Any]", other)])
    return outcome, another


def fire(waiter: Deferred[T], outcome: T) -> None:
    """The first outcome counts; whoever comes later with another one changes nothing."""
    if not waiter.called:
        waiter.callback(outcome)


class Waiters:
    """Those who wait for what happens again and again. Each may give up."""

    def __init__(self) -> None:
        self._waiting: list[Deferred[None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self) -> None:
        """Until the next `wake`."""
        # Without a canceller: one that gives up because another is waked is waked all the same, which Twisted ignores.
        waiter: Deferred[None] = Deferred()
        self._waiting.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def wake(self) -> None:
        """It has happened, for whoever waits now."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(None)


class Signal:
    """Fires once, for any number of waiters."""

    def __init__(self) -> None:
        self._fired = False
        self._waiters = Waiters()

    def fire(self) -> None:
        self._fired = True
        self._waiters.wake()

    async def wait(self) -> None:
        if not self._fired:
            await self._waiters.wait()
