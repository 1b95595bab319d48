"""Debian with its own systemd as process 1 of new namespaces; its network is only a loopback.

Needs root, and `unshare` and `nsenter` of util-linux, but no container engine.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from scripts.staging.process import tied
from scripts.staging.wait import until

_NAMESPACES = ("pid", "mount", "uts", "ipc", "net", "cgroup")
# Sets up what systemd requires of a container engine, in a new mount namespace. $1 is the tree, $2 the control group.
_BOOT = """
set -e
echo $$ >"$2/cgroup.procs"
exec unshare --pid --fork --kill-child --mount --uts --ipc --net --cgroup sh -ec '
mount --make-rprivate /
mount --bind "$1" "$1"
cd "$1"
mkdir -p .outside
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup 2>/dev/null || {
  mount -t tmpfs tmpfs sys/fs/cgroup
  mount -t cgroup2 cgroup2 sys/fs/cgroup
}
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom tty; do
  touch dev/$device
  mount --bind /dev/$device dev/$device
done
mkdir dev/shm dev/pts
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
pivot_root . .outside
cd /
umount -l /.outside
hostname guest
PATH=/usr/sbin:/usr/bin:/sbin:/bin
exec env -i container=guest PATH=$PATH /lib/systemd/systemd --log-target=journal --unit=multi-user.target
' sh "$1"
"""


class Guest:
    """A Debian tree, booted inside the `with` block; `reboot` boots it again with its disk as it is."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._group = _cgroups() / f"txnode-guest-{root.name}-{time.monotonic_ns()}"

    def __enter__(self) -> Self:
        self._group.mkdir()
        try:
            self._boot()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()  # The kernel then kills process 1 (--kill-child), and with it all others.
        self._process.wait()
        until(self._emptied, 20, "the guest's control groups can be removed")

    @property
    def pid(self) -> int:
        """The pid of the guest's process 1 in the outer namespace."""
        return psutil.Process(self._process.pid).children()[0].pid

    def run(self, *command: str | Path, check: bool = True, timeout: float = 240) -> str:
        """Run a command in the guest. Returns stdout and stderr; raises `AssertionError` with them if it fails."""
        return _output([*self._inside, "env", "-i", *_ENVIRONMENT, *command], check, timeout)

    def network(self, *command: str | Path, timeout: float = 120) -> str:
        """Run a command of this machine in the guest's network, like `run`."""
        return _output(["nsenter", f"--net=/proc/{self.pid}/ns/net", *command], True, timeout)

    def shows(self, name: str, unit: str = "node") -> str:
        """A property of the unit."""
        return self.run("systemctl", "show", "-P", name, unit).strip()

    def reboot(self) -> None:
        """Shut down cleanly and boot again."""
        self.shut_down()
        self._boot()

    def shut_down(self) -> None:
        self.run("systemctl", "poweroff", "--no-block")
        self._process.wait(60)

    @property
    def _inside(self) -> list[str]:
        return ["nsenter", f"--target={self.pid}", *(f"--{kind}" for kind in _NAMESPACES), "--"]

    def _boot(self) -> None:
        command = ["sh", "-c", _BOOT, "sh", str(self.root), str(self._group)]
        self._process = tied(command, stdin=subprocess.DEVNULL)
        until(lambda: self._up, 60, "the guest's systemd is up")
        self.network("ip", "link", "set", "lo", "up")

    @property
    def _up(self) -> bool:
        states = {"running", "degraded"}  # Some of Debian's units fail in a guest.
        return self.run("systemctl", "is-system-running", check=False).strip() in states

    def _emptied(self) -> bool:
        for group in sorted(self._group.glob("**/"), reverse=True):
            group.rmdir()
        return not self._group.exists()


_ENVIRONMENT = ("PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8")


@dataclass(frozen=True)
class Layers:
    """An overlay tree: `lower` are its unchanged lower layers, topmost first; `directory` takes the changes."""

    lower: tuple[Path, ...]
    directory: Path

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """Mount the tree inside the block. Yields its path; changes stay in `directory`."""
        upper, work, root = (self.directory / name for name in ("upper", "work", "root"))
        for part in (upper, work, root):
            part.mkdir(parents=True, exist_ok=True)
        layers = f"lowerdir={':'.join(map(str, self.lower))},upperdir={upper},workdir={work}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, root], check=True)
        try:
            yield root
        finally:
            subprocess.run(["umount", root], check=True)

    @property
    def all(self) -> tuple[Path, ...]:
        """All its layers, as `lower` of a tree on top of it."""
        return (self.directory / "upper", *self.lower)


def _cgroups() -> Path:
    """The mount point of control groups version 2."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return next(Path(where) for _, where, kind, *_ in mounts if kind == "cgroup2")


def _output(command: Sequence[str | Path], check: bool, timeout: float) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        check=False,
    )
    output = done.stdout.decode(errors="replace")
    assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{output}"
    return output
