"""The keep-alive: ends a backend after a time without calls from a controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IReactorTime

from node.backend.runner import Runner
from node.base.alarm import Alarm
from node.base.logs import Logger, LogRing
from node.base.part import Part
from node.base.periodic import Periodic
from node.base.reactor import PooledReactor
from node.state.store import Store


class Countdown:
    """A timer that each call of a controller resets; `expired` gets the reason. With 0 `seconds` it is off."""

    def __init__(self, reactor: IReactorTime, expired: Callable[[str], None]) -> None:
        self._alarm = Alarm(reactor, lambda: expired(f"no controller has called for {self.seconds:g} s"))
        self.seconds = 0.0

    @property
    def left(self) -> float | None:
        """Seconds until it expires; None if it does not run."""
        return self._alarm.left

    def set(self, seconds: float, left: float | None = None) -> None:
        """Restart the timer with this period; the first one has only `left` seconds, if given."""
        self.stop()
        self.seconds = seconds
        if seconds:
            self._alarm.set(seconds if left is None else max(0.0, min(left, seconds)))

    def touch(self) -> None:
        """Reset the timer: a controller has called."""
        if self.seconds:
            self._alarm.set(self.seconds)

    def stop(self) -> None:
        """Turn the timer off."""
        self.seconds = 0.0
        self._alarm.cancel()


class KeepAlive(Part):
    """Ends the backend when its keep-alive, the period that its Start has set, expires.

    `outlive`: the backend keeps running when it expires. `interval`: seconds between two writes to the state file.
    """

    title = "the keep-alive"
    log = Logger()

    def __init__(
        self, reactor: PooledReactor, ring: LogRing, runner: Runner, store: Store, *, outlive: bool, interval: float
    ) -> None:
        self._ring = ring
        self._runner = runner
        self._store = store
        self._outlive = outlive
        self._countdown = Countdown(reactor, self._expired)
        # Starts under way: while there are any, it does not expire. Whether a controller has called.
        self._starts, self._heard = 0, False
        self._noting = Periodic("saving the remaining keep-alive time", self._note, interval, reactor)

    @property
    def warnings(self) -> list[str]:
        return self._noting.warnings

    def start(self) -> None:
        self._noting.start()

    def restore_left(self, left: float | None) -> None:
        """Keep in the state file what the node before had left, until the backend runs."""
        if left is not None:
            self._store.keep_alive(left)

    def stop(self) -> None:
        self._noting.stop()
        self._note()
        self.off()

    def leave(self) -> None:
        self.stop()

    def touch(self) -> None:
        """A controller has called: begin again."""
        self._heard = True
        self._countdown.touch()

    def off(self) -> None:
        """Turn it off: the backend is stopped."""
        self._countdown.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not expire while a Start is under way; then go by the backend that runs."""
        self.off()
        self._starts += 1
        try:
            yield
        finally:
            self._starts -= 1
            self._follow()

    def resumed(self, left: float | None) -> None:
        """The backend of the node before runs again, whose keep-alive had so many seconds left; None for all."""
        self._follow(None if self._heard else left)
        # The record takes a running backend for one that a controller has just started.
        self._note()

    def _follow(self, left: float | None = None) -> None:
        """Begin with the period of the current backend, or with what is left of it."""
        if not self._starts:
            accepted = self._runner.accepted
            self._countdown.set(accepted.keep_alive if accepted else 0, left)

    def _note(self) -> None:
        if (left := self._countdown.left) is not None:
            self._store.keep_alive(left)

    def _expired(self, reason: str) -> None:
        if self._outlive:
            self._ring.event(f"{reason}; the backend keeps running")
            self.log.warn("{reason}; the backend keeps running (KEEP_ALIVE_ACTION=keep)", reason=reason)
            return
        self.off()
        ensureDeferred(self._runner.stop(reason)).addErrback(
            lambda failure: self.log.failure(
                "the backend could not be stopped after its keep-alive expired: it goes on running", failure
            )
        )
