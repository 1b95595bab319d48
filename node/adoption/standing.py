"""What is on disk of the run that serves, as long as it does: another node goes on with it if this one is killed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError
from twisted.internet.defer import DeferredLock, ensureDeferred
from twisted.internet.threads import deferToThreadPool
from twisted.python.failure import Failure

from node.adoption import guard
from node.backend.desired import Accepted
from node.backend.generations import Generations
from node.contract.driver import Generation, HasProcess, LivesOn
from node.logs import Logger
from node.reactor import PooledReactor
from node.secret_file import write_secret
from protos import service_pb2
from protos.handover_pb2 import Run, Standing

# The form of the file; another one is not read.
FORMAT = 1
FILE = "core"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Counts(Protocol):
    """What was counted: see `node.traffic.polling`."""

    def last(self, run: Generation | None, mark: str = "") -> None: ...

    def last_only(self, mark: str) -> None: ...


class Runs(Protocol):
    @property
    def accepted(self) -> Accepted | None:
        """What the current run was asked for."""


class Backend(Protocol):
    """What runs: see `node.api.operations`."""

    @property
    def generations(self) -> Generations: ...

    @property
    def runner(self) -> Runs: ...

    @property
    def traffic(self) -> Counts: ...


class Handles:
    """Keeps the file, if cores live `on`."""

    log = Logger()

    def __init__(self, reactor: PooledReactor, directory: Path, on: bool, backend: Backend) -> None:
        self._reactor = reactor
        self._file = directory / FILE
        self._on = on
        self._backend = backend
        self._noted: Generation | None = None
        self._writing = DeferredLock()

    def start(self) -> None:
        """Follow the runs from now on."""
        if self._on:
            self._backend.generations.watch(self._changed)

    def _changed(self) -> None:
        run = self._backend.generations.current
        if run is not self._noted:
            self._noted = run
            ensureDeferred(self._note(run)).addErrback(self._failed)

    def _failed(self, failure: Failure) -> None:
        self.log.failure("another node cannot go on with the core", failure)

    async def _note(self, run: Generation | None) -> None:
        accepted, mark = self._backend.runner.accepted, mark_of(run)
        if run is None or accepted is None or not isinstance(run, LivesOn) or not mark:
            self._backend.traffic.last(None)
            run = None
        else:
            # Before the file: what it says is counted has to be.
            self._backend.traffic.last(run, mark)
        await self._writing.acquire()
        try:
            # Another one may have come meanwhile.
            if self._noted is run or run is None:
                await deferToThreadPool(self._reactor, self._reactor.getThreadPool(), self._write, run, accepted, mark)
                self._backend.traffic.last_only(mark)
        except OSError as error:
            self.log.error("another node cannot go on with the core: {error}", error=str(error))
        finally:
            self._writing.release()

    def _write(self, run: LivesOn | None, accepted: Accepted | None, mark: str) -> None:
        """In the pool: there may be many users in it."""
        left = run.handle if run is not None else None
        if left is None or accepted is None:
            self._file.unlink(missing_ok=True)
            return
        kind = service_pb2.Backend.FromString(accepted.request).type
        packed = Run(type=kind, pid=left.pid, core=left.packed, mark=mark, config=config_of(accepted))
        write_secret(self._file, Standing(format=FORMAT, run=packed).SerializeToString())


def mark_of(run: Generation | None) -> str:
    """What tells a run's process from all others that there were; empty where it has none."""
    pid = run.pid if isinstance(run, HasProcess) else None
    began = guard.began(pid) if pid is not None else ""
    return f"{_BOOT.read_text().strip()}:{pid}:{began}" if began else ""


def config_of(accepted: Accepted) -> str:
    """What a run was asked for, told from all else."""
    name, meaning, excluded = accepted.fingerprint
    words = "\0".join([name, meaning, *sorted(excluded)])
    return hashlib.sha256(words.encode()).hexdigest()


def read(directory: Path) -> Run | None:
    """What an earlier node left, if it is of this form. Raises `OSError`."""
    try:
        found = Standing.FromString((directory / FILE).read_bytes())
    except (FileNotFoundError, DecodeError):
        return None
    return found.run if found.format == FORMAT and found.HasField("run") else None
