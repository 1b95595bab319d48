"""Requests for a name of 255 bytes crash an Xray without its own defence; under the node it survives."""

from __future__ import annotations

import socket
import struct
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress

import pytest

from drivers.xray.overrides import LONG_NAMES_FIXED
from scripts.staging.backend import backend
from scripts.staging.controller import Controller
from scripts.staging.core import Json, Xray, server_config, xray_number
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind, with_users
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, gets_in, member, over

ANNA = TestUser.new("anna@test")
LONG = ("a" * 62 + ".") * 4 + "bcd"
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


def connect(link: socket.socket, echo: EchoServer) -> None:
    """Connect to the name; returns once the core has handled it."""
    link.sendall(_header(_TCP, struct.pack("!H", 80) + _name(LONG)) + b"GET / HTTP/1.0\r\n\r\n")
    with suppress(TimeoutError):
        while link.recv(1000):
            pass


def datagrams(link: socket.socket, echo: EchoServer) -> None:
    """A datagram to the name, between two to the echo server in one session: routing sees only the first."""
    here = struct.pack("!HB4B", echo.port, 1, 127, 0, 0, 1)
    link.sendall(_header(_MUX) + _frame(_NEW, here, b"first-datagram"))
    _receive(link, b"first-datagram")
    link.sendall(_frame(_KEEP, struct.pack("!H", 80) + _name(LONG), b"x") + _frame(_KEEP, here, b"last-datagram"))
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
        "dns": {"servers": [{"address": "127.0.0.1", "port": free_port()}]},
        "routing": {"domainStrategy": routing, "rules": [{"ip": ["10.0.0.0/8"], "outboundTag": "block"}]},
        "outbounds": [
            {"tag": "direct", "protocol": "freedom", "settings": freedom},
            {"tag": "block", "protocol": "blackhole"},
        ],
    }


WAYS = pytest.mark.parametrize(
    ("request_it", "strategy", "routing"),
    [
        (connect, "AsIs", "IPIfNonMatch"),
        (connect, "AsIs", "IPOnDemand"),
        (connect, "UseIP", "AsIs"),
        (datagrams, "UseIP", "AsIs"),
    ],
    ids=["IPIfNonMatch", "IPOnDemand", "UseIP", "datagrams"],
)
Request = Callable[[socket.socket, EchoServer], None]


@WAYS
def test_a_core_without_the_node(
    request_it: Request, strategy: str, routing: str, all_kinds: Mapping[str, Kind], echo: EchoServer
) -> None:
    """The bare core crashes in versions before the known fix, and not from then on."""
    kind, port = all_kinds["vless-raw"], free_port()
    inbound = with_users(kind.inbound(port, "home"), [kind.account(ANNA)])
    with Xray({**server_config([inbound]), **parts(strategy, routing)}) as core:
        with socket.create_connection(("127.0.0.1", port), 2) as link, suppress(OSError):
            request_it(link, echo)
        if xray_number() < LONG_NAMES_FIXED:
            until(lambda: not core.running and "panic" in core.output, 10, "it dies")
        assert core.running == (xray_number() >= LONG_NAMES_FIXED)


@WAYS
@over("grpc")
def test_a_core_under_the_node(
    request_it: Request,
    strategy: str,
    routing: str,
    all_kinds: Mapping[str, Kind],
    node: NodeProcess,
    controller: Controller,
    echo: EchoServer,
) -> None:
    """The core survives, its default outbound is the configuration's, and a warning recommends a safer core."""
    place = Place(all_kinds["vless-raw"], "home")
    controller.stop()
    info = controller.start(backend([place.inbound], [member(ANNA, place)], **parts(strategy, routing)))
    pid = node.newest_core()
    with socket.create_connection(("127.0.0.1", place.port), 2) as link:
        request_it(link, echo)
    assert gets_in(place, ANNA, echo)
    assert node.core_pids() == [pid]
    assert any("safer core" in warning for warning in info.warnings) == (xray_number() < LONG_NAMES_FIXED)
