"""Another version of the node on disk: whole, or what was there before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import Clock

from node.errors import CoreFailed
from node.updates import program
from node.updates.jobs import Step
from node.updates.program import Program
from protos import service_pb2 as pb
from tests.node.updates.pool import pooled


class Disk:
    """Programs that are run, each by its last word; `pip` waits for what comes of it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.pip: list[Deferred[bytes]] = []
        self.commands: list[Sequence[str]] = []
        monkeypatch.setattr(program, "require_installable", lambda: None)
        monkeypatch.setattr(program, "distribution", lambda name: None)
        monkeypatch.setattr(program, "pack", self._pack)
        parts: tuple[Any, ...] = (pooled(Clock()), directory, self, "http://127.0.0.1", self._well, self._well)
        self.program = Program(*parts)

    @staticmethod
    def _pack(_: object, into: Path) -> None:
        into.mkdir(parents=True)
        (into / "before.whl").touch()

    @staticmethod
    async def _well(*_: object) -> str:
        return ""

    async def bring(self, step: Step, *words: str) -> Path:
        return Path("next.whl")

    async def run(self, step: Step, command: Sequence[str], **_: str) -> bytes:
        self.commands.append(command)
        if "--force-reinstall" not in command:
            return b""
        self.ran.append(Path(command[-1]).name)
        self.pip.append(Deferred())
        return await self.pip[-1]

    def update(self) -> Deferred[None]:
        jobs = SimpleNamespace(told=lambda job: None, kept=self._well)
        return ensureDeferred(self.program.update("1.0.1", "0" * 64, Step(pb.Job(), cast(Any, jobs))))


def test_an_installation_that_fails_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip does that for itself, but not where it was killed; and where that is no good either, it is said."""
    disk = Disk(tmp_path, monkeypatch)
    failed = disk.update()
    disk.pip[0].errback(CoreFailed("pip was killed"))
    assert disk.ran == ["next.whl", "before.whl"]
    disk.pip[1].errback(CoreFailed("No space left on device"))
    reasons: list[Any] = []
    failed.addErrback(reasons.append)
    assert "pip was killed" in reasons[0].value.text and "No space left" in reasons[0].value.text


def test_it_is_not_broken_off_when_the_node_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip ends first: half a node would not start again."""
    disk = Disk(tmp_path, monkeypatch)
    update, reasons = disk.update(), list[Any]()
    update.addErrback(reasons.append)
    update.cancel()
    assert not disk.pip[0].called
    disk.pip[0].callback(b"")
    assert disk.ran == ["next.whl", "before.whl"] and not reasons
    disk.pip[1].callback(b"")
    assert reasons[0].check(CancelledError)


def test_a_node_that_ends_before_it_became_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for minutes for a core that drains: what is said to have failed is not what starts next."""
    disk = Disk(tmp_path, monkeypatch)
    waiting: Deferred[str] = Deferred()
    monkeypatch.setattr(disk.program, "_become", lambda: waiting)
    update, reasons = disk.update(), list[Any]()
    update.addErrback(reasons.append)
    disk.pip[0].callback(b"")
    update.cancel()
    assert disk.ran == ["next.whl", "before.whl"] and not reasons
    disk.pip[1].callback(b"")
    assert reasons[0].check(CancelledError)


def test_pip_is_the_environments_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks for a module in the directory that it is called in first, and that may be anybody's."""
    disk = Disk(tmp_path, monkeypatch)
    disk.update()
    assert disk.commands and all(command[1:4] == ["-P", "-m", "pip"] for command in disk.commands)
