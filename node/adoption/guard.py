"""The guard: kills orphaned cores. A script, `python -I -S guard.py DIRECTORY MARK SECONDS`, detached from the node.

It watches the node whose PID is in DIRECTORY; the next node replaces the PID by its own. When no node has lived for
SECONDS it kills the processes that have MARK in their environment, as cores do. It ends when there are none, when the
file with the PID is gone, and at once if another guard runs already.
"""

import fcntl
import os
import signal
import sys
import time

# The file with the node's PID and start time, and the guard's lock file.
NODE, LOCK = "node", "guard"
# The environment variable that holds the mark.
VARIABLE = b"TXNODE_OWNER="
# Seconds between two checks.
LOOK = 1.0
# The index of the start time in /proc/PID/stat, counted after the command's name.
BEGAN = 19


def began(pid: int) -> str:
    """The start time of a process, in clock ticks since boot; empty if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            fields = file.read().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[BEGAN]


def node(directory: str) -> "tuple[int, str] | None":
    """The node's PID and start time; None if there is nothing to guard, (0, "") if the file is unreadable."""
    try:
        with open(os.path.join(directory, NODE), encoding="ascii") as file:  # noqa: PTH118, PTH123
            pid, when = file.read().split()
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return 0, ""
    return int(pid), when


def marked(mark: bytes) -> "list[int]":
    """The PIDs of processes that have this mark in their environment."""
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
            # Read again: if another node has come meanwhile, go on and guard it. Its own guard finds the lock taken.
            if (late or not cores) and node(directory) == there:
                end(cores)
                return
        time.sleep(LOOK)


def main(directory: str, mark: str, seconds: str) -> None:
    # Detach: the parent exits, the child gets a session of its own.
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
