"""What a process takes: memory, processor time, open files; and since when it runs."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Usage:
    """Bytes in memory, seconds of processors, seconds since it began."""

    resident: int
    cpu: float
    age: float


def usage(pid: int | None = None) -> Usage | None:
    """Of a process, or of this one; None if it has gone, or cannot be looked at."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            age = max(0.0, time.time() - process.create_time())
            return Usage(process.memory_info().rss, times.user + times.system, age)
    except (psutil.Error, OSError):  # an error of the system's, such as that there is no descriptor for looking
        return None


def open_files() -> int:
    """Descriptors that this process has open, the one for looking left out."""
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1
    except OSError:  # there is none for looking
        return most_files()


def most_files() -> int:
    """How many it may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
