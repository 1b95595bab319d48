"""Usage is what was booked, whatever happens in whatever order, and decides who is barred."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from node.contract.counters import DIRECTIONS, Scope, counter_name
from node.events.kinds import Kind
from node.limits.book import MANY, REMEMBERED, Book, Report
from node.limits.count import EXPIRY, QUOTA, Count, is_due, next_change, restart_if_due
from node.limits.limits import Defaults, Limit, Way
from node.limits.periods import Period, zone
from node.traffic.ledger import Ledger
from node.traffic.sums import Sums
from protos import service_pb2
from protos.service_pb2 import Limits, Quota
from tests.harness.ledgers import pending as pending_rows
from tests.harness.limited import Noted, new_book

DAY = 86_400.0
NOON = 1_800_014_400.0
NAMES = ("ann", "bob")


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


def quota(size: int, **words: int) -> bytes:
    return Limits(bytes=Quota(bytes=size, **words)).SerializeToString(deterministic=True)  # type: ignore[arg-type]


def until(moment: float, action: int = 0) -> bytes:
    return Limits(expires_at=int(moment), expires_action=action).SerializeToString(deterministic=True)  # type: ignore[arg-type]


def carried(name: str, up: int = 0, down: int = 0) -> Sums:
    return Sums({name: up}, {name: down})


def book_of(own: Mapping[str, bytes], *users: str, defaults: Defaults | None = None) -> tuple[Book, Clock]:
    clock = Clock()
    book = new_book(clock, defaults)
    book.install(own, {*own, *users})
    return book, clock


def test_a_used_up_quota_bars_until_there_is_more() -> None:
    book, _ = book_of({"ann": quota(100), "bob": quota(100)})
    book.book(carried("ann", 30, 60))
    assert book.news == [Report(Kind.LIMIT_NEAR, "ann", QUOTA)] and not book.off
    book.book(carried("ann", 10))
    assert book.off == {"ann"} and book.news[1:] == [Report(Kind.LIMIT_CUT, "ann", QUOTA)]
    book.override("ann", quota(200))
    assert not book.off and book.news[2:] == [Report(Kind.LIMIT_BACK, "ann", "")]
    assert book.left("ann") == 100 and book.left("bob") == 100


def test_only_the_counted_direction() -> None:
    book, _ = book_of({"ann": quota(100, way=Quota.DOWN), "bob": quota(100, way=Quota.UP)})
    for name in NAMES:
        assert book.book(carried(name, 99, 100)) == [(name, 100 if name == "ann" else 99)]
    assert book.off == {"ann"}


def test_a_new_period() -> None:
    book, clock = book_of({"ann": quota(100, period=Quota.DAY)})
    book.book(carried("ann", 100))
    assert book.off == {"ann"}
    assert book.next_turn == clock.now + DAY / 2
    clock.now += DAY / 2
    assert book.about_to_reset(9) == ["ann"]
    book.judge_due()
    assert not book.off and book.left("ann") == 100
    assert book.next_turn == clock.now + DAY


def test_many_due_users_are_judged_in_parts() -> None:
    own = {f"user{number}": until(NOON + number) for number in range(100)}
    book, clock = book_of(own)
    clock.now += 49
    # No count restarts, but with many due users they are returned unchecked.
    assert not book.about_to_reset(50) and len(book.about_to_reset(20)) == 20
    for count in (11, 21, 31, 41):
        assert book.judge_due(10)
        assert len(book.off) == count
    assert not book.judge_due(10) and len(book.off) == 50


def test_expiry() -> None:
    book, clock = book_of({"ann": until(NOON + 5), "bob": until(NOON + 5, service_pb2.TELL)})
    clock.now += 4.9
    book.judge_due()
    assert not book.off
    clock.now += 0.1
    book.judge_due()
    assert book.off == {"ann"}
    assert set(book.news) == {Report(Kind.LIMIT_CUT, "ann", EXPIRY), Report(Kind.LIMIT_REACHED, "bob", EXPIRY)}


def test_a_count_has_a_name() -> None:
    """The same `since` continues the count; another one starts at `used`; one in the future starts then."""
    book, clock = book_of({"ann": quota(100, since=5, used=40)})
    book.book(carried("ann", 10))
    assert book.left("ann") == 50
    book.override("ann", quota(200, since=5, used=40))
    assert book.left("ann") == 150
    book.override("ann", quota(200, since=6, used=7))
    assert book.left("ann") == 193
    book.book(carried("ann", 10))
    book.override("ann", quota(200, since=int(clock.now) + 60))
    assert book.left("ann") == 183
    clock.now += 60
    book.judge_due()
    assert book.left("ann") == 200


def test_the_last_change_holds() -> None:
    """SetLimits, until the user's own message has other limits than it had then."""
    own = {"ann": quota(100)}
    book, _ = book_of(own)
    book.override("ann", quota(50))
    assert book.in_force.of("ann").quota == 50
    book.install(dict(own), {"ann"})
    assert book.in_force.of("ann").quota == 50
    book.install({"ann": quota(70)}, {"ann"})
    assert book.in_force.of("ann").quota == 70
    book.install(dict(own), {"ann"})
    assert book.in_force.of("ann").quota == 100
    book.override("ann", quota(50))
    book.install({}, {"ann"})
    assert not book.in_force.of("ann").any


def test_a_removed_user_keeps_their_usage() -> None:
    """Disabling and enabling a user, or a Stop and a Start, gives no user a new quota."""
    own = {"ann": quota(100)}
    book, clock = book_of(own)
    book.book(carried("ann", 100))
    book.install({}, set())
    book.book(carried("ann", 7))
    clock.now += 100
    book.install(own, {"ann"})
    assert book.off == {"ann"} and book.left("ann") == -7
    book.install({}, set())
    book.forget_gone(book.counted)
    clock.now += 41 * DAY
    book.forget_gone(book.counted)
    assert book.everything() == {}


def test_defaults_are_for_users_without_limits() -> None:
    defaults = Defaults(Limits(bytes=Quota(bytes=100)))
    book, _ = book_of({"ann": quota(0)}, "bob", defaults=defaults)
    book.book(carried("ann", 100))
    book.book(carried("bob", 100))
    assert book.off == {"bob"} and [*book.in_force.limited()] == ["bob"]


def test_a_new_period_of_a_default_quota() -> None:
    """Also for a user who was not judged before they carried something."""
    book, clock = book_of({}, "ann", defaults=Defaults(Limits(bytes=Quota(bytes=100, period=Quota.DAY))))
    book.book(carried("ann", 100))
    assert book.off == {"ann"}
    clock.now += DAY
    book.judge_due()
    assert not book.off


def test_a_day_begins_in_the_time_zone() -> None:
    """Tehran's midnight is 8.5 hours after noon UTC."""
    defaults = Defaults(Limits(bytes=Quota(bytes=100, period=Quota.DAY)), zone=zone("Asia/Tehran"))
    book, clock = book_of({}, "ann", defaults=defaults)
    book.book(carried("ann", 100))
    clock.now = NOON + 8.5 * 3600 - 1
    book.judge_due()
    assert book.off == {"ann"}
    clock.now += 1
    book.judge_due()
    assert not book.off


def test_a_clock_that_is_set_back() -> None:
    book, clock = book_of({"ann": until(NOON + 5)})
    clock.now += 10
    book.judge_due()
    assert book.off == {"ann"}
    clock.now -= 10
    book.judge_all_again()
    book.judge_due()
    assert not book.off
    clock.now += 10
    book.judge_due()
    assert book.off == {"ann"}


def test_changes_of_users_leave_no_heap_behind() -> None:
    book, _ = book_of({"ann": quota(100, period=Quota.DAY)})
    for _ in range(15_000):
        book.follow("ann")
    assert len(book._moments) <= 10_003


def test_users_without_limits_cost_nothing() -> None:
    book, _ = book_of({}, *NAMES)
    assert book.book(carried("ann", 10**12)) == []
    assert book.everything() == {} and not book.dirty and book.next_turn == math.inf


counts = st.builds(
    Count, st.floats(NOON - 90 * DAY, NOON), since=st.none() | st.sampled_from([0, 5]), up=st.integers(0, 200)
)
limits = st.builds(
    Limit,
    quota=st.sampled_from([0, 100]),
    way=st.sampled_from(Way),
    since=st.sampled_from([0, 5, int(NOON) + 60]),
    period=st.sampled_from(Period),
    reset_day=st.integers(0, 7),
    expires_at=st.sampled_from([0, int(NOON) - 5, int(NOON) + 5]),
)


@given(counts, limits, st.floats(NOON, NOON + 90 * DAY))
def test_a_count_restarts_once(count: Count, limit: Limit, now: float) -> None:
    """One `restart_if_due` does it, and nothing is due again before `next_change`."""
    assert restart_if_due(count, limit, now) is not is_due(count, limit, now) or not is_due(count, limit, now)
    assert not restart_if_due(count, limit, now)
    moment = next_change(count, limit, now)
    assert moment > now
    if moment < math.inf:
        assert not is_due(count, limit, (now + moment) / 2)


class UsedIsWhatWasSeen(RuleBasedStateMachine):
    """A ledger and a book over one core; the node is killed now and then. On disk both always match."""

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.own: dict[str, bytes] = {}
        self.messages = 0
        self.core = dict.fromkeys(NAMES, (0, 0))
        self.run = object()
        self.seen = dict.fromkeys(NAMES, 0)
        self.since: dict[str, int | None] = dict.fromkeys(NAMES)
        self.disk: dict[str, bytes | None] = {}
        self.safe: dict[str, int] = dict.fromkeys(NAMES, 0)
        self._node()

    def _node(self) -> None:
        self.book, self.ledger = new_book(self.clock), Ledger()
        self.book.restore([(key, packed) for key, packed in self.disk.items() if packed is not None])
        self.book.install(self.own, {*NAMES})

    def _begin(self, name: str, size: int, since: int, used: int) -> None:
        if not size:
            self.since[name] = None
        elif self.since[name] != since:
            self.since[name], self.seen[name] = since, used

    @rule(name=st.sampled_from(NAMES), up=st.integers(0, 50), down=st.integers(0, 50))
    def carry(self, name: str, up: int, down: int) -> None:
        before = self.core[name]
        self.core[name] = before[0] + up, before[1] + down

    @rule()
    def read(self) -> None:
        reading = {
            counter_name(Scope.USER, name, way): value
            for name, both in self.core.items()
            for way, value in zip(DIRECTIONS, both, strict=True)
        }
        last = {row.name: sum(row.both) for row in pending_rows(self.ledger, Scope.USER)}
        self.book.book(self.ledger.book(self.run, reading).get(Scope.USER, Sums()))
        for row in pending_rows(self.ledger, Scope.USER):
            self.seen[row.name] += sum(row.both) - last.get(row.name, 0)

    @rule(delivered=st.booleans())
    def reset(self, delivered: bool) -> None:
        self.ledger.settle(self.ledger.take(Scope.USER), delivered)

    @rule()
    def save(self) -> None:
        self.disk |= self.book.records(self.book.dirty)
        self.book.dirty.clear()
        self.safe = dict(self.seen)

    @rule(
        name=st.sampled_from(NAMES),
        size=st.sampled_from([0, 50, 500]),
        since=st.sampled_from([0, 5]),
        live=st.booleans(),
    )
    def limit(self, name: str, size: int, since: int, live: bool) -> None:
        self._begin(name, size, since, 7)
        if live:
            self.book.override(name, quota(size, since=since, used=7))
        else:
            # This message differs from all before, so it takes precedence.
            self.messages += 1
            packed = quota(size, since=since, used=7) + Limits(expires_at=10**10 + self.messages).SerializeToString()
            self.own = {**self.own, name: packed}
            self.book.install(self.own, {*NAMES})
        self.save()

    @rule()
    def crash_of_the_core(self) -> None:
        self.core, self.run = dict.fromkeys(NAMES, (0, 0)), object()

    @rule()
    def crash_of_the_node(self) -> None:
        self.seen = dict(self.safe)
        self.crash_of_the_core()
        self._node()

    @invariant()
    def used_is_what_was_seen(self) -> None:
        for name in NAMES:
            limit, count = self.book.in_force.of(name), self.book.count_of(name)
            if limit.quota:
                assert count is not None
                assert count.used(limit.way) == self.seen[name]
                assert (name in self.book.off) == (self.seen[name] >= limit.quota)
            else:
                assert name not in self.book.off


TestUsed = UsedIsWhatWasSeen.TestCase


def test_a_barred_user_who_was_forgotten_is_in_when_they_come_again() -> None:
    book, clock = book_of({"ann": until(NOON - 5)})
    book.install({}, ())
    book.forget_gone(book.counted)
    clock.now += REMEMBERED + 1
    book.forget_gone(book.counted)
    assert not book.install({}, {"ann"}) and book.count_of("ann") is None


def test_a_default_expiry_holds_for_a_whole_set() -> None:
    everybody = Limits(expires_at=int(NOON) + 5)
    book, clock = book_of({}, "ann", defaults=Defaults(everybody))
    clock.now += 5
    book.judge_due()
    assert book.off == {"ann"}
    assert book.install({}, {"ann", "bob"}) == {"ann", "bob"}


def test_a_whole_set_moves_users_to_other_inbounds() -> None:
    """The limits there hold at once: a barred user is in, a user with a quota now is counted."""
    inbounds, clock = {"ann": ("free",), "bob": ("paid",)}, Clock()
    defaults = Defaults(inbounds={"free": Limits(bytes=Quota(bytes=100))})
    desired: Any = SimpleNamespace(roster=SimpleNamespace(tags_of=inbounds.__getitem__))
    book = new_book(clock, defaults, desired)
    book.install({}, {*NAMES})
    book.override("bob", until(NOON + 5))
    book.override("bob", None)
    book.book(carried("ann", 100))
    assert book.off == {"ann"}
    inbounds.update(ann=("paid",), bob=("free",))
    assert not book.install({}, {*NAMES})
    book.book(carried("bob", 100))
    assert book.off == {"bob"}


def test_a_summary_counts_present_users_and_their_reasons() -> None:
    both = Limits(bytes=Quota(bytes=100), expires_at=int(NOON) - 1, expires_action=service_pb2.TELL)
    book, _ = book_of({"ann": both.SerializeToString(deterministic=True), "bob": quota(100)})
    for name, size in (("ann", 100), ("bob", 90)):
        book.book(carried(name, size))
    summary = book.summary()
    assert (summary.off_quota, summary.off_expired, summary.near) == (1, 0, 1)
    book.install({}, ())
    assert book.summary() == service_pb2.LimitsSummary()


def test_a_clock_that_was_fast() -> None:
    """Fast for a while: periods begin as they did before."""
    book, clock = book_of({"ann": quota(100, period=Quota.MONTH)})
    clock.now += 3650 * DAY
    book.judge_due()
    clock.now = NOON
    book.judge_all_again()
    book.judge_due()
    book.book(carried("ann", 100))
    assert book.off == {"ann"}
    clock.now += 31 * DAY
    book.judge_due()
    assert not book.off


def test_a_clock_that_was_slow() -> None:
    """Slow for a while, as on a machine without a battery: no period begins twice, whatever restarts meanwhile."""
    book, clock = book_of({"ann": quota(100, period=Quota.MONTH)})
    book.book(carried("ann", 100))
    clock.now = 60.0
    book.judge_all_again()
    book.judge_due()
    restarted = new_book(clock)
    restarted.restore((key, packed) for key, packed in book.everything().items() if packed)
    restarted.install({"ann": quota(100, period=Quota.MONTH)}, {"ann"})
    clock.now = NOON + 10
    restarted.judge_due()
    assert restarted.off == {"ann"}
    clock.now += 31 * DAY
    restarted.judge_due()
    assert not restarted.off


def test_saved_records_may_be_loaded_late() -> None:
    """If the disk could not be read at the start: the counts before and since then add up."""
    own = {"ann": quota(100, period=Quota.DAY), "bob": until(NOON - 5)}
    before, _ = book_of(own)
    before.book(carried("ann", 60))
    left = {key: packed for key, packed in before.everything().items() if packed}
    book, _ = book_of({**own, "bob": b""})
    book.book(carried("ann", 50))
    assert not book.off
    book.restore(left.items())
    assert book.off == {"ann"} and book.left("ann") == -10 and "ann" in book.dirty
    assert book.news == [Report(Kind.LIMIT_CUT, "ann", QUOTA)]


def test_a_late_record_bars_its_user() -> None:
    before, _ = book_of({}, "ann")
    before.override("ann", until(NOON - 5))
    left = {key: packed for key, packed in before.everything().items() if packed}
    book, _ = book_of({}, "ann")
    book.restore(left.items())
    assert book.off == {"ann"} and book.news == [Report(Kind.LIMIT_CUT, "ann", EXPIRY)]


def test_a_late_record_of_another_period_is_dropped() -> None:
    own = {"ann": quota(100, period=Quota.DAY)}
    before, _ = book_of(own)
    before.book(carried("ann", 60))
    left = {key: packed for key, packed in before.everything().items() if packed}
    book, clock = book_of(own)
    clock.now += DAY
    book.judge_due()
    book.book(carried("ann", 50))
    book.restore(left.items())
    assert book.left("ann") == 50


def test_a_whole_set_is_judged_in_parts() -> None:
    """Barred users at once, the others soon; the summary is right at any time."""
    names = [f"user{number}" for number in range(MANY + 1)]
    own = dict.fromkeys(names, until(NOON + 5))
    before, _ = book_of({"user1": until(NOON - 5)})
    clock = Clock()
    noted = Noted()
    book = new_book(clock, watcher=noted)
    book.restore((key, packed) for key, packed in before.everything().items() if packed)
    clock.now += 5
    assert book.install(own, own.keys()) == {"user1"}
    assert book.next_turn <= clock.now
    # Bytes of a user who is not judged yet.
    book.book(carried("user2", 1))
    assert {*noted.keys} == {"user1"}
    while book.judge_due(100):
        assert book.summary().limited == MANY + 1
        assert book.summary().off_expired == len(book.off)
    assert book.off == {*names} == {*noted.keys} and book.next_turn == math.inf


def test_near_is_current() -> None:
    book, clock = book_of({"ann": quota(100, period=Quota.DAY), "bob": quota(100)})
    for name in NAMES:
        book.book(carried(name, 90))
    assert book.summary().near == 2
    clock.now += DAY
    book.judge_due()
    assert book.summary().near == 1
    book.book(carried("bob", 10))
    assert (book.summary().near, book.summary().off_quota) == (0, 1)
    assert book.summary().limited == 2
    book.override("bob", quota(0))
    assert book.summary() == service_pb2.LimitsSummary(limited=1)


def test_names_without_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those removed for longest first, and no present user."""
    monkeypatch.setattr("node.limits.book.MOST_GONE", 20)
    book, _ = book_of({name: quota(100) for name in NAMES})
    for number in range(20):
        book.override(f"user{number}", quota(100))
    book.forget_gone(["user7"])
    book.make_room()
    assert len(book.counted) == 22
    book.override("user20", quota(100))
    book.make_room()
    assert len(book.counted) == 12 and {*NAMES} <= {*book.counted} and not book.knows("user7")
    assert book.records(["user7"]) == {"user7": None} and "user7" in book.dirty
