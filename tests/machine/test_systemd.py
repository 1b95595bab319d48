"""deploy/node.service under systemd, as `scripts/install` writes it: life cycle, sandbox, reboot."""

from __future__ import annotations

import re
import time
from typing import cast

import psutil

from scripts.staging.wait import until
from tests.machine.conftest import CLONE, Server

# Seconds until users are served again after the node was killed: the unit's restart delay, and the start of the node
# and its core, on a busy machine.
SERVED = 6.0


def _score(server: Server) -> str:
    """The exposure level of `systemd-analyze security`, of 10.0, and its label."""
    last = server.guest.run("systemd-analyze", "security", "--no-pager", "node").strip().splitlines()[-1]
    found = re.search(r"Overall exposure level for node\.service: ([\d.]+) (\w+)", last)
    assert found, last
    return f"{found[1]} {found[2]}"


def test_it_is_ready_and_reloads(server: Server) -> None:
    """systemd has received READY=1; a reload reads keys and certificate, in the same process."""
    guest = server.guest
    assert (guest.shows("ActiveState"), guest.shows("SubState")) == ("active", "running")
    assert guest.shows("Type") == "notify"
    process = guest.shows("MainPID")
    guest.run("/opt/txnode/current/bin/python", "-m", "node.certificate", "/srv/pair", "--san", "renewed.example.com")
    guest.run("sh", "-c", "cat /srv/pair/key.pem >/var/lib/txnode/key.pem")
    guest.run("sh", "-c", "cat /srv/pair/certificate.pem >/var/lib/txnode/certificate.pem")
    guest.run("systemctl", "reload", "node")
    assert server.visit("start")["warnings"] == []  # Its controller pins the new certificate.
    assert guest.shows("MainPID") == process


def test_a_reload_is_an_upgrade(server: Server) -> None:
    """The same process runs another program, and users notice nothing."""
    server.visit("start")
    ready = _ready(server)
    with server.staying() as users:
        server.guest.run("systemctl", "reload", "node")
        until(lambda: _ready(server) > ready, 60, "it is ready again")
        until(lambda: server.guest.shows("SubState") == "running", 30, "systemd knows it")
        server.visit("use")
    assert not users["dropped"] and users["echoed"]
    assert server.guest.shows("NRestarts") == "0"


def test_the_node_is_killed(server: Server) -> None:
    """All users are disconnected, and served again within seconds."""
    server.visit("start")
    with server.staying() as users:
        _kill(server)
        server.visit("use")
    assert users["dropped"], users
    assert cast(float, users["longest"]) < SERVED


def test_the_node_is_killed_and_its_core_lives_on(server: Server) -> None:
    """With the drop-in no connection is dropped, and new users can connect all the time; a stop ends everything."""
    guest = server.guest
    guest.run("install", "-Dm644", "/srv/clone/deploy/node-adopt.conf", "/etc/systemd/system/node.service.d/adopt.conf")
    guest.run("systemctl", "daemon-reload")
    guest.run("systemctl", "restart", "node")
    server.visit("start")
    until(lambda: (guest.root / "var/lib/private/txnode/adopt/core").exists(), 20, "what the next node needs is there")
    with server.staying() as users:
        for _ in range(2):
            _kill(server)
            until(lambda: "goes on with the core" in _said(server), 30, "the next node goes on with it")
            server.visit("use")
    assert not users["dropped"] and users["echoed"]
    assert cast(float, users["longest"]) < 1
    guest.run("systemctl", "stop", "node")
    until(
        lambda: {process.name() for process in _processes(server)} & {"xray", "twistd", "python"} == set(),
        20,
        "all end",
    )


def _kill(server: Server) -> None:
    before = int(server.guest.shows("NRestarts"))
    server.guest.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "node")
    until(lambda: int(server.guest.shows("NRestarts")) > before, 30, "systemd has started it again")
    until(lambda: server.guest.shows("SubState") == "running", 30, "it is ready")


def _said(server: Server) -> str:
    """The log of the node's last process."""
    number = server.guest.shows("InvocationID")
    return server.guest.run("journalctl", f"_SYSTEMD_INVOCATION_ID={number}", "--no-pager")


def _ready(server: Server) -> int:
    return server.guest.run("journalctl", "--unit", "node", "--no-pager").count(" is ready: REST")


def test_users_are_served_in_the_sandbox(server: Server) -> None:
    """A core runs as the service's user, without a warning: the sandbox withholds nothing that the node needs.

    The documentation's exposure level is that of systemd.
    """
    assert server.visit("start")["warnings"] == []
    [core] = [process for process in _processes(server) if process.name() == "xray"]
    assert core.uids().real != 0
    assert f"`{_score(server)}`" in (CLONE / "docs" / "install.md").read_text()


def _processes(server: Server) -> list[psutil.Process]:
    """The guest's processes, with their outer pids."""
    return psutil.Process(server.guest.pid).children(recursive=True)


def test_a_node_that_hangs_is_started_again(server: Server) -> None:
    """A suspended node sends no watchdog notification: systemd ends it, and users are served again."""
    server.visit("start")
    server.guest.run("systemctl", "kill", "--kill-whom=main", "--signal=STOP", "node")
    until(lambda: server.guest.shows("NRestarts") == "1", 60, "systemd has started it again")
    assert "Watchdog timeout" in server.guest.run("journalctl", "--unit", "node", "--no-pager")
    until(lambda: server.guest.shows("SubState") == "running", 30, "it is ready")
    server.visit("use")


def test_it_stops_within_its_time(server: Server) -> None:
    """With a core and users the stop is clean, and no process is left."""
    server.visit("start")
    began = time.monotonic()
    server.guest.run("systemctl", "stop", "node")
    assert time.monotonic() - began < 20
    assert server.guest.shows("Result") == "success"
    assert {process.name() for process in _processes(server)} & {"xray", "twistd"} == set()


def test_users_are_served_after_a_reboot(server: Server) -> None:
    """Without a call of a controller the node resumes the backend that ran before the shutdown."""
    server.visit("start")
    server.guest.reboot()
    until(lambda: server.guest.shows("SubState") == "running", 30, "it is ready")
    assert server.visit("use")["warnings"] == []
