"""Reads the kernel's values for the checks of the machine."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from node.base.proc import parent
from node.doctor.interpreter import is_optimised
from node.doctor.machine import Machine

# adjtimex(2): the clock is not synchronised.
_TIME_ERROR = 5


def look(state: Path, pid: int | None = None, root: Path = Path("/")) -> Machine:
    """Read all values. `pid`: the node's process, whose limits count; `root`: the directory of /proc and /sys."""
    net = root / "proc/sys/net"
    free, fault = _disk(state)
    return Machine(
        synchronised=_synchronised(),
        open_files=_open_files(root, pid),
        conntrack=_pair(_number(net / "netfilter/nf_conntrack_count"), _number(net / "netfilter/nf_conntrack_max")),
        somaxconn=_number(net / "core/somaxconn"),
        tcp_rmem=_numbers(net / "ipv4/tcp_rmem"),
        tcp_wmem=_numbers(net / "ipv4/tcp_wmem"),
        congestion=_text(net / "ipv4/tcp_congestion_control"),
        disk_free=free,
        disk_fault=fault,
        memory_free=min(_memory(root), default=None),
        optimised=is_optimised(),
    )


def node_of(state: Path) -> int | None:
    """The node that holds the lock of this state directory; None if it is free.

    /proc/locks names the process that took the lock. After an upgrade that one is gone: the node that runs inherited
    the lock, as its parent did, the keeper.
    """
    try:
        lock = (state / "lock").stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(lock.st_ino):
            taken = int(words[4])
            return taken if _has_open(taken, lock) else _heir(lock) or taken
    return None


def _heir(lock: os.stat_result) -> int | None:
    """The process that runs `twistd` with this file open, below another such one if there are two."""
    holders = dict[int, int]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(process.name)
            if b"twistd" in (process / "cmdline").read_bytes() and _has_open(pid, lock):
                holders[pid] = parent(pid)
    below = [pid for pid, above in holders.items() if above in holders]
    return max(below or holders, default=None)


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Whether the process has this file open; not if that may not be read."""
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.path.samestat(each.stat(), file):
                    return True
    return False


def given(pid: int, proc: Path = Path("/proc")) -> tuple[Path, dict[str, str]]:
    """Return a process's working directory and initial environment. Raises `OSError` if they may not be read."""
    words = os.fsdecode((proc / f"{pid}/environ").read_bytes()).split("\0")
    return (proc / f"{pid}/cwd").readlink(), dict(word.split("=", 1) for word in words if "=" in word)


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text and text.isdigit() else None


def _numbers(file: Path) -> tuple[int, ...] | None:
    text = _text(file)
    return tuple(map(int, text.split())) if text else None


def _pair(count: int | None, most: int | None) -> tuple[int, int] | None:
    return None if count is None or not most else (count, most)


def _open_files(root: Path, pid: int | None) -> int | None:
    """The node's limit of open files; without a node this shell's hard limit, to which a node raises its own."""
    limits = _text(root / f"proc/{pid}/limits") if pid else None
    for line in (limits or "").splitlines():
        if line.startswith("Max open files"):
            soft = line.split()[3]
            return int(soft) if soft.isdigit() else None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _memory(root: Path) -> Iterator[int]:
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    limit, used = (_number(root / f"sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        yield limit - used


def _disk(state: Path) -> tuple[int | None, str]:
    """Free bytes, and why the directory cannot be written, or ""."""
    try:
        found = os.statvfs(state)
    except OSError as error:
        return None, f"{state}: {error.strerror}"
    if found.f_flag & os.ST_RDONLY:
        return None, f"{state} is mounted read-only"
    free = found.f_bavail * found.f_frsize
    return free, "" if found.f_favail or not found.f_files else f"{state} has no room for one file more (inodes)"


def _synchronised() -> bool | None:
    """Whether the kernel's clock is synchronised, by systemd-timesyncd or adjtimex(2); None if unknown."""
    if Path("/run/systemd/timesync/synchronized").exists():
        return True
    try:
        answer = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))
    except (OSError, AttributeError):
        return None
    return None if answer < 0 else answer != _TIME_ERROR
