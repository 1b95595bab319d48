"""What callers and operators are told: of errors that nobody foresaw or waits for, of users, and of which process."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.python.failure import Failure

from node.contract.accounts import Refusal
from node.contract.driver import Generation, Shares
from node.errors import Aborted, CoreFailed, NodeError
from node.events.users import UserEvents
from node.logs import Logger, LogRing

log = Logger()


def as_told(error: Exception) -> NodeError:
    """What is told of an error that kept a core from running; the log has the rest of what nobody foresaw."""
    if isinstance(error, NodeError):
        return error
    log.failure("a core was not started")
    return CoreFailed(f"internal error: {type(error).__name__}; the node's log has more")


def leave_out(ring: LogRing, events: UserEvents, refused: Sequence[Refusal]) -> None:
    """Tell in the log of the core, and in the events, who cannot be used there."""
    events.refused(refused)
    for email, reason in refused:
        ring.event(f"user {email!r} is left out: {reason}")


def pid_of(run: Generation) -> dict[str, object]:
    """The field of an event that says which process it is about, while that lives."""
    return {"pid": run.pid} if isinstance(run, Shares) and run.pid is not None else {}


def in_background(work: Coroutine[Any, Any, object] | Deferred[object], text: str) -> None:
    """Nobody waits for the work: what goes wrong is logged, as `text`. That a Stop ended it is not wrong."""

    def failed(failure: Failure) -> None:
        if not failure.check(Aborted):
            log.failure(text, failure)

    ensureDeferred(work).addErrback(failed)
