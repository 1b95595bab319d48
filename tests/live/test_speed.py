"""Speed limits on real cores: enforced on the clients' sockets, shared by a user's active connections."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from drivers.sockets.connections import disconnect
from drivers.sockets.sock_diag import listeners
from drivers.xray.driver import Xray
from drivers.xray.generation import XrayGeneration
from node.backend.roster import Roster
from node.base.logs import LogRing
from node.contract.connections import Address, Paces
from node.contract.driver import Generation, Host
from node.contract.generations import Generations
from node.limits.connections import Connections
from node.limits.limits import NONE, Limit
from node.limits.pacer import Pacer
from scripts.staging import plain_vless
from scripts.staging.backend import user
from scripts.staging.core import Json, find_xray, server_config
from scripts.staging.inbounds import Kind
from scripts.staging.node import LOCAL_TARGETS
from scripts.staging.plain_vless import Download
from scripts.staging.ports import free_port
from scripts.staging.protocols import vless
from scripts.staging.sing_box import VLESS, Door
from scripts.staging.transports import raw
from scripts.staging.users import TestUser
from tests.harness.limited import Given
from tests.harness.sing_box_run import SingBoxRun

reactor: Any = installed
KIND = Kind("vless-raw", vless(), raw())
ANNA, BERT = TestUser.new("anna@test"), TestUser.new("bert@test")
# Clients may multiplex their connections.
MUX = {"multiplex": {"enabled": True, "protocol": "h2mux", "max_connections": 1}}
MUXED = replace(VLESS, server={"multiplex": {"enabled": True}}, client=MUX)
MBYTE = 1_000_000
SLOW, SLOWER = Limit(down=16_000_000), Limit(down=8_000_000)
# Tolerance for a measurement of a second and a half on a busy machine.
ABOUT = 0.2


def nobody(key: str, address: Address) -> None:
    """Ignore whose connection it is."""


class SpeedTests(SingBoxRun):
    """The tests set the limits."""

    in_turn = True

    async def setUp(self) -> None:  # type: ignore[override]
        await super().setUp()
        given: Any = Given()
        self.limits: dict[str, Limit] = given.limits
        # The inbound of the core's clients.
        self.door: Door | None = None
        self.generations = Generations()
        self.pacer = Pacer(reactor, Connections(self.generations, given))
        self.port = free_port()
        await self.started(self.port)
        self.pacer.start()
        self.addCleanup(self.pacer.stop)

    async def begun(self, port: int) -> Generation:
        """A core with both users."""
        self.door = door = Door(MUXED, port)
        return await self.launched([door], [door.user(ANNA), door.user(BERT)])

    async def started(self, port: int) -> None:
        """The same, with speed limits."""
        run = await self.begun(port)
        assert isinstance(run, Paces) and not run.unseen and not run.unpaced
        run.arrived = self.pacer.arrived
        self.told: dict[str, int | None] = {}
        tell = run.pace_new

        async def told(rates: Mapping[str, int | None]) -> bool:
            assert await tell(rates)
            self.told |= rates
            return True

        self.patch(run, "pace_new", told)
        self.generations.adopt(run)

    async def downloads(self, person: TestUser, count: int = 1) -> list[Download]:
        """Start so many downloads."""
        found = []
        for _ in range(count):
            link = await deferToThread(plain_vless.connect, self.port, person.uuid, self.echo)
            found.append(Download(link))
            self.addCleanup(deferToThread, found[-1].close)
        return found

    async def speed(self, some: Sequence[Download], seconds: float = 1.5) -> float:
        """The sum of their speeds, in bytes a second."""
        began, before = reactor.seconds(), sum(one.received for one in some)
        await deferLater(reactor, seconds)
        took = reactor.seconds() - began
        return float((sum(one.received for one in some) - before) / took)

    async def until_speed(self, some: Sequence[Download], right: Callable[[float], bool]) -> None:
        async def is_right() -> bool:
            self.last = await self.speed(some)
            return right(self.last)

        await self.until(is_right, 15)

    async def until_about(self, wanted: float, *some: Download) -> None:
        await self.until_speed(some, lambda speed: abs(speed - wanted) < ABOUT * wanted)

    def say(self, person: TestUser, limit: Limit) -> None:
        self.limits[person.email] = limit
        self.pacer.changed([person.email])

    @pytest.mark.slow
    async def test_connections_share_a_speed_that_changes_and_a_neighbour_has_none(self) -> None:
        self.say(ANNA, SLOW)
        hers, his = await self.downloads(ANNA, 4), await self.downloads(BERT)
        await self.until_about(2 * MBYTE, *hers)
        assert await self.speed(his) > 20 * MBYTE
        self.say(ANNA, SLOWER)
        await self.until_about(MBYTE, *hers)
        # The remaining ones share what the others leave.
        for one in hers[1:]:
            await deferToThread(one.close)
        await self.until_about(MBYTE, hers[0])
        self.say(ANNA, NONE)
        await self.until_speed(hers[:1], lambda speed: speed > 20 * MBYTE)
        assert self.pacer.warnings == []

    @pytest.mark.slow
    async def test_it_holds_for_each_connection_from_one_port(self) -> None:
        """A client chooses its source port, and may reuse it before the node looks at the sockets."""
        self.say(ANNA, SLOW)
        own = free_port()
        for _ in range(3):
            link = await deferToThread(plain_vless.connect, self.port, ANNA.uuid, self.echo, "127.9.8.7", own)
            hers = Download(link)
            await self.until_about(2 * MBYTE, hers)
            disconnect(link.fileno())
            await deferToThread(hers.close)

    async def test_it_holds_from_the_first_byte_where_all_have_a_speed(self) -> None:
        run = await self.all_limited()
        # The core's reports of connections are ignored.
        run.arrived = nobody
        (hers,) = await self.downloads(ANNA)
        began = reactor.seconds()
        assert await self.speed([hers], 1.0) < 2 * MBYTE * (1 + ABOUT)
        assert hers.received < 2 * MBYTE * (reactor.seconds() - began + 1)
        self.say(BERT, NONE)
        run.arrived = self.pacer.arrived
        (his,) = await self.downloads(BERT)
        await self.until_speed([his], lambda speed: speed > 20 * MBYTE)

    async def all_limited(self) -> Paces:
        """Both users have a limit, which the listener carries."""
        self.limits |= {ANNA.email: SLOW, BERT.email: SLOWER}
        self.pacer.changed(self.limits)
        await self.until(self.settled)
        return cast(Paces, self.generations.current)

    async def settled(self) -> bool:
        """Wait until the listeners carry it."""
        return set(self.told.values()) == {SLOW.down // 8}

    async def test_a_connection_that_carries_nothing_loses_a_speed_that_is_none_any_more(self) -> None:
        """A multiplexing client keeps an idle connection open."""
        assert self.door is not None
        self.say(ANNA, SLOW)
        (port,) = await self.clients((self.door, ANNA, "127.0.0.2"))
        hers = Download(await self.connected(port))
        await self.until_about(2 * MBYTE, hers)
        await deferToThread(hers.close)
        run = cast(Paces, self.generations.current)

        async def gone() -> bool:
            return not await run.look([ANNA.email]) and not self.pacer._down.held

        await self.until(gone)
        self.say(ANNA, NONE)
        again = Download(await self.connected(port))
        self.addCleanup(deferToThread, again.close)
        await self.until_speed([again], lambda speed: speed > 20 * MBYTE)


class XraySpeedTests(SpeedTests):
    # Here a connection belongs to one user for its whole life.
    test_a_connection_that_carries_nothing_loses_a_speed_that_is_none_any_more = None  # type: ignore[assignment]

    async def begun(self, port: int) -> Generation:
        return await self.launched_xray([KIND.inbound(port, "in")], dict.fromkeys((ANNA, BERT), "in"))

    async def launched_xray(self, inbounds: Sequence[Json], places: Mapping[TestUser, str]) -> Generation:
        """A core with these users, each on one inbound."""
        settings = {"XRAY_EXECUTABLE_PATH": str(find_xray()), "CORE_PATHS": str(self.directory), **LOCAL_TARGETS}
        host = Host(reactor, LogRing(reactor, 1000), self.directory, settings)
        plan = await Xray(host).prepare(json.dumps(server_config(inbounds)), frozenset())
        users = [user(person, {tag: KIND}) for person, tag in places.items()]
        roster, refused = Roster.of(users, plan.tags, plan.account)
        assert not refused
        run = await plan.launch(roster.target, 8)
        self.addCleanup(lambda: Deferred.fromCoroutine(run.stop()))
        return run

    async def test_who_is_led_on_to_another_inbound_has_not_the_speed_of_those_who_are_not(self) -> None:
        self.port, inner = free_port(), free_port()
        front = KIND.inbound(self.port, "front")
        front["settings"]["fallbacks"] = [{"dest": inner}]
        run = await self.launched_xray([front, KIND.inbound(inner, "in")], {ANNA: "front", BERT: "in"})
        assert isinstance(run, Paces)
        self.limits[ANNA.email] = SLOW
        run.arrived = self.pacer.arrived
        told: dict[str, int | None] = {}
        tell = run.pace_new

        async def pace_new(rates: Mapping[str, int | None]) -> bool:
            assert await tell(rates)
            told.update(rates)
            return True

        self.patch(run, "pace_new", pace_new)
        self.generations.adopt(run)

        async def settled() -> bool:
            return told == {"front": SLOW.down // 8}

        await self.until(settled)
        his = await self.downloads(BERT)
        await self.until_speed(his, lambda speed: speed > 20 * MBYTE)

    async def test_a_listener_that_is_swapped_carries_it_again(self) -> None:
        await self.all_limited()
        run = self.generations.current
        assert isinstance(run, XrayGeneration)
        (place,) = self.sockets()
        await run._users._swap("in", [])
        (other,) = self.sockets()
        assert other != place
        # As after a change of users.
        await run.apply([])
        run.arrived = nobody
        assert await self.speed(await self.downloads(ANNA)) < 2 * MBYTE * (1 + ABOUT)

    def sockets(self) -> list[int]:
        """The inodes of listening sockets."""
        return listeners([range(self.port, self.port + 1)])[self.port]
