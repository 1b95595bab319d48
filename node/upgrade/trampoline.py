"""Runs the node's next program, and the one before it again if that does not come up: a script, executed by both.

`python trampoline.py`, with a memory file (see `node.upgrade.handle`) whose first line says what to run and what to go
back to. The next program says that it has come up by taking `VARIABLE` from its environment. Whatever goes wrong until
then, an exception, an end or the end of patience, leads back: the same process, with the same descriptors, executes the
program before. Nothing of the node's own is imported here, for that may be what is broken.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

# The descriptor of the memory file; why the program before runs again, and what it had where its modules are named now.
VARIABLE, FAILED, PATH = "TXNODE_HANDOVER", "TXNODE_HANDOVER_FAILED", "TXNODE_HANDOVER_PATH"
# Signals that would end a program that does not handle them yet, or not any more: they wait.
WAITING = (signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
# Bytes of the first line, and of a reason, at most.
LINE, REASON = 256 * 1024, 2000


def header(descriptor: int) -> dict[str, Any]:
    """What is to be run, and what to go back to."""
    line, _, _ = os.pread(descriptor, LINE, 0).partition(b"\n")
    found: dict[str, Any] = json.loads(line)
    return found


def back(reason: str) -> None:
    """Become the program before. Its environment says why."""
    words = header(int(os.environ[VARIABLE]))
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITING)
    alive()
    # The program that failed may have opened what was left to it, and closed some of it.
    for descriptor in (int(os.environ[VARIABLE]), *words.get("descriptors", ())):
        with suppress(OSError):
            os.set_inheritable(descriptor, True)
    # Whatever it says: no more than an environment can have.
    said = reason[-REASON:].replace("\0", " ").encode("ascii", "backslashreplace").decode()
    environment = {**os.environ, FAILED: said}
    if words["kept"]:
        # Its own modules may be others on disk by now.
        environment[PATH] = os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [words["kept"], environment[PATH]]))
    os.execve(words["before"][0], words["before"], environment)  # noqa: S606 - this is what the script is for


def alive() -> None:
    """Tell systemd's watchdog (sd_notify(3)), which has heard nothing for long."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if "WATCHDOG_USEC" in os.environ and address[:1] in ("/", "@"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as there:
            there.sendto(b"WATCHDOG=1", "\0" + address[1:] if address[0] == "@" else address)


def give_up(descriptor: int, reason: str) -> None:
    """The program before is this one, which has left everything already: it takes that again."""
    os.environ[VARIABLE] = str(descriptor)
    back(reason)


def committed() -> bool:
    """Whether the next program has come up."""
    return VARIABLE not in os.environ


def main() -> None:
    words = header(int(os.environ[VARIABLE]))
    program = words["program"]

    def late(*_: object) -> None:
        if not committed():
            back(f"the new version did not come up within {words['patience']:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, words["patience"])
    # Nothing is garbage yet. The program looks for some when it has its modules.
    gc.disable()
    # As if it had been executed by itself: it may look how to be executed again.
    sys.orig_argv, sys.argv, sys.path[0] = program, program[1:], os.path.dirname(program[1])  # noqa: PTH120
    try:
        runpy.run_path(program[1], run_name="__main__")
    except BaseException as error:
        if committed():
            raise
        ended = isinstance(error, SystemExit)
        back(f"the new version ended: {error}" if ended else traceback.format_exc())
    if not committed():
        back("the new version ended before it had come up")


if __name__ == "__main__":
    main()
