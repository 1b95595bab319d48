"""One ring of log lines for all readers. Each line has a number; each reader keeps a cursor of its own and pulls.

A reader that is too slow loses its oldest lines and is told how many; nobody else notices, and the core never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

# A new reader is given this many of the newest lines before the live ones.
REPLAY = 200
# Readers are woken at most this often, in seconds: with many readers each wake costs far more than a line.
COALESCE = 0.05
# The ring holds at most this many characters, however long its lines are.
MAX_CHARACTERS = 16 * 1024 * 1024

NODE_MARK = "[node] "
# Follows the number of lines that a reader has lost.
TOO_SLOW = " lines were dropped: this reader is too slow"


class Log(Protocol):
    """Where lines go: what a driver needs of the ring."""

    def extend(self, lines: Iterable[str]) -> None: ...


class LogRing:
    """The newest `size` lines, and who waits for more."""

    def __init__(self, reactor: IReactorTime, size: int) -> None:
        self._reactor = reactor
        self._size = size
        self._lines: deque[str] = deque()
        self._characters = 0
        self._next = 0
        self._waiting: list[Deferred[None]] = []
        self._wake_due = False

    def extend(self, lines: Iterable[str]) -> None:
        """Add lines. The oldest are dropped beyond the size."""
        for line in lines:
            self._lines.append(line)
            self._characters += len(line)
            self._next += 1
        while len(self._lines) > self._size or self._characters > MAX_CHARACTERS:
            self._characters -= len(self._lines.popleft())
        if self._waiting and not self._wake_due:
            self._wake_due = True
            self._reactor.callLater(COALESCE, self._wake)

    def event(self, text: str) -> None:
        """Add an event of the node's own, marked as such."""
        self.extend([NODE_MARK + line for line in text.splitlines()])

    def tail(self) -> int:
        """The cursor at which a new reader begins."""
        return self._next - min(len(self._lines), REPLAY)

    def read(self, cursor: int) -> tuple[list[str], int]:
        """The lines from `cursor` on and the next cursor; first, if lines are gone, one that says how many."""
        first = self._next - len(self._lines)
        lost = max(0, first - cursor)
        lines = list(islice(self._lines, max(0, cursor - first), None))
        if lost:
            lines.insert(0, f"{NODE_MARK}{lost}{TOO_SLOW}")
        return lines, self._next

    async def follow(self, cursor: int) -> tuple[list[str], int]:
        """Like `read`, but waits until there is at least one line. Cancelling it is fine."""
        while cursor >= self._next:
            waiter: Deferred[None] = Deferred()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
        return self.read(cursor)

    def _wake(self) -> None:
        self._wake_due = False
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(None)
