"""The harness itself, with two real Xrays face to face and no node between them."""

from __future__ import annotations

import base64
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from node.api.framing import delimited as cut
from protos import service_pb2
from scripts.staging import socks, transfer
from scripts.staging.acceptor import Acceptor
from scripts.staging.backend import chunks, user
from scripts.staging.core import Xray, XrayClient, server_config
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import NAMES, Kind, with_users
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.process import Child
from scripts.staging.users import TestUser, shadowsocks_2022_key
from scripts.staging.wait import until
from tests.harness.forked import Forked
from tests.harness.rest import delimited

USER = TestUser.new("42")
STRANGER = TestUser.new("43")
_ROOT = Path(__file__).parents[2]
MEGABYTE = 1024 * 1024
PAYLOAD = random.Random(1).randbytes(MEGABYTE)


@contextmanager
def server(kind: Kind, port: int, cover: CoverServer) -> Iterator[Xray]:
    """An Xray with USER, ready for connections."""
    config = server_config([with_users(kind.inbound(port, "in"), [kind.account(USER)])])
    with ExitStack() as stack:
        with cover.looked_at() if kind.reality else nullcontext():
            running = stack.enter_context(Xray(config))
        yield running


@pytest.mark.core
@pytest.mark.parametrize("name", NAMES)
def test_kind_carries(name: str, all_kinds: Mapping[str, Kind], cover: CoverServer, echo: EchoServer) -> None:
    """A user of the inbound reaches the destination over TCP and UDP with every byte right, in both directions."""
    kind, port, socks_port = all_kinds[name], free_port(), free_port()
    outbound = kind.outbound(port, USER, source="127.0.0.2")
    with server(kind, port, cover), XrayClient({socks_port: outbound}):
        with transfer.connect(socks_port, echo) as link:
            transfer.echo(link, PAYLOAD)
            transfer.download(link, MEGABYTE)
            transfer.upload(link, MEGABYTE)
        with socks.UdpAssociation(socks_port) as association:
            transfer.udp_echo(association, PAYLOAD[:1000], echo)


def test_first_bytes_come_with_the_request(echo: EchoServer) -> None:
    """The first bytes of a connection are sent before Xray replies to its request."""
    seen: list[bytes] = []
    first = transfer.asking(b"hello")

    def serve(link: socket.socket) -> None:
        link.recv(3, socket.MSG_WAITALL)
        link.sendall(b"\5\0")
        seen.append(link.recv(10 + len(first), socket.MSG_WAITALL))
        link.sendall(b"\5\0\0\1" + bytes(6) + b"hello")

    socks.hurry([port := free_port()])
    with Acceptor("127.0.0.1", port, serve), transfer.connect(port, echo, timeout=5):
        pass
    assert seen == [b"\5\1\0\1" + socket.inet_aton(echo.host) + echo.port.to_bytes(2) + first]


@pytest.mark.core
@pytest.mark.parametrize("name", ["vmess-raw", "shadowsocks-chacha20"])
def test_a_late_reply_ends_no_connection(
    name: str,
    all_kinds: Mapping[str, Kind],
    cover: CoverServer,
    echo: EchoServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A test that gets no processor after a SOCKS reply, for longer than Xray's client waits, has its connection."""
    reply = socks._reply

    def late(link: socket.socket) -> tuple[str, int]:
        found = reply(link)
        time.sleep(0.3)
        return found

    monkeypatch.setattr(socks, "_reply", late)
    kind, port, socks_port = all_kinds[name], free_port(), free_port()
    with (
        server(kind, port, cover),
        XrayClient({socks_port: kind.outbound(port, USER)}),
        transfer.connect(socks_port, echo) as link,
    ):
        transfer.echo(link, PAYLOAD)


@pytest.mark.core
@pytest.mark.parametrize("name", NAMES)
def test_kind_keeps_out(name: str, all_kinds: Mapping[str, Kind], cover: CoverServer, echo: EchoServer) -> None:
    """An unknown user reaches nothing through the inbound, while a known one gets through."""
    kind, port, socks_port = all_kinds[name], free_port(), free_port()
    before = echo.connections
    with server(kind, port, cover):
        with XrayClient({socks_port: kind.outbound(port, STRANGER)}), pytest.raises(OSError):
            transfer.connect(socks_port, echo, timeout=0.5)
        with XrayClient({socks_port: kind.outbound(port, USER)}):
            transfer.connect(socks_port, echo).close()
    assert echo.connections == before + 1


def test_echo_counts(echo: EchoServer) -> None:
    """The echo server counts every byte that passes through it, command lines included."""
    received, sent = echo.received, echo.sent
    with socket.create_connection((echo.host, echo.port)) as link:
        transfer.echo(link, PAYLOAD[:1000])
        transfer.download(link, 5000)
        transfer.upload(link, 70_000)
    assert echo.received - received == len("echo 1000\n") + 1000 + len("give 5000\n") + len("take 70000\n") + 70_000
    assert echo.sent - sent == 1000 + 5000 + len("taken\n")


def test_echo_ends_connections() -> None:
    """The destination can close its connections, and leaves none open."""
    with EchoServer("::1") as server, socket.create_connection((server.host, server.port)) as link:
        transfer.echo(link, b"hello")
        server.drop()
        assert link.recv(1) == b""
        until(lambda: server.live == 0, what="the connection is gone")


def test_ports_are_given_once() -> None:
    """No port is given out twice, and none from the range of outgoing connections."""
    ports = [free_port() for _ in range(50)]
    beyond = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == len(ports)
    assert all(10_000 <= port < beyond for port in ports)


@pytest.mark.core
def test_a_refused_config_is_reported() -> None:
    """A core that does not start fails the test at once, with its output."""
    with pytest.raises(AssertionError, match="unknown config id: nonsense"):
        Xray(server_config([{"port": free_port(), "protocol": "nonsense"}]))


def test_child_that_ignores_term() -> None:
    """A child that does not end on TERM is killed, and the test fails."""
    child = Child(["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"], {"PATH": os.defpath})
    until(lambda: child.lines, what="the child is ready")
    with pytest.raises(AssertionError, match="does not end within"):
        child.stop(timeout=0.2)
    assert not child.running


# A test with a node, a core, a client's core and a program on a terminal; it writes its PID to a file and waits.
_CUT = """
import os, signal
import pytest
from pathlib import Path
from scripts.staging.users import TestUser
from tests.conftest import Place, control, member, run, way
from scripts.staging.terminal import Terminal

@pytest.mark.core
def test_waits(own_node, all_kinds, tmp_path):
    place, person = Place(all_kinds["vless-raw"], "in"), TestUser.new("anna@test")
    with control(own_node, "rest") as controller, Terminal(["/bin/sleep", "60"], {}, tmp_path):
        run(controller, [place], [member(person, place)])
        with way(place, person):
            Path(__file__).with_name("pids").write_text(f"{os.getpid()} {own_node.pid} {own_node.newest_core()}")
            signal.pause()
"""


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.turns("workers")
@pytest.mark.parametrize("workers", [0, 1], ids=["", "a worker"])
def test_killed_tests_leave_no_process(workers: int, tmp_path: Path) -> None:
    """After kill -9 of pytest, or of its worker, everything ends that it has started: the keeper, the node, cores."""
    (tmp_path / "test_cut.py").write_text(_CUT)
    pids = tmp_path / "pids"
    options = ["-p", "tests.conftest", "-n", str(workers), "--basetemp", str(tmp_path / "temporary")]
    argv = [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_cut.py")]
    with Child(argv, {**os.environ, "PYTHONPATH": str(_ROOT)}, directory=_ROOT) as tests:
        tests.ready(lambda: pids.exists() and pids.read_text(), 60, "the test waits")
        tested, *named = map(int, pids.read_text().split())
        family = psutil.Process(tested).children(recursive=True)
        assert {*named} < {process.pid for process in family}
        os.kill(tested, signal.SIGKILL)
        _, left = psutil.wait_procs(family, 20)
        for process in left:
            process.kill()
        assert not left, f"{left}; the output of pytest:\n{tests.output}"
        tests.wait(20)


def test_starting_a_process_starts_no_thread() -> None:
    """Else Ctrl-C in that moment leaves a thread that the end of Python waits for forever."""
    code = (
        "import threading; from scripts.staging.process import tied; before = threading.active_count();"
        "child = tied(['/bin/true']); assert threading.active_count() == before; assert child.wait() == 0"
    )
    subprocess.run([sys.executable, "-c", code], cwd=_ROOT, check=True, timeout=30)


def test_shadowsocks_2022_key() -> None:
    """A password that is a valid key is used as it is; others are turned into one, as in deployed controllers."""
    key = base64.b64encode(bytes(range(16))).decode()
    assert shadowsocks_2022_key(key, 16) == key
    assert shadowsocks_2022_key(key, 32) != key
    assert shadowsocks_2022_key("secret", 16) == "K7gNU3sdo+OL0wNhqoVWhg=="


def test_user_of_many_inbounds(all_kinds: Mapping[str, Kind]) -> None:
    """A controller's user has the credentials of all its inbounds, and none without inbounds."""
    message = user(USER, {"a b": all_kinds["vless-reality-vision"], "c": all_kinds["shadowsocks-chacha20"]})
    assert list(message.inbounds) == ["a b", "c"]
    assert message.proxies.vless.flow == "xtls-rprx-vision"
    assert message.proxies.shadowsocks.method == "chacha20-ietf-poly1305"
    assert not user(USER, {}).HasField("proxies")


def test_chunks_are_numbered() -> None:
    """Chunks count from 0 and only the last one is marked; no users are one empty chunk."""
    users = [user(TestUser.new(str(n)), {}) for n in range(5)]
    assert [(len(c.users), c.index, c.last) for c in chunks(users, 2)] == [(2, 0, False), (2, 1, False), (1, 2, True)]
    assert [(len(c.users), c.index, c.last) for c in chunks([])] == [(0, 0, True)]


def test_chunks_on_the_wire() -> None:
    """The node splits a chunked sync of the harness into the same messages."""
    sent = chunks([user(TestUser.new(str(n)), {}) for n in range(250)])
    assert [service_pb2.UsersChunk.FromString(body) for body in cut(b"".join(delimited(sent)))] == sent


@pytest.fixture(params=[Child, Forked], ids=lambda child: child.__name__)
def each_child(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tests with both ways to start nodes."""
    monkeypatch.setattr(NodeProcess, "child", request.param)


@pytest.mark.core
@pytest.mark.usefixtures("each_child")
def test_a_node_that_ends_is_reported(tmp_path: Path) -> None:
    """A node that does not come up fails the test with its output, without waiting for the deadline."""
    before = time.monotonic()
    with (
        pytest.raises(AssertionError, match=r"it ended with 1; its output:\n.*API_KEY"),
        NodeProcess(tmp_path, API_KEY="short"),
    ):
        pass
    assert time.monotonic() - before < 10


@pytest.mark.core
@pytest.mark.usefixtures("each_child")
def test_node_has_only_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a session, a directory and an environment of its own, and no descriptors that its cores would inherit."""
    monkeypatch.setenv("KEEP_ALIVE_ACTION", "of the tests, not of the node: it would not start")
    with NodeProcess(tmp_path) as node:
        assert os.getsid(node.pid) == node.pid
        assert Path(f"/proc/{node.pid}/cwd").readlink() == tmp_path
        inheritable = {number for number, flags in descriptors(node.pid) if not flags & os.O_CLOEXEC}
        assert inheritable == {0, 1, 2}
        assert node.stop() == -signal.SIGTERM


def descriptors(pid: int) -> Iterator[tuple[int, int]]:
    """The numbers of a process's descriptors, with their flags."""
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            flags = next(line for line in entry.read_text().splitlines() if line.startswith("flags:"))
            yield int(entry.name), int(flags.split()[1], 8)
