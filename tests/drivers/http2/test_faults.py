"""What a core may do to a connection that serves nobody any more, and to the calls of it."""

from __future__ import annotations

import time

import pytest
from twisted.internet.defer import Deferred

from drivers.http2.frames import Setting, settings
from drivers.http2.stream import Status
from node.http2 import END_HEADERS, END_STREAM, Code, Kind, frame, framed, reset, window_update
from tests.drivers.http2.test_connection import DONE, OK, Core, ends


def test_an_answer_in_one_piece_with_what_breaks_the_protocol() -> None:
    """Whoever waits for the answer is waked: it is all there."""
    core = Core()
    stream = core.call()
    waiting = Deferred.fromCoroutine(stream.progress())
    core.says(
        frame(Kind.HEADERS, END_HEADERS, 1, OK) + frame(Kind.DATA, 0, 1, framed(b"a")),
        frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, DONE) + frame(Kind.GOAWAY, 0, 0, b""),
    )
    assert waiting.called and [*stream.messages] == [b"a"] and ends([stream]) == [Status.OK]


def test_an_answer_in_one_piece_with_what_nobody_foresaw() -> None:
    """The status of another call is no number that Python makes. Whoever has their answer is waked all the same."""
    core = Core()
    stream = core.call()
    core.call()
    waiting = Deferred.fromCoroutine(stream.progress())
    done = frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, DONE)
    # 5,000 digits, their number in HPACK's form of 7 bits and more.
    strange = DONE[:-2] + b"\x7f\x89\x26" + b"1" * 5000
    with pytest.raises(ValueError, match="digits"):
        core.says(
            frame(Kind.HEADERS, END_HEADERS, 1, OK), done, frame(Kind.HEADERS, END_HEADERS | END_STREAM, 3, strange)
        )
    assert waiting.called and ends([stream]) == [Status.OK]


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", frame(Kind.DATA, 0, 1, bytes(16_385))[:9]])
def test_who_does_not_speak_http2(said: bytes) -> None:
    """It is known at the first frame's header: what such a frame says of its length never comes."""
    core = Core()
    stream = core.call()
    core.says(said)
    assert ends([stream]) == [Status.UNAVAILABLE] and not core.connection.usable


@pytest.mark.parametrize(
    "said",
    [
        frame(Kind.HEADERS, END_HEADERS, 1, b"\x8d"),
        frame(Kind.HEADERS, END_HEADERS, 1, OK) + frame(Kind.DATA, 0, 1, b"\1\0\0\0\1x"),
    ],
)
def test_a_core_that_goes_on_with_a_call_that_is_over(said: bytes) -> None:
    """It is told, or it would go on for ever."""
    core = Core()
    core.call()
    core.seen()
    core.says(said)
    assert [one for one in core.seen() if one.kind == Kind.RST_STREAM] == core.read(reset(1, Code.CANCEL))


def test_an_answer_before_the_whole_request() -> None:
    """The rest is not sent, and the core is told that it does not come."""
    core = Core()
    stream = core.call(bytes(100_000))
    core.seen()
    core.answers(stream.number)
    assert core.seen() == core.read(reset(1, Code.CANCEL)) and not core.connection._unsent
    core.says(window_update(0, 100_000))
    assert not core.seen()


def test_a_large_request_is_sent_without_copying_what_is_left() -> None:
    """20 MB are some 1,200 frames: to copy the rest at each would be 12 GB."""
    core, message = Core(), bytes(20_000_000)
    core.says(settings({Setting.INITIAL_WINDOW_SIZE: 2**31 - 1}), window_update(0, 2**31 - 1 - 65_535))
    begun = time.process_time()
    core.call(message)
    assert time.process_time() - begun < 1
    assert core.sent(1) == framed(message)
