"""The command of the node, and how it is executed again."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure
from twisted.python.threadpool import ThreadPool

from node import __version__
from node.upgrade import program, trampoline
from node.upgrade.handle import write
from node.upgrade.program import CHECK, SEVERAL, Program, Refused, Successor
from node.upgrade.trampoline import FAILED, VARIABLE
from node.upgrade.upgrade import Upgrades
from protos.handover_pb2 import Handover
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
    ("words", "options", "reason"),
    [
        (["python"], WELL, "twistd"),
        (["python", "-m", "twisted"], WELL, "twistd"),
        (["python", "twistd", "node"], {"nodaemon": False, "pidfile": ""}, "--nodaemon"),
        (["python", "twistd", "node"], {"nodaemon": True, "pidfile": "twistd.pid"}, "--pidfile="),
    ],
)
def test_what_cannot_be_run_again(words: list[str], options: dict[str, object], reason: str, tmp_path: Path) -> None:
    """The error says how the node has to be started."""
    found = Program.of(words, options, tmp_path)
    assert isinstance(found, str) and reason in found


def test_a_program_that_can_be_run_again(tmp_path: Path) -> None:
    """By the absolute paths of interpreter and script, whatever the directory."""
    found = Program.of([sys.executable, "bin/twistd", "--nodaemon", "node"], WELL, tmp_path)
    assert isinstance(found, Program)
    assert found.argv == (sys.executable, str(Path.cwd() / "bin" / "twistd"), "--nodaemon", "node")
    assert found.header()["kept"] == str(tmp_path) and Program(found.argv, tmp_path / "none").header()["kept"] == ""


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
    assert (one.header()["program"], one.header()["before"]) == (one.next, one.argv)


def test_it_is_tried_first() -> None:
    """With an option that makes it print its version; its output is the reason if it cannot take over."""
    asked = []

    def trying(tried: Tried) -> program.Try:
        async def run(command: Sequence[str], *, seconds: float, modules: Path | None = None) -> Tried:
            asked.append(command)
            return tried

        return run

    one = Program(("python", "twistd"), Path("none"))
    assert now(one.test(trying(Tried(0, ["a warning", "txnode 2"])))) == Successor("txnode 2", several=False)
    assert now(one.test(trying(Tried(0, [SEVERAL, "txnode 3"])))) == Successor("txnode 3", several=True)
    assert asked == [["python", "twistd", CHECK]] * 2
    for tried, reason in (Tried(1, ["Traceback", "ImportError: no"]), "ImportError: no"), (Tried(-9, []), "-9"):
        with pytest.raises(Refused, match=reason):
            now(one.test(trying(tried)))
    with pytest.raises(Refused):
        now(one.test(trying(Tried(0, []))))


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
    monkeypatch.setattr(program, "__file__", str(kept / "node" / "upgrade" / "program.py"))
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
    assert Program(("python", "twistd"), kept).header()["kept"] == ""


def test_another_version_is_installed_while_this_one_comes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way back is the running version, which was copied before; a version installed since is not."""
    root, kept = tmp_path / "lib", tmp_path / "program"
    shutil.copytree(Path(program.__file__).parents[1], root / "node")
    for place in ("drivers", "protos", "twisted/plugins"):
        (root / place).mkdir(parents=True)
    (root / program.PLUGIN).touch()
    monkeypatch.setattr(program, "__file__", str(root / "node" / "upgrade" / "program.py"))
    pool = ThreadPool(1, 1)
    reactor = SimpleNamespace(getThreadPool=lambda: pool, callFromThread=lambda work, *args: work(*args))
    upgrades = Upgrades(cast(Any, reactor), cast(Any, None), Program(("python", "twistd"), kept), cast(Any, None))
    upgrades.prepare()
    pool.start()
    until((tmp_path / "program.new" / program.PLUGIN).exists, 10, "it is copied")
    (root / program.VERSION).write_text('__version__ = "9.9.9"')
    upgrades.begin()
    until(kept.is_dir, 10, "it is kept")
    pool.stop()
    assert __version__ in (kept / program.VERSION).read_text()
    with pytest.raises(OSError, match="the version on disk is not"):
        program.copy(kept)
    program.keep(kept)
    assert not kept.exists()


def test_where_the_trampoline_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running version may be gone from where it was installed: then its copy is used."""
    called: list[Sequence[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, argv, environment: called.append(argv))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    one, handle = Program(("python", "twistd"), tmp_path), os.memfd_create("memory")
    there = str(Path(program.__file__).with_name("trampoline.py"))
    one.become(handle, {})
    program.copy(tmp_path / "kept")
    program.keep(tmp_path / "kept")
    monkeypatch.setattr(trampoline, "__file__", str(tmp_path / "gone" / "trampoline.py"))
    Program(("python", "twistd"), tmp_path / "kept").become(handle, {})
    os.close(handle)
    assert called == [["python", there], ["python", str(tmp_path / "kept" / "node" / "upgrade" / "trampoline.py")]]


def test_one_that_cannot_be_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interpreter is gone since it was checked: the previous program runs again, with the reason."""
    called: list[tuple[str, Mapping[str, str]]] = []

    def execute(path: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        called.append((path, environment))
        if path == "/gone/python":
            raise FileNotFoundError(errno.ENOENT, "no such file", path)

    monkeypatch.setattr(os, "execve", execute)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setitem(os.environ, VARIABLE, "")
    script = tmp_path / "twistd"
    script.write_text("#!/gone/python\n")
    one = Program((sys.executable, str(script)), tmp_path)
    handle = write(one.header(), Handover())
    one.become(handle, {})
    os.close(handle)
    assert [path for path, _ in called] == ["/gone/python", sys.executable]
    assert "/gone/python" in called[1][1][FAILED] and called[1][1][VARIABLE] == str(handle)


def test_it_is_kept_before_it_is_left(tmp_path: Path) -> None:
    """Until then the way back leads to the version before."""
    kept, tried = threading.Event(), []

    class Slow(Program):
        def copy(self) -> None:
            pass

        def keep(self) -> None:
            kept.wait(10)

    async def run(command: Sequence[str], *, seconds: float, modules: Path | None = None) -> Tried:
        tried.append(kept.is_set())
        return Tried(1, ["no"])

    pool = ThreadPool(0, 1)
    pool.start()
    reactor = SimpleNamespace(
        getThreadPool=lambda: pool, callFromThread=lambda work, *args: work(*args), seconds=time.monotonic
    )
    told: list[str] = []
    node = SimpleNamespace(refuse=told.append, unsteady=lambda several: "")
    upgrades = Upgrades(cast(Any, reactor), cast(Any, node), Slow(("python", "twistd"), tmp_path), run)
    upgrades.begin()
    upgrades.ask()
    kept.set()
    until(lambda: told, 10, "it was tried")
    pool.stop()
    assert tried == [True] and len(told) == 1


@pytest.mark.parametrize(("silence", "patience"), [(None, 30), (120, 30), (30, 20), (3, 2)])
def test_how_long_it_may_take(silence: float | None, patience: float, tmp_path: Path) -> None:
    """Less than the watchdog's timeout: else it would end both the way back and the core."""
    assert Program(("python", "twistd"), tmp_path).header(silence)["patience"] == patience
