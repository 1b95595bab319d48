"""Adopt a core that outlived its node: read its outputs and notice its end, though it is not a child of this node.

Its outputs are reopened through /proc/PID/fd; its lines since the node died wait in those pipes.
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

# The index of the start time in /proc/PID/stat, counted after the name (proc(5)).
BEGAN = 19
OUTPUTS = (1, 2)
# PIDFD_GET_INFO (linux/pidfd.h): the ioctl, the size of its structure, the mask for the exit status and its offset.
# Since Linux 6.15; before that only the parent gets the status.
_GET_INFO, _INFO, _EXIT, _STATUS = 0xC040FF0B, 64, 1 << 3, 60


def began(pid: int) -> int:
    """Return a process's start time in kernel ticks since boot. Raises `OSError` if it does not exist or has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[BEGAN])


def is_there(found: Process) -> bool:
    """Whether this very process still runs, and not another one with its number."""
    try:
        return began(found.pid) == found.began
    except OSError:
        return False


def adopt(reactor: Reactor, core: CoreProcess, found: Process) -> None:
    """Attach `core` to this process; its outputs are read from `stay` on. Raises `Gone` and `CoreFailed`."""
    try:
        descriptor = os.pidfd_open(found.pid)
    except OSError as error:
        raise Gone(f"process {found.pid} is gone") from error
    # Checked only now: while the pidfd is open the number cannot become that of another process.
    if not is_there(found):
        os.close(descriptor)
        raise Gone(f"process {found.pid} is gone")
    # After an upgrade in place the outputs are open already.
    if not found.outputs:
        try:
            found.outputs.extend(_outputs(found.pid))
        except OSError as error:
            os.close(descriptor)
            raise CoreFailed(f"the output of core process {found.pid} cannot be read: {error.strerror}") from error
    core.go_on(found)
    _Adopted(reactor, core, found.pid, descriptor, found.outputs)


def is_adopted(core: CoreProcess) -> bool:
    """Whether the core's process was adopted, and is not a child of this node."""
    return isinstance(core.transport, _Adopted)


def _outputs(pid: int) -> list[Output]:
    """Open the outputs of a process for reading. Raises `OSError`, and then leaves none open."""
    outputs: list[Output] = []
    try:
        for number in OUTPUTS:
            there = f"/proc/{pid}/fd/{number}"
            if not stat.S_ISFIFO(os.stat(there).st_mode):  # noqa: PTH116 - as it is opened below
                # A compromised core may have replaced it by anything.
                raise OSError(errno.EINVAL, "not a pipe")
            pipe = os.open(there, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            outputs.append(Output(number=number, descriptor=pipe))
    except OSError:
        for output in outputs:
            os.close(output.descriptor)
        raise
    return outputs


class _Adopted(process.Process):
    """A Twisted process transport for a process that is not a child: its pidfd shows when it has ended."""

    def __init__(self, reactor: Any, core: CoreProcess, pid: int, descriptor: int, outputs: Sequence[Output]) -> None:
        # Not `Process.__init__`, which spawns.
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

    # IReadDescriptor

    def fileno(self) -> int:
        return self._descriptor

    def logPrefix(self) -> str:
        return "adopted"

    def doRead(self) -> None:
        """The process has ended."""
        self._reactor.removeReader(self)
        status = _status(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        # A child of it may still hold its outputs open.
        for pipe in [*self.pipes.values()]:
            pipe.resumeProducing()
        self.processEnded(status)

    def connectionLost(self, reason: Any = None) -> None:
        """The reactor stops: leave the process alone."""

    # Twisted's process transport

    def reapProcess(self) -> None:
        """Do nothing: only init can reap this process."""

    def signalProcess(self, signalID: str | int) -> None:  # noqa: N803 - Twisted's name
        if self._descriptor < 0 or self.pid is None:
            raise ProcessExitedAlready
        number = getattr(signal, f"SIG{signalID}") if isinstance(signalID, str) else signalID
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError as error:
            raise ProcessExitedAlready from error


def _status(descriptor: int) -> int:
    """Return the exit status as waitpid(2) does; 0 where the kernel does not report it."""
    info = bytearray(struct.pack("=Q", _EXIT).ljust(_INFO, b"\0"))
    with suppress(OSError):
        fcntl.ioctl(descriptor, _GET_INFO, info)
        if struct.unpack_from("=Q", info)[0] & _EXIT:
            return int(struct.unpack_from("=i", info, _STATUS)[0])
    return 0
