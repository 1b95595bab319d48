"""Cores and geo files: downloaded, tried, switched to, and switched back; and the record of those that were chosen."""

from __future__ import annotations

import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from node.backend.runner import Runner
from node.base.errors import CoreFailed, NodeError
from node.base.logs import Logger
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.base.secret_file import write_secret
from node.contract.driver import Choices, Driver, Generation
from node.updates.jobs import Refused, Step
from node.updates.tool import Tool

# The name of the geo files in the record.
LISTS = "geo"
# The geo files to update unless the request names others.
USUAL = ("geoip.dat", "geosite.dat")
# Seconds that a new core must last, between two checks of it, and to wait for the one that replaces a failed one.
HOLD, LOOK, BACK = 5.0, 0.25, 20.0


@dataclass(frozen=True)
class Chosen:
    """A chosen path, empty for what the node finds without updates, and the one before it, None if there is none.

    `configured`: the operator's setting at that time. If they set something else, that takes precedence.
    """

    path: str
    before: str | None = None
    configured: str = ""


@dataclass
class Record:
    """The choices by the name of a core, or `LISTS`, and when the node last checked for geo files (Unix time).

    `configured` has the operator's setting for each. `choices` are those in use.
    """

    file: Path
    configured: Mapping[str, str] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    by_name: dict[str, Chosen] = field(default_factory=dict)
    looked: float = 0.0
    # False if the file could not be read: then releases on disk that are not in `by_name` may be chosen.
    whole: bool = True

    log = Logger()

    def load(self) -> None:
        """Read the file, also again, and use the choices that are on disk and were made under the present settings.

        If the file cannot be read, nothing is chosen. Blocking, brief.
        """
        self.by_name, self.looked, self.whole = {}, 0.0, True
        self.choices.executables.clear()
        self.choices.lists = None
        try:
            found: Any = json.loads(self.file.read_text())
            self.by_name = {name: Chosen(**chosen) for name, chosen in found["chosen"].items()}
            self.looked = float(found["looked"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self.by_name, self.whole = {}, False
            self.log.error(
                "{file} cannot be read, the node ignores which cores and geo files updates chose: {error}",
                file=self.file,
                error=str(error),
            )
        for name, chosen in self.by_name.items():
            there = Path(chosen.path).is_dir() if name == LISTS else os.access(chosen.path, os.X_OK)
            if chosen.path and there and chosen.configured == self.configured.get(name, ""):
                self.use(name, Path(chosen.path))

    def in_use(self, name: str) -> Path | None:
        """Return the choice that is in use; None for what the node finds without updates."""
        return self.choices.lists if name == LISTS else self.choices.executables.get(name)

    def use(self, name: str, path: Path | None) -> None:
        """Use a choice, without keeping it."""
        if name == LISTS:
            self.choices.lists = path
        elif path is None:
            self.choices.executables.pop(name, None)
        else:
            self.choices.executables[name] = path

    def keep(self, name: str, path: Path | None, before: Path | None) -> None:
        """Keep a choice for the next start, and write the file. Blocking. Raises `Refused`."""
        self.by_name[name] = Chosen(str(path or ""), str(before or ""), self.configured.get(name, ""))
        self.save()

    def save(self) -> None:
        """Write the file. Blocking. Raises `Refused`."""
        content = {"chosen": {name: asdict(chosen) for name, chosen in self.by_name.items()}, "looked": self.looked}
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_secret(self.file, json.dumps(content).encode())
        except OSError as error:
            raise Refused(f"the chosen version cannot be written to {self.file}: {error.strerror or error}") from error
        self.whole = True

    def check(self) -> None:
        """Rewrite the file to see that the disk works, unless it could not be read. Blocking. Raises `Refused`."""
        if self.whole:
            self.save()

    def clear(self, *directories: Path) -> None:
        """Remove the versions in these directories that are neither chosen nor the one before. Blocking."""
        if not self.whole:
            return
        paths = [Path(path) for chosen in self.by_name.values() for path in (chosen.path, chosen.before) if path]
        # A core is a file in the directory of its version.
        spared = {*paths, *(path.parent for path in paths)}
        for place in (place for directory in directories for place in directory.glob("*")):
            if place.is_dir() and place not in spared:
                shutil.rmtree(place, ignore_errors=True)


@dataclass(frozen=True)
class Kit:
    """What every update uses. `directory` has a directory for each kind of thing; `now` is Unix time."""

    reactor: PooledReactor
    directory: Path
    tool: Tool
    trial: Trial
    record: Record
    now: Callable[[], float] = time.time


class Replaceable(ABC):
    """What is the same for cores and geo files. `driver` is that of the core.

    Each version has a directory of its own; those of the chosen one and of the one before it stay.
    """

    # What `drivers.install.update` calls it, and the name of the directory of its versions.
    kind: str
    place: str
    # The name in the record, if it is not that of the core.
    name = ""
    # The reasons why there is no way back, and the step in which the core gets the version.
    never: str
    gone: str
    switching: str

    def __init__(self, kit: Kit, driver: Driver) -> None:
        self._kit = kit
        self._directory = kit.directory / self.place
        self._record = kit.record
        self._name = self.name or driver.name
        self._driver = driver

    async def go_back(self, step: Step) -> None:
        """Switch to the version before. Raises `Refused`."""
        chosen = self._record.by_name.get(self._name)
        if chosen is None or chosen.before is None:
            raise Refused(self.never)
        before = Path(chosen.before) if chosen.before else None
        if before is not None and not before.exists():
            raise Refused(f"{self.gone}: {before}")
        await self._switch(before, step)

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
        # What is in use may differ from the last record, if the operator has set something since.
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
    name = LISTS
    never = "there are no earlier geo files to go back to: no update has installed any"
    gone = "the earlier geo files are no longer on disk"
    switching = "checking the geo files with the core"

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


class Trial:
    """Tries files on the node's backend."""

    def __init__(self, reactor: IReactorTime, runner: Runner) -> None:
        self._reactor = reactor
        self._runner = runner

    @property
    def core(self) -> str:
        """The name of the core of the accepted backend; empty without one."""
        accepted = self._runner.accepted
        return accepted.driver.name if accepted else ""

    async def renew(self) -> None:
        """Start a fresh core beside the running one, if one runs. Raises as `bring_in`."""
        await self.bring_in(self.core, lambda: None, lambda: None, lambda _: True)

    async def bring_in(
        self, core: str, use: Callable[[], None], back: Callable[[], None], due: Callable[[Generation], bool]
    ) -> bool:
        """Switch the core of this name to what `use` chooses: see `Runner.exchange`.

        Returns whether a new core took over, and lasted; False if none had to. Raises `Refused` with the reason if it
        failed; then `back` was called, and the previous files are in use again.
        """
        losses = self._losses
        try:
            took = await self._runner.exchange(core, use, back, due)
        except NodeError as error:
            raise Refused(error.text) from error
        if took and not await self._holds(losses):
            back()
            raise Refused(await self._taken_back(core))
        return took

    @property
    def _losses(self) -> int:
        return sum(self._runner.supervisor.happened.losses.values())

    async def _holds(self, losses: int) -> bool:
        until = self._reactor.seconds() + HOLD
        while self._reactor.seconds() < until or self._runner.supervisor.on_probation:
            if self._losses != losses:
                return False
            await deferLater(self._reactor, LOOK)
        return self._losses == losses

    async def _taken_back(self, core: str) -> str:
        """Wait until the previous files run again, or start a core from them. Returns why the new one failed."""
        until = self._reactor.seconds() + BACK
        while self._runner.status.awaited and self._reactor.seconds() < until:
            await deferLater(self._reactor, LOOK)
        if reason := self._runner.supervisor.returned:
            return reason
        try:
            await self._runner.exchange(core, lambda: None, lambda: None, lambda _: True)
        except NodeError as error:
            return f"the new core failed soon after it took over, and the one before it does not start: {error.text}"
        return "the new core failed soon after it took over, and the one before it runs again"
