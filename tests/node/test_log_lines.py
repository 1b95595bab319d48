"""The node's log as JSON: one line for each event."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.task import Clock
from twisted.logger import ILogObserver, LogLevel, capturedLogs
from twisted.python.components import Componentized
from twisted.python.failure import Failure

from node.base.limited_warning import PERIOD, LimitedWarning
from node.base.logs import UNNAMED, Logger
from node.log_lines import MAX_TEXT, install, json_line


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no")

    __repr__ = __str__


def test_an_event() -> None:
    """Time, level, logger, text, format string, and fields."""
    event = {
        "log_time": 1.5,
        "log_level": LogLevel.warn,
        "log_namespace": "node.door",
        "log_format": "{count} came from {address}",
        "count": 3,
        "address": "::1",
        "timeout": 1.5,
    }
    assert json.loads(json_line(event)) == {
        "time": "1970-01-01T00:00:01.500000+00:00",
        "level": "warn",
        "logger": "node.door",
        "event": "{count} came from {address}",
        "text": "3 came from ::1",
        "fields": {"count": 3, "address": "::1", "timeout": 1.5},
    }


def raised() -> Failure:
    try:
        raise ValueError("one\ntwo\u2028three")
    except ValueError:
        return Failure()


@pytest.mark.parametrize(
    "event",
    [
        {"log_format": "two\nlines\u2028\r\x85", "log_level": LogLevel.info},
        {"log_format": "{missing}", "log_level": LogLevel.info},
        {"log_format": b"bytes \xff", "log_level": LogLevel.info},
        {"log_format": "{much}", "much": 10**5000, "log_level": LogLevel.info},
        {"log_format": "{odd}", "odd": Unprintable()},
        {"log_format": "{odd}", "odd": b"\xff\n", "more": {"a": [1]}, "nan": float("nan"), "none": None},
        {"log_format": "x" * 10 * MAX_TEXT, "text": "y" * 10 * MAX_TEXT},
        {"log_format": "it failed", "log_failure": raised(), "log_level": LogLevel.critical},
        {"message": ("an old", "event"), "isError": 0, "system": "-", "time": 1.0},
        {"message": (), "isError": 1, "failure": raised(), "why": "because", "time": 1.0},
        {},
    ],
)
def test_one_line_whatever_the_event(event: dict[str, Any]) -> None:
    """Each event is one line of JSON, of bounded length."""
    [line] = json_line(event).splitlines()
    assert len(line) < 20 * MAX_TEXT
    found = json.loads(line)
    assert {"time", "level", "logger", "event", "text"} <= found.keys()
    assert ("traceback" in found) is ("log_failure" in event or "failure" in event)


def test_where_it_goes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """To twistd's log file; not to syslog, and not from a daemon to standard output."""
    application, file = Componentized(), tmp_path / "log"
    before = signal.getsignal(signal.SIGUSR1)
    request.addfinalizer(lambda: signal.signal(signal.SIGUSR1, before))
    install(application, {"logfile": str(file)}, lambda turn: turn())
    observer = application.getComponent(ILogObserver)
    assert observer is not None
    observer({"log_format": "it works"})
    assert json.loads(file.read_text())["text"] == "it works"
    for options in ({"syslog": True}, {"logfile": "-"}):
        with pytest.raises(ValueError, match=r"json|daemon"):
            install(Componentized(), options, lambda turn: turn())


def test_users_are_named_only_with_log_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields that name users are hidden unless LOG_USERS is on."""
    log = Logger()
    with capturedLogs() as events:
        log.warn("user {user} was refused: {of_user}", user="ann", of_user="like bert")
        monkeypatch.setattr(Logger, "names_users", True)
        log.warn("user {user} was refused: {of_user}", user="ann", of_user="like bert")
    assert [(event["user"], event["of_user"]) for event in events] == [(UNNAMED, UNNAMED), ("ann", "like bert")]


def test_limited_warnings() -> None:
    """The first is logged, the others of a period are one line with their count, and the last line has the rest."""
    clock = Clock()
    with capturedLogs() as events:
        repeated = LimitedWarning(clock, Logger().warn, "a handshake failed")
        for number in range(1000):
            repeated.happened(f"192.0.2.{number % 4}")
        assert [event["address"] for event in events] == ["192.0.2.0"]
        clock.advance(PERIOD)
        assert (events[1]["count"], events[1]["addresses"]) == (999, 4)
        repeated.happened("192.0.2.9")
        assert len(events) == 2
        repeated.sum_up()
        repeated.sum_up()
        assert (len(events), events[2]["count"]) == (3, 1)
        clock.advance(2 * PERIOD)
        repeated.happened("192.0.2.9")
        assert (len(events), clock.getDelayedCalls()) == (4, [])
