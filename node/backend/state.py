"""The state of the backend, as `info` reports it, and its allowed transitions."""

from __future__ import annotations

from enum import StrEnum

from node.base.errors import CoreFailed, NotInitialized, NotStarted
from node.base.logs import Logger, LogRing
from node.events.journal import Tells
from node.events.kinds import Kind


class State(StrEnum):
    """The states of the backend. The value is the word in BaseInfoResponse.state."""

    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    FAILED = "failed"


# A Start and a Stop are possible in every state; a refused Start leaves the state as it was.
_ALWAYS = frozenset({State.STARTING, State.STOPPED})
# Allowed transitions. From "stopped" to "running": a core that waits for a Start is taken back.
NEXT = {
    State.STOPPED: _ALWAYS | {State.RUNNING},
    State.STARTING: _ALWAYS | {State.RUNNING, State.RESTARTING, State.FAILED},
    State.RUNNING: _ALWAYS | {State.RESTARTING, State.FAILED},
    State.RESTARTING: _ALWAYS | {State.RUNNING, State.RESTARTING, State.FAILED},
    State.FAILED: _ALWAYS | {State.RESTARTING, State.FAILED},
}


_KINDS = {
    State.STOPPED: Kind.STOPPED,
    State.STARTING: Kind.STARTING,
    State.RUNNING: Kind.RUNNING,
    State.RESTARTING: Kind.RESTARTING,
    State.FAILED: Kind.FAILED,
}


class Status:
    """The state of the one backend and the reason for it."""

    log = Logger()

    def __init__(self, ring: LogRing, journal: Tells) -> None:
        self._ring = ring
        self._journal = journal
        self.state = State.STOPPED
        self.reason = ""

    def enter(self, state: State, reason: str = "") -> None:
        """Enter a state and report it in both logs and as an event. Raises `AssertionError` if it may not follow."""
        if state not in NEXT[self.state]:
            raise AssertionError(f"a backend that is {self.state} cannot be {state} next")
        self.state, self.reason = state, reason
        text = f"backend {state}" + (f": {reason}" if reason else "")
        self._ring.event(text)
        self._journal.tell(_KINDS[state], text, **({"reason": reason} if reason else {}))
        self.log.info("{text}", text=text, state=str(state), reason=reason)

    @property
    def running(self) -> bool:
        return self.state is State.RUNNING

    @property
    def stopped(self) -> bool:
        return self.state is State.STOPPED

    @property
    def awaited(self) -> bool:
        """Whether a core is starting: it comes up with users that are supplied now."""
        return self.state in (State.STARTING, State.RESTARTING)

    def require(self) -> None:
        """Raise `NotStarted`, `CoreFailed` or `NotInitialized` if no core is running."""
        if self.awaited:
            raise NotStarted(self.reason or self.state)
        if self.state is State.FAILED:
            raise CoreFailed(f"the core is down: {self.reason}")
        if self.stopped:
            raise NotInitialized
