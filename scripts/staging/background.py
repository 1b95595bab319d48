"""Twisted's reactor in a background thread, and functions with which synchronous code waits for coroutines on it.

Trial's tests run the reactor themselves: they call `stop` first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.task import deferLater
from twisted.internet.threads import blockingCallFromThread
from twisted.python.failure import Failure

from node.base.aio import Aio

T = TypeVar("T")

reactor: Any = installed
_lock = threading.Lock()
_threads: list[threading.Thread] = []
_bridges: list[Aio] = []


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on the reactor and wait for it."""
    _start()
    return _wait_for(work)


def aio() -> Aio:
    """The bridge to gRPC's asyncio thread, which all clients share."""
    _start()
    return _bridges[0]


def stop() -> None:
    """Stop the reactor and leave it as if it had never run. `run` and `aio` start it again."""
    with _lock:
        if not _threads:
            return
        left = _wait_for(_quiet)
        _bridges.pop().stop()
        reactor.callFromThread(reactor.crash)
        _threads.pop().join()
        if reactor.threadpool is not None:
            reactor._stopThreadPool()
        assert not left, f"left open in the reactor: {left}"


def _wait_for(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    call: Any = lambda: Deferred.fromCoroutine(work())  # noqa: E731
    outcome: T = blockingCallFromThread(reactor, call)
    return outcome


def _start() -> None:
    with _lock:
        if _threads:
            return
        running = threading.Event()
        reactor.callWhenRunning(running.set)
        thread = threading.Thread(target=reactor.run, kwargs={"installSignalHandlers": False}, daemon=True)
        thread.start()
        running.wait()
        _threads.append(thread)
        _bridges.append(Aio(reactor))
        _bridges[0].start()
        threading.Thread(target=_stop_at_the_end, daemon=True).start()


async def _quiet() -> list[str]:
    """Wait up to a second for closing connections to go, then remove whatever is still open and return its names."""
    for _ in range(100):
        if not _open():
            return []
        await deferLater(reactor, 0.01)
    left = _open()
    for call in reactor.getDelayedCalls():
        call.cancel()
    for selectable in reactor.removeAll():
        selectable.connectionLost(Failure(ConnectionDone()))
    return left


def _open() -> list[str]:
    return [str(found) for found in (*set(reactor.getReaders()) - reactor._internalReaders, *reactor.getDelayedCalls())]


def _stop_at_the_end() -> None:
    """Stop the reactor after the main thread ends: its name-resolution threads would keep the interpreter alive."""
    threading.main_thread().join()
    stop()
