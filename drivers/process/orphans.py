"""Mark, find and kill cores of any kind that an earlier node left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from drivers.process.child import TERM_SECONDS

# Every process that we spawn has this environment variable with the `mark` of the owner's directory.
MARK = "TXNODE_OWNER"


def mark(owner: Path) -> str:
    """Return a mark of a directory by device and inode: nodes in containers may have equal paths. Raises `OSError`."""
    found = owner.stat()
    return f"{found.st_dev}:{found.st_ino}"


def sweep(owner: Path, spared: Collection[int] = ()) -> list[int]:
    """Kill the processes that an earlier node with this directory left behind, and wait for their end.

    Returns the process numbers. The sockets of cores in the directory are removed, unless processes are `spared`, which
    may use them.
    """
    orphans = [process for process in _left_behind(mark(owner)) if process.pid not in spared]
    for orphan in orphans:
        with suppress(psutil.NoSuchProcess):
            orphan.kill()
    deadline = time.monotonic() + TERM_SECONDS
    while any(map(_runs, orphans)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for socket in () if spared else owner.glob("*.sock*"):
        with suppress(OSError):  # on a read-only disk they stay
            socket.unlink()
    return [orphan.pid for orphan in orphans]


def _runs(process: psutil.Process) -> bool:
    """Whether a process still runs. A zombie does not: it holds no port, and its parent may reap it later."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _left_behind(ours: str) -> Iterator[psutil.Process]:
    """Yield the other processes with this mark. Only the environment is read of most: there may be thousands."""
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):  # gone, or another user's: not ours
            if pid != os.getpid() and MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                process = psutil.Process(pid)
                if process.environ().get(MARK) == ours:
                    yield process
