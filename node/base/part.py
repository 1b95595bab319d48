"""The base class of the parts. `node.tap` lists them: the node starts them in that order, and stops them in reverse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from twisted.internet.defer import maybeDeferred

from node.base.logs import Logger
from protos.service_pb2 import BaseInfoResponse


class Part:
    """A part of the node. It overrides those of these methods that concern it; `title` names it in the log."""

    title = ""

    def start(self) -> None:
        """Begin to work, after all parts before this one. Raises `OSError` if the node cannot start."""

    def begin(self) -> None:
        """Begin what needs all parts: the reactor runs, and the node serves."""

    def settle(self, outcome: str | None) -> None:
        """Note that this process goes on for certain, and not the one before it.

        `outcome` of an upgrade: empty if it succeeded, else why the next version failed; None without one.
        """

    def stop(self) -> object:
        """End, before all parts before this one. May return a Deferred or a coroutine."""

    @property
    def warnings(self) -> Sequence[str]:
        """Current warnings for the operator, a line each."""
        return ()

    def summary(self, info: BaseInfoResponse) -> None:
        """Add to the reply of GetBaseInfo."""

    # Leaving the node to another process

    @property
    def unsteady(self) -> str:
        """Why the node cannot be left to another process now; empty if it can."""
        return ""

    def admit(self, on: bool) -> None:
        """Accept new clients, or let them wait."""

    async def finish(self) -> None:
        """Let what clients have asked for be answered; they repeat what comes from here on."""

    def leave(self) -> object:
        """Save what the next process needs, which goes on in place of this one: the node ends without `stop`."""


class Parts:
    """The parts of the node in order: each may use those before it."""

    log = Logger()

    def __init__(self, *parts: Part) -> None:
        self._parts = [*parts]

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def add(self, *parts: Part) -> None:
        """Append parts."""
        self._parts += parts

    def start(self) -> None:
        """Start all parts in order. Raises what the first one raises that cannot start."""
        for part in self:
            part.start()

    def begin(self) -> None:
        self._tell("begin", lambda part: part.begin())

    def settle(self, outcome: str | None) -> None:
        self._tell("go on", lambda part: part.settle(outcome))

    def _tell(self, what: str, news: Callable[[Part], None]) -> None:
        """Tell each part, also if others fail."""
        for part in self:
            try:
                news(part)
            except Exception:  # noqa: BLE001 - logged; the other parts work all the same
                self.log.failure("{part} failed to {what}", part=part.title or type(part).__name__, what=what)

    async def stop(self) -> None:
        """Stop all parts, the last one first, also if others failed to stop."""
        for part in reversed(self._parts):
            await self._end(part, part.stop)

    @property
    def warnings(self) -> list[str]:
        return [warning for part in self for warning in part.warnings]

    def summary(self, info: BaseInfoResponse) -> None:
        for part in self:
            part.summary(info)

    @property
    def unsteady(self) -> str:
        return next((reason for part in self if (reason := part.unsteady)), "")

    def admit(self, on: bool) -> None:
        for part in self:
            part.admit(on)

    async def finish(self) -> None:
        for part in self:
            await part.finish()

    async def leave(self) -> None:
        """Have all parts leave, the last one first, also if others failed to."""
        for part in reversed(self._parts):
            await self._end(part, part.leave)

    async def _end(self, part: Part, end: Callable[[], object]) -> None:
        try:
            await maybeDeferred(end)
        except Exception:  # noqa: BLE001 - logged; the other parts are stopped all the same
            self.log.failure(
                "could not stop {part} cleanly; the other parts are stopped all the same",
                part=part.title or type(part).__name__,
            )
