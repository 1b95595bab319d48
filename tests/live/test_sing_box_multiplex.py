"""sing-box clients that keep a session with many streams: a removed user's streams are cut, others' are not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from drivers.sockets.sock_diag import Endpoint, connected
from protos.service_pb2 import User
from scripts.staging import certs, socks, transfer
from scripts.staging.core import Json
from scripts.staging.echo import EchoServer
from scripts.staging.sing_box import BUILDS, SERVER_NAME, VLESS, Door, Way, backend, shadowsocks_2022, ways
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.harness.box import Box, box_of, client, gets_in

# Seconds for which a removed user retries, and the timeout of one try.
TRIES, PATIENCE = 0.5, 0.3
GRPC: Json = {"transport": {"type": "grpc", "service_name": "streams"}}
SMUX: Json = {"multiplex": {"enabled": True, "protocol": "smux", "max_connections": 1, "min_streams": 1000}}


def _anytls(certificate: certs.Certificate) -> Way:
    return next(way for way in ways(certificate, 1) if way.name == "anytls")


def _multiplexed(way: Way) -> Way:
    return replace(way, server={**way.server, "multiplex": {"enabled": True}}, client={**way.client, **SMUX})


WAYS: dict[str, Callable[[certs.Certificate], Way]] = {
    "grpc": lambda _: replace(VLESS, server=GRPC, client=GRPC),
    "anytls": _anytls,
    "smux": lambda _: _multiplexed(VLESS),
    "live": lambda _: _multiplexed(shadowsocks_2022()),
}
OLD, NEW, OTHER = TestUser.new("anna"), TestUser.new("anna"), TestUser.new("other")


@pytest.fixture(scope="module", params=list(BUILDS))
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box_of(request.param, tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> certs.Certificate:
    return certs.make(tmp_path_factory.mktemp("inbounds"), [SERVER_NAME])


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.each_once("name", "busy")
def test_a_changed_credential(
    box: Box, certificate: certs.Certificate, echo: EchoServer, name: str, busy: bool
) -> None:
    """After the reply no stream of the old credential works, in no existing session; others stay."""
    door = Door(WAYS[name](certificate))
    box.controller.start(backend(door.inbounds, [door.user(OLD), door.user(OTHER)]))
    with (
        client((door, OLD), (door, OTHER), (door, NEW)) as (old, other, new),
        transfer.connect(old, echo) as link,
        transfer.connect(other, echo) as stays,
    ):
        if not busy:
            link.close()
        box.controller.sync_user(door.user(NEW))
        assert not _echoes(old, echo)
        transfer.echo(stays, b"I stay")
        assert gets_in(other, echo) and gets_in(new, echo)
        if busy:
            with pytest.raises(OSError):
                transfer.echo(link, b"am I in?")


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.each_once("name", "busy")
def test_a_removed_user(box: Box, certificate: certs.Certificate, echo: EchoServer, name: str, busy: bool) -> None:
    """Their sessions are cut, and no others."""
    door = Door(WAYS[name](certificate))
    ports = [range(door.port, door.port + 1)]
    box.controller.start(backend(door.inbounds, [door.user(OLD), door.user(OTHER)]))
    with client((door, OTHER), (door, OLD)) as (other, old), transfer.connect(other, echo) as stays:
        others = connected(ports)
        with transfer.connect(old, echo) as link:
            sessions: set[Endpoint] = connected(ports) - others
            assert sessions
            if not busy:
                link.close()
            box.controller.sync_user(User(email=OLD.email))
            until(lambda: not connected(ports) & sessions, 3, "the sessions end")
            assert connected(ports) >= others
            transfer.echo(stays, b"I stay")


def _echoes(port: int, echo: EchoServer) -> int:
    """The number of echoes through this inbound, with tries in quick succession."""
    came, end = 0, time.monotonic() + TRIES
    while time.monotonic() < end:
        with suppress(OSError), socks.connect(port, echo.host, echo.port, PATIENCE) as link:
            transfer.small_echo(link, b"hello")
            came += 1
    return came
