"""The limits of users, as the rest of the node uses them: set, listed, summed up, enforced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import nsmallest

from twisted.internet.interfaces import IReactorTime

from node.backend.listing import MOST, MOST_BYTES, TURN
from node.backend.runner import Runner
from node.backend.supplied import check
from node.base.errors import InvalidRequest, shown
from node.base.reactor import PooledReactor
from node.base.slices import a_turn
from node.contract.accounts import Unusable, key_of
from node.contract.counters import Both
from node.contract.saved import Changes, Lasting, Saved
from node.events.journal import Journal
from node.limits.address_limits import AddressLimits
from node.limits.book import Book
from node.limits.connections import Connections
from node.limits.count import Count, reached, reasons
from node.limits.enforcement import Enforcement
from node.limits.events import LimitEvents
from node.limits.in_force import InForce
from node.limits.limits import Limit
from node.limits.node_quota import NODE
from node.limits.options import LimitOptions
from node.limits.pacer import Pacer
from node.limits.periods import Period
from node.state.store import Store
from node.traffic.polling import Traffic
from protos.service_pb2 import (
    BaseInfoResponse,
    GetLimitsRequest,
    GetLimitsResponse,
    LimitState,
    ListedUser,
    SetLimitsRequest,
    SetLimitsResponse,
    User,
)

NO_USER = "not a user now: the limits apply once they are one"
# Bytes of a row's tag and length in a reply.
_FRAME = 6


class UserLimits(Lasting):
    """Owns and connects the parts that enforce users' limits."""

    title = "the limits of users"

    def __init__(
        self,
        reactor: PooledReactor,
        runner: Runner,
        traffic: Traffic,
        store: Store,
        journal: Journal,
        options: LimitOptions,
    ) -> None:
        in_force = InForce(runner.desired, options.defaults)
        connections = Connections(runner.generations, in_force)
        self._book = book = Book(connections, weights=options.weighting)
        self._generations = runner.generations
        self._events = events = LimitEvents(journal, reactor, in_force)
        self._enforcement = Enforcement(reactor, book, connections, runner.users, traffic, store, events)
        self._addresses = AddressLimits(reactor, connections, events, options.grouping, options.grace)
        pacer = Pacer(reactor, connections)
        self._parts = self._enforcement, self._addresses, pacer
        self._listing = Listing(reactor, book, self._addresses, pacer)
        self.page = self._listing.page
        runner.desired.limiter = book
        traffic.watched(self._enforcement)

    @property
    def warnings(self) -> list[str]:
        """Warnings for `info`."""
        run = self._generations.current
        unknown = self._book.weights.unknown(run.accounts.keys()) if run is not None else []
        return [*unknown, *(warning for part in self._parts for warning in part.warnings)]

    def start(self) -> None:
        for part in self._parts:
            part.start()

    def stop(self) -> None:
        for part in self._parts:
            part.stop()
        self._events.close()

    def leave(self) -> None:
        self.stop()

    def restore(self, saved: Saved) -> None:
        self._book.restore((key, packed) for key, packed in saved.limits if key != NODE)
        self._enforcement.handle_soon()

    def save(self, changes: Changes) -> None:
        changes.limits |= self._book.everything()

    def summary(self, info: BaseInfoResponse) -> None:
        """Add how many users have limits, how many are barred by them, and the like."""
        info.limits.MergeFrom(self._book.summary())
        info.limits.too_many_addresses = self._addresses.ended

    def cut(self, key: str, seconds: float) -> None:
        """Bar the user for abuse, for so long."""
        self._book.cut(key, seconds)
        self._enforcement.handle_soon()

    def slow(self, key: str, seconds: float, speed: int) -> None:
        """Limit the user to so many bits a second for abuse, for so long."""
        self._book.slow(key, seconds, speed)

    def is_spared(self, key: str) -> bool:
        """Whether the user's limits say that abuse only causes an event."""
        return self._book.in_force.of(key).abuse_tells

    def name_of(self, key: str) -> str:
        return self._book.in_force.name_of(key)

    def is_off(self, key: str) -> bool:
        """Whether the user is barred."""
        return key in self._book.off

    def add_usage(self, rows: Iterable[ListedUser]) -> None:
        """With WEIGHTS, add what users with a quota have used to their rows."""
        for row in rows if self._book.weights.rules else ():
            if (count := self._book.counting(key_of(row.name))) is not None:
                row.used_up, row.used_down = count.up, count.down
                row.weighted_up, row.weighted_down = count.weighted

    def usage(self) -> Iterator[tuple[str, Mapping[str, Both]]]:
        """With WEIGHTS, the bytes of users with a quota by name: `raw` and `weighted`. May be iterated in a thread."""
        book = self._book
        keys = book.counted if book.weights.rules else []
        counts = ((key, book.counting(key)) for key in keys if key in book.in_force.users)
        return (
            (book.in_force.name_of(key), {"raw": (count.up, count.down), "weighted": count.weighted})
            for key, count in counts
            if count is not None
        )

    async def set(self, request: SetLimitsRequest) -> SetLimitsResponse:
        """SetLimits. Returns when all is in force; raises `InvalidRequest` and changes nothing."""
        overrides = {}
        for user in request.users:
            limits = user.limits if user.HasField("limits") else None
            try:
                check(User(email=user.name, limits=limits))
            except Unusable as error:
                raise InvalidRequest(f"user {shown(user.name)}: {error}") from error
            packed = None if limits is None else limits.SerializeToString(deterministic=True)
            overrides[key_of(user.name)] = user.name, packed
        refused = await self._enforcement.override({key: packed for key, (_, packed) in overrides.items()})
        reply = SetLimitsResponse()
        for key, (name, _) in overrides.items():
            for text in self._listing.notes(key) if key in self._book.in_force.users else [NO_USER]:
                reply.notes.add(name=name, text=text)
        for email, reason in refused:
            if key_of(email) in overrides:
                reply.notes.add(name=overrides[key_of(email)][0], text=f"the user is not in the core: {reason}")
        return reply


class Listing:
    """Makes the replies of GetLimits."""

    def __init__(self, reactor: IReactorTime, book: Book, addresses: AddressLimits, pacer: Pacer) -> None:
        self._reactor = reactor
        self._book = book
        self._addresses = addresses
        self._pacer = pacer

    def notes(self, key: str) -> list[str]:
        """Which of this user's limits are not enforced, and why."""
        return [*self._addresses.notes(key), *self._pacer.notes(key)]

    async def page(self, request: GetLimitsRequest) -> GetLimitsResponse:
        """The users after a name, as many as fit into a reply: those with limits, barred ones, or some by name."""
        keys = self._asked(request.names, request.off)
        begin, limit = key_of(request.after), min(request.limit or MOST, MOST)
        reply, size = GetLimitsResponse(total=len(keys)), 0
        page = nsmallest(limit + 1, (key for key in keys if key > begin))
        addresses = await self._addresses.addresses(page)
        for number, key in enumerate(page):
            if number % TURN == 0:
                await a_turn(self._reactor)
            row = self._row(key, addresses.get(key, ()))
            size += row.ByteSize() + _FRAME
            if len(reply.users) == limit or (reply.users and size > MOST_BYTES):
                reply.next = page[number - 1]
                break
            reply.users.append(row)
        return reply

    def _asked(self, names: Collection[str], off: bool) -> AbstractSet[str]:
        book = self._book
        if names:
            return {key for key in map(key_of, names) if book.knows(key) and (not off or key in book.off)}
        return book.off.intersection(book.in_force.users) if off else book.in_force.limited()

    def _row(self, key: str, addresses: Sequence[str]) -> LimitState:
        book = self._book
        limit, count = book.in_force.of(key), book.count_of(key)
        row = LimitState(name=book.in_force.name_of(key), limits=limit.message(), addresses=addresses)
        row.notes.extend(self.notes(key))
        if count is not None or limit.quota:
            # A user who has not connected yet has no count.
            _fill(row, limit, count or Count(0.0), book.now(), weighted=bool(book.weights.rules))
        return row


def _fill(row: LimitState, limit: Limit, count: Count, now: float, weighted: bool) -> None:
    """Add the usage and what follows from it."""
    if limit.quota:
        row.used_up, row.used_down, row.counted_since = count.up, count.down, count.began
        if weighted or count.extra is not None:
            row.weighted_up, row.weighted_down = count.weighted
        row.left = max(0, limit.quota - count.used(limit.way))
        if limit.period is not Period.NEVER:
            row.resets_at = int(limit.span(now)[1])
    row.cut_until = int(count.cut_until) if now < count.cut_until else 0
    row.slow_until = int(count.slow_until) if now < count.slow_until else 0
    row.off_since = count.off_since
    row.off_for.extend(reasons(reached(count, limit, now), limit))
