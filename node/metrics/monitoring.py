"""Puts together metrics, health checks and their pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from node.backend.generations import Generations
from node.backend.runner import Runner
from node.base.reactor import PooledReactor
from node.contract.counters import Scope
from node.metrics.figures import Figures, Sources
from node.metrics.lag import Lag
from node.metrics.pages import Meters, Pages
from node.metrics.readiness import Readiness, checks
from node.state.store import Store
from node.traffic.polling import Traffic
from protos.service_pb2 import LimitsSummary, NodeQuota


class Backend(Protocol):
    """The parts of the backend that are read."""

    @property
    def runner(self) -> Runner: ...

    @property
    def generations(self) -> Generations: ...

    @property
    def traffic(self) -> Traffic: ...

    @property
    def warnings(self) -> Sequence[str]: ...

    @property
    def limits(self) -> LimitsSummary: ...

    @property
    def quota(self) -> NodeQuota | None: ...


class Monitoring:
    """Event loop delay and readiness, each a service to start and stop, and the pages."""

    def __init__(
        self,
        reactor: PooledReactor,
        backend: Backend,
        store: Store,
        meters: Meters,
        *,
        state_dir: Path,
        places: int,
        users: bool,
        prefix: str,
        connections: Callable[[], Iterable[tuple[str, bool]]],
        expires: Callable[[], float],
        changed: Callable[[bool], None],
    ) -> None:
        """`users`: whether bytes are reported by user, too. For the rest see `Sources`, `Figures` and `Readiness`."""
        self.lag = Lag(reactor)
        self.readiness = Readiness(reactor, checks(store, backend.runner.status, backend.generations), changed)
        sources = Sources(
            runner=backend.runner,
            generations=backend.generations,
            traffic=backend.traffic,
            store=store,
            readiness=self.readiness,
            lag=self.lag,
            state_dir=state_dir,
            places=places,
            scopes=[*Scope] if users else [Scope.INBOUND, Scope.OUTBOUND],
            connections=connections,
            warnings=lambda: backend.warnings,
            expires=expires,
            limits=lambda: backend.limits,
            quota=lambda: backend.quota,
        )
        self.pages = Pages(reactor, Figures(reactor, sources, prefix), meters, self.readiness).all()
