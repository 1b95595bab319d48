"""Proxied traffic through a real node: only users get through, and every byte is counted for the right one."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from protos.service_pb2 import Inbound, Inbounds, Outbound, Outbounds, StatType, UsersStat, UserStat
from scripts.staging import certs, socks, transfer
from scripts.staging.acceptor import Acceptor
from scripts.staging.certs import Certificate
from scripts.staging.controller import Controller, ControllerError
from scripts.staging.core import XrayClient
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import NAMES, Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import SOURCE, Place, connection, control, gets_in, member, over, run, settled, stays_out, way

# Bytes that Xray leaves out of an inbound's downlink for each connection.
UNCOUNTED = 8192
ANNA, BERT, CORA = TestUser.new("Anna@test"), TestUser.new("bert@test"), TestUser.new("cora@test")


class Traffic(NamedTuple):
    """Bytes from users, and to them."""

    uplink: int
    downlink: int

    def minus(self, other: Traffic) -> Traffic:
        return Traffic(self.uplink - other.uplink, self.downlink - other.downlink)


class Resident(NamedTuple):
    """An inbound with one user, and the SOCKS port that leads to it as that user."""

    place: Place
    person: TestUser
    socks_port: int


def counted(controller: Controller, kind: StatType, name: str, reset: bool = False) -> Traffic:
    """Both rows of one name."""
    reply = controller.stats(kind, name, reset)
    assert {(stat.name, stat.link) for stat in reply.stats} == {(name, "traffic")}
    assert sorted(stat.type for stat in reply.stats) == ["downlink", "uplink"]
    return Traffic(**{stat.type: stat.value for stat in reply.stats})


def listed(controller: Controller, kind: StatType, reset: bool = False) -> dict[tuple[str, str], int]:
    """All rows, by name and direction; none occurs twice."""
    stats = controller.stats(kind, reset=reset).stats
    rows = {(stat.name, stat.type): stat.value for stat in stats}
    assert len(rows) == len(stats)
    assert {stat.link for stat in stats} <= {"traffic"}
    return rows


def seen(echo: EchoServer) -> Traffic:
    """The bytes that the destination has received and sent."""
    return Traffic(echo.received, echo.sent)


@contextmanager
def tls_source(certificate: Certificate) -> Iterator[int]:
    """The port of a TLS 1.3 server that replies to each number with so many bytes."""
    port, context = free_port(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection.dup(), server_side=True) as link:
            while size := link.recv(20):
                link.sendall(bytes(int(size)))

    with Acceptor("127.0.0.1", port, serve):
        yield port


def receive(link: ssl.SSLSocket, size: int) -> None:
    while size:
        block = link.recv(size)
        assert block, f"the connection ended {size} bytes early"
        size -= len(block)


def unknown(call: Callable[[], object]) -> None:
    """The call is refused as for an unknown name."""
    with pytest.raises(ControllerError) as refused:
        call()
    assert refused.value.status in ("404", "NOT_FOUND")


@pytest.fixture(scope="module")
def residents(all_kinds: Mapping[str, Kind], node: NodeProcess, cover: CoverServer) -> Iterator[Mapping[str, Resident]]:
    """One backend with every kind of inbound, and one client with a user of each."""
    rows = {
        name: Resident(Place(kind, f"in {name}"), TestUser.new(f"{name}@test"), free_port())
        for name, kind in all_kinds.items()
    }
    places = [row.place for row in rows.values()]
    with control(node, "grpc") as controller, settled(places, cover):
        run(controller, places, [member(row.person, row.place) for row in rows.values()])
    with XrayClient({row.socks_port: row.place.outbound(row.person) for row in rows.values()}):
        yield rows


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_counted(
    name: str, residents: Mapping[str, Resident], echo: EchoServer, controller: Controller
) -> None:
    """While a connection is open each of its bytes is counted, for the user and the outbound."""
    person, email = residents[name], residents[name].person.email
    user, outbound, sent = counted(controller, UserStat, email), counted(controller, Outbound, "direct"), seen(echo)
    with transfer.connect(person.socks_port, echo) as link:
        transfer.echo(link, bytes(100_000))
        transfer.download(link, 300_000)
        transfer.upload(link, 200_000)
        moved = seen(echo).minus(sent)
        # The reply may be from a reading that had begun before.
        until(lambda: counted(controller, UserStat, email).minus(user) == moved, 2, "each byte is counted")
        assert counted(controller, Outbound, "direct").minus(outbound) == moved
    echo.drop()
    until(lambda: echo.live == 0, what="the connection is over")
    assert counted(controller, UserStat, email).minus(user) == moved


@over("grpc")
def test_vision_is_counted_live(tmp_path: Path, residents: Mapping[str, Resident], controller: Controller) -> None:
    """TLS inside Vision, which the kernel could splice past the counters, is counted while the connection is open."""
    resident = residents["vless-reality-vision"]
    certificate = certs.make(tmp_path, ["inner.test"])
    context = ssl.create_default_context(cafile=certificate.certificate)
    before = counted(controller, UserStat, resident.person.email)
    with (
        tls_source(certificate) as port,
        socks.connect(resident.socks_port, "127.0.0.1", port) as way_there,
        context.wrap_socket(way_there, server_hostname="inner.test") as link,
    ):
        for size in (1_000_000, 2_000_000):
            link.sendall(b"%d" % size)
            receive(link, size)
        assert counted(controller, UserStat, resident.person.email).minus(before).downlink >= 3_000_000


@pytest.mark.parametrize("name", NAMES)
def test_strangers_stay_out(name: str, residents: Mapping[str, Resident], echo: EchoServer) -> None:
    """An unknown credential works on no inbound on which its user's does."""
    assert gets_in(residents[name].place, residents[name].person, echo)
    assert stays_out(residents[name].place, TestUser.new("stranger@test"), echo)


def test_datagrams_are_counted(residents: Mapping[str, Resident], echo: EchoServer, node: NodeProcess) -> None:
    """UDP bytes are counted as well."""
    resident = residents["vless-raw"]
    with control(node, "rest") as controller, socks.UdpAssociation(resident.socks_port) as association:
        before, sent = counted(controller, UserStat, resident.person.email), echo.datagrams
        transfer.udp_echo(association, bytes(1000), echo)
        moved = counted(controller, UserStat, resident.person.email).minus(before)
        assert moved.downlink == 1000 * (echo.datagrams - sent)
        assert moved.uplink >= moved.downlink


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hysteria2"])
@over("grpc")
def test_inbounds_are_counted(
    name: str, all_kinds: Mapping[str, Kind], cover: CoverServer, echo: EchoServer, controller: Controller
) -> None:
    """An inbound counts its users' bytes, and the protocol's overhead; Xray may leave out part of a download."""
    place, person, before = Place(all_kinds[name], f"counts {name}"), TestUser.new("inbound@test"), seen(echo)
    with settled([place], cover):
        run(controller, [place], [member(person, place)])
    with connection(place, person, echo) as link:
        transfer.download(link, 300_000)
        transfer.upload(link, 200_000)
    moved, inbound = seen(echo).minus(before), counted(controller, Inbound, place.tag)
    assert moved.uplink <= inbound.uplink <= moved.uplink * 1.1
    assert moved.downlink - UNCOUNTED <= inbound.downlink <= moved.downlink * 1.1


def test_inbounds_beside_hysteria(all_kinds: Mapping[str, Kind], echo: EchoServer, controller: Controller) -> None:
    """Some cores cannot count both Hysteria's users and inbounds: the node warns, and never shows zeros."""
    home, hysteria = Place(all_kinds["vless-raw"], "beside"), Place(all_kinds["hysteria2"], "hysteria")
    info = run(controller, [home, hysteria], [member(ANNA, home)])
    with connection(home, ANNA, echo) as link:
        transfer.upload(link, 1000)
    try:
        assert listed(controller, Inbounds)[home.tag, "uplink"] >= 1000
    except ControllerError as refused:
        assert refused.status in ("501", "UNIMPLEMENTED")
        assert "Hysteria" in str(info.warnings)


@pytest.fixture
def counters(controller: Controller, home: Place, echo: EchoServer) -> Traffic:
    """A backend that has counted only a download of Anna's; her bytes. Bert has none."""
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    for kind in (UsersStat, Outbounds, Inbounds):
        listed(controller, kind, reset=True)
    before = seen(echo)
    with connection(home, ANNA, echo) as link:
        transfer.download(link, 50_000)
        return seen(echo).minus(before)


def test_reset_takes(counters: Traffic, controller: Controller) -> None:
    """A reading keeps counters, and one with `reset` sets them to zero."""
    for kind in (UsersStat, Outbounds):
        rows = listed(controller, kind)
        assert listed(controller, kind) == rows
        assert listed(controller, kind, reset=True) == rows
        assert not any(listed(controller, kind).values())
    assert counted(controller, Outbound, "direct") == Traffic(0, 0)


def own(rows: Mapping[tuple[str, str], int], home: Place) -> dict[tuple[str, str], int]:
    """The rows of this inbound; draining cores have others until they end."""
    return {row: moved for row, moved in rows.items() if row[0] == home.tag}


def test_reset_of_one(counters: Traffic, controller: Controller, home: Place) -> None:
    """One user, inbound or outbound can be read and reset alone, without effect on others."""
    others = own(listed(controller, Inbounds), home)
    assert counted(controller, UserStat, ANNA.email, reset=True) == counters
    assert counted(controller, Outbound, "direct", reset=True) == counters
    assert counted(controller, UserStat, ANNA.email) == Traffic(0, 0)
    assert counted(controller, Outbound, "direct") == Traffic(0, 0)
    assert own(listed(controller, Inbounds), home) == others
    # Xray counts the protocol's overhead as well.
    assert counted(controller, Inbound, home.tag, reset=True).uplink >= counters.uplink
    assert counted(controller, Inbound, home.tag) == Traffic(0, 0)


def test_rows(counters: Traffic, controller: Controller, home: Place) -> None:
    """Users without traffic have no rows; inbounds and outbounds always have both; the node's own are not shown."""
    assert listed(controller, UsersStat) == {
        (ANNA.email, "uplink"): counters.uplink,
        (ANNA.email, "downlink"): counters.downlink,
    }
    silent = {(tag, direction): 0 for tag in home.ground.outbounds[1:] for direction in Traffic._fields}
    assert listed(controller, Outbounds) == silent | {
        ("direct", "uplink"): counters.uplink,
        ("direct", "downlink"): counters.downlink,
    }
    inbounds = listed(controller, Inbounds)
    assert {(home.tag, "uplink"), (home.tag, "downlink")} <= inbounds.keys()
    assert not [name for name, _ in inbounds if "api" in name or "txnode" in name]


def test_names(counters: Traffic, controller: Controller) -> None:
    """A user without traffic is known and has none; an unknown one is an error, not a zero."""
    assert counted(controller, UserStat, BERT.email) == Traffic(0, 0)
    for kind in (UserStat, Inbound, Outbound):
        unknown(lambda kind=kind: controller.stats(kind, "nobody@test"))  # type: ignore[misc]


def test_names_too_long_for_the_core(counters: Traffic, controller: Controller) -> None:
    """No user can have them; they neither fail readings of others nor cause warnings."""
    for kind in (UserStat, Inbound, Outbound):
        unknown(lambda kind=kind: controller.stats(kind, "n" * 5_000_000))  # type: ignore[misc]
        assert not [warning for warning in controller.info().warnings if "counters" in warning]


def test_counters_survive_stop(counters: Traffic, controller: Controller, home: Place) -> None:
    """Counted bytes can be read after a Stop, and after the next Start, and are only then gone."""
    controller.stop()
    assert counted(controller, UserStat, ANNA.email) == counters
    assert counted(controller, Outbound, "direct") == counters
    run(controller, [home], [member(BERT, home)])
    assert counted(controller, UserStat, ANNA.email) == counters
    assert sum(listed(controller, UsersStat, reset=True).values()) == sum(counters)
    assert not listed(controller, UsersStat)


def test_removed_users_are_counted(counters: Traffic, controller: Controller) -> None:
    """The bytes of a removed user are kept until they are read."""
    controller.sync_user(member(ANNA))
    assert counted(controller, UserStat, ANNA.email) == counters
    assert sum(listed(controller, UsersStat, reset=True).values()) == sum(counters)
    assert not listed(controller, UsersStat)


@pytest.mark.both
def test_sync_loses_nothing(counters: Traffic, controller: Controller, home: Place, echo: EchoServer) -> None:
    """A full sync keeps all counters: bytes before and after it add up."""
    before = seen(echo)
    with connection(home, BERT, echo) as link:
        transfer.download(link, 10_000)
        controller.sync_users([member(BERT, home), *([member(CORA, home)] if home.ground.live else [])])
        transfer.upload(link, 20_000)
        moved = seen(echo).minus(before)
        assert counted(controller, UserStat, BERT.email) == moved
        controller.sync_users([member(BERT, home), member(CORA, home), member(ANNA, home)])
    assert listed(controller, UsersStat) == {
        (ANNA.email, "uplink"): counters.uplink,
        (ANNA.email, "downlink"): counters.downlink,
        (BERT.email, "uplink"): moved.uplink,
        (BERT.email, "downlink"): moved.downlink,
    }


def test_online(counters: Traffic, controller: Controller, home: Place, echo: EchoServer) -> None:
    """A user is online from each of their connections' addresses, once, and no longer without one."""
    with connection(home, BERT, echo), connection(home, BERT, echo):
        assert controller.online(BERT.email).value == 1
        reply = controller.online_ips(BERT.email)
        assert reply.name == BERT.email
        assert list(reply.ips) == [SOURCE]
        assert abs(reply.ips[SOURCE] - time.time()) < 60
        with way(home, BERT, source="127.0.0.3") as port, transfer.connect(port, echo):
            # sing-box's list may be up to 0.2 s old.
            until(lambda: controller.online(BERT.email).value == 2, 10, "he is online from there, too")
            assert set(controller.online_ips(BERT.email).ips) == {SOURCE, "127.0.0.3"}
    until(lambda: controller.online(BERT.email).value == 0, what="he is offline")
    assert not controller.online_ips(BERT.email).ips


def test_online_names(counters: Traffic, controller: Controller) -> None:
    """A known user without connections is online from nowhere; an unknown one is an error."""
    assert controller.online(BERT.email).value == 0
    assert controller.online(BERT.email).name == BERT.email
    assert not controller.online_ips(BERT.email).ips
    unknown(lambda: controller.online("nobody@test"))
    unknown(lambda: controller.online_ips("nobody@test"))


def test_both_transports_see_the_same(counters: Traffic, node: NodeProcess) -> None:
    """Bytes that one transport has reset are reset for the other."""
    with control(node, "rest") as rest, control(node, "grpc") as grpc:
        assert listed(rest, UsersStat) == listed(grpc, UsersStat)
        assert sum(listed(rest, UsersStat, reset=True).values()) == sum(counters)
        assert not listed(grpc, UsersStat)
