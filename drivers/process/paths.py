"""Decide which files of the machine a configuration may name: those below directories in CORE_PATHS."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivers.process.json_text import texts
from drivers.process.settings import CORE_PATHS
from node.base.errors import InvalidConfig
from node.contract.driver import Host

# The directories of certificate authorities on various systems; they are not secret.
CERTIFICATES = (
    *("/etc/ssl/certs", "/etc/ssl/cert.pem", "/etc/ssl/ca-bundle.pem", "/etc/pki/tls/certs", "/etc/pki/tls/cacert.pem"),
    *("/etc/pki/ca-trust", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates", "/usr/share/pki"),
    *("/etc/ca-certificates", "/var/lib/ca-certificates", "/usr/share/ssl/certs"),
)

# The most files that a configuration may name: each becomes a rule.
MOST = 1000
# The most characters of a path, which the kernel limits, and directories in it, each of which costs a system call.
_LONGEST, _DEEPEST = 4095, 40


def directories(text: str) -> tuple[Path, ...]:
    """Parse the directories of a setting."""
    return tuple(Path(word) for word in text.split(os.pathsep) if word)


@dataclass(frozen=True)
class Paths:
    """The resolved directories (or files) that cores may read for a configuration, and those that are `withheld` there.

    `own` is the directory of the cores' sockets, `listed` are the allowed directories as the operator wrote them,
    `authorities` those of the system's certificates, where cores may not write.
    """

    allowed: tuple[Path, ...] = ()
    withheld: tuple[Path, ...] = ()
    own: Path | None = None
    listed: tuple[str, ...] = ()
    authorities: tuple[Path, ...] = ()

    @classmethod
    def of(cls, host: Host) -> Paths:
        chosen, certificates = directories(host.settings.get(CORE_PATHS.name, "")), tuple(map(Path, CERTIFICATES))
        listed, own = (*chosen, *certificates), Path(os.path.realpath(host.directory))
        authorities = tuple(one for one in _resolved(certificates) if not _is_in(one, _resolved(chosen)))
        return cls(_resolved(listed), _resolved(host.withheld), own, tuple(map(str, listed)), authorities)

    def named_in(self, tree: Any) -> frozenset[str]:
        """Return all strings of a configuration that may be allowed files, under any key.

        Raises `InvalidConfig` for too many.
        """
        # A cheap check, for the many strings that are not paths at all.
        beginnings = (*self.listed, *map(str, self.allowed))
        found = frozenset(named.text for named in texts(tree) if named.text.startswith(beginnings))
        if len(found) > MOST:
            raise InvalidConfig(f"the configuration names more than {MOST:,} files")
        return found

    def allows(self, path: str | Path) -> bool:
        """Whether a configuration may name this file or directory; links and `..` are resolved first."""
        found = resolved(path)
        if found is None or any(found.is_relative_to(one) or one.is_relative_to(found) for one in self.withheld):
            return False
        return _is_in(found, self.allowed)

    def allows_socket(self, path: str | Path) -> bool:
        """Whether a core may create this socket, or connect to it."""
        found = resolved(path)
        if found is None or _is_in(found, self.authorities):
            return False
        return self.allows(path) or found.parent == self.own

    def require(self, path: str | Path, place: str) -> None:
        """Raises `InvalidConfig` for a file that a configuration must not name; `place` is where it does."""
        if not self.allows(path):
            raise InvalidConfig(f"{place}: {str(path)!r} is not in a directory that {CORE_PATHS.name} allows")
        # A file that the node cannot stat is left to the core.
        found = mode(path)
        if found and not (stat.S_ISREG(found) or stat.S_ISDIR(found)):
            raise InvalidConfig(f"{place}: {str(path)!r} is a device, a pipe or a socket, not a file")


def resolved(path: str | Path) -> Path | None:
    """Resolve an absolute path; None for one that is relative or impossible."""
    if len(os.fspath(path)) > _LONGEST or Path(path).as_posix().count("/") > _DEEPEST:
        return None
    try:
        return Path(os.path.realpath(path)) if Path(path).is_absolute() else None
    except ValueError:
        return None


def mode(path: str | Path) -> int:
    """Return the st_mode of a path (stat(2)); 0 if it does not exist or the node cannot stat it."""
    try:
        return Path(path).stat().st_mode
    except (OSError, ValueError):
        return 0


def _is_in(path: Path, directories: Iterable[Path]) -> bool:
    return any(path.is_relative_to(one) for one in directories)


def _resolved(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(found for path in paths if (found := resolved(path)) is not None)
