"""What the end-to-end tests share: a node, controllers over both transports, a destination, every kind of inbound."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
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
from tests.harness import grounds
from tests.harness.forked import Forked
from tests.harness.grounds import GROUNDS, Ground

# Machines differ, and are busy: a property holds or not, however long it takes.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
# For `scripts/test --fast`: a look at each property, not a search.
settings.register_profile("brief", deadline=None, max_examples=15)
# By the hour: a search. For tests/node/test_any_bytes.py and the like, with `--timeout=0`.
settings.register_profile("nightly", deadline=None, max_examples=10_000, database=None)

# Some hundreds are started.
NodeProcess.child = Forked

# What runs in the background of a shell may have it ignored, and so would every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_LIVE = Path(__file__).parent / "live"
# What only newer cores can do is tried where there is one.
NEWER_XRAY = "TXNODE_TEST_XRAY_NEW"
collect_ignore = [] if os.environ.get(NEWER_XRAY) else ["live/test_geo_files.py", "live/test_wireguard.py"]
# Where a test without the mark looks for cores; the path is in its failure's text.
_NOWHERE = "/this/test/lacks/the/mark/core"
_coreless = pytest.MonkeyPatch()
# Lines of a node that stand in the report of a test that failed.
_LAST = 60

# Xray never lists 127.0.0.1 as online.
SOURCE = "127.0.0.2"
TRANSPORTS: Mapping[str, Callable[[NodeProcess], RestController | RpcController]] = {
    "rest": RestController,
    "grpc": RpcController,
}


@dataclass(frozen=True)
class Place:
    """An inbound of the node, on a port of its own."""

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
    """The user as a controller sends him for these inbounds; with none, his removal."""
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
    """A connection to the echo server through the inbound. Raises `OSError` if there is no way."""
    with way(place, person) as port, transfer.connect(port, echo) as link:
        yield link


def gets_in(place: Place, person: TestUser, echo: EchoServer, timeout: float = 10.0) -> bool:
    """Whether a client that is new reaches the echo server through the inbound as this user."""
    before = echo.connections
    with way(place, person) as port:
        try:
            transfer.connect(port, echo, timeout).close()
        except OSError:
            assert echo.connections == before, "he did not get an answer, but he got in"
            return False
        return True


def stays_out(place: Place, person: TestUser, echo: EchoServer) -> bool:
    """Whether he does not reach it; some protocols leave a stranger waiting, so this has a shorter patience."""
    return not (gets_in if place.ground.refuses else _remains)(place, person, echo, timeout=0.5)


def _remains(place: Place, person: TestUser, echo: EchoServer, timeout: float) -> bool:
    """Whether a new connection still carries bytes after this time."""
    over = time.monotonic() + timeout
    with way(place, person) as port:
        try:
            with transfer.connect(port, echo, 2) as link:
                while time.monotonic() < over:
                    transfer.echo(link, b"still there")
        except OSError:
            return False
    return True


@contextmanager
def talking(link: socket.socket) -> Iterator[None]:
    """Echoes over the connection without a pause inside the block; fails at its end if one did not come back."""
    over = threading.Event()

    def talk() -> None:
        transfer.echo(link, b"first")
        while not over.is_set():
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_LIVE):
            item.add_marker(pytest.mark.core)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test without the mark `core` finds none, in every run: what `scripts/test --fast` leaves in needs none."""
    _coreless.undo()
    if item.get_closest_marker("core") is None:
        for name in ("TXNODE_TEST_XRAY", "TXNODE_TEST_XRAY_NEW"):
            _coreless.delenv(name, raising=False)
        for core in (XRAY, SING_BOX):
            _coreless.setenv(core.variable("EXECUTABLE_PATH"), _NOWHERE)
        find_xray.cache_clear()
        find_sing_box.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the nodes of a failed test said last stands in its report."""
    report = yield
    if report.failed:
        for name, found in getattr(item, "funcargs", {}).items():
            if isinstance(found, NodeProcess):
                report.sections.append((f"{name}, its last lines", "\n".join(found.last_lines(_LAST))))
    return report


@pytest.fixture(autouse=True)
def _the_reactor_is_free(request: pytest.FixtureRequest) -> None:
    """A test that runs the reactor by itself finds it as if nobody else ever did."""
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
    """Each core in turn; what differs between them is asked of it, not of its name."""
    found: Ground = request.param
    return found


@pytest.fixture(scope="session")
def echo() -> Iterator[EchoServer]:
    with EchoServer() as server:
        yield server


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One node for the tests of a module that harm none."""
    with NodeProcess(tmp_path_factory.mktemp("node"), **ROOMY) as running:
        yield running


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node for one test."""
    with NodeProcess(tmp_path) as running:
        yield running


@pytest.fixture(params=list(TRANSPORTS))
def controller(node: NodeProcess, request: pytest.FixtureRequest) -> Iterator[Controller]:
    """A controller of the module's node over each transport in turn; see `over`."""
    with control(node, request.param) as over_transport:
        yield over_transport


def over(transport: str) -> pytest.MarkDecorator:
    """For a test that needs `controller` over one transport only."""
    return pytest.mark.parametrize("controller", [transport], indirect=True)


def on(fits: Callable[[Ground], bool]) -> pytest.MarkDecorator:
    """For a test of what only some cores can do."""
    grounds = [ground for ground in GROUNDS if fits(ground)]
    return pytest.mark.parametrize("ground", grounds, indirect=True, ids=[ground.name for ground in grounds])


# Users come while everybody stays connected.
live = on(lambda ground: ground.live)


@contextmanager
def settled(places: Iterable[Place], cover: CoverServer) -> Iterator[None]:
    """For starting a core with these inbounds: goes on when it is ready for users of REALITY, too."""
    with ExitStack() as stack:
        probed = any(place.kind.reality and place.ground.probes for place in places)
        stack.enter_context(cover.looked_at() if probed else nullcontext())
        yield
