"""Update the node itself: install a wheel where this version is, then upgrade this process in place."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

from twisted.internet.defer import CancelledError

from node import __version__
from node.base.errors import NodeError
from node.base.pool import in_pool
from node.base.waiting import finished
from node.handover.upgrade import Upgrades
from node.updates.installed import holds, installation, pack, require_writable, wheel_name
from node.updates.jobs import Stage, Step
from node.updates.record import Refused
from node.updates.replaceable import Kit

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+_]{0,40}")
_PIP = ("-P", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index")


class Program:
    """Updates of the node, from wheels below `url`.

    `kept` has the copy of its modules to which a failed upgrade returns.
    """

    def __init__(self, kit: Kit, kept: Path, url: str, upgrades: Upgrades) -> None:
        self._reactor = kit.reactor
        self._tool = kit.tool
        self._directory = kit.directory / "node"
        self._next = self._directory / "next"
        self._before = self._directory / "before"
        self._kept = kept
        self._url = url
        self._upgrades = upgrades

    async def update(self, version: str, sha256: str, step: Step) -> None:
        """Upgrade to this version, or to what is installed now. Never returns; raises `Refused`."""
        step.say("checking the current version", before=__version__)
        if version:
            await self._install(version, sha256, step)
        step.say("upgrading the node to it")
        await step.jobs.save()
        step.jobs.stage = Stage.BECOMING
        try:
            reason = await self._upgrades.wanted()
        except CancelledError as ended:
            # Whether the new version can take over is not proven, so the next start must not run it.
            if version:
                await self._restore(step, ended)
            raise
        finally:
            step.jobs.stage = Stage.CHANGING
        if version:
            await self.put_back(step)
        raise Refused(reason)

    async def _install(self, version: str, sha256: str, step: Step) -> None:
        place, _ = installation(self._kept)
        require_writable(place)
        if not self._url:
            raise Refused("UPDATE_URL is not set: the node does not know where to fetch its wheels")
        if not _VERSION.fullmatch(version):
            raise Refused(f"{version!r} is not a version")
        url = f"{self._url.rstrip('/')}/{wheel_name(version)}"
        wheel = await self._tool.bring(step, "wheel", self._next, url=url, sha256=sha256)
        try:
            await self._try(wheel, step)
        except (NodeError, CancelledError):
            await self._remove(self._next)
            raise
        step.say("installing it", after=version)
        await step.jobs.save()
        try:
            # Not cancelled: a half-installed node does not start.
            await finished(self._pip(wheel, step))
        except (NodeError, CancelledError) as error:
            await self._restore(step, error)
            raise

    async def _try(self, wheel: Path, step: Step) -> None:
        """Check that the wheel could take over, and pack what is installed, to go back to."""
        step.say("trying it")
        # With its dependencies: all of them have to be installed.
        await self._tool.run(step, [sys.executable, *_PIP, "--dry-run", str(wheel)])
        tried = self._directory / "try"
        await self._remove(tried)
        try:
            await self._tool.run(step, [sys.executable, *_PIP, "--no-deps", "--target", str(tried), str(wheel)])
            await self._upgrades.test(tried)
        finally:
            await self._remove(tried)
        await self._in_pool(lambda: pack(installation(self._kept)[1], self._before))

    async def _restore(self, step: Step, error: BaseException) -> None:
        try:
            await finished(self.put_back(step))
        except NodeError as other:
            reason = error.text if isinstance(error, NodeError) else "the node stopped during this job"
            failed = f"the previous version could not be installed again: {other.text}"
            raise Refused(f"{reason}; {failed}; reinstall the node") from other

    async def put_back(self, step: Step) -> None:
        """Install the previous version again, on disk only, and remove the wheel that failed."""
        wheels = sorted(self._before.glob("*.whl"))
        if wheels:
            step.say("installing the previous version again")
            await self._pip(wheels[0], step)
        await self._remove(self._next)

    def is_installed(self, version: str) -> bool:
        """Whether the next start runs the wheel that was fetched last. Blocking, brief.

        The contents are compared: two builds may have the same version.
        """
        try:
            place, _ = installation(self._kept)
        except Refused:
            return False
        return holds(place, self._next / wheel_name(version))

    async def _pip(self, wheel: Path, step: Step) -> None:
        await self._tool.run(step, [sys.executable, *_PIP, "--no-deps", "--force-reinstall", str(wheel)])

    async def _remove(self, directory: Path) -> None:
        await self._in_pool(lambda: rmtree(directory, ignore_errors=True))

    async def _in_pool(self, work: Callable[[], object]) -> None:
        try:
            await in_pool(self._reactor, work)
        except OSError as error:
            file = error.filename or self._directory
            raise Refused(f"{file} cannot be written: {error.strerror or error}") from error
