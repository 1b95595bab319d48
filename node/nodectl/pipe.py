"""Standard output where it is a pipe: who reads it may be gone long before there is another line to write."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable

from twisted.internet.interfaces import IReactorFDSet, IReadDescriptor
from twisted.python.failure import Failure
from zope.interface import implementer


def tell_when_broken(reactor: IReactorFDSet, broken: Callable[[], None]) -> None:
    """Call this when nobody reads what is said any more."""
    try:
        number = sys.stdout.fileno()
        piped = stat.S_ISFIFO(os.fstat(number).st_mode)
    except (OSError, ValueError):  # closed, or no file
        return
    if piped:
        reactor.addReader(_Pipe(number, broken))


@implementer(IReadDescriptor)
class _Pipe:
    def __init__(self, number: int, broken: Callable[[], None]) -> None:
        self._number = number
        self._broken = broken

    def fileno(self) -> int:
        return self._number

    def logPrefix(self) -> str:
        return "standard output"

    def doRead(self) -> None:
        """There is nothing to read."""

    def connectionLost(self, reason: Failure) -> None:
        self._broken()
