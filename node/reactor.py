"""The types of reactors: Twisted has an interface for each thing that its reactor can do, and none for all of it."""

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
    """Timers, and threads for what takes long."""


class Reactor(PooledReactor, IReactorCore, IReactorProcess, IReactorTCP, IReactorUNIX):
    """All that the node uses."""
