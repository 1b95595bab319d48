"""The live connections of removed and changed users are cut, and only those."""

from __future__ import annotations

import select
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from drivers.sockets import sock_diag as diag
from drivers.xray.compat import FORWARDED as FORWARDED_VERSION
from drivers.xray.compat import UNTRUSTED, UNTRUSTED_SEEN
from protos.service_pb2 import User
from scripts.staging import socks, transfer
from scripts.staging.backend import backend
from scripts.staging.controller import Controller, ControllerError
from scripts.staging.core import Json, XrayClient, xray_number
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.ports import free_port
from scripts.staging.transports import Transport
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import SOURCE, Place, daily, gets_in, live, member, on, over, run, settled, stays_out, way
from tests.harness.grounds import Ground

ANNA, BERT = TestUser.new("anna@test"), TestUser.new("bert@test")
MANY, SOME = 100, 20
# Xray drops access lines while 16 wait to be written.
AT_A_TIME = 12
# Seconds until connections are cut, on a busy machine too; otherwise they would last for minutes.
AT_ONCE = 3.0
FORWARDED = "203.0.113.9"
# Every TCP transport, with one connection for a user and with many requests on one connection.
KINDS = (
    "vless-raw",
    "vless-reality-vision",
    "vless-ws-tls",
    "vless-grpc-tls",
    "vmess-raw",
    "trojan-tls",
    "shadowsocks-aes-256-gcm",
    "shadowsocks-2022-aes-128",
)
SIZES = [(name, SOME if number else MANY) for number, name in enumerate(KINDS)]

# For cores whose access lines show which user connects from where.
cuts = on(lambda ground: ground.cuts)

Sync = Callable[[Controller, list[User]], None]


def one_by_one(controller: Controller, users: list[User]) -> None:
    controller.sync_user(*users)


def the_set(controller: Controller, users: list[User]) -> None:
    """The complete list; users without inbounds are left out."""
    controller.sync_users([user for user in users if user.inbounds])


@dataclass
class Crowd:
    """Open connections of one user through one inbound."""

    links: list[socket.socket]
    late: float

    def all_live(self) -> bool:
        """Check that each echoes."""
        for link in self.links:
            transfer.echo(link, b"still here")
        return True

    def end(self, what: str, nudging: bool = False) -> None:
        """Wait until all have been cut: at once."""
        until(self._end_when_nudged if nudging else self._have_ended, AT_ONCE + self.late, what)

    def _have_ended(self) -> bool:
        return all(map(ended, self.links))

    def _end_when_nudged(self) -> bool:
        """Send something without a reply: with Shadowsocks-2022 Xray's client notices a cut only when it sends."""
        for link in self.links:
            with suppress(OSError):
                link.sendall(b"echo 0\n")
        return self._have_ended()


def ended(link: socket.socket) -> bool:
    """Whether the connection is over, without waiting; discards pending bytes."""
    while readable(link):
        try:
            if not link.recv(100):
                return True
        except ConnectionError:
            return True
    return False


def readable(link: socket.socket) -> bool:
    """Whether there is something to read, or an end. Not `select`, which takes no descriptor beyond 1,023."""
    poller = select.poll()
    poller.register(link, select.POLLIN)
    return bool(poller.poll(0))


def connect(stack: ExitStack, place: Place, socks_port: int, echo: EchoServer, size: int) -> Crowd:
    links = [stack.enter_context(closing(transfer.connect(socks_port, echo))) for _ in range(size)]
    return Crowd(links, place.ground.late)


@contextmanager
def crowd(place: Place, person: TestUser, echo: EchoServer, size: int) -> Iterator[Crowd]:
    """Connections of a separate client core; all users have the same address."""
    with ExitStack() as stack, way(place, person) as port:
        yield connect(stack, place, port, echo, size)


def changed(person: TestUser) -> TestUser:
    return TestUser.new(person.email)


# Each of the two tests takes every second kind in the default run.
@pytest.mark.parametrize(("name", "size"), daily(SIZES[::2], SIZES))
@over("grpc")
def test_removed_user_is_out(
    name: str,
    size: int,
    all_kinds: Mapping[str, Kind],
    ground: Ground,
    cover: CoverServer,
    echo: EchoServer,
    controller: Controller,
) -> None:
    """On every kind of inbound a removed user's connections are cut at once; another's from the same address live."""
    place = Place(all_kinds[name], name, ground=ground)
    with settled([place], cover):
        run(controller, [place], [member(ANNA, place), member(BERT, place)])
    with crowd(place, ANNA, echo, size) as anna, crowd(place, BERT, echo, size) as bert:
        controller.sync_user(member(ANNA))
        anna.end("all of Anna's connections end", nudging=True)
        assert bert.all_live()
        assert stays_out(place, ANNA, echo)
        assert gets_in(place, BERT, echo)


@pytest.mark.parametrize("name", daily(KINDS[1::2], KINDS))
@over("rest")
@live
def test_changed_credential_is_out(
    name: str,
    all_kinds: Mapping[str, Kind],
    ground: Ground,
    cover: CoverServer,
    echo: EchoServer,
    controller: Controller,
) -> None:
    """On every kind of inbound connections by an old credential are cut; those by the new one and others' live."""
    place, anna_now = Place(all_kinds[name], name, ground=ground), changed(ANNA)
    with settled([place], cover):
        run(controller, [place], [member(ANNA, place), member(BERT, place)])
    with crowd(place, ANNA, echo, SOME) as anna, crowd(place, BERT, echo, 10) as bert:
        controller.sync_user(member(anna_now, place))
        with crowd(place, anna_now, echo, 10) as new:
            anna.end("all of Anna's old connections end", nudging=True)
            assert new.all_live()
            assert bert.all_live()


@pytest.mark.parametrize("sync", [one_by_one, the_set])
@pytest.mark.each_once("sync", "controller", "ground")
def test_every_sync_ends_connections(sync: Sync, controller: Controller, home: Place, echo: EchoServer) -> None:
    """Over both transports, users removed by a change or missing in a list are cut, and the other stays."""
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    with crowd(home, ANNA, echo, 10) as anna, crowd(home, BERT, echo, 10) as bert:
        sync(controller, [member(ANNA), member(BERT, home)])
        anna.end("all of Anna's connections end")
        assert bert.all_live()


@pytest.mark.parametrize("name", ["vless-raw", "shadowsocks-2022-aes-256"])
@over("rest")
def test_connections_that_begin_just_then(
    name: str, all_kinds: Mapping[str, Kind], ground: Ground, echo: EchoServer, controller: Controller
) -> None:
    """No connection of a user who reconnects during the removal survives: in the end none replies."""
    place = Place(all_kinds[name], name, ground=ground)
    inbounds = [{**place.inbound, **ground.sniffing}]
    controller.start(ground.backend(inbounds, [member(ANNA, place), member(BERT, place)]))
    with way(place, ANNA) as port, ExitStack() as stack, crowd(place, BERT, echo, 10) as bert:
        links = []
        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(controller.sync_user, member(ANNA))
            while not going.done():
                links.append(stack.enter_context(closing(socks.connect(port, echo.host, echo.port))))
                links[-1].sendall(b"echo 5\nhello")
        assert links
        until(lambda: bert.all_live() and silent(links, bert), 15, "none of Anna's connections answers")


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("times", daily([10], [10, 100]))
@over("rest")
@live
def test_old_connections_that_begin_just_then(
    times: int, others: bool, home: Place, ground: Ground, echo: EchoServer, controller: Controller
) -> None:
    """No connection by an old credential survives, however often it changes under a user who connects all the time.

    Also while other clients connect all the time.
    """
    people = [changed(ANNA) for _ in range(times + 1)]
    ports = [free_port() for _ in range(times)]
    controller.start(
        ground.backend([{**home.inbound, **ground.sniffing}], [member(people[0], home), member(BERT, home)])
    )
    routes = {port: home.outbound(person) for port, person in zip(ports, people, strict=False)}

    def change(port: int, following: TestUser) -> None:
        with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
            links = [stack.enter_context(closing(transfer.connect(port, echo)))]
            going = pool.submit(controller.sync_user, member(following, home))
            while not going.done() and len(links) < AT_A_TIME:
                links.append(stack.enter_context(closing(socks.connect(port, echo.host, echo.port))))
                links[-1].sendall(b"echo 5\nhello")
            going.result()
            Crowd(links, ground.late).end("all old connections end", nudging=True)
            assert bert.all_live()

    with XrayClient(routes), crowd(home, BERT, echo, 10) as bert, arriving(home.port if others else None):
        for port, following in zip(ports, people[1:], strict=True):
            change(port, following)


@contextmanager
def arriving(port: int | None) -> Iterator[None]:
    """Other clients connect to this port all the time."""
    over = threading.Event()

    def work(port: int) -> None:
        while not over.wait(0.002):
            socket.create_connection(("127.0.0.1", port)).close()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work, port) if port else None
        try:
            yield
        finally:
            over.set()
    if done:
        done.result()


def silent(links: list[socket.socket], witness: Crowd) -> bool:
    """Whether none of them replies in the time that the witness needs for ten replies.

    They may still be open: the core may leave strangers waiting.
    """
    drained = [ended(link) for link in links]
    for link in links:
        with suppress(OSError):
            link.sendall(b"echo 3\nyes")
    assert witness.all_live()
    return all(over or not answered(link) for over, link in zip(drained, links, strict=True))


def answered(link: socket.socket) -> bool:
    try:
        return readable(link) and bool(link.recv(3))
    except ConnectionError:
        return False


def test_the_other_inbound_is_left(
    controller: Controller, all_kinds: Mapping[str, Kind], home: Place, echo: EchoServer
) -> None:
    """A user removed from one inbound keeps their connections to another."""
    work = Place(all_kinds["trojan-tls"], "at -> work [TLS]", ground=home.ground)
    run(controller, [home, work], [member(ANNA, home, work)])
    with crowd(home, ANNA, echo, 10) as at_home, crowd(work, ANNA, echo, 10) as at_work:
        controller.sync_user(member(ANNA, home))
        at_work.end("all connections at work end")
        assert at_home.all_live()
    with crowd(home, ANNA, echo, 10) as at_home:
        controller.sync_user(member(ANNA, home, work))
        assert at_home.all_live()


@over("grpc")
def test_who_comes_back_stays(controller: Controller, home: Place, echo: EchoServer) -> None:
    """A user who is removed and added again keeps their new connections through later changes of others."""
    run(controller, [home], [member(ANNA, home), member(BERT, home)])
    with crowd(home, ANNA, echo, 10) as before:
        controller.sync_user(member(ANNA), member(ANNA, home))
        before.end("all connections from before end")
    with crowd(home, ANNA, echo, 10) as after:
        controller.sync_user(member(BERT), member(BERT, home))
        if home.ground.live:
            controller.sync_user(member(changed(BERT), home))
        assert after.all_live()


@over("grpc")
def test_outbound_without_a_tag(controller: Controller, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """Xray does not log the inbound for an outbound without a name; removed users are cut all the same."""
    home, work = Place(all_kinds["vless-raw"], "home"), Place(all_kinds["trojan-tls"], "work")
    outbound = {"protocol": "freedom", "settings": {"finalRules": [{"action": "allow"}]}}
    run(controller, [home, work], [member(ANNA, home, work), member(BERT, home)], outbounds=[outbound])
    with (
        crowd(home, ANNA, echo, 5) as at_home,
        crowd(work, ANNA, echo, 5) as at_work,
        crowd(home, BERT, echo, 5) as bert,
    ):
        controller.sync_user(member(ANNA, work))
        at_home.end("all connections at home end")
        assert at_work.all_live()
        controller.sync_user(member(ANNA))
        at_work.end("all connections at work end")
        assert bert.all_live()


def by_socks_5(name: bytes) -> list[bytes]:
    """The core rejects such a name, and logs it."""
    return [b"\5\1\0", b"\5\1\0\3" + bytes([len(name)]) + name + b"\0P"]


def by_socks_4a(name: bytes) -> list[bytes]:
    """The core accepts any name, and logs it."""
    return [b"\4\1\0P\0\0\0\1\0" + name + b"\0"]


@pytest.mark.parametrize("attack", [by_socks_5, by_socks_4a])
@over("rest")
@cuts
def test_lines_that_users_write(
    attack: Callable[[bytes], list[bytes]], controller: Controller, home: Place, echo: EchoServer
) -> None:
    """A user who forges access lines with names neither survives a removal nor has others cut."""
    port = free_port()
    door = {"tag": "open", "listen": "127.0.0.1", "port": port, "protocol": "socks", "settings": {}}
    log = {"loglevel": "warning", "access": ""}
    users = [member(ANNA, home), member(BERT, home)]
    controller.start(backend([home.inbound, door], users, log=log))
    with crowd(home, ANNA, echo, 5) as anna, controller.logs() as logs:
        hers = diag.connected([range(home.port, home.port + 1)])
        with crowd(home, BERT, echo, 5) as bert:
            for where in diag.connected([range(home.port, home.port + 1)]):
                other = BERT if where in hers else ANNA
                source = f"{socket.inet_ntoa(where[:4])}:{int.from_bytes(where[4:])}"
                line = f"2026/11/21 02:17:57 from {source} accepted tcp:a:1 [home >> direct] email: {other.email}"
                with socket.create_connection(("127.0.0.1", port)) as link:
                    for part in attack(f"x\n{line}\nwritten for {source} x".encode()):
                        link.sendall(part)
                        link.recv(10)
                logs.find(f"written for {source}")
            controller.sync_user(member(ANNA))
            anna.end("all of Anna's connections end")
            assert bert.all_live()


def with_headers(place: Place, person: TestUser, address: str) -> Json:
    """The outbound of a user whose requests look as if a reverse proxy had forwarded them for this address."""
    outbound = place.outbound(person)
    stream = outbound["streamSettings"]
    settings = {**stream["wsSettings"], "headers": {"X-Forwarded-For": address}}
    return {**outbound, "streamSettings": {**stream, "wsSettings": settings}}


@over("grpc")
def test_behind_a_reverse_proxy(controller: Controller, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """If a reverse proxy hides users' addresses, no connection is cut, and a removed user gets no new one."""
    place = Place(all_kinds["vless-ws-tls"], "websocket")
    stream = {**place.inbound["streamSettings"], "sockopt": {"trustedXForwardedFor": ["X-Forwarded-For"]}}
    inbound = {**place.inbound, "streamSettings": stream}
    controller.start(backend([inbound], [member(ANNA, place), member(BERT, place)]))
    ports = free_port(), free_port()
    routes = {port: with_headers(place, person, FORWARDED) for port, person in zip(ports, (ANNA, BERT), strict=True)}
    with ExitStack() as stack, XrayClient(routes):
        anna, bert = (connect(stack, place, port, echo, 10) for port in ports)
        controller.sync_user(member(ANNA))
        assert stays_out(place, ANNA, echo)
        assert bert.all_live()
        assert anna.all_live()


@over("grpc")
def test_a_reverse_proxy_that_is_not_believed(
    controller: Controller, all_kinds: Mapping[str, Kind], echo: EchoServer
) -> None:
    """By default users are at the address of their connections. Newer cores log that for each, the node once."""
    place, port = Place(all_kinds["vless-ws-tls"], "websocket"), free_port()
    run(controller, [place], [member(ANNA, place)])
    newer = xray_number() >= FORWARDED_VERSION
    with ExitStack() as stack, XrayClient({port: with_headers(place, ANNA, FORWARDED)}):
        # From the beginning: a late reader gets only the last lines.
        logs = stack.enter_context(controller.logs())
        connect(stack, place, port, echo, 3)
        assert set(controller.online_ips(ANNA.email).ips) == {SOURCE}
        until(lambda: (UNTRUSTED_SEEN in controller.info().warnings) is newer, what="it is told")
        until(lambda: sum(ANNA.email in line for line in logs.lines) >= 3, what="each connection is in the log")
        # A core writes access lines and others concurrently.
        until(lambda: any(UNTRUSTED in line for line in logs.lines) is newer, what="the core's own words")
        assert sum(UNTRUSTED in line for line in logs.lines) == newer
        anna = connect(stack, place, port, echo, 1)
        controller.sync_user(member(ANNA))
        anna.end("a connection with a forged header is cut")


@over("grpc")
def test_users_on_one_connection(controller: Controller, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """A connection that carries several users, as from a reverse proxy, is kept for the remaining ones."""
    place = Place(all_kinds["vless-grpc-tls"], "shared")
    run(controller, [place], [member(ANNA, place), member(BERT, place)])
    ports = free_port(), free_port()
    # A client core has one gRPC connection to a place for all its users.
    routes = {port: place.outbound(person) for port, person in zip(ports, (ANNA, BERT), strict=True)}
    with ExitStack() as stack, XrayClient(routes):
        _, bert = (connect(stack, place, port, echo, 5) for port in ports)
        controller.sync_user(member(ANNA))
        assert stays_out(place, ANNA, echo)
        assert bert.all_live()


@over("rest")
def test_fallback(controller: Controller, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """A user who arrives by another inbound's fallback, which forwards their address, is identified and cut as well."""
    front, inner = Place(all_kinds["trojan-tls"], "front"), Place(all_kinds["vless-raw"], "inner")
    websocket = all_kinds["vless-ws-tls"].transport
    ws = {"network": "ws", "wsSettings": {"path": "/ws"}}
    inbounds = [front.inbound, {**inner.inbound, "streamSettings": {**ws, "sockopt": {"acceptProxyProtocol": True}}}]
    inbounds[0]["settings"] = {**inbounds[0]["settings"], "fallbacks": [{"path": "/ws", "dest": inner.port, "xver": 1}]}
    outside = Place(replace(inner.kind, transport=Transport("ws", ws, websocket.client)), "outside", front.port)
    controller.start(backend(inbounds, [member(ANNA, inner), member(BERT, inner, front)]))
    with (
        crowd(outside, ANNA, echo, 5) as anna,
        crowd(outside, BERT, echo, 5) as inside,
        crowd(front, BERT, echo, 5) as in_front,
    ):
        controller.sync_user(member(ANNA))
        anna.end("all of Anna's connections end")
        controller.sync_user(member(BERT, front))
        inside.end("all of Bert's connections behind the fallback end")
        assert in_front.all_live()


@pytest.mark.parametrize(
    "log", [{"loglevel": "none"}, {"access": "none"}, {"access": "none", "dnsLog": True}, {}, None]
)
@over("grpc")
@cuts
def test_log_settings_do_not_matter(
    log: dict[str, Any] | None, controller: Controller, home: Place, echo: EchoServer
) -> None:
    """With any log settings, removed users are cut; access lines are shown only if configured."""
    asked, cora = log == {}, TestUser.new(f"{uuid.uuid4()}@test")
    run(controller, [home], [member(cora, home)], log=log)
    with controller.logs() as logs, crowd(home, cora, echo, 5) as links:
        if asked:
            logs.find(f"email: {cora.email}")
        controller.sync_user(member(cora))
        links.end("all of her connections end")
        before = len(logs.lines)
        controller.stop()
        until(lambda: any("backend stopped" in line for line in logs.lines[before:]), what="the log of the stop")
        assert any(cora.email in line for line in logs.lines) == asked


@over("rest")
@cuts
def test_addresses_are_masked(controller: Controller, home: Place, echo: EchoServer) -> None:
    """Addresses in the log are masked as configured, and removed users are cut all the same."""
    cora = TestUser.new(f"{uuid.uuid4()}@test")
    run(controller, [home], [member(cora, home)], log={"loglevel": "debug", "maskAddress": "half"})
    with controller.logs() as logs, crowd(home, cora, echo, 5) as links:
        line = logs.find(f"email: {cora.email}")
        assert "from 127.0.*.*:" in line
        assert "accepted tcp:127.0.*.*:" in line
        controller.sync_user(member(cora))
        links.end("all of her connections end")
        first = next(number for number, line in enumerate(logs.lines) if cora.email in line)
        assert not [line for line in logs.lines[first:] if SOURCE in line]


@over("rest")
@cuts
def test_bad_mask(controller: Controller, home: Place) -> None:
    """A mask that the core would refuse is refused."""
    with pytest.raises(ControllerError, match="maskAddress"):
        run(controller, [home], log={"maskAddress": "/12"})
