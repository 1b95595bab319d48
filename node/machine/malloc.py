"""Returns freed memory to the system.

Otherwise the memory that a large set of users takes while the node handles it stays with the process: the C library
keeps freed blocks between live ones, in each thread's heap. At 50,000 users that is a third of the process, measured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from node.base.alarm import Alarm
from node.base.logs import Logger
from node.base.pool import in_pool
from node.base.reactor import PooledReactor

# malloc.h: number of heaps for all threads. In Python they take turns anyway.
_M_ARENA_MAX = -8
_HEAPS = 1
# Seconds after which the code that handled a set of users has dropped it.
SOON = 1.0


class Memory:
    """Returns freed memory to the system, some time after a request."""

    log = Logger()

    def __init__(self, reactor: PooledReactor) -> None:
        self._reactor = reactor
        libc = ctypes.CDLL(None)
        # mallopt(3) and malloc_trim(3) are glibc's; other C libraries return memory by themselves, or not at all.
        self._trim: Callable[[int], int] | None = getattr(libc, "malloc_trim", None)
        if self._trim is not None:
            libc.mallopt(_M_ARENA_MAX, _HEAPS)
        self._alarm = Alarm(reactor, self._give_back)

    def give_back_soon(self) -> None:
        """Return memory after SOON seconds; further requests until then are merged."""
        if self._trim is not None:
            self._alarm.within(SOON)

    def _give_back(self) -> None:
        assert self._trim is not None
        # Takes some milliseconds, in which threads that allocate memory wait.
        in_pool(self._reactor, self._trim, 0).addErrback(
            lambda failure: self.log.failure("freed memory could not be returned to the system (malloc_trim)", failure)
        )
