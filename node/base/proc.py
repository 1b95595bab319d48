"""Read the state of a process: from /proc (proc(5)), and its processor time."""

from __future__ import annotations

import time
from pathlib import Path

# Each start of the machine has a new id, in containers too.
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# The indexes of the state, the parent and the start time in /proc/PID/stat, counted after the name.
_STATE, _PARENT, _BEGAN = 0, 1, 19
# The clock of a whole process, as clock_getcpuclockid(3) makes it of a PID.
_ALL_THREADS = 2


def boot() -> str:
    """Return the id of this start of the machine. Raises `OSError`."""
    return _BOOT.read_text().strip()


def mark(pid: int | None) -> str:
    """Return a unique mark of a process (boot, PID, start time); empty if it does not run."""
    try:
        fields = _fields(pid)
    except OSError:
        return ""
    return f"{boot()}:{pid}:{fields[_BEGAN]}" if fields[_STATE] not in "ZX" else ""


def parent(pid: int) -> int:
    """Return the PID of the parent of a process. Raises `OSError` if it does not run."""
    return int(_fields(pid)[_PARENT])


def cpu(pid: int | None) -> float | None:
    """Return the processor seconds of a process, exact to the nanosecond; None if it does not run."""
    try:
        return time.clock_gettime(~pid << 3 | _ALL_THREADS) if pid else None
    except OSError:
        return None


def _fields(pid: int | None) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return text.rpartition(") ")[2].split()
