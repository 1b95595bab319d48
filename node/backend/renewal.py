"""Starts a new run of the same configuration for changes of users that a core cannot take while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from twisted.internet.defer import CancelledError

from node.backend.context import Context, Worker
from node.backend.drain import Drain
from node.backend.faults import as_node_error
from node.backend.replace import Check, Replacement
from node.base.alarm import Alarm
from node.base.errors import CoreFailed, NodeError, NotStarted
from node.base.logs import Logger
from node.contract.abilities import NotShared, Shares
from node.contract.accounts import Accounts, Change, apply, diff
from node.contract.driver import Generation

# Seconds that the new run may take until it can take over.
SECONDS = 5.0
# Seconds between a removal and the new run.
REFRESH = 1.5
# Seconds until a retry; and how long the new run is put off at most because it would end a draining run, or all UDP
# sessions.
RETRY = 30.0
PATIENCE = 60.0
SESSIONS = 600.0


@dataclass(frozen=True)
class Renewed:
    """The outcome of a renewal: the run that serves now, the additions missing from it, and why."""

    run: Generation
    out: Sequence[Change] = ()
    fault: NodeError | None = field(default=None)


class Renewal(Worker):
    """Replaces the current run by a new one. `failed` is called if that leaves no current run."""

    log = Logger()

    def __init__(self, context: Context, replacement: Replacement, failed: Callable[[NodeError], None]) -> None:
        super().__init__(context)
        self._replacement = replacement
        self._failed = failed
        # Whether the renewal under way is cancelled: a backend may be running again before it has ended.
        self.cancelled = False

    async def renew(self, run: Generation, left: Sequence[Change]) -> Renewed:
        """Start a run with these changes, or without the additions if none starts with them.

        Removals are in force either way. Returns the same run if no addition can be brought in, or if a Start, a Stop
        or a crash came meanwhile. Raises `CoreFailed` if no run started, and `CancelledError` if `cancelled`.
        """
        if not (run.alive and run is self._generations.current and self._status.running):
            return Renewed(run)
        try:
            return await self._begin(run, left)
        except Exception as error:
            if self.cancelled:
                raise CancelledError from error
            if not self._status.running:
                return Renewed(run)
            failure = CoreFailed(as_node_error(error).text)
            if self._generations.current is None:
                self._failed(failure)
            raise failure from error

    async def refresh(self, run: Generation) -> Generation:
        """Start a run that knows no removed users, if that ends no connection; else return this one."""
        assert self._desired.accepted is not None
        if self._replacement.drain.lacks(run):
            return run
        plan = self._desired.accepted.runs
        try:
            return await self._replacement.beside(plan, lambda: self._accounts(run, ()), 0.0, SECONDS, whole=True)
        except (NodeError, NotShared) as error:
            self.log.info(
                "no new core took over to forget removed users: {reason}; the running core keeps the removed users out",
                reason=str(error),
            )
            return run

    async def _begin(self, run: Generation, left: Sequence[Change]) -> Renewed:
        coming = [change for change in left if change.packed is not None]
        try:
            return Renewed(await self._bring(run, left, checked=True))
        except Exception as error:
            if self.cancelled:
                raise
            self._status.require()
            if isinstance(error, NotStarted):
                return Renewed(run)
            fault = as_node_error(error)
        leaving = [each._replace(packed=None) for each in left if each.key in run.accounts.get(each.tag, {})]
        if not leaving and run is self._generations.current:
            return Renewed(run, coming, fault)
        self.log.error(
            "a core with the changed users did not start: {reason}; starting one without them", reason=fault.text
        )
        return Renewed(await self._bring(run, leaving), coming, fault)

    async def _bring(self, run: Generation, left: Sequence[Change], checked: bool = False) -> Generation:
        assert self._desired.accepted is not None
        plan = self._desired.accepted.runs

        async def check() -> None:
            await plan.check(self._accounts(run, left))
            if not run.alive:
                raise NotStarted("the core ended meanwhile")

        only: Check | None = check if checked else None
        return await self._replacement.bring(plan, lambda: self._accounts(run, left), 0.0, SECONDS, only)

    def _accounts(self, run: Generation, left: Sequence[Change]) -> Mapping[str, Accounts]:
        """The run's current accounts, with the changes that are still wanted, without users removed meanwhile.

        Raises as `Status.require`: a Start or a Stop may have come meanwhile.
        """
        self._status.require()
        target = self._desired.target
        accounts = apply([each for each in left if target.get(each.tag, {}).get(each.key) == each.packed], run.accounts)
        others = [each for each in diff(accounts, target) if each.key in accounts[each.tag]]
        return apply([each._replace(packed=None) for each in others], accounts) if others else accounts


class Refresh(Worker):
    """Schedules a new run in place of one that still knows credentials of removed users, though it keeps them out.

    Calls `begin` when it is due.
    """

    def __init__(self, context: Context, drain: Drain, begin: Callable[[], None]) -> None:
        super().__init__(context)
        self._drain = drain
        self._begin = begin
        self._alarm = Alarm(self._reactor, self._due)
        # Since when the new run is put off.
        self._patient_since: float | None = None
        # Whether a new run is due.
        self.due = False

    @property
    def wanted(self) -> bool:
        """Whether the current run knows credentials of removed users."""
        run = self._running
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
        run = self._running
        if isinstance(run, Shares) and run.ends_sessions:
            return SESSIONS
        return PATIENCE if self._drain.full else 0.0
