"""GetLimits: lists users with their limits and usage, a page at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import nsmallest
from typing import Protocol

from twisted.internet.task import deferLater

from node.backend.listing import MOST, MOST_BYTES, TURN
from node.base.reactor import PooledReactor
from node.contract.accounts import key_of
from node.limits.book import Book
from node.limits.count import Count, reached, reasons
from node.limits.limits import Limit, Period, period
from protos.service_pb2 import GetLimitsResponse, LimitState

# Bytes of a row's tag and length in a reply.
_FRAME = 6


class Sight(Protocol):
    """Where users are connected from, and which limits are not enforced."""

    async def addresses(self, keys: Collection[str]) -> Mapping[str, Sequence[str]]:
        """The addresses that these users are connected from, by key; users without connections may be missing."""

    def notes(self, key: str) -> Sequence[str]:
        """Which of this user's limits are not enforced, and why."""


class Listing:
    """Makes the replies of GetLimits. `sight` knows the users' connections."""

    def __init__(self, reactor: PooledReactor, book: Book, sight: Sight) -> None:
        self._reactor = reactor
        self._book = book
        self._sight = sight

    async def page(self, after: str, limit: int, names: Collection[str], off: bool) -> GetLimitsResponse:
        """The users after this name, as many as fit into a reply: those with limits, barred ones, or `names`."""
        keys = self._asked(names, off)
        begin, limit = key_of(after), min(limit or MOST, MOST)
        reply, size = GetLimitsResponse(total=len(keys)), 0
        page = nsmallest(limit + 1, (key for key in keys if key > begin))
        addresses = await self._sight.addresses(page)
        for number, key in enumerate(page):
            if number % TURN == 0:
                await deferLater(self._reactor, 0)
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
        return {key for key in book.off if book.is_user(key)} if off else book.limited()

    def _row(self, key: str, addresses: Sequence[str]) -> LimitState:
        book = self._book
        limit, count = book.limit_of(key), book.count_of(key)
        row = LimitState(name=book.name_of(key), limits=limit.message(), addresses=addresses)
        row.notes.extend(self._sight.notes(key))
        if count is not None or limit.quota:
            # A user who has not connected yet has no count.
            _fill(row, limit, count or Count(0.0), book.now())
        return row


def _fill(row: LimitState, limit: Limit, count: Count, now: float) -> None:
    """Add the usage and what follows from it."""
    if limit.quota:
        row.used_up, row.used_down, row.counted_since = count.up, count.down, count.began
        row.left = max(0, limit.quota - count.used(limit.way))
        if limit.period is not Period.NEVER:
            row.resets_at = int(period(now, limit.period, limit.reset_day)[1])
    row.off_since = count.off_since
    row.off_for.extend(reasons(reached(count, limit, now), limit))
