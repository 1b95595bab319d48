"""The command that this process runs, to execute it again: another version may be installed by now."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from node import __version__
from node.base.errors import NodeError
from node.handover.launch import interpreter

# The option with which the program checks whether it could take over, instead of running.
CHECK = "--check"
# The line that it prints then; versions from before the keeper do not, and need a restart.
KEPT = "goes on below a keeper"
# The environment variable with which a node that has a keeper runs the check.
CHECKING = "TXNODE_KEEPER_CHECK"
# Timeouts in seconds: of the check, and until the next program has to have come up.
TEST_SECONDS, PATIENCE = 60.0, 30.0
# The environment variable with the original PYTHONPATH, while PYTHONPATH names the kept copy.
PATH = "TXNODE_HANDOVER_PATH"
# The shebang line of a Python script, and its length at most.
_INTERPRETER, LINE = re.compile(rb"#!\s*(/\S*python[\d.]*)\s*"), 1000
# The node's own packages, and the plugin by which twistd finds it.
PACKAGES = ("node", "drivers", "protos")
PLUGIN = Path("twisted", "plugins", "node_plugin.py")
# The files with the version number: the first one that is there counts.
VERSIONS = (Path("node", "_version.py"), Path("node", "__init__.py"))


class Refused(NodeError):
    """The upgrade is refused; nothing has changed."""


class Tried(Protocol):
    """The outcome of a program that was run to its end: exit code and output lines."""

    @property
    def code(self) -> int: ...

    @property
    def lines(self) -> Sequence[str]: ...


class Try(Protocol):
    """Runs a program to its end."""

    def __call__(self, command: Sequence[str], *, seconds: float) -> Awaitable[Tried]: ...


async def run_check(
    run: Callable[..., Awaitable[Tried]],
    environment: Mapping[str, str],
    command: Sequence[str],
    *,
    seconds: float,
) -> Tried:
    """Run another version's check to its end. Satisfies `Try`."""
    return await run(command, {**environment, CHECKING: "yes"}, seconds)


@dataclass(frozen=True)
class Program:
    """The command of this process: `argv` as for execve, interpreter first. `kept`: the copy of the running modules.

    `script`: the place of twistd's script in it, behind the interpreter's own options.
    """

    argv: tuple[str, ...]
    kept: Path
    script: int = 1

    @property
    def next(self) -> tuple[str, ...]:
        """The command with the interpreter that the script names now: an updated script may name another one."""
        try:
            with Path(self.argv[self.script]).open("rb") as script:
                named = _INTERPRETER.fullmatch(script.readline(LINE))
        except OSError:
            return self.argv
        return self.argv if named is None else (os.fsdecode(named[1]), *self.argv[1:])

    def beside(self, attempt: str) -> list[str]:
        """The command that has the script `attempt` run the next version."""
        words = self.next
        return [*words[: self.script], attempt, *words[self.script :]]

    @classmethod
    def of(cls, words: Sequence[str], argv: Sequence[str], twistd: Mapping[str, object], kept: Path) -> Program | str:
        """Make it of `sys.orig_argv`, `sys.argv` and twistd's options; or return why it cannot run again in place."""
        script = len(words) - len(argv)
        if script < 1 or words[script] != argv[0]:
            return "the node was not started as `python .../twistd ...`"
        if not twistd.get("nodaemon") or twistd.get("pidfile"):
            return "start twistd with --nodaemon and --pidfile= (empty): else the next version would leave this process"
        path = str(Path(words[script]).absolute())
        return cls((interpreter(words[0]), *words[1:script], path, *words[script + 1 :]), kept, script)

    def copy(self) -> None:
        """Copy the running modules before another version is installed. Blocking. Raises `OSError`."""
        copy(self.kept)

    def keep(self) -> None:
        """Make that copy the way back, in place of the older one. Blocking. Raises `OSError`."""
        keep(self.kept)

    async def test(self, run: Try) -> str:
        """Have the version on disk check whether it could take over. Returns its version. Raises `Refused`."""
        tried = await run([*self.next, CHECK], seconds=TEST_SECONDS)
        if tried.code != 0 or not tried.lines:
            reason = "\n".join(tried.lines[-5:]) or f"it exited with {tried.code} and printed nothing"
            raise Refused(f"the version on disk cannot take over: {reason}")
        if KEPT not in tried.lines:
            raise Refused(f"{tried.lines[-1]} is from before nodes had a keeper: restart the node to change to it")
        return tried.lines[-1]

    def back(self, environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
        """The command for the way back: additions to the environment, as the modules on disk may be new, and words."""
        if not self.kept.is_dir():
            return {}, self.argv
        path = environment.get("PYTHONPATH", "")
        return {PATH: path, "PYTHONPATH": os.pathsep.join(filter(None, [str(self.kept), path]))}, self.argv


def copy(kept: Path) -> None:
    """Copy the node's own modules next to `kept`, completely or not at all. Raises `OSError`."""
    if _root() == kept:
        return  # this program runs from the kept copy itself
    new = _new(kept)
    shutil.rmtree(new, ignore_errors=True)
    try:
        for package in PACKAGES:
            shutil.copytree(_root() / package, new / package)
        (new / PLUGIN).parent.mkdir(parents=True)
        shutil.copy2(_root() / PLUGIN, new / PLUGIN)
        if f'"{__version__}"' not in _version_in(new):
            raise OSError(f"the version on disk is not {__version__}, which runs")
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise


def keep(kept: Path) -> None:
    """Move the new copy to `kept`. Raises `OSError`."""
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
        # The copy left there is of another version: no way back is better than a wrong one.
        for left in (new, kept):
            shutil.rmtree(left, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _put_aside(kept: Path, old: Path) -> None:
    try:
        kept.rename(old)
    except OSError as error:
        # On overlayfs a directory of a lower layer cannot be renamed (EXDEV).
        if error.errno != errno.EXDEV:
            raise
        shutil.rmtree(kept)


def _version_in(root: Path) -> str:
    """Raises `OSError` if neither is there: another version is just being installed."""
    return next((root / file for file in VERSIONS if (root / file).exists()), root / VERSIONS[-1]).read_text()


def _root() -> Path:
    return Path(__file__).parents[2]


def _new(kept: Path) -> Path:
    return kept.with_name(f"{kept.name}.new")
