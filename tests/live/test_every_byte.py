"""Every byte is counted once: whatever ends, fails or is lost, bills match the bytes transferred."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from node.contract.counters import Row, Scope
from node.contract.saved import Changes
from node.state.database import Database
from protos.service_pb2 import Inbounds, StatRequest, StatResponse, User, UsersStat
from scripts.staging import transfer
from scripts.staging.controller import Controller
from scripts.staging.core import XrayClient
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.process import freeze
from scripts.staging.rpc import SERVICE
from scripts.staging.users import TestUser
from scripts.staging.wait import accepts, until
from tests.conftest import Place, control, member, run, settled, way
from tests.harness.grounds import Ground
from tests.harness.wire import GrpcWire, Wire

PEOPLE = [TestUser.new(f"{name}@test") for name in ("anna", "Bert", "carl", "dora", "emil")]
MORE = TestUser.new("more@test")
# Bytes by user and direction.
Bill = Tally[tuple[str, str]]


class Street:
    """Five users of one inbound, each with their own client: the bytes that they moved, and the bills."""

    def __init__(self, node: NodeProcess, home: Place, echo: EchoServer, ports: Mapping[str, int]) -> None:
        self.node, self.home, self._echo, self._ports = node, home, echo, ports
        self.moved, self.billed = Bill(), Bill()
        self._links: dict[str, socket.socket] = {}
        self._size = 1000
        self._core = 0
        with ExitStack() as stack:
            self._controllers = both(node, stack)
            self._stack = stack.pop_all()

    @property
    def members(self) -> list[User]:
        return [member(person, self.home) for person in PEOPLE]

    @property
    def controller(self) -> Controller:
        """The controllers of both transports in turn."""
        self._controllers = [*self._controllers[1:], self._controllers[0]]
        return self._controllers[0]

    def transfer(self) -> Bill:
        """Each user moves another number of bytes, and keeps the connection. Returns the bytes."""
        moved = Bill()
        self._notice_another_core()
        for person in PEOPLE:
            self._size += 997
            before = self._echo.received, self._echo.sent
            link = self._link(person.email)
            transfer.echo(link, bytes(self._size))
            transfer.download(link, 3 * self._size)
            transfer.upload(link, 2 * self._size)
            moved[person.email, "uplink"] = self._echo.received - before[0]
            moved[person.email, "downlink"] = self._echo.sent - before[1]
        self.moved += moved
        return moved

    def bill(self) -> None:
        """Read the counters with reset, as a controller does."""
        self.billed += rows(self.controller.stats(UsersStat, reset=True))

    def is_booked(self) -> bool:
        """Whether the node has booked all bytes, billed or not."""
        return self.billed + rows(self.controller.stats(UsersStat)) == self.moved

    def close(self) -> None:
        self.close_links()
        self._stack.close()

    def close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _notice_another_core(self) -> None:
        """Wait until connections through the previous core have ended or drain, and a new core accepts."""
        pid = core(self.node)
        if pid != self._core:
            if self._core in self.node.core_pids():
                self._come_again(PEOPLE[1:])
            else:
                until(lambda: all(map(has_ended, self._links.values())), what="the connections end")
                self.close_links()
            self._core = pid
        until(lambda: accepts(self.home.port), what="the core accepts")

    def _come_again(self, people: Iterable[TestUser]) -> None:
        """Close connections that survived, so that the next ones use the new core."""
        for person in people:
            with self._links.pop(person.email) as link:
                assert not has_ended(link)

    def _link(self, email: str) -> socket.socket:
        if email not in self._links:
            self._links[email] = transfer.connect(self._ports[email], self._echo)
        return self._links[email]


@pytest.fixture
def street(own_node: NodeProcess, home: Place, echo: EchoServer) -> Iterator[Street]:
    ports = {person.email: free_port() for person in PEOPLE}
    outbounds = {ports[person.email]: home.outbound(person) for person in PEOPLE}
    with XrayClient(outbounds), closing(Street(own_node, home, echo, ports)) as street:
        yield street


def both(node: NodeProcess, stack: ExitStack) -> list[Controller]:
    return [stack.enter_context(control(node, transport)) for transport in ("rest", "grpc")]


def has_ended(link: socket.socket) -> bool:
    """Whether the other side has closed: an echo connection only answers."""
    link.setblocking(False)
    try:
        return not link.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        link.settimeout(10)


def rows(reply: StatResponse) -> Bill:
    return Bill({(stat.name, stat.type): stat.value for stat in reply.stats})


def core(node: NodeProcess) -> int:
    return node.newest_core()


def restart(street: Street) -> None:
    """Restart the node cleanly, with its backend."""
    street.node.stop()
    street.node.start()
    until(lambda: street.controller.info().running, what="the backend is resumed")


def stop_and_start(street: Street) -> None:
    street.controller.stop()
    run(street.controller, [street.home], street.members)


PLANNED: Mapping[str, Callable[[Street], object]] = {
    "nothing": lambda street: None,
    "a sync": lambda street: street.controller.sync_users([*street.members, member(MORE, street.home)]),
    "an identical Start": lambda street: run(street.controller, [street.home], street.members),
    "another Start": lambda street: run(street.controller, [street.home], street.members, **street.home.ground.other),
    "Stop and Start": stop_and_start,
    "the node's restart": restart,
}


@pytest.mark.slow
def test_planned_ends(street: Street) -> None:
    """Whatever calls are made during transfers, the bills add up to the bytes on the wire."""
    run(street.controller, [street.home], street.members)
    for take in (False, True):
        for act in PLANNED.values():
            street.transfer()
            act(street)
            if take:
                street.bill()
    street.transfer()
    street.controller.stop()
    assert street.is_booked()
    street.bill()
    assert street.billed == street.moved
    # An inbound's counter includes the protocol's overhead.
    inbound = rows(street.controller.stats(Inbounds))[street.home.tag, "uplink"]
    users = sum(value for (_, direction), value in street.moved.items() if direction == "uplink")
    assert users <= inbound <= 1.01 * users
    assert not street.controller.stats(UsersStat).stats


def test_removed_users_are_billed(street: Street) -> None:
    """Bytes of removed users, and of all users at another backend, are kept until they are read."""
    run(street.controller, [street.home], street.members)
    street.transfer()
    street.controller.sync_users([])
    run(street.controller, [Place(street.home.kind, "elsewhere", ground=street.home.ground)])
    street.bill()
    assert street.billed == street.moved


def kill_core(street: Street) -> None:
    before = core(street.node)
    os.kill(before, signal.SIGKILL)
    until(lambda: core(street.node) != before and street.controller.info().running, what="another core runs")


def kill_node(street: Street) -> None:
    street.node.kill()
    street.node.start()
    until(lambda: street.controller.info().running, what="the backend is resumed")


def kill_both(street: Street) -> None:
    pid = core(street.node)
    freeze(street.node.node_pid)
    os.kill(pid, signal.SIGKILL)
    kill_node(street)


CRASHES: Mapping[str, Callable[[Street], None]] = {"core": kill_core, "node": kill_node, "both": kill_both}


@pytest.mark.slow
@pytest.mark.parametrize("who", list(CRASHES))
def test_crashes(street: Street, who: str) -> None:
    """Bytes read before a crash are there after it, once; at most those after the last reading are lost."""
    run(street.controller, [street.home], street.members)
    for _ in range(3):
        street.transfer()
        until(street.is_booked, what="it is polled")
        # Wait until the reading is on disk.
        until(lambda: on_disk(street.node) == street.moved - street.billed, what="it is on disk")
        late = street.transfer() if who == "core" else Bill()
        CRASHES[who](street)
        street.moved -= late
        found = rows(street.controller.stats(UsersStat))
        assert found >= street.moved - street.billed
        assert found <= street.moved - street.billed + late
        street.moved = street.billed + found
        street.bill()
    assert street.billed == street.moved


def on_disk(node: NodeProcess) -> Bill:
    """The bytes that a node started now would find on disk."""
    saved = Database(node.state / "state.db").peek()
    assert saved is not None
    users = [row for row in saved.rows if row.scope is Scope.USER]
    both = {(row.name, "uplink"): row.uplink for row in users} | {(row.name, "downlink"): row.downlink for row in users}
    return +Bill(both)


CROWD = 30_000


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[tuple[NodeProcess, Bill]]:
    """A node with unread bytes of very many users, and those bytes: a reply of some megabytes."""
    node = NodeProcess(tmp_path)
    node.state.mkdir(mode=0o700)
    crowd = [Row(Scope.USER, f"{number}@crowd-of-the-past.test", number + 1, 2 * number + 1) for number in range(CROWD)]
    database = Database(node.state / "state.db")
    database.write(Changes(rows={(row.scope, row.key): row for row in crowd}))
    database.close()
    with node:
        yield (
            node,
            Bill(
                {
                    (row.name, word): value
                    for row in crowd
                    for word, value in (("uplink", row.uplink), ("downlink", row.downlink))
                }
            ),
        )


def rest_wire(node: NodeProcess) -> Wire:
    """A client that has requested all counters with reset, and whose kernel accepts little of the reply."""
    wire = Wire(node.rest_port, node.pem, "http/1.1", receive=4096)
    body = StatRequest(type=UsersStat, reset=True).SerializeToString()
    head = f"GET /stats HTTP/1.1\r\nHost: node\r\nx-api-key: {node.key}\r\nContent-Length: {len(body)}\r\n\r\n"
    wire.send(head.encode(), body)
    return wire


def grpc_wire(node: NodeProcess) -> Wire:
    wire = GrpcWire(node.grpc_port, node.pem)
    request = StatRequest(type=UsersStat, reset=True).SerializeToString()
    wire.ask(f"/{SERVICE.full_name}/GetStats", node.key, request)
    return wire


WIRES: Mapping[str, Callable[[NodeProcess], Wire]] = {"rest": rest_wire, "grpc": grpc_wire}


@pytest.mark.slow
@pytest.mark.parametrize("transport", list(WIRES))
@pytest.mark.parametrize("leave", [Wire.close, Wire.reset], ids=["close", "reset"])
@pytest.mark.turns("leave")
def test_gone_in_the_middle_of_a_reply(
    crowded: tuple[NodeProcess, Bill], transport: str, leave: Callable[[Wire], None]
) -> None:
    """A controller that leaves during a reply has read nothing; the next one gets everything, once."""
    node, expected = crowded
    with control(node, transport) as controller:
        for _ in range(3):
            wire = WIRES[transport](node)
            assert wire.read(20_000) >= 20_000
            assert not controller.stats(UsersStat).stats, "they are set aside"
            leave(wire)
            until(lambda: rows(controller.stats(UsersStat)) == expected, what="they are back")
        assert rows(controller.stats(UsersStat, reset=True)) == expected
        assert not controller.stats(UsersStat).stats


@pytest.mark.parametrize("transport", list(WIRES))
def test_node_ends_in_the_middle_of_a_reply(crowded: tuple[NodeProcess, Bill], transport: str) -> None:
    """Rows that were set aside when the node ended, cleanly or not, are there after its restart."""
    node, expected = crowded
    for end in (node.stop, node.kill):
        with closing(WIRES[transport](node)) as wire:
            wire.read(20_000)
            end()
        node.start()
        with control(node, transport) as controller:
            assert rows(controller.stats(UsersStat)) == expected


@pytest.mark.parametrize("transport", list(WIRES))
def test_gone_before_there_is_a_reply(street: Street, transport: str) -> None:
    """A controller that hangs up while the core is slow has read nothing."""
    run(street.controller, [street.home], street.members)
    street.transfer()
    freeze(core(street.node))
    try:
        WIRES[transport](street.node).close()
    finally:
        os.kill(core(street.node), signal.SIGCONT)
    until(street.is_booked, what="everything is there")
    street.bill()
    assert street.billed == street.moved


@pytest.mark.parametrize("name", ["vless-reality-vision"])
def test_download_that_is_cut(
    own_node: NodeProcess,
    all_kinds: Mapping[str, Kind],
    ground: Ground,
    cover: CoverServer,
    echo: EchoServer,
    name: str,
) -> None:
    """Two gigabytes over Vision, cut in the middle by a Stop: the received bytes are counted, and hardly more."""
    place, person, size = Place(all_kinds[name], "home", ground=ground), PEOPLE[0], 2_000_000_000
    with control(own_node, "grpc") as controller:
        with settled([place], cover):
            run(controller, [place], [member(person, place)])
        with way(place, person) as port, transfer.connect(port, echo) as link, Drain(link, size) as drain:
            until(lambda: drain.received > 100_000_000, 30, what="a good part is there")
            controller.stop()
            received = drain.end()
        counted = rows(controller.stats(UsersStat))[person.email, "downlink"]
    assert received < size
    # Up to the buffers of both cores and of the kernel between them at the cut.
    assert received <= counted <= received + 16_000_000


class Drain:
    """Downloads and counts bytes as fast as they arrive."""

    def __init__(self, link: socket.socket, size: int) -> None:
        self.received = 0
        self._link = link
        self._thread = threading.Thread(target=self._run, daemon=True)
        link.sendall(b"give %d\n" % size)

    def __enter__(self) -> Drain:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._thread.join(10)

    def end(self) -> int:
        """The number of bytes received, once no more arrive."""
        self._thread.join(10)
        assert not self._thread.is_alive(), "the connection does not end"
        return self.received

    def _run(self) -> None:
        buffer = bytearray(1024 * 1024)
        try:
            while count := self._link.recv_into(buffer):
                self.received += count
        except OSError:
            return  # The connection was cut.
