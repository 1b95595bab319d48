"""Audits of the real core's users: the node finds and repairs changes made without it, on every kind of inbound."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from drivers.xray.api import Api, Operation
from drivers.xray.driver import Xray
from drivers.xray.generation import XrayGeneration
from node.backend.roster import Roster
from node.base.errors import CoreFailed
from node.base.logs import LogRing
from node.contract.accounts import Change, diff
from node.contract.driver import Host
from scripts.staging import certs
from scripts.staging.core import find_xray, server_config
from scripts.staging.inbounds import SERVER_NAME, kinds
from scripts.staging.node import LOCAL_TARGETS
from scripts.staging.users import TestUser
from tests.conftest import Place, member

reactor: Any = installed

PEOPLE = [TestUser.new(f"{name}@test") for name in ("Anna", "bert", "carl")]
STRANGER = TestUser.new("stranger@test")


class AuditTests(TestCase):
    """Every kind of inbound except REALITY, which needs a website."""

    async def setUp(self) -> None:  # type: ignore[override]
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        directory = Path(temporary.name)
        (directory / "run").mkdir()
        made = kinds(certs.make(directory, [SERVER_NAME]), 1)
        self.places = [Place(kind, name) for name, kind in made.items() if not kind.reality]
        settings = {"XRAY_EXECUTABLE_PATH": str(find_xray()), "CORE_PATHS": temporary.name, **LOCAL_TARGETS}
        host = Host(reactor, LogRing(reactor, 1000), directory / "run", settings)
        self.driver = Xray(host)
        config = json.dumps(server_config([place.inbound for place in self.places]))
        self.plan = await self.driver.prepare(config, frozenset())
        self.roster, refused = Roster.of(
            [member(person, *self.places) for person in PEOPLE], self.plan.tags, self.plan.account
        )
        assert not refused
        self.core: XrayGeneration = await self.plan.launch(self.roster.target, 8)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.core.stop()))
        [socket] = (directory / "run").glob("*.sock")
        self.behind = Api(reactor, str(socket))
        self.addCleanup(lambda: Deferred.fromCoroutine(self.behind.close()))

    async def tamper(self, *operations: Operation) -> None:
        assert await self.behind.alter(operations) == [None] * len(operations)

    async def repair(self) -> None:
        assert await self.core.apply(diff(self.core.accounts, self.roster.target)) == ([], [])

    async def names(self, tag: str) -> set[str]:
        return {user.email for user in await self.behind.list_users(tag)}

    async def test_as_confirmed(self) -> None:
        """An unchanged core has the users that it confirmed."""
        self.assertEqual(await self.core.audit(), 0)

    async def test_drift(self) -> None:
        """Additional and missing users on any kind of inbound are reported and corrected."""
        for place in self.places:
            account = self.plan.account(place.tag, member(STRANGER, place))
            assert account
            await self.tamper(Operation(place.tag, STRANGER.email, account.packed))
        self.assertEqual(await self.core.audit(), len(self.places))
        await self.repair()
        for place in self.places:
            self.assertEqual(await self.names(place.tag), {person.email for person in PEOPLE}, place.tag)
            await self.tamper(Operation(place.tag, PEOPLE[0].email, None))
        self.assertEqual(await self.core.audit(), len(self.places))
        await self.repair()
        for place in self.places:
            self.assertEqual(await self.names(place.tag), {person.email for person in PEOPLE}, place.tag)
        self.assertEqual(await self.core.audit(), 0)

    async def test_after_a_call_that_failed(self) -> None:
        """A call that timed out may have been carried out, even with equal numbers; the core's full list decides."""
        place = self.places[0]
        account = self.plan.account(place.tag, member(STRANGER, place))
        assert account

        async def no_answer(_: Api, operations: Sequence[Operation]) -> list[str | None]:
            return ["Deadline Exceeded"] * len(operations)

        alter = Api.alter
        self.patch(Api, "alter", no_answer)
        refused, left = await self.core.apply([Change(place.tag, PEOPLE[0].email.lower(), None)])
        self.assertEqual((len(refused), left), (1, []))
        self.patch(Api, "alter", alter)
        await self.tamper(
            Operation(place.tag, PEOPLE[0].email, None), Operation(place.tag, STRANGER.email, account.packed)
        )
        self.assertEqual([await self.core.audit(), await self.core.audit()], [2, 0])
        await self.repair()
        self.assertEqual(await self.names(place.tag), {person.email for person in PEOPLE})

    async def test_a_core_that_is_gone(self) -> None:
        """A core that does not reply cannot be audited, and counts as not alive."""
        self.core.kill()
        await self.core.when_exited()
        self.assertFalse(await self.core.answers(1))
        with self.assertRaises(CoreFailed):
            await self.core.audit()
