"""The sing-box driver on a real core: refused users, users changed by others, and too many live changes."""

from __future__ import annotations

import base64
import secrets
import tempfile
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from twisted.internet import reactor as installed
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import formatEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase, TestCase

from drivers.process.channel import ApiFailed
from drivers.process.executable import Executable
from drivers.sing_box import api, generation
from drivers.sing_box.accounts import unknown_entry
from drivers.sing_box.config import ApiAddress
from drivers.sing_box.driver import SingBox
from drivers.sing_box.generation import SingBoxGeneration
from drivers.sing_box.ssm_api import DEADLINE, LiveUsers, carried
from node.backend.roster import Roster
from node.base.errors import CoreFailed, PortTaken
from node.base.logs import LogRing
from node.contract.accounts import Accounts, Change
from node.contract.driver import Host
from scripts.staging.process import freeze
from scripts.staging.sing_box import BUILDS, VLESS, Door, config, find_sing_box, shadowsocks_2022
from scripts.staging.users import TestUser
from tests.harness.renewing import Renewing

pytestmark = pytest.mark.core

reactor: Any = installed

TAG = "shadowsocks-2022"


class DriverTests(TestCase):
    """On one build: the one without counters does not differ here."""

    async def launched(self) -> SingBoxGeneration:
        """Launch a core, again if another process took the port of its API in between, as the node does."""
        for last in (False, False, True):
            try:
                return await self.plan.launch(self.roster.target, 8)
            except PortTaken:
                if last:
                    raise
        raise AssertionError

    async def setUp(self) -> None:  # type: ignore[override]
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        path = {"SING_BOX_EXECUTABLE_PATH": str(find_sing_box(next(iter(BUILDS))))}
        self.driver = SingBox(Host(reactor, LogRing(reactor, 1000), Path(temporary.name), path))
        self.door, other = Door(shadowsocks_2022()), Door(VLESS)
        self.plan = plan = await self.driver.prepare(config(self.door.inbounds + other.inbounds), frozenset())
        await plan.check({tag: {} for tag in plan.tags})
        people = [self.door.user(TestUser.new(name)) for name in ("Anna", "bert")]
        self.roster, refused = Roster.of(people, plan.tags, plan.account)
        assert not refused
        self.core: SingBoxGeneration = await self.launched()
        self.addCleanup(lambda: Deferred.fromCoroutine(self.core.stop()))
        assert self.core._live is not None
        self.live: LiveUsers = self.core._live

    async def test_a_refused_user_leaves_no_trace(self) -> None:
        """With a credential that the core cannot use they are refused by name; others can still be changed."""
        before = dict(await self.live.listed(TAG))
        bad, good = unknown_entry("Bad", "no key"), unknown_entry("good", _key())
        changes = [Change(TAG, "bad", bad), Change(TAG, "good", good)]
        [refusal], left = await self.core.apply(changes)
        assert not left
        assert refusal.email == "Bad" and "decode psk" in refusal.reason
        assert (await self.live.listed(TAG)).keys() == before.keys() | {"good"}
        assert self.core.accounts[TAG].keys() == {"anna", "bert", "good"}
        # A user whom the core knows already.
        [refusal], _ = await self.core.apply([Change(TAG, "good", unknown_entry("good", "no key"))])
        assert refusal.email == "good"
        assert await self.live.listed(TAG) == before
        assert self.core.accounts[TAG].keys() == {"anna", "bert"}
        assert await self.core.apply([Change(TAG, "good", good)]) == ([], [])
        assert await self.core.audit() == 0

    async def test_changes_by_others(self) -> None:
        """The audit finds and corrects users who were added, changed or removed by someone else."""
        assert await self.core.audit() == 0
        await self.live.let_in(TAG, "stranger", _key())
        await self.live.let_in(TAG, "Anna", _key())
        await self.live.shut_out(TAG, "bert")
        assert await self.core.audit() == 3
        wanted = [Change(TAG, key, self.roster.target[TAG].get(key)) for key in ("anna", "bert", "stranger")]
        assert await self.core.apply(wanted) == ([], [])
        assert await self.core.audit() == 0
        assert self.core.accounts[TAG] == self.roster.target[TAG]
        assert (await self.live.listed(TAG)).keys() == {"Anna", "bert"}

    async def test_another_spelling(self) -> None:
        """The core keeps its spelling of a name, and the audit accepts it."""
        anna = self.roster.target[TAG]["anna"]
        before = dict(await self.live.listed(TAG))
        for spelling in (b"ANNA", b"anna"):
            change = Change(TAG, "anna", anna.replace(b"Anna", spelling))
            assert await self.core.apply([change]) == ([], [])
            assert self.core.accounts[TAG]["anna"] == change.packed
        assert await self.live.listed(TAG) == before
        assert await self.core.audit() == 0
        await self.live.shut_out(TAG, "Anna")
        assert await self.core.audit() == 1
        await self.core.apply([change])
        assert await self.live.listed(TAG) == before
        # Also with another credential.
        await self.core.apply([Change(TAG, "anna", unknown_entry("aNNa", _key()))])
        assert (await self.live.listed(TAG)).keys() == before.keys()
        assert await self.core.audit() == 0

    async def test_a_removed_user_comes_back(self) -> None:
        """With the credential that they had when the core started they can connect again."""
        [anna] = [Change(TAG, "anna", self.roster.target[TAG]["anna"])]
        await self.core.apply([anna._replace(packed=None)])
        assert (await self.live.listed(TAG)).keys() == {"bert"}
        await self.core.apply([anna])
        assert (await self.live.listed(TAG)).keys() == {"Anna", "bert"}

    async def test_too_many_at_once(self) -> None:
        """Additions are left to a new core, which is faster; removals are applied at once all the same."""
        first, runs = self.core, Renewing(reactor, self.driver, self.plan, self.core)
        changes = [Change(TAG, "new", unknown_entry("new", _key())), Change(TAG, "bert", None)]
        with mock.patch.object(generation, "LIVE_SECONDS", 0.0):
            assert await self.core.apply(changes) == ([], changes[:1])
            assert self.core.accounts[TAG].keys() == {"anna"}
            assert await runs.apply(changes[:1]) == []
        assert runs.ended == [first]
        assert isinstance(runs.run, SingBoxGeneration)
        self.core = runs.run
        assert self.core.accounts[TAG].keys() == {"anna", "new"}
        assert await self.core.audit() == 0

    async def test_the_bar_is_lifted_after_a_failure(self) -> None:
        """Also if the core failed to list its connections: no later change would lift it."""
        asked, answering = [0], self.core._api.answering

        async def fails_the_second_time(work: Coroutine[Any, Any, None]) -> None:
            await answering(work)
            asked[0] += 1
            if asked[0] == 2:
                raise ApiFailed("Deadline Exceeded")

        change = Change(TAG, "anna", unknown_entry("Anna", _key()))
        with mock.patch.object(self.core._api, "answering", fails_the_second_time), self.assertRaises(CoreFailed):
            await self.core.apply([change])
        assert self.core.accounts[TAG]["anna"] == change.packed
        assert not self.core._api._barred

    async def test_an_audit_beside_a_removal(self) -> None:
        """The core still has the user while their removal is under way; the audit does not add them again."""
        shut_out, [change] = self.live.shut_out, [Change(TAG, "anna", None)]
        audits: list[Deferred[int]] = []

        async def looked_at(tag: str, user: str, seconds: float) -> None:
            assert await self.core.audit() == 0
            listed, first = self.live.listed, Deferred[None]()

            async def late(tag: str) -> Mapping[str, str]:
                found = await listed(tag)
                await first
                return found

            with mock.patch.object(self.live, "listed", late):
                audits.append(Deferred.fromCoroutine(self.core.audit()))
            await shut_out(tag, user, seconds)
            reactor.callLater(0.1, first.callback, None)

        with mock.patch.object(self.live, "shut_out", looked_at):
            assert await self.core.apply([change]) == ([], [])
        assert await audits[0] == 0
        assert self.core.accounts[TAG].keys() == {"bert"}
        assert await self.core.audit() == 0

    async def test_a_batch_has_one_deadline(self) -> None:
        """A core that stalls delays many changes no longer than one; users who were not added are refused."""
        assert self.core.pid is not None
        process, began = psutil.Process(self.core.pid), reactor.seconds()
        freeze(self.core.pid)
        try:
            with mock.patch.object(generation, "LIVE_PATIENCE", 0.5):
                changes = [Change(TAG, f"new{number}", unknown_entry(f"new{number}", _key())) for number in range(10)]
                refused, left = await self.core.apply(changes)
        finally:
            process.resume()
        assert reactor.seconds() - began < 3 and not left
        assert {refusal.email for refusal in refused} == {f"new{number}" for number in range(10)}
        assert self.core.accounts[TAG].keys() == {"anna", "bert"}

    async def test_a_removal_from_a_core_that_hangs(self) -> None:
        """The removal fails soon, and the user stays barred."""
        assert self.core.pid is not None
        process, began = psutil.Process(self.core.pid), reactor.seconds()
        freeze(self.core.pid)
        try:
            with mock.patch.object(api, "ANSWER", 0.3), self.assertRaises(CoreFailed):
                await self.core.apply([Change("vless", "anna", None), Change(TAG, "anna", None)])
        finally:
            process.resume()
        assert reactor.seconds() - began < 2
        assert self.core._api.bars((TAG, "anna"))
        assert "anna" not in self.core.accounts[TAG]

    async def test_requests_are_not_in_the_log(self) -> None:
        """Nor are their connections."""
        events: list[Any] = []
        observer: Any = events.append
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        await self.live.listed(TAG)
        assert not [event for event in events if "factory" in (formatEvent(event) or "")]

    async def test_additions_that_cannot_be_checked(self) -> None:
        """No connection ends for them, and they are refused by name."""
        runs = Renewing(reactor, self.driver, self.plan, self.core)
        with mock.patch.object(Executable, "run", side_effect=CoreFailed("killed")):
            [refusal] = await runs.renew([Change(TAG, "new", unknown_entry("new", _key()))])
        assert (runs.run, runs.ended) == (self.core, [])
        assert refusal == ("new", f"{TAG}: killed")

    async def test_removals_while_nothing_can_be_checked(self) -> None:
        """The users are out."""
        runs = Renewing(reactor, self.driver, self.plan, self.core)
        with mock.patch.object(self.plan, "check", side_effect=CoreFailed("killed")):
            assert await runs.renew([Change(TAG, "anna", None), Change(TAG, "nobody", None)]) == []
        assert isinstance(runs.run, SingBoxGeneration)
        self.core = runs.run
        assert self.core.accounts[TAG].keys() == {"bert"}

    async def test_removals_beside_additions_that_fail(self) -> None:
        """If no core starts with the new users, users who were removed with them stay out."""
        launch, asked = self.plan.launch, [0]

        async def fails_the_first_time(target: Mapping[str, Accounts], seconds: float) -> SingBoxGeneration:
            asked[0] += 1
            if asked[0] == 1:
                raise CoreFailed("killed")
            return await launch(target, seconds)

        runs = Renewing(reactor, self.driver, self.plan, self.core)
        changes = [Change(TAG, "anna", None), Change(TAG, "new", unknown_entry("New", _key()))]
        with mock.patch.object(self.plan, "launch", fails_the_first_time):
            refused = await runs.renew(changes)
        assert isinstance(runs.run, SingBoxGeneration)
        self.core = runs.run
        assert [refusal.email for refusal in refused] == ["new"]
        assert self.core.accounts[TAG].keys() == {"bert"}

    async def test_a_core_that_has_ended(self) -> None:
        """Changes without a reply are refused, and do not count as confirmed."""
        self.core.kill()
        await self.core.when_exited()
        with self.assertRaises(ApiFailed):
            await self.live.let_in(TAG, "new", _key())


class Unanswered(SynchronousTestCase):
    """Requests to a core that does not accept connections."""

    def setUp(self) -> None:
        clock: Any = MemoryReactorClock()
        self.clock = clock
        self.live = LiveUsers(clock, ApiAddress(1, "secret", None, 2), [TAG])

    def test_a_request_that_is_cancelled(self) -> None:
        """It fails with `CancelledError`, not with an error of the connection."""
        asked = Deferred.fromCoroutine(self.live.listed(TAG))
        asked.cancel()
        self.failureResultOf(asked, CancelledError)

    def test_a_request_that_is_not_answered(self) -> None:
        asked = Deferred.fromCoroutine(self.live.listed(TAG))
        self.clock.advance(DEADLINE)
        self.failureResultOf(asked, ApiFailed)

    def test_a_request_without_time(self) -> None:
        """No request is sent."""
        self.failureResultOf(Deferred.fromCoroutine(self.live.shut_out(TAG, "anna", 0.0)), ApiFailed)
        assert not self.clock.tcpClients


def test_parsing_counters() -> None:
    """Only users who carried something are in the result, whatever characters their names have."""
    row = '{"username":"%s","downlinkBytes":%d,"uplinkBytes":%d,"downlinkPackets":0}'
    rows = ",".join([row % ("a", 0, 0), row % (r"q\"u\u003co,te\\", 5, 7), row % ("c", 0, 1)])
    assert carried(f'{{"downlinkBytes":9,"uplinkBytes":9,"users":[{rows}]}}'.encode()) == {
        'q"u<o,te\\': (7, 5),
        "c": (1, 0),
    }


def _key() -> str:
    return base64.b64encode(secrets.token_bytes(16)).decode()
