"""One version of the node in the place of another, in the same process: what it takes over, and what it leaves."""

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
from node.upgrade.parts import Backend, Calls, Connections, State, Store, Systemd
from node.upgrade.program import Program, Successor
from node.waiting import finished
from protos.handover_pb2 import Handover

# Seconds for calls that are under way when another version takes over.
FINISH = 1.0
# The exit status of a node that no version of it can follow.
FAILURE = 1
# Turns of the reactor in which a signal that it has heard already ends the node.
TURNS = 3


class Succession:
    """`ports` are those that this version listens on, by their names.

    `sweep` ends the cores that another one has left, but for those that it is given.
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
        backend: Backend,
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
        # Why the version that was to follow this one did not.
        self._failed = ""
        self._commit: Callable[[], None] = lambda: None
        # Whether all serves, whether the node is to end, and whether too much has ended for this version to go on.
        self._ready = self._ending = self._closed = False
        # What is under way beside calls and cores, and would end with this version.
        self.under_way: Callable[[], str] = lambda: ""
        self.ports: dict[str, Any] = {}

    # What this version takes over

    def take(self) -> None:
        """Look what the last version has left, before anything is opened."""
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
        """Go on with cores whose node was killed, where no earlier version has left any."""
        if left is not None and not self._left.format:
            self._left.MergeFrom(left)

    @property
    def lock(self) -> int | None:
        """The descriptor of the lock of the state directory, if the last version has left it."""
        return self._left.lock or None

    @property
    def outcome(self) -> str | None:
        """Why this version runs again, if the next one failed; empty where it is that one, None where none was."""
        return self._failed if self._left.format else None

    @property
    def cores(self) -> Collection[int]:
        """The process numbers of the cores that go on."""
        return [run.pid for run in (self._left.run, *self._left.draining) if run.pid]

    def held(self, name: str, interface: str, port: int) -> int | None:
        """The descriptor that listens there already, to be duplicated: this one is for the way back."""
        held: int | None = self._left.ports.get(name)
        if held is None:
            return None
        with socket.socket(fileno=os.dup(held)) as there:
            where = there.getsockname()[:2]
        return held if where in places(interface, port) else None

    def inherit(self) -> None:
        """Have a core that goes on be what is resumed; controllers wait until it is."""
        if self.cores:
            self._backend.inherit(self._left, self)
            self._hear(False)

    def ready(self, commit: Callable[[], None]) -> None:
        """Everything serves; `commit` is called when there is no way back, at once or when the core was taken over."""
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
            said = f"txnode {__version__} goes on with {'the core' if len(pids) == 1 else f'{len(pids)} cores'}"
            self._ring.event(said)
            self.log.info("{said}", said=said)
        if {*pids} != {*self.cores}:
            self._sweep(pids)
        self._come_up()

    def go_back(self, reason: str) -> None:
        self._handle.go_back(f"it cannot go on with the core: {reason}")

    def failed(self, reason: str) -> None:
        self.go_back(reason)
        self.log.warn("the core is started anew: {reason}", reason=reason)
        self._sweep(())
        self._come_up()

    def end(self) -> None:
        """The node ends: there is no way back from here on either."""
        self._ending = True
        self._handle.commit()

    def _come_up(self) -> None:
        self._handle.commit()
        for held in self._left.ports.values():
            os.close(held)
        # It may be much.
        self._left = Handover(format=self._left.format)
        if self._ending:
            return
        self._commit()
        self._hear()

    def _hear(self, controllers: bool = True) -> None:
        for port in self.ports.values():
            (port.startReading if controllers else port.stopReading)()

    # What it leaves

    def unsteady(self, several: bool) -> str:
        if self._ending:
            return "the node is ending"
        # The next version begins with what is on disk.
        if self._store.fault:
            return self._store.fault
        return f"there is an update of {subject}" if (subject := self.under_way()) else self._backend.unsteady(several)

    async def rehearse(self) -> None:
        await self._backend.rehearse()

    async def succeed(self, program: Program, successor: Successor) -> str:
        await self._store.flush()
        if self._store.fault:
            return self._store.fault
        self._hear(False)
        self._calls.end_readers()
        await self._connections.finish(FINISH, self._calls.idle)
        try:
            await self._backend.leave(successor.several, partial(self._become, program, successor.version))
            if not self._closed:
                # There is nothing that could be left.
                await self._backend.close()
                await self._become(program, successor.version, Handover())
        except Exception as error:
            if self._closed:
                self.log.critical("the node ends: the next version cannot be run: {error}", error=str(error))
                # A failure, so that systemd starts it again.
                self._reactor.addSystemEventTrigger("after", "shutdown", os._exit, FAILURE)
                self._reactor.stop()
                return ""
            # This version goes on, whatever it was.
            self._hear()
            if isinstance(error, (NotNow, Aborted)):
                return str(error)
            raise
        return ""

    def refuse(self, reason: str) -> None:
        self._tell(Kind.NODE_UPGRADE_FAILED, f"the node was not upgraded: {reason}", {"reason": reason})

    async def _become(self, program: Program, version: str, runs: Handover) -> None:
        if self._ending:
            raise NotNow("the node is ending")
        self._tell(Kind.NODE_UPGRADING, f"the node becomes {version}", {"version": version})
        self._closed = True
        try:
            await finished(self._close_and_become(program, runs))
        except CancelledError:
            # The node's end ends whatever has to do with cores; what is being closed is closed all the same.
            if not self._ending:
                raise

    async def _close_and_become(self, program: Program, runs: Handover) -> None:
        for end in (self._calls.close, self._backend.rest, self._journal.close, self._store.close):
            try:
                await maybeDeferred(end)
            except Exception:  # noqa: BLE001 - logged; the next version begins with what is on disk
                self.log.failure("a part did not end well")
        ports = {name: port.fileno() for name, port in self.ports.items()}
        ring = self._ring.packed
        handover = Handover(version=__version__, lock=self._state.lock, ports=ports, ring=ring)
        handover.MergeFrom(runs)
        # Versions that can go on with one core alone read nothing else.
        handover.format = SEVERAL if runs.draining or runs.together.descriptors else ONE
        self._systemd.reloading()
        memory = write(program.words(self._systemd.silence), handover)
        for _ in range(TURNS):
            await deferLater(self._reactor, 0)
        if self._ending:
            return  # somebody wants it to end, not to go on
        program.become(memory, self._environment)

    def _tell(self, kind: Kind, said: str, fields: Mapping[str, str]) -> None:
        self._ring.event(said)
        self._journal.tell(kind, said, **fields)
        (self.log.info if kind is Kind.NODE_UPGRADING else self.log.error)("{said}", said=said)
