"""The users of a run of Xray while something else happens: a look at its list during a swap, a swap that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

from drivers.channel import ApiFailed
from drivers.sockets.connections import Endpoint, Ports
from drivers.xray.accounts import Inbound, pack
from drivers.xray.users import Users
from node.contract.accounts import Accounts, Change
from protos import xray_pb2

TAG = "home"
ANNA, BERT, CARL = (pack(f"{name}@test", "xray.proxy.vless.Account", b"") for name in ("anna", "bert", "carl"))


class FakeCore:
    """Has these accounts, and does the next of `meanwhile` before it answers."""

    def __init__(self, *accounts: bytes) -> None:
        self.accounts = list(accounts)
        self.failures = 0
        self.meanwhile: list[Callable[[], Coroutine[Any, Any, object]]] = []

    async def _do(self) -> None:
        if self.meanwhile:
            await self.meanwhile.pop(0)()

    async def count_users(self, tag: str) -> int:
        await self._do()
        return len(self.accounts)

    async def list_users(self, tag: str) -> list[xray_pb2.User]:
        return [xray_pb2.User.FromString(account) for account in self.accounts]

    async def replace_inbound(self, accounts: Accounts) -> None:
        await self._do()
        if self.failures:
            self.failures -= 1
            raise ApiFailed("Deadline Exceeded")
        self.accounts = list(accounts.values())


class FakeConnections:
    """Users are connected from places that are named like them."""

    def __init__(self) -> None:
        self.where: dict[str, Endpoint] = {}
        self.ended: set[Endpoint] = set()

    def of(self, pairs: Any) -> dict[Endpoint, Ports]:
        return {self.where[key]: () for _, key in pairs if key in self.where}

    async def suspect(self, changed: Any) -> None:
        pass

    def put_out(self, pairs: Any) -> None:
        pass

    async def end(self, wanted: Mapping[Endpoint, Ports]) -> None:
        self.ended |= wanted.keys()


def made(core: FakeCore, *accounts: bytes) -> tuple[Users, FakeConnections]:
    base = xray_pb2.Config(inbound=[xray_pb2.InboundHandlerConfig(tag=TAG)])
    plan: Any = SimpleNamespace(base=base, inbounds={TAG: Inbound(TAG, "vless")}, handler=lambda _, accounts: accounts)
    host: Any = SimpleNamespace(reactor=None)
    connections: Any = FakeConnections()
    api: Any = core
    listeners: Any = SimpleNamespace(shared=False, drains=False)
    have = {xray_pb2.User.FromString(account).email: account for account in accounts}
    return Users(host, plan, api, connections, {TAG: have}, listeners), connections


def test_a_look_during_a_swap() -> None:
    """What the core said while everybody was replaced is not compared with who was there before."""
    core = FakeCore(ANNA, BERT)
    users, _ = made(core, ANNA, BERT)
    core.meanwhile = [lambda: users._swap(TAG, [Change(TAG, "carl@test", CARL)])]
    assert asyncio.run(users.audit()) == 0
    assert users.accounts[TAG].keys() == {"anna@test", "bert@test", "carl@test"}
    assert asyncio.run(users.audit()) == 0


def test_who_came_in_while_a_swap_failed() -> None:
    """A removed user who could still connect while the core did not answer is out when the inbound is back."""
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
