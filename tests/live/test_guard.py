"""The guard for an Xray that a request of a user could crash: what it catches does not reach the core's DNS."""

from __future__ import annotations

import socket
import struct
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress

import pytest

from drivers.xray.overrides import SAFE_SINCE
from scripts.staging.backend import backend
from scripts.staging.controller import Controller, LogReader
from scripts.staging.core import Json, xray_number
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, gets_in, member, over

ANNA = TestUser.new("anna@test")
# A name that the guard catches, and that any core refuses with an error; and one that the guard lets pass.
CAUGHT, FREE = ("a" * 62 + ".") * 4 + "bc", "free.test"
_TCP, _MUX = 1, 3
_NEW, _KEEP = 1, 2


def _name(text: str) -> bytes:
    return b"\x02" + bytes([len(text)]) + text.encode()


def _header(command: int, target: bytes = b"") -> bytes:
    return b"\0" + uuid.UUID(ANNA.uuid).bytes + b"\0" + bytes([command]) + target


def _frame(status: int, target: bytes, data: bytes) -> bytes:
    """One datagram of a Mux.Cool session."""
    about = struct.pack("!HBBB", 1, status, 1, 2) + target
    return struct.pack("!H", len(about)) + about + struct.pack("!H", len(data)) + data


def connect(link: socket.socket, name: str, echo: EchoServer) -> None:
    """Connect to the name; returns once the core has handled it."""
    link.sendall(_header(_TCP, struct.pack("!H", 80) + _name(name)) + b"GET / HTTP/1.0\r\n\r\n")
    with suppress(TimeoutError):
        while link.recv(1000):
            pass


def datagrams(link: socket.socket, name: str, echo: EchoServer) -> None:
    """A datagram to the name, between two to the echo server in one session."""
    here = struct.pack("!HB4B", echo.port, 1, 127, 0, 0, 1)
    link.sendall(_header(_MUX) + _frame(_NEW, here, b"first-datagram"))
    _receive(link, b"first-datagram")
    link.sendall(_frame(_KEEP, struct.pack("!H", 80) + _name(name), b"x") + _frame(_KEEP, here, b"last-datagram"))
    _receive(link, b"last-datagram")


def _receive(link: socket.socket, wanted: bytes) -> None:
    data = b""
    while wanted not in data:
        more = link.recv(4096)
        if not more:
            raise ConnectionResetError("the core ended the connection")
        data += more


def parts(strategy: str, routing: str) -> Json:
    """Configurations whose DNS is queried by the freedom outbound, by the rules or by both."""
    freedom = {"domainStrategy": strategy, "finalRules": [{"action": "allow"}]}
    return {
        "log": {"loglevel": "info"},
        "dns": {"servers": [{"address": "127.0.0.1", "port": free_port()}]},
        "routing": {"domainStrategy": routing, "rules": [{"ip": ["10.0.0.0/8"], "outboundTag": "block"}]},
        "outbounds": [
            {"tag": "direct", "protocol": "freedom", "settings": freedom},
            {"tag": "block", "protocol": "blackhole"},
        ],
    }


@pytest.mark.parametrize(
    ("request_it", "strategy", "routing"),
    [
        (connect, "AsIs", "IPIfNonMatch"),
        (connect, "AsIs", "IPOnDemand"),
        (connect, "UseIP", "AsIs"),
        (datagrams, "UseIP", "AsIs"),
    ],
    ids=["IPIfNonMatch", "IPOnDemand", "UseIP", "datagrams"],
)
@over("grpc")
def test_what_the_guard_catches(
    request_it: Callable[[socket.socket, str, EchoServer], None],
    strategy: str,
    routing: str,
    all_kinds: Mapping[str, Kind],
    node: NodeProcess,
    controller: Controller,
    echo: EchoServer,
) -> None:
    """The core's DNS asks for other names only, its users are served, and a warning recommends a safer core."""
    place = Place(all_kinds["vless-raw"], "home")
    controller.stop()
    with controller.logs() as log:
        info = controller.start(backend([place.inbound], [member(ANNA, place)], **parts(strategy, routing)))
        pid = node.newest_core()
        for request, name in ((request_it, CAUGHT), (connect, FREE)):
            with socket.create_connection(("127.0.0.1", place.port), 2) as link:
                request(link, name, echo)
        until(lambda: asks(log, FREE), 10, "the DNS asks for the other name")
        guarded = xray_number() < SAFE_SINCE
        assert not (guarded and asks(log, CAUGHT))
    assert gets_in(place, ANNA, echo)
    assert node.core_pids() == [pid]
    assert any("safer core" in warning for warning in info.warnings) == guarded


def asks(log: LogReader, name: str) -> bool:
    """Whether the core's DNS has asked its server for the name."""
    return any(f"querying DNS for: {name}" in line for line in log.lines)
