"""Users behind a reverse proxy that reports their addresses: the limit of addresses, who is out, and who is online."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from protos.service_pb2 import Limits
from scripts.staging import transfer
from scripts.staging.backend import backend
from scripts.staging.controller import Controller
from scripts.staging.core import Json
from scripts.staging.echo import EchoServer
from scripts.staging.front import Front
from scripts.staging.inbounds import Kind
from scripts.staging.wait import until
from tests.conftest import Place, control, member, over, talking, way
from tests.harness.fronted import (
    HOME,
    MOBILE,
    OFFICE,
    SOON,
    Fronted,
    is_in,
    is_soon,
    limited,
    listed,
    somebody,
    stays_out,
    websocket,
    where,
)
from tests.harness.grounds import SING_BOX, XRAY
from tests.harness.upgraded import RealNode, upgrade

# What the inbound trusts, by how the front reports addresses.
TRUST: Mapping[str, Json] = {
    "header": {"trustedXForwardedFor": ["X-Forwarded-For"]},
    "proxy": {"acceptProxyProtocol": True},
}


@pytest.fixture(params=["header", "proxy"])
def fronted(request: pytest.FixtureRequest, all_kinds: Mapping[str, Kind]) -> Iterator[Fronted]:
    place = Place(websocket(all_kinds), "in")
    with Front(place.port, proxy=request.param == "proxy") as front:
        yield Fronted(place, front, TRUST[request.param])


@pytest.mark.slow
def test_an_address_too_many_is_kept_out(controller: Controller, fronted: Fronted, echo: EchoServer) -> None:
    """Other users there, and the user's first address, notice nothing; when that is free, the other one may come."""
    anna, bert = somebody(), somebody()
    controller.start(backend([fronted.inbound], [limited(anna, fronted), member(bert, fronted.place)]))
    with fronted.way(anna, OFFICE) as office, fronted.way(bert, OFFICE) as other, fronted.way(anna, HOME) as home:
        with transfer.connect(home, echo) as link, talking(link):
            assert set(until(lambda: controller.online_ips(anna.email).ips, SOON)) == {HOME}
            is_soon(office, echo, False)
            assert stays_out(office, echo)
            assert is_in(other, echo)
            assert is_in(home, echo)
            assert where(controller, anna) == [HOME]
            (row,) = controller.limits(anna.email).users
            assert any("reverse proxy" in note for note in row.notes)
            assert controller.routing_rules() == []
        is_soon(office, echo, True)
        assert where(controller, anna) == [OFFICE] or not where(controller, anna)


@pytest.mark.slow
@over("grpc")
def test_a_new_limit_lets_them_in(controller: Controller, fronted: Fronted, echo: EchoServer) -> None:
    anna = somebody()
    controller.start(backend([fronted.inbound], [limited(anna, fronted)]))
    with ExitStack() as stack:
        office, home = (stack.enter_context(fronted.way(anna, source)) for source in (OFFICE, HOME))
        stack.enter_context(talking(stack.enter_context(transfer.connect(home, echo))))
        is_soon(office, echo, False)
        controller.set_limits({anna.email: Limits(addresses=2)})
        is_soon(office, echo, True)
        controller.set_limits({anna.email: Limits(addresses=1)})
        is_soon(office, echo, False)


@pytest.mark.slow
@over("grpc")
def test_another_spelling(controller: Controller, fronted: Fronted, echo: EchoServer) -> None:
    """Who is kept out stays out when a controller spells their e-mail differently."""
    anna = somebody()
    controller.start(backend([fronted.inbound], [limited(anna, fronted)]))
    with fronted.way(anna, OFFICE) as office, fronted.way(anna, HOME) as home, transfer.connect(home, echo):
        is_soon(office, echo, False)
        controller.sync_user(limited(replace(anna, email=anna.email.upper()), fronted))
        assert not is_in(office, echo)


@pytest.mark.slow
@over("grpc")
def test_rules_of_the_controller(controller: Controller, fronted: Fronted, echo: EchoServer) -> None:
    """They come after the node's, in their order; they can be added and removed meanwhile."""
    anna = somebody()
    rules = [
        {"ruleTag": "hers", "user": [anna.email], "outboundTag": "direct"},
        {"user": ["nobody"], "outboundTag": "block"},
        {"ruleTag": "last", "port": "1-65535", "outboundTag": "direct"},
    ]
    controller.start(backend([fronted.inbound], [limited(anna, fronted)], routing={"rules": rules}))
    before = controller.routing_rules()
    assert [tag for _, tag in before] == ["hers", "", "last"] or [tag for tag, _ in before] == ["hers", "", "last"]
    with fronted.way(anna, OFFICE) as office, fronted.way(anna, HOME) as home:
        with transfer.connect(home, echo) as link, talking(link):
            is_soon(office, echo, False)
            assert controller.routing_rules() == before
            controller.add_routing_rule('{"ruleTag": "more", "port": "1-2", "outboundTag": "block"}')
            assert controller.routing_rules()[:3] == before
            assert stays_out(office, echo)
            controller.remove_routing_rule("hers")
            assert controller.routing_rules()[:2] == before[1:]
        is_soon(office, echo, True)
        with transfer.connect(office, echo) as link, talking(link):
            is_soon(home, echo, False)
            controller.remove_routing_rule("more")
            assert controller.routing_rules() == before[1:]
            assert stays_out(home, echo)


@pytest.mark.slow
@over("grpc")
def test_what_is_open_goes_on(controller: Controller, fronted: Fronted, echo: EchoServer) -> None:
    """But a multiplexing client that is out gets no new connection over its open one."""
    anna = somebody()
    controller.start(backend([fronted.inbound], [limited(anna, fronted)]))
    with ExitStack() as stack:
        home = stack.enter_context(fronted.way(anna, HOME))
        office = stack.enter_context(fronted.way(anna, OFFICE, mux={"enabled": True, "concurrency": 8}))
        stack.enter_context(talking(stack.enter_context(transfer.connect(home, echo))))
        open_ = stack.enter_context(transfer.connect(office, echo))
        is_soon(office, echo, False)
        assert stays_out(office, echo)
        transfer.echo(open_, b"still there")


@pytest.mark.slow
def test_what_happens_meanwhile(tmp_path: Path, fronted: Fronted, echo: EchoServer) -> None:
    """They stay out through a new core beside the old one, and the end of the core and of the node."""
    anna, users = somebody(), []
    users.append(limited(anna, fronted))
    with ExitStack() as stack, RealNode(tmp_path, ADOPT_SECONDS="60") as node, control(node, "grpc") as controller:
        controller.start(backend([fronted.inbound], users))
        office = stack.enter_context(fronted.way(anna, OFFICE))
        home = stack.enter_context(fronted.way(anna, HOME))
        with transfer.connect(home, echo) as link, talking(link):
            is_soon(office, echo, False)
            first = node.newest_core()
            controller.start(backend([fronted.inbound], users, log={"loglevel": "info"}))
            until(lambda: node.newest_core() != first, SOON, "another core")
            assert stays_out(office, echo)
            node.kill_node()
            until(lambda: answers(controller), 30, "the next node")
            assert node.newest_core() != first
            assert stays_out(office, echo)
            assert is_in(home, echo)
            upgrade(node)
            until(lambda: answers(controller), 30, "the next node")
            assert stays_out(office, echo)
            assert is_in(home, echo)
        with transfer.connect(home, echo) as link, talking(link):
            is_soon(office, echo, False)
        os.kill(node.newest_core(), signal.SIGKILL)
        until(lambda: is_in(home, echo), SOON, "the next core")
        with transfer.connect(home, echo) as link, talking(link):
            is_soon(office, echo, False)
            assert stays_out(office, echo)


@pytest.mark.slow
@over("grpc")
def test_sing_box_cuts_the_right_connection(
    controller: Controller, all_kinds: Mapping[str, Kind], echo: EchoServer
) -> None:
    """It believes the first address in the header, and closes a connection by its id."""
    anna, bert = somebody(), somebody()
    place = Place(websocket(all_kinds), "in", ground=SING_BOX)
    with Front(place.port) as front, ExitStack() as stack:
        fronted = Fronted(place, front)
        controller.start(SING_BOX.backend([place.inbound], [limited(anna, fronted), member(bert, place)]))
        home, office = (stack.enter_context(fronted.way(anna, source)) for source in (HOME, OFFICE))
        other = stack.enter_context(fronted.way(bert, OFFICE))
        with transfer.connect(home, echo) as link, talking(link), transfer.connect(other, echo) as theirs:
            with pytest.raises(OSError), transfer.connect(office, echo, SOON) as cut:
                end = time.monotonic() + SOON
                while time.monotonic() < end:
                    transfer.echo(cut, b"still there")
            transfer.echo(theirs, b"still there")
            assert where(controller, anna) == [HOME]
        until(lambda: is_in(office, echo), SOON, "it gets in")


@pytest.mark.parametrize("how", ["header", "proxy", "sing-box"])
@over("rest")
def test_who_is_online(how: str, controller: Controller, all_kinds: Mapping[str, Kind], echo: EchoServer) -> None:
    """From the address that the proxy reports, with a mark; without one from that of the socket."""
    anna, bert = somebody(), somebody()
    ground = SING_BOX if how == "sing-box" else XRAY
    place = Place(websocket(all_kinds), "in", ground=ground)
    with Front(place.port, proxy=how == "proxy") as front, ExitStack() as stack:
        fronted = Fronted(place, front, TRUST.get(how, {}))
        controller.start(ground.backend([fronted.inbound], [member(anna, place), member(bert, place)]))
        people = {anna.email: HOME}
        stack.enter_context(transfer.connect(stack.enter_context(fronted.way(anna, HOME)), echo))
        if how != "proxy":
            people[bert.email] = MOBILE
            stack.enter_context(transfer.connect(stack.enter_context(way(place, bert, MOBILE)), echo))
        expected = {name: [address] for name, address in people.items()}
        until(lambda: listed(controller) == (expected, {anna.email: [HOME]}), SOON, "they are online")
        for name, address in people.items():
            found = controller.online_ips(name)
            assert list(found.ips) == [address]
            assert list(found.forwarded) == ([address] if name == anna.email else [])
            assert controller.online(name).value == 1


def answers(controller: Controller) -> bool:
    try:
        return controller.info().running
    except Exception:  # noqa: BLE001 - whatever it is while no node is there
        return False
