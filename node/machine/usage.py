"""Memory, processor time, age and open files of a process."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Usage:
    """Resident bytes, seconds of processor time, seconds since the process started."""

    resident: int
    cpu: float
    age: float


def usage(pid: int | None = None) -> Usage | None:
    """The usage of a process, or of this one; None if it has ended or cannot be read."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            age = max(0.0, time.time() - process.create_time())
            return Usage(process.memory_info().rss, times.user + times.system, age)
    except (psutil.Error, OSError):  # such as that no file descriptor is free for reading /proc
        return None


def open_files() -> int:
    """File descriptors that this process has open, without the one for counting."""
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1
    except OSError:  # no descriptor is free for counting
        return most_files()


def most_files() -> int:
    """File descriptors that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
