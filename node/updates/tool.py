"""Run `drivers.install.update` as a process of its own, and report its progress."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from node.contract.driver import Done
from node.updates.jobs import Refused, Stage, Step

# Seconds that such a program may take. Downloads have their own limit: `drivers.install.fetch.PATIENCE`.
SECONDS = 3600.0
# The directory of the node's own packages.
ROOT = Path(__file__).parents[2]
_PROGRESS = re.compile(r"(fetching https?://\S+|fetched \d+ of \d+ bytes|verified|trying \S+)$")
# The start of lines after which a download begins, and after which none is under way.
_FETCHES, _CHANGES = "fetching ", ("verified", "trying ")
_FETCHED = re.compile(r"fetched (\d+) of (\d+) bytes")
# The variables of the node's environment that such a program gets: no secrets.
_PASSED = ("PATH", "HOME", "LANG", "TMPDIR")
PROXIES = ("http_proxy", "https_proxy", "no_proxy")


# Runs a command with an environment to its end, for at most so many seconds. What it writes to the descriptor of that
# number is the output; the last parameter gets its other lines.
Run = Callable[[Sequence[str], Mapping[str, str], float, int, Callable[[list[str]], None]], Awaitable[Done]]


class Tool:
    """Runs that program for a job. `environment` is the node's own; `proxy` takes precedence over a proxy in it."""

    def __init__(self, run: Run, environment: Mapping[str, str], proxy: str = "") -> None:
        self._run = run
        passed = {name: value for name, value in environment.items() if name in _PASSED or name.lower() in PROXIES}
        if proxy:
            passed = {name: value for name, value in passed.items() if name.lower() not in PROXIES[:2]}
            passed |= dict.fromkeys(PROXIES[:2], proxy)
        self._environment = passed

    async def bring(self, step: Step, kind: str, into: Path, **parameters: object) -> Path:
        """Run `drivers.install.update` with these parameters and return the path that it prints. Raises `Refused`."""
        words = json.dumps({"into": str(into), **parameters})
        command = [sys.executable, "-P", "-m", "drivers.install.update", kind, words]

        def heard(lines: list[str]) -> None:
            for line in filter(None, lines):
                self._heard(step, line)

        step.jobs.stage = Stage.FETCHING
        try:
            done = await self._run(command, {**self._environment, "PYTHONPATH": str(ROOT)}, SECONDS, 1, heard)
        finally:
            step.jobs.stage = Stage.CHANGING
        if done.code != 0:
            # Progress does not explain the failure.
            reasons = [line for line in done.lines[-5:] if not _PROGRESS.match(line)]
            raise Refused("\n".join(reasons) or f"{Path(command[0]).name} exited with code {done.code}")
        return Path(done.output.decode().strip())

    @staticmethod
    def _heard(step: Step, line: str) -> None:
        if line.startswith((_FETCHES, *_CHANGES)):
            step.jobs.stage = Stage.FETCHING if line.startswith(_FETCHES) else Stage.CHANGING
        if match := _FETCHED.fullmatch(line):
            step.fetched(*map(int, match.groups()))
        else:
            step.say(line)
