"""Processes that share their listeners as the runs of a core do: which gets new connections when others come and go."""

from __future__ import annotations

import signal
import socket
from typing import Any
from unittest import mock

from twisted.internet import reactor as installed
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from drivers.sockets import connections, sharing
from drivers.sockets.sessions import Sessions
from drivers.sockets.sharing import Sharing
from drivers.sockets.sock_diag import Ports
from node.base.errors import CoreFailed
from node.contract.abilities import NotShared
from scripts.staging.ports import free_port
from scripts.staging.process import freeze
from tests.harness import handed_on
from tests.harness.answering import NOBODY, Port, end
from tests.harness.steered import Greeter, ask, meet

reactor: Any = installed
HOST = "127.0.0.1"


class SharingTests(TestCase):
    def setUp(self) -> None:
        self.sharing = Sharing(reactor, handed_on.shelf())
        self.first, self.second = sorted([(HOST, free_port()), (HOST, free_port())])
        self.ports: Ports = [range(port, port + 1) for _, port in (self.first, self.second)]

    def start(self, name: str, *addresses: tuple[str, int]) -> Greeter:
        greeter = Greeter(name, addresses or [self.first, self.second])
        self.addCleanup(greeter.kill)
        return greeter

    async def joined(self, name: str, *addresses: tuple[str, int]) -> Greeter:
        greeter = self.start(name, *addresses)
        await self.sharing.join(greeter.pid, self.ports)
        return greeter

    async def end(self, greeter: Greeter) -> None:
        """End its process, and wait until all work for that is done."""
        greeter.kill()
        self.sharing.gone(greeter.pid)
        await self.sharing.survey(greeter.pid, [])

    def link(self, address: tuple[str, int]) -> socket.socket:
        link = socket.create_connection(address, timeout=5)
        self.addCleanup(link.close)
        link.recv(1)
        return link

    async def test_one_takes_over_from_another(self) -> None:
        """The last process alone is released; until then no process may close or open listeners."""
        old = await self.joined("a")
        new = await self.joined("b")
        self.assertEqual({meet(self.first) for _ in range(20)}, {"a"})
        await self.sharing.prove(new.pid, 5)
        self.assertFalse(self.sharing.drains(new.pid))
        link = self.link(self.first)
        await self.sharing.lead(new.pid)
        self.assertEqual({meet(self.first) for _ in range(20)}, {"b"})
        self.assertEqual(ask(link, b"still there"), b"still there")
        self.assertTrue(self.sharing.drains(old.pid))
        self.assertEqual(await self.sharing.connected(old.pid, self.ports), 1)
        self.assertTrue(self.sharing.has(new.pid))
        await self.end(old)
        self.assertFalse(self.sharing.has(new.pid))
        self.assertEqual({meet(self.first) for _ in range(20)}, {"b"})

    async def test_handed_over(self) -> None:
        """The next node process goes on with all of them; one that exited meanwhile is removed."""
        old, dead, current = [await self.joined(name) for name in "abc"]
        await self.sharing.lead(current.pid)
        await self.sharing.close_door(current.pid, self.ports)
        self.sharing = await handed_on.sharing(self.sharing, reactor)
        self.assertRaises(TimeoutError, meet, self.first, 0.2)
        dead.kill()
        await self.sharing.remain([old.pid, current.pid])
        self.assertEqual([self.sharing.drains(each.pid) for each in (old, current)], [True, False])
        new = await self.joined("d")
        await self.sharing.lead(new.pid)
        self.assertRaises(TimeoutError, meet, self.first, 0.2)
        await self.sharing.close_door(current.pid, self.ports, closed=False)
        self.assertEqual((meet(self.first), meet(self.second)), ("d", "d"))
        self.sharing = await handed_on.sharing(self.sharing, reactor)
        await self.end(new)
        self.assertEqual({meet(self.first) for _ in range(20)}, {"c"})
        await self.end(old)
        self.assertFalse(self.sharing.has(current.pid))
        self.assertEqual({meet(self.first) for _ in range(20)}, {"c"})

    async def test_the_node_is_killed(self) -> None:
        """The next node process steers to the last of them; one that does not listen on an address gets none there."""
        old = await self.joined("a")
        dead, current = await self.joined("b"), await self.joined("c", self.first)
        await self.sharing.lead(current.pid)
        dead.kill()
        self.sharing = handed_on.killed(self.sharing, reactor)
        await self.sharing.remain([old.pid, current.pid], lead=current.pid)
        self.assertEqual([self.sharing.drains(each.pid) for each in (old, current)], [True, False])
        self.assertEqual({meet(self.first) for _ in range(20)}, {"c"})
        self.assertRaises(TimeoutError, meet, self.second, 0.2)
        await self.sharing.lead(old.pid)
        self.assertEqual((meet(self.first), meet(self.second)), ("a", "a"))
        await self.end(old)
        self.assertFalse(self.sharing.has(current.pid))
        self.assertEqual({meet(self.first) for _ in range(20)}, {"c"})

    async def test_listeners_that_are_renewed(self) -> None:
        """Connections reach the process led to before and after, also if the node was killed in between."""
        old, current = await self.joined("a"), await self.joined("b")
        await self.sharing.lead(current.pid)
        async with self.sharing.renewing(current.pid, self.ports):
            current.renew()
        self.assertEqual((meet(self.first), meet(self.second)), ("b", "b"))
        current.renew()
        self.sharing = handed_on.killed(self.sharing, reactor)
        await self.sharing.remain([old.pid, current.pid], lead=current.pid)
        self.assertEqual((meet(self.first), meet(self.second)), ("b", "b"))
        await self.sharing.lead(old.pid)
        self.assertEqual((meet(self.first), meet(self.second)), ("a", "a"))

    async def test_a_renewal_that_is_broken_off(self) -> None:
        """The process may have opened its listeners again all the same."""
        await self.joined("a")
        current = await self.joined("b")
        await self.sharing.lead(current.pid)
        with self.assertRaises(CancelledError):
            async with self.sharing.renewing(current.pid, self.ports):
                current.renew()
                raise CancelledError
        self.assertEqual((meet(self.first), meet(self.second)), ("b", "b"))

    async def test_an_heir(self) -> None:
        """A process that gets connections again, as another exits, gets one call; one that never got any is new."""
        old, current = await self.joined("a"), await self.joined("b")
        self.assertFalse(self.sharing.drains(current.pid))
        await self.sharing.lead(current.pid)
        calls = list[str]()
        self.sharing.call_heir(old.pid, lambda: calls.append("a"))
        await self.sharing.join(current.pid, self.ports)
        self.assertTrue(self.sharing.awaits)
        new = await self.joined("c")
        self.assertFalse(self.sharing.awaits)
        await self.end(new)
        self.assertEqual(calls, [])
        await self.end(current)
        self.assertEqual(calls, ["a"])

    async def test_one_alone_is_not_handed_over(self) -> None:
        """A process alone is released."""
        old = await self.joined("a")
        self.sharing = await handed_on.sharing(self.sharing, reactor)
        self.assertFalse(self.sharing.has(old.pid))
        self.start("b")
        self.assertEqual({meet(self.first) for _ in range(20)}, {"a"})

    async def test_the_one_that_is_led_to_dies_between_two_nodes(self) -> None:
        """The newest of the others gets all connections."""
        await self.joined("a")
        before, new = await self.joined("b"), await self.joined("c")
        await self.sharing.lead(new.pid)
        self.sharing = await handed_on.sharing(self.sharing, reactor)
        new.kill()
        await self.sharing.remain([pid for pid in self.sharing._members if pid != new.pid])
        await self.sharing.survey(before.pid, [])
        self.assertEqual((meet(self.first), meet(self.second)), ("b", "b"))

    async def test_an_address_that_the_new_one_does_not_have(self) -> None:
        """Connections there are dropped, until the old process is led to again."""
        old = await self.joined("a")
        new = await self.joined("b", self.first)
        link = self.link(self.second)
        for _ in range(2):
            await self.sharing.lead(new.pid)
            self.assertEqual(meet(self.first), "b")
            self.assertRaises(TimeoutError, meet, self.second, 0.2)
            self.assertEqual(ask(link, b"still there"), b"still there")
            await self.sharing.lead(old.pid)
            self.assertEqual((meet(self.first), meet(self.second)), ("a", "a"))

    async def test_the_one_that_is_led_to_dies(self) -> None:
        """The newest of the others gets all connections at once, also at addresses that the dead one lacked."""
        await self.joined("a")
        await self.sharing.lead((await self.joined("b")).pid)
        new = await self.joined("c", self.first)
        await self.sharing.lead(new.pid)
        await self.end(new)
        self.assertEqual((meet(self.first), meet(self.second)), ("b", "b"))

    async def test_one_remains_while_another_is_awaited(self) -> None:
        """The remaining process stays held: a joining one gets no connection before it is led to."""
        old, current = await self.joined("a"), await self.joined("b")
        await self.sharing.lead(current.pid)
        await self.sharing.join(current.pid, self.ports)
        await self.end(old)
        self.assertTrue(self.sharing.has(current.pid))
        new = self.start("c")
        self.assertEqual({meet(self.first) for _ in range(20)}, {"b"})
        await self.sharing.join(new.pid, self.ports)
        await self.sharing.lead(new.pid)
        self.assertEqual({meet(self.first) for _ in range(20)}, {"c"})

    async def test_the_awaited_one_does_not_come(self) -> None:
        """The remaining process is released, and still no other gets connections."""
        old, stillborn = await self.joined("a"), self.start("b")
        await self.end(stillborn)
        self.assertFalse(self.sharing.has(old.pid))
        self.start("c")
        self.assertEqual({meet(self.first) for _ in range(20)}, {"a"})

    async def test_one_that_hangs(self) -> None:
        """A process that accepts nothing is detected before it is led to; the error names its address."""
        old, new = await self.joined("a"), await self.joined("b")
        freeze(new.pid)
        with self.assertRaisesRegex(CoreFailed, f"within 0.2 s on {HOST}:{self.first[1]}, {HOST}:{self.second[1]}"):
            await self.sharing.prove(new.pid, 0.2)
        self.assertEqual(meet(self.first), "a")
        await self.end(new)
        self.assertFalse(self.sharing.has(old.pid))

    async def test_closed_to_new_connections(self) -> None:
        """A process that joins closed ones can be proven, and is closed when it leads; connections continue."""
        old = await self.joined("a")
        link = self.link(self.first)
        await self.sharing.close_door(old.pid, self.ports)
        self.assertRaises(TimeoutError, meet, self.first, 0.2)
        new = await self.joined("b")
        await self.sharing.prove(new.pid, 5)
        await self.sharing.lead(new.pid)
        for address in (self.first, self.second):
            self.assertRaises(TimeoutError, meet, address, 0.2)
        self.assertEqual(ask(link, b"still there"), b"still there")
        await self.sharing.close_door(new.pid, self.ports)
        for greeter in (old, new):
            await self.sharing.close_door(greeter.pid, self.ports, closed=False)
        self.assertEqual((meet(self.first), meet(self.second)), ("b", "b"))

    async def test_after_a_closed_process_has_exited(self) -> None:
        """Processes after a closed one are open, and one alone can be closed and opened."""
        old = await self.joined("a")
        await self.sharing.close_door(old.pid, self.ports)
        await self.end(old)
        alone = await self.joined("b")
        await self.sharing.lead((await self.joined("c")).pid)
        self.assertEqual(meet(self.first), "c")
        await self.end(alone)
        where = (HOST, free_port())
        lone = self.start("d", where)
        ports = [range(where[1], where[1] + 1)]
        await self.sharing.close_door(lone.pid, ports)
        self.assertRaises(TimeoutError, meet, where, 0.2)
        await self.sharing.close_door(lone.pid, ports, closed=False)
        self.assertEqual(meet(where), "d")

    async def test_before_an_exit(self) -> None:
        """Before an exit neither the process led to nor a draining one gets connections; existing ones continue."""
        old, new = await self.joined("a"), await self.joined("b")
        await self.sharing.lead(new.pid)
        link = self.link(self.first)
        await self.sharing.quieten(old.pid)
        self.assertEqual(meet(self.first), "b")
        await self.sharing.quieten(new.pid)
        self.assertRaises(TimeoutError, meet, self.first, 0.2)
        self.assertEqual(ask(link, b"still there"), b"still there")
        await self.end(new)
        self.assertRaises(TimeoutError, meet, self.first, 0.2)

    async def test_waiting_connections_before_an_exit(self) -> None:
        """A process accepts its waiting connections before it exits; one that does not is awaited for a time only."""
        await self.joined("a")
        one = await self.joined("b")
        await self.sharing.lead(one.pid)
        freeze(one.pid)
        link = socket.create_connection(self.first, timeout=5)
        self.addCleanup(link.close)
        quiet = Deferred.fromCoroutine(self.sharing.quieten(one.pid))
        await deferLater(reactor, 0.1)
        self.assertFalse(quiet.called)
        one.signal(signal.SIGCONT)
        await quiet
        self.assertEqual(await self.sharing.connected(one.pid, self.ports), 1)
        self.assertEqual(link.recv(1), b"b")
        other = await self.joined("c")
        await self.sharing.lead(other.pid)
        freeze(other.pid)
        self.addCleanup(socket.create_connection(self.first, timeout=5).close)
        with mock.patch.object(sharing, "ACCEPTING", 0.1):
            await self.sharing.quieten(other.pid)

    async def test_a_stranger_on_the_port(self) -> None:
        """The port cannot be shared, and is not held."""
        self.start("x")
        one = self.start("a")
        with self.assertRaisesRegex(NotShared, "another process"):
            await self.sharing.join(one.pid, self.ports)
        self.assertFalse(self.sharing.has(one.pid))

    async def test_sessions(self) -> None:
        """UDP sessions end with each change, also at an exit, and the remaining process gets the next ones."""
        port = self.of_udp()
        old = port.start("a")
        for _ in range(2):
            await self.sharing.join(old.pid, [], sessions=port.ports)
        new = port.start("b")
        await self.sharing.join(new.pid, [], sessions=port.ports)
        self.assertEqual(port.met(), {"a"})
        await self.sharing.lead(new.pid)
        self.assertEqual(port.met(), {"b"})
        end(new)
        self.assertEqual(port.met(), {NOBODY})
        self.sharing.gone(new.pid)
        await self.sharing.survey(old.pid, [])
        self.assertEqual((port.met(), self.sharing.has(old.pid)), ({"a"}, False))
        await self.sharing.join(old.pid, [], sessions=port.ports)
        await self.sharing.quieten(old.pid)
        self.assertEqual(port.met(), {NOBODY})

    async def test_a_stranger_by_udp(self) -> None:
        """No socket is held then."""
        port, greeter = self.of_udp(), self.start("a")
        port.start("x")
        one = port.start("b")
        with self.assertRaisesRegex(NotShared, "another process"):
            await self.sharing.join(one.pid, self.ports, sessions=port.ports)
        self.assertFalse(self.sharing.has(one.pid))
        await self.sharing.join(greeter.pid, self.ports)
        self.assertEqual(meet(self.first), "a")

    def of_udp(self) -> Port:
        port = Port(Sessions(handed_on.shelf()), HOST, [HOST])
        self.addCleanup(port.stack.close)
        return port

    async def test_a_cancelled_caller(self) -> None:
        """Work that was begun is finished, and the next call waits for it."""
        old = self.start("a")
        joining = Deferred.fromCoroutine(self.sharing.join(old.pid, self.ports))
        joining.cancel()
        with self.assertRaises(CancelledError):
            await joining
        await self.sharing.survey(old.pid, [])
        new = await self.joined("b")
        await self.sharing.lead(new.pid)
        self.assertEqual(meet(self.first), "b")

    async def test_abandoned_connections(self) -> None:
        """Silent connections stop counting after a while, those that the client has closed sooner."""
        one = await self.joined("a")
        links = [self.link(self.first) for _ in range(2)]
        self.assertEqual(await self.sharing.connected(one.pid, self.ports), 2)
        self.assertEqual(await self.sharing.connected(one.pid, self.ports[1:]), 0)
        with mock.patch.object(connections, "SILENT", 0.0):
            self.assertEqual(await self.sharing.connected(one.pid, self.ports), 0)
        freeze(one.pid)
        links[0].shutdown(socket.SHUT_WR)
        with mock.patch.object(connections, "HALF_SILENT", 0.0):
            self.assertEqual(await self.sharing.connected(one.pid, self.ports), 1)
        waiting = socket.create_connection(self.first, timeout=5)
        self.addCleanup(waiting.close)
        self.assertEqual(await self.sharing.connected(one.pid, self.ports), 3)
