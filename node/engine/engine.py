"""Puts together who runs, who may, and how much. `node.api.operations` maps controllers' calls to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from node.backend.desired import Desired
from node.backend.runner import Runner
from node.base.logs import LogRing
from node.base.reactor import PooledReactor
from node.base.sockets import Passed
from node.bill.bill import Bill, Sources
from node.contract.counters import Scope
from node.contract.driver import Driver
from node.contract.generations import Generations
from node.contract.saved import Changes, Lasting
from node.engine.connected import Connected
from node.engine.keep_alive import KeepAlive
from node.engine.leaving import Leaving
from node.engine.options import EngineOptions
from node.engine.resume import Resume
from node.events.journal import Journal
from node.limits.node_quota import NodeQuotaLimit
from node.limits.users import UserLimits
from node.state.store import Store
from node.traffic.polling import Traffic
from node.traffic.totals import LASTING, Totals
from protos.service_pb2 import Backend


class Engine(Lasting):
    """The runner, its runs, their traffic, and the limits. `parts` are its parts in order."""

    title = "the backend"

    def __init__(
        self,
        reactor: PooledReactor,
        ring: LogRing,
        drivers: Mapping[int, Driver],
        store: Store,
        journal: Journal,
        options: EngineOptions,
        controllers: Passed,
    ) -> None:
        """`controllers`: bytes of the node's own connections."""
        self.drivers = drivers
        self.stop_grace = options.backend.stop_grace
        interval = options.traffic.interval
        runs = self.generations = Generations()
        desired = Desired(reactor, store)
        totals = Totals([*Scope] if options.count_users else LASTING)
        self.traffic = Traffic(reactor, runs, desired.is_user, store, interval, totals)
        self.runner = Runner(reactor, ring, desired, runs, self.traffic.read, options.backend, journal)
        self.connected = Connected(reactor, self.runner, journal)
        self.limits = UserLimits(reactor, self.runner, self.traffic, store, journal, options.limits)
        allowance = replace(options.quota, zone=options.limits.zone)
        self.quota = NodeQuotaLimit(reactor, allowance, runs, store, journal, interval)
        self.bill = Bill(reactor, Sources(runs, self.traffic, controllers), store, allowance, interval)
        self.keep_alive = KeepAlive(
            reactor, ring, self.runner, store, outlive=options.backend.outlive, interval=interval
        )
        self.leaving = Leaving(self.runner, drivers, self.traffic)
        self.resume = Resume(reactor, self.runner, drivers, self.keep_alive, self.leaving, options.backend.resume)
        # The last one ends first: the cores, then the counters, whose last bytes the limits count.
        self.parts = self.quota, self.limits, self.bill, self.traffic, self, self.keep_alive, self.resume

    @property
    def warnings(self) -> list[str]:
        return self.runner.warnings

    @property
    def unsteady(self) -> str:
        return self.runner.unsteady()

    def save(self, changes: Changes) -> None:
        self.runner.desired.recorder.save(changes)

    def leave(self) -> None:
        self.runner.report_users()

    async def stop(self) -> None:
        await self.runner.close()

    async def start_backend(self, driver: Driver, request: Backend) -> None:
        """Run a backend: see `Runner.start`. The one before does not expire meanwhile."""
        with self.keep_alive.paused():
            await self.runner.start(driver, request)

    async def stop_backend(self, grace: float) -> None:
        """Stop the backend. Its core ends after `grace` seconds, unless a Start wants it."""
        self.keep_alive.off()
        await self.runner.stop("a controller asked for it", grace)
