"""Hand-over files of a killed node, and the guard that kills its cores if no other node comes."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from twisted.internet.task import Clock

from node.adoption import guard, handover_files
from node.adoption.adoption import Adoption
from protos.handover_pb2 import Run, Standing
from scripts.staging.wait import until


def adoption(directory: Path) -> Adoption:
    return Adoption(cast(Any, Clock()), directory, True, 300.0, lambda: "mark", list)


def noted(directory: Path, boot: str) -> None:
    directory.mkdir(exist_ok=True)
    run = Run(pid=7, mark=f"{boot}:7:100")
    (directory / handover_files.FILE).write_bytes(Standing(format=handover_files.FORMAT, run=run).SerializeToString())


def test_after_a_reboot_numbers_are_those_of_others(tmp_path: Path) -> None:
    """A process with the same PID and start time after a reboot is not one of our cores."""
    noted(tmp_path, Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    assert adoption(tmp_path).begin() is not None
    noted(tmp_path, "another")
    assert adoption(tmp_path).begin() is None


def test_a_full_disk_is_no_reason_not_to_come_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core is adopted, and no guard takes this node for the dead one."""
    noted(tmp_path, Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    (tmp_path / guard.NODE).write_text("1 1")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("node.adoption.adoption.write_secret", full)
    assert adoption(tmp_path).begin() is not None
    assert guard.node(str(tmp_path)) is None


def test_what_was_half_written_goes(tmp_path: Path) -> None:
    """Half-written files of a killed node: they contain secrets, and would pile up."""
    for name in (".core.x7_ab", ".drains-12.x", ".node.y"):
        (tmp_path / name).touch()
    adoption(tmp_path).begin()
    assert {path.name for path in tmp_path.iterdir()} == {guard.NODE}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Path]:
    adoption(tmp_path).begin()
    yield tmp_path
    for process in guards(tmp_path):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def guards(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if guard.__file__ in process.cmdline() and str(directory) in process.cmdline():
                found.append(process)
    return found


def begin(directory: Path) -> None:
    words = [sys.executable, "-I", "-S", guard.__file__, str(directory), "mark", "300"]
    subprocess.run(words, check=True, timeout=10, env={})


@pytest.mark.parametrize("cores", [[], [1]])
def test_a_node_that_comes_while_a_guard_looks(
    cores: list[int], guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard of the new node finds the lock taken and exits: the old one has to stay, and kills no core."""
    (guarded / guard.NODE).write_text("1 1")
    ended: list[list[int]] = []

    def marked(_: bytes) -> list[int]:
        adoption(guarded).begin()
        return cores

    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) > 1:
            (guarded / guard.NODE).unlink()

    monkeypatch.setattr(guard, "marked", marked)
    monkeypatch.setattr(guard, "end", ended.append)
    monkeypatch.setattr("time.sleep", look)
    guard.watch(str(guarded), b"mark", 0.0)
    assert looks == [guard.LOOK] * 2 and not ended


def test_there_is_one_guard(guarded: Path) -> None:
    """However many nodes come, one after the other."""
    for _ in range(3):
        begin(guarded)
    until(lambda: len(guards(guarded)) == 1, 20, "the others end")
    (guarded / guard.NODE).unlink()
    until(lambda: not guards(guarded), 10, "it ends")
