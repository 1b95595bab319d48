"""Update jobs: they run one at a time, go on when the caller disconnects, and are kept on disk."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from google.protobuf.message import DecodeError
from twisted.internet.defer import CancelledError, Deferred, DeferredList, DeferredLock, TimeoutError, ensureDeferred
from twisted.python.failure import Failure

from node.base.errors import Crowded, NodeError, ShuttingDown, UnknownName, cut, shown, size
from node.base.logs import Logger, LogRing, printable
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.base.secret_file import write_secret
from node.base.waiting import fire
from node.events.journal import Journal
from node.events.kinds import Kind
from protos import service_pb2 as pb

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
ENDED, UPGRADED = "the node stopped during this job: ask again", "the node was upgraded during this job: ask again"
# The most jobs to remember, and to run or wait at the same time.
KEPT = 50
WAITING_MOST = 8
# The most bytes of a job's text: a server may have written parts of it.
TEXT = 2000
# Seconds that work which cannot be cancelled may take when the node stops.
ENDING = 10.0
# Seconds for which a reply about jobs waits for the disk.
WRITTEN = 3.0


class Refused(NodeError):
    """An update failed, and what ran before goes on, unless the text says otherwise. The text has the reason."""


class Stage(Enum):
    """The phase of the running job that matters for an upgrade in place."""

    # It may be cancelled: the download so far stays, for the next try.
    FETCHING = auto()
    # An upgrade has to wait for it.
    CHANGING = auto()
    # It is the upgrade, waits for it, or follows a service that begins it: the next process has the result.
    BECOMING = auto()


@dataclass
class Step:
    """Reports the progress of one job."""

    job: pb.Job
    jobs: Jobs

    def say(self, text: str, before: str = "", after: str = "") -> None:
        """Report the next step, and the versions once they are known."""
        self.job.text = _plain(text)
        self.job.before, self.job.after = before or self.job.before, after or self.job.after
        self.jobs.report(self.job)

    def conclude(self, text: str, after: str = "") -> None:
        """Set the result, which is reported when the job ends."""
        self.job.text, self.job.after = _plain(text), after or self.job.after

    def fetched(self, done: int, total: int) -> None:
        """Set how many bytes of a download there are."""
        self.job.fetched, self.job.total = done, total


Work = Callable[[Step], Awaitable[None]]


@dataclass
class _Asked:
    job: pb.Job
    key: bytes
    work: Work
    under_way: Deferred[None] | None = field(default=None)


class Jobs:
    """The jobs, kept in `file` as `pb.Jobs`."""

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        file: Path,
        ring: LogRing,
        journal: Journal,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._reactor = reactor
        self._file = file
        self._ring = ring
        self._journal = journal
        self._now = now
        self._known: list[pb.Job] = []
        self._asked: list[_Asked] = []
        self._waiting: list[tuple[pb.Job, Deferred[None]]] = []
        self._writing = DeferredLock()
        self._closed = False
        # The text of a job that is cancelled.
        self._reason = ENDED
        # The stage of the running job.
        self.stage = Stage.CHANGING

    def load(self) -> list[pb.Job]:
        """Read the file. Returns the jobs that had not ended. Blocking, brief."""
        try:
            self._known = list(pb.Jobs.FromString(self._file.read_bytes()).jobs)
        except FileNotFoundError:
            return []
        except (OSError, DecodeError) as error:
            self.log.error("{file} cannot be read, earlier jobs are lost: {error}", file=self._file, error=str(error))
            return []
        return [job for job in self._known if job.state in (WAITING, RUNNING)]

    def get(self, identity: str) -> list[pb.Job]:
        """Return the job with this id, or all if it is empty. Raises `UnknownName`."""
        found = [job for job in self._known if identity in ("", job.id)]
        if identity and not found:
            raise UnknownName(f"there is no job {shown(identity)}")
        return found

    @property
    def under_way(self) -> str:
        """The subject of the job that an upgrade of the node has to wait for, or empty."""
        if self.stage is not Stage.CHANGING:
            return ""
        return next((asked.job.subject for asked in self._asked if asked.job.state == RUNNING), "")

    def ask(self, kind: str, subject: str, key: bytes, work: Work) -> pb.Job:
        """Queue a job. Returns the existing one if a job with the same `kind`, `subject` and `key` is under way."""
        for asked in self._asked:
            if (asked.job.kind, asked.job.subject, asked.key) == (kind, subject, key):
                return asked.job
        if self._closed:
            raise ShuttingDown
        if len(self._asked) >= WAITING_MOST:
            raise Crowded(f"{len(self._asked)} updates are waiting already: ask again when some are done")
        job = pb.Job(id=uuid.uuid4().hex[:16], kind=kind, subject=subject, state=WAITING)
        self._known.append(job)
        del self._known[:-KEPT]
        self._queue(_Asked(job, key, work))
        return job

    def go_on(self, job: pb.Job, work: Work) -> None:
        """Go on with a job of the previous node process."""
        self._queue(_Asked(job, b"", work))

    def _queue(self, asked: _Asked) -> None:
        self._asked.append(asked)
        if len(self._asked) == 1:
            self._begin(asked)

    def goes_on(self, job: pb.Job) -> bool:
        """Whether the next process of the node has the result of this job, instead of failing it."""
        return job.state == RUNNING and self.stage is Stage.BECOMING

    def ended(self, job: pb.Job) -> Deferred[None]:
        """Fires when the job has ended, or the next process of the node is about to take over."""

        def forget(gone: Deferred[None]) -> None:
            self._waiting = [each for each in self._waiting if each[1] is not gone]

        waiting: Deferred[None] = Deferred(forget)
        if job.state in (WAITING, RUNNING):
            self._waiting.append((job, waiting))
        else:
            waiting.callback(None)
        return waiting

    def release(self, *jobs: pb.Job) -> None:
        """Let those go on who wait for these jobs, or for any."""
        waiting, self._waiting = self._waiting, []
        for job, waiter in waiting:
            if job in jobs or not jobs:
                fire(waiter, None)
            else:
                self._waiting.append((job, waiter))

    def end(self, job: pb.Job, state: str, text: str) -> None:
        """End a job and report its result."""
        job.state, job.ended = state, self._now()
        kind = Kind.UPDATE_DONE if state == DONE else Kind.UPDATE_FAILED
        self.report(job, text, kind)
        self.release(job)

    def report(self, job: pb.Job, text: str = "", kind: Kind = Kind.UPDATE_STEP) -> None:
        """Report a job's progress: ring, journal, log and disk."""
        job.text = _plain(text) or job.text
        line = f"{job.subject}: {job.text}"
        self._ring.event(line)
        self._journal.tell(kind, line, job=job.id, of=job.kind, before=job.before, after=job.after)
        (self.log.warn if kind is Kind.UPDATE_FAILED else self.log.info)("update: {line}", line=line)
        ensureDeferred(self.save())

    async def written(self) -> None:
        """Wait for the writes under way, at most `WRITTEN` seconds.

        A caller who reads that a job is done may kill the node at that moment.
        """
        turn = self._writing.acquire().addTimeout(WRITTEN, self._reactor)
        with suppress(TimeoutError):
            await turn
            self._writing.release()

    async def stop(self) -> None:
        """Cancel the running job and fail those that wait. A half-done step is completed or undone."""
        self._closed = True
        await self._break_off()
        for asked in list(self._asked):
            if asked.job.state == WAITING:
                self._over(None, asked)
        await self.save()

    async def leave(self) -> None:
        """Prepare for an upgrade in place: cancel a download, and begin no more jobs."""
        self._closed, self._reason = True, UPGRADED
        if self.stage is Stage.FETCHING:
            await self._break_off()
            await self.save()

    async def _break_off(self) -> None:
        for asked in list(self._asked):
            if asked.under_way is not None:
                asked.under_way.cancel()
                # Work that must not be interrupted completes in this time; what takes longer ends with the node.
                await DeferredList([asked.under_way]).addTimeout(ENDING, self._reactor, lambda *_: None)

    def _begin(self, asked: _Asked) -> None:
        asked.job.state, asked.job.began, self.stage = RUNNING, asked.job.began or self._now(), Stage.CHANGING
        asked.under_way = ensureDeferred(self._work(asked))
        asked.under_way.addBoth(self._over, asked)

    async def _work(self, asked: _Asked) -> None:
        step = Step(asked.job, self)
        try:
            step.say("begun")
            await asked.work(step)
        except CancelledError:
            # Otherwise the next process ends it, or goes on with it.
            if not self.goes_on(asked.job):
                self.end(asked.job, FAILED, self._reason)
        except NodeError as error:
            self.end(asked.job, FAILED, error.text)
        except Exception:  # noqa: BLE001 - logged, and the job fails
            self.log.failure("an update job failed, by a fault of the node")
            self.end(asked.job, FAILED, "a fault of the node: its log has the details")
        else:
            self.end(asked.job, DONE, asked.job.text)

    def _over(self, outcome: object, asked: _Asked) -> None:
        if isinstance(outcome, Failure):
            self.log.failure("the end of an update job could not be recorded", outcome)
        if asked in self._asked:
            self._asked.remove(asked)
        if asked.job.state == WAITING:
            self.end(asked.job, FAILED, self._reason)
        elif self._asked and not self._closed:
            self._begin(self._asked[0])

    async def save(self) -> None:
        """Write the state of all jobs to disk, one write at a time."""
        await self._writing.acquire()
        try:
            packed = pb.Jobs(jobs=self._known).SerializeToString()
            await in_pool(self._reactor, _write, self._file, packed)
        except OSError as error:
            self.log.error(
                "{file} cannot be written: {error}; a restart would lose the state of update jobs",
                file=self._file,
                error=str(error),
            )
        finally:
            self._writing.release()


def _plain(text: str) -> str:
    """Make a text fit for logs, terminals and replies: without control characters, and cut.

    A long text keeps its last lines: a traceback ends with the error.
    """
    lines = [printable(line) for line in text.strip("\n").split("\n")]
    first, room = len(lines), TEXT + size("\n")
    while first and (room := room - size("\n" + lines[first - 1])) >= 0:
        first -= 1
    return cut("\n".join(lines[first:] or lines[-1:]), TEXT)


def _write(file: Path, packed: bytes) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_secret(file, packed)
