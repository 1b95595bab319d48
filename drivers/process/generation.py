"""The base class of the generations of both drivers: one run of a core, which shares its listeners with other runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Protocol, TypeVar

from drivers.process import closed, starting
from drivers.process.aliases import PLAIN, Aliases
from drivers.process.channel import COUNTERS, FIGURES, asking
from drivers.process.child import CoreProcess
from drivers.process.executable import Files
from drivers.process.kept import ANSWER, silent
from drivers.process.settings import USER_INBOUNDS
from drivers.sockets.connections import hang_up
from drivers.sockets.core_connections import CoreConnections
from drivers.sockets.listeners import ListenerWatch, Survey
from drivers.sockets.pacing import Paced
from drivers.sockets.pidfd import Unreachable
from drivers.sockets.sharing import Reach, Sharing
from drivers.sockets.sock_diag import Ports, listeners, listening
from node.base.errors import CoreFailed
from node.base.logs import Logger
from node.base.pool import in_pool
from node.contract.abilities import NotShared
from node.contract.accounts import Accounts
from node.contract.connections import Arrived, Live
from node.contract.counters import Asked, Reading, Scope, Seen
from node.contract.driver import Host, Plan
from protos.service_pb2 import BackendStatsResponse

# The most names that are read one by one: with USER_INBOUNDS a user has one for each inbound.
FEW = 500
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
        """What only one process at a time can have, or a next core would not get, each in a line."""


class Api(Protocol):
    """The part of a core's API that all cores have."""

    async def ready(self, seconds: float) -> bool: ...

    async def figures(self) -> BackendStatsResponse:
        """Run-time statistics. Raises `ApiFailed`."""

    async def close(self) -> None: ...


A = TypeVar("A", bound=Api)


@dataclass(frozen=True)
class Started(Generic[A]):
    """A core's process with its API, and the `files` that it read when it started. `sharing` gets to know its end.

    `aliases`: the names that it has for users.
    """

    host: Host
    sharing: Sharing
    process: CoreProcess
    api: A
    files: Files
    aliases: Aliases = PLAIN

    def __post_init__(self) -> None:
        named = int(self.host.settings.get(USER_INBOUNDS.name) == "on")
        self.files.under(
            {"ABUSE": self.host.abuse.number, USER_INBOUNDS.name: named, **closed.numbers(self.host.settings)}
        )
        number = self.process.pid or 0
        self.process.when_exited().addCallback(lambda _: self.sharing.gone(number))

    async def ready(
        self,
        listens: Callable[[], bool],
        seconds: float,
        is_refusal: Callable[[CoreProcess], bool],
        cause: Callable[[Sequence[str]], str],
    ) -> None:
        """Wait until the core answers; `listens` is a cheap check before each call. Raises as `starting.ready`.

        Then the process has ended, and the API is closed.
        """

        async def answers() -> bool:
            return listens() and await self.api.ready(starting.CALL)

        try:
            await starting.ready(self.host.reactor, self.process, answers, seconds, is_refusal, cause)
        except BaseException:
            await self.api.close()
            raise

    async def require_answer(self) -> None:
        """Raises `Gone` if a recovered core does not answer."""
        if not await self.api.ready(ANSWER):
            raise silent(self.process)


class CoreGeneration(Generic[A]):
    """The parts of `Generation`, `Shares`, `Paces`, `CountsSome` and `Leaves` that are the same for all cores.

    `own_paths` are unix sockets that are not inbounds.
    """

    log = Logger()
    accounts: dict[str, Accounts]

    def __init__(
        self,
        started: Started[A],
        listening: Listening,
        connections: CoreConnections,
        paced: Paced,
        own_paths: Collection[str] = (),
    ) -> None:
        self._host = started.host
        self._process = started.process
        self._api = started.api
        self._sharing = started.sharing
        self._files = started.files
        self._aliases = started.aliases
        self._listening = listening
        self._connections = connections
        self._paced = paced
        self.pace, self.pace_new, self.narrow = paced.pace, paced.pace_new, paced.narrow
        self.when_exited = started.process.when_exited
        self._own_paths = frozenset(own_paths)
        self._number = started.process.pid or 0
        self._listener_watch = ListenerWatch()
        # Whether it is closed to new connections, and the listeners that are.
        self._closed = False
        self._shut: frozenset[int] = frozenset()

    # Its process

    @property
    def alive(self) -> bool:
        return self._process.exit is None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def outdated(self) -> bool:
        return bool(self._files.warnings)

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

    async def leave(self) -> None:
        self._process.leave()

    def stay(self) -> None:
        self._process.stay()

    # Its users' connections

    @property
    def arrived(self) -> Arrived:
        return self._connections.arrived

    @arrived.setter
    def arrived(self, arrived: Arrived) -> None:
        self._connections.announce_to(arrived)

    async def look(self, keys: Collection[str]) -> list[Live]:
        try:
            return await self._connections.look(keys)
        except OSError as error:
            raise CoreFailed(f"the kernel does not list connections: {error}") from error

    async def end(self, connections: Iterable[Live]) -> int:
        return await self._connections.reset([live.handle for live in connections])

    @property
    def unpaced(self) -> Mapping[str, str]:
        return self._paced.unpaced

    # Its counters and figures

    async def backend_stats(self) -> BackendStatsResponse:
        with asking(FIGURES):
            return await self._api.figures()

    async def counters(self, seen: Seen | None = None) -> Reading:
        raise NotImplementedError

    async def some_counters(self, wanted: Iterable[Asked]) -> Reading:
        """Read these counters; all, if the core may count one by a name that the node no longer knows."""
        scopes, names = set[Scope](), set[tuple[Scope, str]]()
        for scope, name in wanted:
            if name is None:
                scopes.add(scope)
                continue
            counted = self._counted_as(scope, name)
            if not counted:
                return await self.counters()
            names |= {(scope, spelling) for spelling in counted}
        if len(names) > FEW:
            return await self.counters()
        with asking(COUNTERS):
            return await self._some_counters(scopes, names)

    def _counted_as(self, scope: Scope, name: str) -> Collection[str]:
        """The names by which the core may count this user, inbound or outbound; none if they are not known."""
        raise NotImplementedError

    async def _some_counters(self, scopes: Collection[Scope], names: Collection[tuple[Scope, str]]) -> Reading:
        """Read the counters of these scopes, and of these names of the core. Raises `ApiFailed`."""
        raise NotImplementedError

    # Its listeners

    async def obstacles(self, plan: Plan) -> Sequence[str]:
        """See `Shares.obstacles`. `plan.made` is the attribute of our own drivers' plans."""
        ours, made = self._listening, getattr(plan, "made", None)
        if not isinstance(made, type(ours)):
            return ["the next core is of another type"]
        found = [*ours.exclusive, *moved(ours, made)]
        if max(sum(map(len, each.listens.values())) for each in (ours, made)) > MOST:
            return [*found, f"there are more than {MOST:,} listeners"]
        try:
            return [*found, *self._seen(await self._sharing.survey(self._number, ours.ports))]
        except NotShared as error:
            return [*found, str(error)]

    def _seen(self, seen: Survey) -> list[str]:
        led = set(self.open_ports)
        held = sorted(address for address in seen.udp if address.port not in led)
        udp = [f"UDP at {address} cannot be steered to another core" for address in held]
        paths = [f"only one process can listen at {path}" for path in sorted(seen.paths - self._own_paths)]
        return [*seen.obstacles, *udp, *paths]

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
            try:
                await in_pool(self._host.reactor, hang_up, self._number, self._listening.ports)
            except Unreachable as error:
                raise CoreFailed(str(error)) from error

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

    async def _set_door(self) -> None:
        """Close or open all listeners, with new ones; of a core that has ended nothing must be registered."""
        if not self.alive:
            return
        ports = self._listening.ports
        try:
            # With those of other processes.
            there = frozenset(chain.from_iterable(listeners(ports).values())) if self._closed else frozenset()
            if not self._closed or self.shared or not there <= self._shut:
                await self._sharing.close_door(self._number, ports, self._closed)
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
        """Whether its listeners are shared, and so must not be closed or opened by the core, but inside `renewing`."""
        return self._sharing.has(self._number)

    @property
    def drains(self) -> bool:
        """Whether it gets no new connections any more."""
        return self._sharing.drains(self._number)

    @property
    def renewable(self) -> bool:
        """Whether the core may close listeners and open them again now, inside `renewing`."""
        return not (self.shared and self._sharing.awaits)

    def renewing(self, ports: Ports) -> AbstractAsyncContextManager[None]:
        """Let the core close its listeners at these ports and open them again inside the block. Raises `NotShared`."""
        return self._sharing.renewing(self._number, ports)

    async def quieten(self) -> bool:
        """Steer new connections away before it ends. Returns False if its listeners are not shared."""
        if not self.shared:
            return False
        await self._sharing.quieten(self._number)
        return True


def moved(old: Listening, new: Listening) -> list[str]:
    """Return why listeners on the same port differ: the kernel would give connections to either core.

    And the ports that change between datagrams and sessions, which are steered in different ways.
    """
    before, after = old.listens, new.listens
    ports = sorted(port for port in before.keys() & after.keys() if before[port] != after[port])
    turned = sorted({*old.datagrams} & {*new.sessions} | {*old.sessions} & {*new.datagrams})
    return [f"the inbound on port {port} changes its address or its socket options" for port in ports] + [
        f"the inbound on port {port} changes between UDP with sessions and UDP without" for port in turned
    ]


def single_path(tag: str) -> str:
    return f"the inbound {tag!r} does not use Multipath TCP: its port could not be shared with a next core, or closed"


def only_interface(tag: str) -> str:
    return f"only one process can have the network interface of {tag!r}"


def only_wireguard(tag: str) -> str:
    """With two processes, peers answer the one that sent last, and connections of the other hang."""
    return f"only one process can use the WireGuard key of {tag!r}: its peers answer the process that sent last"
