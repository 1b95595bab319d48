"""Schedules a new run in place of one that still knows credentials of removed users, though it keeps them out."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

from node.backend.drain import Drain
from node.base.alarm import Alarm
from node.contract.abilities import Shares
from node.contract.driver import Generation

# Seconds between a removal and the new run.
REFRESH = 1.5
# Seconds until a retry; and how long the new run is put off at most because it would end a draining run, or all UDP
# sessions.
RETRY = 30.0
PATIENCE = 60.0
SESSIONS = 600.0


class Refresh:
    """Calls `begin` when a new run is due. `run` is the current run."""

    def __init__(
        self,
        reactor: IReactorTime,
        run: Callable[[], Generation | None],
        drain: Drain,
        begin: Callable[[], None],
    ) -> None:
        self._reactor = reactor
        self._run = run
        self._drain = drain
        self._begin = begin
        self._alarm = Alarm(reactor, self._due)
        # Since when the new run is put off.
        self._patient_since: float | None = None
        # Whether a new run is due.
        self.due = False

    @property
    def wanted(self) -> bool:
        """Whether the current run knows credentials of removed users."""
        run = self._run()
        return run is not None and run.lingering

    def soon(self, seconds: float = REFRESH) -> None:
        """Schedule a new run, if wanted, after these seconds: more users may be removed meanwhile."""
        if not self.wanted:
            self._patient_since = None
        elif not self._alarm.pending:
            self._alarm.set(seconds)

    def cancel(self) -> None:
        """Cancel the scheduled run."""
        self._alarm.cancel()
        self._patient_since, self.due = None, False

    def _due(self) -> None:
        if self.wanted and self._is_patient():
            self.soon()
        else:
            self._patient_since, self.due = None, True
            self._begin()

    def _is_patient(self) -> bool:
        """Whether to put the new run off further because it would end connections."""
        now = self._reactor.seconds()
        self._patient_since = now if self._patient_since is None else self._patient_since
        return now - self._patient_since < self._patience

    @property
    def _patience(self) -> float:
        """Seconds for which the new run may be put off, by what it costs."""
        run = self._run()
        if isinstance(run, Shares) and run.ends_sessions:
            return SESSIONS
        return PATIENCE if self._drain.full else 0.0
