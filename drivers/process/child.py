"""A core as a child process: its lines split, its end awaited and enforced."""

from __future__ import annotations

import fcntl
import re
import signal
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessExitedAlready
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

from node.contract.driver import Exit
from node.logs import Logger
from protos.handover_pb2 import Output, Process

# Characters of a line that are kept; what follows up to the newline is cut.
MAX_LINE = 64 * 1024
# Lines of a process that are kept to say why it ended.
LAST_LINES = 50
# How the line begins that says why a core broke; its stack follows, and may be longer than that.
PANIC = "panic: "
TERM_SECONDS = 5.0
# Bytes that wait for the node in each of a core's outputs, if the kernel lets us; what it gives by itself lasts for 200
# connections, after which sing-box lets new ones wait and Xray drops lines.
PIPE = 1024 * 1024
# Bytes that are read at once, and seconds that what comes behind less than that is left to gather.
READ = 8192
GATHER = 0.005
_USUAL_PIPE = 64 * 1024
# What Go says, or Python, when the kernel gives them no more memory.
_STARVED = re.compile(r"fatal error: .*(out of memory|cannot allocate memory)|MemoryError")


class LineSplitter:
    """Bytes in, whole lines out. Cuts lines over MAX_LINE instead of growing."""

    def __init__(self, tail: bytes = b"", cutting: bool = False) -> None:
        self._tail = tail
        self._cutting = cutting

    @property
    def rest(self) -> tuple[bytes, bool]:
        """What there is of a line that has not ended, and whether what comes of it is cut."""
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
        reactor: IReactorTime,
        on_lines: Callable[[list[str]], None],
        sift: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self._reactor = reactor
        self._on_lines = on_lines
        self._sift = sift
        self._splitters = {1: LineSplitter(), 2: LineSplitter()}
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._panic: tuple[str, ...] = ()
        self._waiting: list[Deferred[Exit]] = []
        self._kill: IDelayedCall | None = None
        # Outputs that are not read for a moment.
        self._gathers = True
        self._gathering: dict[int, IDelayedCall] = {}
        self.exit: Exit | None = None
        # Whether it said that it ended for want of memory; a long trace of it follows.
        self.starved = False
        # How much it may have, for an operator who wonders.
        self.allowance = ""

    @property
    def pid(self) -> int | None:
        """The process number while it runs."""
        return getattr(self.transport, "pid", None)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last ones that it has said, and before them why it broke."""
        lines = tuple(self._last)
        return lines if set(self._panic) <= set(lines) else self._panic + lines

    def connectionMade(self) -> None:
        for pipe in cast("Any", self.transport).pipes.values():
            widen(pipe.fd)

    def childDataReceived(self, childFD: int, data: bytes) -> None:  # noqa: N803
        self._take(self._splitters[childFD].feed(data))
        if len(data) < READ and self._gathers:
            # There is no more at the moment. A core writes each line by itself, and a turn of the reactor for each
            # costs more than all that is done with it.
            cast("Any", self.transport).pipes[childFD].pauseProducing()
            self._gathering[childFD] = self._reactor.callLater(GATHER, self._read_on, childFD)

    def childConnectionLost(self, childFD: int) -> None:  # noqa: N803
        self._read_on(childFD)

    def processExited(self, reason: Failure) -> None:
        """What it has said last is read at once."""
        self._gathers = False
        for pipe in tuple(self._gathering):
            self._read_on(pipe)

    def processEnded(self, reason: Failure) -> None:
        """The process is gone and its pipes are drained."""
        for splitter in self._splitters.values():
            self._take(splitter.flush())
        if self.starved and self.allowance:
            self._take([f"fatal error: out of memory: {self.allowance}"])
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

    def abandon(self) -> None:
        """Kill it, and hear no more of it, nor of what it started and left its outputs to."""
        self.signal(signal.SIGKILL)
        if self.transport is not None:
            self.transport.loseConnection()

    def leave(self) -> Process:
        """Read no more of it, and say what the next program of the node needs to go on with it."""
        assert self.transport is not None and self.pid is not None
        self._gathers = False
        for pipe in tuple(self._gathering):
            self._gathering.pop(pipe).cancel()
        pipes = cast("Any", self.transport).pipes
        outputs = []
        for number, pipe in pipes.items():
            pipe.pauseProducing()
            tail, cutting = self._splitters[number].rest
            outputs.append(Output(number=number, descriptor=pipe.fileno(), tail=tail, cutting=cutting))
        return Process(
            pid=self.pid,
            outputs=outputs,
            lines=self._last,
            panic=self._panic,
            starved=self.starved,
            allowance=self.allowance,
        )

    def stay(self) -> None:
        """Read on: it was not left after all, or it is this program's now."""
        self._gathers = True
        for pipe in cast("Any", self.transport).pipes.values():
            pipe.resumeProducing()

    def go_on(self, left: Process) -> None:
        """Be the one that an earlier program of the node has left; before it is connected."""
        self._splitters |= {output.number: LineSplitter(output.tail, output.cutting) for output in left.outputs}
        self._last.extend(left.lines)
        self._panic = tuple(left.panic)
        self.starved, self.allowance = left.starved, left.allowance

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that is gone already is fine."""
        if self.exit is None and self.transport is not None:
            try:
                self.transport.signalProcess(number.name.removeprefix("SIG"))
            except ProcessExitedAlready:
                self.log.debug("{pid} was gone before {signal}", pid=self.pid, signal=number.name)

    def _read_on(self, pipe: int) -> None:
        call = self._gathering.pop(pipe, None)
        if call is not None and call.active():
            call.cancel()
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
    """Have a pipe hold more; half of it where that is refused, and so on (pipe(7): limits of a pipe and of a user)."""
    size = PIPE
    while size > _USUAL_PIPE:
        try:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)
            return
        except OSError:
            size //= 2
