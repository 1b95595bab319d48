"""Choosing a release of a core or geo files, going back, and full disks."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from node.updates import replaceable as records
from node.updates.jobs import Refused, Step
from node.updates.replaceable import LISTS, Kit, Record, ReplaceableCore, ReplaceableLists
from protos import service_pb2 as pb
from tests.node.updates.pool import pooled


def now(work: Coroutine[Deferred[Any], Any, None]) -> None:
    """Run work that never waits."""
    found: list[Any] = []
    Deferred.fromCoroutine(work).addBoth(found.append)
    if isinstance(found[0], Failure):
        found[0].raiseException()


class Host:
    """The parts that updates use; `taken` counts the switches."""

    def __init__(self, directory: Path, configured: str = "") -> None:
        self.directory, self.configured = directory, configured
        self.record = Record(directory / "chosen", {"xray": configured, LISTS: configured})
        self.record.load()
        self.choices = self.record.choices
        self.taken, self.refuses = 0, False

    async def bring(self, step: Step, kind: str, into: Path, **given: Any) -> Path:
        place = into / (f"xray-{given['version']}-x" if kind == "core" else next(iter(given["wanted"])))
        place.mkdir(parents=True, exist_ok=True)
        if kind == "core":
            (place / "xray").touch(0o755)
            return place / "xray"
        return place

    async def bring_in(self, core: str, use: Callable[[], None], back: Callable[[], None], due: object) -> bool:
        if self.refuses:
            raise Refused("it is not taken")
        self.taken += 1
        use()
        return True

    @property
    def step(self) -> Step:
        jobs = SimpleNamespace(report=lambda job: None)
        return Step(pb.Job(), cast(Any, jobs))

    @property
    def driver(self) -> Any:
        async def version() -> str:
            return str(self.choices.executables.get("xray", self.configured))

        return SimpleNamespace(name="xray", version=version)

    @property
    def core(self) -> ReplaceableCore:
        return ReplaceableCore(self.kit, self.driver)

    @property
    def lists(self) -> ReplaceableLists:
        return ReplaceableLists(self.kit, self.driver)

    @property
    def kit(self) -> Kit:
        parts: Any = self
        return Kit(pooled(Clock()), self.directory, parts, parts, self.record)

    def update(self, version: str) -> None:
        now(self.core.update(version, "", "http://127.0.0.1", self.step))

    def update_lists(self, name: str) -> None:
        now(self.lists.update({name: ""}, "http://127.0.0.1", self.step))


def test_back_is_what_ran_before(tmp_path: Path) -> None:
    """If an operator's setting overrode an earlier choice, back leads to the setting."""
    host = Host(tmp_path)
    host.update("1.0.0")
    host.update_lists("1.dat")
    again = Host(tmp_path, "/opt/xray")
    assert not again.choices.executables and again.choices.lists is None
    again.update("2.0.0")
    again.update_lists("2.dat")
    now(again.core.go_back(again.step))
    now(again.lists.go_back(again.step))
    assert not again.choices.executables and again.choices.lists is None
    now(again.core.go_back(again.step))
    assert again.choices.executables["xray"].parent.name == "xray-2.0.0-x"


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that cannot be saved is not brought into use, and the error has the reason."""
    host = Host(tmp_path)
    host.update("1.0.0")
    monkeypatch.setattr(records, "write_secret", full)
    for update in (lambda: host.update("2.0.0"), lambda: host.update_lists("1.dat")):
        with pytest.raises(Refused, match="No space left"):
            update()
    assert host.taken == 1 and host.choices.executables["xray"].parent.name == "xray-1.0.0-x"
    assert [place.name for place in (tmp_path / "cores").iterdir()] == ["xray-1.0.0-x"]
    assert not [*(tmp_path / "geo").iterdir()]


def test_a_disk_that_is_full_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what runs, and until when."""
    host = Host(tmp_path)
    save, saved = Record.save, list[Record]()

    def then_full(record: Record) -> None:
        saved.append(record)
        if len(saved) > 1:
            monkeypatch.setattr(records, "write_secret", full)
        save(record)

    monkeypatch.setattr(Record, "save", then_full)
    with pytest.raises(Refused, match=r"1\.0\.0.* only until the node restarts.*No space left"):
        host.update("1.0.0")


def test_an_unreadable_record_removes_nothing(tmp_path: Path) -> None:
    """Nothing is removed if the record cannot be read, or was written by a later version of the node."""
    host = Host(tmp_path)
    host.update("1.0.0")
    host.update_lists("1.dat")
    said = json.loads((tmp_path / "chosen").read_text())
    said["chosen"]["xray"]["of a later version"] = True
    (tmp_path / "chosen").write_text(json.dumps(said))
    again = Host(tmp_path)
    assert not again.choices.executables
    again.record.clear(tmp_path / "cores", tmp_path / "geo")
    again.refuses = True
    with pytest.raises(Refused, match="not taken"):
        again.update("2.0.0")
    assert "of a later version" in (tmp_path / "chosen").read_text()
    assert (tmp_path / "cores" / "xray-1.0.0-x" / "xray").exists() and (tmp_path / "geo" / "1.dat").exists()
