"""A core as a child process: spawned with a clean environment, its lines split, its end awaited, never orphaned.

Everything here spawns by posix_spawn (`spawnProcess` without path, uid or gid): a fork while gRPC's threads run can
kill the child before it executes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from drivers import leash
from drivers.interface import Exit
from node.errors import CoreFailed
from node.logs import Logger

# In the environment of every process that we spawn, with `mark` of the owner's directory: how the sweep finds them.
MARK = "TXNODE_OWNER"
# Characters of a line that are kept; what follows up to the newline is cut.
MAX_LINE = 64 * 1024
# Lines of a process that are kept to say why it ended.
LAST_LINES = 50
TERM_SECONDS = 5.0
# Bytes that wait for the node in each of a core's outputs, if the kernel lets us; what it gives by itself lasts for 200
# connections, after which sing-box lets new ones wait and Xray drops lines.
PIPE = 1024 * 1024
_USUAL_PIPE = 64 * 1024


class LineSplitter:
    """Bytes in, whole lines out. Cuts lines over MAX_LINE instead of growing."""

    def __init__(self) -> None:
        self._tail = b""
        self._cutting = False

    def feed(self, data: bytes) -> list[str]:
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            self._keep(tail)
            return []
        lines = (self._tail + head).split(b"\n")
        self._tail, self._cutting = b"", False
        self._keep(tail)
        return [line[:MAX_LINE].decode("utf-8", "replace").rstrip("\r") for line in lines]

    def flush(self) -> list[str]:
        """The last line, if it had no newline."""
        tail, self._tail, self._cutting = self._tail, b"", False
        return [tail.decode("utf-8", "replace")] if tail else []

    def _keep(self, tail: bytes) -> None:
        if self._cutting:
            return
        self._tail += tail
        if len(self._tail) >= MAX_LINE:
            self._tail, self._cutting = self._tail[:MAX_LINE], True


class CoreProcess(ProcessProtocol):
    """A running child. `on_lines` gets its output, stdout and stderr alike, a batch at a time.

    `sift` sees all of it first, and returns what may be kept and handed on.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        on_lines: Callable[[list[str]], None],
        sift: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self._reactor = reactor
        self._on_lines = on_lines
        self._sift = sift
        self._splitters = {1: LineSplitter(), 2: LineSplitter()}
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._waiting: list[Deferred[Exit]] = []
        self._kill: IDelayedCall | None = None
        self.exit: Exit | None = None

    @property
    def pid(self) -> int | None:
        """The process number while it runs."""
        return getattr(self.transport, "pid", None)

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._last)

    def connectionMade(self) -> None:
        for pipe in cast("Any", self.transport).pipes.values():
            widen(pipe.fd)

    def childDataReceived(self, childFD: int, data: bytes) -> None:  # noqa: N803
        self._take(self._splitters[childFD].feed(data))

    def processEnded(self, reason: Failure) -> None:
        """The process is gone and its pipes are drained."""
        for splitter in self._splitters.values():
            self._take(splitter.flush())
        killed: int | None = getattr(reason.value, "signal", None)
        code: int | None = getattr(reason.value, "exitCode", None)
        if self._kill is not None and self._kill.active():
            self._kill.cancel()
        self.exit = Exit(-killed if killed else code or 0, self.last_lines)
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(self.exit)

    def when_exited(self) -> Deferred[Exit]:
        """Fires at the end of the process; a Deferred of its own for each caller."""
        waiter: Deferred[Exit] = Deferred(lambda gone: self._waiting.remove(gone))
        if self.exit is not None:
            waiter.callback(self.exit)
        else:
            self._waiting.append(waiter)
        return waiter

    async def stop(self) -> Exit:
        """TERM, five seconds, KILL."""
        self.signal(signal.SIGTERM)
        if self._kill is None and self.exit is None:
            # Stays when who waits here gives up.
            self._kill = self._reactor.callLater(TERM_SECONDS, self.signal, signal.SIGKILL)
        return await self.when_exited()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that is gone already is fine."""
        if self.exit is None and self.transport is not None:
            try:
                self.transport.signalProcess(number.name.removeprefix("SIG"))
            except ProcessExitedAlready:
                self.log.debug("{pid} was gone before {signal}", pid=self.pid, signal=number.name)

    def _take(self, lines: list[str]) -> None:
        kept = self._sift(lines)
        if kept:
            self._last.extend(kept)
            self._on_lines(kept)


def spawn(
    process: CoreProcess,
    reactor: Any,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    owner: Path,
    files: Mapping[int, int],
) -> None:
    """Start `command` (an absolute path first). `files` maps the child's descriptors to ours, 0 among them.

    `owner` is a directory that one node has at a time. Raises `CoreFailed` if the command cannot be run.
    """
    try:
        reactor.spawnProcess(
            process,
            command[0],
            command,
            env={**environment, MARK: mark(owner)},
            childFDs={1: "r", 2: "r", **files},
        )
    except OSError as fault:
        raise CoreFailed(f"{command[0]} cannot be run: {fault}") from fault


def widen(pipe: int) -> None:
    """Have a pipe hold more; half of it where that is refused, and so on (pipe(7): limits of a pipe and of a user)."""
    size = PIPE
    while size > _USUAL_PIPE:
        try:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)
            return
        except OSError:
            size //= 2


def mark(owner: Path) -> str:
    """A directory, whatever its path: in containers of one host each node may have the same. Raises `OSError`."""
    found = owner.stat()
    return f"{found.st_dev}:{found.st_ino}"


def leashed(command: Sequence[str], setpriv: str | None = None) -> list[str]:
    """The same command, ended by the kernel when this process ends: by way of what `find_setpriv` found, or of ours."""
    if setpriv is not None:
        return [setpriv, "--pdeathsig", "KILL", "--", *command]
    return [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *command]


async def find_setpriv(reactor: Any, *, environment: Mapping[str, str], owner: Path) -> str | None:
    """The setpriv(1) of this machine, if it has one that knows parent-death signals: it takes 1 ms, our script 11.

    It does not look whether the parent died before the kernel was asked; such a core is swept at the next start.
    """
    found = shutil.which("setpriv", path=os.defpath)
    if found is None:
        return None
    tried = await run(reactor, leashed([found, "--version"], found), environment=environment, owner=owner)
    return found if tried.code == 0 else None


@dataclass(frozen=True)
class Done:
    """A command that ran to its end."""

    code: int
    lines: tuple[str, ...]
    output: bytes


async def run(
    reactor: Any,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    owner: Path,
    stdin: bytes = b"",
    seconds: float = 30.0,
    output: int = 3,
) -> Done:
    """Run a command that ends by itself. What it writes to the descriptor `output` is the result's `output`.

    Raises `CoreFailed` if it hangs.
    """
    lines: list[str] = []
    process = CoreProcess(reactor, lines.extend)
    source, sink = memory_file(stdin), memory_file(b"")
    try:
        spawn(process, reactor, command, environment=environment, owner=owner, files={0: source, output: sink})
        late = reactor.callLater(seconds, process.signal, signal.SIGKILL)
        try:
            ended = await process.when_exited()
            if not late.active():
                raise CoreFailed(f"{Path(command[0]).name} did not answer within {seconds:g} s")
        except CancelledError:
            process.signal(signal.SIGKILL)
            raise
        finally:
            if late.active():
                late.cancel()
        return Done(ended.code, tuple(lines), os.pread(sink, os.fstat(sink).st_size, 0))
    finally:
        os.close(source)
        os.close(sink)


def memory_file(content: bytes) -> int:
    """A descriptor of an anonymous file, at its beginning: a child reads it without a pipe or a trace on disk."""
    descriptor = os.memfd_create("txnode", os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def sweep(owner: Path) -> list[int]:
    """Kill what an earlier node with this directory left behind, and wait for it. Returns the process numbers."""
    ours = mark(owner)
    orphans = [process for process in psutil.process_iter() if _mark(process) == ours]
    for orphan in orphans:
        with suppress(psutil.NoSuchProcess):
            orphan.kill()
    deadline = time.monotonic() + TERM_SECONDS
    while any(map(_runs, orphans)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [orphan.pid for orphan in orphans]


def _runs(process: psutil.Process) -> bool:
    """A zombie holds no port: whoever its parent is may reap it later."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _mark(process: psutil.Process) -> str | None:
    try:
        found = process.environ().get(MARK)
    except (psutil.Error, OSError):
        return None  # gone, or another user's: not ours
    return found if process.pid != os.getpid() else None
