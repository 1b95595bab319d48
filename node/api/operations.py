"""The interface's methods, one coroutine each: they map controllers' calls to the engine and the other parts."""

from __future__ import annotations

from typing import Protocol

from node import __version__
from node.api.auth import Dialect
from node.api.calls import Call
from node.api.feeds import ChunkFeed, UserFeed, require_few
from node.backend.listing import MOST as LISTED
from node.base.errors import CoreFailed, InvalidRequest, UnknownName, Unsupported, shown
from node.base.part import Parts
from node.contract.abilities import MeasuresLatency, Routes
from node.contract.accounts import key_of
from node.contract.driver import type_name
from node.engine.engine import Engine
from node.keys.keyfile import Scope
from node.machine.system import SystemStats
from protos import service_pb2
from protos.columns_pb2 import Stats
from protos.service_pb2 import BaseInfoResponse, Empty, StatRequest, SystemStatsResponse


class Updates(Protocol):
    """Updates cores, geo files and the node itself: see `node.updates`. All raise `NodeError`."""

    def core(self, request: service_pb2.UpdateCoreRequest) -> service_pb2.Job: ...

    def geo(self, request: service_pb2.UpdateGeoFilesRequest) -> service_pb2.Job: ...

    def node(self, request: service_pb2.UpdateNodeRequest) -> service_pb2.Job: ...

    async def get(self, request: service_pb2.JobRequest) -> service_pb2.Jobs: ...


class Operations:
    """All operations that a controller can call; METHODS names its coroutines. `info` asks all `parts`."""

    def __init__(self, engine: Engine, system: SystemStats, parts: Parts, updates: Updates | None = None) -> None:
        self._engine = engine
        self._runner = engine.runner
        self._system = system
        self._parts = parts
        self._updates = updates

    def touch(self) -> None:
        """A controller has called: restart the keep-alive."""
        self._engine.keep_alive.touch()

    # Lifecycle

    async def start(self, request: service_pb2.Backend, _: Call) -> BaseInfoResponse:
        require_few(len(request.users))
        drivers = self._engine.drivers
        driver = drivers.get(request.type)
        if driver is None:
            kinds = ", ".join(map(type_name, drivers))
            raise Unsupported(f"this node has no core of type {type_name(request.type)}; its cores are {kinds}")
        await self._engine.start_backend(driver, request)
        return await self._info()

    async def stop(self, _: Empty, call: Call) -> Empty:
        await self._engine.stop_backend(self._engine.stop_grace if call.dialect is Dialect.DEPLOYED else 0)
        return Empty()

    async def info(self, _: Empty, __: Call) -> BaseInfoResponse:
        return await self._info()

    # Statistics

    async def system_stats(self, _: Empty, __: Call) -> SystemStatsResponse:
        return self._system.current()

    async def backend_stats(self, _: Empty, __: Call) -> service_pb2.BackendStatsResponse:
        return await self._runner.ask(lambda run: run.backend_stats())

    async def stats(self, request: StatRequest, call: Call) -> Stats:
        return await self._engine.traffic.stats(request, call.delivered)

    async def online(self, request: StatRequest, _: Call) -> service_pb2.OnlineStatResponse:
        return service_pb2.OnlineStatResponse(name=request.name, value=await self._engine.connected.count(request.name))

    async def online_ips(self, request: StatRequest, _: Call) -> service_pb2.StatsOnlineIpListResponse:
        return await self._engine.connected.addresses(request.name)

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

    async def bill(self, request: service_pb2.BillRequest, _: Call) -> service_pb2.Bill:
        return await self._engine.bill.answer(request)

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
        if request.traffic and not request.after:
            await self._engine.traffic.read()
        reply = await self._runner.listing.page(request.after, request.limit, request.names, credentials)
        for user in reply.users if request.traffic else ():
            for tag, (up, down) in self._engine.traffic.by_inbound(key_of(user.name)):
                user.traffic.add(tag=tag, uplink=up, downlink=down)
        self._engine.limits.add_usage(reply.users)
        return reply

    async def drop_connections(
        self, request: service_pb2.DropConnectionsRequest, _: Call
    ) -> service_pb2.DropConnectionsResponse:
        return await self._engine.connected.drop(request)

    async def list_online(self, request: service_pb2.ListOnlineRequest, _: Call) -> service_pb2.ListOnlineResponse:
        return await self._engine.connected.page(request.after, request.limit)

    # Limits

    async def set_limits(self, request: service_pb2.SetLimitsRequest, _: Call) -> service_pb2.SetLimitsResponse:
        require_few(len(request.users))
        return await self._engine.limits.set(request)

    async def get_limits(self, request: service_pb2.GetLimitsRequest, _: Call) -> service_pb2.GetLimitsResponse:
        if len(request.names) > LISTED:
            raise InvalidRequest(f"a request may have at most {LISTED:,} names: send several")
        return await self._engine.limits.page(request)

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
        if self._updates is None:
            raise Unsupported("updates are not available on this node")
        return self._updates

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

    async def _info(self) -> BaseInfoResponse:
        accepted = self._runner.accepted
        drivers = self._engine.drivers
        driver = accepted.driver if accepted else drivers[min(drivers)]
        warnings = self._parts.warnings
        try:
            version = accepted.version if accepted else await driver.version()
        except CoreFailed as error:
            version = "none"
            warnings.append(error.text)
        info = BaseInfoResponse(
            running=self._runner.status.running,
            core_version=version,
            version=__version__,
            core_type=driver.name,
            state=self._runner.status.state,
            reason=self._runner.status.reason,
            warnings=warnings,
            notes=accepted.plan.notes if accepted else (),
        )
        self._parts.summary(info)
        return info
