"""A node and its cores in a memory cgroup of their own, as on a small host: what they took at most, who was killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NAME = f"txnode-bench-{os.getpid()}"
# Seconds in which the kernel lets go of a group whose processes have ended.
_GONE = 10.0


@dataclass(frozen=True)
class Confined:
    """A group, of either version of cgroups."""

    directory: Path
    unified: bool

    @property
    def through(self) -> Sequence[str]:
        """Stands before a command that is to run in it, with all that it starts."""
        return "/bin/sh", "-c", f'echo $$ >{self.directory}/cgroup.procs && exec "$@"', "-"

    def limit(self, size: int) -> None:
        """Bytes of memory, with what the kernel keeps for it; no swap beyond."""
        self._write("memory.max" if self.unified else "memory.limit_in_bytes", size)
        swap = self.directory / ("memory.swap.max" if self.unified else "memory.memsw.limit_in_bytes")
        if swap.exists():
            swap.write_text("0" if self.unified else str(size))

    def peak(self) -> int:
        """The most bytes that it had at once."""
        return int(self._read("memory.peak" if self.unified else "memory.max_usage_in_bytes"))

    def kills(self) -> int:
        """How many of its processes the kernel has ended for want of memory."""
        lines = self._read("memory.events" if self.unified else "memory.oom_control").splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def _write(self, name: str, value: int) -> None:
        (self.directory / name).write_text(str(value))

    def _read(self, name: str) -> str:
        return (self.directory / name).read_text()


@contextmanager
def confined(size: int) -> Iterator[Confined]:
    """A group with so many bytes. Raises `SystemExit` where this user can make none."""
    unified = not (_ROOT / "memory").is_dir()
    group = Confined((_ROOT if unified else _ROOT / "memory") / _NAME, unified)
    try:
        group.directory.mkdir()
        group.limit(size)
    except OSError as error:
        raise SystemExit(f"there is no group to limit memory with: {error}; it takes root and a memory controller")
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
