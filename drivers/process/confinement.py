"""The Landlock rules for a core: which files, sockets and ports it may use, and warnings where none hold.

Of an executable the program interpreter is needed, too: its dynamic linker (elf(5)).
"""

from __future__ import annotations

import functools
import os
import stat
import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from drivers.install import leash
from drivers.process.paths import CERTIFICATES, Paths, mode

UNCONFINED = (
    "a core can read and write all that the node can, its key included; the node only refuses configurations in which "
    "it sees a file that is not allowed"
)
NO_LANDLOCK = f"this kernel has no Landlock (Linux 5.13 and later do): {UNCONFINED}"
SCRIPT = "{} is a script: it and the core that it runs can read and write all that the node can"

# Files that the Go run-time and libraries read: host names, certificates, time zones, MIME types, machine properties.
_SYSTEM = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/services"),
    *("/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager/resolv.conf", "/etc/protocols"),
    *("/etc/localtime", "/usr/share/zoneinfo", "/etc/mime.types", "/etc/apache2/mime.types", "/usr/share/mime"),
    *("/proc/self", "/proc/sys/net", "/proc/sys/kernel", "/proc/meminfo", "/proc/stat", "/proc/loadavg"),
    *("/sys/kernel/mm/transparent_hugepage", "/sys/devices/system/cpu", "/sys/fs/cgroup"),
    *("/dev/urandom", "/dev/random"),
    *CERTIFICATES,
)
# The directory where files are replaced by renaming another one, as DHCP clients do with resolv.conf.
_ETC = Path("/etc")
# Files that a core reads again while it runs. A rule for a plain file holds only for the inode that was there.
_READ_AGAIN = ("/etc/resolv.conf", "/etc/hosts")
_DEVICES = ("/dev/null", "/dev/net/tun")
# Files that a dynamically linked executable reads.
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/ld.so.preload")
_MAGIC = b"\x7fELF"
_INTERPRETER = 3


class Script(Exception):
    """The file is not an ELF executable, so another program interprets it."""


def interpreter(executable: Path) -> str | None:
    """Return the path of the dynamic linker; None if the executable needs none. Raises `Script`."""
    try:
        with executable.open("rb") as file:
            head = file.read(4096)
    except OSError:
        return None  # cannot be run either
    if not head.startswith(_MAGIC):
        raise Script
    try:
        return _interpreter(head)
    except struct.error:
        return None


def _interpreter(head: bytes) -> str | None:
    order, wide = "<" if head[5] == 1 else ">", head[4] == 2
    table = struct.unpack_from(order + ("Q" if wide else "I"), head, 32 if wide else 28)[0]
    size, count = struct.unpack_from(order + "HH", head, 54 if wide else 42)
    for number in range(count):
        # A segment: its type, offset in the file, and size.
        kind, place, length = struct.unpack_from(order + ("I4xQ16xQ" if wide else "II8xI"), head, table + number * size)
        if kind == _INTERPRETER:
            return head[place : place + length].rstrip(b"\0").decode("utf-8", "surrogateescape")
    return None


@dataclass(frozen=True)
class Touched:
    """The names in a configuration: `files` to read, unix `sockets` and TCP `ports` to listen on.

    `abstract`: whether it names abstract sockets. Only what the operator allows becomes a rule.
    """

    files: Collection[str] = ()
    sockets: Collection[str] = ()
    ports: Collection[range] = ()
    abstract: bool = False

    def listening(self, ports: Iterable[int]) -> Touched:
        """Return a copy with these ports added."""
        return replace(self, ports=(*self.ports, *(range(port, port + 1) for port in ports)))


@dataclass(frozen=True)
class Confinement:
    """Paths that the cores of a node may use. `assets`: directories of geo files to read; `state`: where they write."""

    paths: Paths = field(default_factory=Paths)
    state: Path | None = None
    assets: Collection[Path] = field(default=())

    @property
    def reads_etc(self) -> bool:
        """Whether cores may read all of /etc: not as root, who can read secrets there, nor if the node has one."""
        return os.geteuid() != 0 and not any(one.is_relative_to(_ETC) for one in self.paths.withheld)

    def pinned(self) -> list[Path]:
        """Return files whose replacement a running core cannot read.

        Links are fine: they point into directories that it may read.
        """
        again = () if self.reads_etc else _READ_AGAIN
        return [Path(path) for path in again if os.path.realpath(path) == path]

    def covers(self, path: Path) -> bool:
        """Whether cores may read the directory of a geo file, after links."""
        directory = Path(os.path.realpath(path)).parent
        places = [*self.assets, *([self.state] if self.state else [])]
        return any(directory.is_relative_to(os.path.realpath(place)) for place in places)

    def rules(self, executable: Path, touched: Touched) -> tuple[str, ...]:
        """Return the rules for this executable with such a configuration; none where the kernel cannot enforce them."""
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
        # Port 0 asks for a free port, as the local end of an outgoing connection may.
        yield from ("bind=0-0", *(f"bind={ports.start}-{ports.stop - 1}" for ports in touched.ports))
        if touched.abstract:
            yield "abstract"

    def _may_have(self, socket: str) -> bool:
        return self.paths.allows_socket(socket) and self.paths.allows(Path(socket).parent)


def named_places(paths: Paths, file: str) -> Iterator[Path]:
    """Yield what must be readable for a file that a configuration names.

    That is its directory, so that a renewed file can be read, and that of the file that it links to; only the file
    where the directory is not allowed.
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
    """Return why no rules hold for this executable, for an operator; None if they do."""
    if not supported():
        return NO_LANDLOCK
    try:
        interpreter(executable)
    except Script:
        return SCRIPT.format(executable)
    return None


@functools.cache
def supported() -> bool:
    """Whether this kernel has Landlock."""
    return leash.version() > 0


def _each(kind: str, paths: Iterable[str | Path]) -> Iterator[str]:
    return (f"{kind}={path}" for path in paths)
