"""Memory that is free goes back to the system.

What a large set of users takes on its way through the node would else stay with the process: the C library keeps what
was freed between things that live on, and that for each thread by itself. At 50,000 users it would be a third of the
process, measured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall
from twisted.internet.threads import deferToThreadPool

from node.logs import Logger
from node.reactor import PooledReactor

# malloc.h: from how many heaps threads are served. They take turns in Python anyway.
_M_ARENA_MAX = -8
_HEAPS = 1
# Seconds after which whatever handled a set is done with it.
SOON = 1.0


class Memory:
    """Gives back what is free, some time after it was asked to."""

    log = Logger()

    def __init__(self, reactor: PooledReactor) -> None:
        self._reactor = reactor
        libc = ctypes.CDLL(None)
        # glibc's own (mallopt(3), malloc_trim(3)); other C libraries do it by themselves, or not at all.
        self._trim: Callable[[int], int] | None = getattr(libc, "malloc_trim", None)
        if self._trim is not None:
            libc.mallopt(_M_ARENA_MAX, _HEAPS)
        self._due: IDelayedCall | None = None

    def give_back_soon(self) -> None:
        """Once for all who ask meanwhile."""
        if self._trim is not None and self._due is None:
            self._due = self._reactor.callLater(SOON, self._give_back, self._trim)

    def _give_back(self, trim: Callable[[int], int]) -> None:
        self._due = None
        # Some milliseconds, in which only who allocates memory waits.
        done = deferToThreadPool(self._reactor, self._reactor.getThreadPool(), trim, 0)
        done.addErrback(lambda failure: self.log.failure("memory was not given back", failure))
