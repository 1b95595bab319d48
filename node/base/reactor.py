"""Types of reactors: Twisted has an interface for each ability of its reactor, and none for all of them."""

from __future__ import annotations

from twisted.internet.interfaces import (
    IReactorCore,
    IReactorProcess,
    IReactorTCP,
    IReactorThreads,
    IReactorTime,
    IReactorUNIX,
)


class PooledReactor(IReactorTime, IReactorThreads):
    """A reactor with timers and a thread pool."""


class Reactor(PooledReactor, IReactorCore, IReactorProcess, IReactorTCP, IReactorUNIX):
    """A reactor with everything that the node uses."""
