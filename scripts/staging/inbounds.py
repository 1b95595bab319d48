"""Every Xray protocol and transport under test: an inbound for the node, and a user's outbound to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protos import service_pb2
from scripts.staging import protocols
from scripts.staging.certs import Certificate
from scripts.staging.core import Json
from scripts.staging.protocols import VISION, Protocol
from scripts.staging.transports import Transport, raw, reality, tls
from scripts.staging.users import TestUser

SERVER_NAME = "proxy.test"


@dataclass(frozen=True)
class Kind:
    """A protocol over a transport, under a name for test reports."""

    name: str
    protocol: Protocol
    transport: Transport

    @property
    def quic(self) -> bool:
        """Whether it listens on UDP instead of TCP."""
        return self.protocol.name == "hysteria"

    @property
    def reality(self) -> bool:
        """Whether its core probes the cover website when it starts: see `CoverServer.looked_at`."""
        return self.transport.name == "reality"

    def inbound(self, port: int, tag: str, listen: str = "127.0.0.1") -> Json:
        """The inbound as a controller sends it: without users, whom the node adds."""
        return {
            "tag": tag,
            "listen": listen,
            "port": port,
            "protocol": self.protocol.name,
            "settings": {**self.protocol.server, "clients": []},
            "streamSettings": self.transport.server,
        }

    def outbound(self, port: int, user: TestUser, address: str = "127.0.0.1", source: str | None = None) -> Json:
        """A user's outbound to the inbound.

        `source` is the address that the server sees; Xray never lists 127.0.0.1 and ::1 as online.
        """
        return {
            "protocol": self.protocol.name,
            "settings": self.protocol.client(address, port, user),
            "streamSettings": self._client_transport(user),
            **({"sendThrough": source} if source else {}),
        }

    def proxy(self, user: TestUser) -> service_pb2.Proxy:
        """The user's credentials, as a controller sends them."""
        return self.protocol.proxy(user)

    def account(self, user: TestUser) -> Json:
        """The user's entry in `clients`, for servers without the node."""
        return {**self.protocol.account(user), "email": user.email}

    def _client_transport(self, user: TestUser) -> Json:
        client = self.transport.client
        if not self.quic:
            return client
        return {**client, "hysteriaSettings": {**client["hysteriaSettings"], **self.protocol.account(user)}}


def with_users(inbound: Json, accounts: Iterable[Json]) -> Json:
    """The inbound with these users in its own `clients`."""
    return {**inbound, "settings": {**inbound["settings"], "clients": list(accounts)}}


NAMES = (
    "vless-raw",
    "vless-reality-vision",
    "vless-ws-tls",
    "vless-grpc-tls",
    "vmess-raw",
    "trojan-tls",
    "shadowsocks-aes-256-gcm",
    "shadowsocks-chacha20",
    "shadowsocks-2022-aes-128",
    "shadowsocks-2022-aes-256",
    "hysteria2",
)
"""The names of `kinds`, for parametrised tests."""


def kinds(certificate: Certificate, cover_port: int) -> Mapping[str, Kind]:
    """All kinds by name. TLS uses `certificate`, made for `SERVER_NAME`; REALITY the cover server on `cover_port`."""
    ws = tls(certificate, "ws", wsSettings={"path": "/ws"})
    grpc = tls(certificate, "grpc", grpcSettings={"serviceName": "proxy"})
    quic = tls(certificate, "hysteria", alpn=["h3"], hysteriaSettings={"version": 2})
    rows: tuple[tuple[Protocol, Transport], ...] = (
        (protocols.vless(), raw()),
        (protocols.vless(VISION), reality(cover_port)),
        (protocols.vless(), ws),
        (protocols.vless(), grpc),
        (protocols.vmess(), raw()),
        (protocols.trojan(), tls(certificate)),
        (protocols.shadowsocks("aes-256-gcm"), raw()),
        (protocols.shadowsocks("chacha20-ietf-poly1305"), raw()),
        (protocols.shadowsocks_2022("2022-blake3-aes-128-gcm", 16), raw()),
        (protocols.shadowsocks_2022("2022-blake3-aes-256-gcm", 32), raw()),
        (protocols.hysteria(), quic),
    )
    return {name: Kind(name, *row) for name, row in zip(NAMES, rows, strict=True)}
