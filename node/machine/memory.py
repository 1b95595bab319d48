"""Available memory of this machine, and resident memory of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

# Where control groups are, and the groups of this process.
_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class _Version(NamedTuple):
    """A version of control groups: its controller in /proc/self/cgroup, its directory, and a group's files.

    The kernel kills above memory.max or the limit of version 1; above memory.high the group hardly moves. The usage
    includes cached files, which the kernel drops when memory is needed: `cached` in memory.stat.
    """

    controller: str
    directory: str
    limits: Sequence[str]
    usage: str
    cached: str


_VERSIONS = (
    _Version("", "", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
    _Version("memory", "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
)


def available() -> int:
    """Bytes available without swapping: of the machine, or of a control group around this process if that is less."""
    free = psutil.virtual_memory().available
    for version in _VERSIONS:
        for group in _groups(version):
            with suppress(OSError, ValueError):
                free = min([free, *_left(group, version)])
    return int(free)


def resident(pid: int) -> int:
    """Resident bytes of a process; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _groups(version: _Version) -> list[Path]:
    """The control group of this process and its parents; a container sees its own as the root."""
    path, root = "", _GROUPS / version.directory
    with suppress(OSError, StopIteration):
        lines = (line.split(":", 2) for line in _OWN.read_text().splitlines())
        path = next(path for _, controllers, path in lines if version.controller in controllers.split(","))
    own = root / path.strip("/")
    return [group for group in (own, *own.parents) if group.is_relative_to(root)]


def _left(group: Path, version: _Version) -> Iterator[int]:
    """Bytes left to each limit of a group."""
    figures = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / version.usage).read_text()) - int(figures.get(version.cached, 0))
    for name in version.limits:
        if (limit := (group / name).read_text().strip()) != "max":
            yield int(limit) - used
