"""A container run by `crun` as its image configures: read-only, with its own network, without capabilities."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.staging.process import Child


@dataclass(frozen=True)
class Image:
    """The file tree of an image, and its OCI configuration (`Env`, `Entrypoint`, `User`, ...)."""

    root: Path
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Container:
    """A container, which may be started several times; `volume` is the directory of the image's one volume."""

    image: Image
    bundle: Path
    volume: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> Child:
        """Start it. It runs until `stop`; the child's output is the container's."""
        (self.bundle / "config.json").write_text(json.dumps(self._specification()))
        return Child([*_CRUN, "run", "--bundle", str(self.bundle), self.bundle.name], {"PATH": "/usr/sbin:/usr/bin"})

    def stop(self) -> None:
        subprocess.run([*_CRUN, "kill", self.bundle.name, self.image.config["StopSignal"]], check=True)

    def run(self, *command: str) -> str:
        """Run a command inside as the image's user. Returns its output; raises `AssertionError` if it fails."""
        inside = [*_CRUN, "exec", "--user", self.image.config["User"], self.bundle.name, *command]
        done = subprocess.run(inside, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    @property
    def pid(self) -> int:
        """The pid of its process 1 in the outer namespace."""
        state = subprocess.run([*_CRUN, "state", self.bundle.name], capture_output=True, check=True).stdout
        return int(json.loads(state)["pid"])

    def _specification(self) -> dict[str, Any]:
        config = self.image.config
        user, group = map(int, config["User"].split(":"))
        environment = [*config["Env"], *(f"{name}={value}" for name, value in self.environment.items())]
        [volume] = config["Volumes"]
        namespaces = ("pid", "network", "ipc", "uts", "mount")
        return {
            "ociVersion": "1.0.0",
            "hostname": "container",
            "root": {"path": str(self.image.root), "readonly": True},
            "process": {
                "user": {"uid": user, "gid": group},
                "args": [*config["Entrypoint"], *(config.get("Cmd") or ())],
                "env": environment,
                "cwd": config["WorkingDir"],
                "capabilities": {},
                "noNewPrivileges": True,
            },
            "mounts": [*_MOUNTS, _mount(volume, "bind", str(self.volume), "rbind", "rw")],
            "linux": {"namespaces": [{"type": name} for name in namespaces]},
        }


# crun refuses a machine with both versions of control groups, so it sees only the second; it needs neither.
_ALONE = 'mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec crun --cgroup-manager=disabled "$@"'
_CRUN = ("unshare", "--mount", "sh", "-c", _ALONE, "crun")


def _mount(destination: str, kind: str, source: str, *options: str) -> dict[str, object]:
    return {"destination": destination, "type": kind, "source": source, "options": options}


_MOUNTS: Sequence[dict[str, object]] = (
    _mount("/proc", "proc", "proc"),
    _mount("/dev", "tmpfs", "tmpfs", "nosuid", "mode=755"),
    _mount("/dev/pts", "devpts", "devpts", "newinstance", "ptmxmode=0666"),
    _mount("/dev/shm", "tmpfs", "shm", "nosuid", "noexec", "mode=1777"),
    _mount("/sys", "sysfs", "sysfs", "nosuid", "noexec", "ro"),
    _mount("/tmp", "tmpfs", "tmpfs", "nosuid", "mode=1777"),
)
