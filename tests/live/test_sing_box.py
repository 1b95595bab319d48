"""sing-box behind the node: every type of inbound with real traffic, on a build with counters and on one without."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from protos import service_pb2
from protos.service_pb2 import Inbound, Inbounds, Outbound, UsersStat, UserStat
from scripts.staging import certs, socks, transfer
from scripts.staging.controller import ControllerError
from scripts.staging.core import Json
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.ports import free_port
from scripts.staging.sing_box import (
    BUILDS,
    SERVER_KEY,
    SERVER_NAME,
    VLESS,
    Door,
    SingBoxClient,
    backend,
    config,
    shadowsocks_2022,
    tls,
    ways,
)
from scripts.staging.socks import UdpAssociation
from scripts.staging.users import TestUser
from scripts.staging.wait import accepts, until
from tests.conftest import talking
from tests.harness.box import Box, box_of, client, gets_in, stays_in, stays_out

UP, DOWN = 300_000, 700_000


@pytest.fixture(scope="module", params=list(BUILDS))
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box_of(request.param, tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture(scope="module", params=list(BUILDS))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A node without room for another core: if a change needs one, the old core ends first."""
    with box_of(request.param, tmp_path_factory.mktemp("node"), DRAIN_GENERATIONS="0") as running:
        yield running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> certs.Certificate:
    return certs.make(tmp_path_factory.mktemp("inbounds"), [SERVER_NAME])


def test_every_type(box: Box, certificate: certs.Certificate, cover: CoverServer, echo: EchoServer) -> None:
    """A user of each type transfers over TCP and UDP: exactly these bytes are counted, for user and inbound."""
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
        for _ in range(door.way.padded):
            transfer.small_echo(link, b"small")
        transfer.upload(link, UP)
        transfer.download(link, DOWN)
        online = until(lambda: box.controller.online_ips(person.email).ips, 10, f"{door.way.name} is online")
        assert list(online) == ["127.0.0.1"]
        assert box.controller.online(person.email).value == 1
    expected = {"uplink": echo.received - received, "downlink": echo.sent - sent}
    with UdpAssociation(port, timeout=2) if door.way.udp else nullcontext() as association:
        if association:
            before = echo.datagrams
            transfer.udp_echo(association, bytes(1000), echo)
            expected = {way: count + 1000 * (echo.datagrams - before) for way, count in expected.items()}
        # While it is open: a core may not count a datagram that it is writing when its connection closes.
        assert box.settles(UserStat, person.email, expected) == expected, door.way.name
        assert box.settles(Inbound, door.counted, expected) == expected, door.way.name


# Changes of users


@pytest.mark.parametrize("name", ["vless", "shadowsocks-2022", "hysteria2", "tuic", "mixed"])
def test_a_removed_user_is_out(
    alone: Box, certificate: certs.Certificate, cover: CoverServer, echo: EchoServer, name: str
) -> None:
    """The user's connections are cut within a second and no new one works; another user is not affected."""
    door = Door(next(way for way in ways(certificate, cover.port) if way.name == name))
    stays, goes = TestUser.new("stays"), TestUser.new("goes")
    alone.controller.start(backend(door.inbounds, [door.user(stays), door.user(goes)]))
    cores = alone.node.core_pids()
    with client((door, stays), (door, goes)) as (first, second), ExitStack() as stack:
        assert gets_in(first, echo) and gets_in(second, echo)
        mine = [stack.enter_context(transfer.connect(first, echo)) for _ in range(5)]
        his = [stack.enter_context(transfer.connect(second, echo, timeout=1)) for _ in range(20)]
        with talking(mine[0]):
            alone.controller.sync_user(service_pb2.User(email="Goes"))
            for link in his:
                with pytest.raises(OSError):
                    transfer.echo(link, b"am I in?")
            assert not stays_in(second, echo)
        for link in mine:
            transfer.echo(link, b"still there")
        assert alone.node.core_pids() == cores, "no other core was needed"
        with pytest.raises(ControllerError, match="goes"):
            alone.controller.online("goes")
        alone.controller.sync_user(door.user(goes))
        assert alone.node.core_pids() == cores, "he was in its configuration still"
        assert gets_in(second, echo)


def test_out_by_one_way_alone(alone: Box, certificate: certs.Certificate, cover: CoverServer, echo: EchoServer) -> None:
    """A user removed from ShadowTLS, but not from the inbound behind it: only connections through ShadowTLS are cut."""
    door = Door(next(way for way in ways(certificate, cover.port) if way.name == "shadowtls"))
    stays, goes = TestUser.new("stays"), TestUser.new("goes")
    direct = [{**door.outbounds(goes)[0], "server_port": door.inner_port}]
    direct[0].pop("detour")
    alone.controller.start(backend(door.inbounds, [door.user(stays), door.user(goes)]))
    cores = alone.node.core_pids()
    ports = {free_port(): door.outbounds(stays), free_port(): direct, free_port(): door.outbounds(goes)}
    with SingBoxClient(ports), ExitStack() as stack:
        stay, inner, out = ports
        for port in (stay, inner):
            stack.enter_context(talking(stack.enter_context(transfer.connect(port, echo))))
        his = [stack.enter_context(transfer.connect(out, echo)) for _ in range(3)]
        for link in his:
            # From here on a reply may not come.
            link.settimeout(1)
        less = door.user(goes)
        less.inbounds.remove("shadowtls")
        alone.controller.sync_user(less)
        for link in his:
            with pytest.raises(OSError):
                transfer.echo(link, b"am I in?")
        assert not stays_in(out, echo)
        assert stays_in(inner, echo)
        alone.controller.sync_user(door.user(goes))
        assert gets_in(out, echo)
    assert alone.node.core_pids() == cores


def test_out_by_a_way_whose_users_nobody_sees(
    box: Box, certificate: certs.Certificate, cover: CoverServer, echo: EchoServer
) -> None:
    """Behind ShadowTLS all are one user of the configuration: a removed user is cut by a new core."""
    door = Door(next(way for way in ways(certificate, cover.port) if way.name == "shadowtls"))
    stays, goes = TestUser.new("stays"), TestUser.new("goes")
    box.controller.start(backend(door.inbounds, [door.user(stays), door.user(goes)], exclude=["shadowtls-inner"]))
    ports: dict[int, list[Json]] = {}
    for person in (stays, goes):
        inner, front = door.outbounds(person)
        ports[free_port()] = [{**inner, "password": SERVER_KEY}, front]
    with SingBoxClient(ports):
        first, second = ports
        assert gets_in(first, echo) and gets_in(second, echo)
        box.controller.sync_user(service_pb2.User(email="goes"))
        assert gets_in(first, echo) and stays_out(second, echo)


def test_added_users_and_every_byte(box: Box, echo: EchoServer) -> None:
    """A new user can connect after the call; across four successive cores no byte is lost or counted twice."""
    door, first = Door(VLESS), TestUser.new("first")
    box.controller.start(backend(door.inbounds, [door.user(first)]))
    box.controller.stats(Inbounds, reset=True)
    received, sent = echo.received, echo.sent
    with client((door, first)) as (port,):
        for number in range(4):
            with transfer.connect(port, echo) as link:
                transfer.upload(link, UP)
                transfer.download(link, DOWN)
                core = box.node.newest_core()
                person = TestUser.new(f"person-{number}")
                box.controller.sync_user(door.user(person))
                assert box.node.newest_core() != core
            with client((door, person)) as (own,):
                assert gets_in(own, echo)
    expected = {"uplink": echo.received - received, "downlink": echo.sent - sent}
    assert box.settles(Inbound, "vless", expected) == expected
    assert box.counted(UserStat, "first") == {"uplink": 4 * (UP + 36), "downlink": 4 * (DOWN + 11)}


def test_a_sync_that_changes_nothing(box: Box, echo: EchoServer) -> None:
    """The same users, and the same Start, affect no connection."""
    door, people = Door(VLESS), [TestUser.new(f"{number}@x") for number in range(3)]
    users = [door.user(person) for person in people]
    box.controller.start(backend(door.inbounds, users))
    with client((door, people[0])) as (port,), transfer.connect(port, echo) as link, talking(link):
        box.controller.sync_users(users)
        box.controller.sync_user(users[1])
        box.controller.start(backend(door.inbounds, users))


def test_changes_are_collected(box: Box) -> None:
    """Many successive additions share a few new cores."""
    door = Door(VLESS)
    box.controller.start(backend(door.inbounds))
    people = [TestUser.new(f"{number}@x") for number in range(30)]
    seen = {box.node.newest_core()}
    with ThreadPoolExecutor(1) as pool:
        syncing = pool.submit(box.controller.sync_user, *map(door.user, people))
        while not syncing.done():
            seen.add(box.node.newest_core())
        syncing.result()
    # The last one, too: on a busy machine a look may take longer than the change.
    seen.add(box.node.newest_core())
    assert 2 <= len(seen) <= 4


def test_a_changed_credential(box: Box, echo: EchoServer) -> None:
    """The new one works, the old one does not, and its connections are cut."""
    door, old, new = Door(VLESS), TestUser.new("same"), TestUser.new("same")
    box.controller.start(backend(door.inbounds, [door.user(old)]))
    with client((door, old), (door, new)) as (first, second), transfer.connect(first, echo, timeout=1) as link:
        box.controller.sync_user(door.user(new))
        with pytest.raises(OSError):
            transfer.echo(link, b"am I in?")
        assert gets_in(second, echo) and stays_out(first, echo)


def test_nobody_gets_in_without_users(
    box: Box, certificate: certs.Certificate, cover: CoverServer, echo: EchoServer
) -> None:
    """Inbounds without users admit none: otherwise some types would admit all, others would not start."""
    doors = [Door(way) for way in ways(certificate, cover.port) if box.build in way.builds]
    box.controller.start(backend([inbound for door in doors for inbound in door.inbounds]))
    stranger = TestUser("stranger", "", "")
    by_server_key = {"type": "shadowsocks", "method": "2022-blake3-aes-128-gcm", "password": SERVER_KEY, "tag": "out"}
    ports: dict[int, list[Json]] = {}
    for door in doors:
        address = {"server": "127.0.0.1", "server_port": door.port}
        if door.way.name == "shadowsocks-2022":
            ports[free_port()] = [{**by_server_key, **address}]
        elif door.way.type in ("vless", "vmess", "trojan", "anytls", "hysteria2", "hysteria"):
            ports[free_port()] = door.outbounds(stranger)
        elif door.way.type in ("socks", "mixed", "http"):
            ports[free_port()] = [{"type": door.outbounds(stranger)[0]["type"], "tag": "out", **address}]
    before = echo.connections
    with SingBoxClient(ports), ThreadPoolExecutor(len(ports)) as pool:
        assert all(pool.map(lambda port: stays_out(port, echo), ports))
    assert echo.connections == before
    assert len(ports) > 8


# Keys that the node adds and removes


def test_the_apis_are_out_of_reach(box: Box, echo: EchoServer) -> None:
    """A user cannot reach the core's own ports by any name of this machine, but can reach others."""
    door, person, other = Door(VLESS), TestUser.new("nosy"), Door(shadowsocks_2022())
    box.controller.start(backend(door.inbounds + other.inbounds, [door.user(person)]))
    core = psutil.Process(box.node.newest_core())
    listening = {each.laddr.port for each in core.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    own = listening - {door.port, other.port}
    assert len(own) == (3 if box.build == "built" else 2)
    beyond = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[1])
    assert beyond > 65000 or min(own) > beyond
    with client((door, person)) as (port,):
        assert gets_in(port, echo)
        for host in ("127.0.0.1", "::ffff:127.0.0.1", "0.0.0.0", "::", "localhost", socket.gethostname()):
            for target in own:
                with pytest.raises(OSError), socks.connect(port, host, target, timeout=2) as link:
                    link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
                    if not link.recv(1):
                        raise ConnectionResetError
    with box.controller.logs() as log:
        log.find("[nosy] inbound connection")
        assert not [line for line in log.lines if any(f":{one}" in line and "started" in line for one in own)]


def test_a_configuration_in_its_own_spelling(box: Box, echo: EchoServer, tmp_path: Path) -> None:
    """Comments, case and duplicate keys are parsed as the core does; keys that write files or open APIs are removed."""
    door, person = Door(VLESS), TestUser.new("a")
    lines, pprof = tmp_path / "log", free_port()
    text = f"""{{ // a comment
      "LOG": {{"Output": "{lines}", "level": "info"}},
      "inbounds": [{{"type": "vless", "tag": "unused", "listen_port": 1}}],
      /* another */ "Inbounds": [
        {{"type": "vless", "tag": "vless", "LISTEN": "127.0.0.1", "listen_Port": {door.port}, "Users": [
          {{"name": "own", "uuid": ""}}], }},
      ],
      "experimental": {{"debug": {{"listen": "127.0.0.1:{pprof}"}}, "cache_file": {{"enabled": true}}}},
      "services": [{{"type": "API", "listen": "127.0.0.1", "listen_port": {pprof}}}], # the end
    }}"""
    text = text.replace('"API"', '"api"')
    request = service_pb2.Backend(type=service_pb2.SING_BOX, config=text, users=[door.user(person)])
    info = box.controller.start(request)
    assert [word for word in ("debug", "cache_file", "service api", "log.output") if word in str(info.warnings)] == [
        *("debug", "cache_file", "service api", "log.output")
    ]
    nobody = {**door.outbounds(person)[0], "uuid": ""}
    good, bad = free_port(), free_port()
    with SingBoxClient({good: door.outbounds(person), bad: [nobody]}):
        assert gets_in(good, echo) and stays_out(bad, echo)
    assert not lines.exists() and not accepts(pprof)


def test_what_the_core_refuses(box: Box, echo: EchoServer) -> None:
    """It is the caller's fault, reported with the core's message, and the running backend stays."""
    door, person = Door(VLESS), TestUser.new("a")
    box.controller.start(backend(door.inbounds, [door.user(person)]))
    with client((door, person)) as (port,), transfer.connect(port, echo) as link, talking(link):
        for inbounds, why in (
            ([{**door.inbounds[0], "foo": 1}], 'unknown field "foo"'),
            ([{**door.inbounds[0], "type": "nonsense"}], "nonsense"),
            ([{"type": "trojan", "tag": "a", "tls": {"enabled": True}, "listen_port": 1}], "missing certificate"),
            ([{"type": "vless", "tag": "a"}, {"type": "vmess", "tag": "a"}], "tag"),
        ):
            with pytest.raises(ControllerError, match=why) as caught:
                box.controller.start(backend(inbounds))
            assert caught.value.status == "INVALID_ARGUMENT"
    assert box.controller.info().running


def test_what_shows_only_at_the_start(box: Box) -> None:
    """A fault of the configuration is distinguished from one of network or machine, which may pass."""
    rule_set = {"type": "remote", "tag": "r", "format": "binary", "url": f"http://127.0.0.1:{free_port()}/r.srs"}
    seldom = {"type": "urltest", "tag": "fast", "outbounds": ["direct"], "interval": "1h"}
    outbounds = [{"type": "direct", "tag": "direct"}, seldom]
    parts: list[tuple[Json, str, str]] = [
        ({"route": {"final": "nowhere"}}, "INVALID_ARGUMENT", "default outbound not found: nowhere"),
        ({"outbounds": outbounds}, "INVALID_ARGUMENT", "interval must be less"),
        ({"route": {"rule_set": [rule_set]}}, "UNAVAILABLE", "connection refused"),
    ]
    for part, status, why in parts:
        with pytest.raises(ControllerError, match=why) as caught:
            box.controller.start(service_pb2.Backend(type=service_pb2.SING_BOX, config=merged(part)))
        assert caught.value.status == status


def merged(part: Json) -> str:
    """A configuration of one inbound, with these keys added."""
    return json.dumps({**json.loads(config(Door(VLESS).inbounds)), **part})


def test_excluded_inbounds_keep_their_users(box: Box, echo: EchoServer) -> None:
    """An excluded inbound has its own users, who are counted too."""
    door, own = Door(VLESS), TestUser.new("own")
    inbound = {**door.inbounds[0], "users": [{"name": "own", "uuid": own.uuid}]}
    box.controller.start(backend([inbound], [door.user(TestUser.new("other"))], exclude=["vless"]))
    with client((door, own)) as (port,):
        assert gets_in(port, echo)
    assert until(lambda: box.counted(Inbound, "vless")["uplink"], 3)
    assert {row.name for row in box.controller.stats(UsersStat).stats} >= {"own"}


def test_figures_of_the_core(box: Box) -> None:
    """The figures that this build provides; others are not invented."""
    box.controller.start(backend(Door(VLESS).inbounds))
    stats = box.controller.backend_stats()
    assert stats.num_goroutine > 3 and stats.sys > 5_000_000 and stats.uptime < 60
    assert bool(stats.num_gc or stats.mallocs) == (box.build == "built")


def test_naive(box: Box, certificate: certs.Certificate, echo: EchoServer) -> None:
    """A user of Naive (HTTP CONNECT with padding) connects with e-mail and password, and is counted."""
    server, _ = tls(certificate, "http/1.1")
    port, person = free_port(), TestUser.new("naive@x")
    inbound = {"type": "naive", "tag": "naive", "listen": "127.0.0.1", "listen_port": port, "network": "tcp", **server}
    user = service_pb2.User(email=person.email, inbounds=["naive"])
    user.proxies.trojan.password = person.password
    box.controller.start(backend([inbound], [user]))
    assert _naive(port, certificate, echo, person.email, person.password)
    assert not _naive(port, certificate, echo, person.email, "wrong")
    expected = {"uplink": 12, "downlink": 5}
    assert box.settles(UserStat, person.email, expected) == expected


def _naive(port: int, certificate: certs.Certificate, echo: EchoServer, name: str, password: str) -> bool:
    """Whether a CONNECT succeeds, with an echo."""
    context = ssl.create_default_context(cafile=str(certificate.certificate))
    context.set_alpn_protocols(["http/1.1"])
    login = base64.b64encode(f"{name}:{password}".encode()).decode()
    with (
        socket.create_connection(("127.0.0.1", port), 5) as plain,
        context.wrap_socket(plain, server_hostname=SERVER_NAME) as link,
    ):
        target = f"{echo.host}:{echo.port}"
        before = echo.connections
        head = (
            f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nPadding: ~~~\r\nProxy-Authorization: Basic {login}\r\n\r\n"
        )
        link.sendall(head.encode())
        stream = link.makefile("rb")
        accepted = False
        with suppress(ConnectionResetError):
            accepted = b"200" in stream.readline()
            while stream.readline().strip():
                pass
        if accepted:
            # Bytes sent before the core has taken the connection over from its HTTP server can be lost.
            until(lambda: echo.connections > before)
            link.sendall(bytes((0, 12, 3)) + b"echo 5\nhello" + bytes(3))
            received = b""
            while len(received) < 5:
                size, padding = struct.unpack("!HB", stream.read(3))
                received += stream.read(size)
                stream.read(padding)
            assert received == b"hello"
        return accepted


def test_a_flow_that_is_cut_is_counted(alone: Box, echo: EchoServer) -> None:
    """Downloads that a new core cuts in the middle: the received bytes are counted, and hardly more."""
    door = Door(VLESS)
    people = [TestUser.new(f"flow-{number}") for number in range(3)]
    alone.controller.start(backend(door.inbounds, map(door.user, people)))

    def download(port: int) -> int:
        """The bytes received until the premature end."""
        received = 0
        with transfer.connect(port, echo) as link:
            link.sendall(b"give 100000000000\n")
            with suppress(OSError):
                while data := link.recv(1 << 16):
                    received += len(data)
        return received

    def has_received(name: str) -> bool:
        return alone.counted(UserStat, name).get("downlink", 0) > 1_000_000

    with client(*[(door, person) for person in people]) as ports, ThreadPoolExecutor(3) as pool:
        flows = [pool.submit(download, port) for port in ports]
        for person in people:
            until(partial(has_received, person.email), 20)
        alone.controller.sync_user(door.user(TestUser.new("new")))
        received = [flow.result(10) for flow in flows]
    for person, bytes_ in zip(people, received, strict=True):
        counted = alone.counted(UserStat, person.email)["downlink"]
        assert bytes_ <= counted <= bytes_ + 20_000_000
