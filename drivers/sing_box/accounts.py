"""Build a user's entry in an inbound of sing-box; no other module builds entries. Pure.

An entry is the bytes of its JSON. docs/sing-box.md lists which field of a message becomes which credential. The effect
of empty, odd and duplicate credentials was tried on sing-box 1.14.1 and 1.14.4.
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

from drivers.process.aliases import unaliased
from drivers.process.credentials import KEY_BYTES, parse_uuid, shadowsocks_2022_key
from node.contract.accounts import Account, Unusable, key_of
from protos.service_pb2 import User

VISION = "xtls-rprx-vision"
# The Shadowsocks methods that allow several users, by every name that controllers use for them.
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
# SOCKS5 has one byte for the length of a user name and one for that of a password (RFC 1929).
MAX_WORD = 255

# Replaces a slash in names of live users: ssm-api cannot change a user whose name contains one. The character is not
# printable, so no e-mail contains it.
_SLASH = "\ue000"

# How entries begin: with the name. Where its key is "username" it is also the name that the user logs in with.
_LOGIN = b'{"username": '
_NAME = re.compile(rb'\{"(?:user)?name": ("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class Inbound:
    """A managed inbound: the parts of it that determine a user's entry.

    `vision`: whether the inbound can carry Vision. `method`: the method of a Shadowsocks inbound.
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
        raise Unusable(f"the Shadowsocks method is {account.method!r}, but that of the inbound is {inbound.method!r}")
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
        raise Unusable("TUIC needs both vless.id and trojan.password, and one is empty")
    text, raw = parse_uuid(identity)
    return _account(raw, name=user.email, uuid=text, password=password)


def login(_: Inbound, user: User) -> Account | None:
    """Build a SOCKS, HTTP or Naive entry: a name, which identifies the user, and a password."""
    password = user.proxies.trojan.password
    if not password:
        return None
    if ":" in user.email:
        raise Unusable("the e-mail contains a colon, which a user name in HTTP authentication cannot have")
    if max(len(user.email.encode()), len(password.encode())) > MAX_WORD:
        raise Unusable(f"the e-mail or the password is longer than {MAX_WORD} bytes")
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


# The types where users log in by their names, which cannot be others in the core.
LOGINS = frozenset(kind for kind, builder in BUILDERS.items() if builder is login)


def inbound_of(tree: Mapping[str, Any], tag: str) -> Inbound | None:
    """Return the inbound if the node can supply its users; None for other types, or forms of a type without users."""
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


def random_entry(inbound: Inbound) -> bytes:
    """Build an entry with random credentials.

    Some types let all clients in while they have no user, and others do not start.
    """
    user = User(email="nobody-" + secrets.token_hex(8))
    user.proxies.vless.id = user.proxies.vmess.id = str(uuid.uuid4())
    user.proxies.trojan.password = user.proxies.hysteria.auth = user.proxies.shadowsocks.password = secrets.token_hex()
    account = BUILDERS[inbound.type](inbound, user)
    assert account is not None
    return account.packed


def name_of(packed: bytes) -> str:
    name: str = json.loads(quoted_name(packed))
    return name


def quoted_name(packed: bytes) -> bytes:
    """Return the name at the start of an entry as JSON, with its quotes."""
    match = _NAME.match(packed)
    assert match is not None
    return match[1]


def named(packed: bytes, end: str) -> bytes:
    """Return an entry whose name has this end besides."""
    match = _NAME.match(packed)
    assert match is not None
    place = match.end() - 1
    return b"".join((packed[:place], json.dumps(end)[1:-1].encode(), packed[place:])) if end else packed


def alike(one: bytes | None, other: bytes | None) -> bool:
    """Whether two entries of one user have the same credential; the spelling of the e-mail does not count."""
    if one is None or other is None:
        return one is other
    return one == other or _unnamed(one) == _unnamed(other)


def logs_in_otherwise(one: bytes, other: bytes) -> bool:
    """Whether two entries of a user have different login names: the core compares them letter by letter."""
    return one.startswith(_LOGIN) and quoted_name(one) != quoted_name(other)


def _unnamed(packed: bytes) -> bytes:
    match = _NAME.match(packed)
    assert match is not None
    return packed[match.end() :]


def label(name: str) -> str:
    """Return the name that the core has for a live user in its paths, log lines, counters and connections."""
    return name.replace("/", _SLASH)


def unlabelled(text: str) -> str:
    """Replace labels and other names of the core in a text by the users' own names."""
    return unaliased(unslashed(text))


def unslashed(text: str) -> str:
    """Replace labels in a text by the names that they were made of."""
    return text.replace(_SLASH, "/")


def login_of(packed: bytes) -> tuple[str, str]:
    entry = json.loads(packed)
    return label(entry["name"]), entry["password"]


def unknown_entry(user: str, password: str) -> bytes:
    """Build the entry of a live user whom the core lists and the node does not know."""
    return _account(b"", name=unlabelled(user), password=password).packed


def _account(credential: bytes, **entry: str | int) -> Account:
    return Account(json.dumps(entry, ensure_ascii=False).encode(), credential)
