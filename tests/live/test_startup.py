"""Start and end of the node: settings and their faults, ports, systemd, files and processes left behind."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from node import __version__
from node.command_line import SETTINGS
from node.handover.keeper import DESCRIPTORS
from scripts.staging import certs
from scripts.staging.backend import backend
from scripts.staging.controller import ControllerError, RestController, RpcController
from scripts.staging.core import find_xray
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess, node_below
from scripts.staging.ports import free_port
from scripts.staging.process import Child
from scripts.staging.protocols import vless
from scripts.staging.transports import raw
from scripts.staging.wait import accepts, until
from tests.harness.forked import Forked
from tests.harness.listening import Listener

ROOT = Path(__file__).parents[2]
TWISTD = Path(sys.executable).with_name("twistd")
KEY = str(uuid.uuid4())
FAULT = "txnode cannot start: "
VLESS = Kind("vless-raw", vless(), raw())


@dataclass
class Address:
    """A node to call, for the harness's controllers."""

    host: str
    rest_port: int
    grpc_port: int
    pem: str
    key: str = KEY


class Place:
    """A directory to start nodes in, with settings that work; an empty value removes one."""

    def __init__(self, directory: Path, child: type[Child]) -> None:
        self.directory = directory
        self.child = child
        self.rest_port, self.grpc_port = free_port(), free_port()
        self.pair = certs.make(directory, ["localhost", "127.0.0.1", "::1"])
        self.state = directory / "state"

    def address(self, host: str = "127.0.0.1") -> Address:
        return Address(host, self.rest_port, self.grpc_port, self.pair.certificate.read_text())

    @contextmanager
    def node(self, *options: str, **environment: str) -> Iterator[Child]:
        """A node that must report that it is ready."""
        with self.child(_argv(*options), self._environment(environment), directory=self.directory) as child:
            child.ready(lambda: "is ready: " in child.output, 20, "the node is ready")
            yield child

    def refused(self, *options: str, **environment: str) -> list[str]:
        """The faults that a node reports that must not start."""
        return [line.partition(FAULT)[2] for line in self.ended(*options, **environment) if FAULT in line]

    def ended(self, *options: str, **environment: str) -> list[str]:
        """The output of a node that must not start: it exits with 1, without a traceback, and leaves no process."""
        child = self.child(_argv(*options), self._environment(environment), directory=self.directory)
        try:
            status = child.wait(20)
        finally:
            child.kill()
        assert status == 1, child.output
        assert "Traceback" not in child.output
        assert not _session(child.pid)
        return child.lines

    def _environment(self, changes: dict[str, str]) -> dict[str, str]:
        settings = {
            "PATH": os.defpath,
            "HOME": str(self.directory),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "API_KEY": KEY,
            "STATE_DIR": str(self.state),
            "NODE_HOST": "127.0.0.1",
            "REST_PORT": str(self.rest_port),
            "GRPC_PORT": str(self.grpc_port),
            "SSL_CERT_FILE": str(self.pair.certificate),
            "SSL_KEY_FILE": str(self.pair.key),
            "XRAY_EXECUTABLE_PATH": str(find_xray()),
        }
        return {name: value for name, value in (settings | changes).items() if value}


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    return Place(tmp_path, getattr(request, "param", Forked))


# Executed as by an operator, not forked; for some tests of each kind.
from_nothing = pytest.mark.parametrize("place", [Child], ids=["from_nothing"], indirect=True)


def _argv(*options: str) -> list[str]:
    return [str(TWISTD), "--nodaemon", "--pidfile=", "node", *options]


def _session(pid: int) -> list[int]:
    """The remaining processes of the session that this process began."""
    left = []
    for other in psutil.pids():
        try:
            left += [other] if os.getsid(other) == pid else []
        except ProcessLookupError:
            continue
    return left


def listens(node: Child, ports: set[int]) -> None:
    """Wait until these are all ports on which the node listens: at its start it tries what the kernel lets it do."""
    until(lambda: _listening(node_below(node.pid)) == ports, what=f"the node listens on {ports} alone")


def _listening(pid: int) -> set[int]:
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def _works(address: Address) -> None:
    """Check that both transports accept this key."""
    for controller in (RestController(address), RpcController(address)):
        assert controller.info().version
        controller.close()


@from_nothing
def test_descriptors(place: Place) -> None:
    """A node with a low soft limit of open files raises it to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with place.node() as node:
            assert psutil.Process(node_below(node.pid)).rlimit(psutil.RLIMIT_NOFILE) == (min(hard, DESCRIPTORS), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Faults


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("", "there is no key"),
        ("   ", "there is no key"),
        ("00000000-0000-0000-0000-000000000000", "nil UUID"),
        ("0" * 32, "nil UUID"),
        ("fifteen-letters", "fewer than 16 characters"),
    ],
    ids=["missing", "empty", "nil", "nil-bare", "short"],
)
def test_bad_key(place: Place, key: str, says: str) -> None:
    """Without a usable key the node refuses to start, with one line that does not contain the key."""
    (fault,) = place.refused(API_KEY=key)
    assert says in fault
    assert not key.strip() or key.strip() not in fault


def test_empty_key_file(place: Place) -> None:
    """A file without a key is a fault that names the file."""
    file = place.directory / "key"
    file.write_text("\n")
    (fault,) = place.refused(API_KEY="", API_KEY_FILE=str(file))
    assert str(file) in fault


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "SSL_KEY_FILE"])
def test_missing_pair(place: Place, name: str) -> None:
    """A missing certificate or key is named, with the command that makes one."""
    (fault,) = place.refused(**{name: str(place.directory / "nothing.pem")})
    assert name in fault
    assert "nothing.pem" in fault
    assert "nodectl certificate make" in fault


def test_mismatched_key(place: Place, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A key of another certificate is one clear line, before any port is bound."""
    other = certs.make(tmp_path_factory.mktemp("other"), ["localhost"])
    (fault,) = place.refused(SSL_KEY_FILE=str(other.key))
    assert "is not the key of the certificate" in fault


def test_garbage_instead_of_a_certificate(place: Place) -> None:
    """A file that is no PEM is one clear line."""
    place.pair.certificate.write_text("nonsense")
    (fault,) = place.refused()
    assert str(place.pair.certificate) in fault


@from_nothing
def test_several_faults(place: Place) -> None:
    """All faults are reported at once, a line each."""
    faults = place.refused(API_KEY="short", REST_PORT="70000", GRPC_PORT="x", SSL_CERT_FILE="/nothing", DEBUG="maybe")
    named = ["API_KEY", "REST_PORT", "GRPC_PORT", "SSL_CERT_FILE", "DEBUG"]
    assert sorted(fault.partition(":")[0] for fault in faults) == sorted(named)


def test_same_port_twice(place: Place) -> None:
    """One port for both interfaces is a fault of the settings."""
    (fault,) = place.refused(REST_PORT=str(place.grpc_port))
    assert str(place.grpc_port) in fault


@pytest.mark.parametrize("name", ["REST_PORT", "GRPC_PORT"])
@pytest.mark.parametrize("host", ["127.0.0.1", ""], ids=["loopback", "everywhere"])
def test_taken_port(place: Place, name: str, host: str) -> None:
    """A taken port ends the node with one line that names it, and frees the other port."""
    ports = {"REST_PORT": place.rest_port, "GRPC_PORT": place.grpc_port}
    with socket.create_server(("127.0.0.1", ports[name])):
        (fault,) = place.refused(NODE_HOST=host)
    assert str(ports[name]) in fault
    assert not any(map(accepts, ports.values()))


def test_second_node_on_the_ports(place: Place) -> None:
    """A second node on the same ports does not start, and the first is unaffected."""
    with place.node():
        (fault,) = place.refused(STATE_DIR=str(place.directory / "other"))
        assert str(place.rest_port) in fault or str(place.grpc_port) in fault
        _works(place.address())


@from_nothing
def test_second_node_in_the_state(place: Place) -> None:
    """A second node with the same STATE_DIR does not start, and the first is unaffected."""
    with place.node():
        (fault,) = place.refused(REST_PORT=str(free_port()), GRPC_PORT=str(free_port()))
        assert str(place.state) in fault
        _works(place.address())


# Settings


@pytest.mark.parametrize("protocol", ["rest", "grpc", "REST", ""], ids=["rest", "grpc", "upper", "alone"])
def test_service_port(place: Place, protocol: str) -> None:
    """SERVICE_PORT, for SERVICE_PROTOCOL or else gRPC, is the only open port, and serves both."""
    port = free_port()
    with place.node(SERVICE_PROTOCOL=protocol, SERVICE_PORT=str(port), REST_PORT="", GRPC_PORT="") as node:
        listens(node, {port})
        address = Address("127.0.0.1", port, port, place.pair.certificate.read_text())
        for controller in (RestController(address), RpcController(address)):
            assert controller.info().version
            controller.close()


def test_service_port_and_the_other(place: Place) -> None:
    """The other port is open as well if it is set by its own name."""
    port = free_port()
    with place.node(SERVICE_PROTOCOL="grpc", SERVICE_PORT=str(port), GRPC_PORT="") as node:
        listens(node, {port, place.rest_port})


def test_order_of_settings(place: Place) -> None:
    """`.env` in the working directory is read, the environment overrides it, and options override both."""
    first, second = free_port(), free_port()
    lines = [f"REST_PORT={place.rest_port}", f"GRPC_PORT={first}", f"export API_KEY='{KEY}'", "# STATE_DIR=/nothing"]
    (place.directory / ".env").write_text("\n".join(lines))
    with place.node(API_KEY="", REST_PORT="", GRPC_PORT="") as node:
        listens(node, {place.rest_port, first})
    with place.node(API_KEY="", REST_PORT="", GRPC_PORT=str(second)) as node:
        listens(node, {place.rest_port, second})
    with place.node(f"--rest-port={first}", API_KEY="", GRPC_PORT=str(second)) as node:
        listens(node, {first, second})


def test_settings_of_another_node(place: Place) -> None:
    """Settings of another deployed node are used where they apply; the others are ignored."""
    port = free_port()
    lines = [
        f"SERVICE_PORT= {port}",
        'SERVICE_PROTOCOL= "grpc"',
        f"API_KEY= {KEY}",
        "GENERATED_CONFIG_PATH = /var/lib/pg-node/generated",
        f"SECRET_KEY={KEY}",
    ]
    (place.directory / ".env").write_text("\n".join(lines))
    with place.node(API_KEY="", REST_PORT="", GRPC_PORT="", SERVICE_HOST="127.0.0.1") as node:
        listens(node, {port})
        assert KEY not in node.output


@from_nothing
def test_defaults_in_the_state(place: Place) -> None:
    """By default key and certificate are read from STATE_DIR."""
    place.state.mkdir()
    (place.state / "api_key").write_text(f"{KEY}\n")
    place.pair.certificate.rename(place.state / "certificate.pem")
    place.pair.key.rename(place.state / "key.pem")
    with place.node(API_KEY="", SSL_CERT_FILE="", SSL_KEY_FILE=""):
        _works(Address("127.0.0.1", place.rest_port, place.grpc_port, (place.state / "certificate.pem").read_text()))


def test_help(place: Place) -> None:
    """`twistd node --help` has every setting, except that secret ones are no options."""
    done = subprocess.run(
        [str(TWISTD), "node", "--help"],
        env={"PATH": os.defpath, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        cwd=place.directory,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stderr == ""
    offered = set(re.findall(r"--([a-z0-9-]+)=", done.stdout))
    assert offered == {setting.option for setting in SETTINGS if not setting.secret}
    for setting in SETTINGS:
        assert setting.name in done.stdout


@pytest.mark.parametrize("key", [KEY, ""], ids=["key in the environment", "no other key"])
def test_key_is_no_option(place: Place, key: str) -> None:
    """A key on the command line is refused, with or without another key, and is not shown."""
    given = str(uuid.uuid4())
    lines = place.ended(f"--api-key={given}", API_KEY=key)
    assert not any(given in line for line in lines)


# Addresses


def test_every_address_by_default(place: Place) -> None:
    """Without NODE_HOST both interfaces listen on IPv4 and IPv6."""
    with place.node(NODE_HOST=""):
        _works(place.address("127.0.0.1"))
        for port in (place.rest_port, place.grpc_port):
            assert accepts(port, "::1")
        _works_on_ipv6(place)


def test_one_ipv6_address(place: Place) -> None:
    """NODE_HOST=::1 serves only that address."""
    with place.node(NODE_HOST="::1"):
        _works_on_ipv6(place)
        assert not any(map(accepts, (place.rest_port, place.grpc_port)))


def _works_on_ipv6(place: Place) -> None:
    assert RestController(place.address("::1")).info().version
    rpc = RpcController(place.address("[::1]"))
    assert rpc.info().version
    rpc.close()


# systemd


class Systemd(threading.Thread):
    """Receives the node's notifications; with `ready_accepts` it checks that `ports` accept at READY=1."""

    def __init__(self, path: Path, ports: list[int]) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.heard: list[str] = []
        self.ready_accepts: bool | None = None
        self._ports = ports
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(30)

    def run(self) -> None:
        with self._socket:
            while "STOPPING=1" not in self.heard:
                message = self._socket.recv(4096).decode()
                if "READY=1" in message:
                    self.ready_accepts = all(map(accepts, self._ports))
                self.heard += message.split("\n")


@from_nothing
def test_notify(place: Place) -> None:
    """systemd receives READY=1 with the version once both ports accept, and STOPPING=1 at the end, once each."""
    systemd = Systemd(place.directory / "notify", [place.rest_port, place.grpc_port])
    systemd.start()
    with place.node(NOTIFY_SOCKET=str(systemd.path)):
        until(lambda: "READY=1" in systemd.heard, what="READY=1")
    systemd.join(timeout=10)
    assert systemd.ready_accepts
    assert systemd.heard == ["READY=1", f"STATUS=txnode {__version__} serves", "STOPPING=1"]


def test_watchdog(place: Place) -> None:
    """systemd receives watchdog notifications while the node runs."""
    systemd = Systemd(place.directory / "notify", [])
    systemd.start()
    with place.node(NOTIFY_SOCKET=str(systemd.path), WATCHDOG_USEC="200000"):
        until(lambda: systemd.heard.count("WATCHDOG=1") > 2, what="three signs of life")
    systemd.join(timeout=10)


@from_nothing
@pytest.mark.parametrize(
    ("number", "kinds"), [(signal.SIGHUP, ["certificate.loaded"]), (signal.SIGUSR2, ["node.upgrading", "node.started"])]
)
def test_signals_before_it_is_ready(place: Place, number: signal.Signals, kinds: list[str]) -> None:
    """Signals during the start are held back: the node starts, and then handles them."""
    with place.child(_argv(), place._environment({}), directory=place.directory) as child:
        until(lambda: waits(node_below(child.pid), number), 10, "the signal is held back")

        def ready() -> bool:
            os.kill(child.pid, number)
            return "is ready: " in child.output

        child.ready(ready, 30, "the node is ready")
        with closing(RestController(place.address())) as controller, Listener(controller) as listener:
            last = listener.find("node.started").sequence
            for kind in kinds:
                last = listener.find(kind, last).sequence
        assert child.running and not waits(node_below(child.pid), number)


def waits(pid: int, number: signal.Signals) -> bool:
    """Whether the process's main thread blocks this signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(re.search(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)[1], 16)  # type: ignore[index]
    return bool(mask >> (number - 1) & 1)


def test_nothing_is_ready_in_vain(place: Place) -> None:
    """A node that cannot start never sends READY=1."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener, ExitStack() as stack:
        listener.bind(str(place.directory / "notify"))
        listener.setblocking(False)
        stack.enter_context(socket.create_server(("127.0.0.1", place.rest_port)))
        place.refused(NOTIFY_SOCKET=str(place.directory / "notify"))
        with pytest.raises(BlockingIOError):
            print(listener.recv(4096))


# The end, and what is left


def test_term_with_everything_open(tmp_path: Path) -> None:
    """TERM ends a node within 3 s, despite log streams of both transports and a running core."""
    with NodeProcess(tmp_path) as node, ExitStack() as stack:
        controllers = (RestController(node), RestController(node, dialect="x-api-key"), RpcController(node))
        readers = [stack.enter_context(controller.logs()) for controller in controllers]
        controllers[0].start(backend([VLESS.inbound(free_port(), "in")]))
        for reader in readers:
            reader.find("backend running")
        core = node.core_pids()
        began = time.monotonic()
        status = node.stop()
        assert time.monotonic() - began < 3
        assert status == -15
        assert len(core) == 1
        assert not psutil.pid_exists(core[0])
        assert not any("Traceback" in line for line in node.lines)
        until(lambda: all(reader.ended for reader in readers), 10, "the log streams end")
        controllers[2].close()


@from_nothing
def test_interrupt(place: Place) -> None:
    """Ctrl-C ends it as well."""
    with place.node() as node:
        os.kill(node.pid, 2)
        node.wait(15)
        assert "Traceback" not in node.output


def open_before(directory: Path) -> Path:
    (directory / "state").mkdir()
    (directory / "state").chmod(0o755)
    return directory


def test_modes_in_the_state() -> None:
    """Only the node can access STATE_DIR and its contents, even if the directory was open before."""
    # With a path that is short enough for sockets in it.
    with tempfile.TemporaryDirectory() as directory, NodeProcess(open_before(Path(directory))) as node:
        controller = RestController(node)
        controller.start(backend([VLESS.inbound(free_port(), "in")]))
        below = [node.state, *node.state.rglob("*")]
        wrong = {str(path): oct(path.lstat().st_mode) for path in below if not _private(path)}
        assert not wrong
        assert any(stat.S_ISSOCK(path.lstat().st_mode) for path in below)


def _private(path: Path) -> bool:
    mode = path.lstat().st_mode
    return stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600)


def test_start_again_after_kill(tmp_path: Path) -> None:
    """A killed node leaves no core behind, and starts again on its ports at once."""
    with NodeProcess(tmp_path) as node:
        controller = RestController(node)
        controller.start(backend([VLESS.inbound(free_port(), "in")]))
        (core,) = node.core_pids()
        node.kill()
        until(lambda: not psutil.pid_exists(core), what="the core follows its node")
        node.start()
        assert controller.info().version


def test_wrong_key_is_refused(place: Place) -> None:
    """Only the settings' key is accepted."""
    with place.node(API_KEY="another-key-of-a-node"), pytest.raises(ControllerError) as refused:
        RestController(place.address()).info()
    assert refused.value.status == "401"
