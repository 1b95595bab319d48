"""A thing that is downloaded, tried, switched to, and switched back: a core, or the geo files."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from node.base.errors import CoreFailed, NodeError
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.contract.driver import Driver, Generation
from node.updates.jobs import Step
from node.updates.record import LISTS, Record, Refused
from node.updates.tool import Tool
from node.updates.trial import Trial

# The geo files to update unless the request names others.
USUAL = ("geoip.dat", "geosite.dat")


@dataclass(frozen=True)
class Kit:
    """The tools of every update. `directory` has a directory for each kind of thing; `now` is Unix time."""

    reactor: PooledReactor
    directory: Path
    tool: Tool
    trial: Trial
    record: Record
    now: Callable[[], float] = time.time


class Replaceable(ABC):
    """The base of cores and geo files. `name` is that in the record, `driver` that of the core.

    Each version has a directory of its own; those of the chosen one and of the one before it stay.
    """

    # Its name for `drivers.install.update`, and the name of the directory of its versions.
    kind: str
    place: str
    # The reasons why there is no way back, and the step in which the core gets the version.
    never: str
    gone: str
    switching: str

    def __init__(self, kit: Kit, name: str, driver: Driver) -> None:
        self._kit = kit
        self._directory = kit.directory / self.place
        self._record = kit.record
        self._name = name
        self._driver = driver

    async def go_back(self, step: Step) -> None:
        """Switch to the version before. Raises `Refused`."""
        before = self._record.before(self._name)
        if before is None:
            raise Refused(self.never)
        if before and not Path(before).exists():
            raise Refused(f"{self.gone}: {before}")
        await self._switch(Path(before) if before else None, step)

    async def _update(self, step: Step, **parameters: object) -> None:
        """Switch to what `drivers.install.update` downloads with these parameters. Raises `Refused`."""
        try:
            path = await self._bring(step, **parameters)
            if path == self._record.in_use(self._name):
                step.conclude(*await self._result(None))
            else:
                await self._switch(path, step)
        finally:
            await in_pool(self._kit.reactor, self._record.clear, self._directory)

    async def _bring(self, step: Step, **parameters: object) -> Path:
        return await self._kit.tool.bring(step, self.kind, self._directory, **parameters)

    async def _switch(self, path: Path | None, step: Step) -> None:
        reactor = self._kit.reactor
        # The version in use may differ from the last record, if the operator has changed a setting since.
        before = self._record.in_use(self._name)
        # Checked first: on a full disk the choice would be lost at the next start.
        await in_pool(reactor, self._record.check)
        step.say(self.switching)
        took = await self._try(path, before)
        try:
            await in_pool(reactor, self._record.keep, self._name, path, before)
        except Refused as error:
            result, _ = await self._result(took)
            raise Refused(f"{result}, but only until the node restarts: {error.text}") from error
        step.conclude(*await self._result(took))

    async def _try(self, path: Path | None, before: Path | None) -> bool:
        """Have the core use `path`. Returns whether a new core runs with it. Raises `Refused`."""
        use = partial(self._record.use, self._name)
        due = partial(self._due, path, before)
        return await self._kit.trial.bring_in(self._driver.name, partial(use, path), partial(use, before), due)

    def _due(self, path: Path | None, before: Path | None, run: Generation) -> bool:
        """Return whether this run has to be replaced."""
        return True

    @abstractmethod
    async def _result(self, took: bool | None) -> tuple[str, str]:
        """Return the result, and the version if there is one: whether a new core `took` it; None if it was in use."""


class ReplaceableCore(Replaceable):
    """A core: an executable from the archive of its release."""

    kind = "core"
    place = "cores"
    never = "there is no earlier release to go back to: no update has installed one"
    gone = "the earlier release is no longer on disk"
    switching = "switching to it"

    def __init__(self, kit: Kit, driver: Driver) -> None:
        super().__init__(kit, driver.name, driver)

    async def update(self, version: str, sha256: str, mirror: str, step: Step) -> None:
        """Switch to this release. Raises `Refused`."""
        step.say("checking the current version", before=await self._version())
        await self._update(step, name=self._name, version=version, sha256=sha256, url=mirror)

    async def go_back(self, step: Step) -> None:
        step.say("going back to the earlier release", before=await self._version())
        await super().go_back(step)

    async def _result(self, took: bool | None) -> tuple[str, str]:
        version = await self._version()
        words = {None: "is already in use", True: "runs", False: "starts next"}
        return f"{version} {words[took]}", version

    async def _version(self) -> str:
        try:
            return await self._driver.version()
        except CoreFailed:
            return "none"


class ReplaceableLists(Replaceable):
    """Geo files (geoip.dat, geosite.dat), a set in each directory. `driver` is that of the core that reads them."""

    kind = "lists"
    place = "geo"
    never = "there are no earlier geo files to go back to: no update has installed any"
    gone = "the earlier geo files are no longer on disk"
    switching = "checking the geo files with the core"

    def __init__(self, kit: Kit, driver: Driver) -> None:
        super().__init__(kit, LISTS, driver)

    async def update(self, wanted: Mapping[str, str], url: str, step: Step) -> None:
        """Switch to the newest of these files; `wanted` maps names to digests or ''. Raises `Refused`."""
        current = self._record.in_use(LISTS) or ""
        await self._update(step, wanted=wanted or dict.fromkeys(USUAL, ""), url=url, kept=str(current))

    async def _bring(self, step: Step, **parameters: object) -> Path:
        path = await super()._bring(step, **parameters)
        self._record.looked = self._kit.now()
        if path == self._record.in_use(LISTS):
            await in_pool(self._kit.reactor, self._record.save)
        return path

    async def _try(self, path: Path | None, before: Path | None) -> bool:
        try:
            return await super()._try(path, before)
        except Refused:
            with suppress(NodeError):
                # Preparing any configuration makes the driver use the restored choice.
                await self._driver.prepare("{}", frozenset())
            raise

    def _due(self, path: Path | None, before: Path | None, run: Generation) -> bool:
        # A core that started with another directory does not read this one.
        return before is None or path is None or run.outdated

    async def _result(self, took: bool | None) -> tuple[str, str]:
        later = "the core reads the geo files at its next reload, within the hour, or at its next start"
        words = {None: "the geo files are already the newest", True: "the geo files are in use", False: later}
        return words[took], ""
