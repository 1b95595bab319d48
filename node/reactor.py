"""The types of reactors: Twisted has an interface for each thing that its reactor can do, and none for all of it."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorCore, IReactorProcess, IReactorSSL, IReactorThreads, IReactorTime


class PooledReactor(IReactorTime, IReactorThreads):
    """Timers, and threads for what takes long."""


class Reactor(PooledReactor, IReactorCore, IReactorProcess, IReactorSSL):
    """All that the node uses."""
