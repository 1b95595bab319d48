"""Poll the traffic of nodes, and sort it by rate."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorFDSet
from twisted.internet.task import deferLater

from node.base.errors import NodeError
from node.nodectl.running import Fleet, Node, Outcome, Work, attempt, parallel
from node.nodectl.screen import keys
from node.nodectl.traffic import Bytes, Rate, by_name, rates
from protos import service_pb2 as pb

T = TypeVar("T")


class Line(NamedTuple):
    """The traffic of one name on one node."""

    node: str
    name: str
    bytes: Bytes
    rate: Rate


@dataclass
class Watched:
    """The traffic of one node: the last reading, and its rates since the one before."""

    node: str
    counts: Mapping[str, Bytes] = field(default_factory=dict)
    rates: Mapping[str, Rate] = field(default_factory=dict)
    error: NodeError | None = None
    at: float | None = None

    def take(self, outcome: Outcome[pb.StatResponse], now: float) -> None:
        self.error = outcome.error
        if outcome.answer is None:
            self.rates = {}
            return
        counts = by_name(outcome.answer.stats)
        if self.at is not None and now > self.at:
            self.rates = rates(self.counts, counts, now - self.at)
        self.counts, self.at = counts, now

    def lines(self) -> Iterator[Line]:
        for name, count in self.counts.items():
            yield Line(self.node, name, count, self.rates.get(name, Rate()))


def busiest(watched: Iterable[Watched]) -> list[Line]:
    """All names, by their rate now, then by their total, the largest first."""
    lines = (line for one in watched for line in one.lines())
    return sorted(lines, key=lambda line: (-line.rate.both, -line.bytes.both, line.node, line.name))


async def poll(fleet: Fleet, work: Work[T], every: float, take: Callable[[Outcome[T]], None]) -> None:
    """Poll each node, `every` seconds after its last answer, independently of the others. Runs until cancelled."""

    async def follow(node: Node) -> None:
        while True:
            take(await attempt(node, work))
            await deferLater(fleet.reactor, every)

    await parallel([partial(follow, node) for node in fleet.nodes], len(fleet.nodes))


async def until_quit(fleet: Fleet, work: Coroutine[Any, Any, None]) -> None:
    """Run work until q or Ctrl-C."""
    going = Deferred.fromCoroutine(work)
    with keys(IReactorFDSet(fleet.reactor), lambda key: going.cancel() if key in "qQ" else None):
        try:
            await going
        except CancelledError:
            return
