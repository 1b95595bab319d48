"""A core that goes on while the node becomes another program: to the kernel both are one process, and its parent.

Descriptors and children outlive execve(2); what Twisted knows of them does not.
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

# Where /proc/PID/stat has them, behind the name, which may have spaces in it: the state, the parent, and when it began
# (proc(5)).
_STATE, _PARENT, _BEGAN = 0, 1, 19
# States of one that has ended and was not looked after.
_ENDED = "ZX"
# Seconds that one has to answer.
ANSWER = 3.0


def left(core: CoreProcess) -> Process:
    """What the next program needs of this process. Raises `CoreFailed` if it is gone."""
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
    """What another node needs of this process if this one is killed; None if it is gone."""
    if core.exit is not None or core.pid is None:
        return None
    try:
        _, _, began = _seen(core.pid)
    except OSError:
        return None
    return Process(pid=core.pid, began=began, allowance=core.allowance, adopted=True)


def recover(reactor: Reactor, core: CoreProcess, found: Process) -> None:
    """Have `core` be the process that was left, unheard until it is told to `stay`.

    Raises `Gone` if that has ended, and `CoreFailed` if it is not ours.
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
        # Its number is that of another one by now.
        _close(found)
        raise Gone(f"process {found.pid} is gone")
    if parent != os.getpid():
        raise CoreFailed(f"process {found.pid} is not the core that was left")
    core.go_on(found)
    _Recovered(reactor, core, found.pid, found.outputs)
    if state in _ENDED:
        core.stay()
        raise Gone(f"process {found.pid} has ended")


class _Recovered(process.Process):
    """Twisted's own, which spawns what it is."""

    def __init__(self, reactor: Any, core: CoreProcess, pid: int, outputs: Iterable[Output]) -> None:
        # Not Twisted's: that spawns.
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
    """Nobody reads what it said last: an earlier program has noticed its end, and waited for it."""
    for output in found.outputs:
        with suppress(OSError):
            os.close(output.descriptor)


def _seen(pid: int) -> tuple[str, int, int]:
    """Its state, its parent, and when it began. Raises `OSError`."""
    _, _, fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")
    words = fields.split()
    return words[_STATE], int(words[_PARENT]), int(words[_BEGAN])
