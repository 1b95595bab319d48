"""A run of a core, which shares its listeners with other runs: what is the same for all cores."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Generic, Protocol, TypeVar

from twisted.internet.defer import Deferred

from drivers.process.accepting import ListenerWatch
from drivers.process.child import CoreProcess
from drivers.sockets.connections import Ports, hang_up
from drivers.sockets.listeners import Survey
from drivers.sockets.pidfd import Unreachable
from drivers.sockets.sharing import Reach, Sharing
from drivers.sockets.sock_diag import listeners, listening
from node.base.errors import CoreFailed
from node.base.logs import Logger
from node.base.pool import in_pool
from node.contract.abilities import NotShared
from node.contract.driver import Exit, Host, Plan

# The most listeners to share: each is proven, and takes one of the node's descriptors for each core.
MOST = 1000


class Listening(Protocol):
    """Where a configuration listens. Pure."""

    @property
    def ports(self) -> Ports:
        """The ports on which inbounds listen."""

    @property
    def listens(self) -> Mapping[int, Collection[object]]:
        """By port, the address and options of the sockets: if two configurations differ, their listeners do."""

    @property
    def datagrams(self) -> Collection[int]:
        """The UDP ports where each datagram is independent: it may go to another core than those before it."""

    @property
    def sessions(self) -> Collection[int]:
        """The UDP ports where clients have sessions: a client that is refused begins a new session."""

    @property
    def exclusive(self) -> Sequence[str]:
        """The resources that only one process at a time can have, or that a next core would not get; a line each."""


class Api(Protocol):
    """The part of a core's API that all cores have."""

    async def ready(self, seconds: float) -> bool: ...

    async def close(self) -> None: ...


A = TypeVar("A", bound=Api)


class SharedRun(Generic[A]):
    """The part of `node.contract.driver.Generation` and `Shares` that is the same for all cores.

    `own_paths` are unix sockets that are not inbounds.
    """

    log = Logger()

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
        self._host = host
        self._process = process
        self._api = api
        self._sharing = sharing
        self._listening = listening
        self._own_paths = frozenset(own_paths)
        self._number = process.pid or 0
        self._listener_watch = ListenerWatch()
        # Whether it is closed to new connections, and the listeners that are.
        self._closed = False
        self._shut: frozenset[int] = frozenset()

    @property
    def alive(self) -> bool:
        return self._process.exit is None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def when_exited(self) -> Deferred[Exit]:
        return self._process.when_exited()

    async def answers(self, seconds: float) -> bool:
        return await self._api.ready(seconds)

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)

    async def stop(self) -> None:
        await self._process.stop()
        await self._close()

    async def _close(self) -> None:
        """Close the connections to the core. May be called again meanwhile."""
        await self._api.close()

    async def obstacles(self, plan: Plan) -> Sequence[str]:
        """See `Shares.obstacles`. `plan.made` is the attribute of our own drivers' plans."""
        made = getattr(plan, "made", None)
        if not isinstance(made, type(self._listening)):
            return ["the next core is of another type"]
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
        """The ports to share."""
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
            # Not checked for very many listeners, which would delay everything else.
            return self._listener_watch.look(listening(ports)) if len(ports) <= MOST else ()
        except OSError as error:
            raise CoreFailed(f"the kernel does not list listening sockets: {error}") from error

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
        """Close new listeners of a core that is closed to new connections."""
        if self._closed:
            try:
                await self._set_door()
            except CoreFailed as error:
                self.log.warn(
                    "NODE_QUOTA: a core opened inbounds that could not be closed; they accept connections: {fault}",
                    fault=error,
                )

    async def _hang_up(self) -> None:
        try:
            await in_pool(self._host.reactor, hang_up, self._number, self._listening.ports)
        except Unreachable as error:
            raise CoreFailed(str(error)) from error

    def _listeners_there(self) -> frozenset[int]:
        """Return the inodes of the listeners on its ports, with those of other processes."""
        return frozenset(chain.from_iterable(listeners(self._listening.ports).values()))

    async def _set_door(self) -> None:
        """Close or open all listeners, with new ones; of a core that has ended nothing must be registered."""
        if not self.alive:
            return
        try:
            there = self._listeners_there() if self._closed else frozenset()
            if not self._closed or self.shared or not there <= self._shut:
                await self._sharing.close_door(self._number, self._listening.ports, self._closed)
            self._shut = there
        except OSError as error:
            raise CoreFailed(f"its listeners could not be closed or opened for new connections: {error}") from error
        except Unreachable as error:
            raise CoreFailed(str(error)) from error

    @property
    def ends_sessions(self) -> bool:
        return bool(self._listening.sessions)

    @property
    def shared(self) -> bool:
        """Whether its listeners are shared, and so must not be closed or opened by the core."""
        return self._sharing.has(self._number)

    @property
    def drains(self) -> bool:
        """Whether it gets no new connections, any more or yet."""
        return self._sharing.drains(self._number)

    async def quieten(self) -> bool:
        """Steer new connections away before it ends. Returns False if its listeners are not shared."""
        if not self.shared:
            return False
        await self._sharing.quieten(self._number)
        return True

    def _seen(self, seen: Survey) -> list[str]:
        led = {*self._listening.datagrams, *self._listening.sessions}
        held = sorted(address for address in seen.udp if address.port not in led)
        udp = [f"UDP at {address} cannot be steered to another core" for address in held]
        paths = [f"only one process can listen at {path}" for path in sorted(seen.paths - self._own_paths)]
        return [*seen.obstacles, *udp, *paths]


def watch(core: CoreProcess, sharing: Sharing) -> None:
    """Remove the core from `sharing` when its process ends, at whatever point."""
    number = core.pid or 0
    core.when_exited().addCallback(lambda _: sharing.gone(number))


def moved(old: Mapping[int, Collection[object]], new: Mapping[int, Collection[object]]) -> list[str]:
    """Return why listeners on the same port differ: the kernel would give connections to either core."""
    ports = sorted(port for port in old.keys() & new.keys() if old[port] != new[port])
    return [f"the inbound on port {port} changes its address or its socket options" for port in ports]


def turned(old: Listening, new: Listening) -> list[str]:
    """Return the ports that change between datagrams and sessions, which are steered in different ways."""
    ports = sorted({*old.datagrams} & {*new.sessions} | {*old.sessions} & {*new.datagrams})
    return [f"the inbound on port {port} changes between UDP with sessions and UDP without" for port in ports]


def _count(listening: Listening) -> int:
    return sum(map(len, listening.listens.values()))
