"""Tools for waiting with Deferreds: each waiter has one of its own, so that cancelling it affects no other."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

from twisted.internet.defer import CancelledError, Deferred, DeferredList, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

T = TypeVar("T")
U = TypeVar("U")


def lasting(work: Deferred[T]) -> Deferred[T]:
    """Return the outcome of work as another Deferred; cancelling that does not cancel the work."""
    outcome: Deferred[T] = Deferred()
    work.addCallbacks(outcome.callback, outcome.errback)
    return outcome


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Await work that is never cancelled: if the caller is cancelled, `CancelledError` is raised when it has ended."""
    going = ensureDeferred(work)
    try:
        return await lasting(going)
    except CancelledError:
        await going
        raise


async def outcomes(works: Iterable[Coroutine[Any, Any, T] | Deferred[T]]) -> list[T | Failure]:
    """Wait until all of these have ended; return the result or the failure of each, in order."""
    works = list(works)
    if len(works) == 1:  # the usual number; a list of Deferreds costs more than many a work
        try:
            return [await works[0]]
        except Exception:  # noqa: BLE001 - returned
            return [Failure()]
    ended: list[tuple[bool, Any]] = await DeferredList([ensureDeferred(work) for work in works], consumeErrors=True)
    return [outcome for _, outcome in ended]


async def together(works: Iterable[Coroutine[Any, Any, T] | Deferred[T]]) -> list[T]:
    """Wait until all of these have ended; return their results, in order. Raises the first error then."""
    good: list[T] = []
    for outcome in await outcomes(works):
        if isinstance(outcome, Failure):
            outcome.raiseException()
        else:
            good.append(outcome)
    return good


async def both(work: Coroutine[Any, Any, T], other: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Wait until both have ended; return both results. Raises as `together` does."""
    outcome, another = await together([cast("Coroutine[Any, Any, Any]", work), cast("Coroutine[Any, Any, Any]", other)])
    return outcome, another


def fire(waiter: Deferred[T], outcome: T) -> None:
    """Fire the Deferred, unless it has fired already."""
    if not waiter.called:
        waiter.callback(outcome)


class Waiters:
    """Waiters for an event that happens repeatedly. Each may be cancelled."""

    def __init__(self) -> None:
        self._waiting: list[Deferred[None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self) -> None:
        """Wait until the next `wake`."""
        # No canceller: a waiter cancelled while another is woken is still called back, which Twisted ignores then.
        waiter: Deferred[None] = Deferred()
        self._waiting.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def wake(self) -> None:
        """Wake all who wait now."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(None)


class Signal:
    """An event that happens once, for any number of waiters."""

    def __init__(self) -> None:
        self._fired = False
        self._waiters = Waiters()

    @property
    def fired(self) -> bool:
        return self._fired

    def fire(self) -> None:
        self._fired = True
        self._waiters.wake()

    async def wait(self) -> None:
        if not self._fired:
            await self._waiters.wait()


async def until(reactor: IReactorTime, met: Callable[[], bool], deadline: float, look: float) -> None:
    """Wait until `met`, looking every `look` seconds, but not longer than to the `deadline` in the reactor's time."""
    while not met() and reactor.seconds() < deadline:
        await deferLater(reactor, look)
