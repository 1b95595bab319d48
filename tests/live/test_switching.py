"""Starts from one core to the other, and users who change between runs: all bytes are billed, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from protos.service_pb2 import Inbounds, Outbounds, StatResponse, UsersStat
from scripts.staging import transfer
from scripts.staging.controller import Controller, refused
from scripts.staging.core import XrayClient
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, gets_in, member, run, stays_out, talking, way
from tests.harness.grounds import GROUNDS, Ground
from tests.live.test_core_faults import as_is

ANNA, BERT = TestUser.new("anna@test"), TestUser.new("Bert@test")
NAMES = ("vless-raw", "vmess-raw", "trojan-tls", "shadowsocks-aes-256-gcm", "shadowsocks-2022-aes-128")
# Bytes by user and direction.
Bill = Counter[tuple[str, str]]


def rows(reply: StatResponse) -> Bill:
    return Bill({(stat.name, stat.type): stat.value for stat in reply.stats})


class Meter:
    """The users' bytes, as the destination counted them."""

    def __init__(self, echo: EchoServer) -> None:
        self.moved = Bill()
        self._echo = echo
        self._size = 10_000

    @contextmanager
    def transfer(self, port: int, person: TestUser) -> Iterator[None]:
        """The user moves another number of bytes; inside, the connection is still open."""
        self._size += 997
        before = self._echo.received, self._echo.sent
        with transfer.connect(port, self._echo) as link:
            transfer.upload(link, self._size)
            transfer.download(link, 3 * self._size)
            self.moved[person.email, "uplink"] += self._echo.received - before[0]
            self.moved[person.email, "downlink"] += self._echo.sent - before[1]
            yield


@pytest.fixture
def meter(echo: EchoServer) -> Meter:
    return Meter(echo)


def on_each(kind: Kind) -> list[Place]:
    """The same inbound, tag and port on each core: to a user they are one."""
    first = Place(kind, "home", ground=GROUNDS[0])
    return [Place(kind, first.tag, first.port, ground) for ground in GROUNDS]


@pytest.mark.slow
@pytest.mark.parametrize("take", [False, True], ids=["at the end", "each time"])
@pytest.mark.turns("take")
def test_there_and_back(
    own_node: NodeProcess, all_kinds: Mapping[str, Kind], echo: EchoServer, meter: Meter, take: bool
) -> None:
    """From Xray to sing-box and back, twice, with users and open connections: `info` is right, and bills are exact."""
    billed, before = Bill(), 0
    with ExitStack() as stack:
        controllers: list[Controller] = [stack.enter_context(control(own_node, each)) for each in ("grpc", "rest")]
        for round, place in enumerate(on_each(all_kinds["vless-raw"]) * 2):
            controller = controllers[round // 2]
            info = run(controller, [place], [member(ANNA, place), member(BERT, place)])
            assert (info.running, info.core_type) == (True, place.ground.name)
            [core] = own_node.core_pids()
            assert core != before
            before = core
            for person in (ANNA, BERT):
                # They stay connected until the core is replaced.
                port = stack.enter_context(way(place, person))
                stack.enter_context(meter.transfer(port, person))
            if take:
                billed += rows(controller.stats(UsersStat, reset=True))
        controllers[0].stop()
        billed += rows(controllers[1].stats(UsersStat, reset=True))
        assert billed == meter.moved
        # Inbounds and outbounds of both, under their common tags.
        users = sum(value for (_, direction), value in meter.moved.items() if direction == "uplink")
        assert users <= rows(controllers[0].stats(Inbounds))["home", "uplink"] <= 1.01 * users
        assert rows(controllers[0].stats(Outbounds))["direct", "uplink"] == users
        assert not controllers[0].stats(UsersStat).stats


@pytest.mark.slow
def test_users_go_along(own_node: NodeProcess, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """Each core has exactly the users of its own Start and syncs, and the next node resumes the last one."""
    there, here = on_each(all_kinds["vless-raw"])
    with control(own_node, "rest") as controller:
        run(controller, [there], [member(ANNA, there)])
        run(controller, [here], [member(BERT, here)])
        assert stays_out(here, ANNA, echo)
        controller.sync_user(member(ANNA, here), member(BERT))
        assert gets_in(here, ANNA, echo) and stays_out(here, BERT, echo)
        run(controller, [there], [member(BERT, there)])
        assert gets_in(there, BERT, echo) and stays_out(there, ANNA, echo)
        run(controller, [here], [member(ANNA, here), member(BERT, here)])
        own_node.kill()
        own_node.start()
        until(lambda: gets_in(here, ANNA, echo), what="she is in")
        assert controller.info().core_type == here.ground.name


@pytest.mark.parametrize("way_there", [GROUNDS, GROUNDS[::-1]], ids=lambda grounds: f"to {grounds[1].name}")
def test_a_switch_that_is_refused(
    own_node: NodeProcess, all_kinds: Mapping[str, Kind], echo: EchoServer, way_there: Sequence[Ground]
) -> None:
    """If the other core refuses the configuration, this core and its connections stay."""
    ground, other = way_there
    place = Place(all_kinds["vless-raw"], "home", ground=ground)
    with control(own_node, "grpc") as controller:
        run(controller, [place], [member(ANNA, place)])
        before = own_node.core_pids()
        with connection(place, ANNA, echo) as link, talking(link):
            for config, why in other.refusals.values():
                with refused(400, "INVALID_ARGUMENT", why):
                    controller.start(as_is(other, config))
        assert own_node.core_pids() == before
        assert controller.info().core_type == ground.name


def test_four_changes_in_a_row(
    own_node: NodeProcess, all_kinds: Mapping[str, Kind], ground: Ground, echo: EchoServer, meter: Meter
) -> None:
    """Users of many protocols transfer during four additions: every byte is billed."""
    places = [Place(all_kinds[name], name, ground=ground) for name in NAMES]
    people = [TestUser.new(f"{name}@test") for name in NAMES]
    members = [member(person, place) for person, place in zip(people, places, strict=True)]
    ports = [free_port() for _ in NAMES]
    routes = {port: place.outbound(person) for port, place, person in zip(ports, places, people, strict=True)}
    with control(own_node, "grpc") as controller, XrayClient(routes):
        run(controller, places, members)
        for number in range(4):
            with ExitStack() as stack:
                for port, person in zip(ports, people, strict=True):
                    stack.enter_context(meter.transfer(port, person))
                newcomer = TestUser.new(f"{number}@test")
                controller.sync_user(member(newcomer, places[0]))
                assert gets_in(places[0], newcomer, echo)
        billed = rows(controller.stats(UsersStat, reset=True))
    newcomers = {key: value for key, value in billed.items() if key[0][0].isdigit()}
    assert billed == meter.moved + Bill(newcomers)
    assert {name for name, _ in newcomers} == {f"{number}@test" for number in range(4)}
