"""A new run of a core takes over on the same ports: no connection is dropped, whatever it does; old runs end."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from protos.service_pb2 import BackendType, User, UsersStat
from scripts.staging import certs, protocols, transfer, transports
from scripts.staging.activity import Activity, longest
from scripts.staging.controller import Controller, ControllerError, RestController, RpcController
from scripts.staging.core import Json, XrayClient
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import SERVER_NAME, Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.process import freeze
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import (
    SOURCE,
    Place,
    connection,
    control,
    gets_in,
    member,
    on,
    run,
    settled,
    stays_out,
    talking,
    way,
)
from tests.harness.grounds import Ground
from tests.harness.warned import warned
from tests.live.test_core_faults import in_state

ANNA, BERT, CARL, DORA = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl", "dora"))
# Live connections through each transport, further users, and how many of them change. In a manual run there may be
# more: TXNODE_TEST_LIVE=200 TXNODE_TEST_CROWD=10000.
LIVE = int(os.environ.get("TXNODE_TEST_LIVE", "20"))
CROWD = int(os.environ.get("TXNODE_TEST_CROWD", "300"))
CHANGED = 10
# Seconds between two new connections of a user.
PAUSE = 0.005
# Seconds until a core's last connection, and the core itself, must end on a busy machine.
GONE = 20.0
TAKEN = "the previous backend goes on"


@pytest.fixture(scope="module")
def xhttp(tmp_path_factory: pytest.TempPathFactory) -> Kind:
    """XHTTP without its default mode `packet-up`, in which the client sends a write twice now and then.

    The `uploadWriter` of Xray (26.3.27, and still 26.7.28) returns what it wrote as the length of a buffer that the
    reader may have emptied by then. Then its caller writes the same bytes again: the target gets them, the core counts.
    """
    certificate = certs.make(tmp_path_factory.mktemp("xhttp"), [SERVER_NAME])
    layers = transports.tls(certificate, "xhttp", ["h2"], xhttpSettings={"path": "/x", "mode": "stream-up"})
    return Kind("vless-xhttp-tls", protocols.vless(), layers)


@dataclass
class Changes:
    """Configurations of one core that differ in an inbound, an outbound and a rule from one to the next.

    The inbound `shifting` has another port each time, and its rule leads to another outbound, or to none.
    """

    places: Sequence[Place]
    shifting: Place = field(init=False)
    number: int = 0

    def __post_init__(self) -> None:
        self.next()

    @property
    def ground(self) -> Ground:
        return self.places[0].ground

    @property
    def open(self) -> bool:
        """Whether the rule lets connections through."""
        return self.number % 2 == 1

    def next(self) -> None:
        self.number += 1
        self.shifting = Place(self.places[0].kind, "shifting", ground=self.ground)

    def start(self, controller: Controller, users: Sequence[User]) -> None:
        run(controller, [*self.places, self.shifting], users, **self.other())

    def other(self) -> Json:
        """The parts of the configuration other than inbounds."""
        return (_of_xray if self.ground.type == BackendType.XRAY else _of_sing_box)(f"new-{self.number}", self.open)


def _of_xray(tag: str, leads_out: bool) -> Json:
    out = {"protocol": "freedom", "settings": {"finalRules": [{"action": "allow"}]}}
    outbounds = [{**out, "tag": "direct"}, {**out, "tag": tag}, {"tag": "block", "protocol": "blackhole"}]
    rule = {"type": "field", "inboundTag": ["shifting"], "outboundTag": tag if leads_out else "block"}
    return {"outbounds": outbounds, "routing": {"rules": [rule]}}


def _of_sing_box(tag: str, leads_out: bool) -> Json:
    outbounds = [{"type": "direct", "tag": "direct"}, {"type": "direct", "tag": tag}]
    target = {"outbound": tag} if leads_out else {"action": "reject"}
    return {"outbounds": outbounds, "route": {"rules": [{"inbound": ["shifting"], **target}]}}


def runs(node: NodeProcess) -> set[int]:
    """The cores that serve; the node also starts cores for checks."""
    return set(filter(_serves, node.core_pids()))


def _serves(pid: int) -> bool:
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False
    return "run" in words and "-test" not in words


def core(node: NodeProcess) -> int:
    [pid] = runs(node)
    return pid


def only(node: NodeProcess, pid: int) -> None:
    until(lambda: runs(node) == {pid}, GONE, "the other cores are gone")


def newcomer(node: NodeProcess, *others: int) -> int:
    """Wait for a new core, other than these."""
    return until(lambda: next(iter(runs(node) - set(others)), 0), what="another core")


def listens(pid: int, port: int) -> bool:
    found = psutil.Process(pid).net_connections("tcp")
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)


@contextmanager
def busy(place: Place, person: TestUser, echo: EchoServer, live: int = 3) -> Iterator[Activity]:
    """Traffic of the user with a separate client core; at the end none of their connections was dropped."""
    with way(place, person) as port, Activity(port, echo, live, PAUSE) as activity:
        yield activity
        activity.rest()
    assert not activity.dropped


# Changes in a row


TRANSPORTS = ("vless-raw", "trojan-tls", "vless-ws-tls", "vless-grpc-tls", "vless-reality-vision")


@pytest.fixture
def town(all_kinds: Mapping[str, Kind], xhttp: Kind, ground: Ground) -> Mapping[str, Place]:
    """A place for each TCP transport."""
    kinds = [all_kinds[name] for name in TRANSPORTS] + [xhttp] * (ground.type == BackendType.XRAY)
    return {kind.name: Place(kind, kind.name, ground=ground) for kind in kinds}


class Street:
    """All users with traffic, and many idle users."""

    def __init__(self, node: NodeProcess, town: Mapping[str, Place], stack: ExitStack) -> None:
        self.node = node
        self.people = {name: TestUser.new(f"{name}@test") for name in town}
        self.town = town
        self.changes = Changes([*town.values()])
        self._first = self.changes.places[0]
        self._crowd = [TestUser.new(f"{number}@crowd.test") for number in range(CROWD)]
        self._turn = itertools.cycle([stack.enter_context(control(node, name)) for name in ("rest", "grpc")])
        # Only these users connect to it.
        self._echo = stack.enter_context(EchoServer())
        self._panel = stack.enter_context(closing(RpcController(node, dialect="x-api-key")))

    @property
    def controller(self) -> RestController | RpcController:
        return next(self._turn)

    @property
    def users(self) -> list[User]:
        crowd = [member(person, self._first) for person in self._crowd]
        return [*(member(self.people[name], place) for name, place in self.town.items()), *crowd, self.stranger]

    @property
    def stranger(self) -> User:
        """A user of the shifting inbound only."""
        return member(CARL, self.changes.shifting)

    def start(self) -> None:
        self.changes.next()
        self.changes.start(self.controller, self.users)

    def stop_and_start(self) -> None:
        self.changes.next()
        self._panel.stop()
        self.changes.start(self._panel, self.users)

    def change_users(self) -> None:
        """Give the first of the idle users other credentials."""
        some = [TestUser.new(person.email) for person in self._crowd[:CHANGED]]
        self._crowd[:CHANGED] = some
        self.controller.sync_users(self.users)

    def is_in_force(self) -> bool:
        """Whether the last configuration and users are in force."""
        shifting, echo = self.changes.shifting, self._echo
        led = gets_in(shifting, CARL, echo) if self.changes.open else stays_out(shifting, CARL, echo)
        return led and gets_in(self._first, self._crowd[0], echo)


CHANGES: Sequence[Callable[[Street], None]] = (
    Street.start,
    Street.stop_and_start,
    Street.change_users,
    Street.start,
)


@pytest.mark.slow
def test_changes_in_a_row(node: NodeProcess, town: Mapping[str, Place], cover: CoverServer, echo: EchoServer) -> None:
    """Through all changes connections stay, new ones succeed, and bytes are counted exactly; then the old cores end.

    On a live core users are added without another run.
    """
    live = next(iter(town.values())).ground.live
    with ExitStack() as stack:
        street = Street(node, town, stack)
        street.controller.stop()
        street.controller.stats(UsersStat, reset=True)
        with settled(town.values(), cover):
            street.start()
        with workers(town, street.people, echo) as activities:
            known = [runs(node)]
            for change in CHANGES:
                change(street)
                known.append(runs(node))
                assert street.is_in_force()
            for activity in activities.values():
                activity.rest()
            assert troubles(activities, "dropped") == troubles(activities, "failed") == {}
            came = [len(after - before) for before, after in itertools.pairwise(known)]
            assert came == [1, 1, 0 if live else 1, 1]
            assert all(known[0] <= later for later in known)
            told = {street.people[name].email: activity.moved for name, activity in activities.items()}
            assert counted(street.controller, told) == told
            print(f"{sum(len(each.opened) for each in activities.values())} new, {longest(activities.values())}")
        until(lambda: len(runs(node)) == 1, GONE, "the old cores are gone")
        assert counted(street.controller, told) == told
        assert street.is_in_force()
        assert not warned(street.controller.info())


@contextmanager
def workers(
    town: Mapping[str, Place], people: Mapping[str, TestUser], echo: EchoServer
) -> Iterator[Mapping[str, Activity]]:
    """Traffic of each user through the place of their name."""
    ports = {name: free_port() for name in town}
    with XrayClient({ports[name]: place.outbound(people[name]) for name, place in town.items()}), ExitStack() as stack:
        yield {name: stack.enter_context(Activity(port, echo, LIVE, PAUSE * len(town))) for name, port in ports.items()}


def troubles(activities: Mapping[str, Activity], kind: str) -> dict[str, list[str]]:
    return {name: found for name, activity in activities.items() if (found := getattr(activity, kind))}


def counted(controller: Controller, told: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    """Bytes of these users by direction once they are as expected, or after some seconds."""

    def now() -> dict[str, Counter[str]]:
        found = {name: Counter[str]() for name in told}
        for stat in controller.stats(UsersStat).stats:
            if stat.name in found:
                found[stat.name][stat.type] += stat.value
        return found

    with suppress(AssertionError):
        until(lambda: now() == told)
    return now()


# While several run


def test_users_of_an_old_core(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """Users on an old core are online; removed or changed ones are cut there, too. Stop ends all cores."""
    with control(node, "rest") as controller, ExitStack() as stack:
        controller.stop()
        changes = Changes([home])
        changes.start(controller, [member(person, home) for person in (ANNA, BERT, DORA)])
        anna, bert, dora = (stack.enter_context(connection(home, person, echo)) for person in (ANNA, BERT, DORA))
        for _ in range(2):
            changes.next()
            changes.start(controller, [member(person, home) for person in (ANNA, BERT, DORA)])
        assert len(runs(node)) > 1
        until(lambda: controller.online(ANNA.email).value == 1, what="she is online")
        assert list(controller.online_ips(ANNA.email).ips) == [SOURCE]
        with talking(anna):
            controller.sync_user(member(BERT), member(TestUser.new(DORA.email), home))
            until(lambda: ended(bert) and ended(dora), what="they end")
            assert stays_out(home, BERT, echo)
            assert stays_out(home, DORA, echo)
        with pytest.raises(AssertionError, match="offline"):
            until(lambda: not controller.online(ANNA.email).value, 0.2, "she is offline")
        began = time.monotonic()
        controller.stop()
        assert time.monotonic() - began < 5
        assert not runs(node)


def test_inbound_that_comes_back(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """An inbound that is removed and added again serves new connections, while old cores have others."""
    other = Place(home.kind, "other", ground=home.ground)
    users = [member(ANNA, home, other)]
    with control(node, "grpc") as controller:
        controller.stop()
        run(controller, [home, other], users)
        with connection(home, ANNA, echo) as one, connection(other, ANNA, echo) as two:
            for places in ([home], [home, other], [home], [home, other]):
                run(controller, places, users)
                for link in (one, two):
                    transfer.small_echo(link, b"still here")
            assert gets_in(other, ANNA, echo)
            assert not warned(controller.info())


def ended(link: socket.socket) -> bool:
    try:
        transfer.small_echo(link, b"still there")
    except OSError:
        return True
    return False


def test_limit_of_draining(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """An old core with persistent connections is ended at its time limit, which is logged; other users stay."""
    with drained(tmp_path, home, echo) as (node, _):
        pass
    assert any("ending a draining core with 1 connections" in line for line in node.lines), node.lines


# The kill is the same for all cores, and takes long.
@pytest.mark.slow
@on(lambda ground: ground.live)
def test_old_core_that_hangs(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """A suspended old core, which ignores TERM, is killed, and no other user is affected."""
    with drained(tmp_path, home, echo) as (_, old):
        freeze(old)


@contextmanager
def drained(directory: Path, home: Place, echo: EchoServer) -> Iterator[tuple[NodeProcess, int]]:
    """Inside, this core drains with a user's connection; afterwards, another user has traffic until it ends."""
    users = [member(ANNA, home), member(BERT, home)]
    with NodeProcess(directory, DRAIN_TIMEOUT="1") as node, control(node, "grpc") as controller:
        changes = Changes([home])
        changes.start(controller, users)
        old = core(node)
        with connection(home, ANNA, echo) as link:
            changes.next()
            changes.start(controller, users)
            yield node, old
            with busy(home, BERT, echo) as activity:
                only(node, newcomer(node, old))
            assert not activity.failed
            until(lambda: ended(link), what="her connection ends")


# What goes wrong


def at_once(pid: int, home: Place) -> None:
    """Before it replies."""


def in_the_door(pid: int, home: Place) -> None:
    """About when it replies, or gets new connections."""
    until(lambda: listens(pid, home.port), what="it listens")


@pytest.mark.parametrize("moment", [at_once, in_the_door])
def test_new_core_is_killed(
    node: NodeProcess, home: Place, echo: EchoServer, moment: Callable[[int, Place], None]
) -> None:
    """The Start fails with the reason, or the old core takes over again; it serves throughout."""
    users = [member(ANNA, home)]
    with control(node, "grpc") as controller, ThreadPoolExecutor(1) as pool:
        controller.stop()
        changes = Changes([home])
        changes.start(controller, users)
        before = core(node)
        with busy(home, ANNA, echo) as activity:
            changes.next()
            start = pool.submit(changes.start, controller, users)
            new = newcomer(node, before)
            moment(new, home)
            os.kill(new, signal.SIGKILL)
            if error := start.exception():
                assert isinstance(error, ControllerError)
                assert TAKEN in error.text
            only(node, before)
            in_state(controller, "running")
            if error:
                assert not activity.failed
        assert gets_in(home, ANNA, echo)
        assert core(node) == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_probation(node: NodeProcess, home: Place, echo: EchoServer, number: signal.Signals) -> None:
    """A new core that dies or hangs just after the takeover gives way to the old one, which is then resumed."""
    users = [member(ANNA, home)]
    with control(node, "rest") as controller:
        controller.stop()
        changes = Changes([home])
        changes.start(controller, users)
        before, good = core(node), changes.shifting
        with busy(home, ANNA, echo):
            changes.next()
            changes.start(controller, users)
            os.kill(newcomer(node, before), number)
            only(node, before)
            # The process may be gone before the node has noticed.
            until(lambda: "failed soon after taking over" in controller.info().reason, GONE, "the reason")
            reply = in_state(controller, "running")
        assert any("failed soon after taking over" in warning for warning in reply.warnings)
        assert core(node) == before
        assert gets_in(home, ANNA, echo)
        node.stop()
        node.start()
        in_state(controller, "running")
        assert listens(core(node), good.port)
        assert not listens(core(node), changes.shifting.port)


@on(lambda ground: ground.type == BackendType.SING_BOX)
def test_users_of_a_core_that_is_killed(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """Users added with a core that failed are added with the next one, which starts soon."""
    users = [member(ANNA, home)]
    with control(node, "grpc") as controller:
        controller.stop()
        run(controller, [home], users)
        before = core(node)
        with connection(home, ANNA, echo):
            controller.sync_users([*users, member(BERT, home)])
            os.kill(newcomer(node, before), signal.SIGKILL)
            until(lambda: gets_in(home, BERT, echo, timeout=1), GONE, "he gets in again")
            assert before in runs(node)


def test_node_is_killed(node: NodeProcess, home: Place, echo: EchoServer) -> None:
    """With several cores running: none is left, and the last backend is resumed."""
    users = [member(ANNA, home)]
    with control(node, "rest") as controller:
        controller.stop()
        changes = Changes([home])
        changes.start(controller, users)
        with connection(home, ANNA, echo):
            changes.next()
            changes.start(controller, users)
            before = runs(node)
            assert len(before) == 2
            node.kill()
            node.start()
        in_state(controller, "running")
        assert core(node) not in before
        assert listens(core(node), changes.shifting.port)
        assert gets_in(home, ANNA, echo)
        assert not warned(controller.info())
