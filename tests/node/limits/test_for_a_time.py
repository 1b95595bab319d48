"""Users who are barred or slow for abuse, for a time."""

from __future__ import annotations

from node.events.kinds import Kind
from node.limits.book import Book, Report
from node.limits.count import ABUSE, EXPIRY, QUOTA
from node.limits.limits import Defaults
from protos.service_pb2 import TELL, Limits, Quota, Speed
from tests.harness.limited import Noted, new_book
from tests.node.limits.test_book import NOON, Clock, until

NAMES = {"ann", "bob"}
SPARED = Limits(abuse_action=TELL).SerializeToString(deterministic=True)


def made(**own: bytes) -> tuple[Book, Clock, Noted]:
    clock, noted = Clock(), Noted()
    book = new_book(clock, Defaults(), watcher=noted)
    book.install(own, NAMES)
    return book, clock, noted


def passes(book: Book, clock: Clock, seconds: float) -> list[Report]:
    """This time passes. Returns the news."""
    clock.now += seconds
    while book.judge_due():
        pass
    news, book.news = book.news, []
    return news


def test_barred_and_back() -> None:
    """Exactly for so long; a second time it begins again."""
    book, clock, _ = made()
    book.cut("ann", 60)
    assert (book.off, book.news) == ({"ann"}, [Report(Kind.LIMIT_CUT, "ann", ABUSE)])
    assert (book.summary().off_abuse, book.summary().off_quota, book.summary().off_expired) == (1, 0, 0)
    book.news = []
    assert book.next_turn == NOON + 60
    assert not passes(book, clock, 59) and book.off == {"ann"}
    book.cut("ann", 60)
    assert not passes(book, clock, 59) and book.off == {"ann"}
    assert passes(book, clock, 2) == [Report(Kind.LIMIT_BACK, "ann", "")]
    assert not book.off and not book.summary().off_abuse


def test_other_limits_hold_beside_it() -> None:
    """Who has expired meanwhile stays out."""
    book, clock, _ = made(ann=until(NOON + 30))
    book.cut("ann", 60)
    book.news = []
    assert not passes(book, clock, 61) and book.off == {"ann"}
    assert (book.summary().off_abuse, book.summary().off_expired) == (0, 1)
    quota = Limits(bytes=Quota(bytes=5, used=5, since=1)).SerializeToString(deterministic=True)
    book.override("ann", quota)
    assert book.off == {"ann"}
    assert {QUOTA, EXPIRY} == {"quota", "expiry"}


def test_slow_and_not_any_more() -> None:
    """The speed is the lower one; the limits that follow connections learn of both changes."""
    book, clock, noted = made(bob=Limits(speed=Speed(down=500, up=9_000_000)).SerializeToString())
    noted.keys.clear()
    for key in NAMES:
        book.slow(key, 60, 1_000_000)
    assert (book.in_force.of("ann").down, book.in_force.of("ann").up) == (1_000_000, 1_000_000)
    assert (book.in_force.of("bob").down, book.in_force.of("bob").up) == (500, 1_000_000)
    assert set(noted.keys) == NAMES == book.in_force.limited()
    noted.keys.clear()
    assert not passes(book, clock, 61) and not book.off
    assert (book.in_force.of("ann").down, book.in_force.of("bob").up) == (0, 9_000_000)
    assert set(noted.keys) == NAMES and book.in_force.limited() == {"bob"}


def test_a_user_who_is_spared() -> None:
    """With TELL neither holds; set later, it ends both."""
    book, clock, _ = made(ann=SPARED)
    for key in NAMES:
        book.cut(key, 60)
        book.slow(key, 60, 1_000_000)
    assert book.off == {"bob"} and not book.in_force.of("ann").down and book.in_force.of("bob").down
    book.news = []
    book.override("bob", SPARED)
    assert not book.off and book.news == [Report(Kind.LIMIT_BACK, "bob", "")]
    assert not book.in_force.of("bob").down
    assert book.in_force.of("bob").message() == Limits(abuse_action=TELL)
    book.override("bob", None)
    assert book.off == {"bob"} and book.in_force.of("bob").down
    assert passes(book, clock, 61) and not book.off


def test_across_nodes() -> None:
    """The next node goes on with both, and ends them in time."""
    before, clock, _ = made()
    before.cut("ann", 60)
    before.slow("bob", 60, 1_000_000)
    after = new_book(clock, Defaults())
    after.restore((key, packed) for key, packed in before.everything().items() if packed is not None)
    assert after.install({}, NAMES) == {"ann"}
    assert after.in_force.of("bob").down == 1_000_000
    after.news = []
    assert passes(after, clock, 61) == [Report(Kind.LIMIT_BACK, "ann", "")]
    assert not after.in_force.of("bob").down


def test_a_user_who_is_removed_meanwhile() -> None:
    """They are still barred when they come back, until the time is over."""
    book, clock, _ = made()
    book.cut("ann", 60)
    book.slow("bob", 60, 1_000_000)
    book.install({}, set())
    assert book.install({}, NAMES) == {"ann"} and book.in_force.of("bob").down
    book.install({}, set())
    passes(book, clock, 61)
    assert not book.install({}, NAMES) and not book.in_force.of("bob").down
