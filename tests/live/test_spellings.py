"""The two keys for users of an Xray inbound: the controller's users are admitted with either, on every version."""

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
    """The inbound with a user of its own, under this key."""
    settings = {name: value for name, value in place.inbound["settings"].items() if name != "clients"}
    if "method" not in settings and place.kind.protocol.name == "shadowsocks":
        # A core that does not know the key looks for a single user's.
        settings |= {"method": "aes-256-gcm", "password": "of the server"}
    return {**place.inbound, "settings": {**settings, key: [place.kind.account(OWN)]}}


@over("grpc")
@pytest.mark.parametrize("key", ["clients", "users"])
def test_either_name(key: str, all_kinds: Mapping[str, Kind], controller: Controller, echo: EchoServer) -> None:
    """The configuration's user under either key is not admitted; users added later are, and can be removed."""
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
