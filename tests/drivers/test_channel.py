"""A channel to a core: whatever a call ends with is an `ApiFailed`, but who is cancelled stays cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from drivers.channel import ApiFailed, Channel
from protos.xray_pb2 import Nothing

# A core that takes calls and never answers.
Scenario = Callable[[Channel, asyncio.Event], Awaitable[None]]


@pytest.fixture
def silent(tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario with a channel to a server that never answers; the event is set when a call has arrived."""

    async def main(scenario: Scenario) -> None:
        arrived = asyncio.Event()

        async def hang(request: bytes, context: Any) -> bytes:
            arrived.set()
            await asyncio.Event().wait()
            return b""

        async def hang_stream(request: bytes, context: Any) -> Any:
            arrived.set()
            yield b""
            await asyncio.Event().wait()

        server = grpc.aio.server()
        one = grpc.unary_unary_rpc_method_handler(hang)
        many = grpc.unary_stream_rpc_method_handler(hang_stream)
        handlers = {"One": one, "Many": many}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("core.Core", handlers),))
        server.add_insecure_port(f"unix:{tmp_path}/core")
        await server.start()
        try:
            await scenario(Channel(f"unix:{tmp_path}/core"), arrived)
        finally:
            await server.stop(None)

    return lambda scenario: asyncio.run(asyncio.wait_for(main(scenario), 20))


async def call(channel: Channel) -> None:
    await channel.call("/core.Core/One", Nothing(), Nothing, 10)


async def follow(channel: Channel) -> None:
    async for _ in channel.stream("/core.Core/Many", Nothing(), Nothing):
        pass


@pytest.mark.parametrize("ask", [call, follow])
def test_a_channel_that_is_closed_meanwhile(
    silent: Callable[[Scenario], None], ask: Callable[[Channel], Awaitable[None]]
) -> None:
    """The run of a core ends while it is asked something: that is a call that failed, not one that was given up."""

    async def scenario(channel: Channel, arrived: asyncio.Event) -> None:
        asking = asyncio.ensure_future(ask(channel))
        await arrived.wait()
        await channel.close()
        with pytest.raises(ApiFailed):
            await asking

    silent(scenario)


@pytest.mark.parametrize("ask", [call, follow])
def test_a_channel_that_was_closed_before(
    silent: Callable[[Scenario], None], ask: Callable[[Channel], Awaitable[None]]
) -> None:
    """Who still asks it is told that the call failed."""

    async def scenario(channel: Channel, arrived: asyncio.Event) -> None:
        asking = asyncio.ensure_future(ask(channel))
        await arrived.wait()
        await channel.close()
        await asyncio.gather(asking, return_exceptions=True)
        with pytest.raises(ApiFailed):
            await ask(channel)

    silent(scenario)


@pytest.mark.parametrize("ask", [call, follow])
def test_who_gives_up(silent: Callable[[Scenario], None], ask: Callable[[Channel], Awaitable[None]]) -> None:
    """A task that was cancelled ends as such: nobody takes it for a call that may be tried again."""

    async def scenario(channel: Channel, arrived: asyncio.Event) -> None:
        asking = asyncio.ensure_future(ask(channel))
        await arrived.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await channel.close()

    silent(scenario)
