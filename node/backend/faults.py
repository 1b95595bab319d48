"""Reports unexpected errors, failures of background work and refused users to callers, logs and events."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.python.failure import Failure

from node.base.errors import Aborted, CoreFailed, NodeError
from node.base.logs import Logger, LogRing
from node.contract.accounts import Refusal
from node.contract.driver import Generation
from node.events.users import UserEvents

log = Logger()


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
        if failure.check(Aborted):
            return
        if isinstance(failure.value, NodeError):
            log.error("{text}: {reason}", text=text, reason=failure.value.text)
        else:
            log.failure(text, failure)

    ensureDeferred(work).addErrback(failed)
