"""Call several nodes in parallel, once or again and again, on the reactor."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore, FirstError, gatherResults
from twisted.internet.interfaces import IReactorFDSet, IReadDescriptor
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from zope.interface import implementer

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
    """A node's answer or error; the doctor has both, if it finds out why a node does not answer."""

    node: str
    answer: T | None = None
    error: NodeError | None = None

    @property
    def document(self) -> dict[str, Any]:
        """The JSON form."""
        found: dict[str, Any] = {"node": self.node}
        if self.error is not None:
            found["error"] = {"code": self.error.code, "text": self.error.text}
        if self.error is None or self.answer:
            found["result"] = self.answer
        return found


@dataclass(frozen=True)
class Fleet:
    """Several nodes, called in parallel."""

    reactor: Reactor
    nodes: Sequence[Node]

    async def ask(self, work: Work[T]) -> list[Outcome[T]]:
        """Do this work with each node; the outcomes are in the order of the nodes. Raises errors but `NodeError`."""
        return await parallel([partial(attempt, node, work) for node in self.nodes], AT_ONCE)

    async def poll(self, work: Work[T], every: float, take: Callable[[Outcome[T]], object]) -> None:
        """Poll each node, `every` seconds after its last answer, independently of the others. Runs until cancelled."""

        async def follow(node: Node) -> None:
            while True:
                take(await attempt(node, work))
                await deferLater(self.reactor, every)

        await parallel([partial(follow, node) for node in self.nodes], len(self.nodes))


async def call(
    targets: Mapping[str, Target], deadline: float, work: Callable[[Fleet], Coroutine[Any, Any, T]], reactor: Reactor
) -> T:
    """Do work with clients of these nodes, and close them."""
    aio = Aio(reactor) if any(target.transport == "grpc" for target in targets.values()) else None
    if aio is not None:
        aio.start()
    clients = {name: connect(reactor, target, deadline=deadline, aio=aio) for name, target in targets.items()}
    try:
        return await work(Fleet(reactor, [Node(name, client, reactor) for name, client in clients.items()]))
    finally:
        await gatherResults([Deferred.fromCoroutine(each.close()) for each in clients.values()], consumeErrors=True)
        if aio is not None:
            aio.stop()


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


def run(main: Callable[[Reactor], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on the reactor; once per process.

    Raises what it raises, `KeyboardInterrupt` after Ctrl-C, `BrokenPipeError` if the reader of standard output is gone.
    """
    from twisted.internet import reactor

    return _Run(cast(Reactor, reactor), main).whole()


class _Run(Generic[T]):
    """One run of the reactor. On an interrupt it cancels the coroutine and waits for its cleanup before it stops."""

    def __init__(self, reactor: Reactor, main: Callable[[Reactor], Coroutine[Any, Any, T]]) -> None:
        self._reactor = reactor
        self._main = main
        self._outcome: list[T | Failure] = []
        self._work: Deferred[None] | None = None
        self._broken = False

    def whole(self) -> T:
        self._reactor.callWhenRunning(self._begin)
        self._reactor.addSystemEventTrigger("before", "shutdown", self._end)
        self._reactor.run()
        if self._broken:
            raise BrokenPipeError(errno.EPIPE, "the reader of standard output is gone")
        outcome = self._outcome[0] if self._outcome else Failure(CancelledError())
        if not isinstance(outcome, Failure):
            return outcome
        if outcome.check(CancelledError):
            raise KeyboardInterrupt
        assert outcome.value is not None
        raise outcome.value

    def _begin(self) -> None:
        if (output := _piped_output()) is not None:
            # Its other end is noticed also while there is nothing to write; there is nothing to read.
            IReactorFDSet(self._reactor).addReader(Descriptor(output, lambda: None, self._break))
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


def _piped_output() -> int | None:
    """The descriptor of standard output if that is a pipe."""
    try:
        number = sys.stdout.fileno()
        return number if stat.S_ISFIFO(os.fstat(number).st_mode) else None
    except (OSError, ValueError):  # closed, or not a file
        return None


@implementer(IReadDescriptor)
class Descriptor:
    """A file descriptor that the reactor reads by `read`; `lost` is called when its other end is gone."""

    def __init__(self, number: int, read: Callable[[], Failure | None], lost: Callable[[], None]) -> None:
        self._number = number
        self._read = read
        self._lost = lost

    def fileno(self) -> int:
        return self._number

    def logPrefix(self) -> str:
        return "nodectl"

    def doRead(self) -> Failure | None:
        return self._read()

    def connectionLost(self, reason: Failure) -> None:
        self._lost()
