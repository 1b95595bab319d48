"""The reactor's run below a command: a coroutine to its end, or to Ctrl-C, which ends it in order."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore, FirstError, gatherResults
from twisted.python.failure import Failure

from node.aio import Aio
from node.client import Client, Target, connect
from node.errors import NodeError
from node.reactor import Reactor

# Nodes that are asked at once.
AT_ONCE = 32

T = TypeVar("T")
Work = Callable[["Asked"], Coroutine[Any, Any, T]]


@dataclass(frozen=True)
class Asked:
    """One node while it is asked."""

    name: str
    client: Client
    reactor: Reactor


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of asking a node: its answer, or the error."""

    node: str
    answer: T | None = None
    error: NodeError | None = None


def run(main: Callable[[Reactor], Coroutine[Any, Any, T]]) -> T:
    """Run it on the reactor, once a process. Raises what it raises, `KeyboardInterrupt` after Ctrl-C."""
    from twisted.internet import reactor

    run_once = _Run(cast(Reactor, reactor), main)
    run_once.whole()
    return run_once.result()


class _Run(Generic[T]):
    """Its coroutine ends before the reactor does: whoever interrupts it waits until it has cleaned up."""

    def __init__(self, reactor: Reactor, main: Callable[[Reactor], Coroutine[Any, Any, T]]) -> None:
        self._reactor = reactor
        self._main = main
        self._outcome: list[T | Failure] = []
        self._work: Deferred[None] | None = None

    def whole(self) -> None:
        self._reactor.callWhenRunning(self._begin)
        self._reactor.addSystemEventTrigger("before", "shutdown", self._end)
        self._reactor.run()

    def result(self) -> T:
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
        work = Deferred.fromCoroutine(self._main(self._reactor))
        self._work = work.addBoth(self._outcome.append)
        self._work.addBoth(lambda _: self._reactor.callLater(0, self._stop))

    def _end(self) -> Deferred[None] | None:
        if self._work is not None and not self._outcome:
            self._work.cancel()
        return self._work

    def _stop(self) -> None:
        if self._reactor.running:
            self._reactor.stop()


async def ask(reactor: Reactor, targets: dict[str, Target], work: Work[T], deadline: float) -> list[Outcome[T]]:
    """Ask these nodes, `AT_ONCE` of them at a time; none waits for another one's answer."""
    aio = Aio(reactor) if any(target.transport == "grpc" for target in targets.values()) else None
    if aio is not None:
        aio.startService()
    places = DeferredSemaphore(AT_ONCE)
    try:
        asked = [
            places.run(Deferred.fromCoroutine, _one(reactor, name, target, work, deadline, aio))
            for name, target in targets.items()
        ]
        return await gatherResults(asked, consumeErrors=True)
    except FirstError as error:
        assert error.subFailure.value is not None
        raise error.subFailure.value
    finally:
        if aio is not None:
            aio.stopService()


async def _one(
    reactor: Reactor, name: str, target: Target, work: Work[T], deadline: float, aio: Aio | None
) -> Outcome[T]:
    try:
        async with connect(reactor, target, deadline=deadline, aio=aio) as client:
            return Outcome(name, answer=await work(Asked(name, client, reactor)))
    except NodeError as error:
        return Outcome(name, error=error)


def each(outcomes: Sequence[Outcome[T]]) -> list[tuple[str, T]]:
    """The answers, by node."""
    return [(outcome.node, outcome.answer) for outcome in outcomes if outcome.answer is not None]
