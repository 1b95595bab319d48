"""Runs of sing-box that fail to start, are cancelled or crash leave nothing behind."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import psutil
from twisted.internet import reactor as installed
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from drivers.sing_box.api import Api
from drivers.sing_box.driver import SingBox
from drivers.sing_box.generation import SingBoxGeneration
from node.backend.roster import Roster
from node.base.errors import CoreFailed
from node.base.logs import LogRing
from node.contract.accounts import Accounts, Change
from node.contract.driver import Generation, Host
from node.http2.client import ClientConnection
from scripts.staging import certs
from scripts.staging.node import LOCAL_TARGETS
from scripts.staging.sing_box import BUILDS, SERVER_NAME, VLESS, Door, config, find_sing_box, shadowsocks_2022, ways
from scripts.staging.users import TestUser
from tests.harness.renewing import Renewing

reactor: Any = installed

T = TypeVar("T")


class RunTests(TestCase):
    """On both builds: they differ in what follows a run's connections."""

    build = "built"

    async def setUp(self) -> None:  # type: ignore[override]
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.directory = Path(temporary.name)
        path = {
            "SING_BOX_EXECUTABLE_PATH": str(find_sing_box(self.build)),
            "CORE_PATHS": temporary.name,
            **LOCAL_TARGETS,
        }
        self.others = psutil.Process().children(True)
        self.driver = SingBox(Host(reactor, LogRing(reactor, 1000), self.directory, path))

    async def launched(self, *doors: Door) -> SingBoxGeneration:
        """A core with Anna in all of these."""
        self.plan = plan = await self.driver.prepare(
            config([one for door in doors for one in door.inbounds]), frozenset()
        )
        self.roster, refused = Roster.of([door.user(TestUser.new("anna")) for door in doors], plan.tags, plan.account)
        assert not refused
        core = await plan.launch(self.roster.target, 8)
        self.addCleanup(lambda: Deferred.fromCoroutine(core.stop()))
        return core

    def runs(self, core: SingBoxGeneration, end: Callable[[Generation], Awaitable[None]] | None = None) -> Renewing:
        return Renewing(reactor, self.driver, self.plan, core, end)

    async def newcomer(self, core: SingBoxGeneration, door: Door) -> Change:
        account = core.plan.account(door.way.name, door.user(TestUser.new("bert")))
        assert account is not None
        return Change(door.way.name, "bert", account.packed)

    async def calls(self) -> int:
        """Open connections to the API of any core: without one nothing follows a run."""
        return sum(isinstance(getattr(reader, "protocol", None), ClientConnection) for reader in reactor.getReaders())

    async def cores(self) -> list[psutil.Process]:
        children = [one for one in psutil.Process().children(True) if one not in self.others]
        return [one for one in children if one.status() != psutil.STATUS_ZOMBIE]

    async def test_a_start_that_is_cancelled_leaves_no_core(self) -> None:
        """While it waits for the core's reply; it waits for nothing after that."""
        door = Door(VLESS)
        core = await self.launched(door)
        await core.stop()
        reached = list[object]()

        def held(*_: object) -> Deferred[bool]:
            reached.append(None)
            return Deferred()

        with mock.patch.object(Api, "ready", held):
            launching = Deferred.fromCoroutine(self.plan.launch(self.roster.target, 8))
            await until(lambda: bool(reached))
            launching.cancel()
            with self.assertRaises(CancelledError):
                await launching
        assert not await self.cores()
        assert not await self.calls()

    async def test_a_change_for_which_no_descriptor_is_left(self) -> None:
        """The old core has ended and no other can start: this is reported as such, and retried."""
        core = await self.launched(door := Door(VLESS))
        none_left = mock.patch("os.memfd_create", side_effect=OSError(errno.EMFILE, "Too many open files"))
        self.addCleanup(none_left.stop)

        async def end(_: Generation) -> None:
            none_left.start()

        with self.assertRaises(CoreFailed) as caught:
            await self.runs(core, end).apply([await self.newcomer(core, door)])
        assert "Too many open files" in str(caught.exception)
        assert not await self.cores()

    async def test_a_change_whose_configuration_is_refused_too_late(self) -> None:
        """A certificate vanishes between check and start: the missing core is not the caller's fault."""
        certificate = certs.make(self.directory, [SERVER_NAME])
        trojan = next(way for way in ways(certificate, 1) if way.name == "trojan")
        core = await self.launched(door := Door(trojan))

        async def end(_: Generation) -> None:
            certificate.certificate.unlink()

        with self.assertRaises(CoreFailed) as caught:
            await self.runs(core, end).apply([await self.newcomer(core, door)])
        assert "no such file" in str(caught.exception)
        assert not await self.cores()

    async def test_a_core_that_dies_while_a_change_is_checked(self) -> None:
        """No other core is started for the change: the supervisor does that, and would end this one."""
        core = await self.launched(door := Door(VLESS))
        newcomer = await self.newcomer(core, door)
        check, runs = self.plan.check, self.runs(core)

        async def checked(target: Mapping[str, Accounts]) -> None:
            await check(target)
            core.kill()
            await core.when_exited()

        with mock.patch.object(self.plan, "check", checked):
            await runs.apply([newcomer])
        assert (runs.run, runs.ended) == (core, [])
        assert not await self.cores()

    async def test_an_end_that_fails(self) -> None:
        """The core ends all the same, and another one runs, without the users to be added, who are reported."""
        core = await self.launched(door := Door(VLESS))

        async def end(_: Generation) -> None:
            raise ValueError

        runs = self.runs(core, end)
        [refusal] = await runs.apply([await self.newcomer(core, door)])
        self.flushLoggedErrors(ValueError)
        assert refusal.email == "bert"
        assert not core.alive
        await runs.run.stop()
        assert not await self.cores()

    async def test_crashes_leave_nothing(self) -> None:
        """Neither followers of a run nor its connections."""
        core = await self.launched(Door(VLESS), Door(shadowsocks_2022()))
        for _ in range(3):
            await core.apply([Change("vless", "anna", None)])
            await core.counters()
            core.kill()
            await core.when_exited()
            await until_none(self.calls)
            core = await self.plan.launch(self.roster.target, 8)
        await core.stop()
        await until_none(self.calls)

    async def test_nothing_begins_for_a_run_that_is_over(self) -> None:
        """Calls to it fail."""
        core = await self.launched(Door(VLESS))
        await core.stop()
        with self.assertRaises(CoreFailed):
            await core.apply([Change("vless", "anna", None)])
        assert not await core.answers(1)
        assert not await self.calls()


class WithoutCountersTests(RunTests):
    """The same on the other build."""

    build = "wheel"


assert set(BUILDS) == {RunTests.build, WithoutCountersTests.build}


async def until(condition: Callable[[], bool]) -> None:
    deadline = reactor.seconds() + 10
    while not condition():
        assert reactor.seconds() < deadline
        await deferLater(reactor, 0.01)


async def until_none(count: Any) -> None:
    deadline = reactor.seconds() + 3
    while left := await count():
        assert reactor.seconds() < deadline, f"{left} connections are left"
        await deferLater(reactor, 0.01)
