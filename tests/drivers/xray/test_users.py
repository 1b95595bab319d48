"""The users of a run of Xray under concurrent events: an audit during a swap, a swap that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from drivers.process.aliases import PLAIN
from drivers.process.channel import ApiFailed
from drivers.sockets.sock_diag import Endpoint, Ports
from drivers.xray.accounts import Inbound, pack
from drivers.xray.api import Operation
from drivers.xray.handshakes import Busy
from drivers.xray.users import Users
from node.contract.accounts import Accounts, Change, Refusal
from protos import xray_pb2

TAG, OTHER = "home", "work"
SS, VLESS = "shadowsocks_2022", "vless"
ANNA, BERT, CARL = (pack(f"{name}@test", "xray.proxy.vless.Account", b"") for name in ("anna", "bert", "carl"))

REMOVAL = Change(TAG, "bert@test", None)
MANY = [Change(OTHER, f"{number}@test", ANNA) for number in range(60_000)]


class FakeCore:
    """Has these accounts, and runs the next of `meanwhile` before it answers."""

    def __init__(self, *accounts: bytes) -> None:
        self.accounts = list(accounts)
        self.failures = 0
        # Of users and of inbounds.
        self.calls: list[str] = []
        # Removed users, and whether handshakes were paused then.
        self.removed: list[tuple[str, str, bool]] = []
        self.paused = set[str]()
        self.meanwhile: list[Callable[[], Coroutine[Any, Any, object]]] = []

    async def _do(self) -> None:
        if self.meanwhile:
            await self.meanwhile.pop(0)()

    async def count_users(self, tag: str) -> int:
        await self._do()
        return len(self.accounts)

    aliases = PLAIN

    async def list_users(self, tag: str) -> list[xray_pb2.User]:
        return [xray_pb2.User.FromString(account) for account in self.accounts]

    async def alter(self, operations: Iterable[Operation], in_flight: int) -> list[None]:
        some = list(operations)
        self.calls += ["remove" if each.packed is None else "add" for each in some]
        self.removed += [(each.tag, each.email, each.tag in self.paused) for each in some if each.packed is None]
        return [None] * len(some)

    async def remove_inbound(self, tag: str) -> None:
        self.calls.append("remove")

    async def add_inbound(self, accounts: Accounts) -> None:
        self.calls.append("add")
        await self._do()
        if self.failures:
            self.failures -= 1
            raise ApiFailed("Deadline Exceeded")
        self.accounts = list(accounts.values())


class FakeConnections:
    """Each user is connected from an endpoint with their name."""

    def __init__(self) -> None:
        self.where: dict[str, Endpoint] = {}
        self.ended: set[Endpoint] = set()
        self.left: set[tuple[str, str]] = set()

    def of(self, pairs: Any) -> dict[Endpoint, Ports]:
        return {self.where[key]: () for _, key in pairs if key in self.where}

    async def credentials_change(self, changed: Any) -> None:
        pass

    def note_removed(self, pairs: Any) -> None:
        self.left |= {*pairs}

    def left_lately(self, pair: Any) -> bool:
        return pair in self.left

    async def end(self, wanted: Mapping[Endpoint, Ports]) -> None:
        self.ended |= wanted.keys()


class FakeHandshakes:
    """Can pause these inbounds, unless a handshake does not end."""

    def __init__(self, core: FakeCore, tags: Iterable[str]) -> None:
        self._core, self._tags = core, set(tags)
        self.go_on = False

    def can_pause(self, tag: str) -> bool:
        return tag in self._tags

    @asynccontextmanager
    async def paused(self, tags: set[str]) -> AsyncIterator[None]:
        assert tags <= self._tags
        if self.go_on:
            raise Busy("somebody goes on")
        self._core.paused = tags
        try:
            yield
        finally:
            self._core.paused = set()


def made(core: FakeCore, *accounts: bytes) -> tuple[Users, FakeConnections]:
    users, connections, _ = several(core, {TAG: "vless"}, *accounts)
    return users, connections


def several(
    core: FakeCore,
    protocols: Mapping[str, str],
    *accounts: bytes,
    shared: bool = False,
    drains: bool = False,
    pauses: bool = True,
) -> tuple[Users, FakeConnections, FakeHandshakes]:
    """The same accounts in all inbounds."""
    base = xray_pb2.Config(inbound=[xray_pb2.InboundHandlerConfig(tag=tag) for tag in protocols])
    inbounds = {tag: Inbound(tag, protocol) for tag, protocol in protocols.items()}
    plan: Any = SimpleNamespace(base=base, inbounds=inbounds, handler=lambda _, accounts, __: accounts)
    host: Any = SimpleNamespace(reactor=None)
    connections: Any = FakeConnections()
    api: Any = core
    listeners: Any = SimpleNamespace(shared=shared, drains=drains)
    handshakes: Any = FakeHandshakes(core, protocols if pauses else ())
    have = {tag: {xray_pb2.User.FromString(account).email: account for account in accounts} for tag in protocols}
    return Users(host, plan, api, connections, handshakes, have, listeners), connections, handshakes


def test_an_audit_during_a_swap() -> None:
    """The core's list from during a swap is not compared with the users from before it."""
    core = FakeCore(ANNA, BERT)
    users, _ = made(core, ANNA, BERT)
    core.meanwhile = [lambda: users._swap(TAG, [Change(TAG, "carl@test", CARL)])]
    assert asyncio.run(users.audit()) == 0
    assert users.accounts[TAG].keys() == {"anna@test", "bert@test", "carl@test"}
    assert asyncio.run(users.audit()) == 0


def test_changes_that_are_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next audit compares all users, although the core has as many as it should."""
    core = FakeCore(ANNA, BERT)
    users, _ = made(core, ANNA, BERT)

    async def alter(operations: Iterable[Operation], in_flight: int) -> list[None]:
        for operation in operations:
            core.accounts = [ANNA] if operation.packed is None else [*core.accounts, operation.packed]
        raise asyncio.CancelledError

    monkeypatch.setattr(core, "alter", alter)
    for change in (REMOVAL, Change(TAG, "carl@test", CARL)):
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(users.apply([change]))
    assert users.accounts[TAG].keys() == {"anna@test", "bert@test"}
    assert asyncio.run(users.audit()) == 2
    assert users.accounts[TAG].keys() == {"anna@test", "carl@test"}


def test_connections_made_while_a_swap_failed() -> None:
    """A removed user who could still connect while the core did not answer is cut when the inbound is restored."""
    core = FakeCore(ANNA, BERT)
    users, connections = made(core, ANNA, BERT)
    core.failures = 1

    async def nothing() -> None:
        pass

    async def bert_comes() -> None:
        connections.where["bert@test"] = b"bert"

    core.meanwhile = [nothing, bert_comes]
    refused, left = asyncio.run(users._swap(TAG, [Change(TAG, "bert@test", None)]))
    assert not refused and not left
    assert users.accounts[TAG].keys() == {"anna@test"}
    assert connections.ended == {b"bert"}


def test_a_lost_inbound_is_returned_once() -> None:
    """Changes for a new run are returned once, whether the inbound is lost in this batch or was before."""
    core = FakeCore(ANNA, BERT)
    users, _, _ = several(core, {TAG: SS}, ANNA, BERT)
    core.failures = 2
    staying, coming = Change(TAG, "anna@test", ANNA), Change(TAG, "carl@test", CARL)
    assert asyncio.run(users.apply([REMOVAL, coming])) == ([], [staying, coming])
    assert asyncio.run(users.apply([staying, coming])) == ([], [staying, coming])


def test_a_lost_inbound_has_no_users() -> None:
    """If an inbound cannot be restored, removed users are cut all the same."""
    core = FakeCore(ANNA, BERT)
    users, connections = made(core, ANNA, BERT)
    core.failures = 2
    connections.where = {"anna@test": b"anna", "bert@test": b"bert"}
    _, left = asyncio.run(users._swap(TAG, [Change(TAG, "bert@test", None)]))
    assert left == [Change(TAG, "anna@test", ANNA)]
    assert connections.ended == {b"bert"}
    # Later removals there are done already, and other inbounds are changed as usual.
    assert asyncio.run(users.apply([Change(TAG, "anna@test", None)])) == ([], [])
    assert asyncio.run(users.apply([Change(TAG, "carl@test", CARL)])) == ([], [Change(TAG, "carl@test", CARL)])


def test_a_shared_inbound_loses_a_user_at_once() -> None:
    """With shared listeners no handshake overlaps a removal, and none is paused without need."""
    core = FakeCore(ANNA, BERT)
    users, connections, _ = several(core, {TAG: SS, OTHER: VLESS}, ANNA, BERT, shared=True)
    connections.where = {"bert@test": b"bert"}
    assert asyncio.run(users.apply([REMOVAL, Change(OTHER, "bert@test", None)])) == ([], [])
    assert set(core.removed) == {(TAG, "bert@test", True), (OTHER, "bert@test", False)}
    assert users.accounts == {TAG: {"anna@test": ANNA}, OTHER: {"anna@test": ANNA}}
    assert connections.ended == {b"bert"}


def test_another_credential_in_a_shared_inbound() -> None:
    """A user with a changed credential is removed like that, and added again."""
    core, changed = FakeCore(ANNA), pack("anna@test", "xray.proxy.vless.Account", b"new")
    users, _, _ = several(core, {TAG: SS}, ANNA, shared=True)
    assert asyncio.run(users.apply([Change(TAG, "anna@test", changed)])) == ([], [])
    assert core.removed == [(TAG, "anna@test", True)]
    assert users.accounts == {TAG: {"anna@test": changed}}


def test_handshakes_that_do_not_end() -> None:
    """A user who cannot be removed safely stays and is named, and does not delay users of other inbounds."""
    core = FakeCore(ANNA, BERT)
    users, _, handshakes = several(core, {TAG: SS, OTHER: VLESS}, ANNA, BERT, shared=True)
    handshakes.go_on = True
    refused, left = asyncio.run(users.apply([REMOVAL, Change(OTHER, "bert@test", None)]))
    assert refused == [Refusal("bert@test", "home: not removed: somebody goes on")]
    assert not left
    assert core.removed == [(OTHER, "bert@test", False)]
    assert users.accounts[TAG].keys() == {"anna@test", "bert@test"}


@pytest.mark.parametrize("protocol", [SS, VLESS])
def test_additions_wait_without_the_removals(protocol: str) -> None:
    """If additions need a new run, only they wait: removals and changed credentials apply at once."""
    core, changed = FakeCore(ANNA, BERT), pack("anna@test", "xray.proxy.vless.Account", b"new")
    users, connections, _ = several(core, {TAG: protocol, OTHER: VLESS}, ANNA, BERT, shared=True)
    connections.where = {"anna@test": b"anna", "bert@test": b"bert"}
    changes = [REMOVAL, Change(TAG, "anna@test", changed), *MANY]
    assert asyncio.run(users.apply(changes)) == ([], changes[1:])
    careful = protocol == SS
    assert set(core.removed) == {(TAG, "bert@test", careful), (TAG, "anna@test", careful)}
    assert users.accounts == {TAG: {}, OTHER: {"anna@test": ANNA, "bert@test": BERT}}
    assert connections.ended == {b"anna", b"bert"}


def test_a_removal_that_takes_a_new_run() -> None:
    """If handshakes cannot be paused the removal waits for a new run; those in other inbounds do not."""
    core = FakeCore(ANNA, BERT)
    users, _, _ = several(core, {TAG: SS, OTHER: VLESS}, ANNA, BERT, shared=True, pauses=False)
    changes = [REMOVAL, Change(OTHER, "bert@test", None)]
    assert asyncio.run(users.apply(changes)) == ([], [REMOVAL])
    assert core.removed == [(OTHER, "bert@test", False)]


@pytest.mark.parametrize("drains", [False, True])
def test_many_removals(drains: bool) -> None:
    """A draining run does any number of removals itself: no other run could."""
    crowd = [pack(f"{number}@test", "xray.proxy.vless.Account", b"") for number in range(3_000)]
    core = FakeCore(*crowd)
    users, _, _ = several(core, {TAG: SS}, *crowd, shared=True, drains=drains)
    changes = [Change(TAG, key, None) for key in users.accounts[TAG]]
    assert asyncio.run(users.apply(changes)) == ([], [] if drains else changes)
    assert len(core.removed) == (3_000 if drains else 0)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_connection_by_the_old_credential_in_the_last_moment(swapped: bool) -> None:
    """Old connections are listed between the removal and the addition, and those reported meanwhile are cut, too."""
    core, changed = FakeCore(ANNA), pack("anna@test", "xray.proxy.vless.Account", b"new")
    users, connections = made(core, ANNA)
    found: list[list[str]] = []

    async def credentials_change(changed: Iterable[tuple[str, str]]) -> None:
        found.append(core.calls.copy())
        connections.where = {key: b"old" for _, key in changed}

    connections.credentials_change = credentials_change  # type: ignore[method-assign]
    change = Change(TAG, "anna@test", changed)
    asyncio.run(users._swap(TAG, [change]) if swapped else users.apply([change]))
    assert found == [["remove"]] and core.calls == ["remove", "add"]
    assert connections.ended == {b"old"}


def test_connections_of_a_user_who_comes_back() -> None:
    """Those from before the removal may be reported only after it: they are distinguished before the addition."""
    core = FakeCore(ANNA)
    users, connections = made(core, ANNA)
    found: list[tuple[list[str], list[tuple[str, str]]]] = []

    async def credentials_change(changed: Iterable[tuple[str, str]]) -> None:
        found.append((core.calls.copy(), [*changed]))

    connections.credentials_change = credentials_change  # type: ignore[method-assign]
    asyncio.run(users.apply([Change(TAG, "anna@test", None)]))
    asyncio.run(users.apply([Change(TAG, "anna@test", ANNA), Change(TAG, "bert@test", BERT)]))
    assert found == [(["remove"], []), (["remove"], [(TAG, "anna@test")])]
