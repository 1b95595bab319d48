"""Transports of Xray under test: the `streamSettings` of both sides."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from scripts.staging import cover
from scripts.staging.certs import Certificate
from scripts.staging.core import Json

_SHORT_ID = "0123abcd"


@dataclass(frozen=True)
class Transport:
    """`streamSettings` of the inbound and of a client's outbound."""

    name: str
    server: Json
    client: Json


def raw() -> Transport:
    """Plain TCP."""
    return Transport("raw", {"network": "raw"}, {"network": "raw"})


def tls(certificate: Certificate, network: str = "raw", alpn: list[str] | None = None, **settings: Json) -> Transport:
    """A network over TLS, whose certificate the client pins; `settings` are added on both sides."""
    common = {"network": network, "security": "tls", **settings}
    own = {"certificateFile": str(certificate.certificate), "keyFile": str(certificate.key)}
    pinned = {"usage": "verify", "certificateFile": str(certificate.certificate)}
    protocols = {"alpn": alpn} if alpn else {}
    return Transport(
        network,
        {**common, "tlsSettings": {"certificates": [own], **protocols}},
        {
            **common,
            "tlsSettings": {
                "serverName": certificate.names[0],
                "disableSystemRoot": True,
                "certificates": [pinned],
                **protocols,
            },
        },
    )


@dataclass(frozen=True)
class RealityKeys:
    """An x25519 key pair as `xray x25519` prints it: URL-safe Base64 without padding."""

    private: str
    public: str

    @classmethod
    def new(cls) -> RealityKeys:
        key = X25519PrivateKey.generate()
        return cls(_spell(key.private_bytes_raw()), _spell(key.public_key().public_bytes_raw()))


def reality(cover_port: int, keys: RealityKeys | None = None) -> Transport:
    """REALITY over TCP, with the cover server on this port of 127.0.0.1."""
    keys = keys or RealityKeys.new()
    common = {"network": "raw", "security": "reality"}
    server = {
        "target": f"127.0.0.1:{cover_port}",
        "serverNames": [cover.NAME],
        "privateKey": keys.private,
        "shortIds": [_SHORT_ID],
    }
    client = {
        "serverName": cover.NAME,
        "fingerprint": "chrome",
        "publicKey": keys.public,
        "shortId": _SHORT_ID,
    }
    return Transport("reality", {**common, "realitySettings": server}, {**common, "realitySettings": client})


def _spell(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).rstrip(b"=").decode()
