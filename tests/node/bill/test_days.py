"""Sums by day: nothing is lost or counted twice, and old days make room."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, tzinfo

from hypothesis import given
from hypothesis import strategies as st

from node.bill.days import KEPT, Days, count, spread
from node.limits.periods import begin_of, day_of, zone
from node.machine.interfaces import Carried
from protos.kept_pb2 import KeptDay

BYTES = st.builds(Carried, st.integers(0, 2**50), st.integers(0, 2**50))
zones = st.sampled_from(["UTC", "Europe/Berlin", "America/Sao_Paulo", "Pacific/Apia"]).map(zone)
FIRST = date(2026, 11, 1)


def moment(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@given(BYTES, st.floats(0, 2e9), st.floats(0, 60 * 86_400), zones)
def test_all_bytes_are_on_some_day(moved: Carried, begin: float, seconds: float, here: tzinfo) -> None:
    found = [*spread(moved, begin, begin + seconds, here)]
    assert Carried(*map(sum, zip(*(part for _, part in found), strict=True))) == moved
    assert all(each >= 0 for _, part in found for each in part)
    days = [day for day, _ in found]
    assert days == sorted({*days})
    assert (days[0], days[-1]) == (day_of(begin, here), day_of(begin + seconds, here))


def test_bytes_are_spread_by_time() -> None:
    begin, end = moment("2026-11-01T18:00"), moment("2026-11-03T06:00")
    assert [*spread(Carried(360, 36), begin, end, UTC)] == [
        (date(2026, 11, 1), (60, 6)),
        (date(2026, 11, 2), (240, 24)),
        (date(2026, 11, 3), (60, 6)),
    ]


def test_a_time_that_is_too_long() -> None:
    """As on a machine whose clock was at 1970, or that ran without the node for years."""
    found = [*spread(Carried(10**6, 0), 0.0, moment("2026-11-03T06:00"), UTC)]
    assert len(found) == KEPT + 1 and found[0][0] == date(2026, 11, 3) - timedelta(KEPT)
    assert sum(part.received for _, part in found) == 10**6


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2**40))), st.integers(1, 10))
def test_the_newest_days_are_kept(steps: list[tuple[int, int]], most: int) -> None:
    """On disk as in memory; the current day stays, also if the clock is set back."""
    days, disk = Days(most), dict[str, bytes]()
    for number, added in steps:
        day = FIRST + timedelta(number)
        before = days.between(day, day).users.received
        count(days.of(day).users, added, 0)
        assert days.between(day, day).users.received == before + added
        for key, packed in days.changes().items():
            if packed is None:
                del disk[key]
            else:
                disk[key] = packed
        assert len(disk) <= most
    assert disk == days.everything()
    again = Days(most)
    again.restore(disk.items())
    assert again.everything() == disk and again.first(FIRST) == days.first(FIRST)
    assert not days.changes()


def test_sums_of_some_days() -> None:
    days = Days()
    assert days.first(FIRST) is None and days.between(FIRST, FIRST) == KeptDay()
    for number in range(5):
        day = days.of(FIRST + timedelta(number))
        count(day.users, 10**number, 0)
        count(day.interfaces, 0, 2 * 10**number)
        day.transports.append("tls" if number < 3 else "tcp")
    total = days.between(FIRST + timedelta(1), FIRST + timedelta(3))
    assert (total.users.received, total.interfaces.sent, [*total.transports]) == (1110, 2220, ["tls", "tcp"])
    assert days.first(date.min) == days.first(FIRST) == FIRST
    assert days.first(FIRST + timedelta(2)) == FIRST + timedelta(2)
    assert days.first(FIRST + timedelta(5)) is None


def test_days_that_are_loaded_late_add_up() -> None:
    days, later = Days(), Days()
    count(days.of(FIRST).inbounds, 1, 2)
    count(later.of(FIRST).inbounds, 10, 20)
    later.restore((key, packed) for key, packed in days.everything().items() if packed)
    assert later.between(FIRST, FIRST).inbounds.sent == 22
    assert begin_of(FIRST, UTC) == moment("2026-11-01")
