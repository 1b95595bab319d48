"""The pages `/metrics`, `/livez` and `/readyz`, and what they need."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from node.api.pages import Answer, Page
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.metrics.families import CALLS, READ, REFUSALS, Samples, made
from node.metrics.figures import Figures, Sources
from node.metrics.lag import Lag
from node.metrics.readiness import Readiness, checks

T = TypeVar("T")

# Seconds for which a page is reused.
FRESH = 1.0
# Histogram buckets in seconds; calls that wait for a core take up to some ten.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REASONS = ("missing", "wrong", "forbidden")
_TEXT, _OPENMETRICS = CONTENT_TYPE_PLAIN_0_0_4, openmetrics.CONTENT_TYPE_LATEST
_WRITERS: Mapping[str, Callable[[Any], bytes]] = {_TEXT: generate_latest, _OPENMETRICS: openmetrics.generate_latest}

# Without the extra series with the time when each series began.
disable_created_metrics()


class Meters:
    """Metrics that are counted as they happen; from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls = Histogram(CALLS.name, CALLS.text, CALLS.labels, buckets=BUCKETS, registry=self.registry)
        self._refusals = Counter(REFUSALS.name, REFUSALS.text, REFUSALS.labels, registry=self.registry)
        for reason in REASONS:
            self._refusals.labels(reason)

    def called(self, method: str, status: int, seconds: float) -> None:
        """Count an answered call."""
        self._calls.labels(method, f"{status // 100}xx").observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a request that was refused because of its key."""
        self._refusals.labels(reason).inc()


class _Collector:
    """One reading and the `Meters`, as a collector of the library."""

    def __init__(self, samples: Samples, meters: Meters) -> None:
        self._samples, self._meters = samples, meters

    def collect(self) -> Iterable[Metric]:
        yield from made(READ, self._samples)
        yield from self._meters.registry.collect()


class Shared(Generic[T]):
    """Shares the result of some work among all callers that wait for it, and caches it for FRESH seconds."""

    def __init__(self, reactor: IReactorTime, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._reactor = reactor
        self._work = work
        self._waiting: list[Deferred[T]] = []
        self._made: tuple[float, T] | None = None

    async def get(self) -> T:
        """Return a result that is at most FRESH seconds old."""
        if self._made is not None and self._reactor.seconds() - self._made[0] < FRESH:
            return self._made[1]
        waiter: Deferred[T] = Deferred()
        self._waiting.append(waiter)
        if len(self._waiting) == 1:
            ensureDeferred(self._work()).addBoth(self._done)
        return await waiter

    def _done(self, outcome: T | Failure) -> None:
        if not isinstance(outcome, Failure):
            self._made = self._reactor.seconds(), outcome
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(outcome)


class Pages:
    """The three pages, for `node.door`."""

    def __init__(self, reactor: PooledReactor, figures: Figures, meters: Meters, readiness: Readiness) -> None:
        self._reactor = reactor
        self._figures = figures
        self._meters = meters
        self._readiness = readiness
        self._written = {kind: Shared(reactor, partial(self._write, kind)) for kind in _WRITERS}

    def all(self) -> tuple[Page, ...]:
        live = Page("/livez", self._livez, is_open=True)
        return Page("/metrics", self._metrics), live, Page("/readyz", self._readyz, is_open=True)

    async def _metrics(self, accept: str, _: bool) -> Answer:
        kind = _OPENMETRICS if "application/openmetrics-text" in accept else _TEXT
        return Answer(200, kind.encode(), await self._written[kind].get())

    async def _write(self, kind: str) -> bytes:
        """Write the page, in a thread: with series by user there may be 100,000 lines."""
        collector = _Collector(await self._figures.read(), self._meters)
        return await in_pool(self._reactor, _WRITERS[kind], collector)

    async def _livez(self, accept: str, known: bool) -> Answer:
        """Any reply means alive."""
        return _verdict({}, (), accept, known)

    async def _readyz(self, accept: str, known: bool) -> Answer:
        return _verdict(self._readiness.faults, self._readiness.checks, accept, known)


def _verdict(faults: Mapping[str, str], checks: Iterable[str], accept: str, known: bool) -> Answer:
    status, word = (503, "not ok") if faults else (200, "ok")
    shown = faults if known else {}
    if "application/json" in accept:
        body = json.dumps({"ok": not faults, **({"checks": _by_name(checks, shown)} if known else {})})
        return Answer(status, b"application/json", body.encode())
    lines = [word, *(f"{name}: {fault}" for name, fault in shown.items())]
    return Answer(status, b"text/plain; charset=utf-8", "".join(f"{line}\n" for line in lines).encode())


def _by_name(checks: Iterable[str], faults: Mapping[str, str]) -> dict[str, str]:
    return {name: faults.get(name, "ok") for name in checks}


class Monitoring:
    """The event loop's delay and readiness, two parts, and the pages. `changed` gets each change of readiness."""

    def __init__(
        self, reactor: PooledReactor, sources: Sources, meters: Meters, changed: Callable[[bool], None]
    ) -> None:
        engine = sources.engine
        lag = Lag(reactor)
        readiness = Readiness(reactor, checks(sources.store, engine.runner.status, engine.generations), changed)
        self.pages = Pages(reactor, Figures(sources, lag, readiness), meters, readiness).all()
        self.parts = lag, readiness
