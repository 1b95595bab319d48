"""Update geo files (geoip.dat, geosite.dat): fetch and verify them, and have the core check and read them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

from node.base.errors import NodeError
from node.base.reactor import PooledReactor
from node.contract.choices import Choices
from node.contract.driver import Driver, Generation
from node.updates.chosen import LISTS, NOTHING, Chosen, Record
from node.updates.jobs import Refused, Step
from node.updates.tool import Tool
from node.updates.trial import Trial

# The files to update unless the request names others.
USUAL = ("geoip.dat", "geosite.dat")


class Lists:
    """Updates of geo files. Each set has a directory below `directory`. `reads` returns the driver that reads them."""

    def __init__(
        self,
        reactor: PooledReactor,
        directory: Path,
        tool: Tool,
        trial: Trial,
        record: Record,
        choices: Choices,
        url: str,
        configured: str,
        reads: Callable[[], Driver],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._tool = tool
        self._trial = trial
        self._record = record
        self._choices = choices
        self._url = url
        self._configured = configured
        self._reads = reads
        self._now = now

    async def update(self, wanted: Mapping[str, str], step: Step) -> None:
        """Switch to the newest of these files; `wanted` maps names to digests or ''. Raises `Refused`."""
        words = [
            f"{name}={digest}" if digest else name for name, digest in (wanted or dict.fromkeys(USUAL, "")).items()
        ]
        kept: Sequence[str] = [f"--kept={self._choices.lists}"] if self._choices.lists else []
        there = ["--url", self._url, "--into", str(self._directory)]
        try:
            path = await self._tool.bring(step, "lists", *there, *kept, "--", *words)
            self._record.looked = self._now()
            if path == self._choices.lists:
                await self._in_pool(self._record.save)
                step.conclude("the geo files are already the newest")
                return
            await self._choose(path, step)
        finally:
            await self._in_pool(self.clear)

    async def go_back(self, step: Step) -> None:
        """Switch to the geo files before. Raises `Refused`."""
        before = self._record.by_name.get(LISTS, NOTHING).before
        if before is None:
            raise Refused("there are no earlier geo files to go back to: no update has installed any")
        if before and not Path(before).is_dir():
            raise Refused(f"the earlier geo files are no longer on disk: {before}")
        await self._choose(Path(before) if before else None, step)

    async def _choose(self, path: Path | None, step: Step) -> None:
        driver, before = self._reads(), self._choices.lists

        def due(run: Generation) -> bool:
            # A core that started with another directory does not read this one.
            return before is None or path is None or run.outdated

        def choose(one: Path | None) -> None:
            self._choices.lists = one

        await self._in_pool(self._record.check)
        step.say("checking the geo files with the core")
        try:
            took = await self._trial.bring_in(driver.name, lambda: choose(path), lambda: choose(before), due)
        except Refused:
            with suppress(NodeError):
                # Preparing any configuration makes the driver use the restored choice.
                await driver.prepare("{}", frozenset())
            raise
        self._record.by_name[LISTS] = Chosen(str(path or ""), str(before or ""), self._configured)
        try:
            await self._in_pool(self._record.save)
        except Refused as error:
            raise Refused(f"the geo files are in use, but only until the node restarts: {error.text}") from error
        step.conclude(
            "the geo files are in use"
            if took
            else "the core reads the geo files at its next reload, within the hour, or at its next start"
        )

    def clear(self) -> None:
        """Remove sets that are neither chosen nor the one before. Blocking."""
        if not self._record.whole:
            return
        chosen = self._record.by_name.get(LISTS, NOTHING)
        for place in self._directory.glob("*"):
            if place.is_dir() and str(place) not in (chosen.path, chosen.before):
                shutil.rmtree(place, ignore_errors=True)

    def _in_pool(self, work: Callable[[], None]) -> Deferred[None]:
        return deferToThreadPool(self._reactor, self._reactor.getThreadPool(), work)
