"""Connections that a controller ends: of a user, from an address, to an inbound. Their users may come back at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from protos import service_pb2 as pb
from scripts.staging import transfer
from scripts.staging.controller import Controller, ControllerError
from scripts.staging.core import XrayClient
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import SOURCE, Place, connection, member, run, talking
from tests.harness.grounds import Ground
from tests.live.test_events import past
from tests.live.test_overlap import Changes, runs
from tests.live.test_removed_users import ended

ANNA, BERT = TestUser.new("Anna@test"), TestUser.new("bert@test")
OTHERS = [TestUser.new(f"other{number}@test") for number in range(20)]
OFFICE = "127.0.0.3"
NOTHING = pb.DropConnectionsResponse()


@pytest.fixture
def away(ground: Ground, all_kinds: Mapping[str, Kind]) -> Place:
    return Place(all_kinds["trojan-tls"], "away", ground=ground)


@contextmanager
def ways(*places: tuple[Place, TestUser, str]) -> Iterator[Sequence[int]]:
    """The SOCKS ports of one client core: for each, the inbound, the user and the source address."""
    routes = {free_port(): place.outbound(person, source) for place, person, source in places}
    with XrayClient(routes):
        yield list(routes)


def drop(controller: Controller, name: str = "", address: str = "", inbound: str = "") -> pb.DropConnectionsResponse:
    request = pb.DropConnectionsRequest(name=name, address=address, inbound=inbound)
    return controller.call("DropConnections", pb.DropConnectionsResponse, request)


def online(controller: Controller, limit: int = 0) -> dict[str, set[str]]:
    """The addresses of all users online, page by page."""
    found: dict[str, set[str]] = {}
    after, more = "", True
    while more:
        page = controller.call("ListOnline", pb.ListOnlineResponse, pb.ListOnlineRequest(after=after, limit=limit))
        assert len(page.users) <= (limit or 1000) and not page.unsupported
        found |= {user.name: set(user.ips) for user in page.users}
        after, more = page.next, bool(page.next)
    return found


def end_soon(links: Sequence[socket.socket], place: Place) -> None:
    """These connections end within a second, as far as the client reports it at once."""
    until(lambda: all(map(ended, links)), 1 + place.ground.late, "they end")


@pytest.mark.each_once("controller", "ground")
@pytest.mark.slow
def test_dropped(controller: Controller, home: Place, away: Place, echo: EchoServer) -> None:
    """By user, by address, by inbound: these connections end, none of 20 others does, and all come back at once."""
    run(controller, [home, away], [member(person, home, away) for person in (ANNA, BERT, *OTHERS)])
    mine = [(home, ANNA, SOURCE), (home, ANNA, OFFICE), (away, ANNA, SOURCE), (home, BERT, OFFICE)]
    with ways(*mine, *((home, other, SOURCE) for other in OTHERS)) as ports, ExitStack() as stack:

        def linked(*some: int) -> list[socket.socket]:
            links = [stack.enter_context(transfer.connect(port, echo)) for port in some]
            for link in links:
                transfer.echo(link, b"hello")
            return links

        def dropped(links: Sequence[socket.socket], users: int, **asked: str) -> None:
            """These end, the others go on."""
            reply = drop(controller, **asked)
            assert (reply.ended, reply.users, dict(reply.unsupported)) == (len(links), users, {})
            end_soon(links, home)

        here, office, there, bert = ports[:4]
        others = linked(*ports[4:])
        for link in others[:2]:
            stack.enter_context(talking(link))
        wanted = {ANNA.email: {SOURCE, OFFICE}, BERT.email: {OFFICE}, **{other.email: {SOURCE} for other in OTHERS}}
        links = dict(zip(ports[:4], linked(*ports[:4]), strict=True))
        until(lambda: online(controller, 7) == wanted, 5, "all are online")

        dropped([links[here], links[office], links[there]], 1, name="anna@TEST")
        assert not ended(links[bert])
        until(lambda: online(controller) == {name: at for name, at in wanted.items() if name != ANNA.email}, 5)

        links |= dict(zip(ports[:3], linked(*ports[:3]), strict=True))
        until(lambda: online(controller) == wanted, 5, "she is back")
        dropped([links[office], links[bert]], 2, address=f"::ffff:{OFFICE}")
        assert not ended(links[here]) and not ended(links[there])

        links |= dict(zip(ports[:4], [links[here], *linked(office), links[there], *linked(bert)], strict=True))
        until(lambda: online(controller) == wanted, 5, "they are back")
        dropped([links[there]], 1, inbound="away")
        dropped([links[office]], 1, name=ANNA.email, address=OFFICE, inbound="home")
        assert not ended(links[here]) and not ended(links[bert])

        assert drop(controller, ANNA.email, inbound="away") == NOTHING
        # Not the first two: `ended` would take bytes that their conversations wait for.
        assert not any(map(ended, others[2:]))
        for link in others[2:]:
            transfer.echo(link, b"still there")
    until(lambda: not online(controller), 5, "no user is online")


@pytest.mark.each_once("controller", "ground")
def test_what_does_not_exist(controller: Controller, home: Place) -> None:
    """An unknown user or inbound, and what is no address, are errors; so is a request for everything."""
    run(controller, [home], [member(ANNA, home)])
    for asked, status in (
        ({"name": "nobody@test"}, ("404", "NOT_FOUND")),
        ({"inbound": "nowhere"}, ("404", "NOT_FOUND")),
        ({"name": ANNA.email, "inbound": "nowhere"}, ("404", "NOT_FOUND")),
        ({"address": "127.0.0.300"}, ("400", "INVALID_ARGUMENT")),
        ({"address": "a.test"}, ("400", "INVALID_ARGUMENT")),
        ({}, ("400", "INVALID_ARGUMENT")),
    ):
        with pytest.raises(ControllerError) as refused:
            drop(controller, **asked)
        assert refused.value.status in status, asked
    assert drop(controller, ANNA.email) == drop(controller, address="10.0.0.1") == NOTHING
    controller.stop()
    for work in (lambda: drop(controller, ANNA.email), lambda: online(controller)):
        with pytest.raises(ControllerError, match="backend not initialized"):
            work()


@pytest.mark.each_once("controller", "ground")
@pytest.mark.slow
def test_over_udp(controller: Controller, ground: Ground, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """Where the node cannot distinguish a core's connections over UDP the reply says so; else they end."""
    place = Place(all_kinds["hysteria2"], "quic", ground=ground)
    run(controller, [place], [member(ANNA, place), member(BERT, place)])
    with connection(place, ANNA, echo) as anna, connection(place, BERT, echo) as bert, talking(bert):
        transfer.echo(anna, b"hello")
        until(lambda: online(controller) == {ANNA.email: {SOURCE}, BERT.email: {SOURCE}}, 5, "both are online")
        reply = drop(controller, ANNA.email)
        if reply.unsupported:
            assert (reply.ended, list(reply.unsupported)) == (0, ["quic"])
            assert "UDP" in reply.unsupported["quic"]
            transfer.echo(anna, b"still there")
            assert drop(controller, inbound="quic") == drop(controller, address=SOURCE) == reply
        else:
            assert (reply.ended, reply.users) == (1, 1)
            end_soon([anna], place)
    assert bool(reply.unsupported) is ground.cuts


@pytest.mark.each_once("controller", "ground")
@pytest.mark.slow
def test_of_a_draining_core(node: NodeProcess, controller: Controller, home: Place, echo: EchoServer) -> None:
    """Users on every core are listed and dropped, and an event says who."""
    controller.stop()
    changes, users = Changes([home]), [member(person, home) for person in (ANNA, BERT)]
    changes.start(controller, users)
    with ExitStack() as stack:
        old, bert = (stack.enter_context(connection(home, person, echo)) for person in (ANNA, BERT))
        transfer.echo(old, b"hello")
        changes.next()
        changes.start(controller, users)
        new = stack.enter_context(connection(home, ANNA, echo))
        transfer.echo(new, b"hello")
        assert len(runs(node)) == 2
        with talking(bert):
            until(lambda: set(online(controller)) == {ANNA.email, BERT.email}, 5, "both are online")
            began = time.monotonic()
            assert drop(controller, ANNA.email).ended == 2
            assert time.monotonic() - began < 1
            end_soon([old, new], home)
            with connection(home, ANNA, echo) as again:
                transfer.echo(again, b"hello")
        until(lambda: set(online(controller)) == {BERT.email}, 5, "she is offline")
    event = [event for event in past(node) if event.kind == "users.dropped"][-1]
    assert dict(event.fields) == {"connections": "2", "count": "1", "names": ANNA.email, "by": "user"}
    assert event.text == f"a controller had connections of {ANNA.email!r} ended: 2"
