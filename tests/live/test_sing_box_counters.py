"""The counters of a few names, on the real sing-box: the same as among all, whoever counts them."""

from __future__ import annotations

from unittest import mock

from twisted.internet.threads import deferToThread

from drivers.sing_box.generation import SingBoxGeneration
from node.contract.accounts import Change
from node.contract.counters import Reading, Scope
from node.errors import CoreFailed
from scripts.staging import transfer
from scripts.staging.sing_box import VLESS, Door, shadowsocks_2022
from scripts.staging.users import TestUser
from tests.harness.sing_box_run import SingBoxRun, both

ANNA, SLASHED, LATE = (TestUser.new(name) for name in ("Anna@X", "a/b", "Late/r"))
USERS = [(Scope.USER, name) for name in ("anna@x", "a/b", "late/R")]
UP, DOWN = 30_000, 50_000


class CounterTests(SingBoxRun):
    """With v2ray_api, which knows the users of the start; those who come later Shadowsocks counts."""

    async def test_as_among_all(self) -> None:
        """By several inbounds, live and not, whatever is in the name, in another case, and come while it runs."""
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
        """All is read: a user who left may have been counted by any spelling."""
        door = Door(VLESS)
        core = await self.launched([door], [door.user(ANNA)])
        every = await core.counters()
        for names in ([(Scope.USER, "gone")], [(Scope.INBOUND, "gone")], [*USERS[:1], (Scope.USER, "gone")]):
            assert (await core.some_counters(names)).keys() >= every.keys()

    async def test_nothing_carried(self) -> None:
        """An inbound is told with nothing; a user is not."""
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
    """By the stream of connections, where the build has no counters."""

    build = "wheel"

    async def test_costs_nothing(self) -> None:
        """The core is not asked."""
        door = Door(VLESS)
        core = await self.launched([door], [door.user(ANNA)])
        with mock.patch.object(core._api._daemon, "_begin", side_effect=AssertionError("asked")):
            assert await core.some_counters(USERS[:1]) == {}
