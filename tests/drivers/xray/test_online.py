"""Who is online, on cores that tell less than today's: what they cannot tell is said to be unsupported."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from twisted.internet import reactor
from twisted.internet.defer import Deferred, succeed

from drivers.xray.api import STATS, Api
from drivers.xray.generation import XrayGeneration
from node.contract.driver import Host
from node.errors import CoreFailed, Unsupported
from protos import xray_pb2

T = TypeVar("T")
Answer = Callable[[Any, Any], Awaitable[Any]]


class SameThread:
    """Stands in for the asyncio thread: what is run has ended when it returns."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def run(self, coro: Awaitable[T]) -> Deferred[T]:
        return succeed(self.loop.run_until_complete(coro))


async def counted(request: xray_pb2.GetStatsRequest, _: Any) -> xray_pb2.GetStatsResponse:
    return xray_pb2.GetStatsResponse(stat=xray_pb2.Stat(name=request.name, value=2))


async def unknown(request: xray_pb2.GetStatsRequest, context: Any) -> None:
    await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.name} not found.")


async def broken(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.INTERNAL, "it broke")


def asked(calls: Mapping[str, Answer]) -> tuple[object, object]:
    """What comes of asking a core that has these calls for a user's addresses, and for their number."""
    aio = SameThread()

    async def serve(socket: str) -> Any:
        server = grpc.aio.server()
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                call, xray_pb2.GetStatsRequest.FromString, lambda reply: reply.SerializeToString()
            )
            for name, call in calls.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(STATS.strip("/"), handlers),))
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        return server

    with tempfile.TemporaryDirectory() as directory:
        socket = str(Path(directory, "api"))
        server = aio.loop.run_until_complete(serve(socket))
        generation = object.__new__(XrayGeneration)
        generation._host = Host(reactor, aio, None, Path(directory), {})  # type: ignore[arg-type]
        generation._api = Api(socket)
        generation.accounts = {"in": {"ann": xray_pb2.User(email="Ann").SerializeToString()}}
        try:
            return outcome(generation.online("ann")), outcome(generation.online_count("ann"))
        finally:
            aio.loop.run_until_complete(generation._api.close())
            aio.loop.run_until_complete(server.stop(0))
            aio.loop.close()


def outcome(work: Any) -> object:
    results: list[object] = []
    Deferred.fromCoroutine(work).addCallbacks(results.append, lambda failure: results.append(type(failure.value)))
    return results[0]


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ({}, (Unsupported, Unsupported)),
        ({"GetStatsOnline": counted}, (Unsupported, 2)),
        ({"GetStatsOnline": unknown, "GetStatsOnlineIpList": unknown}, ({}, 0)),
        ({"GetStatsOnline": broken, "GetStatsOnlineIpList": broken}, (CoreFailed, CoreFailed)),
    ],
    ids=["neither", "the number alone", "he is offline", "it fails"],
)
def test_cores_that_tell_less(calls: Mapping[str, Answer], told: tuple[object, object]) -> None:
    """A number is told where there is one, nobody is 0, and what the core cannot tell is never 0."""
    assert asked(calls) == told
