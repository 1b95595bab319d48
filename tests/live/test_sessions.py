"""Users of QUIC and similar protocols while their core is replaced: they are back soon, and no other user is affected.

These clients notice the end of a session. How fast other clients notice it is not up to the node.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import pytest

from protos.service_pb2 import BackendType, User, UsersStat
from scripts.staging import certs, protocols, transfer, transports
from scripts.staging.activity import Activity, chatter, gap
from scripts.staging.certs import Certificate
from scripts.staging.controller import Controller
from scripts.staging.core import Json
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import SERVER_NAME, Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.sing_box import VLESS, Door, SingBoxClient, Way, hysteria2, tls, ways
from scripts.staging.socks import UdpAssociation
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, control, member, way
from tests.harness.grounds import Ground
from tests.live.test_overlap import busy, newcomer, only, runs

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
# Seconds until a user is served again on a busy machine, for 0.3 of which no process has the port. A client that does
# not notice that waits for half a minute.
SOON = 20.0
# Seconds between two new connections of a user, and the timeout of one: its session may end before it has begun.
PAUSE = 0.02
PATIENCE = 1.5


class Spot(NamedTuple):
    """A UDP inbound as a controller sends it, with the user's credentials, and the user's client: a SOCKS port."""

    name: str
    inbound: Json
    user: Callable[[TestUser], User]
    client: Callable[[TestUser], AbstractContextManager[int]]

    @property
    def person(self) -> TestUser:
        return PEOPLE[self.name]


NAMES = ("hysteria", "kcp", "hysteria2", "tuic", "vless-quic")
PEOPLE = {name: TestUser.new(f"{name}@test") for name in NAMES}


@contextmanager
def by_sing_box(outbound: Callable[[TestUser], Json], person: TestUser) -> Iterator[int]:
    port = free_port()
    with SingBoxClient({port: [outbound(person)]}):
        yield port


def of_xray(certificate: Certificate, ground: Ground) -> Iterator[Spot]:
    quic = transports.tls(certificate, "hysteria", alpn=["h3"], hysteriaSettings={"version": 2})
    place = Place(Kind("hysteria", protocols.hysteria(), quic), "hysteria", ground=ground)
    outbound = partial(hysteria2, place.port, certificate=certificate)
    wide = {**place.inbound, "listen": "0.0.0.0"}
    yield Spot("hysteria", wide, partial(to, place), partial(by_sing_box, outbound))
    kcp = transports.Transport("kcp", {"network": "kcp"}, {"network": "kcp"})
    place = Place(Kind("kcp", protocols.vless(), kcp), "kcp", ground=ground)
    yield Spot("kcp", place.inbound, partial(to, place), partial(way, place))


def to(place: Place, person: TestUser) -> User:
    return member(person, place)


def of_sing_box(certificate: Certificate, _: Ground) -> Iterator[Spot]:
    server, client = ({**some, "transport": {"type": "quic"}} for some in tls(certificate, "h3"))
    vless = Way("vless-quic", "vless", VLESS.credentials, VLESS.proxy, server, client)
    found = [one for one in ways(certificate, 1) if one.quic]
    for one, listen in zip([*found, vless], itertools.cycle(["::", "127.0.0.1"]), strict=False):
        door = Door(one)
        [inbound] = door.inbounds
        yield Spot(one.name, {**inbound, "listen": listen}, door.user, partial(by_sing_box, partial(_first, door)))


def _first(door: Door, person: TestUser) -> Json:
    return door.outbounds(person)[0]


class Town:
    """A node with inbounds of all sorts."""

    def __init__(self, node: NodeProcess, ground: Ground, kinds: Mapping[str, Kind], spots: Sequence[Spot]) -> None:
        self.node, self.ground, self.spots = node, ground, spots
        self.home = Place(kinds["vless-raw"], "home", ground=ground)
        self.work = Place(kinds["shadowsocks-aes-256-gcm"], "work", ground=ground)
        self._variants = itertools.cycle([Json(), {**ground.other}])

    def start(self, controller: Controller, *more: User) -> int:
        """Start another configuration. Returns the pid of its core."""
        before = runs(self.node)
        inbounds = [self.home.inbound, self.work.inbound, *(spot.inbound for spot in self.spots)]
        users = [member(BERT, self.home), member(ANNA, self.work), *(spot.user(spot.person) for spot in self.spots)]
        controller.start(self.ground.backend(inbounds, [*users, *more], **next(self._variants)))
        return newcomer(self.node, *before)

    @contextmanager
    def regulars(self, echo: EchoServer) -> Iterator[Mapping[str, Activity]]:
        """Continuous traffic of the UDP users; none of them was interrupted for long."""
        with ExitStack() as stack:
            ports = {spot.name: stack.enter_context(spot.client(spot.person)) for spot in self.spots}
            for port in ports.values():
                stack.enter_context(chatter(port, echo))
            found = {
                name: stack.enter_context(Activity(port, echo, 0, PAUSE, PATIENCE)) for name, port in ports.items()
            }
            yield found
            for activity in found.values():
                activity.rest()
            assert {name: away for name, each in found.items() if (away := gap(each)) > SOON} == {}


def are_back(regulars: Mapping[str, Activity]) -> None:
    """Wait until each user has a connection that began after this call."""
    now = time.monotonic()
    until(lambda: all(each.opened and each.opened[-1].begun > now for each in regulars.values()), SOON, "all are back")


@pytest.fixture
def town(
    node: NodeProcess, ground: Ground, all_kinds: Mapping[str, Kind], tmp_path_factory: pytest.TempPathFactory
) -> Town:
    certificate = certs.make(tmp_path_factory.mktemp("udp"), [SERVER_NAME])
    made = of_xray if ground.type == BackendType.XRAY else of_sing_box
    return Town(node, ground, all_kinds, list(made(certificate, ground)))


@pytest.mark.slow
def test_changes_in_a_row(town: Town, echo: EchoServer) -> None:
    """All UDP users are back each time, and counted; TCP and sessionless users are not affected; old cores end."""
    with control(town.node, "grpc") as controller:
        controller.stop()
        controller.stats(UsersStat, reset=True)
        town.start(controller)
        with town.regulars(echo) as regulars:
            with busy(town.home, BERT, echo) as by_tcp, way(town.work, ANNA) as port:
                with UdpAssociation(port) as association:
                    transfer.udp_echo(association, b"before", echo)
                    for _ in range(3):
                        newest = town.start(controller)
                        are_back(regulars)
                        transfer.udp_echo(association, b"after", echo)
                by_tcp.rest()
                assert not by_tcp.failed
            only(town.node, newest)
        moved = {PEOPLE[name].email: each.moved for name, each in regulars.items()}
        until(lambda: all(rows >= moved[name] for name, rows in counted(controller, moved).items()), what="all counted")
        assert not [line for line in controller.info().warnings if "ended" in line]


def counted(controller: Controller, names: Iterable[str]) -> Mapping[str, Counter[str]]:
    """Bytes of these users by direction."""
    found = {name: Counter[str]() for name in names}
    for stat in controller.stats(UsersStat).stats:
        if stat.name in found:
            found[stat.name][stat.type] += stat.value
    return found


def test_probation(town: Town, echo: EchoServer) -> None:
    """The new core dies: UDP users are back with the old one."""
    with control(town.node, "rest") as controller:
        controller.stop()
        before = town.start(controller)
        with town.regulars(echo) as regulars, busy(town.home, BERT, echo):
            new = town.start(controller)
            are_back(regulars)
            os.kill(new, signal.SIGKILL)
            only(town.node, before)
            until(lambda: "failed soon after taking over" in controller.info().reason)
            are_back(regulars)


def test_removed_user(town: Town, echo: EchoServer) -> None:
    """A removed user's session that a core keeps ends at the next change."""
    spot = town.spots[0]
    with control(town.node, "grpc") as controller:
        controller.stop()
        town.start(controller, spot.user(CARL))
        with spot.client(CARL) as port, town.regulars(echo) as regulars:
            transfer.connect(port, echo).close()
            controller.sync_user(member(CARL))
            town.start(controller)
            are_back(regulars)
            with pytest.raises(OSError):
                transfer.connect(port, echo, 2).close()
