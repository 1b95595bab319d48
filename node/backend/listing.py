"""Lists users a page at a time: who is wanted, and what the core has confirmed of it. Reading changes nothing."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool

from node.backend.desired import BUILD_INLINE, Desired
from node.backend.generations import Generations
from node.backend.roster import Roster
from node.backend.settling import Settling
from node.backend.state import Status
from node.backend.supplied import Tags
from node.contract.accounts import Accounts, key_of
from node.errors import UsersRefused, cut
from node.reactor import PooledReactor
from protos.service_pb2 import Limits, ListedUser, ListUsersResponse, User

# Rows and bytes of a page: a quarter of what any gRPC client takes by default.
MOST = 1000
MOST_BYTES = 1024 * 1024
# Rows after which others have their turn: about two milliseconds.
TURN = 50
# Names that are put in order at a time, while no other thread runs.
_AT_ONCE = 5000
# The tag and the length of a row in a reply.
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
        # All keys in order, and of which revision and how many they are.
        self._order: tuple[tuple[int, int], Sequence[str]] = (0, 0), ()

    async def page(
        self, after: str = "", limit: int = 0, names: Collection[str] = (), credentials: bool = False
    ) -> ListUsersResponse:
        """The users behind this name, of `names` where any are given: as many as fit into a reply."""
        users = await self._desired.wanted()
        roster, state = self._desired.roster, self._status.state
        # Who was removed, and is not out of the core yet, has a row as well.
        leaving = {key for key in self._settling.restless() if key not in users}
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
                # Not at once with those of another caller; and what the core has is looked up anew.
                await deferLater(self._reactor, 0)
                sight = self._sight(roster)
            row = self._row(key, users.get(key), sight, reply.credentials)
            if row is None:
                continue
            size += row.ByteSize() + _FRAME
            if len(reply.users) == limit or (reply.users and size > MOST_BYTES):
                reply.next = keys[number - 1]
                return
            reply.users.append(row)

    def _sight(self, roster: Roster) -> _Sight:
        serving, running = self._generations.serving, self._status.running
        newest = serving[0].accounts if serving else {}
        return _Sight(
            roster,
            {tag: (newest.get(tag, {}), want) for tag, want in roster.target.items()},
            settled=running and len(serving) == 1 and serving[0] is self._generations.current,
            coming=self._status.awaited or (running and self._generations.current is None),
        )

    def _row(self, key: str, packed: bytes | None, sight: _Sight, credentials: bool) -> ListedUser | None:
        """What there is to tell of a user; nothing of one who is not wanted, and out."""
        user = User(email=key) if packed is None else User.FromString(packed)
        row = sight.row(key, user)
        if not (sight.settled and sight.agrees(key)):
            self._tell_unsettled(key, row, sight)
        if packed is None and not row.leaving:
            return None
        if credentials:
            row.proxies.CopyFrom(user.proxies)
        if user.HasField("limits"):
            row.limits.CopyFrom(user.limits)
        return row if row.ByteSize() <= MOST_BYTES else ListedUser(name=row.name, shortened=True, limits=_said(row))

    def _tell_unsettled(self, key: str, row: ListedUser, sight: _Sight) -> None:
        found = self._settling.unsettled(key)
        row.leaving.extend(found.leaving)
        if found.leaving or not sight.agrees(key):
            row.pending = found.busy or sight.coming
            row.refused.extend(cut(reason, UsersRefused.REASON) for reason in found.refused)


def _said(row: ListedUser) -> Limits | None:
    return row.limits if row.HasField("limits") else None


@dataclass
class _Sight:
    """The roster, and what there is of it, for some rows.

    `both` has for each inbound what the run has confirmed that new connections are led to, and what is wanted.
    `settled`: there is no other run. `coming`: a core is on its way, and takes everybody along.
    """

    roster: Roster
    both: Mapping[str, tuple[Accounts, Accounts]]
    settled: bool
    coming: bool
    # Of the names of inbounds that users have: those that the backend has, and the others.
    _tags: dict[Tags, tuple[Tags, Tags]] = field(default_factory=dict)

    def agrees(self, key: str) -> bool:
        """Whether this user is as they should be."""
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
        """Without a backend nobody knows which inbounds it will have."""
        if not placed:
            return named, ()
        if named not in self._tags:
            here = self.roster.known(named)
            self._tags[named] = here, tuple(tag for tag in named if tag not in here)
        return self._tags[named]


def in_order(keys: Collection[str], before: Sequence[str] = ()) -> Sequence[str]:
    """These in order; `before` has most of them in order.

    No other thread runs while a list is sorted, so it is done by parts.
    """
    have = set(keys)
    kept = [key for key in before if key in have]
    new = [*have.difference(kept)]
    if len(new) <= _AT_ONCE:
        return sorted(kept + sorted(new))
    parts = [sorted(new[begin : begin + _AT_ONCE]) for begin in range(0, len(new), _AT_ONCE)]
    return list(heapq.merge(kept, *parts))
