"""Puts together metrics, health checks and their pages."""

from __future__ import annotations

from collections.abc import Callable

from node.api.operations import Backend
from node.base.reactor import PooledReactor
from node.metrics.figures import Figures, MetricsOptions, Sources
from node.metrics.lag import Lag
from node.metrics.pages import Meters, Pages
from node.metrics.readiness import Readiness, checks
from node.state.store import Store


class Monitoring:
    """Measures the event loop's delay, checks readiness, and has the pages. `changed` gets each change of readiness."""

    def __init__(
        self,
        reactor: PooledReactor,
        backend: Backend,
        store: Store,
        meters: Meters,
        options: MetricsOptions,
        changed: Callable[[bool], None],
    ) -> None:
        self._lag = Lag(reactor)
        self._readiness = Readiness(reactor, checks(store, backend.runner.status, backend.generations), changed)
        sources = Sources(backend, store, self._readiness, self._lag, options)
        self.pages = Pages(reactor, Figures(reactor, sources), meters, self._readiness).all()

    @property
    def warnings(self) -> list[str]:
        """Whether the readiness checks fail, so that the verdict is old."""
        return self._readiness.warnings

    def start(self) -> None:
        """Begin, once it is known whether a backend is wanted."""
        self._lag.start()
        self._readiness.start()

    def stop(self) -> None:
        """Measure and check no more."""
        self._readiness.stop()
        self._lag.stop()
