"""What a core may send on a connection without calls, and to ended calls."""

from __future__ import annotations

import time

import pytest

from node.http2.client import BLOCK
from node.http2.frames import (
    END_HEADERS,
    END_STREAM,
    PREFIX,
    Code,
    Kind,
    Setting,
    frame,
    framed,
    reset,
    settings,
    window_update,
)
from node.http2.stream import EACH, MOST, End, Status
from tests.node.http2.test_connection import DONE, OK, Core, ends


def test_an_answer_together_with_a_violation() -> None:
    """The caller of the answer is woken: it is complete."""
    core = Core()
    stream = core.call()
    waiting = stream.progress()
    core.says(
        frame(Kind.HEADERS, END_HEADERS, 1, OK) + frame(Kind.DATA, 0, 1, framed(b"a")),
        frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, DONE) + frame(Kind.GOAWAY, 0, 0, b""),
    )
    assert waiting.called and [*stream.messages] == [b"a"] and ends([stream]) == [Status.OK]


def test_an_answer_together_with_an_unforeseen_error() -> None:
    """The status of another call is too long a number for Python. The caller of the complete answer is woken."""
    core = Core()
    stream = core.call()
    core.call()
    waiting = stream.progress()
    done = frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, DONE)
    # 5,000 digits; their count as an HPACK integer with a prefix of 7 bits.
    strange = DONE[:-2] + b"\x7f\x89\x26" + b"1" * 5000
    with pytest.raises(ValueError, match="digits"):
        core.says(
            frame(Kind.HEADERS, END_HEADERS, 1, OK), done, frame(Kind.HEADERS, END_HEADERS | END_STREAM, 3, strange)
        )
    assert waiting.called and ends([stream]) == [Status.OK]


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", frame(Kind.DATA, 0, 1, bytes(16_385))[:9]])
def test_a_server_without_http2(said: bytes) -> None:
    """The connection is closed at the first frame's header, without waiting for the announced length."""
    core = Core()
    stream = core.call()
    core.says(said)
    assert ends([stream]) == [Status.UNAVAILABLE] and not core.connection.usable


@pytest.mark.parametrize("size", [0, 1, 16_384])
def test_headers_without_an_end(size: int) -> None:
    """The connection is closed before they take much memory, with the reason."""
    core = Core()
    stream = core.call()
    piece = frame(Kind.CONTINUATION, 0, 1, bytes(size))
    core.says(frame(Kind.HEADERS, 0, 1, OK), piece * (BLOCK // len(piece) - 1))
    assert core.connection.usable and stream.end is None
    core.says(piece * 2)
    assert stream.end == End(Status.UNAVAILABLE, f"the core violates HTTP/2: headers of more than {BLOCK} bytes")
    assert not core.connection.usable


def test_a_message_of_gigabytes() -> None:
    """The connection is closed at the prefix, which announces the length."""
    core = Core()
    stream, other = core.call(), core.call()
    core.says(frame(Kind.HEADERS, END_HEADERS, 1, OK), frame(Kind.DATA, 0, 1, PREFIX.pack(0, MOST)))
    assert ends([stream, other]) == [Status.UNAVAILABLE] * 2 and not core.connection.usable
    assert stream.end is not None and stream.end.text == f"the core's answer is larger than {MOST} bytes"


@pytest.mark.parametrize("size", [0, 1000])
def test_messages_without_an_end(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are taken do not count; if none are taken, there is a limit."""
    monkeypatch.setattr("node.http2.stream.MOST", 10_000)
    core = Core()
    stream = core.call()
    core.says(frame(Kind.HEADERS, END_HEADERS, 1, OK))
    for _ in range(1000):
        core.says(frame(Kind.DATA, 0, 1, framed(bytes(size))))
        assert stream.take() == bytes(size)
    assert stream.end is None
    core.says(*[frame(Kind.DATA, 0, 1, framed(bytes(size)))] * 1000)
    assert ends([stream]) == [Status.UNAVAILABLE]
    assert sum(EACH + len(message) for message in stream.messages) <= 10_000


@pytest.mark.parametrize(
    "said",
    [
        frame(Kind.HEADERS, END_HEADERS, 1, b"\x8d"),
        frame(Kind.HEADERS, END_HEADERS, 1, OK) + frame(Kind.DATA, 0, 1, b"\1\0\0\0\1x"),
    ],
)
def test_a_core_that_continues_an_ended_call(said: bytes) -> None:
    """The call is reset, or it would go on for ever."""
    core = Core()
    core.call()
    core.seen()
    core.says(said)
    assert [one for one in core.seen() if one.kind == Kind.RST_STREAM] == core.read(reset(1, Code.CANCEL))


def test_an_answer_before_the_whole_request() -> None:
    """The rest is not sent, and the call is reset."""
    core = Core()
    stream = core.call(bytes(100_000))
    core.seen()
    core.answers(stream.number)
    assert core.seen() == core.read(reset(1, Code.CANCEL)) and not core.connection._unsent
    core.says(window_update(0, 100_000))
    assert not core.seen()


def test_a_large_request_is_sent_without_copying_the_rest() -> None:
    """20 MB are some 1,200 frames: copying the rest for each would be 12 GB."""
    core, message = Core(), bytes(20_000_000)
    core.says(settings({Setting.INITIAL_WINDOW_SIZE: 2**31 - 1}), window_update(0, 2**31 - 1 - 65_535))
    begun = time.process_time()
    core.call(message)
    assert time.process_time() - begun < 1
    assert core.sent(1) == framed(message)
