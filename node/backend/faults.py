"""Reports unexpected errors, failures of background work and refused users; bounds how long callers wait."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from node.base.errors import Aborted, CoreFailed, NodeError
from node.base.logs import Logger, LogRing
from node.contract.accounts import Refusal
from node.contract.driver import Generation
from node.events.users import UserEvents

log = Logger()
T = TypeVar("T")

# Seconds. Deployed panels give up after 8 to 10, and take a node that does not answer in time for dead.
PATIENCE = 7.5


def as_node_error(error: Exception) -> NodeError:
    """Convert the error that kept a core from starting to a `NodeError` for callers; log an unexpected one."""
    if isinstance(error, NodeError):
        return error
    log.failure("a core could not be started, by a fault of the node")
    return CoreFailed(f"internal error: {type(error).__name__}; the node's log has more")


def leave_out(ring: LogRing, events: UserEvents, refused: Sequence[Refusal]) -> None:
    """Report refused users in the core's log and as an event."""
    events.refused(refused)
    for email, reason in refused:
        ring.event(f"user {email!r} is left out: {reason}")


def pid_of(run: Generation) -> dict[str, object]:
    """The `pid` field of an event about a run; empty if the process is gone."""
    return {"pid": run.pid} if run.pid is not None else {}


def in_background(work: Coroutine[Any, Any, object] | Deferred[Any], text: str) -> None:
    """Run work that no caller waits for. A failure is logged with `text`, except `Aborted` (by a Stop)."""

    def failed(failure: Failure) -> None:
        if not failure.check(Aborted):
            log.failed(text, failure)

    ensureDeferred(work).addErrback(failed)


async def answered(reactor: IReactorTime, work: Coroutine[Any, Any, T], what: str) -> T:
    """Wait for work, with a timeout for the caller. Cancelling the caller does not cancel the work.

    Raises `CoreFailed` if it takes longer than `PATIENCE`; the work goes on then, and its failure is logged.
    """
    late = False
    waiter: Deferred[T] = Deferred()

    def done(outcome: T | Failure) -> None:
        if not late:
            waiter.callback(outcome)  # a Failure is an errback
        elif isinstance(outcome, Failure):
            log.failed("{what} failed after its caller was answered", outcome, what=what)

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
