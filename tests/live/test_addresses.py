"""The limit of addresses with real traffic: the silent address or the newcomer is cut, other users are not affected."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from protos.service_pb2 import TELL, Limits
from scripts.staging import transfer
from scripts.staging.controller import Controller
from scripts.staging.core import XrayClient
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, control, member, run, settled, talking, way
from tests.harness.grounds import Ground

# Seconds of silence after which an address gives way, in these tests.
GRACE = 2.0
# Seconds until a connection must be cut, on a busy machine; and after which one counts as not cut.
SOON, STAYS = 10.0, 1.5
HOME, OFFICE, MOBILE = "127.0.0.2", "127.0.0.3", "127.0.0.4"
MIB = 1024**2


@pytest.fixture(scope="module")
def brisk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with a short grace: the default one is longer than any stall of a busy machine."""
    with NodeProcess(tmp_path_factory.mktemp("node"), LIMIT_GRACE=f"{GRACE:g}") as node:
        yield node


@pytest.fixture
def place(ground: Ground, all_kinds: dict[str, Kind]) -> Place:
    return Place(all_kinds["vless-raw"], "in", ground=ground)


@contextmanager
def backend(
    node: NodeProcess, place: Place, cover: CoverServer, limits: Limits, *people: TestUser
) -> Iterator[Controller]:
    """A Start whose users all have these limits."""
    users = [member(person, place) for person in people]
    for user in users:
        user.limits.CopyFrom(limits)
    with control(node, "grpc") as controller:
        with settled([place], cover):
            run(controller, [place], users)
        yield controller


def somebody() -> TestUser:
    """A user of this test only: the node remembers for seconds who was connected, from where and in which order."""
    return TestUser.new(f"{uuid.uuid4()}@test")


def ended(controller: Controller) -> int:
    return controller.info().limits.too_many_addresses


@contextmanager
def linked(place: Place, person: TestUser, source: str, echo: EchoServer) -> Iterator[socket.socket]:
    with way(place, person, source) as port, transfer.connect(port, echo) as link:
        yield link


def is_cut(port: int, echo: EchoServer) -> bool:
    """Whether the node ends a new connection."""
    until_ = time.monotonic() + SOON
    try:
        with transfer.connect(port, echo) as link:
            while time.monotonic() < until_:
                transfer.echo(link, b"still there")
                time.sleep(0.02)
    except OSError:
        return True
    return False


def stays(link: socket.socket) -> bool:
    """Whether a connection carries bytes for a while."""
    until_ = time.monotonic() + STAYS
    try:
        while time.monotonic() < until_:
            transfer.echo(link, b"still there")
            time.sleep(0.02)
    except OSError:
        return False
    return True


def gets_in_soon(port: int, echo: EchoServer) -> bool:
    """Whether a user who retries gets a lasting connection at last."""
    until_ = time.monotonic() + SOON
    while time.monotonic() < until_:
        try:
            with transfer.connect(port, echo) as link:
                if stays(link):
                    return True
        except OSError:
            continue
    return False


def where(controller: Controller, person: TestUser) -> list[str]:
    (row,) = controller.limits(person.email).users
    return list(row.addresses)


@pytest.mark.slow
def test_the_third_address_of_two_is_cut(node: NodeProcess, place: Place, cover: CoverServer, echo: EchoServer) -> None:
    """However often it connects; the two stay, and another user at the third does, too. When one leaves, it may."""
    anna, bert = somebody(), somebody()
    with backend(node, place, cover, Limits(addresses=2), anna, bert) as controller, ExitStack() as stack:
        other = stack.enter_context(linked(place, bert, MOBILE, echo))
        stack.enter_context(talking(other))
        home = stack.enter_context(linked(place, anna, HOME, echo))
        stack.enter_context(talking(home))
        with linked(place, anna, OFFICE, echo) as office:
            with talking(office), way(place, anna, MOBILE) as port:
                assert is_cut(port, echo)
                assert is_cut(port, echo)
            assert ended(controller) >= 2
            assert where(controller, anna) == [HOME, OFFICE]
            assert where(controller, bert) == [MOBILE]
        until(lambda: where(controller, anna) == [HOME], SOON, "the office is gone")
        before = ended(controller)
        with linked(place, anna, MOBILE, echo) as link:
            assert stays(link)
        assert ended(controller) == before


@pytest.mark.slow
def test_a_phone_that_flips_is_in_after_the_grace(
    brisk: NodeProcess, place: Place, cover: CoverServer, echo: EchoServer
) -> None:
    """Its old connection is open but silent; switching back works the same way."""
    anna = somebody()
    with backend(brisk, place, cover, Limits(addresses=1), anna) as controller:
        with way(place, anna, HOME) as wifi, way(place, anna, MOBILE) as mobile:
            with transfer.connect(wifi, echo):
                began = time.monotonic()
                assert gets_in_soon(mobile, echo)
                assert time.monotonic() - began >= GRACE
            with transfer.connect(mobile, echo):
                assert gets_in_soon(wifi, echo)
        assert ended(controller)


@pytest.mark.slow
def test_who_only_downloads_is_not_silent(
    brisk: NodeProcess, place: Place, cover: CoverServer, echo: EchoServer
) -> None:
    """A download without a byte from the client, longer than the grace, is activity."""
    anna = somebody()
    with backend(brisk, place, cover, Limits(addresses=1), anna), linked(place, anna, HOME, echo) as link:
        link.sendall(b"give %d\n" % (64 * MIB))
        with ThreadPoolExecutor(1) as pool, way(place, anna, OFFICE) as port:
            came = pool.submit(_slowly, link, 64 * MIB, 2 * GRACE)
            began = time.monotonic()
            while time.monotonic() < began + 1.5 * GRACE:
                assert is_cut(port, echo)
            assert came.result() == 64 * MIB


def _slowly(link: socket.socket, size: int, seconds: float) -> int:
    """Read so many bytes over so many seconds."""
    came, began = 0, time.monotonic()
    while came < size and (block := link.recv(MIB)):
        came += len(block)
        time.sleep(max(0.0, began + seconds * came / size - time.monotonic()))
    return came


def test_many_users_behind_one_address(node: NodeProcess, place: Place, cover: CoverServer, echo: EchoServer) -> None:
    people = [TestUser.new(f"user{number}@test") for number in range(100)]
    ports = {free_port(): place.outbound(person, HOME) for person in people}
    with backend(node, place, cover, Limits(addresses=1), *people) as controller, ExitStack() as stack:
        before = ended(controller)
        stack.enter_context(XrayClient(ports))
        links = [stack.enter_context(transfer.connect(port, echo)) for port in ports for _ in range(2)]
        until(lambda: where(controller, people[-1]) == [HOME], SOON, "all are known")
        assert stays(links[0])
        for link in links:
            transfer.echo(link, b"still there")
        assert ended(controller) == before


@pytest.mark.slow
@pytest.mark.parametrize("by", ["SetLimits", "SyncUser"])
def test_a_limit_that_is_lowered(
    by: str, node: NodeProcess, place: Place, cover: CoverServer, echo: EchoServer
) -> None:
    """It applies to connected users; the first address stays. Without a limit all are admitted."""
    anna = somebody()
    with backend(node, place, cover, Limits(addresses=2), anna) as controller:

        def let(limits: Limits) -> None:
            if by == "SetLimits":
                assert not controller.set_limits({anna.email: limits}).notes
            else:
                user = member(anna, place)
                user.limits.CopyFrom(limits)
                controller.sync_user(user)

        with linked(place, anna, HOME, echo) as home, talking(home), way(place, anna, OFFICE) as port:
            with transfer.connect(port, echo) as office:
                assert stays(office)
                let(Limits(addresses=1))
                until(lambda: not stays(office), SOON, "the second address is cut")
            assert is_cut(port, echo)
            let(Limits())
            with transfer.connect(port, echo) as office:
                assert stays(office)


def test_a_user_who_is_reported_stays(node: NodeProcess, place: Place, cover: CoverServer, echo: EchoServer) -> None:
    anna = somebody()
    told = Limits(addresses=1, addresses_action=TELL)
    with backend(node, place, cover, told, anna) as controller, linked(place, anna, HOME, echo) as home:
        before = ended(controller)
        with linked(place, anna, OFFICE, echo) as office:
            assert stays(office) and stays(home)
        assert ended(controller) == before
