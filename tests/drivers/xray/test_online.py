"""Users online, on cores with fewer API calls: what they cannot report is unsupported."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
import pytest

from drivers.process.aliases import PLAIN
from drivers.xray.api import STATS, Api
from drivers.xray.connections import Connections
from drivers.xray.generation import XrayGeneration
from node.base.errors import CoreFailed, Unsupported
from protos import xray_pb2
from scripts.staging import background
from tests.harness.rpc_server import serving

T = TypeVar("T")
Answer = Callable[[Any, Any], Awaitable[Any]]
Question = Callable[[XrayGeneration], Awaitable[object]]


async def counted(request: xray_pb2.GetStatsRequest, _: Any) -> xray_pb2.GetStatsResponse:
    return xray_pb2.GetStatsResponse(stat=xray_pb2.Stat(name=request.name, value=2))


async def listed(_: Any, __: Any) -> xray_pb2.GetAllOnlineUsersResponse:
    return xray_pb2.GetAllOnlineUsersResponse(users=["user>>>Ann>>>online", "user>>>b>>>o>>>b>>>online"])


async def unknown(request: xray_pb2.GetStatsRequest, context: Any) -> None:
    await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.name} not found.")


async def broken(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.INTERNAL, "it broke")


def asked(calls: Mapping[str, Answer], *questions: Question) -> tuple[object, ...]:
    """The outcomes of asking a core with these calls."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            call, xray_pb2.GetStatsRequest.FromString, lambda reply: reply.SerializeToString()
        )
        for name, call in calls.items()
    }

    async def ask(socket: str) -> tuple[object, ...]:
        generation = object.__new__(XrayGeneration)
        generation._api, generation._aliases = Api(background.reactor, socket), PLAIN
        generation._connections = Connections(background.reactor, {})
        generation.accounts = {"in": {"ann": xray_pb2.User(email="Ann").SerializeToString()}}
        try:
            return tuple([await outcome(question(generation)) for question in questions])
        finally:
            await generation._api.close()

    with tempfile.TemporaryDirectory() as directory:
        socket = f"{directory}/api"
        with serving(f"unix:{socket}", STATS, handlers):
            return background.run(lambda: ask(socket))


async def outcome(work: Awaitable[object]) -> object:
    try:
        return await work
    except (CoreFailed, Unsupported) as error:
        return type(error)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ({}, (Unsupported, Unsupported)),
        ({"GetStatsOnline": counted}, (Unsupported, 2)),
        ({"GetStatsOnline": unknown, "GetStatsOnlineIpList": unknown}, ({}, 0)),
        ({"GetStatsOnline": broken, "GetStatsOnlineIpList": broken}, (CoreFailed, CoreFailed)),
    ],
    ids=["neither", "the number alone", "they are offline", "it fails"],
)
def test_cores_with_fewer_calls(calls: Mapping[str, Answer], expected: tuple[object, object]) -> None:
    """A number is returned if the core has one, 0 for a user who is offline, and never 0 for an unsupported call."""
    assert asked(calls, lambda core: core.online("ann"), lambda core: core.online_count("ann")) == expected


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ({}, Unsupported),
        ({"GetAllOnlineUsers": listed}, {"ann", "b>>>o>>>b"}),
        ({"GetAllOnlineUsers": broken}, CoreFailed),
    ],
    ids=["there is none", "all users", "it fails"],
)
def test_the_list_of_all_users(calls: Mapping[str, Answer], expected: object) -> None:
    """The keys of the users online; a core that has no list is unsupported, not empty."""
    assert asked(calls, lambda core: core.online_keys()) == (expected,)


async def by_a_socket(_: Any, __: Any) -> xray_pb2.GetStatsOnlineIpListResponse:
    return xray_pb2.GetStatsOnlineIpListResponse(ips={"@": 1, "": 1, "10.0.0.1": 1, "::1": 1})


def forwarded(core: XrayGeneration) -> Awaitable[object]:
    core.fronted, core._host = {"in": ""}, cast(Any, SimpleNamespace(reactor=background.reactor))
    return core.forwarded(["ann"])


def test_a_user_who_comes_by_a_unix_socket() -> None:
    """The core lists no address for them; the others of the same user, and of all users, are known all the same."""
    calls: Mapping[str, Answer] = {"GetAllOnlineUsers": listed, "GetStatsOnlineIpList": by_a_socket}
    two = {bytes([10, 0, 0, 1]), bytes(15) + b"\1"}
    reported, online = asked(calls, forwarded, lambda core: core._online())
    assert reported == {"ann": two}
    assert online == {address: {"ann", "b>>>o>>>b"} for address in two}
