"""How much memory is left on this machine, and how much a process has to itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

# Where the kernel says what control groups may have and have (cgroup v2), and which one this process is in.
_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def available() -> int:
    """Bytes that can be had without swapping: of the machine, or of a control group where that has less."""
    free = psutil.virtual_memory().available
    for group in _groups():
        with suppress(OSError, ValueError):
            free = min([free, *_left(group)])
    return int(free)


def resident(pid: int) -> int:
    """Bytes in memory of a process; 0 if it has gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _groups() -> list[Path]:
    """The control group of this process and those around it; a container sees its own as the outermost one."""
    path = ""
    with suppress(OSError, StopIteration):
        path = next(line[3:] for line in _OWN.read_text().splitlines() if line.startswith("0::"))
    own = _GROUPS / path.strip("/")
    return [group for group in (own, *own.parents) if group.is_relative_to(_GROUPS)]


def _left(group: Path) -> Iterator[int]:
    """Bytes to each of its limits: above one it is ended, above the other it is slowed down until it hardly moves."""
    # Files that were read are in it; they give way.
    figures = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / "memory.current").read_text()) - int(figures.get("inactive_file", 0))
    for name in ("memory.max", "memory.high"):
        if (limit := (group / name).read_text().strip()) != "max":
            yield int(limit) - used
