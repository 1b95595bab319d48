"""Spawn child processes, always on a leash, and run commands to their end.

All processes are spawned by posix_spawn (`spawnProcess` without path, uid or gid): after a fork while gRPC's threads
run, the child may die before it executes.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from twisted.internet import defer

from drivers.install.leash import MISSING, UNFIT, kept, leashed
from drivers.process.child import CoreProcess
from drivers.process.kept import KeptProcess
from drivers.process.orphans import MARK, mark
from drivers.process.settings import CORE_MEMORY, soft_limit
from node.base.errors import CoreFailed
from node.base.reactor import Reactor
from node.contract.driver import Done
from node.contract.keeper import Keeper

# Seconds that a command may take, and the most bytes of its output file; of its other output the last lines are kept.
SECONDS = 30.0
OUTPUT = 256 * 1024**2
# Bytes of its own memory that a command may take, and how many more for each byte of its input.
LOOK_MEMORY = 1024**3
LOOK_MEMORY_FACTOR = 48


@dataclass(frozen=True)
class Spawner:
    """Starts child processes that end with the node.

    `owner`: a directory that one node has at a time. `rules`: Landlock rules. `data`: bytes of its own memory that a
    core may have. With a `keeper` cores end with that instead.
    """

    reactor: Reactor
    owner: Path
    environment: Mapping[str, str]
    rules: tuple[str, ...] = ()
    data: int | None = None
    keeper: Keeper | None = None

    def spawn(self, process: CoreProcess, command: Sequence[str], files: Mapping[int, int]) -> None:
        """Start `command` (an absolute path first). `files` maps the child's descriptors to ours, including 0.

        Raises `CoreFailed` if it cannot be spawned.
        """
        replace(self, environment={**self.environment, **soft_limit(self.data)})._spawn(
            process, command, files, self.keeper
        )
        if self.data is not None:
            process.allowance = f"{CORE_MEMORY.name} allows a core {self.data // 1024**2} MiB"
            with suppress(ProcessLookupError):
                _limit(process.pid, resource.RLIMIT_DATA, self.data)

    def _spawn(
        self, process: CoreProcess, command: Sequence[str], files: Mapping[int, int], keeper: Keeper | None = None
    ) -> None:
        try:
            environment = {**self.environment, MARK: mark(self.owner)}
            if keeper is not None:
                spawned = keeper.spawn(kept(command, self.rules), environment, files)
                KeptProcess(self.reactor, keeper, process, spawned)
                process.stay()
                return
            argv = leashed([*command], self.rules)
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
        """Run a command to its end. What it writes to the descriptor `output` is the result's `output`.

        `heard` gets its other lines as they arrive. Raises `CoreFailed` if it cannot be run, or hangs.
        """
        process = CoreProcess(self.reactor, heard)
        with ExitStack() as files:
            source, sink = (in_memory(content, files) for content in (stdin, b""))
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
                allowed = f"it may use {memory // 1024**2} MiB to check a configuration"
                raise CoreFailed(f"{Path(command[0]).name} is out of memory: {allowed}")
            if ended.code in (MISSING, UNFIT):
                raise CoreFailed(f"{command[0]} cannot be run: {' '.join(ended.lines)}")
            return Done(ended.code, ended.lines, os.pread(sink, os.fstat(sink).st_size, 0))


def _limit(pid: int | None, what: int, most: int) -> None:
    """Limit a resource of a process to `most`, or to its present limit if that is lower."""
    if pid is not None:
        own = resource.prlimit(pid, what)
        soft, hard = (most if limit == resource.RLIM_INFINITY else min(limit, most) for limit in own)
        resource.prlimit(pid, what, (soft, hard))


def in_memory(content: bytes, files: ExitStack) -> int:
    """Open an anonymous file with this content until `files` are closed: a child reads it without a file on disk.

    Raises `CoreFailed` if that fails.
    """
    try:
        descriptor = os.memfd_create("txnode", os.MFD_CLOEXEC)
        files.callback(os.close, descriptor)
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError as error:
        raise CoreFailed(f"the core's configuration cannot be put into a memory file: {error.strerror}") from error
    return descriptor
