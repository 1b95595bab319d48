"""Call several nodes in parallel, once or again and again."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

from twisted.internet.defer import Deferred, DeferredSemaphore, FirstError, gatherResults
from twisted.internet.task import deferLater

from node.base.aio import Aio
from node.base.errors import NodeError
from node.base.reactor import Reactor
from node.client import Client, Target, connect

# Nodes that are called in parallel.
AT_ONCE = 32

T = TypeVar("T")
Work = Callable[["Node"], Coroutine[Any, Any, T]]


@dataclass(frozen=True)
class Node:
    """One node, with a client connected to it."""

    name: str
    client: Client
    reactor: Reactor


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """A node's answer or error."""

    node: str
    answer: T | None = None
    error: NodeError | None = None

    @property
    def document(self) -> dict[str, Any]:
        """The JSON form."""
        if self.error is not None:
            return {"node": self.node, "error": {"code": self.error.code, "text": self.error.text}}
        return {"node": self.node, "result": self.answer}


class Fleet:
    """Clients of several nodes, for `async with`. `AT_ONCE` are called in parallel."""

    def __init__(self, reactor: Reactor, targets: Mapping[str, Target], deadline: float) -> None:
        self.reactor = reactor
        self._deadline = deadline
        self._aio = Aio(reactor) if any(target.transport == "grpc" for target in targets.values()) else None
        self._targets = targets
        self.nodes: list[Node] = []

    async def __aenter__(self) -> Self:
        if self._aio is not None:
            self._aio.start()
        for name, target in self._targets.items():
            client = connect(self.reactor, target, deadline=self._deadline, aio=self._aio)
            self.nodes.append(Node(name, client, self.reactor))
        return self

    async def __aexit__(self, *_: object) -> None:
        await gatherResults([Deferred.fromCoroutine(node.client.close()) for node in self.nodes], consumeErrors=True)
        if self._aio is not None:
            self._aio.stop()

    async def ask(self, work: Work[T], at_once: int = AT_ONCE) -> list[Outcome[T]]:
        """Do this work with each node; the outcomes are in the order of the nodes. Raises errors but `NodeError`."""
        return await parallel([partial(attempt, node, work) for node in self.nodes], at_once)

    async def poll(self, work: Work[T], every: float, take: Callable[[Outcome[T]], object]) -> None:
        """Poll each node, `every` seconds after its last answer, independently of the others. Runs until cancelled."""

        async def follow(node: Node) -> None:
            while True:
                take(await attempt(node, work))
                await deferLater(self.reactor, every)

        await parallel([partial(follow, node) for node in self.nodes], len(self.nodes))


async def parallel(works: Iterable[Callable[[], Coroutine[Any, Any, T]]], at_once: int) -> list[T]:
    """Run these works, `at_once` in parallel; the results are in their order. Raises the first error."""
    places = DeferredSemaphore(at_once)
    try:
        return await gatherResults([places.run(work) for work in works], consumeErrors=True)
    except FirstError as error:
        assert error.subFailure.value is not None
        raise error.subFailure.value


async def attempt(node: Node, work: Work[T]) -> Outcome[T]:
    """Do this work with a node, with a `NodeError` as an outcome."""
    try:
        return Outcome(node.name, answer=await work(node))
    except NodeError as error:
        return Outcome(node.name, error=error)


def answers(outcomes: Sequence[Outcome[T]]) -> list[tuple[str, T]]:
    """Names and answers of the nodes that answered."""
    return [(outcome.node, outcome.answer) for outcome in outcomes if outcome.answer is not None]
