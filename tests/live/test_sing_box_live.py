"""Shadowsocks users of sing-box are added, changed and removed while the core runs, without effect on others."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from protos import service_pb2
from protos.service_pb2 import Inbound, UserStat
from scripts.staging import transfer
from scripts.staging.controller import ControllerError
from scripts.staging.echo import EchoServer
from scripts.staging.sing_box import BUILDS, VLESS, Door, Way, backend, shadowsocks, shadowsocks_2022
from scripts.staging.users import TestUser
from scripts.staging.wait import accepts, until
from tests.conftest import talking
from tests.harness.box import Box, box_of, client, gets_in, stays_in, stays_out

UP, DOWN = 300_000, 700_000


@pytest.fixture(scope="module", params=list(BUILDS))
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box_of(request.param, tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture(scope="module", params=list(BUILDS))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A node without room for another core: if a change needs one, the old core ends first."""
    with box_of(request.param, tmp_path_factory.mktemp("node"), DRAIN_GENERATIONS="0") as running:
        yield running


def both(person: TestUser, *doors: Door) -> service_pb2.User:
    """The user as a controller sends them for several inbounds."""
    message = service_pb2.User(email=person.email)
    for door in doors:
        message.MergeFrom(service_pb2.User(inbounds=door.tags, proxies=door.user(person).proxies))
    return message


@pytest.mark.parametrize("way", [shadowsocks_2022, shadowsocks])
def test_nobody_notices(box: Box, echo: EchoServer, way: Callable[[], Way]) -> None:
    """Others of this and of another inbound stay connected through an addition, a change and a removal."""
    door, other = Door(way()), Door(VLESS)
    stays, elsewhere = TestUser.new("stays"), TestUser.new("elsewhere")
    old, new = TestUser.new("same"), TestUser.new("same")
    box.controller.start(backend(door.inbounds + other.inbounds, [door.user(stays), other.user(elsewhere)]))
    core = box.node.newest_core()
    with client((door, stays), (other, elsewhere), (door, old), (door, new)) as ports, ExitStack() as stack:
        for port in ports[:2]:
            stack.enter_context(talking(stack.enter_context(transfer.connect(port, echo))))
        assert stays_out(ports[2], echo)
        box.controller.sync_user(door.user(old))
        his = [stack.enter_context(transfer.connect(ports[2], echo, timeout=1)) for _ in range(10)]
        assert stays_out(ports[3], echo)
        box.controller.sync_user(door.user(new))
        assert gets_in(ports[3], echo) and not stays_in(ports[2], echo)
        his_now = [stack.enter_context(transfer.connect(ports[3], echo, timeout=1)) for _ in range(10)]
        for link in his:
            with pytest.raises(OSError):
                transfer.echo(link, b"am I in?")
        box.controller.sync_users([door.user(stays), other.user(elsewhere)])
        for link in his_now:
            with pytest.raises(OSError):
                transfer.echo(link, b"am I in?")
        assert stays_out(ports[3], echo)
        with pytest.raises(ControllerError, match="same"):
            box.controller.online("same")
        box.controller.sync_users([door.user(stays), other.user(elsewhere), door.user(old)])
        assert gets_in(ports[2], echo) and stays_out(ports[3], echo)
    assert box.node.newest_core() == core


def test_every_byte(box: Box, echo: EchoServer) -> None:
    """Of users from the start, added, removed and re-added ones, on one inbound and on two, across a new core."""
    door, other = Door(shadowsocks_2022()), Door(VLESS)
    first, late, third = TestUser.new("first"), TestUser.new("late"), TestUser.new("Third")
    box.controller.start(backend(door.inbounds + other.inbounds, [both(first, door, other)]))
    for kind in (service_pb2.UsersStat, service_pb2.Inbounds):
        box.controller.stats(kind, reset=True)
    received, sent = echo.received, echo.sent
    used = dict.fromkeys((first, late, third), 0)
    routes = [(door, first), (other, first), (door, late), (other, late), (door, third)]
    with client(*routes) as ports:
        ways = dict(zip(routes, ports, strict=True))

        def use(door: Door, person: TestUser) -> None:
            used[person] += 1
            with transfer.connect(ways[door, person], echo) as link:
                transfer.upload(link, UP)
                transfer.download(link, DOWN)

        use(door, first)
        use(other, first)
        box.controller.sync_user(door.user(late), door.user(third))
        for person in (first, late, third):
            use(door, person)
        box.controller.sync_user(service_pb2.User(email="late"), service_pb2.User(email="third"))
        use(door, first)
        box.controller.sync_user(door.user(late))
        use(door, late)
        core = box.node.newest_core()
        # VLESS needs another core, which also gets the Shadowsocks user.
        box.controller.sync_user(both(late, door, other))
        assert box.node.newest_core() != core
        use(door, late)
        use(other, late)
        box.controller.sync_user(door.user(third))
        use(door, third)
        box.controller.sync_user(service_pb2.User(email="late"), service_pb2.User(email="first"))
    rows = box.controller.stats(service_pb2.UsersStat).stats
    found = {(row.name.lower(), row.type): row.value for row in rows}
    for person, times in used.items():
        name = person.email.lower()
        assert found[name, "downlink"] == times * (DOWN + 11), name
        assert found[name, "uplink"] == times * (UP + 36), name
    inbounds = [box.counted(Inbound, one.way.name) for one in (door, other)]
    assert sum(row["downlink"] for row in inbounds) == echo.sent - sent
    assert sum(row["uplink"] for row in inbounds) == echo.received - received


def test_a_name_that_is_no_path(box: Box, echo: EchoServer) -> None:
    """A user with any characters in their e-mail is added, counted, shown by name, and removed."""
    door, person = Door(shadowsocks_2022()), TestUser.new("a/b%2F c?d#é;..")
    box.controller.start(backend(door.inbounds))
    with client((door, person)) as (port,), box.controller.logs() as log:
        box.controller.sync_user(door.user(person))
        with transfer.connect(port, echo) as link:
            transfer.echo(link, b"hello")
            assert list(until(lambda: box.controller.online_ips(person.email).ips, 2)) == ["127.0.0.1"]
            expected = {"uplink": 24, "downlink": 10}
            assert box.settles(UserStat, person.email, expected) == expected
            log.find(f"[{person.email}] inbound connection")
            box.controller.sync_user(service_pb2.User(email=person.email))
            with pytest.raises(OSError):
                transfer.echo(link, b"am I in?")
        assert stays_out(port, echo)


def test_others_of_this_machine_are_not_answered(box: Box) -> None:
    """The port for users needs a secret path, which is logged nowhere, even at the highest log level."""
    door = Door(shadowsocks_2022())
    with box.controller.logs() as log:
        box.controller.start(backend(door.inbounds, log={"level": "trace"}))
        box.controller.sync_user(door.user(TestUser.new("a")))
        core = psutil.Process(box.node.newest_core())
        ports = {each.laddr.port for each in core.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        for port in ports - {door.port}:
            assert _status(port, "/server/v1/users") != 200 and _status(port, "//server/v1/users") != 200
        log.find("tcp server started at")
        assert not [line for line in log.lines if "/server/v1" in line]


def _status(port: int, path: str) -> int:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        link.request("GET", path)
        return link.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        link.close()


def test_keys_are_in_no_file(box: Box) -> None:
    """The users are only in the core's memory."""
    door, person = Door(shadowsocks()), TestUser.new("a")
    box.controller.start(backend(door.inbounds, [door.user(person)]))
    assert accepts(door.port)
    run: Path = box.node.state / "run"
    assert not [path for path in run.rglob("*") if path.is_file() and person.password.encode() in path.read_bytes()]


def test_a_core_that_comes_back_has_them(box: Box, echo: EchoServer) -> None:
    """Including those added meanwhile."""
    door, first, late = Door(shadowsocks_2022()), TestUser.new("first"), TestUser.new("late")
    box.controller.stop()
    box.controller.start(backend(door.inbounds, [door.user(first)]))
    box.controller.sync_user(door.user(late))
    (pid,) = box.node.core_pids()
    psutil.Process(pid).kill()
    until(lambda: box.node.core_pids() not in ([], [pid]) and box.controller.info().running, 5)
    with client((door, first), (door, late)) as ports:
        assert all(gets_in(port, echo) for port in ports)


def test_another_spelling(alone: Box, echo: EchoServer) -> None:
    """Another case of an e-mail with the same credential changes only the name by which the user is removed."""
    live, other = Door(shadowsocks_2022()), Door(VLESS)
    person, stays = TestUser.new("Anna@X"), TestUser.new("stays")
    again = TestUser("anna@x", person.uuid, person.password)
    alone.controller.start(backend(live.inbounds + other.inbounds, [both(person, live, other), other.user(stays)]))
    cores = alone.node.core_pids()
    with client((live, person), (other, person), (other, stays)) as ports, ExitStack() as stack:
        links = [stack.enter_context(transfer.connect(port, echo, timeout=1)) for port in ports]
        for link in links:
            stack.enter_context(talking(link))
        alone.controller.sync_user(both(again, live, other))
        alone.controller.sync_users([both(person, live, other), other.user(stays)])
        alone.controller.sync_users([both(again, live, other), other.user(stays)])
        assert alone.counted(UserStat, "ANNA@X")
        assert list(alone.controller.online_ips("anna@x").ips) == ["127.0.0.1"]
    with client((live, person), (other, person)) as ports, ExitStack() as stack:
        links = [stack.enter_context(transfer.connect(port, echo, timeout=1)) for port in ports]
        alone.controller.sync_users([other.user(stays)])
        for link in links:
            with pytest.raises(OSError):
                transfer.echo(link, b"am I in?")
        assert not any(stays_in(port, echo) for port in ports)
        assert stays_out(ports[0], echo), "the core was told by the name that it knows"
        alone.controller.sync_users([both(again, live, other), other.user(stays)])
        assert all(gets_in(port, echo) for port in ports)
    assert alone.node.core_pids() == cores
