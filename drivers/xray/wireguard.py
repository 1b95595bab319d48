"""Users of WireGuard inbounds: their keys and addresses, and the order in which changes are applied. Pure.

The core does not refuse an address that another user has, but takes it from them. So here each address has one user,
and a user gets one only when it is free. Names and numbers: `proxy/wireguard` of Xray-core 26.6.27 and later.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv6Address, ip_address, ip_network
from socket import AF_INET, AF_INET6, inet_pton

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from drivers.xray.messages import WIREGUARD, Version, edited, field
from node.base.errors import InvalidConfig, shown
from node.contract.accounts import Accounts, Change, Unusable, key_of
from protos import xray_pb2
from protos.service_pb2 import Wireguard
from protos.xray_pb2 import InboundHandlerConfig, User

# The first version that can change WireGuard users while it runs.
SINCE: Version = (26, 6, 27)
# The most addresses of one user, over all prefixes: claims are kept for single addresses.
MOST_ADDRESSES = 256
# The most characters of a prefix: in an error a longer one would leave no room for the names of others.
_LONGEST = 100
# Above this many users a busy core may exceed the start timeout: 0.3 ms of a processor for each.
CROWD = 10_000
_URL_SAFE = str.maketrans("-_", "+/")
_KEY = re.compile(r"[A-Za-z0-9+/]{43}=?", re.ASCII)


def parse_key(text: str) -> bytes:
    """Decode a key in base64, with or without padding, in either alphabet. Raises `Unusable`."""
    plain = text.translate(_URL_SAFE)
    if not _KEY.fullmatch(plain):
        raise Unusable("the WireGuard key is not 32 bytes in base64")
    return base64.b64decode(plain[:43] + "=")


def prefixes(texts: Iterable[str]) -> list[str]:
    """Normalise prefixes and bare addresses as the core writes them, sorted, each once. Raises `Unusable`."""
    each, found = set(texts), list[str]()
    # Not parsed if there are too many.
    too_many = len(each) > MOST_ADDRESSES
    if not too_many:
        try:
            found = sorted(set(map(_prefix, each)))
        except ValueError as error:
            raise Unusable(f"invalid WireGuard address: {error}") from error
    if too_many or sum(map(_size, found)) > MOST_ADDRESSES:
        raise Unusable(f"the user has more than {MOST_ADDRESSES} WireGuard addresses")
    if not found:
        raise Unusable("the user has no WireGuard address")
    return found


def _prefix(text: str) -> str:
    """Normalise a prefix or a bare address. Raises `ValueError`."""
    if len(text) > _LONGEST:
        raise ValueError(f"{shown(text)} is too long")
    address, _, length = text.partition("/")
    one = ip_address(address)
    # The core does not parse a zone, and takes a mapped address for its IPv4 one.
    if isinstance(one, IPv6Address) and (one.scope_id or one.ipv4_mapped):
        raise ValueError(f"{text!r} is an IPv6 address with a zone, or an IPv4-mapped one")
    # A shortcut for prefixes of one address, which nearly all are.
    alone = str(one.max_prefixlen)
    return f"{one}/{alone}" if length in ("", alone) else str(ip_network(text, strict=False))


def _size(prefix: str) -> int:
    address, _, length = prefix.partition("/")
    return 1 << (128 if ":" in address else 32) - int(length)


def addresses(found: Iterable[str]) -> frozenset[bytes]:
    return frozenset(address for prefix in found for address in _addresses(prefix))


def _addresses(prefix: str) -> Iterable[bytes]:
    if _size(prefix) > 1:
        return (each.packed for each in ip_network(prefix))
    address = prefix.partition("/")[0]
    return (inet_pton(AF_INET6 if ":" in address else AF_INET, address),)


def peer(user: Wireguard, server: bytes) -> tuple[bytes, bytes, frozenset[bytes]]:
    """A user's peer: its PeerConfig, its key and its addresses. Raises `Unusable`."""
    key, allowed = parse_key(user.public_key), prefixes(user.peer_ips)
    if key == server:
        raise Unusable("the WireGuard key is the server's own")
    return packed_peer(key.hex(), allowed), key, addresses(allowed)


def packed_peer(key: str, allowed: Iterable[str]) -> bytes:
    return field(b"\x0a", key.encode()) + b"".join(field(b"\x2a", prefix.encode()) for prefix in allowed)


# The inbound


def is_wireguard(handler: InboundHandlerConfig) -> bool:
    return handler.proxy_settings.type == WIREGUARD


def has_users(handler: InboundHandlerConfig, version: Version) -> bool:
    """Whether it is a WireGuard inbound whose users this version can change."""
    if version < SINCE or not is_wireguard(handler):
        return False
    return not xray_pb2.WireguardConfig.FromString(handler.proxy_settings.value).is_client


def strip(handler: InboundHandlerConfig) -> bytes:
    """Remove its own users. Returns its public key. Raises `InvalidConfig` if the secret key is invalid."""
    with edited(handler.proxy_settings, xray_pb2.WireguardConfig) as settings:
        try:
            secret = X25519PrivateKey.from_private_bytes(binascii.unhexlify(settings.secret_key))
        except ValueError as error:
            text = f"inbound {handler.tag!r}: the secretKey of WireGuard is not 32 bytes in base64"
            raise InvalidConfig(text) from error
        settings.ClearField("users")
    return secret.public_key().public_bytes_raw()


# Changes


def claims(packed: bytes) -> frozenset[bytes]:
    """The key and addresses of an account, which no other user may have."""
    account = _account(User.FromString(packed))
    return addresses(account.allowed_ips) | {bytes.fromhex(account.public_key)}


def keeps_key(before: bytes, after: bytes) -> bool:
    """Whether two accounts have the same key: the core replaces one with the other, and the tunnel continues."""
    return _account(User.FromString(before)).public_key == _account(User.FromString(after)).public_key


def yielding(accounts: Accounts, changes: Iterable[Change]) -> Iterator[Change]:
    """Changes to apply first: users who keep their key give up the addresses that others get."""
    coming = {change: change.packed for change in changes if change.packed is not None}
    staying = [
        change for change in coming if change.key in accounts and keeps_key(accounts[change.key], coming[change])
    ]
    if not staying:
        return
    getting = {claim: change.key for change, packed in coming.items() for claim in claims(packed)}
    for change in staying:
        before = accounts[change.key]
        if any(getting.get(claim, change.key) != change.key for claim in claims(before)):
            yield change._replace(packed=_common(before, coming[change]))


def held_back(accounts: Accounts, changes: Iterable[Change]) -> Iterator[tuple[Change, str]]:
    """The changes that need a key or address which another user still has, and that user."""
    holder = {claim: key for key, packed in accounts.items() for claim in claims(packed)}
    for change in changes:
        wanted = claims(change.packed) if change.packed is not None else ()
        if keys := {holder[claim] for claim in wanted if claim in holder} - {change.key}:
            yield change, min(keys)


def listed(accounts: Accounts, users: Iterable[User]) -> dict[str, User]:
    """The core's users by e-mail key. If an e-mail has several WireGuard keys, the one that differs from ours."""
    found: dict[str, User] = {}
    for user in users:
        key = key_of(user.email)
        if key not in found or not _is(accounts.get(key), user):
            found[key] = user
    return found


def differing(accounts: Accounts, users: Mapping[str, User]) -> dict[str, bytes]:
    """The core's accounts of the users whose account differs from the known one."""
    both = accounts.keys() & users.keys()
    return {key: users[key].SerializeToString() for key in both if not _is(accounts[key], users[key])}


def crowded(accounts: Mapping[str, Accounts], tags: Iterable[str]) -> list[str]:
    """A warning for the operator if there are so many users that a restart may fail."""
    many = sum(len(accounts[tag]) for tag in tags)
    if many <= CROWD:
        return []
    return [f"the core has {many:,} WireGuard users: with so many a restart is slow and may exceed START_TIMEOUT"]


def _is(packed: bytes | None, user: User) -> bool:
    """Whether an account equals that of the core's user."""
    if packed is None:
        return False
    ours, theirs = _account(User.FromString(packed)), _account(user)
    return ours.public_key == theirs.public_key and set(ours.allowed_ips) == set(theirs.allowed_ips)


def _common(before: bytes, after: bytes) -> bytes:
    """The second account, with only the prefixes that the first has, too."""
    user = User.FromString(after)
    account, kept = _account(user), _account(User.FromString(before)).allowed_ips
    common = [prefix for prefix in account.allowed_ips if prefix in kept]
    user.account.value = packed_peer(account.public_key, common)
    return user.SerializeToString()


def _account(user: User) -> xray_pb2.WireguardAccount:
    return xray_pb2.WireguardAccount.FromString(user.account.value)
