"""What is on disk of the runs that serve, as long as they do: another node goes on with them if this one is killed."""

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
from node.backend.standing import Standing as Stands
from node.contract.driver import Generation, HasProcess, LivesOn
from node.logs import Logger
from node.reactor import PooledReactor
from node.secret_file import write_secret
from protos import service_pb2
from protos.handover_pb2 import Handover, Run, Standing

# The form of the files; another one is not read.
FORMAT = 1
# The current run, and those that drain, each with its process number.
FILE, DRAINS = "core", "drains-{}"
NAMES = guard.NODE, FILE, DRAINS.format("*")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Counts(Protocol):
    """What was counted: see `node.traffic.polling`."""

    async def last(self, runs: Mapping[Generation, str]) -> None: ...

    def last_only(self) -> None: ...


class Runs(Protocol):
    @property
    def standing(self) -> Stands | None:
        """The runs as they are."""


class Backend(Protocol):
    """What runs: see `node.api.operations`."""

    @property
    def generations(self) -> Generations: ...

    @property
    def runner(self) -> Runs: ...

    @property
    def traffic(self) -> Counts: ...


@dataclass(frozen=True)
class Noted:
    """A run, what it runs, and since when it drains, if it does. `mark` tells it from all others."""

    run: LivesOn
    accepted: Accepted
    mark: str
    since: float = 0.0


class Handles:
    """Keeps the files, if cores live `on`."""

    log = Logger()

    def __init__(self, reactor: PooledReactor, directory: Path, on: bool, backend: Backend) -> None:
        self._reactor = reactor
        self._directory = directory
        self._on = on
        self._backend = backend
        self._seen: Sequence[Generation] = ()
        # Of which runs there are files, by their names.
        self._there: dict[str, Generation] = {}
        self._writing = DeferredLock()

    def start(self) -> None:
        """Follow the runs from now on."""
        if self._on:
            self._backend.generations.watch(self._changed)

    def _changed(self) -> None:
        if self._backend.generations.serving != self._seen:
            self._seen = self._backend.generations.serving
            ensureDeferred(self._note()).addErrback(self._failed)

    def _failed(self, failure: Failure) -> None:
        self.log.failure("another node cannot go on with the cores", failure)

    async def _note(self) -> None:
        # Those who told us have more to do before all is as it will be.
        await deferLater(self._reactor, 0)
        await self._writing.acquire()
        try:
            files = dict(_files(self._backend.runner.standing))
            # Before the files: what they say is counted has to be on disk.
            await self._backend.traffic.last({noted.run: noted.mark for noted in files.values()})
            await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), self._write, files)
            self._backend.traffic.last_only()
        except OSError as error:
            self.log.error("another node cannot go on with the cores: {error}", error=str(error))
        finally:
            self._writing.release()

    def _write(self, files: Mapping[str, Noted]) -> None:
        """Those that drain go first: each is in some file all the time. In the pool, for there may be many users."""
        for name in sorted(files, key=lambda name: name == FILE):
            noted = files[name]
            if self._there.get(name) is not noted.run and (packed := _packed(noted)) is not None:
                self._there.pop(name, None)
                write_secret(self._directory / name, packed)
                self._there[name] = noted.run
        kept = {name for name, noted in files.items() if self._there.get(name) is noted.run}
        for path in (self._directory / FILE, *self._directory.glob(DRAINS.format("*"))):
            if path.name not in kept:
                path.unlink(missing_ok=True)
        self._there = {name: self._there[name] for name in kept}


def _files(standing: Stands | None) -> Iterable[tuple[str, Noted]]:
    """Of which runs there should be files. Without one that serves new connections nobody goes on with any."""
    if standing is None or (current := _noted(standing.current, standing.accepted)) is None:
        return
    yield FILE, current
    for each in standing.draining:
        if (noted := _noted(each.run, each.accepted, each.since)) is not None:
            yield DRAINS.format(each.run.pid if isinstance(each.run, HasProcess) else 0), noted


def _noted(run: Generation, accepted: Accepted, since: float = 0.0) -> Noted | None:
    mark = mark_of(run)
    return Noted(run, accepted, mark, since) if isinstance(run, LivesOn) and mark else None


def _packed(noted: Noted) -> bytes | None:
    left, accepted = noted.run.handle, noted.accepted
    if left is None:
        return None
    packed = Run(
        type=service_pb2.Backend.FromString(accepted.request).type,
        pid=left.pid,
        core=left.packed,
        mark=noted.mark,
        config=config_of(accepted),
    )
    if noted.since:
        packed.since, packed.backend, packed.routing = noted.since, accepted.request, accepted.routing.pack()
    return Standing(format=FORMAT, run=packed).SerializeToString()


def mark_of(run: Generation | None) -> str:
    """What tells a run's process from all others that there were; empty where it has none."""
    pid = run.pid if isinstance(run, HasProcess) else None
    began = guard.began(pid) if pid is not None else ""
    return f"{_boot()}:{pid}:{began}" if began else ""


def _boot() -> str:
    """Which start of the machine this is: after it process numbers, and when processes began, are those of others."""
    return _BOOT.read_text().strip()


def config_of(accepted: Accepted) -> str:
    """What a run was asked for, told from all else."""
    name, meaning, excluded = accepted.fingerprint
    words = "\0".join([name, meaning, *sorted(excluded)])
    return hashlib.sha256(words.encode()).hexdigest()


def read(directory: Path) -> Handover | None:
    """What an earlier node left, as far as it is of this form. Raises `OSError`."""
    current = _read(directory / FILE)
    if current is None:
        return None
    found = filter(None, map(_read, directory.glob(DRAINS.format("*"))))
    draining = sorted((run for run in found if run.pid != current.pid), key=lambda run: run.since)
    for run in draining:
        if run.config == current.config:
            # It needs no plan of its own.
            run.ClearField("backend")
    return Handover(run=current, draining=draining)


def _read(path: Path) -> Run | None:
    with suppress(FileNotFoundError, DecodeError):
        found = Standing.FromString(path.read_bytes())
        if found.format == FORMAT and found.run.mark.startswith(f"{_boot()}:"):
            return found.run
    return None
