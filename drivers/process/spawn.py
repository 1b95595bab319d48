"""Starting a child process, and running one to its end.

Everything here spawns by posix_spawn (`spawnProcess` without path, uid or gid): a fork while gRPC's threads run can
kill the child before it executes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from twisted.internet.defer import CancelledError

from drivers.process import leash
from drivers.process.child import CoreProcess
from drivers.process.orphans import MARK, mark
from node.errors import CoreFailed
from node.reactor import Reactor


def spawn(
    process: CoreProcess,
    reactor: Reactor,
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


def leashed(command: Sequence[str], setpriv: str | None = None) -> list[str]:
    """The same command, ended by the kernel when this process ends: by way of what `find_setpriv` found, or of ours."""
    if setpriv is not None:
        return [setpriv, "--pdeathsig", "KILL", "--", *command]
    return [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *command]


async def find_setpriv(reactor: Reactor, *, environment: Mapping[str, str], owner: Path) -> str | None:
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
    reactor: Reactor,
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
    with ExitStack() as files:
        source = memory_file(stdin)
        files.callback(os.close, source)
        sink = memory_file(b"")
        files.callback(os.close, sink)
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


def memory_file(content: bytes) -> int:
    """A descriptor of an anonymous file, at its beginning: a child reads it without a pipe or a trace on disk."""
    descriptor = os.memfd_create("txnode", os.MFD_CLOEXEC)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
