"""Reports what the kernel refuses to this node: once in the log, and in `info`, where `nodectl doctor` reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from node.base.logs import Logger
from node.base.part import Part
from node.base.pool import in_pool
from node.base.reactor import PooledReactor

# The beginning of each line.
REFUSED = "the kernel refuses "


class Mechanisms(Part):
    """Tries all mechanisms when the node serves. `attempt` returns a line for each refused one, without `REFUSED`."""

    title = "the check of the kernel"
    log = Logger()

    def __init__(self, reactor: PooledReactor, attempt: Callable[[], Sequence[str]]) -> None:
        self._reactor = reactor
        self._attempt = attempt
        self._refused: list[str] = []

    @property
    def warnings(self) -> list[str]:
        return self._refused

    def begin(self) -> None:
        in_pool(self._reactor, self._attempt).addCallback(self._report).addErrback(
            lambda failure: self.log.failure("what the kernel refuses is not known: trying it failed", failure)
        )

    def _report(self, refused: Sequence[str]) -> None:
        self._refused = [f"{REFUSED}{each}" for each in refused]
        for line in self._refused:
            self.log.warn("{line}; docs/install.md has what it needs", line=line)
