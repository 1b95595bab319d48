"""Fixtures of the machine tests: a Debian, wheels of this clone, a server on which `scripts/install` ran.

TXNODE_TEST_DEBIAN is a directory that keeps the Debian for later runs; without it each run takes a minute to make one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from scripts.packaging.version import WRITTEN, text_of
from scripts.staging.core import find_xray
from scripts.staging.sing_box import find_sing_box
from scripts.staging.wait import until
from tests.harness.guest import Guest, Layers

CLONE = Path(__file__).parents[2]
_HERE = Path(__file__).parent
_PACKAGES = "python3,python3-venv,ca-certificates,systemd,systemd-sysv,dbus,openrc,openssh-client"
_LOCK = "deploy/requirements.txt"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.machine)
            item.add_marker(pytest.mark.core)


@pytest.fixture(scope="session")
def debian() -> Iterator[Path]:
    """The file tree of a Debian 12 with Python and systemd."""
    kept = os.environ.get("TXNODE_TEST_DEBIAN")
    # Not below /tmp, which may be in memory.
    root = Path(kept or f"/var/tmp/txnode-debian-{os.getpid()}")
    if not root.is_dir():
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root)]
        subprocess.run(command, check=True)
    yield root
    if not kept:
        shutil.rmtree(root)


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A directory on a file system that supports overlays."""
    directory = Path(f"/var/tmp/txnode-machine-{os.getpid()}")
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def clone(scratch: Path) -> Path:
    """A copy of this clone's files that git tracks."""
    copy = scratch / "clone"
    copy.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=CLONE, capture_output=True, check=True).stdout
    subprocess.run(["cp", "--parents", "-t", copy, *listed.decode().split("\0")[:-1]], cwd=CLONE, check=True)
    return copy


@dataclass(frozen=True)
class Wheel:
    """A wheel of this project, and its version."""

    file: Path
    version: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.file.read_bytes()).hexdigest()


@pytest.fixture(scope="session")
def wheel(clone: Path, scratch: Path) -> Callable[..., Wheel]:
    """Build a wheel of this clone with another version, and with a line added to `node/tap.py`."""

    @cache
    def make(version: str, line: str = "") -> Wheel:
        directory = scratch / f"wheel-{version}"
        shutil.copytree(clone, directory)
        (directory / WRITTEN).write_text(text_of(version))
        with (directory / "node" / "tap.py").open("a") as tap:
            tap.write(f"{line}\n")
        _pip("wheel", "--no-deps", "--wheel-dir", str(scratch / "made"), str(directory))
        return Wheel(next((scratch / "made").glob(f"txnode-{version}-*.whl")), version)

    return make


@pytest.fixture(scope="session")
def wheelhouse(scratch: Path) -> Path:
    """All packages of the lock for Debian 12's Python, as a guest cannot reach an index."""
    house = scratch / "wheels"
    python = ("--python-version=3.11", "--only-binary=:all:")
    _pip("download", "--require-hashes", "-r", str(CLONE / _LOCK), *python, "-d", str(house))
    return house


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True, cwd="/")


@dataclass(frozen=True)
class Server:
    """A guest with this clone in /srv/clone, and clients of it."""

    guest: Guest
    visitor: Path

    def install(self, *arguments: str, check: bool = True) -> str:
        """Run `scripts/install`, with the wheelhouse as pip's only source. Returns its output."""
        pip = ("PIP_NO_INDEX=1", "PIP_FIND_LINKS=/srv/wheels")
        return self.guest.run("env", *pip, "/srv/clone/scripts/install", *arguments, check=check)

    def visit(self, what: str) -> dict[str, object]:
        """Run `tests.machine.visit`."""
        return _last_of(self.guest.network(*self._visit(what)))

    def staying(self) -> AbstractContextManager[dict[str, object]]:
        """Inside, a user stays connected, and others connect repeatedly. The dictionary is filled at the end."""
        return self._connected("stay")

    def crowded(self) -> AbstractContextManager[dict[str, object]]:
        """Inside, ten users of an Xray of their own keep 200 connections, and make new ones."""
        return self._connected("crowd")

    @contextmanager
    def _connected(self, what: str) -> Iterator[dict[str, object]]:
        found: dict[str, object] = {}
        there, over = (self.visitor.with_name(f"{self.visitor.name}.{word}") for word in ("there", "over"))
        for file in (there, over):
            file.unlink(missing_ok=True)
        with ThreadPoolExecutor(1) as pool:
            visit = pool.submit(self.guest.network, *self._visit(what), timeout=600)
            try:
                until(lambda: there.exists() or visit.done(), 60, "the users are connected")
                yield found
            finally:
                over.touch()
            found |= _last_of(visit.result())

    @property
    def key(self) -> str:
        [key] = re.findall(r"^API_KEY=(.*)$", (self.guest.root / "etc/txnode/node.env").read_text(), re.MULTILINE)
        return str(key)

    @property
    def certificate(self) -> Path:
        return self.guest.root / "var/lib/private/txnode/certificate.pem"

    def _visit(self, what: str) -> Sequence[str | Path]:
        module = ("-m", "tests.machine.visit")
        return ["env", f"--chdir={CLONE}", sys.executable, *module, what, self.certificate, self.key, self.visitor]

    def give(self, wheel: Wheel) -> list[str]:
        """Copy the wheel to the guest. Returns the arguments of `scripts/install` for it."""
        shutil.copy(wheel.file, self.guest.root / "srv")
        return ["--from", f"/srv/{wheel.file.name}", "--sha256", wheel.digest]


def _last_of(said: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(said.splitlines()[-1])
    return found


@pytest.fixture(scope="session")
def supplied(debian: Path, scratch: Path, clone: Path, wheelhouse: Path) -> Layers:
    """The Debian with the clone, the wheels and the cores, which a server would download."""
    layers = Layers((debian,), scratch / "supplied")
    with layers.mounted() as root:
        shutil.copytree(clone, root / "srv" / "clone")
        shutil.copytree(wheelhouse, root / "srv" / "wheels")
        bring_cores(root)
    return layers


def bring_cores(root: Path) -> None:
    """Give a tree the cores, and nothing to wait for: its guest has no network."""
    for core in (find_xray(), find_sing_box()):
        shutil.copytree(core.parent, root / "opt" / "txnode" / "cores" / core.parent.name)
    (root / "etc/systemd/system/systemd-networkd-wait-online.service").symlink_to("/dev/null")


@dataclass(frozen=True)
class Installed:
    """The layers of a server on which `scripts/install` ran once, and its output."""

    layers: Layers
    said: str


@pytest.fixture(scope="session")
def installed(supplied: Layers, scratch: Path) -> Installed:
    layers = Layers(supplied.all, scratch / "installed")
    with layers.mounted() as root, Guest(root) as guest:
        said = Server(guest, scratch / "nobody").install("--san", "node.example.com")
        with (root / "etc/txnode/node.env").open("a") as settings:
            settings.write("PROXY_TO_SERVER=allow\n")  # users' targets are on the guest's loopback
        guest.shut_down()
    return Installed(layers, said)


@pytest.fixture
def server(installed: Installed, scratch: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server for this test alone, whose node is up."""
    directory = scratch / request.node.name
    with ExitStack() as stack:
        root = stack.enter_context(Layers(installed.layers.all, directory).mounted())
        guest = stack.enter_context(Guest(root))
        yield Server(guest, directory / "visitor")
