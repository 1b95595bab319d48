"""The connection limits: how many there may be, and which one is closed for a new one when all places are taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from twisted.internet.interfaces import IReactorTime

from node.base.limited_warning import LimitedWarning
from node.base.logs import Logger
from node.door.connection import Connection


class Places:
    """The open connections, oldest first: at most `size`, and at most `strangers` without a key from one address."""

    log = Logger()

    def __init__(self, reactor: IReactorTime, size: int, strangers: int) -> None:
        self._reactor = reactor
        self._size = size
        self._strangers = strangers
        self._taken: dict[Connection, None] = {}
        limit = f"connection limit ({size}) reached; each new one closes one without a key, or an idle one"
        self._full = LimitedWarning(reactor, self.log.warn, limit)
        limit = f"{strangers} connections without a key from one address; each new one closes one"
        self._crowded = LimitedWarning(reactor, self.log.warn, limit)

    def __len__(self) -> int:
        return len(self._taken)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._taken)

    def admit(self, connection: Connection) -> bool:
        """Admit a connection, if need be by cutting one that is worth less. Returns False if there is no such one."""
        spare = self._crowding(connection)
        if spare is None and len(self._taken) >= self._size:
            self._full.happened(connection.address)
            spare = self._spare()
            if spare is None:
                return False
        elif spare is not None:
            self._crowded.happened(connection.address)
        if spare is not None:
            self.leave(spare)
            spare.cut()
        self._taken[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        self._taken.pop(connection, None)

    def _crowding(self, newcomer: Connection) -> Connection | None:
        """A connection without a key from the newcomer's address, if that address has as many as allowed."""
        crowd = [one for one in self._taken if one.network == newcomer.network and not one.known]
        return _stranger(crowd) if len(crowd) >= self._strangers else None

    def _spare(self) -> Connection | None:
        """A connection without a key, otherwise the one that has been idle for longest."""
        idle = (connection for connection in self._taken if connection.idle)
        return _stranger(self._taken) or min(idle, key=lambda one: one.idle_since, default=None)

    def sum_up(self) -> None:
        """Log the warnings that were only counted."""
        self._full.sum_up()
        self._crowded.sum_up()


def _stranger(connections: Iterable[Connection]) -> Connection | None:
    """The oldest connection whose TLS handshake is not done, otherwise the oldest one without a key."""
    strangers = [connection for connection in connections if not connection.known]
    return next((one for one in strangers if not one.secured), next(iter(strangers), None))
