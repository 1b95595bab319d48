"""Abuse on real cores: BitTorrent between programs of the test, scans and mail are reported, blocked, slowed, cut."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from protos import service_pb2 as pb
from scripts.staging import socks, transfer
from scripts.staging.controller import Controller, RpcController
from scripts.staging.core import XrayClient, server_config
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import NAMES, Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.torrent import Peer, asks_tracker, asks_utp, shakes_hands
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import SOURCE, Place, control, gets_in, member, run, settled, stays_out, talking, way
from tests.harness.grounds import SING_BOX, XRAY, Ground
from tests.harness.upgraded import RealNode
from tests.live.test_events import past
from tests.live.test_next_node import Killed

ANNA, BERT = TestUser.new("Anna@test"), TestUser.new("bert@test")
MIB = 1024**2
# Seconds until what a user did must be reported, on a busy machine.
SOON = 10.0
OURS = "~txnode-"
ROOT = Path(__file__).parents[2]
Asks = Callable[..., bool]


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
        assert "ABUSE: the node adds" in str(controller.info())
        with controller.logs() as logs, ways(home, [*users, ANNA]) as ports:
            with transfer.connect(ports[ANNA], echo) as link:
                transfer.echo(link, bytes(MIB))
            assert all(shakes_hands(ports[user], peer, blocks=16) for user in users)
            until(lambda: len(told(node, "abuse.torrent")) == 10, SOON, "all are reported")
            found = told(node, "abuse.torrent")
            lines = logs.lines
        assert set(found) == {user.email for user in users}
        for fields in found.values():
            assert (fields["address"], fields["action"], fields["times"]) == (SOURCE, "tell", "1")
            assert fields["targets"] == f"tcp {peer.host}:{peer.port}"
            assert fields["first"] <= fields["last"]
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


def _told_over_udp(directory: Path, home: Place, peer: Peer, asks: Asks, action: str) -> tuple[int, int]:
    """How many of ten users who send one such packet get an answer, and how many are reported."""
    users = people(10)
    with watched(directory, home, users, ABUSE=f"torrent: {action}") as (node, _), ways(home, users) as ports:
        answered = sum(asks(ports[user], peer) for user in users)
        with suppress(AssertionError):
            until(lambda: len(told(node, "abuse.torrent")) == 10, SOON)
        return answered, len(told(node, "abuse.torrent"))


@pytest.mark.slow
@pytest.mark.parametrize("asks", [asks_utp, asks_tracker])
def test_torrents_over_udp_are_told(tmp_path: Path, all_kinds: Mapping[str, Kind], peer: Peer, asks: Asks) -> None:
    """sing-box recognises uTP and UDP trackers; with `tell` they are answered, with `block` they are not."""
    home = Place(all_kinds["vless-raw"], "home", ground=SING_BOX)
    (tmp_path / "tell").mkdir()
    answered, reported = _told_over_udp(tmp_path / "tell", home, peer, asks, "tell")
    assert answered == 10 and reported >= 9
    (tmp_path / "block").mkdir()
    before = peer.asked
    answered, reported = _told_over_udp(tmp_path / "block", home, peer, partial(asks, timeout=0.3), "block")
    assert (answered, peer.asked - before) == (0, 0) and reported >= 9


@pytest.mark.both
@pytest.mark.slow
def test_torrents_are_blocked(tmp_path: Path, home: Place, peer: Peer, echo: EchoServer) -> None:
    """No handshake reaches the peer, that traffic alone; those of an exempt user do, and no user is barred."""
    with (
        watched(tmp_path, home, [ANNA, BERT], ABUSE="torrent: block", ABUSE_EXEMPT=BERT.email) as (node, controller),
        ways(home, [ANNA, BERT]) as ports,
        transfer.connect(ports[ANNA], echo) as link,
        talking(link),
    ):
        assert not any(shakes_hands(ports[ANNA], peer, timeout=2) for _ in range(5))
        assert peer.asked == 0
        assert all(shakes_hands(ports[BERT], peer, blocks=16) for _ in range(3))
        until(lambda: told(node, "abuse.torrent"), SOON, "she is reported")
        found = told(node, "abuse.torrent")
        assert (set(found), found[ANNA.email]["action"]) == ({ANNA.email}, "block")
        with transfer.connect(ports[ANNA], echo) as another:
            transfer.echo(another, b"still in")
        assert not controller.limits(off=True).users
        assert not any(OURS in stat.name for stat in controller.stats(pb.Outbounds).stats)


@pytest.mark.slow
def test_cut_for_a_time_and_back(tmp_path: Path, home: Place, peer: Peer, echo: EchoServer) -> None:
    """The user's connections end, they stay out for so long, and come back by themselves; no other user notices."""
    with (
        watched(tmp_path, home, [ANNA, BERT], ABUSE="torrent: cut 8s") as (node, controller),
        ways(home, [ANNA, BERT]) as ports,
        transfer.connect(ports[BERT], echo) as other,
        talking(other),
    ):
        shakes_hands(ports[ANNA], peer, timeout=2)
        until(lambda: controller.limits(ANNA.email).users[0].off_for == ["abuse"], SOON, "she is barred")
        began = time.time()
        (row,) = controller.limits(ANNA.email).users
        assert 0 < row.cut_until - began < 9
        assert controller.info().limits.off_abuse == 1
        assert stays_out(home, ANNA, echo)
        until(lambda: not controller.limits(ANNA.email).users[0].off_since, 20, "she is let in")
        assert 6 < time.time() - began < 15
        until(lambda: gets_in(home, ANNA, echo), SOON, "she is in")
        kinds = [event.kind for event in past(node) if event.fields.get("user") == ANNA.email]
        assert kinds.index("limits.cut") < kinds.index("limits.back")
        assert told(node, "abuse.torrent")[ANNA.email]["action"] == "cut"


@pytest.mark.slow
def test_slow_for_a_time(tmp_path: Path, home: Place, peer: Peer, echo: EchoServer) -> None:
    """The user gets the speed for a time; a user whose limits say TELL keeps theirs."""
    with (
        watched(tmp_path, home, [ANNA, BERT], ABUSE="torrent: slow 8M 20s") as (node, controller),
        ways(home, [ANNA, BERT]) as ports,
    ):
        controller.set_limits({BERT.email: pb.Limits(abuse_action=pb.TELL)})
        assert all(shakes_hands(ports[user], peer) for user in (ANNA, BERT))
        until(lambda: controller.limits(ANNA.email).users[0].slow_until, SOON, "she is slow")
        (row,) = controller.limits(ANNA.email).users
        assert row.limits.speed.down == row.limits.speed.up == 8_000_000
        until(lambda: len(told(node, "abuse.torrent")) == 2, SOON, "both are reported")
        assert {user: fields["action"] for user, fields in told(node, "abuse.torrent").items()} == {
            ANNA.email: "slow",
            BERT.email: "tell",
        }
        assert not controller.limits(BERT.email).users[0].slow_until
        with transfer.connect(ports[ANNA], echo) as link, transfer.connect(ports[BERT], echo) as other:
            until(lambda: _seconds(link) > 1, SOON, "her connection is slow")
            assert _seconds(other) < 1
        until(lambda: not controller.limits().users, 25, "it is over")


def _seconds(link: socket.socket) -> float:
    """How long a download of 2 MiB takes."""
    began = time.monotonic()
    transfer.download(link, 2 * MIB)
    return time.monotonic() - began


@pytest.mark.slow
def test_a_scan_and_mail(tmp_path: Path, home: Place, echo: EchoServer) -> None:
    """200 ports in 10 s are reported within 5 s of the first; mail is blocked, and reported; mail to others passes."""
    with (
        watched(tmp_path, home, [ANNA, BERT], ABUSE="scan: tell; mail: block") as (node, _),
        ways(home, [ANNA, BERT]) as ports,
        ThreadPoolExecutor(20) as pool,
    ):

        def knock(port: int, host: str = "127.0.0.1") -> None:
            with suppress(OSError):
                socks.connect(ports[ANNA], host, port, 1, first=b"x" * 30).close()

        began = time.monotonic()
        wall = time.time()
        for number in range(200):
            time.sleep(max(0.0, began + number / 20 - time.monotonic()))
            pool.submit(knock, 20_000 + 7 * number)
        until(lambda: told(node, "abuse.scan"), SOON, "the scan is reported")
        event = next(event for event in past(node) if event.kind == "abuse.scan")
        assert event.time - wall < 5
        assert event.fields["user"] == ANNA.email and "tcp 127.0.0.1:2" in event.fields["targets"]
        with suppress(OSError):
            socks.connect(ports[BERT], "127.0.0.9", 25, 2, first=b"EHLO x\r\n").close()
        until(lambda: told(node, "abuse.mail"), SOON, "mail is reported")
        (fields,) = told(node, "abuse.mail").values()
        assert (fields["user"], fields["action"], fields["targets"]) == (BERT.email, "block", "tcp 127.0.0.9:25")


@pytest.mark.slow
def test_rules_that_change_while_it_runs(tmp_path: Path, all_kinds: Mapping[str, Kind], peer: Peer) -> None:
    """Torrents go where a new rule leads them, still reported; another one that is removed leads nowhere any more."""
    home = Place(all_kinds["vless-raw"], "home", ground=XRAY)
    with (
        watched(tmp_path, home, [ANNA, BERT], ABUSE="torrent: tell") as (node, controller),
        ways(home, [ANNA, BERT]) as ports,
    ):
        assert shakes_hands(ports[ANNA], peer)
        rule = {"type": "field", "user": [ANNA.email], "outboundTag": "block", "ruleTag": "off"}
        controller.add_routing_rule(json.dumps(rule))
        assert controller.routing_rules() == [("block", "off")]
        assert not shakes_hands(ports[ANNA], peer, timeout=1)
        assert shakes_hands(ports[BERT], peer)
        route = pb.TestRouteRequest(
            inbound_tag="home", network="tcp", target_ip="127.0.0.1", protocol="bittorrent", user=ANNA.email
        )
        assert controller.test_route(route).outbound_tag == "block"
        controller.remove_routing_rule("off")
        assert not controller.routing_rules()
        assert shakes_hands(ports[ANNA], peer)
        counts = controller.info().limits.abuse["torrent"]
        until(lambda: controller.info().limits.abuse["torrent"].requests == 4, SOON, f"all are counted: {counts}")
        assert set(told(node, "abuse.torrent")) == {ANNA.email, BERT.email}


@pytest.mark.slow
def test_names_and_rules_for_addresses(tmp_path: Path, all_kinds: Mapping[str, Kind], peer: Peer) -> None:
    """A name that a rule for addresses blocks once it is resolved stays blocked; other addresses are reached."""
    home = Place(all_kinds["vless-raw"], "home", ground=XRAY)
    rules = [{"type": "field", "ip": [peer.host], "outboundTag": "block"}]
    direct, block = server_config([])["outbounds"]
    direct["settings"]["domainStrategy"] = "UseIP"
    extra = {"dns": {"hosts": {"peer.test": peer.host, "other.test": "127.0.0.7"}}, "outbounds": [direct, block]}
    with (
        NodeProcess(tmp_path, ABUSE_SNIFFING="on", ABUSE="torrent: tell") as node,
        control(node, "grpc") as controller,
        Peer("127.0.0.7") as other,
        way(home, ANNA) as port,
    ):
        extra["routing"] = {"domainStrategy": "IPIfNonMatch", "rules": rules}
        run(controller, [home], [member(ANNA, home)], **extra)
        assert shakes_hands(port, other)
        assert not shakes_hands(port, peer, timeout=1)
        peer.host, other.host = "peer.test", "other.test"
        assert shakes_hands(port, other)
        assert not shakes_hands(port, peer, timeout=2)
        assert peer.asked == 0
        until(lambda: controller.info().limits.abuse["torrent"].requests == 4, SOON, "all are reported")


@pytest.mark.slow
def test_by_inbound(tmp_path: Path, home: Place, all_kinds: Mapping[str, Kind], peer: Peer, echo: EchoServer) -> None:
    """What holds in one inbound does not in another one."""
    free = Place(all_kinds["vless-raw"], "free: for all", ground=home.ground)
    settings = {"ABUSE": "torrent: tell", "ABUSE_INBOUNDS": f"{free.tag}: torrent block"}
    with NodeProcess(tmp_path, ABUSE_SNIFFING="on", **settings) as node, control(node, "rest") as controller:
        run(controller, [home, free], [member(ANNA, home, free), member(BERT, home, free)])
        with way(home, ANNA) as here, way(free, BERT) as there:
            assert shakes_hands(here, peer)
            assert not shakes_hands(there, peer, timeout=2)
            with transfer.connect(there, echo) as link:
                transfer.echo(link, b"passes")
        until(lambda: len(told(node, "abuse.torrent")) == 2, SOON, "both are reported")
        actions = {user: fields["action"] for user, fields in told(node, "abuse.torrent").items()}
        assert actions == {ANNA.email: "tell", BERT.email: "block"}


@pytest.mark.slow
def test_the_documented_example(tmp_path: Path, home: Place, peer: Peer) -> None:
    """Pasted into `.env` it does what the page says, and curl prints the event."""
    settings, curl = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "abuse.md").read_text(), re.DOTALL)
    (tmp_path / ".env").write_text(settings)
    user = TestUser.new("anna@example.com")
    with NodeProcess(tmp_path) as node, control(node, "grpc") as controller, way(home, user) as port:
        run(controller, [home], [member(user, home)])
        shakes_hands(port, peer, timeout=2)
        until(lambda: controller.limits(off=True).users, SOON, "the user is cut")
        (tmp_path / "var").mkdir()
        (tmp_path / "var" / "certificate.pem").write_text(node.pem)
        (tmp_path / "var" / "api_key").write_text(node.key)
        command = curl.replace("62051", str(node.rest_port)).replace("curl", "curl --max-time 2")
        printed = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
        (data,) = [line for line in printed.stdout.splitlines() if line.startswith("data:")]
        event = json.loads(data.removeprefix("data:"))
        assert (event["kind"], event["fields"]["action"]) == ("abuse.torrent", "cut")


@pytest.mark.slow
def test_across_nodes(tmp_path: Path, home: Place, peer: Peer, echo: EchoServer) -> None:
    """The next node goes on with the core and its rules; settings that have changed come with the next core."""
    settings = tmp_path / ".env"
    settings.write_text('ABUSE="torrent: cut 20s"\nABUSE_SNIFFING=on\n')
    with (
        RealNode(tmp_path, ADOPT_SECONDS="60", UPGRADE_ON_START="on") as node,
        closing(RpcController(node)) as controller,
    ):
        killed = Killed(node, controller)
        run(controller, [home], [member(ANNA, home), member(BERT, home)])
        core = node.newest_core()
        with ways(home, [ANNA, BERT]) as ports, transfer.connect(ports[BERT], echo) as link, talking(link):
            shakes_hands(ports[ANNA], peer, timeout=2)
            until(lambda: controller.limits(off=True).users, SOON, "she is barred")
            killed.happens()
            assert [user.name for user in controller.limits(off=True).users] == [ANNA.email]
            assert not any("changed" in warning for warning in controller.info().warnings)
            until(lambda: not controller.limits(off=True).users, 30, "she is back")

            settings.write_text('ABUSE="torrent: block"\nABUSE_SNIFFING=on\n')
            killed.happens()
            assert core in node.core_pids()
            assert any("ABUSE has changed" in warning for warning in controller.info().warnings)
            run(controller, [home], [member(ANNA, home), member(BERT, home)])
            assert not any("ABUSE has changed" in warning for warning in controller.info().warnings)
            before = peer.asked
            assert not shakes_hands(ports[ANNA], peer, timeout=2) and peer.asked == before
            until(lambda: told(node, "abuse.torrent")[ANNA.email], SOON, "she is reported")


@pytest.mark.slow
@pytest.mark.turns("name")
@pytest.mark.parametrize("name", NAMES)
def test_over_each_protocol(
    tmp_path: Path, ground: Ground, all_kinds: Mapping[str, Kind], cover: CoverServer, peer: Peer, name: str
) -> None:
    """Handshakes are reported, and carry on, over each protocol and transport."""
    home = Place(all_kinds[name], "home", ground=ground)
    with settled([home], cover), watched(tmp_path, home, [ANNA], ABUSE="torrent: tell") as (node, _):
        with way(home, ANNA) as port:
            assert all(shakes_hands(port, peer, blocks=16) for _ in range(3))
        until(lambda: told(node, "abuse.torrent"), SOON, "she is reported")
        assert told(node, "abuse.torrent")[ANNA.email]["address"] == SOURCE


@pytest.mark.both
@pytest.mark.slow
def test_an_encrypted_torrent(tmp_path: Path, home: Place) -> None:
    """Sixty hosts, each on another high port: a torrent by behaviour, and no scan."""
    rng = random.Random(1)
    peers = [(f"127.{rng.randrange(1, 200)}.{number}.9", rng.randrange(1024, 65536)) for number in range(60)]
    with watched(tmp_path, home, [ANNA], ABUSE="torrent: block; scan: tell") as (node, _), way(home, ANNA) as port:

        def asks(peer: tuple[str, int]) -> None:
            with suppress(OSError):
                socks.connect(port, *peer, 1, first=rng.randbytes(96)).close()

        with ThreadPoolExecutor(20) as pool:
            [*pool.map(asks, peers)]
        until(lambda: told(node, "abuse.torrent"), SOON, "she is reported")
        assert told(node, "abuse.torrent")[ANNA.email]["action"] == "tell"
        assert not told(node, "abuse.scan")
