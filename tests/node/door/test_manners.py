"""Limits for HTTP/2 clients: what they may do, and what ends the connection."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from node.door import manners
from node.door.bodies import Bodies
from node.door.manners import BLOCK, CONTINUATIONS, Knows, Manners
from node.http2.frames import ACK, END_HEADERS, END_STREAM, PADDED, PREFACE, Code, Frame, Kind, Violation
from tests.harness.strangers import nobody
from tests.node.http2.test_frames import cuts, packed, pieces

# HPACK's index of `:method: GET`, one byte.
FIELD = b"\x82"


class Client:
    """Sends frames at a time of the test's choice."""

    def __init__(self, known: bool = False, knows: Knows = nobody) -> None:
        self.manners = Manners(0.0, knows, Bodies())
        self.manners.received(PREFACE, 0.0, known)
        self.known = known
        self.now = 0.0

    def send(self, kind: int, flags: int = 0, stream: int = 0, size: int = 0, times: int = 1) -> None:
        data = packed(Frame(kind, flags, stream, size), FIELD * size) * times
        self.manners.received(data, self.now, self.known)

    def ask(self, stream: int) -> None:
        self.send(Kind.HEADERS, END_HEADERS | END_STREAM, stream, 50)

    def sent(self, kind: int, flags: int = 0, stream: int = 0, size: int = 0) -> None:
        self.manners.sent(packed(Frame(kind, flags, stream, size), bytes(size)))


def refused(code: Code = Code.ENHANCE_YOUR_CALM) -> Refused:
    return Refused(code)


class Refused:
    """Asserts that the code inside is refused with this error code."""

    def __init__(self, code: Code) -> None:
        self._code = code

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        assert isinstance(error, Violation), "it was allowed"
        assert error.code is self._code, error
        return True


def test_a_usual_call() -> None:
    """Headers, a message, the answer's headers, message and end: one stream, open in between."""
    client = Client()
    client.send(Kind.SETTINGS, size=12)
    client.send(Kind.WINDOW_UPDATE, size=4)
    assert not client.manners.asked
    client.send(Kind.HEADERS, END_HEADERS, 1, 200)
    client.send(Kind.DATA, END_STREAM, 1, 5)
    assert client.manners.asked
    assert client.manners.open == {1}
    client.sent(Kind.HEADERS, END_HEADERS, 1, 40)
    client.sent(Kind.DATA, 0, 1, 400)
    assert client.manners.open == {1}
    client.sent(Kind.HEADERS, END_HEADERS | END_STREAM, 1, 20)
    assert client.manners.open == set()
    assert client.manners.last == 1


@pytest.mark.parametrize(
    "end",
    [
        lambda client: client.sent(Kind.RST_STREAM, 0, 1, 4),
        lambda client: client.sent(Kind.DATA, END_STREAM, 1),
        lambda client: client.send(Kind.RST_STREAM, 0, 1, 4),
    ],
    ids=["refused", "data", "cancelled"],
)
def test_a_stream_ends(end: Callable[[Client], None]) -> None:
    client = Client()
    client.ask(1)
    end(client)
    assert client.manners.open == set()


def test_what_is_unanswered() -> None:
    """A complete call is unanswered until its answer begins; a stream of requests is not."""
    client = Client(known=True)
    client.send(Kind.HEADERS, END_HEADERS, 1, 50)
    client.send(Kind.DATA, 0, 1, 5)
    assert not client.manners.unanswered
    client.send(Kind.DATA, END_STREAM, 1, 5)
    client.ask(3)
    client.sent(Kind.HEADERS, END_HEADERS, 1)
    assert client.manners.unanswered
    client.sent(Kind.HEADERS, END_HEADERS | END_STREAM, 3)
    assert not client.manners.unanswered and client.manners.open == client.manners.whole == {1}


def test_trailers_open_nothing() -> None:
    """The second headers of a stream are its trailers, not a new stream."""
    client = Client(known=True)
    client.ask(3)
    client.sent(Kind.HEADERS, END_HEADERS | END_STREAM, 3)
    client.send(Kind.HEADERS, END_HEADERS | END_STREAM, 3, 10)
    assert client.manners.open == set()


def test_headers_in_pieces() -> None:
    """The block is complete with the last of the allowed CONTINUATIONs."""
    client = Client()
    client.send(Kind.HEADERS, END_STREAM, 1, 100)
    client.send(Kind.CONTINUATION, 0, 1, 100, times=CONTINUATIONS - 1)
    assert not client.manners.asked
    client.send(Kind.CONTINUATION, END_HEADERS, 1, 100)
    assert client.manners.asked


@pytest.mark.parametrize("size", [0, 1, BLOCK // 4], ids=["empty", "small", "large"])
def test_headers_that_are_too_long(size: int) -> None:
    """Too many pieces, or too large ones, with a key or without."""
    for known in (False, True):
        client = Client(known)
        client.send(Kind.HEADERS, 0, 1, size)
        with refused():
            client.send(Kind.CONTINUATION, 0, 1, size, times=CONTINUATIONS + 1)


def test_a_large_block_is_refused_by_its_first_bytes() -> None:
    """The announced length counts, not the received bytes."""
    client = Client()
    with refused():
        client.manners.received(packed(Frame(Kind.HEADERS, END_HEADERS, 1, 0), bytes(BLOCK + 1))[:9], 0.0, False)


def test_something_in_between() -> None:
    """No other frame may come inside a block of headers, and no CONTINUATION without HEADERS."""
    for kind, stream in ((Kind.PING, 0), (Kind.DATA, 1), (Kind.HEADERS, 1), (Kind.CONTINUATION, 3)):
        client = Client()
        client.send(Kind.HEADERS, 0, 1, 10)
        with refused(Code.PROTOCOL_ERROR):
            client.send(kind, 0, stream, 8)
    client = Client()
    with refused(Code.PROTOCOL_ERROR):
        client.send(Kind.CONTINUATION, END_HEADERS, 1, 8)


FLOODS = [
    (Kind.PING, 0, 8, manners.PINGS),
    (Kind.SETTINGS, 0, 6, manners.SETTINGS),
    (Kind.RST_STREAM, 1, 4, manners.RESETS),
]


@pytest.mark.parametrize(("kind", "stream", "size", "limit"), FLOODS, ids=["PING", "SETTINGS", "RST_STREAM"])
def test_floods(kind: Kind, stream: int, size: int, limit: tuple[int, float]) -> None:
    """Exactly the allowed number at once and per second passes, with a key or without."""
    most, rate = limit
    for known in (False, True):
        client = Client(known)
        client.send(kind, 0, stream, size, times=most)
        client.now = 10.0
        client.send(kind, 0, stream, size, times=min(most, int(10 * rate)))
        with refused():
            client.send(kind, 0, stream, size)


def test_pings_of_a_client_that_is_sent_something() -> None:
    """Clients send a PING whenever data comes, and answer the server's own PINGs."""
    client = Client(known=True)
    most = manners.PINGS[0]
    for kind, flags in ((Kind.DATA, 0), (Kind.HEADERS, END_HEADERS), (Kind.PING, 0)):
        client.send(Kind.PING, size=8, times=most)
        client.sent(kind, flags, 1, 8)
    client.send(Kind.PING, size=8, times=most)
    for kind, flags in ((Kind.PING, ACK), (Kind.SETTINGS, ACK), (Kind.WINDOW_UPDATE, 0)):
        client.sent(kind, flags, 0, 8)
    with refused():
        client.send(Kind.PING, size=8)


def test_a_stranger_has_less() -> None:
    """Requests and frames of any kind are limited until a key was shown, and not afterwards."""
    requests, frames = manners.STRANGERS_REQUESTS[0], manners.STRANGERS_FRAMES[0]
    for what in ("requests", "frames"):
        for known in (False, True):
            client = Client(known)
            for number in range(requests if what == "requests" else 0):
                client.ask(2 * number + 1)
            client.send(Kind.DATA, 0, 7, times=frames if what == "frames" else 0)
            if known:
                client.ask(100_001)
            else:
                with refused():
                    client.ask(100_001)


@pytest.mark.parametrize("size", [1, 7, 1000, 1_000_000])
@pytest.mark.parametrize("key", [b"right", b"wrong"])
def test_many_calls_at_once(key: bytes, size: int) -> None:
    """The first call has the key: further ones in the same bytes count as those of a client with a key."""
    client = Client(knows=lambda _, keys: keys == ["right"])
    many = 2 * manners.STRANGERS_REQUESTS[0]
    block = Encoder().encode([(b":path", b"/x/Y"), (b"x-api-key", key)])
    data = b"".join(
        packed(Frame(Kind.HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, len(block)), block)
        for number in range(many)
    )
    with nullcontext() if key == b"right" else refused():
        for begin in range(0, len(data), size):
            client.manners.received(data[begin : begin + size], 0.0, False)
    assert client.manners.shown is (key == b"right")
    assert not client.manners.shown or len(client.manners.open) == many


def test_a_long_message_before_the_key_is_known() -> None:
    """gRPC's server reports the key when a message is complete: until then, frames of an open call do not count."""
    frames = manners.STRANGERS_FRAMES[0]
    client = Client()
    client.send(Kind.HEADERS, END_HEADERS, 1, 50)
    for _ in range(3):
        client.send(Kind.DATA, 0, 1, 1, times=frames)
    client.sent(Kind.HEADERS, END_HEADERS | END_STREAM, 1)
    with refused():
        client.send(Kind.DATA, 0, 1, 1, times=frames + 1)


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 5), st.integers(0, 20))), cuts)
def test_the_cuts_make_no_difference(sent: list[tuple[int, int, int, int]], at: list[int]) -> None:
    """The verdict and the open streams are the same however the frames arrive."""
    data = b"".join(packed(Frame(kind, flags, stream, size), FIELD * size) for kind, flags, stream, size in sent)
    assert told([data]) == told(pieces(data, at))


def told(parts: list[bytes]) -> object:
    client = Client()
    try:
        for part in parts:
            client.manners.received(part, 0.0, False)
    except Violation as error:
        return error.code
    return client.manners.open, client.manners.last, client.manners.asked


@given(st.lists(st.binary(max_size=200)), st.lists(st.binary(max_size=200)))
def test_any_bytes(received: list[bytes], sent: list[bytes]) -> None:
    """Nothing but `Violation` is raised, and the memory for streams is bounded by the number of calls."""
    client = Client()
    try:
        for theirs, ours in zip(received, sent, strict=False):
            client.manners.received(theirs, 0.0, False)
            client.manners.sent(ours)
    except Violation:
        return
    assert len(client.manners.open) <= manners.STRANGERS_REQUESTS[0]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("kind", [Kind.HEADERS, Kind.DATA])
def test_padding(kind: Kind, known: bool) -> None:
    """gRPC's server takes padding for headers, and would read a path that was not checked."""
    client = Client(known)
    client.ask(1)
    with refused():
        client.send(kind, END_HEADERS | PADDED, 3 if kind is Kind.HEADERS else 1, 8)


def test_no_frame_between_the_servers_headers() -> None:
    """If the server's headers continue in another frame, none of the door's own may come in between."""
    client = Client(known=True)
    client.ask(1)
    client.sent(Kind.HEADERS, END_STREAM, 1, 9)
    assert not client.manners.interruptible
    client.sent(Kind.CONTINUATION, END_HEADERS, 1, 9)
    assert client.manners.interruptible
