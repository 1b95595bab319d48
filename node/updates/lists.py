"""Newer lists of addresses and names: fetched, verified, tried by the core, and read by it without dropping anybody."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

from node.contract.choices import Choices
from node.contract.driver import Driver, Generation
from node.errors import NodeError
from node.reactor import PooledReactor
from node.updates.chosen import LISTS, NOTHING, Chosen, Record
from node.updates.jobs import Refused, Step
from node.updates.tool import Tool
from node.updates.trial import Trial

# What there is of them unless some are named.
USUAL = ("geoip.dat", "geosite.dat")


class Lists:
    """Below `directory` each set has a directory of its own. `reads` gives the driver of the core that reads them."""

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
        """Have the newest of these, by name with the digest of each or an empty one. Raises `Refused`."""
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
                step.conclude("they are the newest already")
                return
            await self._choose(path, step)
        finally:
            await self._in_pool(self.clear)

    async def go_back(self, step: Step) -> None:
        """Have those before. Raises `Refused`."""
        before = self._record.by_name.get(LISTS, NOTHING).before
        if before is None:
            raise Refused("there are none before: no update has brought any in")
        if before and not Path(before).is_dir():
            raise Refused(f"those before are not there any more: {before}")
        await self._choose(Path(before) if before else None, step)

    async def _choose(self, path: Path | None, step: Step) -> None:
        driver, before = self._reads(), self._choices.lists

        def due(run: Generation) -> bool:
            # One that began with others does not look where these are.
            return before is None or path is None or run.outdated

        def choose(one: Path | None) -> None:
            self._choices.lists = one

        await self._in_pool(self._record.check)
        step.say("having the core try them")
        try:
            took = await self._trial.bring_in(driver.name, lambda: choose(path), lambda: choose(before), due)
        except Refused:
            with suppress(NodeError):
                # What the core finds is what is chosen again, by the next look at any configuration.
                await driver.prepare("{}", frozenset())
            raise
        self._record.by_name[LISTS] = Chosen(str(path or ""), str(before or ""), self._configured)
        try:
            await self._in_pool(self._record.save)
        except Refused as error:
            raise Refused(f"they are in use, but only until the node starts anew: {error.text}") from error
        step.conclude(
            "they are in use"
            if took
            else "the core reads them when it reads lists next, within the hour or at its start"
        )

    def clear(self) -> None:
        """Sets that nobody goes back to are not on disk any more. Blocking."""
        if not self._record.whole:
            return
        chosen = self._record.by_name.get(LISTS, NOTHING)
        for place in self._directory.glob("*"):
            if place.is_dir() and str(place) not in (chosen.path, chosen.before):
                shutil.rmtree(place, ignore_errors=True)

    def _in_pool(self, work: Callable[[], None]) -> Deferred[None]:
        return deferToThreadPool(self._reactor, self._reactor.getThreadPool(), work)
