"""Hand a running core over to the next node process, and take it over there.

In an upgrade in place the node executes its next version: to the kernel that is the same process, still the parent of
its cores. Descriptors and children outlive execve(2); Twisted's objects for them do not. Cores of a node that was
killed are adopted: see `adopted`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from twisted.internet import process

from drivers.process.adopted import adopt, is_adopted
from drivers.process.child import CoreProcess
from node.contract.driver import Gone
from node.errors import CoreFailed
from node.reactor import Reactor
from protos.handover_pb2 import Output, Process

# The indexes of the state, the parent and the start time in /proc/PID/stat (proc(5)), counted after the name, which may
# contain spaces.
_STATE, _PARENT, _BEGAN = 0, 1, 19
# The states of a process that has ended: zombie and dead.
_ENDED = "ZX"
# Seconds within which a recovered core must answer.
ANSWER = 3.0


def left(core: CoreProcess) -> Process:
    """Stop reading the core, and return what the next node process needs. Raises `CoreFailed` if it has ended."""
    if core.exit is not None or core.pid is None:
        raise CoreFailed("the core has ended")
    try:
        _, _, began = _seen(core.pid)
    except OSError as error:
        raise CoreFailed(f"the core has ended: {error.strerror}") from error
    found = core.leave()
    found.began = began
    found.adopted = is_adopted(core)
    return found


def lives_on(core: CoreProcess) -> Process | None:
    """Return what another node needs to adopt the core if this one is killed; None if the core has ended."""
    if core.exit is not None or core.pid is None:
        return None
    try:
        _, _, began = _seen(core.pid)
    except OSError:
        return None
    return Process(pid=core.pid, began=began, allowance=core.allowance, adopted=True)


def recover(reactor: Reactor, core: CoreProcess, found: Process) -> None:
    """Attach `core` to the process that was handed over; its outputs are read from `stay` on.

    Raises `Gone` if the process has ended, and `CoreFailed` if it is not a child of this node.
    """
    if found.adopted:
        try:
            adopt(reactor, core, found)
        except Gone:
            _close(found)
            raise
        return
    try:
        state, parent, began = _seen(found.pid)
    except FileNotFoundError as error:
        _close(found)
        raise Gone(f"process {found.pid} is gone") from error
    if began != found.began:
        # The number is that of another process by now.
        _close(found)
        raise Gone(f"process {found.pid} is gone")
    if parent != os.getpid():
        raise CoreFailed(f"process {found.pid} is not a child of the node: it is not the core that was handed over")
    core.go_on(found)
    _Recovered(reactor, core, found.pid, found.outputs)
    if state in _ENDED:
        core.stay()
        raise Gone(f"process {found.pid} has ended")


class _Recovered(process.Process):
    """A Twisted process transport for a child that exists already."""

    def __init__(self, reactor: Any, core: CoreProcess, pid: int, outputs: Iterable[Output]) -> None:
        # Not `Process.__init__`, which spawns.
        process._BaseProcess.__init__(self, core)
        self._reactor = reactor
        self.pid = pid
        self.pipes: dict[int, Any] = {
            output.number: self.processReaderFactory(reactor, self, output.number, output.descriptor)
            for output in outputs
        }
        for reader in self.pipes.values():
            reader.stopReading()
        core.makeConnection(self)
        process.registerReapProcessHandler(pid, self)


def _close(found: Process) -> None:
    """Close the outputs of a core that ended: the previous node process has seen its end and reaped it."""
    for output in found.outputs:
        with suppress(OSError):
            os.close(output.descriptor)


def _seen(pid: int) -> tuple[str, int, int]:
    """Return a process's state, parent and start time. Raises `OSError`."""
    _, _, fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")
    words = fields.split()
    return words[_STATE], int(words[_PARENT]), int(words[_BEGAN])
