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
    """The node hands over to the next version, and back to the previous one: no user is disconnected."""
    server.visit("start")
    keeper = server.guest.shows("MainPID")
    with server.staying() as users:
        for arguments, version in ((server.give(wheel("9.1.0")), "9.1.0"), (["--version", NUMBER], NUMBER)):
            assert "serves" in server.install(*arguments)
            assert server.visit("use")["version"] == version
    assert not users["dropped"] and users["echoed"]
    assert (server.guest.shows("MainPID"), server.guest.shows("NRestarts")) == (keeper, "0")


def test_an_upgrade_without_a_start(server: Server, wheel: Callable[..., Wheel]) -> None:
    """With --no-start the running version stays, until the script runs again."""
    before = server.visit("start")["version"]
    given = server.give(wheel("9.6.0"))
    with server.staying() as users:
        assert "installed, not started" in server.install(*given, "--no-start")
        assert server.visit("use")["version"] == before
        assert "users stay connected" in server.install(*given)
        assert server.visit("use")["version"] == "9.6.0"
    assert not users["dropped"] and users["echoed"]


def test_versions_that_wait_for_a_start_and_fail(server: Server, wheel: Callable[..., Wheel]) -> None:
    """The version that runs stays on disk and goes on, though the link names one that was never tried."""
    before, link = server.visit("start")["version"], server.guest.root / "opt/txnode/current"
    linked = link.readlink()
    broken = server.give(wheel("9.2.0", "raise SystemExit('broken on purpose')"))
    with server.staying() as users:
        for given in (server.give(wheel("9.6.0")), broken):
            server.install(*given, "--no-start")
        said = server.install(*broken, check=False)
        assert "The previous version goes on, and no connection ended." in said
        assert server.visit("use")["version"] == before
    assert not users["dropped"] and users["echoed"]
    assert link.readlink() == linked
    server.guest.run("test", "-x", f"{linked}/bin/twistd")
    server.guest.run("systemctl", "restart", "node")
    assert server.visit("use")["version"] == before


def test_an_upgrade_with_another_unit(server: Server, wheel: Callable[..., Wheel]) -> None:
    """A changed comment needs no restart; a changed line does, and the script says what that ends."""
    server.visit("start")
    unit, keeper = server.guest.root / "etc/systemd/system/node.service", server.guest.shows("MainPID")
    shipped = unit.read_text()
    unit.write_text(f"# an older comment\n{shipped}")
    assert "users stay connected" in server.install(*server.give(wheel("9.4.0")))
    assert (server.guest.shows("MainPID"), unit.read_text()) == (keeper, shipped)
    unit.write_text(shipped.replace("PrivateTmp=yes", "PrivateTmp=no"))
    assert "which ends all connections: /etc/systemd/system/node.service changes" in server.install(
        "--version", "9.4.0"
    )
    assert server.guest.shows("MainPID") != keeper
    assert server.visit("use")["version"] == "9.4.0"


def test_an_upgrade_that_does_not_come_up(server: Server, wheel: Callable[..., Wheel]) -> None:
    """The previous version goes on with its users, and the script says why; the same after a restart, without users."""
    before, link = server.visit("start")["version"], server.guest.root / "opt/txnode/current"
    broken, linked = server.give(wheel("9.2.0", "raise SystemExit('broken on purpose')")), link.readlink()
    with server.staying() as users:
        said = server.install(*broken, check=False)
        assert "broken on purpose" in said
        assert "The previous version goes on, and no connection ended." in said
        assert server.visit("use")["version"] == before
    assert not users["dropped"] and users["echoed"]
    assert link.readlink() == linked
    with (server.guest.root / "etc/systemd/system/node.service").open("a") as unit:
        unit.write("LimitNPROC=10000\n")
    said = server.install(*broken, check=False)
    assert "broken on purpose" in said
    assert "The previous version runs again." in said
    assert server.visit("use")["version"] == before


def test_a_version_that_is_not_ready(server: Server, wheel: Callable[..., Wheel]) -> None:
    """A version that takes over, but does not serve, hands back: no user is disconnected."""
    before = server.visit("start")["version"]
    faults = "property(lambda self: {'state': 'broken on purpose'}, lambda *_: None)"
    unready = f"import node.metrics.readiness as _r\n_r.Readiness.faults = {faults}"
    with server.staying() as users:
        said = server.install(*server.give(wheel("9.5.0", unready)), check=False)
        assert "The previous version runs again, and no connection ended." in said
        assert server.visit("use")["version"] == before
    assert not users["dropped"] and users["echoed"]


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
