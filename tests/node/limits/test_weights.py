"""Users' bytes weigh what WEIGHTS says, in the hours that the clock shows, and no part of a byte is lost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.contract.counters import SEPARATOR
from node.limits.book import Book
from node.limits.count import Count, pack, unpack
from node.limits.limits import Way
from node.limits.periods import begin_of, zone
from node.limits.weights import PARTS, Rule, Weights, fault_of, rules
from node.traffic.sums import Sums
from protos.service_pb2 import LimitState, Quota
from tests.harness.limited import new_book
from tests.node.limits.test_book import NOON, carried, quota

BERLIN = zone("Europe/Berlin")
EXAMPLE = "premium: 2; night 00:00-06:00: 0.5; premium 00:00-06:00: 1"
factors = st.integers(0, 100 * PARTS)
tags = st.sampled_from(["premium", "gold", "in 1", "a:b", "443-8443"])
minutes = st.integers(0, 1439)
one_rule = st.builds(Rule, factors, st.frozensets(tags, max_size=2), minutes, st.integers(1, 1440))
some_rules = st.lists(one_rule, max_size=4).map(tuple)
some_bytes = st.integers(0, 10**12)


def weights(text: str, where: str = "UTC") -> Weights:
    return Weights(rules(text), zone(where))


def at(text: str, where: tzinfo = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=where).timestamp()


def shown(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


def written(rule: Rule) -> str:
    end = rule.begin + rule.length
    hours = "" if rule.length == 1440 else f"{shown(rule.begin)}-{shown(end if end <= 1440 else end - 1440)}"
    named = " ".join(filter(None, [", ".join(sorted(rule.tags)), hours])) or "00:00-24:00"
    return f"{named}: {rule.factor // PARTS}.{rule.factor % PARTS:03}"


# The text


@given(some_rules)
def test_what_is_written_is_read(some: tuple[Rule, ...]) -> None:
    # The whole day has no beginning.
    some = tuple(Rule(each.factor, each.tags, 0 if each.length == 1440 else each.begin, each.length) for each in some)
    assert rules("; ".join(map(written, some))) == some


def test_the_example() -> None:
    """The last rule that fits holds: so an exception comes after the rule; a name is always that of an inbound."""
    found = weights(EXAMPLE)
    night, day = at("2026-01-15T01:00", zone("UTC")), at("2026-01-15T06:00", zone("UTC"))
    assert [found.factor(tag, night) for tag in ("premium", "night", "other", None)] == [1000, 500, 1000, 1000]
    assert [found.factor(tag, day) for tag in ("premium", "night", "other", None)] == [2000, 1000, 1000, 1000]
    assert found.most == 2 and weights("").most == weights("00:00-24:00: 0.5").most == 1
    assert rules(" ; ") == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2", "is not a rule"),
        ("premium", "is not a rule"),
        ("premium:2", "is not a rule"),
        # Without its factor the last minutes are none.
        ("premium 00:00-06:00", "is not a rule"),
        (", 00:00-06:00: 2", "no tag"),
        (",: 2", "no tag"),
        ("premium: two", "is not a factor"),
        ("premium: -1", "is not a factor"),
        ("premium: 100.001", "is not a factor"),
        ("premium: 0.0001", "is not a factor"),
        ("premium: 1e2", "is not a factor"),
        ("premium: 0,5", "is not a factor"),
        ("6:00-7:00: 2", "are not hours"),
        ("00:00-24:01: 2", "are not hours"),
        ("24:00-06:00: 2", "are not hours"),
        ("06:00-06:00: 2", "are not hours"),
        ("premium 00:60-06:00: 2", "are not hours"),
        ("premium 00:00 - 06:00: 2", "are not hours"),
    ],
)
def test_what_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        rules(f"00:00-24:00: 1; {text}")


def test_rules_for_inbounds_need_bytes_by_inbound() -> None:
    assert fault_of(rules("gold, premium: 2; 00:00-06:00: 0.5"), by_inbound=False).startswith(
        "rules for inbounds (gold, premium) need USER_INBOUNDS=on"
    )
    assert not fault_of(rules(EXAMPLE), by_inbound=True)
    assert not fault_of(rules("00:00-06:00: 0.5"), by_inbound=False)


def test_an_unknown_inbound_is_reported() -> None:
    assert weights(EXAMPLE).unknown({"premium", "in"}) == [
        "WEIGHTS: the backend has no inbound 'night' for users: rules for it have no effect"
    ]
    assert not weights("00:00-06:00: 0.5").unknown(set())


# The hours


@given(one_rule, minutes)
def test_hours_of_a_day(rule: Rule, minute: int) -> None:
    """A rule holds from its first minute on, over midnight, for its length."""
    inside = {(rule.begin + more) % 1440 for more in range(rule.length)}
    assert Rule(1, frozenset(), rule.begin, rule.length).fits(None, minute) == (minute in inside)


@pytest.mark.parametrize(
    ("day", "hours", "long"),
    [
        ("2026-03-28", "00:00-06:00", 360),
        ("2026-03-28", "22:00-01:00", 180),
        # Two o'clock is skipped.
        ("2026-03-29", "00:00-06:00", 300),
        ("2026-03-29", "02:00-03:00", 0),
        ("2026-03-29", "01:30-03:30", 60),
        ("2026-03-29", "00:00-24:00", 23 * 60),
        # Two o'clock comes twice.
        ("2026-10-25", "00:00-06:00", 420),
        ("2026-10-25", "02:00-03:00", 120),
        ("2026-10-25", "02:30-02:45", 30),
        ("2026-10-25", "00:00-24:00", 25 * 60),
    ],
)
def test_days_on_which_the_clock_is_set(day: str, hours: str, long: int) -> None:
    """A rule holds while the clock shows its hours."""
    found = weights(f"{hours}: 0", "Europe/Berlin")
    date = datetime.fromisoformat(day).date()
    begin, end = begin_of(date, BERLIN), begin_of(date + timedelta(1), BERLIN)
    held = [found.factor(None, begin + 60 * minute + 59.9) == 0 for minute in range(round(end - begin) // 60)]
    assert sum(held) == long


# The bytes


@given(st.lists(st.tuples(factors, some_bytes, some_bytes), max_size=20), st.lists(st.booleans(), min_size=20))
def test_no_part_of_a_byte_is_lost(bookings: Sequence[tuple[int, int, int]], restarts: Sequence[bool]) -> None:
    """Whatever the order of bookings and restarts, with other WEIGHTS: the sum is that of exact fractions."""
    count, exact = Count(1.0, since=0), [Fraction(), Fraction()]
    for (factor, up, down), restarted in zip(bookings, restarts, strict=False):
        book = Weights((Rule(factor),)) if factor != PARTS else Weights()
        count.add(up, down, book.beyond(carried("ann", up, down), Sums(), NOON).both("ann"))
        exact = [exact[0] + Fraction(up * factor, PARTS), exact[1] + Fraction(down * factor, PARTS)]
        assert count.weighted == (math.floor(exact[0]), math.floor(exact[1]))
        assert count.used(Way.BOTH) == sum(count.weighted) and count.used(Way.UP) == count.weighted[0]
        if restarted:
            restored = unpack(pack(None, count))[1]
            assert restored is not None and restored.weighted == count.weighted
            count = restored
    assert (count.up, count.down) == (sum(up for _, up, _ in bookings), sum(down for *_, down in bookings))


def test_many_small_bookings_do_not_drift() -> None:
    book = book_with("00:00-24:00: 0.001")
    for _ in range(9999):
        book.book(carried("ann", 1, 3))
    assert (used(book).up, used(book).weighted) == (9999, (9, 29))


def test_more_than_a_field_holds() -> None:
    """A year at ten gigabits, by the greatest factor, is kept exactly."""
    carried = 4 * 10**16 + 1
    count = Count(1.0, since=0, up=carried, extra=(carried * 99 * PARTS + 1, -1))
    assert unpack(pack(None, count))[1] == count


@given(some_rules, st.dictionaries(tags, st.tuples(some_bytes, some_bytes)), st.booleans(), st.floats(0, 86_400))
def test_bytes_by_inbound(
    some: tuple[Rule, ...], there: Mapping[str, tuple[int, int]], apart: bool, late: float
) -> None:
    """Each byte has the factor of its inbound, also if its two counters come apart; one that is not known has none."""
    found, now = Weights(some), NOON + late
    by_inbound = Sums(*({f"ann{SEPARATOR}{tag}": both[way] for tag, both in there.items()} for way in (0, 1)))
    # Some bytes are of no known inbound.
    moved = carried("ann", *(sum(both[way] for both in there.values()) + 7 for way in (0, 1)))
    count = Count(1.0, since=0)
    for part in [(moved, Sums()), (Sums(), by_inbound)] if apart else [(moved, by_inbound)]:
        count.add(*part[0].both("ann"), found.beyond(*part, now).both("ann"))
    exact = [
        7 * found.factor(None, now) + sum(both[way] * found.factor(tag, now) for tag, both in there.items())
        for way in (0, 1)
    ]
    assert count.weighted == (exact[0] // PARTS, exact[1] // PARTS)


# The book


def book_with(text: str, limit: bytes = quota(1000)) -> Book:
    book = new_book(lambda: NOON, weights=weights(text))
    book.install({"ann": limit}, {"ann", "bob"})
    return book


def used(book: Book) -> Count:
    count = book.counting("ann")
    assert count is not None
    return count


def test_a_quota_ends_at_half() -> None:
    book = book_with("00:00-24:00: 2")
    assert book.book(carried("ann", 100, 399)) == [("ann", 998)]
    assert book.left("ann") == 2 and not book.off
    book.book(carried("ann", 1))
    assert book.off == {"ann"} and used(book).weighted == (202, 798)
    assert (used(book).up, used(book).down) == (101, 399)


def test_only_the_counted_direction_weighs() -> None:
    book = book_with("00:00-24:00: 2", quota(1000, way=Quota.DOWN))
    assert book.book(carried("ann", 10_000, 100)) == [("ann", 200)]
    assert book.left("ann") == 800


def test_an_inbound_that_is_free() -> None:
    """Its bytes do not count; a user without a quota has no count."""
    book = book_with("free: 0")
    moved = Sums({"ann": 300, "bob": 5})
    moved.add(carried("ann"))
    assert book.book(moved, Sums({f"ann{SEPARATOR}free": 200, f"bob{SEPARATOR}free": 5})) == [("ann", 100)]
    assert book.left("ann") == 900 and book.counting("bob") is None


def test_other_weights_count_from_then_on() -> None:
    """Also without any: what has been counted keeps its weight, over a restart and in the period."""
    book = book_with("00:00-24:00: 1.5")
    book.book(carried("ann", 101))
    # 152.5, 153 and 153 bytes.
    for text, left in (("", 848), ("00:00-24:00: 0.5", 847), ("00:00-24:00: 0", 847)):
        records = [(key, packed) for key, packed in book.records(["ann"]).items() if packed is not None]
        book = book_with(text)
        book.restore(records)
        book.book(carried("ann", 1))
        assert book.left("ann") == left
    assert used(book).up == 104


def test_bytes_before_the_records_came() -> None:
    """Those of an earlier node are added, with what they weigh."""
    before, book = book_with("00:00-24:00: 2"), book_with("00:00-24:00: 0.5")
    before.book(carried("ann", 10))
    book.book(carried("ann", 3))
    book.restore([(key, packed) for key, packed in before.records(["ann"]).items() if packed is not None])
    assert (used(book).up, used(book).weighted) == (13, (21, 0))


def test_a_new_period_begins_at_zero() -> None:
    book = book_with("00:00-24:00: 2")
    book.book(carried("ann", 10))
    used(book).begin(NOON, 0)
    assert used(book).weighted == (0, 0) and used(book).extra is None


def test_without_weights_there_is_nothing_to_keep() -> None:
    book = book_with("")
    assert book.book(carried("ann", 10, 20), Sums({f"ann{SEPARATOR}in": 10})) == [("ann", 30)]
    assert used(book).extra is None and used(book).weighted == (10, 20)


def test_what_a_reply_cannot_hold() -> None:
    """A core that counts nonsense does not keep a controller from reading the limits of all users."""
    count = Count(1.0, since=0, up=2**63 - 1, down=2**63 - 1, extra=((2**63 - 1) * 99 * PARTS, -(2**63) * PARTS))
    assert LimitState(weighted_up=count.weighted[0], weighted_down=count.weighted[1]).weighted_up == 2**63 - 1
