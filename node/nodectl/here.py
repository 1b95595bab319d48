"""Where the node of this machine is, and which settings it reads: those of a directory, else the service's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from node import env_file
from node.nodectl.exits import Unusable
from node.settings import BadSettings, given, keys_file

# Where the unit of `deploy/` has a node.
SERVICE_SETTINGS = Path("/etc/txnode/node.env")
SERVICE: Mapping[str, str] = {"STATE_DIR": "/var/lib/txnode", "TXNODE_CORES": "/opt/txnode/cores"}
_STATE_DIR = "var"


@dataclass(frozen=True)
class Here:
    """`directory` is where it runs, `environ` what it is given, `file` what says its settings."""

    directory: Path
    environ: Mapping[str, str]
    file: Path
    service: bool = False

    @property
    def values(self) -> Mapping[str, str]:
        """All that is said, also of settings that are nobody's. Raises `Unusable`."""
        try:
            return {**env_file.read(self.file.read_text()), **self.environ} if self.file.exists() else self.environ
        except (OSError, UnicodeDecodeError) as error:
            raise Unusable(f"{self.file} cannot be read: {error}")

    @property
    def state(self) -> Path:
        return (self.directory / Path(self.values.get("STATE_DIR") or _STATE_DIR).expanduser()).absolute()

    @property
    def keys(self) -> Path:
        """The file of keys. Raises `Unusable`."""
        try:
            return keys_file(given({}, self.directory, self.environ), self.directory)
        except BadSettings as error:
            raise Unusable(str(error))


def here(directory: Path, environ: Mapping[str, str]) -> Here:
    """The node whose settings are in this directory, else the service. Raises `OSError`."""
    _require_ours(directory, (".env",) if environ.get("STATE_DIR") else (".env", _STATE_DIR))
    if not (directory / ".env").exists() and not (directory / environ.get("STATE_DIR", _STATE_DIR)).is_dir():
        service = env_file.read(SERVICE_SETTINGS.read_text()) if SERVICE_SETTINGS.exists() else {}
        if service or Path(SERVICE["STATE_DIR"]).exists():
            return Here(Path("/"), {**SERVICE, **service}, SERVICE_SETTINGS, service=True)
    return Here(directory, environ, directory / ".env")


def _require_ours(directory: Path, names: Iterable[str]) -> None:
    """In /tmp and its like anybody may put settings, which say what is run and who is sent a key.

    Raises `PermissionError` for those of strangers: neither the caller's, root's nor the directory's owner's.
    """
    trusted = {os.geteuid(), 0, owner(directory)}
    for file in (directory / name for name in names):
        if os.path.lexists(file) and owner(file) not in trusted:
            raise PermissionError(f"{file} is another user's, in a directory that is not theirs: go to another one")


def owner(file: Path) -> int:
    """Whose it is, of a link itself."""
    return file.lstat().st_uid
