"""Update requests of controllers, and the periodic check for newer geo files."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from google.protobuf.message import Message

from node import __version__
from node.base.errors import Forbidden, InvalidRequest, shown
from node.base.logs import LogRing
from node.base.periodic import Periodic
from node.base.reactor import PooledReactor
from node.base.secret_file import clear
from node.contract.choices import Choices
from node.contract.driver import Driver
from node.events.journal import Tells
from node.updates.chosen import Record
from node.updates.cores import Cores
from node.updates.jobs import DONE, ENDED, FAILED, RUNNING, Jobs, Refused, Step
from node.updates.lists import Lists
from node.updates.policy import Policy, Sources
from node.updates.program import Program
from node.updates.tool import Run, Tool
from node.updates.trial import Runner, Trial
from protos import service_pb2 as pb

CORE, GEO, NODE = "core", "geo", "node"
# The most files of one request.
FILES = 8
# The most characters of a version, a digest or a name in a request: all real ones are shorter.
WORD = 128
# Seconds between two checks whether geo files are due, and the largest random extension of the period, as a part of it,
# so that nodes do not all ask at the same moment.
LOOK, SPREAD = 600.0, 0.1
# Seconds until a check that failed is tried again.
AGAIN = 3600.0
ASK_FOR = "program updates are off on this node: UPDATES=on lets keys of scope all replace cores and the node"


class Updates:
    """Satisfies `node.api.operations.Updates`. `choices` follow `record`.

    `kept` has the copy of the node's modules to which a failed upgrade returns.
    """

    def __init__(
        self,
        reactor: PooledReactor,
        directory: Path,
        *,
        kept: Path,
        ring: LogRing,
        journal: Tells,
        policy: Policy,
        sources: Sources,
        drivers: Mapping[int, Driver],
        runner: Runner,
        record: Record,
        choices: Choices,
        run: Run,
        environment: Mapping[str, str],
        test: Callable[[Path], Awaitable[str]],
        become: Callable[[], Awaitable[str]],
        now: Callable[[], float] = time.time,
    ) -> None:
        tool, trial = Tool(run, environment, policy.proxy), Trial(reactor, runner)
        self.jobs = Jobs(reactor, directory / "jobs", ring, journal, now)
        self._directory = directory
        self._policy = policy
        self._drivers = drivers
        self._record = record
        self._now = now
        self._cores = Cores(
            *(reactor, directory / "cores", tool, trial, record, choices), sources.mirrors, sources.configured
        )
        self._lists = Lists(
            *(reactor, directory / "geo", tool, trial, record, choices),
            url=policy.lists_url,
            configured=sources.lists_configured,
            reads=lambda: drivers[sources.reads_lists],
            now=now,
        )
        self._program = Program(reactor, directory / "node", kept, tool, policy.program_url, test, become)
        self._every = policy.lists_every * (1 + random.random() * SPREAD)  # noqa: S311 - no secret
        self._looking = Periodic("checking for newer geo files", self._look, LOOK, reactor)
        self._asked = 0.0
        self._left: list[pb.Job] = []

    @property
    def warnings(self) -> list[str]:
        """Warnings if the periodic check fails."""
        return self._looking.warnings

    # Requests

    def core(self, request: pb.UpdateCoreRequest) -> pb.Job:
        """Queue an update of a core. Raises `Forbidden` and `InvalidRequest`, as the next two do."""
        self._require(self._policy.programs, ASK_FOR)
        driver = self._drivers.get(request.type)
        if driver is None:
            raise InvalidRequest(f"this node has no core of type {request.type}")
        if request.back == bool(request.version):
            raise InvalidRequest("set either version or back: one of them, and not both")
        _require_short(request.version, request.sha256)
        subject = f"{driver.name} {'back to the earlier release' if request.back else shown(request.version)[1:-1]}"

        async def work(step: Step) -> None:
            if request.back:
                await self._cores.go_back(driver, step)
            else:
                await self._cores.update(driver, request.version, request.sha256.lower(), step)

        return self._ask(CORE, subject, request, work)

    def geo(self, request: pb.UpdateGeoFilesRequest) -> pb.Job:
        self._require(self._policy.lists, "geo file updates are off on this node (GEO_UPDATES=off)")
        if len(request.files) > FILES or (request.back and request.files):
            raise InvalidRequest(f"set either files, at most {FILES}, or back, not both")
        _require_short(*(word for file in request.files for word in (file.name, file.sha256)))
        wanted = {file.name: file.sha256.lower() for file in request.files}

        async def work(step: Step) -> None:
            await (self._lists.go_back(step) if request.back else self._lists.update(wanted, step))

        subject = "geo files back to the earlier ones" if request.back else "geo files"
        return self._ask(GEO, subject, request, work)

    def node(self, request: pb.UpdateNodeRequest) -> pb.Job:
        self._require(self._policy.programs, ASK_FOR)

        async def work(step: Step) -> None:
            await self._program.update(request.version, request.sha256.lower(), step)

        _require_short(request.version, request.sha256)
        subject = f"txnode {shown(request.version)[1:-1] or 'as it is installed'}"
        return self._ask(NODE, subject, request, work)

    async def get(self, request: pb.JobRequest) -> pb.Jobs:
        """Report one job or all, once this state of them is on disk. Raises `UnknownName`."""
        found = pb.Jobs(jobs=self.jobs.get(request.id))
        await self.jobs.written()
        return found

    def _ask(self, kind: str, subject: str, request: Message, work: Callable[[Step], Awaitable[None]]) -> pb.Job:
        # A waiting job keeps the request: not its unknown fields.
        request.DiscardUnknownFields()
        return self.jobs.ask(kind, subject, request.SerializeToString(deterministic=True), work)

    @staticmethod
    def _require(allowed: bool, otherwise: str) -> None:
        if not allowed:
            raise Forbidden(otherwise)

    # The process

    def load(self) -> None:
        """Read the jobs of the previous node process, and remove releases that it did not bring into use.

        Blocking, brief.
        """
        for name in ("jobs", "chosen"):
            clear(self._directory / name)
        self._left = self.jobs.load()
        self._cores.clear()
        self._lists.clear()

    def begin(self, outcome: str | None) -> None:
        """Settle the jobs left from the previous process. `outcome` of the upgrade in place; None if there was none."""
        for job in self._left:
            # Only a job that ran may have succeeded; those that waited have not begun.
            if job.kind == NODE and job.state == RUNNING:
                self._settle(job, outcome)
            else:
                self.jobs.end(job, FAILED, ENDED)
        self._left = []
        if self._policy.lists_every and self._policy.lists:
            self._looking.start()
            self._look()

    async def close(self) -> None:
        self._looking.stop()
        await self.jobs.close()

    def _settle(self, job: pb.Job, outcome: str | None) -> None:
        """End a job of the previous process that updated the node."""
        # No outcome: the node was killed, maybe after the new version was on disk, which then runs now.
        if outcome == "" or (outcome is None and job.after and self._program.is_installed(job.after)):
            job.after = __version__
            self.jobs.end(job, DONE, f"{__version__} runs")
            return
        reason = outcome or ENDED
        if not job.after:
            self.jobs.end(job, FAILED, reason)
            return

        async def put_back(step: Step) -> None:
            await self._program.put_back(step)
            raise Refused(reason)

        self.jobs.end(job, FAILED, reason)
        self.jobs.ask(NODE, f"txnode {__version__} back on disk", b"back", put_back)

    def _look(self) -> None:
        now = self._now()
        # A time in the future, from a clock that was ahead, does not delay the check.
        if not 0 <= now - self._record.looked < self._every and now - self._asked >= AGAIN:
            self._asked = now
            self.geo(pb.UpdateGeoFilesRequest())


def _require_short(*words: str) -> None:
    for word in words:
        if len(word) > WORD:
            raise InvalidRequest(f"{shown(word)} is longer than {WORD} characters")
