"""New connections steered from one process to another: none fails, and all reach the process steered to."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivers.sockets.connections import peers
from drivers.sockets.held import Unsteerable
from drivers.sockets.listeners import survey
from drivers.sockets.reuseport import RESET, knock
from drivers.sockets.sock_diag import Ports
from drivers.sockets.steering import Datagrams, Steering
from protos import handover_pb2
from scripts.staging.ports import free_port
from scripts.staging.process import freeze
from scripts.staging.wait import until
from tests.harness import handed_on
from tests.harness.open_files import open_files
from tests.harness.steered import Greeter, Visit, Visitors, ask, meet

HOST = "127.0.0.1"
# States of a connection in its tcp_info, from include/net/tcp_states.h.
CLOSED = 7
NAMES = "abcdefghijklmnopqrstuvwxyz"


def only(port: int) -> Ports:
    return [range(port, port + 1)]


def host_of(listening: str) -> str:
    """The address by which a listener is reached."""
    return {"0.0.0.0": HOST, "::": "::1"}.get(listening, listening)


class Port:
    """A port, the processes on it, and the steering under test."""

    def __init__(self, hosts: Sequence[str] = (HOST,)) -> None:
        self.number = free_port()
        self.ports = only(self.number)
        self.listening = [(host, self.number) for host in hosts]
        self.address = (host_of(hosts[0]), self.number)
        self.steering = Steering(handed_on.shelf())
        self._stack = ExitStack()
        self._names = iter(NAMES * 10)

    def start(self) -> Greeter:
        return self._stack.enter_context(Greeter(next(self._names), self.listening))

    def join(self) -> Greeter:
        """Start a process and add it."""
        new = self.start()
        self.steering.join(new.pid, self.ports)
        return new

    def link(self) -> socket.socket:
        """A connection that stays open, by its process's greeting."""
        link = self._stack.enter_context(socket.create_connection(self.address, timeout=5))
        link.recv(1)
        return link

    def rest(self, one: Greeter) -> None:
        """Wait until a process has no connections."""
        until(lambda: not any(self.steering.waiting(one.pid).values()) and not peers(one.pid), what="no connections")

    def end(self, one: Greeter) -> int:
        one.kill()
        return self.steering.leave(one.pid)

    def killed(self) -> None:
        """The node that steers is killed, and the next one goes on."""
        self.steering = handed_on.steering(self.steering)

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.steering.close()


@pytest.fixture
def port() -> Iterator[Port]:
    with Port() as made:
        yield made


# Which process they reach

# Events: a process joins, one is steered to, one opens its listeners again, or one exits (which, counted in the order
# of joining). Or the state is handed over to the next node process, or that takes over from a killed one.
WORDS = ["join", "join", "steer", "renew", "renew", "end", "end", "kill", "kill"]
STEPS = st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 9)), min_size=10, max_size=16)


@settings(max_examples=5, deadline=None)
@given(STEPS)
def test_whatever_comes_and_goes(steps: list[tuple[str, int]]) -> None:
    """Two to five processes in any order of events: all connections reach the right process, and none fails.

    But those that come while the process that gets them has no listener.
    """
    renewals = list[tuple[float, float]]()

    def apart(visits: list[Visit]) -> list[Visit]:
        return [one for one in visits if not any(a <= one.end and one.begin <= b for a, b in renewals)]

    with Port() as port:
        alive = [port.join()]
        current = alive[0]
        with Visitors([port.address] * 2) as visitors:
            since = time.monotonic()
            for step, which in [("join", 0), *steps]:
                one = alive[which % len(alive)]
                if step == "join" and len(alive) < 5:
                    alive.append(port.join())
                elif step == "steer":
                    assert apart(visitors.strays(current.name, since, time.monotonic())) == []
                    port.steering.steer(one.pid)
                    current, since = one, time.monotonic()
                elif step == "end" and one is not current:
                    port.rest(one)
                    alive.remove(one)
                    port.end(one)
                elif step == "renew":
                    began = time.monotonic()
                    one.renew()
                    port.steering.renew(one.pid, port.ports)
                    if one is current:
                        renewals.append((began, time.monotonic()))
                elif step == "kill":
                    port.killed()
                visitors.more(10)
            assert apart(visitors.strays(current.name, since, time.monotonic())) == []
            for one in [one for one in alive if one is not current]:
                port.rest(one)
                port.end(one)
                visitors.more(10)
        assert apart(visitors.failed) == []


def test_a_renewal_after_one_that_failed(port: Port) -> None:
    """The listener of the failed one gets no connections, as its process has closed it."""
    port.join()
    one = port.join()
    stranger = port.start()
    one.renew()
    with pytest.raises(Unsteerable, match="another process"):
        port.steering.renew(one.pid, port.ports)
    stranger.kill()
    one.renew()
    port.steering.renew(one.pid, port.ports)
    port.steering.steer(one.pid)
    assert meet(port.address) == one.name


def test_datagrams_from_a_port_of_streams() -> None:
    """The kernel may give a UDP socket of a user's traffic the number of a port where a core listens by TCP alone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind((HOST, 0))
        Datagrams(handed_on.shelf()).renew(os.getpid(), only(one.getsockname()[1]))


@pytest.mark.parametrize(
    ("hosts", "reached"),
    [
        (["127.0.0.1"], ["127.0.0.1"]),
        (["0.0.0.0"], ["127.0.0.1"]),
        (["::1"], ["::1"]),
        (["::"], ["127.0.0.1", "::1"]),
        (["127.0.0.1", "::1"], ["127.0.0.1", "::1"]),
    ],
    ids=lambda hosts: " ".join(hosts),
)
def test_thousands_of_connections_over_many_generations(hosts: list[str], reached: list[str]) -> None:
    """Each generation takes over from the one before, as cores do: no new connection fails or goes astray."""
    with Port(hosts) as port, ExitStack() as stack:
        old = port.join()
        link = port.link()
        visitors = stack.enter_context(Visitors([(host, port.number) for host in reached] * 2, 0.0005))
        for _ in range(6):
            new = port.join()
            visitors.more(30)
            port.steering.steer(new.pid)
            since = time.monotonic()
            visitors.more(100)
            assert visitors.strays(new.name, since, time.monotonic()) == []
            assert ask(link, b"x") == b"x"
            link.close()
            port.rest(old)
            link = port.link()
            port.end(old)
            visitors.more(60)
            assert visitors.strays(new.name, since, time.monotonic()) == []
            old = new
        assert len(visitors.visits) > 1000
        assert visitors.failed == []


@pytest.mark.parametrize("hosts", [["127.0.0.1"], ["0.0.0.0"], ["::1"], ["::"], ["127.0.0.1", "::1"]])
def test_the_node_is_killed(hosts: list[str]) -> None:
    """The order stays, whatever exits before and meanwhile: the keeper holds all listeners."""
    with Port(hosts) as port, Visitors([port.address] * 2) as visitors:
        a, b, c, d, e = (port.join() for _ in NAMES[:5])
        port.steering.steer(e.pid)
        since = time.monotonic()
        port.killed()
        visitors.more(50)
        port.rest(b)
        port.end(b)
        port.rest(c)
        c.kill()
        port.killed()
        visitors.more(50)
        port.steering.leave(c.pid)
        new = port.join()
        visitors.more(20)
        assert visitors.strays(e.name, since, time.monotonic()) == []
        port.steering.steer(new.pid)
        since = time.monotonic()
        visitors.more(20)
        for one in (a, d, e):
            port.rest(one)
            port.end(one)
            port.killed()
        visitors.more(20)
        assert visitors.strays(new.name, since, time.monotonic()) == []


def test_the_node_is_killed_while_it_closes(port: Port) -> None:
    """What the next node reads may be older than what the killed one has closed."""
    a, b, c, d = (port.join() for _ in NAMES[:4])
    port.steering.steer(c.pid)
    stored = handover_pb2.Sharing(streams=port.steering.packed())
    port.end(a)
    port.join()
    port.steering = handed_on.steering(port.steering, stored)
    port.steering.steer(c.pid)
    assert {meet(port.address) for _ in range(50)} == {c.name}
    port.steering.steer(b.pid)
    assert {meet(port.address) for _ in range(50)} == {b.name}
    assert d.pid


def test_listeners_that_are_renewed(port: Port) -> None:
    """Connections stay with the process that opened its listener again, led to or not, however often it does."""
    old, new = port.join(), port.join()
    link = port.link()
    port.steering.steer(new.pid)
    for one in (new, new, old, new, old, old, new):
        one.renew()
        port.steering.renew(one.pid, port.ports)
        assert {meet(port.address) for _ in range(30)} == {new.name}
    assert ask(link, b"still there") == b"still there"
    port.steering.steer(old.pid)
    assert {meet(port.address) for _ in range(30)} == {old.name}
    newest = port.join()
    port.end(new)
    port.steering.steer(newest.pid)
    assert {meet(port.address) for _ in range(30)} == {newest.name}


def test_listeners_that_are_not_renewed(port: Port) -> None:
    """Nothing changes, and nothing stays open."""
    port.join()
    new = port.join()
    port.steering.steer(new.pid)
    before = open_files()
    port.steering.renew(new.pid, port.ports)
    assert open_files().items() <= before.items()
    assert {meet(port.address) for _ in range(30)} == {new.name}


def test_a_process_that_joins_gets_no_connections(port: Port) -> None:
    """A process that joins gets only one knock of the node; once steered to, all connections; and back."""
    old = port.join()
    new = port.join()
    assert {meet(port.address) for _ in range(100)} == {old.name}
    port.steering.steer(new.pid)
    assert {meet(port.address) for _ in range(100)} == {new.name}
    port.steering.steer(old.pid)
    assert {meet(port.address) for _ in range(100)} == {old.name}
    port.end(new)
    assert {meet(port.address) for _ in range(100)} == {old.name}


def test_a_process_that_has_not_joined_gets_no_connections(port: Port) -> None:
    """From its listen on, whichever process is alone by then, after others have come and gone."""
    processes = [port.join() for _ in range(4)]
    port.steering.steer(processes[2].pid)
    for one in (processes[3], processes[0], processes[1]):
        port.end(one)
        port.start().kill()
    port.start()
    assert {meet(port.address) for _ in range(100)} == {processes[2].name}


@pytest.mark.parametrize("places", [(0, 1), (0, 1, 2, 1)])
def test_another_exits_before_one_joins(port: Port, places: Sequence[int]) -> None:
    """A process that listens gets no connections until it joins, and is found although an older one exits then."""
    processes = [port.join() for _ in set(places)]
    for place in places:
        port.steering.steer(processes[place].pid)
    new = port.start()
    port.end(processes[0])
    assert {meet(port.address) for _ in range(100)} == {processes[1].name}
    port.steering.join(new.pid, port.ports)
    port.steering.steer(new.pid)
    assert {meet(port.address) for _ in range(100)} == {new.name}


def test_only_a_knock_is_noticed(port: Port) -> None:
    """Joining is silent; a knock is one empty connection, to the given process."""
    first = port.join()
    link = port.link()
    for _ in range(3):
        port.steering.knock(port.join().pid)
    assert ask(link, b"came?") == b"1"
    port.steering.knock(first.pid)
    until(lambda: ask(link, b"came?") == b"2")
    newest = port.join()
    port.steering.steer(newest.pid)
    other = port.link()
    assert ask(other, b"came?") == b"1"
    assert ask(link, b"came?") == b"2"


@pytest.mark.parametrize("most", [1000, 200])
def test_small_segments(port: Port, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A listener is distinguished from others where the machine's segments are smaller than the mark."""

    class Small(socket.socket):
        def bind(self, address: Any) -> None:
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, most)
            super().bind(address)

    one, other = port.join(), port.start()
    monkeypatch.setattr(socket, "socket", Small)
    port.steering.join(other.pid, port.ports)
    assert {meet(port.address) for _ in range(30)} == {one.name}
    port.steering.steer(other.pid)
    assert {meet(port.address) for _ in range(30)} == {other.name}
    port.start()
    with pytest.raises(Unsteerable, match="another process also listens"):
        port.join()


def test_connections_stay_where_they_are(port: Port) -> None:
    """Existing connections stay open while others join, are steered to, and leave."""
    processes = [port.join()]
    links = [port.link()]
    for _ in range(3):
        processes.append(port.join())
        port.steering.steer(processes[-1].pid)
        links.append(port.link())
    for one, link in zip(processes[:3], links[:3], strict=True):
        assert all(ask(other, b"x") == b"x" for other in links[links.index(link) :])
        port.end(one)
    assert ask(links[-1], b"x") == b"x"


def test_one_that_hangs_gets_no_connections(port: Port) -> None:
    """Of two draining processes one is stopped and the other exits: the stopped one gets no connection by that."""
    hung, other, new = port.join(), port.join(), port.join()
    port.steering.steer(new.pid)
    freeze(hung.pid)
    with Visitors([port.address] * 2) as visitors:
        visitors.more(50)
        port.end(other)
        visitors.more(100)
        assert port.end(hung) == 0
        visitors.more(100)
    assert {visit.met for visit in visitors.visits} == {new.name}


def test_waiting_connections_are_reset(port: Port) -> None:
    """Connections that a stopped process has not accepted are counted, and reset when it has exited."""
    old = port.join()
    freeze(old.pid)
    with ExitStack() as stack:
        links = [stack.enter_context(socket.create_connection(port.address, timeout=5)) for _ in range(3)]
        new = port.join()
        port.steering.steer(new.pid)
        assert meet(port.address) == new.name
        assert list(port.steering.waiting(old.pid).values()) == [3]
        assert port.end(old) == 3
        for link in links:
            with pytest.raises(ConnectionResetError):
                link.recv(1)
    assert meet(port.address) == new.name


def test_one_that_does_not_accept_is_seen(port: Port) -> None:
    """A knock waits at a process that does not accept; at one that does nothing waits."""
    port.join()
    deaf = port.start()
    freeze(deaf.pid)
    port.steering.join(deaf.pid, port.ports)
    assert list(port.steering.waiting(deaf.pid).values()) == [0]
    port.steering.knock(deaf.pid)
    assert list(port.steering.waiting(deaf.pid).values()) == [1]
    deaf.signal(signal.SIGCONT)
    until(lambda: list(port.steering.waiting(deaf.pid).values()) == [0])


def test_a_knock_that_is_reset_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core whose inbound has no users resets a knock, maybe before the node's connect has returned."""

    class Slow(socket.socket):
        def connect(self, address: Any) -> None:
            super().connect(address)
            with listener.accept()[0] as knocked:
                knocked.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            until(lambda: self.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == bytes([CLOSED]))
            raise OSError(error := self.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), os.strerror(error))

    with socket.create_server((HOST, free_port()), reuse_port=True) as listener:
        monkeypatch.setattr(socket, "socket", Slow)
        assert knock(listener, 0, 0)


def test_a_crash_leads_back(port: Port) -> None:
    """When the process with all connections dies, the next ones reach the newest of the others."""
    oldest, older, new = port.join(), port.join(), port.join()
    port.steering.steer(new.pid)
    port.end(new)
    assert {meet(port.address) for _ in range(50)} == {older.name}
    port.end(older)
    assert {meet(port.address) for _ in range(50)} == {oldest.name}
    port.end(oldest)
    with pytest.raises(ConnectionRefusedError):
        meet(port.address)
    again = port.join()
    assert meet(port.address) == again.name


# Addresses


def test_addresses_that_come_and_go() -> None:
    """A new configuration has other ports: the common one is steered, the new one works, the old one is named."""
    common, gone, added = (free_port() for _ in range(3))
    ports = [*only(common), *only(gone), *only(added)]
    with Greeter("a", [(HOST, common), (HOST, gone)]) as old:
        steering = Steering(handed_on.shelf())
        steering.join(old.pid, ports)
        with Greeter("b", [(HOST, common), (HOST, added)]) as new:
            steering.join(new.pid, ports)
            steering.steer(new.pid)
            assert [meet((HOST, number)) for number in (common, gone, added)] == ["b", "a", "b"]
            assert {address.port for address in steering.missing(new.pid)} == {gone}
            assert {address.port for address in steering.missing(old.pid)} == {added}
            with socket.create_connection((HOST, gone)) as link:
                assert ask(link, b"x")
                steering.deafen(steering.missing(new.pid))
                with pytest.raises(TimeoutError):
                    meet((HOST, gone), 0.2)
                assert ask(link, b"x")
            steering.deafen(steering.missing(new.pid), False)
            assert meet((HOST, gone)) == "a"
            old.kill()
            steering.leave(old.pid)
            assert steering.missing(new.pid) == frozenset()
            with pytest.raises(ConnectionRefusedError):
                meet((HOST, gone))
            steering.close()


def test_other_ports_are_left(port: Port) -> None:
    """Only the given ports of a process are looked at."""
    other = free_port()
    with Greeter("a", [(HOST, other), *port.listening]) as one:
        port.steering.join(one.pid, port.ports)
        assert {address.port for address in port.steering.waiting(one.pid)} == {port.number}
        assert {address.port for address in survey(one.pid, port.ports).tcp} == {port.number}
        assert survey(one.pid, [range(0)]).tcp == frozenset()


def test_nothing_stays_open(port: Port) -> None:
    """After a close no descriptor and no port is held."""
    before = open_files()
    with Port() as own:
        for _ in range(3):
            own.steering.steer(own.join().pid)
        own.steering.knock(own.join().pid)
        survey(port.start().pid, port.ports)
    with pytest.raises(ConnectionRefusedError):
        meet(own.address)
    with Port() as own:
        old, new = own.join(), own.join()
        own.steering.steer(new.pid)
        own.end(old)
        own.end(new)
        with pytest.raises(ConnectionRefusedError):
            meet(own.address)
    with Port() as own:
        first = own.start()
        own.start()
        with pytest.raises(Unsteerable):
            own.steering.join(first.pid, own.ports)
        own.steering.close()
        assert len({meet(own.address) for _ in range(200)}) == 2

    def closed() -> bool:
        # One more is that greeter's output. Threads of other tests may have a file open for a moment.
        after = open_files()
        assert len(after) <= len(before) + 1, f"{sorted(after.items() - before.items())} are new"
        return True

    until(closed, what="everything is closed")


def test_closed_and_joined_again(port: Port) -> None:
    """After all others have exited and a close, the remaining process goes on, and another can join."""
    first, second, third = port.join(), port.join(), port.join()
    port.steering.steer(third.pid)
    with Visitors([port.address]) as visitors:
        port.end(first)
        port.end(second)
        visitors.more(50)
        port.steering.close()
        port.start().kill()
        visitors.more(50)
        port.steering.join(third.pid, port.ports)
        last = port.join()
        visitors.more(50)
        assert {visit.met for visit in visitors.visits} == {third.name}
        port.steering.steer(last.pid)
        since = time.monotonic()
        visitors.more(50)
    assert visitors.failed == []
    assert visitors.strays(last.name, since, time.monotonic()) == []


def test_detached(port: Port) -> None:
    """Without steering all listeners get connections."""
    names = {port.join().name for _ in range(3)}
    assert len({meet(port.address) for _ in range(50)}) == 1
    port.steering.detach()
    assert {meet(port.address) for _ in range(200)} == names


# Where steering is impossible


def test_a_stranger_on_the_port(port: Port) -> None:
    """An unknown process on the port is detected, before the first of ours or between two."""
    old = port.join()
    stranger = port.start()
    new = port.start()
    with pytest.raises(Unsteerable, match=f"another process also listens on port {port.number}"):
        port.steering.join(new.pid, port.ports)
    assert {meet(port.address) for _ in range(50)} == {old.name}
    port.end(new)
    assert {meet(port.address) for _ in range(50)} == {old.name}
    stranger.kill()
    assert meet(port.address) == old.name


def test_a_socket_that_is_not_shared(port: Port) -> None:
    """The error names a listener without SO_REUSEPORT."""
    with Greeter("a", port.listening, reuse=False) as one:
        [reason] = survey(one.pid, port.ports).obstacles
        assert f"{HOST}:{port.number} cannot be shared with a second process" in reason
        with pytest.raises(Unsteerable, match="lacks SO_REUSEPORT"):
            port.steering.join(one.pid, port.ports)


def listening(kind: int = socket.SOCK_STREAM, protocol: int = 0, *, port: int) -> socket.socket:
    one = socket.socket(socket.AF_INET, kind, protocol)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind((HOST, port))
    if kind == socket.SOCK_STREAM:
        one.listen()
    return one


def test_multipath(port: Port) -> None:
    """The error names a listener with Multipath TCP."""
    with listening(protocol=262, port=port.number):
        [reason] = survey(os.getpid(), port.ports).obstacles
        assert "Multipath TCP" in reason


def test_twice_the_same_address(port: Port) -> None:
    """With two listeners of a process on one address, one of them would get no connections."""
    with listening(port=port.number), listening(port=port.number):
        [reason] = survey(os.getpid(), port.ports).obstacles
        assert "more than once" in reason


def test_datagrams_and_paths(port: Port, tmp_path: Path) -> None:
    """A survey has UDP ports and unix sockets apart from TCP, without connected UDP sockets and other ports."""
    path = str(tmp_path / "a.sock")
    with (
        listening(socket.SOCK_DGRAM, port=port.number) as datagrams,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connected,
        socket.socket(socket.AF_UNIX) as unix,
        listening(port=port.number),
    ):
        connected.connect(datagrams.getsockname())
        unix.bind(path)
        unix.listen()
        seen = survey(os.getpid(), [*port.ports, *only(connected.getsockname()[1])])
        assert [address[:3] for address in seen.tcp] == [(socket.AF_INET, HOST, port.number)]
        assert [address[:3] for address in seen.udp] == [(socket.AF_INET, HOST, port.number)]
        assert path in seen.paths
        assert seen.obstacles == ()


def test_datagrams_of_users(port: Port) -> None:
    """A core's socket for a user's datagrams may have the number of a TCP port: it keeps no other core from that."""
    with socket.socket() as listener, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(port.address)
        listener.listen()
        datagrams.bind(("0.0.0.0", port.number))
        seen = survey(os.getpid(), port.ports)
    assert (len(seen.tcp), seen.udp, seen.obstacles) == (1, frozenset(), ())


def test_a_process_that_has_exited(port: Port) -> None:
    """A process that has exited listens on nothing, and that is no error."""
    with Greeter("a", port.listening) as one:
        one.kill()
        assert survey(one.pid, port.ports).tcp == frozenset()
        port.steering.join(one.pid, port.ports)
        assert port.steering.waiting(one.pid) == {}
        assert port.steering.leave(one.pid) == 0


@contextmanager
def full(port: Port) -> Iterator[socket.socket]:
    """A listener here whose queue is full."""
    with ExitStack() as stack:
        one = stack.enter_context(listening(port=port.number))
        one.listen(0)
        for _ in range(2):
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(port.address)
        yield one


def test_one_that_does_not_answer(port: Port) -> None:
    """The error names, after a time, a listener that the node itself cannot reach."""
    with full(port), pytest.raises(Unsteerable, match=f"{HOST}:{port.number} cannot be reached by the node itself"):
        port.steering.join(os.getpid(), port.ports)
