"""The driver of sing-box on a real core: what is refused, what somebody else did, and what is too much to do live."""

from __future__ import annotations

import base64
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.trial.unittest import TestCase

from drivers.channel import ApiFailed
from drivers.sing_box import generation
from drivers.sing_box.accounts import stranger
from drivers.sing_box.driver import SingBox
from drivers.sing_box.fronts import Pair
from drivers.sing_box.generation import SingBoxGeneration
from drivers.sing_box.live import LiveUsers, carried
from node.aio import Aio
from node.backend.roster import Roster
from node.contract.accounts import Change
from node.contract.driver import Generation, Host
from node.errors import CoreFailed
from node.logs import LogRing
from tests.harness.sing_box import BUILDS, VLESS, Door, config, find_sing_box, shadowsocks_2022
from tests.harness.users import TestUser

TAG = "shadowsocks-2022"


class DriverTests(TestCase):
    """The build without counters is the same here."""

    async def setUp(self) -> None:  # type: ignore[override]
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        aio = Aio(IReactorFromThreads(reactor))
        aio.startService()
        self.addCleanup(aio.stopService)
        path = {"SING_BOX_EXECUTABLE_PATH": str(find_sing_box(next(iter(BUILDS))))}
        self.driver = SingBox(Host(reactor, aio, LogRing(reactor, 1000), Path(temporary.name), path))
        self.door, other = Door(shadowsocks_2022()), Door(VLESS)
        plan = await self.driver.prepare(config(self.door.inbounds + other.inbounds), frozenset())
        await self.driver.check(plan)
        people = [self.door.user(TestUser.new(name)) for name in ("Anna", "bert")]
        self.roster, refused = Roster.of(people, plan.tags, plan.account)
        assert not refused
        self.core: SingBoxGeneration = await self.driver.launch(plan, self.roster.target, 8)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.core.stop()))
        assert self.core._live is not None
        self.live: LiveUsers = self.core._live

    async def test_a_refused_user_leaves_no_trace(self) -> None:
        """A credential that the core cannot use: he is refused by name, others come and go as before."""
        before = dict(await self.live.listed(TAG))
        bad, good = stranger("Bad", "no key"), stranger("good", _key())
        changes = [Change(TAG, "bad", bad), Change(TAG, "good", good)]
        same, refused = await self.driver.apply(self.core, changes, never)
        assert same is self.core
        [refusal] = refused
        assert refusal.email == "Bad" and "decode psk" in refusal.reason
        assert (await self.live.listed(TAG)).keys() == before.keys() | {"good"}
        assert self.core.accounts[TAG].keys() == {"anna", "bert", "good"}
        # One whom the core knows already.
        [refusal] = (await self.driver.apply(self.core, [Change(TAG, "good", stranger("good", "no key"))], never))[1]
        assert refusal.email == "good"
        assert await self.live.listed(TAG) == before
        assert self.core.accounts[TAG].keys() == {"anna", "bert"}
        assert not (await self.driver.apply(self.core, [Change(TAG, "good", good)], never))[1]
        assert await self.core.audit() == 0

    async def test_what_somebody_else_did(self) -> None:
        """A user who was added, changed or taken away behind the node's back is seen, and put right."""
        assert await self.core.audit() == 0
        await self.live.let_in(TAG, "stranger", _key())
        await self.live.let_in(TAG, "Anna", _key())
        await self.live.shut_out(TAG, "bert")
        assert await self.core.audit() == 3
        wanted = [Change(TAG, key, self.roster.target[TAG].get(key)) for key in ("anna", "bert", "stranger")]
        assert not (await self.driver.apply(self.core, wanted, never))[1]
        assert await self.core.audit() == 0
        assert self.core.accounts[TAG] == self.roster.target[TAG]
        assert (await self.live.listed(TAG)).keys() == {"Anna", "bert"}

    async def test_another_spelling(self) -> None:
        """The core keeps the spelling that it has, and its list is taken for what it is."""
        anna = self.roster.target[TAG]["anna"]
        before = dict(await self.live.listed(TAG))
        for spelling in (b"ANNA", b"anna"):
            change = Change(TAG, "anna", anna.replace(b"Anna", spelling))
            assert self.core.free([change]) == [change]
            assert await self.driver.apply(self.core, [change], never) == (self.core, [])
            assert self.core.accounts[TAG]["anna"] == change.packed
        assert await self.live.listed(TAG) == before
        assert await self.core.audit() == 0
        await self.live.shut_out(TAG, "Anna")
        assert await self.core.audit() == 1
        await self.driver.apply(self.core, [change], never)
        assert await self.live.listed(TAG) == before
        # With another credential too.
        await self.driver.apply(self.core, [Change(TAG, "anna", stranger("aNNa", _key()))], never)
        assert (await self.live.listed(TAG)).keys() == before.keys()
        assert await self.core.audit() == 0

    async def test_removed_and_as_before(self) -> None:
        """Who comes back with the credential that he had at the start is let in again."""
        [anna] = [Change(TAG, "anna", self.roster.target[TAG]["anna"])]
        await self.driver.apply(self.core, [anna._replace(packed=None)], never)
        assert (await self.live.listed(TAG)).keys() == {"bert"}
        await self.driver.apply(self.core, [anna], never)
        assert (await self.live.listed(TAG)).keys() == {"Anna", "bert"}

    async def test_too_many_at_once(self) -> None:
        """They come with a new core, which is in force sooner; who goes goes at once all the same."""
        ended = []

        async def end(core: Generation) -> None:
            ended.append(core)
            await core.stop()

        changes = [Change(TAG, "new", stranger("new", _key())), Change(TAG, "bert", None)]
        with mock.patch.object(generation, "LIVE_SECONDS", 0.0):
            assert self.core.free(changes) == changes[1:]
            newest, refused = await self.driver.apply(self.core, changes, end)
        assert (ended, refused) == ([self.core], [])
        self.core = newest
        assert newest.accounts[TAG].keys() == {"anna", "new"}
        assert await newest.audit() == 0

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
            await self.driver.apply(self.core, [change], never)
        assert self.core.accounts[TAG]["anna"] == change.packed
        assert not api._barred

    async def test_who_stays_because_nothing_could_be_checked(self) -> None:
        """A removal that takes a new core and does not come to it is no success."""
        leaving = [Change(TAG, "anna", None), Change(TAG, "nobody", None)]
        with mock.patch.object(self.driver, "_run", side_effect=CoreFailed("killed")):
            same, refused = await self.driver.bring_in(self.core, leaving, never)
        assert same is self.core
        assert [(refusal.email, refusal.reason) for refusal in refused] == [("Anna", f"{TAG}: killed")]

    async def test_who_leaves_is_out_of_a_core_that_is_run_again(self) -> None:
        """Users with whom no core comes up do not bring back who leaves together with them."""
        launch, asked = self.driver.launch, [0]

        async def fails_the_first_time(*arguments: Any) -> SingBoxGeneration:
            asked[0] += 1
            if asked[0] == 1:
                raise CoreFailed("killed")
            return await launch(*arguments)

        async def end(core: Generation) -> None:
            await core.stop()

        changes = [Change(TAG, "anna", None), Change(TAG, "new", stranger("New", _key()))]
        with mock.patch.object(self.driver, "launch", fails_the_first_time):
            self.core, refused = await self.driver.bring_in(self.core, changes, end)
        self.flushLoggedErrors()
        assert [refusal.email for refusal in refused] == ["New"]
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


async def never(_: Generation) -> None:
    """No other core is needed."""
    raise AssertionError


def _key() -> str:
    return base64.b64encode(secrets.token_bytes(16)).decode()
