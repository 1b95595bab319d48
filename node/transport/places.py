"""The places for connections: which ones are taken, and which connection gives its place up when all are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Generic, Protocol, TypeVar

from twisted.internet.interfaces import IReactorTime

from node.logs import Logger

# A lack of places is worth one line, and another only after this many seconds without one.
_QUIET = 60.0


class Connection(Protocol):
    """`known`: it has shown the key. `idle`: all its requests are answered."""

    @property
    def known(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    def cut(self) -> None:
        """End at once."""


C = TypeVar("C", bound=Connection)


class Places(Generic[C]):
    """The connections there are, strangers in the order of their coming, idle ones in that of their last reply."""

    log = Logger()

    def __init__(self, reactor: IReactorTime, size: int) -> None:
        self._reactor = reactor
        self._size = size
        self._taken: dict[C, None] = {}
        self._quiet_until = 0.0

    def __len__(self) -> int:
        return len(self._taken)

    def __iter__(self) -> Iterator[C]:
        return iter(self._taken)

    def admit(self, connection: C) -> bool:
        """Whether there is a place for one more, if need be that of one that is worth less."""
        if len(self._taken) >= self._size:
            self._warn()
            spare = self._spare()
            if spare is None:
                return False
            self.leave(spare)
            spare.cut()
        self._taken[connection] = None
        return True

    def rests(self, connection: C) -> None:
        """It becomes idle: the last of those."""
        if connection in self._taken:
            self.leave(connection)
            self._taken[connection] = None

    def leave(self, connection: C) -> None:
        self._taken.pop(connection, None)

    def _spare(self) -> C | None:
        """The oldest connection that never showed the key, else the one that has been idle for longest."""
        strangers = (connection for connection in self._taken if not connection.known)
        idle = (connection for connection in self._taken if connection.idle)
        return next(chain(strangers, idle), None)

    def _warn(self) -> None:
        now = self._reactor.seconds()
        if now >= self._quiet_until:
            self.log.warn(
                "connection limit ({size}) reached: a new one ends a stranger's or an idle one", size=self._size
            )
        self._quiet_until = now + _QUIET
