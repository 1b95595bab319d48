"""Puts together metrics, health checks and their pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from node.base.part import Parts
from node.base.reactor import PooledReactor
from node.contract.counters import Scope
from node.engine.engine import Engine
from node.metrics.figures import Figures, Sources
from node.metrics.lag import Lag
from node.metrics.pages import Meters, Pages
from node.metrics.readiness import Readiness, checks
from node.state.store import Store


class Monitoring:
    """Event loop delay and readiness, each a service to start and stop, and the pages."""

    def __init__(
        self,
        reactor: PooledReactor,
        engine: Engine,
        parts: Parts,
        store: Store,
        meters: Meters,
        *,
        state_dir: Path,
        places: int,
        users: bool,
        prefix: str,
        connections: Callable[[], Iterable[tuple[str, bool]]],
        expires: Callable[[], float],
    ) -> None:
        """`users`: whether bytes are reported by user, too. For the rest see `Sources` and `Figures`."""
        self.lag = Lag(reactor)
        self.readiness = Readiness(reactor, checks(store, engine.runner.status, engine.generations))
        sources = Sources(
            runner=engine.runner,
            generations=engine.generations,
            traffic=engine.traffic,
            store=store,
            readiness=self.readiness,
            lag=self.lag,
            state_dir=state_dir,
            places=places,
            scopes=[*Scope] if users else [Scope.INBOUND, Scope.OUTBOUND],
            connections=connections,
            parts=parts,
            expires=expires,
        )
        self.pages = Pages(reactor, Figures(reactor, sources, prefix), meters, self.readiness).all()
