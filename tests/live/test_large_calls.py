"""Calls to a real core that exceed its default message size."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from drivers.process.channel import MAX_REQUEST
from drivers.xray.accounts import pack
from drivers.xray.api import Api, Operation
from drivers.xray.driver import Xray
from node.backend.roster import Roster
from node.base.logs import LogRing
from node.contract.driver import Host
from scripts.staging.core import find_xray, server_config
from scripts.staging.inbounds import Kind
from scripts.staging.node import LOCAL_TARGETS
from scripts.staging.protocols import vless
from scripts.staging.transports import raw
from scripts.staging.users import TestUser
from scripts.staging.wait import accepts
from tests.conftest import Place, member

reactor: Any = installed
# Bytes of a name: 3,000 names are 3 MB.
LONG = 1000


class LargeCallTests(TestCase):
    async def setUp(self) -> None:  # type: ignore[override]
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        directory = Path(temporary.name)
        self.place = Place(Kind("vless", vless(), raw()), "home")
        host = Host(
            reactor, LogRing(reactor, 1000), directory, {"XRAY_EXECUTABLE_PATH": str(find_xray()), **LOCAL_TARGETS}
        )
        config = json.dumps(server_config([self.place.inbound]))
        self.plan = await Xray(host).prepare(config, frozenset())
        people = [TestUser.new(f"{number:04}" + "x" * LONG) for number in range(3000)]
        roster, refused = Roster.of([member(one, self.place) for one in people], self.plan.tags, self.plan.account)
        assert not refused
        self.accounts = roster.target[self.place.tag]
        self.core = await self.plan.launch({self.place.tag: {}}, 8)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.core.stop()))
        [socket] = directory.glob("*.sock")
        self.api = Api(reactor, str(socket))
        self.addCleanup(lambda: Deferred.fromCoroutine(self.api.close()))

    async def test_an_inbound_of_three_megabytes(self) -> None:
        """All of its users are added unchanged, and the core's list of them is complete."""
        handler = self.core.plan.handler(self.place.tag, self.accounts)
        self.assertTrue(3_000_000 < handler.ByteSize() < MAX_REQUEST)
        await self.api.remove_inbound(handler.tag)
        await self.api.add_inbound(handler)
        self.assertEqual({one.email for one in await self.api.list_users(self.place.tag)}, self.accounts.keys())
        self.assertTrue(accepts(self.place.port))

    async def test_many_users_at_once(self) -> None:
        """Many concurrent single additions; a refusal affects only its user."""
        operations = [Operation(self.place.tag, email, packed) for email, packed in self.accounts.items()]
        operations.insert(7, Operation(self.place.tag, "bad", pack("bad", "no.such.Account", b"")))
        results = await self.api.alter(operations)
        self.assertEqual([place for place, refused in enumerate(results) if refused is not None], [7])
        self.assertEqual(await self.api.count_users(self.place.tag), len(self.accounts))
        self.assertIsInstance(await self.api.counters(), dict)
