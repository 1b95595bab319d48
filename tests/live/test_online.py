"""Who is online means the same on both cores, by TCP and by QUIC, and from the machine itself."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import pytest

from protos.service_pb2 import ListOnlineRequest, ListOnlineResponse
from scripts.staging import transfer
from scripts.staging.controller import Controller
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import SOURCE, Place, member, over, run, settled, way
from tests.harness.grounds import Ground


def listed(controller: Controller) -> dict[str, set[str]]:
    page = controller.call("ListOnline", ListOnlineResponse, ListOnlineRequest())
    return {row.name: set(row.ips) for row in page.users}


@pytest.mark.both
@pytest.mark.parametrize(("kind", "source"), [("vless-raw", SOURCE), ("vless-raw", "127.0.0.1"), ("hysteria2", SOURCE)])
@over("rest")
def test_a_connection_makes_online(
    kind: str,
    source: str,
    controller: Controller,
    ground: Ground,
    all_kinds: Mapping[str, Kind],
    cover: CoverServer,
    echo: EchoServer,
) -> None:
    """With one connection a user is online from one address, and a moment after its end from none."""
    place = Place(all_kinds[kind], "in", ground=ground)
    anna, bert = (TestUser.new(f"Somebody-{uuid.uuid4()}@test") for _ in range(2))
    with settled([place], cover):
        run(controller, [place], [member(anna, place), member(bert, place)])
    with way(place, anna, source) as port:
        with transfer.connect(port, echo):
            until(lambda: listed(controller) == {anna.email: {source}}, 10, "she is online")
            assert set(controller.online_ips(anna.email).ips) == {source}
            assert [controller.online(person.email).value for person in (anna, bert)] == [1, 0]
        # Over QUIC only the client itself says that the connection has ended.
        until(lambda: not controller.online(anna.email).value and not listed(controller), 10, "she is offline")
