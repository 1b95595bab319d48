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
from drivers.xray.users import Users
from node.contract.abilities import NotShared
from node.contract.accounts import Accounts, Change
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
        # Users removed by calls.
        self.removed: list[tuple[str, str]] = []
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

    async def alter(self, operations: Iterable[Operation]) -> list[None]:
        some = list(operations)
        self.calls += ["remove" if each.packed is None else "add" for each in some]
        self.removed += [(each.tag, each.email) for each in some if each.packed is None]
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
        self.crowded: set[str] = set()

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

    async def end_crowded(self, tags: Iterable[str]) -> None:
        self.crowded |= {*tags}


class Listeners:
    """The listeners of a run: whether they can be renewed, and whether it drains."""

    def __init__(self, renewable: bool, drains: bool) -> None:
        self.renewable, self.drains, self.shared = renewable, drains, drains
        self.faults: list[Exception] = []

    @asynccontextmanager
    async def renewing(self, _: Ports) -> AsyncIterator[None]:
        yield
        if self.faults:
            raise self.faults.pop()


def made(core: FakeCore, *accounts: bytes) -> tuple[Users, FakeConnections]:
    users, connections, _ = several(core, {TAG: "vless"}, *accounts)
    return users, connections


def several(
    core: FakeCore, protocols: Mapping[str, str], *accounts: bytes, renewable: bool = True, drains: bool = False
) -> tuple[Users, FakeConnections, Listeners]:
    """The same accounts in all inbounds."""
    base = xray_pb2.Config(inbound=[xray_pb2.InboundHandlerConfig(tag=tag) for tag in protocols])
    inbounds = {tag: Inbound(tag, protocol) for tag, protocol in protocols.items()}
    plan: Any = SimpleNamespace(base=base, inbounds=inbounds, handler=lambda _, accounts, __: accounts)
    host: Any = SimpleNamespace(reactor=None)
    connections: Any = FakeConnections()
    api: Any = core
    run: Any = Listeners(renewable, drains)
    have = {tag: {xray_pb2.User.FromString(account).email: account for account in accounts} for tag in protocols}
    return Users(host, plan, api, connections, have, run), connections, run


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

    async def alter(operations: Iterable[Operation]) -> list[None]:
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


def test_a_removal_by_a_swap() -> None:
    """Shadowsocks-2022 users are removed by a swap of their inbound, those of others by a call."""
    core = FakeCore(ANNA, BERT)
    users, connections, _ = several(core, {TAG: SS, OTHER: VLESS}, ANNA, BERT)
    connections.where = {"bert@test": b"bert"}
    assert asyncio.run(users.apply([REMOVAL, Change(OTHER, "bert@test", None)])) == ([], [])
    assert core.removed == [(OTHER, "bert@test")]
    assert core.accounts == [ANNA]
    assert users.accounts == {TAG: {"anna@test": ANNA}, OTHER: {"anna@test": ANNA}}
    assert connections.ended == {b"bert"}


def test_a_swap_whose_listener_gets_no_connections() -> None:
    """It is done again; if that fails, too, a new run brings the users."""
    core = FakeCore(ANNA, BERT)
    users, connections, run = several(core, {TAG: SS}, ANNA, BERT)
    connections.where = {"bert@test": b"bert"}
    run.faults = [NotShared("another process also listens")]
    assert asyncio.run(users.apply([REMOVAL])) == ([], [])
    assert (core.calls, users.accounts) == (["remove", "add"] * 2, {TAG: {"anna@test": ANNA}})
    run.faults = [NotShared("another process also listens")] * 2
    assert asyncio.run(users.apply([Change(TAG, "carl@test", None), *[Change(TAG, "anna@test", None)]])) == ([], [])
    assert users.accounts == {TAG: {}} and connections.ended == {b"bert"}


def test_kept_out_of_a_draining_run() -> None:
    """A draining run gets no call for Shadowsocks-2022: removed users are cut, and no user again when audited."""
    core = FakeCore(ANNA, BERT)
    users, connections, run = several(core, {TAG: SS}, ANNA, BERT, drains=True)
    connections.where = {"bert@test": b"bert"}
    assert asyncio.run(users.apply([REMOVAL])) == ([], [])
    assert (core.calls, users.accounts) == ([], {TAG: {"anna@test": ANNA}})
    assert (connections.ended, connections.left, connections.crowded) == ({b"bert"}, {(TAG, "bert@test")}, {TAG})
    assert not users.is_in((TAG, "bert@test"))
    users._doubt(TAG)
    assert asyncio.run(users.audit()) == 0
    assert users.accounts == {TAG: {"anna@test": ANNA}}
    run.drains = False
    asyncio.run(users.put_out())
    assert (core.accounts, users.kept_out) == ([ANNA], {})
    assert asyncio.run(users.audit()) == 0


def test_a_draining_run_that_keeps_removed_users() -> None:
    """It must not lead again."""
    core = FakeCore(ANNA, BERT)
    users, _, _ = several(core, {TAG: SS}, ANNA, BERT, drains=True)
    asyncio.run(users.apply([REMOVAL]))
    core.failures = 1
    with pytest.raises(NotShared, match="still has removed users: Deadline Exceeded"):
        asyncio.run(users.put_out())
    assert users.kept_out == {TAG: {"bert@test": BERT}}
    users.readmit()
    assert users.accounts[TAG].keys() == {"anna@test", "bert@test"} and not users.kept_out


def test_a_draining_run_while_another_core_starts() -> None:
    """The order of listeners must not change then."""
    core = FakeCore(ANNA, BERT)
    users, _, run = several(core, {TAG: SS}, ANNA, BERT, drains=True)
    asyncio.run(users.apply([REMOVAL]))
    run.renewable = False
    with pytest.raises(NotShared, match="cannot be swapped now"):
        asyncio.run(users.put_out())
    assert core.calls == []


def test_kept_out_before_connections_are_cut() -> None:
    """A connection that the core reports while others are cut is one of a removed user."""
    users, connections, _ = several(FakeCore(ANNA, BERT), {TAG: SS}, ANNA, BERT, drains=True)
    known: list[bool] = []

    async def end(_: Mapping[str, object]) -> None:
        known.append(users.is_in((TAG, "bert@test")))

    connections.end = end  # type: ignore[assignment, method-assign]
    asyncio.run(users.apply([REMOVAL]))
    assert known and not any(known)


def test_additions_wait_without_the_removals() -> None:
    """If additions need a new run, only they wait: removals and changed credentials apply at once."""
    core, changed = FakeCore(ANNA, BERT), pack("anna@test", "xray.proxy.vless.Account", b"new")
    users, connections, _ = several(core, {TAG: VLESS, OTHER: VLESS}, ANNA, BERT, renewable=False)
    connections.where = {"anna@test": b"anna", "bert@test": b"bert"}
    changes = [REMOVAL, Change(TAG, "anna@test", changed), *MANY]
    assert asyncio.run(users.apply(changes)) == ([], changes[1:])
    assert set(core.removed) == {(TAG, "bert@test"), (TAG, "anna@test")}
    assert users.accounts == {TAG: {}, OTHER: {"anna@test": ANNA, "bert@test": BERT}}
    assert connections.ended == {b"anna", b"bert"}


def test_a_removal_that_takes_a_new_run() -> None:
    """If the inbound cannot be swapped the removal waits for a new run; those in other inbounds do not."""
    core = FakeCore(ANNA, BERT)
    users, _, _ = several(core, {TAG: SS, OTHER: VLESS}, ANNA, BERT, renewable=False)
    changes = [REMOVAL, Change(OTHER, "bert@test", None)]
    assert asyncio.run(users.apply(changes)) == ([], [REMOVAL])
    assert core.removed == [(OTHER, "bert@test")]


@pytest.mark.parametrize(("protocol", "calls"), [(SS, 0), (VLESS, 3_000), ("vmess", 3_000)])
def test_many_removals_from_a_draining_run(protocol: str, calls: int) -> None:
    """It makes calls only where they are safe and fast; all users are out."""
    crowd = [pack(f"{number}@test", "xray.proxy.vless.Account", b"") for number in range(3_000)]
    core = FakeCore(*crowd)
    users, _, _ = several(core, {TAG: protocol}, *crowd, drains=True)
    assert asyncio.run(users.apply([Change(TAG, key, None) for key in users.accounts[TAG]])) == ([], [])
    assert (len(core.removed), users.accounts) == (calls, {TAG: {}})


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
