"""Changes of users in the core's API: many calls in flight, answered in any order."""

from __future__ import annotations

from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock

from drivers.process.channel import LATE
from drivers.xray.api import Api, Operation
from node.http2 import headers
from node.http2.frames import END_HEADERS, PREFACE, Code, Kind, frame, framed, number, reset
from tests.node.http2.test_connection import OK, Core

# What the core does with an operation: applies it, refuses it, or ends the call without an answer.
APPLIED, REFUSED, RESET = "applied", "refused", "reset"


class ApiCore(Core):
    """A core with calls that wait for an answer, by stream, in the order in which they began."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[int] = []
        self.begun = 0

    def __call__(self, _: object, __: str, protocol: Any) -> None:
        self.connection = protocol
        self.transport.clear()
        protocol.makeConnection(self.transport)
        self._read = len(PREFACE)

    def look(self) -> None:
        for one in self.seen():
            if one.kind == Kind.HEADERS:
                self.waiting.append(one.stream)
                self.begun += 1
            elif one.kind == Kind.RST_STREAM:
                assert number(one.payload) == Code.CANCEL
                self.waiting.remove(one.stream)

    def answer(self, place: int, what: str) -> None:
        stream = self.waiting.pop(place)
        if what == APPLIED:
            self.says(frame(Kind.HEADERS, END_HEADERS, stream, OK), frame(Kind.DATA, 0, stream, framed(b"")))
            self.says(headers.trailers(stream, {"grpc-status": "0"}, begun=True))
        elif what == REFUSED:
            self.says(headers.trailers(stream, {"grpc-status": "2", "grpc-message": f"refused {stream}"}, begun=False))
        else:
            self.says(reset(stream, Code.CANCEL))
        self.look()


def altering(core: ApiCore, clock: Clock, count: int, in_flight: int) -> Deferred[list[str | None]]:
    with mock.patch("drivers.process.channel.dial", core):
        api = Api(clock, "core")  # type: ignore[arg-type]
        operations = [Operation("home", f"{place}@test", b"") for place in range(count)]
        work = Deferred.fromCoroutine(api.alter(operations, in_flight))
    core.look()
    return work


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([APPLIED, APPLIED, REFUSED, RESET])), min_size=1),
    st.integers(1, 4),
)
def test_answers_in_any_order(todo: list[tuple[int, str]], in_flight: int) -> None:
    """Each operation has its own outcome; after a call without an answer none begins."""
    core, results, expected = ApiCore(), list[list[str | None]](), dict[int, str | None]()
    altering(core, Clock(), count := len(todo), in_flight).addCallback(results.append)
    silent = False
    for place, what in todo:
        if results:
            break
        assert 0 < len(core.waiting) <= in_flight
        place %= len(core.waiting)
        stream, silent = core.waiting[place], silent or what == RESET
        expected[stream // 2] = {APPLIED: None, REFUSED: f"refused {stream}"}.get(what, "the core reset the call")
        core.answer(place, what)
    assert len(expected) == core.begun and (silent or core.begun == count)
    for at, result in enumerate(results[0]):
        wanted = expected.get(at, "the core reset the call")
        assert result == wanted if wanted is None else (result or "").startswith(wanted)


def test_calls_that_are_late() -> None:
    """The others fail at once, each with the reason; the calls under way are cancelled at the core."""
    core, clock, results = ApiCore(), Clock(), list[list[str | None]]()
    altering(core, clock, 1000, 3).addCallback(results.append)
    core.answer(1, APPLIED)
    clock.advance(5)
    core.look()
    assert results == [[LATE, None, LATE] + [LATE] * 997] and core.waiting == []
    assert core.begun == 3


def test_a_caller_who_is_cancelled() -> None:
    """No call stays open at the core."""
    core = ApiCore()
    work = altering(core, Clock(), 10, 4)
    core.answer(0, APPLIED)
    assert len(core.waiting) == 4
    work.cancel()
    core.look()
    work.addErrback(lambda failure: failure.trap(CancelledError))
    assert core.waiting == []


def test_a_user_whom_the_core_has_already() -> None:
    """They are replaced: removed, and added again."""
    core, results = ApiCore(), list[list[str | None]]()
    altering(core, Clock(), 2, 2).addCallback(results.append)
    there = {"grpc-status": "2", "grpc-message": "User 0@test already exists."}
    core.says(headers.trailers(core.waiting.pop(0), there, begun=False))
    core.look()
    for _ in range(3):
        core.answer(0, APPLIED)
    assert results == [[None, None]] and core.begun == 4
