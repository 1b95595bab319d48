"""The two names that inbounds of Xray have for their users: the controller's get in by either, on every core."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from scripts.staging.backend import backend
from scripts.staging.controller import Controller
from scripts.staging.core import Json
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.users import TestUser
from tests.conftest import Place, gets_in, member, over, stays_out

ANNA, OWN = TestUser.new("anna@test"), TestUser.new("own@test")


def spelled(place: Place, key: str) -> Json:
    """The inbound with a user of its own, under this name."""
    settings = {name: value for name, value in place.inbound["settings"].items() if name != "clients"}
    if "method" not in settings and place.kind.protocol.name == "shadowsocks":
        # A core that does not know the name looks for one user for all.
        settings |= {"method": "aes-256-gcm", "password": "of the server"}
    return {**place.inbound, "settings": {**settings, key: [place.kind.account(OWN)]}}


@over("grpc")
@pytest.mark.parametrize("key", ["clients", "users"])
def test_either_name(key: str, all_kinds: Mapping[str, Kind], controller: Controller, echo: EchoServer) -> None:
    """Whom the configuration has under either name does not; who comes later does, and leaves again."""
    names = ("vless-raw", "vmess-raw", "trojan-tls", "shadowsocks-aes-256-gcm", "shadowsocks-2022-aes-128", "hysteria2")
    places = [Place(all_kinds[name], name) for name in names]
    controller.stop()
    controller.start(backend([spelled(place, key) for place in places]))
    controller.sync_user(member(ANNA, *places))
    for place in places:
        assert gets_in(place, ANNA, echo), place.tag
    assert stays_out(places[0], OWN, echo)
    controller.sync_user(member(ANNA))
    assert stays_out(places[0], ANNA, echo)
