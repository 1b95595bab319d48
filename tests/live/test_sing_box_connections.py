"""Users' live connections on the real sing-box: whose they are, from where, and ending some of them."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from twisted.internet.threads import deferToThread

from drivers.sing_box.generation import SingBoxGeneration
from node.contract.accounts import Change
from node.contract.connections import Address, Live
from scripts.staging import certs, transfer
from scripts.staging.cover import CoverServer
from scripts.staging.sing_box import SERVER_NAME, VLESS, Door, Way, shadowsocks, shadowsocks_2022, ways
from scripts.staging.users import TestUser
from tests.harness.sing_box_run import SingBoxRun, both

ANNA, BERT = TestUser.new("Anna@X"), TestUser.new("bert")
HERE, THERE = "127.0.0.2", "127.0.0.3"
# Those with which several connections of a client are one to the kernel, or none.
MUX = {"multiplex": {"enabled": True, "protocol": "h2mux", "max_connections": 1}}


def address(text: str) -> Address:
    return socket.inet_aton(text)


async def lives(link: socket.socket) -> bool:
    """Whether there is a way there and back."""
    try:
        await deferToThread(transfer.small_echo, link, b"am I in?")
    except OSError:
        return False
    return True


class ConnectionTests(SingBoxRun):
    """Which build it is matters little: one has its connections followed anyway."""

    async def setUp(self) -> None:  # type: ignore[override]
        await super().setUp()
        self.heard: list[tuple[str, Address]] = []
        cover = CoverServer(self.directory)
        await deferToThread(cover.__enter__)
        self.addCleanup(deferToThread, cover.__exit__, None, None, None)
        certificate = certs.make(self.directory, [SERVER_NAME])
        self.ways = {way.name: way for way in ways(certificate, cover.port)}

    async def seen(self, core: SingBoxGeneration, keys: Collection[str], count: int) -> list[Live]:
        """What is told of these users once it is so much."""

        async def told() -> list[Live]:
            found = await core.look(keys)
            return found if len(found) == count else []

        return await self.until(told)

    async def test_by_address(self) -> None:
        """One address of a user ends, and nothing else: not the same user at another, not another user there."""
        for way in self.some_ways():
            with self.subTest(way=way.name):
                await self.by_address(Door(way))

    def some_ways(self) -> Iterable[Way]:
        tls = [self.ways[name] for name in ("anytls", "shadowtls", "hysteria2", "tuic")]
        muxed = Way("muxed", VLESS.type, VLESS.credentials, VLESS.proxy, {"multiplex": {"enabled": True}}, MUX)
        return [VLESS, shadowsocks(), shadowsocks_2022(), muxed, *tls]

    async def by_address(self, door: Door) -> None:
        core = await self.launched([door], [door.user(ANNA), door.user(BERT)])
        self.heard.clear()
        core.arrived = lambda key, address: self.heard.append((key, address))
        ports = await self.clients((door, ANNA, HERE), (door, ANNA, THERE), (door, BERT, HERE))
        links = [await self.connected(port) for port in ports for _ in range(2)]
        found = await self.settled(core, links)
        assert {(live.key, live.address) for live in found} == {
            *((key, address(HERE)) for key in ("anna@x", "bert")),
            ("anna@x", address(THERE)),
        }
        # The core tells of connections beside what it carries, so it may be heard of one after its first bytes.
        await self.until(lambda: self.has_heard({(live.key, live.address): 2 for live in found}))
        assert all(core.may_carry(key) for key in ("anna@x", "bert")) and not core.may_carry("c")
        wanted = [live for live in found if (live.key, live.address) == ("anna@x", address(HERE))]
        assert await core.end(wanted) == len(wanted)
        assert [await lives(link) for link in links] == [False, False, True, True, True, True]
        left = await self.seen(core, ["anna@x", "bert"], len(found) - len(wanted))
        assert await core.end(wanted) == 0
        assert {(live.key, live.address) for live in left} == {("anna@x", address(THERE)), ("bert", address(HERE))}
        # The client comes again, which is heard.
        self.heard.clear()
        again = await self.connected(ports[0])
        await self.until(lambda: self.has_heard({("anna@x", address(HERE)): 1}))
        assert await lives(again)
        assert core.cut == 0, "nobody was removed"
        for link in (*links, again):
            link.close()
        await self.until(lambda: self.gone(core))
        await core.stop()

    async def has_heard(self, wanted: Mapping[tuple[str, Address], int]) -> bool:
        """Whether it was told of so many connections; more are none that there were."""
        heard = Counter(self.heard)
        assert heard <= Counter(wanted), heard
        return heard == Counter(wanted)

    async def gone(self, core: SingBoxGeneration) -> bool:
        names = ["anna@x", "bert"]
        return not await core.look(names) and not any(map(core.may_carry, names))

    async def settled(self, core: SingBoxGeneration, links: list[socket.socket]) -> list[Live]:
        """Who is there, once the bytes of all are told."""

        async def told() -> list[Live]:
            found = await core.look(["anna@x", "bert"])
            return found if all(live.sent and live.received for live in found) else []

        return await self.until(told)

    async def test_silence(self) -> None:
        """Who moves bytes is less silent than who does not."""
        for way in (VLESS, self.ways["hysteria2"]):
            door = Door(way)
            core = await self.launched([door], [door.user(ANNA)])
            ports = await self.clients((door, ANNA, HERE), (door, ANNA, THERE))
            core.may_carry("somebody")
            quiet, busy = [await self.connected(port) for port in ports]

            async def told(busy: socket.socket = busy, core: SingBoxGeneration = core) -> bool:
                assert await lives(busy)
                silent = {live.address: live.silent for live in await core.look(["anna@x"])}
                return silent[address(HERE)] > 1.5 and silent[address(THERE)] < 0.5

            await self.until(told)
            assert await lives(quiet)
            await core.stop()

    async def test_what_the_kernel_knows(self) -> None:
        """Of a client by TCP how far away it is, and what it has confirmed: the protocol's own bytes are in it."""
        for way in (VLESS, self.ways["trojan"]):
            door = Door(way)
            core = await self.launched([door], [door.user(ANNA)])
            (port,) = await self.clients((door, ANNA, HERE))
            link = await self.connected(port)
            await deferToThread(transfer.download, link, 1_000_000)

            async def told(core: SingBoxGeneration = core) -> bool:
                (live,) = await core.look(["anna@x"])
                return 0 < live.round_trip < 1 and live.sent > 1_000_000 > live.received > 0 and live.waiting == 0

            await self.until(told)
            await core.stop()

    async def test_who_was_there_before(self) -> None:
        """The core is first asked when somebody is connected already."""
        door = Door(VLESS)
        core = await self.launched([door], [door.user(ANNA)])
        (port,) = await self.clients((door, ANNA, HERE))
        link = await self.connected(port)
        (live,) = await core.look(["anna@x"])
        assert (live.key, live.address) == ("anna@x", address(HERE))
        assert await core.end([live]) == 1 and not await lives(link)

    async def test_several_inbounds_and_a_front(self) -> None:
        """One user by a live inbound, by another one and behind ShadowTLS, with a name that a core needs changed."""
        person = TestUser.new("Å/b")
        doors = [Door(shadowsocks()), Door(VLESS)]
        core = await self.launched(doors, [both(person, *doors)])
        core.arrived = lambda key, address: self.heard.append((key, address))
        ports = await self.clients(*((door, person, HERE) for door in doors))
        links = [await self.connected(port) for port in ports]
        found = await self.seen(core, ["å/b"], 2)
        await self.until(lambda: self.has_heard({("å/b", address(HERE)): 2}))
        assert not core.unseen
        # Who is removed is heard no more.
        await core.apply([Change("shadowsocks", "å/b", None)])
        assert [await lives(link) for link in links] == [False, True]
        assert await core.end(found) == 1


class FollowedTests(ConnectionTests):
    build = "wheel"
