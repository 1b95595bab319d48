"""Abuse on real cores: BitTorrent between programs of the test, scans and mail are reported, blocked, slowed, cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from protos import service_pb2 as pb
from scripts.staging import transfer
from scripts.staging.controller import Controller
from scripts.staging.core import XrayClient
from scripts.staging.echo import EchoServer
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.torrent import Peer, shakes_hands
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import SOURCE, Place, control, member, run
from tests.live.test_events import past

ANNA, BERT = TestUser.new("Anna@test"), TestUser.new("bert@test")
MIB = 1024**2
# Seconds until what a user did must be reported, on a busy machine.
SOON = 10.0
OURS = "~txnode-"


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


@contextmanager
def watched(
    directory: Path, home: Place, people: Sequence[TestUser], **settings: str
) -> Iterator[tuple[NodeProcess, Controller]]:
    """A node with these settings that runs one inbound with these users."""
    with NodeProcess(directory, ABUSE_SNIFFING="on", **settings) as node, control(node, "grpc") as controller:
        run(controller, [home], [member(person, home) for person in people])
        yield node, controller


@contextmanager
def ways(home: Place, people: Sequence[TestUser]) -> Iterator[Mapping[TestUser, int]]:
    """The SOCKS port of each of them, of one client core."""
    ports = {person: free_port() for person in people}
    with XrayClient({port: home.outbound(person, SOURCE) for person, port in ports.items()}):
        yield ports


def told(node: NodeProcess, kind: str) -> dict[str, dict[str, str]]:
    """The fields of the first event of this kind by user."""
    found: dict[str, dict[str, str]] = {}
    for event in past(node):
        if event.kind == kind:
            found.setdefault(event.fields["user"], dict(event.fields))
    return found


def people(number: int) -> list[TestUser]:
    return [TestUser.new(f"user{each}@test") for each in range(number)]


@pytest.mark.both
@pytest.mark.slow
def test_torrents_are_told(tmp_path: Path, home: Place, peer: Peer, echo: EchoServer) -> None:
    """Ten handshakes of ten users are reported and answered; nothing else is, and no tag of the node is seen."""
    users = people(10)
    with watched(tmp_path, home, [*users, ANNA], ABUSE="torrent: tell") as (node, controller):
        before = controller.info().warnings
        with controller.logs() as logs, ways(home, [*users, ANNA]) as ports:
            with transfer.connect(ports[ANNA], echo) as link:
                transfer.echo(link, bytes(MIB))
            assert all(shakes_hands(ports[user], peer, more=MIB) for user in users)
            until(lambda: len(told(node, "abuse.torrent")) == 10, SOON, "all are reported")
            found = told(node, "abuse.torrent")
            lines = logs.lines
        assert set(found) == {user.email for user in users}
        for fields in found.values():
            assert (fields["address"], fields["action"], fields["times"]) == (SOURCE, "tell", "1")
            assert fields["targets"] == f"tcp {peer.host}:{peer.port}"
            assert fields["first"] <= fields["last"]
        assert any("ABUSE" in warning for warning in before)
        assert lines and not any(OURS in line for line in lines)
        if home.ground.cuts:
            assert not [rule for rule in controller.routing_rules() if OURS in str(rule)]
        out = controller.stats(pb.Outbounds)
        until(lambda: _carried(controller, home) >= 20 * MIB, SOON, "the default outbound has carried the bytes")
        assert not any(OURS in stat.name for stat in out.stats)
        counts = controller.info().limits.abuse
        assert (counts["torrent"].cases, counts["torrent"].requests) == (10, 10)


def _carried(controller: Controller, home: Place) -> int:
    stats = controller.stats(pb.Outbounds).stats
    return sum(stat.value for stat in stats if stat.name == home.ground.outbounds[0])
