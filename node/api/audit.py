"""The audit log: which controller made which calls. Starts and Stops are also events in the ring."""

from __future__ import annotations

from node.api.auth import Caller
from node.base.logs import Logger, LogRing

# Calls that are logged each time, and in the ring, too.
_EVENTS = {"Start", "Stop"}
# How many pairs of method and caller are remembered; then the node forgets all, and logs each again.
_REMEMBERED = 1000


class Audit:
    """Logs each Start and Stop; of frequent calls, the first one of each key from each address."""

    log = Logger()

    def __init__(self, ring: LogRing) -> None:
        self._ring = ring
        self._logged: set[tuple[str, str]] = set()

    def note(self, what: str, caller: Caller) -> None:
        """Log that this caller makes this call."""
        if what in _EVENTS:
            self._ring.event(f"{what} by {caller}")
            self.log.info("{what} by {caller}", what=what, caller=str(caller))
        elif (what, str(caller)) not in self._logged:
            if len(self._logged) >= _REMEMBERED:
                self._logged.clear()
            self._logged.add((what, str(caller)))
            self.log.info("{what} by {caller}; further such calls are not logged", what=what, caller=str(caller))
