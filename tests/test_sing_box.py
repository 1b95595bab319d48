"""sing-box behind the node: every type of inbound with real traffic, on a build with counters and on one without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import pytest

from protos import service_pb2
from protos.service_pb2 import Inbound, Outbound, UsersStat, UserStat
from tests.harness import certs, transfer
from tests.harness.controller import RpcController
from tests.harness.cover import CoverServer
from tests.harness.echo import EchoServer
from tests.harness.node import NodeProcess
from tests.harness.ports import free_port
from tests.harness.sing_box import (
    BUILDS,
    SERVER_NAME,
    Door,
    SingBoxClient,
    backend,
    find_sing_box,
    ways,
)
from tests.harness.socks import UdpAssociation
from tests.harness.users import TestUser
from tests.harness.wait import until

UP, DOWN = 300_000, 700_000


@dataclass
class Box:
    """A node of one build, and a controller of it."""

    build: str
    node: NodeProcess
    controller: RpcController

    def counted(self, kind: service_pb2.StatType, name: str) -> dict[str, int]:
        return {stat.type: stat.value for stat in self.controller.stats(kind, name).stats}

    def settles(self, kind: service_pb2.StatType, name: str, expected: Mapping[str, int]) -> dict[str, int]:
        """What is counted once it is as expected, or after two seconds."""
        with suppress(AssertionError):
            until(lambda: self.counted(kind, name) == expected, 2)
        return self.counted(kind, name)


@pytest.fixture(scope="module", params=list(BUILDS))
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    executable = find_sing_box(request.param)
    directory = tmp_path_factory.mktemp("node")
    with NodeProcess(directory, SING_BOX_EXECUTABLE_PATH=str(executable)) as node:
        node.core = executable.resolve()
        with closing(RpcController(node)) as controller:
            yield Box(request.param, node, controller)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> certs.Certificate:
    return certs.make(tmp_path_factory.mktemp("inbounds"), [SERVER_NAME])


@contextmanager
def client(*routes: tuple[Door, TestUser]) -> Iterator[list[int]]:
    """The SOCKS ports of a client for each of these users by these ways."""
    ports = {free_port(): door.outbounds(person) for door, person in routes}
    with SingBoxClient(ports) as core:
        try:
            yield list(ports)
        except OSError as fault:
            raise AssertionError(f"{fault}; the client said:\n{core.output}") from fault


def test_every_type(box: Box, certificate: certs.Certificate, cover: CoverServer, echo: EchoServer) -> None:
    """A user of each type gets his bytes over TCP and UDP, and exactly these are counted, for him and his inbound."""
    doors = [Door(way) for way in ways(certificate, cover.port) if box.build in way.builds]
    people = {door: TestUser.new(f"{door.way.name}@Example.org") for door in doors}
    info = box.controller.start(
        backend([inbound for door in doors for inbound in door.inbounds], map(Door.user, doors, people.values()))
    )
    assert info.running and info.core_type == "sing-box" and info.core_version == BUILDS[box.build].version
    with client(*people.items()) as ports:
        for (door, person), port in zip(people.items(), ports, strict=True):
            _use_and_compare(box, door, person, port, echo)
    total = box.counted(Outbound, "direct")
    rows = box.controller.stats(UsersStat).stats
    assert {row.name for row in rows} == {person.email for person in people.values()}
    assert total == {way: sum(row.value for row in rows if row.type == way) for way in ("uplink", "downlink")}


def _use_and_compare(box: Box, door: Door, person: TestUser, port: int, echo: EchoServer) -> None:
    received, sent = echo.received, echo.sent
    with transfer.connect(port, echo) as link:
        transfer.upload(link, UP)
        transfer.download(link, DOWN)
        online = until(lambda: box.controller.online_ips(person.email).ips, 2, f"{door.way.name} is online")
        assert list(online) == ["127.0.0.1"]
        assert box.controller.online(person.email).value == 1
    datagrams = 0
    if door.way.udp:
        with UdpAssociation(port, timeout=2) as association:
            transfer.udp_echo(association, bytes(1000), echo)
            datagrams = 1000
    expected = {"uplink": echo.received - received + datagrams, "downlink": echo.sent - sent + datagrams}
    assert box.settles(UserStat, person.email, expected) == expected, door.way.name
    assert box.settles(Inbound, door.counted, expected) == expected, door.way.name
