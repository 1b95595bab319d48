"""Readers of log lines and events, each with a cursor of its own. They end with their key, or with the node."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import cache, partial
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred

from node.api.auth import Caller
from node.base.errors import InvalidRequest, NodeError
from node.base.logs import LogRing
from node.contract.saved import Packed
from node.events.journal import Journal
from node.events.kinds import Kind, fits
from protos.service_pb2 import Event, EventsRequest

T = TypeVar("T")

GONE = "the key is not valid any more"
# Kinds of events that one reader may name, and characters of each: they are kept for as long as it reads.
KINDS, LONGEST_KIND = 100, 100


class Reader:
    """The base of readers: belongs to one caller, and can be ended. Waiting for more may be cancelled."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._dismissed: NodeError | None = None
        self._waiting: Deferred[Any] | None = None

    def dismiss(self, error: NodeError) -> None:
        """End the reader at once, with this error."""
        self._dismissed = error
        if self._waiting is not None:
            self._waiting.cancel()

    async def _while_valid(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do the work unless the reader was dismissed. Raises the error that it was dismissed with."""
        try:
            if self._dismissed is None:
                self._waiting = waiting = ensureDeferred(work())
                return await waiting
        except CancelledError:
            if self._dismissed is None:
                raise
        raise self._dismissed


class LogReader(Reader):
    """A reader of log lines: a cursor into the ring."""

    def __init__(self, ring: LogRing, caller: Caller, last: str = "") -> None:
        """`last`: the place of the last line that was read on another connection. Without it, begin with the tail."""
        super().__init__(caller)
        self._ring = ring
        self._cursor = ring.behind(last) if last else ring.tail()

    @property
    def behind(self) -> bool:
        """Whether `next` will return without waiting."""
        return self._ring.has(self._cursor)

    async def next(self) -> list[str]:
        """Return the next lines, at least one. May be cancelled. Raises the error that it was dismissed with."""
        lines, self._cursor = await self._while_valid(lambda: self._ring.follow(self._cursor))
        return lines

    def place(self, back: int) -> str:
        """Return the place of the line that was read last, or of one `back` lines before it."""
        return self._ring.place(self._cursor - back)


class PlacedReader:
    """A reader of log lines with their places; a client resumes after a line by sending its place as `last`."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader

    @property
    def behind(self) -> bool:
        return self._reader.behind

    async def next(self) -> list[tuple[str, str]]:
        lines = await self._reader.next()
        return [(line, self._reader.place(len(lines) - number)) for number, line in enumerate(lines, 1)]


class EventReader(Reader):
    """A reader of events, of all or some kinds: a cursor into the journal."""

    def __init__(self, journal: Journal, request: EventsRequest, caller: Caller) -> None:
        """Raises `InvalidRequest` for too many kinds."""
        super().__init__(caller)
        self._journal = journal
        if len(request.kinds) > KINDS or any(len(kind) > LONGEST_KIND for kind in request.kinds):
            raise InvalidRequest(f"`kinds` may have at most {KINDS} kinds, of at most {LONGEST_KIND} characters each")
        # Cached: decided once for each kind.
        self._fits = cache(partial(fits, wanted=tuple(request.kinds)))
        self._follow = request.follow
        self._cursor = request.since
        self._lost = request.since > 0 and not journal.knows(request.since, request.epoch)

    @property
    def behind(self) -> bool:
        """Whether `next` will return without waiting."""
        return self._journal.has(self._cursor)

    async def next(self) -> list[Event]:
        """Return the next events, at least one; none at the end, if it does not follow.

        May be cancelled. Raises the error that it was dismissed with.
        """
        return await self._while_valid(self._next)

    async def _next(self) -> list[Event]:
        while True:
            if found := self._notices() or self._fitting():
                return found
            if not self.behind:
                if not self._follow:
                    return []
                await self._journal.arrival()

    def _notices(self) -> list[Event]:
        """Return a notice to send before the next events: that numbering has restarted, or that events are lost."""
        first, cursor = self._journal.first, self._cursor
        if self._lost:
            self._lost, self._cursor = False, 0
            return [self._journal.notice(Kind.LOST, 0)]
        if 0 < cursor < first - 1:
            self._cursor = first - 1
            return [self._journal.notice(Kind.MISSED, first - 1, first=cursor + 1, last=first - 1)]
        return []

    def _fitting(self) -> list[Event]:
        read = self._journal.read(self._cursor)
        self._cursor = read[-1].sequence if read else self._cursor
        wanted = [event for event in map(unpacked, read) if self._fits(event.kind)]
        for event in wanted:
            event.epoch = self._journal.epoch
        return wanted


def unpacked(packed: Packed) -> Event:
    return Event.FromString(packed.body)
