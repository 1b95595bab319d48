"""The program that this process runs, as it would be run again: maybe another version of it by now."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from node import __version__
from node.errors import NodeError
from node.upgrade import trampoline
from node.upgrade.trampoline import VARIABLE, WAITING

# What has the program say whether it could take over, instead of running.
CHECK = "--check"
# How it says there that it goes on with several cores; versions that can do so with one alone say nothing.
SEVERAL = "goes on with several cores"
# Seconds for that, and until the next program has to have come up.
TEST_SECONDS, PATIENCE = 60.0, 30.0
# How much of a watchdog's patience that may be: the program before has to be in time.
PART = 2 / 3
# The first line of a script that is for Python, and the most bytes of it.
_INTERPRETER, LINE = re.compile(rb"#!\s*(/\S*python[\d.]*)\s*"), 1000
# The packages that are the node's own, beside where twistd finds it.
PACKAGES = ("node", "drivers", "protos")
PLUGIN = Path("twisted", "plugins", "node_plugin.py")
# Where a version says which it is.
VERSION = Path("node", "__init__.py")


class Refused(NodeError):
    """There is no upgrade, and why: nothing has changed."""


@dataclass(frozen=True)
class Successor:
    """What the next program says of itself; whether it can go on with more than one core."""

    version: str
    several: bool


class Tried(Protocol):
    """A program that was run to its end."""

    @property
    def code(self) -> int: ...

    @property
    def lines(self) -> Sequence[str]: ...


class Try(Protocol):
    """Runs a program to its end; with these modules before those that it finds."""

    def __call__(self, command: Sequence[str], *, seconds: float, modules: Path | None = None) -> Awaitable[Tried]: ...


@dataclass(frozen=True)
class Program:
    """`argv` as for execve, with the interpreter first. `kept` has what is the node's own as it was at the start."""

    argv: tuple[str, ...]
    kept: Path

    @property
    def next(self) -> tuple[str, ...]:
        """The same with the interpreter that the script names by now: a link to it may lead to another version."""
        try:
            with Path(self.argv[1]).open("rb") as script:
                named = _INTERPRETER.fullmatch(script.readline(LINE))
        except OSError:
            return self.argv
        return self.argv if named is None else (os.fsdecode(named[1]), *self.argv[1:])

    @classmethod
    def of(cls, words: Sequence[str], options: Mapping[str, object], kept: Path) -> Program | str:
        """The program of these words (`sys.orig_argv`); or why it cannot be run again in the same process."""
        if len(words) < 2 or words[1].startswith("-"):
            return "the node was not started as `python .../twistd ...`"
        if not options.get("nodaemon") or options.get("pidfile"):
            return "twistd has no --nodaemon and --pidfile= (empty): it would leave the process"
        return cls((_interpreter(words[0]), str(Path(words[1]).absolute()), *words[2:]), kept)

    def copy(self) -> None:
        """Have a copy of what runs, before another version is on disk; blocking. Raises `OSError`."""
        copy(self.kept)

    def keep(self) -> None:
        """Have that copy be the way back, and what was that no more; blocking. Raises `OSError`."""
        keep(self.kept)

    async def test(self, run: Try, modules: Path | None = None) -> Successor:
        """Have it say whether it could take over. Raises `Refused`."""
        tried = await run([*self.next, CHECK], seconds=TEST_SECONDS, modules=modules)
        if tried.code != 0 or not tried.lines:
            said = "\n".join(tried.lines[-5:]) or f"it ended with {tried.code} and said nothing"
            raise Refused(f"the version on disk cannot take over: {said}")
        return Successor(tried.lines[-1], SEVERAL in tried.lines)

    def words(self, silence: float | None = None) -> dict[str, object]:
        """The first line of a memory file: see `trampoline`. After `silence` a watchdog ends the process."""
        kept = str(self.kept) if self.kept.is_dir() else ""
        patience = PATIENCE if silence is None else min(PATIENCE, silence * PART)
        return {"program": self.next, "before": self.argv, "kept": kept, "patience": patience}

    def become(self, handle: int, environment: Mapping[str, str]) -> None:
        """Become the next program, which inherits this memory file; this one again where that cannot be run.

        Raises `OSError` if neither can.
        """
        os.set_inheritable(handle, True)
        signal.pthread_sigmask(signal.SIG_BLOCK, WAITING)
        try:
            argv = [self.next[0], self._trampoline]
            os.execve(argv[0], argv, {**environment, VARIABLE: str(handle)})  # noqa: S606 - that is what it is for
        except OSError as error:
            trampoline.give_up(handle, f"the next version cannot be run: {error}")

    @property
    def _trampoline(self) -> str:
        """Where this version was, there may be none by now."""
        kept = self.kept / "node" / "upgrade" / Path(trampoline.__file__).name
        return trampoline.__file__ if Path(trampoline.__file__).exists() or not kept.exists() else str(kept)


def copy(kept: Path) -> None:
    """Have the node's own modules as they are now beside there, whole or not at all. Raises `OSError`."""
    if _root() == kept:
        return  # this is the way back, and these are they
    new = _new(kept)
    shutil.rmtree(new, ignore_errors=True)
    try:
        for package in PACKAGES:
            shutil.copytree(_root() / package, new / package)
        (new / PLUGIN).parent.mkdir(parents=True)
        shutil.copy2(_root() / PLUGIN, new / PLUGIN)
        if f'"{__version__}"' not in (new / VERSION).read_text():
            raise OSError(f"on disk is another version than {__version__}, which runs")
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise


def keep(kept: Path) -> None:
    """Have what was copied be the way back. Raises `OSError`."""
    if _root() == kept:
        return
    new, old = _new(kept), kept.with_name(f"{kept.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    try:
        if kept.exists():
            _put_aside(kept, old)
        if new.exists():
            new.rename(kept)
    except OSError:
        # What is there is another version, which is no way back to this one.
        for left in (new, kept):
            shutil.rmtree(left, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _put_aside(kept: Path, old: Path) -> None:
    try:
        kept.rename(old)
    except OSError as error:
        # A directory of an image's layer cannot be renamed (overlayfs).
        if error.errno != errno.EXDEV:
            raise
        shutil.rmtree(kept)


def _root() -> Path:
    return Path(__file__).parents[2]


def _new(kept: Path) -> Path:
    return kept.with_name(f"{kept.name}.new")


def _interpreter(word: str) -> str:
    """Its path: what is run again is in no PATH. Not resolved, for a link says of which environment it is."""
    return word if os.path.isabs(word) else shutil.which(word) or word  # noqa: PTH117
