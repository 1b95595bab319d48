"""Begins the keeper: `twistd node` executes it in place of itself, and goes on as the node in a child of it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from node.base import env_file
from node.handover import keeper

# The setting that turns it off, and twistd's words with which no node runs, or not in this process.
KEEPER, OPTION = "KEEPER", "--keeper"
# The variable by which a version from before the keeper has this one go on with its cores.
BEFORE = "TXNODE_HANDOVER"
_NO_NODE = {"--help", "--version", "--check"}


def become_keeper() -> None:
    """Get a keeper, if this process is a node to be that has none. Reads the setting before all others are read.

    Returns in a new process, the keeper's child, with all that was imported: a process that the keeper executes imports
    that again. To be called before anything is open. In each case the key is no longer in /proc/PID/environ.
    """
    keeper.blank_key()
    if BEFORE in os.environ:
        raise SystemExit("restart the node to change to this version: the one that runs has no keeper")
    if keeper.VARIABLE in os.environ or not is_node(sys.argv):
        return
    if setting(sys.argv, os.environ, Path(".env")).lower() == "off":
        return
    words = sys.orig_argv
    # Behind the interpreter's own options.
    script = len(words) - len(sys.argv)
    if script < 1 or words[script] != sys.argv[0]:
        print("the node has no keeper: it was not started as `python .../twistd ...`", file=sys.stderr)  # noqa: T201
        return
    command = [interpreter(words[0]), *words[1:script], str(Path(words[script]).absolute()), *words[script + 1 :]]
    divide(command)


def divide(command: list[str]) -> None:
    """Execute the keeper in this process, whose PID the system knows, and return in its child, its first node."""
    words = words_of(keeper.__file__)
    open_standard_files()
    if len([*Path("/proc/self/task").iterdir()]) > 1:
        # A child would not have the threads of a tool: the keeper executes the node.
        os.execv(words[0], [*words, *command])  # noqa: S606 - the purpose
    keeper.prepare()
    # Where it is ignored, as some programs leave it, the kernel does not keep the node's status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    above, (ask, its_ask), (events, its_events) = os.getpid(), *keeper.pairs()
    # What comes from here on waits for the keeper.
    signal.pthread_sigmask(signal.SIG_BLOCK, (*keeper.FORWARDED, signal.SIGCHLD))
    try:
        pid = os.fork()
    except OSError:
        # There may be too many processes now: the keeper says so, and tries again.
        os.execv(words[0], [*words, *command])  # noqa: S606 - the purpose
    if pid:
        node = [pid, ask.fileno(), events.fileno()]
        keeper.execute(words, {"command": [{}, command], "node": node}, node[1:])
    keeper.end_with(above)
    keeper.close((ask.detach(), events.detach()))
    os.environ[keeper.VARIABLE] = f"{its_ask.detach()} {its_events.detach()} {above}"
    for name in keeper.SYSTEMD:
        os.environ.pop(name, None)
    # As in a process that the keeper executes; Python's own handler for the last.
    for number in keeper.FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, keeper.WAITING[:2])


def open_standard_files() -> None:
    """Open those that are closed, as by `2>&-`: else sockets would have their numbers, and get what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def words_of(script: str) -> list[str]:
    """The command that runs a keeper: imported, as a script would be compiled each time, which takes memory."""
    there = Path(script)
    code = f"import sys; sys.path.append({str(there.parent)!r}); import {there.stem} as keeper; keeper.main()"
    return [sys.executable, "-I", "-S", "-c", code]


def is_node(words: Sequence[str]) -> bool:
    """Whether this command runs a node in the process itself."""
    if Path(words[0]).name != "twistd" or "node" not in words or _NO_NODE & {*words}:
        return False
    before = words[1 : words.index("node")]
    return "--nodaemon" in before or any(word[:1] == "-" != word[1:2] and "n" in word for word in before)


def setting(words: Sequence[str], environment: Mapping[str, str], file: Path) -> str:
    """The value of KEEPER: of an option, else of the environment, else of the file."""
    for place, word in enumerate(words):
        if word.partition("=")[0] == OPTION:
            return word.partition("=")[2] or "".join(words[place + 1 : place + 2])
    try:
        text = "" if KEEPER in environment else file.read_text()
    except (OSError, UnicodeDecodeError):
        text = ""
    return environment.get(KEEPER) or env_file.read(text).get(KEEPER, "")


def interpreter(word: str) -> str:
    """The interpreter's path: execve does not search PATH. Links are kept: they name the virtual environment."""
    return word if os.path.isabs(word) else shutil.which(word) or word  # noqa: PTH117
