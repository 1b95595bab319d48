"""A memory cgroup for a node and its cores, as on a small host: peak use and OOM kills."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NAME = f"txnode-bench-{os.getpid()}"
# Seconds until the kernel lets a group be removed after its processes have ended.
_GONE = 10.0


@dataclass(frozen=True)
class Confined:
    """A memory cgroup of version 1 or 2 (`unified`)."""

    directory: Path
    unified: bool

    @property
    def through(self) -> Sequence[str]:
        """A command prefix that runs the command, with its children, in the group."""
        return "/bin/sh", "-c", f'echo $$ >{self.directory}/cgroup.procs && exec "$@"', "-"

    def limit(self, size: int) -> None:
        """Limit the group to `size` bytes of memory (kernel memory included), without swap."""
        self._write("memory.max" if self.unified else "memory.limit_in_bytes", size)
        swap = self.directory / ("memory.swap.max" if self.unified else "memory.memsw.limit_in_bytes")
        if swap.exists():
            swap.write_text("0" if self.unified else str(size))

    def peak(self) -> int:
        """The group's peak memory in bytes."""
        return int(self._read("memory.peak" if self.unified else "memory.max_usage_in_bytes"))

    def kills(self) -> int:
        """The number of processes that the OOM killer has ended."""
        lines = self._read("memory.events" if self.unified else "memory.oom_control").splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def _write(self, name: str, value: int) -> None:
        (self.directory / name).write_text(str(value))

    def _read(self, name: str) -> str:
        return (self.directory / name).read_text()


@contextmanager
def confined(size: int) -> Iterator[Confined]:
    """A group with so many bytes. Raises `SystemExit` if this user cannot create one."""
    unified = not (_ROOT / "memory").is_dir()
    group = Confined((_ROOT if unified else _ROOT / "memory") / _NAME, unified)
    try:
        group.directory.mkdir()
        group.limit(size)
    except OSError as error:
        raise SystemExit(f"no memory cgroup: {error}: run as root on a host with cgroups' memory controller")
    try:
        yield group
    finally:
        _remove(group.directory)


def _remove(directory: Path) -> None:
    end = time.monotonic() + _GONE
    while True:
        try:
            return directory.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
