"""Who is online means the same on both cores, by TCP and by QUIC, and from the machine itself."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from protos.service_pb2 import ListOnlineRequest, ListOnlineResponse
from scripts.staging import certs, transfer
from scripts.staging.controller import Controller, ControllerError
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import SERVER_NAME, Kind
from scripts.staging.socks import UdpAssociation
from scripts.staging.transports import Transport, tls
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import SOURCE, Place, member, over, run, settled, way
from tests.harness.grounds import Ground

SECOND_SOURCE, LOCAL = "127.0.0.4", "127.0.0.1"
# Kinds of connections on both cores; "/udp": the user sends datagrams.
BOTH = (
    *("vless-raw", "vless-ws-tls", "vless-grpc-tls", "trojan-tls/udp", "shadowsocks-aes-256-gcm"),
    *("shadowsocks-aes-256-gcm/udp", "shadowsocks-2022-aes-128/udp", "hysteria2", "hysteria2/udp"),
)
# Some of them for users from the machine itself; Xray 26.3.27 logs nothing about datagrams of Hysteria.
FROM_HERE = (
    *("vless-grpc-tls", "shadowsocks-aes-256-gcm", "hysteria2"),
    *("shadowsocks-aes-256-gcm/udp", "shadowsocks-2022-aes-128/udp"),
)
# Transports that only Xray has.
ALONE = ("xhttp", "xhttp-h3", "mkcp")
# A core keeps the datagrams' session of these for minutes.
LASTING = ("shadowsocks-aes-256-gcm/udp", "shadowsocks-2022-aes-128/udp", "hysteria2/udp")
# Seconds after which a user must be offline: over mKCP the core waits for some eight.
OFF, IDLE = 20.0, 1.5


def listed(controller: Controller) -> dict[str, set[str]]:
    page = controller.call("ListOnline", ListOnlineResponse, ListOnlineRequest())
    return {row.name: set(row.ips) for row in page.users}


def somebody() -> TestUser:
    return TestUser.new(f"Somebody-{uuid.uuid4()}@test")


def soon(condition: Callable[[], object], what: str) -> None:
    """Wait for a second, or longer on a busy machine."""
    until(condition, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), what)


def stays(condition: Callable[[], bool], what: str) -> None:
    """Fail if the condition does not hold at any moment of some time."""
    end = time.monotonic() + IDLE
    while time.monotonic() < end:
        assert condition(), what


@pytest.fixture
def alone(all_kinds: Mapping[str, Kind], tmp_path: Path) -> Mapping[str, Kind]:
    """VLESS by transports that only Xray has."""
    certificate = certs.make(tmp_path, [SERVER_NAME])
    path = {"path": "/x"}
    transports = {
        "xhttp": tls(certificate, "xhttp", xhttpSettings=path),
        "xhttp-h3": tls(certificate, "xhttp", ["h3"], xhttpSettings=path),
        "mkcp": Transport("mkcp", {"network": "kcp"}, {"network": "kcp"}),
    }
    vless = all_kinds["vless-raw"]
    return {name: replace(vless, name=name, transport=transport) for name, transport in transports.items()}


@contextmanager
def using(name: str, port: int, echo: EchoServer) -> Iterator[None]:
    """A connection by this way, or a session of datagrams."""
    if name.endswith("/udp"):
        with UdpAssociation(port) as association:
            transfer.udp_echo(association, b"hello", echo)
            yield
    else:
        with transfer.connect(port, echo):
            yield


def means_the_same(name: str, place: Place, controller: Controller, cover: CoverServer, echo: EchoServer) -> None:
    anna, bert = somebody(), somebody()
    with settled([place], cover):
        run(controller, [place], [member(anna, place), member(bert, place)])

    def online(*sources: str) -> bool:
        counts = [controller.online(person.email).value for person in (anna, bert)]
        expected = {anna.email: set(sources)} if sources else {}
        return listed(controller) == expected and counts == [len(sources), 0]

    # The clients stay: over QUIC only they can say that a connection has ended.
    with way(place, anna, SOURCE) as first, way(place, anna, SECOND_SOURCE) as second:
        with using(name, first, echo):
            soon(lambda: online(SOURCE), "she is online")
            stays(lambda: online(SOURCE), "she stays online while she moves no bytes")
            with using(name, second, echo):
                soon(lambda: online(SOURCE, SECOND_SOURCE), "she has two addresses")
                assert set(controller.online_ips(anna.email).ips) == {SOURCE, SECOND_SOURCE}
            if not name.endswith("/udp"):
                until(lambda: online(SOURCE), OFF, "she has one address")
        if not name.endswith("/udp"):
            until(online, OFF, "she is offline")
    if name not in LASTING:
        # A client may keep the session of datagrams inside its connection.
        until(online, OFF, "she is offline without her clients")


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
@over("rest")
def test_online_means_the_same(
    name: str,
    controller: Controller,
    ground: Ground,
    all_kinds: Mapping[str, Kind],
    cover: CoverServer,
    echo: EchoServer,
) -> None:
    """A user is online within a second, also when idle, from each address, and offline after the end."""
    place = Place(all_kinds[name.removesuffix("/udp")], "in", ground=ground)
    means_the_same(name, place, controller, cover, echo)


@pytest.mark.slow
@pytest.mark.turns("name")
@pytest.mark.parametrize("name", ALONE)
@over("rest")
def test_online_by_other_transports(
    name: str, controller: Controller, alone: Mapping[str, Kind], cover: CoverServer, echo: EchoServer
) -> None:
    """It means the same by transports that only Xray has."""
    means_the_same(name, Place(alone[name], "in"), controller, cover, echo)


def never_offline(name: str, place: Place, controller: Controller, cover: CoverServer, echo: EchoServer) -> None:
    anna, bert = somebody(), somebody()
    with settled([place], cover):
        run(controller, [place], [member(anna, place), member(bert, place)])

    def known() -> bool:
        """Whether she is online, or the reply is that the node does not know; the list agrees with that."""
        page = controller.call("ListOnline", ListOnlineResponse, ListOnlineRequest())
        try:
            assert controller.online(anna.email).value in (0, len(page.users))
        except ControllerError as error:
            assert error.status == "501" and "from this machine" in error.text
            assert not page.users and [*page.unsupported] == ["in"]
            with pytest.raises(ControllerError):
                controller.online_ips(bert.email)
            return True
        return [set(row.ips) for row in page.users] == [{LOCAL}]

    with way(place, anna, LOCAL) as port, using(name, port, echo):
        # The node looks for the sockets of new connections once a second.
        until(known, what="she is online, or that is not known")
        stays(known, "she is never reported as offline")


@pytest.mark.parametrize("name", FROM_HERE)
@over("rest")
def test_a_user_from_the_machine_itself(
    name: str,
    controller: Controller,
    ground: Ground,
    all_kinds: Mapping[str, Kind],
    cover: CoverServer,
    echo: EchoServer,
) -> None:
    """As behind a relay: a user is online, or the reply is `unsupported`, but they are never offline."""
    place = Place(all_kinds[name.removesuffix("/udp")], "in", ground=ground)
    never_offline(name, place, controller, cover, echo)


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", ALONE)
@over("rest")
def test_from_the_machine_itself_by_other_transports(
    name: str, controller: Controller, alone: Mapping[str, Kind], cover: CoverServer, echo: EchoServer
) -> None:
    """Nor are they by transports that only Xray has."""
    never_offline(name, Place(alone[name], "in"), controller, cover, echo)


@pytest.mark.both
@pytest.mark.parametrize(("kind", "source"), [("vless-raw", SOURCE), ("vless-raw", "127.0.0.1"), ("hysteria2", SOURCE)])
@over("rest")
def test_a_connection_makes_online(
    kind: str,
    source: str,
    controller: Controller,
    ground: Ground,
    all_kinds: Mapping[str, Kind],
    cover: CoverServer,
    echo: EchoServer,
) -> None:
    """With one connection a user is online from one address, and a moment after its end from none."""
    place = Place(all_kinds[kind], "in", ground=ground)
    anna, bert = somebody(), somebody()
    with settled([place], cover):
        run(controller, [place], [member(anna, place), member(bert, place)])
    with way(place, anna, source) as port:
        with transfer.connect(port, echo):
            until(lambda: listed(controller) == {anna.email: {source}}, 10, "she is online")
            assert set(controller.online_ips(anna.email).ips) == {source}
            assert [controller.online(person.email).value for person in (anna, bert)] == [1, 0]
        # Over QUIC only the client itself says that the connection has ended.
        until(lambda: not controller.online(anna.email).value and not listed(controller), 10, "she is offline")
