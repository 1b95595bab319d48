"""Update the node itself: ask the service that may write the installation for a version, and hand over to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from twisted.internet.task import deferLater

from node import __version__
from node.base.pool import in_pool
from node.base.secret_file import write_secret
from node.handover.upgrade import Upgrades
from node.updates.jobs import Refused, Stage, Step
from node.updates.replaceable import Kit

# The file in STATE_DIR that txnode-update.path waits for: a version, or NEWEST, and the SHA-256 of its wheel if the
# request has one.
REQUEST, NEWEST = "update-request", "latest"
# Where txnode-update.service reports: what it does in `said`, and after its end systemd's word for that in `result`.
REPORTS = Path("/run/txnode-update")
# Seconds until the service has taken the request, if there is one, and between two looks at its reports.
TAKEN, LOOK = 15.0, 0.5
# The last lines of the service that explain a failure, and the last characters of each: a traceback may be one line.
REASONS, CHARACTERS = 5, 350
NO_SERVICE = (
    "no service installs versions on this machine (txnode-update.path does not run): install the version as root "
    "(scripts/install), or let this do it from now on: scripts/install --updates URL --key KEY"
)


class Program:
    """Updates of the node: txnode-update.service installs versions, as root, when it finds a request in `state`."""

    def __init__(self, kit: Kit, state: Path, upgrades: Upgrades) -> None:
        self._reactor = kit.reactor
        self._request = state / REQUEST
        self._upgrades = upgrades

    async def update(self, version: str, sha256: str, step: Step) -> None:
        """Have this version (or `NEWEST`) installed, or hand over to what is installed. Raises `Refused`."""
        step.say("checking the current version", before=__version__)
        if version:
            await self._install(version, sha256, step)
            return
        step.say("upgrading the node to it")
        await step.jobs.save()
        step.jobs.stage = Stage.BECOMING
        raise Refused(await self._upgrades.wanted())

    async def reset(self, step: Step, renew: Callable[[], Awaitable[object]]) -> None:
        """Start a fresh core beside the old one by `renew`, and hand over to a fresh process. Raises `Refused`."""
        step.say("starting a fresh core beside the old one")
        await renew()
        await self.update("", "", step)

    async def _install(self, version: str, sha256: str, step: Step) -> None:
        step.say("asking txnode-update.service for it", after=version)
        await step.jobs.save()
        step.jobs.stage = Stage.BECOMING
        try:
            await in_pool(self._reactor, write_secret, self._request, " ".join((version, sha256)).strip().encode())
        except OSError as error:
            raise Refused(f"{self._request} cannot be written: {error.strerror or error}") from error
        try:
            await self._taken()
        finally:
            ignored = self.withdraw()
        if ignored:
            raise Refused(NO_SERVICE)
        await self.follow(step)

    async def _taken(self) -> None:
        until = self._reactor.seconds() + TAKEN
        while self._request.exists() and self._reactor.seconds() < until:
            await deferLater(self._reactor, LOOK)

    def withdraw(self) -> bool:
        """Remove the request. Returns whether it was there, so that nothing has taken it. Blocking, brief."""
        # On a read-only disk even the removal of nothing fails.
        if not self._request.exists():
            return False
        try:
            self._request.unlink()
        except FileNotFoundError:
            return False
        return True

    @property
    def installs(self) -> bool:
        """Whether the service has begun, and has not ended. Blocking, brief."""
        return (REPORTS / "said").exists() and not _read("result")

    async def follow(self, step: Step) -> None:
        """Report what the service does until it has ended. Raises `Refused` if it failed."""
        # The service has this process hand over: the job must not hold that up.
        step.jobs.stage = Stage.BECOMING
        while self.installs:
            if (lines := _lines()) and lines[-1] != step.job.text:
                step.say(lines[-1])
            await deferLater(self._reactor, LOOK)
        lines, result = _lines(), _read("result")
        if result != "success":
            reasons = [line[-CHARACTERS:] for line in lines[-REASONS:]]
            raise Refused("\n".join(reasons) or f"txnode-update.service ended: {result or 'no result'}")
        step.conclude(lines[-1] if lines else "done", __version__)


def _lines() -> list[str]:
    return [" ".join(line.split()) for line in _read("said").splitlines() if line.strip()]


def _read(name: str) -> str:
    try:
        return (REPORTS / name).read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""
