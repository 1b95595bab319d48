"""Available memory of this machine, and resident memory of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

# The limits and usage of control groups (cgroup v2), and the group of this process.
_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def available() -> int:
    """Bytes available without swapping: of the machine, or of a control group around this process if that is less."""
    free = psutil.virtual_memory().available
    for group in _groups():
        with suppress(OSError, ValueError):
            free = min([free, *_left(group)])
    return int(free)


def resident(pid: int) -> int:
    """Resident bytes of a process; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _groups() -> list[Path]:
    """The control group of this process and its parents; a container sees its own as the root."""
    path = ""
    with suppress(OSError, StopIteration):
        path = next(line[3:] for line in _OWN.read_text().splitlines() if line.startswith("0::"))
    own = _GROUPS / path.strip("/")
    return [group for group in (own, *own.parents) if group.is_relative_to(_GROUPS)]


def _left(group: Path) -> Iterator[int]:
    """Bytes left to memory.max (above it the kernel kills) and memory.high (above it the group hardly moves)."""
    # The usage includes cached files, which the kernel drops when memory is needed.
    figures = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / "memory.current").read_text()) - int(figures.get("inactive_file", 0))
    for name in ("memory.max", "memory.high"):
        if (limit := (group / name).read_text().strip()) != "max":
            yield int(limit) - used
