"""Evaluation of benchmarks: goals, comparisons, the bytes of a log stream, sums of a profile."""

from __future__ import annotations

import pytest

from scripts.bench import stacks
from scripts.bench.all import reported
from scripts.bench.profile import profiled
from scripts.bench.raw import arrived, payloads
from scripts.bench.results import GOALS, Goal, Row, from_json, line, markdown, merged, regressions, to_json, worse

RATE = "PUT /user/sync, one by one"
RSS = "RSS without users"


def test_a_saved_run_is_read_back() -> None:
    """Rows survive JSON, with and without a floor."""
    rows = [Row(RATE, "/s", 500.0, 700.0, None, 1_500.0), Row(RSS, "MiB", 60.0)]
    assert from_json(to_json(rows, "two processors")) == rows


@pytest.mark.parametrize(
    ("now", "before", "share"),
    [
        # Without a floor: compared as it is; a smaller rate is worse.
        (Row("a", "ms", 12.0), Row("a", "ms", 10.0), 0.2),
        (Row("a", "/s", 80.0), Row("a", "/s", 100.0), 0.25),
        (Row("a", "%", 100.0), Row("a", "%", 50.0), -0.5),
        # A machine of half the speed makes no row worse.
        (Row("a", "ms", 20.0, transport=2.0), Row("a", "ms", 10.0, transport=1.0), 0.0),
        (Row("a", "/s", 50.0, core=200.0), Row("a", "/s", 100.0, core=400.0), 0.0),
        (Row("a", "ms", 10.0, transport=1.0), Row("a", "ms", 10.0, transport=2.0), 1.0),
        # The core's own floor wins over the transport's; a floor that only one run has does not count.
        (Row("a", "ms", 20.0, core=2.0, transport=1.0), Row("a", "ms", 10.0, core=1.0, transport=1.0), 0.0),
        (Row("a", "ms", 10.0, transport=5.0), Row("a", "ms", 10.0), 0.0),
        # From zero to more than zero: drops.
        (Row("a", "", 0.0), Row("a", "", 0.0), 0.0),
        (Row("a", "", 3.0), Row("a", "", 0.0), 1.0),
    ],
)
def test_by_how_much_a_row_is_worse(now: Row, before: Row, share: float) -> None:
    assert worse(now, before) == pytest.approx(share)


def test_comparing_a_run_with_another() -> None:
    """Rows worse by more than 15 % are reported, with exit code 1; rows that the other run lacks are not compared."""
    before = [Row("slow", "ms", 10.0), Row("steady", "ms", 10.0)]
    now = [Row("slow", "ms", 12.0), Row("steady", "ms", 11.0), Row("new", "ms", 99.0)]
    found = regressions(now, before)
    assert [(row.name, round(share, 2)) for row, share in found] == [("slow", 0.2)]
    assert (reported(found), reported([])) == (1, 0)


def test_the_better_of_two_measurements_counts() -> None:
    """Measured by the floor, if there is one: the second took longer, but on a then much slower machine."""
    first = [Row("a", "ms", 10.0, transport=1.0), Row("b", "/s", 10.0), Row("c", "ms", 1.0)]
    second = [Row("a", "ms", 12.0, transport=2.0), Row("b", "/s", 8.0)]
    assert merged(first, second) == [second[0], first[1], first[2]]


def test_a_goal_follows_the_machine() -> None:
    """If the other node is slower than when the goal was set, the goal is easier by the same factor."""
    assert Goal(700, 715).here(357.5) == pytest.approx(350)
    assert Goal(700, 715).here(None) == 700
    assert Goal(60).here(20.0) == 60


def test_missed_goals_are_marked() -> None:
    """A rate below its goal, or a size above it; GetStats is compared with the core's own."""
    assert Row(RATE, "/s", 600.0).missed
    assert not Row(RATE, "/s", 600.0, peer=400.0).missed
    assert Row(RSS, "MiB", GOALS[RSS].value + 1).missed
    assert Row("GetStats over gRPC, 10,000 rows", "ms", 13.0, core=10.0).missed
    assert not Row("GetStats over gRPC, 10,000 rows", "ms", 11.0, core=10.0).missed
    assert not Row("no goal", "ms", 1e9).missed
    assert line(Row(RATE, "/s", 600.0)).endswith("*")
    assert "| **600** | 700 |" in markdown([Row(RATE, "/s", 600.0)])[-1]


def _frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, 0, 0, 0, 0, 1)) + payload


def test_bytes_of_a_log_stream_and_their_times() -> None:
    """Only DATA frames count; a text in two frames arrives with the second; half a frame does not count yet."""
    first, second = _frame(1, b"head") + _frame(0, b"abc"), _frame(6, bytes(8)) + _frame(0, b"def")
    data, ends, places = payloads(first + second + _frame(0, b"later")[:-1])
    assert data == b"abcdef"
    arrivals = [(len(first), 1.0), (len(first + second), 2.0)]
    assert [arrived(place, ends, places, arrivals) for place in (3, 4, 6)] == [1.0, 2.0, 2.0]


def test_the_sums_of_a_profile() -> None:
    """A recursive function counts once; our functions by rooms; the sampling thread is not in the shares."""
    text = (
        "main;twisted.internet.base:run;node.api.calls:f;node.api.calls:f;ssl:read 300\n"
        "main;twisted.internet.base:run;node.api.calls:f 100\n"
        "aio;asyncio.events:_run;grpc.aio._call:g 200\n"
        "sampler;threading:run 400\n"
    )
    found = stacks.parsed(text)
    assert stacks.by_thread(found) == {"main": 400, "aio": 200, "sampler": 400}
    assert stacks.within(found) == {"node.api.calls:f": 400}
    assert stacks.itself(found)["node.api.calls:f"] == 100
    assert stacks.by_package(found) == {"ssl": 300, "node.api": 100, "grpc": 200, "threading": 400}
    lines = list(stacks.report(found, 1_200e-6))
    assert "25% of it in threads without Python" in lines[0]
    assert "   50.0%  main" in lines


@pytest.mark.core
def test_a_profile_sees_the_node_at_work() -> None:
    """Of a real node: the stacks have the function through which all gRPC requests go."""
    found, used, done = profiled("info", users=10, seconds=1.0)
    assert done > 10
    seen = sum(micros for stack, micros in found if stack[0] != stacks.SAMPLER)
    assert 0.3 * used < seen / 1e6 < 1.1 * used
    assert stacks.within(found)["node.base.aio:Aio._main"] > 0
    assert {"MainThread", "aio"} <= stacks.by_thread(found).keys()
