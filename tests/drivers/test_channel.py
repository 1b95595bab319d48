"""A channel to a core: whatever a call ends with is an `ApiFailed`, but who is cancelled stays cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater

from drivers.channel import LATE, ApiFailed, Channel
from drivers.http2.connection import OPEN
from protos.xray_pb2 import Nothing, Stat
from scripts.staging import background
from tests.harness.rpc_server import serving

Ask = Callable[[Channel], Coroutine[Deferred[Any], Any, None]]
SERVICE = "/core.Core/"
reactor = background.reactor


class Core:
    """Never answers `One` and `Many`; echoes to `Echo`, and `Count` tells as many numbers as it is asked for."""

    def __init__(self) -> None:
        self.arrived, self.left = threading.Event(), threading.Event()

    async def one(self, _: bytes, __: Any) -> bytes:
        await self._hang()
        return b""

    async def many(self, _: bytes, __: Any) -> Any:
        yield b""
        await self._hang()

    async def echo(self, request: bytes, _: Any) -> bytes:
        return request

    async def count(self, request: bytes, _: Any) -> Any:
        for number in range(Stat.FromString(request).value):
            yield Stat(value=number).SerializeToString()

    async def refuse(self, _: bytes, context: Any) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no ‘user’ 100 %")

    async def _hang(self) -> None:
        self.arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()

    @property
    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        return {
            "One": unary(self.one),
            "Echo": unary(self.echo),
            "Refuse": unary(self.refuse),
            "Many": stream(self.many),
            "Count": stream(self.count),
        }


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    core = Core()
    with serving(f"unix:{tmp_path}/core", SERVICE, core.handlers):
        yield core


@pytest.fixture
def channel(core: Core, tmp_path: Path) -> Iterator[Channel]:
    channel = Channel(reactor, f"{tmp_path}/core")
    yield channel
    background.run(lambda: closed(channel))


async def closed(channel: Channel) -> None:
    channel.close()


async def call(channel: Channel) -> None:
    await channel.call(SERVICE + "One", Nothing(), Nothing, 10)


async def follow(channel: Channel) -> None:
    async for _ in channel.stream(SERVICE + "Many", Nothing(), Nothing):
        pass


async def echoed(channel: Channel, size: int) -> None:
    sent = Stat(name="x" * size)
    assert await channel.call(SERVICE + "Echo", sent, Stat, 20) == sent


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await deferLater(reactor, 0.01)
    raise AssertionError("it did not come to that")


both = pytest.mark.parametrize("ask", [call, follow])


@both
def test_a_channel_that_is_closed_meanwhile(core: Core, channel: Channel, ask: Ask) -> None:
    """The run of a core ends while it is asked something: that is a call that failed, not one that was given up."""

    async def scenario() -> None:
        asking = Deferred.fromCoroutine(ask(channel))
        await until(core.arrived.is_set)
        channel.close()
        with pytest.raises(ApiFailed) as failed:
            await asking
        assert failed.value.silent

    background.run(scenario)


@both
def test_a_channel_that_was_closed_before(channel: Channel, ask: Ask) -> None:
    """Who still asks it is told that the call failed."""

    async def scenario() -> None:
        await echoed(channel, 1)
        channel.close()
        for _ in range(2):
            with pytest.raises(ApiFailed):
                await ask(channel)

    background.run(scenario)


@both
def test_who_gives_up(core: Core, channel: Channel, ask: Ask) -> None:
    """Whoever is cancelled ends as such: nobody takes it for a call that may be tried again. The core is told."""

    async def scenario() -> None:
        asking = Deferred.fromCoroutine(ask(channel))
        await until(core.arrived.is_set)
        asking.cancel()
        with pytest.raises(CancelledError):
            await asking
        await until(core.left.is_set)
        await echoed(channel, 1)

    background.run(scenario)


def test_a_call_that_takes_too_long(core: Core, channel: Channel) -> None:
    """It is over for the core, too, and the connection serves others."""

    async def scenario() -> None:
        for work in (
            channel.call(SERVICE + "One", Nothing(), Nothing, 0.3),
            anext(channel.stream(SERVICE + "One", Nothing(), Nothing, 0.3)),
        ):
            core.left.clear()
            with pytest.raises(ApiFailed, match=LATE) as failed:
                await work
            assert failed.value.silent and not failed.value.unknown
            await until(core.left.is_set)
        await echoed(channel, 1)

    background.run(scenario)


@pytest.mark.parametrize("size", [0, 1, 16_384, 65_535, 70_000, 4_000_000])
def test_large_requests_and_replies(channel: Channel, size: int) -> None:
    """More than a frame and than what the core takes at first."""
    background.run(lambda: echoed(channel, size))


def test_more_than_the_first_window_of_all(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core is told in time that it may send more."""
    monkeypatch.setattr("drivers.http2.connection.TOLD", 200_000)
    assert OPEN > 200_000

    async def scenario() -> None:
        for _ in range(20):
            await echoed(channel, 1_000_000)

    background.run(scenario)


def test_many_at_once(channel: Channel) -> None:
    """Each has its own reply, large ones among small ones, whichever is there first."""

    async def scenario() -> None:
        sizes = [7, 200_000, 13] * 30
        works = [Deferred.fromCoroutine(echoed(channel, size + number)) for number, size in enumerate(sizes)]
        for work in works:
            await work

    background.run(scenario)


def test_a_stream_is_whole_and_in_order(channel: Channel) -> None:
    async def scenario() -> None:
        stream = channel.stream(SERVICE + "Count", Stat(value=5_000), Stat)
        assert [stat.value async for stat in stream] == list(range(5_000))

    background.run(scenario)


def test_what_a_core_refuses(channel: Channel) -> None:
    """In its own words, whatever is in them; a call that it does not have is told from a name that it does not have."""

    async def scenario() -> None:
        with pytest.raises(ApiFailed, match="no ‘user’ 100 %") as failed:
            await channel.call(SERVICE + "Refuse", Nothing(), Nothing, 5)
        assert failed.value.unknown and not failed.value.silent
        with pytest.raises(ApiFailed) as failed:
            await channel.call(SERVICE + "None", Nothing(), Nothing, 5)
        assert failed.value.unsupported and not failed.value.unknown

    background.run(scenario)


def test_a_core_that_comes_later_and_comes_again(tmp_path: Path) -> None:
    """Nobody waits for one that is not there; the next call finds the one that is."""
    channel, path = Channel(reactor, f"{tmp_path}/core"), tmp_path / "core"

    async def refused() -> None:
        with pytest.raises(ApiFailed) as failed:
            await echoed(channel, 1)
        assert failed.value.silent

    for _ in range(2):
        background.run(refused)
        with serving(f"unix:{path}", SERVICE, Core().handlers):
            background.run(lambda: echoed(channel, 1))
        path.unlink(missing_ok=True)
    background.run(lambda: closed(channel))
