"""The hand-over from the node before and to the next one, which an upgrade starts, or the keeper after a death."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.task import deferLater

from node import __version__
from node.base.errors import Aborted
from node.base.logs import Logger, LogRing
from node.base.part import Parts
from node.base.waiting import finished
from node.contract.driver import NotNow
from node.events.journal import Journal
from node.events.kinds import Kind
from node.handover import attempt
from node.handover.attempt import TRYING
from node.handover.keeper import FAILED, WAITING
from node.handover.parts import Calls, Connections, HandoverBackend, Jobs, State, Store, Systemd
from node.handover.program import PATH, PATIENCE, Program, Refused
from node.handover.snapshots import FORMAT, Snapshots, memory_of
from node.handover.ties import Ties
from protos.handover_pb2 import Handover

# Seconds that running calls have to finish before another version takes over.
FINISH = 1.0
# Seconds between two looks at what is not delivered yet.
LOOK = 0.01
# The exit status if the next version could not be left all.
FAILURE = 1
# Turns of the reactor in which a signal received already can still end the node.
TURNS = 3


class Succession:
    """`ports`: the listening ports of this node, by name. `seconds`: for how long cores go on without any node.

    Without `ties` there is no keeper: nothing is taken over, and no version follows in place.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        environment: MutableMapping[str, str],
        ties: Ties | None,
        seconds: float,
        *,
        ring: LogRing,
        journal: Journal,
        state: State,
        store: Store,
        backend: HandoverBackend,
        parts: Parts,
        calls: Calls,
        connections: Connections,
        systemd: Systemd,
        sweep: Callable[[Collection[int]], object],
    ) -> None:
        self._reactor = reactor
        self._environment = environment
        self._ties = ties
        self._seconds = seconds
        self._ring = ring
        self._journal = journal
        self._state = state
        self._store = store
        self._backend = backend
        self._parts = parts
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
        # Why the next version failed after it had been ready.
        self._late = ""
        # Updates under way, which would end with this version.
        self.jobs: Jobs | None = None
        self.ports: dict[str, Any] = {}
        self._snapshots = Snapshots(reactor, ties, backend, ring) if ties is not None else None

    # What this node takes over

    def take(self) -> None:
        """Receive what the node before has left; waits for its end. Call it before anything is opened."""
        self._failed = self._environment.pop(FAILED, "")
        if PATH in self._environment:
            # The next program must find its modules in the usual place, not in the kept copy.
            self._environment["PYTHONPATH"] = self._environment.pop(PATH)
        if self._ties is None:
            return
        self._ties.hello()
        for memory in self._ties.take("state"):
            self._left = _read(memory)
        if self._left.HasField("ring"):
            self._ring.unpack(self._left.ring)
        if self._failed:
            self._store.go_back()

    @property
    def lock(self) -> int | None:
        """The descriptor of the state directory's lock that the node before has left, if any."""
        return next(iter(self._ties.take("lock")), None) if self._ties else None

    @property
    def outcome(self) -> str | None:
        """The outcome of an upgrade: why the next version failed and this one runs again; empty if it succeeded.

        None without an upgrade.
        """
        return self._failed if self._failed or self._left.exact else None

    @property
    def cores(self) -> Collection[int]:
        """The PIDs of the cores that were left."""
        return [run.pid for run in (self._left.run, *self._left.draining) if run.pid]

    def held(self, name: str, interface: str, port: int) -> int | None:
        """The descriptor that the node before has left, if it listens there. The caller owns it."""
        for held in self._ties.take(_port(name)) if self._ties else ():
            with socket.socket(fileno=os.dup(held)) as there:
                where = there.getsockname()[:2]
            if where in places(interface, port):
                return held
            os.close(held)
            self._drop([_port(name)])
        return None

    def hold(self) -> None:
        """Have the keeper hold the lock and the ports. Raises `OSError`."""
        if self._ties is not None:
            self._ties.put("lock", [self._state.lock])
            for name, port in self.ports.items():
                self._ties.put(_port(name), [port.fileno()])

    def inherit(self) -> None:
        """Have the resume recover the cores that were left; controllers wait until that is done."""
        if self._ties is not None:
            self._ties.follow(self._reactor)
        if self.cores:
            self._backend.inherit(self._left, self)
            self._listen(False)

    def ready(self, commit: Callable[[], None]) -> None:
        """Note that everything serves. `commit` is called when the way back ends: at once, or with the cores taken."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITING)
        self._commit, self._ready = commit, True
        if self._failed:
            self.refuse(self._failed)
        if not self.cores:
            self._come_up()

    async def end_others(self) -> None:
        if not self._left.exact and self._ties is not None:
            await self._ties.end_others()

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
        """Go back to the version before, if this one follows it in an upgrade: the keeper ends this process then."""
        if self._ties is not None and self._left.exact and not self._failed:
            self._ties.fail(f"it cannot go on with the core: {reason}")
            signal.pause()

    def failed(self, reason: str) -> None:
        self.go_back(reason)
        self.log.warn("the core is restarted: {reason}", reason=reason)
        self._sweep(())
        self._come_up()

    def end(self) -> None:
        """Note that the node is ending, and all with it."""
        self._ending = True
        if self._snapshots is not None:
            self._snapshots.stop()
        if self._ties is not None:
            self._ties.bye()

    def _come_up(self) -> None:
        if self._ties is not None and self._snapshots is not None:
            # From here on the next node finds what the disk has, not what the node before had counted.
            self._snapshots.go_on(self._left)
            self._ties.drop_leftover()
            self._environment.pop(TRYING, None)
            self._ties.up(self._seconds)
        # Frees memory: it may be large.
        self._left = Handover(exact=self._left.exact)
        if self._ending:
            return
        if self._snapshots is not None:
            self._snapshots.start()
        self._commit()
        self._listen()

    def _listen(self, on: bool = True) -> None:
        """Accept new connections of controllers, or let them wait in the backlog."""
        for port in self.ports.values():
            (port.startReading if on else port.stopReading)()

    def _drop(self, names: Sequence[str]) -> None:
        if self._ties is not None:
            self._ties.drop(names)

    # What this node leaves to the next version

    def unsteady(self) -> str:
        if self._ties is None:
            return ""
        if self._ending:
            return "the node is ending"
        # The next version starts from the state file.
        if self._store.fault:
            return self._store.fault
        return self._updating or self._backend.unsteady()

    @property
    def _updating(self) -> str:
        subject = self.jobs.under_way if self.jobs else ""
        return f"an update of {subject} is under way" if subject else ""

    async def rehearse(self) -> None:
        await self._backend.rehearse()

    async def succeed(self, program: Program, version: str) -> str:
        if self._ties is None:
            raise Refused("the node has no keeper (KEEPER=off): restart it to change its version")
        # Written again, so that a disk that has failed since the last change is noticed.
        self._store.event(self._journal.margins)
        await self._store.flush()
        if self._store.fault:
            return self._store.fault
        await self._start_next(self._ties, program)
        reason = "the node goes on"
        try:
            self._listen(False)
            self._calls.end_readers()
            await self._connections.finish(FINISH, self._calls.idle)
            await self._deliver()
            await self._backend.leave(partial(self._leave, self._ties, version))
            if not self._closed:
                # No run was handed over: there is none, or none that can be.
                await self._backend.shut_down()
                await self._leave(self._ties, version, Handover())
        except Exception as error:
            if self._closed:
                text = "the node exits with status {status}: the next version could not be left all: {error}"
                self.log.critical(text, status=FAILURE, error=str(error))
                os._exit(FAILURE)
            # This version goes on in any case.
            self._listen()
            reason = str(error)
            if isinstance(error, (NotNow, Aborted)):
                return reason
            raise
        finally:
            self._ties.cancel_next(reason)
        return ""

    def refuse(self, reason: str) -> None:
        self._report(Kind.NODE_UPGRADE_FAILED, f"the node was not upgraded: {reason}", {"reason": reason})

    async def _start_next(self, ties: Ties, program: Program) -> None:
        """Start the next version, which imports its modules while this one serves. Raises `Refused` if it fails."""
        said: Deferred[str] = Deferred()
        self._late = ""
        ties.next_said = lambda reason: None if said.called else said.callback(reason)
        interpreter, *words = program.next
        added: dict[str, str] = {}
        command, plain = (added, [interpreter, attempt.__file__, *words]), (added, program.next)
        ties.start_next(command, plain, program.back(self._environment), PATIENCE)
        if reason := await said:
            raise Refused(f"the next version did not start: {reason}")
        ties.next_said = self._next_failed

    def _next_failed(self, reason: str) -> None:
        """The next version has failed although it was ready."""
        self._late = reason

    async def _deliver(self) -> None:
        """Wait until replies have reached clients that are far away: their rows would come back, and count twice."""
        until = self._reactor.seconds() + FINISH
        while not self._calls.settled and self._reactor.seconds() < until:
            await deferLater(self._reactor, LOOK)

    async def _leave(self, ties: Ties, version: str, runs: Handover) -> None:
        if self._ending:
            raise NotNow("the node is ending")
        if self._updating:
            raise NotNow(self._updating)
        if self._late:
            raise NotNow(f"the next version has failed: {self._late}")
        self._report(Kind.NODE_UPGRADING, f"upgrading the node to {version}", {"version": version})
        self._closed = True
        if self._snapshots is not None:
            self._snapshots.stop()
        try:
            await finished(self._close_and_leave(ties, runs))
        except CancelledError:
            # The node's end cancels operations on cores, this one included; the closing continues all the same.
            if not self._ending:
                raise

    async def _close_and_leave(self, ties: Ties, runs: Handover) -> None:
        leave = [self.jobs.leave] if self.jobs else []
        # Updates first: they must change nothing from here on.
        for end in (*leave, self._calls.close, self._parts.leave):
            try:
                await maybeDeferred(end)
            except Exception:  # noqa: BLE001 - logged; the next version starts from the state file
                self.log.failure("a part of the node could not be closed before the upgrade")
        handover = Handover(format=FORMAT, version=__version__, ring=self._ring.packed, exact=True)
        handover.MergeFrom(runs)
        self._systemd.reloading()
        for _ in range(TURNS):
            await deferLater(self._reactor, 0)
        if self._ending:
            return  # a signal asked the node to end
        memory = memory_of(handover.SerializeToString())
        ties.put("state", [memory])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)

    def _report(self, kind: Kind, text: str, fields: Mapping[str, str]) -> None:
        self._ring.event(text)
        self._journal.tell(kind, text, **fields)
        (self.log.info if kind is Kind.NODE_UPGRADING else self.log.error)("{text}", text=text)


def places(interface: str, port: int) -> Sequence[tuple[Any, ...]]:
    """The addresses that an interface and port resolve to: an operator may give a host name."""
    try:
        found = socket.getaddrinfo(interface, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return [(interface, port)]
    return [address[:2] for *_, address in found]


def _port(name: str) -> str:
    return f"listen/{name}"


def _read(memory: int) -> Handover:
    """Parse and close what was left; nothing if its format is unknown."""
    with os.fdopen(memory, "rb") as file:
        content = os.pread(memory, os.fstat(file.fileno()).st_size, 0)
    try:
        found = Handover.FromString(content)
    except DecodeError:
        found = Handover()
    if found.format == FORMAT:
        return found
    Succession.log.warn("what the node before has left has an unknown format: the core is restarted")
    return Handover()
