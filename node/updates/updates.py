"""Update requests of controllers, and the periodic check for newer geo files."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial

from google.protobuf.message import Message

from node import __version__
from node.base.errors import Forbidden, InvalidRequest, shown
from node.base.part import Part
from node.base.periodic import Periodic
from node.base.secret_file import clear
from node.contract.driver import Driver
from node.updates.jobs import DONE, ENDED, FAILED, RUNNING, Jobs, Work
from node.updates.policy import Policy, Sources
from node.updates.program import NEWEST, Program
from node.updates.replaceable import Kit, ReplaceableCore, ReplaceableLists
from protos import service_pb2 as pb

CORE, GEO, NODE, RESET = "core", "geo", "node", "reset"
# The most files of one request.
FILES = 8
# The most characters of a version, a digest or a name in a request: all real ones are shorter.
WORD = 128
# Seconds between two checks whether geo files are due, and the largest random extension of the period, as a part of it,
# so that nodes do not all ask at the same moment.
LOOK, SPREAD = 600.0, 0.1
# Seconds until a check that failed is tried again.
AGAIN = 3600.0


class Updates(Part):
    """Updates of cores, geo files and the node itself. A request begins a job; all requests raise `NodeError`."""

    title = "the updates"

    def __init__(
        self,
        kit: Kit,
        jobs: Jobs,
        program: Program,
        drivers: Mapping[int, Driver],
        policy: Policy,
        sources: Sources,
    ) -> None:
        self.jobs = jobs
        self._kit = kit
        self._program = program
        self._drivers = drivers
        self._policy = policy
        self._sources = sources
        self._every = policy.lists_every * (1 + random.random() * SPREAD)  # noqa: S311 - no secret
        self._looking = Periodic("checking for newer geo files", self._look, LOOK, kit.reactor)
        self._asked = 0.0
        self._left: list[pb.Job] = []

    @property
    def warnings(self) -> list[str]:
        """Warnings if the periodic check fails."""
        return self._looking.warnings

    # Requests

    def core(self, request: pb.UpdateCoreRequest) -> pb.Job:
        """Queue an update of a core."""
        self._require_programs()
        driver = self._drivers.get(request.type)
        if driver is None:
            raise InvalidRequest(f"this node has no core of type {request.type}")
        if request.back == bool(request.version):
            raise InvalidRequest("set either version or back: one of them, and not both")
        _require_short(request.version, request.sha256)
        core = ReplaceableCore(self._kit, driver)
        mirror = self._sources.mirrors.get(driver.name, "")
        update = partial(core.update, request.version, request.sha256.lower(), mirror)
        which = "back to the earlier release" if request.back else shown(request.version)[1:-1]
        return self._ask(CORE, f"{driver.name} {which}", request, core.go_back if request.back else update)

    def newest_core(self, version: str) -> pb.Job:
        """Queue an update of the core that runs, or of the default one, to this version or the newest known one."""
        running = self._kit.trial.core
        types = [kind for kind in self._drivers if running and self._drivers[kind].name == running]
        kind = next(iter(types), min(self._drivers))
        known = version or self._sources.newest[self._drivers[kind].name]
        return self.core(pb.UpdateCoreRequest(type=kind, version=known))  # type: ignore[arg-type]

    def geo(self, request: pb.UpdateGeoFilesRequest, region: str = "") -> pb.Job:
        """Queue an update of geo files, from the usual server or from that of a region."""
        if not self._policy.lists:
            raise Forbidden("geo file updates are off on this node (GEO_UPDATES=off)")
        if len(request.files) > FILES or (request.back and request.files):
            raise InvalidRequest(f"set either files, at most {FILES}, or back, not both")
        _require_short(*(word for file in request.files for word in (file.name, file.sha256)))
        wanted = {file.name: file.sha256.lower() for file in request.files}
        lists = ReplaceableLists(self._kit, self._drivers[self._sources.reads_lists])
        update = partial(lists.update, wanted, self._policy.lists_of(region) if region else self._policy.lists_url)
        subject = "geo files back to the earlier ones" if request.back else " ".join(("geo files", region)).strip()
        return self._ask(GEO, subject, request, lists.go_back if request.back else update)

    def newest_node(self) -> pb.Job:
        """Queue an update of the node to the newest version that is offered to its machine."""
        self._require_programs()
        return self._ask(NODE, "txnode, the newest", pb.UpdateNodeRequest(), partial(self._program.update, NEWEST, ""))

    def reset(self) -> pb.Job:
        """Queue a fresh start of the core beside the old one, and a hand-over to a fresh process of the node."""
        reset = partial(self._program.reset, renew=self._kit.trial.renew)
        return self._ask(RESET, "a fresh core and a fresh process", pb.Empty(), reset)

    def node(self, request: pb.UpdateNodeRequest) -> pb.Job:
        """Queue an update of the node."""
        self._require_programs()
        _require_short(request.version, request.sha256)
        update = partial(self._program.update, request.version, request.sha256.lower())
        subject = f"txnode {shown(request.version)[1:-1] or 'as it is installed'}"
        return self._ask(NODE, subject, request, update)

    async def get(self, request: pb.JobRequest) -> pb.Jobs:
        """Report one job or all, once this state of them is on disk."""
        found = pb.Jobs(jobs=self.jobs.get(request.id))
        await self.jobs.written()
        return found

    def _ask(self, kind: str, subject: str, request: Message, work: Work) -> pb.Job:
        # A waiting job keeps the request: not its unknown fields.
        request.DiscardUnknownFields()
        return self.jobs.ask(kind, subject, request.SerializeToString(deterministic=True), work)

    def _require_programs(self) -> None:
        if not self._policy.programs:
            raise Forbidden(
                "program updates are off on this node: UPDATES=on lets keys of scope all replace cores and the node"
            )

    # The life of the node

    def start(self) -> None:
        """Read the jobs of the previous node process, and remove releases that it did not bring into use.

        Blocking, brief.
        """
        # Again: the node before may have changed it until its end.
        self._kit.record.load()
        for name in ("jobs", "chosen"):
            clear(self._kit.directory / name)
        self._program.withdraw()
        self._left = self.jobs.load()
        self._kit.record.clear(*(self._kit.directory / thing.place for thing in (ReplaceableCore, ReplaceableLists)))

    def settle(self, outcome: str | None) -> None:
        """Settle the jobs left from the previous process, which is sure to have ended.

        `outcome` of the upgrade in place; None if there was none.
        """
        for job in self._left:
            # Only a job that ran may have succeeded; those that waited have not begun.
            if job.kind in (NODE, RESET) and job.state == RUNNING:
                self._end_update(job, outcome)
            else:
                self.jobs.end(job, FAILED, ENDED)
        self._left = []
        if self._policy.lists_every and self._policy.lists:
            self._looking.start()
            self._look()

    @property
    def unsteady(self) -> str:
        subject = self.jobs.under_way
        return f"an update of {subject} is under way" if subject else ""

    async def finish(self) -> None:
        """Answer those who wait for a job: the node is about to end."""
        self.jobs.release()

    async def leave(self) -> None:
        await self.jobs.leave()

    async def stop(self) -> None:
        """End the running job, and fail those that wait."""
        self._looking.stop()
        await self.jobs.stop()

    def _end_update(self, job: pb.Job, outcome: str | None) -> None:
        """End a job of the previous process that updated the node, or go on with it while its version is installed."""
        if self._program.installs and not outcome:
            self.jobs.go_on(job, self._program.follow)
        # No outcome: the node was killed or stopped, maybe after the new version was on disk, which then runs now.
        elif (outcome == "" and job.after in ("", __version__)) or (
            outcome is None and job.before != job.after == __version__
        ):
            job.after = __version__
            self.jobs.end(job, DONE, f"{__version__} runs")
        else:
            self.jobs.end(job, FAILED, outcome or ENDED)

    def _look(self) -> None:
        now = self._kit.now()
        # A time in the future, from a clock that was ahead, does not delay the check.
        if not 0 <= now - self._kit.record.looked < self._every and now - self._asked >= AGAIN:
            self._asked = now
            self.geo(pb.UpdateGeoFilesRequest())


def _require_short(*words: str) -> None:
    for word in words:
        if len(word) > WORD:
            raise InvalidRequest(f"{shown(word)} is longer than {WORD} characters")
