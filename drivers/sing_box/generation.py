"""One sing-box process: its APIs, the users in it, and how they change while it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from twisted.internet.defer import ensureDeferred

from drivers.process.channel import COUNTERS, LATENCY, ONLINE, USERS, ApiFailed, asking
from drivers.process.generation import CoreGeneration, Started
from drivers.process.kept import left
from drivers.sing_box.accounts import (
    alike,
    label,
    login_of,
    logs_in_otherwise,
    name_of,
    named,
    unknown_entry,
    unlabelled,
)
from drivers.sing_box.api import Api
from drivers.sing_box.config import ApiAddress, Plan
from drivers.sing_box.connections import Connections
from drivers.sing_box.ssm_api import LiveUsers
from drivers.sing_box.table import Pair
from drivers.sing_box.tally import LACKING, reading, spellings
from drivers.sockets.connections import deafen, run_dry
from drivers.sockets.pacing import Paced
from drivers.sockets.pidfd import Unreachable
from node.base.errors import CoreFailed, Unsupported
from node.base.pool import in_pool
from node.contract.accounts import Accounts, Change, Refusal, apply, key_of
from node.contract.counters import DIRECTIONS, Reading, Scope, Seen, counter_name
from node.contract.driver import Applied, Exit
from protos.handover_pb2 import Accounts as Packed
from protos.handover_pb2 import Label, SingBoxRun
from protos.service_pb2 import Latency
from protos.sing_box_pb2 import Group

# Seconds for which connections may end before they are closed: bytes of a write that is cut are not counted.
DRY = 0.5
# The cost of one live change, in seconds for each user of the inbound, and the most that a batch may cost: with more
# changes a new core is faster.
LIVE_COST = 6e-6
LIVE_SECONDS = 5.0
# Seconds that a batch of live changes may take in all: the controller waits for it.
LIVE_PATIENCE = 7.0
URL_TEST = "urltest"
NOT_MEASURED = (
    f"the configuration measures no outbound: add an outbound of the type `{URL_TEST}` whose `outbounds` names others"
)


class SingBoxGeneration(CoreGeneration[Api]):
    """Satisfies `Generation` and `Shares`, and of the abilities `CountsSome`, `ListsOnline`, `MeasuresLatency`,
    `NamesTransports`, `Paces` and `SeesRequests`.
    """

    _api: Api
    _connections: Connections
    uncounted: frozenset[Scope] = frozenset()
    mixed: Mapping[str, str] = {}

    def __init__(self, started: Started[Api], plan: Plan, endpoint: ApiAddress, users: Mapping[str, Accounts]) -> None:
        reactor, process = started.host.reactor, started.process
        self.plan = plan
        self._endpoint = endpoint
        self._live = LiveUsers(reactor, endpoint, plan.live) if plan.live else None
        self._live_tags = frozenset(plan.live)
        # Whether v2ray_api does not count the users of the configuration; and the labels of live users unknown to it.
        self.counts_in_node = endpoint.stats_port is None
        self._unknown_to_v2ray: set[str] = set()
        self.lingering = False
        self._own_names = frozenset(plan.own_names)
        # Whether several counters may be of one name, so that none may be missing.
        names = "".join([*plan.own_names, *plan.zero_counters])
        self._adds_up = bool(plan.live) or unlabelled(names) != names
        # The most bytes that the counters have lacked so far.
        self._lacking = 0
        # The labels of live users whose e-mails are spelled differently by now.
        self._labels: dict[Pair, str] = {}
        # Batches of changes that are done, and those under way: a list that the core makes meanwhile proves nothing.
        self._batches = self._under_way = 0
        # The users of its configuration, and those who may connect now.
        self._configured = users
        # They do not change, and may be many: packed once.
        self._packed = b""
        self.accounts: dict[str, Accounts] = {tag: dict(accounts) for tag, accounts in users.items()}
        connections = Connections(reactor, started.api, plan, process, self.accounts)
        paced = Paced(reactor, connections, plan.tcp_ports, plan.shared)
        super().__init__(started, plan, connections, paced)
        self.unseen, self.may_carry, self.requests = connections.unseen, connections.may_carry, connections.requests
        self.forwarded = connections.forwarded
        # However the process ends: close the APIs, as another process may get their ports.
        process.when_exited().addCallback(self._ended)

    @property
    def cut(self) -> int:
        return self._api.cut

    @property
    def transports(self) -> Collection[str]:
        return self.plan.transports

    @property
    def warnings(self) -> Sequence[str]:
        return [*self._lost, *self._files.warnings]

    @property
    def _lost(self) -> list[str]:
        return [LACKING.format(self._lacking)] if self._lacking else []

    async def counters(self, seen: Seen | None = None) -> Reading:
        seen = None if self._adds_up else seen
        some = seen is not None and bool(seen.rows)
        with asking(COUNTERS):
            counted, lacking = await self._api.counters(seen)
            live = await self._live_counters()
        self._lacking = max(self._lacking, lacking)
        return reading({} if some else self.plan.zero_counters, counted, live, self._aliases)

    async def _some_counters(self, scopes: Collection[Scope], names: Collection[tuple[Scope, str]]) -> Reading:
        if scopes:
            return await self.counters()  # it has no cheaper call for these
        wanted = {counter_name(*each, way) for each in names for way in DIRECTIONS}
        zeros = {name: 0 for name in self.plan.zero_counters if name in wanted}
        counted = await self._api.some_counters(wanted)
        apart = {name for scope, name in names if scope is Scope.USER and self._is_apart(name)}
        live = await self._live.some_counters(apart) if self._live is not None and apart else {}
        return reading(zeros, counted, live, self._aliases)

    def _counted_as(self, scope: Scope, name: str) -> set[str]:
        if scope is not Scope.USER:
            return {name} if counter_name(scope, name, DIRECTIONS[0]) in self.plan.zero_counters else set()
        key = key_of(name)
        labels = [self._labels[tag, key] for tag in self._live_tags if (tag, key) in self._labels]
        runs = (*self._configured.values(), *self.accounts.values())
        return spellings(key, runs, {*self._own_names, *labels}, self._aliases)

    async def _live_counters(self) -> Mapping[str, tuple[int, int]]:
        """Return the bytes, up and down, of live users whom v2ray_api does not count.

        After the core has ended, these are its last known sums: a counter that goes down would be booked again.
        """
        if self._live is None or not (self.counts_in_node or self._unknown_to_v2ray):
            return {}
        counted = await self._live.counters() if self.alive else self._live.last_known
        return {user: sums for user, sums in counted.items() if self._is_apart(user)}

    def _is_apart(self, user: str) -> bool:
        """Whether only ssm-api counts this live user."""
        return self.counts_in_node or user in self._unknown_to_v2ray

    async def online(self, key: str) -> Mapping[str, int]:
        with asking(ONLINE):
            return (await self._api.online()).get(key, {})

    @property
    def unlisted(self) -> Mapping[str, str]:
        return self.unseen

    async def online_keys(self) -> Collection[str]:
        with asking(ONLINE):
            return (await self._api.online()).keys()

    async def latency(self) -> Sequence[Latency]:
        if all(outbound.get("type") != URL_TEST for outbound in self.plan.tree.get("outbounds", [])):
            raise Unsupported(NOT_MEASURED)
        with asking(LATENCY):
            return latencies(await self._api.groups())

    async def audit(self) -> int:
        """Audit live users only: the other users are in the configuration, which the core does not change."""
        if self._live is None:
            return 0
        with asking(USERS):
            return sum([await self._audit(tag, self._live) for tag in self.plan.live])

    async def _audit(self, tag: str, live: LiveUsers) -> int:
        before, batches = dict(self.accounts[tag]), self._batches
        real = {unknown_entry(user, password) for user, password in (await live.listed(tag)).items()}
        if self._under_way or self._batches != batches:
            return 0  # users changed meanwhile: left to the next audit
        known = {key: unknown_entry(*self._login(tag, key, packed)) for key, packed in before.items()}
        lost = [key for key, packed in known.items() if packed not in real]
        strangers = {key_of(name_of(packed)): packed for packed in real.difference(known.values())}
        for key in lost:
            del self.accounts[tag][key]
        for key, packed in strangers.items():
            self.accounts[tag][key] = packed
            self._labels.pop((tag, key), None)
        return len(strangers.keys() | lost)

    async def apply(self, changes: Sequence[Change]) -> Applied:
        free = self._free(changes)
        self._under_way += 1
        try:
            refused = await self._admit(free)
        finally:
            self._under_way -= 1
            self._batches += 1
        admitted = set(free)
        return Applied(refused, [change for change in changes if change not in admitted])

    def _free(self, changes: Sequence[Change]) -> list[Change]:
        """Return the changes that need no new core: most removals, users of its configuration, and live users."""
        live = [change for change in changes if change.tag in self._live_tags and change.packed is not None]
        dear = self._cost([change for change in live if not self._is_respelled(change)]) > LIVE_SECONDS
        return [change for change in changes if self._is_free(change, dear)]

    def _is_free(self, change: Change, dear: bool) -> bool:
        if change.packed is None:
            # Connections of unseen users can only be closed together with all others.
            return change.tag not in self.unseen
        if self._is_respelled(change):
            return True
        if change.tag in self._live_tags:
            return not dear
        return alike(change.packed, self._configured[change.tag].get(change.key))

    def _is_respelled(self, change: Change) -> bool:
        """Whether the user is in with this credential, and only the spelling of their e-mail changes."""
        return change.packed is not None and alike(change.packed, self.accounts[change.tag].get(change.key))

    def _cost(self, live: Sequence[Change]) -> float:
        """Estimate the seconds that the core works on these changes."""
        return LIVE_COST * sum(len(self.accounts[change.tag]) for change in live)

    async def _admit(self, changes: Sequence[Change]) -> list[Refusal]:
        """Apply changes that need no new core. Returns the refused users."""
        respelled = set(filter(self._is_respelled, changes))
        self._respell(respelled)
        coming = [change for change in changes if change.packed is not None and change not in respelled]
        replaced = [change for change in coming if change.key in self.accounts[change.tag]]
        gone = [change for change in changes if change.packed is None] + replaced
        left = {(change.tag, change.key): self.accounts[change.tag].get(change.key) for change in gone}
        self.accounts.update(apply([Change(tag, key, None) for tag, key in left], self.accounts))
        until = self._host.reactor.seconds() + LIVE_PATIENCE
        self.lingering |= any(packed and tag not in self._live_tags for (tag, _), packed in left.items())
        try:
            if left:
                await self._bar(left)
            await self._shut_out(left, coming, until)
            refused = await self._let_in(coming, until)
            try:
                if replaced:
                    # Connections that began meanwhile with the old credential.
                    await self._bar([(change.tag, change.key) for change in replaced])
            finally:
                # Their accounts are in force by now: no later change would lift the bar.
                admitted = [pair for change in coming if (pair := (change.tag, change.key)) not in refused]
                self._api.admit(admitted)
        except ApiFailed as error:
            raise CoreFailed(f"the core did not close the connections of removed users: {error}") from error
        return list(refused.values())

    async def _bar(self, pairs: Collection[Pair]) -> None:
        """Close the connections of these users, cut the sessions that carry them, and close every new one."""
        self._api.bar(pairs)
        await self._api.answering(self._end(pairs))

    async def _end(self, pairs: Collection[Pair]) -> None:
        places = await self._connections.sessions(pairs)
        await self._api.sweep()
        await self._connections.end_sessions(places | await self._connections.sessions(pairs))

    def _respell(self, changes: Iterable[Change]) -> None:
        """Accept a new spelling of e-mails: the core keeps the old one until it is replaced, also as login name."""
        for tag, key, packed in changes:
            assert packed is not None
            self.lingering |= logs_in_otherwise(packed, self.accounts[tag][key])
            if tag in self._live_tags:
                self._labels[tag, key] = self._login(tag, key, self.accounts[tag][key])[0]
            self.accounts[tag][key] = packed

    def _login(self, tag: str, key: str, packed: bytes) -> tuple[str, str]:
        """Return the label that the core has for a live user, and the password."""
        user, password = login_of(named(packed, self._aliases.end(tag)))
        return self._labels.get((tag, key), user), password

    async def _shut_out(self, left: Mapping[Pair, bytes | None], coming: Sequence[Change], until: float) -> None:
        """Remove the credentials of live users from the core. Where that fails or is too slow, only the bar holds."""
        live = [Change(tag, key, packed) for (tag, key), packed in left.items() if packed and tag in self._live_tags]
        dear = self._cost([*live, *(change for change in coming if change.tag in self._live_tags)]) > LIVE_SECONDS
        self.lingering |= dear and bool(live)
        if self._live is None or dear:
            return
        for change in live:
            user, _ = self._login(change.tag, change.key, change.packed or b"")
            try:
                await self._live.shut_out(change.tag, user, until - self._host.reactor.seconds())
            except ApiFailed as error:
                self.lingering = True
                self.log.warn(
                    "a removed user's credential stays in this core; the node closes their connections: {fault}",
                    fault=error,
                )

    async def _let_in(self, coming: Sequence[Change], until: float) -> dict[Pair, Refusal]:
        refused = {}
        for tag, key, packed in coming:
            assert packed is not None
            if self._live is not None and tag in self._live_tags:
                user, password = self._login(tag, key, packed)
                self._note(user, key)
                try:
                    await self._live.let_in(tag, user, password, until - self._host.reactor.seconds())
                except ApiFailed as error:
                    refused[tag, key] = Refusal(name_of(packed), f"{tag}: {error}")
                    continue
            self.accounts[tag][key] = packed
        return refused

    def _note(self, user: str, key: str) -> None:
        """Remember users whom v2ray_api does not count: it counts only names that the core had at its start."""
        started = ((tag, accounts[key]) for tag, accounts in self._configured.items() if key in accounts)
        spelled = ((tag, name_of(packed) + self._aliases.end(tag)) for tag, packed in started)
        names = {label(name) if tag in self._live_tags else name for tag, name in spelled}
        if user not in names and user not in self._own_names:
            self._unknown_to_v2ray.add(user)

    def packed(self, exact: bool) -> bytes:
        """Without `exact` the core will list its live users."""
        run = SingBoxRun(
            process=left(self._process),
            port=self._endpoint.port,
            secret=self._endpoint.secret,
            stats_port=self._endpoint.stats_port,
            users_port=self._endpoint.users_port,
            accounts={tag: Packed(by_key=some) for tag, some in self.accounts.items()} if exact else {},
            files=self._files.packed,
            nobody=self._live.random_key if self._live else "",
            untold=self._unknown_to_v2ray,
            labels=(Label(tag=tag, key=key, name=name) for (tag, key), name in self._labels.items()),
            lingering=self.lingering,
            lacking=self._lacking,
            aliased=self._aliases.tags,
        )
        self._api.leave(run)
        if not self._packed:
            configured = {tag: Packed(by_key=some) for tag, some in self._configured.items()}
            self._packed = SingBoxRun(configured=configured).SerializeToString()
        return run.SerializeToString() + self._packed

    def go_on(self, run: SingBoxRun, exact: bool) -> None:
        """Restore the state that a previous node process left for this core."""
        # Changed in place: other objects hold references to these.
        for tag, accounts in self.accounts.items() if exact else ():
            accounts.clear()
            accounts |= run.accounts[tag].by_key
        self._unknown_to_v2ray = set(run.untold)
        self._labels = {(label.tag, label.key): label.name for label in run.labels}
        self.lingering, self._lacking = run.lingering, run.lacking
        if self._live is not None:
            self._live.go_on(run.nobody)

    async def take_stock(self) -> None:
        """Set the `accounts` of live users to what the core lists. Raises `CoreFailed`."""
        await self.audit()
        for tag in self._live_tags:
            for key, packed in self.accounts[tag].items():
                self._note(self._login(tag, key, packed)[0], key)

    async def wind_down(self) -> None:
        try:
            # Its number, as the process may exit meanwhile.
            if not await self.quieten():
                await in_pool(self._host.reactor, deafen, self._number, self.plan.ports)
            if self.alive:
                await in_pool(self._host.reactor, run_dry, self._number, self._api.ports)
        except Unreachable as error:
            self.log.warn(
                "a core that stops still accepts connections; their last bytes may not be counted: {fault}", fault=error
            )
        try:
            await self._api.until_idle(DRY)
            await self._api.end_all()
        except ApiFailed as error:
            self.log.warn(
                "a core that stops did not close its connections first; their last bytes may not be counted: {fault}",
                fault=error,
            )

    def _ended(self, _: Exit) -> None:
        for warning in self._lost:
            self.log.warn("{warning}", warning=warning)
        ensureDeferred(self._close()).addErrback(
            lambda failure: self.log.failure(
                "the node's connections to a core that exited could not be closed", failure
            )
        )

    async def _close(self) -> None:
        if self._live is not None:
            await self._live.close()
        await super()._close()


def latencies(groups: Iterable[Group]) -> list[Latency]:
    """Return the latency of each outbound in a urltest group, once. After a failed test the core reports no time."""
    items = {item.tag: item for group in groups if group.type == URL_TEST for item in group.items}
    return [
        Latency(
            name=item.tag,
            alive=bool(item.url_test_time),
            # 0 means no answer: less than a millisecond is reported as one.
            delay=max(item.url_test_delay, int(bool(item.url_test_time))),
            link=item.tag,
            last_seen_time=item.url_test_time,
            last_try_time=item.url_test_time,
            source="sing-box-urltest",
        )
        for item in items.values()
    ]
