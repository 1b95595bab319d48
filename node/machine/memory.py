"""How much memory is left on this machine, and how much a process has to itself."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

# Where the kernel says what a control group may have and has (cgroup v2); a container sees its own there.
_GROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that can be had without swapping: of the machine, or of the control group where that has less."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        # Files that were read are in it; they give way.
        figures = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(figures.get("inactive_file", 0)))
    return int(free)


def resident(pid: int) -> int:
    """Bytes in memory of a process; 0 if it has gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
