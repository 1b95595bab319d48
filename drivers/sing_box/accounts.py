"""From a user to their entry in an inbound of sing-box. Pure; the only place where entries are built.

An entry is the bytes of its JSON. Which field of a message becomes which credential: docs/sing-box.md. What an empty,
odd or double credential does there was tried on the core (1.14.1, 1.14.4).
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from drivers.credentials import KEY_BYTES, parse_uuid, shadowsocks_2022_key
from node.contract.accounts import Account, Unusable, key_of
from protos.service_pb2 import User

VISION = "xtls-rprx-vision"
# Methods of Shadowsocks that can have several users, by all names that controllers have for them.
METHODS = {
    "aes-128-gcm": "aes-128-gcm",
    "aead_aes_128_gcm": "aes-128-gcm",
    "aes-192-gcm": "aes-192-gcm",
    "aes-256-gcm": "aes-256-gcm",
    "aead_aes_256_gcm": "aes-256-gcm",
    "chacha20-poly1305": "chacha20-ietf-poly1305",
    "aead_chacha20_poly1305": "chacha20-ietf-poly1305",
    "chacha20-ietf-poly1305": "chacha20-ietf-poly1305",
    "xchacha20-poly1305": "xchacha20-ietf-poly1305",
    "aead_xchacha20_poly1305": "xchacha20-ietf-poly1305",
    "xchacha20-ietf-poly1305": "xchacha20-ietf-poly1305",
}
# SOCKS5 has one byte for the length of a name, and of a password (RFC 1929).
MAX_WORD = 255

# In the place of a slash in names of live users: with one there nobody could be changed. It is not printable, so no
# e-mail has it.
_SLASH = "\ue000"

# How entries begin, and those in which the name is nothing but a name.
_NAMED = b'{"name": '
_NAME = re.compile(rb'\{"(?:user)?name": ("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class Inbound:
    """What an entry depends on beside the user.

    `vision` is whether the inbound can carry Vision, `method` the method of a Shadowsocks inbound.
    """

    tag: str
    type: str
    vision: bool = False
    method: str = ""


def vless(inbound: Inbound, user: User) -> Account | None:
    account = user.proxies.vless
    if not account.id:
        return None
    if account.flow not in ("", VISION):
        raise Unusable(f"the flow {account.flow!r} is unknown")
    text, identity = parse_uuid(account.id)
    return _account(identity, name=user.email, uuid=text, flow=account.flow if inbound.vision else "")


def vmess(_: Inbound, user: User) -> Account | None:
    if not user.proxies.vmess.id:
        return None
    text, identity = parse_uuid(user.proxies.vmess.id)
    return _account(identity, name=user.email, uuid=text, alterId=0)


def trojan(_: Inbound, user: User) -> Account | None:
    password = user.proxies.trojan.password
    return _account(password.encode(), name=user.email, password=password) if password else None


def shadowsocks(inbound: Inbound, user: User) -> Account | None:
    account = user.proxies.shadowsocks
    if not account.password:
        return None
    if inbound.method in KEY_BYTES:
        key = shadowsocks_2022_key(account.password, KEY_BYTES[inbound.method])
        return _account(key, name=user.email, password=base64.b64encode(key).decode())
    if account.method and METHODS.get(account.method.lower()) != inbound.method:
        raise Unusable(f"the method is {account.method!r}, but sing-box has one for an inbound: {inbound.method!r}")
    return _account(account.password.encode(), name=user.email, password=account.password)


def hysteria2(_: Inbound, user: User) -> Account | None:
    secret = user.proxies.hysteria.auth
    return _account(secret.encode(), name=user.email, password=secret) if secret else None


def hysteria(_: Inbound, user: User) -> Account | None:
    secret = user.proxies.hysteria.auth
    return _account(secret.encode(), name=user.email, auth_str=secret) if secret else None


def tuic(_: Inbound, user: User) -> Account | None:
    identity, password = user.proxies.vless.id, user.proxies.trojan.password
    if not identity and not password:
        return None
    if not identity or not password:
        raise Unusable("TUIC takes an id and a password: those of VLESS and of Trojan")
    text, raw = parse_uuid(identity)
    return _account(raw, name=user.email, uuid=text, password=password)


def login(_: Inbound, user: User) -> Account | None:
    """SOCKS, HTTP and Naive: a name and a password. The name is what tells users apart."""
    password = user.proxies.trojan.password
    if not password:
        return None
    if ":" in user.email:
        raise Unusable("the e-mail has a colon, which ends a name in HTTP's authentication")
    if max(len(user.email.encode()), len(password.encode())) > MAX_WORD:
        raise Unusable(f"the e-mail or the password has more than {MAX_WORD} bytes")
    return _account(key_of(user.email).encode(), username=user.email, password=password)


BUILDERS: Mapping[str, Callable[[Inbound, User], Account | None]] = {
    "vless": vless,
    "vmess": vmess,
    "trojan": trojan,
    "shadowsocks": shadowsocks,
    "hysteria2": hysteria2,
    "hysteria": hysteria,
    "tuic": tuic,
    "shadowtls": trojan,
    "anytls": trojan,
    "naive": login,
    "mixed": login,
    "socks": login,
    "http": login,
}


def inbound_of(tree: Mapping[str, Any], tag: str) -> Inbound | None:
    """The inbound if its users can be supplied: None for another type, or a form of it that has no users."""
    kind = tree.get("type", "")
    if kind not in BUILDERS:
        return None
    method = tree.get("method", "")
    if kind == "shadowsocks" and ("destinations" in tree or method not in {*METHODS.values(), *KEY_BYTES}):
        return None
    if kind == "shadowtls" and tree.get("version") != 3:
        return None
    vision = bool(tree.get("tls", {}).get("enabled")) and "transport" not in tree
    return Inbound(tag, kind, vision=vision, method=method)


def nobody(inbound: Inbound) -> bytes:
    """An entry that nobody knows: without any, some types let everybody in, and others do not start."""
    user = User(email="nobody-" + secrets.token_hex(8))
    user.proxies.vless.id = user.proxies.vmess.id = str(uuid.uuid4())
    user.proxies.trojan.password = user.proxies.hysteria.auth = user.proxies.shadowsocks.password = secrets.token_hex()
    account = BUILDERS[inbound.type](inbound, user)
    assert account is not None
    return account.packed


def name_of(packed: bytes) -> str:
    """The user's name in an entry."""
    name: str = json.loads(quoted_name(packed))
    return name


def quoted_name(packed: bytes) -> bytes:
    """The same as it stands there, in quotes: entries begin with it."""
    match = _NAME.match(packed)
    assert match is not None
    return match[1]


def alike(one: bytes | None, other: bytes | None) -> bool:
    """Whether two entries of one user let them in by the same credential: the e-mail may be spelled in another case.

    Where the e-mail is what they log in by, its spelling belongs to the credential.
    """
    if one is None or other is None or not one.startswith(_NAMED):
        return one == other
    return _unnamed(one) == _unnamed(other)


def _unnamed(packed: bytes) -> bytes:
    match = _NAME.match(packed)
    assert match is not None
    return packed[match.end() :]


def label(name: str) -> str:
    """The name of a live user as the core has it: in its paths, log lines, counters and connections."""
    return name.replace("/", _SLASH)


def unlabelled(text: str) -> str:
    """What the core says of users, with their own names."""
    return text.replace(_SLASH, "/")


def login_of(packed: bytes) -> tuple[str, str]:
    """The label and the password of a live user."""
    entry = json.loads(packed)
    return label(entry["name"]), entry["password"]


def stranger(user: str, password: str) -> bytes:
    """The entry of a live user whom the core has and the node does not know."""
    return _account(b"", name=unlabelled(user), password=password).packed


def _account(credential: bytes, **entry: str | int) -> Account:
    return Account(json.dumps(entry, ensure_ascii=False).encode(), credential)
