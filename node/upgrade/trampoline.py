"""Runs the node's next program, and executes the previous one again if the next does not come up.

A script, `python trampoline.py`. The first line of the hand-over file (see `node.upgrade.handle`) has both commands.
The next program signals that it has come up by removing `VARIABLE` from its environment. On any failure before that
(an exception, an exit, a timeout) the same process, with the same descriptors, executes the previous program. Imports
none of the node's own modules: they may be what is broken.
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

# Environment variables: the descriptor of the hand-over file; why the previous program runs again; and the original
# PYTHONPATH, while PYTHONPATH names the kept copy.
VARIABLE, FAILED, PATH = "TXNODE_HANDOVER", "TXNODE_HANDOVER_FAILED", "TXNODE_HANDOVER_PATH"
# Signals that are blocked while no handlers for them are installed: they would end the process.
WAITING = (signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
# Bytes of the first line, and of a reason, at most.
LINE, REASON = 256 * 1024, 2000


def header(descriptor: int) -> dict[str, Any]:
    """The first line of the hand-over file: what to run, and what to go back to."""
    line, _, _ = os.pread(descriptor, LINE, 0).partition(b"\n")
    found: dict[str, Any] = json.loads(line)
    return found


def back(reason: str) -> None:
    """Execute the previous program; its environment has the reason."""
    words = header(int(os.environ[VARIABLE]))
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITING)
    alive()
    # The failed program may have changed or closed the descriptors that it was given.
    for descriptor in (int(os.environ[VARIABLE]), *words.get("descriptors", ())):
        with suppress(OSError):
            os.set_inheritable(descriptor, True)
    # Made fit for an environment variable.
    text = reason[-REASON:].replace("\0", " ").encode("ascii", "backslashreplace").decode()
    environment = {**os.environ, FAILED: text}
    if words["kept"]:
        # The modules on disk may be of the new version: use the kept copy.
        environment[PATH] = os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [words["kept"], environment[PATH]]))
    os.execve(words["before"][0], words["before"], environment)  # noqa: S606 - the purpose of this script


def alive() -> None:
    """Send systemd's watchdog a sign of life (sd_notify(3)): the last one may be long ago."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if "WATCHDOG_USEC" in os.environ and address[:1] in ("/", "@"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as there:
            there.sendto(b"WATCHDOG=1", "\0" + address[1:] if address[0] == "@" else address)


def give_up(descriptor: int, reason: str) -> None:
    """Execute the previous program, which is the running one: it takes its own hand-over back."""
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
    # There is no garbage yet; the program enables collection once its modules are imported.
    gc.disable()
    # As if the program had been executed directly: it reads its own command from here.
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
