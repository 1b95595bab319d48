"""Queries to Xray about connections without an access line: online users and their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil

from drivers.xray.api import Api
from node.state.directory import StateDirectory
from scripts.staging import background
from scripts.staging.controller import Controller
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from tests.conftest import SOURCE, Place, connection, member, over, run, settled

ANNA, BERT = TestUser.new("Anna@test"), TestUser.new("bert@test")


async def _online(socket: Path) -> dict[str, list[str]]:
    api = Api(background.reactor, str(socket))
    try:
        return {email: [*await api.online_ips(email)] for email in await api.all_online()}
    finally:
        await api.close()


@over("rest")
def test_the_core_tells_who_is_online(
    controller: Controller, node: NodeProcess, all_kinds: Mapping[str, Kind], cover: CoverServer, echo: EchoServer
) -> None:
    """All at once, with the spelling of their e-mails, and no other users."""
    place = Place(all_kinds["vless-raw"], "in")
    with settled([place], cover):
        run(controller, [place], [member(ANNA, place), member(BERT, place)])
    files = set(map(str, StateDirectory(node.state).run_dir.glob("*.sock")))
    (socket,) = files & {each.laddr for each in psutil.Process(node.newest_core()).net_connections("unix")}
    assert background.run(lambda: _online(Path(socket))) == {}
    with connection(place, ANNA, echo):
        assert background.run(lambda: _online(Path(socket))) == {ANNA.email: [SOURCE]}
