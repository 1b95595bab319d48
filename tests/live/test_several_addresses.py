"""Users come in and leave by one of several addresses of the machine, with the examples of docs/configuration.md."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from protos.service_pb2 import Backend
from scripts.staging import socks
from scripts.staging.acceptor import Acceptor
from scripts.staging.backend import user
from scripts.staging.controller import Controller
from scripts.staging.core import XrayClient
from scripts.staging.inbounds import Kind
from scripts.staging.ports import free_port, own_address
from scripts.staging.users import TestUser
from tests.harness.grounds import GROUNDS, Ground

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
ANNA = TestUser.new("anna@test")
TEN, ELEVEN = "203.0.113.10", "203.0.113.11"


def example(ground: Ground) -> str:
    """The example for this core; they are in the order of the cores."""
    section = PAGE.read_text().partition("## Several addresses")[2]
    return str(re.findall(r"^```json\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[GROUNDS.index(ground)])


@contextmanager
def echoing(socks_port: int, target: int) -> Iterator[tuple[socket.socket, str]]:
    """A connection, and the address that the target sees it come from."""
    with socks.connect(socks_port, "127.0.0.1", target, first=b"hello") as link:
        yield link, link.recv(100).decode()


def _tell(connection: socket.socket) -> None:
    while connection.recv(100):
        connection.sendall(connection.getpeername()[0].encode())


@pytest.mark.slow
@pytest.mark.both
def test_users_leave_by_the_address_that_they_came_in_by(
    ground: Ground, controller: Controller, all_kinds: Mapping[str, Kind]
) -> None:
    """Also after a change of the configuration, which ends no connection on either address."""
    kind = all_kinds["shadowsocks-2022-aes-128"]
    port, target = free_port(), free_port()
    addresses = {TEN: own_address(), ELEVEN: own_address()}
    config = example(ground).replace("8388", str(port)).replace("SERVER_KEY", kind.protocol.server["password"])
    for documented, own in addresses.items():
        config = config.replace(documented, own)
    # The target is on this machine, which cores after 26.3.27 refuse by default.
    config = config.replace('"freedom",', '"freedom", "settings": {"finalRules": [{"action": "allow"}]},')
    person = user(ANNA, {"in-10": kind, "in-11": kind})

    def start(**extra: object) -> None:
        whole = json.dumps({**json.loads(config), **extra})
        controller.start(Backend(type=ground.type, config=whole, users=[person]))  # type: ignore[arg-type]

    start()
    ways = {free_port(): own for own in addresses.values()}
    outbounds = {way: kind.outbound(port, ANNA, address=own) for way, own in ways.items()}
    with ExitStack() as stack:
        stack.enter_context(Acceptor("127.0.0.1", target, _tell))
        stack.enter_context(XrayClient(outbounds))
        held = {way: stack.enter_context(echoing(way, target)) for way in ways}
        assert {way: seen for way, (_, seen) in held.items()} == ways
        start(**ground.other)
        for way, own in ways.items():
            link, _ = held[way]
            link.sendall(b"still here")
            assert link.recv(100).decode() == own
            with echoing(way, target) as (_, seen):
                assert seen == own
