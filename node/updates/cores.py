"""Another release of a core: fetched, verified, tried, and brought in beside the one that runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

from node.contract.choices import Choices
from node.contract.driver import Driver
from node.errors import CoreFailed
from node.reactor import PooledReactor
from node.updates.chosen import NOTHING, Chosen, Record
from node.updates.jobs import Refused, Step
from node.updates.tool import Tool
from node.updates.trial import Trial


class Cores:
    """Below `directory` each release has a directory of its own: the one that is chosen, and the one before it.

    `mirrors` say by a core's name where archives come from, `configured` what the operator set as its executable.
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
        """Have this release run. Raises `Refused`."""
        name = driver.name
        step.say("looking what there is", before=await _version(driver))
        words = ["core", name, version, "--url", self._mirrors[name], "--into", str(self._directory)]
        try:
            path = await self._tool.bring(step, *words, *([f"--sha256={sha256}"] if sha256 else []))
            if self._choices.executables.get(name) == path:
                step.conclude(f"{version} is what runs already", version)
                return
            await self._choose(driver, path, step)
        finally:
            await self._in_pool(lambda: self.clear(name))

    async def go_back(self, driver: Driver, step: Step) -> None:
        """Have the one before run. Raises `Refused`."""
        before = self._record.by_name.get(driver.name, NOTHING).before
        if before is None:
            raise Refused("there is no release before: no update has brought one in")
        step.say("going back", before=await _version(driver))
        if before and not Path(before).is_file():
            raise Refused(f"the release before is not there any more: {before}")
        await self._choose(driver, Path(before) if before else None, step)

    async def _choose(self, driver: Driver, path: Path | None, step: Step) -> None:
        name, chosen = driver.name, self._choices.executables
        before = chosen.get(name)

        def choose(one: Path | None) -> None:
            chosen.pop(name, None)
            if one is not None:
                chosen[name] = one

        # On a full disk the node would forget by its next start what it runs.
        await self._in_pool(self._record.check)
        step.say("bringing it in beside what runs")
        took = await self._trial.bring_in(name, lambda: choose(path), lambda: choose(before))
        # Not what was chosen before: the operator's own setting may have gone before that.
        self._record.by_name[name] = Chosen(str(path or ""), str(before or ""), self._configured.get(name, ""))
        version = await _version(driver)
        try:
            await self._in_pool(self._record.save)
        except Refused as error:
            raise Refused(f"{version} is in use, but only until the node starts anew: {error.text}") from error
        step.conclude(f"{version} runs" if took else f"{version} is what starts next", version)

    def _in_pool(self, work: Callable[[], None]) -> Deferred[None]:
        return deferToThreadPool(self._reactor, self._reactor.getThreadPool(), work)

    def clear(self, name: str = "") -> None:
        """Releases, of this core or of any, that nobody goes back to are not on disk any more. Blocking."""
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
