"""Installing another version of the node: completely, or the previous one again; and which versions are refused."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import Clock

from node import __version__
from node.base.errors import CoreFailed
from node.updates import program
from node.updates.jobs import Refused, Step
from node.updates.program import Program, require_newer, require_release
from protos import service_pb2 as pb
from tests.node.updates.pool import pooled

VERSION = "1.0.1"


def wheel(version: str = VERSION, name: str = "txnode", told: str = "", **more: str) -> bytes:
    """A wheel with its description of itself, and more members. `told`: what it says its version is."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {told or version}\n\nText\n"
        archive.writestr(f"{name}-{version}.dist-info/METADATA", text)
        for member, text in more.items():
            archive.writestr(member, text)
    return packed.getvalue()


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """The directory of the node's wheels."""
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


class Disk:
    """Records the programs that are run, each by its last argument; `pip` waits for its result."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, keys: Sequence[str] = ()) -> None:
        self.ran: list[str] = []
        self.asked: list[tuple[str, Mapping[str, object]]] = []
        self.offered, self.latest = wheel(), ""
        self.pip: list[Deferred[bytes]] = []
        self.commands: list[Sequence[str]] = []
        monkeypatch.setattr(program, "installation", lambda kept: (directory, None))
        monkeypatch.setattr(program, "require_writable", lambda place: None)
        monkeypatch.setattr(program, "pack", self._pack)
        kit: Any = SimpleNamespace(reactor=pooled(Clock()), tool=self, directory=directory.parent)
        self.upgrades = SimpleNamespace(test=self._test, wanted=self._well)
        self.program = Program(kit, directory / "kept", "http://127.0.0.1", cast(Any, self.upgrades), keys)
        self.refused = ""

    @staticmethod
    def _pack(_: object, into: Path) -> None:
        into.mkdir(parents=True)
        (into / "before.whl").touch()

    @staticmethod
    async def _well(*_: object) -> str:
        return ""

    async def _test(self, modules: Path) -> str:
        if self.refused:
            raise CoreFailed(self.refused)
        return ""

    async def ask(self, step: Step, kind: str, into: Path, **parameters: object) -> str:
        self.asked.append((kind, parameters))
        return self.latest

    async def bring(self, step: Step, kind: str, into: Path, **parameters: object) -> Path:
        self.asked.append((kind, parameters))
        wheel = into / "next.whl"
        wheel.parent.mkdir(parents=True, exist_ok=True)
        wheel.write_bytes(self.offered)
        return wheel

    async def run(self, step: Step, command: Sequence[str], **_: str) -> bytes:
        self.commands.append(command)
        if "--target" in command:
            Path(command[command.index("--target") + 1], "node").mkdir(parents=True)
        if "--force-reinstall" not in command:
            return b""
        self.ran.append(Path(command[-1]).name)
        self.pip.append(Deferred())
        return await self.pip[-1]

    def update(self, version: str = VERSION, sha256: str = "0" * 64) -> Deferred[None]:
        return ensureDeferred(self.program.update(version, sha256, self._step()))

    def update_to_newest(self) -> Deferred[None]:
        return ensureDeferred(self.program.update_to_newest(self._step()))

    def _step(self) -> Step:
        return Step(pb.Job(), cast(Any, SimpleNamespace(report=lambda job: None, save=self._well)))


def test_an_installation_that_fails_is_put_back(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip restores files itself unless it is killed. If restoring fails as well, the error reports it."""
    disk = Disk(wheels, monkeypatch)
    failed = disk.update()
    disk.pip[0].errback(CoreFailed("pip was killed"))
    assert disk.ran == ["next.whl", "before.whl"]
    disk.pip[1].errback(CoreFailed("No space left on device"))
    reasons: list[Any] = []
    failed.addErrback(reasons.append)
    assert "pip was killed" in reasons[0].value.text and "No space left" in reasons[0].value.text


def test_pip_is_not_cancelled_when_the_node_stops(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node waits for it: a half-installed node would not start."""
    disk = Disk(wheels, monkeypatch)
    update, reasons = disk.update(), list[Any]()
    update.addErrback(reasons.append)
    update.cancel()
    assert not disk.pip[0].called
    disk.pip[0].callback(b"")
    assert disk.ran == ["next.whl", "before.whl"] and not reasons
    disk.pip[1].callback(b"")
    assert reasons[0].check(CancelledError)


def test_a_node_that_stops_before_its_upgrade(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upgrade may wait for minutes: the next start must not run a version that was reported as failed."""
    disk = Disk(wheels, monkeypatch)
    waiting: Deferred[str] = Deferred()
    disk.upgrades.wanted = lambda: waiting
    update, reasons = disk.update(), list[Any]()
    update.addErrback(reasons.append)
    disk.pip[0].callback(b"")
    update.cancel()
    assert disk.ran == ["next.whl", "before.whl"] and not reasons
    disk.pip[1].callback(b"")
    assert reasons[0].check(CancelledError)


def test_pip_is_that_of_the_environment(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python searches the working directory first, which others may be able to write."""
    disk = Disk(wheels, monkeypatch)
    disk.update()
    assert disk.commands and all(command[1:4] == ["-P", "-m", "pip"] for command in disk.commands)


def test_a_refused_wheel_leaves_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel and its unpacked files for the test are removed."""
    disk, reasons = Disk(wheels, monkeypatch), list[Any]()
    disk.refused = "it cannot take over"
    disk.update().addErrback(reasons.append)
    assert reasons[0].value.text == disk.refused and not disk.ran
    assert not [*wheels.iterdir()]


def test_a_failed_wheel_leaves_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous version is installed again, and the wheel is removed."""
    disk, reasons = Disk(wheels, monkeypatch), list[Any]()
    disk.update().addErrback(reasons.append)
    disk.pip[0].errback(CoreFailed("pip was killed"))
    disk.pip[1].callback(b"")
    assert reasons[0].value.text == "pip was killed"
    assert [path.name for path in wheels.iterdir()] == ["before"]


def test_a_disk_without_room_for_the_old_version(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job reports it in one sentence, and nothing is installed."""
    disk, reasons = Disk(wheels, monkeypatch), list[Any]()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "before.whl")

    monkeypatch.setattr(program, "pack", full)
    disk.update().addErrback(reasons.append)
    assert reasons[0].value.text == "before.whl cannot be written: No space left on device"
    assert not disk.ran and not [*wheels.iterdir()]


def failure(update: Deferred[None]) -> str:
    """The text with which an update was refused."""
    reasons: list[Any] = []
    update.addErrback(reasons.append)
    assert reasons[0].check(Refused), reasons
    return str(reasons[0].value.text)


WRONG: Mapping[str, tuple[bytes, str]] = {
    "an older version under this name": (wheel("1.0.0"), "has 'txnode-1.0.0.dist-info/METADATA'"),
    "another package": (wheel(name="txnode_client"), "has 'txnode_client-1.0.1.dist-info/METADATA'"),
    "another version in its text": (wheel(told="1.0.0"), "says that it is txnode 1.0.0"),
    "other bytes": (wheel().replace(b"Name: txnode", b"Name: txmode"), "damaged"),
    "two packages": (wheel(**{"other-1.dist-info/METADATA": ""}), "other-1.dist-info"),
    "no package": (b"", "damaged"),
    "no archive": (b"<html>", "damaged"),
    "half an archive": (wheel()[:-30], "damaged"),
}


@pytest.mark.parametrize("keys", [(), ("ssh-ed25519 AAAA",)])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wheel_of_something_else(
    wrong: str, keys: Sequence[str], wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server can offer an old wheel, which is signed as well, under the new name. Nothing is run, nothing is kept."""
    disk = Disk(wheels, monkeypatch, keys)
    disk.offered, words = WRONG[wrong]
    text = failure(disk.update())
    assert re.search(words, text) and text.endswith("not installed"), text
    assert disk.commands == [] and not [*wheels.iterdir()]


def test_a_long_description(tmp_path: Path) -> None:
    """It is not unpacked: a small archive may hold gigabytes."""
    with zipfile.ZipFile(tmp_path / "one.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("txnode-1.0.1.dist-info/METADATA", "x" * (program.METADATA + 1))
    with pytest.raises(Refused, match=r"is not txnode 1\.0\.1"):
        require_release(tmp_path / "one.whl", VERSION)


def test_what_vouches_for_a_wheel(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of the request, or a signature by the keys, which are passed on; one of them is needed."""
    disk = Disk(wheels, monkeypatch)
    assert "--sha256 DIGEST); with UPDATE_KEY" in failure(disk.update(sha256=""))
    assert disk.asked == []
    disk = Disk(wheels, monkeypatch, ["ssh-ed25519 AAAA"])
    disk.update(sha256="")
    url = "http://127.0.0.1/txnode-1.0.1-py3-none-any.whl"
    assert disk.asked == [("wheel", {"url": url, "sha256": "", "keys": ["ssh-ed25519 AAAA"]})]
    assert len(disk.pip) == 1


@pytest.mark.parametrize(
    ("latest", "running", "words"),
    [
        ("1.0.0", "1.0.1", "1.0.0, and 1.0.1 runs, which is newer: .* nodectl update node 1.0.0"),
        ("1.9.0", "1.10.0", "1.10.0 runs"),
        ("1.1.0rc1", "1.1.0", "1.1.0 runs"),
        ("1.1.0.dev3+gabcdef0", "1.1.0", "1.1.0 runs"),
        ("1.0", "1.0.0", "1.0.0 runs"),
        ("newest", "1.0.0", "'newest', which is not a version"),
        ("../1.0.1", "1.0.0", "not a version"),
    ],
)
def test_a_newest_version_that_is_not_newer(latest: str, running: str, words: str) -> None:
    """A server may offer an old version with a known weakness, and its signature."""
    with pytest.raises(Refused, match=words):
        require_newer(latest, running)


@pytest.mark.parametrize(
    ("latest", "running"),
    [("1.10.0", "1.9.0"), ("1.1.0", "1.1.0.dev7+gabcdef0"), ("1.1.0", "1.1.0rc1"), ("2.0.0", "1.99.99")],
)
def test_a_newest_version_that_is_newer(latest: str, running: str) -> None:
    require_newer(latest, running)


@pytest.mark.parametrize("signed", [False, True])
def test_the_newest_version(signed: bool, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running one is the result; an older one is not even downloaded; a newer one is."""
    disk = Disk(wheels, monkeypatch, ["ssh-ed25519 AAAA"] if signed else [])
    disk.latest = f"{__version__} {'0' * 64}"
    assert disk.update_to_newest().called and not disk.pip
    disk.latest = f"0.0.1 {'0' * 64}"
    assert "which is newer" in failure(disk.update_to_newest())
    assert {kind for kind, _ in disk.asked} == {"latest"}
    disk.latest, disk.offered = "99.0.0" if signed else f"99.0.0 {'1' * 64}", wheel("99.0.0")
    disk.update_to_newest()
    kind, parameters = disk.asked[-1]
    assert (kind, parameters["sha256"]) == ("wheel", "" if signed else "1" * 64) and len(disk.pip) == 1
