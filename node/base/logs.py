"""The ring of log lines of the core and the node, for all readers; and the node's logger, which makes texts printable.

Each line of the ring has a number; each reader keeps a cursor and pulls. A reader that is too slow loses the oldest
lines and gets a line that says how many; other readers lose nothing, and the core never waits.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import twisted.logger
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from node.base.alarm import Alarm
from node.base.errors import NodeError
from node.base.settings import Options, chosen, number, setting
from node.base.waiting import Waiters
from protos.handover_pb2 import Ring

# A new reader gets this many of the newest lines before the live ones.
REPLAY = 200
# Readers are woken at most this often, in seconds: with many readers each wake costs far more than a line.
COALESCE = 0.008
# The ring holds at most this many characters, however long its lines are.
MAX_CHARACTERS = 16 * 1024 * 1024
# One read returns at most this many lines, and at most this many characters unless the first line alone has more.
READ_LINES = 1000
READ_CHARACTERS = 256 * 1024
# Characters of an event of the node, and of a field in a line of its log.
MAX_TEXT = 4096

# The number of a line has fewer digits than this.
_DIGITS = 20
# Fields that name users, and what the log has instead of them.
USERS = ("user", "users", "of_user")
UNNAMED = "(LOG_USERS is off)"

NODE_MARK = "[node] "
# Ends the line that tells a reader how many lines it has lost.
TOO_SLOW = " lines were dropped: this reader is too slow"
# Put before a core's line that would look like one of the node's.
CORE_MARK = "[core] "
_FORGED = re.compile(r"\s*" + re.escape(NODE_MARK.rstrip()))

# Characters that move the cursor, turn the direction of writing, or are invisible: all that are not `str.isprintable`
# but spaces, and characters that Python does not know yet. A tab may stay.
_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(9), *range(10, 32), 127)}
_UNSEEN = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


@dataclass(frozen=True)
class LogOptions(Options):
    """The size of the ring in lines, and how the node writes its own log."""

    buffer: int = setting("LOG_BUFFER_SIZE", "10000", number(1, 1_000_000)).help(
        "log lines kept in memory for controllers, 1 to 1000000; at most 16 Mi characters",
        "Raise it if readers of the core's log lose lines (`lines were dropped`), or reconnect too late.",
    )
    json: bool = setting("LOG_FORMAT", "text", chosen("json", "text")).help(
        "format of the node's own log: text, or json (one JSON object a line)",
        "Set `json` where a program collects the log. See [The node's own log](#the-nodes-own-log).",
    )
    users: bool = setting("LOG_USERS", "off", chosen("on", "off")).help(
        "on or off: name users in the node's own log",
        "Off, `(LOG_USERS is off)` stands in place of each name. Turn it on to follow up one user's trouble.",
    )


def printable(text: str) -> str:
    """Escape line breaks, control characters and invisible characters, so that a text is safe to show on one line."""
    if text.isprintable():  # most texts are, and this check is by far the quickest
        return text
    return text.translate(_CONTROLS) if text.isascii() else _UNSEEN.sub(lambda match: repr(match[0])[1:-1], text)


class Logger(twisted.logger.Logger):
    """Twisted's logger, for fields with texts from outside: it makes them printable, and cuts them.

    Fields that name users (USERS) are replaced unless LOG_USERS is on.
    """

    # LOG_USERS, set at the start.
    names_users: ClassVar[bool] = False

    def __get__(self, instance: object, owner: type | None = None) -> Logger:
        """As Twisted's, which is typed as its own class."""
        found = super().__get__(instance, owner)
        assert isinstance(found, Logger)
        return found

    def emit(self, level: twisted.logger.LogLevel, format: str | None = None, **fields: Any) -> None:
        if not self.names_users:
            fields |= {name: UNNAMED for name in USERS if name in fields}
        for name, value in fields.items():
            if isinstance(value, str):
                fields[name] = printable(value[:MAX_TEXT])
        super().emit(level, format, **fields)

    def failed(self, format: str, failure: Failure, **fields: Any) -> None:
        """Log that work failed: an expected error, such as a core's end, by its text; any other with its traceback."""
        if isinstance(failure.value, NodeError):
            self.error(f"{format}: {{reason}}", reason=failure.value.text, **fields)
        else:
            self.failure(format, failure, **fields)


class Log(Protocol):
    """The part of the ring that a driver needs: to add lines."""

    def extend(self, lines: Iterable[str]) -> None: ...


class LogRing:
    """The newest `size` lines, and the readers that wait for more."""

    def __init__(self, reactor: IReactorTime, size: int) -> None:
        self._reactor = reactor
        self._size = size
        # Part of each place: line numbers of another ring, such as an earlier node's, mean nothing here.
        self._name = secrets.token_hex(4)
        # Line number n is at n modulo size.
        self._lines: list[str] = []
        self._first = 0
        self._next = 0
        self._characters = 0
        self._waiters = Waiters()
        self._waking = Alarm(reactor, self._wake)
        self._woken = -COALESCE

    def extend(self, lines: Iterable[str]) -> None:
        """Add lines of a core. One that looks like a line of the node is marked."""
        self._add([CORE_MARK + line if _FORGED.match(line) else line for line in map(printable, lines)])

    def event(self, text: str) -> None:
        """Add an event of the node, marked as such. Its text may have several lines, such as a core's error."""
        lines = map(printable, text[:MAX_TEXT].split("\n"))
        self._add([NODE_MARK + ("| " if number else "") + line for number, line in enumerate(lines)])

    @property
    def packed(self) -> Ring:
        """The whole ring, for the next node process."""
        at = self._next % self._size
        count = self._next - self._first
        lines = (self._lines[at:] + self._lines[:at])[-count:] if count else []
        return Ring(name=self._name, next=self._next, lines=lines)

    def unpack(self, ring: Ring) -> None:
        """Take over the ring of the last node process: places that it gave to readers stay valid."""
        self._name = ring.name
        lines = [*ring.lines][-self._size :]
        self._first = self._next = ring.next - len(lines)
        self._lines = [""] * min(self._next, self._size)
        self._put(lines)

    def tail(self) -> int:
        """Return the cursor at which a new reader begins."""
        return max(self._first, self._next - REPLAY)

    def place(self, cursor: int) -> str:
        """Return the place of this cursor, with which a reader resumes on another connection."""
        return f"{cursor}@{self._name}"

    def behind(self, place: str) -> int:
        """Return the cursor of a place; for one that is not of this ring, the cursor of the oldest line."""
        number, _, name = place.partition("@")
        known = name == self._name and number.isascii() and number.isdigit() and len(number) < _DIGITS
        return int(number) if known and int(number) <= self._next else self._first

    def has(self, cursor: int) -> bool:
        """Return whether there are lines from this cursor on."""
        return cursor < self._next

    def read(self, cursor: int) -> tuple[list[str], int]:
        """Return lines from `cursor` on and the next cursor; if lines are gone, the first line says how many."""
        begin = max(self._first, cursor)
        at = begin % self._size
        count = min(READ_LINES, self._next - begin)
        lines = self._lines[at : at + count]
        lines += self._lines[: count - len(lines)]
        lengths = list(accumulate(map(len, lines)))
        del lines[max(1, bisect_right(lengths, READ_CHARACTERS)) :]
        end = begin + len(lines)
        if begin > cursor:
            lines.insert(0, f"{NODE_MARK}{begin - cursor}{TOO_SLOW}")
        return lines, end

    async def follow(self, cursor: int) -> tuple[list[str], int]:
        """Like `read`, but wait until there is at least one line. May be cancelled."""
        while not self.has(cursor):
            await self._waiters.wait()
        return self.read(cursor)

    def _wake(self) -> None:
        self._woken = self._reactor.seconds()
        self._waiters.wake()

    def _add(self, lines: list[str]) -> None:
        """Add these lines. All waiting readers are woken together, `COALESCE` seconds after the last time."""
        for begin in range(0, len(lines), self._size):
            self._put(lines[begin : begin + self._size])
        if self._waiters and not self._waking.pending:
            self._waking.set(max(self._woken + COALESCE - self._reactor.seconds(), 0))

    def _put(self, lines: list[str]) -> None:
        """Put these lines in the place of the oldest. There may be no more than the ring holds."""
        at = self._next % self._size
        room = self._size - at
        for begin, some in (at, lines[:room]), (0, lines[room:]):
            end = begin + len(some)
            self._characters += sum(map(len, some)) - sum(map(len, self._lines[begin:end]))
            self._lines[begin:end] = some
        self._next += len(lines)
        self._first = max(self._first, self._next - self._size)
        while self._characters > MAX_CHARACTERS:
            self._drop()

    def _drop(self) -> None:
        at = self._first % self._size
        self._characters -= len(self._lines[at])
        self._lines[at] = ""
        self._first += 1
