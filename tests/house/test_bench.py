"""What the benches make of their figures: goals, comparisons, the bytes of a log stream, sums of a profile."""

from __future__ import annotations

import pytest

from scripts.bench import stacks
from scripts.bench.all import told
from scripts.bench.profile import profiled
from scripts.bench.raw import arrived, payloads
from scripts.bench.results import GOALS, Goal, Row, from_json, line, markdown, merged, regressions, to_json, worse

RATE = "PUT /user/sync, one by one"
RSS = "RSS without users"


def test_a_saved_run_is_what_it_was() -> None:
    """Rows go to JSON and come back, those without a floor too."""
    rows = [Row(RATE, "/s", 500.0, 700.0, None, 1_500.0), Row(RSS, "MiB", 60.0)]
    assert from_json(to_json(rows, "two processors")) == rows


@pytest.mark.parametrize(
    ("now", "before", "share"),
    [
        # Without a floor as it is; a rate is worse when it is smaller.
        (Row("a", "ms", 12.0), Row("a", "ms", 10.0), 0.2),
        (Row("a", "/s", 80.0), Row("a", "/s", 100.0), 0.25),
        (Row("a", "%", 100.0), Row("a", "%", 50.0), -0.5),
        # A machine that is half as fast makes nothing worse.
        (Row("a", "ms", 20.0, transport=2.0), Row("a", "ms", 10.0, transport=1.0), 0.0),
        (Row("a", "/s", 50.0, core=200.0), Row("a", "/s", 100.0, core=400.0), 0.0),
        (Row("a", "ms", 10.0, transport=1.0), Row("a", "ms", 10.0, transport=2.0), 1.0),
        # The core's own floor goes before the transport's; one that only one run has is none.
        (Row("a", "ms", 20.0, core=2.0, transport=1.0), Row("a", "ms", 10.0, core=1.0, transport=1.0), 0.0),
        (Row("a", "ms", 10.0, transport=5.0), Row("a", "ms", 10.0), 0.0),
        # From nothing to something: drops.
        (Row("a", "", 0.0), Row("a", "", 0.0), 0.0),
        (Row("a", "", 3.0), Row("a", "", 0.0), 1.0),
    ],
)
def test_by_how_much_a_row_is_worse(now: Row, before: Row, share: float) -> None:
    assert worse(now, before) == pytest.approx(share)


def test_what_is_told_of_a_run_beside_another() -> None:
    """More than 15 in a hundred is told, and ends with 1; a row that the other run did not have is not compared."""
    before = [Row("slow", "ms", 10.0), Row("steady", "ms", 10.0)]
    now = [Row("slow", "ms", 12.0), Row("steady", "ms", 11.0), Row("new", "ms", 99.0)]
    found = regressions(now, before)
    assert [(row.name, round(share, 2)) for row, share in found] == [("slow", 0.2)]
    assert (told(found), told([])) == (1, 0)


def test_the_better_of_two_measurements_counts() -> None:
    """By its floor, where it has one: the second took longer on a machine that was much slower then."""
    first = [Row("a", "ms", 10.0, transport=1.0), Row("b", "/s", 10.0), Row("c", "ms", 1.0)]
    second = [Row("a", "ms", 12.0, transport=2.0), Row("b", "/s", 8.0)]
    assert merged(first, second) == [second[0], first[1], first[2]]


def test_a_goal_follows_the_machine() -> None:
    """Where the other node is slower than it was when the goal was set, the goal is so much easier."""
    assert Goal(700, 715).here(357.5) == pytest.approx(350)
    assert Goal(700, 715).here(None) == 700
    assert Goal(60).here(20.0) == 60


def test_missed_goals_are_marked() -> None:
    """A rate below its goal, or a size above it; GetStats is held to the core's own."""
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


def test_what_a_log_stream_holds_and_when_it_came() -> None:
    """Only DATA frames count; a text that two frames share came with the second; half a frame is not there yet."""
    first, second = _frame(1, b"head") + _frame(0, b"abc"), _frame(6, bytes(8)) + _frame(0, b"def")
    data, ends, places = payloads(first + second + _frame(0, b"later")[:-1])
    assert data == b"abcdef"
    arrivals = [(len(first), 1.0), (len(first + second), 2.0)]
    assert [arrived(place, ends, places, arrivals) for place in (3, 4, 6)] == [1.0, 2.0, 2.0]


def test_the_sums_of_a_profile() -> None:
    """Of a recursive function once; ours by their rooms; the thread that looks is left out of the shares."""
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
    """Of a real node: the calls were made, and the function that all requests of gRPC go through is in the stacks."""
    found, used, done = profiled("info", users=10, seconds=1.0)
    assert done > 10
    seen = sum(micros for stack, micros in found if stack[0] != stacks.SAMPLER)
    assert 0.3 * used < seen / 1e6 < 1.1 * used
    assert stacks.within(found)["node.aio:Aio._main"] > 0
    assert {"MainThread", "aio"} <= stacks.by_thread(found).keys()
