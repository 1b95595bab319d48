"""USER_INBOUNDS: users' bytes by inbound, while all else of a user is as without it. Both cores, one table."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from protos.service_pb2 import (
    ListOnlineRequest,
    ListOnlineResponse,
    ListUsersRequest,
    ListUsersResponse,
    UsersStat,
    UserStat,
)
from scripts.staging import transfer
from scripts.staging.controller import Controller, traffic
from scripts.staging.core import Json
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import ROOMY, NodeProcess
from scripts.staging.sing_box import find_sing_box
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, gets_in, member, on, over, run, stays_out, talking, way
from tests.harness.grounds import Ground
from tests.harness.nodectl import Nodectl
from tests.live.test_next_node import Killed
from tests.live.test_overlap import ended, runs

ANNA, BERT, CORA, DORA = (TestUser.new(name) for name in ("Anna@test", "bert@test", "c/1@test", "dora@test"))
KINDS = ("vless-raw", "trojan-tls", "shadowsocks-2022-aes-128")
SOURCES = ("127.0.0.2", "127.0.0.3")
# How the core's names for users would show.
TRACES = ("\x1f", "x1f", "u001f", "u{1f}")
Both = tuple[int, int]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("node"), USER_INBOUNDS="on", **ROOMY) as running:
        yield running


@pytest.fixture
def places(all_kinds: Mapping[str, Kind], ground: Ground) -> list[Place]:
    """The same inbounds on both cores: tags that no core's counter could hold as a name are left to units."""
    return [Place(all_kinds[kind], f"in {number}", ground=ground) for number, kind in enumerate(KINDS)]


def blocking(ground: Ground, *users: str) -> Json:
    """Settings that keep these users from all targets, by a rule as a controller writes it."""
    if "block" in ground.outbounds:
        return {"routing": {"rules": [{"type": "field", "user": list(users), "outboundTag": "block"}]}}
    return {"route": {"rules": [{"auth_user": list(users), "action": "reject"}]}}


def by_inbound(controller: Controller, person: TestUser) -> dict[str, Both]:
    request = ListUsersRequest(names=[person.email], traffic=True)
    rows = controller.call("ListUsers", ListUsersResponse, request).users
    return {each.tag: (each.uplink, each.downlink) for row in rows for each in row.traffic}


def of_user(controller: Controller, person: TestUser) -> Both:
    row = traffic(controller.stats(UserStat, person.email))[person.email]
    return row["uplink"], row["downlink"]


def summed(rows: Mapping[str, Both]) -> Both:
    return sum(up for up, _ in rows.values()), sum(down for _, down in rows.values())


@contextmanager
def counted(echo: EchoServer, into: dict[str, Both], tag: str) -> Iterator[None]:
    """Add what the destination gets and sends within the block."""
    up, down = echo.received, echo.sent
    yield
    before = into.get(tag, (0, 0))
    into[tag] = before[0] + echo.received - up, before[1] + echo.sent - down


def carry(place: Place, person: TestUser, echo: EchoServer, into: dict[str, Both], size: int) -> None:
    """Some bytes of a user, each way, by a connection of its own."""
    with counted(echo, into, place.tag), connection(place, person, echo) as link:
        transfer.upload(link, size)
        transfer.download(link, 3 * size)


def test_bytes_by_inbound(places: list[Place], ground: Ground, controller: Controller, echo: EchoServer) -> None:
    """They are to the byte what the destination has seen; the user's are the sum, in the user's own spelling."""
    people = (ANNA, BERT, CORA)
    run(controller, places, [member(person, *places) for person in people])
    before = {person: by_inbound(controller, person) for person in people}
    sums = {person: of_user(controller, person) for person in people}
    sent: dict[TestUser, dict[str, Both]] = {person: {} for person in people}
    for number, place in enumerate(places):
        for person in people:
            carry(place, person, echo, sent[person], 1000 * (number + 1) + len(person.email))
    # A user who came later, while connections stay, where the core can have it so.
    controller.sync_user(member(DORA, *places[1:]))
    sent[DORA], before[DORA], sums[DORA] = {}, by_inbound(controller, DORA), of_user(controller, DORA)
    carry(places[-1], DORA, echo, sent[DORA], 4321)

    def grown(person: TestUser) -> dict[str, Both]:
        old = before[person]
        now = {
            tag: (up - old.get(tag, (0, 0))[0], down - old.get(tag, (0, 0))[1])
            for tag, (up, down) in by_inbound(controller, person).items()
        }
        return {tag: both for tag, both in now.items() if any(both)}

    def has(person: TestUser, wanted: Mapping[str, Both]) -> bool:
        return grown(person) == wanted

    for person, wanted in sent.items():
        until(partial(has, person, wanted), what=f"{person.email} has {wanted}")
        up, down = summed(wanted)
        assert of_user(controller, person) == (sums[person][0] + up, sums[person][1] + down)
    rows = traffic(controller.stats(UsersStat, reset=True))
    assert rows.keys() >= {person.email for person in sent}
    assert not any(trace in name for trace in TRACES for name in rows)
    # A reset by a panel changes no totals.
    assert grown(ANNA) == sent[ANNA] and of_user(controller, ANNA) == (0, 0)


@on(lambda ground: ground.name == "sing-box")
def test_a_build_without_counters(places: list[Place], ground: Ground, echo: EchoServer, tmp_path: Path) -> None:
    """Also where the node sums what the core's stream of connections says; live users have counters of their own."""
    settings = {ground.variable: str(find_sing_box("wheel")), "USER_INBOUNDS": "on"}
    with NodeProcess(tmp_path, **settings) as node, control(node, "grpc") as controller:
        run(controller, places, [member(person, *places) for person in (ANNA, CORA)])
        sent: dict[str, Both] = {}
        for place in places:
            carry(place, CORA, echo, sent, 7000)
        until(lambda: by_inbound(controller, CORA) == sent, what=f"all of {sent} is counted")
        assert of_user(controller, CORA) == summed(sent) and by_inbound(controller, ANNA) == {}


@over("grpc")
def test_nodectl_shows_them(
    places: list[Place], controller: Controller, echo: EchoServer, node: NodeProcess, tmp_path: Path
) -> None:
    """A row for each inbound where the user has moved bytes."""
    someone = TestUser.new(f"{places[0].ground.name}@nodectl")
    run(controller, places, [member(someone, *places)])
    sent: dict[str, Both] = {}
    for place in places[1:]:
        carry(place, someone, echo, sent, 5000)
    program = Nodectl(tmp_path)
    program.add("one", node, "rest")

    def rows() -> dict[str, Both]:
        (answer,) = program("--node", "one", "users", "list", "--traffic", someone.email, "--json").json
        (row,) = answer["result"]["users"]
        return {each["tag"]: (int(each["uplink"]), int(each["downlink"])) for each in row["traffic"]}

    until(lambda: rows() == sent, what="nodectl has the bytes")
    table = program("--node", "one", "users", "list", "--traffic", someone.email).out
    assert all(someone.email in line for line in table.splitlines()[1:]) and places[1].tag in table


@over("rest")
def test_names_are_the_users_own(
    places: list[Place], ground: Ground, controller: Controller, echo: EchoServer, node: NodeProcess
) -> None:
    """Of users online, in log lines, lists and limits; an address by two inbounds counts once."""
    with controller.logs() as reader:
        run(controller, places, [member(ANNA, *places), member(BERT, *places)], log=ground.verbose)
        with ExitStack() as stack:
            for place in places[:2]:
                transfer.connect(stack.enter_context(way(place, ANNA, SOURCES[0])), echo)
            until(lambda: controller.online(ANNA.email).value == 1, what="she is online from one address")
            port = stack.enter_context(way(places[2], ANNA, SOURCES[1]))
            stack.enter_context(transfer.connect(port, echo))
            stack.enter_context(connection(places[0], BERT, echo))
            until(lambda: controller.online(ANNA.email).value == 2, what="she is online from two addresses")
            assert controller.online_ips(ANNA.email).ips.keys() == {*SOURCES}
            listed = controller.call("ListOnline", ListOnlineResponse, ListOnlineRequest())
            assert {row.name for row in listed.users} == {ANNA.email, BERT.email}
            reader.find(ANNA.email)
            reader.find(BERT.email)
        stays_out(places[0], CORA, echo)
    assert not [line for line in [*reader.lines, *node.lines] for trace in TRACES if trace in line]


def test_rules_by_user_fit(places: list[Place], ground: Ground, controller: Controller, echo: EchoServer) -> None:
    """A controller's rule by a user's name applies in every inbound, and to no other user."""
    people = (ANNA, BERT, CORA)
    run(controller, places, [member(person, *places) for person in people], **blocking(ground, BERT.email, CORA.email))
    for place in places:
        assert gets_in(place, ANNA, echo)
        for person in (BERT, CORA):
            with way(place, person) as port, pytest.raises(OSError):
                transfer.connect(port, echo, 2)


@on(lambda ground: "block" in ground.outbounds)
def test_patterns_and_live_rules_fit(
    places: list[Place], ground: Ground, controller: Controller, echo: EchoServer
) -> None:
    """Also a regular expression, and rules that are added and removed while the core runs."""

    def barred() -> set[str]:
        found = set()
        for place, person in ((places[0], ANNA), (places[1], BERT), (places[2], DORA)):
            with way(place, person) as port:
                try:
                    transfer.connect(port, echo, 1).close()
                except OSError:
                    found.add(person.email)
        return found

    run(
        controller,
        places,
        [member(person, *places) for person in (ANNA, BERT, DORA)],
        **blocking(ground, "regexp:^b.*t$", r"regexp:\d"),
    )
    assert barred() == {BERT.email}
    rule = {"ruleTag": "mine", "user": [ANNA.email, "regexp:^d[^x]*test$"], "outboundTag": "block"}
    controller.add_routing_rule(json.dumps(rule))
    assert barred() == {ANNA.email, BERT.email, DORA.email}
    controller.remove_routing_rule("mine")
    assert barred() == {BERT.email}


@pytest.mark.slow
def test_removals_and_new_credentials(
    places: list[Place], ground: Ground, controller: Controller, echo: EchoServer
) -> None:
    """A removed user is out of every inbound, with live connections; others, and their bytes, stay."""
    run(controller, places, [member(ANNA, *places), member(BERT, *places)])
    other = TestUser.new(BERT.email)
    with ExitStack() as stack:
        links = [stack.enter_context(connection(place, ANNA, echo)) for place in places]
        stay = stack.enter_context(connection(places[0], BERT, echo))
        with talking(stay):
            controller.sync_user(member(ANNA))
            for link in links:
                until(partial(ended, link), 20, "the removed user's connection ends")
    assert all(stays_out(place, ANNA, echo) for place in places)
    controller.sync_user(member(other, *places))
    assert all(stays_out(place, BERT, echo) and gets_in(place, other, echo) for place in places)
    row = controller.call("ListUsers", ListUsersResponse, ListUsersRequest(names=[BERT.email])).users[0]
    assert {*row.confirmed} == {place.tag for place in places} and not row.leaving


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("on", "on"), ("off", "on"), ("on", "off")])
def test_the_next_node_goes_on_with_the_core(
    first: str, then: str, places: list[Place], ground: Ground, echo: EchoServer, tmp_path: Path
) -> None:
    """A killed node leaves a core whose users have either names; the next one knows them, with either setting."""
    (tmp_path / ".env").write_text(f"USER_INBOUNDS={first}\n")
    sent: dict[str, Both] = {}
    with NodeProcess(tmp_path, **ROOMY) as node, control(node, "grpc") as controller:
        run(controller, places, [member(ANNA, *places), member(BERT, *places)])
        # From another address: the next node cuts a connection that it cannot attribute where a removed user was.
        with way(places[0], BERT, "127.0.0.3") as port, transfer.connect(port, echo) as link:
            for place in places:
                carry(place, ANNA, echo, sent, 2000)
            wanted = summed(sent)
            until(lambda: of_user(controller, ANNA) == wanted, what="all bytes are counted")
            (core,) = runs(node)
            (tmp_path / ".env").write_text(f"USER_INBOUNDS={then}\n")
            Killed(node, controller).happens()
            assert runs(node) == {core}
            changed = [warning for warning in controller.info().warnings if "USER_INBOUNDS" in warning]
            assert bool(changed) == (first != then)
            assert of_user(controller, ANNA) == wanted
            transfer.echo(link, b"still there")
            # The core's names stay, and so does what it counts apart.
            for place in places:
                carry(place, ANNA, echo, sent, 3000)
            wanted = summed(sent)
            until(lambda: of_user(controller, ANNA) == wanted, what="all bytes are counted once")
            assert by_inbound(controller, ANNA) == (sent if first == "on" else {})
            controller.sync_user(member(ANNA))
            assert all(stays_out(place, ANNA, echo) for place in places)
            controller.sync_user(member(DORA, places[-1]))
            assert gets_in(places[-1], DORA, echo)
            transfer.echo(link, b"still there")
        # The next core has the names of the setting as it is now.
        before_it = runs(node)
        os.kill(node.newest_core(), signal.SIGKILL)
        # Alone: one that drains would get new connections in between.
        until(lambda: runs(node) and not runs(node) & before_it, 30, "another core runs alone")
        until(lambda: controller.info().state == "running", 20, "it serves")
        before, total = by_inbound(controller, BERT), of_user(controller, BERT)
        more: dict[str, Both] = {}
        carry(places[1], BERT, echo, more, 1500)
        wanted = summed({"before": total, **more})
        until(lambda: of_user(controller, BERT) == wanted, what="all bytes are counted by the next core")
        assert by_inbound(controller, BERT) == ({**before, **more} if then == "on" else before)
        assert not [line for line in node.lines for trace in TRACES if trace in line]


@pytest.mark.slow
def test_a_start_brings_the_setting_in(places: list[Place], ground: Ground, echo: EchoServer, tmp_path: Path) -> None:
    """The next Start of the same backend starts a core with the other names beside the old one; no connection drops."""
    (tmp_path / ".env").write_text("USER_INBOUNDS=off\n")
    with NodeProcess(tmp_path, UPGRADE_ON_START="on", **ROOMY) as node, control(node, "grpc") as controller:
        run(controller, places[:2], [member(ANNA, *places[:2])])
        (old,) = runs(node)
        with connection(places[0], ANNA, echo) as link, talking(link):
            (tmp_path / ".env").write_text("USER_INBOUNDS=on\n")
            Killed(node, controller).happens()
            run(controller, places[:2], [member(ANNA, *places[:2])])
            until(lambda: old in runs(node) and len(runs(node)) == 2, what="two cores run")
            sent: dict[str, Both] = {}
            carry(places[1], ANNA, echo, sent, 6000)
            # The old core counts for the user, the new one by inbound; the talk goes on by the old one.
            until(lambda: [*by_inbound(controller, ANNA)] == [places[1].tag], what="it counts by inbound")
            assert not [warning for warning in controller.info().warnings if "USER_INBOUNDS" in warning]
