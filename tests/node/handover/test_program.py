"""The command of the node, how the next version is started, and the way back."""

from __future__ import annotations

import errno
import shutil
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure
from twisted.python.threadpool import ThreadPool

from node import __version__
from node.handover import program
from node.handover.program import CHECK, KEPT, PATH, Program, Refused
from node.handover.upgrade import Upgrades
from scripts.staging.wait import until

T = TypeVar("T")


@dataclass
class Tried:
    code: int
    lines: Sequence[str]


def now(work: Coroutine[Deferred[Any], Any, T]) -> T:
    """The result of work that waits for nothing."""
    found: list[Any] = []
    Deferred.fromCoroutine(work).addBoth(found.append)
    if isinstance(found[0], Failure):
        found[0].raiseException()
    return cast(T, found[0])


WELL = {"nodaemon": True, "pidfile": ""}


@pytest.mark.parametrize(
    ("words", "argv", "options", "reason"),
    [
        (["python"], [""], WELL, "twistd"),
        (["python", "-m", "twisted"], ["/lib/twisted/__main__.py"], WELL, "twistd"),
        (["python", "twistd", "node"], ["twistd", "node"], {"nodaemon": False, "pidfile": ""}, "--nodaemon"),
        (["python", "twistd", "node"], ["twistd", "node"], {"nodaemon": True, "pidfile": "a"}, "--pidfile="),
    ],
)
def test_what_cannot_be_run_again(
    words: list[str], argv: list[str], options: dict[str, object], reason: str, tmp_path: Path
) -> None:
    """The error says how the node has to be started."""
    found = Program.of(words, argv, options, tmp_path)
    assert isinstance(found, str) and reason in found


def test_a_program_that_can_be_run_again(tmp_path: Path) -> None:
    """By the absolute paths of interpreter and script, whatever the directory."""
    argv, twistd = ["bin/twistd", "--nodaemon", "node"], str(Path.cwd() / "bin" / "twistd")
    found = Program.of([sys.executable, *argv], argv, WELL, tmp_path)
    assert isinstance(found, Program)
    assert found.argv == (sys.executable, twistd, "--nodaemon", "node")
    assert found.kept == tmp_path
    # With options of the interpreter, also beside this version.
    found = Program.of([sys.executable, "-X", "dev", *argv], argv, WELL, tmp_path)
    assert isinstance(found, Program)
    assert found.beside("/attempt.py") == [*(sys.executable, "-X", "dev", "/attempt.py", twistd, "--nodaemon", "node")]


def test_the_way_back(tmp_path: Path) -> None:
    """The same command, with the copy first in the module search path, and what restores that path; or no copy."""
    one = Program(("python", "twistd"), tmp_path)
    assert one.back({}) == ({PATH: "", "PYTHONPATH": str(tmp_path)}, one.argv)
    assert one.back({"PYTHONPATH": "/lib"}) == ({PATH: "/lib", "PYTHONPATH": f"{tmp_path}:/lib"}, one.argv)
    assert Program(one.argv, tmp_path / "none").back({"PYTHONPATH": "/lib"}) == ({}, one.argv)


@pytest.mark.parametrize(
    ("line", "interpreter"),
    [
        ("#!/opt/2/bin/python", "/opt/2/bin/python"),
        ("#!/opt/2/bin/python3.11", "/opt/2/bin/python3.11"),
        ("#!/bin/sh", "/opt/1/bin/python"),
        ("#!/usr/bin/env python", "/opt/1/bin/python"),
        ("", "/opt/1/bin/python"),
        (None, "/opt/1/bin/python"),
    ],
)
def test_by_which_interpreter(line: str | None, interpreter: str, tmp_path: Path) -> None:
    """By the interpreter that the script names now; the way back uses the original one."""
    script = tmp_path / "twistd"
    if line is not None:
        script.write_text(f"{line}\nimport sys\n")
    one = Program(("/opt/1/bin/python", str(script), "node"), tmp_path)
    assert one.next == (interpreter, str(script), "node")
    assert one.back({})[1] == one.argv


def test_it_is_tried_first() -> None:
    """With an option that makes it print its version; its output is the reason if it cannot take over."""
    asked = []

    def trying(tried: Tried) -> program.Try:
        async def run(command: Sequence[str], *, seconds: float) -> Tried:
            asked.append(command)
            return tried

        return run

    one = Program(("python", "twistd"), Path("none"))
    assert now(one.test(trying(Tried(0, ["a warning", KEPT, "txnode 2"])))) == "txnode 2"
    assert asked == [["python", "twistd", CHECK]]
    for tried, reason in (Tried(1, ["Traceback", "ImportError: no"]), "ImportError: no"), (Tried(-9, []), "-9"):
        with pytest.raises(Refused, match=reason):
            now(one.test(trying(tried)))
    with pytest.raises(Refused):
        now(one.test(trying(Tried(0, []))))
    # A version from before the keeper would not speak to it.
    with pytest.raises(Refused, match=r"txnode 1 .* restart the node"):
        now(one.test(trying(Tried(0, ["a warning", "txnode 1"]))))


def test_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All modules are copied, in place of an earlier version's; not if they run from that copy."""
    kept = tmp_path / "program"
    (kept / "node").mkdir(parents=True)
    (kept / "node" / "old.py").touch()
    program.copy(kept)
    assert (kept / "node" / "old.py").exists()
    program.keep(kept)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"program"} and not (kept / "node" / "old.py").exists()
    for module in ("node/tap.py", "drivers/registry.py", "protos/service_pb2.py", "twisted/plugins/node_plugin.py"):
        assert (kept / module).is_file()
    before = (kept / "node").stat().st_ino
    monkeypatch.setattr(program, "__file__", str(kept / "node" / "handover" / "program.py"))
    program.copy(kept)
    program.keep(kept)
    assert (kept / "node").stat().st_ino == before


def test_kept_where_an_image_has_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of a lower layer of overlayfs cannot be renamed, but replaced."""
    kept, rename = tmp_path / "program", Path.rename
    (kept / "node").mkdir(parents=True)
    (kept / "node" / "old.py").touch()

    def overlaid(path: Path, target: Path) -> Path:
        if path == kept:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", overlaid)
    program.copy(kept)
    program.keep(kept)
    assert (kept / "node" / "tap.py").is_file() and not (kept / "node" / "old.py").exists()


def test_what_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version's copy is no way back to this one: on a full disk there is none."""
    kept = tmp_path / "program"
    (kept / "node").mkdir(parents=True)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(OSError, match="no space"):
        program.copy(kept)
    program.keep(kept)
    assert not [*tmp_path.iterdir()]
    assert Program(("python", "twistd"), kept).back({})[0] == {}


def test_modules_that_are_just_being_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy without the file that has the version is no way back."""
    root, kept = tmp_path / "lib", tmp_path / "program"
    for place in ("node/handover", "drivers", "protos", "twisted/plugins"):
        (root / place).mkdir(parents=True)
    (root / program.PLUGIN).touch()
    monkeypatch.setattr(program, "__file__", str(root / "node" / "handover" / "program.py"))
    with pytest.raises(FileNotFoundError):
        program.copy(kept)
    program.keep(kept)
    assert {path.name for path in tmp_path.iterdir()} == {"lib"}


def test_another_version_is_installed_while_this_one_comes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way back is the running version, which was copied before; a version installed since is not."""
    root, kept = tmp_path / "lib", tmp_path / "program"
    shutil.copytree(Path(program.__file__).parents[1], root / "node")
    for place in ("drivers", "protos", "twisted/plugins"):
        (root / place).mkdir(parents=True)
    (root / program.PLUGIN).touch()
    monkeypatch.setattr(program, "__file__", str(root / "node" / "handover" / "program.py"))
    pool = ThreadPool(1, 1)
    reactor = SimpleNamespace(getThreadPool=lambda: pool, callFromThread=lambda work, *args: work(*args))
    upgrades = Upgrades(cast(Any, reactor), cast(Any, None), Program(("python", "twistd"), kept), cast(Any, None))
    upgrades.start()
    pool.start()
    until((tmp_path / "program.new" / program.PLUGIN).exists, 10, "it is copied")
    (root / program.VERSIONS[0]).write_text('__version__ = "9.9.9"')
    upgrades.settle(None)
    until(kept.is_dir, 10, "it is kept")
    pool.stop()
    assert any(__version__ in (kept / file).read_text() for file in program.VERSIONS if (kept / file).exists())
    with pytest.raises(OSError, match="the version on disk is not"):
        program.copy(kept)
    program.keep(kept)
    assert not kept.exists()


def test_it_is_kept_before_it_is_left(tmp_path: Path) -> None:
    """Until then the way back leads to the version before."""
    kept, tried = threading.Event(), []

    class Slow(Program):
        def copy(self) -> None:
            pass

        def keep(self) -> None:
            kept.wait(10)

    async def run(command: Sequence[str], *, seconds: float) -> Tried:
        tried.append(kept.is_set())
        return Tried(1, ["no"])

    pool = ThreadPool(0, 1)
    pool.start()
    reactor = SimpleNamespace(
        getThreadPool=lambda: pool, callFromThread=lambda work, *args: work(*args), seconds=time.monotonic
    )
    refused: list[str] = []
    node = SimpleNamespace(refuse=refused.append, unsteady="")
    upgrades = Upgrades(cast(Any, reactor), cast(Any, node), Slow(("python", "twistd"), tmp_path), run)
    upgrades.settle(None)
    upgrades.ask()
    kept.set()
    until(lambda: refused, 10, "it was tried")
    pool.stop()
    assert tried == [True] and len(refused) == 1
