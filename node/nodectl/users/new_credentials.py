"""Generate credentials for new users."""

from __future__ import annotations

import base64
import secrets
import uuid
from collections.abc import Callable, Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from protos import service_pb2 as pb

# Shadowsocks methods whose passwords are keys, and the keys' bytes. Other methods get 32 bytes as a password.
KEY_BYTES = {"2022-blake3-aes-128-gcm": 16, "2022-blake3-aes-256-gcm": 32}
_KEY = 32
_PASSWORD = 24


def new_proxies(flow: str = "", method: str = "", random: Callable[[int], bytes] = secrets.token_bytes) -> pb.Proxy:
    """One id for VLESS and VMess, one password for Trojan and Hysteria, one key for Shadowsocks (2022: no method)."""
    identity = str(uuid.UUID(bytes=random(16), version=4))
    password = base64.urlsafe_b64encode(random(_PASSWORD)).decode()
    key = base64.b64encode(random(KEY_BYTES.get(method, _KEY))).decode()
    return pb.Proxy(
        vless=pb.Vless(id=identity, flow=flow),
        vmess=pb.Vmess(id=identity),
        trojan=pb.Trojan(password=password),
        shadowsocks=pb.Shadowsocks(password=key, method="" if method in KEY_BYTES else method),
        hysteria=pb.Hysteria(auth=password),
    )


def new_tunnel(addresses: Sequence[str]) -> tuple[pb.Wireguard, str]:
    """A new WireGuard public key with these addresses, and its private key, which only the user gets."""
    private = X25519PrivateKey.generate()
    public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    mine = private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    peer = pb.Wireguard(public_key=base64.b64encode(public).decode(), peer_ips=addresses)
    return peer, base64.b64encode(mine).decode()
