"""Run a command's coroutine on the reactor, to its end or to Ctrl-C, and call several nodes in parallel."""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast

from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore, FirstError, gatherResults
from twisted.internet.interfaces import IReactorFDSet
from twisted.python.failure import Failure

from node.base.aio import Aio
from node.base.errors import NodeError
from node.base.reactor import Reactor
from node.client import Client, Target, connect
from node.nodectl.pipe import on_broken_pipe

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


def run(main: Callable[[Reactor], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on the reactor; once per process.

    Raises what it raises, `KeyboardInterrupt` after Ctrl-C, `BrokenPipeError` if the reader of standard output is gone.
    """
    from twisted.internet import reactor

    run_once = _Run(cast(Reactor, reactor), main)
    run_once.whole()
    return run_once.result()


class _Run(Generic[T]):
    """One run of the reactor. On an interrupt it cancels the coroutine and waits for its cleanup before it stops."""

    def __init__(self, reactor: Reactor, main: Callable[[Reactor], Coroutine[Any, Any, T]]) -> None:
        self._reactor = reactor
        self._main = main
        self._outcome: list[T | Failure] = []
        self._work: Deferred[None] | None = None
        self._broken = False

    def whole(self) -> None:
        self._reactor.callWhenRunning(self._begin)
        self._reactor.addSystemEventTrigger("before", "shutdown", self._end)
        self._reactor.run()

    def result(self) -> T:
        if self._broken:
            raise BrokenPipeError(errno.EPIPE, "the reader of standard output is gone")
        if not self._outcome:
            raise KeyboardInterrupt
        (outcome,) = self._outcome
        if not isinstance(outcome, Failure):
            return outcome
        if outcome.check(CancelledError):
            raise KeyboardInterrupt
        assert outcome.value is not None
        raise outcome.value

    def _begin(self) -> None:
        on_broken_pipe(IReactorFDSet(self._reactor), self._break)
        work = Deferred.fromCoroutine(self._main(self._reactor))
        self._work = work.addBoth(self._outcome.append)
        self._work.addBoth(lambda _: self._reactor.callLater(0, self._stop))

    def _end(self) -> Deferred[None] | None:
        if self._work is not None and not self._outcome:
            self._work.cancel()
        return self._work

    def _break(self) -> None:
        if not self._outcome:  # else the reactor closed the pipe itself when it stopped
            self._broken = True
            self._stop()

    def _stop(self) -> None:
        if self._reactor.running:
            self._reactor.stop()


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


async def ask(reactor: Reactor, targets: Mapping[str, Target], work: Work[T], deadline: float) -> list[Outcome[T]]:
    """Connect to these nodes, do this work with each, and close."""
    async with Fleet(reactor, targets, deadline) as fleet:
        return await fleet.ask(work)


def each(outcomes: Sequence[Outcome[T]]) -> list[tuple[str, T]]:
    """Names and answers of the nodes that answered."""
    return [(outcome.node, outcome.answer) for outcome in outcomes if outcome.answer is not None]
