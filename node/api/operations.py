"""The interface's methods, one coroutine each, over the runner, the traffic counters and the machine's statistics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Protocol

from twisted.internet.defer import ensureDeferred
from twisted.python.failure import Failure

from node import __version__
from node.api.auth import Dialect
from node.api.calls import Call
from node.api.feeds import ChunkFeed, UserFeed, require_few
from node.backend.drain import Limits
from node.backend.generations import Generations
from node.backend.keepalive import KeepAlive
from node.backend.listing import MOST as LISTED
from node.backend.questions import Questions
from node.backend.runner import Runner
from node.base.errors import Aborted, CoreFailed, InvalidRequest, UnknownName, Unsupported, shown
from node.base.logs import Logger, LogRing
from node.base.periodic import Periodic, Warns
from node.base.reactor import PooledReactor
from node.contract.accounts import key_of
from node.contract.counters import Scope as Counted
from node.contract.driver import CountsOnline, Driver, Generation, Heirs, MeasuresLatency, Routes
from node.contract.routing import Routing
from node.events.journal import Journal
from node.handover.leaving import Leaving
from node.keys.keyfile import Scope
from node.limits.allowance import Allowance
from node.limits.node_quota import NodeQuotaLimit
from node.limits.users import Options, UserLimits
from node.machine.system import SystemStats
from node.state.database import Changes, Saved
from node.state.store import Store
from node.traffic.polling import Traffic
from node.traffic.totals import LASTING, Totals
from protos import service_pb2
from protos.columns_pb2 import Stats
from protos.handover_pb2 import Handover
from protos.service_pb2 import (
    BackendType,
    BaseInfoResponse,
    Empty,
    LimitsSummary,
    NodeQuota,
    StatRequest,
    SystemStatsResponse,
)

# Seconds between two looks whether the cores that were left are still wanted.
HEIR = 0.5


@dataclass(frozen=True)
class Policy:
    """The operator's choices for the backend. Times are in seconds.

    `stop_grace`: how long a core lives on after a Stop of a deployed panel, which sends Stop and then Start for each
    change. `outlive`: a backend keeps running when its keep-alive expires. `poll`: between two readings of the
    counters. `drain`: the limits of draining cores. `upgrade`: a Start brings in a core whose files changed.
    `count_users`: bytes are summed up by user, too. `limits`: those of users; `allowance`: the node's own quota.
    """

    stop_grace: float = 30.0
    outlive: bool = False
    resume: bool = True
    poll: float = 10.0
    drain: Limits = field(default_factory=Limits)
    upgrade: bool = False
    count_users: bool = False
    limits: Options = field(default_factory=Options)
    allowance: Allowance = field(default_factory=Allowance)


class Updates(Protocol):
    """Updates cores, geo files and the node itself: see `node.updates`. All raise `NodeError`."""

    def core(self, request: service_pb2.UpdateCoreRequest) -> service_pb2.Job: ...

    def geo(self, request: service_pb2.UpdateGeoFilesRequest) -> service_pb2.Job: ...

    def node(self, request: service_pb2.UpdateNodeRequest) -> service_pb2.Job: ...

    async def get(self, request: service_pb2.JobRequest) -> service_pb2.Jobs: ...


class Backend:
    """All operations that a controller can call. Satisfies `node.api.calls.Backend`; METHODS names its coroutines."""

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        ring: LogRing,
        drivers: Mapping[int, Driver],
        system: SystemStats,
        store: Store,
        policy: Policy,
        others: Sequence[Warns] = (),
        journal: Journal | None = None,
    ) -> None:
        """`others` are further parts whose warnings `info` reports. `journal` gets the events."""
        self._reactor = reactor
        self._journal = journal
        self._policy = policy
        self._ring = ring
        self._drivers = drivers
        self.updates: Updates | None = None
        self._system = system
        self._store = store
        self._generations = Generations()
        totals = Totals([*Counted] if policy.count_users else LASTING)
        self._traffic = Traffic(reactor, self._generations, self._is_user, store, policy.poll, totals)
        self._runner = Runner(
            *(reactor, ring, store, self._generations, self._traffic.read),
            limits=policy.drain,
            upgrade=policy.upgrade,
            journal=self._journal,
        )
        self._limits = UserLimits(
            *(reactor, self._runner, self._generations, self._traffic, store, self._runner.journal, policy.limits)
        )
        self._own = NodeQuotaLimit(
            *(reactor, policy.allowance, policy.poll, self._generations, store, self._runner.journal)
        )
        self._questions = Questions(reactor, self._runner.current, self._generations)
        self._keep_alive = KeepAlive(reactor, self._expired)
        # Starts under way: while there are any, no keep-alive expires.
        self._starts = 0
        self._heard = False
        self._leaving = Leaving(self._runner, drivers, self._traffic)
        self._noting = Periodic("saving the remaining keep-alive time", self._note_keep_alive, policy.poll, reactor)
        own = store, self._traffic, self._runner, self._limits, self._own, self._noting, system
        self._warning: tuple[Warns, ...] = (*own, *others)
        store.everything, store.found = self._everything, self._found

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def generations(self) -> Generations:
        return self._generations

    @property
    def traffic(self) -> Traffic:
        return self._traffic

    @property
    def limits(self) -> LimitsSummary:
        """How many users have limits, and how many are barred by them."""
        return self._summary()

    @property
    def quota(self) -> NodeQuota | None:
        """The node's own quota and its use, if there is one."""
        summary = self._summary()
        return summary.node if summary.HasField("node") else None

    @property
    def warnings(self) -> list[str]:
        """All current warnings, for the operator."""
        accepted = self._runner.accepted
        warnings = [*(accepted.plan.warnings if accepted else ())]
        warnings += [warning for part in self._warning for warning in part.warnings]
        return warnings + (list(self._generations.current.warnings) if accepted and self._generations.current else [])

    def begin(self, saved: Saved) -> None:
        """Start the parts, and resume from the state of an earlier node."""
        self._own.start()
        self._traffic.start()
        self._noting.start()
        self._found(saved)
        self._limits.start()

    def unsteady(self) -> str:
        """Why the runs could not be left to the next node process now; empty if they could: see `Runner.unsteady`."""
        return self._runner.unsteady()

    def marks(self) -> Mapping[Generation, str]:
        """The marks of the runs that the next node can take over: see `Leaving.marks`."""
        return self._leaving.marks()

    def describe(self, saved: Collection[Generation]) -> Handover:
        """Describe these runs for the next node, in case that this one dies: see `Leaving.describe`."""
        return self._leaving.describe(saved=saved)

    async def rehearse(self) -> None:
        """Have the core check the running configurations for the next node process: see `Leaving.rehearse`."""
        await self._leaving.rehearse()

    async def leave(self, go: Callable[[Handover], Awaitable[None]]) -> None:
        """Call `go` with what the next node process needs to adopt the cores: see `Leaving.leave`."""
        await self._leaving.leave(go)

    def inherit(self, left: Handover, heirs: Heirs) -> None:
        """Adopt these runs of the last node process when the backend is resumed: see `Leaving.inherit`."""
        self._leaving.inherit(left, heirs)

    def touch(self) -> None:
        """A controller has called: restart the keep-alive."""
        self._heard = True
        self._keep_alive.touch()

    async def close(self) -> None:
        """Stop the core and all parts: the node ends."""
        self._noting.stop()
        self._note_keep_alive()
        self._keep_alive.stop()
        try:
            await self._runner.close()
        finally:
            self.rest()

    def rest(self) -> None:
        """Stop all periodic work, and save what is known to the store."""
        self._noting.stop()
        if self._keep_alive.left is not None:
            self._note_keep_alive()
            self._keep_alive.stop()
        self._traffic.stop()
        self._limits.stop()
        self._own.stop()

    # Lifecycle

    async def start(self, request: service_pb2.Backend, _: Call) -> BaseInfoResponse:
        require_few(len(request.users))
        driver = self._drivers.get(request.type)
        if driver is None:
            kinds = ", ".join(map(type_name, self._drivers))
            raise Unsupported(f"this node has no core of type {type_name(request.type)}; its cores are {kinds}")
        # The running backend must not expire while its successor starts.
        self._keep_alive.stop()
        self._starts += 1
        try:
            await self._runner.start(driver, request)
        finally:
            self._starts -= 1
            self._watch_controller()
        return await self._info()

    async def stop(self, _: Empty, call: Call) -> Empty:
        self._keep_alive.stop()
        grace = self._policy.stop_grace if call.dialect is Dialect.DEPLOYED else 0
        await self._runner.stop("a controller asked for it", grace)
        return Empty()

    async def info(self, _: Empty, __: Call) -> BaseInfoResponse:
        return await self._info()

    # Statistics

    async def system_stats(self, _: Empty, __: Call) -> SystemStatsResponse:
        return SystemStatsResponse(**asdict(self._system.current()))

    async def backend_stats(self, _: Empty, __: Call) -> service_pb2.BackendStatsResponse:
        return await self._questions.one(lambda run: run.backend_stats())

    async def stats(self, request: StatRequest, call: Call) -> Stats:
        return await self._traffic.stats(request, call.delivered)

    async def online(self, request: StatRequest, _: Call) -> service_pb2.OnlineStatResponse:
        try:
            count = len(await self._addresses(request.name))
        except Unsupported:
            if not any(isinstance(run, CountsOnline) for run in self._generations.serving):
                raise
            # An address that is connected to two generations counts twice then.
            count = sum(await self._questions.all(partial(_count_online, key_of(request.name))))
        return service_pb2.OnlineStatResponse(name=request.name, value=count)

    async def online_ips(self, request: StatRequest, _: Call) -> service_pb2.StatsOnlineIpListResponse:
        return service_pb2.StatsOnlineIpListResponse(name=request.name, ips=await self._addresses(request.name))

    async def latency(self, request: service_pb2.LatencyRequest, _: Call) -> service_pb2.LatencyResponse:
        run = self._runner.current()
        if not isinstance(run, MeasuresLatency):
            raise Unsupported("this core does not measure the latency of outbounds")
        found = sorted(await run.latency(), key=lambda latency: latency.name)
        if request.name:
            found = [latency for latency in found if latency.name == request.name]
            if not found:
                raise UnknownName(f"no latency was measured for outbound {shown(request.name)}")
        return service_pb2.LatencyResponse(latencies=found)

    # Users

    async def sync_users(self, request: service_pb2.Users, _: Call) -> Empty:
        require_few(len(request.users))
        await self._runner.users.replace(request.users)
        return Empty()

    def sync_user(self) -> UserFeed:
        return UserFeed(self._runner.users)

    def sync_chunked(self) -> ChunkFeed:
        return ChunkFeed(self._runner.users)

    async def list_users(self, request: service_pb2.ListUsersRequest, call: Call) -> service_pb2.ListUsersResponse:
        if len(request.names) > LISTED:
            raise InvalidRequest(f"a request may have at most {LISTED:,} names: send several")
        credentials = request.credentials and call.scope is Scope.ALL
        return await self._runner.listing.page(request.after, request.limit, request.names, credentials)

    # Limits

    async def set_limits(self, request: service_pb2.SetLimitsRequest, _: Call) -> service_pb2.SetLimitsResponse:
        require_few(len(request.users))
        return await self._limits.set(request)

    async def get_limits(self, request: service_pb2.GetLimitsRequest, _: Call) -> service_pb2.GetLimitsResponse:
        if len(request.names) > LISTED:
            raise InvalidRequest(f"a request may have at most {LISTED:,} names: send several")
        return await self._limits.page(request)

    # Updates

    async def update_core(self, request: service_pb2.UpdateCoreRequest, _: Call) -> service_pb2.Job:
        return self._jobs().core(request)

    async def update_geo_files(self, request: service_pb2.UpdateGeoFilesRequest, _: Call) -> service_pb2.Job:
        return self._jobs().geo(request)

    async def update_node(self, request: service_pb2.UpdateNodeRequest, _: Call) -> service_pb2.Job:
        return self._jobs().node(request)

    async def jobs(self, request: service_pb2.JobRequest, _: Call) -> service_pb2.Jobs:
        return await self._jobs().get(request)

    def _jobs(self) -> Updates:
        if self.updates is None:
            raise Unsupported("updates are not available on this node")
        return self.updates

    # Routing

    async def routing_rules(self, _: Empty, __: Call) -> service_pb2.RoutingRulesResponse:
        return service_pb2.RoutingRulesResponse(rules=await self._routes().rules())

    async def balancer_info(
        self, request: service_pb2.BalancerInfoRequest, _: Call
    ) -> service_pb2.BalancerInfoResponse:
        return await self._routes().balancer(request.tag)

    async def test_route(self, request: service_pb2.TestRouteRequest, _: Call) -> service_pb2.RouteResult:
        return await self._routes().test_route(request)

    async def add_routing_rule(self, request: service_pb2.AddRoutingRuleRequest, _: Call) -> Empty:
        await self._runner.router.add(request.rule, request.should_reset)
        return Empty()

    async def remove_routing_rule(self, request: service_pb2.RemoveRoutingRuleRequest, _: Call) -> Empty:
        await self._runner.router.remove(request.rule_tag)
        return Empty()

    async def override_balancer(self, request: service_pb2.OverrideBalancerTargetRequest, _: Call) -> Empty:
        await self._runner.router.lead(request.balancer_tag, request.target)
        return Empty()

    def _routes(self) -> Routes:
        run = self._runner.current()
        if not isinstance(run, Routes):
            raise Unsupported("this core does not report its routing while it runs")
        return run

    def _is_user(self, name: str) -> bool:
        """Whether there is such a user, in the running backend or in that of a Start under way."""
        desired, key = self._runner.desired, key_of(name)
        return key in desired.roster.users or key in desired.serving_roster.users

    async def _addresses(self, name: str) -> dict[str, int]:
        """Return the addresses from which a user is connected to any generation, and when each was last seen."""
        self._runner.current()
        if not self._is_user(name):
            raise UnknownName(f"there is no user {shown(name)}")
        addresses: dict[str, int] = {}
        for found in await self._questions.all(lambda run: run.online(key_of(name))):
            for address, seen in found.items():
                addresses[address] = max(seen, addresses.get(address, 0))
        return addresses

    async def _info(self) -> BaseInfoResponse:
        accepted = self._runner.accepted
        driver = accepted.driver if accepted else self._drivers[min(self._drivers)]
        warnings = self.warnings
        try:
            version = accepted.version if accepted else await driver.version()
        except CoreFailed as error:
            version = "none"
            warnings.append(error.text)
        return BaseInfoResponse(
            running=self._runner.status.running,
            core_version=version,
            version=__version__,
            core_type=driver.name,
            state=self._runner.status.state,
            reason=self._runner.status.reason,
            warnings=warnings,
            limits=self._summary(),
        )

    def _summary(self) -> LimitsSummary:
        info = BaseInfoResponse()
        self._limits.summary(info)
        self._own.summary(info)
        return info.limits

    def _found(self, saved: Saved) -> None:
        """Take over the saved state of an earlier node, which may be read late."""
        self._traffic.restore(saved)
        self._limits.restore(saved)
        self._own.restore(saved)
        if not self._runner.desired.loaded(saved) or not saved.request:
            self._require_heir()
            return
        self._leaving.booked = saved.booked
        if saved.left is not None:
            self._store.keep_alive(saved.left)
        if self._policy.resume or self._leaving.inherits:
            resuming = ensureDeferred(self._resume(saved)).addErrback(self._not_resumed)
            resuming.addCallback(lambda _: self._require_heir())

    def _require_heir(self) -> None:
        if self._runner.status.awaited:
            # A failed resume is tried again, and may still take the core over.
            self._reactor.callLater(HEIR, self._require_heir)
            return
        ensureDeferred(self._leaving.require_heir()).addErrback(self._not_resumed)

    async def _resume(self, saved: Saved) -> None:
        """Start the saved backend again, with its users and its remaining keep-alive, before any controller calls."""
        request = service_pb2.Backend.FromString(saved.request)
        request.users.extend(map(service_pb2.User.FromString, saved.users))
        driver = self._drivers.get(request.type)
        if driver is None:
            kind = type_name(request.type)
            self.log.error("the last backend cannot be resumed: this node has no core of type {type}", type=kind)
            return

        def resumed() -> None:
            self._watch_controller(None if self._heard else saved.left)
            # The record takes a running backend for one that a controller has just started.
            self._note_keep_alive()

        await self._runner.resume(driver, request, resumed, Routing.unpack(saved.routing))

    def _not_resumed(self, failure: Failure) -> None:
        if not failure.check(Aborted):  # a Stop, or the node's end
            self.log.failure("the last backend could not be resumed; `nodectl info` shows its state", failure)

    def _watch_controller(self, left: float | None = None) -> None:
        """Start the keep-alive of the current backend, with all of its time or with `left` seconds."""
        if not self._starts:
            accepted = self._runner.accepted
            self._keep_alive.set(accepted.keep_alive if accepted else 0, left)

    def _everything(self) -> Changes:
        """Return the whole state to save."""
        changes = self._runner.desired.everything()
        if self._journal is not None:
            changes.margins, changes.events = self._journal.everything()
        rows, totals = self._traffic.everything()
        changes.rows = {(row.scope, row.key): row for row in rows}
        changes.totals = {(row.scope, row.key): row for row in totals}
        changes.booked = self._traffic.booked
        changes.limits = {**self._limits.everything(), **self._own.everything()}
        return changes

    def _note_keep_alive(self) -> None:
        if self._keep_alive.left is not None:
            self._store.keep_alive(self._keep_alive.left)

    def _expired(self, reason: str) -> None:
        if self._policy.outlive:
            self._ring.event(f"{reason}; the backend keeps running")
            self.log.warn("{reason}; the backend keeps running (KEEP_ALIVE_ACTION=keep)", reason=reason)
            return
        self._keep_alive.stop()
        ensureDeferred(self._runner.stop(reason)).addErrback(
            lambda failure: self.log.failure(
                "the backend could not be stopped after its keep-alive expired: it goes on running", failure
            )
        )


async def _count_online(key: str, run: Generation) -> int:
    return await run.online_count(key) if isinstance(run, CountsOnline) else 0


def type_name(number: int) -> str:
    """Return the name of a backend type with its number, or the number alone."""
    try:
        return f"{BackendType.Name(number)} ({number})"
    except ValueError:
        return str(number)
