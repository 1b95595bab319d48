"""Shadowsocks-2022 users are removed while runs of Xray share their listeners and others make handshakes all the time.

Their inbound is swapped in the current run, which gives it a new listener: the next connections must reach that one.
From a run that drains they are kept out.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import pytest

from scripts.staging import transfer
from scripts.staging.acceptor import Acceptor
from scripts.staging.controller import Controller
from scripts.staging.core import XrayClient
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import SOURCE, Place, connection, gets_in, member, over, run, stays_out, talking, way

ANNA, BERT, CARL = (TestUser.new(f"{name}@test") for name in ("anna", "bert", "carl"))
# Removed users, each with a connection; and connections of others, which stay.
MANY, SOME = 60, 10
# Seconds until a removed user's connection is cut: normally, and at worst.
AS_A_RULE, AT_WORST = 0.5, 2.0
# Salt, identity and first header (SIP022 and SIP023): the core then knows the user, and waits for more.
HALF = 16 + 16 + 27


@contextmanager
def stalling(place: Place) -> Iterator[Place]:
    """A relay to the inbound on which each handshake stays half done for a while."""
    over = threading.Event()

    def serve(client: socket.socket) -> None:
        hello = client.recv(64 * 1024)
        with socket.create_connection(("127.0.0.1", place.port), 5) as inbound:
            inbound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            inbound.sendall(hello[:HALF])
            over.wait(0.2)
            inbound.sendall(hello[HALF:])
            client.sendall(inbound.recv(64 * 1024))

    with Acceptor("127.0.0.1", port := free_port(), serve):
        try:
            yield replace(place, port=port)
        finally:
            over.set()


@contextmanager
def knocking(work: Callable[[], None], threads: int) -> Iterator[None]:
    """Repeat the work meanwhile; it may fail."""
    over = threading.Event()

    def knock() -> None:
        while not over.is_set():
            with suppress(OSError, AssertionError):
                work()

    running = [threading.Thread(target=knock) for _ in range(threads)]
    for each in running:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in running:
            each.join()


@pytest.fixture
def shared(
    node: NodeProcess, controller: Controller, all_kinds: Mapping[str, Kind], echo: EchoServer
) -> Iterator[tuple[Place, list[TestUser]]]:
    """Two runs share a Shadowsocks-2022 inbound with many users, Anna the first and Bert the last."""
    home, place = Place(all_kinds["vless-raw"], "home"), Place(all_kinds["shadowsocks-2022-aes-128"], "shared")
    crowd = [TestUser.new(f"{number}@test") for number in range(MANY)]
    users = [member(person, place) for person in (ANNA, *crowd, BERT)] + [member(CARL, home)]
    controller.stop()
    run(controller, [home, place], users)
    with connection(home, CARL, echo) as link:
        run(controller, [home, place], users, log={"loglevel": "error"})
        assert len(node.core_pids()) == 2
        with talking(link):
            yield place, crowd
    controller.stop()


def over_after(link: socket.socket, began: float) -> float:
    """Seconds until a connection in continuous use ends."""
    link.settimeout(AT_WORST + 1)
    with suppress(OSError, AssertionError):
        while time.monotonic() < began + AT_WORST + 1:
            transfer.echo(link, b"still here")
    return time.monotonic() - began


@pytest.mark.slow
@over("grpc")
def test_removals_among_handshakes(
    shared: tuple[Place, list[TestUser]], node: NodeProcess, controller: Controller, echo: EchoServer
) -> None:
    """Each removed user is cut at once, no other connection ends, and no core does."""
    place, crowd = shared
    ports = {person: free_port() for person in crowd}
    pids = node.core_pids()
    with ExitStack() as stack:
        stack.enter_context(
            XrayClient({ports[person]: place.kind.outbound(place.port, person, source=SOURCE) for person in crowd})
        )
        stay = stack.enter_context(way(place, ANNA))
        staying = [stack.enter_context(closing(transfer.connect(stay, echo))) for _ in range(SOME)]
        slow = stack.enter_context(stalling(place))
        halves = [stack.enter_context(way(slow, person)) for person in (ANNA, BERT)]
        for half in halves:
            stack.enter_context(knocking(lambda half=half: transfer.connect(half, echo, 2).close(), 2))  # type: ignore[misc]
        stack.enter_context(knocking(lambda: transfer.connect(stay, echo, 2).close(), 2))
        took = []
        for person in crowd:
            with closing(transfer.connect(ports[person], echo, 10)) as link:
                transfer.echo(link, b"hers")
                began = time.monotonic()
                controller.sync_user(member(person))
                took.append(over_after(link, began))
        assert node.core_pids() == pids
        assert sorted(took)[len(took) // 2] < AS_A_RULE
        assert max(took) < AT_WORST
        for link in staying:
            transfer.echo(link, b"still here")
    assert gets_in(place, BERT, echo)
    assert stays_out(place, crowd[0], echo)
    assert stays_out(place, crowd[-1], echo)
    until(lambda: controller.info().running, what="it runs")


@pytest.mark.slow
@over("grpc")
def test_thousands_leave_while_a_core_drains(
    node: NodeProcess, controller: Controller, all_kinds: Mapping[str, Kind], echo: EchoServer
) -> None:
    """Within a panel's patience those who leave are cut from the draining core, and stay out if it must lead again."""
    home, place = Place(all_kinds["vless-raw"], "home"), Place(all_kinds["shadowsocks-2022-aes-128"], "shared")
    few = [member(CARL, home), member(BERT, place)]
    crowd = [member(person, place) for person in (ANNA, *(TestUser.new(f"{number}@test") for number in range(6_000)))]
    controller.stop()
    run(controller, [home, place], few + crowd)
    with (
        connection(home, CARL, echo) as far,
        connection(place, BERT, echo) as near,
        connection(place, ANNA, echo) as leaves,
    ):
        run(controller, [home, place], few + crowd, log={"loglevel": "error"})
        pids = node.core_pids()
        assert len(pids) == 2
        controller.sync_users(few)
        assert over_after(leaves, time.monotonic()) < AT_WORST
        assert node.core_pids() == pids
        os.kill(node.newest_core(), signal.SIGKILL)
        for link in (far, near):
            transfer.echo(link, b"still here")
        assert stays_out(place, ANNA, echo)
        until(lambda: controller.info().running, what="it runs again")
        assert gets_in(place, BERT, echo)
        assert stays_out(place, ANNA, echo)
    controller.stop()
