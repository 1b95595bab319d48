"""Writes the persistent state in the background: the backend, its users, and traffic not yet delivered.

Changes are batched on the reactor and written by one thread, one transaction at a time; those that come meanwhile go
into the next batch. A failing disk is reported once and retried: then everything is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

from node.base.alarm import Alarm
from node.base.logs import Logger
from node.base.part import Part
from node.base.pool import OneThread
from node.base.reactor import PooledReactor
from node.base.waiting import Signal
from node.contract.counters import Counters, Row, Scope
from node.contract.saved import Changes, Lasting, Margins, Packed, Saved
from node.state.database import Damaged, Database, Unwritable

T = TypeVar("T")

# Seconds until a failed disk is retried.
AGAIN = 10.0
# Retries at the end: the disk may have space again, and its file may turn out to be damaged only then.
LAST_TRIES = 2


class Store(Lasting):
    """The state file and the batch of changes for it.

    `parts` say what has to be in the file, and take over what is in it. A file that could not be read at the start is
    read before the first write.
    """

    title = "the state file"
    log = Logger()

    def __init__(self, reactor: PooledReactor, path: Path, parts: Iterable[Part] = ()) -> None:
        self._parts = parts
        self._reactor = reactor
        self._database = Database(path)
        self._path = path
        self._pool = OneThread("store")
        self._changes = Changes()
        # The users written ahead, who may soon be all users.
        self._staged: dict[str, bytes] | None = None
        # Fire when the batched changes, or those being written, are on disk or have failed.
        self._gathered = Signal()
        self._written: Signal | None = None
        self._busy = False
        # Why the disk fails, if it does; and what happened to a damaged file.
        self.fault = ""
        self.damage = ""
        self._retry = Alarm(reactor, self._try_again)
        self._unread = self._closed = False
        # The keep-alive's remaining seconds, as the file should have them.
        self._left: float | None = None

    @property
    def _lasting(self) -> Iterator[Lasting]:
        return (part for part in self._parts if isinstance(part, Lasting))

    @property
    def warnings(self) -> list[str]:
        """Warnings about the disk."""
        return [text for text in (self.fault, self.damage) if text]

    @property
    def size(self) -> int:
        """Bytes of the state file and its WAL."""
        files = [self._path, self._path.with_name(f"{self._path.name}-wal")]
        return sum(file.stat().st_size for file in files if file.exists())

    def look(self) -> None:
        """Check that the file can be read, without writing. Raises `OSError` if not."""
        if self._database.peek() is None:
            raise OSError(f"{self._path} cannot be read by this version")

    def peek(self) -> Saved | None:
        """Read the file while another node writes it; None if it cannot be read. Blocking."""
        return self._database.peek()

    def go_back(self) -> None:
        """Undo the upgrade of the file by a newer node. Call it before `open`. Blocking."""
        try:
            if self._database.go_back():
                self.log.info("restored the state file from the copy made before the newer version upgraded it")
        except OSError as error:
            self.log.error(
                "the state file could not be restored from the copy made before the newer version upgraded it: {error}",
                error=str(error),
            )

    def open(self) -> Saved:
        """Read what an earlier node saved. Blocking, for before the reactor runs. Never fails: see `warnings`."""
        self._pool.start()
        try:
            return self._database.load()
        except Damaged as damage:
            self._note_damage(str(damage))
            return Saved()
        except Unwritable as error:
            self._note_fault(str(error))
            saved = self._database.peek()
            self._unread = saved is None
            return saved or Saved()

    def start(self) -> None:
        """Have the parts take over what an earlier node saved, then learn of the disk. Blocking."""
        saved = self.open()
        self._tell(lambda part: part.restore(saved))
        if self.fault:
            self._tell(lambda part: part.disk(self.fault))
        if self.damage:
            self._tell(lambda part: part.damaged(self.damage))

    @property
    def unsteady(self) -> str:
        return self.fault  # the next version starts from the state file

    async def leave(self) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Write all changes and close the file. A failed disk is retried at once, also with a new file for a bad one.

        Later changes are not written. May be called again.
        """
        if self._closed:
            return
        await self.flush()
        for _ in range(LAST_TRIES):
            if self._retry.pending:
                self._retry.cancel()
                self._try_again()
                await self.flush()
        self._retry.cancel()
        self._closed = True
        try:
            await self._on_disk(self._database.close)
        finally:
            self._pool.stop()

    # Changes to write. None of these calls fails, whatever the disk does.

    def accept(self, request: bytes, routing: bytes = b"") -> None:
        """Save the backend that runs (serialised, without users), with all of its keep-alive left.

        `routing`: its packed routing changes.
        """
        self._changes.request, self._changes.routing = request, routing
        self._changes.left = self._left = None
        self._write()

    def forget(self) -> None:
        """Delete the backend and its users; the traffic stays."""
        self.accept(b"")
        self.users({}, clean=True)

    def routing(self, packed: bytes) -> None:
        """Save the backend's packed routing changes."""
        self._changes.routing = packed
        self._write()

    def keep_alive(self, left: float) -> None:
        """Save the remaining seconds of the keep-alive."""
        self._changes.left = self._left = left
        self._write()

    def stage(self, users: Mapping[str, bytes]) -> None:
        """Write users ahead who may soon be all users, so that `users` need not write them then.

        With none, drop those written ahead.
        """
        # Batched changes may still need users staged before.
        if not self._retry.pending and not self._closed and not self._changes.staged and (users or self._staged):
            self._staged = dict(users) or None
            self._put_aside(dict(users))

    def users(self, changed: Mapping[str, bytes | None], clean: bool = False) -> None:
        """Save changed users, None for a removed one; with `clean` delete all others."""
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

    def rows(self, rows: Mapping[tuple[Scope, str], Row]) -> None:
        """Save changed rows of the ledger, by scope and key."""
        self._changes.rows.update(rows)
        self._write()

    def booked(self, run: str, counters: Mapping[str, Counters]) -> None:
        """Save which counters of the run with this mark the rows include; call it together with `rows`."""
        self._changes.booked.setdefault(run, {}).update(counters)
        self._write()

    def booked_only(self, runs: Collection[str]) -> None:
        """Delete the booked counters of all other runs."""
        self._changes.booked = {mark: counters for mark, counters in self._changes.booked.items() if mark in runs}
        self._changes.booked_only = runs
        self._write()

    def totals(self, rows: Iterable[Row]) -> None:
        """Save changed sums."""
        self._changes.totals.update({(row.scope, row.key): row for row in rows})
        self._write()

    def limits(self, records: Mapping[str, bytes | None]) -> None:
        """Save changed records of users' limits, by key; None for a removed one."""
        self._changes.limits.update(records)
        self._write()

    def days(self, records: Mapping[str, bytes | None]) -> None:
        """Save changed days of the bill, by date; None for one to delete."""
        self._changes.days.update(records)
        self._write()

    def event(self, margins: Margins, event: Packed | None = None) -> None:
        """Append an event, if given, and save the margins."""
        self._changes.margins = margins
        kept = [other for other in self._changes.events if other.sequence >= margins.first]
        self._changes.events = [*kept, event] if event else kept
        self._write()

    async def flush(self) -> None:
        """Wait until all changes so far are on disk, or the disk has failed."""
        reading = self._busy and self._written is None
        if self._closed:
            return
        if (self._changes or reading) and not self._retry.pending:
            await self._gathered.wait()
        elif self._written is not None:
            await self._written.wait()

    def _write(self) -> None:
        """Schedule a write of all changes of this reactor turn, unless one runs or a retry is pending."""
        if self._changes and not self._busy and not self._retry.pending and not self._closed:
            self._busy = True
            self._reactor.callLater(0, self._next)

    def _next(self) -> None:
        changes = self._gather(self._changes)
        done = self._on_disk(self._database.write, changes)
        done.addCallback(lambda _: changes)
        done.addCallbacks(self._succeeded, self._not_written)

    def _gather(self, changes: Changes) -> Changes:
        """Begin a new batch; return these changes, which include the batched ones, to write now."""
        self._changes = Changes()
        self._written, self._gathered = self._gathered, Signal()
        return changes

    def _on_disk(self, function: Callable[..., T], *arguments: Any) -> Deferred[T]:
        return deferToThreadPool(self._reactor, self._pool, function, *arguments)  # type: ignore[arg-type]

    def _succeeded(self, changes: Changes) -> None:
        # With a retry pending, this was only a write from before the disk failed.
        recovered = self.fault and not self._retry.pending
        if recovered:
            self.log.info("the state is on disk again: {path}", path=str(self._path))
        if (margins := changes.margins) is not None:
            self._tell(lambda part: part.stored(margins))
        if recovered:
            self.fault = ""
            self._tell(lambda part: part.disk(""))
        self._end()
        self._write()

    def _end(self) -> None:
        written, self._written, self._busy = self._written, None, False
        if written is not None:
            written.fire()

    def _put_aside(self, users: Mapping[str, bytes]) -> None:
        self._on_disk(self._database.stage, users).addErrback(self._not_staged)

    def _not_staged(self, failure: Failure) -> None:
        if not self._retry.pending:
            self._not_written(failure)

    def _not_written(self, failure: Failure) -> None:
        if failure.check(Damaged):
            self._unread = False
            self._report_damage(str(failure.value))
        elif not failure.check(Unwritable):
            self.log.failure("the state could not be written, by a fault of the node", failure)
        self._failed(str(failure.value))
        self._end()
        self._gathered.fire()
        self._gathered = Signal()

    def _failed(self, fault: str) -> None:
        """Drop the batch and schedule a retry, which will write everything."""
        if self._note_fault(fault):
            self._tell(lambda part: part.disk(self.fault))

    def _note_fault(self, fault: str) -> bool:
        """Note that the disk fails. Returns whether it did not before."""
        if not self.fault:
            self.log.error(
                "THE STATE IS NOT ON DISK: {path}: {fault}. The node goes on, but a restart would lose the backend, "
                "its users and the traffic that no controller has had yet",
                path=str(self._path),
                fault=fault,
            )
        first, self.fault = not self.fault, f"the state cannot be written to {self._path}: {fault}"
        self._changes, self._staged = Changes(), None
        self._retry.within(AGAIN)
        return first

    def _tell(self, news: Callable[[Lasting], None]) -> None:
        """Tell each part, also if others fail."""
        for part in self._lasting:
            try:
                news(part)
            except Exception:  # noqa: BLE001 - logged; the node starts all the same
                self.log.failure(
                    "{part} failed to take what the state file has", part=part.title or type(part).__name__
                )

    def _try_again(self) -> None:
        self._busy = True
        ensureDeferred(self._write_everything()).addCallbacks(self._succeeded, self._not_written)

    async def _write_everything(self) -> Changes:
        if self._unread:
            saved = await self._on_disk(self._database.load)
            self._unread = False
            self._tell(lambda part: part.restore(saved))
        everything = Changes()
        for part in self._lasting:
            part.save(everything)
        everything.clean, everything.left = True, self._left
        self._staged = None
        await self._on_disk(self._database.write, self._gather(everything))
        return everything

    def _report_damage(self, text: str) -> None:
        self._note_damage(text)
        self._tell(lambda part: part.damaged(text))

    def _note_damage(self, text: str) -> None:
        self.damage = text
        self.log.error("{text}", text=text)


def _alike(users: Mapping[str, bytes], others: Mapping[str, bytes | None]) -> bool:
    """Whether both have the same entries in the same order."""
    return users == others and [*users] == [*others]
