"""The part of `node.contract.driver.Shares` that is the same for all cores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Protocol

from twisted.internet.threads import deferToThreadPool

from drivers.process.child import CoreProcess
from drivers.process.deaf import Ears
from drivers.process.run import A, Run
from drivers.sockets.connections import Ports, hang_up
from drivers.sockets.listeners import Survey
from drivers.sockets.rights import Unreachable
from drivers.sockets.sharing import Reach, Sharing
from drivers.sockets.sock_diag import listeners, listening
from node.contract.driver import Host, NotShared, Plan
from node.errors import CoreFailed

# Listeners above which no other run joins: each is proven, and takes a descriptor of the node's for each run.
MOST = 1000


class Listening(Protocol):
    """What a driver knows of a configuration. Pure."""

    @property
    def ports(self) -> Ports:
        """Where inbounds listen."""

    @property
    def listens(self) -> Mapping[int, Collection[object]]:
        """By port where and how they do: what is not equal for two configurations is another listener."""

    @property
    def datagrams(self) -> Collection[int]:
        """The ports where each datagram stands for itself, if any come: it need not go where those before it went."""

    @property
    def sessions(self) -> Collection[int]:
        """The ports where clients have sessions by UDP, if any: who is told that nobody is there begins anew."""

    @property
    def exclusive(self) -> Sequence[str]:
        """What of it only one process at a time can have, or does not get over to another one, each in a line."""


class SharedRun(Run[A]):
    """A run that can share its listeners. `own_paths` are sockets in the file system that are no inbounds."""

    def __init__(
        self,
        host: Host,
        process: CoreProcess,
        api: A,
        *,
        sharing: Sharing,
        listening: Listening,
        own_paths: Collection[str] = (),
    ) -> None:
        super().__init__(host, process, api)
        self._sharing = sharing
        self._listening = listening
        self._own_paths = frozenset(own_paths)
        self._number = process.pid or 0
        self._ears = Ears()
        # Whether no new connections are to be taken, and the sockets that take none.
        self._closed = False
        self._shut: frozenset[int] = frozenset()

    async def obstacles(self, plan: Plan) -> Sequence[str]:
        """`plan.made` is what plans of our own drivers have."""
        made = getattr(plan, "made", None)
        if not isinstance(made, type(self._listening)):
            return ["the next core is of another kind"]
        found = [*self._listening.exclusive, *moved(self._listening.listens, made.listens)]
        found += turned(self._listening, made)
        if max(map(_count, (self._listening, made))) > MOST:
            return [*found, f"there are more than {MOST:,} listeners"]
        try:
            return [*found, *self._seen(await self._sharing.survey(self._number, self._listening.ports))]
        except NotShared as error:
            return [*found, str(error)]

    async def join(self) -> None:
        if not self.alive:
            raise NotShared("the core has ended")
        await self._sharing.join(*self.reach)

    @property
    def reach(self) -> Reach:
        """What of it is shared."""
        datagrams, sessions = (
            [range(port, port + 1) for port in ports] for ports in (self._listening.datagrams, self._listening.sessions)
        )
        return Reach(self._number, self._listening.ports, datagrams, sessions)

    async def prove(self, seconds: float) -> None:
        await self._sharing.prove(self._number, seconds)
        if not self.alive:
            raise CoreFailed("the core ended before it accepted connections")

    async def lead(self) -> None:
        await self._sharing.lead(self._number)

    async def connected(self) -> int:
        return await self._sharing.connected(self._number, self._listening.ports)

    async def deaf(self) -> Sequence[str]:
        ports = self._listening.listens
        try:
            # Of very many it is not looked at: it would take the time of others.
            return self._ears.look(listening(ports)) if len(ports) <= MOST else ()
        except OSError as error:
            raise CoreFailed(f"the kernel does not tell who listens: {error}") from error

    async def close_door(self, *, empty: bool = False) -> None:
        self._closed = True
        await self._set_door()
        if empty:
            await self._hang_up()

    async def open_door(self) -> None:
        self._closed = False
        await self._set_door()

    @property
    def open_ports(self) -> Sequence[int]:
        return sorted({*self._listening.datagrams, *self._listening.sessions})

    async def keep_closed(self) -> None:
        """Where it is closed, its listeners may be new."""
        if self._closed:
            try:
                await self._set_door()
            except CoreFailed as error:
                self.log.warn("new connections may be taken: {fault}", fault=error)

    async def _hang_up(self) -> None:
        reactor = self._host.reactor
        try:
            await deferToThreadPool(reactor, reactor.getThreadPool(), hang_up, self._number, self._listening.ports)
        except Unreachable as error:
            raise CoreFailed(str(error)) from error

    def _listeners_there(self) -> frozenset[int]:
        """Their inodes, and those of others at the same ports."""
        return frozenset(chain.from_iterable(listeners(self._listening.ports).values()))

    async def _set_door(self) -> None:
        """As it is to be, at listeners that are new, too. Of one that has ended nobody is to remember it."""
        if not self.alive:
            return
        try:
            there = self._listeners_there() if self._closed else frozenset()
            if not self._closed or self.shared or not there <= self._shut:
                await self._sharing.close_door(self._number, self._listening.ports, self._closed)
            self._shut = there
        except OSError as error:
            raise CoreFailed(f"its listeners do not let new connections be dropped, or taken: {error}") from error
        except Unreachable as error:
            raise CoreFailed(str(error)) from error

    @property
    def ends_sessions(self) -> bool:
        return bool(self._listening.sessions)

    @property
    def shared(self) -> bool:
        """Whether its listeners are held, and must not be closed or opened."""
        return self._sharing.has(self._number)

    @property
    def drains(self) -> bool:
        """Whether it gets no new connections any more, or yet."""
        return self._sharing.drains(self._number)

    async def quieten(self) -> bool:
        """Have no new connections come before it ends. False if its listeners are its own, and it is to be told."""
        if not self.shared:
            return False
        await self._sharing.quieten(self._number)
        return True

    def _seen(self, seen: Survey) -> list[str]:
        led = {*self._listening.datagrams, *self._listening.sessions}
        held = sorted(address for address in seen.udp if address.port not in led)
        udp = [f"UDP at {address} cannot be led to another run of the core" for address in held]
        paths = [f"only one process can listen at {path}" for path in sorted(seen.paths - self._own_paths)]
        return [*seen.obstacles, *udp, *paths]


def watch(core: CoreProcess, sharing: Sharing) -> None:
    """Have it leave when it ends, however far it has come until then."""
    number = core.pid or 0
    core.when_exited().addCallback(lambda _: sharing.gone(number))


def moved(old: Mapping[int, Collection[object]], new: Mapping[int, Collection[object]]) -> list[str]:
    """The kernel would give some connections to either run, whoever is to have them."""
    ports = sorted(port for port in old.keys() & new.keys() if old[port] != new[port])
    return [f"the inbound on port {port} moves to another address, or its socket has other options" for port in ports]


def turned(old: Listening, new: Listening) -> list[str]:
    """One way of leading datagrams knows nothing of a run that is led in the other."""
    ports = sorted({*old.datagrams} & {*new.sessions} | {*old.sessions} & {*new.datagrams})
    return [f"the inbound on port {port} becomes one of another kind over UDP" for port in ports]


def _count(listening: Listening) -> int:
    return sum(map(len, listening.listens.values()))
