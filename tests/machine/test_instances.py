"""deploy/node@.conf under systemd, as docs/install.md says: a second node of one installation, beside the first."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from scripts.staging.wait import until
from tests.machine.conftest import CLONE, Server, Wheel


def _block() -> str:
    """The commands of docs/install.md for a second node."""
    section = (CLONE / "docs" / "install.md").read_text().partition("### A second node")[2]
    found = re.search(r"^```sh\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


def test_a_second_node_of_one_installation(server: Server, wheel: Callable[..., Wheel]) -> None:
    """It has its own user, state and doctor; neither the end nor the upgrade of one touches the other."""
    guest = server.guest
    guest.run("sh", "-euc", f"cd /srv/clone\n{_block()}")
    nodectl = "/opt/txnode/current/bin/nodectl"
    (guest.root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")  # the guest has none
    until(lambda: "stopped" in guest.run(nodectl, "--node", "two", "info", check=False), 60, "the second node serves")
    server.visit("start")
    units = ("node", "node@two")

    def users() -> list[str]:
        return [guest.run("stat", "-c", "%u", f"/proc/{guest.shows('MainPID', unit)}").strip() for unit in units]

    assert len({*users(), "0"}) == 3
    assert guest.run("stat", "-c", "%u", "/var/lib/txnode/", "/var/lib/txnode-two/").split() == users()
    told = guest.run(nodectl, "doctor", "--node", "two", check=False)
    own = guest.shows("MainPID", "node@two")
    [node] = guest.run("cat", f"/proc/{own}/task/{own}/children").split()
    assert re.search(rf"node +ok +process {node}\b", told), told
    assert "62061: ours" in told and "62051" not in told
    with server.staying() as visit:
        guest.run("systemctl", "reload", "node@two")
        guest.run("systemctl", "restart", "node@two")
        guest.run("systemctl", "kill", "--signal=KILL", "node@two")
        until(lambda: guest.shows("NRestarts", "node@two") == "1", 60, "systemd has started it again")
        guest.run("systemctl", "stop", "node@two")
        server.visit("use")
    assert not visit["dropped"] and visit["echoed"]
    guest.run("systemctl", "start", "node@two")
    process = guest.shows("MainPID", "node@two")
    server.install(*server.give(wheel("9.0.0")))
    until(
        lambda: "9.0.0" in guest.run(nodectl, "--node", "two", "info", check=False), 60, "it has the new version, too"
    )
    assert guest.shows("MainPID", "node@two") == process
    guest.run("/srv/clone/scripts/install", "--uninstall", "--purge")
    assert guest.shows("ActiveState", "node@two") == "inactive"
    left = [
        Path(guest.root, *place.parts[1:])
        for place in map(Path, ("/var/lib/txnode-two", "/etc/systemd/system/node@.service"))
    ]
    assert not any(place.exists() or place.is_symlink() for place in left)
