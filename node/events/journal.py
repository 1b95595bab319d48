"""The newest events, in memory and on disk, and the readers that wait for more.

Memory has all that is kept, and the disk a copy of it. So that a number is never given out twice, whatever becomes of
the process, numbers are reserved on disk before any reader sees them: an event shows when its number is. Where a disk
that fails cannot reserve more, the node takes another epoch, which no earlier reader knows.
"""

from __future__ import annotations

import math
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

from twisted.internet.interfaces import IReactorTime

from node.events.kinds import Kind
from node.logs import printable
from node.state.events import Margins, Packed
from node.waiting import Waiters
from protos.service_pb2 import Event

# Events that are kept, and their bytes: days of an ordinary node, minutes of one whose core ends again and again.
EVENTS = 5_000
BYTES = 1024 * 1024
# Characters of a text and of each field; the log has the rest.
MAX_TEXT = 4096
MAX_FIELD = 1024
# Numbers that are reserved at a time.
RESERVED = 1_000
# Events that one read brings at most.
READ = 256


class Keep(Protocol):
    """What a journal needs of the disk: `node.state.store.Store.event` satisfies it."""

    def __call__(self, margins: Margins, event: Packed | None = None) -> None: ...


class Tells(Protocol):
    """What a part needs of the journal."""

    def tell(self, kind: Kind, text: str, **fields: object) -> None:
        """This has happened."""


class Journal:
    """Events in order. `keep` takes each to the disk; without it they last as long as the journal."""

    def __init__(self, reactor: IReactorTime, keep: Keep | None = None, now: Callable[[], float] = time.time) -> None:
        self._reactor = reactor
        self._keep = keep
        self.now = now
        self._events: list[Packed] = []
        self._bytes = 0
        self.epoch = uuid.uuid4().hex[:16]
        self._last = 0
        # The last number that is reserved, and the last that is known to be on disk as such.
        self._ceiling = 0
        self._sure: float = 0 if keep else math.inf
        self._trouble = False
        self._waiters = Waiters()
        self._wake_due = False

    def tell(self, kind: Kind, text: str, **fields: object) -> None:
        """This has happened. Satisfies `Tells`."""
        self._last += 1
        told = event(kind, self._last, self.now(), text, fields)
        packed = Packed(self._last, told.SerializeToString())
        self._add(packed)
        if self._last + RESERVED // 2 > self._ceiling:
            self._ceiling = self._last + RESERVED
        if self._keep is not None:
            self._keep(self._margins, packed)
        self._show()

    # The disk

    def restore(self, margins: Margins | None, events: tuple[Packed, ...]) -> bool:
        """Go on where an earlier node ended. Returns whether that one ended in order, or there was none."""
        if margins is None:
            return True
        self.epoch, self._sure = margins.epoch, margins.ceiling
        self._ceiling = margins.ceiling
        for packed in events:
            self._add(packed)
        last = events[-1].sequence if events else margins.first - 1
        # What was told after it may not be on disk; its numbers are not used again.
        self._last = max(last, margins.ceiling)
        return last >= margins.ceiling

    def everything(self) -> tuple[Margins, list[Packed]]:
        """All that is to be on disk."""
        return self._margins, list(self._events)

    def kept(self, margins: Margins) -> None:
        """This is on disk by now."""
        if margins.epoch == self.epoch:
            self._sure = margins.ceiling
            self._show()

    def disk(self, fault: str) -> None:
        """The disk has begun to fail, or with an empty `fault` works again."""
        self._trouble = bool(fault)
        if fault:
            self.tell(Kind.DISK_TROUBLE, fault)
        else:
            self.tell(Kind.DISK_WELL, "the state is on disk again")

    def close(self) -> None:
        """The node ends in order: no number is left out."""
        self._ceiling = self._last
        if self._keep is not None:
            self._keep(self._margins)

    @property
    def _margins(self) -> Margins:
        return Margins(self.epoch, self.first, self._ceiling)

    # Readers

    @property
    def first(self) -> int:
        """The oldest number that is kept, or the next one."""
        return self._events[0].sequence if self._events else self._last + 1

    @property
    def last(self) -> float:
        """The newest number that readers may see."""
        return min(self._last, self._sure)

    def read(self, after: int) -> list[Packed]:
        """The next events behind this number, oldest first."""
        begin = bisect_right(self._events, after, key=_number)
        return [packed for packed in self._events[begin : begin + READ] if packed.sequence <= self._sure]

    def has(self, after: int) -> bool:
        """There are events behind this number that readers may see."""
        behind = bisect_right(self._events, after, key=_number)
        return behind < len(self._events) and self._events[behind].sequence <= self._sure

    def knows(self, sequence: int, epoch: str) -> bool:
        """This number was given out, in this epoch if one is said."""
        return epoch in ("", self.epoch) and sequence <= self.last

    def notice(self, kind: Kind, sequence: int, **fields: object) -> Event:
        """What one reader is told of the numbers; resumed from it, a stream goes on as it does."""
        told = event(kind, sequence, self.now(), kind.meaning.removeprefix("Told to one reader: "), fields)
        told.epoch = self.epoch
        return told

    async def arrival(self) -> None:
        """Wait until there may be more. Cancelling it is fine."""
        await self._waiters.wait()

    def _add(self, packed: Packed) -> None:
        self._events.append(packed)
        self._bytes += len(packed.body)
        over = 0
        while len(self._events) - over > EVENTS or self._bytes > BYTES:
            self._bytes -= len(self._events[over].body)
            over += 1
        del self._events[:over]

    def _show(self) -> None:
        """Readers are woken soon, all together."""
        if self._trouble and self._last > self._sure:
            self.epoch, self._sure = uuid.uuid4().hex[:16], math.inf
        if self._waiters and not self._wake_due:
            self._wake_due = True
            self._reactor.callLater(0, self._wake)

    def _wake(self) -> None:
        self._wake_due = False
        self._waiters.wake()


def _number(packed: Packed) -> int:
    return packed.sequence


def event(kind: Kind, sequence: int, when: float, text: str, fields: dict[str, object]) -> Event:
    """The message. Texts may be of others: lines stay, and nothing in them does something to those who look at them."""
    told = Event(
        sequence=sequence, time=round(when, 3), kind=kind.word, severity=kind.severity, text=_clean(text, MAX_TEXT)
    )
    for name, value in fields.items():
        told.fields[name] = _clean(str(value), MAX_FIELD)
    return told


def _clean(text: str, most: int) -> str:
    return "\n".join(map(printable, text[:most].split("\n")))
