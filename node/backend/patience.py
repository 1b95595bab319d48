"""The timeout of callers: panels take a node that does not answer in time for dead."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from node.backend.faults import log
from node.base.errors import CoreFailed, NodeError

T = TypeVar("T")

# Seconds. Deployed panels give up after 8 to 10.
PATIENCE = 7.5


async def answered(reactor: IReactorTime, work: Coroutine[Any, Any, T], what: str) -> T:
    """Wait for work, with a timeout for the caller. Cancelling the caller does not cancel the work.

    Raises `CoreFailed` if it takes longer than `PATIENCE`; the work goes on then, and its failure is logged.
    """
    late = False
    waiter: Deferred[T] = Deferred()

    def done(outcome: T | Failure) -> None:
        if not late:
            waiter.callback(outcome)  # a Failure is an errback
        elif isinstance(outcome, Failure) and isinstance(outcome.value, NodeError):
            log.error("{what} failed after its caller was answered: {reason}", what=what, reason=outcome.value.text)
        elif isinstance(outcome, Failure):
            log.failure("{what} failed after its caller was answered", outcome, what=what)

    def too_late() -> None:
        waiter.errback(CoreFailed(f"{what} takes longer than {PATIENCE:g} s; the node continues in the background"))

    ensureDeferred(work).addBoth(done)
    if waiter.called:
        return await waiter
    call = reactor.callLater(PATIENCE, too_late)
    try:
        return await waiter
    finally:
        late = True
        if call.active():
            call.cancel()
