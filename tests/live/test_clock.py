"""The machine's clock is set, by an operator or NTP: no timer of the node is affected."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from protos.service_pb2 import UsersStat
from scripts.staging import transfer
from scripts.staging.controller import traffic
from scripts.staging.echo import EchoServer
from scripts.staging.inbounds import Kind
from scripts.staging.node import NodeProcess
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, member, run

ANNA = TestUser.new("anna@test")
DAY = 86400.0
ROOT = Path(__file__).parents[2]
# Python imports a module of this name first: it sets `time.time` ahead by the seconds in a file. But not for gRPC,
# which compares it with the kernel's clock, which the tests cannot set.
SITE = """
import os, sys, time
_time, _file = time.time, os.environ["AHEAD"]

def ahead():
    if sys._getframe(1).f_globals.get("__name__", "").startswith("grpc."):
        return _time()
    with open(_file) as file:
        return _time() + float(file.read())

time.time = ahead
"""


class Machine:
    """A node on a machine whose clock can be set, with a systemd watchdog of five notifications a second."""

    def __init__(self, directory: Path) -> None:
        self._ahead = directory / "ahead"
        self.set(0.0)
        (directory / "site").mkdir()
        (directory / "site" / "sitecustomize.py").write_text(SITE)
        self.systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.systemd.bind(str(directory / "notify"))
        self.node = NodeProcess(
            directory,
            PYTHONPATH=f"{directory / 'site'}:{ROOT}",
            AHEAD=str(self._ahead),
            NOTIFY_SOCKET=str(directory / "notify"),
            WATCHDOG_USEC="400000",
        )

    def set(self, seconds: float) -> None:
        """Set the clock ahead by so many seconds."""
        new = self._ahead.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self._ahead)

    def alive(self) -> None:
        """Wait until systemd has received some more watchdog notifications."""
        while self._heard():
            pass
        for _ in range(3):
            until(self._heard, 5, "a sign of life")

    def _heard(self) -> bytes:
        try:
            return self.systemd.recv(4096)
        except BlockingIOError:
            return b""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    with closing(made.systemd), made.node:
        yield made


@pytest.mark.parametrize("ahead", [-DAY, DAY], ids=["back", "forward"])
def test_the_clock_is_set(machine: Machine, all_kinds: Mapping[str, Kind], echo: EchoServer, ahead: float) -> None:
    """The watchdog is notified, keep-alive does not expire, and counters are read periodically and on request."""
    home = Place(all_kinds["vless-raw"], "home")
    with control(machine.node, "grpc") as controller:
        run(controller, [home], [member(ANNA, home)], keep_alive=600)
        [core] = machine.node.core_pids()
        machine.alive()
        machine.set(ahead)
        machine.alive()
        for moved in (10_000, 20_000):
            with connection(home, ANNA, echo) as link:
                transfer.download(link, 10_000)
            until(
                lambda moved=moved: traffic(controller.stats(UsersStat))[ANNA.email]["downlink"] >= moved,  # type: ignore[misc]
                what="the bytes are counted",
            )
        assert controller.info().state == "running"
        assert machine.node.core_pids() == [core]
