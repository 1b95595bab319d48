"""The driver of sing-box on a real core: what is refused, what somebody else did, and what is too much to do live."""

from __future__ import annotations

import base64
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from drivers.channel import ApiFailed
from drivers.process.executable import Executable
from drivers.sing_box import generation
from drivers.sing_box.accounts import stranger
from drivers.sing_box.driver import SingBox
from drivers.sing_box.fronts import Pair
from drivers.sing_box.generation import SingBoxGeneration
from drivers.sing_box.live import LiveUsers, carried
from node.backend.roster import Roster
from node.contract.accounts import Accounts, Change
from node.contract.driver import Host
from node.errors import CoreFailed
from node.logs import LogRing
from scripts.staging.sing_box import BUILDS, VLESS, Door, config, find_sing_box, shadowsocks_2022
from scripts.staging.users import TestUser
from tests.harness.renewing import Renewing

pytestmark = pytest.mark.core

reactor: Any = installed

TAG = "shadowsocks-2022"


class DriverTests(TestCase):
    """The build without counters is the same here."""

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
        self.core: SingBoxGeneration = await plan.launch(self.roster.target, 8)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.core.stop()))
        assert self.core._live is not None
        self.live: LiveUsers = self.core._live

    async def test_a_refused_user_leaves_no_trace(self) -> None:
        """A credential that the core cannot use: he is refused by name, others come and go as before."""
        before = dict(await self.live.listed(TAG))
        bad, good = stranger("Bad", "no key"), stranger("good", _key())
        changes = [Change(TAG, "bad", bad), Change(TAG, "good", good)]
        [refusal], left = await self.core.apply(changes)
        assert not left
        assert refusal.email == "Bad" and "decode psk" in refusal.reason
        assert (await self.live.listed(TAG)).keys() == before.keys() | {"good"}
        assert self.core.accounts[TAG].keys() == {"anna", "bert", "good"}
        # One whom the core knows already.
        [refusal], _ = await self.core.apply([Change(TAG, "good", stranger("good", "no key"))])
        assert refusal.email == "good"
        assert await self.live.listed(TAG) == before
        assert self.core.accounts[TAG].keys() == {"anna", "bert"}
        assert await self.core.apply([Change(TAG, "good", good)]) == ([], [])
        assert await self.core.audit() == 0

    async def test_what_somebody_else_did(self) -> None:
        """A user who was added, changed or taken away behind the node's back is seen, and put right."""
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
        """The core keeps the spelling that it has, and its list is taken for what it is."""
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
        # With another credential too.
        await self.core.apply([Change(TAG, "anna", stranger("aNNa", _key()))])
        assert (await self.live.listed(TAG)).keys() == before.keys()
        assert await self.core.audit() == 0

    async def test_removed_and_as_before(self) -> None:
        """Who comes back with the credential that he had at the start is let in again."""
        [anna] = [Change(TAG, "anna", self.roster.target[TAG]["anna"])]
        await self.core.apply([anna._replace(packed=None)])
        assert (await self.live.listed(TAG)).keys() == {"bert"}
        await self.core.apply([anna])
        assert (await self.live.listed(TAG)).keys() == {"Anna", "bert"}

    async def test_too_many_at_once(self) -> None:
        """They come with a new core, which is in force sooner; who goes goes at once all the same."""
        first, runs = self.core, Renewing(reactor, self.driver, self.plan, self.core)
        changes = [Change(TAG, "new", stranger("new", _key())), Change(TAG, "bert", None)]
        with mock.patch.object(generation, "LIVE_SECONDS", 0.0):
            assert await self.core.apply(changes) == ([], changes[:1])
            assert self.core.accounts[TAG].keys() == {"anna"}
            assert await runs.apply(changes[:1]) == []
        assert runs.ended == [first]
        assert isinstance(runs.run, SingBoxGeneration)
        self.core = runs.run
        assert self.core.accounts[TAG].keys() == {"anna", "new"}
        assert await self.core.audit() == 0

    async def test_who_gets_in_is_let_in(self) -> None:
        """Also where the core did not list its connections just then: nobody would ask for him again."""
        api, asked = self.core._api, [0]
        bar = api.bar

        async def fails_the_second_time(pairs: Iterable[Pair]) -> None:
            await bar(pairs)
            asked[0] += 1
            if asked[0] == 2:
                raise ApiFailed("Deadline Exceeded")

        change = Change(TAG, "anna", stranger("Anna", _key()))
        with mock.patch.object(api, "bar", fails_the_second_time), self.assertRaises(CoreFailed):
            await self.core.apply([change])
        assert self.core.accounts[TAG]["anna"] == change.packed
        assert not api._barred

    async def test_who_comes_where_nothing_could_be_checked(self) -> None:
        """Nobody's connections end for them, and they are told."""
        runs = Renewing(reactor, self.driver, self.plan, self.core)
        with mock.patch.object(Executable, "run", side_effect=CoreFailed("killed")):
            [refusal] = await runs.renew([Change(TAG, "new", stranger("new", _key()))])
        assert (runs.run, runs.ended) == (self.core, [])
        assert refusal == ("new", f"{TAG}: killed")

    async def test_who_leaves_where_nothing_could_be_checked(self) -> None:
        """They are out."""
        runs = Renewing(reactor, self.driver, self.plan, self.core)
        with mock.patch.object(self.plan, "check", side_effect=CoreFailed("killed")):
            assert await runs.renew([Change(TAG, "anna", None), Change(TAG, "nobody", None)]) == []
        assert isinstance(runs.run, SingBoxGeneration)
        self.core = runs.run
        assert self.core.accounts[TAG].keys() == {"bert"}

    async def test_who_leaves_is_out_of_a_core_that_is_run_again(self) -> None:
        """Users with whom no core comes up do not bring back who leaves together with them."""
        launch, asked = self.plan.launch, [0]

        async def fails_the_first_time(target: Mapping[str, Accounts], seconds: float) -> SingBoxGeneration:
            asked[0] += 1
            if asked[0] == 1:
                raise CoreFailed("killed")
            return await launch(target, seconds)

        runs = Renewing(reactor, self.driver, self.plan, self.core)
        changes = [Change(TAG, "anna", None), Change(TAG, "new", stranger("New", _key()))]
        with mock.patch.object(self.plan, "launch", fails_the_first_time):
            refused = await runs.renew(changes)
        assert isinstance(runs.run, SingBoxGeneration)
        self.core = runs.run
        assert [refusal.email for refusal in refused] == ["new"]
        assert self.core.accounts[TAG].keys() == {"bert"}

    async def test_a_core_that_is_gone(self) -> None:
        """What it does not answer is refused, and not taken for confirmed."""
        self.core.kill()
        await self.core.when_exited()
        with self.assertRaises(ApiFailed):
            await self.live.let_in(TAG, "new", _key())


def test_what_was_carried() -> None:
    """Only who carried anything is in it, whatever is in his name."""
    row = '{"username":"%s","downlinkBytes":%d,"uplinkBytes":%d,"downlinkPackets":0}'
    rows = ",".join([row % ("a", 0, 0), row % (r"q\"u\u003co,te\\", 5, 7), row % ("c", 0, 1)])
    assert carried(f'{{"downlinkBytes":9,"uplinkBytes":9,"users":[{rows}]}}'.encode()) == {
        'q"u<o,te\\': (7, 5),
        "c": (1, 0),
    }


def _key() -> str:
    return base64.b64encode(secrets.token_bytes(16)).decode()
