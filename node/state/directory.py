"""The node's own directory: created with mode 0700, locked by one node at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from node.base.logs import Logger
from node.base.part import Part
from node.base.settings import Options, setting
from node.contract.keeper import Keeper

# A unix socket's path has at most 107 bytes (unix(7)); the name of a core's socket takes this many.
_SOCKET_NAME = 40
_MAX_PATH = 107
# For a TMPDIR that is too long. `_make_private` refuses what another user has put there.
_SHORT = Path("/tmp")  # noqa: S108
# Seconds to wait for another node's end: the processes of a killed keeper need some; and between two looks.
_PATIENCE, _LOOK = 5.0, 0.02
# The suffix of a directory's short name, if it is not below STATE_DIR.
_OTHERS = {"run": "", "door": "-door"}


@dataclass(frozen=True)
class StateOptions(Options):
    """Where the node keeps its state."""

    dir: Path = setting("STATE_DIR", "var", Path).help(
        "directory of the state file, certificate and keys; only one node may use it, and it gets mode 0700",
        "A relative path starts at the working directory. A service should have an absolute path, on a disk "
        "that keeps its files when the node is reinstalled.",
    )


class StateDirectory(Part):
    """STATE_DIR, and the directories for the sockets of the running node."""

    title = "the lock of the state directory"
    log = Logger()

    def __init__(self, path: Path, keeper: Keeper | None = None) -> None:
        """`keeper` holds the lock for the next node process."""
        self._keeper = keeper or Keeper()
        # Resolved: systemd's StateDirectory may be a link, and cores carry the path.
        self.path = path.resolve()
        self._lock: int | None = None

    @property
    def run_dir(self) -> Path:
        """The directory of the cores' sockets. Cores carry its path, so that a later node finds orphaned ones."""
        return self._of_sockets("run")

    @property
    def door_dir(self) -> Path:
        """The directory of gRPC's own socket, out of reach of cores and their configurations."""
        return self._of_sockets("door")

    @property
    def database(self) -> Path:
        """The path of the state file."""
        return self.path / "state.db"

    @property
    def lock(self) -> int:
        """The descriptor of the lock. The directory must be claimed."""
        assert self._lock is not None
        return self._lock

    def start(self) -> None:
        self.claim(next(iter(self._keeper.take("lock")), None), _PATIENCE)
        self._keeper.put("lock", [self.lock])

    def claim(self, lock: int | None = None, patience: float = 0.0) -> None:
        """Make the directories private and take the lock. Raises `OSError` if another node has it.

        `lock`: a descriptor that already holds it, of the node before; it may be of another STATE_DIR. `patience`:
        seconds to wait for the other node's end. Blocking, for before the reactor runs.
        """
        for directory in (self.path, self.run_dir, self.door_dir):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(directory)
        if lock is not None and not self._is_here(lock):
            os.close(lock)
            lock = None
        if lock is None:
            lock = self._open_lock()
        if patience and not _locked(lock):
            self.log.info(
                "another node has the lock of STATE_DIR {path}: the node waits up to {seconds:g} s for that one's end",
                path=str(self.path),
                seconds=patience,
            )
        deadline = time.monotonic() + patience
        while not _locked(lock):
            if time.monotonic() >= deadline:
                os.close(lock)
                raise OSError(f"another node uses STATE_DIR {self.path}: give each node its own")
            time.sleep(_LOOK)
        self._lock = lock

    def stop(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _of_sockets(self, name: str) -> Path:
        """Below STATE_DIR; where that is read-only or too long, below TMPDIR, or else below /tmp."""
        short = f"txnode-{os.getuid()}-{hash_name(self.path)}{_OTHERS[name]}"
        places = [self.path / name] if self._is_writable else []
        places.append(Path(tempfile.gettempdir()) / short)
        return next((place for place in places if _fits(place)), _SHORT / short)

    def _is_here(self, lock: int) -> bool:
        """Whether this descriptor is of the lock file, or of the directory where that cannot be made."""
        there = (place.stat() for place in (self.path / "lock", self.path) if place.exists())
        return any(os.path.samestat(os.fstat(lock), each) for each in there)

    @cached_property
    def _is_writable(self) -> bool:
        """Whether files can be made there. Found out by making one: access(2) believes in a disk that has failed."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                return True
        except OSError as error:
            return error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM)

    def _open_lock(self) -> int:
        """Open the lock file; on a read-only disk an existing one, or else the directory itself."""
        file = self.path / "lock"
        try:
            lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return os.open(file if file.exists() else self.path, os.O_RDONLY)
        os.fchmod(lock, 0o600)
        return lock


def _locked(lock: int) -> bool:
    """Take the lock, unless another open file has it. Returns whether this one has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hash_name(path: Path) -> str:
    """A short hash of a long path."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def _fits(directory: Path) -> bool:
    return len(os.fsencode(directory)) + _SOCKET_NAME <= _MAX_PATH


def _make_private(directory: Path) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise OSError(f"{directory} is not a directory owned by this user")
    if stat.S_IMODE(status.st_mode) != 0o700:
        directory.chmod(0o700)
