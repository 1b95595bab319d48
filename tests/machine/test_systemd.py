"""deploy/node.service under a live systemd, as `scripts/install` writes it: its life, its sandbox, a reboot."""

from __future__ import annotations

import re
import time

import psutil

from scripts.staging.wait import until
from tests.machine.conftest import CLONE, Server


def _score(server: Server) -> str:
    """The exposure that `systemd-analyze security` finds, of 10.0, and its word for that."""
    last = server.guest.run("systemd-analyze", "security", "--no-pager", "node").strip().splitlines()[-1]
    found = re.search(r"Overall exposure level for node\.service: ([\d.]+) (\w+)", last)
    assert found, last
    return f"{found[1]} {found[2]}"


def test_it_is_ready_and_reloads(server: Server) -> None:
    """systemd has heard READY=1; a reload reads keys and certificate, in the same process."""
    guest = server.guest
    assert (guest.shows("ActiveState"), guest.shows("SubState")) == ("active", "running")
    assert guest.shows("Type") == "notify"
    process = guest.shows("MainPID")
    guest.run("/opt/txnode/current/bin/python", "-m", "node.certificate", "/srv/pair", "--san", "renewed.example.com")
    guest.run("sh", "-c", "cat /srv/pair/key.pem >/var/lib/txnode/key.pem")
    guest.run("sh", "-c", "cat /srv/pair/certificate.pem >/var/lib/txnode/certificate.pem")
    guest.run("systemctl", "reload", "node")
    assert server.visit("start")["warnings"] == []  # its controller knows the new certificate alone
    assert guest.shows("MainPID") == process


def test_users_are_served_in_the_sandbox(server: Server) -> None:
    """A core runs as the service's own user, without a warning: nothing that the node needs is withheld from it.

    What the documentation says of the sandbox is what systemd finds.
    """
    assert server.visit("start")["warnings"] == []
    [core] = [process for process in _processes(server) if process.name() == "xray"]
    assert core.uids().real != 0
    assert f"`{_score(server)}`" in (CLONE / "docs" / "install.md").read_text()


def _processes(server: Server) -> list[psutil.Process]:
    """The guest's, as they are seen outside."""
    return psutil.Process(server.guest.pid).children(recursive=True)


def test_a_node_that_hangs_is_started_again(server: Server) -> None:
    """Stopped dead, it tells systemd nothing any more: the watchdog ends it, and users are served again."""
    server.visit("start")
    server.guest.run("systemctl", "kill", "--kill-whom=main", "--signal=STOP", "node")
    until(lambda: server.guest.shows("NRestarts") == "1", 60, "systemd has started it again")
    assert "Watchdog timeout" in server.guest.run("journalctl", "--unit", "node", "--no-pager")
    until(lambda: server.guest.shows("SubState") == "running", 30, "it is ready")
    server.visit("use")


def test_it_stops_within_its_time(server: Server) -> None:
    """With a core and its users the end is in good order, and nothing is left of it."""
    server.visit("start")
    began = time.monotonic()
    server.guest.run("systemctl", "stop", "node")
    assert time.monotonic() - began < 20
    assert server.guest.shows("Result") == "success"
    assert {process.name() for process in _processes(server)} & {"xray", "twistd"} == set()


def test_users_are_served_after_a_reboot(server: Server) -> None:
    """No controller calls: what ran before the machine went down runs again."""
    server.visit("start")
    server.guest.reboot()
    until(lambda: server.guest.shows("SubState") == "running", 30, "it is ready")
    assert server.visit("use")["warnings"] == []
