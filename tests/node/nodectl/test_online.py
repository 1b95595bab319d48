"""`nodectl online` without names: from the node's list, or user by user where there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from twisted.internet.defer import ensureDeferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.base.errors import NodeError, UnknownName, UnknownPath, Unsupported
from node.client import Client
from node.nodectl.commands.users import _counts, _places
from node.nodectl.fleet import Node
from protos import service_pb2 as pb


class OneClient:
    """A client of a node with two users online, bob from two addresses; `fault` is that of its list."""

    def __init__(self, fault: NodeError | None = None) -> None:
        self.fault = fault
        self.asked: list[str] = []

    async def all_online(self) -> AsyncIterator[pb.ListOnlineResponse]:
        if self.fault is not None:
            raise self.fault
        ann = pb.StatsOnlineIpListResponse(name="ann", ips={"10.0.0.1": 1})
        yield pb.ListOnlineResponse(users=[ann], next="ann", unsupported={"quic": "it leads elsewhere"})
        yield pb.ListOnlineResponse(
            users=[pb.StatsOnlineIpListResponse(name="bob", ips={"10.0.0.1": 1, "10.0.0.2": 2})]
        )

    async def all_users(self, *_: Any, **__: Any) -> AsyncIterator[pb.ListUsersResponse]:
        yield pb.ListUsersResponse(users=[pb.ListedUser(name=name) for name in ("ann", "bob", "cy", "gone")])

    async def online(self, name: str) -> pb.OnlineStatResponse:
        self.asked.append(name)
        if name == "gone":
            raise UnknownName("there is no user")
        return pb.OnlineStatResponse(name=name, value={"ann": 1, "bob": 2}.get(name, 0))


def test_the_mark() -> None:
    """An address that a reverse proxy reported has it, and no other."""
    ann = pb.StatsOnlineIpListResponse(name="ann", ips={"10.0.0.1": 1, "10.0.0.2": 2}, forwarded=["10.0.0.2"])
    rows = [(*row[:2], row[-1]) for row in _places([ann])]
    assert rows == [("ann", "10.0.0.1", ""), ("ann", "10.0.0.2", "forwarded")]


class OnlineTests(SynchronousTestCase):
    @pytest.fixture(autouse=True)
    def _captured(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def counted(self, client: OneClient) -> dict[str, int]:
        node = Node("one", cast(Client, client), cast(Any, Clock()))
        return {count.name: count.value for count in self.successResultOf(ensureDeferred(_counts(node)))}

    def test_the_list(self) -> None:
        """No user is asked for; a note has the inbounds that it lacks."""
        client = OneClient()
        self.assertEqual((self.counted(client), client.asked), ({"ann": 1, "bob": 2}, []))
        self.assertIn("one: users of inbound 'quic' are not listed: it leads elsewhere", self.capsys.readouterr().err)

    def test_without_a_list(self) -> None:
        """A core without it, or a node of an earlier version: each user is asked for."""
        for fault in (Unsupported("no list"), UnknownPath("there is no such path")):
            client = OneClient(fault)
            self.assertEqual(self.counted(client), {"ann": 1, "bob": 2})
            self.assertEqual(sorted(client.asked), ["ann", "bob", "cy", "gone"])
