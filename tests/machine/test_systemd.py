"""deploy/node.service under systemd, as `scripts/install` writes it: life cycle, sandbox, reboot."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import cast

import psutil
import pytest

from scripts.staging.node import is_node
from scripts.staging.wait import until
from tests.machine.conftest import CLONE, Server

# Seconds until users are served again after the keeper was killed: the unit's restart delay, and the start of the node
# and its core, on a busy machine.
SERVED = 8.0
# Seconds until a removed user's connections have ended.
OUT = 2.0


def _score(server: Server) -> str:
    """The exposure level of `systemd-analyze security`, of 10.0, and its label."""
    last = server.guest.run("systemd-analyze", "security", "--no-pager", "node").strip().splitlines()[-1]
    found = re.search(r"Overall exposure level for node\.service: ([\d.]+) (\w+)", last)
    assert found, last
    return f"{found[1]} {found[2]}"


def test_it_is_ready_and_reloads(server: Server) -> None:
    """systemd has received READY=1; a reload reads keys and certificate, below the same main process."""
    guest = server.guest
    assert (guest.shows("ActiveState"), guest.shows("SubState")) == ("active", "running")
    assert guest.shows("Type") == "notify"
    process, ready = guest.shows("MainPID"), _ready(server)
    guest.run("/opt/txnode/current/bin/python", "-m", "node.certificate", "/srv/pair", "--san", "renewed.example.com")
    guest.run("sh", "-c", "cat /srv/pair/key.pem >/var/lib/txnode/key.pem")
    guest.run("sh", "-c", "cat /srv/pair/certificate.pem >/var/lib/txnode/certificate.pem")
    guest.run("systemctl", "reload", "node")
    until(lambda: _ready(server) > ready, 60, "it is ready again")
    assert server.visit("start")["warnings"] == []  # Its controller pins the new certificate.
    assert guest.shows("MainPID") == process


def test_a_reload_is_an_upgrade(server: Server) -> None:
    """Another node goes on below the same keeper, and users notice nothing."""
    server.visit("start")
    ready, keeper, node = _ready(server), server.guest.shows("MainPID"), _node(server)
    with server.staying() as users:
        server.guest.run("systemctl", "reload", "node")
        until(lambda: _ready(server) > ready, 60, "it is ready again")
        until(lambda: server.guest.shows("SubState") == "running", 30, "systemd knows it")
        server.visit("use")
    assert not users["dropped"] and users["echoed"]
    assert server.guest.shows("NRestarts") == "0"
    assert (server.guest.shows("MainPID"), _node(server) == node) == (keeper, False)


def test_the_node_is_killed(server: Server) -> None:
    """No connection is dropped, new users can connect all the time, and systemd notices nothing; a stop ends all."""
    guest = server.guest
    server.visit("start")
    keeper = guest.shows("MainPID")
    with server.staying() as users:
        for _ in range(2):
            _goes_on(server, _node(server).kill, 30)
    assert not users["dropped"] and users["echoed"]
    assert cast(float, users["longest"]) < 1
    assert (guest.shows("MainPID"), guest.shows("NRestarts")) == (keeper, "0")
    guest.run("systemctl", "stop", "node")
    assert not _left(server)


def test_the_node_hangs(server: Server) -> None:
    """The keeper ends a suspended node before systemd's watchdog would end all: no connection is dropped."""
    guest = server.guest
    server.visit("start")
    with server.staying() as users:
        _goes_on(server, _node(server).suspend, 60)
    assert not users["dropped"] and users["echoed"]
    assert cast(float, users["longest"]) < 1
    assert guest.shows("NRestarts") == "0"
    assert "Watchdog timeout" not in guest.run("journalctl", "--unit", "node", "--no-pager")


@pytest.mark.parametrize("number", ["KILL", "STOP"])
def test_the_keeper_ends(server: Server, number: str) -> None:
    """All users are disconnected when the keeper is killed or hangs; systemd starts it, and they are served again."""
    server.visit("start")
    with server.staying() as users:
        server.guest.run("systemctl", "kill", "--kill-whom=main", f"--signal={number}", "node")
        until(lambda: server.guest.shows("NRestarts") == "1", 60, "systemd has started it again")
        until(lambda: server.guest.shows("SubState") == "running", 30, "it is ready")
        server.visit("use")
    assert users["dropped"], users
    if number == "KILL":
        assert cast(float, users["longest"]) < SERVED
    assert len([process for process in _processes(server) if process.name() == "xray"]) == 1


def _goes_on(server: Server, end: Callable[[], object], seconds: float) -> None:
    """End the node; wait until the next one goes on with the core, and users are counted."""
    before, node = _said(server).count("goes on with the core"), _node(server)
    end()
    until(lambda: _said(server).count("goes on with the core") > before, seconds, "the next node goes on with it")
    until(lambda: not node.is_running(), 10, "the node before has ended")
    server.visit("use")


def _node(server: Server) -> psutil.Process:
    """The node below the keeper."""
    processes = _processes(server)
    [keeper] = [process for process in processes if any("keeper" in word for word in process.cmdline())]
    [node] = [child for child in keeper.children() if is_node(child, keeper)]
    return node


def _left(server: Server) -> set[str]:
    """The names of the service's processes that run."""
    return {process.name() for process in _processes(server)} & {"xray", "twistd", "python"}


def _said(server: Server) -> str:
    """The log of the service since systemd started it."""
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


def test_removals_and_a_changed_configuration(server: Server) -> None:
    """Without privileges each removed user is out within 2 s, also of Shadowsocks-2022 and while two cores share ports.

    The others stay connected, those of the core before the change, too.
    """
    found = server.visit("remove")
    assert (found["warnings"], found["dropped"], found["kept"]) == ([], [], 2), _said(server)
    assert max(cast(dict[str, float], found["took"]).values()) < OUT, found
    assert server.guest.shows("NRestarts") == "0"
    assert "which ends all connections" not in _said(server)


def test_what_the_kernel_refuses(server: Server) -> None:
    """With a filter as in a container: a line in the log, a warning, and a finding of the doctor; users are served."""
    guest = server.guest
    (guest.root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")  # the guest has none
    assert [each["level"] for each in _mechanisms(server)] == ["ok"]
    dropped_in = guest.root / "etc/systemd/system/node.service.d"
    dropped_in.mkdir(parents=True)
    (dropped_in / "filter.conf").write_text("[Service]\nSystemCallFilter=~pidfd_getfd\n")
    guest.run("systemctl", "daemon-reload")
    guest.run("systemctl", "restart", "node")
    [warning] = cast(list[str], server.visit("start")["warnings"])
    assert warning.startswith("the kernel refuses duplicates of a core's sockets (pidfd_open, pidfd_getfd), so ")
    assert _said(server).count(warning) == 1
    assert [(each["level"], each["found"]) for each in _mechanisms(server)] == [("warn", warning)]


def _mechanisms(server: Server) -> list[dict[str, str]]:
    """The doctor's findings of them on the guest."""
    [found] = json.loads(server.guest.run("/opt/txnode/current/bin/nodectl", "doctor", "--json", check=False))
    return [each for each in found["result"] if each["name"] == "mechanisms"]


def _processes(server: Server) -> list[psutil.Process]:
    """The guest's processes, with their outer pids."""
    return psutil.Process(server.guest.pid).children(recursive=True)


def test_it_stops_within_its_time(server: Server) -> None:
    """With a core and users the stop is clean, and no process is left."""
    server.visit("start")
    began = time.monotonic()
    server.guest.run("systemctl", "stop", "node")
    assert time.monotonic() - began < 20
    assert server.guest.shows("Result") == "success"
    assert not _left(server)


def test_users_are_served_after_a_reboot(server: Server) -> None:
    """Without a call of a controller the node resumes the backend that ran before the shutdown."""
    server.visit("start")
    server.guest.reboot()
    until(lambda: server.guest.shows("SubState") == "running", 30, "it is ready")
    assert server.visit("use")["warnings"] == []
