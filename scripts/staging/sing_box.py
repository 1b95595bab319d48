"""sing-box: every type of inbound that has users, a user's outbound to it, and the core as a user's client."""

from __future__ import annotations

import base64
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from drivers.install import install
from drivers.install.releases import SING_BOX_BUILT, SING_BOX_WHEEL, Core
from protos import service_pb2
from scripts.staging import cover
from scripts.staging.certs import Certificate
from scripts.staging.core import ENVIRONMENT, Json
from scripts.staging.ports import free_port
from scripts.staging.process import Child
from scripts.staging.protocols import VISION
from scripts.staging.users import TestUser, shadowsocks_2022_key
from scripts.staging.wait import accepts, bound

BUILDS: Mapping[str, Core] = {"built": SING_BOX_BUILT, "wheel": SING_BOX_WHEEL}
SERVER_NAME = "proxy.test"
_STARTED = "sing-box started"
# The server key of Shadowsocks-2022, which every client needs too.
SERVER_KEY = shadowsocks_2022_key("server", 16)


@functools.cache
def find_sing_box(build: str = "built") -> Path:
    """One of the pinned builds, or for "built" what `TXNODE_TEST_SING_BOX_NEW` names.

    Raises `InstallError` with the command that installs it.
    """
    if build == "built" and (newer := os.environ.get("TXNODE_TEST_SING_BOX_NEW")):
        return Path(newer)
    core = BUILDS[build]
    found = install.find(core, pinned=True)
    if found is None:
        command = f"python -m scripts.cores sing-box --version {core.release}"
        raise install.InstallError(f"{core.label} is not installed: run `{command}`")
    return found


class SingBoxClient(Child):
    """sing-box as a client: `routes` maps each SOCKS port (UDP too) to a chain of outbounds, the first one used."""

    def __init__(self, routes: Mapping[int, list[Json]]) -> None:
        super().__init__([str(find_sing_box()), "run", "-c", "stdin"], ENVIRONMENT, stdin=client_config(routes))
        # When a core has found its default interface, it ends its connections, which may be after it listens.
        self.ready(lambda: all(map(accepts, routes)) and _STARTED in self.output, 10, "sing-box has started")


def client_config(routes: Mapping[int, list[Json]]) -> bytes:
    """The client's configuration. Tags are prefixed with the port, as several routes may use the same ones."""
    inbounds = [{"type": "mixed", "tag": str(port), "listen": "127.0.0.1", "listen_port": port} for port in routes]
    outbounds = [
        {key: f"{port}-{value}" if key in ("tag", "detour") else value for key, value in outbound.items()}
        for port, chain in routes.items()
        for outbound in chain
    ]
    rules = [{"inbound": [str(port)], "outbound": f"{port}-{chain[0]['tag']}"} for port, chain in routes.items()]
    config = {"log": {"level": "info"}, "inbounds": inbounds, "outbounds": outbounds, "route": {"rules": rules}}
    return json.dumps(config).encode()


@dataclass(frozen=True)
class Way:
    """One type of inbound in one variant: the controller's inbound and the client's outbound.

    `server` and `client` are the options of the two sides, `credentials` those of a client, `proxy` those that a
    controller sends. `behind` is the inbound that this one detours to; users need both. `padded` is how many writes of
    a connection are padded, none of which may be over 8 kB: Vision of sing-box 1.14.1 as the server may stop reading
    after a longer one (1.14.4 does not, nor does Xray).
    """

    name: str
    type: str
    credentials: Callable[[TestUser], Json]
    proxy: Callable[[TestUser], service_pb2.Proxy]
    server: Json = field(default_factory=dict)
    client: Json = field(default_factory=dict)
    udp: bool = True
    quic: bool = False
    padded: int = 0
    behind: Way | None = None
    builds: frozenset[str] = frozenset(BUILDS)


@dataclass(frozen=True, eq=False)
class Door:
    """A `Way` on its own port."""

    way: Way
    port: int = field(default_factory=free_port)
    inner_port: int = field(default_factory=free_port)

    @property
    def tags(self) -> list[str]:
        return [self.way.name] + ([f"{self.way.name}-inner"] if self.way.behind else [])

    @property
    def counted(self) -> str:
        """The tag of the inbound that counts traffic and reports the user."""
        return self.tags[-1]

    @property
    def inbounds(self) -> list[Json]:
        """The inbounds as a controller sends them: without users."""
        front = {"type": self.way.type, "tag": self.way.name, "listen": "127.0.0.1", "listen_port": self.port}
        if not self.way.behind:
            return [{**front, **self.way.server}]
        inner = {"type": self.way.behind.type, "tag": self.counted, "listen": "127.0.0.1"}
        return [
            {**front, **self.way.server, "detour": self.counted},
            {**inner, "listen_port": self.inner_port, **self.way.behind.server},
        ]

    def outbounds(self, person: TestUser) -> list[Json]:
        """The user's outbounds; the first one carries the traffic, its detour the outer protocol."""
        front = {**_outbound(self.way, person), "server": "127.0.0.1", "server_port": self.port}
        if not self.way.behind:
            return [{**front, "tag": "out"}]
        inner = {**_outbound(self.way.behind, person), "tag": "out", "detour": "front"}
        return [{**inner, "server": "127.0.0.1", "server_port": self.port}, {**front, "tag": "front"}]

    def user(self, person: TestUser) -> service_pb2.User:
        """The user as a controller sends them, for these inbounds only."""
        message = service_pb2.User(email=person.email, inbounds=self.tags)
        for way in (self.way, self.way.behind):
            if way:
                message.proxies.MergeFrom(way.proxy(person))
        return message

    def listens(self) -> bool:
        return bound(self.port) if self.way.quic else accepts(self.port)


def _outbound(way: Way, person: TestUser) -> Json:
    return {"type": "socks" if way.type == "mixed" else way.type, **way.client, **way.credentials(person)}


def config(inbounds: Iterable[Json], **extra: object) -> str:
    """A whole configuration with a direct outbound."""
    outbounds = [{"type": "direct", "tag": "direct"}]
    return json.dumps({"log": {"level": "info"}, "inbounds": list(inbounds), "outbounds": outbounds, **extra})


def backend(
    inbounds: Iterable[Json], users: Iterable[service_pb2.User] = (), exclude: Iterable[str] = (), **extra: object
) -> service_pb2.Backend:
    """A complete Start request for sing-box; `extra` is as in `config`."""
    text = config(inbounds, **extra)
    return service_pb2.Backend(type=service_pb2.SING_BOX, config=text, users=users, exclude_inbounds=exclude)


def _uuid(user: TestUser) -> Json:
    return {"uuid": user.uuid}


def _password(user: TestUser) -> Json:
    return {"password": user.password}


def _login(user: TestUser) -> Json:
    return {"username": user.email, "password": user.password}


def _vless(user: TestUser, flow: str = "") -> service_pb2.Proxy:
    return service_pb2.Proxy(vless=service_pb2.Vless(id=user.uuid, flow=flow))


def _vmess(user: TestUser) -> service_pb2.Proxy:
    return service_pb2.Proxy(vmess=service_pb2.Vmess(id=user.uuid))


def _trojan(user: TestUser) -> service_pb2.Proxy:
    return service_pb2.Proxy(trojan=service_pb2.Trojan(password=user.password))


def _tuic(user: TestUser) -> service_pb2.Proxy:
    return service_pb2.Proxy(vless=_vless(user).vless, trojan=_trojan(user).trojan)


def _hysteria(user: TestUser) -> service_pb2.Proxy:
    return service_pb2.Proxy(hysteria=service_pb2.Hysteria(auth=user.password))


def _shadowsocks(user: TestUser) -> service_pb2.Proxy:
    return service_pb2.Proxy(shadowsocks=service_pb2.Shadowsocks(password=user.password))


# Padded writes of a Vision connection that carries no TLS.
_PADDED = 8
VLESS = Way("vless", "vless", _uuid, _vless)


def ways(certificate: Certificate, cover_port: int) -> list[Way]:
    """Every type of inbound, and the variants that differ in how the core identifies users."""
    return [*_plain(certificate), *_over_tls(certificate, cover_port), *_quic(certificate)]


def _plain(_: Certificate) -> Iterator[Way]:
    yield VLESS
    transport = {"transport": {"type": "ws", "path": "/w"}}
    yield Way("vless-ws", "vless", _uuid, _vless, transport, transport)
    yield Way("vmess", "vmess", lambda user: {**_uuid(user), "security": "auto"}, _vmess)
    yield shadowsocks()
    yield shadowsocks_2022()
    yield Way("mixed", "mixed", _login, _trojan)
    yield Way("socks", "socks", _login, _trojan)
    yield Way("http", "http", _login, _trojan, udp=False)


def shadowsocks() -> Way:
    """Classic Shadowsocks, where the server tries every user's password."""
    method = {"method": "aes-256-gcm"}
    return Way("shadowsocks", "shadowsocks", _password, _shadowsocks, method, method)


def shadowsocks_2022() -> Way:
    """Shadowsocks with a key of the server and one of the user."""
    method = {"method": "2022-blake3-aes-128-gcm"}

    def both(user: TestUser) -> Json:
        return {"password": f"{SERVER_KEY}:{shadowsocks_2022_key(user.password, 16)}"}

    return Way("shadowsocks-2022", "shadowsocks", both, _shadowsocks, {**method, "password": SERVER_KEY}, method)


def tls(certificate: Certificate, *alpn: str) -> tuple[Json, Json]:
    """TLS for the server and for a client that pins the certificate."""
    files = {"certificate_path": str(certificate.certificate), "key_path": str(certificate.key)}
    common = {"enabled": True, **({"alpn": list(alpn)} if alpn else {})}
    pinned = {"server_name": SERVER_NAME, "certificate_path": str(certificate.certificate)}
    return {"tls": {**common, **files}}, {"tls": {**common, **pinned}}


def _over_tls(certificate: Certificate, cover_port: int) -> Iterator[Way]:
    def vision(user: TestUser) -> Json:
        return {**_uuid(user), "flow": VISION}

    def with_flow(user: TestUser) -> service_pb2.Proxy:
        return _vless(user, VISION)

    yield Way("trojan", "trojan", _password, _trojan, *tls(certificate))
    yield Way("anytls", "anytls", _password, _trojan, *tls(certificate))
    yield Way("vless-vision", "vless", vision, with_flow, *tls(certificate), padded=_PADDED)
    reality = _reality(cover_port)
    yield Way("vless-reality", "vless", vision, with_flow, *reality, padded=_PADDED, builds=frozenset({"built"}))
    handshake = {"handshake": {"server": "127.0.0.1", "server_port": cover_port}, "strict_mode": True}
    hello = {"tls": {"enabled": True, "server_name": cover.NAME, "insecure": True}}
    yield Way(
        *("shadowtls", "shadowtls", _password, _trojan),
        {"version": 3, **handshake},
        {"version": 3, **hello},
        udp=False,
        behind=shadowsocks_2022(),
    )


def _reality(cover_port: int) -> tuple[Json, Json]:
    key = X25519PrivateKey.generate()
    private, public = key.private_bytes_raw(), key.public_key().public_bytes_raw()
    short = "0123abcd"
    handshake = {"server": "127.0.0.1", "server_port": cover_port}
    server = {"enabled": True, "private_key": _spell(private), "short_id": [short], "handshake": handshake}
    client = {"enabled": True, "public_key": _spell(public), "short_id": short}
    common = {"enabled": True, "server_name": cover.NAME}
    utls = {"enabled": True, "fingerprint": "chrome"}
    return {"tls": {**common, "reality": server}}, {"tls": {**common, "utls": utls, "reality": client}}


def _quic(certificate: Certificate) -> Iterator[Way]:
    server, client = tls(certificate, "h3")
    speed = {"up_mbps": 1000, "down_mbps": 1000}
    yield Way("hysteria2", "hysteria2", _password, _hysteria, server, client, quic=True)
    yield Way(
        *("hysteria", "hysteria", lambda user: {"auth_str": user.password}, _hysteria),
        {**server, **speed},
        {**client, **speed},
        quic=True,
    )
    yield Way("tuic", "tuic", lambda user: {**_uuid(user), **_password(user)}, _tuic, server, client, quic=True)


def hysteria2(port: int, person: TestUser, certificate: Certificate) -> Json:
    """The user's outbound to a Hysteria 2 inbound of any core. Unlike Xray it notices a port without a listener."""
    _, client = tls(certificate, "h3")
    common = {"type": "hysteria2", "tag": "out", "server": "127.0.0.1", "server_port": port}
    return {**common, **_password(person), **client}


def _spell(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).rstrip(b"=").decode()
