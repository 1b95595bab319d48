"""Two runs of a core on the same ports: the new one takes over, and no connection is dropped or refused."""

from __future__ import annotations

import base64
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from drivers.registry import REGISTRY
from drivers.sockets.listeners import look
from drivers.sockets.sessions import is_hidden
from drivers.sockets.sock_diag import listeners
from node.backend.roster import Roster
from node.base.errors import CoreFailed
from node.base.logs import LogRing
from node.contract.abilities import Shares
from node.contract.accounts import Change
from node.contract.counters import Scope, counter_name
from node.contract.driver import Generation, Host, Plan
from scripts.staging import certs, sing_box, transfer
from scripts.staging.activity import Activity, chatter, gap
from scripts.staging.core import Json, xray_number
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import SERVER_NAME, Kind
from scripts.staging.node import LOCAL_TARGETS
from scripts.staging.ports import free_port
from scripts.staging.process import freeze
from scripts.staging.protocols import hysteria, shadowsocks, shadowsocks_2022, vless, vmess
from scripts.staging.sing_box import SingBoxClient, hysteria2
from scripts.staging.socks import UdpAssociation
from scripts.staging.transports import raw, tls
from scripts.staging.users import TestUser
from tests.conftest import Place, member, way
from tests.harness import grounds
from tests.harness.grounds import Ground
from tests.harness.steered import meet

reactor: Any = installed

ANNA, BERT = (TestUser.new(f"{name}@test") for name in ("anna", "bert"))
VLESS, VMESS = Kind("vless", vless(), raw()), Kind("vmess", vmess(), raw())
KNOCKER = "127.84.88.78"
# Seconds until a client that notices the end of its session is served again, on a busy machine. A client that does not
# notice it waits for half a minute.
SOON = 8.0


class Visitors:
    """Sequential connections through users' SOCKS ports, inside the `with` block."""

    def __init__(self, echo: EchoServer, ports: Sequence[int]) -> None:
        self.came, self.failed = 0, list[OSError]()
        self._echo, self._ports, self._over = echo, ports, threading.Event()
        self._thread = threading.Thread(target=self._visit)

    def _visit(self) -> None:
        while not self._over.is_set():
            for port in self._ports:
                try:
                    transfer.connect(port, self._echo, 5).close()
                except OSError as error:
                    self.failed.append(error)
                self.came += 1

    def __enter__(self) -> Visitors:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class SharingTests(TestCase):
    """Tests on each core."""

    __test__ = False
    in_turn = True
    ground: Ground

    async def setUp(self) -> None:  # type: ignore[override]
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)
        directory = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.echo = self.stack.enter_context(EchoServer())
        self.lines: list[str] = []
        log = LogRing(reactor, 1000)
        log.extend = self.lines.extend  # type: ignore[method-assign,assignment]
        settings = {
            self.ground.variable: str(self.ground.executable()),
            "CORE_PATHS": str(directory.parent),
        } | LOCAL_TARGETS
        self.directory = directory
        self.driver = REGISTRY[self.ground.type].load(Host(reactor, log, directory, settings))
        self.home, self.work = Place(VLESS, "home", ground=self.ground), Place(VMESS, "work", ground=self.ground)

    async def prepared(self, *inbounds: Json, **extra: object) -> Plan:
        plan: Plan = await self.driver.prepare(self.ground.config(inbounds, **extra), frozenset())
        return plan

    async def launched(self, plan: Plan, *people: TestUser) -> Any:
        places = [place for place in (self.home, self.work) if place.tag in plan.tags]
        roster, refused = Roster.of([member(one, *places) for one in people], plan.tags, plan.account)
        assert not refused
        run = await plan.launch(roster.target, 8)
        assert isinstance(run, Shares)
        self.addCleanup(lambda: Deferred.fromCoroutine(run.stop()))
        return run

    async def started(self, *people: TestUser) -> tuple[Plan, Any]:
        plan = await self.prepared(self.home.inbound, self.work.inbound)
        return plan, await self.launched(plan, *people)

    async def followed(self, old: Any, plan: Plan, *people: TestUser) -> Any:
        """Start a run that joins the old one."""
        await old.join()
        new = await self.launched(plan, *people)
        await new.join()
        return new

    def socks(self, place: Place, person: TestUser) -> int:
        port: int = self.stack.enter_context(way(place, person))
        return port

    def link(self, port: int) -> Any:
        return self.stack.enter_context(transfer.connect(port, self.echo))

    async def served(self, run: Generation) -> int:
        """Bytes from the users."""
        reading = await run.counters()
        return sum(reading.get(counter_name(Scope.USER, user.email, "uplink"), 0) for user in (ANNA, BERT))

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + 10
        while not await condition():
            assert time.monotonic() < deadline
            await deferLater(reactor, 0.02)

    async def test_the_new_one_takes_over(self) -> None:
        """With another configuration: connections live on, none fails, and the old run ends without connections."""
        _, old = await self.started(ANNA)
        changed = await self.prepared(self.home.inbound, self.work.inbound, log=self.ground.verbose)
        self.assertEqual(list(await old.obstacles(changed)), [])
        ports = [self.socks(place, ANNA) for place in (self.home, self.work)]
        links = [self.link(port) for port in ports]
        with Visitors(self.echo, ports) as visitors:
            new = await self.followed(old, changed, ANNA, BERT)
            self.assertEqual(await self.served(new), 0)
            await new.prove(5)
            await new.lead()
            transfer.connect(self.socks(self.home, BERT), self.echo).close()
            for link in links:
                transfer.echo(link, b"still there")
            self.assertGreaterEqual(await old.connected(), 2)
            for link in links:
                link.close()

            async def deserted() -> bool:
                return bool(await old.connected() == 0)

            await self.until(deserted)
            await old.stop()
            came = visitors.came
            while visitors.came < came + 10:
                await deferLater(reactor, 0.02)
        self.assertEqual(visitors.failed, [])
        self.assertGreater(await self.served(new), 0)
        self.assertFalse(new.shared)
        self.assertFalse([line for line in self.lines if KNOCKER in line])

    async def test_the_new_one_dies(self) -> None:
        """Its new connections go back to the old run at once."""
        plan, old = await self.started(ANNA)
        port = self.socks(self.home, ANNA)
        link = self.link(port)
        new = await self.followed(old, plan, ANNA)
        await new.prove(5)
        await new.lead()
        transfer.connect(port, self.echo).close()
        new.kill()
        await new.when_exited()
        await old.connected()  # once the end was handled
        transfer.connect(port, self.echo).close()
        transfer.echo(link, b"still there")

    async def test_the_new_one_hangs(self) -> None:
        """This is detected in time, and no user is affected."""
        plan, old = await self.started(ANNA)
        port = self.socks(self.home, ANNA)
        new = await self.followed(old, plan, ANNA)
        freeze(new.pid)
        with self.assertRaisesRegex(CoreFailed, f"127.0.0.1:{self.home.port}"):
            await new.prove(0.5)
        transfer.connect(port, self.echo).close()
        new.kill()
        await new.stop()
        transfer.connect(port, self.echo).close()
        self.assertTrue(old.alive)

    async def test_ends(self) -> None:
        """The end of a draining run cuts its connections, no port; when the serving one ends new connections wait."""
        plan, old = await self.started(ANNA)
        port = self.socks(self.home, ANNA)
        link = self.link(port)
        new = await self.followed(old, plan, ANNA)
        await new.lead()
        await old.wind_down()
        self.assertEqual(link.recv(1), b"")
        later = self.link(port)
        await new.wind_down()
        self.assertEqual(later.recv(1), b"")
        self.assertRaises(TimeoutError, meet, ("127.0.0.1", self.home.port), 0.3)

    async def test_killed_while_it_ends(self) -> None:
        """A core that dies while the node ends its connections is no fault of the node."""
        _, run = await self.started(ANNA)

        async def quieten() -> bool:
            run.kill()
            await run.when_exited()
            return False

        self.patch(run, "quieten", quieten)
        await run.wind_down()
        self.assertFalse(run.alive)

    async def test_users_of_both(self) -> None:
        """A user removed from the old run is cut there; a user added to the new one is admitted."""
        plan, old = await self.started(ANNA, BERT)
        link, other = self.link(self.socks(self.home, ANNA)), self.link(self.socks(self.home, BERT))
        new = await self.followed(old, plan, ANNA, BERT)
        await new.lead()
        removals = [Change(place.tag, ANNA.email, None) for place in (self.home, self.work)]
        self.assertEqual(await old.apply(removals), ([], []))
        self.assertEqual(link.recv(1), b"")
        transfer.echo(other, b"still there")

    async def test_obstacles(self) -> None:
        """Each is found before anything is changed."""
        plan, old = await self.started()
        self.assertEqual(await old.obstacles(plan), [])
        strange: Any = object()
        self.assertEqual(await old.obstacles(strange), ["the next core is of another type"])
        moved = await self.prepared({**self.home.inbound, "listen": "0.0.0.0"}, self.work.inbound)
        [obstacle] = await old.obstacles(moved)
        self.assertIn(f"port {self.home.port} changes its address", obstacle)
        self.assertFalse(old.shared)

    async def test_sessions(self) -> None:
        """UDP sessions end, and begin again with the next run, or with the old one; others live on."""
        certificate = certs.make(self.directory, [SERVER_NAME])
        kind = Kind("quic", hysteria(), tls(certificate, "hysteria", alpn=["h3"], hysteriaSettings={"version": 2}))
        self.work = Place(kind, "work", ground=self.ground)
        plan, old = await self.started(ANNA)
        self.assertEqual(await old.obstacles(plan), [])
        port, link = free_port(), self.link(self.socks(self.home, ANNA))
        self.stack.enter_context(SingBoxClient({port: [hysteria2(self.work.port, ANNA, certificate)]}))
        with chatter(port, self.echo), Activity(port, self.echo, 1, 0.01) as activity:
            new = await self.followed(old, plan, ANNA)
            await self.serves(old)
            self.assertEqual(await self.served(new), 0)
            await new.lead()
            await self.serves(new)
            another = await self.followed(new, plan, ANNA)
            await self.serves(new)
            self.assertEqual(await self.served(another), 0)
            leading = Deferred.fromCoroutine(another.lead())
            await self.until(lambda: self.is_hidden(another, self.work.port))
            another.kill()
            await another.when_exited()
            await leading
            await self.serves(new)
            activity.rest()
        self.assertLess(gap(activity), SOON)
        self.assertEqual(len(activity.dropped), 1)
        transfer.echo(link, b"still there")
        self.assertEqual(await old.connected(), 1)

    async def serves(self, run: Generation) -> None:
        """From now on this run gets new connections."""
        before = await self.served(run)

        async def more() -> bool:
            return await self.served(run) > before

        await self.until(more)

    async def is_hidden(self, run: Any, port: int) -> bool:
        _, found = look(run.pid, [range(port, port + 1)], socket.SOCK_DGRAM)
        with ExitStack() as stack:
            return all(is_hidden(stack.enter_context(one)) for one in found)

    async def test_datagrams(self) -> None:
        """Shadowsocks datagrams go to the run of new connections; clients notice nothing."""
        self.home = Place(Kind("ss", shadowsocks("aes-256-gcm"), raw()), "home", ground=self.ground)
        plan, old = await self.started(ANNA)
        self.assertEqual(await old.obstacles(plan), [])
        port = self.socks(self.home, ANNA)
        with UdpAssociation(port) as association, UdpAssociation(port) as later:
            transfer.udp_echo(association, b"before", self.echo)
            new = await self.followed(old, plan, ANNA)
            before = await self.served(old)
            for _ in range(20):
                with UdpAssociation(port) as another:
                    transfer.udp_echo(another, b"meanwhile", self.echo)

            async def counted() -> bool:
                return await self.served(old) >= before + 20 * len(b"meanwhile")

            # The core counts bytes after it has sent them.
            await self.until(counted)
            self.assertEqual(await self.served(new), 0)
            await new.lead()
            served = await self.served(old)
            for one in (association, later, association, later):
                transfer.udp_echo(one, b"after", self.echo)
            self.assertEqual(await self.served(old), served)
            self.assertGreater(await self.served(new), 0)
            new.kill()
            await new.when_exited()
            await old.connected()
            transfer.udp_echo(association, b"back", self.echo)
            transfer.udp_echo(later, b"back", self.echo)

    async def test_datagrams_that_are_passed_on(self) -> None:
        """They go to the leading run, like all others."""
        port = free_port()
        plan = await self.prepared(self.passing(port))
        old = await self.launched(plan)
        self.assertEqual(await old.obstacles(plan), [])
        new = await self.followed(old, plan)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(5)
            client.connect(("127.0.0.1", port))

            def passes() -> bool:
                client.send(b"there and back")
                return client.recv(64) == b"there and back"

            self.assertTrue(passes())
            with frozen(new.pid):
                self.assertTrue(passes())
            await new.lead()
            with frozen(old.pid):
                self.assertTrue(passes())

    def passing(self, port: int) -> Json:
        """An inbound that forwards UDP of this port to the echo server."""
        raise NotImplementedError

    async def test_datagrams_at_the_end(self) -> None:
        """The leading run gets no more of them, so that its counters come to rest; it still replies."""
        self.home = Place(Kind("ss", shadowsocks("aes-256-gcm"), raw()), "home", ground=self.ground)
        plan, old = await self.started(ANNA)
        new = await self.followed(old, plan, ANNA)
        await new.lead()
        with UdpAssociation(self.socks(self.home, ANNA)) as association:
            transfer.udp_echo(association, b"before", self.echo)
            await new.wind_down()
            served = await self.served(new)
            self.assertGreater(served, 0)
            association.send(b"after", self.echo.host, self.echo.port)
            await new.connected()
            self.assertEqual((await self.served(new), await self.served(old)), (served, 0))


class XrayTests(SharingTests):
    __test__ = True
    ground = grounds.XRAY

    def passing(self, port: int) -> Json:
        settings = {"network": "udp", "address": self.echo.host, "port": self.echo.port}
        inbound = {"tag": "passing", "listen": "127.0.0.1", "port": port, "protocol": "dokodemo-door"}
        return {**inbound, "settings": settings}

    async def test_http_3(self) -> None:
        """XHTTP's clients would not notice, so its inbound is not shared."""
        h3 = tls(certs.make(self.directory, [SERVER_NAME]), "xhttp", ["h3"], xhttpSettings={"path": "/x"})
        self.home = Place(Kind("xhttp", vless(), h3), "home", ground=self.ground)
        plan, run = await self.started()
        [obstacle] = await run.obstacles(plan)
        self.assertIn("clients of 'home'", obstacle)

    async def test_udp_of_connections(self) -> None:
        """SOCKS's UDP belongs to connections of the run, so it cannot be led; newer cores have no such port."""
        port = free_port()
        socks = {"tag": "socks", "listen": "127.0.0.1", "port": port, "protocol": "socks", "settings": {"udp": True}}
        run = await self.launched(plan := await self.prepared(socks))
        told = f"UDP at 127.0.0.1:{port} cannot be steered to another core"
        self.assertEqual(await run.obstacles(plan), [told] if xray_number() <= (26, 3, 27) else [])

    async def test_swaps(self) -> None:
        """No inbound is swapped while another core is awaited; once it leads, its swapped inbound gets connections."""
        kind = Kind("ss", shadowsocks_2022("2022-blake3-aes-128-gcm", 16), raw())
        self.home = Place(kind, "home", ground=self.ground)
        plan, old = await self.started(ANNA, BERT)
        removal = [Change("home", ANNA.email, None)]
        await old.join()
        ports = [range(self.home.port, self.home.port + 1)]
        before = listeners(ports)
        self.assertEqual(await old.apply(removal), ([], removal))
        self.assertEqual((listeners(ports), old.accounts["home"].keys()), (before, {ANNA.email, BERT.email}))
        new = await self.launched(plan, ANNA, BERT)
        await new.join()
        await new.lead()
        for run in (old, new):
            self.assertEqual(await run.apply(removal), ([], []))
            self.assertEqual(run.accounts["home"].keys(), {BERT.email})
        transfer.connect(self.socks(self.home, BERT), self.echo).close()
        with self.assertRaises(OSError):
            transfer.connect(self.socks(self.home, ANNA), self.echo, 1).close()
        # The older one loses her before it leads again.
        await old.lead()
        transfer.connect(self.socks(self.home, BERT), self.echo).close()
        with self.assertRaises(OSError):
            transfer.connect(self.socks(self.home, ANNA), self.echo, 1).close()

    async def test_an_inbound_in_the_file_system(self) -> None:
        """Only one process can have it; the core's own API is no obstacle."""
        path = self.directory / "inbound"
        plan = await self.prepared({**self.home.inbound, "listen": str(path)})
        run = await self.launched(plan)
        self.assertEqual(await run.obstacles(plan), [f"only one process can listen at {path}"])

        abstract = f"@{path.name}-{os.getpid()}"
        plan = await self.prepared({**self.home.inbound, "listen": abstract})
        run = await self.launched(plan)
        self.assertEqual(await run.obstacles(plan), [f"only one process can listen at {abstract}"])

    async def test_a_key_of_wireguard(self) -> None:
        """Its peer knows only one process: this is reported, and nothing is changed."""
        key = base64.b64encode(bytes(32)).decode()
        settings = {"secretKey": key, "noKernelTun": True, "peers": [{"publicKey": key, "endpoint": "127.0.0.1:9"}]}
        outbounds = [{"protocol": "freedom"}, {"protocol": "wireguard", "tag": "warp", "settings": settings}]
        plan = await self.prepared(self.home.inbound, outbounds=outbounds)
        run = await self.launched(plan)
        [obstacle] = await run.obstacles(plan)
        self.assertIn("WireGuard key of 'warp'", obstacle)
        self.assertFalse(run.shared)


class SingBoxTests(SharingTests):
    __test__ = True
    ground = grounds.SING_BOX

    def passing(self, port: int) -> Json:
        target = {"override_address": self.echo.host, "override_port": self.echo.port}
        inbound = {"type": "direct", "tag": "passing", "listen": "127.0.0.1", "listen_port": port}
        return {**inbound, "network": "udp", **target}

    async def test_naive(self) -> None:
        """It has both TCP and UDP on its port."""
        server, _ = sing_box.tls(certs.make(self.directory, [SERVER_NAME]))
        port = free_port()
        naive = {"type": "naive", "tag": "naive", "listen": "::", "listen_port": port, **server}
        plan = await self.prepared(naive)
        old = await self.launched(plan)
        self.assertEqual(await old.obstacles(plan), [])
        new = await self.followed(old, plan)
        await new.prove(5)
        await new.lead()
        self.assertEqual([await self.is_hidden(run, port) for run in (old, new)], [True, False])
