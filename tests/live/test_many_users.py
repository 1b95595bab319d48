"""Many users at once for a running Xray: in force in time, without breaking connections where the core supports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import psutil
import pytest

from protos.service_pb2 import User
from scripts.staging import transfer
from scripts.staging.controller import Controller
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from tests.conftest import Place, connection, gets_in, member, over, run, settled, stays_out

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
FIVE = ("vless-reality-vision", "vmess-raw", "trojan-tls", "shadowsocks-chacha20", "shadowsocks-2022-aes-128")
# So many users cost a running core some 10 s on a Shadowsocks-2022 inbound if added one by one, …
MANY = 3_000
# … and the processor seconds that they may cost, which do not depend on the machine's load.
CHEAP = 3.0
# The core accepts 4 MiB in one call. With names of this length fewer users exceed that.
LONG, TOO_MANY = 400, 9_000


@contextmanager
def cheap(core: int) -> Iterator[None]:
    """Assert that the block costs the core little processor time."""
    before = sum(psutil.Process(core).cpu_times()[:2])
    yield
    assert sum(psutil.Process(core).cpu_times()[:2]) - before < CHEAP


@pytest.mark.slow
@over("grpc")
def test_many_on_five_inbounds(
    all_kinds: Mapping[str, Kind], cover: CoverServer, node: NodeProcess, echo: EchoServer, controller: Controller
) -> None:
    """Adding and removing thousands on five protocols is cheap, and connections of other users stay."""
    places = [Place(all_kinds[name], name) for name in FIVE]
    crowd = [member(TestUser.new(f"{number}@test"), *places) for number in range(MANY)]
    # A User has one flow and one Shadowsocks method.
    stay = [member(person, *places) for person in (ANNA, BERT)]
    with settled(places, cover):
        run(controller, places, stay)
    core = node.newest_core()
    with ExitStack() as stack:
        links = [stack.enter_context(connection(place, ANNA, echo)) for place in places]
        with cheap(core):
            run(controller, places, [*stay, *crowd, member(CARL, *places)])
        assert all(gets_in(place, CARL, echo) for place in places[-2:])
        with cheap(core):
            controller.sync_users(stay)
        for link in links:
            transfer.echo(link, b"still there")
        assert not any(gets_in(place, CARL, echo, timeout=0.5) for place in places[-2:])
        assert all(gets_in(place, BERT, echo) for place in places)
    assert node.newest_core() == core


@over("rest")
def test_ports_hear_after_many_swaps(
    all_kinds: Mapping[str, Kind], node: NodeProcess, echo: EchoServer, controller: Controller
) -> None:
    """An inbound that was swapped repeatedly accepts users, and the core has no more sockets than before."""
    place = Place(all_kinds["shadowsocks-2022-aes-128"], "swapped")
    controller.stop()
    run(controller, [place], [member(ANNA, place), member(BERT, place)])
    core = node.newest_core()

    def change() -> None:
        controller.sync_user(member(TestUser.new(BERT.email), place))

    change()
    before = sockets(core)
    for _ in range(20):
        change()
    assert sockets(core) <= before
    assert node.newest_core() == core
    assert all(gets_in(place, ANNA, echo) for _ in range(5))


def sockets(pid: int) -> int:
    return len(psutil.Process(pid).net_connections())


@pytest.fixture
def crowded(all_kinds: Mapping[str, Kind], controller: Controller) -> tuple[Place, list[User]]:
    """A running Shadowsocks-2022 inbound with more users than fit into one call; Anna and Bert are among them."""
    place = Place(all_kinds["shadowsocks-2022-aes-128"], "crowded")
    crowd = [member(TestUser.new(f"{number}-{'x' * LONG}@test"), place) for number in range(TOO_MANY)]
    run(controller, [place], [*crowd, member(ANNA, place), member(BERT, place)])
    return place, crowd


def by_start(controller: Controller, place: Place, crowd: list[User]) -> None:
    run(controller, [place], [*crowd, member(ANNA, place)])


def by_sync(controller: Controller, place: Place, crowd: list[User]) -> None:
    controller.sync_users([*crowd, member(ANNA, place)])


def one_by_one(controller: Controller, place: Place, crowd: list[User]) -> None:
    controller.sync_user(member(BERT))


@pytest.mark.slow
@pytest.mark.parametrize("remove", [by_start, by_sync, one_by_one])
@pytest.mark.turns("remove")
@over("rest")
def test_removed_from_a_crowd(
    remove: Callable[[Controller, Place, list[User]], None],
    crowded: tuple[Place, list[User]],
    echo: EchoServer,
    controller: Controller,
) -> None:
    """Removed users are cut when the call succeeds; the others stay."""
    place, crowd = crowded
    assert gets_in(place, BERT, echo)
    remove(controller, place, crowd)
    assert stays_out(place, BERT, echo)
    assert gets_in(place, ANNA, echo)
    assert controller.info().running


@pytest.mark.slow
@over("rest")
def test_changes_in_a_crowd(
    crowded: tuple[Place, list[User]], node: NodeProcess, echo: EchoServer, controller: Controller
) -> None:
    """An addition needs no new run of the core, a removal does: the inbound does not fit into the call of a swap."""
    place, _ = crowded
    changed = TestUser.new(BERT.email)
    core = node.newest_core()
    controller.sync_user(member(CARL, place))
    assert node.newest_core() == core
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(controller.sync_user, [member(changed, place), member(CARL)]))
    assert gets_in(place, changed, echo)
    assert stays_out(place, BERT, echo)
    assert stays_out(place, CARL, echo)
    assert gets_in(place, ANNA, echo)
    assert node.newest_core() != core
