"""A channel to a core: every failed call raises `ApiFailed`, but cancellation stays cancellation."""

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

from drivers.process.channel import LATE, ApiFailed, Channel
from node.http2.client import OPEN
from protos.xray_pb2 import Nothing, Stat
from scripts.staging import background
from tests.harness.rpc_server import serving

Ask = Callable[[Channel], Coroutine[Deferred[Any], Any, None]]
SERVICE = "/core.Core/"
reactor = background.reactor


class Core:
    """Never answers `One` and `Many`; echoes `Echo`; `Count` returns as many numbers as requested."""

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
    """The core ends during a call: the call failed, and was not cancelled."""

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
    """A call on a closed channel fails."""

    async def scenario() -> None:
        await echoed(channel, 1)
        channel.close()
        for _ in range(2):
            with pytest.raises(ApiFailed):
                await ask(channel)

    background.run(scenario)


@both
def test_cancelling(core: Core, channel: Channel, ask: Ask) -> None:
    """A cancelled caller gets `CancelledError`, not a failure that may be retried. The core's call is reset, too."""

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
    """The call ends for the core, too, and the connection serves others."""

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


@pytest.mark.parametrize("size", [0, 1, 16_384, 65_535, 70_000, 4_000_000, 20_000_000])
def test_large_requests_and_replies(channel: Channel, size: int) -> None:
    """Larger than a frame, and than the core's initial window."""
    background.run(lambda: echoed(channel, size))


def test_more_than_the_first_window(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core gets WINDOW_UPDATEs in time."""
    monkeypatch.setattr("node.http2.client.WINDOW_UPDATE_AFTER", 200_000)
    assert OPEN > 200_000

    async def scenario() -> None:
        for _ in range(20):
            await echoed(channel, 1_000_000)

    background.run(scenario)


def test_many_at_once(channel: Channel) -> None:
    """Each call has its own reply, large ones among small ones, whichever comes first."""

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


def test_a_call_that_the_core_refuses(channel: Channel) -> None:
    """The error has the core's text, whatever it is; an unknown call is distinguished from an unknown name."""

    async def scenario() -> None:
        with pytest.raises(ApiFailed, match="no ‘user’ 100 %") as failed:
            await channel.call(SERVICE + "Refuse", Nothing(), Nothing, 5)
        assert failed.value.unknown and not failed.value.silent
        with pytest.raises(ApiFailed) as failed:
            await channel.call(SERVICE + "None", Nothing(), Nothing, 5)
        assert failed.value.unsupported and not failed.value.unknown

    background.run(scenario)


def test_a_core_that_comes_later_and_again(tmp_path: Path) -> None:
    """A call does not wait for a missing core; the next call connects to the one that is there."""
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
