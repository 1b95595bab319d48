"""Files with secrets: write one atomically, and check whether others may read it."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def write_secret(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write `data` to `path` atomically and durably; at no moment is it readable by more users than `mode` allows.

    The owner stays that of the old file, or becomes that of the directory: root may write for the node's user.
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
    """Remove temporary files of a killed process that was writing `path`; its name may have wildcards.

    Raises `OSError`.
    """
    for left in path.parent.glob(f".{path.name}.*"):
        left.unlink(missing_ok=True)


def exposed(path: Path) -> bool:
    """Return whether every user of the machine may read or write the file. The mode for its group is not checked."""
    try:
        return bool(path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH))
    except OSError:  # missing, or not accessible
        return False
