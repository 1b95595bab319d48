"""Pause the handshakes of inbounds for a moment, to remove Shadowsocks-2022 users safely.

Xray finds the index of a Shadowsocks-2022 user in its list, waits for more of the client's bytes, and then takes the
user at that index (`proxy/shadowsocks_2022`, inbound_multi.go). If a user was removed meanwhile it bills another one,
or panics. So no handshake may be between these steps during a removal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.task import deferLater

from drivers.sockets import sock_diag
from drivers.sockets.connections import Descriptors
from drivers.sockets.listeners import Hush, unhush
from drivers.sockets.pidfd import Unreachable
from drivers.sockets.sock_diag import Endpoint, Flow
from drivers.xray.ingress import HandshakePorts
from node.base.pool import in_pool
from node.base.reactor import PooledReactor

P = ParamSpec("P")
R = TypeVar("R")

# Seconds between two pauses, for new connections; removals that come meanwhile are batched.
BETWEEN = 0.1
# Seconds for handshakes to finish; clients usually send all of one at once.
COURTESY = 0.05
# Seconds for the core to read the datagrams that have arrived.
NOTICE = 0.02
# Seconds for the core to accept waiting connections, and to close reset ones; and between two checks of that.
PATIENCE = 1.0
POLL = 0.005

# Whether an access line named the owner of a connection, given its peer and its socket's cookie.
Knows = Callable[[Endpoint, int], bool]


class Busy(Exception):
    """Handshakes may still be going on. The text says why, for an operator."""


class Handshakes:
    """Pauses handshakes of one run of the core, at the inbounds of `ports_by_tag`."""

    def __init__(
        self, reactor: PooledReactor, ports_by_tag: Mapping[str, HandshakePorts], pid: int, knows: Knows
    ) -> None:
        self._reactor = reactor
        self._ports_by_tag = ports_by_tag
        self._pid, self._knows = pid, knows
        self._descriptors = Descriptors(pid)
        self._lock = DeferredLock()
        self._rests_until = 0.0

    def can_pause(self, tag: str) -> bool:
        return tag in self._ports_by_tag

    @asynccontextmanager
    async def paused(self, tags: Iterable[str]) -> AsyncIterator[None]:
        """Have no handshakes at these inbounds inside the block; new connections wait until its end. Raises `Busy`.

        Connections whose handshake does not finish in `COURTESY` seconds are reset, and all connections of an inbound
        where one connection can carry many handshakes.
        """
        some = [self._ports_by_tag[tag] for tag in tags]
        ports = [ports for one in some for ports in one.ports]
        hush = Hush(self._pid, ports)
        await deferLater(self._reactor, max(0.0, self._rests_until - self._reactor.seconds()))
        try:
            await self._aside(hush.begin)
            if not await self._wait_for_none(lambda: self._aside(hush.waiting)):
                raise Busy("the core did not accept its waiting connections in time")
            for one in some:
                await self._end(one)
            if hush.datagrams:
                await deferLater(self._reactor, NOTICE)
            yield
        finally:
            await self._aside(hush.end)
            self._rests_until = self._reactor.seconds() + BETWEEN

    async def resume(self) -> None:
        """End a pause that an earlier node process may have left. Raises `Busy`."""
        ports = [ports for one in self._ports_by_tag.values() for ports in one.ports]
        if ports:
            await self._aside(unhush, self._pid, ports)

    async def _end(self, one: HandshakePorts) -> None:
        deadline = self._reactor.seconds() + (0 if one.crowded else COURTESY)
        while inodes := await self._handshaking(one):
            if self._reactor.seconds() >= deadline:
                break
            await deferLater(self._reactor, POLL)
        if inodes:
            await self._aside(self._descriptors.reset, inodes)
            # The core closes those in a handshake; one that it keeps open is past it.
            taken = self._descriptors.taken
            await self._wait_for_none(lambda: self._aside(lambda: sum(1 for _ in taken(inodes))))

    async def _handshaking(self, one: HandshakePorts) -> set[int]:
        """The inodes of the sockets that may be in a handshake."""
        found = await self._aside(lambda: sock_diag.flows(one.ports, sock_diag.connected(one.ports)))
        return {flow.inode for flow in found if not self._is_through(one, flow)}

    def _is_through(self, one: HandshakePorts, flow: Flow) -> bool:
        return not one.crowded and (self._knows(flow.peer, flow.cookie) or (one.plain and flow.sent > 0))

    async def _wait_for_none(self, count: Callable[[], Awaitable[int]]) -> bool:
        """Wait for a count of zero, at most `PATIENCE` seconds. Returns whether it came."""
        deadline = self._reactor.seconds() + PATIENCE
        while await count():
            if self._reactor.seconds() > deadline:
                return False
            await deferLater(self._reactor, POLL)
        return True

    async def _aside(self, work: Callable[P, R], *arguments: P.args, **words: P.kwargs) -> R:
        """Run work in the pool, one at a time, even if the caller is cancelled. Raises `Busy`."""
        result: Deferred[R] = Deferred()
        self._lock.run(in_pool, self._reactor, partial(work, *arguments, **words)).chainDeferred(result)
        try:
            return await result
        except (OSError, Unreachable) as error:
            raise Busy(f"the core's sockets cannot be inspected: {error}") from error
