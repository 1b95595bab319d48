"""The node's own quota, on the real cores: connections stay, no new ones are accepted until there is more quota."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from protos.service_pb2 import NodeQuota
from scripts.staging import transfer
from scripts.staging.controller import Controller
from scripts.staging.cover import CoverServer
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, gets_in, member, run, settled
from tests.harness.grounds import Ground

ROOT = Path(__file__).parents[2]
# Python runs it before the node: it adds a network interface with counters in a file, as those of the machine include
# the traffic of other tests.
COUNTER = """
import pathlib, psutil
real = psutil.net_io_counters
def counters(**words):
    found = real(**words)
    carried = int(pathlib.Path(__file__).with_name("carried").read_text())
    return {**found, "wire": found["lo"]._replace(bytes_sent=carried, bytes_recv=0)}
psutil.net_io_counters = counters
"""
# Seconds until the node finds the quota used up, on a machine that runs other tests.
SOON = 20.0
# Seconds without a reply after which a client counts as refused.
REFUSED = 1.0


def quota(controller: Controller) -> NodeQuota:
    return controller.info().limits.node


def stays_out(place: Place, person: TestUser, echo: EchoServer) -> bool:
    return not gets_in(place, person, echo, REFUSED)


class Hammer:
    """Connects repeatedly, and keeps the connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._links: list[socket.socket] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._try)

    def served(self) -> int:
        """The number of live connections."""
        return sum(map(_is_alive, [*self._links]))

    def _try(self) -> None:
        while not self._over.wait(0.001):
            with suppress(OSError):
                self._links.append(socket.create_connection(("127.0.0.1", self._port), timeout=0.1))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for link in self._links:
            link.close()


def _is_alive(link: socket.socket) -> bool:
    link.settimeout(0)
    try:
        return bool(link.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def wire(directory: Path) -> Callable[[int], object]:
    """Add an interface to a node with this directory first in PYTHONPATH. Sets its counters."""
    (directory / "node").mkdir()
    (directory / "sitecustomize.py").write_text(COUNTER)
    new, there = directory / "carried.new", directory / "carried"

    def carried(count: int) -> None:
        new.write_text(str(count))
        new.rename(there)

    carried(0)
    return carried


@pytest.mark.slow
def test_who_is_in_stays_and_nobody_else_gets_in(
    tmp_path: Path, ground: Ground, all_kinds: dict[str, Kind], cover: CoverServer, echo: EchoServer
) -> None:
    """At the quota connected users stay; another run and another node are closed, too; more quota opens them."""
    anna, bert = TestUser.new("anna@test"), TestUser.new("bert@test")
    place, other = (
        Place(all_kinds["vless-raw"], "in", ground=ground),
        Place(all_kinds["vless-raw"], "more", ground=ground),
    )
    carried = wire(tmp_path)
    settings = {"NODE_QUOTA_INTERFACE": "wire", "NODE_QUOTA_ACTION": "close", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with (
        NodeProcess(tmp_path / "node", NODE_QUOTA="1MB", **settings) as node,
        control(node, "grpc") as controller,
        settled([place, other], cover),
    ):
        run(controller, [place], [member(anna, place), member(bert, place)])
        with connection(place, anna, echo) as link:
            assert gets_in(place, bert, echo)
            carried(999_999)
            until(lambda: quota(controller).used == 999_999, SOON, "it is counted")
            assert not quota(controller).closed
            carried(1_000_000)
            until(lambda: quota(controller).closed, SOON, "it is used up")
            until(lambda: stays_out(place, bert, echo), SOON, "nobody gets in")
            assert any("NODE_QUOTA of" in text for text in controller.info().warnings)
            transfer.download(link, 1024)
            # Another run; the old one keeps its connections.
            run(controller, [place, other], [member(anna, place, other), member(bert, place, other)])
            assert stays_out(place, bert, echo)
            assert stays_out(other, bert, echo)
            transfer.download(link, 1024)
        with Hammer(place.port) as hammer:
            node.kill()
            node.start()
            until(lambda: controller.info().running, SOON, "the backend is back")
            until(lambda: not hammer.served(), SOON, "whoever was quicker is out")
            assert stays_out(place, bert, echo)
            node.stop()
            node.environment["NODE_QUOTA"] = "2MB"
            carried(1_500_000)
            node.start()
            until(lambda: gets_in(place, bert, echo), SOON, "there is more to use")
        assert not quota(controller).closed
        assert quota(controller).used == 1_500_000
