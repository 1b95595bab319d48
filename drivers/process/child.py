"""A core as a child process: split its output into lines, await its end, stop and kill it."""

from __future__ import annotations

import fcntl
import os
import re
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.interfaces import IReactorTime
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from node.base.alarm import Alarm
from node.base.logs import Logger
from node.contract.driver import Exit
from protos.handover_pb2 import Output, Process

# The longest line; the rest up to the newline is cut.
MAX_LINE = 64 * 1024
# The number of last lines that are kept to explain why a process ended.
LAST_LINES = 50
# The start of the line that says why a core crashed; the stack after it may be longer than LAST_LINES.
PANIC = "panic: "
# Seconds from TERM to KILL. A healthy core ends within 0.1 s; its counters have been read before.
TERM_SECONDS = 2.0
# The size of the pipe of each output, if the kernel allows it. Its default holds the lines of 200 connections; when it
# is full sing-box delays new connections and Xray drops lines.
PIPE = 1024 * 1024
# Bytes of Twisted's read, and of one behind it, so that few pieces wake the readers of the log; after shorter ones, the
# seconds for which output gathers before the next.
READ, MORE = 8192, 64 * 1024
GATHER = 0.008
USUAL_PIPE = 64 * 1024
# The message of Go or Python when the kernel refuses more memory.
_STARVED = re.compile(r"fatal error: .*(out of memory|cannot allocate memory)|MemoryError")


class LineSplitter:
    """Splits bytes into whole lines. Cuts lines at MAX_LINE."""

    def __init__(self, tail: bytes = b"", cutting: bool = False) -> None:
        self._tail = tail
        self._cutting = cutting

    @property
    def rest(self) -> tuple[bytes, bool]:
        """The beginning of an unfinished line, and whether the rest of it is cut."""
        return self._tail, self._cutting

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
        """Return the last line, if it had no newline."""
        tail, self._tail, self._cutting = self._tail, b"", False
        return [tail.decode("utf-8", "replace")] if tail else []

    def _keep(self, tail: bytes) -> None:
        if self._cutting:
            return
        self._tail += tail
        if len(self._tail) >= MAX_LINE:
            self._tail, self._cutting = self._tail[:MAX_LINE], True


class CoreProcess(ProcessProtocol):
    """A child process. `on_lines` gets its lines of stdout and stderr in batches.

    `sift` filters the lines before they are kept and passed on.
    """

    log = Logger()

    def __init__(
        self,
        reactor: IReactorTime,
        on_lines: Callable[[list[str]], None],
        sift: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self._on_lines = on_lines
        self._sift = sift
        self._splitters = {1: LineSplitter(), 2: LineSplitter()}
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._panic: tuple[str, ...] = ()
        self._waiting: list[Deferred[Exit]] = []
        self._kill = Alarm(reactor, partial(self.signal, signal.SIGKILL))
        # Whether to pause after short reads, and for each output when that ends.
        self._gathers = True
        self._gathering = {number: Alarm(reactor, partial(self._read_on, number)) for number in self._splitters}
        self.exit: Exit | None = None
        # Whether a line said that it ran out of memory; a long trace follows that line.
        self.starved = False
        # How much memory it may have, in words, for the log.
        self.allowance = ""

    @property
    def pid(self) -> int | None:
        """The process number while it runs."""
        return getattr(self.transport, "pid", None)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of output, after the panic line if there was one."""
        lines = tuple(self._last)
        return lines if set(self._panic) <= set(lines) else self._panic + lines

    def connectionMade(self) -> None:
        for pipe in cast("Any", self.transport).pipes.values():
            widen(pipe.fd)

    def childDataReceived(self, childFD: int, data: bytes) -> None:  # noqa: N803
        pipe = cast("Any", self.transport).pipes[childFD]
        with suppress(BlockingIOError):
            data += os.read(pipe.fileno(), MORE) if len(data) == READ else b""
        self._take(self._splitters[childFD].feed(data))
        if len(data) < READ + MORE and self._gathers:
            # No more output is ready. A core writes each line separately, and one turn of the reactor per line costs
            # more than processing it.
            pipe.pauseProducing()
            self._gathering[childFD].set(GATHER)

    def childConnectionLost(self, childFD: int) -> None:  # noqa: N803
        self._read_on(childFD)

    def processExited(self, reason: Failure) -> None:
        """Read the last output at once."""
        self._gathers = False
        for number, alarm in self._gathering.items():
            if alarm.pending:
                self._read_on(number)

    def processEnded(self, reason: Failure) -> None:
        """The process has ended and its pipes are read to the end."""
        for splitter in self._splitters.values():
            self._take(splitter.flush())
        if self.starved and self.allowance:
            self._take([f"fatal error: out of memory: {self.allowance}"])
        killed: int | None = getattr(reason.value, "signal", None)
        code: int | None = getattr(reason.value, "exitCode", None)
        self._kill.cancel()
        self.exit = Exit(-killed if killed else code or 0, self.last_lines)
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.callback(self.exit)

    def when_exited(self) -> Deferred[Exit]:
        """Return a new Deferred that fires at the end of the process."""
        waiter: Deferred[Exit] = Deferred(lambda gone: self._waiting.remove(gone))
        if self.exit is not None:
            waiter.callback(self.exit)
        else:
            self._waiting.append(waiter)
        return waiter

    async def stop(self) -> Exit:
        """Send TERM, and KILL after `TERM_SECONDS`. Returns when the process has ended."""
        self.signal(signal.SIGTERM)
        if self.exit is None:
            # Not cancelled with this call.
            self._kill.within(TERM_SECONDS)
        return await self.when_exited()

    async def end(self) -> Exit:
        """Kill a core that never answered and so has no users. Returns when the process has ended."""
        self.signal(signal.SIGKILL)
        return await self.when_exited()

    def abandon(self) -> None:
        """Kill the process and stop reading its outputs, which its own children may still hold open."""
        self.signal(signal.SIGKILL)
        if self.transport is not None:
            self.transport.loseConnection()

    def leave(self) -> None:
        """Stop reading the outputs: what the core writes from here on is for the next node."""
        self._gathers = False
        for alarm in self._gathering.values():
            alarm.cancel()
        for pipe in cast("Any", self.transport).pipes.values():
            pipe.pauseProducing()

    @property
    def packed(self) -> Process:
        """Pack the state with which the next node goes on reading."""
        rests = ((number, *splitter.rest) for number, splitter in self._splitters.items())
        return Process(
            pid=self.pid,
            outputs=[Output(number=number, tail=tail, cutting=cutting) for number, tail, cutting in rests],
            lines=self._last,
            panic=self._panic,
            starved=self.starved,
            allowance=self.allowance,
        )

    def stay(self) -> None:
        """Read the outputs again: the hand-over failed, or this process has taken over."""
        self._gathers = True
        for pipe in cast("Any", self.transport).pipes.values():
            pipe.resumeProducing()

    def go_on(self, left: Process) -> None:
        """Restore what the previous node process left; to be called before a transport is attached."""
        self._splitters |= {output.number: LineSplitter(output.tail, output.cutting) for output in left.outputs}
        self._last.extend(left.lines)
        self._panic = tuple(left.panic)
        self.starved, self.allowance = left.starved, left.allowance

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; ignored if the process has ended."""
        if self.exit is None and self.transport is not None:
            try:
                self.transport.signalProcess(number.name.removeprefix("SIG"))
            except ProcessExitedAlready:
                self.log.debug("core process {pid} exited before {signal} was sent", pid=self.pid, signal=number.name)

    def _read_on(self, pipe: int) -> None:
        self._gathering[pipe].cancel()
        if (reader := cast("Any", self.transport).pipes.get(pipe)) is not None:
            reader.resumeProducing()

    def _take(self, lines: list[str]) -> None:
        self.starved = self.starved or any(map(_STARVED.match, lines))
        kept = self._sift(lines)
        if kept:
            self._last.extend(kept)
            self._panic = self._panic or tuple(line for line in kept if line.startswith(PANIC))[:1]
            self._on_lines(kept)


def widen(pipe: int) -> None:
    """Enlarge a pipe, halving the size while the kernel refuses it (pipe(7): limits of a pipe and of a user)."""
    size = PIPE
    while size > USUAL_PIPE:
        try:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)
            return
        except OSError:
            size //= 2
