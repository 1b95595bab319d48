"""Users of a WebSocket inbound behind a reverse proxy, who claim another address than theirs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from protos import service_pb2
from protos.service_pb2 import Limits
from scripts.staging import transfer
from scripts.staging.controller import Controller
from scripts.staging.core import Json, XrayClient
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.ports import free_port
from scripts.staging.transports import Transport
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, member

HOME, OFFICE, MOBILE, FORGED = "127.0.0.2", "127.0.0.3", "127.0.0.4", "203.0.113.7"
# Seconds until the core must refuse an address, or take it again, on a busy machine; and after which it counts as out.
SOON, STAYS = 15.0, 1.0
WEBSOCKET = {"network": "ws", "wsSettings": {"path": "/ws"}}


class HasPort(Protocol):
    """A reverse proxy, by the port of 127.0.0.1 on which it listens."""

    port: int


@dataclass(frozen=True)
class Fronted:
    """An inbound behind a front, and the `sockopt` with which it believes the front; sing-box has none."""

    place: Place
    front: HasPort
    sockopt: Json = field(default_factory=dict)

    @property
    def inbound(self) -> Json:
        stream = {"streamSettings": {**WEBSOCKET, "sockopt": self.sockopt}} if self.sockopt else {}
        return {**self.place.inbound, **stream}

    @contextmanager
    def way(
        self, person: TestUser, source: str, headers: Mapping[str, str] | None = None, port: int = 0, **extra: Json
    ) -> Iterator[int]:
        """The SOCKS port of a client that connects to the front from this address, and claims another one.

        `headers` are added to its request. With `port` it connects to that instead of the front.
        """
        forged = {"X-Forwarded-For": FORGED, **(headers or {})}
        stream = {**WEBSOCKET, "wsSettings": {"path": "/ws", "headers": forged}}
        outbound = self.place.kind.outbound(port or self.front.port, person, source=source)
        way = free_port()
        with XrayClient({way: {**outbound, "streamSettings": stream, **extra}}):
            yield way


def websocket(all_kinds: Mapping[str, Kind]) -> Kind:
    return replace(all_kinds["vless-raw"], transport=Transport("ws", WEBSOCKET, WEBSOCKET))


def somebody() -> TestUser:
    """A user of this test only: the node remembers for seconds who was connected, and from where."""
    return TestUser.new(f"Somebody-{uuid.uuid4()}@test")


def limited(person: TestUser, fronted: Fronted, addresses: int = 1) -> service_pb2.User:
    user = member(person, fronted.place)
    user.limits.CopyFrom(Limits(addresses=addresses))
    return user


def is_in(port: int, echo: EchoServer) -> bool:
    """Whether a new connection carries bytes."""
    try:
        with transfer.connect(port, echo, 3) as link:
            transfer.echo(link, b"here")
    except OSError:
        return False
    return True


def is_soon(port: int, echo: EchoServer, inside: bool) -> None:
    until(lambda: is_in(port, echo) is inside, SOON, "it gets in" if inside else "it stays out")


def stays_out(port: int, echo: EchoServer) -> bool:
    end = time.monotonic() + STAYS
    while time.monotonic() < end:
        if is_in(port, echo):
            return False
    return True


def stays_in(port: int, echo: EchoServer) -> bool:
    """Whether a new connection carries bytes, and still does so after the time in which some cores end it."""
    end = time.monotonic() + 3 * STAYS
    try:
        with transfer.connect(port, echo, 3) as link:
            while time.monotonic() < end:
                transfer.echo(link, b"still here")
    except OSError:
        return False
    return True


def where(controller: Controller, person: TestUser) -> list[str]:
    (row,) = controller.limits(person.email).users
    return list(row.addresses)


def listed(controller: Controller) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The addresses of the users online, and those of them that a reverse proxy reported."""
    page = controller.call("ListOnline", service_pb2.ListOnlineResponse, service_pb2.ListOnlineRequest())
    marked = {row.name: list(row.forwarded) for row in page.users if row.forwarded}
    return {row.name: sorted(row.ips) for row in page.users}, marked
