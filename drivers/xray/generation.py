"""One run of Xray: its process, its API, and the users that it confirmed."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from drivers.api import ApiFailed
from drivers.interface import Exit, Host
from drivers.process import CoreProcess
from drivers.xray.accounts import email_of
from drivers.xray.api import MAX_REQUEST, Api, Operation
from drivers.xray.config import Endpoint, Plan
from drivers.xray.connections import Connections
from drivers.xray.doors import entrances
from drivers.xray.executable import Files
from drivers.xray.selectors import OURS
from drivers.xray.suspects import Pair
from node.errors import CoreFailed, Unsupported
from node.ledger import DIRECTIONS, Reading, Scope, counter_name
from node.users import Accounts, Change, Refusal, apply, key_of
from protos.service_pb2 import BackendStatsResponse
from protos.xray_pb2 import OutboundHandlerConfig


class XrayGeneration:
    """Satisfies `drivers.interface.Generation`."""

    log = Logger()

    def __init__(
        self,
        host: Host,
        plan: Plan,
        process: CoreProcess,
        api: Api,
        endpoint: Endpoint,
        connections: Connections,
        started: dict[str, Accounts],
        files: Files,
    ) -> None:
        self._host = host
        self._plan = plan
        self._process = process
        self._api = api
        self._own = own_counters(endpoint, plan.base.outbound)
        self.accounts = started
        self._files = files
        self._connections = connections
        # Who is being let in: the core may have him before we hear of it.
        self._entering: set[Pair] = set()
        connections.begin(process.pid, self._is_in)
        process.when_exited().addCallback(lambda _: connections.stop())

    @property
    def alive(self) -> bool:
        return self._process.exit is None

    @property
    def uncounted(self) -> frozenset[Scope]:
        return self._plan.uncounted

    @property
    def warnings(self) -> Sequence[str]:
        return [f"{path} changed on disk; it is used when the core starts next" for path in self._files.changed()]

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def when_exited(self) -> Deferred[Exit]:
        return self._process.when_exited()

    async def counters(self) -> Reading:
        try:
            counters = await self._host.aio.run(self._api.counters())
        except ApiFailed as fault:
            raise CoreFailed(f"the core did not give its counters: {fault}") from fault
        for name in self._own:
            counters.pop(name, None)
        return counters

    async def online(self, key: str) -> Mapping[str, int]:
        with _asking_who_is_online():
            for email in self._spellings(key):
                return await self._host.aio.run(self._api.online_ips(email))
        return {}

    async def online_count(self, key: str) -> int:
        with _asking_who_is_online():
            for email in self._spellings(key):
                return await self._host.aio.run(self._api.online_count(email))
        return 0

    async def backend_stats(self) -> BackendStatsResponse:
        try:
            figures = await self._host.aio.run(self._api.sys_stats())
        except ApiFailed as fault:
            # Deployed controllers know how this text begins, and leave a node that says it alone.
            raise CoreFailed(f"failed to get sys stats: {fault}") from fault
        return BackendStatsResponse.FromString(figures.SerializeToString())

    async def answers(self, seconds: float) -> bool:
        return await self._host.aio.run(self._api.ready(seconds))

    def free(self, changes: Sequence[Change]) -> list[Change]:
        return list(changes)

    async def audit(self) -> int:
        try:
            return sum([await self._audit(tag, accounts) for tag, accounts in self.accounts.items()])
        except ApiFailed as fault:
            raise CoreFailed(f"the core did not list its users: {fault}") from fault

    async def _audit(self, tag: str, accounts: Accounts) -> int:
        """Count first, and list only where the count differs."""
        before = dict(accounts)
        if await self._host.aio.run(self._api.count_users(tag)) == len(accounts):
            return 0
        real = {key_of(user.email): user for user in await self._host.aio.run(self._api.list_users(tag))}
        if accounts != before:
            return 0  # users changed meanwhile: the next look tells
        missing = accounts.keys() - real.keys()
        for key in missing:
            del accounts[key]
        strangers = real.keys() - accounts.keys()
        for key in strangers:
            accounts[key] = real[key].SerializeToString()
        return len(missing) + len(strangers)

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)

    async def apply(self, changes: Sequence[Change]) -> list[Refusal]:
        """All removals, then all additions; inbounds that cannot do so live are swapped whole.

        Connections that came by an account which is removed or replaced are ended.
        """
        swapped = {change.tag for change in changes if self._needs_swap(change)}
        live = [change for change in changes if change.tag not in swapped]
        leaving = [change for change in live if self._has(change)]
        refused = await self._alter([self._removal(change) for change in leaving])
        # Who could not be removed is still there with the old account.
        gone = [change for change in leaving if not self._has(change)]
        wanted = self._connections.of(map(pair_of, gone))
        await self._connections.suspect(pair_of(change) for change in gone if change.packed is not None)
        adds = [change for change in live if not self._has(change)]
        with self._letting_in(adds):
            refused += await self._alter(
                [Operation(tag, email_of(packed), packed) for tag, _, packed in adds if packed is not None]
            )
        # Looking through the core's sockets takes some milliseconds, for which nobody who is added has to wait.
        await self._connections.end(wanted)
        for tag in sorted(swapped):
            refused += await self._swap(tag, [change for change in changes if change.tag == tag])
        return refused

    async def wind_down(self) -> None:
        for handler in self._plan.base.inbound:
            try:
                await self._host.aio.run(self._api.remove_inbound(handler.tag))
            except ApiFailed as fault:
                self.log.warn("inbound {tag!r} goes on accepting: {fault}", tag=handler.tag, fault=fault)
        await self._connections.hang_up(entrances(self._plan.base.inbound))

    async def stop(self) -> None:
        self._connections.stop()
        await self._process.stop()
        await self._host.aio.run(self._api.close())

    def _spellings(self, key: str) -> list[str]:
        found = (accounts[key] for accounts in self.accounts.values() if key in accounts)
        return list(dict.fromkeys(map(email_of, found)))

    def _is_in(self, pair: Pair) -> bool:
        """Whether the core lets this user in by this inbound, or by any where the tag is not known."""
        tag, key = pair
        tags = (tag,) if tag else tuple(self.accounts)
        return any(key in self.accounts[tag] or (tag, key) in self._entering for tag in tags)

    @contextmanager
    def _letting_in(self, changes: Iterable[Change]) -> Iterator[None]:
        self._entering = {pair_of(change) for change in changes if change.packed is not None}
        try:
            yield
        finally:
            self._entering = set()

    def _has(self, change: Change) -> bool:
        return change.key in self.accounts[change.tag]

    def _needs_swap(self, change: Change) -> bool:
        """Shadowsocks-2022 can panic, or bill the wrong user, when one is removed while another shakes hands."""
        return self._plan.inbounds[change.tag].protocol == "shadowsocks_2022" and self._has(change)

    def _removal(self, change: Change) -> Operation:
        return Operation(change.tag, email_of(self.accounts[change.tag][change.key]), None)

    async def _alter(self, operations: list[Operation]) -> list[Refusal]:
        """Run these and record what the core confirmed."""
        if not operations:
            return []
        results = await self._host.aio.run(self._api.alter(operations))
        refused = []
        for operation, fault in zip(operations, results, strict=True):
            accounts = self.accounts[operation.tag]
            if fault is not None:
                refused.append(Refusal(operation.email, f"{operation.tag}: {fault}"))
            elif operation.packed is None:
                accounts.pop(key_of(operation.email), None)
            else:
                accounts[key_of(operation.email)] = operation.packed
        return refused

    async def _swap(self, tag: str, changes: list[Change]) -> list[Refusal]:
        """Take the inbound out and put it back with the users as they shall be; live connections go on."""
        before = self.accounts[tag]
        after = apply(changes, {tag: before})[tag]
        handler = self._plan.handler(tag, after)
        if handler.ByteSize() > MAX_REQUEST:
            return self._refuse(changes, f"{tag}: the inbound has too many users to be changed while the core runs")
        gone = [change for change in changes if self._has(change)]
        # Before, since afterwards connections by a new credential could be among them.
        wanted = self._connections.of(map(pair_of, gone))
        await self._connections.suspect(pair_of(change) for change in gone if change.packed is not None)
        try:
            with self._letting_in(changes):
                await self._host.aio.run(self._api.replace_inbound(handler))
        except ApiFailed as fault:
            await self._put_back(tag, before)
            return self._refuse(changes, f"{tag}: {fault}")
        self.accounts[tag] = after
        wanted |= self._connections.of(pair_of(change) for change in gone if change.packed is None)
        await self._connections.end(wanted)
        return []

    async def _put_back(self, tag: str, accounts: Accounts) -> None:
        try:
            await self._host.aio.run(self._api.replace_inbound(self._plan.handler(tag, accounts)))
        except ApiFailed as fault:
            self.log.error("inbound {tag} could not be put back after a failed change: {fault}", tag=tag, fault=fault)

    def _refuse(self, changes: list[Change], reason: str) -> list[Refusal]:
        names = [self.accounts[tag].get(key) or packed for tag, key, packed in changes]
        return [Refusal(email_of(name), reason) for name in names if name is not None]


@contextmanager
def _asking_who_is_online() -> Iterator[None]:
    try:
        yield
    except ApiFailed as fault:
        if fault.unsupported:
            raise Unsupported(
                "this core does not tell where users are connected from: Xray does from 25.3.6 on"
            ) from fault
        raise CoreFailed(f"the core did not say who is online: {fault}") from fault


def pair_of(change: Change) -> Pair:
    return change.tag, change.key


def own_counters(endpoint: Endpoint, outbounds: Iterable[OutboundHandlerConfig] = ()) -> tuple[str, ...]:
    """The counters of the node's own inbound and outbound, which are nobody's traffic, and of those that it named."""
    ours = [(Scope.INBOUND, endpoint.inbound), (Scope.OUTBOUND, endpoint.outbound)]
    ours += [(Scope.OUTBOUND, outbound.tag) for outbound in outbounds if outbound.tag.startswith(OURS)]
    return tuple(counter_name(scope, name, direction) for scope, name in ours for direction in DIRECTIONS)
