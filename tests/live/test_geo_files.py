"""Geo files that are replaced while a core runs, with traffic that follows them.

Only on a core that rereads them, which `TXNODE_TEST_XRAY_NEW` names.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos.xray_pb2 import Cidr, GeoIp, GeoIpList
from scripts.staging import transfer
from scripts.staging.controller import Controller, RpcController
from scripts.staging.core import Json
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import NEWER_XRAY, Place, connection, gets_in, member, run

ANNA = TestUser.new("anna@test")
HERE, ELSEWHERE = "127.0.0.0/8", "203.0.113.0/24"
OUTBOUNDS: list[Json] = [
    {"tag": "direct", "protocol": "freedom", "settings": {"finalRules": [{"action": "allow"}]}},
    {"tag": "block", "protocol": "blackhole"},
]
ROUTING: Json = {"rules": [{"ip": ["ext:mine.dat:blocked"], "outboundTag": "block"}]}
OFTEN: Json = {"cron": "@every 1s"}


def listing(network: str) -> bytes:
    at = ipaddress.ip_network(network)
    cidr = Cidr(ip=at.network_address.packed, prefix=at.prefixlen)
    return GeoIpList(entry=[GeoIp(country_code="BLOCKED", cidr=[cidr])]).SerializeToString()


@dataclass
class Lists:
    """A node whose core has its own directory, and the list that its configuration uses."""

    node: NodeProcess
    list: Path

    def put(self, content: bytes) -> None:
        """Replace the list by a rename, as an updater does."""
        fresh = self.list.with_name("fresh.dat")
        fresh.write_bytes(content)
        fresh.replace(self.list)

    def told(self, controller: Controller) -> bool:
        """Whether the node warns of the list."""
        return any(f"{self.list.name} changed on disk" in warning for warning in controller.info().warnings)


@pytest.fixture(params=["the operator's", "beside the executable"])
def lists(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lists]:
    """The second case reads the list through a link, without a geoip.dat."""
    own, beside = tmp_path / "lists", tmp_path / "core"
    for directory in (own, beside, tmp_path / "node"):
        directory.mkdir()
    shutil.copy2(os.environ[NEWER_XRAY], beside / "xray")
    is_own = request.param == "the operator's"
    settings = {"XRAY_EXECUTABLE_PATH": str(beside / "xray"), **({"XRAY_ASSETS_PATH": str(own)} if is_own else {})}
    made = Lists(NodeProcess(tmp_path / "node", **settings), (own if is_own else beside) / "mine.dat")
    made.put(listing(ELSEWHERE))
    with made.node:
        yield made


@pytest.fixture
def home(all_kinds: Mapping[str, Kind]) -> Place:
    return Place(all_kinds["vless-raw"], "home")


def test_rules_follow_a_list(lists: Lists, home: Place, echo: EchoServer) -> None:
    """Rules follow a new list; a broken one leaves the old in force. Connections stay."""

    def is_in() -> bool:
        return gets_in(home, ANNA, echo, timeout=1)

    with closing(RpcController(lists.node)) as controller, controller.logs() as log:
        run(controller, [home], [member(ANNA, home)], outbounds=OUTBOUNDS, routing=ROUTING, geodata=OFTEN)
        assert is_in()
        with connection(home, ANNA, echo) as link:
            lists.put(listing(HERE))
            until(lambda: not is_in(), what="the new list is in force")
            lists.put(b"no list")
            log.find("scheduled geodata reload failed")
            assert not is_in() and not lists.told(controller)
            lists.put(listing(ELSEWHERE))
            until(is_in, what="the list after the broken one is in force")
            transfer.echo(link, b"still there")


def test_the_node_has_it_done(lists: Lists, home: Place) -> None:
    """Reloading is scheduled hourly, only for configurations with lists, and no warning asks for a core's restart."""
    level = {"loglevel": "info"}
    with closing(RpcController(lists.node)) as controller, controller.logs() as log:
        run(controller, [home], [member(ANNA, home)], outbounds=OUTBOUNDS, log=level)
        lists.put(listing(HERE))
        assert lists.told(controller)
        run(controller, [home], [member(ANNA, home)], outbounds=OUTBOUNDS, routing=ROUTING, log=level)
        log.find("scheduled geodata reload with cron: @every 1h")
        lists.put(listing(ELSEWHERE))
        assert not lists.told(controller)
