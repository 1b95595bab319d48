"""Hand-over files of the serving runs: with them the next node adopts the cores if this one is killed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError
from twisted.internet.defer import DeferredLock, ensureDeferred
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

from node.adoption import guard
from node.backend.desired import Accepted
from node.backend.generations import Generations
from node.backend.snapshot import Snapshot
from node.contract.driver import Generation, HasProcess, LivesOn
from node.logs import Logger
from node.reactor import PooledReactor
from node.secret_file import write_secret
from protos import service_pb2
from protos.handover_pb2 import Handover, Run, Standing

# The format of the files; other formats are not read.
FORMAT = 1
# The file of the current run, and those of draining ones, named by PID.
FILE, DRAINS = "core", "drains-{}"
NAMES = guard.NODE, FILE, DRAINS.format("*")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class TrafficCounts(Protocol):
    """The traffic counts: see `node.traffic.polling`."""

    async def persist(self, runs: Mapping[Generation, str]) -> None: ...

    def forget_others(self) -> None: ...


class Runs(Protocol):
    @property
    def snapshot(self) -> Snapshot | None:
        """A snapshot of the runs; None without a current one."""


class RunsAndTraffic(Protocol):
    """The backend: see `node.api.operations`."""

    @property
    def generations(self) -> Generations: ...

    @property
    def runner(self) -> Runs: ...

    @property
    def traffic(self) -> TrafficCounts: ...


@dataclass(frozen=True)
class DescribedRun:
    """A run to describe in a file: its accepted backend, its unique mark, and when it began to drain (0: never)."""

    run: LivesOn
    accepted: Accepted
    mark: str
    since: float = 0.0


class HandoverFiles:
    """Keeps the hand-over files in step with the runs; does nothing without `on`."""

    log = Logger()

    def __init__(self, reactor: PooledReactor, directory: Path, on: bool, backend: RunsAndTraffic) -> None:
        self._reactor = reactor
        self._directory = directory
        self._on = on
        self._backend = backend
        self._seen: Sequence[Generation | None] = ()
        # The runs that have files, by file name.
        self._written: dict[str, Generation] = {}
        self._writing = DeferredLock()

    def start(self) -> None:
        """Begin to follow the runs."""
        if self._on:
            self._backend.generations.watch(self._changed)

    def _changed(self) -> None:
        # A run that takes over gets a file when it is the current one.
        runs = self._backend.generations
        if (snapshot := (runs.current, *runs.draining)) != self._seen:
            self._seen = snapshot
            ensureDeferred(self._update()).addErrback(self._failed)

    def _failed(self, failure: Failure) -> None:
        self.log.failure("hand-over files not written: the next node cannot adopt the cores", failure)

    async def _update(self) -> None:
        # The caller has not finished its changes of the runs yet.
        await deferLater(self._reactor, 0)
        await self._writing.acquire()
        try:
            files = dict(_files(self._backend.runner.snapshot))
            # Before the files: the counters booked for these runs must be on disk first.
            await self._backend.traffic.persist({described.run: described.mark for described in files.values()})
            await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), self._write, files)
            self._backend.traffic.forget_others()
        except OSError as error:
            self.log.error(
                "hand-over files not written: the next node cannot adopt the cores: {error}", error=str(error)
            )
        finally:
            self._writing.release()

    def _write(self, files: Mapping[str, DescribedRun]) -> None:
        """Write the files, draining runs first, so that each run is always in some file. Called in a pool thread."""
        for name in sorted(files, key=lambda name: name == FILE):
            described = files[name]
            if self._written.get(name) is not described.run and (packed := _packed(described)) is not None:
                self._written.pop(name, None)
                write_secret(self._directory / name, packed)
                self._written[name] = described.run
        kept = {name for name, described in files.items() if self._written.get(name) is described.run}
        for path in (self._directory / FILE, *self._directory.glob(DRAINS.format("*"))):
            if path.name not in kept:
                path.unlink(missing_ok=True)
        self._written = {name: self._written[name] for name in kept}


def _files(snapshot: Snapshot | None) -> Iterable[tuple[str, DescribedRun]]:
    """Yield the files that should exist: none if the current run cannot be adopted, as no other is adopted then."""
    if snapshot is None or (current := _described(snapshot.current, snapshot.accepted)) is None:
        return
    yield FILE, current
    for each in snapshot.draining:
        if (described := _described(each.run, each.accepted, each.since)) is not None:
            yield DRAINS.format(each.run.pid if isinstance(each.run, HasProcess) else 0), described


def _described(run: Generation, accepted: Accepted, since: float = 0.0) -> DescribedRun | None:
    mark = mark_of(run)
    return DescribedRun(run, accepted, mark, since) if isinstance(run, LivesOn) and mark else None


def _packed(described: DescribedRun) -> bytes | None:
    left, accepted = described.run.handle, described.accepted
    if left is None:
        return None
    packed = Run(
        type=service_pb2.Backend.FromString(accepted.request).type,
        pid=left.pid,
        core=left.packed,
        mark=described.mark,
        config=config_of(accepted),
    )
    if described.since:
        packed.since, packed.backend, packed.routing = described.since, accepted.request, accepted.routing.pack()
    return Standing(format=FORMAT, run=packed).SerializeToString()


def mark_of(run: Generation | None) -> str:
    """A unique mark of a run's process (boot, PID, start time); empty without a process."""
    pid = run.pid if isinstance(run, HasProcess) else None
    began = guard.began(pid) if pid is not None else ""
    return f"{_boot()}:{pid}:{began}" if began else ""


def _boot() -> str:
    """The kernel's boot id: after a reboot the same PIDs and start times may belong to other processes."""
    return _BOOT.read_text().strip()


def config_of(accepted: Accepted) -> str:
    """A hash that identifies the accepted configuration of a run."""
    name, meaning, excluded = accepted.fingerprint
    words = "\0".join([name, meaning, *sorted(excluded)])
    return hashlib.sha256(words.encode()).hexdigest()


def read(directory: Path) -> Handover | None:
    """Read the hand-over files of a killed node, as far as their format and boot id match. Raises `OSError`."""
    current = _read(directory / FILE)
    if current is None:
        return None
    found = filter(None, map(_read, directory.glob(DRAINS.format("*"))))
    draining = sorted((run for run in found if run.pid != current.pid), key=lambda run: run.since)
    for run in draining:
        if run.config == current.config:
            # It can use the current run's plan.
            run.ClearField("backend")
    return Handover(run=current, draining=draining)


def _read(path: Path) -> Run | None:
    with suppress(FileNotFoundError, DecodeError):
        found = Standing.FromString(path.read_bytes())
        if found.format == FORMAT and found.run.mark.startswith(f"{_boot()}:"):
            return found.run
    return None
