"""A channel whose core sends GOAWAY, closes, answers nonsense, or does not answer yet."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.logger import globalLogPublisher

from drivers.process.channel import BULK_DEADLINE, ENDED, LATE, OVER, ApiFailed, Channel
from node.http2.frames import END_HEADERS, END_STREAM, Kind, frame, framed
from protos.xray_pb2 import Nothing, Stat
from scripts.staging import background
from scripts.staging.ports import free_port
from tests.drivers.process.test_channel import SERVICE, Core, closed, echoed, until
from tests.harness.rpc_server import serving
from tests.node.http2.test_connection import DONE, OK

reactor = background.reactor


class Dialled:
    """The connections that a channel makes, in order."""

    def __init__(self) -> None:
        self.connections: list[Any] = []

    def __call__(self, _: object, __: str, protocol: Any) -> None:
        self.connections.append(protocol)
        protocol.makeConnection(StringTransport())

    def says(self, at: int, *frames: bytes) -> None:
        self.connections[at].dataReceived(b"".join(frames))


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> Dialled:
    dialled = Dialled()
    monkeypatch.setattr("drivers.process.channel.dial", dialled)
    return dialled


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def channel(dialled: Dialled, clock: Clock) -> Channel:
    return Channel(clock, "core")  # type: ignore[arg-type]


def asked(channel: Channel) -> Deferred[Any]:
    return Deferred.fromCoroutine(channel.call("/core.Core/One", Nothing(), Stat, 10))


def failed(asking: Deferred[Any]) -> str:
    """Return the error of a failed call."""
    errors: list[Any] = []
    asking.addErrback(errors.append)
    assert errors and errors[0].check(ApiFailed)
    return str(errors[0].value)


def test_the_next_call_after_a_goaway(channel: Channel, dialled: Dialled) -> None:
    """It goes over a new connection; the old one ends with its last call. Both end with the channel."""
    asking = asked(channel)
    dialled.says(0, frame(Kind.GOAWAY, 0, 0, struct.pack(">LL", 1, 0)))
    after = asked(channel)
    assert len(dialled.connections) == 2 and not asking.called
    channel.close()
    assert failed(asking) and failed(after)
    assert all(connection.transport.disconnecting for connection in dialled.connections)
    assert failed(asked(channel)) == OVER and not channel._reactor.getDelayedCalls()


def test_a_channel_that_is_closed_while_its_core_winds_up(channel: Channel, dialled: Dialled) -> None:
    asking = asked(channel)
    dialled.says(0, frame(Kind.GOAWAY, 0, 0, struct.pack(">LL", 1, 0)))
    channel.close()
    assert failed(asking)


def test_a_core_that_never_answers(channel: Channel, dialled: Dialled) -> None:
    """After a timeout the next call goes over another connection, until the core has sent anything on one."""
    clock: Any = channel._reactor
    asking, other = asked(channel), asked(channel)
    other.cancel()
    other.addErrback(lambda failure: failure.trap(CancelledError) and None)
    assert not dialled.connections[0].transport.disconnecting
    clock.advance(10)
    assert failed(asking) == LATE and dialled.connections[0].transport.disconnecting
    asking = asked(channel)
    dialled.says(1, frame(Kind.SETTINGS, 0, 0))
    clock.advance(10)
    assert failed(asking) == LATE
    asking = asked(channel)
    assert len(dialled.connections) == 2 and not dialled.connections[1].transport.disconnecting
    channel.close()
    assert failed(asking)


def test_an_answer_that_is_not_a_message(channel: Channel, dialled: Dialled) -> None:
    """Such bytes are the core's failure."""
    asking = asked(channel)
    data = frame(Kind.DATA, 0, 1, framed(b"\xff"))
    done = frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, DONE)
    dialled.says(0, frame(Kind.HEADERS, END_HEADERS, 1, OK), data, done)
    assert failed(asking)
    following = Deferred.fromCoroutine(anext(channel.stream("/core.Core/Many", Nothing(), Stat)))
    dialled.says(0, frame(Kind.HEADERS, END_HEADERS, 3, OK), frame(Kind.DATA, 0, 3, framed(b"\xff")))
    assert failed(following) and not dialled.connections[0]._streams


def test_ended_connections_are_released(channel: Channel, dialled: Dialled, clock: Clock) -> None:
    """However often a core closes them."""
    for number in range(20):
        asking = asked(channel)
        dialled.connections[number].connectionLost()
        assert failed(asking)
    assert len(channel._connections) <= 1 and not channel._deadlines
    # One alarm is for all calls.
    clock.advance(BULK_DEADLINE)
    assert not clock.getDelayedCalls()


def test_each_call_has_its_own_deadline(channel: Channel, dialled: Dialled, clock: Clock) -> None:
    """A later call may be due before an earlier one, and an answered one leaves the others as they are."""
    calls = [Deferred.fromCoroutine(channel.call("/core.Core/One", Nothing(), Stat, seconds)) for seconds in (9, 3, 6)]
    clock.advance(2.9)
    dialled.says(0, frame(Kind.HEADERS, END_HEADERS | END_STREAM, 3, DONE))
    assert "without a message" in failed(calls[1])
    clock.advance(3)
    assert not calls[2].called
    clock.advance(0.1)
    assert failed(calls[2]) == LATE and not calls[0].called
    channel.close()
    assert failed(calls[0]) == ENDED and not clock.getDelayedCalls()


def test_calls_while_a_connection_is_made() -> None:
    """One connection serves all of them; cancelling one affects no other, and nothing is logged."""
    port, events = free_port(), list[Any]()
    channel = Channel(reactor, port)

    async def scenario() -> None:
        works = [Deferred.fromCoroutine(echoed(channel, size)) for size in (1, 2, 3)]
        works[0].cancel()
        with pytest.raises(CancelledError):
            await works[0]
        for work in works[1:]:
            await work
        assert len(channel._connections) == 1

    observer: Any = events.append
    globalLogPublisher.addObserver(observer)
    try:
        with serving(f"127.0.0.1:{port}", SERVICE, Core().handlers):
            background.run(scenario)
            background.run(lambda: closed(channel))
    finally:
        globalLogPublisher.removeObserver(observer)
    assert not [event for event in events if "factory" in str(event.get("log_format", ""))]


def test_a_channel_that_is_closed_while_its_connection_comes_about() -> None:
    port = free_port()
    channel = Channel(reactor, port)

    async def scenario() -> None:
        asking = Deferred.fromCoroutine(echoed(channel, 1))
        channel.close()
        with pytest.raises(ApiFailed, match=OVER):
            await asking

    with serving(f"127.0.0.1:{port}", SERVICE, Core().handlers):
        background.run(scenario)


def test_a_core_that_dies_in_mid_call(tmp_path: Any) -> None:
    """The call fails at once, before its deadline, and the failure is distinguished from a refusal."""
    core, channel = Core(), Channel(reactor, f"{tmp_path}/core")
    calls: list[Deferred[Any]] = []

    async def begin() -> None:
        calls.append(Deferred.fromCoroutine(channel.call(SERVICE + "One", Nothing(), Nothing, 600)))
        await until(core.arrived.is_set)

    async def end() -> None:
        with pytest.raises(ApiFailed) as error:
            await calls[0]
        assert error.value.silent
        channel.close()

    with serving(f"unix:{tmp_path}/core", SERVICE, core.handlers):
        background.run(begin)
    background.run(end)
