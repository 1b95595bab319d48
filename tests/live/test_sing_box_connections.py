"""Users' live connections on the real sing-box: their users and addresses, and ending some of them."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from unittest import mock

import psutil
import pytest
from twisted.internet.threads import deferToThread

from drivers.sing_box import api
from drivers.sing_box.generation import SingBoxGeneration
from node.base.errors import CoreFailed
from node.contract.accounts import Change
from node.contract.connections import Address, Live
from scripts.staging import certs, transfer
from scripts.staging.cover import CoverServer
from scripts.staging.process import freeze
from scripts.staging.sing_box import SERVER_NAME, VLESS, Door, Way, shadowsocks, shadowsocks_2022, ways
from scripts.staging.users import TestUser
from tests.harness.sing_box_run import SingBoxRun, both

ANNA, BERT = TestUser.new("Anna@X"), TestUser.new("bert")
HERE, THERE = "127.0.0.2", "127.0.0.3"
# Transports with which several connections of a client are one to the kernel, or none.
MUX = {"multiplex": {"enabled": True, "protocol": "h2mux", "max_connections": 1}}


def address(text: str) -> Address:
    return socket.inet_aton(text)


async def lives(link: socket.socket) -> bool:
    """Whether a connection echoes."""
    try:
        await deferToThread(transfer.small_echo, link, b"am I in?")
    except OSError:
        return False
    return True


class ConnectionTests(SingBoxRun):
    """The build matters little: on one of them the node follows connections anyway."""

    async def setUp(self) -> None:  # type: ignore[override]
        await super().setUp()
        self.heard: list[tuple[str, Address]] = []
        cover = CoverServer(self.directory)
        await deferToThread(cover.__enter__)
        self.addCleanup(deferToThread, cover.__exit__, None, None, None)
        certificate = certs.make(self.directory, [SERVER_NAME])
        self.ways = {way.name: way for way in ways(certificate, cover.port)}

    async def seen(self, core: SingBoxGeneration, keys: Collection[str], count: int) -> list[Live]:
        """The connections of these users once there are so many."""

        async def told() -> list[Live]:
            found = await core.look(keys)
            return found if len(found) == count else []

        return await self.until(told)

    @pytest.mark.slow
    async def test_by_address(self) -> None:
        """Ending one address of a user affects neither the user at another address nor another user there."""
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
        # The core reports connections concurrently, so a report may follow the connection's first bytes.
        await self.until(lambda: self.has_heard({(live.key, live.address): 2 for live in found}))
        assert all(core.may_carry(key) for key in ("anna@x", "bert")) and not core.may_carry("c")
        wanted = [live for live in found if (live.key, live.address) == ("anna@x", address(HERE))]
        assert await core.end(wanted) == len(wanted)
        assert [await lives(link) for link in links] == [False, False, True, True, True, True]
        left = await self.seen(core, ["anna@x", "bert"], len(found) - len(wanted))
        assert await core.end(wanted) == 0
        assert {(live.key, live.address) for live in left} == {("anna@x", address(THERE)), ("bert", address(HERE))}
        # The client reconnects, which is reported.
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
        """Whether at least so many connections of each were reported, and of no others."""
        heard = Counter(self.heard)
        assert heard <= Counter(wanted), heard
        return heard == Counter(wanted)

    async def gone(self, core: SingBoxGeneration) -> bool:
        names = ["anna@x", "bert"]
        return not await core.look(names) and not any(map(core.may_carry, names))

    async def settled(self, core: SingBoxGeneration, links: list[socket.socket]) -> list[Live]:
        """The connections, once the bytes of all are reported."""

        async def told() -> list[Live]:
            found = await core.look(["anna@x", "bert"])
            return found if all(live.sent and live.received for live in found) else []

        return await self.until(told)

    async def test_silence(self) -> None:
        """A user who moves bytes is less silent than one who does not."""
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
        """For a TCP client the round trip and the bytes it has acknowledged, including the protocol's overhead."""
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
        """The core is first asked when a user is connected already."""
        door = Door(VLESS)
        core = await self.launched([door], [door.user(ANNA)])
        (port,) = await self.clients((door, ANNA, HERE))
        link = await self.connected(port)
        (live,) = await core.look(["anna@x"])
        assert (live.key, live.address) == ("anna@x", address(HERE))
        assert await core.end([live]) == 1 and not await lives(link)

    async def test_several_inbounds_and_a_front(self) -> None:
        """One user on a live inbound, another inbound and behind ShadowTLS, with a name that the core gets escaped."""
        person = TestUser.new("Å/b")
        doors = [Door(shadowsocks()), Door(VLESS)]
        core = await self.launched(doors, [both(person, *doors)])
        core.arrived = lambda key, address: self.heard.append((key, address))
        ports = await self.clients(*((door, person, HERE) for door in doors))
        links = [await self.connected(port) for port in ports]
        found = await self.seen(core, ["å/b"], 2)
        await self.until(lambda: self.has_heard({("å/b", address(HERE)): 2}))
        assert not core.unseen
        # Connections of a removed user are not reported any more.
        await core.apply([Change("shadowsocks", "å/b", None)])
        assert [await lives(link) for link in links] == [False, True]
        assert await core.end(found) == 1

    async def test_a_core_that_hangs_while_somebody_is_removed(self) -> None:
        """This is reported soon; the user is cut as soon as the core runs on, without another call."""
        door = Door(VLESS)
        core = await self.launched([door], [door.user(ANNA), door.user(BERT)])
        ports = await self.clients((door, ANNA, HERE), (door, BERT, HERE))
        links = [await self.connected(port) for port in ports]
        assert core.pid is not None
        process, began = psutil.Process(core.pid), time.monotonic()
        freeze(core.pid)
        try:
            with mock.patch.object(api, "ANSWER", 0.3), self.assertRaises(CoreFailed):
                await core.apply([Change(door.way.name, "anna@x", None)])
            assert time.monotonic() - began < 3
        finally:
            process.resume()

        async def out() -> bool:
            return not await lives(links[0])

        await self.until(out)
        assert await lives(links[1])


class FollowedTests(ConnectionTests):
    build = "wheel"
