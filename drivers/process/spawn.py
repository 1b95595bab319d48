"""Starting a child process, always on a leash, and running one to its end.

Everything here spawns by posix_spawn (`spawnProcess` without path, uid or gid): a fork while gRPC's threads run can
kill the child before it executes.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from twisted.internet import defer

from drivers.process.child import CoreProcess
from drivers.process.leash import MISSING, UNFIT, leashed
from drivers.process.memory import soft_limit
from drivers.process.orphans import MARK, mark
from drivers.process.settings import CORE_MEMORY
from node.contract.driver import Exit
from node.errors import CoreFailed
from node.reactor import Reactor

# Seconds that a command may take, and bytes of its output; of what it says the last lines are kept.
SECONDS = 30.0
OUTPUT = 256 * 1024**2
# Bytes of memory of its own that a command may take, and how many more for each byte that it reads.
LOOK_MEMORY = 1024**3
LOOK_MEMORY_FACTOR = 48


@dataclass(frozen=True)
class Done(Exit):
    """A command that ran to its end, and its output."""

    output: bytes


@dataclass(frozen=True)
class Spawner:
    """Starts child processes that end with the node: by way of setpriv(1) if there is one that can, else of our script.

    `owner` is a directory that one node has at a time, `rules` are what the processes are kept to, and `data` how many
    bytes of memory of its own a core may have.
    """

    reactor: Reactor
    owner: Path
    environment: Mapping[str, str]
    setpriv: str | None = None
    rules: tuple[str, ...] = ()
    data: int | None = None

    def spawn(self, process: CoreProcess, command: Sequence[str], files: Mapping[int, int]) -> None:
        """Start `command` (an absolute path first). `files` maps the child's descriptors to ours, 0 among them.

        Raises `CoreFailed` where nothing can be spawned.
        """
        replace(self, environment={**self.environment, **soft_limit(self.data)})._spawn(process, command, files)
        if self.data is not None:
            process.allowance = f"{CORE_MEMORY.name} allows a core {self.data // 1024**2} MiB"
            with suppress(ProcessLookupError):
                _limit(process.pid, resource.RLIMIT_DATA, self.data)

    def _spawn(self, process: CoreProcess, command: Sequence[str], files: Mapping[int, int]) -> None:
        argv = leashed([*command], self.setpriv, self.rules)
        try:
            environment = {**self.environment, MARK: mark(self.owner)}
            self.reactor.spawnProcess(process, argv[0], argv, env=environment, childFDs={1: "r", 2: "r", **files})
        except OSError as error:
            raise CoreFailed(f"{command[0]} cannot be run: {error}") from error

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        seconds: float = SECONDS,
        output: int = 3,
        heard: Callable[[list[str]], None] = lambda _: None,
    ) -> Done:
        """Run a command that ends by itself. What it writes to the descriptor `output` is the result's `output`.

        `heard` is told its other lines as they come. Raises `CoreFailed` if it cannot be run, or hangs.
        """
        process = CoreProcess(self.reactor, heard)
        with ExitStack() as files:
            source, sink = (opened(content, files) for content in (stdin, b""))
            self._spawn(process, command, {0: source, output: sink})
            try:
                memory = LOOK_MEMORY + LOOK_MEMORY_FACTOR * len(stdin)
                _limit(process.pid, resource.RLIMIT_DATA, memory)
                _limit(process.pid, resource.RLIMIT_FSIZE, OUTPUT)
                ended = await process.when_exited().addTimeout(seconds, self.reactor)
            except defer.TimeoutError as late:
                raise CoreFailed(f"{Path(command[0]).name} did not answer within {seconds:g} s") from late
            except OSError as error:
                raise CoreFailed(f"{command[0]} cannot be run: {error}") from error
            finally:
                process.abandon()
            if process.starved:
                needed = f"is out of memory: it needs more than the {memory // 1024**2} MiB that it may have"
                raise CoreFailed(f"{Path(command[0]).name} {needed} to look at a configuration")
            if ended.code in (MISSING, UNFIT):
                raise CoreFailed(f"{command[0]} cannot be run: {' '.join(ended.lines)}")
            return Done(ended.code, ended.lines, os.pread(sink, os.fstat(sink).st_size, 0))


async def by_setpriv(spawner: Spawner) -> Spawner:
    """By the setpriv(1) of this machine, if it can be run and knows parent-death signals: it takes 1 ms, our script 11.

    It does not look whether the parent died before the kernel was asked; such a core is swept at the next start.
    """
    found = shutil.which("setpriv", path=os.defpath)
    if found is None:
        return spawner
    better = replace(spawner, setpriv=found)
    try:
        tried = await better.run([found, "--version"])
    except CoreFailed:
        return spawner
    return better if tried.code == 0 else spawner


def _limit(pid: int | None, what: int, most: int) -> None:
    """Have a process, if it is still there, take no more of something, or what the node itself may take."""
    if pid is not None:
        own = resource.prlimit(pid, what)
        soft, hard = (most if limit == resource.RLIM_INFINITY else min(limit, most) for limit in own)
        resource.prlimit(pid, what, (soft, hard))


def opened(content: bytes, files: ExitStack) -> int:
    """A descriptor that a child reads this from, as long as `files` are open. Raises `CoreFailed` for want of one."""
    try:
        descriptor = memory_file(content)
    except OSError as error:
        raise CoreFailed(f"the core cannot be given its configuration: {error.strerror}") from error
    files.callback(os.close, descriptor)
    return descriptor


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
