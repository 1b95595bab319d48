"""Update a core: fetch a release, verify and try it, and start it beside the running core."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

from node.base.errors import CoreFailed
from node.base.reactor import PooledReactor
from node.contract.choices import Choices
from node.contract.driver import Driver
from node.updates.chosen import NOTHING, Chosen, Record
from node.updates.jobs import Refused, Step
from node.updates.tool import Tool
from node.updates.trial import Trial


class Cores:
    """Updates of cores. Each release has a directory below `directory`: the chosen one and the one before it.

    By a core's name: `mirrors` has the base URL of archives, `configured` the executable that the operator set.
    """

    def __init__(
        self,
        reactor: PooledReactor,
        directory: Path,
        tool: Tool,
        trial: Trial,
        record: Record,
        choices: Choices,
        mirrors: Mapping[str, str],
        configured: Mapping[str, str],
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._tool = tool
        self._trial = trial
        self._record = record
        self._choices = choices
        self._mirrors = mirrors
        self._configured = configured

    async def update(self, driver: Driver, version: str, sha256: str, step: Step) -> None:
        """Switch to this release. Raises `Refused`."""
        name = driver.name
        step.say("checking the current version", before=await _version(driver))
        words = ["core", name, version, "--url", self._mirrors[name], "--into", str(self._directory)]
        try:
            path = await self._tool.bring(step, *words, *([f"--sha256={sha256}"] if sha256 else []))
            if self._choices.executables.get(name) == path:
                step.conclude(f"{version} is already in use", version)
                return
            await self._choose(driver, path, step)
        finally:
            await self._in_pool(lambda: self.clear(name))

    async def go_back(self, driver: Driver, step: Step) -> None:
        """Switch to the release before. Raises `Refused`."""
        before = self._record.by_name.get(driver.name, NOTHING).before
        if before is None:
            raise Refused("there is no earlier release to go back to: no update has installed one")
        step.say("going back to the earlier release", before=await _version(driver))
        if before and not Path(before).is_file():
            raise Refused(f"the earlier release is no longer on disk: {before}")
        await self._choose(driver, Path(before) if before else None, step)

    async def _choose(self, driver: Driver, path: Path | None, step: Step) -> None:
        name, chosen = driver.name, self._choices.executables
        before = chosen.get(name)

        def choose(one: Path | None) -> None:
            chosen.pop(name, None)
            if one is not None:
                chosen[name] = one

        # Checked first: on a full disk the choice would be lost at the next start.
        await self._in_pool(self._record.check)
        step.say("switching to it")
        took = await self._trial.bring_in(name, lambda: choose(path), lambda: choose(before))
        # `before` is what was in use, which may differ from the last record if the operator has set something since.
        self._record.by_name[name] = Chosen(str(path or ""), str(before or ""), self._configured.get(name, ""))
        version = await _version(driver)
        try:
            await self._in_pool(self._record.save)
        except Refused as error:
            raise Refused(f"{version} is in use, but only until the node restarts: {error.text}") from error
        step.conclude(f"{version} runs" if took else f"{version} starts next", version)

    def _in_pool(self, work: Callable[[], None]) -> Deferred[None]:
        return deferToThreadPool(self._reactor, self._reactor.getThreadPool(), work)

    def clear(self, name: str = "") -> None:
        """Remove releases, of this core or of all, that are neither chosen nor the one before. Blocking."""
        if not self._record.whole:
            return
        spared = {Path(path).parent for one in self._record.by_name.values() for path in (one.path, one.before) if path}
        for place in self._directory.glob(f"{name}*-*"):
            if place not in spared:
                shutil.rmtree(place, ignore_errors=True)


async def _version(driver: Driver) -> str:
    try:
        return await driver.version()
    except CoreFailed:
        return "none"
