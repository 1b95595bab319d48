"""WireGuard inbounds: who their users are by key and by address, and in which order they change. Pure.

The core refuses no address that somebody else has: it takes it from them. So each address has one user here, and nobody
is given one before it is free. Names and numbers: `proxy/wireguard` of Xray-core 26.6.27 and later.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv6Address, ip_address, ip_network
from socket import AF_INET, AF_INET6, inet_pton

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from drivers.xray.wire import field
from node.contract.accounts import Accounts, Change, Unusable, key_of
from node.errors import InvalidConfig, shown
from protos import xray_pb2
from protos.service_pb2 import Wireguard
from protos.xray_pb2 import InboundHandlerConfig, User

SETTINGS = "xray.proxy.wireguard.DeviceConfig"
ACCOUNT = "xray.proxy.wireguard.PeerConfig"
# The first version with users that can be changed while it runs.
SINCE = (26, 6, 27)
# The most addresses of one user, of all prefixes together: each is looked up by itself.
MOST_ADDRESSES = 256
# Characters of a prefix, and more: in an error a longer one would leave no room for the names of others.
_LONGEST = 100
# Users above which a busy core may not be up in the time that a start has: 0.3 ms of a processor for each.
CROWD = 10_000
_URL_SAFE = str.maketrans("-_", "+/")
_KEY = re.compile(r"[A-Za-z0-9+/]{43}=?", re.ASCII)


def parse_key(text: str) -> bytes:
    """A key in base64, with or without its padding, in either alphabet. Raises `Unusable`."""
    plain = text.translate(_URL_SAFE)
    if not _KEY.fullmatch(plain):
        raise Unusable("the WireGuard key is not 32 bytes in base64")
    return base64.b64decode(plain[:43] + "=")


def prefixes(texts: Iterable[str]) -> list[str]:
    """These as the core writes them, bare addresses among them, each once and in order. Raises `Unusable`."""
    try:
        found = sorted(set(map(_prefix, _few(texts))))
    except ValueError as error:
        raise Unusable(f"a WireGuard address is none: {error}") from error
    if not found:
        raise Unusable("the user has no WireGuard address")
    if sum(map(_size, found)) > MOST_ADDRESSES:
        raise _too_many()
    return found


def _few(texts: Iterable[str]) -> set[str]:
    """These, each once. Raises `Unusable` before anybody reads what a whole message can hold of them."""
    each = set(texts)
    if len(each) > MOST_ADDRESSES:
        raise _too_many()
    return each


def _too_many() -> Unusable:
    return Unusable(f"the user has more than {MOST_ADDRESSES} WireGuard addresses")


def _prefix(text: str) -> str:
    """One of them. Raises `ValueError`."""
    if len(text) > _LONGEST:
        raise ValueError(f"{shown(text)} is too long")
    address, _, length = text.partition("/")
    one = ip_address(address)
    # The core does not read the first, and takes the second for the address of IPv4.
    if isinstance(one, IPv6Address) and (one.scope_id or one.ipv4_mapped):
        raise ValueError(f"{text!r} has a zone, or is one of IPv4")
    # Nearly all are of one address, and of those that is all.
    alone = str(one.max_prefixlen)
    return f"{one}/{alone}" if length in ("", alone) else str(ip_network(text, strict=False))


def _size(prefix: str) -> int:
    address, _, length = prefix.partition("/")
    return 1 << (128 if ":" in address else 32) - int(length)


def addresses(found: Iterable[str]) -> frozenset[bytes]:
    """All addresses of these prefixes."""
    return frozenset(address for prefix in found for address in _addresses(prefix))


def _addresses(prefix: str) -> Iterable[bytes]:
    if _size(prefix) > 1:
        return (each.packed for each in ip_network(prefix))
    address = prefix.partition("/")[0]
    return (inet_pton(AF_INET6 if ":" in address else AF_INET, address),)


def peer(user: Wireguard, server: bytes) -> tuple[bytes, bytes, frozenset[bytes]]:
    """The peer that a user is: as the core takes it, its key, its addresses. Raises `Unusable`."""
    key, allowed = parse_key(user.public_key), prefixes(user.peer_ips)
    if key == server:
        raise Unusable("the WireGuard key is the server's own")
    return packed_peer(key.hex(), allowed), key, addresses(allowed)


def packed_peer(key: str, allowed: Iterable[str]) -> bytes:
    """A PeerConfig."""
    return field(b"\x0a", key.encode()) + b"".join(field(b"\x2a", prefix.encode()) for prefix in allowed)


# The inbound


def is_wireguard(handler: InboundHandlerConfig) -> bool:
    return handler.proxy_settings.type == SETTINGS


def has_users(handler: InboundHandlerConfig, version: tuple[int, ...]) -> bool:
    """Whether it is one whose users can be supplied."""
    if version < SINCE or not is_wireguard(handler):
        return False
    return not xray_pb2.WireguardConfig.FromString(handler.proxy_settings.value).is_client


def strip(handler: InboundHandlerConfig) -> bytes:
    """Take its own users out. Returns its public key. Raises `InvalidConfig` if it has none."""
    settings = xray_pb2.WireguardConfig.FromString(handler.proxy_settings.value)
    try:
        secret = X25519PrivateKey.from_private_bytes(binascii.unhexlify(settings.secret_key))
    except ValueError as error:
        # The core would break over it.
        raise InvalidConfig(f"inbound {handler.tag!r}: the secretKey of WireGuard is not 32 bytes in base64") from error
    settings.ClearField("users")
    handler.proxy_settings.value = settings.SerializeToString()
    return secret.public_key().public_bytes_raw()


# Changes


def claims(packed: bytes) -> frozenset[bytes]:
    """What a user has for themselves alone, by their account: the key, the addresses."""
    account = _account(User.FromString(packed))
    return addresses(account.allowed_ips) | {bytes.fromhex(account.public_key)}


def keeps_key(before: bytes, after: bytes) -> bool:
    """Whether two accounts have one key: the core puts the one in the place of the other, and the tunnel goes on."""
    return _account(User.FromString(before)).public_key == _account(User.FromString(after)).public_key


def yielding(accounts: Accounts, changes: Iterable[Change]) -> Iterator[Change]:
    """What goes before changes of accounts that keep their key: who has what another one gets, gives it up first."""
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
    """Which of these changes want what somebody else still has, and who that is."""
    holder = {claim: key for key, packed in accounts.items() for claim in claims(packed)}
    for change in changes:
        wanted = claims(change.packed) if change.packed is not None else ()
        if keys := {holder[claim] for claim in wanted if claim in holder} - {change.key}:
            yield change, min(keys)


def listed(accounts: Accounts, users: Iterable[User]) -> dict[str, User]:
    """The core's users by key. One e-mail may be there with several keys: the one that is not ours is told of."""
    found: dict[str, User] = {}
    for user in users:
        key = key_of(user.email)
        if key not in found or not _is(accounts.get(key), user):
            found[key] = user
    return found


def differing(accounts: Accounts, users: Mapping[str, User]) -> dict[str, bytes]:
    """Whom the core has in another way than they are known: what it has."""
    both = accounts.keys() & users.keys()
    return {key: users[key].SerializeToString() for key in both if not _is(accounts[key], users[key])}


def crowded(accounts: Mapping[str, Accounts], tags: Iterable[str]) -> list[str]:
    """For an operator: what another start of this run may break over."""
    many = sum(len(accounts[tag]) for tag in tags)
    if many <= CROWD:
        return []
    return [
        f"the core has {many:,} users of WireGuard: it starts slowly with them, and may not be up in the time it has"
    ]


def _is(packed: bytes | None, user: User) -> bool:
    """Whether an account is what the core has of a user."""
    if packed is None:
        return False
    ours, theirs = _account(User.FromString(packed)), _account(user)
    return ours.public_key == theirs.public_key and set(ours.allowed_ips) == set(theirs.allowed_ips)


def _common(before: bytes, after: bytes) -> bytes:
    """The second account with those of its prefixes only that the first one has."""
    user = User.FromString(after)
    account, kept = _account(user), _account(User.FromString(before)).allowed_ips
    common = [prefix for prefix in account.allowed_ips if prefix in kept]
    user.account.value = packed_peer(account.public_key, common)
    return user.SerializeToString()


def _account(user: User) -> xray_pb2.WireguardAccount:
    return xray_pb2.WireguardAccount.FromString(user.account.value)
