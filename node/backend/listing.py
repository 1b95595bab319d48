"""Lists users page by page: who is wanted, and what the core has confirmed. Read-only."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool

from node.backend.desired import BUILD_INLINE, Desired
from node.backend.roster import Roster
from node.backend.settling import Settling
from node.backend.state import Status
from node.backend.supplied import Tags
from node.base.errors import UsersRefused, cut
from node.base.reactor import PooledReactor
from node.contract.accounts import Accounts, key_of
from node.contract.generations import Generations
from protos.service_pb2 import Limits, ListedUser, ListUsersResponse, User

# Rows and bytes of a page at most: a quarter of what gRPC clients accept by default.
MOST = 1000
MOST_BYTES = 1024 * 1024
# Rows between two turns of the reactor: about two milliseconds.
TURN = 50
# Names that are sorted at a time: no other thread runs meanwhile.
_AT_ONCE = 5000
# Bytes of a row's tag and length in a reply.
_FRAME = 6


class Listing:
    """The users of the one backend, or of the one that a resume brings back."""

    def __init__(
        self, reactor: PooledReactor, status: Status, desired: Desired, generations: Generations, settling: Settling
    ) -> None:
        self._reactor = reactor
        self._status = status
        self._desired = desired
        self._generations = generations
        self._settling = settling
        # All keys, sorted, with the revision and the number of users that they are of.
        self._order: tuple[tuple[int, int], Sequence[str]] = (0, 0), ()

    async def page(
        self, after: str = "", limit: int = 0, names: Collection[str] = (), credentials: bool = False
    ) -> ListUsersResponse:
        """Users after this name, only those in `names` if any are given: as many as fit into a reply."""
        users = await self._desired.wanted()
        roster, state = self._desired.roster, self._status.state
        # Removed users who are still in the core have a row, too.
        leaving = {key for key in self._settling.unsettled_keys() if key not in users}
        begin, limit = key_of(after), min(limit or MOST, MOST)
        asked = {key_of(name) for name in names}
        found = {key for key in asked if key in users or key in leaving} if asked else leaving
        total = sum(key in users for key in asked) if asked else len(users)
        reply = ListUsersResponse(total=total, revision=roster.revision, state=state, credentials=credentials)
        if not asked:
            order = await self._in_order(users, roster.revision)
            place = bisect_right(order, begin)
            found = found.union(order[place : place + limit + 1])
        keys = await self._sorted([key for key in found if key > begin])
        await self._fill(reply, keys, limit, users, roster)
        return reply

    async def _in_order(self, users: Mapping[str, bytes], revision: int) -> Sequence[str]:
        known, order = self._order
        if known != (which := (revision, len(users))):
            order = await self._sorted(list(users), order)
            self._order = which, order
        return order

    async def _sorted(self, keys: Collection[str], before: Sequence[str] = ()) -> Sequence[str]:
        if len(keys) <= BUILD_INLINE:
            return sorted(keys)
        return await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), in_order, keys, before)

    async def _fill(
        self, reply: ListUsersResponse, keys: Sequence[str], limit: int, users: Mapping[str, bytes], roster: Roster
    ) -> None:
        size = 0
        for number, key in enumerate(keys):
            if number % TURN == 0:
                # Pages of other callers take turns with this one; the core's accounts may have changed meanwhile.
                await deferLater(self._reactor, 0)
                view = self._view(roster)
            row = self._row(key, users.get(key), view, reply.credentials)
            if row is None:
                continue
            size += row.ByteSize() + _FRAME
            if len(reply.users) == limit or (reply.users and size > MOST_BYTES):
                reply.next = keys[number - 1]
                return
            reply.users.append(row)

    def _view(self, roster: Roster) -> _View:
        serving, running = self._generations.serving, self._status.running
        newest = serving[0].accounts if serving else {}
        return _View(
            roster,
            {tag: (newest.get(tag, {}), want) for tag, want in roster.target.items()},
            settled=running and len(serving) == 1 and serving[0] is self._generations.current,
            coming=self._status.awaited or (running and self._generations.current is None),
        )

    def _row(self, key: str, packed: bytes | None, view: _View, credentials: bool) -> ListedUser | None:
        """The row of a user; None for one who is neither wanted nor in the core."""
        user = User(email=key) if packed is None else User.FromString(packed)
        row = view.row(key, user)
        if not (view.settled and view.agrees(key)):
            self._add_unsettled(key, row, view)
        if packed is None and not row.leaving:
            return None
        if credentials:
            row.proxies.CopyFrom(user.proxies)
        if user.HasField("limits"):
            row.limits.CopyFrom(user.limits)
        return row if row.ByteSize() <= MOST_BYTES else ListedUser(name=row.name, shortened=True, limits=_limits(row))

    def _add_unsettled(self, key: str, row: ListedUser, view: _View) -> None:
        found = self._settling.unsettled(key)
        row.leaving.extend(found.leaving)
        if found.leaving or not view.agrees(key):
            row.pending = found.busy or view.coming
            row.refused.extend(cut(reason, UsersRefused.REASON) for reason in found.refused)


def _limits(row: ListedUser) -> Limits | None:
    return row.limits if row.HasField("limits") else None


@dataclass
class _View:
    """The roster and the core's accounts, for some rows.

    `both` has for each inbound the accounts confirmed by the run that gets new connections, and the wanted accounts.
    `settled`: it is the only run. `coming`: a new core is starting, with all wanted users.
    """

    roster: Roster
    both: Mapping[str, tuple[Accounts, Accounts]]
    settled: bool
    coming: bool
    # Cache: the inbounds that users name, split into those that the backend has and the others.
    _tags: dict[Tags, tuple[Tags, Tags]] = field(default_factory=dict)

    def agrees(self, key: str) -> bool:
        """Whether the core has confirmed this user's wanted accounts, and no others."""
        return all(have.get(key) == want.get(key) for have, want in self.both.values())

    def row(self, key: str, user: User) -> ListedUser:
        here, unknown = self._split(tuple(user.inbounds), key in self.roster.users)
        wanted = [tag for tag in here if tag in self.both and key in self.both[tag][1]]
        confirmed = [tag for tag in wanted if self.both[tag][0].get(key) == self.both[tag][1][key]]
        row = ListedUser(name=user.email, inbounds=here, unknown=unknown, confirmed=confirmed)
        if len(wanted) < len(here):
            row.refused.extend(cut(reason, UsersRefused.REASON) for reason in self.roster.outside(key, user))
        return row

    def _split(self, named: Tags, placed: bool) -> tuple[Tags, Tags]:
        """Split inbound names into known and unknown ones; without a backend all count as known."""
        if not placed:
            return named, ()
        if named not in self._tags:
            here = self.roster.known(named)
            self._tags[named] = here, tuple(tag for tag in named if tag not in here)
        return self._tags[named]


def in_order(keys: Collection[str], before: Sequence[str] = ()) -> Sequence[str]:
    """Sort keys; `before` has most of them sorted already.

    Sorted in parts: no other thread runs while Python sorts a list.
    """
    have = set(keys)
    kept = [key for key in before if key in have]
    new = [*have.difference(kept)]
    if len(new) <= _AT_ONCE:
        return sorted(kept + sorted(new))
    parts = [sorted(new[begin : begin + _AT_ONCE]) for begin in range(0, len(new), _AT_ONCE)]
    return list(heapq.merge(kept, *parts))
