"""Notice when the reader of standard output, a pipe, is gone, also while there is nothing to write."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable

from twisted.internet.interfaces import IReactorFDSet, IReadDescriptor
from twisted.python.failure import Failure
from zope.interface import implementer


def on_broken_pipe(reactor: IReactorFDSet, broken: Callable[[], None]) -> None:
    """Call `broken` when standard output is a pipe and its reader closes it."""
    try:
        number = sys.stdout.fileno()
        piped = stat.S_ISFIFO(os.fstat(number).st_mode)
    except (OSError, ValueError):  # closed, or not a file
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
