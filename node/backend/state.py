"""What the backend is doing, as `info` tells it, and what may follow what."""

from __future__ import annotations

from enum import StrEnum

from node.errors import CoreFailed, NotInitialized, NotStarted
from node.events.journal import Tells
from node.events.kinds import Kind
from node.logs import Logger, LogRing


class State(StrEnum):
    """The value is the word in BaseInfoResponse.state."""

    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    FAILED = "failed"


# A Start and a Stop are possible in every state, and what a Start that is refused found stays as it was.
_ALWAYS = frozenset({State.STARTING, State.STOPPED})
# What may follow what. A core that waits for its end is taken back from "stopped" to "running".
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
        """Enter a state: `info` tells it, and so do the logs and the events."""
        if state not in NEXT[self.state]:
            raise AssertionError(f"a backend that is {self.state} cannot be {state} next")
        self.state, self.reason = state, reason
        said = f"backend {state}" + (f": {reason}" if reason else "")
        self._ring.event(said)
        self._journal.tell(_KINDS[state], said, **({"reason": reason} if reason else {}))
        self.log.info("backend {state} {reason}", state=str(state), reason=reason)

    @property
    def running(self) -> bool:
        return self.state is State.RUNNING

    @property
    def stopped(self) -> bool:
        return self.state is State.STOPPED

    @property
    def awaited(self) -> bool:
        """A core is on its way: users that are supplied now go with it."""
        return self.state in (State.STARTING, State.RESTARTING)

    def require(self) -> None:
        """Raises what a call that needs a running core fails with."""
        if self.awaited:
            raise NotStarted(self.reason or self.state)
        if self.state is State.FAILED:
            raise CoreFailed(f"the core is down: {self.reason}")
        if self.stopped:
            raise NotInitialized
