"""What a core may touch of the machine: the rules that its leash is given, and what there is to say without them."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from drivers.process import leash
from drivers.process.elf import Script, interpreter
from drivers.process.paths import CERTIFICATES, Paths, mode

NO_LANDLOCK = (
    "there is no Landlock here (Linux 5.13 or later has it): a core can read and write all that the node can, its key "
    "among it, and only the files that the node sees a configuration name are kept from it"
)
SCRIPT = "{} is a script: it, and the core that it runs, can read and write all that the node can"

# What the Go runtime and its libraries read: names of hosts, certificates, time zones, types of files, the machine.
_SYSTEM = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/services"),
    *("/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager/resolv.conf", "/etc/protocols"),
    *("/etc/localtime", "/usr/share/zoneinfo", "/etc/mime.types", "/etc/apache2/mime.types", "/usr/share/mime"),
    *("/proc/self", "/proc/sys/net", "/proc/sys/kernel", "/proc/meminfo", "/proc/stat", "/proc/loadavg"),
    *("/sys/kernel/mm/transparent_hugepage", "/sys/devices/system/cpu", "/sys/fs/cgroup"),
    *("/dev/urandom", "/dev/random"),
    *CERTIFICATES,
)
# Where files are that take another's name, as DHCP clients do it with the resolver's.
_ETC = Path("/etc")
# Those that are read again while a core runs. Of a plain file the kernel knows the one that was there alone.
_READ_AGAIN = ("/etc/resolv.conf", "/etc/hosts")
_DEVICES = ("/dev/null", "/dev/net/tun")
# What an executable that is linked when it starts reads.
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/ld.so.preload")


@dataclass(frozen=True)
class Touched:
    """What a configuration names: `files` to be read, `sockets` to listen at, ports of TCP to listen on.

    `abstract`: it names sockets that are in no directory. Only what is allowed becomes a rule.
    """

    files: Collection[str] = ()
    sockets: Collection[str] = ()
    ports: Collection[range] = ()
    abstract: bool = False

    def listening(self, ports: Iterable[int]) -> Touched:
        """The same, and these ports."""
        return replace(self, ports=(*self.ports, *(range(port, port + 1) for port in ports)))


@dataclass(frozen=True)
class Confinement:
    """What the cores of a node may touch. `assets` are lists that they read, `state` is where they write."""

    paths: Paths = field(default_factory=Paths)
    state: Path | None = None
    assets: Collection[Path] = field(default=())

    @property
    def reads_etc(self) -> bool:
        """Whether all of it can be read: not by root, whose secrets are there, nor where there is one of the node's."""
        return os.geteuid() != 0 and not any(one.is_relative_to(_ETC) for one in self.paths.withheld)

    def pinned(self) -> list[Path]:
        """Files of which another one that takes the name is withheld from a core that runs.

        Links lead to directories that it reads.
        """
        again = () if self.reads_etc else _READ_AGAIN
        return [Path(path) for path in again if os.path.realpath(path) == path]

    def covers(self, path: Path) -> bool:
        """Whether the directory is readable that a file of lists is in, where a link to it leads."""
        directory = Path(os.path.realpath(path)).parent
        places = [*self.assets, *([self.state] if self.state else [])]
        return any(directory.is_relative_to(os.path.realpath(place)) for place in places)

    def rules(self, executable: Path, touched: Touched) -> tuple[str, ...]:
        """The rules for a run of this executable with such a configuration; none where they cannot be enforced."""
        if unconfined(executable) is not None:
            return ()
        return tuple(dict.fromkeys(self._rules(executable, touched)))

    def _rules(self, executable: Path, touched: Touched) -> Iterator[str]:
        yield f"run={executable}"
        linker = interpreter(executable)
        yield from (f"run={linker}", *_each("read", _LIBRARIES)) if linker else ()
        yield from _each("read", _SYSTEM)
        yield from [f"read={_ETC}"] if self.reads_etc else []
        yield from _each("device", _DEVICES)
        yield from _each("read", self.assets)
        if self.state is not None:
            yield f"write={self.state}"
        yield from _each("read", (place for file in touched.files for place in named_places(self.paths, file)))
        yield from _each("write", (Path(socket).parent for socket in touched.sockets if self._may_have(socket)))
        # Port 0 is whichever is free, which the own end of a connection may ask for.
        yield from ("bind=0-0", *(f"bind={ports.start}-{ports.stop - 1}" for ports in touched.ports))
        if touched.abstract:
            yield "abstract"

    def _may_have(self, socket: str) -> bool:
        return self.paths.allows_socket(socket) and self.paths.allows(Path(socket).parent)


def named_places(paths: Paths, file: str) -> Iterator[Path]:
    """What is to be read for a file that a configuration names: its directory, where a renewed one will be, …

    … and that of the file that it is a link to; the file alone if no more is allowed.
    """
    if not paths.allows(file):
        return
    path = Path(file)
    for place in (path, Path(os.path.realpath(path))):
        beside = not stat.S_ISDIR(mode(place)) and paths.allows(place.parent)
        found = place.parent if beside else place
        if mode(found):
            yield found


def unconfined(executable: Path) -> str | None:
    """Why no rules hold for this executable, for an operator; None if they do."""
    if not supported():
        return NO_LANDLOCK
    try:
        interpreter(executable)
    except Script:
        return SCRIPT.format(executable)
    return None


@functools.cache
def supported() -> bool:
    """Whether this kernel enforces rules."""
    return leash.version() > 0


def _each(kind: str, paths: Iterable[str | Path]) -> Iterator[str]:
    return (f"{kind}={path}" for path in paths)
