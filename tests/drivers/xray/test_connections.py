"""Owners of a core's live connections, when its lines are late, forged, or missing.

This process is the core: it holds real connections, and the tests write the lines about them.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any
from unittest import mock

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from drivers.process.channel import ApiFailed
from drivers.sockets.core_connections import rest_of
from drivers.sockets.sock_diag import endpoint
from drivers.xray import connections, requests
from drivers.xray.connections import Connections
from drivers.xray.ingress import Ingress
from drivers.xray.ownership import Pair
from node.contract.abuse import Request
from protos.handover_pb2 import XrayRun
from scripts.staging.ports import free_port, own_address

reactor: Any = installed


class ConnectionsTests(TestCase):
    def setUp(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(self.listener.close)
        port = self.listener.getsockname()[1]
        # The addresses of clients.
        self.here = own_address()
        self.ports = (range(port, port + 1),)
        self.accepted: dict[socket.socket, socket.socket] = {}
        self.inside: set[Pair] = {("home", "anna"), ("home", "bert")}
        self.there: dict[bytes, set[str]] = {}
        self.connections = self.make(Ingress(self.ports))

    async def online(self) -> dict[bytes, set[str]]:
        """The core's users online, by address."""
        return self.there

    def make(self, door: Ingress) -> Connections:
        made = Connections(reactor, {"home": door, "work": Ingress(())})
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
        """The core logs that this connection is that user's."""
        self.say("{}:{}".format(*link.getsockname()), email, inbound, target)

    def say(self, where: str, email: str, inbound: str = "home", target: str = "tcp:a.test:80") -> None:
        self.connections.take(
            f"2026/11/21 02:17:57.788507 from {where} accepted {target} [{inbound} >> direct] email: {email}"
        )

    def reject(self) -> None:
        """The core rejects a name with a newline in it."""
        self.connections.take("2026/11/21 02:17:57.788507 from 10.0.0.9:99 rejected  invalid domain name: evil")

    def connect_again(self, link: socket.socket) -> socket.socket:
        """Close this connection, and open another one from the same port."""
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

    async def soon_ended(self, link: socket.socket) -> None:
        """Wait until the node has gathered what to close, and has closed this."""
        deadline = time.monotonic() + 10
        while not ended(link):
            self.assertLess(time.monotonic(), deadline, "the connection goes on")
            await deferLater(reactor, connections.GATHER / 4)

    async def where(self, key: str) -> set[bytes]:
        """The endpoint of a user's connection, as the node has it."""
        return {rest_of(live.handle) for live in await self.connections.look([key])}

    async def _hang_up(self) -> None:
        """Connections are closed when the core has read what had arrived, or did not in time."""
        link, idle = self.connect(), self.connect()
        link.send(b"first bytes")
        hanging_up = ensureDeferred(self.connections.close_all(self.ports))
        await deferLater(reactor, 5 * connections.NOTICE)
        self.assertFalse(hanging_up.called)
        self.assertEqual(self.accepted[link].recv(100), b"first bytes")
        await hanging_up
        self.assertEqual((link.recv(1), idle.recv(1)), (b"", b""))
        self.connect().send(b"never read")
        with mock.patch.object(connections, "DRY", 0.1):
            await self.connections.close_all(self.ports)

    def test_bytes_that_arrived_before_a_close(self) -> Deferred[None]:
        return ensureDeferred(self._hang_up())

    async def _unlined(self) -> None:
        """Connections without an access line, from an address at which only bert is online."""
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
        assert self.connections._unlogged is not None
        self.connections._unlogged._governor.until = 0
        await self.connections._look_around()
        self.assertEqual(await self.where("bert"), {endpoint(*link.getsockname()) for link in (lined, unlined)})
        self.assertEqual(came, [("bert", here)] * 2)
        # Each is closed separately.
        (live,) = [
            live
            for live in await self.connections.look(["bert"])
            if rest_of(live.handle) == endpoint(*unlined.getsockname())
        ]
        self.assertEqual(await self.connections.reset([live.handle]), 1)
        with self.assertRaises(ConnectionResetError):
            unlined.recv(1)
        with self.assertRaises(BlockingIOError):
            lined.recv(1)
        self.assertEqual(await self.where("bert"), {endpoint(*lined.getsockname())})
        self.assertTrue(self.connections.has("bert"))
        self.assertFalse(self.connections.has("anna"))

    def test_connections_without_a_line(self) -> Deferred[None]:
        return ensureDeferred(self._unlined())

    async def _without_a_line_yet(self) -> socket.socket:
        """A connection whose line is not there yet is attributed to bert, the only user online at its address."""
        self.connections.arrived = lambda *_: None
        self.there = {socket.inet_aton(self.here): {"bert"}}
        link = self.connect()
        for _ in range(2):
            await self.connections._look_around()
        self.assertEqual(await self.where("bert"), {endpoint(*link.getsockname())})
        return link

    async def _late_line(self, out_first: bool) -> None:
        link = await self._without_a_line_yet()
        if out_first:
            await self.put_out("anna")
            self.line(link, "anna")
        else:
            self.line(link, "anna")
            self.assertFalse(await self.where("bert"))
            await self.put_out("anna")
        await self.soon_ended(link)

    async def _slow_to_list(self) -> None:
        """A core that is slow to list the users online gets one call at a time, and delays nothing else."""
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
        self.assertLess(self.connections._governor.left, 0.2 / connections.SHARE)

    def test_a_core_that_is_slow_to_list_users_online(self) -> Deferred[None]:
        return ensureDeferred(self._slow_to_list())

    async def _forwarded(self) -> None:
        """A connection that an inbound has forwarded to another has no line, and may be any user's there."""
        self.connections = self.make(Ingress(self.ports, forwards=True))
        self.connections.arrived = lambda *_: None
        self.connect()
        self.there = {socket.inet_aton(self.here): {"bert"}}
        for _ in range(2):
            await self.connections._look_around()
        self.assertEqual(await self.where("bert"), set())

    def test_a_forwarded_connection_is_not_attributed(self) -> Deferred[None]:
        return ensureDeferred(self._forwarded())

    async def _fronted(self) -> None:
        """A reverse proxy reports the address, and has the socket: it arrives, and is no connection of the core's."""
        came: list[tuple[str, bytes]] = []
        self.connections.arrived = lambda key, address: came.append((key, address))
        self.say("203.0.113.7:0", "anna")
        self.say("[2001:db8::1]:0", "Bert")
        self.say("203.0.113.7:0", "gone")
        self.inside.add(("work", "anna"))
        # By the PROXY protocol, which names a port, too.
        self.say("203.0.113.8:4321", "anna", inbound="work")
        bert = socket.inet_pton(socket.AF_INET6, "2001:db8::1")
        expected = [("anna", bytes([203, 0, 113, 7])), ("bert", bert), ("anna", bytes([203, 0, 113, 8]))]
        self.assertEqual(came, expected)
        self.assertFalse(self.connections.has("anna"))
        link = self.connect()
        self.line(link, "anna")
        self.assertEqual(self.connections.addresses("anna"), {socket.inet_aton(self.here)})
        here = {socket.inet_aton(self.here)}
        self.assertEqual((self.connections.owners(here), self.connections.mixed_at(here)), ({"anna"}, []))
        self.connections = self.make(Ingress(self.ports, shared=True))
        self.line(link, "anna")
        self.line(link, "bert")
        self.assertEqual((self.connections.owners(here), self.connections.mixed_at(here)), (set(), ["home"]))

    def test_behind_a_reverse_proxy(self) -> Deferred[None]:
        return ensureDeferred(self._fronted())

    def test_users_from_this_machine_whom_nothing_lists(self) -> None:
        """The inbounds of those who come by UDP or through a proxy are known, also to the next node process."""
        self.connections = Connections(
            reactor, {"home": Ingress(self.ports, datagrams=True), "work": Ingress(())}, ["home", "work", "quic"]
        )
        self.addCleanup(self.connections.stop)
        self.say("127.0.0.1:5", "anna")
        self.say("127.0.0.2:5", "anna", "quic")
        self.say("udp:127.0.0.2:5", "anna", target="udp:a.test:53")
        self.say("127.0.0.2:0", "anna", "work")
        self.assertEqual(self.connections.hidden, set())
        self.say("127.0.0.1:5", "anna", "quic")
        self.assertEqual(self.connections.hidden, {"quic"})
        self.say("udp:127.0.0.1:5", "anna", target="udp:a.test:53")
        self.say("[::1]:0", "anna", "work")
        run = XrayRun()
        self.connections.leave(run)
        later = self.make(Ingress(self.ports))
        later.go_on(run)
        self.assertEqual(later.hidden, {"home", "work", "quic"})

    async def _by_either(self) -> None:
        """Lines of Shadowsocks-2022 do not show who comes by UDP; the kernel does."""
        with mock.patch.object(connections, "LOCAL", frozenset({socket.inet_aton(self.here)})):
            self.connections = self.make(Ingress(self.ports, shared=True, either=True))
            self.line(self.connect(), "anna")
            await self.connections._look_around()
            self.assertEqual(self.connections.hidden, set())
            self.say(f"{self.here}:5", "bert")
            await self.connections._look_around()
            self.assertEqual(self.connections.hidden, {"home"})

    def test_by_tcp_or_by_udp(self) -> Deferred[None]:
        return ensureDeferred(self._by_either())

    def test_a_late_line_overrides_a_guess(self) -> Deferred[None]:
        return ensureDeferred(self._late_line(out_first=False))

    def test_a_late_line_of_a_removed_user(self) -> Deferred[None]:
        return ensureDeferred(self._late_line(out_first=True))

    async def _spares_another(self) -> None:
        link = await self._without_a_line_yet()
        self.line(link, "anna")
        await self.put_out("bert")
        self.assertFalse(ended(link))

    def test_a_late_line_spares_another(self) -> Deferred[None]:
        return ensureDeferred(self._spares_another())

    async def _out_without_a_line(self) -> None:
        """Of two connections from an address only bert's has a line; anna, who is removed, is online there."""
        lined, unlined = self.connect(), self.connect()
        self.line(lined, "bert")
        self.there = {socket.inet_aton(self.here): {"anna", "bert"}}
        for _ in range(2):
            await self.looked()
        self.assertFalse(ended(unlined), "nobody was removed")
        await self.put_out("anna")
        self.connections.note_removed([("home", "anna"), ("elsewhere", "anna")])
        for _ in range(2):
            await self.looked()
        await self.soon_ended(unlined)
        while not self.connections.cut:  # counted when the thread that has closed it returns
            await deferLater(reactor, 0.01)
        self.assertFalse(ended(lined))
        self.assertEqual(self.connections.cut, 1)

    def test_a_removed_user_without_a_line_is_cut(self) -> Deferred[None]:
        return ensureDeferred(self._out_without_a_line())

    async def _back_without_a_line(self) -> None:
        unlined = self.connect()
        self.there = {socket.inet_aton(self.here): {"anna"}}
        self.connections.note_removed([("home", "anna")])
        for _ in range(3):
            await self.looked()
        await deferLater(reactor, connections.GATHER * 3)
        self.assertFalse(ended(unlined), "anna is in again")

    def test_a_user_who_is_added_again_keeps_connections(self) -> Deferred[None]:
        return ensureDeferred(self._back_without_a_line())

    async def _asks_seldom(self) -> None:
        self.connections.arrived = lambda *_: None
        asked = []

        async def broken() -> dict[bytes, set[str]]:
            asked.append(1)
            raise ApiFailed("no")

        assert self.connections._unlogged is not None
        self.connections._unlogged._online = broken
        self.connect()
        for _ in range(6):
            await self.connections._look_around()
        self.assertLessEqual(len(asked), 1)

    def test_a_core_that_does_not_answer_is_asked_seldom(self) -> Deferred[None]:
        return ensureDeferred(self._asks_seldom())

    async def looked(self) -> None:
        """Wait for a look at the sockets that covers all lines so far."""
        await self.connections._look_around()

    def put_out(self, *keys: str) -> Deferred[None]:
        pairs = [("home", key) for key in keys]
        self.inside -= set(pairs)
        return ensureDeferred(self.connections.end(self.connections.of(pairs)))

    async def over(self, link: socket.socket) -> None:
        """Wait until the connection is closed; if it never is, the test fails."""
        while not ended(link):
            await deferLater(reactor, 0.01)

    async def test_only_the_removed_users(self) -> None:
        """A removed user's connections are closed, and no others."""
        anna, bert = self.connect(), self.connect()
        self.line(anna, "Anna")
        self.line(bert, "bert")
        await self.put_out("anna")
        self.assertTrue(ended(anna))
        self.assertFalse(ended(bert))

    async def test_late_line(self) -> None:
        """A line after the removal of its user cuts the connection, however late it is."""
        link = self.connect()
        await self.put_out("anna")
        self.line(link, "anna")
        await self.over(link)

    async def test_late_line_among_rejections(self) -> None:
        """So does one that the core prints after it has rejected the user's next connections."""
        link = self.connect()
        await self.put_out("anna")
        self.connections.take("2026/11/21 02:17:57.788507 from 10.0.0.9:99 rejected  proxy/trojan: not a valid user")
        self.line(link, "anna")
        await self.over(link)

    async def test_late_line_takes_nothing(self) -> None:
        """A line of a removed user does not take a connection from a current one."""
        link = self.connect()
        self.line(link, "bert")
        await self.put_out("anna")
        self.line(link, "anna")
        await deferLater(reactor, connections.GATHER * 2)
        self.assertFalse(ended(link))
        await self.put_out("bert")
        self.assertTrue(ended(link))

    async def only_the_older_ends(self, before: socket.socket) -> None:
        """Anna gets a credential now: a line of this connection cuts it, and one of a newer connection does not."""
        await self.connections.credentials_change([("home", "anna")])
        after = self.connect()
        self.line(before, "anna")
        self.line(after, "anna")
        await self.over(before)
        self.assertFalse(ended(after))

    async def test_line_of_the_old_credential(self) -> None:
        """After a change of credential, lines of older connections cut them, and lines of newer ones do not."""
        before = self.connect()
        await self.only_the_older_ends(before)

    async def test_late_line_of_a_user_who_came_back(self) -> None:
        """It cuts a connection from before the removal, for some seconds."""
        before = self.connect()
        self.connections.note_removed([("home", "anna")])
        self.assertTrue(self.connections.left_lately(("home", "anna")))
        self.assertFalse(self.connections.left_lately(("home", "bert")))
        await self.only_the_older_ends(before)

    async def test_a_new_connection_from_the_port_of_an_old_one(self) -> None:
        """After a change of credential, a client may use the port of a connection that was cut, or that it closed."""
        came: list[tuple[str, bytes]] = []
        self.connections.arrived = lambda key, address: came.append((key, address))
        for cut in (True, False):
            before, other = self.connect(), self.connect()
            self.line(before, "anna")
            await self.connections.credentials_change([("home", "anna")])
            if cut:
                await self.connections.end(self.connections.of([("home", "anna")]))
            after = self.connect_again(before)
            came.clear()
            self.line(after, "anna")
            self.line(other, "anna")
            await self.over(other)
            # A thread closes connections; the node learns what it has closed a moment after their clients.
            while not came:
                await deferLater(reactor, 0.01)
            self.assertFalse(ended(after))
            self.assertEqual([key for key, _ in came], ["anna"])

    async def test_port_used_again(self) -> None:
        """Of the users who connect from one port in turn, the last one owns the connection."""
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

    async def test_a_new_connection_of_the_same_user_and_port(self) -> None:
        """Another connection of a user from the same port counts as a new one; another line does not."""
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

    async def test_a_callback_that_fails(self) -> None:
        """An error of the callback is logged: the line must reach others, and a core whose pipe is closed dies."""

        def arrived(key: str, address: bytes) -> None:
            raise RuntimeError("never mind")

        self.connections.arrived = arrived
        link = self.connect()
        self.line(link, "anna")
        self.assertEqual(await self.where("anna"), {endpoint(*link.getsockname())})
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    async def test_late_line_of_a_removed_user_with_a_reused_port(self) -> None:
        """A removed user is cut, even if a current user had the port before."""
        self.patch(connections, "LEARN", 0.01)
        link = self.connect()
        self.line(link, "bert")
        await self.looked()
        link = self.connect_again(link)
        await self.put_out("anna")
        self.line(link, "anna")
        await self.over(link)

    async def test_a_line_about_a_connection_that_is_known(self) -> None:
        """Later lines about a connection change nothing: it is cut when its user is removed, not before."""
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

    async def test_a_forged_line(self) -> None:
        """A line forged after the newline of a rejected name cuts no connection, neither now nor later."""
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

    async def test_a_user_who_makes_their_line_untrusted(self) -> None:
        """A user who has a name rejected just before they connect is cut all the same on removal."""
        link, other = self.connect(), self.connect()
        self.reject()
        self.line(link, "anna")
        self.line(other, "bert")
        await self.looked()
        await self.put_out("anna")
        self.assertTrue(ended(link))
        self.assertFalse(ended(other))

    async def test_shared_connection(self) -> None:
        """A connection that carries several users is not cut for one of them."""
        self.connections = self.make(Ingress(self.ports, shared=True))
        link = self.connect()
        self.line(link, "anna")
        self.assertEqual(self.connections.mixed, [])
        self.line(link, "bert")
        self.line(link, "anna")
        self.assertEqual((self.connections.mixed, await self.where("anna")), (["home"], set()))
        await self.put_out("anna")
        self.assertFalse(ended(link))
        link.close()
        self.accepted[link].close()
        for _ in range(2):
            await self.connections._look_around()
        self.assertEqual(self.connections.mixed, [])

    async def test_by_udp(self) -> None:
        """A user over UDP has no connection, even if another user has one from the same port."""
        self.connections = self.make(Ingress(self.ports, datagrams=True))
        link = self.connect()
        self.line(link, "bert")
        self.line(link, "anna", target="udp:8.8.8.8:53")
        await self.put_out("anna")
        self.assertFalse(ended(link))

    async def test_other_inbounds(self) -> None:
        """A line of another inbound, managed or not, does not count for a connection of this one."""
        link = self.connect()
        for inbound in ("work", "somebody else's"):
            self.line(link, "anna", inbound)
        await self.put_out("anna")
        self.assertFalse(ended(link))

    async def test_prune(self) -> None:
        """Closed connections are forgotten, open ones are not."""
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
        """The number of endpoints is limited, and the oldest are forgotten first."""
        self.patch(connections, "CAP", 80)
        for port in range(1, 1000):
            self.say(f"10.0.0.1:{port}", "anna")
        kept = self.connections.of([("home", "anna")]).keys()
        self.assertLessEqual(len(kept), 80)
        self.assertIn(endpoint("10.0.0.1", 999), kept)

    async def test_core_that_is_gone(self) -> None:
        """After the core's exit no work is left, now or later."""
        link = self.connect()
        self.line(link, "anna")
        self.connections.stop()
        await self.put_out("anna")
        self.assertFalse(ended(link))

    def test_requests(self) -> None:
        """From the first call on, each line that the core wrote itself; exempt users are left out."""
        self.say("10.0.0.1:9", "Anna", target="tcp:before.test:80")
        self.assertEqual(self.connections.requests.collect(()), [])
        self.say("10.0.0.1:9", "Anna", target="tcp:a.test:80")
        self.say("10.0.0.1:9", "Anna", target="udp:[2001:db8::1]:443")
        self.say("udp:10.0.0.1:9", "Anna", target="udp:c.test:53")
        self.say("10.0.0.2:9", "Bert", "nowhere", target="tcp:b.test:22")
        torrent = "accepted tcp:b.test:22 [home -> ~txnode-torrent-2] email: Bert"
        self.connections.take(f"2026/11/21 02:17:57.788507 from tcp:10.0.0.2:9 {torrent}")
        anna, bert = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])
        self.assertEqual(
            self.connections.requests.collect({"cora"}),
            [
                Request("anna", anna, "home", "a.test:80", udp=False),
                Request("anna", anna, "home", "[2001:db8::1]:443", udp=True),
                Request("anna", anna, "home", "c.test:53", udp=True),
                Request("bert", bert, "home", "b.test:22", udp=False, torrent=True),
            ],
        )
        self.say("10.0.0.3:9", "Cora")
        self.reject()
        self.say("10.0.0.2:9", "Bert", target="tcp:forged.test:22")
        self.assertEqual(self.connections.requests.collect(()), [])
        with mock.patch.object(requests, "MOST", 3):
            for number in range(20):
                self.say("10.0.0.1:9", "Anna", target=f"tcp:{number}-{'long' * 100}.test:80")
        self.assertEqual(len(self.connections.requests.collect(())), 3)


def ended(link: socket.socket) -> bool:
    try:
        return link.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
