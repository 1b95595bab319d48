"""Cores that a dead node left behind: the sweep ends them, and nothing else."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from drivers.process.orphans import MARK, mark, sweep
from scripts.staging.process import tied
from scripts.staging.wait import until

ROOT = Path(__file__).parents[3]


@pytest.fixture
def idle() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of the test, all ended at its end."""
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for child in running:
        child.kill()
        child.wait()


def marked(running: list[subprocess.Popen[bytes]], owner: str | None) -> subprocess.Popen[bytes]:
    """Start a process that sleeps, with the mark of an owner."""
    environment = {} if owner is None else {MARK: owner}
    child = tied(["/bin/sleep", "60"], env=environment)
    running.append(child)
    process = psutil.Process(child.pid)
    # setpriv has the same environment, and the kernel shows an empty one while it becomes sleep.
    until(lambda: process.cmdline() == ["/bin/sleep", "60"] and process.environ() == environment, 5, "it was executed")
    return child


def test_the_sweep_ends_orphans_and_nothing_else(idle: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Processes with the owner's mark have ended on return; others run on. The sockets are removed."""
    (tmp_path / "x").mkdir()
    ours = [marked(idle, mark(tmp_path)) for _ in range(2)]
    others = [marked(idle, owner) for owner in (mark(tmp_path / "x"), mark(tmp_path)[:-1], str(tmp_path), "", None)]
    (tmp_path / "left.sock").touch()
    assert sorted(sweep(tmp_path)) == sorted(child.pid for child in ours)
    assert [child.wait(5) for child in ours] == [-signal.SIGKILL] * 2
    assert [child.poll() for child in others] == [None] * 5
    assert sweep(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_sweep_on_a_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets that cannot be removed keep no node from starting."""
    (tmp_path / "left.sock").touch()

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", read_only)
    assert sweep(tmp_path) == []


def test_the_sweep_goes_by_the_directory(idle: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """A core belongs to a directory, not to its path: another node may have another directory at the same path."""
    here, moved = tmp_path / "run", tmp_path / "moved"
    here.mkdir()
    core = marked(idle, mark(here))
    here.rename(moved)
    here.mkdir()
    assert sweep(here) == []
    assert core.poll() is None
    assert sweep(moved) == [core.pid]


def test_the_sweep_spares_itself(tmp_path: Path) -> None:
    """A node that was started in the environment of a core does not kill itself."""
    code = "import os, pathlib, sys; from drivers.process.orphans import sweep; print(sweep(pathlib.Path(sys.argv[1])))"
    argv = [sys.executable, "-c", code, str(tmp_path)]
    environment = {"PATH": os.defpath, MARK: mark(tmp_path)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_orphan_that_ends_meanwhile(
    idle: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core that exits between the search and the kill is no error."""
    found = [psutil.Process(marked(idle, mark(tmp_path)).pid) for _ in range(2)]

    def listing() -> Iterator[psutil.Process]:
        yield from found
        idle[0].kill()
        idle[0].wait()

    monkeypatch.setattr(psutil, "process_iter", listing)
    assert idle[1].pid in sweep(tmp_path)
    assert idle[1].wait(5) == -signal.SIGKILL
