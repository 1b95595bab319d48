"""The node's own directory: made with mode 0700, held by one node at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import tempfile
from pathlib import Path

# A unix socket's path has at most 107 bytes (unix(7)); a core's socket adds this much.
_SOCKET_NAME = 40
_MAX_PATH = 107
# What follows the short name of a directory that is not below the node's own.
_OTHERS = {"run": "", "door": "-door"}


class StateDirectory:
    """STATE_DIR, and the directory below it for what lives as long as the process (sockets)."""

    def __init__(self, path: Path) -> None:
        # Resolved, because systemd's StateDirectory may be a link, and because cores carry the name.
        self.path = path.resolve()
        self._lock: int | None = None

    @property
    def run_dir(self) -> Path:
        """Where the sockets of cores are. Cores carry its name, so that a later node finds those that were left."""
        return self._of_sockets("run")

    @property
    def door_dir(self) -> Path:
        """Where gRPC's own socket is, which a core has no business with, nor a configuration."""
        return self._of_sockets("door")

    @property
    def database(self) -> Path:
        """What outlives the process."""
        return self.path / "state.db"

    @property
    def lock(self) -> int:
        """The descriptor that holds it."""
        assert self._lock is not None
        return self._lock

    def claim(self, lock: int | None = None) -> None:
        """Make the directories private and take the lock. Raises `OSError` if another node has it.

        `lock`: what holds it already, by an earlier program of this process.
        """
        for directory in (self.path, self.run_dir, self.door_dir):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(directory)
        if lock is None:
            lock = self._open_lock()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise OSError(f"another node has STATE_DIR {self.path}; give each its own") from error
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _of_sockets(self, name: str) -> Path:
        below = self.path / name
        writable = os.access(self.path, os.W_OK) or not self.path.exists()
        if writable and len(os.fsencode(below)) + _SOCKET_NAME <= _MAX_PATH:
            return below
        return Path(tempfile.gettempdir()) / f"txnode-{os.getuid()}-{hash_name(self.path)}{_OTHERS[name]}"

    def _open_lock(self) -> int:
        """On a disk that became read-only the lock of an earlier node does, or the directory itself."""
        file = self.path / "lock"
        try:
            lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return os.open(file if file.exists() else self.path, os.O_RDONLY)
        os.fchmod(lock, 0o600)
        return lock


def hash_name(path: Path) -> str:
    """A short name for a long path."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def _make_private(directory: Path) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise OSError(f"{directory} is not a directory of this user")
    if stat.S_IMODE(status.st_mode) != 0o700:
        directory.chmod(0o700)
