"""WebSocket inbounds behind a real nginx, with the configuration of docs/limits.md as it stands there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.staging import transfer
from scripts.staging.controller import Controller
from scripts.staging.core import Json
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.ports import free_port
from scripts.staging.users import TestUser
from scripts.staging.wait import accepts, until
from tests.conftest import Place, member, over, talking
from tests.harness.fronted import (
    FORGED,
    HOME,
    MOBILE,
    OFFICE,
    SOON,
    Fronted,
    limited,
    listed,
    somebody,
    stays_in,
    websocket,
    where,
)
from tests.harness.grounds import SING_BOX, XRAY
from tests.harness.nodectl import Nodectl
from tests.machine.reach import ROOT, daemon

# The core behind nginx, and the example's place on the page: the header first, then the PROXY protocol.
WAYS = {"xray-header": (XRAY, 0), "xray-proxy": (XRAY, 1), "sing-box-header": (SING_BOX, 0)}


class Nginx:
    """nginx with one of the page's examples, and `more` directives of its server."""

    def __init__(self, directory: Path, example: str, behind: int, more: str = "") -> None:
        self.port = free_port()
        found = example.replace("listen 443", f"listen 127.0.0.1:{self.port}").replace(":8080", f":{behind}")
        if example.startswith("location"):
            parts = f"http {{ access_log off; server {{ listen 127.0.0.1:{self.port}; {more}\n{found} }} }}\n"
        else:
            parts = f"stream {{ {found} }}\n"
        self._file = directory / "nginx.conf"
        self._file.write_text(
            "load_module /usr/lib/nginx/modules/ngx_stream_module.so;\nerror_log stderr;\ndaemon off;\n"
            f"master_process off;\nevents {{}}\npid {directory}/pid;\n{parts}"
        )

    @contextmanager
    def running(self) -> Iterator[Nginx]:
        with daemon("/usr/sbin/nginx", "-c", self._file):
            until(lambda: accepts(self.port), what="nginx listens")
            yield self


def examples(language: str) -> list[str]:
    """The examples of the section on reverse proxies, in this language."""
    section = (ROOT / "docs" / "limits.md").read_text().partition("**Behind a reverse proxy")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def sockopt(at: int) -> Json:
    found: Json = json.loads(f"{{{examples('json')[at]}}}")["sockopt"]
    return found


@pytest.fixture(params=WAYS)
def fronted(request: pytest.FixtureRequest, all_kinds: Mapping[str, Kind], tmp_path: Path) -> Iterator[Fronted]:
    ground, at = WAYS[request.param]
    place = Place(websocket(all_kinds), "in", ground=ground)
    with Nginx(tmp_path, examples("nginx")[at], place.port).running() as front:
        yield Fronted(place, front, sockopt(at) if ground is XRAY else {})


def start(controller: Controller, fronted: Fronted, addresses: int = 0) -> tuple[TestUser, TestUser]:
    """Start the core with two users, the first with a limit of addresses."""
    anna, bert = somebody(), somebody()
    users = [limited(anna, fronted, addresses), member(bert, fronted.place)]
    controller.start(fronted.place.ground.backend([fronted.inbound], users))
    return anna, bert


@over("grpc")
def test_the_limit_of_addresses(controller: Controller, fronted: Fronted, echo: EchoServer) -> None:
    """The address that nginx reports counts, and not the claimed one; another user there notices nothing."""
    anna, bert = start(controller, fronted, addresses=1)
    with fronted.way(anna, HOME) as home, fronted.way(anna, OFFICE) as office, fronted.way(bert, OFFICE) as other:
        with transfer.connect(home, echo) as link, talking(link):
            until(lambda: where(controller, anna) == [HOME], SOON, "her address counts")
            until(lambda: not stays_in(office, echo), SOON, "another address is out")
            assert not stays_in(office, echo)
            assert stays_in(other, echo)
            assert stays_in(home, echo)
            assert where(controller, anna) == [HOME]
        until(lambda: stays_in(office, echo), SOON, "it is in when the first one is free")


@over("grpc")
def test_a_removed_user(controller: Controller, fronted: Fronted, echo: EchoServer) -> None:
    """They get no new connection; a live one goes on as the page says, and others notice nothing."""
    anna, bert = start(controller, fronted)
    with (
        fronted.way(anna, HOME) as home,
        fronted.way(bert, HOME) as other,
        transfer.connect(home, echo) as hers,
        transfer.connect(other, echo) as his,
        talking(his),
    ):
        controller.sync_user(member(anna))
        assert not stays_in(home, echo)
        if fronted.place.ground.cuts:
            transfer.echo(hers, b"still here")
        else:
            with pytest.raises(OSError):
                transfer.echo(hers, b"still here")
        assert stays_in(other, echo)


@over("grpc")
def test_online_with_a_mark(
    controller: Controller, node: NodeProcess, fronted: Fronted, echo: EchoServer, tmp_path: Path
) -> None:
    """Users are online from the addresses that nginx reports, marked as such, also by nodectl."""
    anna, bert = start(controller, fronted)
    with (
        fronted.way(anna, HOME) as home,
        fronted.way(anna, OFFICE) as office,
        fronted.way(bert, MOBILE) as other,
        transfer.connect(home, echo),
        transfer.connect(office, echo),
        transfer.connect(other, echo),
    ):
        people = {anna.email: [HOME, OFFICE], bert.email: [MOBILE]}
        until(lambda: listed(controller) == (people, people), SOON, "they are online")
        nodectl = Nodectl(tmp_path / "ctl")
        nodectl.add("one", node, "grpc")
        for arguments in (["--addresses"], [anna.email, bert.email]):
            done = nodectl("online", "--node", "one", *arguments)
            assert done.code == 0, done.err
            assert {(row[0], row[1], row[-1]) for row in done.rows[1:]} == {
                (name, address, "forwarded") for name, addresses in people.items() for address in addresses
            }
    until(lambda: listed(controller) == ({}, {}), SOON, "they are offline")


@over("grpc")
def test_who_comes_past_nginx(controller: Controller, fronted: Fronted, echo: EchoServer) -> None:
    """Xray believes no address of a client that connects to its port; sing-box does, so the port must be closed."""
    anna, _ = start(controller, fronted)
    if "acceptProxyProtocol" in fronted.sockopt:
        with fronted.way(anna, HOME, port=fronted.place.port) as past:
            assert not stays_in(past, echo)
        return
    believed = not fronted.sockopt
    with fronted.way(anna, HOME, port=fronted.place.port) as past, transfer.connect(past, echo):
        expected = {anna.email: [FORGED if believed else HOME]}
        until(lambda: listed(controller) == (expected, expected if believed else {}), SOON, "they are online")


@over("grpc")
def test_behind_a_cdn(controller: Controller, all_kinds: Mapping[str, Kind], echo: EchoServer, tmp_path: Path) -> None:
    """With nginx's two directives a user is online from the address in the CDN's header."""
    place = Place(websocket(all_kinds), "in")
    real = "set_real_ip_from 127.0.0.0/8; real_ip_header CF-Connecting-IP;"
    with Nginx(tmp_path, examples("nginx")[0], place.port, real).running() as front:
        fronted = Fronted(place, front, sockopt(0))
        anna, _ = start(controller, fronted)
        with fronted.way(anna, HOME, {"CF-Connecting-IP": "198.51.100.9"}) as port, transfer.connect(port, echo):
            people = {anna.email: ["198.51.100.9"]}
            until(lambda: listed(controller) == (people, people), SOON, "she is online")
