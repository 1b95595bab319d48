"""WireGuard inbounds: users are added, changed and removed while the tunnel is up, with real traffic through it.

Only on a core with WireGuard users, which `TXNODE_TEST_XRAY_NEW` names. The tunnel carries nothing to 127.0.0.0/8, so
all its traffic is redirected to the echo server.
"""

from __future__ import annotations

import base64
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from protos.service_pb2 import Proxy, User, UserStat, Wireguard
from scripts.staging import socks, transfer
from scripts.staging.backend import backend, chunks
from scripts.staging.controller import Controller, ControllerError
from scripts.staging.core import Json, XrayClient
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import NEWER_XRAY, Place, connection, control, member, talking

TAG, ANYWHERE = "tunnel", "192.0.2.1"
# Seconds: timeout of a reply through an open tunnel; until a tunnel is open; without a reply until it counts as closed;
# and until clients notice that their session is over.
SOON, UP, OUT, PATIENT = 3.0, 15.0, 1.0, 60.0


def key() -> X25519PrivateKey:
    return X25519PrivateKey.generate()


def text_of(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


@dataclass(frozen=True)
class Peer:
    """A user of the tunnel."""

    email: str
    ips: tuple[str, ...]
    secret: X25519PrivateKey = field(default_factory=key)

    @property
    def user(self) -> User:
        public = text_of(self.secret.public_key().public_bytes_raw())
        proxies = Proxy(wireguard=Wireguard(public_key=public, peer_ips=self.ips))
        return User(email=self.email, inbounds=[TAG], proxies=proxies)

    @property
    def gone(self) -> User:
        return User(email=self.email)

    def at(self, *ips: str) -> Self:
        return replace(self, ips=ips)


class Tunnel:
    """A WireGuard inbound, and the redirection of its traffic to the echo server."""

    def __init__(self, echo: EchoServer) -> None:
        self.echo, self.port, self.secret = echo, free_port(), key()

    @property
    def inbound(self) -> Json:
        settings = {"secretKey": text_of(self.secret.private_bytes_raw()), "address": ["10.7.0.1"], "peers": []}
        return {"tag": TAG, "listen": "127.0.0.1", "port": self.port, "protocol": "wireguard", "settings": settings}

    def start(self, controller: Controller, *peers: Peer, also: Place | None = None, level: str = "warning") -> None:
        target = f"{self.echo.host}:{self.echo.port}"
        settings = {"redirect": target, "finalRules": [{"action": "allow"}]}
        outbounds = [{"tag": "direct", "protocol": "freedom", "settings": settings}]
        inbounds = [self.inbound, *([also.inbound] if also else [])]
        users = [peer.user for peer in peers] + ([member(CARL, also)] if also else [])
        controller.start(backend(inbounds, users, outbounds=outbounds, log={"loglevel": level}))

    def outbound(self, peer: Peer) -> Json:
        public = text_of(self.secret.public_key().public_bytes_raw())
        settings = {
            "secretKey": text_of(peer.secret.private_bytes_raw()),
            "address": list(peer.ips),
            "peers": [{"publicKey": public, "endpoint": f"127.0.0.1:{self.port}"}],
            "noKernelTun": True,
        }
        return {"protocol": "wireguard", "settings": settings}

    @contextmanager
    def way(self, peer: Peer) -> Iterator[int]:
        """The SOCKS port of a client that is in the tunnel as this user."""
        port = free_port()
        with XrayClient({port: self.outbound(peer)}):
            yield port

    def connect(self, way: int, timeout: float = UP) -> socket.socket:
        """A connection to the echo server after a first echo. Raises `OSError`."""
        link = socks.connect(way, ANYWHERE, self.echo.port, timeout)
        try:
            transfer.echo(link, b"hello")
        except BaseException:
            link.close()
            raise
        return link

    def gets_in(self, peer: Peer, timeout: float = UP) -> bool:
        """Whether a new client gets an echo as this user."""
        before = self.echo.connections
        with self.way(peer) as port:
            try:
                self.connect(port, timeout).close()
            except OSError:
                assert self.echo.connections == before
                return False
            return True


ANNA, BERT = Peer("anna@test", ("10.7.0.2/32", "fd59::2/128")), Peer("bert@test", ("10.7.0.3/32",))
CARL = TestUser.new("carl@test")


@contextmanager
def running(directory: Path) -> Iterator[NodeProcess]:
    """A node that runs the newer core."""
    with NodeProcess(directory, XRAY_EXECUTABLE_PATH=os.environ[NEWER_XRAY]) as node:
        node.core = Path(os.environ[NEWER_XRAY]).resolve()
        yield node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with running(tmp_path_factory.mktemp("node")) as found:
        yield found


@pytest.fixture(params=["rest", "grpc"])
def controller(node: NodeProcess, request: pytest.FixtureRequest) -> Iterator[Controller]:
    with control(node, request.param) as over_transport:
        yield over_transport


@pytest.fixture
def tunnel(echo: EchoServer) -> Tunnel:
    return Tunnel(echo)


@pytest.fixture
def home(all_kinds: Mapping[str, Kind]) -> Place:
    return Place(all_kinds["vless-raw"], "home")


grpc = pytest.mark.parametrize("controller", ["grpc"], indirect=True)


def sync(controller: Controller, *users: User) -> None:
    controller.sync_chunked(chunks(users))


def traffic(controller: Controller, peer: Peer) -> dict[str, int]:
    return {stat.type: stat.value for stat in controller.stats(UserStat, peer.email).stats}


def refused(controller: Controller, *users: User) -> str:
    with pytest.raises(ControllerError) as error:
        sync(controller, *users)
    return error.value.text


def test_life_of_a_user(controller: Controller, tunnel: Tunnel) -> None:
    """Users of the start and added ones are admitted; changed, only with the new key; removed, no more."""
    tunnel.start(controller, ANNA)
    assert not any("left as configured" in warning for warning in controller.info().warnings)
    assert not tunnel.gets_in(BERT, OUT)
    sync(controller, BERT.user)
    assert tunnel.gets_in(BERT)
    changed = replace(BERT, secret=key())
    sync(controller, changed.user)
    assert tunnel.gets_in(changed)
    assert not tunnel.gets_in(BERT, OUT)
    controller.sync_users([ANNA.user])
    assert not tunnel.gets_in(changed, OUT)
    assert tunnel.gets_in(ANNA)


@grpc
def test_every_byte(controller: Controller, tunnel: Tunnel) -> None:
    """TCP and UDP bytes of the user are counted exactly, up and down; they are online with their tunnel address."""
    anna, bert = replace(ANNA, email="counted@test"), replace(BERT, email="idle@test")
    tunnel.start(controller, anna, bert)
    echo = tunnel.echo
    received, sent = echo.received, echo.sent
    with tunnel.way(anna) as way:
        with tunnel.connect(way) as link:
            transfer.download(link, 3_000_011)
            transfer.upload(link, 500_037)
            assert dict(controller.online_ips(anna.email).ips).keys() == {"10.7.0.2"}
            assert controller.online(anna.email).value == 1
        with socks.UdpAssociation(way) as association:
            association.send(b"datagram", ANYWHERE, echo.port)
            assert association.receive() == b"datagram"
    whole = {"uplink": echo.received - received + 8, "downlink": echo.sent - sent + 8}
    until(lambda: traffic(controller, anna) == whole, what="every byte is counted")
    assert not any(traffic(controller, bert).values())


@grpc
def test_removed(controller: Controller, tunnel: Tunnel) -> None:
    """Nothing passes for a removed user, in either direction, and others are not affected."""
    tunnel.start(controller, ANNA, BERT)
    with tunnel.way(ANNA) as hers, tunnel.way(BERT) as his, tunnel.connect(hers) as link, tunnel.connect(his) as other:
        with talking(other):
            sync(controller, ANNA.gone)
            link.settimeout(OUT)
            with pytest.raises(TimeoutError):
                transfer.small_echo(link, b"still there?")
        with pytest.raises(OSError, match=r"."):
            tunnel.connect(hers, OUT)


@grpc
def test_other_addresses_without_a_break(controller: Controller, tunnel: Tunnel) -> None:
    """A user who gains or loses an address keeps using the others, and may use a new one at once."""
    tunnel.start(controller, ANNA.at("10.7.0.2/32"))
    with tunnel.way(ANNA.at("10.7.0.2/32")) as way, tunnel.connect(way) as link, talking(link):
        sync(controller, ANNA.at("10.7.0.2/32", "10.7.0.9/32").user)
        sync(controller, ANNA.at("10.7.0.2/32", "fd59::9/128").user)
    moved = ANNA.at("10.7.0.5/32")
    with tunnel.way(moved) as way:
        with pytest.raises(OSError, match=r"."):
            tunnel.connect(way, OUT)
        sync(controller, moved.user)
        before = time.monotonic()
        tunnel.connect(way).close()
        assert time.monotonic() - before < SOON, "the tunnel was dark"


@grpc
def test_one_owner(controller: Controller, tunnel: Tunnel) -> None:
    """An address or key in use is not given to another user, who is refused, and admitted once it is free."""
    tunnel.start(controller, ANNA)
    thief = Peer("thief@test", ("10.7.0.2/32",))
    assert "'anna@test' has the same address 10.7.0.2" in refused(controller, thief.user)
    twin = replace(BERT, secret=ANNA.secret)
    assert "'anna@test' has the same credential" in refused(controller, twin.user)
    with tunnel.way(ANNA) as way, tunnel.connect(way) as link:
        transfer.echo(link, b"mine")
    for wide in ("0.0.0.0/0", "::/0"):
        assert "more than 256" in refused(controller, Peer("wide@test", (wide,)).user)
    sync(controller, ANNA.gone)
    assert tunnel.gets_in(thief)


@grpc
def test_addresses_change_hands(controller: Controller, tunnel: Tunnel) -> None:
    """Two users who swap their addresses in one sync are both admitted with the other's, and counted as themselves."""
    anna, bert = replace(ANNA, email="first@test"), replace(BERT, email="second@test")
    tunnel.start(controller, anna.at(*bert.ips), bert.at(*anna.ips))
    sync(controller, anna.user, bert.user)
    received = tunnel.echo.received
    with tunnel.way(anna) as way, tunnel.connect(way) as link:
        transfer.upload(link, 100_000)
    counted = tunnel.echo.received - received
    until(lambda: traffic(controller, anna)["uplink"] == counted, what="hers is hers")
    assert not any(traffic(controller, bert).values())
    assert tunnel.gets_in(bert)


@pytest.mark.slow
@grpc
def test_another_configuration(controller: Controller, tunnel: Tunnel, home: Place) -> None:
    """It takes over while TCP connections stay; a client of the tunnel is back with its next session."""
    tunnel.start(controller, ANNA, BERT, also=home)
    with tunnel.way(ANNA) as way, connection(home, CARL, tunnel.echo) as link:
        tunnel.connect(way).close()
        with talking(link):
            tunnel.start(controller, ANNA, BERT, also=home, level="error")
            assert not any("ended all connections" in warning for warning in controller.info().warnings)
            assert tunnel.gets_in(BERT, SOON)
            until(lambda: tunnel.connect(way, SOON), PATIENT, "the tunnel is back").close()


def test_it_comes_back(tmp_path: Path, tunnel: Tunnel) -> None:
    """After a crash of the core, and after the node's restart, with the last users; an equal Start keeps the core."""
    with running(tmp_path) as node:
        with control(node, "grpc") as controller:
            tunnel.start(controller, ANNA)
            sync(controller, BERT.user, ANNA.gone)
            first = node.newest_core()
            os.kill(first, signal.SIGKILL)
            until(lambda: controller.info().running and node.newest_core() != first, what="another core runs")
            assert tunnel.gets_in(BERT)
            assert not tunnel.gets_in(ANNA, OUT)
        node.kill()
        node.start()
        with control(node, "rest") as controller:
            until(lambda: controller.info().running, what="it runs again")
            pid = node.newest_core()
            tunnel.start(controller, BERT, ANNA)
            assert node.newest_core() == pid
            assert tunnel.gets_in(BERT)
            assert tunnel.gets_in(ANNA)
