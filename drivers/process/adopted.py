"""A core that outlived the node that started it: found again, heard, and its end noticed, though it is nobody's child.

Its outputs are opened where the kernel shows them; what it has said meanwhile waits in them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from twisted.internet import process
from twisted.internet.error import ProcessExitedAlready

from drivers.process.child import CoreProcess
from node.contract.driver import Gone
from node.errors import CoreFailed
from node.reactor import Reactor
from protos.handover_pb2 import Output, Process

# Where /proc/PID/stat has when it began, behind the name (proc(5)).
BEGAN = 19
OUTPUTS = (1, 2)
# pidfd_get_info (linux/pidfd.h): the structure of 64 bytes, the mask for how it ended, and where that is in it. Since
# Linux 6.15; before that nobody but a parent is told.
_GET_INFO, _INFO, _EXIT, _STATUS = 0xC040FF0B, 64, 1 << 3, 60


def began(pid: int) -> int:
    """When a process began, in the kernel's own clock. Raises `OSError` for one that is not there, or has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[BEGAN])


def is_there(found: Process) -> bool:
    """Whether that very process lives."""
    try:
        return began(found.pid) == found.began
    except OSError:
        return False


def adopt(reactor: Reactor, core: CoreProcess, found: Process) -> None:
    """Have `core` be this process, unheard until it is told to `stay`. Raises `Gone`, and `CoreFailed`."""
    try:
        descriptor = os.pidfd_open(found.pid)
    except OSError as error:
        raise Gone(f"process {found.pid} is gone") from error
    # Not before: from here on the number is that of this process.
    if not is_there(found):
        os.close(descriptor)
        raise Gone(f"process {found.pid} is gone")
    # Those of an earlier program of this process are open.
    if not found.outputs:
        try:
            found.outputs.extend(_outputs(found.pid))
        except OSError as error:
            os.close(descriptor)
            raise CoreFailed(f"what core {found.pid} says cannot be read: {error.strerror}") from error
    core.go_on(found)
    _Adopted(reactor, core, found.pid, descriptor, found.outputs)


def is_adopted(core: CoreProcess) -> bool:
    """Whether it is nobody's child."""
    return isinstance(core.transport, _Adopted)


def _outputs(pid: int) -> list[Output]:
    """Its outputs, opened for reading. Raises `OSError`; then none is."""
    outputs: list[Output] = []
    try:
        for number in OUTPUTS:
            there = f"/proc/{pid}/fd/{number}"
            if not stat.S_ISFIFO(os.stat(there).st_mode):  # noqa: PTH116 - as it is opened below
                # A core that was broken into may have put anything there.
                raise OSError(errno.EINVAL, "it is no pipe")
            pipe = os.open(there, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            outputs.append(Output(number=number, descriptor=pipe))
    except OSError:
        for output in outputs:
            os.close(output.descriptor)
        raise
    return outputs


class _Adopted(process.Process):
    """Twisted's own, of a process that is not waited for: its descriptor tells when it has ended."""

    def __init__(self, reactor: Any, core: CoreProcess, pid: int, descriptor: int, outputs: Sequence[Output]) -> None:
        # Not Twisted's: that spawns.
        process._BaseProcess.__init__(self, core)
        self._reactor = reactor
        self.pid = pid
        self._descriptor = descriptor
        self.pipes: dict[int, Any] = {
            output.number: self.processReaderFactory(reactor, self, output.number, output.descriptor)
            for output in outputs
        }
        for reader in self.pipes.values():
            reader.stopReading()
        core.makeConnection(self)
        reactor.addReader(self)

    # What the reactor asks of a reader

    def fileno(self) -> int:
        return self._descriptor

    def logPrefix(self) -> str:
        return "adopted"

    def doRead(self) -> None:
        """It has ended."""
        self._reactor.removeReader(self)
        status = _status(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        # Its own child may hold its outputs.
        for pipe in [*self.pipes.values()]:
            pipe.resumeProducing()
        self.processEnded(status)

    def connectionLost(self, reason: Any = None) -> None:
        """The reactor ends: the process goes on."""

    # What Twisted asks of a process

    def reapProcess(self) -> None:
        """Nobody but init can."""

    def signalProcess(self, signalID: str | int) -> None:  # noqa: N803 - Twisted's name
        if self._descriptor < 0 or self.pid is None:
            raise ProcessExitedAlready
        number = getattr(signal, f"SIG{signalID}") if isinstance(signalID, str) else signalID
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError as error:
            raise ProcessExitedAlready from error


def _status(descriptor: int) -> int:
    """How it ended, as waitpid(2) has it; 0 where the kernel does not tell."""
    info = bytearray(struct.pack("=Q", _EXIT).ljust(_INFO, b"\0"))
    with suppress(OSError):
        fcntl.ioctl(descriptor, _GET_INFO, info)
        if struct.unpack_from("=Q", info)[0] & _EXIT:
            return int(struct.unpack_from("=i", info, _STATUS)[0])
    return 0
