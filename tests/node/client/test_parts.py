"""The client's parts: which error is which, chunks, and streams that resume after the last line read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import ResponseDone

from node.api.auth import Caller, Dialect
from node.api.methods import METHODS
from node.api.readers import LogReader, PlacedReader
from node.base import errors
from node.base.errors import KINDS, NodeError
from node.base.logs import NODE_MARK, REPLAY, TOO_SLOW, LogRing
from node.client import EventStream, LogStream, NoReply, StreamEnded, Target, UnexpectedReply, Unreachable
from node.client.client import Client, chunks
from node.client.failures import of_grpc, of_http
from node.client.rest import MAX_LINE, SILENCE, StreamBody, placed_lines, plain_lines
from node.client.stream import GAP, QUIET, overlap
from node.client.transport import ROOM, Inbox, Line
from node.door.site import describe
from node.keys.keyfile import Key, Scope
from protos.service_pb2 import (
    Event,
    EventsRequest,
    GetLimitsRequest,
    GetLimitsResponse,
    LimitState,
    ListUsersResponse,
    User,
)

CALLER = Caller(Key("somebody", Scope.READ, b""))
START, INFO = METHODS[0], METHODS[2]

# One error of each kind, with a text that the node uses.
SAID: dict[type[NodeError], NodeError] = {
    errors.Internal: errors.Internal("internal error in Start: KeyError; the node's log has more"),
    errors.Unauthenticated: errors.Unauthenticated(),
    errors.Forbidden: errors.Forbidden("the key has the scope read: this call needs all"),
    errors.InvalidRequest: errors.InvalidRequest("expected chunk 1, got chunk 2"),
    errors.InvalidConfig: errors.InvalidConfig("the core refuses the configuration: what is that?"),
    errors.UnknownPath: errors.UnknownPath("there is no such path; the interface has its list"),
    errors.UnknownName: errors.UnknownName("there is no user 'x'"),
    errors.WrongVerb: errors.WrongVerb("this path takes other HTTP methods: see Allow"),
    errors.RequestTimeout: errors.RequestTimeout("the request did not arrive in time"),
    errors.TooLarge: errors.TooLarge("the chunks together are larger than 67108864 bytes"),
    errors.Crowded: errors.Crowded(),
    errors.WrongMediaType: errors.WrongMediaType("the body's media type is text/plain: send application/x-protobuf"),
    errors.Unsupported: errors.Unsupported("this core does not measure outbounds"),
    errors.NotInitialized: errors.NotInitialized(),
    errors.NotStarted: errors.NotStarted("it was killed"),
    errors.CoreFailed: errors.CoreFailed("the core is down: it was killed"),
    errors.UsersRefused: errors.UsersRefused([("ann", "bad id")]),
    errors.Aborted: errors.Aborted(),
    errors.ShuttingDown: errors.ShuttingDown(),
}
# Errors that do not occur over gRPC: gRPC has its own for those cases, or they cannot happen.
ONLY_REST = {errors.WrongVerb, errors.UnknownPath, errors.WrongMediaType}


def test_every_kind_is_tried() -> None:
    assert list(SAID) == list(KINDS)


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_over_rest(kind: type[NodeError], dialect: Dialect) -> None:
    """Each error of the node is the same one in the client, in both dialects, with its text."""
    said = SAID[kind]
    method = START if kind is errors.InvalidConfig else INFO
    found = of_http(method, said.http, describe(said, dialect)[1], dialect)
    assert (type(found), found.text, str(found)) == (kind, said.text, said.text)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ONLY_REST])
def test_errors_over_grpc(kind: type[NodeError]) -> None:
    """The same over gRPC."""
    said = SAID[kind]
    method = START if kind is errors.InvalidConfig else INFO
    found = of_grpc(method, said.grpc, said.text, connected=True)
    assert (type(found), found.text) == (kind, said.text)


def test_refused_start_is_about_the_configuration() -> None:
    """If a status fits both, a refused Start is about its configuration, unless its body is not a message."""
    assert isinstance(of_grpc(START, "INVALID_ARGUMENT", "no inbound has a port", True), errors.InvalidConfig)
    malformed = "the body is not a Backend message: Wire format was corrupt"
    assert type(of_grpc(START, "INVALID_ARGUMENT", malformed, True)) is errors.InvalidRequest


@pytest.mark.parametrize(
    ("status", "text", "connected"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; last error: UNKNOWN: Connection refused", False),
        ("UNAVAILABLE", "Stream removed (Socket closed)", True),
        ("UNAVAILABLE", "Cancelling all calls", True),
        ("UNAVAILABLE", "something that grpcio says in its next version", False),
        ("CANCELLED", "", True),
    ],
)
def test_broken_connections_of_grpc(status: str, text: str, connected: bool) -> None:
    """gRPC's own text for a broken connection is not taken for the node's error about its core."""
    assert type(of_grpc(INFO, status, text, connected)) is Unreachable


@pytest.mark.parametrize(
    "answer",
    [
        (502, b"<html>Bad Gateway</html>"),
        (200, b""),
        (500, b"[]"),
        (500, b"{}"),
        (404, b'{"error": "x", "code": "internal"}'),
    ],
)
def test_another_server_answers(answer: tuple[int, bytes]) -> None:
    """An answer that no node gives, such as a known code with another status, is an unexpected reply."""
    found = of_http(INFO, *answer, Dialect.DOCUMENT)
    assert type(found) is UnexpectedReply
    assert isinstance(found, NoReply)
    assert type(of_http(INFO, 418, b"teapot", Dialect.DEPLOYED)) is UnexpectedReply
    assert type(of_grpc(INFO, "DATA_LOSS", "oh", True)) is UnexpectedReply
    for status, number in (("UNIMPLEMENTED", 404), ("UNAVAILABLE", 502), ("PERMISSION_DENIED", 403)):
        plain = f"Received http2 header with status: {number}"
        assert type(of_grpc(INFO, status, plain, True)) is UnexpectedReply


def test_addresses() -> None:
    """An IPv6 address is put in brackets, and the key is not in the representation of a target."""
    targets = [Target("rest", host, 1, "secret-secret-secret") for host in ("::1", "[::1]", "127.0.0.1", "a.example")]
    assert [target.address for target in targets] == ["[::1]:1", "[::1]:1", "127.0.0.1:1", "a.example:1"]
    assert "secret" not in repr(targets[0])


def test_a_pin_that_is_none() -> None:
    with pytest.raises(ValueError):
        Target("grpc", "localhost", 1, "x", "no certificate").certificates()


@given(st.lists(st.integers(0, 200), max_size=60), st.integers(100, 600))
def test_chunks(sizes: list[int], size: int) -> None:
    """Chunks have all users in order, are numbered, the last is marked, and none of several users is too large."""
    users = [User(email=str(number), inbounds=["x" * length]) for number, length in enumerate(sizes)]
    found = list(chunks(users, size))
    assert [user for chunk in found for user in chunk.users] == users
    assert [(chunk.index, chunk.last) for chunk in found] == [(n, n == len(found) - 1) for n in range(len(found))]
    assert all(chunk.ByteSize() <= size or len(chunk.users) == 1 for chunk in found)


# Resuming streams

RING = [f"line {number}" for number in range(1000)]


@given(st.integers(1, 500), st.integers(0, REPLAY - 1), st.integers(0, 500))
def test_overlap_of_one_ring(read: int, more: int, first: int) -> None:
    """In a ring of different lines, the lines after the last one read are found, however many were read before."""
    ring = RING[first : first + read + more]
    known = overlap(ring[max(0, read - REPLAY) : read], ring[-REPLAY:])
    assert known is not None
    assert ring[-REPLAY:][known:] == ring[read:]


def test_nothing_in_common() -> None:
    """More lines than a new reader gets, or another ring, do not overlap; if none were read, all are new."""
    assert overlap(RING[:REPLAY], RING[REPLAY : 2 * REPLAY]) is None
    assert overlap(RING[:3], ["ready"]) is None
    assert overlap([], RING[:3]) == 0


def test_repeated_lines() -> None:
    """All lines read are searched first, at their first place; then as many of the last ones as there are."""
    again = ["starting", "running", "stopped"]
    assert overlap(again, again * 2) == 3
    assert overlap(again * 2, again * 2) == 6
    assert overlap(["x", *again], [*again, "starting"]) == 3


class Node:
    """An older node for log streams: one ring, a source for each connection, and lines without places."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ring: list[str] = []
        self.sources: list[Inbox[Line]] = []
        self.down: NodeError | None = None

    async def connect(self, last: str) -> Inbox[Line]:
        assert not last
        if self.down is not None:
            raise self.down
        self.sources.append(Inbox(self.clock))
        self.sources[-1].put(map(Line, self.ring[-REPLAY:]))
        return self.sources[-1]

    def says(self, *lines: str) -> None:
        self.ring.extend(lines)
        if self.sources:
            self.sources[-1].put(map(Line, lines))

    def breaks(self) -> None:
        self.sources.pop().end(Unreachable("cut"))


class LogStreamTests(SynchronousTestCase):
    """A stream over connections that break."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.node = Node(self.clock)

    def opened(self, **options: Any) -> LogStream:
        stream = LogStream(self.clock, self.node.connect, **options)
        return self.successResultOf(Deferred.fromCoroutine(stream.open()))

    def taken(self, stream: LogStream) -> list[str]:
        """Return what is there by now; time passes until a broken stream has settled."""
        waiting = Deferred.fromCoroutine(stream.next(10))
        self.clock.pump([0.05] * 300)
        return self.successResultOf(waiting)

    def test_resumes_after_the_last_line(self) -> None:
        """Lines sent during a break come once and in order, and none comes twice."""
        self.node.says("a", "b")
        stream = self.opened()
        self.assertEqual(self.taken(stream), ["a", "b"])
        self.node.says("c")
        self.node.breaks()
        self.node.says("d", "e")
        self.assertEqual(self.taken(stream), ["c"])
        self.assertEqual(self.taken(stream), ["d", "e"])
        self.node.says("f")
        self.assertEqual(self.taken(stream), ["f"])

    def test_breaks_repeatedly(self) -> None:
        """The same after many breaks, some before any line came, and however long the ring is."""
        stream, expected, found = self.opened(), list[str](), list[str]()
        for number in range(40):
            lines = [f"{number}.{part}" for part in range(number)]
            self.node.says(*lines[: number // 2])
            self.node.breaks()
            self.node.says(*lines[number // 2 :])
            expected += lines
            found += self.taken(stream) + self.taken(stream)
        self.assertEqual(found, expected)

    def test_a_gap_is_marked(self) -> None:
        """If more lines came than a new connection gets, a line marks that some may be missing."""
        self.node.says("a")
        stream = self.opened()
        self.assertEqual(self.taken(stream), ["a"])
        self.node.breaks()
        self.node.says(*RING[: REPLAY + 1])
        self.assertEqual(self.taken(stream), [GAP, *RING[1 : REPLAY + 1]])
        self.node.breaks()
        self.node.says("b")
        self.assertEqual(self.taken(stream), ["b"])

    def test_lines_that_the_node_dropped(self) -> None:
        """The line that says how many were dropped is for this reader alone, and is not searched in the ring."""
        self.node.says("a")
        stream = self.opened()
        self.taken(stream)
        lost = [f"lost {number}" for number in range(3)]
        self.node.ring.extend(lost)
        told = f"{NODE_MARK}3{TOO_SLOW}"
        self.node.sources[-1].put([Line(told)])
        self.node.says("b")
        self.assertEqual(self.taken(stream), [told, "b"])
        self.node.breaks()
        self.node.says("c")
        self.assertEqual(self.taken(stream), ["c"])

    def test_lines_do_not_wait_for_silence(self) -> None:
        """A node that sends lines all the time is followed, although few lines are known yet."""
        stream = self.opened()
        self.node.breaks()
        waiting = Deferred.fromCoroutine(stream.next())
        for number in range(100):
            self.clock.advance(QUIET / 2)
            self.node.says(f"line {number}")
        self.assertEqual(self.successResultOf(waiting)[0], "line 0")

    def test_patience(self) -> None:
        """A node that is away for longer ends the stream with the last error; one that is back before does not."""
        stream = self.opened(patience=5)
        self.node.down = Unreachable("still away")
        self.node.breaks()
        waiting = Deferred.fromCoroutine(stream.next())
        self.clock.pump([0.1] * 30)
        self.assertNoResult(waiting)
        self.clock.pump([0.1] * 30)
        self.assertEqual(self.failureResultOf(waiting, Unreachable).value.args, ("still away",))

    def test_without_patience(self) -> None:
        """Without patience a stream ends with its first connection."""
        stream = self.opened(patience=0)
        self.node.says("a")
        self.node.breaks()
        self.assertEqual(self.taken(stream), ["a"])
        self.failureResultOf(Deferred.fromCoroutine(stream.next()), Unreachable)

    def test_an_error_of_the_node(self) -> None:
        """An error of the node ends the stream: it is not a broken connection."""
        stream = self.opened()
        self.node.down = errors.Unauthenticated()
        self.node.breaks()
        waiting = Deferred.fromCoroutine(stream.next())
        self.clock.pump([0.1] * 30)
        self.failureResultOf(waiting, errors.Unauthenticated)

    def test_first_connection(self) -> None:
        """There are no retries for a stream that was never open."""
        self.node.down = Unreachable("nobody there")
        self.failureResultOf(Deferred.fromCoroutine(LogStream(self.clock, self.node.connect).open()), Unreachable)

    def test_close(self) -> None:
        """Closing ends a waiting reader without an error, and leaves nothing behind; also without a node."""
        for away in (False, True):
            self.node.down = None
            stream = self.opened()
            if away:
                self.node.down = Unreachable("away")
                self.node.breaks()
            waiting = Deferred.fromCoroutine(stream.next())
            stream.close()
            self.clock.advance(0)
            self.assertEqual(self.successResultOf(waiting), [])
            self.failureResultOf(Deferred.fromCoroutine(stream.__anext__()), StopAsyncIteration)
            self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_reader_that_stops_waiting(self) -> None:
        """A wait that timed out, or was cancelled, loses no line."""
        stream = self.opened()
        waiting = Deferred.fromCoroutine(stream.next(1))
        self.clock.advance(1)
        self.assertEqual(self.successResultOf(waiting), [])
        cancelled = Deferred.fromCoroutine(stream.next())
        cancelled.cancel()
        self.failureResultOf(cancelled)
        self.node.says("a")
        self.assertEqual(self.taken(stream), ["a"])

    def test_a_reader_that_takes_nothing(self) -> None:
        """Beyond a number of lines, those that are not taken stay with the node."""
        stream = self.opened()
        for number in range(5):
            self.node.says(*[f"{number}"] * ROOM)
        self.assertTrue(self.node.sources[-1].full)
        taken = sum(len(self.taken(stream)) for _ in range(5))
        self.assertEqual(taken, 5 * ROOM)


class EventStreamTests(SynchronousTestCase):
    """A stream of events over connections that break."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.asked: list[int] = []
        self.sources: list[Inbox[Event]] = []
        self.down = False

    async def connect(self, request: EventsRequest) -> Inbox[Event]:
        if self.down:
            raise Unreachable("down")
        self.asked.append(request.since)
        self.sources.append(Inbox(self.clock))
        return self.sources[-1]

    def opened(self, **options: Any) -> EventStream:
        stream = EventStream(self.clock, self.connect, EventsRequest(**options), patience=60)
        return self.successResultOf(Deferred.fromCoroutine(stream.open()))

    def taken(self, stream: EventStream) -> list[int]:
        waiting = Deferred.fromCoroutine(stream.next(10))
        self.clock.pump([0.1] * 120)
        return [event.sequence for event in self.successResultOf(waiting)]

    def test_goes_on_after_the_last_event(self) -> None:
        """The new connection asks for what follows; another stream can resume after what was taken."""
        stream = self.opened(since=3, follow=True)
        self.sources[0].put([Event(sequence=4, epoch="e"), Event(sequence=5, epoch="e")])
        self.sources[0].end(StreamEnded())
        self.assertEqual(stream.since, 3)
        self.assertEqual((self.taken(stream), stream.since, stream.epoch), ([4, 5], 5, "e"))
        self.assertEqual(self.taken(stream), [])
        self.assertEqual(self.asked, [3, 5])
        self.sources[1].put([Event(sequence=6)])
        stream.close()
        self.assertEqual((self.taken(stream), self.asked), ([], [3, 5]))

    def test_waits_as_long_as_asked(self) -> None:
        """Also while no connection can be made."""
        stream = self.opened()
        self.down = True
        self.sources[0].end(Unreachable("cut"))
        self.assertEqual(self.taken(stream), [])
        self.down = False
        self.clock.pump([0.1] * 110)
        self.sources[1].put([Event(sequence=1)])
        self.assertEqual(self.taken(stream), [1])

    def test_goes_on_after_an_error(self) -> None:
        """The reader gets it, and may ask again: the stream connects after the last event."""
        stream = self.opened(since=3, follow=True)
        self.sources[0].put([Event(sequence=4)])
        self.assertEqual(self.taken(stream), [4])
        self.down = True
        self.sources[0].end(Unreachable("cut"))
        failing = Deferred.fromCoroutine(stream.next())
        self.clock.pump([0.1] * 700)
        self.failureResultOf(failing, Unreachable)
        self.down = False
        waiting = Deferred.fromCoroutine(stream.next())
        self.clock.pump([0.1] * 20)
        self.assertEqual(self.asked, [3, 4])
        self.sources[1].put([Event(sequence=5)])
        self.clock.pump([0.1] * 5)
        self.assertEqual([event.sequence for event in self.successResultOf(waiting)], [5])
        stream.close()

    def test_ends_after_those_that_there_are(self) -> None:
        """Without `follow` the end of the connection is that of the stream; a broken one is resumed."""
        stream = self.opened(follow=False)
        self.sources[0].end(Unreachable("cut"))
        self.assertEqual((self.taken(stream), len(self.asked)), ([], 2))
        self.sources[1].put([Event(sequence=1)])
        self.sources[1].end(StreamEnded())
        found = Deferred.fromCoroutine(anext(stream))
        self.clock.pump([0.1] * 5)
        self.assertEqual((self.successResultOf(found).sequence, stream.since), (1, 1))
        over = Deferred.fromCoroutine(anext(stream, None))
        self.clock.pump([0.1] * 5)
        self.assertIsNone(self.successResultOf(over))
        self.assertEqual(len(self.asked), 2)


class PlacedLogTests(SynchronousTestCase):
    """A stream from a node that sends the places of its lines."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.ring = LogRing(self.clock, 1000)
        self.source: Inbox[Line] = Inbox(self.clock)
        self.asked: list[str] = []

    async def connect(self, last: str) -> Inbox[Line]:
        self.asked.append(last)
        self.source = Inbox(self.clock)
        reader = PlacedReader(LogReader(self.ring, CALLER, last))
        while reader.behind:
            self.source.put(Line(*line) for line in await reader.next())
        return self.source

    def taken(self, stream: LogStream) -> list[str]:
        waiting = Deferred.fromCoroutine(stream.next(10))
        self.clock.pump([0.05] * 300)
        return self.successResultOf(waiting)

    def test_as_many_lines_as_the_node_keeps(self) -> None:
        """After a break all lines that came meanwhile are there at once, far more than a new reader gets."""
        self.ring.extend(["a", "a"])
        stream = self.successResultOf(Deferred.fromCoroutine(LogStream(self.clock, self.connect).open()))
        self.assertEqual(self.taken(stream), ["a", "a"])
        self.source.end(Unreachable("cut"))
        self.ring.extend(["a"] * 3 * REPLAY)
        self.assertEqual(self.taken(stream), ["a"] * 3 * REPLAY)
        self.source.end(Unreachable("cut"))
        self.ring.extend(map(str, range(1100)))
        lines = self.taken(stream)
        self.assertEqual(lines, [f"{NODE_MARK}100{TOO_SLOW}", *map(str, range(100, 1100))])
        self.source.end(Unreachable("cut"))
        self.ring.extend(["last"])
        self.assertEqual(self.taken(stream), ["last"])
        self.assertEqual(self.asked[0], "")
        self.assertEqual(len(set(self.asked)), 4)

    def test_another_start_of_the_node(self) -> None:
        """All lines of the new log come, after a line that some of the old log may be missing."""
        self.ring.extend(map(str, range(500)))
        stream = self.successResultOf(Deferred.fromCoroutine(LogStream(self.clock, self.connect).open()))
        self.taken(stream)
        self.ring = LogRing(self.clock, 1000)
        self.ring.extend(["ready", "and more"])
        self.source.end(Unreachable("gone"))
        self.assertEqual(self.taken(stream), [GAP, "ready", "and more"])


class FakeResponse:
    """A response whose body the test writes."""

    def __init__(self) -> None:
        self.paused = self.closed = False

    def deliverBody(self, body: Protocol) -> None:
        self.body = body
        body.makeConnection(self)

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False

    def loseConnection(self) -> None:
        self.closed = True


class LogLinesTests(SynchronousTestCase):
    """Lines of a REST response."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.response = FakeResponse()

    def body(self, events: bool = True) -> Inbox[Line]:
        split = placed_lines if events else plain_lines
        return StreamBody(self.clock, self.response, split, heartbeats=events).inbox  # type: ignore[arg-type]

    def taken(self, inbox: Inbox[Line]) -> list[str]:
        return [line.text for line in self.successResultOf(Deferred.fromCoroutine(inbox.take(0)))]

    def test_lines_in_any_pieces(self) -> None:
        """Lines are complete however the bytes come, and comments are skipped."""
        said = ": heartbeat\n\ndata: one\n\ndata:  two – \n\n: heartbeat\n\ndata: \n\n".encode()
        for size in (1, 3, 1000):
            self.response = FakeResponse()
            inbox = self.body()
            for start in range(0, len(said), size):
                self.response.body.dataReceived(said[start : start + size])
            self.assertEqual(self.taken(inbox), ["one", " two – ", ""])

    def test_places(self) -> None:
        """A line has the id of its event, and comes when the event is complete: otherwise it could come twice."""
        inbox = self.body()
        self.response.body.dataReceived(b"id: 1@a\r\ndata: one\r\n\r\nid: 2@a\ndata: two\n")
        found = self.successResultOf(Deferred.fromCoroutine(inbox.take(0)))
        self.assertEqual(found, [Line("one", "1@a")])
        self.assertEqual(found[0].log, "a")
        self.response.body.dataReceived(b"\n")
        self.assertEqual(self.successResultOf(Deferred.fromCoroutine(inbox.take(0))), [Line("two", "2@a")])

    def test_bare_lines(self) -> None:
        """In the deployed dialect each line of the body is a line."""
        inbox = self.body(events=False)
        self.response.body.dataReceived(b"one\n\ndata: two\nthr\xffee\nfo")
        self.assertEqual(self.taken(inbox), ["one", "", "data: two", "thr\ufffdee"])

    def ended(self, inbox: Inbox[Line], kind: type[Exception]) -> None:
        self.failureResultOf(Deferred.fromCoroutine(inbox.take(0)), kind)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_silence(self) -> None:
        """A node that sends nothing, not even a comment, is gone; one that the reader has paused is not."""
        inbox = self.body()
        self.clock.advance(SILENCE - 1)
        self.response.body.dataReceived(b": heartbeat\n\n")
        self.clock.advance(SILENCE - 1)
        self.assertFalse(self.response.closed)
        self.response.body.dataReceived(b"data: x\n\n" * ROOM)
        self.assertTrue(self.response.paused)
        self.clock.advance(10 * SILENCE)
        self.assertFalse(self.response.closed)
        self.taken(inbox)
        self.assertFalse(self.response.paused)
        self.clock.advance(SILENCE)
        self.assertTrue(self.response.closed)
        self.ended(inbox, Unreachable)

    def test_no_heartbeat_in_the_other_dialect(self) -> None:
        self.body(events=False)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_the_end(self) -> None:
        """However the body ends, the reader gets all lines, and then the error."""
        for reason in (ResponseDone(), ConnectionError("reset")):
            self.response = FakeResponse()
            inbox = self.body()
            self.response.body.dataReceived(b"data: last\n\n")
            self.response.body.connectionLost(Failure(reason))
            self.assertEqual(self.taken(inbox), ["last"])
            self.ended(inbox, Unreachable)

    def test_close(self) -> None:
        """A reader that wants no more lines closes the connection."""
        inbox = self.body()
        inbox.close()
        self.assertTrue(self.response.closed)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_line_without_end(self) -> None:
        """A server that never ends a line is not a node, and the line is not kept."""
        inbox = self.body()
        self.response.body.dataReceived(b"x" * (MAX_LINE + 1))
        self.assertTrue(self.response.closed)
        self.ended(inbox, UnexpectedReply)


class Circling:
    """A transport to a node that lists the same page again and again."""

    asked = 0

    async def call(self, *_: object) -> bytes:
        self.asked += 1
        return ListUsersResponse(next="ann" if self.asked < 10 else "").SerializeToString()


class Paged:
    """A transport to a node with two pages of limits, for any names."""

    def __init__(self) -> None:
        self.asked: list[GetLimitsRequest] = []

    async def call(self, _: object, messages: Sequence[GetLimitsRequest]) -> bytes:
        [request] = messages
        self.asked.append(request)
        name, following = ("bob", "") if request.after else ("ann", "ann")
        return GetLimitsResponse(users=[LimitState(name=name)], next=following).SerializeToString()


class PagesTests(SynchronousTestCase):
    def test_pages_in_circles(self) -> None:
        """They would fill the memory: each page must begin after the one before it."""
        transport: Any = Circling()

        async def listed() -> int:
            return len([page async for page in Client(Clock(), transport).all_users()])

        self.failureResultOf(Deferred.fromCoroutine(listed()), UnexpectedReply)
        self.assertEqual(transport.asked, 2)

    def test_all_limits(self) -> None:
        """Each page begins after the one before it, and each request has a thousand names at most."""
        transport: Any = Paged()

        async def read(*names: str) -> list[str]:
            return [user.name async for page in Client(Clock(), transport).all_limits(names) for user in page.users]

        self.assertEqual(self.successResultOf(Deferred.fromCoroutine(read())), ["ann", "bob"])
        names = [f"user{number}" for number in range(1500)]
        self.assertEqual(self.successResultOf(Deferred.fromCoroutine(read(*names))), ["ann", "bob"] * 2)
        self.assertEqual(
            [(len(one.names), one.after) for one in transport.asked[2:]],
            [(1000, ""), (1000, "ann"), (500, ""), (500, "ann")],
        )
