"""Fixtures and helpers of the end-to-end tests: a node, controllers over both transports, a destination, inbounds."""

from __future__ import annotations

import gc
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from twisted.trial.unittest import TestCase

from drivers.install.releases import SING_BOX, XRAY
from protos import service_pb2
from scripts.staging import background, certs, transfer
from scripts.staging.backend import user
from scripts.staging.controller import Controller, RestController, RpcController
from scripts.staging.core import Json, XrayClient, find_xray
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import SERVER_NAME, Kind, kinds
from scripts.staging.node import ROOMY, NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.sing_box import find_sing_box
from scripts.staging.users import TestUser
from tests.harness import grounds, in_turn
from tests.harness.forked import Forked
from tests.harness.grounds import GROUNDS, Ground

# Bytes.
_LONG_TMPDIR = 18
# No deadline, and no complaint that examples are slow to make: machines differ and may be busy.
_PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("patient", **_PATIENT)
settings.load_profile("patient")
# For `scripts/test --fast`: a few examples of each property.
settings.register_profile("brief", **_PATIENT, max_examples=10, stateful_step_count=30)
# A long search, for tests/node/test_any_bytes.py and the like, with `--timeout=0`.
settings.register_profile("nightly", **_PATIENT, max_examples=1_000, database=None)

# The path of a unix socket has at most 107 bytes, and tests bind some far below the directory of temporary files.
if len(os.fsencode(tempfile.gettempdir())) > _LONG_TMPDIR:
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"

# Forked, as the tests start some hundreds of nodes.
NodeProcess.child = Forked

# Background jobs of a shell may ignore SIGINT, and so would every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_LIVE = Path(__file__).parent / "live"
# Names a newer core, for tests of what only newer cores support.
NEWER_XRAY = "TXNODE_TEST_XRAY_NEW"
collect_ignore = [] if os.environ.get(NEWER_XRAY) else ["live/test_geo_files.py", "live/test_wireguard.py"]
# The path of cores for tests without the mark; it appears in their failures.
_NOWHERE = "/this/test/lacks/the/mark/core"
_coreless = pytest.MonkeyPatch()
# Seconds between two echoes of `talking`.
_PAUSE = 0.02
# Seconds that a test without the mark `slow` may take in the default run, with a processor for each process.
_LONG = 10.0
# Lines of a node in the report of a failed test.
_LAST = 60

# Xray never lists 127.0.0.1 as online.
SOURCE = "127.0.0.2"
TRANSPORTS: Mapping[str, Callable[[NodeProcess], RestController | RpcController]] = {
    "rest": RestController,
    "grpc": RpcController,
}


@dataclass(frozen=True)
class Place:
    """An inbound of the node on its own port."""

    kind: Kind
    tag: str
    port: int = field(default_factory=free_port)
    ground: Ground = grounds.XRAY

    @property
    def inbound(self) -> Json:
        return self.ground.inbound(self.kind, self.port, self.tag)

    def outbound(self, person: TestUser, source: str = SOURCE) -> Json:
        return self.kind.outbound(self.port, person, source=source)


def member(person: TestUser, *places: Place) -> service_pb2.User:
    """The user as a controller sends them for these inbounds; without any it removes the user."""
    return user(person, {place.tag: place.kind for place in places})


def run(
    controller: Controller, places: Iterable[Place], users: Iterable[service_pb2.User] = (), **extra: Any
) -> service_pb2.BaseInfoResponse:
    """Start a backend with these inbounds, all of one core, and users; `extra` is as in `Ground.backend`."""
    places = list(places)
    ground = places[0].ground if places else grounds.XRAY
    return controller.start(ground.backend([place.inbound for place in places], users, **extra))


@contextmanager
def way(place: Place, person: TestUser, source: str = SOURCE) -> Iterator[int]:
    """The SOCKS port of a client core that connects to the inbound as this user."""
    port = free_port()
    with XrayClient({port: place.outbound(person, source)}):
        yield port


@contextmanager
def connection(place: Place, person: TestUser, echo: EchoServer) -> Iterator[socket.socket]:
    """A connection to the echo server through the inbound. Raises `OSError` if it is refused."""
    with way(place, person) as port, transfer.connect(port, echo) as link:
        yield link


def gets_in(place: Place, person: TestUser, echo: EchoServer, timeout: float = 10.0) -> bool:
    """Whether a new client reaches the echo server through the inbound as this user."""
    before, port = echo.connections, free_port()
    with XrayClient({port: place.outbound(person)}) as client:
        try:
            transfer.connect(port, echo, timeout).close()
        except OSError as error:
            assert echo.connections == before, "he did not get an answer, but he got in"
            print(f"{person.email} does not get in: {error!r}; output of the client:\n{client.output}")
            return False
        return True


def stays_out(place: Place, person: TestUser, echo: EchoServer) -> bool:
    """Whether the user is refused. The timeout is short, as some protocols leave strangers waiting."""
    return not (gets_in if place.ground.refuses else _remains)(place, person, echo, timeout=0.5)


def _remains(place: Place, person: TestUser, echo: EchoServer, timeout: float) -> bool:
    """Whether a new connection still carries bytes after this time."""
    with way(place, person) as port:
        try:
            with transfer.connect(port, echo, 2) as link:
                # Not before: a client may take longer to start, and a first echo may be faster than the node.
                over = time.monotonic() + timeout
                while time.monotonic() < over:
                    transfer.echo(link, b"still there")
        except OSError:
            return False
    return True


@contextmanager
def talking(link: socket.socket) -> Iterator[None]:
    """Echo over the connection continuously inside the block; fails at its end if an echo did not come back.

    The pauses leave the processors to the test: without them four processes would do nothing else.
    """
    over = threading.Event()

    def talk() -> None:
        transfer.echo(link, b"first")
        while not over.wait(_PAUSE):
            transfer.echo(link, bytes(1000))
        transfer.echo(link, b"last")

    with ThreadPoolExecutor(1) as pool:
        conversation = pool.submit(talk)
        try:
            yield
        finally:
            over.set()
    conversation.result()


@contextmanager
def control(node: NodeProcess, transport: str) -> Iterator[RestController | RpcController]:
    """A controller of the node, over "rest" or "grpc"."""
    with closing(TRANSPORTS[transport](node)) as controller:
        yield controller


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "of each test take one core, protocol and seed, by its name; a test over ten seconds must be marked slow"
    parser.addoption("--in-turn", action="store_true", help=words)
    words = "of each test take each core, each protocol and each seed, but not each combination"
    parser.addoption("--each-once", action="store_true", help=words)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    for item in items:
        if item.path.is_relative_to(_LIVE):
            item.add_marker(pytest.mark.core)
    # After the selection by -m and -k.
    yield
    each = config.getoption("each_once")
    if each or config.getoption("in_turn"):
        items[:], left_out = in_turn.choose(items, each=each)
        config.hook.pytest_deselected(items=left_out)
        items[:] = in_turn.longest_first(items)


def pytest_collection_finish() -> None:
    """Never look for garbage among the thousands of tests: that would take a twentieth of a run."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test without the mark `core` finds no core, in every run, so that `scripts/test --fast` needs none."""
    _coreless.undo()
    if item.get_closest_marker("core") is None:
        for name in ("TXNODE_TEST_XRAY", "TXNODE_TEST_XRAY_NEW", "TXNODE_TEST_SING_BOX_NEW"):
            _coreless.delenv(name, raising=False)
        for core in (XRAY, SING_BOX):
            _coreless.setenv(core.variable("EXECUTABLE_PATH"), _NOWHERE)
        find_xray.cache_clear()
        find_sing_box.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the last lines of a failed test's nodes to its report."""
    report = yield
    if item.config.getoption("in_turn") and report.when == "call":
        _within_time(item, report)
    if report.failed:
        for name, found in getattr(item, "funcargs", {}).items():
            # Some fixtures are a node with its controller.
            found = getattr(found, "node", found)
            if isinstance(found, NodeProcess):
                report.sections.append((f"{name}, its last lines", "\n".join(found.last_lines(_LAST))))
    return report


def _within_time(item: pytest.Item, report: pytest.TestReport) -> None:
    """Fail a test that took too long; on a busy machine the limit grows with the number of waiting processes."""
    limit = _LONG * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    if report.passed and report.duration > limit and item.get_closest_marker("slow") is None:
        report.outcome = "failed"
        report.longrepr = f"It took {report.duration:.1f} s: make it shorter, or mark it slow."


@pytest.fixture(autouse=True)
def _the_reactor_is_free(request: pytest.FixtureRequest) -> None:
    """Stop the background reactor before a test that runs the reactor itself."""
    if request.cls is not None and issubclass(request.cls, TestCase):
        background.stop()


@pytest.fixture(scope="session")
def cover(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoverServer]:
    with CoverServer(tmp_path_factory.mktemp("cover")) as server:
        yield server


@pytest.fixture(scope="session")
def all_kinds(tmp_path_factory: pytest.TempPathFactory, cover: CoverServer) -> Mapping[str, Kind]:
    return kinds(certs.make(tmp_path_factory.mktemp("inbounds"), [SERVER_NAME]), cover.port)


@pytest.fixture(params=GROUNDS, ids=lambda ground: ground.name)
def ground(request: pytest.FixtureRequest) -> Ground:
    """Each core in turn; tests ask it for differences, never for its name."""
    found: Ground = request.param
    return found


@pytest.fixture(scope="session")
def echo() -> Iterator[EchoServer]:
    with EchoServer() as server:
        yield server


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One node for those tests of a module that do not harm it."""
    with NodeProcess(tmp_path_factory.mktemp("node"), **ROOMY) as running:
        yield running


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node for one test."""
    with NodeProcess(tmp_path) as running:
        yield running


@pytest.fixture
def home(all_kinds: Mapping[str, Kind], ground: Ground) -> Place:
    """An inbound that most tests can do with."""
    return Place(all_kinds["vless-raw"], "home", ground=ground)


@pytest.fixture(params=list(TRANSPORTS))
def controller(node: NodeProcess, request: pytest.FixtureRequest) -> Iterator[Controller]:
    """A controller of the module's node over each transport in turn; see `over`."""
    with control(node, request.param) as over_transport:
        yield over_transport


def over(transport: str) -> pytest.MarkDecorator:
    """For a test that needs `controller` over one transport only."""
    return pytest.mark.parametrize("controller", [transport], indirect=True)


def on(fits: Callable[[Ground], bool]) -> pytest.MarkDecorator:
    """For a test of what only some cores support."""
    grounds = [ground for ground in GROUNDS if fits(ground)]
    return pytest.mark.parametrize("ground", grounds, indirect=True, ids=[ground.name for ground in grounds])


def daily(some: Collection[object], of: Iterable[object]) -> list[Any]:
    """Parameters of a costly test: the default run tries `some` of them, the nightly run tries them all."""
    nightly = pytest.mark.nightly
    values = [(each, each if isinstance(each, tuple) else (each,)) for each in of]
    return [each if each in some else pytest.param(*parts, marks=nightly) for each, parts in values]


# Users are added while all connections stay.
live = on(lambda ground: ground.live)


@contextmanager
def settled(places: Iterable[Place], cover: CoverServer) -> Iterator[None]:
    """Start a core with these inbounds inside; the block's end waits until it is ready for REALITY's users, too."""
    with ExitStack() as stack:
        probed = any(place.kind.reality and place.ground.probes for place in places)
        stack.enter_context(cover.looked_at() if probed else nullcontext())
        yield
