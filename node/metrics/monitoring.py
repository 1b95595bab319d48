"""Puts together metrics, health checks and their pages."""

from __future__ import annotations

from collections.abc import Callable

from node.base.reactor import PooledReactor
from node.metrics.figures import Figures, Sources
from node.metrics.lag import Lag
from node.metrics.pages import Meters, Pages
from node.metrics.readiness import Readiness, checks


class Monitoring:
    """The event loop's delay and readiness, two parts, and the pages. `changed` gets each change of readiness."""

    def __init__(
        self, reactor: PooledReactor, sources: Sources, meters: Meters, changed: Callable[[bool], None]
    ) -> None:
        engine = sources.engine
        lag = Lag(reactor)
        readiness = Readiness(reactor, checks(sources.store, engine.runner.status, engine.generations), changed)
        self.pages = Pages(reactor, Figures(reactor, sources, lag, readiness), meters, readiness).all()
        self.parts = lag, readiness
