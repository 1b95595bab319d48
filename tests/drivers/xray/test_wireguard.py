"""WireGuard users: keys and addresses, the core's own bytes, and no address taken from another user."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from drivers.xray import accounts, config, wireguard
from drivers.xray.accounts import Inbound
from drivers.xray.api import Operation
from drivers.xray.user_changes import Batch, Swap, choose, swap_of
from drivers.xray.users import Users
from node.backend.roster import Roster
from node.base.errors import InvalidConfig
from node.contract.accounts import Account, Unusable, diff, key_of
from protos import xray_pb2
from protos.service_pb2 import Proxy, User, Wireguard
from protos.xray_pb2 import Config, InboundHandlerConfig

TAG = "wg"
SECRET, VERSION = bytes(range(32)), (26, 7, 28)
SERVER = X25519PrivateKey.from_private_bytes(SECRET).public_key().public_bytes_raw()
ANN_KEY = X25519PrivateKey.from_private_bytes(b"\1" * 32).public_key().public_bytes_raw()
INBOUND = Inbound(TAG, "wireguard", key=SERVER)
# What Xray 26.7.28 makes of the user `ann@test` with that key and two addresses, and of the inbound.
ANN = (
    b"\x12\x08ann@test\x1a\x7f\n\x1fxray.proxy.wireguard.PeerConfig\x12\\"
    b"\n@a4e09292b651c278b9772c569f5fa9bb13d906b46ab68c9df9dc2b4409f8a209*\x0b10.7.0.2/32*\x0bfd00::2/128"
)
SETTINGS = (
    b"\n@000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\x12\x0810.7.0.1 \x8c\x0b*\x8b\x01" + ANN
)
HANDLER = (
    b"\n\x02wg\x124\n xray.app.proxyman.ReceiverConfig\x12\x10"
    b"\n\x06\n\x04\x08\x05\x10\x05\x12\x06\n\x04\x7f\x00\x00\x01\x1a\x83\x02\n!xray.proxy.wireguard.DeviceConfig\x12\xdd\x01"
    + SETTINGS
)


def member(name: str, key: bytes | str, *ips: str, tag: str = TAG) -> User:
    text = key if isinstance(key, str) else base64.b64encode(key).decode()
    return User(email=name, inbounds=[tag], proxies=Proxy(wireguard=Wireguard(public_key=text, peer_ips=ips)))


def account(key: bytes | str, *ips: str) -> Account | None:
    return accounts.wireguard(INBOUND, member("ann@test", key, *ips))


def planned(handler: bytes = HANDLER, version: tuple[int, ...] = VERSION, *exclude: str) -> config.Plan:
    converted = Config(inbound=[InboundHandlerConfig.FromString(handler)]).SerializeToString()
    return config.plan(converted, json.dumps({"inbounds": [{"tag": TAG}]}), frozenset(exclude), version)


# Accounts


@pytest.mark.parametrize("ips", [("10.7.0.2/32", "fd00::2/128"), ("fd00:0::2", "10.7.0.2", "10.7.0.2/32")])
def test_the_bytes_are_the_cores_own(ips: tuple[str, ...]) -> None:
    """An account equals what the core's converter makes of the same user, in any order and spelling of addresses."""
    made = account(ANN_KEY, *ips)
    assert made == Account(ANN, ANN_KEY, (bytes([10, 7, 0, 2]), bytes.fromhex("fd000000000000000000000000000002")))


def test_keys() -> None:
    """Keys are decoded in both base64 alphabets, with padding and without; a user without a key has no account."""
    key = bytes([0xFB, 0xFF] * 16)
    for text in (base64.b64encode(key), base64.urlsafe_b64encode(key)):
        assert wireguard.parse_key(text.decode()) == wireguard.parse_key(text.decode().rstrip("=")) == key
    assert account("") is None


@pytest.mark.parametrize("key", ["x", "A" * 42, "A" * 44, "A" * 43 + "==", "A" * 42 + "!", "é" * 43, "0" * 64])
def test_bad_keys(key: str) -> None:
    """An invalid key is refused, and so is the server's own."""
    for bad in (key, SERVER):
        with pytest.raises(Unusable, match="WireGuard key"):
            account(bad, "10.0.0.2")


@pytest.mark.parametrize(
    "ips",
    [
        *((), ("",), ("x",), ("10.0.0.2/33",), ("10.0.0.2/32 ",), ("fe80::1%lo/128",), ("::ffff:10.0.0.2/128",)),
        *(("0.0.0.0/0",), ("::/0",), ("10.0.0.0/23",), ("fd00::/119",), ("10.0.0.0/24", "10.0.1.1/32")),
    ],
)
def test_bad_addresses(ips: tuple[str, ...]) -> None:
    """Addresses must be valid, and not too many: a wide prefix would take those of other users."""
    with pytest.raises(Unusable, match="WireGuard address"):
        account(ANN_KEY, *ips)


def test_a_prefix() -> None:
    """Each address of a prefix is the user's."""
    made = account(ANN_KEY, "10.0.0.5/24")
    assert made is not None and len(made.addresses) == wireguard.MOST_ADDRESSES
    assert xray_pb2.User.FromString(made.packed).account.value.endswith(b"10.0.0.0/24")


# The inbound


def test_a_managed_inbound() -> None:
    """Its own peers are replaced by the supplied ones, and the rest of it stays."""
    made = planned()
    assert (made.inbounds, made.warnings) == ({TAG: INBOUND}, ())
    assert b"ann@test" not in made.base.SerializeToString()
    handler = made.handler(TAG, {"ann@test": ANN})
    assert handler.proxy_settings.value == SETTINGS
    api = config.ApiAddress("/nowhere/api.sock", "0123", direct=True)
    assert Config.FromString(config.render(made, api, {TAG: {"ann@test": ANN}})).inbound[0] == handler


def test_no_tcp_ingress() -> None:
    """It has a UDP port with sessions: no TCP ingress, and no swap."""
    made = planned()
    assert made.ingress == {}
    assert made.sessions == {5}
    assert made.exclusive == []
    assert not made.datagrams
    assert swap_of(made.base.inbound[0]) is Swap.DEAF


@pytest.mark.parametrize("version", [(26, 3, 27), (26, 6, 22)])
def test_older_cores(version: tuple[int, ...]) -> None:
    """It is left as configured, and a warning names the first version that can change users."""
    made = planned(version=version)
    assert made.tags == ()
    assert "26.6.27" in made.warnings[0]
    assert made.base.inbound[0].SerializeToString() == HANDLER


def test_left_alone() -> None:
    """An excluded inbound keeps its own peers, without a warning."""
    made = planned(HANDLER, VERSION, TAG)
    assert (made.tags, made.warnings) == ((), ())
    assert "WireGuard key of 'wg'" in made.exclusive[0]
    assert made.base.inbound[0].SerializeToString() == HANDLER


def test_an_unreadable_secret() -> None:
    """An inbound whose secret key cannot be read is refused by name."""
    keys = mock.Mock(from_private_bytes=mock.Mock(side_effect=ValueError))
    with mock.patch.object(wireguard, "X25519PrivateKey", keys), pytest.raises(InvalidConfig, match=r"'wg'.*secretKey"):
        planned()


def test_peers_are_no_reason_for_a_new_run() -> None:
    """Any number of changes goes by single calls: a new run takes as long, and closes all connections."""
    work = Batch("wireguard", Swap.DEAF, 20_000, removed=20_000, added=20_000)
    assert choose({TAG: work, "b": Batch("vless", Swap.GO_ON, 1, added=1)}, 20_000, lambda _: True) == frozenset()
    assert choose({TAG: Batch("vless", Swap.DEAF, 20_000, 20_000, 20_000)}, 0, lambda _: True) is None


def test_many_users_are_warned_of() -> None:
    """There is a warning if there are so many users that the core may not start in time."""
    few = dict.fromkeys(map(str, range(wireguard.CROWD)), b"")
    assert wireguard.crowded({TAG: few, "b": few}, [TAG]) == []
    [told] = wireguard.crowded({TAG: few, "b": few}, [TAG, "b"])
    assert "20,000 WireGuard users" in told


# Changes


class Peers:
    """A core with one WireGuard inbound: it asserts that no user takes the key or address of another.

    The calls of one `alter` run in any order. `fails`: whether each call fails. `done`: whether it is applied all the
    same.
    """

    def __init__(self, seed: int = 0, fails: Iterable[bool] = (), done: Iterable[bool] = ()) -> None:
        self._order = random.Random(seed)
        self.fails, self.done = iter(fails), iter(done)
        # The e-mail and the account by public key.
        self.peers: dict[bytes, tuple[str, bytes]] = {}
        self.calls: list[Operation] = []

    def fill(self, *packed: bytes) -> None:
        for one in packed:
            self._do(Operation(TAG, xray_pb2.User.FromString(one).email, one))
        self.calls.clear()

    @property
    def users(self) -> dict[str, frozenset[bytes]]:
        return {email: wireguard.claims(packed) for email, packed in self.peers.values()}

    async def alter(self, operations: Sequence[Operation]) -> list[str | None]:
        results: list[str | None] = [None] * len(operations)
        for place in self._order.sample(range(len(operations)), len(operations)):
            if next(self.fails, False):
                results[place] = "Deadline Exceeded"
                if not next(self.done, False):
                    continue
            self._do(operations[place])
        return results

    async def count_users(self, _: str) -> int:
        return len(self.peers)

    async def list_users(self, _: str) -> list[xray_pb2.User]:
        return [xray_pb2.User.FromString(packed) for _, packed in self.peers.values()]

    def _do(self, operation: Operation) -> None:
        self.calls.append(operation)
        if operation.packed is None:
            found = [key for key, (email, _) in self.peers.items() if email == operation.email]
            for key in found[:1]:
                del self.peers[key]
            return
        wanted = wireguard.claims(operation.packed)
        [key] = [claim for claim in wanted if len(claim) == 32]
        for email, packed in self.peers.values():
            assert email == operation.email or wanted.isdisjoint(wireguard.claims(packed)), "it was somebody else's"
        self.peers[key] = operation.email, operation.packed


class NoConnections:
    """TCP connections, of which WireGuard has none."""

    def of(self, _: object) -> dict[bytes, tuple[range, ...]]:
        return {}

    async def credentials_change(self, changed: Iterable[object]) -> None:
        assert list(changed) is not None

    def left_lately(self, _: object) -> bool:
        return False

    def note_removed(self, pairs: Iterable[object]) -> None:
        assert list(pairs) is not None

    async def end(self, wanted: object) -> None:
        assert wanted == {}


def running(core: Peers) -> Users:
    host: Any = SimpleNamespace(reactor=None)
    api: Any = core
    nobody: Any = NoConnections()
    listeners: Any = SimpleNamespace(renewable=True, drains=False, shared=False)
    have = {key_of(email): packed for email, packed in core.peers.values()}
    return Users(host, planned(), api, nobody, {TAG: have}, listeners)


def roster_of(*users: User) -> Roster:
    return Roster.of(users, [TAG], lambda _, user: accounts.wireguard(INBOUND, user))[0]


def apply(users: Users, roster: Roster) -> list[str]:
    """Apply what differs, and audit the core after a refusal, as the node does."""

    async def settle() -> list[str]:
        refused, left = await users.apply(diff(users.accounts, roster.target))
        assert left == []
        if refused:
            await users.audit()
        return [refusal.reason for refusal in refused]

    return asyncio.run(settle())


def started(*users: User) -> tuple[Peers, Users, Roster]:
    core, roster = Peers(), roster_of(*users)
    core.fill(*roster.target[TAG].values())
    return core, running(core), roster


ANNA = member("Anna", b"a" * 32, "10.0.0.1", "fd00::1")
BERT = member("bert", b"b" * 32, "10.0.0.2")


def test_other_addresses_come_in_one_call() -> None:
    """A user with the same key is never removed: the tunnel would be down for half a minute."""
    core, users, roster = started(ANNA, BERT)
    roster.put(member("Anna", b"a" * 32, "10.0.0.9"))
    assert apply(users, roster) == []
    [call] = core.calls
    assert call.packed == roster.target[TAG]["anna"]


def test_another_key_is_another_peer() -> None:
    """A user with a new key is removed, by the e-mail that the core has, before they are added."""
    core, users, roster = started(ANNA, BERT)
    roster.put(member("Anna", b"c" * 32, "10.0.0.1"))
    assert apply(users, roster) == []
    assert [(call.email, call.packed is None) for call in core.calls] == [("Anna", True), ("Anna", False)]


def test_swapped_addresses() -> None:
    """Two users who swap addresses give them up first, keep the others, and are not removed."""
    core, users, roster = started(ANNA, BERT)
    roster.put_all([member("Anna", b"a" * 32, "10.0.0.2", "fd00::1"), member("bert", b"b" * 32, "10.0.0.1")])
    assert apply(users, roster) == []
    assert len(core.calls) == 4
    assert all(call.packed is not None for call in core.calls)
    kept = {call.email: len(wireguard.claims(call.packed or b"")) for call in core.calls[:2]}
    assert kept == {"Anna": 2, "bert": 1}
    assert list(core.users.values()) == [wireguard.claims(packed) for packed in roster.target[TAG].values()]


def test_a_user_who_could_not_be_removed() -> None:
    """No other user gets it meanwhile; the refusal names its user."""
    core, _, roster = started(ANNA, BERT)
    core.fails = iter([True])
    users = running(core)
    roster.put_all([User(email="bert"), member("cy", b"c" * 32, "10.0.0.2")])
    refused = apply(users, roster)
    assert "wg: 'bert' still has this user's key or one of their addresses" in refused
    assert apply(users, roster) == []
    assert set(core.users) == {"Anna", "cy"}


def test_an_audit_finds_other_addresses_and_keys() -> None:
    """After a failed call the core's list is trusted: for addresses, and for several keys of one e-mail."""
    core, users, roster = started(ANNA, BERT)
    core.fails, core.done = iter([True]), iter([True])
    roster.put(member("Anna", b"a" * 32, "10.0.0.9"))
    assert apply(users, roster) == ["wg: Deadline Exceeded"]
    assert diff(users.accounts, roster.target) == []
    core.fill(accounts.wireguard(INBOUND, member("bert", b"z" * 32, "10.0.0.77")).packed)  # type: ignore[union-attr]
    for _ in range(5):
        asyncio.run(users.audit())
        apply(users, roster)
    assert core.users.keys() == {"Anna", "bert"} and len(core.peers) == 2


names = st.sampled_from(["anna", "bert", "cy", "dora"])
some_keys = st.sampled_from([b"a" * 32, b"b" * 32, b"c" * 32])
some_ips = st.sets(st.sampled_from(["10.0.0.1/32", "10.0.0.2", "10.0.0.0/30", "fd00::1/128", "fd00::/126"]), min_size=1)
people = st.builds(lambda name, key, ips: member(name, key, *ips), names, some_keys, some_ips)
departures = st.builds(lambda name: User(email=name), names)
syncs = st.lists(st.lists(st.one_of(people, departures), min_size=1, max_size=4), max_size=6)


@given(syncs, st.integers(), st.lists(st.booleans(), max_size=12), st.lists(st.booleans(), max_size=12))
def test_no_address_is_ever_taken(syncs: list[list[User]], seed: int, fails: list[bool], done: list[bool]) -> None:
    """With any syncs, order of calls and failures, no address has two users.

    Once nothing fails any more all wanted users are there, with all their addresses.
    """
    core, roster = Peers(seed, fails, done), roster_of()
    users = running(core)
    for batch in syncs:
        roster.put_all(batch)
        apply(users, roster)
    core.fails = iter(())
    for _ in range(4):
        asyncio.run(users.audit())
        apply(users, roster)
    assert core.users == {key: wireguard.claims(packed) for key, packed in roster.target[TAG].items()}
    assert diff(users.accounts, roster.target) == []


def test_a_whole_message_of_addresses() -> None:
    """They are not parsed one by one: that would block the node for a minute."""
    many = [f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}" for number in range(wireguard.MOST_ADDRESSES + 1)]
    with mock.patch.object(wireguard, "_prefix") as read, pytest.raises(Unusable, match="more than 256"):
        wireguard.prefixes(many)
    read.assert_not_called()
    assert wireguard.prefixes(["10.0.0.1"] * 1_000) == ["10.0.0.1/32"]


def test_an_endless_address_is_cut_in_the_error() -> None:
    with pytest.raises(Unusable) as error:
        wireguard.prefixes(["x" * 1_000_000])
    assert len(str(error.value)) < 1_000
