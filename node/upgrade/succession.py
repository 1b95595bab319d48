"""Succession of node versions in one process: what a version takes over from the last one, and hands to the next."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping, MutableMapping
from functools import partial
from typing import Any

from twisted.internet.defer import CancelledError, maybeDeferred
from twisted.internet.task import deferLater

from node import __version__
from node.contract.driver import NotNow
from node.errors import Aborted
from node.events.journal import Journal
from node.events.kinds import Kind
from node.logs import Logger, LogRing
from node.upgrade.handle import ONE, SEVERAL, Handle, places, write
from node.upgrade.parts import Calls, Connections, HandoverBackend, Jobs, State, Store, Systemd
from node.upgrade.program import Program, Successor
from node.waiting import finished
from protos.handover_pb2 import Handover

# Seconds that running calls have to finish before another version takes over.
FINISH = 1.0
# The exit status if neither the next nor this version can be executed.
FAILURE = 1
# Turns of the reactor in which a signal received already can still end the node.
TURNS = 3


class Succession:
    """The hand-over from the previous version and to the next one.

    `ports`: the listening ports of this version, by name. `sweep` kills the cores of earlier nodes, except those that
    it is given.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        environment: MutableMapping[str, str],
        *,
        ring: LogRing,
        journal: Journal,
        state: State,
        store: Store,
        backend: HandoverBackend,
        calls: Calls,
        connections: Connections,
        systemd: Systemd,
        sweep: Callable[[Collection[int]], object],
    ) -> None:
        self._reactor = reactor
        self._environment = environment
        self._handle = Handle(environment)
        self._ring = ring
        self._journal = journal
        self._state = state
        self._store = store
        self._backend = backend
        self._calls = calls
        self._connections = connections
        self._systemd = systemd
        self._sweep = sweep
        self._left = Handover()
        # Why the next version failed, if this one runs again.
        self._failed = ""
        self._commit: Callable[[], None] = lambda: None
        # Whether everything serves; whether the node is ending; whether so much is closed that it cannot go on.
        self._ready = self._ending = self._closed = False
        # Updates under way, which would end with this version.
        self.jobs: Jobs | None = None
        self.ports: dict[str, Any] = {}

    # What this version takes over

    def take(self) -> None:
        """Read the hand-over of the previous version. Call it before any descriptor is opened."""
        taken = self._handle.take()
        if taken is None:
            return
        self._left = taken.handover
        if taken.handover.HasField("ring"):
            self._ring.unpack(taken.handover.ring)
        self._failed = taken.failed
        if taken.failed:
            self._store.go_back()

    def adopt(self, left: Handover | None) -> None:
        """Take over the cores of a killed node, unless a previous version handed over."""
        if left is not None and not self._left.format:
            self._left.MergeFrom(left)

    @property
    def lock(self) -> int | None:
        """The handed-over descriptor of the state directory's lock, if any."""
        return self._left.lock or None

    @property
    def outcome(self) -> str | None:
        """The outcome of an upgrade: why the next version failed and this one runs again; empty if it succeeded.

        None without an upgrade.
        """
        return self._failed if self._left.format else None

    @property
    def cores(self) -> Collection[int]:
        """The PIDs of the handed-over cores."""
        return [run.pid for run in (self._left.run, *self._left.draining) if run.pid]

    def held(self, name: str, interface: str, port: int) -> int | None:
        """The handed-over descriptor that listens there. The caller duplicates it: this one is for the way back."""
        held: int | None = self._left.ports.get(name)
        if held is None:
            return None
        with socket.socket(fileno=os.dup(held)) as there:
            where = there.getsockname()[:2]
        return held if where in places(interface, port) else None

    def inherit(self) -> None:
        """Have the resume recover the handed-over cores; controllers wait until that is done."""
        if self.cores:
            self._backend.inherit(self._left, self)
            self._listen(False)

    def ready(self, commit: Callable[[], None]) -> None:
        """Note that everything serves. `commit` is called when the way back ends: at once, or with the cores taken."""
        self._handle.heed_signals()
        self._commit, self._ready = commit, True
        if self._failed:
            self.refuse(self._failed)
        if not self.cores:
            self._come_up()

    def taken(self, pids: Collection[int]) -> None:
        if not self._ready:
            self.go_back("it does not get ready")
        if pids:
            text = f"txnode {__version__} goes on with {'the core' if len(pids) == 1 else f'{len(pids)} cores'}"
            self._ring.event(text)
            self.log.info("{text}", text=text)
        if {*pids} != {*self.cores}:
            self._sweep(pids)
        self._come_up()

    def go_back(self, reason: str) -> None:
        self._handle.go_back(f"it cannot go on with the core: {reason}")

    def failed(self, reason: str) -> None:
        self.go_back(reason)
        self.log.warn("the core is restarted: {reason}", reason=reason)
        self._sweep(())
        self._come_up()

    def end(self) -> None:
        """Note that the node is ending: there is no way back from here on either."""
        self._ending = True
        self._handle.commit()

    def _come_up(self) -> None:
        self._handle.commit()
        for held in self._left.ports.values():
            os.close(held)
        # Frees memory: it may be large.
        self._left = Handover(format=self._left.format)
        if self._ending:
            return
        self._commit()
        self._listen()

    def _listen(self, on: bool = True) -> None:
        """Accept new connections of controllers, or let them wait in the backlog."""
        for port in self.ports.values():
            (port.startReading if on else port.stopReading)()

    # What this version hands over

    def unsteady(self, several: bool) -> str:
        if self._ending:
            return "the node is ending"
        # The next version starts from the state file.
        if self._store.fault:
            return self._store.fault
        return self._updating or self._backend.unsteady(several)

    @property
    def _updating(self) -> str:
        subject = self.jobs.under_way if self.jobs else ""
        return f"an update of {subject} is under way" if subject else ""

    async def rehearse(self) -> None:
        await self._backend.rehearse()

    async def succeed(self, program: Program, successor: Successor) -> str:
        await self._store.flush()
        if self._store.fault:
            return self._store.fault
        self._listen(False)
        self._calls.end_readers()
        await self._connections.finish(FINISH, self._calls.idle)
        try:
            await self._backend.leave(successor.several, partial(self._become, program, successor.version))
            if not self._closed:
                # No run was handed over: there is none, or none that can be.
                await self._backend.close()
                await self._become(program, successor.version, Handover())
        except Exception as error:
            if self._closed:
                text = "the node exits with status {status}: the next version could not be executed: {error}"
                self.log.critical(text, status=FAILURE, error=str(error))
                # A failure, so that systemd starts it again.
                self._reactor.addSystemEventTrigger("after", "shutdown", os._exit, FAILURE)
                self._reactor.stop()
                return ""
            # This version goes on in any case.
            self._listen()
            if isinstance(error, (NotNow, Aborted)):
                return str(error)
            raise
        return ""

    def refuse(self, reason: str) -> None:
        self._report(Kind.NODE_UPGRADE_FAILED, f"the node was not upgraded: {reason}", {"reason": reason})

    async def _become(self, program: Program, version: str, runs: Handover) -> None:
        if self._ending:
            raise NotNow("the node is ending")
        if self._updating:
            raise NotNow(self._updating)
        self._report(Kind.NODE_UPGRADING, f"upgrading the node to {version}", {"version": version})
        self._closed = True
        try:
            await finished(self._close_and_become(program, runs))
        except CancelledError:
            # The node's end cancels operations on cores, this one included; the closing continues all the same.
            if not self._ending:
                raise

    async def _close_and_become(self, program: Program, runs: Handover) -> None:
        leave = [self.jobs.leave] if self.jobs else []
        # Updates first: they must change nothing from here on.
        for end in (*leave, self._calls.close, self._backend.rest, self._journal.close, self._store.close):
            try:
                await maybeDeferred(end)
            except Exception:  # noqa: BLE001 - logged; the next version starts from the state file
                self.log.failure("a part of the node could not be closed before the upgrade")
        ports = {name: port.fileno() for name, port in self.ports.items()}
        ring = self._ring.packed
        handover = Handover(version=__version__, lock=self._state.lock, ports=ports, ring=ring)
        handover.MergeFrom(runs)
        # Versions that can take over one core only read no other format.
        handover.format = SEVERAL if runs.draining or runs.together.descriptors else ONE
        self._systemd.reloading()
        memory = write(program.header(self._systemd.silence), handover)
        for _ in range(TURNS):
            await deferLater(self._reactor, 0)
        if self._ending:
            return  # a signal asked the node to end
        program.become(memory, self._environment)

    def _report(self, kind: Kind, text: str, fields: Mapping[str, str]) -> None:
        self._ring.event(text)
        self._journal.tell(kind, text, **fields)
        (self.log.info if kind is Kind.NODE_UPGRADING else self.log.error)("{text}", text=text)
