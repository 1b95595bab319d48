"""What a part of the node is: `node.tap` has all parts in one list, and they begin, are asked and end by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

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

    def stop(self) -> object:
        """End, before all parts before this one. May return a Deferred or a coroutine."""

    def leave(self) -> object:
        """Save what the next process needs, which goes on in place of this one: the node ends without `stop`."""

    @property
    def warnings(self) -> Sequence[str]:
        """Current warnings for the operator, a line each."""
        return ()

    def summary(self, info: BaseInfoResponse) -> None:
        """Add to the reply of GetBaseInfo."""


P = TypeVar("P", bound=Part)


class Parts:
    """The parts of the node in order: each may use those before it."""

    log = Logger()

    def __init__(self, *parts: Part) -> None:
        self._parts = [*parts]

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def add(self, part: P) -> P:
        """Append a part, and return it."""
        self._parts.append(part)
        return part

    def start(self) -> None:
        """Start all parts in order. Raises what the first one raises that cannot start."""
        for part in self._parts:
            part.start()

    def begin(self) -> None:
        """Tell all parts that the node serves."""
        for part in self._parts:
            part.begin()

    async def stop(self) -> None:
        """Stop all parts, the last one first, also if others failed to stop."""
        for part in reversed(self._parts):
            await self._end(part, part.stop)

    async def leave(self) -> None:
        """Have all parts save what the next process needs, the last one first."""
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

    @property
    def warnings(self) -> list[str]:
        """The warnings of all parts."""
        return [warning for part in self._parts for warning in part.warnings]
