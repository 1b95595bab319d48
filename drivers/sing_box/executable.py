"""The sing-box on this machine: where it is, which version, and what it was built with."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from drivers.process.installation import located
from drivers.process.spawn import run
from node.contract.driver import Host
from node.errors import CoreFailed

# The first version with the api service.
OLDEST = (1, 14)
ENVIRONMENT = {
    "PATH": os.defpath,
    "TZ": "UTC",
    # Else listeners are MPTCP, and cannot be handed over to a next generation.
    "GODEBUG": "multipathtcp=0",
}

_VERSION = re.compile(r"^sing-box version ((\d+)\.(\d+)\.\S+)")


@dataclass(frozen=True)
class Executable:
    """One executable file as it is now."""

    path: Path
    version: str
    tags: frozenset[str]

    @property
    def counts(self) -> bool:
        """It has v2ray_api, whose counters are exact."""
        return "with_v2ray_api" in self.tags


class Installation:
    """Finds the executable once, and asks for its version again when the file changes."""

    def __init__(self, host: Host) -> None:
        self._host = host
        # With the time of the file's change that it belongs to.
        self._known: tuple[int, Executable] | None = None

    async def current(self) -> Executable:
        """The executable to run now. Raises `CoreFailed` with what to do if there is none."""
        path = self._known[1].path if self._known else None
        if path is None or not path.is_file():
            path = await located(self._host, "sing-box")
        changed = path.stat().st_mtime_ns
        if self._known is None or self._known[0] != changed or self._known[1].path != path:
            self._known = changed, await self._ask(path)
        return self._known[1]

    async def _ask(self, path: Path) -> Executable:
        done = await run(
            self._host.reactor, [str(path), "version"], environment=ENVIRONMENT, owner=self._host.directory
        )
        match = _VERSION.match(done.lines[0]) if done.lines else None
        if match is None:
            raise CoreFailed(
                f"{path} does not say which sing-box it is; set SING_BOX_EXECUTABLE_PATH to one that works"
            )
        if (int(match[2]), int(match[3])) < OLDEST:
            raise CoreFailed(
                f"{path} is sing-box {match[1]}, and the node needs {'.'.join(map(str, OLDEST))} or newer; "
                "set SING_BOX_EXECUTABLE_PATH to one"
            )
        tags = next((line.removeprefix("Tags: ") for line in done.lines if line.startswith("Tags: ")), "")
        return Executable(path, match[1], frozenset(tags.split(",")))
