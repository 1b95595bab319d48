"""GetLimits: pages of users with limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.limits.book import Book
from node.limits.limits import Defaults
from node.limits.users import Listing
from protos.service_pb2 import GetLimitsRequest, GetLimitsResponse, Limits, Quota
from tests.harness.limited import new_book
from tests.node.limits.test_book import NOON, carried, quota, until

DAY = Limits(bytes=Quota(bytes=100, period=Quota.DAY))


class Nobody:
    """No one is connected."""

    async def addresses(self, _: Collection[str]) -> Mapping[str, Sequence[str]]:
        return {}

    def notes(self, _: str) -> Sequence[str]:
        return ()


class ListingTests(SynchronousTestCase):
    def page(self, book: Book, after: str, limit: int, names: Sequence[str], off: bool) -> GetLimitsResponse:
        clock, nobody = Clock(), cast(Any, Nobody())
        request = GetLimitsRequest(after=after, limit=limit, names=names, off=off)
        page = ensureDeferred(Listing(clock, book, nobody, nobody).page(request))
        clock.advance(0)
        return self.successResultOf(page)

    def test_pages(self) -> None:
        """All users with limits, by name, each once."""
        names = [f"user{number}" for number in range(10)]
        book = new_book(lambda: NOON)
        book.install({name: until(NOON - (name < "user5")) for name in names}, [*names, "somebody"])
        first = self.page(book, "", 6, (), False)
        self.assertEqual(([row.name for row in first.users], first.next, first.total), (names[:6], names[5], 10))
        second = self.page(book, first.next, 6, (), False)
        self.assertEqual(([row.name for row in second.users], second.next), (names[6:], ""))
        off = self.page(book, "", 0, (), True)
        self.assertEqual(([row.name for row in off.users], off.total), (names, 10))
        some = self.page(book, "", 0, ("USER7", "user3", "nobody"), False)
        self.assertEqual([row.name for row in some.users], ["user3", "user7"])

    def test_a_user_who_never_connected_has_the_whole_default_quota(self) -> None:
        book = new_book(lambda: NOON, Defaults(DAY))
        book.install({}, {"ann"})
        (row,) = self.page(book, "", 0, (), False).users
        self.assertEqual((row.left, row.resets_at, row.counted_since), (100, NOON + 43_200, 0))
        book.book(carried("ann", 30))
        (row,) = self.page(book, "", 0, (), False).users
        self.assertEqual((row.left, row.counted_since), (70, NOON))

    def test_a_removed_user(self) -> None:
        book = new_book(lambda: NOON)
        book.override("ann", quota(100))
        self.assertEqual(self.page(book, "", 0, (), False).total, 0)
        (row,) = self.page(book, "", 0, ("ann",), False).users
        self.assertEqual(row.limits.bytes.bytes, 100)
