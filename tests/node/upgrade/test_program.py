"""What the node runs, as it would be run again."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from node.upgrade import program
from node.upgrade.program import CHECK, SEVERAL, Program, Refused, Successor

T = TypeVar("T")


@dataclass
class Tried:
    code: int
    lines: Sequence[str]


def now(work: Coroutine[Deferred[Any], Any, T]) -> T:
    """What comes of work that waits for nothing."""
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
    """The operator is told how the node has to be started."""
    found = Program.of(words, options, tmp_path)
    assert isinstance(found, str) and reason in found


def test_what_can(tmp_path: Path) -> None:
    """By the paths of interpreter and script, whatever the directory."""
    found = Program.of([sys.executable, "bin/twistd", "--nodaemon", "node"], WELL, tmp_path)
    assert isinstance(found, Program)
    assert found.argv == (sys.executable, str(Path.cwd() / "bin" / "twistd"), "--nodaemon", "node")
    assert found.words["kept"] == str(tmp_path) and Program(found.argv, tmp_path / "none").words["kept"] == ""


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
    """By the one that the script names now; back by the one that it was run by."""
    script = tmp_path / "twistd"
    if line is not None:
        script.write_text(f"{line}\nimport sys\n")
    one = Program(("/opt/1/bin/python", str(script), "node"), tmp_path)
    assert one.next == (interpreter, str(script), "node")
    assert (one.words["program"], one.words["before"]) == (one.next, one.argv)


def test_it_is_tried_first() -> None:
    """With a word that has it say who it is; what it says when it cannot take over is the reason."""
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
    """All modules, whole, in the place of those of a version before; not where they are run from there."""
    kept = tmp_path / "program"
    (kept / "node").mkdir(parents=True)
    (kept / "node" / "old.py").touch()
    program.keep(kept)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"program"} and not (kept / "node" / "old.py").exists()
    for module in ("node/tap.py", "drivers/registry.py", "protos/service_pb2.py", "twisted/plugins/node_plugin.py"):
        assert (kept / module).is_file()
    before = (kept / "node").stat().st_ino
    monkeypatch.setattr(program, "__file__", str(kept / "node" / "upgrade" / "program.py"))
    program.keep(kept)
    assert (kept / "node").stat().st_ino == before
