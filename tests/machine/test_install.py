"""`scripts/install` on a Debian with systemd: first and second run, upgrades that succeed or fail, removal."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

from node import NUMBER
from tests.machine.conftest import CLONE, Installed, Server, Wheel

_OURS = ("opt", "etc/txnode", "etc/systemd/system", "usr/local", "root", "home")


def _content(root: Path) -> dict[str, tuple[int, str]]:
    """Modification time and content of every file in the places that an install may change."""
    found = {}
    for place in _OURS:
        for path in sorted((root / place).rglob("*")):
            read = path.is_file() and not path.is_symlink()
            content = (
                hashlib.sha256(path.read_bytes()).hexdigest() if read else str(path.is_symlink() and path.readlink())
            )
            found[str(path)] = (path.lstat().st_mtime_ns, content)
    return found


def test_the_script_is_clean() -> None:
    subprocess.run(["shellcheck", CLONE / "scripts" / "install"], check=True)


def test_the_first_run_and_the_second(installed: Installed, server: Server) -> None:
    """The first run makes a node that serves users; the second changes nothing."""
    assert "serves" in installed.said
    assert "node.example.com" in installed.said
    assert server.visit("start")["warnings"] == []
    before, process = _content(server.guest.root), server.guest.shows("MainPID")
    assert "nothing to do" in server.install()
    assert server.guest.shows("MainPID") == process
    assert _content(server.guest.root) == before


def test_an_upgrade_and_the_way_back(server: Server, wheel: Callable[..., Wheel]) -> None:
    """The next version runs with the state of the previous one, and so does the previous one after a downgrade."""
    server.visit("start")
    assert "serves" in server.install(*server.give(wheel("9.1.0")))
    assert server.visit("use")["version"] == "9.1.0"
    assert "serves" in server.install("--version", NUMBER)
    assert server.visit("use")["version"] == NUMBER


def test_an_upgrade_that_does_not_come_up(server: Server, wheel: Callable[..., Wheel]) -> None:
    """The previous version runs again, with its backend and users, and the script's exit status reports the failure."""
    before = server.visit("start")["version"]
    said = server.install(*server.give(wheel("9.2.0", "raise SystemExit('broken on purpose')")), check=False)
    assert "broken on purpose" in said
    assert "The previous version runs again." in said
    assert server.visit("use")["version"] == before


def test_a_wheel_with_another_digest(server: Server, wheel: Callable[..., Wheel]) -> None:
    """A wheel with another digest is not installed."""
    given = server.give(wheel("9.3.0"))
    before, process = _content(server.guest.root), server.guest.shows("MainPID")
    assert "not installed" in server.install(*given[:-1], "0" * 64, check=False)
    assert server.guest.shows("MainPID") == process
    assert _content(server.guest.root) == before


def test_the_end(server: Server) -> None:
    """A removal keeps state and settings for a later install; with --purge it keeps nothing."""
    server.visit("start")
    server.install("--uninstall")
    assert not (server.guest.root / "opt" / "txnode").exists()
    assert not (server.guest.root / "etc" / "systemd" / "system" / "node.service").exists()
    assert server.guest.run("systemctl", "is-active", "node", check=False).strip() == "inactive"
    assert (server.guest.root / "var" / "lib" / "private" / "txnode" / "state.db").exists()
    server.install("--uninstall", "--purge")
    left = server.guest.run("find", "/", "-xdev", "-name", "*txnode*", "-not", "-path", "/srv/*").split()
    assert left == []
    assert server.guest.run("find", "/etc/systemd", "-name", "node.service*") == ""
