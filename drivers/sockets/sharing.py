"""Share listeners between the runs of a core, and steer new connections to one of them.

Runs `Steering`, `Datagrams` and `Sessions` in the reactor's thread pool, one call at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.task import deferLater

from drivers.sockets.connections import alive, deafen
from drivers.sockets.held import Shelf, Unsteerable
from drivers.sockets.listeners import Survey, survey
from drivers.sockets.pidfd import Unreachable
from drivers.sockets.reuseport import Address
from drivers.sockets.sessions import Sessions
from drivers.sockets.sock_diag import Ports
from drivers.sockets.steering import Datagrams, Steering
from node.base.errors import CoreFailed
from node.base.logs import Logger
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.contract.abilities import NotShared
from protos import handover_pb2

P = ParamSpec("P")
T = TypeVar("T")

# Seconds between two checks of a process's waiting connections.
POLL = 0.005
# Seconds for a stopping core to accept its waiting connections.
ACCEPTING = 0.5


class Reach(NamedTuple):
    """A process, and the ports where it listens, takes stateless datagrams, and has sessions over UDP."""

    pid: int
    ports: Ports
    datagrams: Ports
    sessions: Ports


class Sharing:
    """The sharing of listeners between all runs of one driver."""

    log = Logger()

    def __init__(self, reactor: PooledReactor, shelf: Shelf) -> None:
        self._reactor = reactor
        self._shelf = shelf
        self._steering, self._datagrams, self._sessions = Steering(shelf), Datagrams(shelf), Sessions(shelf)
        # The descriptors that the keeper has for the next node.
        self._stored = b""
        self._lock = DeferredLock()
        # The pids of processes that share, in the order in which they joined; and those about to exit.
        self._members: dict[int, None] = {}
        self._ending: set[int] = set()
        self._led: int | None = None
        # Those of them that have never got new connections, and what to call when one gets them because another exits.
        self._coming: set[int] = set()
        self._heirs: dict[int, Callable[[], None]] = {}
        # Another process is about to join. Listeners stay held for one process, else the new one would get connections.
        self._awaits = self._joins = False
        # Held while a process closes listeners and opens them again: their order must be known.
        self._renewal = DeferredLock()
        # Processes closed to new connections; those that join them are closed, too.
        self._closed: set[int] = set()

    def has(self, pid: int | None) -> bool:
        """Whether a process shares its listeners. It must not open or close any then."""
        return pid in self._members

    def drains(self, pid: int | None) -> bool:
        """Whether a process shares its listeners and gets no new connections any more."""
        return self.has(pid) and pid != self._led and pid not in self._coming

    @property
    def awaits(self) -> bool:
        """Whether another process is about to join, or joins."""
        return self._awaits or self._joins

    def call_heir(self, pid: int, call: Callable[[], None]) -> None:
        """Call this, once, when the process gets new connections because another has exited."""
        self._heirs[pid] = call

    async def survey(self, pid: int, ports: Ports) -> Survey:
        """Survey the sockets of a process. Raises `NotShared`."""
        return await self._steered(survey, pid, ports)

    async def join(self, pid: int, ports: Ports, datagrams: Ports = (), sessions: Ports = ()) -> None:
        """Share the TCP and UDP sockets of a process. Raises `NotShared`.

        The first one, or one that has joined already, awaits another.
        """
        first = not self._members
        self._awaits = first or pid in self._members
        if pid in self._members:
            await self._steered(self._sessions.hold, pid)
            return
        self._members[pid] = None
        if first:
            self._led = pid
        (self._coming.discard if first else self._coming.add)(pid)
        self._joins = True
        try:
            await self._steered(self._join, pid, ports, datagrams, sessions)
        except NotShared:
            if first:  # nothing is held then; of a later process something may be, until it exits
                self._members.clear()
                self._led = None
            raise
        finally:
            self._joins = False

    @asynccontextmanager
    async def renewing(self, pid: int, ports: Ports) -> AsyncIterator[None]:
        """Let a process close its listeners at these ports and open them again inside the block.

        No other process may be about to join. Raises `NotShared`: then new connections may not reach the process.
        """
        async with self._renewal:
            try:
                yield
            finally:
                # Also after a failed or cancelled call, which the process may have carried out.
                if self.has(pid):
                    await self._steered(self._renew, pid, ports)

    async def prove(self, pid: int, seconds: float) -> None:
        """Check that a process accepts a connection on each of its addresses. Raises `CoreFailed`."""
        deadline = self._reactor.seconds() + seconds
        try:
            await self._steered(self._steering.knock, pid)
        except NotShared as error:
            raise CoreFailed(f"the core cannot be reached: {error}") from error
        while deaf := sorted(address for address, count in (await self._waiting(pid)).items() if count):
            if self._reactor.seconds() > deadline:
                where = ", ".join(map(str, deaf))
                raise CoreFailed(f"the core did not accept a connection within {seconds:g} s on {where}")
            await deferLater(self._reactor, POLL)

    async def lead(self, pid: int) -> None:
        """Steer all new connections to a process; at addresses that it lacks they are dropped. Raises `NotShared`.

        UDP sessions end, and clients start new ones with it.
        """
        if not self.has(pid):
            return
        before, self._led = self._led, pid
        self._coming.discard(pid)
        try:
            await self._steered(self._lead, pid)
        except NotShared:
            self._led = before if self.has(before) else None
            raise

    async def quieten(self, pid: int) -> None:
        """A process is about to exit: stop new connections if it gets them.

        Returns when it has accepted those that wait, or after `ACCEPTING` seconds: a later accept would go unnoticed.
        """
        self._ending.add(pid)
        self._closed.discard(pid)
        if pid != self._led:
            return
        await self._do(self._quieten, pid)
        deadline = self._reactor.seconds() + ACCEPTING
        while any((await self._waiting(pid)).values()) and self._reactor.seconds() < deadline:
            await deferLater(self._reactor, POLL)

    async def close_door(self, pid: int, ports: Ports, closed: bool = True) -> None:
        """Drop new TCP connections at these ports, or stop that; a process steered to later is closed likewise.

        Raises `Unreachable`.
        """
        if pid in self._ending:
            return
        (self._closed.add if closed else self._closed.discard)(pid)
        if not self.has(pid):
            await self._do(deafen, pid, ports, closed)
        elif closed:
            await self._do(self._deafen, pid, True)
        elif self._led is not None and not self._is_closed():
            await self._do(self._deafen, self._led, False)

    async def connected(self, pid: int, ports: Ports) -> int:
        """Count a process's live connections, with those that it has not accepted yet."""
        # In this order, so that a connection accepted in between is not missed.
        waiting = sum((await self._waiting(pid)).values())
        try:
            return waiting + await self._do(alive, pid, ports)
        except Unreachable as error:
            raise CoreFailed(str(error)) from error

    async def leave(self) -> None:
        """Leave all to the next node. A process that is alone is released, even if it awaits another."""
        if len(self._members) == 1:
            self._awaits = False
            self._members.clear()
            self._led = None
            await self._do(self._close)

    def go_on(self) -> None:
        """Restore what an earlier node has left, before any other call. Raises `OSError`."""
        sharing = self._shelf.stored()
        sockets = self._shelf.take(sharing)
        self._members = dict.fromkeys(sharing.members)
        self._led = sharing.led if sharing.HasField("led") else None
        self._closed = set(sharing.closed)
        self._steering.unpack(sharing.streams, sockets)
        self._datagrams.unpack(sharing.datagrams, sockets)
        self._sessions.unpack(sharing, sockets)

    async def remain(self, pids: Collection[int], lead: int | None = None) -> None:
        """Keep these of the restored processes; the others have exited.

        `lead` gets new connections: the node before may have been killed between any two steps. Raises `NotShared`.
        """
        if lead is not None and lead in pids and self.has(lead):
            self._led = lead
            await self._steered(self._lead_again, lead)
        for pid in [pid for pid in self._members if pid not in pids]:
            self.gone(pid)
        if len(self._members) == 1:
            await self.leave()

    def gone(self, pid: int) -> None:
        """A process of the driver has exited. One that had not joined is the awaited one."""
        joined = self.has(pid)
        self._members.pop(pid, None)
        self._closed.discard(pid)
        self._coming.discard(pid)
        self._heirs.pop(pid, None)
        self._awaits = self._awaits and joined
        heir = None
        if joined and pid == self._led:
            heir = self._led = next((one for one in reversed(self._members) if one not in self._ending), None)
        self._ending.discard(pid)
        alone = len(self._members) == 1 and not self._awaits
        if alone:
            self._members.clear()
            self._led = None
        if joined or alone:
            text = "releasing the listeners of a core that exited failed: new connections may not reach the other core"
            self._do(self._leave, pid, heir, alone).addErrback(lambda failure: self.log.failure(text, failure))
        if heir is not None:
            self._coming.discard(heir)
            if call := self._heirs.pop(heir, None):
                call()

    def _packed(self) -> handover_pb2.Sharing:
        sharing = handover_pb2.Sharing(members=list(self._members), led=self._led, closed=self._closed)
        sharing.streams.extend(self._steering.packed())
        sharing.datagrams.extend(self._datagrams.packed())
        self._sessions.pack(sharing)
        return sharing

    def _join(self, pid: int, ports: Ports, datagrams: Ports, sessions: Ports) -> None:
        first = not self._members.keys() - {pid}
        self._steering.join(pid, ports)
        try:
            self._datagrams.join(pid, datagrams)
            self._sessions.join(pid, sessions)
        except (Unsteerable, OSError):
            if first:
                self._steering.detach()
                self._datagrams.detach()
                self._sessions.close()
            raise

    def _renew(self, pid: int, ports: Ports) -> None:
        self._steering.renew(pid, ports)
        self._datagrams.renew(pid, ports)

    def _quieten(self, pid: int) -> None:
        self._deafen(pid, True)
        self._datagrams.silence(pid)
        self._sessions.silence(pid)

    def _leave(self, pid: int, heir: int | None, alone: bool) -> None:
        lost = self._steering.leave(pid)
        self._datagrams.leave(pid)
        self._sessions.leave(pid)
        if lost:
            self.log.warn("the core exited before it accepted {count} connections; they were reset", count=lost)
        if heir is not None:
            self._lead(heir)
        if alone:
            self._close()

    def _close(self) -> None:
        self._steering.close()
        self._datagrams.close()
        self._sessions.close()

    def _lead(self, pid: int) -> None:
        self._deafen(pid, self._is_closed())
        self._steering.steer(pid)
        self._datagrams.steer(pid)
        self._steering.deafen(self._steering.missing(pid))
        self._sessions.lead(pid)

    def _lead_again(self, pid: int) -> None:
        self._sessions.settle()
        # The node may have been killed before it took over listeners that a process had renewed.
        for each in list(self._members):
            self._renew(each, [*self._steering.ports, *self._datagrams.ports])
        self._lead(pid)

    def _is_closed(self) -> bool:
        """Whether any process that shares is closed."""
        return any(pid in self._closed for pid in list(self._members))

    def _deafen(self, pid: int, deaf: bool) -> None:
        self._steering.deafen(self._steering.waiting(pid), deaf)

    def _waiting(self, pid: int) -> Deferred[dict[Address, int]]:
        return self._do(lambda: dict(self._steering.waiting(pid)))

    async def _steered(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return await self._do(work, *arguments, **named)
        except (Unsteerable, OSError) as error:
            raise NotShared(str(error)) from error

    def _do(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Deferred[T]:
        """Run work in the pool, one call at a time, to its end even if the caller is cancelled."""
        result: Deferred[T] = Deferred()
        done = partial(self._done, partial(work, *arguments, **named))
        self._lock.run(in_pool, self._reactor, done).chainDeferred(result)
        return result

    def _done(self, work: Callable[[], T]) -> T:
        """Do the work, and store the outcome for the next node."""
        try:
            return work()
        finally:
            sharing = self._packed()
            if (stored := sharing.SerializeToString()) != self._stored:
                try:
                    self._shelf.store(sharing)
                    self._stored = stored
                except OSError as error:
                    text = "if the node dies now, new connections may not reach the current core: {error}"
                    self.log.error(text, error=str(error))
