"""Cores that an earlier node left behind, of whatever kind: how they are marked, found and ended."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from drivers.process.child import TERM_SECONDS

# In the environment of every process that we spawn, with `mark` of the owner's directory: how the sweep finds them.
MARK = "TXNODE_OWNER"


def mark(owner: Path) -> str:
    """A directory, whatever its path: in containers of one host each node may have the same. Raises `OSError`."""
    found = owner.stat()
    return f"{found.st_dev}:{found.st_ino}"


def sweep(owner: Path, spared: Collection[int] = ()) -> list[int]:
    """Kill what an earlier node with this directory left behind, and wait for it. Returns the process numbers.

    Sockets that its cores had there are removed, unless some are `spared`, whose sockets they may be.
    """
    ours = mark(owner)
    orphans = [process for process in _marked() if _mark(process) == ours and process.pid not in spared]
    for orphan in orphans:
        with suppress(psutil.NoSuchProcess):
            orphan.kill()
    deadline = time.monotonic() + TERM_SECONDS
    while any(map(_runs, orphans)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for socket in () if spared else owner.glob("*.sock*"):
        socket.unlink()
    return [orphan.pid for orphan in orphans]


def _runs(process: psutil.Process) -> bool:
    """A zombie holds no port: whoever its parent is may reap it later."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _marked() -> Iterator[psutil.Process]:
    """Those with any mark. Of the others no more is asked: there may be thousands."""
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):  # gone, or another user's: not ours
            if MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                yield psutil.Process(pid)


def _mark(process: psutil.Process) -> str | None:
    try:
        found = process.environ().get(MARK)
    except (psutil.Error, OSError):
        return None  # gone, or another user's: not ours
    return found if process.pid != os.getpid() else None
