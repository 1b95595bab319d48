"""What must outlive the node: the backend, its users, and the bytes that nobody has had yet.

Changes are gathered on the reactor and written by one thread, one transaction at a time; those that come meanwhile go
together into the next. A disk that does not take them is said once and tried again: then everything is written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure
from twisted.python.threadpool import ThreadPool

from node.contract.counters import Row
from node.logs import Logger
from node.reactor import PooledReactor
from node.state.database import Changes, Damaged, Database, Saved, Unwritable
from node.state.events import Margins, Packed
from node.waiting import Signal

T = TypeVar("T")

# Seconds until a disk that failed is tried again.
AGAIN = 10.0
# How often one is tried again at the end: it may have room again, and the file it has may turn out to be bad only then.
LAST_TRIES = 2


class Store:
    """The state file. `everything` gives all that has to be in it, for a file that lacks some.

    A file that could not be read when the node began is read before it is written for the first time: `found` takes
    what was in it. `trouble` is told why the disk fails, and with an empty text that it works again; `damaged` of a
    file that was moved aside; `kept` which events are on disk.
    """

    log = Logger()

    def __init__(self, reactor: PooledReactor, path: Path) -> None:
        self._reactor = reactor
        self._database = Database(path)
        self._path = path
        self._pool = ThreadPool(0, 1, "store")
        self._changes = Changes()
        # The users that are written already, if they are to be all there are.
        self._staged: dict[str, bytes] | None = None
        # What fires when the changes that are gathered, or those being written, are on disk or have failed.
        self._gathered = Signal()
        self._written: Signal | None = None
        self._busy = False
        # Why the disk does not take what there is; and what became of a file that could not be read.
        self.fault = ""
        self.damage = ""
        self._again: IDelayedCall | None = None
        self._unread = self._closed = False
        # Seconds of keep-alive, as they are to be in the file.
        self._left: float | None = None
        self.everything: Callable[[], Changes] = Changes
        self.found: Callable[[Saved], None] = lambda _: None
        self.trouble: Callable[[str], None] = lambda _: None
        self.damaged: Callable[[str], None] = lambda _: None
        self.kept: Callable[[Margins], None] = lambda _: None

    @property
    def warnings(self) -> list[str]:
        """What an operator should know about the disk."""
        return [text for text in (self.fault, self.damage) if text]

    @property
    def size(self) -> int:
        """Bytes of the file, and of what is to go into it."""
        files = [self._path, self._path.with_name(f"{self._path.name}-wal")]
        return sum(file.stat().st_size for file in files if file.exists())

    def look(self) -> None:
        """Read what there is and touch nothing. Raises `OSError` if it cannot be read."""
        if self._database.peek() is None:
            raise OSError(f"{self._path} cannot be read by this version")

    def go_back(self) -> None:
        """What a newer version of the node has made of the file is undone; before it is opened. Blocking."""
        try:
            if self._database.go_back():
                self.log.info("the state file is again as it was before the newer version had it")
        except OSError as error:
            self.log.error("the state file cannot be made what it was: {error}", error=str(error))

    def open(self) -> Saved:
        """What an earlier node left. Blocking, for before the reactor runs; never fails, see `warnings`."""
        self._pool.start()
        try:
            return self._database.load()
        except Damaged as damage:
            self._tell_damage(str(damage))
            return Saved()
        except Unwritable as error:
            self._failed(str(error))
            saved = self._database.peek()
            self._unread = saved is None
            return saved or Saved()

    async def close(self) -> None:
        """Write what is left, and end. A disk that failed is tried again at once, so is a new file for a bad one.

        What is said later is not written. May be called again.
        """
        if self._closed:
            return
        await self.flush()
        for _ in range(LAST_TRIES):
            if self._again is not None:
                self._again.cancel()
                self._try_again()
                await self.flush()
        if self._again is not None:
            self._again.cancel()
        self._closed = True
        try:
            await self._on_disk(self._database.close)
        finally:
            self._pool.stop()

    # What there is to write. Nothing is refused, whatever the disk does.

    def accept(self, request: bytes, routing: bytes = b"") -> None:
        """This backend (serialised, without users) is the one that runs; a controller was just heard of.

        `routing`: what was changed of its routing, packed.
        """
        self._changes.request, self._changes.routing = request, routing
        self._changes.left = self._left = None
        self._write()

    def forget(self) -> None:
        """There is no backend, and no user; the traffic stays."""
        self.accept(b"")
        self.users({}, clean=True)

    def routing(self, packed: bytes) -> None:
        """This was changed of the backend's routing."""
        self._changes.routing = packed
        self._write()

    def keep_alive(self, left: float) -> None:
        """So many seconds may pass from now until a controller is heard of."""
        self._changes.left = self._left = left
        self._write()

    def stage(self, users: Mapping[str, bytes]) -> None:
        """These may soon be all users: they are written already, and `users` has nothing left to write then.

        No users: they will not be.
        """
        # What is gathered may need those who were staged before.
        if self._again is None and not self._closed and not self._changes.staged and (users or self._staged):
            self._staged = dict(users) or None
            self._put_aside(dict(users))

    def users(self, changed: Mapping[str, bytes | None], clean: bool = False) -> None:
        """These users changed, None for a user who is gone; with `clean` there are no others."""
        if clean:
            staged, self._staged = self._staged, None
            aside = staged is not None or self._changes.staged
            self._changes.staged = staged is not None and _alike(staged, changed)
            self._changes.clean_users, self._changes.users = True, {} if self._changes.staged else dict(changed)
            changed = {}
            if aside and not self._changes.staged:
                self._put_aside({})
        for key, packed in changed.items():
            self._changes.users.pop(key, None)
            self._changes.users[key] = packed
        self._write()

    def rows(self, rows: Iterable[Row]) -> None:
        """These rows of the ledger changed."""
        self._changes.rows.update({(row.scope, row.key): row for row in rows})
        self._write()

    def booked(self, run: str, counters: Mapping[str, int]) -> None:
        """These counters of the run with this mark are in the rows; said with those."""
        self._changes.booked.setdefault(run, {}).update(counters)
        self._write()

    def booked_only(self, runs: Collection[str]) -> None:
        """Of other runs no counters are to be known."""
        self._changes.booked = {mark: counters for mark, counters in self._changes.booked.items() if mark in runs}
        self._changes.booked_only = runs
        self._write()

    def totals(self, rows: Iterable[Row]) -> None:
        """These sums changed."""
        self._changes.totals.update({(row.scope, row.key): row for row in rows})
        self._write()

    def limits(self, records: Mapping[str, bytes | None]) -> None:
        """These records of users changed, by key; None for one that is gone."""
        self._changes.limits.update(records)
        self._write()

    def event(self, margins: Margins, event: Packed | None = None) -> None:
        """This happened, and these are the margins of all that did. Satisfies `node.events.journal.Keep`."""
        self._changes.margins = margins
        kept = [other for other in self._changes.events if other.sequence >= margins.first]
        self._changes.events = [*kept, event] if event else kept
        self._write()

    async def flush(self) -> None:
        """Wait until all that there was to write is on disk, or the disk has failed."""
        reading = self._busy and self._written is None
        if self._closed:
            return
        if (self._changes or reading) and self._again is None:
            await self._gathered.wait()
        elif self._written is not None:
            await self._written.wait()

    def _write(self) -> None:
        """Write soon, together with what else is said in this turn, if the disk is not left alone for now."""
        if self._changes and not self._busy and self._again is None and not self._closed:
            self._busy = True
            self._reactor.callLater(0, self._next)

    def _next(self) -> None:
        changes = self._gather(self._changes)
        done = self._on_disk(self._database.write, changes)
        done.addCallback(lambda _: changes.margins)
        done.addCallbacks(self._succeeded, self._not_written)

    def _gather(self, changes: Changes) -> Changes:
        """These are written next, and what was gathered is among them."""
        self._changes = Changes()
        self._written, self._gathered = self._gathered, Signal()
        return changes

    def _on_disk(self, function: Callable[..., T], *arguments: Any) -> Deferred[T]:
        return deferToThreadPool(self._reactor, self._pool, function, *arguments)

    def _succeeded(self, margins: Margins | None) -> None:
        # While another try is to come, what was under way when the disk failed is not all there is.
        well = self.fault and self._again is None
        if well:
            self.log.info("the state is on disk again: {path}", path=str(self._path))
        if margins is not None:
            self.kept(margins)
        if well:
            self.fault = ""
            self.trouble("")
        self._end()
        self._write()

    def _end(self) -> None:
        written, self._written, self._busy = self._written, None, False
        if written is not None:
            written.fire()

    def _put_aside(self, users: Mapping[str, bytes]) -> None:
        self._on_disk(self._database.stage, users).addErrback(self._not_staged)

    def _not_staged(self, failure: Failure) -> None:
        if self._again is None:
            self._not_written(failure)

    def _not_written(self, failure: Failure) -> None:
        if failure.check(Damaged):
            self._unread = False
            self._tell_damage(str(failure.value))
        elif not failure.check(Unwritable):
            self.log.failure("the state was not written", failure)
        self._failed(str(failure.value))
        self._end()
        self._gathered.fire()
        self._gathered = Signal()

    def _failed(self, fault: str) -> None:
        """Nothing is kept for the disk meanwhile: it gets all there is when it takes something again."""
        if not self.fault:
            self.log.error(
                "THE STATE IS NOT ON DISK: {path}: {fault}. The node goes on, but what runs now and the traffic that "
                "nobody has had yet would not outlive it",
                path=str(self._path),
                fault=fault,
            )
        news, self.fault = not self.fault, f"the state cannot be written to {self._path}: {fault}"
        self._changes, self._staged = Changes(), None
        if self._again is None:
            self._again = self._reactor.callLater(AGAIN, self._try_again)
        if news:
            self.trouble(self.fault)

    def _try_again(self) -> None:
        self._again, self._busy = None, True
        ensureDeferred(self._write_anew()).addCallbacks(self._succeeded, self._not_written)

    async def _write_anew(self) -> Margins | None:
        if self._unread:
            saved = await self._on_disk(self._database.load)
            self._unread = False
            self.found(saved)
        everything = self.everything()
        everything.clean, everything.left = True, self._left
        self._staged = None
        await self._on_disk(self._database.write, self._gather(everything))
        return everything.margins

    def _tell_damage(self, text: str) -> None:
        self.damage = text
        self.damaged(text)
        self.log.error("{text}", text=text)


def _alike(users: Mapping[str, bytes], others: Mapping[str, bytes | None]) -> bool:
    """Whether they are the same, in the same order."""
    return users == others and [*users] == [*others]
