"""Reading the counters of a few names on the real sing-box: the same values as reading all."""

from __future__ import annotations

from unittest import mock

from twisted.internet.threads import deferToThread

from drivers.sing_box.generation import SingBoxGeneration
from node.base.errors import CoreFailed
from node.contract.accounts import Change
from node.contract.counters import Reading, Scope, Seen
from scripts.staging import transfer
from scripts.staging.sing_box import VLESS, Door, shadowsocks_2022
from scripts.staging.users import TestUser
from tests.harness.sing_box_run import SingBoxRun, both

ANNA, SLASHED, LATE = (TestUser.new(name) for name in ("Anna@X", "a/b", "Late/r"))
USERS = [(Scope.USER, name) for name in ("anna@x", "a/b", "late/R")]
UP, DOWN = 30_000, 50_000


class CounterTests(SingBoxRun):
    """With v2ray_api, which counts the users of the core's start; Shadowsocks counts those added later."""

    async def test_as_among_all(self) -> None:
        """On several inbounds, live and not, with any characters or case in the name, and for users added later."""
        live, other = Door(shadowsocks_2022()), Door(VLESS)
        core = await self.launched([live, other], [both(ANNA, live, other), both(SLASHED, live, other)])
        await self.let_in(core, live)
        routes = [(door, person) for person in (ANNA, SLASHED) for door in (live, other)] + [(live, LATE)]
        ports = await self.clients(*((door, person, "127.0.0.1") for door, person in routes))
        for (_, person), port in zip(routes, ports, strict=True):
            await self.use(port, 1 + (person is SLASHED))
        names = [*USERS, (Scope.INBOUND, other.way.name), (Scope.OUTBOUND, "direct")]

        async def told() -> bool:
            some, every = await core.some_counters(names), await core.counters()
            return bool(some) and all(every[name] == value for name, value in some.items()) and whole(some)

        def whole(some: Reading) -> bool:
            found = {name: some.get(f"user>>>{name}>>>traffic>>>downlink", 0) // DOWN for name in ("Anna@X", "a/b")}
            late = some.get("user>>>Late/r>>>traffic>>>downlink", 0) // DOWN
            return (found, late) == ({"Anna@X": 2, "a/b": 4}, 1)

        await self.until(told)
        (one,) = {name.split(">>>")[1] for name in await core.some_counters(USERS[:1])}
        assert one == "Anna@X", "of others nothing is asked"

    async def test_whom_nobody_knows(self) -> None:
        """For an unknown user all counters are read: a removed user may have been counted under any spelling."""
        door = Door(VLESS)
        core = await self.launched([door], [door.user(ANNA)])
        every = await core.counters()
        for names in ([(Scope.USER, "gone")], [(Scope.INBOUND, "gone")], [*USERS[:1], (Scope.USER, "gone")]):
            assert (await core.some_counters(names)).keys() >= every.keys()

    async def test_only_changes(self) -> None:
        """A reading after another one has the counters that have changed; those that it leaves out are as they were."""
        for live in (False, True):
            doors = [Door(VLESS), *([Door(shadowsocks_2022())] if live else [])]
            core = await self.launched(doors, [both(person, *doors) for person in (ANNA, SLASHED)])
            ports = await self.clients(*((door, person, "127.0.0.1") for person in (ANNA, SLASHED) for door in doors))
            seen, found = Seen(), dict[str, int]()
            for port in (*ports, *ports):
                await self.use(port, 1)
                found |= await core.counters(seen)

            async def the_same(core: SingBoxGeneration = core, seen: Seen = seen, found: Reading = found) -> bool:
                every = await core.counters()
                return every == {**found, **(await core.counters(seen))} and len(every) > len(USERS)

            await self.until(the_same)
            if self.build == "built":
                assert bool(await core.counters(seen)) == live, "where counters are added up all are read"
            await core.stop()

    async def test_nothing_carried(self) -> None:
        """An inbound without traffic has rows; a user without traffic has none."""
        door = Door(VLESS)
        core = await self.launched([door], [door.user(ANNA)])
        expected = {f"inbound>>>vless>>>traffic>>>{way}": 0 for way in ("uplink", "downlink")}
        assert await core.some_counters([(Scope.INBOUND, "vless"), USERS[0]]) == expected

    async def test_a_core_that_is_gone(self) -> None:
        live = Door(shadowsocks_2022())
        core = await self.launched([live], [live.user(ANNA)])
        core.kill()
        await core.when_exited()
        with self.assertRaises(CoreFailed):
            await core.some_counters(USERS[:1])

    async def let_in(self, core: SingBoxGeneration, live: Door) -> None:
        account = core.plan.account(live.way.name, live.user(LATE))
        assert account is not None
        assert await core.apply([Change(live.way.name, "late/r", account.packed)]) == ([], [])

    async def use(self, port: int, times: int) -> None:
        for _ in range(times):
            link = await self.connected(port)
            await deferToThread(transfer.upload, link, UP)
            await deferToThread(transfer.download, link, DOWN)
            link.close()


class StreamTests(CounterTests):
    """With the stream of connections, for the build without counters."""

    build = "wheel"

    async def test_costs_nothing(self) -> None:
        """The core is not asked."""
        door = Door(VLESS)
        core = await self.launched([door], [door.user(ANNA)])
        with mock.patch.object(core._api._daemon, "begin", side_effect=AssertionError("asked")):
            assert await core.some_counters(USERS[:1]) == {}

    async def test_a_core_that_was_killed(self) -> None:
        """The bytes reported before are known."""
        door = Door(VLESS)
        core = await self.launched([door], [door.user(ANNA)])
        [port] = await self.clients((door, ANNA, "127.0.0.1"))
        link = await self.connected(port)
        await deferToThread(transfer.download, link, DOWN)
        name = "user>>>Anna@X>>>traffic>>>downlink"

        async def heard() -> bool:
            return (await core.some_counters(USERS[:1])).get(name, 0) >= DOWN

        await self.until(heard)
        core.kill()
        await core.when_exited()
        assert (await core.counters())[name] >= DOWN
        assert (await core.counters())["outbound>>>direct>>>traffic>>>downlink"] >= DOWN

    async def test_a_killed_core_tells_no_less(self) -> None:
        """Also for a user of a live inbound: if a counter decreased, its bytes would be booked twice."""
        doors = Door(shadowsocks_2022()), Door(VLESS)
        core = await self.launched(doors, [both(ANNA, *doors)])
        for port in await self.clients(*((door, ANNA, "127.0.0.1") for door in doors)):
            await self.use(port, 1)
        name = "user>>>Anna@X>>>traffic>>>downlink"

        async def counted() -> bool:
            return (await core.counters()).get(name, 0) >= 2 * DOWN

        await self.until(counted)
        before = await core.counters()
        core.kill()
        await core.when_exited()
        after = await core.counters()
        assert {counter: value for counter, value in before.items() if after.get(counter, 0) < value} == {}
