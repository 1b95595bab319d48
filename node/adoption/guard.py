"""Ends cores that nobody comes back for: a script, `python -I -S guard.py DIRECTORY MARK SECONDS`, away from the node.

It looks whether the node lives whose number is in DIRECTORY, which the next one replaces by its own. Where none has
lived for so many seconds it kills the processes with this mark, which cores have in their environment. It ends when
there are none, when the directory says that nobody needs it, and where there is another one already.
"""

import fcntl
import os
import signal
import sys
import time

# The file with the number of the node and when it began, and the one that only one of these has locked.
NODE, LOCK = "node", "guard"
# What stands before the mark in an environment.
VARIABLE = b"TXNODE_OWNER="
# Seconds between two looks.
LOOK = 1.0
BEGAN = 19


def began(pid: int) -> str:
    """When a process began; empty for one that is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            fields = file.read().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[BEGAN]


def node(directory: str) -> "tuple[int, str] | None":
    """The node's number, and when it began; None if nobody is to be guarded."""
    try:
        with open(os.path.join(directory, NODE), encoding="ascii") as file:  # noqa: PTH118, PTH123
            pid, when = file.read().split()
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return 0, ""
    return int(pid), when


def marked(mark: bytes) -> "list[int]":
    """The processes that have this mark."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        try:
            with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                if VARIABLE + mark in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:  # gone, or another user's
            continue
    return found


def end(pids: "list[int]") -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:  # gone meanwhile
            continue


def watch(directory: str, mark: bytes, seconds: float) -> None:
    seen = time.monotonic()
    while (there := node(directory)) is not None:
        if there[1] and began(there[0]) == there[1]:
            seen = time.monotonic()
        else:
            cores = marked(mark)
            late = time.monotonic() - seen >= seconds
            # A node that has come since is guarded by this one: its own finds the lock taken.
            if (late or not cores) and node(directory) == there:
                end(cores)
                return
        time.sleep(LOOK)


def main(directory: str, mark: str, seconds: str) -> None:
    # Nobody's child, and in no terminal's session.
    if os.fork():
        return
    os.setsid()
    lock = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CREAT, 0o600)  # noqa: PTH118
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    watch(directory, mark.encode(), float(seconds))
    os.close(lock)


if __name__ == "__main__":
    main(*sys.argv[1:])
