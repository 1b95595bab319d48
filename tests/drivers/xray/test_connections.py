"""Whose the live connections of a core are, when its lines come late, come from elsewhere, or are too many.

The core is this very process: it holds real connections, and the lines about them are written here.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from drivers.channel import ApiFailed
from drivers.sockets.connections import endpoint
from drivers.sockets.live import peer_of
from drivers.xray import connections
from drivers.xray.connections import Connections
from drivers.xray.doors import Door
from drivers.xray.suspects import Pair
from scripts.staging.ports import free_port, own_address

reactor: Any = installed


class ConnectionsTests(TestCase):
    def setUp(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(self.listener.close)
        port = self.listener.getsockname()[1]
        # From where users come.
        self.here = own_address()
        self.ports = (range(port, port + 1),)
        self.accepted: dict[socket.socket, socket.socket] = {}
        self.inside: set[Pair] = {("home", "anna"), ("home", "bert")}
        self.there: dict[bytes, set[str]] = {}
        self.connections = self.make(Door(self.ports))

    async def online(self) -> dict[bytes, set[str]]:
        """What the core says of who is online, by address."""
        return self.there

    def make(self, door: Door) -> Connections:
        made = Connections(reactor, {"home": door, "work": Door(())})
        made.begin(os.getpid(), lambda pair: pair in self.inside, self.online)
        self.addCleanup(made.stop)
        return made

    def connect(self) -> socket.socket:
        link = socket.create_connection(self.listener.getsockname(), source_address=(self.here, free_port()))
        link.setblocking(False)
        self.addCleanup(link.close)
        self.accepted[link] = self.listener.accept()[0]
        self.addCleanup(self.accepted[link].close)
        return link

    def line(self, link: socket.socket, email: str, inbound: str = "home", target: str = "tcp:a.test:80") -> None:
        """The core says that this connection is that user's."""
        self.say("{}:{}".format(*link.getsockname()), email, inbound, target)

    def say(self, where: str, email: str, inbound: str = "home", target: str = "tcp:a.test:80") -> None:
        self.connections.take(
            f"2026/11/21 02:17:57.788507 from {where} accepted {target} [{inbound} >> direct] email: {email}"
        )

    def reject(self) -> None:
        """The core refuses a name that has a newline in it."""
        self.connections.take("2026/11/21 02:17:57.788507 from 10.0.0.9:99 rejected  invalid domain name: evil")

    def connect_again(self, link: socket.socket) -> socket.socket:
        """Another connection from the port of this one, which ends."""
        where = link.getsockname()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()
        self.accepted[link].close()
        again = socket.socket()
        self.addCleanup(again.close)
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(where)
        again.connect(self.listener.getsockname())
        again.setblocking(False)
        self.accepted[again] = self.listener.accept()[0]
        self.addCleanup(self.accepted[again].close)
        return again

    async def where(self, key: str) -> set[bytes]:
        """From where a user is connected, as the node tells it."""
        return {peer_of(live.handle) for live in await self.connections.look([key])}

    async def _unlined(self) -> None:
        """Of some the core has written no line, and bert alone is online from there."""
        came: list[tuple[str, bytes]] = []
        self.connections.arrived = lambda key, address: came.append((key, address))
        here = socket.inet_aton(self.here)
        lined, unlined = self.connect(), self.connect()
        self.line(lined, "bert")
        self.assertEqual(came, [("bert", here)])
        self.there = {here: {"bert", "anna"}}
        for _ in range(2):
            await self.connections._look_around()
        self.assertEqual(await self.where("bert"), {endpoint(*lined.getsockname())})
        self.there = {here: {"bert"}}
        assert self.connections._strays is not None
        self.connections._strays._rest_until = 0
        await self.connections._look_around()
        self.assertEqual(await self.where("bert"), {endpoint(*link.getsockname()) for link in (lined, unlined)})
        self.assertEqual(came, [("bert", here)] * 2)
        # Each is ended alone.
        (live,) = [
            live
            for live in await self.connections.look(["bert"])
            if peer_of(live.handle) == endpoint(*unlined.getsockname())
        ]
        self.assertEqual(await self.connections.reset([live.handle]), 1)
        with self.assertRaises(ConnectionResetError):
            unlined.recv(1)
        with self.assertRaises(BlockingIOError):
            lined.recv(1)
        self.assertEqual(await self.where("bert"), {endpoint(*lined.getsockname())})
        self.assertTrue(self.connections.has("bert"))
        self.assertFalse(self.connections.has("anna"))

    def test_of_whom_no_line_told(self) -> Deferred[None]:
        return ensureDeferred(self._unlined())

    async def _says_nothing_yet(self) -> socket.socket:
        """A connection of which there is no line yet is taken for bert's, who alone is online from there."""
        self.connections.arrived = lambda *_: None
        self.there = {socket.inet_aton(self.here): {"bert"}}
        link = self.connect()
        for _ in range(2):
            await self.connections._look_around()
        self.assertEqual(await self.where("bert"), {endpoint(*link.getsockname())})
        return link

    async def _late_line(self, out_first: bool) -> None:
        link = await self._says_nothing_yet()
        if out_first:
            await self.put_out("anna")
            self.line(link, "anna")
        else:
            self.line(link, "anna")
            self.assertFalse(await self.where("bert"))
            await self.put_out("anna")
        await deferLater(reactor, connections.GATHER * 3)
        self.assertTrue(ended(link))

    async def _slow_to_say(self) -> None:
        """A core that takes long to say who is online is asked once at a time, and holds up nothing else."""
        asked: list[Deferred[dict[bytes, set[str]]]] = []

        async def online() -> dict[bytes, set[str]]:
            asked.append(Deferred())
            return await asked[0] if len(asked) == 1 else {}

        self.connections.begin(os.getpid(), lambda pair: pair in self.inside, online)
        self.connections.arrived = lambda *_: None
        link = self.connect()
        await self.connections._look_around()
        first = ensureDeferred(self.connections._look_around())
        while not asked:
            await deferLater(reactor, 0.01)
        await self.connections._look_around()
        await deferLater(reactor, 0.2)
        asked[0].callback({socket.inet_aton(self.here): {"bert"}})
        await first
        self.assertEqual(len(asked), 1)
        self.assertEqual(await self.where("bert"), {endpoint(*link.getsockname())})
        self.assertLess(self.connections._rest, 0.2 / connections.SHARE)

    def test_a_core_that_is_slow_to_say_who_is_online(self) -> Deferred[None]:
        return ensureDeferred(self._slow_to_say())

    async def _led_on(self) -> None:
        """Of a connection that the inbound has led to another one no line tells, and its user may be anybody there."""
        self.connections = self.make(Door(self.ports, leads_on=True))
        self.connections.arrived = lambda *_: None
        self.connect()
        self.there = {socket.inet_aton(self.here): {"bert"}}
        for _ in range(2):
            await self.connections._look_around()
        self.assertEqual(await self.where("bert"), set())

    def test_who_is_led_on_is_not_taken_for_another(self) -> Deferred[None]:
        return ensureDeferred(self._led_on())

    def test_a_late_line_has_the_say(self) -> Deferred[None]:
        return ensureDeferred(self._late_line(out_first=False))

    def test_a_late_line_of_who_is_out(self) -> Deferred[None]:
        return ensureDeferred(self._late_line(out_first=True))

    async def _spares_another(self) -> None:
        link = await self._says_nothing_yet()
        self.line(link, "anna")
        await self.put_out("bert")
        self.assertFalse(ended(link))

    def test_a_late_line_spares_another(self) -> Deferred[None]:
        return ensureDeferred(self._spares_another())

    async def _out_without_a_line(self) -> None:
        """Of two connections from one address the core told of bert's alone; anna, who is removed, is online there."""
        lined, unlined = self.connect(), self.connect()
        self.line(lined, "bert")
        self.there = {socket.inet_aton(self.here): {"anna", "bert"}}
        for _ in range(2):
            await self.looked()
        self.assertFalse(ended(unlined), "nobody was removed")
        await self.put_out("anna")
        self.connections.put_out([("home", "anna"), ("elsewhere", "anna")])
        for _ in range(2):
            await self.looked()
        await deferLater(reactor, connections.GATHER * 3)
        self.assertTrue(ended(unlined))
        self.assertFalse(ended(lined))
        self.assertEqual(self.connections.cut, 1)

    def test_who_is_out_has_none_of_which_no_line_told(self) -> Deferred[None]:
        return ensureDeferred(self._out_without_a_line())

    async def _back_without_a_line(self) -> None:
        unlined = self.connect()
        self.there = {socket.inet_aton(self.here): {"anna"}}
        self.connections.put_out([("home", "anna")])
        for _ in range(3):
            await self.looked()
        await deferLater(reactor, connections.GATHER * 3)
        self.assertFalse(ended(unlined), "anna is in again")

    def test_who_is_in_again_keeps_them(self) -> Deferred[None]:
        return ensureDeferred(self._back_without_a_line())

    async def _asks_seldom(self) -> None:
        self.connections.arrived = lambda *_: None
        asked = []

        async def broken() -> dict[bytes, set[str]]:
            asked.append(1)
            raise ApiFailed("no")

        assert self.connections._strays is not None
        self.connections._strays._online = broken
        self.connect()
        for _ in range(6):
            await self.connections._look_around()
        self.assertLessEqual(len(asked), 1)

    def test_a_core_that_does_not_say_is_asked_seldom(self) -> Deferred[None]:
        return ensureDeferred(self._asks_seldom())

    async def looked(self) -> None:
        """Wait until the sockets were looked at, for what was said before."""
        await self.connections._look_around()

    def put_out(self, *keys: str) -> Deferred[None]:
        pairs = [("home", key) for key in keys]
        self.inside -= set(pairs)
        return ensureDeferred(self.connections.end(self.connections.of(pairs)))

    async def over(self, link: socket.socket) -> None:
        """Wait until the connection is over; the test ends with a failure if it never is."""
        while not ended(link):
            await deferLater(reactor, 0.01)

    async def test_only_his(self) -> None:
        """The connections of who is out end, and nobody else's."""
        anna, bert = self.connect(), self.connect()
        self.line(anna, "Anna")
        self.line(bert, "bert")
        await self.put_out("anna")
        self.assertTrue(ended(anna))
        self.assertFalse(ended(bert))

    async def test_late_line(self) -> None:
        """A line that comes when its user is out already ends his connection, however late it is."""
        link = self.connect()
        await self.put_out("anna")
        self.line(link, "anna")
        await self.over(link)

    async def test_late_line_among_rejections(self) -> None:
        """It does so too where the core rejects the user's next connections before it prints the line."""
        link = self.connect()
        await self.put_out("anna")
        self.connections.take("2026/11/21 02:17:57.788507 from 10.0.0.9:99 rejected  proxy/trojan: not a valid user")
        self.line(link, "anna")
        await self.over(link)

    async def test_late_line_takes_nothing(self) -> None:
        """A line of somebody who is out does not take a connection from who is in."""
        link = self.connect()
        self.line(link, "bert")
        await self.put_out("anna")
        self.line(link, "anna")
        await deferLater(reactor, connections.GATHER * 2)
        self.assertFalse(ended(link))
        await self.put_out("bert")
        self.assertTrue(ended(link))

    async def test_line_of_the_old_credential(self) -> None:
        """After a change of credential a line tells of who came before it, and he is out, or of who came after it."""
        before = self.connect()
        await self.connections.suspect([("home", "anna")])
        after = self.connect()
        self.line(before, "anna")
        self.line(after, "anna")
        await self.over(before)
        self.assertFalse(ended(after))

    async def test_port_used_again(self) -> None:
        """Of those who came from one port one after the other the last has the connection."""
        self.patch(connections, "LEARN", 0.01)
        link = self.connect()
        self.line(link, "anna")
        await self.looked()
        link = self.connect_again(link)
        self.line(link, "bert")
        await self.looked()
        await self.put_out("anna")
        self.assertFalse(ended(link))
        await self.put_out("bert")
        self.assertTrue(ended(link))

    async def test_a_user_who_uses_a_port_again_is_heard_again(self) -> None:
        """Another connection of theirs from the same port is one, though they had that before; another line is none."""
        self.patch(connections, "LEARN", 0.01)
        came: list[tuple[str, bytes]] = []
        self.connections.arrived = lambda key, address: came.append((key, address))
        link = self.connect()
        for _ in range(3):
            self.line(link, "anna")
            await self.looked()
        self.assertEqual(came, [("anna", socket.inet_aton(self.here))])
        link = self.connect_again(link)
        self.line(link, "anna")
        self.line(link, "anna")
        await self.looked()
        self.assertEqual(came, [("anna", socket.inet_aton(self.here))] * 2)
        self.line(link, "anna")
        await self.looked()
        self.assertEqual(len(came), 2)

    async def test_who_wants_to_know_of_connections_and_fails(self) -> None:
        """What goes wrong about one is logged: a line goes to others, too, and a core whose pipe is closed dies."""

        def arrived(key: str, address: bytes) -> None:
            raise RuntimeError("never mind")

        self.connections.arrived = arrived
        link = self.connect()
        self.line(link, "anna")
        self.assertEqual(await self.where("anna"), {endpoint(*link.getsockname())})
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    async def test_late_line_of_who_used_the_port_again(self) -> None:
        """Who is out is out, also where somebody who is in had the port before."""
        self.patch(connections, "LEARN", 0.01)
        link = self.connect()
        self.line(link, "bert")
        await self.looked()
        link = self.connect_again(link)
        await self.put_out("anna")
        self.line(link, "anna")
        await self.over(link)

    async def test_a_line_about_a_connection_that_is_known(self) -> None:
        """What lines say later of a connection changes nothing: its user is out when he is removed, and not before."""
        for learn in (60, 0.01):
            self.patch(connections, "LEARN", learn)
            link = self.connect()
            self.line(link, "anna")
            if learn < 1:
                await self.looked()
            self.line(link, "bert")
            await self.looked()
            await self.put_out("bert")
            self.assertFalse(ended(link))
            self.line(link, "bert")
            await deferLater(reactor, connections.GATHER * 2)
            self.assertFalse(ended(link))
            await self.put_out("anna")
            self.assertTrue(ended(link))
            self.inside |= {("home", "anna"), ("home", "bert")}

    async def test_a_line_that_a_user_wrote(self) -> None:
        """Behind the newline of a rejected name a line ends nobody's connection, neither now nor later."""
        known, unknown = self.connect(), self.connect()
        self.line(known, "bert")
        await self.put_out("anna")
        self.reject()
        for link in (known, unknown):
            self.line(link, "anna")
        await deferLater(reactor, connections.GATHER * 2)
        self.assertFalse(ended(known) or ended(unknown))
        self.reject()
        self.line(known, "cora")
        self.assertEqual(self.connections.of([("home", "cora")]), {})

    async def test_who_makes_his_line_doubtful(self) -> None:
        """A user who has a name rejected just before he connects is out all the same when he is removed."""
        link, other = self.connect(), self.connect()
        self.reject()
        self.line(link, "anna")
        self.line(other, "bert")
        await self.looked()
        await self.put_out("anna")
        self.assertTrue(ended(link))
        self.assertFalse(ended(other))

    async def test_shared_connection(self) -> None:
        """A connection that carries several users is not ended for one of them."""
        self.connections = self.make(Door(self.ports, shared=True))
        link = self.connect()
        self.line(link, "anna")
        self.line(link, "bert")
        self.line(link, "anna")
        await self.put_out("anna")
        self.assertFalse(ended(link))

    async def test_by_udp(self) -> None:
        """Who came by UDP has no connection, even if somebody has one from the same port."""
        self.connections = self.make(Door(self.ports, datagrams=True))
        link = self.connect()
        self.line(link, "bert")
        self.line(link, "anna", target="udp:8.8.8.8:53")
        await self.put_out("anna")
        self.assertFalse(ended(link))

    async def test_other_inbounds(self) -> None:
        """The line of another inbound, managed or not, is not about a connection of this one."""
        link = self.connect()
        for inbound in ("work", "somebody else's"):
            self.line(link, "anna", inbound)
        await self.put_out("anna")
        self.assertFalse(ended(link))

    async def test_prune(self) -> None:
        """Connections that ended are forgotten, those that live are not."""
        self.patch(connections, "LEARN", 0.01)
        gone, live = self.connect(), self.connect()
        self.line(gone, "anna")
        self.line(live, "anna")
        name = endpoint(*live.getsockname())
        gone.close()
        self.accepted[gone].close()
        while self.connections.of([("home", "anna")]).keys() != {name}:
            await deferLater(reactor, 0.01)

    async def test_cap(self) -> None:
        """There is a limit to what is remembered, and the oldest is forgotten for it."""
        self.patch(connections, "CAP", 80)
        for port in range(1, 1000):
            self.say(f"10.0.0.1:{port}", "anna")
        kept = self.connections.of([("home", "anna")]).keys()
        self.assertLessEqual(len(kept), 80)
        self.assertIn(endpoint("10.0.0.1", 999), kept)

    async def test_core_that_is_gone(self) -> None:
        """When the core ended nothing is left to be done, now or later."""
        link = self.connect()
        self.line(link, "anna")
        self.connections.stop()
        await self.put_out("anna")
        self.assertFalse(ended(link))


def ended(link: socket.socket) -> bool:
    try:
        return link.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
