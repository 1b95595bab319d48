"""The ports of the node: opens them, and ends what came in by them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from twisted.internet.defer import gatherResults, maybeDeferred
from twisted.internet.task import deferLater

from node.api.auth import Authenticator
from node.api.calls import Calls
from node.api.pages import Page
from node.base.aio import Aio
from node.base.part import Part
from node.base.reactor import Reactor
from node.contract.keeper import Keeper
from node.door.connections import Connections, Limits
from node.door.entrance import Entrance
from node.door.keyless import is_open_here, is_open_to_others
from node.door.options import DoorOptions
from node.door.rest import make_app
from node.door.rpc import RpcServer
from node.door.site import Site
from node.door.sockets import Port, listen
from node.door.tls import GRPC_FIRST, REST_FIRST, Certificates
from node.door.upstream import Upstream

LOOPBACK = "127.0.0.1"
# Seconds in which gRPC's server must listen.
BIND_SECONDS = 10.0
# Limits of the metrics port.
FEW = Limits(max_connections=32, strangers=32, max_body=0)
# Seconds that calls under way have to finish before another version takes over, and between two looks at replies.
FINISH, LOOK = 1.0, 0.01


@dataclass(frozen=True)
class Place:
    """`directory` has the socket between the listeners and gRPC's server. `metrics`: the port of the metrics.

    `keeper` holds the ports for the next node process.
    """

    directory: Path
    metrics: int | None = None
    keeper: Keeper = field(default_factory=Keeper)


class Ports(Part):
    """REST and gRPC, both on either port, and metrics on loopback. `listening` are the open ports, by name."""

    title = "the ports"

    def __init__(
        self,
        reactor: Reactor,
        aio: Aio,
        calls: Calls,
        authenticator: Authenticator,
        certificates: Certificates,
        options: DoorOptions,
        place: Place,
    ) -> None:
        self._reactor = reactor
        self._aio = aio
        self._calls = calls
        self._authenticator = authenticator
        self._certificates = certificates
        self._options = options
        self._place = place
        self._pages: Sequence[Page] = ()
        self._upstream = Upstream(reactor, place.directory)
        self._few = Connections(reactor, FEW, authenticator.lets_in)
        self.connections = Connections(reactor, Limits(), authenticator.lets_in)
        self.rpc = RpcServer(aio, calls, authenticator, self._upstream)
        self.listening: dict[str, Port] = {}
        self._ending = False

    def serve(self, pages: Sequence[Page]) -> None:
        """Serve these pages, too. Call it before `start`."""
        self._pages = pages

    def start(self) -> None:
        """Start the gRPC server and open the ports. Raises `OSError` and `CannotListenError`."""
        self._upstream.sweep()
        self._aio.block(self.rpc.start(), BIND_SECONDS)
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - the documented default
        entrance = Entrance(self.connections, self._site(self._pages), self._upstream)
        # Each port serves both protocols; its own is the first for ALPN.
        for name, port, order in (
            ("grpc", self._options.grpc_port, GRPC_FIRST),
            ("rest", self._options.rest_port, REST_FIRST),
        ):
            factory = entrance.secured(self._certificates.context_factory(order))
            self._open(name, port, self._options.host or everywhere, factory)
        self._open("metrics", self._place.metrics, LOOPBACK, self._metrics_site(self._pages))

    def _open(self, name: str, port: int | None, interface: str, factory: Any) -> None:
        if port is not None:
            held = self._held(name, interface, port)
            self.listening[name] = opened = listen(self._reactor, factory, port, interface, held)
            self._place.keeper.put(f"listen/{name}", [opened.fileno()])

    def _held(self, name: str, interface: str, port: int) -> int | None:
        """The descriptor that the node before has left, if it listens there. The caller owns it."""
        for held in self._place.keeper.take(f"listen/{name}"):
            with socket.socket(fileno=os.dup(held)) as there:
                where: Any = there.getsockname()[:2]
            if where in places(interface, port):
                return held
            os.close(held)
            self._place.keeper.drop([f"listen/{name}"])
        return None

    def _site(self, pages: Sequence[Page]) -> Site:
        is_open = partial(is_open_here, frozenset(page.path for page in pages if page.is_open))
        app, heard = make_app(self._calls, pages), self._calls.touch
        return Site(app, self._authenticator, self.connections, self._options.debug, heard, pages, is_open)

    def _metrics_site(self, pages: Sequence[Page]) -> Site:
        app, debug = make_app(None, pages), self._options.debug
        return Site(app, self._authenticator, self._few, debug, pages=pages, is_open=is_open_to_others)

    def clients(self) -> Iterator[tuple[str, bool]]:
        """The connected clients: the protocol of each one's port, and whether they have shown a key."""
        for connection in self.connections:
            port = connection.transport.getHost().port
            yield "rest" if port == self._options.rest_port else "grpc", connection.known

    def admit(self, on: bool) -> None:
        for port in self.listening.values() if not self._ending else ():
            (port.startReading if on else port.stopReading)()

    async def finish(self) -> None:
        """Let calls under way be answered, and wait until replies have reached clients that are far away.

        The rows of a reply whose delivery is not known would come back, and count twice.
        """
        self._calls.end_readers()
        await self.connections.finish(FINISH, self._calls.idle)
        until = self._reactor.seconds() + FINISH
        while not self._calls.settled and self._reactor.seconds() < until:
            await deferLater(self._reactor, LOOK)

    def leave(self) -> None:
        self._calls.close()

    async def stop(self) -> None:
        """Accept no more clients, give calls under way a moment to be answered, and end the rest."""
        self._ending = True
        closing = [maybeDeferred(port.stopListening) for port in self.listening.values()]
        try:
            await gatherResults(closing, consumeErrors=True)
        finally:
            try:
                await self.connections.dismiss()
            finally:
                try:
                    await self._aio.run(self.rpc.stop())
                finally:
                    for connections in (self.connections, self._few):
                        connections.disconnect()
                    self._calls.close()


def places(interface: str, port: int) -> Sequence[tuple[Any, ...]]:
    """The addresses that an interface and port resolve to: an operator may give a host name."""
    try:
        found = socket.getaddrinfo(interface, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return [(interface, port)]
    return [address[:2] for *_, address in found]
