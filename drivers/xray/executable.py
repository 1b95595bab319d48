"""The Xray on this machine: where it is, which version, and the environment that it runs in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drivers.process.installation import located
from drivers.process.spawn import find_setpriv, run
from drivers.xray.config import Version
from drivers.xray.geo import assets
from node.contract.driver import Host
from node.errors import CoreFailed

_ASSETS = "XRAY_LOCATION_ASSET"
_VERSION = re.compile(r"^Xray (\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True)
class Executable:
    """One executable file as it is now, and the setpriv(1) to run it by, if there is one."""

    path: Path
    version: Version
    environment: dict[str, str]
    setpriv: str | None

    def files(self) -> Files:
        """What a core reads when it starts, and not again."""
        return Files([self.path, *Path(self.environment[_ASSETS]).glob("*.dat")])


class Files:
    """Files as they are now, to be looked at again."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._marks = {path: _mark(path) for path in sorted(paths)}

    def changed(self) -> list[Path]:
        """Those that were replaced, written or removed since."""
        return [path for path, mark in self._marks.items() if _mark(path) != mark]


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class Installation:
    """Finds the executable once, and asks for its version again when the file changes."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._path: Path | None = None
        # The version, and the time of the file's change that it belongs to.
        self._version: tuple[int, Version] | None = None
        self._setpriv: str | None = None

    async def current(self) -> Executable:
        """The executable to run now. Raises `CoreFailed` with what to do if there is none."""
        if self._path is None or not self._path.is_file():
            self._path, self._version = await located(self._host, "xray"), None
            self._setpriv = await find_setpriv(
                self._host.reactor, environment={"PATH": os.defpath}, owner=self._host.directory
            )
        path, environment = self._path, self._environment(self._path)
        changed = path.stat().st_mtime_ns
        if self._version is None or self._version[0] != changed:
            self._version = changed, await self._ask_version(path, environment)
        return Executable(path, self._version[1], environment, self._setpriv)

    async def _ask_version(self, path: Path, environment: dict[str, str]) -> Version:
        done = await run(
            self._host.reactor, [str(path), "version"], environment=environment, owner=self._host.directory
        )
        match = _VERSION.match(done.lines[0]) if done.lines else None
        if match is None:
            raise CoreFailed(f"{path} does not say which Xray it is; set XRAY_EXECUTABLE_PATH to one that works")
        major, minor, patch = match.groups()
        return int(major), int(minor), int(patch)

    def _environment(self, path: Path) -> dict[str, str]:
        """Clean: nothing of the node's own reaches the core, its key least of all."""
        configured = self._host.settings.get("XRAY_ASSETS_PATH")
        try:
            directory = assets(Path(configured) if configured else None, path, self._host.directory / "assets")
        except OSError as fault:
            raise CoreFailed(f"the core cannot have its lists of addresses: {fault}") from fault
        environment = {
            "PATH": os.defpath,
            "TZ": "UTC",
            _ASSETS: str(directory),
            # Else listeners are MPTCP, and cannot be handed over to a next generation.
            "GODEBUG": "multipathtcp=0",
        }
        if self._host.settings.get("XRAY_SPLICE", "off") != "on":
            environment["XRAY_BUF_SPLICE"] = "disable"
        return environment
