"""The packages of a release, and its wheel alone, on a Debian without a clone, a compiler or a network.

Each way is installed, serves the conformance suite, is upgraded under 200 live connections, and is removed.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import pytest

from scripts.packaging import deb, rpm
from scripts.staging.wait import until
from tests.harness.guest import Guest, Layers
from tests.machine.conftest import CLONE, Server, Wheel, bring_cores

LIVE = 200
# Seconds of a command that installs a version, on a busy machine.
INSTALLING = 600
NODECTL = "/opt/txnode/current/bin/nodectl"
OLD, NEW = "0.9.0", "9.0.0"
_INTO_TREE = """
mount -t proc proc "$0/proc"
mount --bind /dev "$0/dev"
exec chroot "$0" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive "$@"
"""

pytestmark = pytest.mark.timeout(1800)


@dataclass(frozen=True)
class Way:
    """A way to install: `packed` puts a version's file in a tree's /srv, and returns the command that installs it."""

    name: str
    packed: Callable[[Path, Wheel], list[str]]
    remove: tuple[str, ...]
    purge: tuple[str, ...]
    # What a removal leaves, besides state and settings; what the command needs in a chroot.
    left: tuple[str, ...] = ()
    in_chroot: tuple[str, ...] = ()


def _deb(root: Path, wheel: Wheel) -> list[str]:
    file = root / "srv" / f"txnode_{wheel.version}_all.deb"
    file.write_bytes(deb.package(wheel.file, wheel.version, deb.EARLIEST))
    return [*_APT, "install", f"/srv/{file.name}"]


def _wheel(root: Path, wheel: Wheel) -> list[str]:
    shutil.copy(wheel.file, root / "srv")
    shutil.copy(CLONE / "scripts" / "install", root / "srv" / "txnode-install")
    return ["/srv/txnode-install", "--from", f"/srv/{wheel.file.name}", "--sha256", wheel.digest]


_APT = ("apt-get", "-y", "-o", "APT::Sandbox::User=root")
_UNINSTALL = ("/srv/txnode-install", "--uninstall")
WAYS = (
    Way("deb", _deb, (*_APT, "remove", "txnode"), (*_APT, "purge", "txnode"), ("/etc/default/txnode",)),
    Way("wheel", _wheel, _UNINSTALL, (*_UNINSTALL, "--purge"), in_chroot=("--no-start",)),
)


@pytest.fixture(scope="session")
def bare(debian: Path, scratch: Path, wheelhouse: Path) -> Layers:
    """The Debian with packages and cores in the directories for servers without a network."""
    layers = Layers((debian,), scratch / "bare")
    with layers.mounted() as root:
        shutil.copytree(wheelhouse, root / "opt" / "txnode" / "wheels")
        bring_cores(root)
        (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")  # the guest has none
    return layers


@pytest.fixture(scope="session")
def image(bare: Layers, scratch: Path, wheel: Callable[..., Wheel]) -> Callable[[Way], Layers]:
    """The Debian with the old version, installed in a chroot, where no service can be started, and booted once.

    The first start moves the directory of the state, which an overlay of that tree could not.
    """

    @cache
    def make(way: Way) -> Layers:
        layers = Layers(bare.all, scratch / f"image-{way.name}")
        with layers.mounted() as root:
            said = _in_tree(root, "SSL_SANS=node.example.com", *way.packed(root, wheel(OLD)), *way.in_chroot)
            assert "installed, not started" in said and "names: node.example.com" in said
            with (root / "etc/txnode/node.env").open("a") as settings:
                settings.write("PROXY_TO_SERVER=allow\n")  # users' targets are on the guest's loopback
            with Guest(root) as guest:
                _until_ready(guest)
                guest.shut_down()
        return layers

    return make


def _in_tree(root: Path, *command: str) -> str:
    enter = ["unshare", "--mount", "sh", "-ec", _INTO_TREE, str(root), *command]
    done = subprocess.run(enter, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def _until_ready(guest: Guest) -> None:
    until(lambda: guest.shows("SubState") == "running", 120, "the node is ready")


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Way:
    return cast(Way, request.param)


@pytest.fixture
def server(image: Callable[[Way], Layers], way: Way, scratch: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server for this test alone, booted from the image."""
    directory = scratch / request.node.name
    with ExitStack() as stack:
        root = stack.enter_context(Layers(image(way).all, directory).mounted())
        guest = stack.enter_context(Guest(root))
        _until_ready(guest)
        yield Server(guest, directory / "visitor")


def test_it_serves_the_conformance_suite(server: Server) -> None:
    """The node that the image starts at boot passes both levels of the suite, over both protocols."""
    assert server.guest.run("sh", "-c", "command -v cc gcc c++ git", check=False) == ""
    assert server.guest.run("test", "-e", "/srv/clone", check=False) == ""
    ports = ("--address", "127.0.0.1:62051", "--grpc-port", "62050")
    call = (*ports, "--key", server.key, "--certificate", server.certificate, "--level", "beyond")
    suite = (sys.executable, "-m", "tests.conformance", *call)
    said = server.guest.network("env", f"--chdir={CLONE}", *suite, timeout=1500)
    assert "FAILED" not in said


def test_an_upgrade_disconnects_nobody(server: Server, way: Way, wheel: Callable[..., Wheel]) -> None:
    """The old version hands over to the new one: none of 200 live connections drops, and all new ones are served."""
    keeper = server.guest.shows("MainPID")
    assert OLD in _info(server)
    with server.crowded() as users:
        said = server.guest.run(*way.packed(server.guest.root, wheel(NEW)), timeout=INSTALLING)
        assert "users stay connected" in said and "runs and serves" in said
        assert NEW in _info(server)
    assert (users["live"], users["dropped"], users["failed"]) == (LIVE, [], [])
    assert cast(int, users["opened"]) > LIVE
    assert (server.guest.shows("MainPID"), server.guest.shows("NRestarts")) == (keeper, "0")


def test_a_version_that_fails(server: Server, way: Way, wheel: Callable[..., Wheel]) -> None:
    """The old version goes on without a dropped connection, and the command fails; the next version repairs it."""
    broken = wheel("9.0.1", "raise SystemExit('broken on purpose')")
    with server.crowded() as users:
        command = way.packed(server.guest.root, broken)
        said = server.guest.run(*command, check=False, timeout=INSTALLING)
        assert "broken on purpose" in said and "The previous version goes on" in said
        with pytest.raises(AssertionError):
            server.guest.run(*command, timeout=INSTALLING)
        assert OLD in _info(server)
        server.guest.run(*way.packed(server.guest.root, wheel("9.0.2")), timeout=INSTALLING)
        assert "9.0.2" in _info(server)
    assert (users["live"], users["dropped"], users["failed"]) == (LIVE, [], [])


def test_a_removal_and_a_purge(server: Server, way: Way, bare: Layers, wheel: Callable[..., Wheel]) -> None:
    """A removal leaves state and settings, with which another installation goes on; a purge leaves nothing."""
    guest = server.guest
    server.visit("start")
    guest.run(*way.remove)
    kept = ["/etc/txnode/node.env", "/var/lib/private/txnode/state.db", *way.left]
    assert [path for path in kept if not (guest.root / path[1:]).exists()] == []
    gone = ("/opt/txnode", "/etc/systemd/system/node.service", "/usr/lib/txnode", "/usr/bin/nodectl")
    assert [path for path in gone if (guest.root / path[1:]).exists()] == []
    assert guest.run("systemctl", "is-active", "node", check=False).strip() == "inactive"
    shutil.copytree(bare.directory / "upper/opt/txnode", guest.root / "opt/txnode")
    guest.run(*way.packed(guest.root, wheel(NEW)), timeout=INSTALLING)
    assert server.visit("use")["version"] == NEW
    guest.run(*way.purge)
    assert guest.run("find", "/", "-xdev", "-name", "*txnode*", "-not", "-path", "/srv/*").split() == []
    assert guest.run("find", "/etc/systemd", "-name", "node.service*") == ""


def test_a_service_that_the_operator_has_disabled(server: Server, way: Way, wheel: Callable[..., Wheel]) -> None:
    """Debian's package installs the new version and leaves the service disabled; the script starts it."""
    guest = server.guest
    guest.run("systemctl", "disable", "--now", "node")
    said = guest.run(*way.packed(guest.root, wheel(NEW)), timeout=INSTALLING)
    expected = ("inactive", "disabled") if way.name == "deb" else ("active", "enabled")
    assert "installed, not started" in said if way.name == "deb" else "runs and serves" in said
    assert (guest.shows("ActiveState"), guest.shows("UnitFileState")) == expected


def test_the_service_for_updates(server: Server, way: Way, wheel: Callable[..., Wheel]) -> None:
    """Off by default; Debian's package puts it in place by its configuration file, and a purge removes it."""
    guest, unit = server.guest, server.guest.root / "etc/systemd/system/txnode-update.path"
    assert not unit.exists() and guest.shows("ActiveState", "txnode-update.path") == "inactive"
    if way.name == "deb":
        key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
        with (guest.root / "etc/default/txnode").open("a") as settings:
            settings.write(f'UPDATE_URL="https://127.0.0.1/releases"\nUPDATE_KEY="{key}"\n')
        guest.run(*way.packed(guest.root, wheel(NEW)), timeout=INSTALLING)
        assert guest.shows("ActiveState", "txnode-update.path") == "active" and unit.exists()
        written = f"UPDATE_URL=https://127.0.0.1/releases\nUPDATE_KEY={key}\n"
        assert (guest.root / "etc/txnode/updates.env").read_text() == written
        guest.run(*way.purge)
        assert guest.run("find", "/etc", "-name", "*txnode*", "-o", "-name", "updates.env") == ""
        assert guest.shows("ActiveState", "txnode-update.path") == "inactive"


def test_dpkg_reads_the_package(wheel: Callable[..., Wheel], tmp_path: Path) -> None:
    """dpkg knows the settings of the installer as a configuration file, and sorts versions as Python does."""
    (tmp_path / "srv").mkdir()
    _deb(tmp_path, wheel(OLD))
    [file] = (tmp_path / "srv").iterdir()
    assert _output("dpkg-deb", "--info", file, "conffiles") == "/etc/default/txnode\n"
    listed = _output("dpkg-deb", "--contents", file)
    assert "./usr/bin/nodectl -> /opt/txnode/current/bin/nodectl" in listed
    versions = ("1.0.0", "1.1.0.dev5+gabc", "1.1.0.dev12+g0ab", "1.1.0rc1", "1.1.0", "1.1.1")
    for before, after in itertools.pairwise(map(deb.package_version, versions)):
        subprocess.run(["dpkg", "--compare-versions", before, "lt", after], check=True)


def test_the_rpm(wheel: Callable[..., Wheel], tmp_path: Path) -> None:
    """rpmbuild makes the same bytes twice, with the files of the Debian package and scripts that run the installer."""
    made = wheel(OLD)
    first, second = (rpm.package(made.file, OLD, _new(tmp_path / name), deb.EARLIEST) for name in ("1", "2"))
    assert first.read_bytes() == second.read_bytes()
    digests = _output("rpm", "-qp", "--qf", "[%{FILENAMES} %{FILEMODES:perms} %{FILEDIGESTS}\n]", first)
    for file in deb.payload(made.file):
        mode = "-rwxr-xr-x" if file.mode == 0o755 else "-rw-r--r--"
        line = f"/{file.name} {mode} {hashlib.sha256(file.content).hexdigest()}\n"
        assert not file.mode or line in digests
    assert _output("rpm", "-qcp", first) == "/etc/default/txnode\n"
    scripts = _output("rpm", "-qp", "--scripts", first)
    assert f"/usr/lib/txnode/configure /usr/lib/txnode/{made.file.name}" in scripts
    assert "/usr/lib/txnode/txnode-install --uninstall" in scripts


def _new(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _info(server: Server) -> str:
    """What nodectl shows of the node. Not in /, where it would take /var for the state of a clone."""
    command = "nodectl" if (server.guest.root / "usr/bin/nodectl").is_symlink() else NODECTL
    return server.guest.run("env", "--chdir=/root", command, "info")


def _output(*command: str | Path) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_the_scripts_are_clean() -> None:
    parts = CLONE / "deploy" / "packages"
    subprocess.run(["shellcheck", *(parts / name for name in ("configure", "postinst", "prerm", "postrm"))], check=True)
