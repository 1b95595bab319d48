"""Cores as children of the keeper, which outlive the node: leave one to the next node, recover it there.

Descriptors and processes outlive the node, Twisted's objects for them do not.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from twisted.internet import process
from twisted.internet.error import ProcessExitedAlready

from drivers.process.child import CoreProcess
from drivers.sockets.pidfd import has_exited
from node.base.errors import CoreFailed
from node.base.reactor import Reactor
from node.contract.keeper import Keeper, Spawned
from node.contract.leaving import Gone
from protos.handover_pb2 import Process

# Seconds within which a recovered core must answer.
ANSWER = 3.0


def left(core: CoreProcess) -> Process:
    """Return what the next node needs to go on with the core. Raises `CoreFailed` if it has ended."""
    if core.exit is not None or core.pid is None:
        raise CoreFailed("the core has ended")
    if not isinstance(core.transport, KeptProcess):
        raise CoreFailed("the core ends with the node, which has no keeper")
    return core.packed


def recover(reactor: Reactor, keeper: Keeper, core: CoreProcess, found: Process) -> None:
    """Attach `core` to the process that was left; its outputs are read from `stay` on. Raises `Gone` if it ended."""
    spawned = keeper.spawned(found.pid)
    if spawned is None:
        raise Gone(f"process {found.pid} is gone")
    core.go_on(found)
    KeptProcess(reactor, keeper, core, spawned)
    if spawned.ended:
        core.stay()
        raise Gone(f"process {found.pid} has ended")


def silent(core: CoreProcess) -> Exception:
    """Why a recovered core does not answer."""
    if core.exit is not None or (isinstance(core.transport, KeptProcess) and core.transport.has_ended):
        return Gone(f"process {core.pid} has ended")
    return CoreFailed("the core that the previous node left running does not answer")


class KeptProcess(process.Process):
    """A Twisted process transport for a process of the keeper, which tells when it has ended."""

    def __init__(self, reactor: Any, keeper: Keeper, core: CoreProcess, spawned: Spawned) -> None:
        # Not `Process.__init__`, which spawns.
        process._BaseProcess.__init__(self, core)
        self._reactor = reactor
        self.pid = spawned.pid
        self._pidfd = spawned.pidfd
        self.pipes: dict[int, Any] = {
            number: self.processReaderFactory(reactor, self, number, pipe) for number, pipe in spawned.outputs.items()
        }
        for reader in self.pipes.values():
            reader.stopReading()
        core.makeConnection(self)
        keeper.when_exited(spawned.pid, self._exited)

    @property
    def has_ended(self) -> bool:
        return self._pidfd < 0 or has_exited(self._pidfd)

    def _exited(self, status: int) -> None:
        os.close(self._pidfd)
        self._pidfd = -1
        # A child of it may still hold its outputs open.
        for pipe in [*self.pipes.values()]:
            pipe.resumeProducing()
        self.processEnded(status)

    # Twisted's process transport

    def reapProcess(self) -> None:
        """Do nothing: its parent is the keeper."""

    def signalProcess(self, signalID: str | int) -> None:  # noqa: N803 - Twisted's name
        if self._pidfd < 0 or self.pid is None:
            raise ProcessExitedAlready
        number = getattr(signal, f"SIG{signalID}") if isinstance(signalID, str) else signalID
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError as error:
            raise ProcessExitedAlready from error
