"""A sing-box user who is sent again with another spelling of the e-mail: no connection is affected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from protos.service_pb2 import UserStat
from scripts.staging import certs, transfer
from scripts.staging.echo import EchoServer
from scripts.staging.sing_box import BUILDS, SERVER_NAME, Door, Way, backend, ways
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.harness.box import Box, box_of, client, gets_in, stays_out
from tests.harness.sing_box_run import both


@pytest.fixture(scope="module", params=list(BUILDS))
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box_of(request.param, tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> certs.Certificate:
    return certs.make(tmp_path_factory.mktemp("inbounds"), [SERVER_NAME])


def _way(certificate: certs.Certificate, name: str) -> Way:
    return next(way for way in ways(certificate, 1) if way.name == name)


@pytest.mark.parametrize("sync", ["SyncUser", "SyncUsers"])
def test_another_spelling_of_a_login_ends_nobody(
    box: Box, certificate: certs.Certificate, echo: EchoServer, sync: str
) -> None:
    """Also if users log in by e-mail no other core is started, which would end QUIC sessions."""
    doors = [Door(way) for way in ways(certificate, 1) if way.quic or way.name in ("mixed", "socks", "http")]
    person, stays = TestUser.new(f"Anna.{sync}@X"), TestUser.new("stays")
    again = TestUser(person.email.lower(), person.uuid, person.password)
    inbounds = [inbound for door in doors for inbound in door.inbounds]
    box.controller.start(backend(inbounds, [both(person, *doors), both(stays, *doors)]))
    cores = box.node.core_pids()
    routes = [(door, who) for door in doors for who in (person, stays)]
    with client(*routes) as ports, ExitStack() as stack:
        links = [stack.enter_context(transfer.connect(port, echo)) for port in ports]
        if sync == "SyncUser":
            box.controller.sync_user(both(again, *doors))
        else:
            box.controller.sync_users([both(again, *doors), both(stays, *doors)])
        before = box.counted(UserStat, again.email)["downlink"]
        for link in links:
            transfer.echo(link, bytes(1000))
        assert all(gets_in(port, echo) for port in ports)
        moved = before + 1000 * len(doors)
        until(lambda: box.counted(UserStat, again.email)["downlink"] >= moved, 2, "their bytes are counted")
    # The core of the test before may have ended meanwhile.
    assert box.node.newest_core() == cores[-1] and {*box.node.core_pids()} <= {*cores}


def test_another_spelling_of_a_login_comes_with_the_next_core(
    box: Box, certificate: certs.Certificate, echo: EchoServer
) -> None:
    """The new login applies from the next necessary core on; until then the old one works."""
    door = Door(_way(certificate, "mixed"))
    person = TestUser.new("Anna@Y")
    again = TestUser("anna@y", person.uuid, person.password)
    box.controller.start(backend(door.inbounds, [door.user(person)]))
    with client((door, person), (door, again)) as (old, new):
        link = transfer.connect(old, echo)
        with link:
            box.controller.sync_user(door.user(again))
            assert gets_in(old, echo)
            until(lambda: gets_in(new, echo, patience=1.0), 15, "they log in by the new spelling")
            assert stays_out(old, echo)
