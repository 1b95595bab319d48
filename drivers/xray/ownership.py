"""Which user each connection of a core belongs to: by its access lines, its users online and the kernel's list.

Some access lines come late: those of connections made before a change of credential. Some never come: the core drops
lines under load, but it still knows from which addresses each user is online. If only one user is online at an address,
all connections from there are theirs; a removed user who is still online at an address has one of the unattributed
connections from there. Users cannot forge this, since it comes from the core's own state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping
from itertools import islice
from sys import intern
from typing import Any

from twisted.internet.interfaces import IReactorTime

from drivers.sockets.sock_diag import Endpoint
from node.base.governor import Governor
from node.contract.connections import Address
from protos.handover_pb2 import Places, Suspect
from protos.handover_pb2 import Suspects as Packed

# A user of an inbound: tag and key.
Pair = tuple[str, str]

# Seconds after a change of credential within which a line may name an older connection: the core writes it only after
# it has sniffed the first bytes and, if its rules need that, asked the DNS.
LATE = 5.0
# The largest share of time spent on asking the core for users online, and the least seconds between two calls.
SHARE, PAUSE = 0.02, 1.0

# Returns the keys of the users online, by address.
Online = Callable[[], Awaitable[Mapping[Address, Collection[str]]]]


class Endpoints:
    """The endpoints from which users are connected to one inbound, and their owners by key; newest last.

    Ports are used again, so an endpoint can pass to another user; but only with a new socket, which a look at the
    kernel's list recognises by its cookie: a line alone may be forged by a user. Where a connection may carry several
    users (`shared`), an endpoint that a second user claims has no owner for the rest of its life.
    """

    _NO_OWNER = ""

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        # Endpoints noted since the last `age`, which the look that began then may have missed; and older ones.
        self._young: dict[Endpoint, str] = {}
        self._old: dict[Endpoint, str] = {}
        # The cookies of endpoints that a look found. Claims on another user's endpoint: since `age`, and before.
        self._sockets: dict[Endpoint, int] = {}
        self._claims: dict[Endpoint, str] = {}
        self._due: dict[Endpoint, str] = {}
        # The former cookies of endpoints that a line named again for the same user: since `age`, and before.
        self._again: dict[Endpoint, int] = {}
        self._again_due: dict[Endpoint, int] = {}
        # Possible users of endpoints without an owner, by untrusted lines; and those endpoints at the last `age`.
        self._guesses: dict[Endpoint, set[str]] = {}
        self._guessed: list[Endpoint] = []
        # Endpoints attributed without a line: a line overrides them.
        self._presumed: set[Endpoint] = set()
        # The endpoints that each user has, or may have.
        self._places: dict[str, set[Endpoint]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old) + len(self._guesses)

    def note(self, where: Endpoint, key: str) -> bool:
        """A line names this user for the endpoint. Returns whether it is theirs now; if not, `settle` may decide so."""
        before = None if where in self._presumed else self._young.get(where, self._old.get(where))
        if before is not None and before != key and not self._shared:
            self._claims[where] = intern(key)
            return False
        socket = self._sockets.pop(where, None)
        if before == key and socket is not None:
            self._again.setdefault(where, socket)
        self._hold(where, key if before in (None, key) else self._NO_OWNER)
        return before in (None, key)

    def guess(self, where: Endpoint, key: str) -> None:
        """As `note`, for a line that may be forged: it takes no endpoint from its owner.

        It must count, or a user could have true lines about them ignored.
        """
        if where not in self._young and where not in self._old:
            key = intern(key)
            self._guesses.setdefault(where, set()).add(key)
            self._places.setdefault(key, set()).add(where)

    def presume(self, where: Endpoint, key: str) -> bool:
        """Attribute a new endpoint to a user until a line names its owner. Returns False if it is not new."""
        if where in self._young or where in self._old:
            return False
        self._hold(where, key)
        self._presumed.add(where)
        return True

    def holder(self, where: Endpoint) -> str | None:
        return self._young.get(where) or self._old.get(where) or None

    def owners(self, addresses: Container[Address]) -> set[str]:
        """The owners of endpoints at these addresses."""
        held = (self._young, self._old)
        return {key for part in held for where, key in part.items() if where[:-2] in addresses and key}

    def is_mixed(self, addresses: Container[Address]) -> bool:
        """Whether several users claimed an endpoint at these addresses."""
        held = (self._young, self._old) if self._shared else ()
        return any(key == self._NO_OWNER and where[:-2] in addresses for part in held for where, key in part.items())

    @property
    def mixed(self) -> bool:
        """Whether an endpoint has no owner because several users claimed it."""
        return self._shared and any(key == self._NO_OWNER for part in (self._young, self._old) for key in part.values())

    def of(self, keys: Iterable[str]) -> set[Endpoint]:
        """The endpoints from which these users are connected, or may be."""
        return set[Endpoint]().union(*(self._places.get(key, ()) for key in keys))

    def has(self, key: str) -> bool:
        """Whether this user is or may be connected."""
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
        """A look at the sockets begins: what it does not find is gone, if noted before now."""
        self._old |= self._young
        self._young = {}
        self._due |= self._claims
        self._claims = {}
        self._again_due |= self._again
        self._again = {}
        self._guessed = list(self._guesses)

    def renewed(self, live: Mapping[Endpoint, int | None]) -> dict[Endpoint, str]:
        """The endpoints, by owner, at which a look since `age` found a new connection of the same user."""
        due, self._again_due = self._again_due, {}
        some = [where for where, socket in due.items() if live.get(where) not in (None, socket)]
        return {where: key for where in some if (key := self.holder(where)) is not None}

    def unfound(self, live: Mapping[Endpoint, int | None]) -> list[Endpoint]:
        """Endpoints of lines before `age` that neither that look nor one before it found connected by TCP."""
        return [where for where in self._old if where not in live and where not in self._sockets]

    def settle(self, live: Mapping[Endpoint, int | None]) -> dict[Endpoint, str]:
        """Apply the result of a look since `age`: connected endpoints with their cookies, None if unknown.

        Forgets endpoints that are gone. Returns those that passed to another user.
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
        self.forget(list(islice((where for part in (self._guesses, self._old, self._young) for where in part), count)))

    def packed(self) -> Places:
        """The owners, for the next node process. Those of `presume` are left out: it asks the core again."""
        held = {where: key for where, key in (self._old | self._young).items() if where not in self._presumed}
        sockets = [self._sockets.get(where, 0) for where in held]
        return Places(where=held.keys(), key=held.values(), socket=sockets)

    def unpack(self, places: Places) -> None:
        """Restore what an earlier node process packed, into an empty object."""
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
        """Remove the endpoint from its users."""
        self._presumed.discard(where)
        for key in (self._young.get(where), self._old.get(where), *self._guesses.get(where, ())):
            places = self._places.get(key) if key else None
            if places is not None and key is not None:
                places.discard(where)
                if not places:
                    del self._places[key]

    def _is_another(self, where: Endpoint, socket: int | None) -> bool:
        """Whether the endpoint has another socket than before."""
        return socket is not None and self._sockets.get(where, socket) != socket

    def _is_free(self, where: Endpoint, socket: int | None) -> bool:
        """Whether a claim succeeds: the endpoint has no owner, or cookies are unknown."""
        return socket is None or (where not in self._old and where not in self._young)


class OldCredentials:
    """Users with a changed credential. Looks are numbered, and each connection has the number of its first look."""

    def __init__(self) -> None:
        self._look = 0
        # When the last look began (seconds).
        self.looked = float("-inf")
        # With the socket's cookie; 0 if it is unknown, or there are several.
        self._since: dict[Endpoint, tuple[int, int]] = {}
        # By user: until when it matters (seconds), and the last look before the change.
        self._pairs: dict[Pair, tuple[float, int]] = {}
        self._pruned = 0.0

    def __len__(self) -> int:
        return len(self._pairs)

    def look(self, connected: Mapping[Endpoint, int], begun: float) -> None:
        """A look that began then (seconds) found these endpoints connected, of all inbounds, with their cookies."""
        if begun > self._pruned + LATE:
            self.prune(begun)
        self._look += 1
        self._since = {where: (self._first(where, socket), socket) for where, socket in connected.items()}
        self.looked = begun

    def add(self, pairs: Iterable[Pair], now: float) -> None:
        """These users get a new credential now; the endpoints of the last look are older."""
        self._pairs.update(dict.fromkeys(pairs, (now + LATE, self._look)))

    def has(self, pair: Pair, where: Endpoint, now: float) -> bool:
        """Whether the user had a connection from there before their credential changed: that of `socket`."""
        until, look = self._pairs.get(pair, (now, 0))
        return now < until and self._since.get(where, (look + 1, 0))[0] <= look

    def socket(self, where: Endpoint) -> int:
        """The cookie of the connection that the last look found; 0 if unknown. A client may use its port again."""
        return self._since.get(where, (0, 0))[1]

    def _first(self, where: Endpoint, socket: int) -> int:
        """The number of the first look that found this connection."""
        look, before = self._since.get(where, (self._look, 0))
        return self._look if before and socket and socket != before else look

    def packed(self, now: float) -> Packed:
        """Pack everything for the next node process."""
        users = [
            Suspect(tag=tag, key=key, seconds=until - now, look=look)
            for (tag, key), (until, look) in self._pairs.items()
            if until > now
        ]
        since = self._since if users else {}
        return Packed(look=self._look, users=users, where=since.keys(), since=[look for look, _ in since.values()])

    def unpack(self, packed: Packed, now: float) -> None:
        """Restore what an earlier node process packed."""
        self._look = packed.look
        self._since = {where: (look, 0) for where, look in zip(packed.where, packed.since, strict=True)}
        self._pairs = {(each.tag, each.key): (now + each.seconds, each.look) for each in packed.users}

    def prune(self, now: float) -> None:
        """Forget changes older than `LATE` seconds."""
        self._pruned = now
        self._pairs = {pair: found for pair, found in self._pairs.items() if now < found[0]}
        if not self._pairs:
            self._since, self.looked = {}, float("-inf")


class Unlogged:
    """Finds the possible users of connections that two looks in a row have seen."""

    def __init__(self, reactor: IReactorTime, online: Online) -> None:
        self._reactor = reactor
        self._online = online
        self._seen: set[tuple[str, Endpoint]] = set()
        # Whether some connections need another look.
        self.fresh = False
        self._asking = False
        self._governor = Governor(reactor, SHARE, shortest=PAUSE)

    async def claim(self, strays: Collection[tuple[str, Endpoint]]) -> dict[tuple[str, Endpoint], Collection[str]]:
        """For unattributed connections (inbound, endpoint): the users online at their address, if known by now.

        Raises `ApiFailed`.
        """
        now = self._reactor.seconds()
        again = self._seen.intersection(strays)
        rests = self._asking or self._governor.left > 0
        self.fresh = len(again) < len(strays) or (rests and bool(again))
        self._seen = set(strays)
        if not again or rests:
            return {}
        self._asking = True
        try:
            online = await self._online()
            return {stray: online[stray[1][:-2]] for stray in again if stray[1][:-2] in online}
        finally:
            self._asking = False
            self._governor.worked(now)
