"""Whose the connections of one inbound are, by what the access lines say. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from sys import intern
from typing import Any

from drivers.sockets.connections import Endpoint
from protos.handover_pb2 import Places


class Endpoints:
    """Where the users of one inbound are connected from, newest last.

    Ports are used again, so a later user may have an endpoint; but only if there is another socket, which a look at
    them tells by the number that the kernel gives each (its cookie): what a line says can be a user's own words. Where
    one connection may carry several users (`shared`) it is nobody's, as long as it lives.
    """

    _NOBODY = ""

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        # Those since the last `age`, which a look at the sockets that began with it may not have found, and the others.
        self._young: dict[Endpoint, str] = {}
        self._old: dict[Endpoint, str] = {}
        # The sockets of those that were seen, and who claimed an endpoint of somebody else's: since `age`, and before.
        self._sockets: dict[Endpoint, int] = {}
        self._claims: dict[Endpoint, str] = {}
        self._due: dict[Endpoint, str] = {}
        # The sockets that endpoints had of which a line told again, by the same user: since `age`, and before.
        self._again: dict[Endpoint, int] = {}
        self._again_due: dict[Endpoint, int] = {}
        # Who may be where nobody is known to be, by lines that are not believed; and which of them were there at `age`.
        self._guesses: dict[Endpoint, set[str]] = {}
        self._guessed: list[Endpoint] = []
        # Whose holders no line told of: a line that does has the say.
        self._presumed: set[Endpoint] = set()
        # Where each user is, or may be.
        self._places: dict[str, set[Endpoint]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old) + len(self._guesses)

    def note(self, where: Endpoint, key: str) -> bool:
        """A line says that this user came from there. Whether it is so; if not it may turn out in `settle`."""
        before = None if where in self._presumed else self._young.get(where, self._old.get(where))
        if before is not None and before != key and not self._shared:
            self._claims[where] = intern(key)
            return False
        socket = self._sockets.pop(where, None)
        if before == key and socket is not None:
            self._again.setdefault(where, socket)
        self._hold(where, key if before in (None, key) else self._NOBODY)
        return before in (None, key)

    def guess(self, where: Endpoint, key: str) -> None:
        """As `note`, by a line that may be a user's own words: it takes nothing from anybody.

        It is kept, else users could see to it that what the core says of them is not believed.
        """
        if where not in self._young and where not in self._old:
            key = intern(key)
            self._guesses.setdefault(where, set()).add(key)
            self._places.setdefault(key, set()).add(where)

    def presume(self, where: Endpoint, key: str) -> bool:
        """It is this user's as long as no line says whose it is. Whether nobody had it."""
        if where in self._young or where in self._old:
            return False
        self._hold(where, key)
        self._presumed.add(where)
        return True

    def holder(self, where: Endpoint) -> str | None:
        """Whose the endpoint is, by key."""
        return self._young.get(where) or self._old.get(where) or None

    def of(self, keys: Iterable[str]) -> set[Endpoint]:
        """Where these users are connected from, or may be."""
        return set[Endpoint]().union(*(self._places.get(key, ()) for key in keys))

    def has(self, key: str) -> bool:
        """Whether this user is connected from anywhere, or may be."""
        return key in self._places

    def forget(self, gone: Iterable[Endpoint]) -> None:
        parts: tuple[dict[Endpoint, Any], ...] = (
            self._young,
            self._old,
            self._sockets,
            self._claims,
            self._due,
            self._again,
            self._again_due,
            self._guesses,
        )
        for where in gone:
            self._leave(where)
            for part in parts:
                part.pop(where, None)

    def age(self) -> None:
        """A look at the sockets begins: only what was noted before it can be missed in what it finds."""
        self._old |= self._young
        self._young = {}
        self._due |= self._claims
        self._claims = {}
        self._again_due |= self._again
        self._again = {}
        self._guessed = list(self._guesses)

    def renewed(self, live: Mapping[Endpoint, int | None]) -> dict[Endpoint, str]:
        """Where a user has another connection from the same port, by what a look since `age` found."""
        due, self._again_due = self._again_due, {}
        some = [where for where, socket in due.items() if live.get(where) not in (None, socket)]
        return {where: key for where in some if (key := self.holder(where)) is not None}

    def settle(self, live: Mapping[Endpoint, int | None]) -> dict[Endpoint, str]:
        """What a look since `age` found: who is connected, each with their socket; None where that is not known.

        Forgets who is not connected any more. Returns what changed hands.
        """
        due, self._due = self._due, {}
        for where in [where for where in self._old if where not in live or self._is_another(where, live[where])]:
            if where not in self._young:
                self._leave(where)
            del self._old[where]
            self._sockets.pop(where, None)
        for where in self._guessed:
            if where not in live and where in self._guesses:
                self._leave(where)
                del self._guesses[where]
        taken = {where: key for where, key in due.items() if where in live and self._is_free(where, live[where])}
        for where, key in taken.items():
            self._hold(where, key)
        for where in self._old.keys() | taken:
            if (socket := live[where]) is not None:
                self._sockets[where] = socket
        return taken

    def drop(self, count: int) -> None:
        """Forget the oldest."""
        self.forget(list(islice((where for part in (self._guesses, self._old, self._young) for where in part), count)))

    def packed(self) -> Places:
        """Whose they are, for the next program of the node. What is not sure is left out: the core is asked again."""
        held = {where: key for where, key in (self._old | self._young).items() if where not in self._presumed}
        sockets = [self._sockets.get(where, 0) for where in held]
        return Places(where=held.keys(), key=held.values(), socket=sockets)

    def unpack(self, places: Places) -> None:
        """As an earlier program of the node knew them; there was none before."""
        for where, key, socket in zip(places.where, places.key, places.socket, strict=True):
            self._hold(where, key)
            if socket:
                self._sockets[where] = socket

    def _hold(self, where: Endpoint, key: str) -> None:
        self._leave(where)
        self._old.pop(where, None)
        self._guesses.pop(where, None)
        self._young[where] = key = intern(key)
        if key:
            self._places.setdefault(key, set()).add(where)

    def _leave(self, where: Endpoint) -> None:
        """Nobody is there any more."""
        self._presumed.discard(where)
        for key in (self._young.get(where), self._old.get(where), *self._guesses.get(where, ())):
            places = self._places.get(key) if key else None
            if places is not None and key is not None:
                places.discard(where)
                if not places:
                    del self._places[key]

    def _is_another(self, where: Endpoint, socket: int | None) -> bool:
        """Whether the endpoint has another socket than it had."""
        return socket is not None and self._sockets.get(where, socket) != socket

    def _is_free(self, where: Endpoint, socket: int | None) -> bool:
        """Whether who claims it can have it: nobody has it, or nothing tells one socket from another."""
        return socket is None or (where not in self._old and where not in self._young)
