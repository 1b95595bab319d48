"""One run of sing-box: its process, its APIs, and the users that it lets in."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from twisted.internet.defer import ensureDeferred
from twisted.internet.threads import deferToThreadPool

from drivers.channel import COUNTERS, FIGURES, LATENCY, ONLINE, USERS, ApiFailed, asking
from drivers.process.child import CoreProcess
from drivers.process.executable import Files
from drivers.process.paced import Paced, PacedRun
from drivers.process.recovered import left, lives_on
from drivers.process.shared import SharedRun
from drivers.sing_box import listening
from drivers.sing_box.accounts import alike, label, login_of, name_of, stranger
from drivers.sing_box.api import Api
from drivers.sing_box.config import Endpoint, Plan
from drivers.sing_box.connections import Connections
from drivers.sing_box.counting import reading, spellings
from drivers.sing_box.groups import NOT_MEASURED, latencies, measures
from drivers.sing_box.live import LiveUsers
from drivers.sockets.connections import deafen, run_dry
from drivers.sockets.rights import Unreachable
from drivers.sockets.sharing import Sharing
from node.contract.accounts import Accounts, Change, Refusal, apply, key_of
from node.contract.connections import Arrived, Live
from node.contract.counters import DIRECTIONS, Reading, Scope, counter_name
from node.contract.driver import Applied, Exit, Host, Left
from node.errors import CoreFailed, Unsupported
from protos.handover_pb2 import Accounts as Packed
from protos.handover_pb2 import Label, SingBoxRun
from protos.service_pb2 import BackendStatsResponse, Latency

# Seconds for which connections may come to their end: what is cut in the middle of a write is not counted.
DRY = 0.5
# What one live change costs, in seconds for each user that the core has there, and what a batch of them may cost: a new
# run of the core is in force sooner than more of them.
LIVE_COST = 6e-6
LIVE_SECONDS = 5.0
LACKING = "{:,} bytes that this run of the core carried are counted for nobody: its stream of connections left them out"


class SingBoxGeneration(SharedRun[Api], PacedRun):
    """Satisfies `node.contract.driver.Generation`, `Shares`, `CountsSome`, `Paces` and
    `MeasuresLatency`."""

    uncounted: frozenset[Scope] = frozenset()

    def __init__(
        self,
        host: Host,
        sharing: Sharing,
        plan: Plan,
        process: CoreProcess,
        api: Api,
        endpoint: Endpoint,
        users: Mapping[str, Accounts],
        files: Files,
    ) -> None:
        super().__init__(host, process, api, sharing=sharing, listening=plan)
        self.plan = plan
        self._endpoint = endpoint
        self._files = files
        self._live = LiveUsers(host.reactor, endpoint, plan.live) if plan.live else None
        self._live_tags, self._unseen = frozenset(plan.live), plan.unseen
        # Whether v2ray_api counts who is in its configuration, and the labels of live users whom it does not know.
        self._counts = endpoint.stats_port is not None
        self._untold: set[str] = set()
        self.lingering = False
        self._own_names = frozenset(plan.own_names)
        # The most bytes that the counters ever lacked.
        self._lacking = 0
        # The labels of live users whose e-mails are spelled otherwise by now.
        self._labels: dict[tuple[str, str], str] = {}
        # The users of its configuration, and of them those who may come in.
        self._configured = users
        self.accounts: dict[str, Accounts] = {tag: dict(accounts) for tag, accounts in users.items()}
        self._connections = Connections(host.reactor, api, plan, process, self.accounts)
        descriptors, shared = self._connections.descriptors, listening.shared(plan.tree)
        self._paced = Paced(host.reactor, descriptors, plan.doors, shared, self._connections.inodes)
        # However the process ends: nobody asks a port any more that is not its own then.
        process.when_exited().addCallback(self._ended)

    @property
    def arrived(self) -> Arrived:
        return self._connections.arrived

    @arrived.setter
    def arrived(self, arrived: Arrived) -> None:
        self._connections.arrived = arrived

    @property
    def unseen(self) -> Mapping[str, str]:
        return self._connections.unseen

    def may_carry(self, key: str) -> bool:
        return self._connections.may_carry(key)

    async def look(self, keys: Collection[str]) -> list[Live]:
        return await self._connections.look(keys)

    async def end(self, connections: Iterable[Live]) -> int:
        return await self._connections.end(connections)

    @property
    def cut(self) -> int:
        return self._api.cut

    @property
    def outdated(self) -> bool:
        return bool(self._files.warnings)

    @property
    def warnings(self) -> Sequence[str]:
        return [*self._lost, *self._files.warnings]

    @property
    def _lost(self) -> list[str]:
        return [LACKING.format(self._lacking)] if self._lacking else []

    async def counters(self) -> Reading:
        with asking(COUNTERS):
            counted, lacking = await self._api.counters()
            live = await self._live_counters()
        self._lacking = max(self._lacking, lacking)
        return reading(self.plan.silent, counted, live)

    async def some_counters(self, names: Iterable[tuple[Scope, str]]) -> Reading:
        """All, where one is wanted of whom it was not told: it may have been, by a name that nobody knows any more."""
        wanted = set[tuple[Scope, str]]()
        for scope, name in names:
            spellings = self._counted_as(scope, name)
            if not spellings:
                return await self.counters()
            wanted |= {(scope, spelling) for spelling in spellings}
        counters = {counter_name(*each, way) for each in wanted for way in DIRECTIONS}
        silent = {name: 0 for name in self.plan.silent if name in counters}
        with asking(COUNTERS):
            counted = await self._api.some_counters(counters)
            live = await self._some_live({name for scope, name in wanted if scope is Scope.USER})
        return reading(silent, counted, live)

    def _counted_as(self, scope: Scope, name: str) -> set[str]:
        """The names by which the core may count this."""
        if scope is not Scope.USER:
            return {name} if counter_name(scope, name, DIRECTIONS[0]) in self.plan.silent else set()
        key = key_of(name)
        labels = [self._labels[tag, key] for tag in self._live_tags if (tag, key) in self._labels]
        runs = (*self._configured.values(), *self.accounts.values())
        return spellings(key, runs, {*self._own_names, *labels})

    async def _live_counters(self) -> Mapping[str, tuple[int, int]]:
        """Bytes of live users whom nothing else counts: of all, but where v2ray_api was told of them at the start."""
        if self._live is None or (self._counts and not self._untold):
            return {}
        counted = await self._live.counters()
        return {user: sums for user, sums in counted.items() if self._is_apart(user)}

    async def _some_live(self, users: Iterable[str]) -> Mapping[str, tuple[int, int]]:
        apart = [user for user in users if self._is_apart(user)]
        return await self._live.some_counters(apart) if self._live is not None and apart else {}

    def _is_apart(self, user: str) -> bool:
        """Whether a live user's bytes are counted where live users are, and nowhere else."""
        return not self._counts or user in self._untold

    async def online(self, key: str) -> Mapping[str, int]:
        with asking(ONLINE):
            return await self._api.online(key)

    async def backend_stats(self) -> BackendStatsResponse:
        """All of it where the build has v2ray_api; else what the api service and the kernel know."""
        with asking(FIGURES):
            figures = await self._api.sys_stats()
            if figures is not None:
                return BackendStatsResponse.FromString(figures.SerializeToString())
            status = await self._api.status()
            started = await self._api.started_at()
        return BackendStatsResponse(
            num_goroutine=status.goroutines,
            sys=status.memory,
            uptime=max(0, int(time.time() - started)),
        )

    async def latency(self) -> Sequence[Latency]:
        if not measures(self.plan.tree):
            raise Unsupported(NOT_MEASURED)
        with asking(LATENCY):
            return latencies(await self._api.groups())

    async def audit(self) -> int:
        """Only live users can be others than it was told: who else is in its configuration stays there."""
        if self._live is None:
            return 0
        with asking(USERS):
            return sum([await self._audit(tag, self._live) for tag in self.plan.live])

    async def _audit(self, tag: str, live: LiveUsers) -> int:
        before = dict(self.accounts[tag])
        real = {stranger(user, password) for user, password in (await live.listed(tag)).items()}
        if self.accounts[tag] != before:
            return 0  # users changed meanwhile: the next look tells
        known = {key: stranger(*self._login(tag, key, packed)) for key, packed in before.items()}
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
        refused = await self._admit(free)
        admitted = set(free)
        return Applied(refused, [change for change in changes if change not in admitted])

    def _free(self, changes: Sequence[Change]) -> list[Change]:
        """Those that need no other run: most removals, users who are in its configuration already, and live users."""
        live = [change for change in changes if change.tag in self._live_tags and change.packed is not None]
        dear = self._cost([change for change in live if not self._is_respelled(change)]) > LIVE_SECONDS
        return [change for change in changes if self._is_free(change, dear)]

    def _is_free(self, change: Change, dear: bool) -> bool:
        if change.packed is None:
            # Connections of those whom nobody sees can only be ended with all others.
            return change.tag not in self._unseen
        if self._is_respelled(change):
            return True
        if change.tag in self._live_tags:
            return not dear
        return alike(change.packed, self._configured[change.tag].get(change.key))

    def _is_respelled(self, change: Change) -> bool:
        """The user is in already, by the same credential, and only their e-mail is spelled otherwise."""
        return change.packed is not None and alike(change.packed, self.accounts[change.tag].get(change.key))

    def _cost(self, live: Sequence[Change]) -> float:
        """Seconds that the core works on these."""
        return LIVE_COST * sum(len(self.accounts[change.tag]) for change in live)

    async def _admit(self, changes: Sequence[Change]) -> list[Refusal]:
        """Apply changes that are free. Returns who is refused."""
        respelled = set(filter(self._is_respelled, changes))
        self._respell(respelled)
        coming = [change for change in changes if change.packed is not None and change not in respelled]
        replaced = [change for change in coming if change.key in self.accounts[change.tag]]
        gone = [change for change in changes if change.packed is None] + replaced
        left = {(change.tag, change.key): self.accounts[change.tag].get(change.key) for change in gone}
        self.accounts.update(apply([Change(tag, key, None) for tag, key in left], self.accounts))
        try:
            if left:
                await self._api.bar(left)
            await self._shut_out(left)
            refused = await self._let_in(coming)
            try:
                if replaced:
                    # Who came in meanwhile by what is not valid any more.
                    await self._api.bar((change.tag, change.key) for change in replaced)
            finally:
                # Their accounts are in force by now: nobody would ask for them again.
                admitted = [pair for change in coming if (pair := (change.tag, change.key)) not in refused]
                await self._api.admit(admitted)
        except ApiFailed as error:
            raise CoreFailed(f"the core did not end connections of removed users: {error}") from error
        return list(refused.values())

    def _respell(self, changes: Iterable[Change]) -> None:
        """The core keeps the spelling that it has until the next one."""
        for tag, key, packed in changes:
            assert packed is not None
            if tag in self._live_tags:
                self._labels[tag, key] = self._login(tag, key, self.accounts[tag][key])[0]
            self.accounts[tag][key] = packed

    def _login(self, tag: str, key: str, packed: bytes) -> tuple[str, str]:
        """The label by which the core knows a live user, and the password."""
        user, password = login_of(packed)
        return self._labels.get((tag, key), user), password

    async def _shut_out(self, left: Mapping[tuple[str, str], bytes | None]) -> None:
        """Have the core forget credentials, where it can. Where that fails or is too dear, connections are closed."""
        live = [Change(tag, key, packed) for (tag, key), packed in left.items() if packed and tag in self._live_tags]
        dear = self._cost(live) > LIVE_SECONDS
        self.lingering |= dear or any(packed and tag not in self._live_tags for (tag, _), packed in left.items())
        if self._live is None or dear:
            return
        for change in live:
            try:
                await self._live.shut_out(change.tag, self._login(change.tag, change.key, change.packed or b"")[0])
            except ApiFailed as error:
                self.lingering = True
                self.log.warn("a removed user's connections are closed as they come: {fault}", fault=error)

    async def _let_in(self, coming: Sequence[Change]) -> dict[tuple[str, str], Refusal]:
        refused = {}
        for tag, key, packed in coming:
            assert packed is not None
            if self._live is not None and tag in self._live_tags:
                user, password = self._login(tag, key, packed)
                self._note(user, key)
                try:
                    await self._live.let_in(tag, user, password)
                except ApiFailed as error:
                    refused[tag, key] = Refusal(name_of(packed), f"{tag}: {error}")
                    continue
            self.accounts[tag][key] = packed
        return refused

    def _note(self, user: str, key: str) -> None:
        """Keep in mind whom v2ray_api does not count: it knows the names that it was told when the core started."""
        told = ((tag, accounts[key]) for tag, accounts in self._configured.items() if key in accounts)
        names = {label(name) if tag in self._live_tags else name for tag, name in ((t, name_of(p)) for t, p in told)}
        if user not in names and user not in self._own_names:
            self._untold.add(user)

    async def leave(self) -> Left:
        process = left(self._process)
        run = SingBoxRun(
            process=process,
            port=self._endpoint.port,
            secret=self._endpoint.secret,
            stats_port=self._endpoint.stats_port,
            users_port=self._endpoint.users_port,
            accounts={tag: Packed(by_key=accounts) for tag, accounts in self.accounts.items()},
            configured={tag: Packed(by_key=accounts) for tag, accounts in self._configured.items()},
            files=self._files.packed,
            untold=self._untold,
            labels=[Label(tag=tag, key=key, name=name) for (tag, key), name in self._labels.items()],
            lingering=self.lingering,
            lacking=self._lacking,
            nobody=self._live.nobody if self._live else "",
        )
        self._api.leave(run)
        descriptors = [output.descriptor for output in process.outputs]
        return Left(process.pid, descriptors, run.SerializeToString())

    def go_on(self, run: SingBoxRun) -> None:
        """Be the one that an earlier program of the node has left."""
        # They are looked at by others, who have hold of them already.
        for tag, accounts in self.accounts.items():
            accounts.clear()
            accounts |= run.accounts[tag].by_key
        self._untold = set(run.untold)
        self._labels = {(label.tag, label.key): label.name for label in run.labels}
        self.lingering, self._lacking = run.lingering, run.lacking
        if self._live is not None:
            self._live.nobody = run.nobody

    @property
    def handle(self) -> Left | None:
        """Not where it does not count itself: what was counted of its connections ends with the node."""
        process = lives_on(self._process)
        if process is None or not self._counts:
            return None
        run = SingBoxRun(
            process=process,
            port=self._endpoint.port,
            secret=self._endpoint.secret,
            stats_port=self._endpoint.stats_port,
            users_port=self._endpoint.users_port,
            accounts={tag: Packed(by_key=accounts) for tag, accounts in self._configured.items()},
            configured={tag: Packed(by_key=accounts) for tag, accounts in self._configured.items()},
            files=self._files.packed,
            nobody=self._live.nobody if self._live else "",
        )
        return Left(process.pid, (), run.SerializeToString())

    async def take_stock(self) -> None:
        """Have `accounts` of live users be what the core has. Raises `CoreFailed`."""
        await self.audit()
        for tag in self._live_tags:
            for key, packed in self.accounts[tag].items():
                self._note(self._login(tag, key, packed)[0], key)

    def stay(self) -> None:
        self._process.stay()

    async def wind_down(self) -> None:
        try:
            if self.pid is not None:
                pool = self._host.reactor.getThreadPool()
                if not await self.quieten():
                    await deferToThreadPool(self._host.reactor, pool, deafen, self.pid, self.plan.ports)
                await deferToThreadPool(self._host.reactor, pool, run_dry, self.pid, self._api.ports)
        except Unreachable as error:
            self.log.warn("the core goes on accepting: {fault}", fault=error)
        try:
            await self._api.until_idle(DRY)
            await self._api.end_all()
        except ApiFailed as error:
            self.log.warn("the core goes on serving: {fault}", fault=error)

    def _ended(self, _: Exit) -> None:
        for warning in self._lost:
            self.log.warn("{warning}", warning=warning)
        ensureDeferred(self._close()).addErrback(
            lambda failure: self.log.failure("connections to a core that is gone were not closed", failure)
        )

    async def _close(self) -> None:
        if self._live is not None:
            await self._live.close()
        await super()._close()
