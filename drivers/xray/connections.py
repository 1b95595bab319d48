"""The live connections of the users of one run of the core: whose they are, and ending those of who is put out.

The core has no call for it. Its access lines say who came from where, and its sockets can be shut down from outside
(`drivers.sockets.connections`). A line that the core drops under load is a connection that is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import lru_cache
from typing import Any

from twisted.internet.defer import ensureDeferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool

from drivers.sockets import connections as sockets
from drivers.sockets.connections import Endpoint, Ports, Seen, Unreachable
from drivers.sockets.sock_diag import connected
from drivers.xray.access import Accepted, Endpoints, parse
from drivers.xray.doors import Door
from drivers.xray.suspects import Pair, Suspects
from node.contract.accounts import key_of
from node.logs import Logger

# The tag where the core's line has none: its outbound has no tag.
UNTAGGED = ""

# Endpoints that are kept, of all inbounds together; some 20 MB.
CAP = 200_000
# Seconds between two looks at which of them are still connected, …
PRUNE = 60.0
# … and the least there are when half the cap is reached.
PRUNE_FULL = 10.0
# Connections above which they are looked at in the reactor's pool.
INLINE = 500
# Seconds that late lines are gathered: one look at 10,000 sockets takes some 0.1 s of a processor.
GATHER = 0.1
# Seconds in which a core notices that its connections have ended.
NOTICE = 0.02
_ARROWS = (" >> ", " -> ", " ==> ")


class Connections:
    """Takes the core's lines, and ends connections. `is_in` says whether a pair is let in, or is being let in."""

    log = Logger()

    def __init__(self, reactor: Any, doors: Mapping[str, Door]) -> None:
        self._reactor = reactor
        self._doors = {**doors, UNTAGGED: Door((), shared=True)}
        self._endpoints = {tag: Endpoints(door.shared) for tag, door in self._doors.items()}
        self._pid: int | None = None
        self._is_in: Callable[[Pair], bool] = lambda _: True
        self._ports = [some for door in doors.values() for some in door.ports]
        self._suspects = Suspects()
        self._late: dict[Endpoint, Ports] = {}
        self._calls: dict[str, IDelayedCall] = {}
        self._noted = 0
        self._pruned = 0.0
        self._pruning = False
        self._complained = False
        # Connections to the inbounds when they were looked at last.
        self._crowd = 0
        self._tag_of = lru_cache(maxsize=1024)(self._find_tag)

    def begin(self, pid: int | None, is_in: Callable[[Pair], bool]) -> None:
        """The core answers: from now on there is somebody to be put out."""
        self._pid, self._is_in = pid, is_in

    def take(self, line: str) -> None:
        """A line of the core, whatever it is about."""
        accepted = parse(line)
        if accepted is None:
            return
        tag = self._tag_of(accepted.detour)
        if tag is not None and not (accepted.udp and self._doors[tag].datagrams):
            self._note(tag, accepted)

    def of(self, pairs: Iterable[Pair]) -> dict[Endpoint, Ports]:
        """From where these users are connected to these inbounds, and the ports that they came in by."""
        keys: dict[str, set[str]] = {}
        for tag, key in pairs:
            keys.setdefault(tag, set()).add(key)
        found: dict[Endpoint, Ports] = {}
        for tag, some in keys.items():
            for known in (tag, UNTAGGED):
                for where in self._endpoints[known].of(some) if tag in self._doors else ():
                    found[where] = (*found.get(where, ()), *self._doors[tag].ports)
        return found

    async def suspect(self, changed: Iterable[Pair]) -> None:
        """These get a new credential next: who of them is connected by now came with the old one."""
        pairs = [pair for pair in changed if pair[0] in self._doors]
        if not pairs or self._pid is None:
            return
        try:
            peers = await self._connected()
        except OSError as fault:
            self._complain(f"connections by an old credential may live on: the kernel does not list them: {fault}")
            return
        self._suspects.add(pairs, peers, self._reactor.seconds())
        self._call("prune", PRUNE, self._prune)

    async def _connected(self) -> set[Endpoint]:
        """Who is connected to the inbounds; asked in the pool where there were many the last time."""
        if self._crowd > INLINE:
            pool = self._reactor.getThreadPool()
            peers = await deferToThreadPool(self._reactor, pool, connected, self._ports)
        else:
            peers = connected(self._ports)
        self._crowd = len(peers)
        return peers

    async def end(self, wanted: Mapping[Endpoint, Ports]) -> None:
        """End these connections, of users who are out or have another credential than they came with."""
        seen = await self._look(wanted) if wanted else None
        for where in seen.ended if seen else ():
            self._forget(where)

    async def hang_up(self, ports: Ports) -> None:
        """End all connections to these ports, whosever they are, and give the core a moment to notice."""
        pool = self._reactor.getThreadPool()
        try:
            if self._pid is not None:
                await deferToThreadPool(self._reactor, pool, sockets.hang_up, self._pid, ports)
        except Unreachable as fault:
            self._complain(str(fault))
        await deferLater(self._reactor, NOTICE)

    def stop(self) -> None:
        """The core ends, or ended."""
        self._pid = None
        for call in self._calls.values():
            call.cancel()
        self._calls.clear()

    def _find_tag(self, detour: str) -> str | None:
        """The inbound that an access line names; its tag may have arrows in it, too. None if it is not managed."""
        if not detour:
            return UNTAGGED
        tags = [tag for tag in self._doors if tag and any(detour.startswith(tag + arrow) for arrow in _ARROWS)]
        return max(tags, key=len, default=None)

    def _note(self, tag: str, accepted: Accepted) -> None:
        where, pair = accepted.endpoint, (tag, key_of(accepted.email))
        endpoints, out = self._endpoints[tag], not self._is_in(pair)
        holder = endpoints.holder(where)
        if out and holder is not None and self._is_in((tag, holder)):
            return  # Who is in does not lose his endpoint to who is not, whatever a late line says.
        endpoints.note(where, pair[1])
        self._call("prune", PRUNE, self._prune)
        self._noted += 1
        if self._noted >= CAP // 8:
            self._make_room()
        suspect = self._suspects.has(pair, where, self._reactor.seconds())
        if (out or suspect) and endpoints.holder(where) == pair[1]:
            doors = [self._doors[tag]] if tag else self._doors.values()
            self._late[where] = [some for door in doors for some in door.ports]
            self._call("late", GATHER, self._end_late)

    async def _end_late(self) -> None:
        late, self._late = self._late, {}
        await self.end(late)

    async def _look(self, wanted: Mapping[Endpoint, Ports]) -> Seen | None:
        """What is found on the core's sockets; None if they cannot be looked at, which is said once."""
        if self._pid is None:
            return None
        pool = self._reactor.getThreadPool()
        try:
            return await deferToThreadPool(self._reactor, pool, sockets.cut, self._pid, wanted)
        except Unreachable as fault:
            self._complain(str(fault))
            return None

    def _complain(self, text: str) -> None:
        """Once: it would be the same each time."""
        if not self._complained:
            self.log.error("{text}", text=text)
        self._complained = True

    def _forget(self, where: Endpoint) -> None:
        for endpoints in self._endpoints.values():
            endpoints.forget((where,))

    async def _prune(self) -> None:
        """Forget the endpoints that are not connected any more."""
        if self._pruning:
            return
        self._pruning, self._pruned = True, self._reactor.seconds()
        for endpoints in self._endpoints.values():
            endpoints.age()
        try:
            seen = await self._look({})
        finally:
            self._pruning = False
        if seen is None:
            return
        for endpoints in self._endpoints.values():
            endpoints.prune(seen.peers)
        self._suspects.prune(self._reactor.seconds())
        if self._suspects or any(map(len, self._endpoints.values())):
            self._call("prune", PRUNE, self._prune)

    def _make_room(self) -> None:
        """Keep to the cap, and prune early where it comes near."""
        self._noted = 0
        while sum(map(len, self._endpoints.values())) > CAP - CAP // 8:
            max(self._endpoints.values(), key=len).drop(CAP // 8)
        size = sum(map(len, self._endpoints.values()))
        if size > CAP // 2 and self._reactor.seconds() > self._pruned + PRUNE_FULL:
            self._call("early prune", 0, self._prune)

    def _call(self, name: str, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have `work` done in a while, unless that is due already or the core is gone."""
        if name in self._calls or self._pid is None:
            return

        def run() -> None:
            del self._calls[name]
            ensureDeferred(work()).addErrback(
                lambda failure: self.log.failure("connections were not ended or pruned", failure)
            )

        self._calls[name] = self._reactor.callLater(seconds, run)
