"""Reports that the time of day has jumped. A machine that was suspended is no jump: both clocks go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime

from node.base.logs import Logger
from node.base.part import Part
from node.base.periodic import Periodic
from node.base.settings import Options, number, setting
from node.events.journal import Journal
from node.events.kinds import Kind

# Seconds between two looks, and for which `info` warns after a jump.
LOOK, REMEMBERED = 5.0, 3600.0


@dataclass(frozen=True)
class ClockOptions(Options):
    """How far the time of day may jump, in seconds; 0: anywhere."""

    jump: int = setting("CLOCK_JUMP", "60", number(0, 86_400)).help(
        "seconds that the time of day may jump before the node reports it, 0 to 86400; 0: never",
        "Quotas, expiry dates and certificates depend on the clock. Raise it on a machine whose clock is often "
        "corrected.",
    )


class Clock(Part):
    """Compares the time of day with the clock since boot, which does not jump and goes on while the machine sleeps."""

    title = "the clock watch"
    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        journal: Journal,
        options: ClockOptions,
        now: Callable[[], float] = time.time,
        steady: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._journal = journal
        self._most = options.jump
        self._now = now
        self._steady = steady
        # The distance of the two clocks at the last look, the last jump in seconds, and when it was noticed.
        self._distance, self._jump, self._noticed = now() - steady(), 0, 0.0
        self._looking = Periodic("looking at the clock", self._look, LOOK, reactor)

    @property
    def warnings(self) -> list[str]:
        """One warning for an hour after a jump."""
        jumped = self._jump and self._steady() < self._noticed + REMEMBERED
        return [*([self._text()] if jumped else []), *self._looking.warnings]

    def start(self) -> None:
        if self._most:
            self._looking.start()

    def stop(self) -> None:
        self._looking.stop()

    def _look(self) -> None:
        before, self._distance = self._distance, self._now() - self._steady()
        if abs(jump := round(self._distance - before)) > self._most:
            self._jump, self._noticed = jump, self._steady()
            self.log.warn("{text}", text=self._text())
            self._journal.tell(Kind.CLOCK_JUMPED, self._text(), seconds=jump)

    def _text(self) -> str:
        way = "ahead" if self._jump > 0 else "back"
        return f"the clock of the machine jumped {abs(self._jump):,} s {way}: check its time synchronization"
