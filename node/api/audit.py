"""Which controller did what: a line in the log, and for what everybody notices an event."""

from __future__ import annotations

from node.api.auth import Caller
from node.logs import Logger, LogRing

# Calls that are worth an event, each time.
_EVENTS = {"Start", "Stop"}
# Who did what is remembered of so many; then anew.
_REMEMBERED = 1000


class Audit:
    """Of calls that come again and again, those of users and counters, a key's first from an address is told."""

    log = Logger()

    def __init__(self, ring: LogRing) -> None:
        self._ring = ring
        self._told: set[tuple[str, str]] = set()

    def note(self, what: str, caller: Caller) -> None:
        """This caller does that now."""
        if what in _EVENTS:
            self._ring.event(f"{what} by {caller}")
            self.log.info("{what} by {caller}", what=what, caller=str(caller))
        elif (what, str(caller)) not in self._told:
            if len(self._told) >= _REMEMBERED:
                self._told.clear()
            self._told.add((what, str(caller)))
            self.log.info("{what} by {caller}, the first one", what=what, caller=str(caller))
