"""The ports of the node: opens them, and ends what came in by them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, gatherResults, maybeDeferred

from node.api.auth import Authenticator
from node.api.calls import Calls
from node.api.pages import Page
from node.base.aio import Aio
from node.base.reactor import Reactor
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
# Returns the descriptor of a socket that listens already, by the port's name, interface and number.
Held = Callable[[str, str, int], int | None]


class Ports:
    """REST and gRPC, both on either port, and metrics on loopback. `listening` are the open ports, by name."""

    def __init__(
        self,
        reactor: Reactor,
        aio: Aio,
        calls: Calls,
        authenticator: Authenticator,
        certificates: Certificates,
        directory: Path,
        options: DoorOptions,
    ) -> None:
        """`directory` has the socket between the listeners and gRPC's server."""
        self._reactor = reactor
        self._aio = aio
        self._calls = calls
        self._authenticator = authenticator
        self._certificates = certificates
        self._options = options
        self._upstream = Upstream(reactor, directory)
        self._few = Connections(reactor, FEW, authenticator.lets_in)
        self.connections = Connections(reactor, Limits(), authenticator.lets_in)
        self.rpc = RpcServer(aio, calls, authenticator, self._upstream)
        self.listening: dict[str, Port] = {}

    def listen(self, pages: Sequence[Page], metrics: int | None, held: Held) -> None:
        """Start the gRPC server and open the ports, one for metrics if given.

        Raises `OSError` and `CannotListenError`.
        """
        self._upstream.sweep()
        self._aio.block(self.rpc.start(), BIND_SECONDS)
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - the documented default
        entrance = Entrance(self.connections, self._site(pages), self._upstream)
        # Each port serves both protocols; its own is the first for ALPN.
        ports = ("grpc", self._options.grpc_port, GRPC_FIRST), ("rest", self._options.rest_port, REST_FIRST)
        for name, port, order in ports:
            factory = entrance.secured(self._certificates.context_factory(order))
            self._open(name, port, self._options.host or everywhere, factory, held)
        self._open("metrics", metrics, LOOPBACK, self._metrics_site(pages), held)

    def _open(self, name: str, port: int | None, interface: str, factory: Any, held: Held) -> None:
        if port is not None:
            self.listening[name] = listen(self._reactor, factory, port, interface, held(name, interface, port))

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

    def stop_accepting(self) -> Deferred[Any]:
        """Close the listening ports."""
        ports = self.listening.values()
        return gatherResults([maybeDeferred(port.stopListening) for port in ports], consumeErrors=True)

    async def dismiss(self) -> None:
        """Give calls under way a moment to be answered, REST's first; begin no more."""
        try:
            await self.connections.dismiss()
        finally:
            await self._aio.run(self.rpc.stop())

    def disconnect(self) -> None:
        """Abort the remaining connections."""
        for connections in (self.connections, self._few):
            connections.disconnect()
