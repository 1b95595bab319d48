"""node.machine.systemd: the datagrams that systemd gets, on real sockets."""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from pathlib import Path

import pytest
from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from node.machine.systemd import Notifier, Systemd

READY = "READY=1\nSTATUS=txnode 1.2.3 serves"


class Listener:
    """Listens in place of systemd."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind(name)

    def heard(self) -> list[str]:
        messages = []
        while True:
            try:
                messages.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return messages


def test_without_systemd_nothing_happens() -> None:
    """Where NOTIFY_SOCKET is unset or empty, every call is allowed, silent and without effect."""
    for environ in ({}, {"NOTIFY_SOCKET": "", "WATCHDOG_USEC": "30000000"}):
        notifier = Notifier.from_environment(environ)
        with capturedLogs() as logged:
            notifier.ready("1.2.3")
            notifier.watchdog()
            notifier.stopping()
        assert (notifier.address, notifier.watchdog_interval, logged) == (None, None, [])


def test_an_abstract_address() -> None:
    """An address with @ is a name in the abstract name space."""
    name = f"txnode-{uuid.uuid4()}"
    listener = Listener(f"\0{name}")
    Notifier.from_environment({"NOTIFY_SOCKET": f"@{name}"}).ready("1.2.3")
    assert listener.heard() == [READY]
    listener.socket.close()


def test_an_address_of_another_kind() -> None:
    """An address that is not a unix socket is reported once and then ignored."""
    with capturedLogs() as logged:
        notifier = Notifier.from_environment({"NOTIFY_SOCKET": "vsock:2:1234"})
        notifier.ready("1.2.3")
    assert (notifier.address, len(logged)) == (None, 1)


def test_a_failing_send_is_logged(tmp_path: Path) -> None:
    """If no program listens at the address, that is one error in the log and never an exception."""
    with capturedLogs() as logged:
        Notifier.from_environment({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("1.2.3")
    assert len(logged) == 1
    assert logged[0]["log_level"].name == "error"


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_ours_or_not(environ: dict[str, str], interval: float | None) -> None:
    """A watchdog counts if its time is a number above 0 and it is not for another process."""
    assert Notifier.from_environment({"NOTIFY_SOCKET": "/x", **environ}).watchdog_interval == interval


class SystemdTests(SynchronousTestCase):
    """The service, with a clock of the test's own."""

    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        path = str(Path(directory.name) / "notify")
        self.listener = Listener(path)
        self.addCleanup(self.listener.socket.close)
        self.clock = Clock()
        self.environ = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "30000000"}

    def service(self) -> Systemd:
        return Systemd(Notifier.from_environment(self.environ), self.clock, "1.2.3")

    def test_a_life(self) -> None:
        """READY=1 only on `ready`, WATCHDOG=1 with it and at each half of the interval, STOPPING=1 and then silence."""
        service = self.service()
        service.start()
        self.assertEqual(self.listener.heard(), [])
        service.begin()
        self.assertEqual(self.listener.heard(), [READY, "WATCHDOG=1"])
        self.clock.advance(14.9)
        self.assertEqual(self.listener.heard(), [])
        self.clock.pump([0.2, 15])
        self.assertEqual(self.listener.heard(), ["WATCHDOG=1", "WATCHDOG=1"])
        service.stop()
        self.assertEqual(self.listener.heard(), ["STOPPING=1"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_without_a_watchdog(self) -> None:
        """A unit without WatchdogSec gets no WATCHDOG=1."""
        del self.environ["WATCHDOG_USEC"]
        service = self.service()
        service.start()
        self.clock.advance(100)
        service.stop()
        self.assertEqual(self.listener.heard(), ["STOPPING=1"])
