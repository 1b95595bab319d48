"""The ports of the node: opens them, and ends what came in by them.

Pages that are open without a key get at most `ok` or `not ok` to anyone on this machine: a proxied user may come from
here, by way of the core.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from twisted.internet import tcp
from twisted.internet.defer import gatherResults, maybeDeferred

from node.api.auth import Authenticator
from node.api.calls import Calls
from node.api.pages import Button, Page
from node.base.aio import Aio
from node.base.part import Part
from node.base.reactor import Reactor
from node.base.sockets import Passed, Prompt
from node.base.waiting import until
from node.contract.keeper import Keeper
from node.door.connections import LOOK, Connections, Limits
from node.door.entrance import Entrance
from node.door.options import DoorOptions
from node.door.rest import make_app
from node.door.rpc import RpcServer
from node.door.site import Site
from node.door.strangers import Strangers
from node.door.tls import GRPC_FIRST, REST_FIRST, Certificates, ContextFactory
from node.door.upstream import Upstream
from node.machine.peer_user import user_of

LOOPBACK = "127.0.0.1"
# Seconds in which gRPC's server must listen.
BIND_SECONDS = 10.0
# Limits of the metrics port.
FEW = Limits(max_connections=32, strangers=32, max_body=0)
# Seconds that calls under way have to finish before another version takes over.
FINISH = 1.0
# Connections accepted in one reactor turn; with more, a crowd of new ones keeps earlier handshakes from ending.
ADMITTED = 16
# Connections that may wait to be accepted; the kernel drops the SYN of further ones, which retry after a second.
BACKLOG = 1024


class Counted(Prompt):
    """A connection whose bytes its port counts, unless the client is on this machine."""

    server: Port
    _host: Any = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._passed = Passed() if is_loopback(self.getPeer().host) else self.server.passed

    def getHost(self) -> Any:
        """Its own address. Twisted asks the kernel each time, which its web server does for each request."""
        self._host = self._host or super().getHost()
        return self._host

    def _dataReceived(self, data: bytes | None) -> Any:
        self._passed.received += len(data or b"")
        return super()._dataReceived(data)

    def writeSomeData(self, data: bytes) -> Any:
        written = super().writeSomeData(data)
        if isinstance(written, int):
            self._passed.sent += written
        return written


class Port(tcp.Port):
    """A listening port. Twisted's own accepts more at a time, the more connections come."""

    transport = Counted  # type: ignore[assignment]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.passed = Passed()

    def createInternetSocket(self) -> socket.socket:
        link: socket.socket = super().createInternetSocket()
        # Accepted connections inherit TCP_NODELAY. Without it a small write waits until the client has acknowledged the
        # one before it, which clients delay by some 40 ms.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link

    @property
    def numberAccepts(self) -> int:
        return ADMITTED

    @numberAccepts.setter
    def numberAccepts(self, _: int) -> None:
        """Ignored: the number is fixed."""


@dataclass(frozen=True)
class Place:
    """`directory` has the socket between the listeners and gRPC's server. `metrics`: the port of the metrics.

    `keeper` holds the ports for the next node process. `passed`: the bytes of clients on other machines.
    """

    directory: Path
    metrics: int | None = None
    keeper: Keeper = field(default_factory=Keeper)
    passed: Passed = field(default_factory=Passed)


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
        # Not a page of the site: strangers ask for `/`, too, which must not show that there is more.
        self._root: Sequence[Page] = ()
        self._buttons: Sequence[Button] = ()
        self._upstream = Upstream(reactor, place.directory)
        self._few = Connections(reactor, FEW, authenticator.lets_in)
        self.connections = Connections(reactor, Limits(), authenticator.lets_in)
        self.rpc = RpcServer(aio, calls, authenticator, self._upstream)
        self.listening: dict[str, Port] = {}
        self._ending = False

    def serve(self, pages: Sequence[Page], root: Page, buttons: Sequence[Button]) -> None:
        """Serve pages on all ports, `root` and buttons on those of the interface. Call it before `start`."""
        self._pages, self._root, self._buttons = pages, (root,), buttons

    def start(self) -> None:
        """Start the gRPC server and open the ports. Raises `OSError` and `CannotListenError`."""
        self._upstream.sweep()
        self._aio.block(self.rpc.start(), BIND_SECONDS)
        everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - the documented default
        entrance = Entrance(self.connections, self._site(), self._upstream)
        options = self._options
        strangers = None if options.strangers == "answer" else Strangers(options.name, options.decoy)
        # Each port serves both protocols; its own is the first for ALPN.
        for name, port, order in (
            ("grpc", self._options.grpc_port, GRPC_FIRST),
            ("rest", self._options.rest_port, REST_FIRST),
        ):
            factory = entrance.secured(ContextFactory(self._certificates, order), strangers)
            self._open(name, port, self._options.host or everywhere, factory)
        self._open("metrics", self._place.metrics, LOOPBACK, self._metrics_site())

    def _open(self, name: str, port: int | None, interface: str, factory: Any) -> None:
        if port is not None:
            held = self._held(name, interface, port)
            self.listening[name] = opened = listen(self._reactor, factory, port, interface, held)
            opened.passed = self._place.passed
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

    def _site(self) -> Site:
        app = make_app(self._calls, [*self._pages, *self._root], self._buttons)
        debug, touch = self._options.debug, self._calls.touch
        return Site(app, self._authenticator, self.connections, debug, touch, self._pages, is_open_here)

    def _metrics_site(self) -> Site:
        app, debug = make_app(None, self._pages), self._options.debug
        return Site(app, self._authenticator, self._few, debug, pages=self._pages, is_open=is_open_to_others)

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
        await until(self._reactor, lambda: self._calls.settled, self._reactor.seconds() + FINISH, LOOK)

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


def listen(reactor: Any, factory: Any, port: int, interface: str, held: int | None = None) -> Port:
    """Listen on a port, or by `held`, a socket that listens there already and is closed here.

    Raises `CannotListenError`.
    """
    if held is None:
        listening = Port(port, factory, BACKLOG, interface, reactor)
    else:
        with socket.socket(fileno=held) as there:
            listening = Port._fromListeningDescriptor(reactor, held, there.family, factory)
    listening.startListening()
    return listening


def is_open_here(page: Page | None, transport: Any) -> bool:
    """Whether the client may read the page without a key: an open one, from loopback, perhaps by a proxied user."""
    return page is not None and page.is_open and is_loopback(transport.getPeer().host)


def is_open_to_others(_: Page | None, transport: Any) -> bool:
    """Whether the client runs as another user of this machine: then it is neither a core nor a proxied user."""
    peer, host = transport.getPeer(), transport.getHost()
    try:
        user = user_of((peer.host, peer.port), (host.host, host.port))
    except OSError:  # the kernel does not answer: the client needs a key
        return False
    return user is not None and user != os.getuid()


def is_loopback(host: str) -> bool:
    """Whether this is a loopback address, also an IPv4-mapped one."""
    address = ip_address(host.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
