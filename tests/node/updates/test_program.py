"""Installing another version of the node: completely, or the previous one again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import Clock

from node.base.errors import CoreFailed
from node.updates import program
from node.updates.jobs import Step
from node.updates.program import Program
from protos import service_pb2 as pb
from tests.node.updates.pool import pooled


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """The directory of the node's wheels."""
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


class Disk:
    """Records the programs that are run, each by its last argument; `pip` waits for its result."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.pip: list[Deferred[bytes]] = []
        self.commands: list[Sequence[str]] = []
        monkeypatch.setattr(program, "installation", lambda kept: (directory, None))
        monkeypatch.setattr(program, "require_writable", lambda place: None)
        monkeypatch.setattr(program, "pack", self._pack)
        kit: Any = SimpleNamespace(reactor=pooled(Clock()), tool=self, directory=directory.parent)
        self.upgrades = SimpleNamespace(test=self._test, wanted=self._well)
        self.program = Program(kit, directory / "kept", "http://127.0.0.1", cast(Any, self.upgrades))
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

    async def bring(self, step: Step, kind: str, into: Path, **_: object) -> Path:
        wheel = into / "next.whl"
        wheel.parent.mkdir(parents=True, exist_ok=True)
        wheel.touch()
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

    def update(self) -> Deferred[None]:
        jobs = SimpleNamespace(report=lambda job: None, save=self._well)
        return ensureDeferred(self.program.update("1.0.1", "0" * 64, Step(pb.Job(), cast(Any, jobs))))


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
