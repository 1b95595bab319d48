"""Files with secrets: written at once and whole, and whether others may read them."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def write_secret(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Put `data` into `path` at once, whole and durable, readable by whom `mode` lets at any moment.

    Whoever owned the file, or else its directory, owns it afterwards: root may write for the node's user.
    """
    owner = (path if path.exists() else path.parent).stat()
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if os.geteuid() == 0:
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def clear(path: Path) -> None:
    """What a process that was killed has left of writing `path`, whose name may have wildcards. Raises `OSError`."""
    for left in path.parent.glob(f".{path.name}.*"):
        left.unlink(missing_ok=True)


def exposed(path: Path) -> bool:
    """Everybody on the machine may read or write it. Of a group the node does not know who is in it."""
    try:
        return bool(path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH))
    except OSError:  # nobody reads it, then
        return False
