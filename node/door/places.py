"""The places for connections: which ones are taken, and which connection gives its place up when all are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from twisted.internet.interfaces import IReactorTime

from node.logs import Logger
from node.repeated import Repeated


class Connection(Protocol):
    """`known`: it has shown the key. `secured`: it has shaken hands. `idle`: all its requests are answered.

    `network` is what counts as its address, `address` what people are told.
    """

    @property
    def known(self) -> bool: ...
    @property
    def secured(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    @property
    def idle_since(self) -> float: ...
    @property
    def network(self) -> str: ...
    @property
    def address(self) -> str: ...
    def cut(self) -> None:
        """End at once."""


C = TypeVar("C", bound=Connection)


class Places(Generic[C]):
    """The connections there are, in the order of their coming.

    There are `size` of them, and of one address at most `strangers` that have not shown the key.
    """

    log = Logger()

    def __init__(self, reactor: IReactorTime, size: int, strangers: int) -> None:
        self._reactor = reactor
        self._size = size
        self._strangers = strangers
        self._taken: dict[C, None] = {}
        limit = f"connection limit ({size}) reached: a new one ends a stranger's or an idle one"
        self._full = Repeated(reactor, self.log.warn, limit)
        self._crowded = Repeated(
            reactor, self.log.warn, f"an address has {strangers} connections without the key: a new one ends one"
        )

    def __len__(self) -> int:
        return len(self._taken)

    def __iter__(self) -> Iterator[C]:
        return iter(self._taken)

    def admit(self, connection: C) -> bool:
        """Whether there is a place for one more, if need be that of one that is worth less."""
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

    def leave(self, connection: C) -> None:
        self._taken.pop(connection, None)

    def _crowding(self, newcomer: C) -> C | None:
        """A stranger of the newcomer's address, if there are as many as may be."""
        crowd = [one for one in self._taken if one.network == newcomer.network and not one.known]
        return _stranger(crowd) if len(crowd) >= self._strangers else None

    def _spare(self) -> C | None:
        """A stranger, else the connection that has been idle for longest."""
        idle = (connection for connection in self._taken if connection.idle)
        return _stranger(self._taken) or min(idle, key=lambda one: one.idle_since, default=None)

    def sum_up(self) -> None:
        """Tell what was only counted."""
        self._full.sum_up()
        self._crowded.sum_up()


def _stranger(connections: Iterable[C]) -> C | None:
    """The oldest one that did not even shake hands, else the oldest that never showed the key."""
    strangers = [connection for connection in connections if not connection.known]
    return next((one for one in strangers if not one.secured), next(iter(strangers), None))
