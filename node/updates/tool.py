"""Fetches for updates, in a process of its own: `drivers.install.update`."""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from node.updates.jobs import Refused, Step

# Seconds that a download may take, all tries together, and a program that installs.
SECONDS = 3600.0
# Where the node's own modules are.
ROOT = Path(__file__).parents[2]
_COMING = re.compile(r"(fetching https?://\S+|fetched \d+ of \d+ bytes|verified|trying \S+)$")
_FETCHED = re.compile(r"fetched (\d+) of (\d+) bytes")
# What such a program is told of the node's environment: of its secrets, and of its certificate, nothing.
_PASSED = ("PATH", "HOME", "LANG", "TMPDIR")
PROXIES = ("http_proxy", "https_proxy", "no_proxy")


class Done(Protocol):
    """A program that was run to its end."""

    @property
    def code(self) -> int: ...

    @property
    def lines(self) -> Sequence[str]: ...

    @property
    def output(self) -> bytes: ...


class Run(Protocol):
    """Runs a program to its end."""

    def __call__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        seconds: float,
        output: int,
        heard: Callable[[list[str]], None],
    ) -> Awaitable[Done]: ...


class Tool:
    """Runs programs for a job. `environment` is the node's own, `proxy` goes before what that says of one."""

    def __init__(self, run: Run, environment: Mapping[str, str], proxy: str = "") -> None:
        self._run = run
        passed = {name: value for name, value in environment.items() if name in _PASSED or name.lower() in PROXIES}
        named = dict.fromkeys(PROXIES[:2], proxy) if proxy else {}
        if proxy:
            passed = {name: value for name, value in passed.items() if name.lower() not in PROXIES[:2]}
        self.environment = {**passed, **named}

    async def bring(self, step: Step, *arguments: str) -> Path:
        """What was fetched, verified and tried. Raises `Refused`."""
        command = [sys.executable, "-P", "-m", "drivers.install.update", *arguments]
        return Path((await self.run(step, command, PYTHONPATH=str(ROOT))).decode().strip())

    async def run(self, step: Step, command: Sequence[str], **more: str) -> bytes:
        """Run a program, whose lines the job repeats; what it wrote to stdout. Raises `Refused`."""

        def heard(lines: list[str]) -> None:
            for line in lines:
                if match := _FETCHED.fullmatch(line):
                    step.fetched(*map(int, match.groups()))
                elif line:
                    step.say(line)

        environment = {**self.environment, **more}
        done = await self._run(command, environment=environment, seconds=SECONDS, output=1, heard=heard)
        if done.code != 0:
            # What it said before is how far it has come.
            said = [line for line in done.lines[-5:] if not _COMING.match(line)]
            raise Refused("\n".join(said) or f"{Path(command[0]).name} ended with {done.code}")
        return done.output
