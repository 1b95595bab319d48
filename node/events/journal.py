"""The journal: keeps the newest events in memory and on disk, and wakes readers that wait for more.

Memory has all events that are kept, the disk a copy. Numbers are never used twice, even if the process dies: they are
reserved on disk before a reader sees them, so an event becomes visible when its number is on disk. If a failing disk
cannot reserve more, the node starts a new epoch, which no earlier reader knows.
"""

from __future__ import annotations

import math
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

from twisted.internet.interfaces import IReactorTime

from node import __version__
from node.base.alarm import Alarm
from node.base.logs import printable
from node.base.waiting import Waiters
from node.contract.saved import Changes, Lasting, Margins, Packed, Saved
from node.events.kinds import ONE_READER, Kind
from protos.service_pb2 import Event

# Most events kept, and most bytes: days for an ordinary node, minutes if the core crashes again and again.
EVENTS = 5_000
BYTES = 1024 * 1024
# Characters of a text and of each field; the log has the rest.
MAX_TEXT = 4096
MAX_FIELD = 1024
# Numbers reserved at a time.
RESERVED = 1_000
# Most events in one read.
READ = 256


class Keep(Protocol):
    """Writes an event to disk: `node.state.store.Store.event` satisfies it."""

    def __call__(self, margins: Margins, event: Packed | None = None) -> None: ...


class Tells(Protocol):
    """The part of the journal that reports events."""

    def tell(self, kind: Kind, text: str, **fields: object) -> None:
        """Report an event of this kind."""


class Journal(Lasting):
    """Events in order. `keep` writes each to disk; without it they are only in memory."""

    title = "the event journal"

    def __init__(self, reactor: IReactorTime, keep: Keep | None = None, now: Callable[[], float] = time.time) -> None:
        self._keep = keep
        self.now = now
        self._events: list[Packed] = []
        self._bytes = 0
        self.epoch = uuid.uuid4().hex[:16]
        self._last = 0
        # The last number reserved, and the last one whose reservation is on disk.
        self._ceiling = 0
        self._sure: float = 0 if keep else math.inf
        self._trouble = False
        # Whether the node before ended in order, or there was none.
        self._clean = True
        # Whether this node has started: a journal that is read later is not continued.
        self._begun = False
        self._waiters = Waiters()
        self._waking = Alarm(reactor, self._waiters.wake)

    def tell(self, kind: Kind, text: str, **fields: object) -> None:
        """Report an event. Satisfies `Tells`."""
        self._last += 1
        packed = Packed(self._last, event(kind, self._last, self.now(), text, fields).SerializeToString())
        self._add(packed)
        if self._last + RESERVED // 2 > self._ceiling:
            self._ceiling = self._last + RESERVED
        if self._keep is not None:
            self._keep(self.margins, packed)
        self._show()

    # The disk

    def start(self) -> None:
        """Report that this node has started."""
        self._begun = True
        before = "" if self._clean else "; the previous node was killed: its last events may be missing"
        text = f"txnode {__version__} started{before}"
        self.tell(Kind.NODE_STARTED, text, version=__version__, clean=self._clean)

    def restore(self, saved: Saved) -> None:
        """Continue an earlier node's journal."""
        if saved.margins is not None and not self._begun:
            self._clean = self._continue(saved.margins, saved.events)

    def _continue(self, margins: Margins, events: tuple[Packed, ...]) -> bool:
        """Return whether the earlier node ended in order."""
        self.epoch, self._sure = margins.epoch, margins.ceiling
        self._ceiling = margins.ceiling
        for packed in events:
            self._add(packed)
        last = events[-1].sequence if events else margins.first - 1
        # Later events may be missing on disk: their numbers are not used again.
        self._last = max(last, margins.ceiling)
        return last >= margins.ceiling

    def save(self, changes: Changes) -> None:
        changes.margins, changes.events = self.margins, list(self._events)

    def stored(self, margins: Margins) -> None:
        if margins.epoch == self.epoch:
            self._sure = margins.ceiling
            self._show()

    def disk(self, fault: str) -> None:
        self._trouble = bool(fault)
        if fault:
            self.tell(Kind.DISK_TROUBLE, fault)
        else:
            self.tell(Kind.DISK_WELL, "the state is on disk again")

    def damaged(self, text: str) -> None:
        self.tell(Kind.DISK_DAMAGED, text)

    def reloaded(self, loaded: Kind, refused: Kind, fault: str) -> None:
        """Report that files were reloaded or, with `fault`, that they cannot be used."""
        self.tell(refused if fault else loaded, fault or loaded.meaning)

    def leave(self) -> None:
        self.stop()

    def stop(self) -> None:
        """The node ends in order: give back reserved numbers that were not used."""
        self._ceiling = self._last
        if self._keep is not None:
            self._keep(self.margins)

    @property
    def margins(self) -> Margins:
        return Margins(self.epoch, self.first, self._ceiling)

    # Readers

    @property
    def first(self) -> int:
        """The number of the oldest event kept, or of the next one."""
        return self._events[0].sequence if self._events else self._last + 1

    @property
    def last(self) -> float:
        """The newest number that readers may see."""
        return min(self._last, self._sure)

    def read(self, after: int) -> list[Packed]:
        """The next visible events after this number, oldest first."""
        begin = bisect_right(self._events, after, key=_number)
        return [packed for packed in self._events[begin : begin + READ] if packed.sequence <= self._sure]

    def has(self, after: int) -> bool:
        """Whether there are visible events after this number."""
        behind = bisect_right(self._events, after, key=_number)
        return behind < len(self._events) and self._events[behind].sequence <= self._sure

    def knows(self, sequence: int, epoch: str) -> bool:
        """Whether this number was used, in this epoch unless `epoch` is empty."""
        return epoch in ("", self.epoch) and sequence <= self.last

    def notice(self, kind: Kind, sequence: int, **fields: object) -> Event:
        """Make an event for one reader, about its numbers. A stream resumed from it goes on as this one does."""
        notice = event(kind, sequence, self.now(), kind.meaning.removeprefix(ONE_READER), fields)
        notice.epoch = self.epoch
        return notice

    async def arrival(self) -> None:
        """Wait until there may be more events. May be cancelled."""
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
        """Wake all readers in the next turn of the reactor; start a new epoch if the disk cannot reserve numbers."""
        if self._trouble and self._last > self._sure:
            self.epoch, self._sure = uuid.uuid4().hex[:16], math.inf
        if self._waiters:
            self._waking.within(0)


def _number(packed: Packed) -> int:
    return packed.sequence


def event(kind: Kind, sequence: int, when: float, text: str, fields: dict[str, object]) -> Event:
    """Make the message. Texts may come from outside: line breaks stay, control characters are escaped."""
    message = Event(
        sequence=sequence, time=round(when, 3), kind=kind.word, severity=kind.severity, text=_clean(text, MAX_TEXT)
    )
    for name, value in fields.items():
        message.fields[name] = _clean(str(value), MAX_FIELD)
    return message


def _clean(text: str, most: int) -> str:
    return "\n".join(map(printable, text[:most].split("\n")))
