"""Build the account of a user for an Xray inbound. Pure; the only place that builds accounts.

Rules and type names: Xray-core 26.3.27 (`proxy/*/account.go`, `common/uuid/uuid.go`); the effect of empty and odd
credentials was tried on the core.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from google.protobuf.message import Message

from drivers.process.credentials import KEY_BYTES, parse_uuid, shadowsocks_2022_key
from drivers.xray import wireguard as tunnel
from drivers.xray.messages import SIZE, field
from node.contract.accounts import Account, Accounts, Unusable
from protos import service_pb2, xray_pb2

VISION = "xtls-rprx-vision"
# CipherType in proxy/shadowsocks/config.proto, by the names in infra/conf/shadowsocks.go.
CIPHERS = {
    "aes-128-gcm": 5,
    "aead_aes_128_gcm": 5,
    "aes-256-gcm": 6,
    "aead_aes_256_gcm": 6,
    "chacha20-poly1305": 7,
    "aead_chacha20_poly1305": 7,
    "chacha20-ietf-poly1305": 7,
    "xchacha20-poly1305": 8,
    "aead_xchacha20_poly1305": 8,
    "xchacha20-ietf-poly1305": 8,
}
DEFAULT_CIPHER = "chacha20-ietf-poly1305"


@dataclass(frozen=True)
class Inbound:
    """The properties of a managed inbound that accounts depend on.

    `vision`: the inbound can carry Vision. `flow`: the default for users without one. `method`: of a Shadowsocks
    inbound, if known. `key`: the public key of a WireGuard inbound.
    """

    tag: str
    protocol: str
    vision: bool = False
    flow: str = ""
    method: str = ""
    key: bytes = b""


def vless(inbound: Inbound, user: service_pb2.User) -> Account | None:
    account = user.proxies.vless
    text = account.id
    if not text:
        return None
    flow = account.flow or inbound.flow
    if flow not in ("", VISION):
        raise Unusable(f"the flow {flow!r} is unknown")
    text, identity = parse_uuid(text)
    packed = field(b"\x0a", text.encode())
    if flow and inbound.vision:
        packed += field(b"\x12", flow.encode())
    # Xray ignores bytes 6 and 7 of a VLESS id (proxy/vless/validator.go).
    credential = identity[:6] + identity[8:]
    return Account(pack(user.email, "xray.proxy.vless.Account", packed), credential)


def as_given(user: xray_pb2.User) -> xray_pb2.User:
    """Reduce a user that the core lists to what it was given: it adds fields to a VMess account."""
    if user.account.type == "xray.proxy.vmess.Account":
        user.account.value = xray_pb2.VmessAccount(
            id=xray_pb2.VmessAccount.FromString(user.account.value).id
        ).SerializeToString()
    return user


def vmess(_: Inbound, user: service_pb2.User) -> Account | None:
    if not user.proxies.vmess.id:
        return None
    text, identity = parse_uuid(user.proxies.vmess.id)
    return _account(user, "vmess", xray_pb2.VmessAccount(id=text), identity)


def trojan(_: Inbound, user: service_pb2.User) -> Account | None:
    password = user.proxies.trojan.password
    return _account(user, "trojan", xray_pb2.TrojanAccount(password=password), password.encode()) if password else None


def shadowsocks(inbound: Inbound, user: service_pb2.User) -> Account | None:
    account = user.proxies.shadowsocks
    if not account.password:
        return None
    method = account.method or inbound.method or DEFAULT_CIPHER
    cipher = CIPHERS.get(method.lower())
    if cipher is None:
        raise Unusable(f"the Shadowsocks method {method!r} is unknown")
    packed = xray_pb2.ShadowsocksAccount(password=account.password, cipher_type=cipher)
    return _account(user, "shadowsocks", packed, bytes([cipher]) + account.password.encode())


def shadowsocks_2022(inbound: Inbound, user: service_pb2.User) -> Account | None:
    password = user.proxies.shadowsocks.password
    if not password:
        return None
    key = shadowsocks_2022_key(password, KEY_BYTES[inbound.method])
    packed = xray_pb2.Shadowsocks2022Account(key=base64.b64encode(key).decode())
    return _account(user, "shadowsocks_2022", packed, key)


def hysteria(_: Inbound, user: service_pb2.User) -> Account | None:
    secret = user.proxies.hysteria.auth
    packed = xray_pb2.HysteriaAccount(auth=secret)
    return _account(user, "hysteria.account", packed, secret.encode()) if secret else None


def wireguard(inbound: Inbound, user: service_pb2.User) -> Account | None:
    if not user.proxies.wireguard.public_key:
        return None
    packed, key, addresses = tunnel.peer(user.proxies.wireguard, inbound.key)
    return Account(pack(user.email, "xray.proxy.wireguard.PeerConfig", packed), key, tuple(sorted(addresses)))


BUILDERS: dict[str, Callable[[Inbound, service_pb2.User], Account | None]] = {
    "vless": vless,
    "vmess": vmess,
    "trojan": trojan,
    "shadowsocks": shadowsocks,
    "shadowsocks_2022": shadowsocks_2022,
    "hysteria": hysteria,
    "wireguard": wireguard,
}


def _account(user: service_pb2.User, protocol: str, account: Message, credential: bytes) -> Account:
    return Account(pack(user.email, f"xray.proxy.{protocol}.Account", account.SerializeToString()), credential)


def pack(email: str, type_name: str, account: bytes) -> bytes:
    """A serialised protocol.User, for a configuration or an AlterInbound call."""
    name = email.encode()
    return b"".join((b"\x12", SIZE[len(name)], name, _frame(type_name, len(account)), account))


def email_of(packed: bytes) -> str:
    """The e-mail in a serialised protocol.User: first in those of `pack`; the core's may begin with a level."""
    if packed[:1] == b"\x12" and packed[1] < 0x80:
        return packed[2 : 2 + packed[1]].decode()
    return xray_pb2.User.FromString(packed).email


def named(packed: bytes, end: str) -> bytes:
    """A serialised protocol.User whose e-mail has this end besides."""
    if not end:
        return packed
    if packed[:1] == b"\x12" and packed[1] < 0x80 and len(end) < 0x80 - packed[1]:
        begin, size = 2 + packed[1], packed[1] + len(end)
        return b"".join((b"\x12", SIZE[size], packed[2:begin], end.encode(), packed[begin:]))
    user = xray_pb2.User.FromString(packed)
    user.email += end
    return user.SerializeToString()


def spellings(accounts: Mapping[str, Accounts], keys: Iterable[str]) -> dict[str, list[str]]:
    """The spellings of these users' e-mails in all inbounds, by key; none for others."""
    found = {key: [some[key] for some in accounts.values() if key in some] for key in keys}
    return {key: list(dict.fromkeys(map(email_of, some))) for key, some in found.items()}


def unnamed(packed: bytes) -> bytes:
    """A serialised protocol.User without its e-mail."""
    user = xray_pb2.User.FromString(packed)
    user.ClearField("email")
    return user.SerializeToString(deterministic=True)


@lru_cache(maxsize=1024)
def _frame(type_name: str, size: int) -> bytes:
    """The bytes between the e-mail and an account of this size in a protocol.User."""
    typed = field(b"\x0a", type_name.encode()) + b"\x12" + SIZE[size]
    return b"\x1a" + SIZE[len(typed) + size] + typed
