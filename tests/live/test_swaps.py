"""Failing swaps of an inbound, and new runs of a core for users: removed users are cut, and no port stays closed."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import TestCase

from drivers.process.channel import ApiFailed
from drivers.xray.accounts import pack
from drivers.xray.api import IN_FLIGHT, Api, Operation
from drivers.xray.driver import Xray
from drivers.xray.generation import XrayGeneration
from node.backend.roster import Roster
from node.base.logs import LogRing
from node.contract.accounts import Change, diff
from node.contract.driver import Host
from node.http2.stream import Status
from protos.service_pb2 import User
from protos.xray_pb2 import InboundHandlerConfig
from scripts.staging.core import find_xray, server_config
from scripts.staging.inbounds import Kind
from scripts.staging.node import LOCAL_TARGETS
from scripts.staging.ports import free_port
from scripts.staging.protocols import shadowsocks_2022, vless
from scripts.staging.transports import raw
from scripts.staging.users import TestUser
from scripts.staging.wait import accepts
from tests.conftest import Place, member
from tests.harness.renewing import Renewing

reactor: Any = installed

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
# An account that every core refuses.
BAD = pack(CARL.email, "no.such.Account", b"")


class BrokenApi(Api):
    """Fails the next `failures` times to add an inbound."""

    failures = 0

    async def add_inbound(self, handler: InboundHandlerConfig) -> None:
        if not self.failures:
            await super().add_inbound(handler)
            return
        self.failures -= 1
        raise ApiFailed("the port is taken", 2)


class SwapTests(TestCase):
    async def setUp(self) -> None:  # type: ignore[override]
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        directory = Path(temporary.name)
        kind = Kind("shadowsocks-2022", shadowsocks_2022("2022-blake3-aes-128-gcm", 16), raw())
        self.place, self.other = Place(kind, "home", free_port()), Place(Kind("vless", vless(), raw()), "work")
        host = Host(
            reactor, LogRing(reactor, 1000), directory, {"XRAY_EXECUTABLE_PATH": str(find_xray()), **LOCAL_TARGETS}
        )
        self.driver = Xray(host)
        config = json.dumps(server_config([self.place.inbound, self.other.inbound]))
        self.plan = await self.driver.prepare(config, frozenset())
        self.core = await self.plan.launch(self.target(ANNA, BERT), 8)
        self.runs = Renewing(reactor, self.driver, self.plan, self.core)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.core.stop()))
        [path] = directory.glob("*.sock")
        self.api = BrokenApi(reactor, str(path))
        self.addCleanup(lambda: Deferred.fromCoroutine(self.api.close()))
        self.core._users._api = self.api

    def target(self, *people: TestUser) -> dict[str, dict[str, bytes]]:
        users: list[User] = [member(person, self.place, self.other) for person in people]
        roster, refused = Roster.of(users, self.plan.tags, self.plan.account)
        assert not refused
        return roster.target

    async def apply(self, changes: Sequence[Change]) -> set[str]:
        """Apply changes. Returns the refused users."""
        refused = await self.runs.apply(changes)
        assert isinstance(self.runs.run, XrayGeneration)
        self.core = self.runs.run
        return {refusal.email for refusal in refused}

    async def names(self, tag: str) -> set[str]:
        """The users in the core, which must be those that it confirmed."""
        self.assertEqual(await self.core.audit(), 0)
        api: Api = self.core._api
        return {user.email for user in await api.list_users(tag)}

    def changes(self, *people: TestUser) -> list[Change]:
        return [change for change in diff(self.core.accounts, self.target(*people)) if change.tag == self.place.tag]

    async def test_a_swap_that_fails(self) -> None:
        """Removed users are cut all the same, added ones are refused, and others stay."""
        self.api.failures, first = 1, self.core
        self.assertEqual(await self.apply(self.changes(ANNA, CARL)), {CARL.email})
        self.assertEqual(await self.names(self.place.tag), {ANNA.email})
        self.assertTrue(accepts(self.place.port))
        self.assertIs(self.core, first)

    async def test_an_inbound_that_cannot_be_put_back(self) -> None:
        """A new run of the core gets all users."""
        self.api.failures, first = 2, self.core
        self.assertEqual(await self.apply(self.changes(ANNA, CARL)), set())
        self.assertEqual(self.runs.ended, [first])
        self.assertEqual(await self.names(self.place.tag), {ANNA.email, CARL.email})
        self.assertEqual(await self.names(self.other.tag), {ANNA.email, BERT.email})
        self.assertTrue(accepts(self.place.port))

    async def test_a_closed_door(self) -> None:
        """The listener of an inbound is closed during its swap as before, and all of them open again."""
        places = [("127.0.0.1", place.port) for place in (self.place, self.other)]
        await self.core.close_door()
        self.assertEqual(await self.apply(self.changes(ANNA, CARL)), set())
        for place in places:
            self.assertRaises(TimeoutError, socket.create_connection, place, 0.2)
        await self.core.open_door()
        for place in places:
            socket.create_connection(place, 5).close()

    async def test_nobody_is_left_in_an_inbound_that_is_gone(self) -> None:
        """An inbound that cannot be restored admits no user, and none is reported in it."""
        self.api.failures = 2
        refused, left = await self.core.apply(self.changes(ANNA, CARL))
        self.assertEqual(refused, [])
        self.assertEqual({change.key for change in left if change.packed}, {ANNA.email, CARL.email})
        self.assertEqual(self.core.accounts[self.place.tag], {})
        self.assertFalse(accepts(self.place.port))
        self.assertEqual(await self.core.apply(left), ([], left))

    async def test_a_run_that_the_core_refuses(self) -> None:
        """Users whom the core refuses do not keep removed ones in: it runs again without either."""
        self.api.failures, first = 2, self.core
        coming = [Change(self.place.tag, CARL.email, BAD)]
        leaving = [Change(self.place.tag, BERT.email, None)]
        refused = await self.runs.renew([*leaving, *coming])
        assert isinstance(self.runs.run, XrayGeneration)
        self.core = self.runs.run
        self.assertEqual(len(refused), 1)
        self.assertEqual(self.runs.ended, [first])
        self.assertEqual(await self.names(self.place.tag), {ANNA.email})

    async def test_nobody_leaves_for_users_whom_the_core_refuses(self) -> None:
        """If no user must be removed the running core stays."""
        refused = await self.runs.renew([Change(self.place.tag, CARL.email, BAD)])
        self.assertIs(self.runs.run, self.core)
        self.assertEqual((len(refused), self.runs.ended), (1, []))

    async def test_a_core_that_is_gone(self) -> None:
        """No second core is started beside the restarting one, which gets the users."""
        self.core.kill()
        await self.core.when_exited()
        first: XrayGeneration = self.core
        self.assertEqual(await self.apply(self.changes(ANNA, CARL)), set())
        self.assertIs(self.core, first)
        self.assertEqual(self.runs.ended, [])


class StalledChannel:
    """A channel to a core that never replies."""

    def __init__(self) -> None:
        self.asked = 0
        self.clock = Clock()

    async def begin(self, path: str, request: Message | bytes) -> Deferred[None]:
        self.asked += 1
        return deferLater(self.clock, 1)

    def flush(self) -> None:
        pass

    async def result(self, call: Deferred[None], reply: type) -> None:
        await call
        raise ApiFailed("Deadline Exceeded", Status.DEADLINE_EXCEEDED)


def test_a_core_that_does_not_answer_is_not_asked_thousands_of_times() -> None:
    """When one of many calls times out the others fail at once, each with its name."""
    api, stalled = Api(reactor, "nowhere"), StalledChannel()
    api._channel = stalled  # type: ignore[assignment]
    asking = api.alter([Operation("home", f"{number}@test", None) for number in range(5_000)])
    results = list[list[str | None]]()
    Deferred.fromCoroutine(asking).addCallback(results.append)
    stalled.clock.advance(1)
    assert results[0] == ["Deadline Exceeded"] * 5_000
    assert stalled.asked <= IN_FLIGHT
