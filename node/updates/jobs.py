"""Updates under way and those before: one at a time, each goes on when its caller hangs up, all outlive the process."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError
from twisted.internet.defer import CancelledError, Deferred, DeferredList, DeferredLock, ensureDeferred
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

from node.errors import Crowded, NodeError, UnknownName, cut, shown
from node.events.journal import Tells
from node.events.kinds import Kind
from node.logs import Logger, LogRing, printable
from node.reactor import PooledReactor
from node.secret_file import write_secret
from protos import service_pb2 as pb

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
# Jobs that are kept, and that may be under way and wait.
KEPT = 50
WAITING_MOST = 8
# Bytes of what a job says: a server may have chosen some of it.
TEXT = 2000
# Seconds that what is not to be broken off may take when the node ends.
ENDING = 10.0


class Refused(NodeError):
    """An update cannot be: what there was goes on. The text says why."""


@dataclass
class Step:
    """What the work of one job says of itself."""

    job: pb.Job
    jobs: Jobs

    def say(self, text: str, before: str = "", after: str = "") -> None:
        """This comes next; the versions, once they are known."""
        self.job.text = _plain(text)
        self.job.before, self.job.after = before or self.job.before, after or self.job.after
        self.jobs.told(self.job)

    def conclude(self, text: str, after: str = "") -> None:
        """What came of it, to be told when it has ended."""
        self.job.text, self.job.after = _plain(text), after or self.job.after

    def fetched(self, done: int, total: int) -> None:
        """Bytes of a download."""
        self.job.fetched, self.job.total = done, total

    async def kept(self) -> None:
        """Wait until what was said is on disk."""
        await self.jobs.kept()


Work = Callable[[Step], Awaitable[None]]


@dataclass
class _Asked:
    job: pb.Job
    key: bytes
    work: Work
    under_way: Deferred[None] | None = field(default=None)


class Jobs:
    """`file` has them, as `pb.Jobs`."""

    log = Logger()

    def __init__(
        self,
        reactor: PooledReactor,
        file: Path,
        ring: LogRing,
        journal: Tells,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._reactor = reactor
        self._file = file
        self._ring = ring
        self._journal = journal
        self._now = now
        self._known: list[pb.Job] = []
        self._asked: list[_Asked] = []
        self._writing = DeferredLock()
        self._closed = False
        # The one that runs has nothing under way that ends with this program.
        self.resting = False

    def load(self) -> list[pb.Job]:
        """Read what an earlier program left; those of its jobs that had not ended. Blocking, brief."""
        try:
            self._known = list(pb.Jobs.FromString(self._file.read_bytes()).jobs)
        except FileNotFoundError:
            return []
        except (OSError, DecodeError) as error:
            self.log.error("what is known of updates cannot be read, and begins anew: {error}", error=str(error))
            return []
        return [job for job in self._known if job.state in (WAITING, RUNNING)]

    def get(self, identity: str) -> list[pb.Job]:
        """One of them, or all. Raises `UnknownName`."""
        found = [job for job in self._known if identity in ("", job.id)]
        if identity and not found:
            raise UnknownName(f"there is no job {shown(identity)}")
        return found

    @property
    def under_way(self) -> str:
        """What runs and would end with this program; empty if nothing does."""
        return (
            "" if self.resting else next((asked.job.subject for asked in self._asked if asked.job.state == RUNNING), "")
        )

    def ask(self, kind: str, subject: str, key: bytes, work: Work) -> pb.Job:
        """Have this done behind what was asked for before; the same job where its `key` is that of one under way."""
        for asked in self._asked:
            if (asked.job.kind, asked.key) == (kind, key):
                return asked.job
        if len(self._asked) >= WAITING_MOST:
            raise Crowded(f"{len(self._asked)} updates wait for each other: ask again when some are done")
        job = pb.Job(id=uuid.uuid4().hex[:16], kind=kind, subject=subject, state=WAITING)
        self._known.append(job)
        del self._known[:-KEPT]
        asked = _Asked(job, key, work)
        self._asked.append(asked)
        if len(self._asked) == 1:
            self._begin(asked)
        return job

    def end(self, job: pb.Job, state: str, text: str) -> None:
        """It is over."""
        job.state, job.ended = state, self._now()
        kind = Kind.UPDATE_DONE if state == DONE else Kind.UPDATE_FAILED
        self.told(job, text, kind)

    def told(self, job: pb.Job, text: str = "", kind: Kind = Kind.UPDATE_STEP) -> None:
        """It has come this far."""
        job.text = _plain(text) or job.text
        said = f"{job.subject}: {job.text}"
        self._ring.event(said)
        self._journal.tell(kind, said, job=job.id, of=job.kind, before=job.before, after=job.after)
        (self.log.warn if kind is Kind.UPDATE_FAILED else self.log.info)("update: {said}", said=said)
        ensureDeferred(self._save())

    async def kept(self) -> None:
        """Wait until all that was told is on disk."""
        await self._save()

    async def close(self) -> None:
        """End what is under way: nothing half of it stays."""
        self._closed = True
        for asked in list(self._asked):
            if asked.under_way is not None:
                asked.under_way.cancel()
                # What must not be half done is done by then.
                await DeferredList([asked.under_way]).addTimeout(ENDING, self._reactor, _given_up)
        for asked in list(self._asked):
            if asked.job.state == WAITING:
                self._over(None, asked)
        await self._save()

    def _begin(self, asked: _Asked) -> None:
        asked.job.state, asked.job.began = RUNNING, self._now()
        asked.under_way = ensureDeferred(self._work(asked))
        asked.under_way.addBoth(self._over, asked)

    async def _work(self, asked: _Asked) -> None:
        step = Step(asked.job, self)
        try:
            step.say("begun")
            await asked.work(step)
        except CancelledError:
            self.end(asked.job, FAILED, "the node ended meanwhile: ask again")
        except NodeError as error:
            self.end(asked.job, FAILED, error.text)
        except Exception:  # noqa: BLE001 - logged, and told to whoever asks
            self.log.failure("an update failed")
            self.end(asked.job, FAILED, "a fault of the node's: its log has more")
        else:
            self.end(asked.job, DONE, asked.job.text)

    def _over(self, outcome: object, asked: _Asked) -> None:
        if isinstance(outcome, Failure):
            self.log.failure("an update ended badly", outcome)
        if asked in self._asked:
            self._asked.remove(asked)
        if asked.job.state == WAITING:
            self.end(asked.job, FAILED, "the node ended meanwhile: ask again")
        elif self._asked and not self._closed:
            self._begin(self._asked[0])

    async def _save(self) -> None:
        """In order, off the reactor's back."""
        await self._writing.acquire()
        try:
            packed = pb.Jobs(jobs=self._known).SerializeToString()
            await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), _write, self._file, packed)
        except OSError as error:
            self.log.error("what is known of updates cannot be written: {error}", error=str(error))
        finally:
            self._writing.release()


def _plain(text: str) -> str:
    """What may stand in a log, on a terminal and in each reply: not too long, and nothing that moves a cursor."""
    return cut("\n".join(map(printable, text.split("\n"))), TEXT)


def _given_up(*_: object) -> None:
    """It is ended together with the node."""


def _write(file: Path, packed: bytes) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_secret(file, packed)
